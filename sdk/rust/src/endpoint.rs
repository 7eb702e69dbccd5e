//! Where the gateway is.

use std::{path::PathBuf, time::Duration};

use hyper_util::rt::TokioIo;
use tokio::net::UnixStream;
use tonic::transport::{Channel, Endpoint};
use tower::service_fn;

use crate::error::{Error, chain, io_kind};

/// Where a gateway listens unless told otherwise.
pub const DEFAULT_ENDPOINT: &str = "unix:///run/torpor/gateway.sock";

/// How long a connection may take to come about.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(10);

enum Address {
    Unix(PathBuf),
    Http(String),
}

fn parse(endpoint: &str) -> Result<Address, Error> {
    let wrong =
        |problem: &str| Error::Endpoint { endpoint: endpoint.to_owned(), problem: problem.to_owned() };
    if let Some(path) = endpoint.strip_prefix("unix://") {
        return if path.starts_with('/') {
            Ok(Address::Unix(path.into()))
        } else {
            Err(wrong("the path of the socket must be absolute"))
        };
    }
    if endpoint.starts_with("https://") {
        return Err(wrong("TLS is not supported; forward the Unix socket over SSH instead"));
    }
    if endpoint.starts_with("http://") {
        return Ok(Address::Http(endpoint.to_owned()));
    }
    Err(wrong("the scheme is neither unix:// nor http://"))
}

/// Connects now, so that a gateway that isn't there is known before anything is asked of it.
pub(crate) async fn connect(endpoint: &str) -> Result<Channel, Error> {
    let unreachable = |e: tonic::transport::Error| Error::Unreachable {
        endpoint: endpoint.to_owned(),
        kind: io_kind(&e),
        cause: chain(&e),
    };
    match parse(endpoint)? {
        Address::Unix(path) => {
            let connector = service_fn(move |_| {
                let path = path.clone();
                async move { UnixStream::connect(path).await.map(TokioIo::new) }
            });
            // HTTP/2 wants an authority; on a Unix socket its name means nothing.
            let target = Endpoint::from_static("http://localhost").connect_timeout(CONNECT_TIMEOUT);
            target.connect_with_connector(connector).await.map_err(unreachable)
        }
        Address::Http(uri) => {
            let target = Endpoint::from_shared(uri)
                .map_err(|e| Error::Endpoint { endpoint: endpoint.to_owned(), problem: chain(&e) })?
                .connect_timeout(CONNECT_TIMEOUT)
                .tcp_nodelay(true)
                .http2_keep_alive_interval(Duration::from_secs(30))
                .keep_alive_timeout(Duration::from_secs(20));
            target.connect().await.map_err(unreachable)
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn a_bad_endpoint_is_refused_with_what_is_wrong() {
        for bad in ["", "/run/x.sock", "unix://x.sock", "ftp://a", "https://a:1"] {
            let error = connect(bad).await.unwrap_err();
            assert!(matches!(error, Error::Endpoint { .. }), "{bad}: {error}");
        }
    }

    #[tokio::test]
    async fn a_missing_socket_is_told_by_its_kind() {
        let error = connect("unix:///nonexistent/torpor.sock").await.unwrap_err();
        let Error::Unreachable { kind, cause, .. } = error else { panic!("{error}") };
        assert_eq!(kind, Some(std::io::ErrorKind::NotFound), "{cause}");
    }
}
