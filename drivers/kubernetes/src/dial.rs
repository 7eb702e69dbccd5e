//! To an agent's own port, by mutual TLS.

use std::{
    io,
    net::{IpAddr, SocketAddr},
    pin::Pin,
    time::{Duration, SystemTime},
};

use tokio::{
    io::{AsyncRead, AsyncReadExt as _, AsyncWrite},
    net::TcpStream,
    time::timeout,
};
use tokio_rustls::{TlsConnector, rustls::pki_types::ServerName};

use crate::trust::{self, Trust};

/// For everything that there is to one dial: the pod is in the same cluster.
const DIAL: Duration = Duration::from_secs(2);
/// What an agent writes when it has let us in.
const LET_IN: u8 = 1;

/// What a connection is carried by.
pub(crate) trait Pipe: AsyncRead + AsyncWrite + Send {}
impl<T: AsyncRead + AsyncWrite + Send> Pipe for T {}
pub(crate) type Stream = Pin<Box<dyn Pipe>>;

/// A connection that the agent has let in.
pub(crate) struct Dialed {
    pub(crate) stream: Stream,
    /// Until when the agent's certificate holds.
    pub(crate) until: Option<SystemTime>,
}

/// The agent of this name, at the first of these addresses that answers.
///
/// # Errors
/// Why nobody does, in words.
pub(crate) async fn dial(
    trust: &Trust,
    addresses: &[IpAddr],
    port: u16,
    name: &str,
) -> Result<Dialed, String> {
    let Some(each) = u32::try_from(addresses.len()).ok().and_then(|count| DIAL.checked_div(count)) else {
        return Err("its pod has no address".to_owned());
    };
    let mut failed = Vec::new();
    for address in addresses {
        let address = SocketAddr::new(*address, port);
        match timeout(each, connect(trust, address, name)).await {
            Ok(Ok(dialed)) => return Ok(dialed),
            Ok(Err(error)) => failed.push(format!("{address}: {error}")),
            Err(_) => failed.push(format!("{address}: no answer within {:.1} s", each.as_secs_f64())),
        }
    }
    Err(failed.join("; "))
}

async fn connect(trust: &Trust, address: SocketAddr, name: &str) -> io::Result<Dialed> {
    let config = trust.client().map_err(io::Error::other)?;
    let name = ServerName::try_from(name.to_owned()).map_err(io::Error::other)?;
    let stream = TcpStream::connect(address).await?;
    stream.set_nodelay(true)?;
    let mut stream = TlsConnector::from(config).connect(name, stream).await?;
    // Our side has seen whom it wanted; that the other side has, too, is known by its first word only.
    let word = stream.read_u8().await?;
    if word != LET_IN {
        return Err(io::Error::new(io::ErrorKind::InvalidData, format!("its first word is {word}")));
    }
    let shown = stream.get_ref().1.peer_certificates().and_then(|all| all.first());
    let until = shown.and_then(|certificate| trust::holds_until(certificate));
    Ok(Dialed { stream: Box::pin(stream), until })
}
