//! Commands in a sandbox: what comes out, how they end, and what they can't do to the gateway.
#![allow(clippy::unwrap_used, reason = "tests")]

use std::{
    fs,
    io::{Read as _, Write as _},
    process::Stdio,
    time::{Duration, Instant},
};

use sha2::{Digest as _, Sha256};
use torpor_tests::{Host, can_run_vms, wait_at_most};

fn high_water_kib(pid: i32) -> u64 {
    let status = fs::read_to_string(format!("/proc/{pid}/status")).unwrap();
    let line = status.lines().find_map(|l| l.strip_prefix("VmHWM:")).unwrap();
    line.trim().trim_end_matches(" kB").parse().unwrap()
}

#[test]
fn commands_end_as_they_should_and_take_what_they_are_given() {
    if !can_run_vms("commands_end_as_they_should_and_take_what_they_are_given") {
        return;
    }
    let host = Host::new();
    host.ok(&["create", "box"]);
    let code = |arguments: &[&str]| host.run(arguments).status.code().unwrap();

    // Exit codes and signals.
    assert_eq!(code(&["exec", "box", "--", "sh", "-c", "exit 42"]), 42);
    assert_eq!(code(&["exec", "box", "--", "sh", "-c", "kill -9 $$"]), 137);
    let (missing, error) = host.fails(&["exec", "box", "--", "no-such-program"]);
    assert!(missing != 0 && error.contains("no-such-program"), "{error}");

    // Separate streams.
    let both = host.run(&["exec", "box", "--", "sh", "-c", "echo out; echo err >&2"]);
    assert_eq!((both.stdout.as_slice(), both.stderr.as_slice()), (&b"out\n"[..], &b"err\n"[..]));

    // Environment, folder, user.
    let shown = host.ok(&[
        "exec",
        "--env",
        "A=b c",
        "--workdir",
        "/tmp",
        "--user",
        "worker",
        "box",
        "--",
        "sh",
        "-c",
        "echo $A $PWD $(id -u):$(id -g) $HOME",
    ]);
    assert_eq!(shown, "b c /tmp 1000:1000 /home/worker\n");
    assert!(host.fails(&["exec", "--user", "nobody-here", "box", "--", "true"]).1.contains("nobody-here"));

    // Half of an input is not taken for the whole: a client that goes away hangs its command up.
    let script = "cat > /tmp/half && echo whole > /tmp/whole";
    let mut client = host.command(&["exec", "-i", "box", "--", "sh", "-c", script]);
    let mut client = client.stdin(Stdio::piped()).spawn().unwrap();
    client.stdin.as_mut().unwrap().write_all(b"half\n").unwrap();
    host.until("half of it is there", |host| host.sh("box", "cat /tmp/half 2>/dev/null || true") == "half\n");
    client.kill().unwrap();
    client.wait().unwrap();
    host.until("its command has ended", |host| host.sh("box", "pidof cat || echo none") == "none\n");
    assert_eq!(host.sh("box", "ls /tmp/whole 2>/dev/null || echo none"), "none\n");

    // A background child holds the pipes: the command's end is the end.
    let began = Instant::now();
    assert_eq!(host.ok(&["exec", "box", "--", "sh", "-c", "sleep 100 & echo hi"]), "hi\n");
    assert!(began.elapsed() < Duration::from_secs(60), "it waited for the background child");

    // An open stdin that never closes is not read without -i.
    let mut child = host
        .command(&["exec", "box", "--", "cat"])
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let open = child.stdin.take();
    assert!(wait_at_most(&mut child, Duration::from_secs(60)).unwrap().success());
    drop(open);

    // With -i it is, and its end is forwarded.
    let mut child = host
        .command(&["exec", "-i", "box", "--", "sha256sum"])
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let data = vec![b'x'; 3 << 20];
    let mut stdin = child.stdin.take().unwrap();
    let sent = data.clone();
    let writer = std::thread::spawn(move || stdin.write_all(&sent));
    let mut sum = String::new();
    child.stdout.take().unwrap().read_to_string(&mut sum).unwrap();
    writer.join().unwrap().unwrap();
    assert!(wait_at_most(&mut child, Duration::from_secs(60)).unwrap().success());
    assert_eq!(sum.split_whitespace().next().unwrap(), format!("{:x}", Sha256::digest(&data)));

    // A timeout ends the whole tree, also children that made a session of their own.
    let (timed_out, _) =
        host.fails(&["exec", "--timeout", "1s", "box", "--", "sh", "-c", "setsid sleep 4321 & sleep 4321"]);
    assert_eq!(timed_out, 124);
    assert_eq!(host.sh("box", "ps | grep -c '[s]leep 4321' || true"), "0\n");
}

#[test]
fn a_terminal_has_its_size_before_the_command_begins() {
    if !can_run_vms("a_terminal_has_its_size_before_the_command_begins") {
        return;
    }
    let host = Host::new();
    host.ok(&["create", "box"]);
    // script(1) gives torpor a terminal; its size is set before torpor starts.
    let inner = format!(
        "stty rows 33 cols 101; {} exec -t box -- stty size",
        torpor_tests::torpor_program().display()
    );
    let command = host.command(&[]);
    let endpoint = command.get_envs().find(|(k, _)| *k == "TORPOR_ENDPOINT").unwrap().1.unwrap().to_owned();
    let output = std::process::Command::new("script")
        .args(["-qec", &inner, "/dev/null"])
        .env("TORPOR_ENDPOINT", endpoint)
        .stdin(Stdio::null())
        .output()
        .unwrap();
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    assert_eq!(text.lines().next().map(str::trim), Some("33 101"), "{text}");
}

#[test]
fn two_hundred_megabytes_stream_whole_and_the_gateway_stays_small() {
    if !can_run_vms("two_hundred_megabytes_stream_whole_and_the_gateway_stays_small") {
        return;
    }
    const BYTES: u64 = 200_000_000;
    let host = Host::new();
    host.ok(&["create", "box"]);
    let script = format!("yes 0123456789abcdef | head -c {BYTES}");
    let mut child =
        host.command(&["exec", "box", "--", "sh", "-c", &script]).stdout(Stdio::piped()).spawn().unwrap();
    let mut out = child.stdout.take().unwrap();
    let (mut hasher, mut buffer, mut read) = (Sha256::new(), vec![0; 1 << 16], 0_u64);
    loop {
        let n = out.read(&mut buffer).unwrap();
        if n == 0 {
            break;
        }
        hasher.update(&buffer[..n]);
        read += n as u64;
    }
    assert!(wait_at_most(&mut child, Duration::from_secs(60)).unwrap().success());
    let expected = {
        let line = b"0123456789abcdef\n";
        let mut hasher = Sha256::new();
        let mut left = BYTES as usize;
        let block: Vec<u8> = line.iter().copied().cycle().take(line.len() * 4096).collect();
        while left > 0 {
            let n = left.min(block.len());
            hasher.update(&block[..n]);
            left -= n;
        }
        hasher.finalize()
    };
    assert_eq!((read, hasher.finalize()), (BYTES, expected));
    let peak = high_water_kib(host.gateway_pid());
    println!("gateway's peak: {} MiB", peak >> 10);
    // It starts with some 50, and half of what went through would be 100.
    assert!(peak < 96 << 10, "the gateway grew to {peak} KiB");
}

#[test]
fn a_suspend_ends_sessions_with_the_reason() {
    if !can_run_vms("a_suspend_ends_sessions_with_the_reason") {
        return;
    }
    let host = Host::new();
    host.ok(&["create", "box"]);
    let mut child = host
        .command(&["exec", "box", "--", "sleep", "1000"])
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    host.until("the command runs", |h| h.sh("box", "ps | grep -c '[s]leep 1000' || true") == "1\n");
    host.ok(&["suspend", "box"]);
    let status = wait_at_most(&mut child, Duration::from_secs(30)).expect("the session went on");
    let mut error = String::new();
    child.stderr.take().unwrap().read_to_string(&mut error).unwrap();
    assert!(!status.success() && error.contains("torpor resume box"), "{status} {error}");
}
