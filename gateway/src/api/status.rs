//! Errors on the wire.

use std::collections::HashMap;

use tonic::Status;
use tonic_types::{ErrorDetails, StatusExt as _};

use crate::{
    error::{ApiError, Code, RETRY_AFTER},
    store::StoreError,
};

/// The domain of every reason of ours.
pub const DOMAIN: &str = "torpor";

/// Room for the message, bytes as the wire has them.
const MESSAGE_BUDGET: usize = 1500;
/// Room for all metadata but the console.
const METADATA_BUDGET: usize = 2000;
/// Room for the console's end.
const CONSOLE_BUDGET: usize = 2500;

/// A gRPC status with google.rpc.ErrorInfo.
pub fn to_status(error: ApiError) -> Status {
    let code = match error.code {
        Code::NotFound => tonic::Code::NotFound,
        Code::AlreadyExists => tonic::Code::AlreadyExists,
        Code::InvalidArgument => tonic::Code::InvalidArgument,
        Code::FailedPrecondition => tonic::Code::FailedPrecondition,
        Code::Aborted => tonic::Code::Aborted,
        Code::OutOfRange => tonic::Code::OutOfRange,
        Code::ResourceExhausted => tonic::Code::ResourceExhausted,
        Code::Unavailable => tonic::Code::Unavailable,
        Code::DeadlineExceeded => tonic::Code::DeadlineExceeded,
        Code::Unimplemented => tonic::Code::Unimplemented,
        Code::Unauthenticated => tonic::Code::Unauthenticated,
        Code::PermissionDenied => tonic::Code::PermissionDenied,
        Code::Internal => tonic::Code::Internal,
    };
    if code == tonic::Code::Internal {
        tracing::warn!(reason = error.reason, error = error.message, "answered with an internal error");
    }

    // Message and details travel in headers, which have a limit (hyper: 16 KiB in all): what is longer is cut.
    let message = clip(&error.message, MESSAGE_BUDGET, false);
    let each = METADATA_BUDGET / error.metadata.len().max(1);
    // Of a console the end is what counts.
    let metadata: HashMap<_, _> = error
        .metadata
        .into_iter()
        .map(|(key, value)| {
            let (budget, end) = if key == "console" { (CONSOLE_BUDGET, true) } else { (each, false) };
            let value = clip(&value, budget, end);
            (key, value)
        })
        .collect();
    let overloaded = error.reason == "OVERLOADED";
    let mut details = ErrorDetails::with_error_info(error.reason, DOMAIN, metadata);
    if overloaded {
        details.set_retry_info(Some(RETRY_AFTER));
    }
    Status::with_error_details(code, message, details)
}

impl From<ApiError> for Status {
    fn from(error: ApiError) -> Self {
        to_status(error)
    }
}

impl From<StoreError> for Status {
    fn from(error: StoreError) -> Self {
        to_status(error.into())
    }
}

/// The beginning (or the end) of a text that fits, counted as gRPC encodes messages: anything but printable ASCII takes
/// three bytes per byte.
fn clip(text: &str, budget: usize, end: bool) -> String {
    let mut left = budget;
    let mut fits = |c: &char| {
        let cost = if matches!(c, ' '..='~') && *c != '%' { 1 } else { 3 * c.len_utf8() };
        left.checked_sub(cost).map(|rest| left = rest).is_some()
    };
    if end {
        let mut kept: Vec<char> = text.chars().rev().take_while(&mut fits).collect();
        kept.reverse();
        kept.into_iter().collect()
    } else {
        text.chars().take_while(&mut fits).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_error_full_of_a_guests_words_fits_into_headers() {
        for word in ["x", "\u{fffd}", "\u{1b}", "%"] {
            let error = ApiError::new(Code::Internal, "R", word.repeat(5000))
                .with("console", word.repeat(5000))
                .with("next", word.repeat(5000));
            let status = to_status(error);
            let encoded =
                status.message().bytes().map(|b| if (b' '..=b'~').contains(&b) && b != b'%' { 1 } else { 3 });
            let size = encoded.sum::<usize>() + status.details().len() * 4 / 3;
            assert!(size < 14_000, "{size} bytes of headers");
        }
    }

    #[test]
    fn the_end_of_a_console_is_kept() {
        assert_eq!(clip("abc", 2, true), "bc");
        assert_eq!(clip("abc", 2, false), "ab");
    }
}
