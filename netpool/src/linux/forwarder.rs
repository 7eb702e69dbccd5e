//! A forwarder of name server questions: guests ask the host, the host asks its own servers. Messages pass as they are; only
//! the id of a question changes, and each goes out by a port of its own, so that nobody can answer in the server's place
//! without having seen it (RFC 5452).

use std::collections::HashMap;
use std::fs::File;
use std::io::{self, Read};
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, TcpListener, UdpSocket};
use std::os::fd::AsFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use nix::poll::{PollFd, PollFlags, PollTimeout, poll};

use super::error::NetError;
use super::tcp_names::TcpSide;
use crate::Ipv4Cidr;

/// The header of a message (RFC 1035, 4.1.1).
const HEADER: usize = 12;
/// The largest message that a client may announce for UDP.
const LARGEST: usize = 65_535;
/// How often the loop looks whether it is to end.
const TICK: Duration = Duration::from_millis(200);
/// The most questions that are taken in one turn, so that a flood of them keeps nobody's answers waiting.
const AT_ONCE: usize = 64;

/// How a forwarder works.
#[derive(Clone, Debug)]
pub struct ForwarderOptions {
    /// Whose questions are answered; `None`: everyone's.
    pub clients: Option<Ipv4Cidr>,
    /// The most questions that wait for an answer at one time.
    pub in_flight: usize,
    /// The most of them that one client has.
    pub in_flight_per_client: usize,
    /// How long a server may take before the next one is asked.
    pub patience: Duration,
}

impl Default for ForwarderOptions {
    fn default() -> Self {
        ForwarderOptions {
            clients: None,
            in_flight: 512,
            in_flight_per_client: 64,
            patience: Duration::from_secs(2),
        }
    }
}

/// A forwarder that runs in a thread of its own until it is dropped.
#[derive(Debug)]
pub struct Forwarder {
    addresses: Vec<SocketAddr>,
    counts: Arc<Counts>,
    ended: Arc<AtomicBool>,
    thread: Option<JoinHandle<()>>,
}

#[derive(Debug, Default)]
struct Counts {
    answered: AtomicU64,
    refused: AtomicU64,
    unanswered: AtomicU64,
}

impl Forwarder {
    /// Listens for UDP and TCP on `addresses` (port 0: one that is free, the same for both) and asks `upstreams`, in order. It
    /// lives in the network namespace of the calling thread.
    ///
    /// # Errors
    /// There is no upstream, or an address can't be listened on.
    pub fn start(
        addresses: &[SocketAddr],
        upstreams: &[SocketAddr],
        options: &ForwarderOptions,
    ) -> Result<Forwarder, NetError> {
        let mut listeners = Vec::new();
        for address in addresses {
            let failed = |source| NetError::Listen { address: *address, source };
            listeners.push(listen(*address).map_err(failed)?);
        }
        let addresses: Vec<SocketAddr> =
            listeners.iter().filter_map(|(udp, _)| udp.local_addr().ok()).collect();
        // A server that is this forwarder would ask itself for ever.
        let upstreams: Vec<SocketAddr> =
            upstreams.iter().filter(|up| !addresses.contains(up)).copied().collect();
        if upstreams.is_empty() {
            return Err(NetError::NoUpstream);
        }
        let (ended, counts) = (Arc::new(AtomicBool::new(false)), Arc::new(Counts::default()));
        let tcp = TcpSide::new(upstreams.clone(), options);
        let random = File::open("/dev/urandom").map_err(NetError::file("open", "/dev/urandom"))?;
        let mut state = Loop {
            listeners,
            upstreams,
            options: options.clone(),
            tcp,
            random,
            pending: Vec::new(),
            counts: Arc::clone(&counts),
        };
        let until = Arc::clone(&ended);
        let thread = std::thread::Builder::new()
            .name("names".to_string())
            .spawn(move || {
                while !until.load(Ordering::Relaxed) {
                    state.turn();
                }
            })
            .map_err(|source| NetError::File {
                what: "start a thread for",
                path: "the forwarder".into(),
                source,
            })?;
        Ok(Forwarder { addresses, counts, ended, thread: Some(thread) })
    }

    /// Where it listens.
    pub fn addresses(&self) -> &[SocketAddr] {
        &self.addresses
    }

    /// Questions over UDP that were answered, refused for want of room, and given up.
    pub fn counts(&self) -> (u64, u64, u64) {
        let Counts { answered, refused, unanswered } = &*self.counts;
        (
            answered.load(Ordering::Relaxed),
            refused.load(Ordering::Relaxed),
            unanswered.load(Ordering::Relaxed),
        )
    }
}

impl Drop for Forwarder {
    fn drop(&mut self) {
        self.ended.store(true, Ordering::Relaxed);
        if let Some(thread) = self.thread.take() {
            // A panic of the thread has been reported where it happened.
            let _ = thread.join();
        }
    }
}

fn listen(address: SocketAddr) -> io::Result<(UdpSocket, TcpListener)> {
    let udp = UdpSocket::bind(address)?;
    let tcp = TcpListener::bind(udp.local_addr()?)?;
    udp.set_nonblocking(true)?;
    tcp.set_nonblocking(true)?;
    Ok((udp, tcp))
}

/// A question that waits for its answer.
struct Pending {
    socket: UdpSocket,
    listener: usize,
    client: SocketAddr,
    /// As the client sent it.
    question: Vec<u8>,
    id: [u8; 2],
    upstream: usize,
    deadline: Instant,
}

struct Loop {
    listeners: Vec<(UdpSocket, TcpListener)>,
    upstreams: Vec<SocketAddr>,
    options: ForwarderOptions,
    tcp: TcpSide,
    random: File,
    pending: Vec<Pending>,
    counts: Arc<Counts>,
}

impl Loop {
    /// Waits for something to do, and does it.
    fn turn(&mut self) {
        let now = Instant::now();
        let next = self.pending.iter().map(|one| one.deadline.saturating_duration_since(now)).min();
        // A poll must not end just before the deadline that it waits for.
        let wait = next.map_or(TICK, |next| next + Duration::from_millis(1)).min(TICK);
        let mut fds: Vec<PollFd<'_>> = Vec::new();
        for (udp, tcp) in &self.listeners {
            fds.extend([
                PollFd::new(udp.as_fd(), PollFlags::POLLIN),
                PollFd::new(tcp.as_fd(), PollFlags::POLLIN),
            ]);
        }
        fds.extend(self.pending.iter().map(|one| PollFd::new(one.socket.as_fd(), PollFlags::POLLIN)));
        if poll(&mut fds, PollTimeout::try_from(wait).unwrap_or(PollTimeout::ZERO)).is_err() {
            std::thread::sleep(TICK);
        }
        let ready: Vec<bool> = fds.iter().map(|fd| fd.any().unwrap_or(true)).collect();
        let (listening, waiting) = ready.split_at(2 * self.listeners.len());
        self.answers(waiting);
        for (number, ready) in listening.chunks(2).enumerate() {
            if ready.first() == Some(&true) {
                self.questions(number);
            }
            if ready.get(1) == Some(&true) {
                self.tcp.accept(&self.listeners[number].1);
            }
        }
    }

    /// Takes questions in, [`AT_ONCE`] of them; the next poll comes back for the rest.
    fn questions(&mut self, listener: usize) {
        let mut buffer = vec![0; LARGEST];
        for _ in 0..AT_ONCE {
            let Ok((length, client)) = self.listeners[listener].0.recv_from(&mut buffer) else { return };
            let question = &buffer[..length];
            if !is_question(question) || !allowed(self.options.clients, client.ip()) {
                continue;
            }
            let own = self.pending.iter().filter(|one| one.client.ip() == client.ip()).count();
            if self.pending.len() >= self.options.in_flight || own >= self.options.in_flight_per_client {
                self.counts.refused.fetch_add(1, Ordering::Relaxed);
                self.fail(listener, client, question);
                continue;
            }
            match self.ask(listener, client, question.to_vec(), 0) {
                Some(pending) => self.pending.push(pending),
                None => self.fail(listener, client, &buffer[..length]),
            }
        }
    }

    /// Sends a question to the first server, from `upstream` on, that it can be sent to.
    fn ask(
        &mut self,
        listener: usize,
        client: SocketAddr,
        question: Vec<u8>,
        upstream: usize,
    ) -> Option<Pending> {
        for upstream in upstream..self.upstreams.len() {
            let mut id = [0; 2];
            self.random.read_exact(&mut id).ok()?;
            let mut message = question.clone();
            message[..2].copy_from_slice(&id);
            if let Ok(socket) = send(self.upstreams[upstream], &message) {
                let deadline = Instant::now() + self.options.patience;
                return Some(Pending { socket, listener, client, question, id, upstream, deadline });
            }
        }
        None
    }

    /// Passes on the answers that have come, and asks the next server where one takes too long.
    fn answers(&mut self, ready: &[bool]) {
        let mut buffer = vec![0; LARGEST];
        let all = std::mem::take(&mut self.pending);
        let now = Instant::now();
        for (number, pending) in all.into_iter().enumerate() {
            let answer = match ready.get(number) {
                Some(true) => receive(&pending, &mut buffer),
                _ => Received::Nothing,
            };
            match answer {
                Received::Answer(length) => {
                    buffer[..2].copy_from_slice(&pending.question[..2]);
                    self.counts.answered.fetch_add(1, Ordering::Relaxed);
                    // Who has gone away meanwhile gets no answer.
                    let _ = self.listeners[pending.listener].0.send_to(&buffer[..length], pending.client);
                }
                Received::Nothing if pending.deadline > now => self.pending.push(pending),
                Received::Nothing | Received::Unreachable => {
                    let Pending { listener, client, question, upstream, .. } = pending;
                    match self.ask(listener, client, question.clone(), upstream + 1) {
                        Some(next) => self.pending.push(next),
                        None => {
                            self.counts.unanswered.fetch_add(1, Ordering::Relaxed);
                            self.fail(listener, client, &question);
                        }
                    }
                }
            }
        }
    }

    /// Tells the client that there is no answer.
    fn fail(&self, listener: usize, client: SocketAddr, question: &[u8]) {
        let _ = self.listeners[listener].0.send_to(&server_failure(question), client);
    }
}

enum Received {
    Answer(usize),
    Nothing,
    /// The server's host says that nobody listens.
    Unreachable,
}

/// The answer to exactly this question, as its server sent it: the socket is connected, the id is ours, and the question is
/// repeated in it. Others are passed over.
fn receive(pending: &Pending, buffer: &mut [u8]) -> Received {
    loop {
        match pending.socket.recv(buffer) {
            Ok(length) => {
                let message = &buffer[..length];
                let is_answer = length >= HEADER && message[2] & 0x80 != 0 && message[..2] == pending.id;
                if is_answer && repeats(message, &pending.question) {
                    return Received::Answer(length);
                }
            }
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => return Received::Nothing,
            Err(_) => return Received::Unreachable,
        }
    }
}

fn send(server: SocketAddr, message: &[u8]) -> io::Result<UdpSocket> {
    let any: IpAddr =
        if server.is_ipv4() { Ipv4Addr::UNSPECIFIED.into() } else { Ipv6Addr::UNSPECIFIED.into() };
    let socket = UdpSocket::bind((any, 0))?;
    socket.connect(server)?;
    socket.set_nonblocking(true)?;
    socket.send(message)?;
    Ok(socket)
}

pub(super) fn is_question(message: &[u8]) -> bool {
    message.len() >= HEADER && message[2] & 0x80 == 0
}

pub(super) fn allowed(clients: Option<Ipv4Cidr>, client: IpAddr) -> bool {
    match (clients, client) {
        (None, _) => true,
        (Some(network), IpAddr::V4(address)) => network.contains(address),
        (Some(_), IpAddr::V6(_)) => false,
    }
}

/// Whether the answer has the same first question. Names are compared without case: some servers answer in lower case.
fn repeats(answer: &[u8], question: &[u8]) -> bool {
    match (question_part(answer), question_part(question)) {
        (Some(one), Some(other)) => one.eq_ignore_ascii_case(other),
        // A server that didn't understand the question may leave it out.
        (None, _) => answer.get(4..6) == Some(&[0, 0]),
        (Some(_), None) => false,
    }
}

/// Name, type and class of the first question (RFC 1035, 4.1.2).
fn question_part(message: &[u8]) -> Option<&[u8]> {
    if message.get(4..6)? == [0, 0] {
        return None;
    }
    let mut at = HEADER;
    loop {
        match usize::from(*message.get(at)?) {
            0 => return message.get(HEADER..at + 5),
            // Pointers have no place in the first question.
            length @ 1..=63 => at += 1 + length,
            _ => return None,
        }
    }
}

/// The question as an answer with the code SERVFAIL.
pub(super) fn server_failure(question: &[u8]) -> Vec<u8> {
    let part = question_part(question).unwrap_or_default();
    let mut answer = question[..HEADER].to_vec();
    answer[2] = 0x80 | (question[2] & 0x79);
    answer[3] = 0x80 | 2;
    answer[4..].fill(0);
    answer[5] = u8::from(!part.is_empty());
    answer.extend(part);
    answer
}

/// How many connections or questions each client has.
pub(super) type PerClient = HashMap<IpAddr, usize>;

#[cfg(test)]
mod tests {
    use super::*;

    /// A question for example.org, type A.
    pub(crate) fn question(id: u16) -> Vec<u8> {
        let mut message = id.to_be_bytes().to_vec();
        message.extend([1, 0, 0, 1, 0, 0, 0, 0, 0, 0]);
        message.extend(b"\x07example\x03org\0\0\x01\0\x01");
        message
    }

    #[test]
    fn a_flood_of_questions_is_taken_in_portions() {
        let listener = listen((Ipv4Addr::LOCALHOST, 0).into()).unwrap();
        let to = listener.0.local_addr().unwrap();
        let options = ForwarderOptions { in_flight: 0, ..ForwarderOptions::default() };
        let mut state = Loop {
            listeners: vec![listener],
            upstreams: vec![to],
            tcp: TcpSide::new(vec![to], &options),
            options,
            random: File::open("/dev/urandom").unwrap(),
            pending: Vec::new(),
            counts: Arc::default(),
        };
        let client = UdpSocket::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
        for id in 0..AT_ONCE + 10 {
            client.send_to(&question(id as u16), to).unwrap();
        }
        let refused = |state: &Loop| state.counts.refused.load(Ordering::Relaxed) as usize;
        state.questions(0);
        assert_eq!(refused(&state), AT_ONCE);
        state.questions(0);
        assert_eq!(refused(&state), AT_ONCE + 10);
    }

    #[test]
    fn a_failure_repeats_the_question_and_nothing_else() {
        let mut asked = question(7);
        asked.extend([0; 11]);
        asked[11] = 1;
        let answer = server_failure(&asked);
        assert_eq!(answer[..12], [0, 7, 0x81, 0x82, 0, 1, 0, 0, 0, 0, 0, 0]);
        assert_eq!(answer[12..], question(7)[12..]);
        assert_eq!(server_failure(&[0; 12]).len(), 12, "a question without a question");
    }

    #[test]
    fn answers_to_other_questions_are_not_taken() {
        let asked = question(7);
        assert!(repeats(&asked, &asked));
        let mut upper = asked.clone();
        upper[13..20].make_ascii_uppercase();
        assert!(repeats(&upper, &asked));
        let mut other = asked.clone();
        other[14] = b'z';
        assert!(!repeats(&other, &asked));
        let mut none = asked[..12].to_vec();
        none[5] = 0;
        assert!(repeats(&none, &asked));
        for bad in [&asked[..15], &[0xff; 40]] {
            assert!(!repeats(bad, &asked));
        }
    }

    #[test]
    fn only_questions_of_the_pools_range_are_taken() {
        let range = Some("10.231.0.0/16".parse().unwrap());
        assert!(
            allowed(range, Ipv4Addr::new(10, 231, 9, 2).into()) && allowed(None, Ipv6Addr::LOCALHOST.into())
        );
        assert!(!allowed(range, Ipv4Addr::LOCALHOST.into()) && !allowed(range, Ipv6Addr::LOCALHOST.into()));
        assert!(is_question(&question(1)) && !is_question(&question(1)[..11]) && !is_question(&[0xff; 12]));
    }
}
