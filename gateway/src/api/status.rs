//! Errors on the wire.

use tonic::Status;
use tonic_types::{ErrorDetails, StatusExt as _};

use crate::error::{ApiError, Code};

/// The domain of every reason of ours.
pub const DOMAIN: &str = "torpor";

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
    let details = ErrorDetails::with_error_info(error.reason, DOMAIN, metadata);
    // Details travel in a header: what does not fit there is left out by whoever fills the metadata.
    Status::with_error_details(code, error.message, details)
}
