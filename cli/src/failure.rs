//! How a failure is told: on standard error for people, by the exit code for scripts.

use std::{fmt::Write as _, io};

use torpor_sdk::{ApiError, Code, Error, phase, v1};

use crate::output::{clean, clean_block};

pub const FAILED: u8 = 1;
pub const USAGE: u8 = 2;
pub const NOT_FOUND: u8 = 3;
pub const PRECONDITION: u8 = 4;
pub const CONFLICT: u8 = 5;
pub const EXHAUSTED: u8 = 6;
pub const UNAVAILABLE: u8 = 7;
pub const DENIED: u8 = 8;
pub const TIMED_OUT: u8 = 124;
const COMMAND_NOT_EXECUTABLE: u8 = 126;
const COMMAND_NOT_FOUND: u8 = 127;
/// As a shell tells it of a program that SIGPIPE ended.
pub const BROKEN_PIPE: u8 = 141;
/// The outcome of a remote command is not known.
pub const LOST: u8 = 255;

/// Lines of a console that are shown with an error.
const CONSOLE_LINES: usize = 20;

/// Why a command failed.
#[derive(Debug, Default)]
pub struct Failure {
    pub code: u8,
    pub told: Box<Told>,
}

/// What is said about a failure. Boxed: results are passed around much, failures rarely happen.
#[derive(Debug, Default)]
pub struct Told {
    /// Empty: nothing is printed.
    pub message: String,
    pub step: String,
    pub reason: String,
    pub cause: String,
    pub console_tail: String,
    pub next: String,
}

impl Failure {
    pub fn new(code: u8, message: impl Into<String>) -> Self {
        Self { code, told: Box::new(Told { message: message.into(), ..Told::default() }) }
    }

    pub fn usage(message: impl Into<String>) -> Self {
        Self::new(USAGE, message)
    }

    /// Ends the program without a word.
    pub fn silent(code: u8) -> Self {
        Self { code, ..Self::default() }
    }

    /// Prints it to standard error. `about` names the thing when several were asked for.
    pub fn print(&self, about: &str) {
        let told = &self.told;
        if told.message.is_empty() {
            return;
        }
        let about = if about.is_empty() { String::new() } else { format!("{}: ", clean(about)) };
        let mut text = format!("error: {about}{}\n", indented(&told.message));
        for (title, value) in [("step", &told.step), ("reason", &told.reason), ("cause", &told.cause)] {
            if !value.is_empty() {
                let _ = writeln!(text, "  {title:<7} {}", indented(value));
            }
        }
        if !told.console_tail.is_empty() {
            text.push_str("  console:\n");
            let lines: Vec<_> = told.console_tail.lines().collect();
            for line in &lines[lines.len().saturating_sub(CONSOLE_LINES)..] {
                let _ = writeln!(text, "    | {}", clean_block(line));
            }
        }
        if !told.next.is_empty() {
            let _ = writeln!(text, "next: {}", clean(&told.next));
        }
        // Nobody is left to tell when standard error is gone.
        let _ = io::Write::write_all(&mut io::stderr(), text.as_bytes());
    }

    fn with_failure_of(mut self, sandbox: &v1::Sandbox) -> Self {
        if let Some(failure) = sandbox.status.as_ref().and_then(|s| s.failure.clone()) {
            self.told.step = failure.step;
            self.told.reason = failure.reason;
            self.told.cause = failure.message;
            self.told.console_tail = failure.console_tail;
            self.told.next = failure.next;
        }
        self
    }
}

impl From<io::Error> for Failure {
    fn from(error: io::Error) -> Self {
        if error.kind() == io::ErrorKind::BrokenPipe {
            return Self::silent(BROKEN_PIPE);
        }
        Self::new(FAILED, format!("can't write the output: {error}"))
    }
}

impl From<Error> for Failure {
    fn from(error: Error) -> Self {
        let message = error.to_string();
        match error {
            Error::Endpoint { .. } => Self::usage(message),
            Error::Unreachable { kind, .. } => unreachable_gateway(message, kind),
            Error::Lost(_) => Self::new(UNAVAILABLE, message),
            Error::Api(api) => of_api(*api),
            Error::CannotReach { sandbox, .. } => cannot_reach(message, &sandbox),
            Error::Gone { .. } => Self::new(NOT_FOUND, message),
            Error::WaitTimedOut { sandbox, .. } => {
                let failure = Self::new(TIMED_OUT, message);
                match sandbox {
                    Some(sandbox) => failure.with_failure_of(&sandbox),
                    None => failure,
                }
            }
            _ => Self::new(FAILED, message),
        }
    }
}

/// A phase in which it stays. The failure that it may still know of is the reason only where that is Error.
fn cannot_reach(message: String, sandbox: &v1::Sandbox) -> Failure {
    let mut failure = Failure::new(FAILED, message);
    match phase::of(sandbox) {
        v1::Phase::Suspended => failure.told.next = format!("torpor resume {}", sandbox.name),
        v1::Phase::Stopped | v1::Phase::Completed => {
            failure.told.next = format!("torpor start {}", sandbox.name);
        }
        _ => {
            failure = failure.with_failure_of(sandbox);
            failure.code = of_reason(&failure.told.reason);
        }
    }
    failure
}

/// Text of several lines that can't be taken for lines of our own.
fn indented(text: &str) -> String {
    clean_block(text.trim_end()).replace('\n', "\n    ")
}

/// The exit code of a step that failed while it was awaited: the same as if the gateway had answered with it.
fn of_reason(reason: &str) -> u8 {
    match reason {
        "BASE_MISSING" | "BASE_CHANGED" | "DATA_MISSING" | "MEMORY_MISSING" | "LOCKED" | "CORRUPT"
        | "BACKEND_MISSING" | "UNSUPPORTED" => PRECONDITION,
        "INVALID" => USAGE,
        "EXHAUSTED" | "NO_SPACE" => EXHAUSTED,
        _ => FAILED,
    }
}

fn of_api(api: ApiError) -> Failure {
    let code = match api.code {
        Code::InvalidArgument => USAGE,
        Code::NotFound => NOT_FOUND,
        Code::FailedPrecondition | Code::Unimplemented => PRECONDITION,
        Code::Aborted | Code::AlreadyExists => CONFLICT,
        Code::ResourceExhausted => EXHAUSTED,
        Code::Unauthenticated | Code::PermissionDenied => DENIED,
        Code::Unavailable => UNAVAILABLE,
        Code::DeadlineExceeded => TIMED_OUT,
        _ => FAILED,
    };
    // As a shell has it, and no code of ours: the gateway was asked and the sandbox was there.
    let code = match api.reason.as_deref() {
        Some("COMMAND_NOT_FOUND") => COMMAND_NOT_FOUND,
        Some("COMMAND_NOT_EXECUTABLE") => COMMAND_NOT_EXECUTABLE,
        _ => code,
    };
    let known = |key: &str| api.metadata.get(key).cloned().unwrap_or_default();
    let told = Told {
        message: api.to_string(),
        step: known("step"),
        reason: api.reason.clone().unwrap_or_default(),
        cause: String::new(),
        console_tail: known("console"),
        next: known("next"),
    };
    Failure { code, told: Box::new(told) }
}

fn unreachable_gateway(message: String, kind: Option<io::ErrorKind>) -> Failure {
    let (cause, next) = match kind {
        Some(io::ErrorKind::PermissionDenied) => (
            "the gateway's socket is not ours to use",
            "run the same command as root, with sudo; or socket_mode, in its configuration",
        ),
        Some(io::ErrorKind::NotFound | io::ErrorKind::ConnectionRefused) => {
            ("no gateway is running there", "torpor serve   (as root), or: systemctl start torpor")
        }
        _ => ("", "torpor doctor, and look at --endpoint and TORPOR_ENDPOINT"),
    };
    let told = Told { message, cause: cause.into(), next: next.into(), ..Told::default() };
    Failure { code: UNAVAILABLE, told: Box::new(told) }
}
