//! Errors as google.rpc.Status in JSON, with the HTTP codes of google.rpc.Code.

use base64::{Engine as _, engine::general_purpose::STANDARD};
use http::{HeaderMap, HeaderName, HeaderValue, Response, StatusCode, header};
use prost::Message as _;
use prost_reflect::{DescriptorPool, DynamicMessage};
use serde_json::{Value, json};
use tonic::{Code, Status, body::Body};
use tonic_types::{ErrorDetails, StatusExt as _, pb};

/// The domain of the reasons given here, as in the rest of the API.
const DOMAIN: &str = "torpor";

/// An error of this layer's own.
pub fn refusal(code: Code, reason: &str, message: impl Into<String>, metadata: &[(&str, &str)]) -> Status {
    let metadata = metadata.iter().map(|(key, value)| ((*key).to_owned(), (*value).to_owned()));
    let details =
        ErrorDetails::with_error_info(reason, DOMAIN, metadata.collect::<std::collections::HashMap<_, _>>());
    Status::with_error_details(code, message, details)
}

/// The types that details are of.
///
/// # Errors
/// Descriptors of tonic-types that can't be read.
pub fn types() -> Result<DescriptorPool, prost_reflect::DescriptorError> {
    let mut pool = DescriptorPool::global();
    pool.decode_file_descriptor_set(pb::FILE_DESCRIPTOR_SET)?;
    Ok(pool)
}

/// The status as an object: code, message, details, each with its type.
pub fn object(status: &Status, types: &DescriptorPool) -> Value {
    // Without details the header is empty, and so is the message.
    let full = pb::Status::decode(status.details()).unwrap_or_default();
    let details: Vec<Value> =
        full.details.iter().map(|any| detail(&any.type_url, &any.value, types)).collect();
    json!({"code": status.code() as i32, "message": status.message(), "details": details})
}

fn detail(url: &str, bytes: &[u8], types: &DescriptorPool) -> Value {
    let name = url.rsplit('/').next().unwrap_or_default();
    let message = types.get_message_by_name(name).and_then(|of| DynamicMessage::decode(of, bytes).ok());
    match message.and_then(|message| serde_json::to_value(&message).ok()) {
        Some(Value::Object(mut fields)) => {
            fields.insert("@type".to_owned(), Value::String(url.to_owned()));
            Value::Object(fields)
        }
        // A type that isn't known here is passed on as it came.
        _ => json!({"@type": url, "value": STANDARD.encode(bytes)}),
    }
}

/// The HTTP status of a gRPC code, as google/rpc/code.proto has it.
pub fn http_code(code: Code) -> StatusCode {
    let number = match code {
        Code::Ok => 200,
        Code::InvalidArgument | Code::FailedPrecondition | Code::OutOfRange => 400,
        Code::Unauthenticated => 401,
        Code::PermissionDenied => 403,
        Code::NotFound => 404,
        Code::Aborted | Code::AlreadyExists => 409,
        Code::ResourceExhausted => 429,
        Code::Cancelled => 499,
        Code::Unimplemented => 501,
        Code::Unavailable => 503,
        Code::DeadlineExceeded => 504,
        Code::Unknown | Code::Internal | Code::DataLoss => 500,
    };
    StatusCode::from_u16(number).unwrap_or(StatusCode::INTERNAL_SERVER_ERROR)
}

/// When to come again, whole seconds, when the status says so.
fn retry_after(status: &Status) -> Option<u64> {
    let details = status.get_error_details();
    let of_info = details.retry_info().and_then(|info| info.retry_delay).map(|delay| delay.as_millis());
    let of_metadata = || details.error_info()?.metadata.get("retry_after_ms")?.parse::<u128>().ok();
    let milliseconds = of_info.or_else(of_metadata)?;
    u64::try_from(milliseconds.div_ceil(1000)).ok().map(|seconds| seconds.max(1))
}

/// An error as an answer of its own.
pub fn response(status: &Status, types: &DescriptorPool) -> Response<Body> {
    with_code(status, http_code(status.code()), types)
}

/// The same with an HTTP code that says more than the status's.
pub fn with_code(status: &Status, code: StatusCode, types: &DescriptorPool) -> Response<Body> {
    let mut response = json(code, format!("{}\n", object(status, types)));
    let headers = response.headers_mut();
    if let Some(seconds) = retry_after(status) {
        headers.insert(header::RETRY_AFTER, HeaderValue::from(seconds));
    }
    if code == StatusCode::UNAUTHORIZED {
        headers.insert(header::WWW_AUTHENTICATE, HeaderValue::from_static("Bearer"));
    }
    response
}

/// A JSON document, whose text this is, as an answer.
pub fn json(code: StatusCode, text: impl Into<bytes::Bytes>) -> Response<Body> {
    let mut response = Response::new(Body::new(http_body_util::Full::new(text.into())));
    *response.status_mut() = code;
    head(response.headers_mut(), "application/json");
    response
}

/// What every answer says of itself.
pub fn head(headers: &mut HeaderMap, content_type: &'static str) {
    headers.insert(header::CONTENT_TYPE, HeaderValue::from_static(content_type));
    headers.insert(header::CACHE_CONTROL, HeaderValue::from_static("no-store"));
    // No browser takes it for a page.
    headers.insert(HeaderName::from_static("x-content-type-options"), HeaderValue::from_static("nosniff"));
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn details_are_shown_by_their_types() {
        let mut details =
            ErrorDetails::with_error_info("OVERLOADED", "torpor", [("next".into(), "again".into())]);
        details.set_retry_info(Some(std::time::Duration::from_millis(1500)));
        let status = Status::with_error_details(Code::ResourceExhausted, "too much", details);
        let types = types().unwrap();
        let shown = object(&status, &types);
        assert_eq!((shown["code"].as_i64(), shown["message"].as_str()), (Some(8), Some("too much")));
        let info = shown["details"].as_array().unwrap();
        let of = |name: &str| {
            let url = format!("type.googleapis.com/google.rpc.{name}");
            info.iter().find(|one| one["@type"] == url.as_str()).unwrap_or_else(|| panic!("{shown}")).clone()
        };
        assert_eq!(of("ErrorInfo")["reason"], "OVERLOADED");
        assert_eq!(of("ErrorInfo")["metadata"]["next"], "again");
        assert_eq!(of("RetryInfo")["retryDelay"], "1.500s");
        let answer = response(&status, &types);
        assert_eq!(answer.status(), 429);
        assert_eq!(answer.headers()["retry-after"], "2");
    }

    #[test]
    fn milliseconds_in_the_metadata_are_a_hint_as_well() {
        let status = refusal(Code::ResourceExhausted, "BUSY", "later", &[("retry_after_ms", "1")]);
        assert_eq!(response(&status, &types().unwrap()).headers()["retry-after"], "1");
        let status = refusal(Code::NotFound, "NO", "never", &[]);
        let answer = response(&status, &types().unwrap());
        assert_eq!((answer.status().as_u16(), answer.headers().get("retry-after")), (404, None));
    }

    #[test]
    fn an_unknown_detail_is_passed_on_as_it_came() {
        let shown = detail("example.com/some.Thing", b"\x01\x02", &types().unwrap());
        assert_eq!(shown, json!({"@type": "example.com/some.Thing", "value": "AQI="}));
    }
}
