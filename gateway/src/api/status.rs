//! Errors on the wire.

use tonic::Status;
use tonic_types::{ErrorDetails, StatusExt as _};

use crate::error::{ApiError, Code};

/// The domain of every reason of ours.
pub const DOMAIN: &str = "torpor";

/// Longest message, characters.
const LONGEST_MESSAGE: usize = 1500;

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
        Code::Internal => tonic::Code::Internal,
    };
    if code == tonic::Code::Internal {
        tracing::warn!(reason = error.reason, error = error.message, "answered with an internal error");
    }
    let metadata: std::collections::HashMap<_, _> = error.metadata.into_iter().collect();
    // Message and details travel in headers, which have a limit (hyper: 16 KiB in all).
    let message: String = error.message.chars().take(LONGEST_MESSAGE).collect();
    let details = ErrorDetails::with_error_info(error.reason, DOMAIN, metadata);
    Status::with_error_details(code, message, details)
}
