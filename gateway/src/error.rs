//! What a verb answers when it can't do as asked.

use std::collections::BTreeMap;

use torpor_sandbox::{DriverError, Failure, InvalidSpec, Phase};

use crate::store::{Kind, Problem, Record, StoreError};

/// When a request that was refused for too much work at once may be made again.
pub const RETRY_AFTER: std::time::Duration = std::time::Duration::from_millis(500);

/// The status codes of the contract.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[allow(missing_docs, reason = "gRPC's own names")]
pub enum Code {
    NotFound,
    AlreadyExists,
    InvalidArgument,
    FailedPrecondition,
    Aborted,
    OutOfRange,
    ResourceExhausted,
    Unavailable,
    DeadlineExceeded,
    Unimplemented,
    Unauthenticated,
    PermissionDenied,
    Internal,
}

/// An answer with everything that a client can act on.
#[derive(Clone, Debug, thiserror::Error)]
#[error("{message}")]
pub struct ApiError {
    /// gRPC status.
    pub code: Code,
    /// For programs: upper case, stable.
    pub reason: String,
    /// For people.
    pub message: String,
    /// phase, sandbox, next, step, console …
    pub metadata: BTreeMap<String, String>,
}

impl ApiError {
    /// An error without metadata.
    pub fn new(code: Code, reason: impl Into<String>, message: impl Into<String>) -> Self {
        Self { code, reason: reason.into(), message: message.into(), metadata: BTreeMap::new() }
    }

    /// Adds what the client can act on.
    #[must_use]
    pub fn with(mut self, key: &str, value: impl Into<String>) -> Self {
        self.metadata.insert(key.to_owned(), value.into());
        self
    }

    /// Bad input.
    pub fn invalid(field: &str, problem: impl std::fmt::Display) -> Self {
        Self::new(Code::InvalidArgument, "INVALID_ARGUMENT", format!("{field}: {problem}"))
            .with("field", field)
    }

    /// Something of ours failed.
    pub fn internal(error: impl std::fmt::Display) -> Self {
        Self::new(Code::Internal, "INTERNAL", error.to_string())
    }

    /// A sandbox that came to rest in Error instead of where it was sent.
    pub fn of_failure(record: &Record, failure: &Failure) -> Self {
        let code = match failure.reason.as_str() {
            "BASE_MISSING" | "BASE_CHANGED" | "DATA_MISSING" | "MEMORY_MISSING" | "LOCKED" | "CORRUPT"
            | "BACKEND_MISSING" | "MOUNT_MISSING" | "UNSUPPORTED" | "INVALID" => Code::FailedPrecondition,
            "EXHAUSTED" | "NO_SPACE" => Code::ResourceExhausted,
            _ => Code::Internal,
        };
        let error = Self::new(code, &failure.reason, format!("{} failed: {}", failure.step, failure.message));
        let error = error
            .about(record)
            .with("step", &failure.step)
            .with("next", next_command(&failure.reason, record));
        if failure.console.is_empty() {
            error
        } else {
            error.with("console", last_bytes(&failure.console, 2048))
        }
    }

    /// Adds the sandbox and its phase.
    #[must_use]
    pub fn about(self, record: &Record) -> Self {
        self.with("sandbox", &record.name)
            .with("id", record.id.as_str())
            .with("phase", record.state.phase.as_str())
    }

    /// Exec and the like outside Ready.
    pub fn not_ready(record: &Record) -> Self {
        let name = &record.name;
        let phase = record.state.phase;
        let (reason, next) = match phase {
            Phase::Suspended | Phase::Suspending => ("SUSPENDED", format!("torpor resume {name}")),
            Phase::Stopped | Phase::Stopping => ("STOPPED", format!("torpor start {name}")),
            Phase::Completed => ("COMPLETED", format!("torpor start {name}")),
            Phase::Error => ("SANDBOX_ERROR", format!("torpor resume {name}")),
            Phase::Deleting => ("DELETING", String::new()),
            _ => ("NOT_READY", format!("torpor wait {name}")),
        };
        let message = format!("sandbox '{name}' is {phase}, not Ready");
        let error = Self::new(Code::FailedPrecondition, reason, message).about(record);
        if next.is_empty() { error } else { error.with("next", next) }
    }
}

/// An error with all its causes, each said once.
pub fn with_causes(error: &dyn std::error::Error) -> String {
    let mut text = error.to_string();
    let mut source = error.source();
    while let Some(cause) = source {
        let cause_text = cause.to_string();
        if !text.contains(&cause_text) {
            text.push_str(": ");
            text.push_str(&cause_text);
        }
        source = cause.source();
    }
    text
}

/// The command to type after a failure, as far as the phase that it is in by now allows it.
pub fn next_command(reason: &str, record: &Record) -> String {
    let name = &record.name;
    let verb = match record.state.phase {
        // Only start wakes what was stopped.
        Phase::Stopped | Phase::Stopping => "start",
        _ => "resume",
    };
    match reason {
        "BASE_MISSING" => {
            format!("bring the image back (torpor image import or build), then: torpor {verb} {name}")
        }
        "BASE_CHANGED" => format!("put the image's own bytes back, then: torpor {verb} {name}"),
        "DATA_MISSING" => format!("put the workspace disk back where it was, then: torpor {verb} {name}"),
        "MEMORY_MISSING" => format!("torpor start {name}"),
        "LOCKED" => format!("end the process that holds the disk, then: torpor {verb} {name}"),
        "EXHAUSTED" => "torpor list; suspend what is not needed".to_owned(),
        "NO_SPACE" => "free space on the host; the sandbox goes on by itself then".to_owned(),
        "CORRUPT" => format!("keep a copy of the disk's file, then: torpor sandbox disk show {name} --check"),
        _ => format!("torpor logs {name}; torpor {verb} {name}"),
    }
}

/// The end of a text, at a character's boundary.
fn last_bytes(text: &str, bytes: usize) -> &str {
    let mut from = text.len().saturating_sub(bytes);
    while !text.is_char_boundary(from) {
        from += 1;
    }
    &text[from..]
}

impl From<StoreError> for ApiError {
    fn from(error: StoreError) -> Self {
        let message = error.to_string();
        match error {
            StoreError::NotFound(name) => Self::new(Code::NotFound, "SANDBOX_NOT_FOUND", message)
                .with("sandbox", name)
                .with("next", "torpor list"),
            StoreError::NameTaken(name) => Self::new(Code::AlreadyExists, "NAME_TAKEN", message)
                .with("sandbox", &name)
                .with("next", format!("torpor get {name}")),
            StoreError::Stale { name, found, .. } => Self::new(Code::Aborted, "STALE_VERSION", message)
                .with("sandbox", &name)
                .with("version", found.to_string())
                .with("next", format!("torpor get {name}")),
            StoreError::Refused { name, refusal } => {
                let error = Self::new(Code::FailedPrecondition, refusal.reason, message)
                    .with("sandbox", &name)
                    .with("phase", refusal.phase.as_str());
                match refusal.next {
                    Some(next) => error.with("next", format!("torpor {next} {name}")),
                    None => error,
                }
            }
            StoreError::Deleting(name) => Self::new(Code::FailedPrecondition, "DELETING", message)
                .with("sandbox", name)
                .with("phase", Phase::Deleting.as_str()),
            StoreError::HostTaken { holder, .. } => {
                let error = Self::new(Code::AlreadyExists, "HOST_PORT_TAKEN", message);
                match holder {
                    Some((name, _)) => error
                        .with("sandbox", &name)
                        .with("next", format!("torpor expose list {name}; or another --host")),
                    None => error.with("next", "another --host"),
                }
            }
            StoreError::TooManyPorts { name, .. } => {
                Self::new(Code::ResourceExhausted, "TOO_MANY_PORTS", message)
                    .with("next", format!("torpor expose remove {name} PORT"))
            }
            StoreError::NoWorkspace(_) => Self::new(Code::NotFound, "WORKSPACE_NOT_FOUND", message)
                .with("next", "torpor workspace list"),
            StoreError::WorkspaceTaken(_) => Self::new(Code::AlreadyExists, "WORKSPACE_TAKEN", message),
            StoreError::WorkspaceInUse { name, .. } => {
                Self::new(Code::FailedPrecondition, "WORKSPACE_IN_USE", message)
                    .with("next", format!("torpor list --workspace {name}"))
            }
            StoreError::TooMany { .. } => Self::new(Code::ResourceExhausted, "TOO_MANY", message),
            StoreError::Foreign(problem) => Self::of_foreign(&problem, message),
            StoreError::NoTemplate(_) => {
                Self::new(Code::NotFound, "TEMPLATE_NOT_FOUND", message).with("next", "torpor template list")
            }
            StoreError::TemplateTaken(name) => Self::new(Code::AlreadyExists, "TEMPLATE_TAKEN", message)
                .with("next", format!("torpor template get {name}")),
            StoreError::StaleTemplate { name, found, .. } => {
                Self::new(Code::Aborted, "STALE_VERSION", message)
                    .with("version", found.to_string())
                    .with("next", format!("torpor template get {name}"))
            }
            StoreError::RequestReused(_) => Self::new(Code::InvalidArgument, "REQUEST_ID_REUSED", message),
            StoreError::Exhausted(_) => Self::new(Code::ResourceExhausted, "EXHAUSTED", message),
            StoreError::NeverFits(_) => Self::new(Code::InvalidArgument, "NEVER_FITS", message),
            StoreError::BadToken(_) => Self::new(Code::InvalidArgument, "BAD_TOKEN", message),
            StoreError::CursorTooOld => Self::new(Code::OutOfRange, "CURSOR_TOO_OLD", message),
            StoreError::Overloaded(_) => Self::new(Code::ResourceExhausted, "OVERLOADED", message)
                .with("retry_after_ms", RETRY_AFTER.as_millis().to_string())
                .with("next", "the same again in a moment"),
            StoreError::Injected(_) => Self::new(Code::Unavailable, "INJECTED", message),
            StoreError::Closed => Self::new(Code::Unavailable, "SHUTTING_DOWN", message),
            _ => Self::internal(message),
        }
    }
}

impl ApiError {
    fn of_foreign(problem: &Problem, message: String) -> Self {
        let named = |kind: &Kind, what: &str| format!("{}_{what}", kind.as_str().to_uppercase());
        match problem {
            Problem::Missing { kind, .. } => Self::new(Code::NotFound, named(kind, "NOT_FOUND"), message),
            Problem::Taken { kind, .. } => Self::new(Code::AlreadyExists, named(kind, "TAKEN"), message),
            Problem::InUse { kind, .. } => {
                Self::new(Code::FailedPrecondition, named(kind, "IN_USE"), message)
            }
            Problem::Stale { found, .. } => {
                Self::new(Code::Aborted, "STALE_VERSION", message).with("version", found.to_string())
            }
            Problem::TooLarge { .. } => Self::new(Code::InvalidArgument, "TOO_LARGE", message),
            Problem::Invalid { field, .. } => {
                Self::new(Code::InvalidArgument, "INVALID_ARGUMENT", message).with("field", *field)
            }
        }
    }
}

impl From<InvalidSpec> for ApiError {
    fn from(error: InvalidSpec) -> Self {
        Self::invalid(error.field, error.problem)
    }
}

impl Code {
    /// What a driver's failure is for whoever asked.
    pub fn of_driver(error: &DriverError) -> Self {
        match error {
            DriverError::Missing
            | DriverError::BaseMissing(_)
            | DriverError::BaseChanged(_)
            | DriverError::DataMissing(_)
            | DriverError::MountMissing(_)
            | DriverError::Locked { .. }
            | DriverError::Corrupt(_)
            | DriverError::Unsupported(_) => Self::FailedPrecondition,
            DriverError::Invalid(_) => Self::InvalidArgument,
            DriverError::Exhausted(_) | DriverError::NoSpace(_) => Self::ResourceExhausted,
            DriverError::Cancelled(_) => Self::Aborted,
            _ => Self::Unavailable,
        }
    }
}

impl From<DriverError> for ApiError {
    fn from(error: DriverError) -> Self {
        Self::new(Code::of_driver(&error), error.reason(), error.to_string())
    }
}
