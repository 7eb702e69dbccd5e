//! Where hosts come in: the serial port, vsock, a Unix socket (theirs or ours). Each way carries sessions, each session
//! one connection. A pod's own port has connections already, see `port.rs`.

use std::{
    fs, io,
    os::fd::{AsFd as _, AsRawFd as _, OwnedFd},
    path::{Path, PathBuf},
    sync::Arc,
    time::Duration,
};

use hyper::server::conn::http2;
use hyper_util::{
    rt::{TokioExecutor, TokioIo, TokioTimer},
    service::TowerToHyperService,
};
use nix::{
    fcntl::{OFlag, open},
    poll::{PollFd, PollFlags, PollTimeout, poll},
    sys::{
        socket::{self, AddressFamily, Backlog, SockFlag, SockType, VsockAddr},
        stat::Mode,
    },
};
use tokio::{
    io::{AsyncRead, AsyncWrite, unix::AsyncFd},
    net::{UnixListener, UnixStream},
    sync::watch,
    time::{Instant, sleep},
};
use torpor_agent_channel::guest;
use torpor_proto::agent::v1::agent_server::AgentServer;

use crate::{agent::Agent, fd::FdStream, service::Service};

/// Name of the serial port, as the host gives it.
const PORT: &str = "torpor.agent";
/// For the port to appear.
const PORT_WITHIN: Duration = Duration::from_secs(10);
const LOOK: Duration = Duration::from_millis(5);
/// Where the agent listens on vsock.
const VSOCK_PORT: u32 = 1024;
/// A port of the host where nobody ever listens: the last before the one that means any (vsock(7)).
const NOBODYS_PORT: u32 = libc::VMADDR_PORT_ANY - 1;
/// A serial port or socket without a host is tried this often: no sign of a new one can be waited for.
const HOSTLESS: Duration = Duration::from_millis(50);
/// After a failed accept, so that a lasting fault doesn't take the whole CPU.
const PAUSE: Duration = Duration::from_millis(200);

/// Serves every way in that this machine has; the names of those that are open by now. Empty: the host can't reach the
/// agent.
pub async fn machine(agent: &Arc<Agent>) -> Vec<String> {
    let agent = agent.clone();
    if let Ok(listener) = listen_vsock() {
        tokio::spawn(vsock(agent, listener));
        return vec![format!("vsock port {VSOCK_PORT}")];
    }
    let Some((device, port)) = serial_port().await else {
        return Vec::new();
    };
    tokio::spawn(serial(agent, port));
    vec![device.display().to_string()]
}

/// Serves on a Unix socket until the process ends.
///
/// # Errors
/// When the socket can't be made.
pub async fn unix(agent: Arc<Agent>, path: &Path) -> io::Result<()> {
    let listener = UnixListener::bind(path)?;
    loop {
        match listener.accept().await {
            Ok((stream, _)) => drop(tokio::spawn(sessions(agent.clone(), stream))),
            Err(_) => sleep(PAUSE).await,
        }
    }
}

/// Dials the host's Unix socket, again and again: hosts come and go while the container runs. The container can't write
/// to the folder of that socket, so it is the host that listens.
pub async fn dial(agent: Arc<Agent>, path: &Path) {
    loop {
        if let Ok(stream) = UnixStream::connect(path).await {
            sessions(agent.clone(), stream).await;
        }
        sleep(HOSTLESS).await;
    }
}

/// Serves the sessions of one pipe, until it ends.
async fn sessions<I>(agent: Arc<Agent>, io: I)
where
    I: AsyncRead + AsyncWrite + Send + 'static,
{
    let mut sessions = guest::serve(io);
    while let Some(session) = sessions.next().await {
        tokio::spawn(connection(agent.clone(), session, None));
    }
}

/// What may wait unread in one call, bytes: input of a command that doesn't read it.
const STREAM_WINDOW: u32 = 256 << 10;
/// What may wait unread in all calls together. Far more than any number of calls can fill: a few commands that don't read
/// must not stop all the others, and each call is bounded by its own window.
const CONNECTION_WINDOW: u32 = 1 << 30;

/// Serves one connection to its end. With `ping`: one that answers nothing for so long, twice over, has ended.
pub async fn connection<I>(agent: Arc<Agent>, io: I, ping: Option<Duration>)
where
    I: AsyncRead + AsyncWrite + Send + Unpin + 'static,
{
    let (alive, connected) = watch::channel(());
    let service = AgentServer::new(Service { agent, connected });
    let mut builder = http2::Builder::new(TokioExecutor::new());
    builder.initial_stream_window_size(STREAM_WINDOW).initial_connection_window_size(CONNECTION_WINDOW);
    if let Some(ping) = ping {
        builder.timer(TokioTimer::new()).keep_alive_interval(ping).keep_alive_timeout(ping);
    }
    // A connection that breaks needs no word: the host makes another.
    let _ = builder.serve_connection(TokioIo::new(io), TowerToHyperService::new(service)).await;
    drop(alive);
}

/// Opens our port once it is there: the driver learns the names of ports from the host, some time after it was loaded.
async fn serial_port() -> Option<(PathBuf, Arc<OwnedFd>)> {
    let limit = Instant::now() + PORT_WITHIN;
    while Instant::now() < limit {
        if let Some(device) = named_port()
            && let Ok(port) =
                open(&device, OFlag::O_RDWR | OFlag::O_CLOEXEC | OFlag::O_NONBLOCK, Mode::empty())
        {
            return Some((device, Arc::new(port)));
        }
        sleep(LOOK).await;
    }
    None
}

/// The device of the port that has our name.
fn named_port() -> Option<PathBuf> {
    fs::read_dir("/sys/class/virtio-ports").ok()?.flatten().find_map(|entry| {
        let name = fs::read_to_string(entry.path().join("name")).ok()?;
        (name.trim() == PORT).then(|| Path::new("/dev").join(entry.file_name()))
    })
}

/// The port can be opened once only, so it stays open over hosts that come and go.
async fn serial(agent: Arc<Agent>, port: Arc<OwnedFd>) {
    loop {
        if !hostless(&port)
            && let Ok(stream) = FdStream::new(port.clone())
        {
            // Registered anew for every host: tokio never forgets that a descriptor was hung up.
            sessions(agent.clone(), stream).await;
        }
        sleep(HOSTLESS).await;
    }
}

fn hostless(port: &OwnedFd) -> bool {
    let mut look = [PollFd::new(port.as_fd(), PollFlags::empty())];
    poll(&mut look, PollTimeout::ZERO).is_err()
        || look[0].revents().is_some_and(|events| events.contains(PollFlags::POLLHUP))
}

fn listen_vsock() -> nix::Result<OwnedFd> {
    // Without a device there may still be the socket family; the host can't come in then, and that is no fault.
    if !Path::new("/dev/vsock").exists() {
        return Err(nix::errno::Errno::ENODEV);
    }
    let flags = SockFlag::SOCK_CLOEXEC | SockFlag::SOCK_NONBLOCK;
    let listener = socket::socket(AddressFamily::Vsock, SockType::Stream, flags, None)?;
    socket::bind(listener.as_raw_fd(), &VsockAddr::new(libc::VMADDR_CID_ANY, VSOCK_PORT))?;
    socket::listen(&listener, Backlog::new(16)?)?;
    Ok(listener)
}

/// Tries to connect to the host. That nobody is there doesn't matter: a host that waits for us sees that we are here, and
/// comes at once instead of at its next try.
fn knock() -> nix::Result<OwnedFd> {
    let flags = SockFlag::SOCK_CLOEXEC | SockFlag::SOCK_NONBLOCK;
    let socket = socket::socket(AddressFamily::Vsock, SockType::Stream, flags, None)?;
    match socket::connect(socket.as_raw_fd(), &VsockAddr::new(libc::VMADDR_CID_HOST, NOBODYS_PORT)) {
        Ok(()) | Err(nix::errno::Errno::EINPROGRESS) => Ok(socket),
        Err(errno) => Err(errno),
    }
}

async fn vsock(agent: Arc<Agent>, listener: OwnedFd) {
    // Closed when the first has come: until then the request is on its way.
    let mut knocked = knock().ok();
    // SAFETY: the descriptor is owned by what is registered, and open for as long.
    let Ok(listener) = (unsafe { AsyncFd::register(listener) }) else {
        return;
    };
    loop {
        match accept(&listener).await {
            Ok(stream) => {
                drop(knocked.take());
                drop(tokio::spawn(sessions(agent.clone(), stream)));
            }
            Err(_) => sleep(PAUSE).await,
        }
    }
}

async fn accept(listener: &AsyncFd<OwnedFd>) -> io::Result<FdStream> {
    loop {
        let mut ready = listener.readable().await?;
        let accepted = ready.try_io(|listener| {
            Ok(socket::accept4(listener, SockFlag::SOCK_CLOEXEC | SockFlag::SOCK_NONBLOCK)?)
        });
        if let Ok(accepted) = accepted {
            return FdStream::new(Arc::new(accepted?));
        }
    }
}
