//! A real torpor-vmm process, its control socket and its files.

use std::fs::{self, File};
use std::io::{BufRead as _, BufReader, Write as _};
use std::os::unix::net::UnixStream;
use std::path::PathBuf;
use std::process::{Child, Command, ExitStatus, Stdio};
use std::time::{Duration, Instant};

use serde_json::{Value, json};
use torpor_vmm_api::{EndFile, Reply, Request};

/// Nothing here takes as long.
const PATIENCE: Duration = Duration::from_secs(20);

/// Whether the test's need is there: says why not, or panics where it must be.
pub fn has(test: &str, need: &str) -> bool {
    let there = match need {
        "kvm" => File::options().read(true).write(true).open("/dev/kvm").is_ok(),
        "root" => nix::unistd::geteuid().is_root(),
        program => Command::new(program).arg("--version").output().is_ok(),
    };
    let required = std::env::var("REQUIRE").unwrap_or_default();
    let word = if matches!(need, "kvm" | "root") { need } else { "tools" };
    assert!(there || !required.split(',').any(|one| one == word), "{test} needs {need}");
    if !there {
        let _ =
            std::io::Write::write_fmt(&mut std::io::stderr(), format_args!("SKIP {test}: needs {need}\n"));
    }
    there
}

/// A VM that is about to be started.
pub struct Setup {
    pub folder: tempfile::TempDir,
    pub config: Value,
}

impl Setup {
    /// One CPU, 4 MiB, control socket and end file, not confined.
    pub fn new(kernel: &[u8]) -> Self {
        let folder = tempfile::tempdir().unwrap();
        let path = |name: &str| folder.path().join(name);
        fs::write(path("kernel"), kernel).unwrap();
        let config = json!({
            "cpus": 1, "memory_bytes": 4 << 20, "command_line": "",
            "kernel": {"path": path("kernel")},
            "console": {"path": path("console")},
            "control": path("control"),
            "end": {"path": path("end")},
        });
        Self { folder, config }
    }

    pub fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    pub fn command(&self) -> Command {
        fs::write(self.path("config"), self.config.to_string()).unwrap();
        let mut command = Command::new(env!("CARGO_BIN_EXE_torpor-vmm"));
        command.args(["-name", "torpor-test-run-1", "--config"]).arg(self.path("config"));
        command
    }

    pub fn start(self) -> Vm {
        let command = self.command();
        self.start_as(command)
    }

    /// By another command than [`Setup::command`].
    pub fn start_as(self, mut command: Command) -> Vm {
        let log = File::create(self.path("log")).unwrap();
        let child = command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(log).spawn().unwrap();
        Vm { setup: self, child }
    }
}

/// A running one; killed when the test forgets it.
pub struct Vm {
    pub setup: Setup,
    pub child: Child,
}

impl Vm {
    pub fn pid(&self) -> nix::unistd::Pid {
        nix::unistd::Pid::from_raw(self.child.id() as i32)
    }

    pub fn log(&self) -> String {
        fs::read_to_string(self.setup.path("log")).unwrap()
    }

    /// Connects, as soon as there is a socket.
    pub fn control(&mut self) -> Control {
        let path = self.setup.path("control");
        let stream = until("the control socket", || {
            if let Some(status) = self.child.try_wait().unwrap() {
                panic!("it ended ({status}): {}", fs::read_to_string(self.setup.path("log")).unwrap());
            }
            UnixStream::connect(&path).ok()
        });
        Control::new(stream)
    }

    /// Waits until the console holds the text.
    pub fn console(&self, text: &str) {
        let path = self.setup.path("console");
        until(text, || {
            let bytes = fs::read(&path).unwrap_or_default();
            bytes.windows(text.len()).any(|window| window == text.as_bytes()).then_some(())
        });
    }

    /// Waits for its end.
    pub fn ended(&mut self) -> ExitStatus {
        until("its end", || self.child.try_wait().unwrap())
    }

    pub fn end_file(&self) -> Option<EndFile> {
        let text = fs::read_to_string(self.setup.path("end")).ok().filter(|text| !text.is_empty())?;
        assert!(text.ends_with('\n'), "{text}");
        Some(serde_json::from_str(&text).unwrap())
    }
}

impl Drop for Vm {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Waits until something is there.
pub fn until<T>(what: &str, mut look: impl FnMut() -> Option<T>) -> T {
    let end = Instant::now() + PATIENCE;
    loop {
        if let Some(found) = look() {
            return found;
        }
        assert!(Instant::now() < end, "waited in vain for {what}");
        std::thread::sleep(Duration::from_millis(5));
    }
}

/// A client of the control socket.
pub struct Control {
    pub stream: UnixStream,
    pub lines: BufReader<UnixStream>,
}

impl Control {
    pub fn new(stream: UnixStream) -> Self {
        stream.set_read_timeout(Some(PATIENCE)).unwrap();
        Self { lines: BufReader::new(stream.try_clone().unwrap()), stream }
    }

    pub fn ask(&mut self, request: &Request) -> Reply {
        self.stream.write_all(format!("{}\n", serde_json::to_string(request).unwrap()).as_bytes()).unwrap();
        self.next().unwrap()
    }

    /// As [`Control::ask`], where the other side may have closed.
    pub fn ask_gently(&mut self, request: &Request) -> Option<Reply> {
        let _ = self.stream.write_all(format!("{}\n", serde_json::to_string(request).unwrap()).as_bytes());
        self.next()
    }

    /// The next line; none when the other side has closed.
    pub fn next(&mut self) -> Option<Reply> {
        let mut line = String::new();
        match self.lines.read_line(&mut line) {
            Ok(0) => None,
            Ok(_) => Some(serde_json::from_str(&line).unwrap()),
            Err(error) if error.kind() == std::io::ErrorKind::ConnectionReset => None,
            Err(error) => panic!("{error}"),
        }
    }
}
