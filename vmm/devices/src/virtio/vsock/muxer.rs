//! All connections: which packet goes to which, whose turn it is, and what is due when.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::io;
use std::os::fd::AsRawFd;
use std::os::unix::net::UnixStream;
use std::time::{Duration, Instant};

use libc::iovec;
use vmm_sys_util::epoll::{ControlOperation, Epoll, EpollEvent, EventSet};

use super::connection::{Asking, Connection, Phase, Ports, due};
use super::host::{Greeting, HostSocket, Wish, greeting};
use super::packet::{HEADER_BYTES, HOST_CID, Header, STREAM, operation};
use crate::virtio::segments::Segments;

/// The epoll token of the listening socket. Connections' begin at [`FIRST`]; those between are the engine's.
pub(super) const LISTENER: u64 = 0;
pub(super) const FIRST: u64 = 16;

/// What each of the first connections may have on its way to the host, and each of the later ones.
const WINDOW: u32 = 64 << 10;
const SMALL_WINDOW: u32 = 16 << 10;
const LARGE_WINDOWS: usize = 32;
/// Most resets that wait for room in the guest's queue; more are dropped: who waits for one has a timeout.
const MAX_STRAY: usize = 256;
/// The host's ports.
const PORTS: std::ops::Range<u32> = 1 << 30..1 << 31;

/// How long a client may take to say what it wants, and the guest to answer one that isn't patient.
const PATIENCE: Duration = Duration::from_secs(5);
/// How long the guest may take to part with a connection.
const PARTING: Duration = Duration::from_secs(2);
/// How long the host may take to read what a guest that is gone has sent.
const DRAINING: Duration = Duration::from_secs(10);
/// Between two requests for a patient client: from this, doubled, to that.
const FIRST_DELAY: Duration = Duration::from_millis(5);
const LAST_DELAY: Duration = Duration::from_millis(100);
/// When the guest shows signs of life it is asked at once, but not more often than this.
const NUDGE: Duration = Duration::from_millis(1);
/// After the process ran out of descriptors.
const ACCEPT_AGAIN: Duration = Duration::from_millis(100);

/// What outlives the driver: the socket, and clients that nobody has answered yet.
pub(super) struct HostSide {
    socket: HostSocket,
    epoll: Epoll,
    waiting: Vec<(UnixStream, Option<Wish>)>,
}

impl HostSide {
    pub(super) fn new(socket: HostSocket) -> io::Result<Self> {
        let epoll = Epoll::new()?;
        let event = EpollEvent::new(EventSet::IN | EventSet::EDGE_TRIGGERED, LISTENER);
        epoll.ctl(ControlOperation::Add, socket.listener.as_raw_fd(), event)?;
        Ok(Self { socket, epoll, waiting: Vec::new() })
    }
}

/// The connections of one life of the driver.
pub(super) struct Muxer {
    cid: u64,
    limit: usize,
    side: HostSide,
    connections: BTreeMap<u64, Connection>,
    by_ports: BTreeMap<Ports, u64>,
    /// Who has something for the guest, in turn.
    ready: VecDeque<u64>,
    stray: VecDeque<Header>,
    timers: BTreeSet<(Instant, u64)>,
    next_id: u64,
    next_port: u32,
    /// Connections that the guest began.
    of_guest: usize,
    /// Patient clients between two requests.
    between: usize,
    nudged: Instant,
    /// Clients are left in the backlog.
    full: bool,
    scratch: Vec<iovec>,
}

impl Muxer {
    pub(super) fn new(cid: u32, limit: usize, mut side: HostSide, now: Instant) -> Self {
        let waiting = std::mem::take(&mut side.waiting);
        let mut muxer = Self {
            cid: u64::from(cid),
            limit,
            side,
            connections: BTreeMap::new(),
            by_ports: BTreeMap::new(),
            ready: VecDeque::new(),
            stray: VecDeque::new(),
            timers: BTreeSet::new(),
            next_id: FIRST,
            next_port: PORTS.start,
            of_guest: 0,
            between: 0,
            nudged: now,
            full: false,
            scratch: Vec::new(),
        };
        for (stream, wish) in waiting {
            muxer.greet(stream, wish, now);
        }
        muxer.accept(now);
        muxer
    }

    pub(super) fn epoll(&self) -> &Epoll {
        &self.side.epoll
    }

    /// Ends the driver's life. Clients that wait for the guest wait on.
    pub(super) fn finish(mut self) -> HostSide {
        for connection in std::mem::take(&mut self.connections).into_values() {
            let wish = match connection.phase {
                Phase::Greeting => None,
                Phase::Asking(asking) if asking.wish.patient => Some(asking.wish),
                _ => continue,
            };
            if let Some(stream) = connection.stream {
                let _ =
                    self.side.epoll.ctl(ControlOperation::Delete, stream.as_raw_fd(), EpollEvent::default());
                self.side.waiting.push((stream, wish));
            }
        }
        self.side
    }

    /// All connections are over, as the guest knows: it has been restored from an image. Clients that wait for it
    /// wait on.
    pub(super) fn restored(&mut self) {
        let over: Vec<u64> = self
            .connections
            .iter()
            .filter(|(_, connection)| !matches!(connection.phase, Phase::Greeting | Phase::Asking(_)))
            .map(|(id, _)| *id)
            .collect();
        over.into_iter().for_each(|id| self.remove(id));
        self.stray.clear();
    }

    // ---- clients of the host

    /// Takes clients while there is room.
    fn accept(&mut self, now: Instant) {
        self.full = false;
        while self.connections.len() < self.limit {
            match self.side.socket.listener.accept() {
                Ok((stream, _)) => self.greet(stream, None, now),
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => return,
                Err(_) => {
                    self.timers.insert((now + ACCEPT_AGAIN, LISTENER));
                    return;
                }
            }
        }
        self.full = true;
    }

    fn greet(&mut self, stream: UnixStream, wish: Option<Wish>, now: Instant) {
        let connection = Connection::new(stream, Ports::default(), Phase::Greeting, self.window());
        let Some(id) = self.insert(connection) else { return };
        match wish {
            Some(wish) => self.ask(id, wish, now),
            None => {
                // Read when epoll has told whether the client is still there, which is next.
                self.set_timer(id, Some(now + PATIENCE));
            }
        }
    }

    fn window(&self) -> u32 {
        if self.connections.len() < LARGE_WINDOWS { WINDOW } else { SMALL_WINDOW }
    }

    /// None: the process can't watch it, and it is closed.
    fn insert(&mut self, connection: Connection) -> Option<u64> {
        let id = self.next_id;
        let all = EventSet::IN | EventSet::OUT | EventSet::READ_HANG_UP | EventSet::EDGE_TRIGGERED;
        let descriptor = connection.stream.as_ref()?.as_raw_fd();
        self.side.epoll.ctl(ControlOperation::Add, descriptor, EpollEvent::new(all, id)).ok()?;
        self.next_id += 1;
        self.connections.insert(id, connection);
        Some(id)
    }

    fn read_greeting(&mut self, id: u64, now: Instant) {
        let Some(stream) = self.connections.get(&id).and_then(|connection| connection.stream.as_ref()) else {
            return;
        };
        match greeting(stream) {
            Greeting::Said(wish) => self.ask(id, wish, now),
            Greeting::Unfinished => {}
            Greeting::Nonsense => self.remove(id),
        }
    }

    fn ask(&mut self, id: u64, wish: Wish, now: Instant) {
        let host = self.free_port(wish.port);
        let Some(connection) = self.connections.get_mut(&id) else { return };
        connection.ports = Ports { guest: wish.port, host };
        connection.phase = Phase::Asking(Asking { wish, asked: true, delay: FIRST_DELAY });
        connection.due = due::REQUEST;
        self.by_ports.insert(connection.ports, id);
        self.enqueue(id);
        // A patient client's request is answered when the guest comes to it: it isn't lost, and isn't sent twice.
        self.set_timer(id, (!wish.patient).then(|| now + PATIENCE));
    }

    /// There are far more ports than connections.
    fn free_port(&mut self, guest: u32) -> u32 {
        loop {
            let host = self.next_port;
            self.next_port = if host + 1 == PORTS.end { PORTS.start } else { host + 1 };
            if !self.by_ports.contains_key(&Ports { guest, host }) {
                return host;
            }
        }
    }

    /// The guest refused. A patient client is asked for again later.
    fn refused(&mut self, id: u64, mut asking: Asking, now: Instant) {
        if !asking.wish.patient {
            return self.remove(id);
        }
        let Some(connection) = self.connections.get_mut(&id) else { return };
        self.between += usize::from(asking.asked);
        asking.asked = false;
        let again = now + asking.delay;
        asking.delay = (asking.delay * 2).min(LAST_DELAY);
        connection.phase = Phase::Asking(asking);
        self.set_timer(id, Some(again));
    }

    fn ask_again(&mut self, id: u64) {
        let Some(connection) = self.connections.get_mut(&id) else { return };
        let Phase::Asking(asking) = &mut connection.phase else { return };
        self.between -= usize::from(!asking.asked);
        asking.asked = true;
        connection.due |= due::REQUEST;
        self.enqueue(id);
        self.set_timer(id, None);
    }

    /// The guest shows signs of life: patient clients needn't wait.
    fn nudge(&mut self, now: Instant) {
        if self.between == 0 || now < self.nudged + NUDGE {
            return;
        }
        self.nudged = now;
        let between: Vec<u64> = self
            .connections
            .iter()
            .filter(|(_, connection)| matches!(connection.phase, Phase::Asking(asking) if !asking.asked))
            .map(|(id, _)| *id)
            .collect();
        for id in between {
            if let Some(Connection { phase: Phase::Asking(asking), .. }) = self.connections.get_mut(&id) {
                asking.delay = FIRST_DELAY;
            }
            self.ask_again(id);
        }
    }

    // ---- events

    /// What epoll said, for the listener or a connection.
    pub(super) fn event(&mut self, token: u64, events: EventSet, now: Instant) {
        if token == LISTENER {
            return self.accept(now);
        }
        let Some(connection) = self.connections.get_mut(&token) else { return };
        connection.socket_says(events);
        let gone = connection.has_hung_up();
        match connection.phase {
            Phase::Greeting | Phase::Asking(_) if gone => self.remove(token),
            Phase::Greeting => self.read_greeting(token, now),
            Phase::Asking(_) => {}
            _ => self.settle(token, now),
        }
    }

    /// When something is due next.
    pub(super) fn next_timer(&self) -> Option<Instant> {
        self.timers.first().map(|(time, _)| *time)
    }

    /// Does what is due.
    pub(super) fn tick(&mut self, now: Instant) {
        while let Some((time, id)) = self.timers.first().copied()
            && time <= now
        {
            self.timers.pop_first();
            let Some(connection) = self.connections.get_mut(&id) else {
                if id == LISTENER {
                    self.accept(now);
                }
                continue;
            };
            connection.timer = None;
            match connection.phase {
                Phase::Asking(asking) if asking.wish.patient => self.ask_again(id),
                Phase::Leaving => {
                    connection.fail();
                    self.enqueue(id);
                    self.set_timer(id, Some(now + PARTING));
                }
                Phase::Open => {}
                _ => self.remove(id),
            }
        }
    }

    fn set_timer(&mut self, id: u64, time: Option<Instant>) {
        let Some(connection) = self.connections.get_mut(&id) else { return };
        if let Some(old) = std::mem::replace(&mut connection.timer, time) {
            self.timers.remove(&(old, id));
        }
        if let Some(time) = time {
            self.timers.insert((time, id));
        }
    }

    fn remove(&mut self, id: u64) {
        let Some(connection) = self.connections.remove(&id) else { return };
        if let Some(time) = connection.timer {
            self.timers.remove(&(time, id));
        }
        if self.by_ports.get(&connection.ports) == Some(&id) {
            self.by_ports.remove(&connection.ports);
        }
        if connection.queued {
            self.ready.retain(|other| *other != id);
        }
        self.between -= usize::from(matches!(connection.phase, Phase::Asking(asking) if !asking.asked));
        self.of_guest -= usize::from(connection.from_guest);
        if std::mem::take(&mut self.full) {
            // Looked at when the engine comes round: not in the middle of something else.
            self.timers.insert((Instant::now(), LISTENER));
        }
    }

    /// After something has happened to a connection.
    fn settle(&mut self, id: u64, now: Instant) {
        let Some(connection) = self.connections.get_mut(&id) else { return };
        connection.settle();
        self.follow(id, now);
    }

    /// A connection that is about to end gets its time limit, one that has something to say its turn.
    fn follow(&mut self, id: u64, now: Instant) {
        let Some(connection) = self.connections.get(&id) else { return };
        if connection.is_drained() {
            return self.remove(id);
        }
        if connection.timer.is_none() && matches!(connection.phase, Phase::Leaving | Phase::Failed) {
            self.set_timer(id, Some(now + PARTING));
        }
        self.enqueue(id);
    }

    fn enqueue(&mut self, id: u64) {
        if let Some(connection) = self.connections.get_mut(&id)
            && connection.wants_to_send()
            && !std::mem::replace(&mut connection.queued, true)
        {
            self.ready.push_back(id);
        }
    }

    // ---- packets

    /// Somebody has something for the guest.
    pub(super) fn has_packet(&self) -> bool {
        !self.stray.is_empty() || !self.ready.is_empty()
    }

    /// Fills the next packet into the buffers, which hold more than a header; its length with the header. None: nobody
    /// had anything.
    pub(super) fn give(&mut self, buffers: &Segments, now: Instant) -> Option<u32> {
        if let Some(header) = self.stray.pop_front() {
            buffers.fill(0, &header.bytes());
            return Some(HEADER_BYTES as u32);
        }
        let space = usize::try_from(buffers.bytes()).unwrap_or(usize::MAX);
        while let Some(id) = self.ready.pop_front() {
            let Some(connection) = self.connections.get_mut(&id) else { continue };
            connection.queued = false;
            let header = connection.next_packet(self.cid, buffers.list(), space, &mut self.scratch);
            if connection.phase == Phase::Failed && connection.due == 0 {
                self.remove(id);
            } else {
                self.follow(id, now);
            }
            if let Some(header) = header {
                buffers.fill(0, &header.bytes());
                return Some(HEADER_BYTES as u32 + header.length);
            }
        }
        None
    }

    /// Takes a packet of the guest's; `data` is what follows the header.
    pub(super) fn take(&mut self, header: &Header, data: &Segments, now: Instant) {
        if header.source_cid != self.cid {
            return; // whoever that is, an answer wouldn't reach it
        }
        if header.operation != operation::RESET {
            self.nudge(now);
        }
        let ports = Ports { guest: header.source_port, host: header.target_port };
        let ours = header.target_cid == HOST_CID && header.kind == STREAM;
        match self.by_ports.get(&ports).copied().filter(|_| ours) {
            Some(id) => self.for_connection(id, header, data, now),
            None if ours && header.operation == operation::REQUEST => self.connect(ports, header, now),
            None => self.stray(header),
        }
    }

    fn stray(&mut self, header: &Header) {
        if header.operation != operation::RESET && self.stray.len() < MAX_STRAY {
            self.stray.push_back(header.reset());
        }
    }

    /// The guest connects to the host.
    fn connect(&mut self, ports: Ports, header: &Header, now: Instant) {
        // Half of the room is the host's.
        if self.of_guest >= self.limit.div_ceil(2) || self.connections.len() >= self.limit {
            return self.stray(header);
        }
        let Ok(stream) = self.side.socket.connect(ports.host) else { return self.stray(header) };
        let mut connection = Connection::new(stream, ports, Phase::Open, self.window());
        connection.from_guest = true;
        connection.due = due::RESPONSE;
        connection.guest_credit(header);
        let Some(id) = self.insert(connection) else { return self.stray(header) };
        self.of_guest += 1;
        self.by_ports.insert(ports, id);
        self.follow(id, now);
    }

    fn for_connection(&mut self, id: u64, header: &Header, data: &Segments, now: Instant) {
        let Some(connection) = self.connections.get_mut(&id) else { return };
        connection.guest_credit(header);
        let phase = connection.phase;
        match (header.operation, phase) {
            (operation::RESET, Phase::Asking(asking)) => return self.refused(id, asking, now),
            (operation::RESET, Phase::Open) => return self.ended(id, now),
            (operation::RESET, _) => return self.remove(id),
            (operation::RESPONSE, Phase::Asking(asking)) if asking.asked => {
                connection.open(true);
                self.set_timer(id, None);
            }
            (operation::DATA, Phase::Open | Phase::Leaving) => {
                let whole = u64::from(header.length) <= data.bytes();
                if !whole || !connection.take(data.list(), header.length, &mut self.scratch) {
                    connection.fail();
                }
                connection.settle();
            }
            (operation::SHUTDOWN, Phase::Open) => {
                connection.guest_shuts(header.flags);
                connection.settle();
            }
            (operation::SHUTDOWN, Phase::Leaving) => connection.fail(),
            (operation::CREDIT_UPDATE, _) => {}
            (operation::CREDIT_REQUEST, Phase::Open) => connection.due |= due::CREDIT_UPDATE,
            // Nothing that the guest may say now, and nothing that it could hurt.
            (operation::CREDIT_REQUEST, _) | (_, Phase::Failed | Phase::Asking(_)) => {}
            // A request or an answer out of turn, or what isn't known.
            _ => connection.fail(),
        }
        self.follow(id, now);
    }

    /// The guest has reset an open connection.
    fn ended(&mut self, id: u64, now: Instant) {
        let Some(connection) = self.connections.get_mut(&id) else { return };
        if !connection.drain() {
            return self.remove(id);
        }
        let ports = connection.ports;
        self.by_ports.remove(&ports);
        self.set_timer(id, Some(now + DRAINING));
    }
}

impl std::fmt::Debug for Muxer {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        formatter.debug_struct("Muxer").field("connections", &self.connections.len()).finish_non_exhaustive()
    }
}
