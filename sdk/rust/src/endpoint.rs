//! Where the gateway is.

use std::{net::IpAddr, path::PathBuf, time::Duration};

use hyper_util::rt::TokioIo;
use tokio::net::UnixStream;
use tonic::{
    Request, Status,
    metadata::{Ascii, MetadataValue},
    service::{Interceptor, interceptor::InterceptedService},
    transport::{Certificate, Channel, ClientTlsConfig, Endpoint, Identity, Uri},
};
use tower::service_fn;

use crate::error::{Error, chain, io_kind};

/// Where a gateway listens unless told otherwise.
pub const DEFAULT_ENDPOINT: &str = "unix:///run/torpor/gateway.sock";

/// How long a connection may take to come about.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(10);

/// The metadata that names a workspace.
const WORKSPACE: &str = "x-torpor-workspace";

/// Who calls, and where.
#[derive(Clone, Debug, Default)]
pub struct Options {
    /// A token of the gateway's, or of its OIDC issuer.
    pub token: Option<String>,
    /// The workspace that calls work in; none: the default one, or that of the token.
    pub workspace: Option<String>,
    /// For `https://`.
    pub tls: Tls,
}

/// Whom to trust, and what to show.
#[derive(Clone, Debug, Default)]
pub struct Tls {
    /// Roots that the gateway's certificate may come from, PEM; none: the system's.
    pub ca: Option<PathBuf>,
    /// Our certificate and its key, PEM.
    pub identity: Option<(PathBuf, PathBuf)>,
}

/// A connection whose calls say who makes them.
pub(crate) type Transport = InterceptedService<Channel, Headers>;

/// Goes with every call.
#[derive(Clone, Default)]
pub(crate) struct Headers {
    token: Option<MetadataValue<Ascii>>,
    workspace: Option<MetadataValue<Ascii>>,
}

impl std::fmt::Debug for Headers {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let token = self.token.as_ref().map(|_| "(not shown)");
        f.debug_struct("Headers").field("token", &token).field("workspace", &self.workspace).finish()
    }
}

impl Interceptor for Headers {
    fn call(&mut self, mut request: Request<()>) -> Result<Request<()>, Status> {
        if let Some(token) = &self.token {
            request.metadata_mut().insert("authorization", token.clone());
        }
        if let Some(workspace) = &self.workspace {
            request.metadata_mut().insert(WORKSPACE, workspace.clone());
        }
        Ok(request)
    }
}

enum Address {
    Unix(PathBuf),
    Http(String),
    Https(String),
}

fn wrong(endpoint: &str, problem: impl Into<String>) -> Error {
    Error::Endpoint { endpoint: endpoint.to_owned(), problem: problem.into() }
}

fn parse(endpoint: &str) -> Result<Address, Error> {
    if let Some(path) = endpoint.strip_prefix("unix://") {
        return if path.starts_with('/') {
            Ok(Address::Unix(path.into()))
        } else {
            Err(wrong(endpoint, "the path of the socket must be absolute"))
        };
    }
    if endpoint.starts_with("https://") {
        return Ok(Address::Https(endpoint.to_owned()));
    }
    if endpoint.starts_with("http://") {
        return Ok(Address::Http(endpoint.to_owned()));
    }
    Err(wrong(endpoint, "the scheme is none of unix://, https:// and http://"))
}

fn headers(endpoint: &str, options: &Options) -> Result<Headers, Error> {
    // Not said again: it may be a secret.
    let token = options.token.as_ref().map(|token| format!("Bearer {}", token.trim()).parse());
    let token =
        token.transpose().map_err(|_| wrong(endpoint, "the token holds characters that no token has"))?;
    let workspace = options.workspace.as_ref().map(|workspace| workspace.parse());
    let workspace = workspace.transpose().map_err(|_| wrong(endpoint, "the workspace's name is none"))?;
    Ok(Headers { token, workspace })
}

fn is_loopback(uri: &Uri) -> bool {
    let host = uri.host().unwrap_or_default().trim_matches(['[', ']']);
    host == "localhost" || host.parse::<IpAddr>().is_ok_and(|address| address.is_loopback())
}

fn tls(endpoint: &str, options: &Tls) -> Result<ClientTlsConfig, Error> {
    let read = |path: &PathBuf| {
        std::fs::read(path).map_err(|e| wrong(endpoint, format!("'{}': {e}", path.display())))
    };
    let mut config = ClientTlsConfig::new();
    config = match &options.ca {
        Some(ca) => config.ca_certificate(Certificate::from_pem(read(ca)?)),
        None => config.with_native_roots(),
    };
    if let Some((certificate, key)) = &options.identity {
        config = config.identity(Identity::from_pem(read(certificate)?, read(key)?));
    }
    Ok(config)
}

/// Connects now, so that a gateway that isn't there is known before anything is asked of it.
pub(crate) async fn connect(endpoint: &str, options: &Options) -> Result<Transport, Error> {
    let headers = headers(endpoint, options)?;
    let unreachable = |e: tonic::transport::Error| Error::Unreachable {
        endpoint: endpoint.to_owned(),
        kind: io_kind(&e),
        cause: chain(&e),
    };
    let over_tcp = |uri: String| {
        let target = Endpoint::from_shared(uri).map_err(|e| wrong(endpoint, chain(&e)))?;
        Ok::<_, Error>(
            target
                .connect_timeout(CONNECT_TIMEOUT)
                .tcp_nodelay(true)
                .http2_keep_alive_interval(Duration::from_secs(30))
                .keep_alive_timeout(Duration::from_secs(20)),
        )
    };
    let channel = match parse(endpoint)? {
        Address::Unix(path) => {
            let connector = service_fn(move |_| {
                let path = path.clone();
                async move { UnixStream::connect(path).await.map(TokioIo::new) }
            });
            // HTTP/2 wants an authority; on a Unix socket its name means nothing.
            let target = Endpoint::from_static("http://localhost").connect_timeout(CONNECT_TIMEOUT);
            target.connect_with_connector(connector).await.map_err(unreachable)?
        }
        Address::Http(uri) => {
            let target = over_tcp(uri)?;
            if options.token.is_some() && !is_loopback(target.uri()) {
                return Err(wrong(
                    endpoint,
                    "a token must not go in the clear to another host: use https://",
                ));
            }
            target.connect().await.map_err(unreachable)?
        }
        Address::Https(uri) => {
            let target = over_tcp(uri)?.tls_config(tls(endpoint, &options.tls)?);
            target.map_err(|e| wrong(endpoint, chain(&e)))?.connect().await.map_err(unreachable)?
        }
    };
    Ok(InterceptedService::new(channel, headers))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn a_bad_endpoint_is_refused_with_what_is_wrong() {
        for bad in ["", "/run/x.sock", "unix://x.sock", "ftp://a"] {
            let error = connect(bad, &Options::default()).await.unwrap_err();
            assert!(matches!(error, Error::Endpoint { .. }), "{bad}: {error}");
        }
    }

    #[tokio::test]
    async fn a_missing_socket_is_told_by_its_kind() {
        let error = connect("unix:///nonexistent/torpor.sock", &Options::default()).await.unwrap_err();
        let Error::Unreachable { kind, cause, .. } = error else { panic!("{error}") };
        assert_eq!(kind, Some(std::io::ErrorKind::NotFound), "{cause}");
    }

    #[tokio::test]
    async fn a_token_never_goes_in_the_clear_to_another_host_and_is_never_printed() {
        let options = Options { token: Some("tpr_secret".into()), ..Options::default() };
        let error = connect("http://192.0.2.1:1", &options).await.unwrap_err();
        assert!(matches!(error, Error::Endpoint { .. }), "{error}");
        assert!(!format!("{:?}", headers("", &options).unwrap()).contains("secret"));
        let bad = Options { token: Some("tpr_\nsecret".into()), ..Options::default() };
        let error = connect("unix:///nonexistent/torpor.sock", &bad).await.unwrap_err();
        assert!(!error.to_string().contains("secret"), "{error}");
    }
}
