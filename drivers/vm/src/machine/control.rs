//! The control socket of torpor-vmm: JSON lines over a Unix socket.

use std::{
    collections::BTreeSet,
    io,
    path::{Path, PathBuf},
    time::Duration,
};

use async_trait::async_trait;
use tokio::time::timeout;
use torpor_sandbox::DriverError;
use torpor_vmm_api::{Event, GrowProblem, Reply, Request, VmState};

use super::{GuestEnd, Monitor, News, kvm, lines::Lines};

/// The VMM answers at once unless it hangs.
const ANSWER: Duration = Duration::from_secs(5);
/// Unless it has all tables of a large disk to read first.
const LONG_ANSWER: Duration = Duration::from_secs(60);
/// The longest line that makes sense, bytes.
const LONGEST: usize = 64 << 10;
/// More devices than a machine has.
const DEVICES: usize = 32;

/// A connection to the VMM's control socket.
#[derive(Debug)]
pub(crate) struct Control {
    lines: Lines,
    /// Seen on the way to something else.
    end: Option<GuestEnd>,
    /// A disk without room, not yet handed on.
    full: bool,
    /// Devices that were said to be broken.
    broken: BTreeSet<String>,
    run_dir: PathBuf,
}

impl Control {
    /// Connects and asks for events.
    pub(crate) async fn connect(path: &Path, run_dir: &Path) -> io::Result<Self> {
        let lines = Lines::connect(path, "torpor-vmm", LONGEST).await?;
        let mut control =
            Self { lines, end: None, full: false, broken: BTreeSet::new(), run_dir: run_dir.to_owned() };
        control.ask(&Request::Subscribe).await?;
        if let Reply::Status(status) = control.ask(&Request::Status).await? {
            if status.state == VmState::Ended && control.end.is_none() {
                // The event came before we listened: the process is on its way out and leaves its reason.
                return Err(io::ErrorKind::NotConnected.into());
            }
            control.full |= !status.full.is_empty();
        }
        Ok(control)
    }

    /// One request and its answer; events in between are kept.
    async fn ask(&mut self, request: &Request) -> io::Result<Reply> {
        self.ask_within(request, ANSWER).await
    }

    async fn ask_within(&mut self, request: &Request, limit: Duration) -> io::Result<Reply> {
        let text = serde_json::to_string(request)?;
        let exchange = async {
            self.lines.send(&text).await?;
            loop {
                match self.lines.next().await? {
                    Reply::Event(event) => self.note(&event),
                    Reply::Refused { reason } => {
                        return Err(io::Error::other(format!("torpor-vmm refused {request:?}: {reason}")));
                    }
                    reply => return Ok(reply),
                }
            }
        };
        timeout(limit, exchange).await.map_err(|_| {
            io::Error::new(io::ErrorKind::TimedOut, "torpor-vmm's control socket does not answer")
        })?
    }

    fn note(&mut self, event: &Event) {
        match event {
            Event::Ended { end } => self.end = self.end.or(Some(kvm::guest_end(end))),
            // Once for each: a guest can break a device as often as it likes.
            Event::DeviceBroken { device, reason }
                if self.broken.len() < DEVICES && self.broken.insert(device.clone()) =>
            {
                tracing::warn!(run_dir = %self.run_dir.display(), device, reason, "a guest broke a device");
            }
            Event::DiskFull { .. } => self.full = true,
            Event::DeviceBroken { .. } | Event::DiskHasRoom { .. } => {}
        }
    }
}

#[async_trait]
impl Monitor for Control {
    async fn news(&mut self) -> io::Result<News> {
        loop {
            if let Some(end) = self.end {
                return Ok(News::Ended(end));
            }
            if std::mem::take(&mut self.full) {
                return Ok(News::DiskFull);
            }
            if let Reply::Event(event) = self.lines.next().await? {
                self.note(&event);
            }
        }
    }

    async fn console(&mut self) -> io::Result<Vec<u8>> {
        let run_dir = self.run_dir.clone();
        tokio::task::spawn_blocking(move || kvm::take_console(&run_dir)).await.map_err(io::Error::other)?
    }

    async fn grow_disk(&mut self, bytes: u64) -> io::Result<Result<u64, DriverError>> {
        let request = Request::GrowDisk { disk: kvm::ROOT_DISK.to_owned(), bytes };
        Ok(match self.ask_within(&request, LONG_ANSWER).await? {
            Reply::Grown { bytes } => Ok(bytes),
            Reply::NotGrown { problem: GrowProblem::Invalid, reason } => Err(DriverError::Invalid(reason)),
            Reply::NotGrown { problem: GrowProblem::NoSpace, reason } => Err(DriverError::NoSpace(reason)),
            Reply::NotGrown { problem: GrowProblem::Failed, reason } => {
                Err(DriverError::backend("grow the disk", reason))
            }
            other => Err(DriverError::backend("grow the disk", format!("torpor-vmm answered {other:?}"))),
        })
    }

    async fn quit(&mut self) -> io::Result<()> {
        self.ask(&Request::Shutdown).await.map(drop)
    }
}

#[cfg(test)]
mod tests {
    use tokio::{
        io::{AsyncBufReadExt as _, AsyncWriteExt as _, BufReader},
        net::UnixListener,
    };
    use torpor_vmm_api::End;

    use super::*;

    #[tokio::test]
    async fn an_end_that_comes_between_request_and_answer_is_not_lost() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("c.sock");
        let listener = UnixListener::bind(&path).unwrap();
        let vmm = tokio::spawn(async move {
            let (stream, _) = listener.accept().await.unwrap();
            let mut stream = BufReader::new(stream);
            let mut line = String::new();
            stream.read_line(&mut line).await.unwrap();
            assert_eq!(serde_json::from_str::<Request>(&line).unwrap(), Request::Subscribe);
            let event = serde_json::to_string(&Reply::Event(Event::Ended { end: End::TripleFault })).unwrap();
            let done = serde_json::to_string(&Reply::Done).unwrap();
            stream.write_all(format!("{event}\n{done}\n").as_bytes()).await.unwrap();
            line.clear();
            stream.read_line(&mut line).await.unwrap();
            stream.write_all(format!("{done}\n").as_bytes()).await.unwrap();
            stream
        });
        let mut control = Control::connect(&path, folder.path()).await.unwrap();
        assert_eq!(control.news().await.unwrap(), News::Ended(GuestEnd::Reset));
        drop(vmm.await.unwrap());
        assert!(control.quit().await.is_err(), "the process is gone");
    }

    #[tokio::test]
    async fn a_disk_without_room_is_handed_on_each_time_and_a_growth_in_between_gets_its_answer() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("c.sock");
        let listener = UnixListener::bind(&path).unwrap();
        tokio::spawn(async move {
            let (stream, _) = listener.accept().await.unwrap();
            let mut stream = BufReader::new(stream);
            let full = Reply::Event(Event::DiskFull { device: "block vda".into() });
            let not = Reply::NotGrown { problem: GrowProblem::Invalid, reason: "too small".into() };
            let answers = [vec![Reply::Done], vec![Reply::Done, full.clone(), full.clone()], vec![full, not]];
            for answers in answers {
                let mut line = String::new();
                stream.read_line(&mut line).await.unwrap();
                for answer in answers {
                    let text = serde_json::to_string(&answer).unwrap();
                    stream.write_all(format!("{text}\n").as_bytes()).await.unwrap();
                }
            }
            std::future::pending::<()>().await;
        });
        let mut control = Control::connect(&path, folder.path()).await.unwrap();
        assert_eq!(control.news().await.unwrap(), News::DiskFull);
        assert_eq!(control.news().await.unwrap(), News::DiskFull);
        let refused = control.grow_disk(7).await.unwrap();
        assert!(matches!(refused, Err(DriverError::Invalid(reason)) if reason == "too small"));
        assert_eq!(control.news().await.unwrap(), News::DiskFull);
    }

    #[tokio::test]
    async fn a_refusal_says_what_was_refused_and_why() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("c.sock");
        let listener = UnixListener::bind(&path).unwrap();
        tokio::spawn(async move {
            let (mut stream, _) = listener.accept().await.unwrap();
            let refused = serde_json::to_string(&Reply::Refused { reason: "no".into() }).unwrap();
            stream.write_all(format!("{refused}\n").as_bytes()).await.unwrap();
            std::future::pending::<()>().await;
        });
        let error = Control::connect(&path, folder.path()).await.unwrap_err().to_string();
        assert_eq!(error, "torpor-vmm refused Subscribe: no");
    }
}
