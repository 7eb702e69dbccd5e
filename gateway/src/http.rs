//! The one thing that is said in HTTP: that there is no connection, and why.

use std::{fmt::Write as _, time::Duration};

use tokio::{
    io::{AsyncReadExt as _, AsyncWriteExt as _},
    net::TcpStream,
    time::timeout,
};

use crate::error::{ApiError, Code};

/// The longest head of a request that is waited for, bytes.
const HEAD: usize = 16 << 10;
/// How long a client may take to send it: whoever speaks another protocol may say nothing at all.
const PATIENCE: Duration = Duration::from_secs(2);
/// What of a request's body is read after the answer, so that it isn't lost with a connection that is reset, bytes.
const REST: usize = 256 << 10;

/// Answers whatever was asked, and ends the connection.
pub async fn answer(stream: &mut TcpStream, error: &ApiError) {
    // The answer is the same without a request.
    let _ = timeout(PATIENCE, read_head(stream)).await;
    let text = response(error);
    let write = async {
        stream.write_all(text.as_bytes()).await?;
        stream.shutdown().await
    };
    // The client may be gone.
    if !matches!(timeout(PATIENCE, write).await, Ok(Ok(()))) {
        return;
    }
    let _ = timeout(PATIENCE, drain(stream)).await;
}

async fn read_head(stream: &mut TcpStream) {
    let mut head = Vec::new();
    let mut piece = [0; 1024];
    while head.len() < HEAD && !head.windows(4).any(|end| end == b"\r\n\r\n") {
        match stream.read(&mut piece).await {
            Ok(0) | Err(_) => return,
            Ok(length) => head.extend_from_slice(&piece[..length]),
        }
    }
}

async fn drain(stream: &mut TcpStream) {
    let (mut left, mut piece) = (REST, [0; 4096]);
    while left > 0 {
        match stream.read(&mut piece).await {
            Ok(0) | Err(_) => return,
            Ok(length) => left = left.saturating_sub(length),
        }
    }
}

/// An answer: why there is no connection.
pub struct Said {
    /// Number and reason phrase.
    pub status: (u16, &'static str),
    /// Without those of the connection.
    pub headers: Vec<(&'static str, String)>,
    /// Plain text.
    pub body: String,
}

impl Said {
    /// 502: the sandbox is Ready and its server isn't there. 404: nothing is exposed there. 503: everything else.
    pub fn of(error: &ApiError) -> Self {
        let status = match error.reason.as_str() {
            "PORT_CLOSED" | "BAD_GATEWAY" => (502, "Bad Gateway"),
            "PORT_NOT_EXPOSED" => (404, "Not Found"),
            "INVALID_ARGUMENT" => (400, "Bad Request"),
            _ => (503, "Service Unavailable"),
        };
        let known = |key: &str| error.metadata.get(key).cloned().unwrap_or_default();
        let mut body = format!("{}\n", error.message);
        if !known("next").is_empty() {
            // Writing to a String can't fail.
            let _ = writeln!(body, "next: {}", known("next"));
        }
        let waits = status.0 == 503
            && (matches!(error.code, Code::ResourceExhausted | Code::Unavailable)
                || error.reason == "NOT_READY");
        let headers = [
            ("content-type", "text/plain; charset=utf-8".to_owned()),
            ("cache-control", "no-store".to_owned()),
            ("retry-after", if waits { "2".to_owned() } else { String::new() }),
            ("x-torpor-sandbox", known("sandbox")),
            ("x-torpor-phase", known("phase")),
            ("x-torpor-reason", error.reason.clone()),
        ];
        let headers = headers.into_iter().filter(|(_, value)| !value.is_empty());
        let plain = |value: String| value.replace(|c: char| c.is_control(), " ");
        Self { status, headers: headers.map(|(name, value)| (name, plain(value))).collect(), body }
    }
}

fn response(error: &ApiError) -> String {
    let Said { status: (number, phrase), headers, body } = Said::of(error);
    let mut head =
        format!("HTTP/1.1 {number} {phrase}\r\ncontent-length: {}\r\nconnection: close\r\n", body.len());
    for (name, value) in headers {
        let _ = write!(head, "{name}: {value}\r\n");
    }
    format!("{head}\r\n{body}")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_answer_names_the_phase_and_has_no_headers_of_somebody_elses_making() {
        let error =
            ApiError::new(Code::FailedPrecondition, "SUSPENDED", "sandbox 'web' is Suspended, not Ready")
                .with("phase", "Suspended")
                .with("sandbox", "web\r\nx-evil: 1")
                .with("next", "torpor resume web");
        let text = response(&error);
        let (head, body) = text.split_once("\r\n\r\n").unwrap();
        assert!(head.starts_with("HTTP/1.1 503 Service Unavailable\r\n"), "{head}");
        assert!(head.contains("\r\nx-torpor-phase: Suspended\r\n") && !head.contains("\r\nx-evil"), "{head}");
        assert!(head.contains(&format!("\r\ncontent-length: {}\r\n", body.len())), "{head}");
        assert_eq!(body, "sandbox 'web' is Suspended, not Ready\nnext: torpor resume web\n");
        let closed = ApiError::new(Code::FailedPrecondition, "PORT_CLOSED", "nothing listens");
        assert!(response(&closed).starts_with("HTTP/1.1 502 "));
    }
}
