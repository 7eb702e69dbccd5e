//! Stop and delete: processes end, files are written out, the container stands still and holds nothing of the host.

use std::{sync::Arc, time::Duration};

use hyper::Method;
use tokio::time::{Instant, sleep, timeout_at};
use torpor_driver_common::Turn;
use torpor_proto::agent::v1::{ShutdownRequest, agent_client::AgentClient};
use torpor_sandbox::{Change, DriverError, Keep, SandboxId, Stopped, failpoint::hit};

use crate::{
    client::{EngineError, WORK, said},
    container::grace,
    driver::Inner,
    live::Live,
    types::Inspect,
};

/// How long an agent of which nothing was heard is asked whether it has begun to work.
const BEGUN: Duration = Duration::from_millis(500);
/// What of a deadline is kept back for the engine's own stop.
const RESERVE: Duration = Duration::from_millis(500);
/// How long a container whose agent has flushed may take to end by itself; nothing is lost when it doesn't.
const LEAVE: Duration = Duration::from_secs(3);
/// How long a killed container may take to be gone, and to give back its address.
pub(crate) const KILLED: Duration = Duration::from_secs(if cfg!(test) { 1 } else { 10 });
/// Pauses between two looks.
const LOOKS: [Duration; 4] = [
    Duration::from_millis(20),
    Duration::from_millis(40),
    Duration::from_millis(80),
    Duration::from_millis(150),
];
/// Tries at a removal that the engine refuses.
const REMOVALS: u32 = 8;

impl Inner {
    /// Ends whatever runs and sees it stopped. `deadline` none: nobody is asked.
    pub(crate) async fn put_down(
        self: &Arc<Self>,
        id: &SandboxId,
        turn: &Turn,
        deadline: Option<Duration>,
    ) -> Result<Stopped, DriverError> {
        let mut stopped = Stopped { flushed: false, kept: Keep::Disk, detail: None };
        let until = Instant::now() + deadline.unwrap_or_default();
        let dir = self.run_dir(id);
        let record = dir.record()?;
        let found = self.inspect(id).await?;
        // A start whose answer nobody has read may still be under way in the engine.
        let pending = match (&record, &found) {
            (Some(record), Some(found)) => record.is_pending(found),
            _ => false,
        };
        let up = found.as_ref().is_some_and(|found| found.state.is_up());
        if let (Some(found), true) = (&found, up || pending) {
            if found.state.paused {
                self.unpause(id, turn).await?;
            }
            let ours = record.as_ref().filter(|record| !record.is_replaced(found));
            let flushed = match (deadline, ours) {
                (Some(_), Some(record)) if up => self.flush(&self.hear(id, record)?, turn, until).await,
                (Some(_), None) => Err("it was started from outside".to_owned()),
                _ => Err("it was not asked to end".to_owned()),
            };
            match flushed {
                Ok(()) => stopped.flushed = true,
                Err(why) => stopped.detail = Some(why),
            }
            hit("container.stop.flushed")?;
            let (inner, wanted, flushed) = (self.clone(), id.clone(), stopped.flushed);
            let left = deadline.map(|_| until.saturating_duration_since(Instant::now()));
            self.turns.step(id, turn, async move { inner.end(&wanted, flushed, left).await }).await?;
        } else if let Some(record) = &record {
            stopped.flushed = dir.flushed(record.run);
            stopped.detail = (!stopped.flushed).then(|| "it had ended before".to_owned());
        }
        hit("container.stop.ended")?;
        self.unhear(id);
        if found.is_some() {
            // Its files may be others by now, or nobody wants its memory.
            let (inner, wanted) = (self.clone(), id.clone());
            self.turns.step(id, turn, async move { inner.discard(&wanted).await }).await?;
        }
        self.turns.step(id, turn, async move { dir.remove() }).await?;
        hit("container.stop.released")?;
        Ok(stopped)
    }

    pub(crate) async fn unpause(self: &Arc<Self>, id: &SandboxId, turn: &Turn) -> Result<(), DriverError> {
        let (inner, wanted) = (self.clone(), id.clone());
        let unpause = async move {
            match inner.ask(Method::POST, &wanted, "/unpause", WORK).await {
                // Somebody else may have done it, or it has ended: what is there is seen in a moment.
                Err(error) if error.is_absence() => Err(error.into()),
                _ => Ok(()),
            }
        };
        self.turns.step(id, turn, unpause).await
    }

    /// Lets the agent end the processes and write out the files, and notes that it has: a stop that is cut short after it is
    /// asked again.
    async fn flush(&self, live: &Arc<Live>, turn: &Turn, until: Instant) -> Result<(), String> {
        let (id, run, dir) = (&live.id, live.run, self.run_dir(&live.id));
        if dir.flushed(run) {
            return Ok(());
        }
        shut_down(live, until).await?;
        if let Err(error) = self.turns.step(id, turn, async move { dir.write_flushed(run) }).await {
            tracing::warn!(sandbox = %id, %error, "that the files are written out is not noted");
        }
        Ok(())
    }

    /// Ends the container and sees it ended: nothing runs, and its address is given back. `left` none: killed at once.
    async fn end(&self, id: &SandboxId, flushed: bool, left: Option<Duration>) -> Result<(), DriverError> {
        if flushed && self.down(id, LEAVE).await? {
            return self.released(id).await;
        }
        let left = left.unwrap_or_default();
        let stop = format!("/stop?t={}", grace(left));
        let asked = self.ask(Method::POST, id, &stop, left + WORK).await;
        hit("container.stop.asked")?;
        // Whatever was answered: a stop is what is seen.
        if !self.down(id, Duration::ZERO).await? {
            let killed = self.ask(Method::POST, id, "/kill", WORK).await;
            if !self.down(id, KILLED).await? {
                let text = format!("it is still running {} s after it was killed", KILLED.as_secs());
                let refusal = asked.err().or(killed.err()).map(|e| format!(" ({e})")).unwrap_or_default();
                return Err(DriverError::backend(format!("end the container of {id}"), text + &refusal));
            }
        }
        self.released(id).await
    }

    /// Whether nothing of the container runs, within this time.
    pub(crate) async fn down(&self, id: &SandboxId, within: Duration) -> Result<bool, EngineError> {
        self.until(id, within, |found| !found.state.is_up()).await
    }

    /// Waits until the engine has taken the container's address back.
    pub(crate) async fn released(&self, id: &SandboxId) -> Result<(), DriverError> {
        if self.until(id, KILLED, |found| found.addresses().0.is_empty()).await? {
            return Ok(());
        }
        let text = "the engine has not taken its address back";
        Err(DriverError::backend(format!("release the network of {id}"), text))
    }

    /// A container that is gone fulfils everything.
    async fn until(
        &self,
        id: &SandboxId,
        within: Duration,
        test: impl Fn(&Inspect) -> bool,
    ) -> Result<bool, EngineError> {
        let end = Instant::now() + within;
        let mut pauses = LOOKS.into_iter();
        loop {
            if self.inspect(id).await?.is_none_or(|found| test(&found)) {
                return Ok(true);
            }
            if Instant::now() >= end {
                return Ok(false);
            }
            sleep(pauses.next().unwrap_or(LOOKS[LOOKS.len() - 1])).await;
        }
    }

    pub(crate) async fn delete(self: &Arc<Self>, id: &SandboxId) -> Result<Change, DriverError> {
        let turn = self.turns.turn(id).await;
        let dir = self.run_dir(id);
        if !self.store.specs.exists(id) && !dir.exists() {
            match self.inspect(id).await {
                Ok(Some(_)) => {}
                // What has no folder here has nothing in the engine; an engine that is gone keeps nobody.
                Ok(None) => return Ok(Change::Already),
                Err(error) if error.is_absence() => return Ok(Change::Already),
                Err(error) => return Err(error.into()),
            }
        }
        match self.put_down(id, &turn, None).await {
            Err(error @ DriverError::Unreachable(_)) => return Err(error),
            // An engine that can't stop it may still be able to remove it.
            Err(error) => tracing::warn!(sandbox = %id, %error, "not stopped before its removal"),
            Ok(_) => {}
        }
        let (inner, wanted) = (self.clone(), id.clone());
        self.turns.step(id, &turn, async move { inner.remove(&wanted).await }).await?;
        Ok(Change::Done)
    }

    /// Removes the container with its anonymous volumes, then what is ours.
    async fn remove(&self, id: &SandboxId) -> Result<(), DriverError> {
        for attempt in 1.. {
            // What has its name and is not ours is left alone.
            match self.inspect(id).await {
                Ok(None) => break,
                Err(error) if error.is_absence() => return Err(error.into()),
                Ok(Some(_)) | Err(_) => {}
            }
            let asked = self.ask(Method::DELETE, id, "?force=true&v=true", WORK).await;
            hit("container.delete.asked")?;
            match asked {
                Ok(()) => {}
                Err(error) if error.is_not_found() => {}
                Err(error) if error.is_absence() => return Err(error.into()),
                Err(error) => match self.inspect(id).await {
                    Ok(None) => {}
                    _ if attempt < REMOVALS => {
                        sleep(LOOKS[LOOKS.len() - 1] * attempt).await;
                        continue;
                    }
                    _ => return Err(error.into()),
                },
            }
            break;
        }
        self.unhear(id);
        self.run_dir(id).remove()?;
        hit("container.delete.removed")?;
        self.store.specs.delete(id)?;
        Ok(())
    }
}

/// Asks the agent to end every process and to write out the files, until then at the latest.
async fn shut_down(live: &Arc<Live>, until: Instant) -> Result<(), String> {
    let left = until.saturating_duration_since(Instant::now());
    // An agent that has not come so far holds nothing worth waiting for; one that has may use the whole deadline.
    if !live.is_configured() {
        let status = live.status(BEGUN.min(left)).await;
        if !status.is_some_and(|status| status.configured) {
            return Err("its agent had not answered yet".to_owned());
        }
    }
    let ask = until.checked_sub(RESERVE.min(left / 4)).unwrap_or(until);
    // The agent kills at half of its grace, and needs the rest to sync.
    let grace = ask.saturating_duration_since(Instant::now()).mul_f64(0.8);
    let request = ShutdownRequest { grace: grace.try_into().ok() };
    let mut client = AgentClient::new(live.channel());
    match timeout_at(ask, client.shutdown(request)).await {
        Ok(Ok(answer)) => {
            let answer = answer.into_inner();
            if answer.flushed {
                Ok(())
            } else {
                Err(format!("the files are not all written out: {}", said(&answer.detail)))
            }
        }
        Ok(Err(status)) => Err(format!("the agent did not shut down: {}", said(status.message()))),
        Err(_) => Err(format!("the agent did not answer within {:.1} s", left.as_secs_f64())),
    }
}

#[cfg(test)]
mod tests {
    use std::{
        fs,
        io::{Read as _, Write as _},
        os::unix::net::{UnixListener, UnixStream},
        path::Path,
        sync::atomic::{AtomicU32, Ordering},
        thread,
    };

    use torpor_sandbox::{ComputeDriver as _, Observed};

    use crate::{ContainerConfig, ContainerDriver, Engine};

    use super::*;

    /// An engine that shows one container and can do nothing about it but, at the third time, remove it.
    fn broken(socket: &Path, identity: String, id: SandboxId) -> Arc<AtomicU32> {
        let removals = Arc::new(AtomicU32::new(0));
        let (listener, asked) = (UnixListener::bind(socket).unwrap(), removals.clone());
        thread::spawn(move || {
            for stream in listener.incoming().flatten() {
                let _gone = answer(stream, &identity, &id, &asked);
            }
        });
        removals
    }

    fn answer(
        mut stream: UnixStream,
        identity: &str,
        id: &SandboxId,
        removals: &AtomicU32,
    ) -> std::io::Result<()> {
        let mut request = [0; 4096];
        let read = stream.read(&mut request)?;
        let request = String::from_utf8_lossy(&request[..read]).into_owned();
        let labels = format!(r#"{{"torpor.dev/gateway":"{identity}","torpor.dev/sandbox":"{id}"}}"#);
        let shown = format!(r#"{{"Id":"c","State":{{"Status":"exited"}},"Config":{{"Labels":{labels}}}}}"#);
        let there = removals.load(Ordering::SeqCst) < 3;
        let (status, body) = match request.split(' ').next() {
            Some("GET") if !request.contains("/json ") => (200, "{}"),
            Some("GET") if there => (200, shown.as_str()),
            Some("GET") => (404, "{}"),
            Some("DELETE") if removals.fetch_add(1, Ordering::SeqCst) == 2 => (204, ""),
            _ => (500, r#"{"message":"device or resource busy"}"#),
        };
        let length = body.len();
        write!(stream, "HTTP/1.1 {status} X\r\nContent-Length: {length}\r\nConnection: close\r\n\r\n{body}")
    }

    #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
    async fn a_delete_goes_on_with_an_engine_that_is_half_broken() {
        let folder = tempfile::tempdir().unwrap();
        let path = |name: &str| folder.path().join(name);
        fs::write(path("agent"), "agent").unwrap();
        let mut config = ContainerConfig::new(Engine::Docker, path("state"), path("run"), path("agent"));
        config.socket = path("sock");
        let driver = ContainerDriver::new(config).unwrap();
        let identity = fs::read_to_string(path("state/containers/identity")).unwrap().trim().to_owned();
        let id = SandboxId::generate();
        let removals = broken(&path("sock"), identity, id.clone());
        assert_eq!(driver.observe(&id).await.unwrap(), Observed::Stopped { memory: false });
        assert_eq!(driver.delete(&id).await.unwrap(), Change::Done);
        assert_eq!(removals.load(Ordering::SeqCst), 3);
        assert_eq!(driver.observe(&id).await.unwrap(), Observed::Missing);
    }
}
