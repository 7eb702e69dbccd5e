//! Files in and out of a real sandbox, by the real command line.
#![allow(clippy::unwrap_used, reason = "tests")]

use std::{
    fs,
    io::{BufRead as _, BufReader, Read as _, Write as _},
    os::unix::{
        ffi::OsStrExt as _,
        fs::{MetadataExt as _, PermissionsExt as _, symlink},
    },
    path::Path,
    process::{Child, Stdio},
    time::Duration,
};

use nix::{
    sys::signal::{Signal, kill},
    unistd::Pid,
};
use serde_json::Value;
use sha2::{Digest as _, Sha256};
use torpor_tests::{Host, can_run_vms, secrets::http, wait_at_most};

/// Nothing takes this long unless it hangs.
const LIMIT: Duration = Duration::from_secs(60);
const LARGE: u64 = 300_000_000;

/// Everything about a tree: names, kinds, modes, times of files, contents.
fn described(root: &Path) -> Vec<String> {
    fn walk(root: &Path, path: &Path, all: &mut Vec<String>) {
        let meta = fs::symlink_metadata(path).unwrap();
        let name = path.strip_prefix(root).unwrap().as_os_str().as_bytes().escape_ascii().to_string();
        let kind = if meta.is_symlink() {
            format!("-> {}", fs::read_link(path).unwrap().display())
        } else if meta.is_dir() {
            format!("folder {:o}", meta.mode() & 0o777)
        } else {
            let digest = Sha256::digest(fs::read(path).unwrap());
            format!(
                "{:o} {}.{} {} {digest:x}",
                meta.mode() & 0o777,
                meta.mtime(),
                meta.mtime_nsec(),
                meta.len()
            )
        };
        all.push(format!("{name} {kind}"));
        if meta.is_dir() {
            let mut below: Vec<_> = fs::read_dir(path).unwrap().map(|entry| entry.unwrap().path()).collect();
            below.sort();
            below.iter().for_each(|path| walk(root, path, all));
        }
    }
    let mut all = Vec::new();
    walk(root, root, &mut all);
    all
}

fn tree(root: &Path) {
    fs::create_dir_all(root.join("deep/er")).unwrap();
    fs::create_dir(root.join("empty")).unwrap();
    for name in ["zero", "$(touch pwned)", "`id`;x", "new\nline", " sp ace ", "-rf", "..x", &"n".repeat(255)]
    {
        fs::write(root.join("deep").join(name), name.len().to_string()).unwrap();
    }
    fs::write(root.join("deep/zero"), "").unwrap();
    fs::write(root.join(std::ffi::OsStr::from_bytes(b"deep/latin-\xe9")), "x").unwrap();
    let odd: Vec<u8> = (0..(4_u32 << 20) + 1).map(|n| (n * 7 + n / 251).to_le_bytes()[0]).collect();
    fs::write(root.join("deep/er/4MiB+1"), odd).unwrap();
    symlink("/etc/passwd", root.join("absolute")).unwrap();
    symlink("../../../../../../etc", root.join("deep/er/outside")).unwrap();
    fs::set_permissions(root.join("deep/-rf"), fs::Permissions::from_mode(0o751)).unwrap();
}

fn spawn(host: &Host, arguments: &[&str]) -> Child {
    let mut command = host.command(arguments);
    command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap()
}

/// What a program came to that must end by itself.
fn finished(mut child: Child) -> std::process::Output {
    assert!(wait_at_most(&mut child, LIMIT).is_some(), "it hangs");
    child.wait_with_output().unwrap()
}

fn report(text: &str) -> Value {
    serde_json::from_str(text).unwrap()
}

#[test]
fn files_go_in_and_come_out_whole_and_a_broken_copy_goes_on() {
    if !can_run_vms("files_go_in_and_come_out_whole_and_a_broken_copy_goes_on") {
        return;
    }
    let address = std::net::TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().to_string();
    let host =
        Host::with(&format!("[[tcp]]\naddress = '{address}'\nplaintext = true\nanonymous = 'admin'\n"));
    let main = "i=0; while :; do i=$((i+1)); echo line $i; echo oops >&2; sleep 1; done";
    host.ok(&["create", "box", "--", "sh", "-c", main]);
    let here = tempfile::tempdir().unwrap();
    let path = |name: &str| here.path().join(name).to_str().unwrap().to_owned();

    // A tree with everything that names can hold.
    tree(&here.path().join("tree"));
    let copied = report(&host.ok(&["cp", &path("tree"), "box:/root/", "-o", "json"]));
    assert_eq!((&copied["files"], &copied["symlinks"]), (&Value::from(10), &Value::from(2)), "{copied}");
    assert_eq!(host.sh("box", "cat /root/tree/deep/-rf; ls /root/tree | wc -l; ls -a / /root | grep -c -e pwned -e torpor-part -e torpor-new || true"), "33\n0\n");
    assert_eq!(
        host.sh("box", "stat -c %U:%a /root/tree/deep/-rf; readlink /root/tree/absolute"),
        "root:751\n/etc/passwd\n"
    );
    host.ok(&["cp", "box:/root/tree", &path("back")]);
    assert_eq!(described(&here.path().join("back")), described(&here.path().join("tree")));
    // What is in it, into a folder that is made; owned by somebody else.
    host.ok(&["cp", "-p", "-u", "worker", &path("tree/."), "box:/home/worker/a/b"]);
    assert_eq!(
        host.sh("box", "stat -c %U /home/worker/a/b/deep/zero; ls /home/worker/a/b | head -1"),
        "worker\nabsolute\n"
    );
    let again = report(&host.ok(&["cp", "--resume", &path("tree"), "box:/root", "-o", "json"]));
    // All but the one whose name can't be asked for.
    assert_eq!((&again["unchanged"], &again["files"]), (&Value::from(9), &Value::from(1)), "{again}");

    streams_and_refusals(&host, &path);
    hostile_names(&host, &address);
    let (code, errors) = host.fails(&["ssh", "box"]);
    assert!(
        code == 4 && errors.contains("SSH_SERVER_MISSING") && errors.contains("openssh-server"),
        "{code} {errors}"
    );
    broken_copies(&host, here.path());
    attached(&host);
    talked_to(&host);
}

fn streams_and_refusals(host: &Host, path: &dyn Fn(&str) -> String) {
    let mut child = host.command(&["cp", "-", "box:/tmp/$(id)"]).stdin(Stdio::piped()).spawn().unwrap();
    child.stdin.take().unwrap().write_all(b"from a stream").unwrap();
    assert!(wait_at_most(&mut child, Duration::from_secs(60)).unwrap().success());
    assert_eq!(host.ok(&["cp", "box:/tmp/$(id)", "-"]), "from a stream");
    assert!(
        host.ok(&["cp", "box:/proc/version", "-"]).starts_with("Linux"),
        "a file whose size says nothing"
    );
    // A path can't leave the sandbox, and a link there leads to what is there.
    host.ok(&["cp", &path("tree/deep/-rf"), "box:/tmp/../../../../etc/outside"]);
    assert_eq!(host.sh("box", "cat /etc/outside; ln -s /etc /tmp/link; ln -s /nowhere /tmp/dangling"), "3");
    host.ok(&["cp", &path("tree/deep/-rf"), "box:/tmp/link/by-link"]);
    assert_eq!(host.sh("box", "cat /etc/by-link"), "3");
    assert_eq!(host.ok(&["cp", "box:/tmp/link/by-link", "-"]), "3");

    let long = format!("box:/tmp/{}", "x/".repeat(2500));
    let long_name = format!("box:/tmp/{}", "x".repeat(256));
    let zero = path("tree/deep/zero");
    for (arguments, code, word) in [
        (["cp", "box:/no/such", "-"], 3, "FILE_NOT_FOUND"),
        (["cp", &zero, "box:/no/such/folder/f"], 3, "FILE_NOT_FOUND"),
        (["cp", &zero, &long], 2, "BAD_PATH"),
        (["cp", &zero, &long_name], 2, "BAD_PATH"),
        (["cp", &zero, "box:/etc/passwd/x"], 4, "NOT_A_DIRECTORY"),
        (["cp", "box:/dev/null", "-"], 2, "NOT_A_FILE"),
        (["cp", "box:/etc", "-"], 2, "is a folder"),
        (["cp", "nobody:/etc/passwd", "-"], 3, "torpor list"),
        (["cp", &zero, &zero], 2, "NAME:/PATH"),
        (["cp", "box:/a", "box:/b"], 2, "must be here"),
        (["cp", &path("nothing here"), "box:/x"], 1, "nothing here"),
        (["cp", &path("tree"), "box:/etc/passwd"], 4, "NOT_A_DIRECTORY"),
    ] {
        let (got, errors) = host.fails(&arguments);
        assert!(got == code && errors.contains(word), "{arguments:?}: {got} {errors}");
    }
}

/// What comes of an upload by REST of one file of this name into /tmp/odd.
fn uploaded(address: &str, name: &[u8], data: &[&[u8]]) -> (u16, String) {
    let text = |bytes: &[u8]| base64::Engine::encode(&base64::prelude::BASE64_STANDARD, bytes);
    let entry = serde_json::json!({
        "entry": { "path": text(name), "kind": "FILE_KIND_FILE", "mode": 0o640 },
    });
    let start = serde_json::json!({ "path": "/tmp/odd", "parents": true });
    let mut lines = vec![start.to_string(), entry.to_string()];
    lines.extend(data.iter().map(|piece| serde_json::json!({ "data": text(piece) }).to_string()));
    lines.extend([r#"{"fileEnd": {}}"#, r#"{"end": {}}"#].map(str::to_owned));
    let request = "POST /v1/sandboxes/box/files:upload";
    let (status, answer, _) = http(address, request, &[], &lines.join("\n"), None);
    (status, answer)
}

/// Names that a client of its own sends, past our command line's checks.
fn hostile_names(host: &Host, address: &str) {
    for name in [&b"$(touch pwned)\n`id`"[..], b"-rf", b"..x", b"\xff\xfe", b" "] {
        let (status, answer) = uploaded(address, name, &[b"odd"]);
        assert!(status == 200 && answer.contains("\"files\":\"1\""), "{answer}");
    }
    assert_eq!(host.sh("box", "find /tmp/odd -type f -exec echo x \\; | wc -l; cat /tmp/odd/*id*; stat -c %a /tmp/odd/-rf; ls /pwned /tmp/odd/pwned 2>/dev/null | wc -l"), "5\nodd640\n0\n");
    let long = b"x/".repeat(2048);
    for name in
        [&b"a\0b"[..], b"..", b"../x", b"a/../x", b"./x", b"/etc/x", b"", b"a//b", b"a/", &[b'x'; 256], &long]
    {
        let (status, answer) = uploaded(address, name, &[b"evil"]);
        let shown = name.escape_ascii().to_string();
        assert!(status == 400 && answer.contains("BAD_PATH"), "{shown}: {answer}");
    }
    assert_eq!(host.sh("box", "ls /tmp | grep -c '^x$' || true; ls /etc/x 2>/dev/null | wc -l"), "0\n0\n");
    for call in ["files:stat", "files", "files:download"] {
        for path in ["%2Ftmp%2Fa%00b".to_owned(), format!("%2Ftmp%2F{}", "x%2F".repeat(2100))] {
            let request = format!("GET /v1/sandboxes/box/{call}?path={path}");
            let (_, answer, _) = http(address, &request, &[], "", None);
            assert!(answer.contains("BAD_PATH"), "{call}: {answer}");
        }
    }
    // 4 MiB and a byte, and nothing at all, both ways.
    let piece: Vec<u8> = (0..1_u32 << 20).map(|n| (n ^ (n >> 8)).to_le_bytes()[0]).collect();
    let (status, answer) = uploaded(address, b"large", &[&piece, &piece, &piece, &piece, b"!"]);
    assert!(status == 200, "{answer}");
    let (status, answer) = uploaded(address, b"none", &[]);
    assert!(status == 200, "{answer}");
    assert_eq!(host.sh("box", "stat -c %s /tmp/odd/large /tmp/odd/none"), "4194305\n0\n");
    let sum: String = Sha256::digest([&piece[..], &piece, &piece, &piece, b"!"].concat())
        .iter()
        .map(|byte| format!("{byte:02x}"))
        .collect();
    assert!(host.sh("box", "sha256sum /tmp/odd/large").starts_with(&sum));
    let request = "GET /v1/sandboxes/box/files:download?path=%2Ftmp%2Fodd%2Flarge";
    let (_, answer, _) = http(address, request, &[], "", None);
    let wanted = base64::Engine::encode(&base64::prelude::BASE64_STANDARD, &piece[..300]);
    assert!(answer.contains(&wanted[..300]) && answer.contains("\"end\""), "{} bytes", answer.len());
}

/// A main command that ends hands its code on.
fn attached(host: &Host) {
    host.ok(&["create", "job", "--", "sh", "-c", "echo begun; sleep 3; echo done; exit 5"]);
    let output = host.run(&["attach", "job"]);
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    assert_eq!((output.status.code(), text.as_str()), (Some(5), "begun\ndone\n"), "{output:?}");
    assert_eq!(host.ok(&["logs", "job"]), text);
    host.ok(&["delete", "job"]);
}

/// Whoever attaches talks to the command that runs, and leaves it running.
fn talked_to(host: &Host) {
    let script = "echo begun; while read line; do echo got $line; done; echo over; exit 4";
    host.ok(&["create", "talk", "--stdin", "--", "sh", "-c", script]);
    let attach = |more: &[&str]| {
        let mut attach = host.command(&[&["attach", "talk"], more].concat());
        attach.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap()
    };
    let mut first = attach(&[]);
    let mut output = BufReader::new(first.stdout.take().unwrap()).lines().map(Result::unwrap);
    first.stdin.take().unwrap().write_all(b"one\n").unwrap();
    // The end of our input is not the end of the command's.
    assert_eq!(output.by_ref().take(2).collect::<Vec<_>>(), ["begun", "got one"]);
    kill(Pid::from_raw(first.id().cast_signed()), Signal::SIGINT).unwrap();
    assert_eq!(wait_at_most(&mut first, LIMIT).unwrap().code(), Some(130));
    let mut second = attach(&["--close-stdin", "-n", "1"]);
    second.stdin.take().unwrap().write_all(b"two\n").unwrap();
    let output = finished(second);
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    assert_eq!((output.status.code(), text.as_str()), (Some(4), "got one\ngot two\nover\n"), "{output:?}");
    host.ok(&["delete", "talk"]);

    host.ok(&["create", "term", "-i", "--tty", "--", "sh", "-c", "stty size; read line; exec sleep 4242"]);
    let mut term = host.command(&["attach", "term"]);
    let mut term = term.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    term.stdin.as_mut().unwrap().write_all(b"echoed\n").unwrap();
    let mut output = BufReader::new(term.stdout.take().unwrap()).lines().map(Result::unwrap);
    let mut lines: Vec<_> = output.by_ref().take(2).collect();
    // The terminal echoes as soon as it is told something.
    lines.sort();
    assert_eq!(lines, ["24 80", "echoed"]);
    host.ok(&["suspend", "term"]);
    let ended = finished(term);
    let errors = String::from_utf8_lossy(&ended.stderr).into_owned();
    assert!(ended.status.code() == Some(255) && errors.contains("torpor resume term"), "{ended:?}");
    host.ok(&["delete", "term"]);
    let (code, errors) = host.fails(&["create", "idle", "-i"]);
    assert!(code == 2 && errors.contains("stdin: it is the main command's"), "{code} {errors}");
}

fn output_while_it_sleeps(host: &Host) {
    host.until("it sleeps", |h| h.get("box")["phase"] == "Suspended");
    let all = host.ok(&["logs", "box"]);
    assert!(all.contains("line 1\n") && all.contains("oops\n"), "{all}");
    let last = host.ok(&["logs", "box", "-n", "2"]);
    assert!(all.ends_with(&last) && last.lines().count() == 2, "{last}");
    assert_eq!(host.ok(&["logs", "box", "--since", "1h"]), all);
    assert_eq!(host.ok(&["logs", "box", "--since", "2099-01-01T00:00:00Z"]), "");
    // Nothing follows.
    assert_eq!(host.ok(&["logs", "box", "-f"]), all);
    let (code, errors) = host.fails(&["logs", "box", "--source", "console", "--since", "1h"]);
    assert!(code == 2 && errors.contains("since"), "{code} {errors}");
    host.restart_gateway();
    assert_eq!(host.ok(&["logs", "box"]), all);
}

fn broken_copies(host: &Host, here: &Path) {
    let large = here.join("large");
    let mut file = std::io::BufWriter::new(fs::File::create(&large).unwrap());
    let mut digest = Sha256::new();
    for n in 0..LARGE / 1_000_000 {
        let block: Vec<u8> = (0..1_000_000_u64).map(|m| (m ^ (m >> 8) ^ n).to_le_bytes()[0]).collect();
        digest.update(&block);
        file.write_all(&block).unwrap();
    }
    drop(file);
    let large = large.to_str().unwrap();
    // Killed in the middle: no half file, and the rest goes on from there.
    let mut child = spawn(host, &["cp", large, "box:/root/large"]);
    host.until("some of it has come", |h| {
        let size = h.sh("box", "stat -c %s /root/.torpor-part-* 2>/dev/null || echo 0");
        size.trim().parse::<u64>().unwrap() > 1_000_000
    });
    child.kill().unwrap();
    child.wait().unwrap();
    assert_eq!(host.sh("box", "ls /root"), "tree\n");
    // The same when the sandbox goes to sleep under it, with a word that says so.
    let mut child = spawn(host, &["cp", "--resume", large, "box:/root/large"]);
    std::thread::sleep(Duration::from_millis(300));
    host.ok(&["suspend", "box"]);
    let status = wait_at_most(&mut child, Duration::from_secs(30)).expect("the copy hangs");
    let mut errors = String::new();
    child.stderr.take().unwrap().read_to_string(&mut errors).unwrap();
    assert!(status.code() == Some(4) && errors.contains("torpor resume box"), "{status} {errors}");
    output_while_it_sleeps(host);
    let (code, errors) = host.fails(&["cp", large, "box:/root/large"]);
    assert!(code == 4 && errors.contains("torpor resume box"), "{code} {errors}");
    host.ok(&["resume", "box"]);
    assert_eq!(host.sh("box", "ls /root"), "tree\n");
    let rest = report(&host.ok(&["cp", "--resume", large, "box:/root/large", "-o", "json"]));
    let came = rest["bytes"].as_u64().unwrap();
    assert!(came > 0 && came < LARGE - 1_000_000, "{rest}");

    // A new boot begins anew; what the last one wrote is there still.
    let all = host.ok(&["logs", "box"]);
    assert!(all.matches("line 1\n").count() == 2, "{all}");

    // Out again, broken in the middle too; the part that is here is damaged, so all of it comes anew.
    let back = here.join("back-large");
    let mut child = spawn(host, &["cp", "box:/root/large", back.to_str().unwrap()]);
    let part = || {
        let names = fs::read_dir(here).unwrap().map(|entry| entry.unwrap().path());
        names.into_iter().find(|path| path.to_str().unwrap().contains(".torpor-part-"))
    };
    host.until("some of it is here", |_| {
        part().is_some_and(|part| part.metadata().unwrap().len() > 20_000_000)
    });
    child.kill().unwrap();
    child.wait().unwrap();
    let kept = part().unwrap();
    fs::File::options().write(true).open(&kept).unwrap().write_all(b"damaged").unwrap();
    let anew = report(&host.ok(&["cp", "--resume", "box:/root/large", back.to_str().unwrap(), "-o", "json"]));
    assert_eq!(anew["bytes"], LARGE, "{anew}");
    assert!(part().is_none());
    assert_eq!(Sha256::digest(fs::read(&back).unwrap()), digest.finalize());
}
