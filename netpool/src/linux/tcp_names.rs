//! The forwarder's TCP side: a thread for each connection, of which there are few, since only long answers come this way.

use std::io::{self, Read, Write};
use std::net::{IpAddr, SocketAddr, TcpListener, TcpStream};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use super::forwarder::{ForwarderOptions, PerClient, allowed, is_question, server_failure};
use crate::Ipv4Cidr;

/// The most connections, and the most of one client.
const CONNECTIONS: usize = 64;
const PER_CLIENT: usize = 8;
/// How long a client may be silent (RFC 7766 asks for seconds).
const IDLE: Duration = Duration::from_secs(10);

pub(super) struct TcpSide {
    upstreams: Arc<Vec<SocketAddr>>,
    clients: Option<Ipv4Cidr>,
    patience: Duration,
    open: Arc<Mutex<PerClient>>,
}

impl TcpSide {
    pub(super) fn new(upstreams: Vec<SocketAddr>, options: &ForwarderOptions) -> TcpSide {
        let (clients, patience) = (options.clients, options.patience);
        TcpSide { upstreams: Arc::new(upstreams), clients, patience, open: Arc::default() }
    }

    /// Takes in the connections that wait; what is too much is closed.
    pub(super) fn accept(&self, listener: &TcpListener) {
        while let Ok((stream, client)) = listener.accept() {
            let client = client.ip();
            let Some(place) = self.place(client).filter(|_| allowed(self.clients, client)) else { continue };
            let (upstreams, patience) = (Arc::clone(&self.upstreams), self.patience);
            let serve = move || {
                // Either side has closed, or was silent for too long: nothing remains to be said.
                let _ = serve(stream, &upstreams, patience);
                drop(place);
            };
            // Without a thread the connection is closed, and the client asks again.
            let _ = std::thread::Builder::new().name("names-tcp".to_string()).spawn(serve);
        }
    }

    fn place(&self, client: IpAddr) -> Option<Place> {
        let mut open = self.open.lock().unwrap_or_else(PoisonError::into_inner);
        if open.values().sum::<usize>() >= CONNECTIONS
            || open.get(&client).is_some_and(|own| *own >= PER_CLIENT)
        {
            return None;
        }
        *open.entry(client).or_insert(0) += 1;
        Some(Place { open: Arc::clone(&self.open), client })
    }
}

/// One of the connections that may be open.
struct Place {
    open: Arc<Mutex<PerClient>>,
    client: IpAddr,
}

impl Drop for Place {
    fn drop(&mut self) {
        let mut open = self.open.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(own) = open.get_mut(&self.client) {
            *own -= 1;
        }
        open.retain(|_, own| *own > 0);
    }
}

fn serve(mut client: TcpStream, upstreams: &[SocketAddr], patience: Duration) -> io::Result<()> {
    client.set_nonblocking(false)?;
    client.set_read_timeout(Some(IDLE))?;
    client.set_write_timeout(Some(IDLE))?;
    loop {
        let question = read_message(&mut client)?;
        if !is_question(&question) {
            return Ok(());
        }
        let answer = upstreams.iter().find_map(|server| ask(*server, &question, patience).ok());
        write_message(&mut client, &answer.unwrap_or_else(|| server_failure(&question)))?;
    }
}

fn ask(server: SocketAddr, question: &[u8], patience: Duration) -> io::Result<Vec<u8>> {
    let mut stream = TcpStream::connect_timeout(&server, patience)?;
    stream.set_read_timeout(Some(patience))?;
    stream.set_write_timeout(Some(patience))?;
    write_message(&mut stream, question)?;
    read_message(&mut stream)
}

/// A message over TCP is preceded by its length (RFC 1035, 4.2.2).
fn read_message(stream: &mut TcpStream) -> io::Result<Vec<u8>> {
    let mut length = [0; 2];
    stream.read_exact(&mut length)?;
    let mut message = vec![0; usize::from(u16::from_be_bytes(length))];
    stream.read_exact(&mut message)?;
    Ok(message)
}

fn write_message(stream: &mut TcpStream, message: &[u8]) -> io::Result<()> {
    let length = u16::try_from(message.len()).map_err(io::Error::other)?;
    stream.write_all(&[&length.to_be_bytes()[..], message].concat())
}
