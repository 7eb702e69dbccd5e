//! Images made, named and removed for real: needs root and e2fsprogs.

#![allow(clippy::unwrap_used, missing_docs)]

mod common;

use std::fs;
use std::io::Write;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use common::*;
use torpor_images::{Catalog, Error, Source};

fn tar_of(tree: &Path, to: &Path) {
    let (tree, to) = (tree.to_str().unwrap(), to.to_str().unwrap());
    let made = run("tar", &["--format=pax", "--xattrs", "--xattrs-include=*", "-C", tree, "-cf", to, "."]);
    assert!(made.status.success(), "{}", text(&made));
}

#[test]
fn the_same_tree_is_the_same_image_from_a_directory_a_copy_or_a_tar() {
    if !have_root("the_same_tree_is_the_same_image_from_a_directory_a_copy_or_a_tar") {
        return;
    }
    let dir = tempfile::tempdir().unwrap();
    let (tree, copy, tar) = (dir.path().join("tree"), dir.path().join("copy"), dir.path().join("tree.tar"));
    fs::create_dir(&tree).unwrap();
    sample_tree(&tree);
    std::thread::sleep(Duration::from_millis(1100)); // another second for change times
    assert!(run("cp", &["-a", tree.to_str().unwrap(), copy.to_str().unwrap()]).status.success());
    tar_of(&tree, &tar);

    let catalog = Catalog::open(dir.path()).unwrap();
    let first = catalog.import("one", &Source::Dir(tree.clone()), &mut quiet()).unwrap();
    let second = catalog.import("two", &Source::Dir(copy), &mut quiet()).unwrap();
    let third = catalog.import("three:1", &Source::Tar(tar.clone()), &mut quiet()).unwrap();
    assert_eq!(first.digest, second.digest);
    assert_eq!(first.digest, third.digest);
    assert_eq!(
        catalog.list().unwrap().iter().map(|i| i.name.as_str()).collect::<Vec<_>>(),
        ["one", "three:1", "two"]
    );
    catalog.verify(&first).unwrap();

    for (packer, end) in [("gzip", "gz"), ("xz", "xz"), ("zstd", "zst")] {
        if !found(packer) {
            continue;
        }
        let packed = dir.path().join(format!("tree.tar.{end}"));
        let out = fs::File::create(&packed).unwrap();
        assert!(Command::new(packer).arg("-c").arg(&tar).stdout(out).status().unwrap().success());
        assert_eq!(
            catalog.import(end, &Source::Tar(packed), &mut quiet()).unwrap().digest,
            first.digest,
            "{packer}"
        );
    }

    fs::write(tree.join("etc/marker"), "another-content").unwrap();
    let other = catalog.import("one", &Source::Dir(tree), &mut quiet()).unwrap();
    assert_ne!(other.digest, first.digest);
    assert_eq!(catalog.resolve("one").unwrap().digest, other.digest);
}

#[test]
fn an_image_holds_the_tree_and_nothing_of_its_host() {
    if !have_root("an_image_holds_the_tree_and_nothing_of_its_host") {
        return;
    }
    let dir = tempfile::tempdir().unwrap();
    let tree = dir.path().join("tree");
    fs::create_dir(&tree).unwrap();
    sample_tree(&tree);
    // A file capability as setcap cap_net_raw+ep writes it.
    let capability = [1, 0, 0, 2, 0, 0x20, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0];
    let capable = xattr::set(tree.join("usr/bin/busybox"), "security.capability", &capability).is_ok();
    let catalog = Catalog::open(dir.path()).unwrap();
    let image = catalog.import("it", &Source::Dir(tree.clone()), &mut quiet()).unwrap();

    let disk = image.path.to_str().unwrap();
    let check = run("e2fsck", &["-fn", disk]);
    assert!(check.status.success(), "{}", text(&check));
    assert_eq!(image.size_bytes % (64 << 10), 0);
    assert!(image.used_bytes < 24 << 20, "{} bytes for a small tree", image.used_bytes);
    assert_eq!(fs::metadata(&image.path).unwrap().permissions().mode() & 0o7777, 0o444);

    assert!(debugfs(&image.path, "cat /etc/marker").starts_with("marker-content"));
    assert!(debugfs(&image.path, "stat /var/node").contains("Type: character special"));
    assert!(debugfs(&image.path, "stat /var/node").contains("Device major/minor number: 01:03"));
    assert!(debugfs(&image.path, "stat /var/fifo").contains("Type: FIFO"));
    assert!(debugfs(&image.path, "stat /home/hard").contains("Mode:  04755"));
    assert!(debugfs(&image.path, "stat /home/hard").contains("Links: 2"));
    let owned = debugfs(&image.path, "stat \"/home/a dir\"");
    assert!(owned.contains("User:  1234") && owned.contains("Group:  5678"), "{owned}");
    if capable {
        let listed = debugfs(&image.path, "ea_list /usr/bin/busybox");
        assert!(listed.contains("security.capability (20)"), "{listed}");
    }
    for gone in ["/etc/resolv.conf", "/etc/hostname", "/etc/ssh/ssh_host_ed25519_key", "/var/log/syslog"] {
        assert!(debugfs(&image.path, &format!("stat {gone}")).contains("File not found"), "{gone}");
    }
    assert!(debugfs(&image.path, "stat /etc/machine-id").contains("Size: 0"));
    for there in ["/proc", "/sys", "/dev", "/run", "/tmp"] {
        assert!(debugfs(&image.path, &format!("stat {there}")).contains("Type: directory"), "{there}");
    }
    let bytes = fs::read(&image.path).unwrap();
    for secret in
        ["secret-build-host", "192.0.2.77", "5ec2e75ec2e75ec2e75ec2e75ec2e75e", "secret-host-key", "secret-l"]
    {
        assert!(!bytes.windows(secret.len()).any(|window| window == secret.as_bytes()), "{secret}");
    }
    assert!(tree.join("etc/resolv.conf").exists(), "the user's directory is only read");
}

/// An archive with one entry made by hand, so that nothing cleans its path.
struct Evil {
    builder: tar::Builder<Vec<u8>>,
}

impl Evil {
    fn new() -> Self {
        let mut evil = Self { builder: tar::Builder::new(Vec::new()) };
        evil.entry("etc/", tar::EntryType::Directory, "", b"");
        evil
    }

    fn entry(&mut self, path: &str, kind: tar::EntryType, link: &str, data: &[u8]) {
        let mut header = tar::Header::new_ustar();
        header.set_entry_type(kind);
        header.set_mode(0o755);
        header.set_uid(0);
        header.set_gid(0);
        header.set_mtime(1_600_000_000);
        header.set_size(data.len() as u64);
        header.as_mut_bytes()[..path.len()].copy_from_slice(path.as_bytes());
        header.as_mut_bytes()[157..157 + link.len()].copy_from_slice(link.as_bytes());
        header.set_cksum();
        self.builder.append(&header, data).unwrap();
    }

    fn write(self, to: &Path) {
        fs::write(to, self.builder.into_inner().unwrap()).unwrap();
    }
}

#[test]
fn archives_that_reach_outside_are_refused_and_leave_nothing() {
    if !have_root("archives_that_reach_outside_are_refused_and_leave_nothing") {
        return;
    }
    use tar::EntryType::{Link, Regular, Symlink};
    let dir = tempfile::tempdir().unwrap();
    let outside = dir.path().join("outside");
    fs::create_dir(&outside).unwrap();
    fs::write(outside.join("victim"), "untouched").unwrap();
    let (absolute, victim) = (outside.to_str().unwrap().to_owned(), outside.join("victim"));
    let victim = victim.to_str().unwrap().to_owned();
    // From <state>/images/.tmp-x/tree back to <state>.
    type Entries<'a> = Vec<(&'a str, tar::EntryType, &'a str)>;
    let cases: Vec<(&str, Entries<'_>)> = vec![
        ("..", vec![("../../../outside/x", Regular, "")]),
        ("inner ..", vec![("etc/../../../../outside/x", Regular, "")]),
        ("absolute link", vec![("evil", Symlink, &absolute), ("evil/x", Regular, "")]),
        ("climbing link", vec![("evil", Symlink, "../../../outside"), ("evil/x", Regular, "")]),
        ("chain", vec![("a", Symlink, "etc"), ("etc/b", Symlink, "../.."), ("a/b/x", Regular, "")]),
        ("hard link out", vec![("evil", Link, "../../../outside/victim"), ("evil", Regular, "")]),
        ("hard link through link", vec![("l", Symlink, &absolute), ("evil", Link, "l/victim")]),
        ("absolute hard link", vec![("evil", Link, &victim)]),
        ("hard link to directory", vec![("evil", Link, "etc")]),
        ("over a directory", vec![("etc", Regular, "")]),
    ];
    let catalog = Catalog::open(dir.path()).unwrap();
    for (case, entries_of_case) in cases {
        let mut evil = Evil::new();
        for (path, kind, link) in entries_of_case {
            evil.entry(path, kind, link, if kind == Regular { b"evil" } else { b"" });
        }
        let tar = dir.path().join("evil.tar");
        evil.write(&tar);
        let result = catalog.import("evil", &Source::Tar(tar), &mut quiet());
        assert!(matches!(result, Err(Error::BadEntry { .. })), "{case}: {result:?}");
    }
    assert_eq!(fs::read_to_string(outside.join("victim")).unwrap(), "untouched");
    assert_eq!(entries(&outside), ["victim"]);
    assert_eq!(entries(&dir.path().join("images")), ["names"]);

    // A link in the place of a file is replaced, not written through.
    let mut evil = Evil::new();
    evil.entry("etc/file", Symlink, &victim, b"");
    evil.entry("etc/file", Regular, "", b"own");
    let tar = dir.path().join("replace.tar");
    evil.write(&tar);
    let image = catalog.import("replace", &Source::Tar(tar), &mut quiet()).unwrap();
    assert!(debugfs(&image.path, "cat /etc/file").starts_with("own"));
    assert_eq!(fs::read_to_string(outside.join("victim")).unwrap(), "untouched");
}

#[test]
fn what_is_no_root_file_system_is_refused_with_a_reason() {
    if !have_root("what_is_no_root_file_system_is_refused_with_a_reason") {
        return;
    }
    let dir = tempfile::tempdir().unwrap();
    let catalog = Catalog::open(dir.path()).unwrap();
    let refused = |name: &str, bytes: &[u8]| {
        let path = dir.path().join(name);
        fs::write(&path, bytes).unwrap();
        catalog.import("x", &Source::Tar(path), &mut quiet()).unwrap_err().to_string()
    };
    let mut saved = tar::Builder::new(Vec::new());
    let mut header = tar::Header::new_gnu();
    header.set_size(2);
    header.set_mode(0o644);
    header.set_uid(0);
    header.set_gid(0);
    header.set_mtime(0);
    saved.append_data(&mut header, "manifest.json", &b"[]"[..]).unwrap();
    assert!(refused("saved.tar", &saved.into_inner().unwrap()).contains("docker export"));
    assert!(refused("empty.tar", b"").contains("none of the directories"));
    assert!(refused("text.tar", &[b'x'; 2000]).contains("read archive"));
    let gz = refused("cut.tar.gz", &[0x1f, 0x8b, 8, 0, 0, 0, 0, 0, 0, 3, 1]);
    assert!(gz.contains("gzip failed"), "{gz}");
    let own = catalog.import("x", &Source::Dir(dir.path().to_owned()), &mut quiet()).unwrap_err();
    assert!(own.to_string().contains("own state"), "{own}");
    let none = catalog.import("x", &Source::Dir(dir.path().join("none")), &mut quiet()).unwrap_err();
    assert!(none.to_string().contains("none"), "{none}");
    assert!(matches!(
        catalog.import("../x", &Source::Dir("/".into()), &mut quiet()),
        Err(Error::BadName { .. })
    ));
    assert_eq!(entries(&dir.path().join("images")), ["names"]);
}

/// A tree that becomes an image of its own.
fn small(dir: &Path, word: &str) -> Source {
    let tree = dir.join(word);
    // Written once: a second time would give it another modification time, and so make it another tree.
    if !tree.exists() {
        fs::create_dir_all(tree.join("etc")).unwrap();
        fs::write(tree.join("etc/word"), word).unwrap();
    }
    Source::Dir(tree)
}

#[test]
fn images_are_found_by_name_and_digest_and_removed_only_when_unused() {
    if !have_root("images_are_found_by_name_and_digest_and_removed_only_when_unused") {
        return;
    }
    let dir = tempfile::tempdir().unwrap();
    let catalog = Catalog::open(dir.path()).unwrap();
    let error = catalog.resolve("debian").unwrap_err().to_string();
    assert!(error.contains("torpor image build debian") && error.contains("catalog is empty"), "{error}");

    let image = catalog.import("a", &small(dir.path(), "a"), &mut quiet()).unwrap();
    catalog.import("alias", &small(dir.path(), "a"), &mut quiet()).unwrap();
    catalog.import("b", &small(dir.path(), "b"), &mut quiet()).unwrap();
    assert_eq!(catalog.resolve(&image.digest).unwrap().digest, image.digest);
    assert_eq!(catalog.resolve(&image.digest[7..19]).unwrap().digest, image.digest);
    assert!(catalog.resolve("none").unwrap_err().to_string().contains("there are: a, alias, b"));

    let used = |digest: &str| if digest == image.digest { 3 } else { 0 };
    assert_eq!(catalog.remove("alias", &used).unwrap(), 0, "another name is left");
    let refused = catalog.remove("a", &used).unwrap_err();
    assert!(matches!(&refused, Error::InUse { count: 3, .. }), "{refused}");
    assert!(matches!(catalog.remove(&image.digest, &used), Err(Error::InUse { .. })));
    assert!(catalog.resolve("a").is_ok());
    assert!(catalog.remove("a", &|_| 0).unwrap() > 0);
    assert!(matches!(catalog.resolve("a"), Err(Error::UnknownImage { .. })));
    assert!(!image.path.exists());
    assert_eq!(entries(&dir.path().join("images")).len(), 2);
}

#[test]
fn two_imports_of_one_tree_at_the_same_time_both_succeed() {
    if !have_root("two_imports_of_one_tree_at_the_same_time_both_succeed") {
        return;
    }
    let dir = tempfile::tempdir().unwrap();
    let catalog = Catalog::open(dir.path()).unwrap();
    let source = small(dir.path(), "a");
    let import = |name| catalog.import(name, &source, &mut quiet()).unwrap().digest;
    let (one, two) = std::thread::scope(|scope| {
        let other = scope.spawn(|| import("two"));
        (import("one"), other.join().unwrap())
    });
    assert_eq!(one, two);
    assert_eq!(entries(&dir.path().join("images")), [&one[7..], "names"]);
}

#[test]
fn damage_is_reported_and_not_served() {
    if !have_root("damage_is_reported_and_not_served") {
        return;
    }
    let dir = tempfile::tempdir().unwrap();
    let catalog = Catalog::open(dir.path()).unwrap();
    let image = catalog.import("a", &small(dir.path(), "a"), &mut quiet()).unwrap();
    let mut file = fs::File::options().write(true).open(&image.path).unwrap();
    file.write_all(b"x").unwrap();
    assert!(matches!(catalog.verify(&image), Err(Error::Broken { .. })));
    file.set_len(4096).unwrap();
    assert!(matches!(catalog.resolve("a"), Err(Error::Broken { .. })));
    fs::remove_dir_all(image.path.parent().unwrap()).unwrap();
    let error = catalog.resolve("a").unwrap_err().to_string();
    assert!(error.contains("torpor image rm a"), "{error}");
    assert!(catalog.list().unwrap().is_empty());
    assert_eq!(catalog.remove("a", &|_| 0).unwrap(), 0);
}

/// A stand-in for mmdebstrap that does `script` with the target directory in `$tree`.
fn fake_builder(dir: &Path, script: &str) -> PathBuf {
    let bin = dir.join("bin");
    fs::create_dir_all(&bin).unwrap();
    let path = bin.join("mmdebstrap");
    let find_tree = "while [ \"$1\" != -- ]; do shift; done; tree=$3; mkdir -p \"$tree/etc\"; ";
    fs::write(&path, format!("#!/bin/sh\n{find_tree}\n{script}\n")).unwrap();
    fs::set_permissions(&path, fs::Permissions::from_mode(0o755)).unwrap();
    bin
}

/// Not a test by itself: what [`start_build`] runs in a process of its own, with a PATH of its own.
#[test]
fn build_in_a_process_of_its_own() {
    let Ok(state) = std::env::var("TORPOR_TEST_STATE") else { return };
    let catalog = Catalog::open(Path::new(&state)).unwrap();
    match catalog
        .build_debian("debian", &[], &mut |progress| println!("{}: {}", progress.step, progress.detail))
    {
        Ok(image) => println!("BUILT {}", image.digest),
        Err(error) => println!("FAILED {error}"),
    }
}

fn start_build(state: &Path, bin: &Path) -> std::process::Child {
    let path = format!("{}:{}", bin.display(), std::env::var("PATH").unwrap_or_default());
    Command::new(std::env::current_exe().unwrap())
        .args(["--exact", "build_in_a_process_of_its_own", "--nocapture"])
        .env("PATH", path)
        .env("TORPOR_TEST_STATE", state)
        .stdout(Stdio::piped())
        .spawn()
        .unwrap()
}

#[test]
fn a_builder_that_fails_midway_leaves_nothing_and_the_next_one_builds() {
    if !have_root("a_builder_that_fails_midway_leaves_nothing_and_the_next_one_builds") {
        return;
    }
    let dir = tempfile::tempdir().unwrap();
    let state = dir.path().join("state");
    let bin = fake_builder(dir.path(), "echo 'E: mirror went away' >&2; exit 25");
    let said = text(&start_build(&state, &bin).wait_with_output().unwrap());
    assert!(said.contains("FAILED mmdebstrap failed") && said.contains("mirror went away"), "{said}");
    assert_eq!(entries(&state.join("images")), ["names"]);

    let bin = fake_builder(
        dir.path(),
        "echo nameserver 192.0.2.1 > $tree/etc/resolv.conf; echo word > $tree/etc/word",
    );
    let said = text(&start_build(&state, &bin).wait_with_output().unwrap());
    assert!(said.contains("BUILT sha256:"), "{said}");
    let image = Catalog::open(&state).unwrap().resolve("debian").unwrap();
    assert!(debugfs(&image.path, "cat /etc/word").starts_with("word"));
    assert!(debugfs(&image.path, "stat /etc/resolv.conf").contains("File not found"));
}

#[test]
fn what_a_killed_build_left_is_swept_once_its_programs_are_gone() {
    if !have_root("what_a_killed_build_left_is_swept_once_its_programs_are_gone") {
        return;
    }
    let dir = tempfile::tempdir().unwrap();
    let state = dir.path().join("state");
    let pid_file = dir.path().join("pid");
    let bin = fake_builder(
        dir.path(),
        &format!("echo $$ > {0}.new; mv {0}.new {0}; exec sleep 120", pid_file.display()),
    );
    let mut build = start_build(&state, &bin);
    let until = Instant::now() + Duration::from_secs(60);
    while !pid_file.exists() {
        assert!(Instant::now() < until, "the builder never started");
        std::thread::sleep(Duration::from_millis(20));
    }
    build.kill().unwrap();
    build.wait().unwrap();

    let left = |state: &Path| entries(&state.join("images")).iter().any(|name| name.starts_with(".tmp-"));
    Catalog::open(&state).unwrap();
    let kept_while_running = left(&state);
    let pid: i32 = fs::read_to_string(&pid_file).unwrap().trim().parse().unwrap();
    nix::sys::signal::kill(nix::unistd::Pid::from_raw(pid), nix::sys::signal::Signal::SIGKILL).unwrap();
    assert!(kept_while_running, "a builder still worked there");
    while left(&state) {
        assert!(Instant::now() < until, "the leftover was never swept");
        std::thread::sleep(Duration::from_millis(20));
        Catalog::open(&state).unwrap();
    }
    assert!(Catalog::open(&state).unwrap().list().unwrap().is_empty());
}
