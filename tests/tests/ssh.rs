//! SSH into a real sandbox, by the real client and the real server.
#![allow(clippy::unwrap_used, reason = "tests")]

use std::{
    fs,
    io::Write as _,
    path::{Path, PathBuf},
    process::{Command, Output, Stdio},
    time::Duration,
};

use torpor_tests::{Host, can_run_vms, need, wait_at_most};

const LIMIT: Duration = Duration::from_secs(60);

/// The server's package, unpacked (`./check` does it).
fn server() -> Option<PathBuf> {
    std::env::var_os("TORPOR_TEST_SSH_SERVER")
        .map(PathBuf::from)
        .filter(|dir| dir.join("usr/sbin/sshd").is_file())
}

fn found(program: &str) -> Option<PathBuf> {
    let path = std::env::var_os("PATH").unwrap_or_default();
    std::env::split_paths(&path).map(|dir| dir.join(program)).find(|file| file.is_file())
}

/// The server, the maker of its key, and all libraries of both, as they lie in a file system.
fn tree(server: &Path, root: &Path) {
    let programs = [
        (server.join("usr/sbin/sshd"), "usr/sbin/sshd"),
        (found("ssh-keygen").unwrap(), "usr/bin/ssh-keygen"),
    ];
    let libraries = server.join("usr/lib/x86_64-linux-gnu");
    let put = |from: &Path, to: &str| {
        let to = root.join(to.trim_start_matches('/'));
        fs::create_dir_all(to.parent().unwrap()).unwrap();
        fs::copy(from, to).unwrap();
    };
    for (program, place) in &programs {
        put(program, place);
        let needed = Command::new("ldd").arg(program).env("LD_LIBRARY_PATH", &libraries).output().unwrap();
        for line in String::from_utf8(needed.stdout).unwrap().lines() {
            if let Some(path) = line.split_whitespace().find(|word| word.starts_with('/')) {
                let name = Path::new(path).file_name().unwrap().to_str().unwrap();
                // The loader is where the programs say that it is, the libraries where it looks by itself.
                let place = if name.starts_with("ld-") { path.to_owned() } else { format!("lib/{name}") };
                put(Path::new(path), &place);
            }
        }
    }
    fs::create_dir_all(root.join("etc")).unwrap();
}

fn text(output: &Output) -> (Option<i32>, String, String) {
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
    (output.status.code(), text(&output.stdout), text(&output.stderr))
}

/// A command line that reads a configuration of ours, and the key of nobody else.
fn with_config(program: &str, config: &Path, rest: &[&str]) -> Output {
    let mut command = Command::new(program);
    command.arg("-F").arg(config).args(["-o", "BatchMode=yes"]).args(rest);
    command.env_remove("SSH_AUTH_SOCK").stdin(Stdio::null()).output().unwrap()
}

#[test]
fn the_images_ssh_server_is_reached_by_ssh_sftp_and_configuration_and_ends_with_the_session() {
    let test = "the_images_ssh_server_is_reached_by_ssh_sftp_and_configuration_and_ends_with_the_session";
    let server = server();
    if !can_run_vms(test)
        || !need(test, "tools", server.is_some(), "TORPOR_TEST_SSH_SERVER names no unpacked openssh-server")
        || !need(test, "tools", found("ssh").is_some() && found("ssh-keygen").is_some(), "no openssh-client")
    {
        return;
    }
    let host = Host::new();
    host.ok(&["create", "box"]);
    let here = tempfile::tempdir().unwrap();
    let root = here.path().join("root");
    tree(&server.unwrap(), &root);
    host.ok(&["cp", &format!("{}/.", root.display()), "box:/"]);
    host.sh("box", "echo sshd:x:100:65534::/run/sshd:/bin/false >> /etc/passwd");

    // By our own command: output, code, input, and a key that nobody has afterwards.
    let run = |arguments: &[&str]| {
        let mut command = host.command(&[&["ssh", "box"], arguments].concat());
        command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
        let mut child = command.spawn().unwrap();
        child.stdin.take().unwrap().write_all(b"from here\n").unwrap();
        text(&child.wait_with_output().unwrap())
    };
    let (code, out, err) = run(&["--", "cat; echo there >&2; exit 7"]);
    assert_eq!((code, out.as_str()), (Some(7), "from here\n"), "{err}");
    assert!(err.contains("there\n"), "{err}");
    assert_eq!(run(&["--login", "worker", "--", "id", "-un"]).1, "worker\n");
    let gone = host.sh("box", "ls -d /run/torpor-ssh* /tmp/torpor-ssh* 2>/dev/null | wc -l");
    assert_eq!(gone, "0\n");

    // By a configuration, as editors use it.
    let config = here.path().join("config");
    let written = host.command(&["ssh-config", "box"]).env("XDG_STATE_HOME", here.path()).output().unwrap();
    fs::write(&config, &written.stdout).unwrap();
    let (code, out, err) = text(&with_config("ssh", &config, &["box.torpor", "hostname"]));
    assert_eq!((code, out.as_str()), (Some(0), "box\n"), "{err}");
    fs::write(here.path().join("batch"), "put config /tmp/put\nget /etc/passwd got\n").unwrap();
    let mut sftp = Command::new("sftp");
    sftp.current_dir(here.path()).arg("-F").arg(&config).args(["-b", "batch", "box.torpor"]);
    let (code, _, err) = text(&sftp.output().unwrap());
    assert_eq!(code, Some(0), "{err}");
    assert_eq!(host.sh("box", "cat /tmp/put"), fs::read_to_string(&config).unwrap());
    assert!(fs::read_to_string(here.path().join("got")).unwrap().contains("sshd:x:100"));

    // An agent is handed on where the user says so, and its keys are not offered.
    let (_, out, err) = text(&with_config("ssh", &config, &["-G", "box.torpor"]));
    assert!(out.contains("identitiesonly yes") && !out.contains("identityagent none"), "{out} {err}");

    // A suspend ends it, and afterwards it is the same server.
    let mut command = host.command(&["ssh", "box", "--", "sleep", "4242"]);
    let mut child = command.stdin(Stdio::null()).stderr(Stdio::null()).spawn().unwrap();
    host.until("the command runs", |h| h.sh("box", "ps | grep -c '[s]leep 4242' || true") == "1\n");
    host.ok(&["suspend", "box"]);
    assert_eq!(wait_at_most(&mut child, LIMIT).unwrap().code(), Some(255));
    let (code, errors) = host.fails(&["ssh", "box", "--", "true"]);
    assert!(code == 4 && errors.contains("torpor resume box"), "{code} {errors}");
    host.ok(&["resume", "box"]);
    let (code, out, err) = text(&with_config("ssh", &config, &["box.torpor", "hostname"]));
    assert_eq!((code, out.as_str()), (Some(0), "box\n"), "{err}");
}
