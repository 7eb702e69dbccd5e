//! The care of a disk between two lives of its guest.
#![allow(clippy::unwrap_used, reason = "tests")]

use std::{path::Path, process::Command};

use serde_json::Value;
use torpor_tests::{Host, can_run_vms, need};

fn qemu_img(args: &[&str]) {
    let done = Command::new("qemu-img").args(args).output().unwrap();
    let text = String::from_utf8_lossy(&done.stdout).into_owned() + &String::from_utf8_lossy(&done.stderr);
    assert!(done.status.success(), "qemu-img {args:?}: {text}");
}

/// Size of the guest's root file system, bytes.
fn root_bytes(host: &Host) -> u64 {
    let kib = host.sh("web", "df -kP / | tail -n 1 | awk '{ print $2 }'");
    kib.trim().parse::<u64>().unwrap() << 10
}

#[test]
fn a_suspended_disk_is_checked_grown_compacted_and_exported_and_comes_back_larger_with_its_files() {
    const NAME: &str =
        "a_suspended_disk_is_checked_grown_compacted_and_exported_and_comes_back_larger_with_its_files";
    let found = ["/usr/bin/qemu-img", "/usr/local/bin/qemu-img"].iter().any(|p| Path::new(p).exists());
    if !can_run_vms(NAME) || !need(NAME, "tools", found, "qemu-img is not installed") {
        return;
    }
    let host = Host::new();
    host.ok(&["create", "web"]);
    let script = "dd if=/dev/urandom of=/root/data bs=1M count=6 2>/dev/null
                  dd if=/dev/zero of=/root/zeros bs=1M count=8 2>/dev/null; sync; sha256sum /root/data /root/zeros";
    let sums = host.sh("web", script);
    let before = root_bytes(&host);
    let (code, error) = host.fails(&["sandbox", "disk", "grow", "web", "2G"]);
    assert!(code == 4 && error.contains("Ready") && error.contains("torpor suspend web"), "{code} {error}");
    let shown: Value = serde_json::from_str(&host.ok(&["disk", "web", "-o", "json"])).unwrap();
    assert_eq!((&shown["state"], &shown["check"]), (&"in_use".into(), &Value::Null));

    host.ok(&["suspend", "web"]);
    let shown: Value =
        serde_json::from_str(&host.ok(&["sandbox", "disk", "web", "--check", "-o", "json"])).unwrap();
    assert_eq!((&shown["state"], &shown["check"]["damage_count"]), (&"at_rest".into(), &0.into()), "{shown}");
    assert_eq!((&shown["virtual_bytes"], &shown["check"]["unclean"]), (&(1_u64 << 30).into(), &false.into()));
    assert_eq!(shown["layers"].as_array().unwrap().len(), 2);

    let version = host.get("web")["version"].as_u64().unwrap();
    host.ok(&["sandbox", "disk", "grow", "web", "2G"]);
    let grown = host.get("web");
    assert_eq!(grown["resources"]["disk_bytes"], 2_u64 << 30);
    assert!(grown["version"].as_u64().unwrap() > version);
    let (code, error) = host.fails(&["disk", "grow", "web", "1G"]);
    assert!(code == 2 && error.contains("1 GiB") && error.contains("2 GiB"), "{code} {error}");
    for rewrite in [&[][..], &["--rewrite"]] {
        let arguments = [&["disk", "compact", "web", "-o", "json"], rewrite].concat();
        let done: Value = serde_json::from_str(&host.ok(&arguments)).unwrap();
        let used = |key: &str| done[key].as_u64().unwrap();
        assert!(used("used_after_bytes") <= used("used_before_bytes"), "{done}");
    }

    let overlay = host.sandbox_dir(grown["id"].as_str().unwrap()).join("overlay.qcow2");
    let overlay = overlay.to_str().unwrap();
    qemu_img(&["check", overlay]);
    for format in ["raw", "qcow2"] {
        let file = host.dir().join(format!("web.{format}"));
        let file = file.to_str().unwrap();
        host.ok(&["disk", "export", "web", file, "--format", format]);
        qemu_img(&["compare", "-f", "qcow2", "-F", format, overlay, file]);
        assert_eq!(host.fails(&["disk", "export", "web", file]).0, 2, "an existing file was replaced");
    }
    let names = std::fs::read_dir(Path::new(overlay).parent().unwrap()).unwrap().count();
    assert_eq!(names, 2, "something is left beside the disk");

    host.restart_gateway();
    host.ok(&["resume", "web"]);
    assert_eq!(host.sh("web", "sha256sum /root/data /root/zeros"), sums);
    let after = root_bytes(&host);
    assert!(after > before + (800 << 20), "the file system had {before} bytes and has {after}");
    host.ok(&["suspend", "web"]);
    host.ok(&["disk", "web", "--check"]);
    host.ok(&["delete", "web"]);
}
