//! `torpor exec -it` on a pseudo-terminal.

use std::{
    fs::File,
    io::Read as _,
    os::fd::OwnedFd,
    process::{Child, Command},
    time::Duration,
};

use nix::{
    pty::{OpenptyResult, Winsize, openpty},
    sys::{
        signal::{Signal, kill},
        termios::{LocalFlags, tcgetattr},
    },
    unistd::{Pid, write},
};

use crate::fake::Fake;

const SIZE: Winsize = Winsize { ws_row: 31, ws_col: 97, ws_xpixel: 0, ws_ypixel: 0 };

struct Pty {
    master: File,
    slave: OwnedFd,
}

impl Pty {
    fn open() -> Self {
        let OpenptyResult { master, slave } = openpty(Some(&SIZE), None).unwrap();
        Self { master: master.into(), slave }
    }

    fn spawn(&self, mut command: Command) -> Child {
        let end = || self.slave.try_clone().unwrap();
        command.env("TERM", "xterm").stdin(end()).stdout(end()).stderr(end()).spawn().unwrap()
    }

    fn read_until(&mut self, wanted: &str) -> String {
        let (mut text, mut buffer) = (String::new(), [0; 256]);
        while !text.contains(wanted) {
            let count = self.master.read(&mut buffer).unwrap();
            assert!(count > 0, "the terminal ended after {text:?}");
            text.push_str(&String::from_utf8_lossy(&buffer[..count]));
        }
        text
    }

    fn is_raw(&self) -> bool {
        !tcgetattr(&self.slave)
            .unwrap()
            .local_flags
            .intersects(LocalFlags::ICANON | LocalFlags::ECHO | LocalFlags::ISIG)
    }
}

fn pid(child: &Child) -> Pid {
    Pid::from_raw(child.id().try_into().unwrap())
}

#[test]
fn the_first_line_knows_the_size_and_the_terminal_is_given_back() {
    let fake = Fake::start();
    let mut pty = Pty::open();
    let before = tcgetattr(&pty.slave).unwrap();
    let mut child = pty.spawn(fake.torpor(&["exec", "-it", "web", "--", "size"]));
    pty.read_until("97x31\r\n");
    assert!(pty.is_raw());
    kill(pid(&child), Signal::SIGWINCH).unwrap();
    pty.read_until("97x31\r\n");
    write(&pty.master, b"q").unwrap();
    assert_eq!(child.wait().unwrap().code(), Some(0));
    assert_eq!(tcgetattr(&pty.slave).unwrap(), before);
    let start = fake.state.started.lock().unwrap().clone().unwrap();
    assert_eq!((start.environment["TERM"].as_str(), start.tty, start.stdin), ("xterm", true, true));
}

#[test]
fn the_terminal_is_given_back_when_a_signal_or_a_broken_connection_ends_us() {
    let mut fake = Fake::start();
    let mut pty = Pty::open();
    let before = tcgetattr(&pty.slave).unwrap();
    let mut child = pty.spawn(fake.torpor(&["shell", "web"]));
    // The login script is not scripted in the fake: the stream breaks.
    assert_eq!(child.wait().unwrap().code(), Some(255));
    assert_eq!(tcgetattr(&pty.slave).unwrap(), before);
    for end in [Some(Signal::SIGTERM), Some(Signal::SIGHUP), None] {
        let mut child = pty.spawn(fake.torpor(&["exec", "-it", "web", "--", "size"]));
        pty.read_until("97x31\r\n");
        assert!(pty.is_raw());
        let code = match end {
            Some(signal) => {
                kill(pid(&child), signal).unwrap();
                128 + signal as i32
            }
            None => {
                fake.kill();
                255
            }
        };
        assert_eq!(child.wait().unwrap().code(), Some(code), "{end:?}");
        assert_eq!(tcgetattr(&pty.slave).unwrap(), before, "{end:?}");
    }
}

#[test]
fn progress_is_shown_on_a_terminal_only_and_names_the_step() {
    use torpor_sdk::v1::{self, Phase};

    use crate::fake::{at, sandbox};
    let fake = Fake::start();
    fake.put(sandbox("web", Phase::Suspended));
    let step = |text: &str| v1::SandboxStatus { step: text.into(), ..at(Phase::Resuming) };
    fake.plan("resume", vec![step("claiming a slot"), step("booting"), step("booting"), at(Phase::Ready)]);
    let mut pty = Pty::open();
    let mut command = fake.torpor(&["resume", "web"]);
    let end = pty.slave.try_clone().unwrap();
    let output = command.env("TERM", "xterm").stderr(end).output().unwrap();
    assert_eq!(output.stdout, b"web Ready\n");
    std::thread::sleep(Duration::from_millis(50));
    let shown = pty.read_until("booting  ");
    assert!(shown.contains("web: Resuming: "), "{shown:?}");
    fake.put(sandbox("web", Phase::Suspended));
    assert_eq!(fake.run(&["resume", "web"]).stderr, "");
}
