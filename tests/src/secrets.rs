//! Looks for secrets in places where none may be.

use std::{
    collections::{BTreeMap, BTreeSet},
    fs,
    hash::{BuildHasher as _, RandomState},
    io::{Read as _, Write as _},
    net::TcpStream,
    os::unix::fs::PermissionsExt as _,
    path::{Path, PathBuf},
    process::Command,
    time::Duration,
};

/// Secrets by what they are, and where else than nowhere they may lie at rest: the ends of paths.
#[derive(Default)]
pub struct Secrets(BTreeMap<String, (String, Vec<&'static str>)>);

/// A text that is nowhere else.
pub fn mark(what: &str) -> String {
    let random = || RandomState::new().hash_one(what);
    format!("mark-{what}-{:016x}{:016x}", random(), random())
}

impl Secrets {
    /// A new secret that may lie in these files and nowhere else.
    pub fn new_one(&mut self, what: &str, places: &[&'static str]) -> String {
        let secret = mark(what);
        self.add(what, &secret, places);
        secret
    }

    /// One that somebody else has made.
    pub fn add(&mut self, what: &str, secret: &str, places: &[&'static str]) {
        assert!(secret.len() > 24, "'{secret}' may be anywhere by chance");
        self.0.insert(what.to_owned(), (secret.to_owned(), places.to_vec()));
    }

    /// What is in a text that no secret may be in.
    pub fn in_text(&self, text: &str) -> Vec<String> {
        self.0
            .iter()
            .filter(|(_, (secret, _))| text.contains(secret.as_str()))
            .map(|(what, _)| what.clone())
            .collect()
    }

    /// Fails when a text holds a secret.
    pub fn not_in(&self, place: &str, text: &str) {
        let found = self.in_text(text);
        assert!(found.is_empty(), "{place} holds {found:?}");
    }

    /// Which secrets are in the arguments or the environment of a process of this machine, but for this one.
    pub fn in_processes(&self) -> BTreeSet<String> {
        let mut found = BTreeSet::new();
        for entry in fs::read_dir("/proc").unwrap().flatten() {
            let name = entry.file_name().to_string_lossy().into_owned();
            if name.parse::<u32>().is_err() || name == std::process::id().to_string() {
                continue;
            }
            for file in ["cmdline", "environ"] {
                let text = fs::read(entry.path().join(file)).unwrap_or_default();
                let text = String::from_utf8_lossy(&text);
                found.extend(self.in_text(&text).into_iter().map(|what| format!("{what}: {file} of {name}")));
            }
        }
        found
    }

    /// Which secrets lie in files below `folder`, and which of these files are where they may be.
    pub fn in_files(&self, folder: &Path) -> (BTreeSet<String>, BTreeSet<PathBuf>) {
        let (mut wrong, mut right) = (BTreeSet::new(), BTreeSet::new());
        for (what, (secret, places)) in &self.0 {
            for path in holding(folder, secret) {
                if places.iter().any(|place| path.ends_with(place)) {
                    right.insert(path);
                } else {
                    wrong.insert(format!("{what}: {}", path.display()));
                }
            }
        }
        (wrong, right)
    }
}

/// Files below a folder that hold a text, whatever else they hold.
pub fn holding(folder: &Path, text: &str) -> Vec<PathBuf> {
    let pattern = tempfile::NamedTempFile::new().unwrap();
    fs::write(pattern.path(), text).unwrap();
    let mut grep = Command::new("grep");
    grep.args([
        "--recursive",
        "--text",
        "--fixed-strings",
        "--files-with-matches",
        "--devices=skip",
        "--file",
    ]);
    let output = grep.arg(pattern.path()).arg(folder).env("LC_ALL", "C").output().unwrap();
    assert!(output.status.code().is_some_and(|code| code < 2), "{output:?}");
    String::from_utf8(output.stdout).unwrap().lines().map(PathBuf::from).collect()
}

/// Whether nobody but its owner can get at a file below `root`: by its own mode, or by that of a folder on the way.
pub fn is_private(root: &Path, path: &Path) -> bool {
    let closed = |path: &Path, bits: u32| fs::metadata(path).unwrap().permissions().mode() & bits == 0;
    closed(path, 0o077)
        || path.ancestors().skip(1).take_while(|a| a.starts_with(root)).any(|a| closed(a, 0o011))
}

/// One request in HTTP/1.1 and its answer as it came, until the end or until it holds `enough`.
pub fn http(
    address: &str,
    request: &str,
    headers: &[(&str, &str)],
    body: &str,
    enough: Option<&str>,
) -> (u16, String, TcpStream) {
    let mut stream = TcpStream::connect(address).unwrap();
    stream.set_read_timeout(Some(Duration::from_secs(60))).unwrap();
    let mut text = format!("{request} HTTP/1.1\r\nHost: {address}\r\nConnection: close\r\n");
    for (name, value) in headers {
        text.push_str(&format!("{name}: {value}\r\n"));
    }
    text.push_str(&format!("Content-Type: application/json\r\nContent-Length: {}\r\n\r\n{body}", body.len()));
    stream.write_all(text.as_bytes()).unwrap();
    let (mut answer, mut buffer) = (Vec::new(), [0; 8192]);
    loop {
        let count = stream.read(&mut buffer).unwrap();
        answer.extend_from_slice(&buffer[..count]);
        let so_far = String::from_utf8_lossy(&answer);
        if count == 0 || enough.is_some_and(|enough| so_far.contains(enough)) {
            let status = so_far.split(' ').nth(1).and_then(|code| code.parse().ok());
            return (status.unwrap_or_default(), so_far.into_owned(), stream);
        }
    }
}
