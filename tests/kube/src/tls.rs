//! The same cluster over TLS, by a certificate of its own, for those who know its CA and its token.

use std::{io, sync::Arc};

use tokio::{
    net::{TcpListener, TcpStream},
    task::JoinHandle,
};
use tokio_rustls::{
    TlsAcceptor,
    rustls::{ServerConfig, crypto::ring, pki_types::PrivateKeyDer},
};

use crate::Server;

/// Until it is dropped.
#[derive(Debug)]
pub struct Front {
    /// `https://127.0.0.1:PORT`.
    pub url: String,
    /// PEM of what its certificate is signed by.
    pub ca: String,
    task: JoinHandle<()>,
}

impl Drop for Front {
    fn drop(&mut self) {
        self.task.abort();
    }
}

impl Server {
    /// Answers over TLS as well. From now on every request, on either way, must carry this token.
    ///
    /// # Errors
    /// When there is no port to listen on, or no certificate can be made.
    pub async fn secure(&self, token: &str) -> io::Result<Front> {
        let made = rcgen::generate_simple_self_signed(["127.0.0.1".to_owned()]).map_err(io::Error::other)?;
        let key = PrivateKeyDer::try_from(made.signing_key.serialize_der()).map_err(io::Error::other)?;
        let config = ServerConfig::builder_with_provider(Arc::new(ring::default_provider()))
            .with_safe_default_protocol_versions()
            .map_err(io::Error::other)?
            .with_no_client_auth()
            .with_single_cert(vec![made.cert.der().clone()], key)
            .map_err(io::Error::other)?;
        let listener = TcpListener::bind("127.0.0.1:0").await?;
        let url = format!("https://{}", listener.local_addr()?);
        self.want_token(token);
        let (acceptor, behind) = (TlsAcceptor::from(Arc::new(config)), self.address);
        let task = tokio::spawn(async move {
            while let Ok((stream, _)) = listener.accept().await {
                let acceptor = acceptor.clone();
                tokio::spawn(async move {
                    // A client that doesn't like the certificate goes away.
                    let Ok(mut stream) = acceptor.accept(stream).await else { return };
                    if let Ok(mut plain) = TcpStream::connect(behind).await {
                        let _ended = tokio::io::copy_bidirectional(&mut stream, &mut plain).await.is_err();
                    }
                });
            }
        });
        Ok(Front { url, ca: made.cert.pem(), task })
    }
}
