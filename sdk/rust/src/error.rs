//! What can go wrong, in a form that programs can match and people can read.

use std::{collections::BTreeMap, error::Error as StdError, fmt, io, time::Duration};

use tonic::{Code, Status};
use tonic_types::StatusExt as _;
use torpor_proto::v1;

use crate::{phase, wait::Goal};

/// Why a call of the SDK failed.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// The text can't be an endpoint.
    #[error("endpoint '{endpoint}' is not valid: {problem}; use unix:///path/to.sock or http://host:port")]
    Endpoint {
        /// As given.
        endpoint: String,
        /// What is wrong with it.
        problem: String,
    },
    /// Nobody answers there.
    #[error("no gateway answers at {endpoint}: {cause}")]
    Unreachable {
        /// Where it was tried.
        endpoint: String,
        /// The operating system's kind of error, where there was one.
        kind: Option<io::ErrorKind>,
        /// The whole chain of causes.
        cause: String,
    },
    /// The gateway answered with an error.
    #[error(transparent)]
    Api(Box<ApiError>),
    /// The connection ended in the middle of a call whose outcome is therefore not known.
    #[error("the connection to the gateway was lost: {0}")]
    Lost(String),
    /// A wait ended because the sandbox can't come to the goal without a further request.
    #[error("sandbox '{}' is {} and will not become {goal} by itself", name(.sandbox), phase_of(.sandbox))]
    CannotReach {
        /// As it was last seen, with its failure when it has one.
        sandbox: Box<v1::Sandbox>,
        /// What was waited for.
        goal: Goal,
    },
    /// A wait ended because the sandbox was deleted.
    #[error("sandbox '{sandbox}' was deleted while it was awaited to become {goal}")]
    Gone {
        /// Id or name, as the wait was given.
        sandbox: String,
        /// What was waited for.
        goal: Goal,
    },
    /// A wait took longer than its caller allowed.
    #[error("sandbox '{name}' was still {phase} after {} s of waiting for {goal}{}", .after.as_secs(), at_step(.step))]
    WaitTimedOut {
        /// The sandbox's name.
        name: String,
        /// Its phase when last seen.
        phase: String,
        /// The step under way when last seen; may be empty.
        step: String,
        /// What was waited for.
        goal: Goal,
        /// How long was waited.
        after: Duration,
        /// As it was last seen; none when no state ever arrived.
        sandbox: Option<Box<v1::Sandbox>>,
    },
    /// The gateway broke the rules of the API.
    #[error("the gateway sent an answer that makes no sense: {0}")]
    Protocol(&'static str),
}

impl Error {
    /// The status code, when the gateway answered with one.
    pub fn code(&self) -> Option<Code> {
        match self {
            Self::Api(e) => Some(e.code),
            _ => None,
        }
    }

    /// The reason code of google.rpc.ErrorInfo ("BASE_CHANGED"), or of the failure that ended a wait.
    pub fn reason(&self) -> Option<&str> {
        match self {
            Self::Api(e) => e.reason.as_deref(),
            Self::CannotReach { sandbox, .. } => {
                Some(sandbox.status.as_ref()?.failure.as_ref()?.reason.as_str()).filter(|r| !r.is_empty())
            }
            _ => None,
        }
    }

    /// The command that the gateway advises to type next.
    pub fn next_command(&self) -> Option<&str> {
        let next = match self {
            Self::Api(e) => e.metadata.get("next").map(String::as_str),
            Self::CannotReach { sandbox, .. } => {
                Some(sandbox.status.as_ref()?.failure.as_ref()?.next.as_str())
            }
            _ => None,
        };
        next.filter(|n| !n.is_empty())
    }

    /// Whether a status is one that a broken connection makes, not the gateway.
    pub(crate) fn is_transport(status: &Status) -> bool {
        let from_below = status.source().is_some();
        matches!(status.code(), Code::Unavailable)
            || (from_below && matches!(status.code(), Code::Unknown | Code::Cancelled | Code::Internal))
    }
}

impl From<Status> for Error {
    fn from(status: Status) -> Self {
        if status.source().is_some() && Self::is_transport(&status) {
            return Self::Lost(chain(&status));
        }
        Self::Api(Box::new(ApiError::from(&status)))
    }
}

/// An error that the gateway sent.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ApiError {
    /// The gRPC code.
    pub code: Code,
    /// For people.
    pub message: String,
    /// For programs: the reason of google.rpc.ErrorInfo.
    pub reason: Option<String>,
    /// What ErrorInfo adds: "phase", "sandbox", "next" and, where known, "step" and "console".
    pub metadata: BTreeMap<String, String>,
}

impl fmt::Display for ApiError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.message.is_empty() {
            write!(f, "the gateway answered {:?}", self.code)
        } else {
            f.write_str(&self.message)
        }
    }
}

impl StdError for ApiError {}

impl From<&Status> for ApiError {
    fn from(status: &Status) -> Self {
        let info = status.get_details_error_info();
        let (reason, metadata) = info.map_or_else(Default::default, |i| (Some(i.reason), i.metadata));
        Self {
            code: status.code(),
            message: status.message().to_owned(),
            reason: reason.filter(|r| !r.is_empty()),
            metadata: metadata.into_iter().collect(),
        }
    }
}

/// An error and its causes in one line, without the words that repeat.
pub(crate) fn chain(error: &(dyn StdError + 'static)) -> String {
    let mut parts: Vec<String> = Vec::new();
    let mut next: Option<&(dyn StdError + 'static)> = Some(error);
    while let Some(e) = next {
        let text = match e.downcast_ref::<Status>() {
            Some(status) => status.message().to_owned(),
            None => e.to_string(),
        };
        if !text.is_empty() && text != "transport error" && !parts.iter().any(|p| p.contains(&text)) {
            parts.push(text);
        }
        next = e.source();
    }
    if parts.is_empty() { "no cause was given".to_owned() } else { parts.join(": ") }
}

/// The operating system's error at the bottom of a chain.
pub(crate) fn io_kind(error: &(dyn StdError + 'static)) -> Option<io::ErrorKind> {
    let mut next: Option<&(dyn StdError + 'static)> = Some(error);
    while let Some(e) = next {
        if let Some(io) = e.downcast_ref::<io::Error>() {
            return Some(io.kind());
        }
        next = e.source();
    }
    None
}

fn name(sandbox: &v1::Sandbox) -> &str {
    if sandbox.name.is_empty() { &sandbox.id } else { &sandbox.name }
}

fn phase_of(sandbox: &v1::Sandbox) -> &'static str {
    phase::name(phase::of(sandbox))
}

fn at_step(step: &str) -> String {
    if step.is_empty() { String::new() } else { format!(" (step: {step})") }
}

#[cfg(test)]
mod tests {
    use std::collections::HashMap;

    use tonic_types::ErrorDetails;

    use super::*;

    #[test]
    fn an_error_info_becomes_reason_and_next_command() {
        let metadata = HashMap::from([("next".to_owned(), "torpor resume web".to_owned())]);
        let details = ErrorDetails::with_error_info("NOT_READY", "torpor", metadata);
        let error = Error::from(Status::with_error_details(Code::FailedPrecondition, "it sleeps", details));
        assert_eq!(error.code(), Some(Code::FailedPrecondition));
        assert_eq!(error.reason(), Some("NOT_READY"));
        assert_eq!(error.next_command(), Some("torpor resume web"));
        assert_eq!(error.to_string(), "it sleeps");
    }

    #[test]
    fn a_status_without_details_or_words_still_says_something() {
        let error = Error::from(Status::new(Code::Internal, ""));
        assert_eq!((error.reason(), error.to_string().as_str()), (None, "the gateway answered Internal"));
    }
}
