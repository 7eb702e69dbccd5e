//! Real container engines for tests: tests/engines/engine runs one apart from the host's own, for as long as its input is
//! open.

use std::{
    fs,
    io::{BufRead as _, BufReader, Read as _, Write as _},
    os::unix::net::UnixStream,
    path::{Path, PathBuf},
    process::{Child, ChildStdin, ChildStdout, Command, Stdio},
    sync::Mutex,
    time::{Duration, Instant},
};

use serde_json::Value;

use crate::{need, path_variable};

/// Longest that an engine may take to answer.
const ANSWER: Duration = Duration::from_secs(60);

/// An engine of the test's own, to its drop or to the end of the program.
pub struct Engine {
    /// "docker", "podman" or "rootless": podman of a user without rights.
    pub name: &'static str,
    /// Where it has the program that makes checkpoints.
    pub criu: Option<PathBuf>,
    folder: PathBuf,
    control: Mutex<Option<(ChildStdin, BufReader<ChildStdout>)>>,
    process: Mutex<Child>,
}

/// Whether this machine can run an engine of this name for `test`.
pub fn can_run(test: &str, name: &str) -> bool {
    let found = |tool: &str| std::env::split_paths(&path_variable()).any(|dir| dir.join(tool).is_file());
    let program = if name == "docker" { "dockerd" } else { name };
    let missing = [program, "runc", "curl", "busybox"].into_iter().find(|tool| !found(tool));
    let reason = missing.map(|tool| format!("{tool} is not installed")).unwrap_or_default();
    need(test, "root", nix::unistd::geteuid().is_root(), "not root")
        && need(test, "root", missing.is_none(), &reason)
}

/// The folder of a program criu that works here, for `test`: TORPOR_TEST_CRIU, which ./check sets where it can be had.
pub fn criu(test: &str) -> Option<PathBuf> {
    let folder = std::env::var_os("TORPOR_TEST_CRIU").map(PathBuf::from);
    let folder = folder.filter(|folder| folder.join("criu").is_file());
    let reason = "needs TORPOR_TEST_CRIU=FOLDER of a program criu that passes its check";
    need(test, "criu", folder.is_some(), reason).then_some(folder).flatten()
}

/// Whether this machine can run podman of a user without rights for `test`.
pub fn can_run_rootless(test: &str) -> bool {
    let found = |tool: &str| std::env::split_paths(&path_variable()).any(|dir| dir.join(tool).is_file());
    let missing = ["newuidmap", "slirp4netns", "setpriv", "unshare"].into_iter().find(|tool| !found(tool));
    let missing = missing.map(|tool| format!("{tool} is not installed"));
    let user =
        ["--reuid=65123", "--regid=65123", "--clear-groups", "unshare", "--user", "--map-root-user", "true"];
    let may = || Command::new("setpriv").args(user).status().is_ok_and(|status| status.success());
    can_run(test, "podman")
        && need(test, "rootless", missing.is_none(), missing.as_deref().unwrap_or_default())
        && need(test, "rootless", may(), "users without rights make no namespaces here")
}

impl Engine {
    /// The engine's folder: of its socket, its log and its files.
    pub fn folder(&self) -> &Path {
        &self.folder
    }

    /// Starts one.
    pub fn start(name: &'static str) -> Self {
        Self::start_with(name, None)
    }

    /// Starts one that makes checkpoints with the program criu of this folder.
    pub fn start_with(name: &'static str, criu: Option<&Path>) -> Self {
        let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("engines/engine");
        let mut command = Command::new(script);
        let mut process =
            command.arg(name).args(criu).stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap();
        let input = process.stdin.take().unwrap();
        let mut output = BufReader::new(process.stdout.take().unwrap());
        let mut line = String::new();
        output.read_line(&mut line).unwrap();
        let folder = line.trim().strip_prefix("ready ").unwrap_or_else(|| panic!("{name}: {line}"));
        let folder = PathBuf::from(folder);
        let criu = criu.map(Path::to_owned);
        Self { name, criu, folder, control: Mutex::new(Some((input, output))), process: Mutex::new(process) }
    }

    /// Where its API listens.
    pub fn socket(&self) -> PathBuf {
        self.folder.join(if self.name == "rootless" { "xdg/podman/podman.sock" } else { "sock" })
    }

    /// What its log says.
    pub fn log(&self) -> String {
        fs::read_to_string(self.folder.join("log")).unwrap_or_default()
    }

    /// "kill" (a loss of power), "term" or "start".
    pub fn tell(&self, word: &str) {
        let mut control = self.control.lock().unwrap();
        let (input, output) = control.as_mut().unwrap();
        writeln!(input, "{word}").unwrap();
        let mut line = String::new();
        output.read_line(&mut line).unwrap();
        assert_eq!(line, "ok\n", "{word}\n{}", self.log());
    }

    /// What anybody else would ask of it: status and body.
    pub fn ask(&self, method: &str, path: &str) -> (u16, Value) {
        let mut stream = UnixStream::connect(self.socket()).unwrap();
        stream.set_read_timeout(Some(ANSWER)).unwrap();
        // In this version of HTTP an answer ends with its connection.
        write!(stream, "{method} /v1.41{path} HTTP/1.0\r\nHost: x\r\nContent-Length: 0\r\n\r\n").unwrap();
        let mut answer = Vec::new();
        stream.read_to_end(&mut answer).unwrap();
        let text = String::from_utf8_lossy(&answer);
        let status = text.split(' ').nth(1).and_then(|code| code.parse().ok());
        let body = text.split_once("\r\n\r\n").map_or("", |(_, body)| body);
        (status.unwrap_or_else(|| panic!("{text}")), serde_json::from_str(body).unwrap_or(Value::Null))
    }

    /// Does something to the container of a sandbox, from outside: "kill", "pause", "stop?t=5".
    pub fn container(&self, id: &str, what: &str) {
        let (status, body) = self.ask("POST", &format!("/containers/torpor-{id}/{what}"));
        assert!(status < 400, "{what}: {status} {body}");
    }

    /// The container of a sandbox as the engine shows it; null when it has none.
    pub fn inspect(&self, id: &str) -> Value {
        let (status, body) = self.ask("GET", &format!("/containers/torpor-{id}/json"));
        if status == 404 { Value::Null } else { body }
    }

    /// The files of the checkpoints of a container.
    pub fn checkpoint_files(&self, container: &str) -> Vec<PathBuf> {
        let below = match self.name {
            "docker" => format!("data/containers/{container}/checkpoints"),
            _ => format!("data/overlay-containers/{container}/userdata/checkpoint"),
        };
        let (mut folders, mut files) = (vec![self.folder.join(below)], Vec::new());
        while let Some(folder) = folders.pop() {
            for entry in fs::read_dir(&folder).into_iter().flatten().flatten() {
                let path = entry.path();
                if path.is_dir() { folders.push(path) } else { files.push(path) }
            }
        }
        files
    }

    /// Removes the container of a sandbox, from outside.
    pub fn remove(&self, id: &str) {
        let (status, body) = self.ask("DELETE", &format!("/containers/torpor-{id}?force=true&v=true"));
        assert!(status < 400 || status == 404, "{status} {body}");
    }

    /// What a container at rest still holds, in words.
    pub fn held(&self, id: &str) -> Vec<String> {
        let seen = self.inspect(id);
        let state = &seen["State"];
        let mut held = Vec::new();
        let pid = state["Pid"].as_i64().unwrap_or_default() != 0;
        if state["Running"] == true || (pid && !self.is_checkpointed(id)) {
            held.push(format!("a process: {state}"));
        }
        // Of a container that it lost, Docker shows the old address until the next start; it has it no more.
        let lost = state["ExitCode"] == 255;
        for end in seen["NetworkSettings"]["Networks"].as_object().into_iter().flat_map(|all| all.values()) {
            if !lost && end["IPAddress"] != "" {
                held.push(format!("an address: {end}"));
            }
        }
        held
    }

    /// Of a container that it has written out, Podman goes on showing the process, and says so elsewhere.
    fn is_checkpointed(&self, id: &str) -> bool {
        let (_, seen) = self.ask("GET", &format!("/libpod/containers/torpor-{id}/json"));
        seen["State"]["Checkpointed"] == true && seen["State"]["Running"] == false
    }

    /// Processes and mounts on this host that are about the container of a sandbox: what engines leave when they forget
    /// something. Monitors take a moment to go.
    pub fn traces(&self, id: &str) -> Vec<String> {
        let seen = self.inspect(id);
        let container = seen["Id"].as_str().unwrap_or_else(|| panic!("{id} has no container")).to_owned();
        let layer = seen["GraphDriver"]["Data"]["UpperDir"].as_str().unwrap_or_default();
        let layer = layer.trim_end_matches("/diff").to_owned();
        let end = Instant::now() + ANSWER;
        loop {
            let found = self.look(&container, &layer);
            if found.is_empty() || Instant::now() > end {
                return found;
            }
            std::thread::sleep(Duration::from_millis(100));
        }
    }

    /// The same at this moment, of a container and its layer.
    pub fn look(&self, container: &str, layer: &str) -> Vec<String> {
        let mut found = Vec::new();
        let own = self.folder.to_string_lossy().into_owned();
        for entry in fs::read_dir("/proc").unwrap().flatten() {
            let line = fs::read(entry.path().join("cmdline")).unwrap_or_default();
            let line = String::from_utf8_lossy(&line).replace('\0', " ");
            if line.contains(container) {
                found.push(line);
                continue;
            }
            let engine = line.starts_with("dockerd ") || line.starts_with("podman ");
            if engine && line.contains(&own) {
                let mounts = fs::read_to_string(entry.path().join("mountinfo")).unwrap_or_default();
                let about =
                    |line: &&str| line.contains(container) || (!layer.is_empty() && line.contains(layer));
                found.extend(mounts.lines().filter(about).map(str::to_owned));
            }
        }
        found
    }
}

impl Drop for Engine {
    fn drop(&mut self) {
        // The end of its input is its end.
        drop(self.control.lock().ok().and_then(|mut control| control.take()));
        if let Ok(mut process) = self.process.lock() {
            let _ = process.wait();
        }
    }
}
