//! The control socket's clients: JSON lines in, JSON lines out, all of it bounded.

use std::collections::BTreeMap;
use std::io::{self, Read as _, Write as _};
use std::ops::ControlFlow;
use std::os::fd::{AsFd as _, BorrowedFd};
use std::os::unix::net::{UnixListener, UnixStream};

use nix::sys::epoll::{Epoll, EpollEvent, EpollFlags};
use nix::sys::socket::{SockFlag, accept4};
use torpor_vmm_api::{Event, LONGEST_REQUEST, Reply, Request, Requests};

/// Most clients at once; one more is turned away.
pub(super) const MOST_CLIENTS: usize = 16;
/// Most bytes that wait for a client to read them; who reads slower is dropped.
const MOST_WAITING: usize = 64 << 10;
/// Clients' numbers begin here; those below are the caller's.
pub(super) const FIRST_CLIENT: u64 = 16;

struct Client {
    stream: UnixStream,
    requests: Requests,
    output: Vec<u8>,
    subscribed: bool,
    /// The kernel tells when it can be written to.
    watched: bool,
}

/// Whether a client stays.
#[derive(PartialEq, Eq)]
enum Verdict {
    Stays,
    Goes,
}

/// All clients.
#[derive(Default)]
pub(super) struct Clients {
    clients: BTreeMap<u64, Client>,
    accepted: u64,
}

impl Clients {
    /// Takes in who is waiting.
    pub(super) fn accept(&mut self, listener: &UnixListener, epoll: &Epoll) -> io::Result<()> {
        let flags = SockFlag::SOCK_NONBLOCK | SockFlag::SOCK_CLOEXEC;
        let mut stream = match accept4(listener, flags).map_err(io::Error::from) {
            Ok(fd) => UnixStream::from(fd),
            Err(error) if is_passing(&error) => return Ok(()),
            Err(error) => return Err(error),
        };
        if self.clients.len() >= MOST_CLIENTS {
            let reason = format!("{MOST_CLIENTS} clients are connected already");
            // It may be gone, too.
            let _ = stream.write(&line(&Reply::Refused { reason }));
            return Ok(());
        }
        let number = FIRST_CLIENT + self.accepted;
        self.accepted += 1;
        epoll.add(stream.as_fd(), EpollEvent::new(EpollFlags::EPOLLIN, number))?;
        let (requests, output) = (Requests::default(), Vec::new());
        let client = Client { stream, requests, output, subscribed: false, watched: false };
        self.clients.insert(number, client);
        Ok(())
    }

    /// A client can be read from or written to.
    pub(super) fn serve(&mut self, number: u64, epoll: &Epoll, answer: &mut dyn FnMut(Request) -> Reply) {
        let Some(client) = self.clients.get_mut(&number) else { return };
        if client.read(answer) == Verdict::Goes || client.write(number, epoll) == Verdict::Goes {
            // Closing its only descriptor ends its registration.
            self.clients.remove(&number);
        }
    }

    /// Tells all who want to know.
    pub(super) fn tell(&mut self, event: &Event, epoll: &Epoll) {
        if self.clients.values().all(|client| !client.subscribed) {
            return;
        }
        let line = line(&Reply::Event(event.clone()));
        self.clients.retain(|number, client| {
            if client.subscribed {
                client.output.extend_from_slice(&line);
            }
            !client.subscribed || client.write(*number, epoll) == Verdict::Stays
        });
    }
}

/// An error of accept that has nothing to do with the next one.
fn is_passing(error: &io::Error) -> bool {
    use io::ErrorKind::{ConnectionAborted, Interrupted, WouldBlock};
    matches!(error.kind(), WouldBlock | Interrupted | ConnectionAborted)
}

/// The host was short of something when it accepted; it may have it again later.
pub(super) fn is_shortage(error: &io::Error) -> bool {
    use nix::errno::Errno::{EMFILE, ENFILE, ENOBUFS, ENOMEM, ENOSPC};
    let short = [EMFILE, ENFILE, ENOBUFS, ENOMEM, ENOSPC];
    short.iter().any(|errno| error.raw_os_error() == Some(*errno as i32))
}

/// The answer to one line.
fn reply(
    request: Result<Request, String>,
    subscribed: &mut bool,
    answer: &mut dyn FnMut(Request) -> Reply,
) -> Reply {
    match request {
        Ok(Request::Subscribe) => {
            *subscribed = true;
            Reply::Done
        }
        Ok(request) => answer(request),
        Err(error) => Reply::Refused { reason: format!("not a request: {error}") },
    }
}

fn line(reply: &Reply) -> Vec<u8> {
    // These types always become JSON.
    let mut line = serde_json::to_vec(reply).unwrap_or_default();
    line.push(b'\n');
    line
}

impl Client {
    fn fd(&self) -> BorrowedFd<'_> {
        self.stream.as_fd()
    }

    /// Takes in what fits and answers all whole lines in it.
    fn read(&mut self, answer: &mut dyn FnMut(Request) -> Reply) -> Verdict {
        let mut chunk = [0; LONGEST_REQUEST];
        let count = match self.stream.read(&mut chunk) {
            Ok(0) => return Verdict::Goes,
            Ok(count) => count,
            Err(error) if is_passing(&error) => return Verdict::Stays,
            Err(_) => return Verdict::Goes,
        };
        let Self { requests, output, subscribed, .. } = self;
        let taken = requests.take(&chunk[..count], |request| {
            output.extend(line(&reply(request, subscribed, answer)));
            match output.len() > MOST_WAITING {
                true => ControlFlow::Break(()),
                false => ControlFlow::Continue(()),
            }
        });
        match taken {
            Ok(ControlFlow::Continue(())) => Verdict::Stays,
            Ok(ControlFlow::Break(())) => Verdict::Goes,
            Err(error) => {
                // It is gone after this anyway.
                let _ = self.stream.write(&line(&Reply::Refused { reason: error.to_string() }));
                Verdict::Goes
            }
        }
    }

    /// Sends what waits; what doesn't fit waits on.
    fn write(&mut self, number: u64, epoll: &Epoll) -> Verdict {
        while !self.output.is_empty() {
            match self.stream.write(&self.output) {
                Ok(count) => drop(self.output.drain(..count)),
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => break,
                Err(_) => return Verdict::Goes,
            }
        }
        if self.output.len() > MOST_WAITING {
            return Verdict::Goes;
        }
        let wanted = !self.output.is_empty();
        if wanted == std::mem::replace(&mut self.watched, wanted) {
            return Verdict::Stays;
        }
        let flags = if wanted { EpollFlags::EPOLLIN | EpollFlags::EPOLLOUT } else { EpollFlags::EPOLLIN };
        match epoll.modify(self.fd(), &mut EpollEvent::new(flags, number)) {
            Ok(()) => Verdict::Stays,
            Err(_) => Verdict::Goes,
        }
    }
}
