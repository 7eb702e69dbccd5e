//! `torpor exec` without a terminal.

use std::{
    fs,
    io::{BufRead as _, BufReader, Read as _, Write as _},
    process::{Child, Command, Stdio},
    sync::atomic::Ordering,
    thread,
    time::Duration,
};

use nix::{
    sys::signal::{Signal, kill},
    unistd::Pid,
};
use tonic::Code;

use crate::{
    fake::{Fake, Finished, refusal},
    services::pattern,
};

/// More anonymous memory than this of a client that streams is not flat. Bytes.
const FLAT: u64 = 32 << 20;

fn spawn(mut command: Command) -> Child {
    command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap()
}

/// Anonymous resident memory of a process, bytes.
fn anonymous(pid: u32) -> u64 {
    let status = fs::read_to_string(format!("/proc/{pid}/status")).unwrap_or_default();
    let line = status.lines().find_map(|l| l.strip_prefix("RssAnon:")).unwrap_or("0 kB");
    line.trim().trim_end_matches(" kB").parse::<u64>().unwrap() << 10
}

#[test]
fn output_and_exit_code_of_the_command_are_ours() {
    let fake = Fake::start();
    let done = fake.run(&["exec", "web", "--", "both", "7"]);
    assert_eq!((done.code, done.stdout.as_str(), done.stderr.as_str()), (7, "out\n", "err\n"));
    let done = fake.run(&[
        "exec",
        "-e",
        "A=1",
        "-w",
        "/srv",
        "-u",
        "app",
        "--timeout",
        "3s",
        "web",
        "--",
        "echo",
        "-i",
    ]);
    assert_eq!((done.code, done.stdout.as_str()), (0, "-i\n"));
    let start = fake.state.started.lock().unwrap().clone().unwrap();
    assert_eq!(
        (start.environment["A"].as_str(), start.workdir.as_str(), start.user.as_str()),
        ("1", "/srv", "app")
    );
    assert!(!start.stdin && !start.tty && start.size.is_none());
    assert_eq!(start.timeout.unwrap().seconds, 3);
}

#[test]
fn signals_and_timeouts_of_the_command_are_told() {
    let fake = Fake::start();
    let done = fake.run(&["exec", "web", "--", "killed"]);
    assert_eq!((done.code, done.stderr.as_str()), (137, "the command was killed by signal 9\n"));
    let done = fake.run(&["exec", "web", "--", "overtime"]);
    assert_eq!((done.code, done.stderr.as_str()), (124, "the command ran out of time and was ended\n"));
    assert_eq!(fake.run(&["-q", "exec", "web", "--", "killed"]).stderr, "");
}

#[test]
fn standard_input_is_never_read_without_i() {
    let fake = Fake::start();
    let mut command = fake.torpor(&["exec", "web", "--", "echo", "hi"]);
    let (reader, mut writer) = std::io::pipe().unwrap();
    command.stdin(reader.try_clone().unwrap());
    writer.write_all(b"for somebody else").unwrap();
    let child = spawn(command);
    // The pipe stays open: who waits for its end waits for ever.
    let done = Finished::from(child.wait_with_output().unwrap());
    assert_eq!((done.code, done.stdout.as_str()), (0, "hi\n"));
    drop(writer);
    let mut left = String::new();
    { reader }.read_to_string(&mut left).unwrap();
    assert_eq!(left, "for somebody else");
}

#[test]
fn with_i_input_and_its_end_reach_the_command() {
    let fake = Fake::start();
    let mut command = fake.torpor(&["exec", "-i", "web", "--", "cat"]);
    command.stdin(Stdio::piped());
    let mut child = spawn(command);
    let sent = pattern(0, 3 << 20);
    let mut stdin = child.stdin.take().unwrap();
    let writing = thread::spawn({
        let sent = sent.clone();
        move || stdin.write_all(&sent).unwrap()
    });
    let output = child.wait_with_output().unwrap();
    writing.join().unwrap();
    assert_eq!(output.status.code(), Some(0));
    assert!(output.stdout == sent, "{} bytes came back of {}", output.stdout.len(), sent.len());
}

#[test]
fn with_i_a_command_that_ends_is_not_held_up_by_open_input() {
    let fake = Fake::start();
    let mut command = fake.torpor(&["exec", "-i", "web", "--", "echo", "hi"]);
    command.stdin(Stdio::piped());
    let mut child = spawn(command);
    let stdin = child.stdin.take();
    let done = Finished::from(child.wait_with_output().unwrap());
    assert_eq!((done.code, done.stdout.as_str()), (0, "hi\n"));
    drop(stdin);
}

#[test]
fn fifty_megabytes_stream_whole_and_with_flat_memory() {
    const TOTAL: usize = 50 << 20;
    let fake = Fake::start();
    let mut child = spawn(fake.torpor(&["exec", "web", "--", "flood", &TOTAL.to_string()]));
    let mut stdout = child.stdout.take().unwrap();
    let (mut buffer, mut done, mut most) = (vec![0; 256 << 10], 0, 0);
    loop {
        let count = stdout.read(&mut buffer).unwrap();
        if count == 0 {
            break;
        }
        assert!(buffer[..count] == pattern(done, count)[..], "wrong bytes after {done}");
        if done % (1 << 20) < count {
            most = most.max(anonymous(child.id()));
        }
        done += count;
    }
    assert_eq!((done, child.wait().unwrap().code()), (TOTAL, Some(0)));
    assert!(most > 0 && most < FLAT, "{most} bytes of memory");
}

#[test]
fn a_reader_that_pauses_holds_up_the_sender_and_not_our_memory() {
    const TOTAL: usize = 100 << 20;
    let fake = Fake::start();
    let mut child = spawn(fake.torpor(&["exec", "web", "--", "flood", &TOTAL.to_string()]));
    let mut stdout = child.stdout.take().unwrap();
    stdout.read_exact(&mut vec![0; 1 << 20]).unwrap();
    let mut before = u64::MAX;
    // Until the sender stands still.
    while fake.state.sent.load(Ordering::Relaxed) != before {
        before = fake.state.sent.load(Ordering::Relaxed);
        thread::sleep(Duration::from_millis(300));
    }
    assert!(before < TOTAL as u64 / 2, "{before} bytes were sent to a reader that took 1 MiB");
    assert!(anonymous(child.id()) < FLAT);
    // Broken pipe: no message, no waiting for the rest.
    drop(stdout);
    let output = child.wait_with_output().unwrap();
    assert_eq!((output.status.code(), String::from_utf8_lossy(&output.stderr).as_ref()), (Some(141), ""));
}

fn wait_for_line(child: &mut Child) -> BufReader<std::process::ChildStdout> {
    let mut stdout = BufReader::new(child.stdout.take().unwrap());
    let mut line = String::new();
    stdout.read_line(&mut line).unwrap();
    assert_eq!(line, "waiting\n");
    stdout
}

fn send(child: &Child, signal: Signal) {
    kill(Pid::from_raw(child.id().try_into().unwrap()), signal).unwrap();
}

#[test]
fn signals_to_us_are_signals_to_the_command() {
    let fake = Fake::start();
    for (signal, number) in [(Signal::SIGINT, 2), (Signal::SIGTERM, 15), (Signal::SIGHUP, 1)] {
        let mut child = spawn(fake.torpor(&["exec", "web", "--", "signals"]));
        let mut stdout = wait_for_line(&mut child);
        send(&child, signal);
        let mut rest = String::new();
        stdout.read_to_string(&mut rest).unwrap();
        assert_eq!(rest, format!("signal {number}\n"));
        assert_eq!(child.wait().unwrap().code(), Some(128 + number));
    }
}

#[test]
fn the_third_interrupt_ends_us_when_the_command_is_deaf() {
    let fake = Fake::start();
    let mut child = spawn(fake.torpor(&["exec", "web", "--", "deaf"]));
    let _stdout = wait_for_line(&mut child);
    for _ in 0..3 {
        send(&child, Signal::SIGINT);
        // Signals of one kind that come together count once.
        thread::sleep(Duration::from_millis(100));
    }
    assert_eq!(child.wait().unwrap().code(), Some(130));
}

#[test]
fn a_lost_connection_has_a_code_of_its_own_and_shows_what_came_before() {
    let fake = Fake::start();
    let done = fake.run(&["exec", "web", "--", "break"]);
    assert_eq!((done.code, done.stdout.as_str()), (255, "partial\n"));
    assert!(done.stderr.contains("lost") && done.stderr.contains("not known"), "{}", done.stderr);

    let mut fake = fake;
    let mut child = spawn(fake.torpor(&["exec", "web", "--", "deaf"]));
    let _stdout = wait_for_line(&mut child);
    fake.kill();
    assert_eq!(child.wait().unwrap().code(), Some(255));
}

#[test]
fn a_sandbox_that_sleeps_is_refused_with_the_command_to_wake_it() {
    let fake = Fake::start();
    let error =
        refusal(Code::FailedPrecondition, "sandbox 'web' is Suspended", "NOT_READY", "torpor resume web");
    fake.refuse("exec", error);
    let done = fake.run(&["exec", "web", "--", "echo"]);
    assert_eq!(done.code, 4);
    assert_eq!(
        done.stderr,
        "error: sandbox 'web' is Suspended\n  reason  NOT_READY\nnext: torpor resume web\n"
    );
}

#[test]
fn a_command_that_does_not_exist_ends_as_in_a_shell() {
    let fake = Fake::start();
    fake.refuse("exec", refusal(Code::NotFound, "no program 'x'", "COMMAND_NOT_FOUND", ""));
    assert_eq!(fake.run(&["exec", "web", "--", "x"]).code, 127);
    fake.refuse("exec", refusal(Code::InvalidArgument, "not executable", "COMMAND_NOT_EXECUTABLE", ""));
    assert_eq!(fake.run(&["exec", "web", "--", "x"]).code, 126);
}

#[test]
fn a_shell_without_a_terminal_reads_commands_from_its_input() {
    let fake = Fake::start();
    fake.refuse("exec", refusal(Code::NotFound, "no", "NOT_FOUND", ""));
    assert_eq!(fake.run(&["shell", "web"]).code, 3);
    let done = fake.run(&["exec", "-it", "web", "--", "cat"]);
    assert_eq!(done.code, 2, "{}", done.stderr);
}
