//! The host's side before there is a connection: the listening socket, what a client says first, and where listeners for
//! the guest are.

use std::ffi::OsString;
use std::io;
use std::os::unix::fs::PermissionsExt;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};

use super::socket;

/// Bytes of the longest first line.
const LINE: usize = "CONNECT 4294967295\n".len();

/// The device's Unix socket.
#[derive(Debug)]
pub struct HostSocket {
    pub(super) listener: UnixListener,
    /// What a port is added to, to get a listener's path.
    peers: OsString,
}

impl HostSocket {
    /// Makes the socket, for this user only. Before the process confines itself; afterwards see [`HostSocket::find_peers_at`].
    ///
    /// # Errors
    /// The path is taken, or can't be made.
    pub fn bind(path: &Path) -> io::Result<Self> {
        let listener = UnixListener::bind(path)?;
        std::fs::set_permissions(path, std::fs::Permissions::from_mode(0o600))?;
        Self::new(listener, path.to_owned())
    }

    /// With a socket that listens already, bound to `path`.
    ///
    /// # Errors
    /// It can't be set to not waiting.
    pub fn new(listener: UnixListener, path: PathBuf) -> io::Result<Self> {
        listener.set_nonblocking(true)?;
        Ok(Self { listener, peers: prefix(path) })
    }

    /// A guest that connects to port P is connected to a listener at `path_P`. In a process whose root is empty this is a
    /// path from its working directory: `./vsock`, while it stays in the directory where the socket is.
    #[must_use]
    pub fn find_peers_at(mut self, path: PathBuf) -> Self {
        self.peers = prefix(path);
        self
    }

    /// A guest that connects to port P is connected to a listener at `folder/P`.
    #[must_use]
    pub fn find_peers_in(mut self, folder: &Path) -> Self {
        self.peers = folder.join("").into();
        self
    }

    pub(super) fn connect(&self, port: u32) -> io::Result<UnixStream> {
        let mut path = self.peers.clone();
        path.push(port.to_string());
        socket::connect_to(Path::new(&path))
    }
}

fn prefix(path: PathBuf) -> OsString {
    let mut prefix = OsString::from(path);
    prefix.push("_");
    prefix
}

/// What a client wants.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Wish {
    /// The guest's port.
    pub(super) port: u32,
    /// Held until somebody listens there, instead of refused.
    pub(super) patient: bool,
}

/// What came of reading a client's first line.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Greeting {
    Said(Wish),
    /// Not yet all of it.
    Unfinished,
    /// It is gone, or says something else.
    Nonsense,
}

/// Reads the first line and not a byte of what follows it.
pub(super) fn greeting(stream: &UnixStream) -> Greeting {
    let mut bytes = [0; LINE];
    let count = match socket::receive_bytes(stream, &mut bytes, true) {
        Ok(0) => return Greeting::Nonsense,
        Ok(count) => count,
        Err(error) if error.kind() == io::ErrorKind::WouldBlock => return Greeting::Unfinished,
        Err(_) => return Greeting::Nonsense,
    };
    let Some(end) = bytes[..count].iter().position(|byte| *byte == b'\n') else {
        return if count < LINE { Greeting::Unfinished } else { Greeting::Nonsense };
    };
    let mut line = [0; LINE];
    let taken = socket::receive_bytes(stream, &mut line[..=end], false);
    match (taken, parse(&bytes[..end])) {
        (Ok(count), Some(wish)) if count == end + 1 => Greeting::Said(wish),
        _ => Greeting::Nonsense,
    }
}

fn parse(line: &[u8]) -> Option<Wish> {
    let (word, port) = std::str::from_utf8(line).ok()?.split_once(' ')?;
    let patient = match word {
        "CONNECT" => false,
        "AWAIT" => true,
        _ => return None,
    };
    let digits = port.bytes().all(|byte| byte.is_ascii_digit());
    Some(Wish { port: port.parse().ok().filter(|_| digits)?, patient })
}

#[cfg(test)]
mod tests {
    use std::io::{Read, Write};

    use super::*;

    #[test]
    fn the_first_line_is_taken_and_what_follows_stays() {
        let (mut client, mut ours) = UnixStream::pair().unwrap();
        assert_eq!(greeting(&ours), Greeting::Unfinished);
        client.write_all(b"AWAIT 10").unwrap();
        assert_eq!(greeting(&ours), Greeting::Unfinished);
        client.write_all(b"24\nhello").unwrap();
        assert_eq!(greeting(&ours), Greeting::Said(Wish { port: 1024, patient: true }));
        let mut rest = [0; 5];
        ours.read_exact(&mut rest).unwrap();
        assert_eq!(&rest, b"hello");
    }

    #[test]
    fn lines_that_mean_nothing_are_nonsense() {
        let long = "CONNECT 00000000000000000000000001\n";
        for line in
            ["\n", "CONNECT\n", "CONNECT x\n", "CONNECT +1\n", "CONNECT 4294967296\n", "connect 1\n", long]
        {
            let (mut client, ours) = UnixStream::pair().unwrap();
            client.write_all(line.as_bytes()).unwrap();
            assert_eq!(greeting(&ours), Greeting::Nonsense, "{line:?}");
        }
        let (client, ours) = UnixStream::pair().unwrap();
        drop(client);
        assert_eq!(greeting(&ours), Greeting::Nonsense);
    }
}
