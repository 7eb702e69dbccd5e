//! What several test programs share.
#![allow(dead_code)] // each test program uses its part

pub mod model;

use std::path::{Path, PathBuf};
use std::process::{Command, Output};

use torpor_overlay::{BaseIdentity, Block, open, open_read_only, sha256_file};

/// True when qemu-img and qemu-io are there; otherwise says so, or panics when REQUIRE names `tools`.
pub fn qemu_tools(test: &str) -> bool {
    let there = ["qemu-img", "qemu-io"]
        .iter()
        .all(|tool| Command::new(tool).arg("--version").output().is_ok_and(|output| output.status.success()));
    if !there {
        skip(test, "tools", "qemu-img and qemu-io are not installed");
    }
    there
}

/// Prints a skip, or panics when the environment demands the need.
pub fn skip(test: &str, need: &str, why: &str) {
    let required = std::env::var("REQUIRE").unwrap_or_default();
    assert!(!required.split(',').any(|word| word == need), "{test} needs {need}: {why}");
    let _ = std::io::Write::write_fmt(&mut std::io::stderr(), format_args!("SKIP {test}: {why}\n"));
}

/// Runs a command and returns its output; panics with all of it when it fails.
pub fn run(program: &str, arguments: &[&str]) -> String {
    let output = output(program, arguments);
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    let errors = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{program} {arguments:?}: {}\n{text}\n{errors}", output.status);
    text
}

pub fn output(program: &str, arguments: &[&str]) -> Output {
    Command::new(program).args(arguments).output().unwrap()
}

pub fn text(path: &Path) -> &str {
    path.to_str().unwrap()
}

/// `qemu-img check` finds neither damage nor leaks.
pub fn assert_clean(image: &Path) {
    let text = run("qemu-img", &["check", "-f", "qcow2", self::text(image)]);
    assert!(text.contains("No errors were found"), "{text}");
}

/// `qemu-img check` finds no damage; returns whether it found leaks.
pub fn assert_no_corruption(image: &Path) -> bool {
    let output = output("qemu-img", &["check", "-f", "qcow2", text(image)]);
    let code = output.status.code();
    assert!(matches!(code, Some(0 | 3)), "{code:?}: {output:?}");
    code == Some(3)
}

/// A directory with a raw base image in it.
pub struct Bench {
    pub dir: tempfile::TempDir,
    pub base: PathBuf,
    pub identity: BaseIdentity,
}

impl Bench {
    /// A base whose every 512-byte sector tells its own number.
    pub fn new(base_bytes: u64) -> Self {
        Self::with_base(&base_content(base_bytes))
    }

    pub fn with_base(content: &[u8]) -> Self {
        let dir = tempfile::tempdir().unwrap();
        let base = dir.path().join("base.raw");
        std::fs::write(&base, content).unwrap();
        let identity = BaseIdentity { digest: sha256_file(&base).unwrap(), size: content.len() as u64 };
        Self { dir, base, identity }
    }

    pub fn path(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    /// A new overlay of that size.
    pub fn overlay(&self, size: u64) -> PathBuf {
        let path = self.path("overlay.qcow2");
        torpor_overlay::create(&path, &self.base, &self.identity, size).unwrap();
        path
    }
}

/// Bytes that differ from sector to sector and are never zero.
pub fn base_content(bytes: u64) -> Vec<u8> {
    (0..bytes).map(|at| ((at / 512 * 7 + at / 65536) % 255) as u8 + 1).collect()
}

/// Random content in an overlay; returns what it should hold.
pub fn scribble(path: &Path, bases: &[&Path], mut now: Vec<u8>, seed: u64) -> Vec<u8> {
    let disk = open(path, bases).unwrap();
    now.resize(disk.size() as usize, 0);
    let mut model = model::Model::new(now, disk.size());
    let mut random = model::Random::new(seed);
    for _ in 0..60 {
        let operation = model::operation(&mut random, disk.size().min(8 << 20), 512);
        model::perform(&disk, &operation).unwrap();
        model.apply(&operation);
        model.flushed();
    }
    disk.close().unwrap();
    model.now
}

pub fn same(path: &Path, bases: &[&Path], expected: &[u8]) {
    assert!(model::content(&open_read_only(path, bases).unwrap()) == expected);
}
