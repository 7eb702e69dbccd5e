//! The one connection to a container's agent. The agent dials, since the container can write to nothing of ours; the
//! newest connection that it has made is the one that is used.

use std::{
    fs, io,
    net::Shutdown,
    os::{fd::AsFd as _, unix::fs::PermissionsExt as _},
    path::{Path, PathBuf},
    sync::{Arc, Mutex, PoisonError},
    time::Duration,
};

use hyper_util::rt::TokioIo;
use tokio::{
    net::{UnixListener, UnixStream},
    sync::Notify,
    task::AbortHandle,
    time::timeout,
};
use tonic::transport::{Channel, Endpoint, Uri};
use torpor_agent_channel::host::{self, Stream};

/// How long a call waits for an agent that dials, and for the answer to a greeting.
const WAIT: Duration = Duration::from_secs(10);
/// After a failed accept, so that a lasting fault doesn't take the whole CPU.
const PAUSE: Duration = Duration::from_millis(200);
/// Flow-control windows, bytes: what may wait unread in one call, and in all. The second is never reached: some slow
/// readers must not stop everybody else's calls.
const WINDOWS: (u32, u32) = (1 << 20, 1 << 30);

#[derive(Debug, Default)]
struct Door {
    newest: Mutex<Option<UnixStream>>,
    /// The one that is used, to be hung up.
    used: Mutex<Option<std::os::unix::net::UnixStream>>,
    knocked: Notify,
}

/// The listening end, to its drop.
#[derive(Debug)]
pub(crate) struct Link {
    accepting: AbortHandle,
    door: Arc<Door>,
    path: PathBuf,
    pub(crate) channel: Channel,
}

impl Drop for Link {
    fn drop(&mut self) {
        self.accepting.abort();
    }
}

impl Link {
    /// Listens in `folder`, in place of whoever did before. Must be called within the runtime.
    pub(crate) fn listen(folder: &Path) -> io::Result<Self> {
        let path = folder.join("sock");
        match fs::remove_file(&path) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
            _ => {}
        }
        let listener = UnixListener::bind(&path)?;
        // The folder is its owner's alone; inside the container only root may dial.
        fs::set_permissions(&path, fs::Permissions::from_mode(0o600))?;
        let door = Arc::new(Door::default());
        let accepting = tokio::spawn(accept(listener, door.clone())).abort_handle();
        Ok(Self { accepting, channel: channel(door.clone()), door, path })
    }

    /// Hangs up, whoever still has the channel: a container that is to be written out has no connection to anybody.
    pub(crate) fn close(&self) {
        self.accepting.abort();
        let _gone_before = fs::remove_file(&self.path);
        self.door.hang_up();
    }
}

async fn accept(listener: UnixListener, door: Arc<Door>) {
    loop {
        match listener.accept().await {
            Ok((stream, _)) => {
                *door.newest.lock().unwrap_or_else(PoisonError::into_inner) = Some(stream);
                door.knocked.notify_one();
            }
            Err(_) => tokio::time::sleep(PAUSE).await,
        }
    }
}

impl Door {
    async fn take(&self) -> UnixStream {
        loop {
            let newest = self.newest.lock().unwrap_or_else(PoisonError::into_inner).take();
            match newest {
                Some(stream) => return stream,
                None => self.knocked.notified().await,
            }
        }
    }

    fn hang_up(&self) {
        drop(self.newest.lock().unwrap_or_else(PoisonError::into_inner).take());
        if let Some(used) = self.used.lock().unwrap_or_else(PoisonError::into_inner).take() {
            let _ended_before = used.shutdown(Shutdown::Both);
        }
    }

    async fn open(&self) -> io::Result<TokioIo<Stream>> {
        let nobody = |_| io::Error::new(io::ErrorKind::TimedOut, "the container's agent does not dial");
        let stream = timeout(WAIT, self.take()).await.map_err(nobody)?;
        let copy = stream.as_fd().try_clone_to_owned()?;
        *self.used.lock().unwrap_or_else(PoisonError::into_inner) = Some(copy.into());
        host::connect(stream, WAIT).await.map(TokioIo::new).map_err(io::Error::other)
    }
}

/// A channel that connects when it is first used, and again after it was lost.
fn channel(door: Arc<Door>) -> Channel {
    let connector = tower::service_fn(move |_: Uri| {
        let door = door.clone();
        async move { door.open().await }
    });
    // The name is never looked up: the connector knows where to go.
    Endpoint::from_static("http://agent.torpor.invalid")
        .initial_stream_window_size(WINDOWS.0)
        .initial_connection_window_size(WINDOWS.1)
        .connect_with_connector_lazy(connector)
}
