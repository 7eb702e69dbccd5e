//! What the tests need of the host, and a small tree.

#![allow(dead_code, clippy::unwrap_used)]

use std::fs;
use std::os::unix::fs::symlink;
use std::path::Path;
use std::process::{Command, Output};

use torpor_images::Progress;

/// Whether the test may go on. When `REQUIRE` names `word`, a missing need is a failure instead of a skip.
pub fn have(test: &str, word: &str, met: bool, reason: &str) -> bool {
    if !met {
        let required = std::env::var("REQUIRE").unwrap_or_default();
        assert!(!required.split(',').any(|need| need == word), "{test} needs {word}: {reason}");
        let _ = std::io::Write::write_fmt(&mut std::io::stderr(), format_args!("SKIP {test}: {reason}\n"));
    }
    met
}

pub fn have_root(test: &str) -> bool {
    have(test, "root", nix::unistd::geteuid().is_root(), "not root")
        && have(test, "tools", found("mke2fs") && found("debugfs"), "no e2fsprogs")
}

pub fn found(tool: &str) -> bool {
    ["/usr/sbin", "/sbin", "/usr/bin", "/bin"].iter().any(|dir| Path::new(dir).join(tool).is_file())
}

pub fn run(program: &str, args: &[&str]) -> Output {
    let path = format!("{}:/usr/sbin:/sbin", std::env::var("PATH").unwrap_or_default());
    Command::new(program).args(args).env("PATH", path).env("LC_ALL", "C").output().unwrap()
}

pub fn text(output: &Output) -> String {
    String::from_utf8_lossy(&output.stdout).into_owned() + &String::from_utf8_lossy(&output.stderr)
}

pub fn debugfs(disk: &Path, command: &str) -> String {
    text(&run("debugfs", &["-R", command, disk.to_str().unwrap()]))
}

/// A root file system with what is hard to carry over, and with traces of its host.
pub fn sample_tree(root: &Path) {
    for dir in ["etc/ssh", "usr/bin", "var/log", "var/lib/apt/lists", "var/cache", "home/a dir"] {
        fs::create_dir_all(root.join(dir)).unwrap();
    }
    symlink("usr/bin", root.join("bin")).unwrap();
    symlink("/etc/marker", root.join("etc/absolute")).unwrap();
    for (file, content) in [
        ("etc/marker", "marker-content"),
        ("etc/resolv.conf", "nameserver 192.0.2.77"),
        ("etc/hostname", "secret-build-host"),
        ("etc/machine-id", "5ec2e75ec2e75ec2e75ec2e75ec2e75e"),
        ("etc/ssh/ssh_host_ed25519_key", "secret-host-key"),
        ("var/log/syslog", "secret-log"),
        ("var/lib/apt/lists/index", "secret-list"),
        ("home/a dir/späce \" quote", "odd name"),
    ] {
        fs::write(root.join(file), content).unwrap();
    }
    fs::copy("/bin/busybox", root.join("usr/bin/busybox"))
        .or_else(|_| fs::copy("/bin/true", root.join("usr/bin/true")))
        .unwrap();
    fs::hard_link(root.join("etc/marker"), root.join("home/hard")).unwrap();
    let at = |path: &str| root.join(path).to_str().unwrap().to_owned();
    assert!(run("mkfifo", &[&at("var/fifo")]).status.success());
    assert!(run("mknod", &[&at("var/node"), "c", "1", "3"]).status.success());
    assert!(run("chown", &["1234:5678", &at("home/a dir")]).status.success());
    assert!(run("chmod", &["4755", &at("home/hard")]).status.success());
    assert!(
        run("find", &[root.to_str().unwrap(), "-exec", "touch", "-h", "-d", "@1600000000", "{}", "+"])
            .status
            .success()
    );
}

pub fn quiet() -> impl FnMut(Progress) {
    |_| ()
}

/// What is in `<state>/images` beside the lock: nothing half-made may be.
pub fn entries(dir: &Path) -> Vec<String> {
    let mut names: Vec<String> =
        fs::read_dir(dir).unwrap().map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect();
    names.sort();
    names.retain(|name| name != ".lock");
    names
}
