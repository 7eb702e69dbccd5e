//! Suspends that keep the memory: the engine's checkpoint of a container, and what is noted of it.
//!
//! The note is written before the engine is asked, so that a later gateway knows what it finds; it says that the memory is
//! kept only once nothing runs and the checkpoint is there, and who has used it before it is used. A checkpoint goes with
//! the files as they were: as soon as anything has run since, it is worthless.

use std::{
    collections::BTreeSet,
    fs,
    path::{Path, PathBuf},
    sync::{Arc, Weak},
    time::Duration,
};

use hyper::Method;
use serde::{Deserialize, Serialize};
use serde_json::json;
use tokio::{process::Command, time::sleep};
use torpor_driver_common::{Turn, files::remove_tree};
use torpor_sandbox::{DriverError, Keep, Run, SandboxId, Stopped, failpoint::hit};

use crate::{
    checkpoint,
    client::{Carries, EngineError, WORK},
    container,
    driver::Inner,
    engine::Engine,
    run::{Record, host_boot},
    stop::KILLED,
    types::{Checkpoint, CheckpointInspect, Inspect},
};

/// For the agent to see that its connection is gone: CRIU writes out no socket whose other end is outside.
const HANG_UP: Duration = Duration::from_millis(150);
/// Tries at a checkpoint: the first may have come upon a socket that was just being closed.
const TRIES: u32 = 2;
/// Tries at handing a checkpoint over that containerd still has of its making, the pause between, and what it says then.
const UPLOADS: u32 = 40;
const UPLOAD_AGAIN: Duration = Duration::from_millis(500);
const UPLOADED: &str = "already exists";
/// How long files may take to be written out afterwards.
const SYNC: Duration = Duration::from_secs(60);

/// What the slowest disk that is waited for writes or reads in a second, bytes, and what is added for it at most.
const SLOWEST: u64 = 16 << 20;
const LONGEST: Duration = Duration::from_secs(3600);
/// How long the making of a checkpoint that a gateway before this one asked for is waited for, with what a usual disk
/// writes in a second, bytes, and the longest.
const UNDER_WAY: Duration = Duration::from_secs(10);
const USUAL: u64 = 64 << 20;
const LONGEST_UNDER_WAY: Duration = Duration::from_secs(120);
/// Pause before a finding that may be another one next time is looked for again.
const LOOK_AGAIN: Duration = Duration::from_secs(5);

/// What is noted of a checkpoint.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Note {
    /// The container that it is of.
    pub(crate) container: String,
    /// The run whose memory it holds.
    pub(crate) run: Run,
    /// The engine's time stamp of that run's start: with another one, something has run in the container since.
    #[serde(default)]
    pub(crate) started_at: String,
    /// The host's boot that it was made in: until it is kept, a loss of power may have taken some of it.
    #[serde(default)]
    pub(crate) host_boot: String,
    /// The engine has said that it has made it: Docker shows one that is half made like any other.
    #[serde(default)]
    pub(crate) made: bool,
    /// It was there, and nothing ran.
    pub(crate) kept: bool,
    /// The run that was to go on from it.
    pub(crate) used: Option<Run>,
    /// Where Podman keeps it: after a loss of power it brings it back, but doesn't know of it any more.
    pub(crate) path: Option<PathBuf>,
}

impl Note {
    pub(crate) fn new(run: Run, found: &Inspect) -> Self {
        Self {
            container: found.id.clone(),
            run,
            started_at: found.state.started_at.clone(),
            host_boot: host_boot(),
            made: false,
            kept: false,
            used: None,
            path: None,
        }
    }

    /// Whether it is of this container, and nothing has run there since.
    fn is_of(&self, found: &Inspect) -> bool {
        self.container == found.id && self.started_at == found.state.started_at
    }

    /// Whether a suspend may go on with it: nobody has gone on from it, and all of it can be there.
    fn is_unused(&self) -> bool {
        self.used.is_none() && (self.kept || self.host_boot == host_boot())
    }

    /// Docker's name of the checkpoint.
    fn name(&self) -> String {
        format!("run-{}", self.run)
    }

    /// Whether a file is there that CRIU writes last.
    fn is_whole(&self) -> bool {
        self.path.as_ref().is_some_and(|path| path.join("inventory.img").is_file())
    }
}

impl Inner {
    /// Whether the engine keeps memory, and why not; looked at again after the engine was away.
    pub(crate) async fn keeps_memory(&self) -> Result<(), DriverError> {
        let known = self.client.learn().await?;
        let (can, engine) = (self.client.can_keep(), self.config.engine);
        let can = match can {
            Some(can) => can,
            None => {
                let can = match checkpoint::probe(engine, &known.info, &self.config.criu).await {
                    Err(cannot) if !cannot.lasts => {
                        return Err(DriverError::backend("see whether checkpoints work", cannot.why));
                    }
                    can => can.map_err(|cannot| cannot.why),
                };
                self.client.note_can_keep(can.clone());
                can
            }
        };
        can.map_err(DriverError::Unsupported)
    }

    /// Looks whether the engine keeps memory until what is found will last.
    pub(crate) async fn find_out(inner: Weak<Self>) {
        while let Some(inner) = inner.upgrade() {
            let found = inner.keeps_memory().await;
            // An engine that is away is looked at when it is back.
            if found.is_ok() || inner.client.known().is_none_or(|known| known.can_keep.is_some()) {
                return;
            }
            drop(inner);
            sleep(LOOK_AGAIN).await;
        }
    }

    /// Stops a container with its memory kept; what can't be kept is told, and the files are.
    pub(crate) async fn put_to_sleep(
        self: &Arc<Self>,
        id: &SandboxId,
        deadline: Duration,
    ) -> Result<Stopped, DriverError> {
        let turn = self.turns.turn(id).await;
        let (record, found) = (self.run_dir(id).record()?, self.settled(id).await?);
        let Some(found) = found else { return self.put_down(id, &turn, Some(deadline)).await };
        if found.state.is_up() {
            let ours = record.filter(|record| !record.is_replaced(&found));
            let Some(record) = ours else { return self.put_down(id, &turn, Some(deadline)).await };
            // What is made already needs no more of it.
            self.keeps_memory().await?;
            return match self.dump(id, &record, &found, &turn).await {
                Ok(()) => self.asleep(id, &found, &turn).await,
                Err(error @ DriverError::Unreachable(_)) => Err(error),
                // The processes go on after a checkpoint that failed, and end in order.
                Err(error) => self.without_memory(id, &turn, deadline, &error).await,
            };
        }
        // Done before, or by a gateway that was ended in the middle.
        let note = self.store.note(id)?.filter(|note| note.is_unused() && note.is_of(&found));
        let of_this = record.is_none_or(|record| note.as_ref().is_some_and(|note| note.run == record.run));
        if let (Some(note), true) = (note, of_this) {
            let note = self.located(id, note).await?;
            if self.has_checkpoint(id, &note).await? {
                return self.asleep(id, &found, &turn).await;
            }
        }
        self.put_down(id, &turn, Some(deadline)).await
    }

    /// The container, once the making of a checkpoint that may be under way is done: a second one would only destroy it.
    async fn settled(&self, id: &SandboxId) -> Result<Option<Inspect>, DriverError> {
        let found = self.inspect(id).await?;
        let Some(up) = found.as_ref().filter(|found| found.state.is_up()) else { return Ok(found) };
        let under_way = |note: &Note| !note.kept && note.is_unused() && note.is_of(up);
        if !self.store.note(id)?.as_ref().is_some_and(under_way) {
            return Ok(found);
        }
        let more = Duration::from_secs(self.memory_bytes(id) / USUAL);
        self.down(id, (UNDER_WAY + more).min(LONGEST_UNDER_WAY)).await?;
        Ok(self.inspect(id).await?)
    }

    fn memory_bytes(&self, id: &SandboxId) -> u64 {
        self.store.specs.read(id).map_or(0, |spec| spec.resources.memory_bytes)
    }

    /// How long the engine may take to write the memory out, or to read it in.
    fn patience(&self, id: &SandboxId) -> Duration {
        WORK + Duration::from_secs(self.memory_bytes(id) / SLOWEST).min(LONGEST)
    }

    async fn without_memory(
        self: &Arc<Self>,
        id: &SandboxId,
        turn: &Turn,
        deadline: Duration,
        why: &DriverError,
    ) -> Result<Stopped, DriverError> {
        let stopped = self.put_down(id, turn, Some(deadline)).await?;
        let also = stopped.detail.map(|detail| format!("; {detail}")).unwrap_or_default();
        Ok(Stopped { detail: Some(format!("its memory could not be kept: {why}{also}")), ..stopped })
    }

    /// Has the checkpoint made, after which nothing runs.
    async fn dump(
        self: &Arc<Self>,
        id: &SandboxId,
        record: &Record,
        found: &Inspect,
        turn: &Turn,
    ) -> Result<(), DriverError> {
        if found.state.paused {
            self.unpause(id, turn).await?;
        }
        let note = Note::new(record.run, found);
        let (inner, wanted) = (self.clone(), id.clone());
        let work = async move {
            let id = wanted;
            // Of an earlier life, and in the way.
            inner.discard(&id).await?;
            inner.store.write_note(&id, &note)?;
            hit("container.memory.noted")?;
            let mut tries = 1;
            loop {
                // Nobody listens until it runs again, so that the agent's dialing comes to nothing.
                if let Some(live) = inner.heard(&id) {
                    live.close();
                }
                inner.unhear(&id);
                sleep(HANG_UP * tries).await;
                let asked = inner.ask_for_checkpoint(&id, &note).await;
                if asked.is_ok() {
                    inner.store.write_note(&id, &Note { made: true, ..note.clone() })?;
                }
                hit("container.memory.asked")?;
                let Err(error) = asked else { return Ok(()) };
                if error.is_absence() {
                    return Err(error.into());
                }
                if !inner.is_up(&id).await? {
                    // Whatever was answered: what is there decides.
                    tracing::warn!(sandbox = %id, %error, "a checkpoint was refused after it was made");
                    return Ok(());
                }
                if tries == TRIES {
                    return Err(error.into());
                }
                tries += 1;
            }
        };
        self.turns.step(id, turn, work).await
    }

    async fn is_up(&self, id: &SandboxId) -> Result<bool, EngineError> {
        Ok(self.inspect(id).await?.is_some_and(|found| found.state.is_up()))
    }

    /// Sees that nothing runs and that the checkpoint is there, notes both, and gives everything back.
    async fn asleep(
        self: &Arc<Self>,
        id: &SandboxId,
        before: &Inspect,
        turn: &Turn,
    ) -> Result<Stopped, DriverError> {
        hit("container.memory.made")?;
        let (inner, wanted, before) = (self.clone(), id.clone(), before.clone());
        let work = async move {
            let id = &wanted;
            let Some(note) = inner.store.note(id)? else { return Ok(None) };
            let note = inner.located(id, note).await?;
            if !inner.down(id, KILLED).await? || !inner.has_checkpoint(id, &note).await? {
                return Ok(None);
            }
            match inner.released(id).await {
                // Docker shows the address of a container that it lost until the next start.
                Err(error @ DriverError::Backend { .. }) if !before.state.is_up() => {
                    tracing::warn!(sandbox = %id, %error, "its address is shown at the second time, too");
                }
                // A repeat finds the checkpoint.
                released => released?,
            }
            // Its memory goes with the files as they are now, so these may not be lost with the host's power.
            let flushed = sync(&before).await;
            inner.store.write_note(id, &Note { kept: true, ..note })?;
            hit("container.memory.kept")?;
            inner.unhear(id);
            inner.run_dir(id).remove()?;
            Ok(Some(flushed))
        };
        match self.turns.step(id, turn, work).await? {
            Some(flushed) => {
                let detail =
                    flushed.as_ref().err().map(|why| format!("the files are not written out: {why}"));
                Ok(Stopped { flushed: flushed.is_ok(), kept: Keep::Memory, detail })
            }
            None => {
                let gone = DriverError::backend("keep memory", "the engine has no checkpoint of it");
                self.without_memory(id, turn, Duration::ZERO, &gone).await
            }
        }
    }

    async fn ask_for_checkpoint(&self, id: &SandboxId, note: &Note) -> Result<(), EngineError> {
        let name = container::name(id);
        let (path, carries) = match self.config.engine {
            Engine::Docker => (
                format!("/containers/{name}/checkpoints"),
                Carries::Json(json!({"CheckpointID": note.name(), "Exit": true})),
            ),
            // Locks of files are kept; established connections of others than the agent's are not.
            Engine::Podman => {
                (format!("/libpod/containers/{name}/checkpoint?fileLocks=true"), Carries::Nothing)
            }
        };
        self.client.call(Method::POST, &path, carries, self.patience(id)).await.map(drop)
    }

    /// Starts the container from its checkpoint; another address than before is fine.
    pub(crate) async fn ask_to_restore(&self, id: &SandboxId, note: &Note) -> Result<(), EngineError> {
        let name = container::name(id);
        let path = match self.config.engine {
            Engine::Docker => format!("/containers/{name}/start?checkpoint={}", note.name()),
            Engine::Podman => format!(
                "/libpod/containers/{name}/restore?fileLocks=true&ignoreStaticIP=true&ignoreStaticMAC=true"
            ),
        };
        let (mut tries, limit) = (0, self.patience(id));
        loop {
            match self.client.call(Method::POST, &path, Carries::Nothing, limit).await {
                // Docker hands the checkpoint to containerd, which may not have thrown away yet that it has made the same.
                Err(EngineError::Refused { message, .. })
                    if tries < UPLOADS && message.contains(UPLOADED) =>
                {
                    tries += 1;
                    sleep(UPLOAD_AGAIN).await;
                }
                done => return done.map(drop),
            }
        }
    }

    /// Whether a start may go on from memory.
    pub(crate) async fn memory_of(
        &self,
        id: &SandboxId,
        found: &Inspect,
    ) -> Result<Option<Note>, DriverError> {
        let note = self.store.note(id)?;
        let Some(note) = note.filter(|note| note.kept && note.is_of(found)) else { return Ok(None) };
        Ok(self.has_checkpoint(id, &note).await?.then_some(note))
    }

    /// With the place where Podman has put it.
    async fn located(&self, id: &SandboxId, note: Note) -> Result<Note, EngineError> {
        if self.config.engine != Engine::Podman || note.path.is_some() {
            return Ok(note);
        }
        let state = self.checkpointed(id).await?.state;
        let path = state.checkpointed.then(|| PathBuf::from(state.checkpoint_path));
        Ok(Note { path, ..note })
    }

    /// Whether all of it is there.
    async fn has_checkpoint(&self, id: &SandboxId, note: &Note) -> Result<bool, EngineError> {
        let name = container::name(id);
        match self.config.engine {
            Engine::Docker if !note.made => Ok(false),
            Engine::Docker => {
                let all: Option<Vec<Checkpoint>> =
                    self.client.get(&format!("/containers/{name}/checkpoints")).await?;
                Ok(all.unwrap_or_default().iter().any(|one| one.name == note.name()))
            }
            Engine::Podman => Ok(note.is_whole()),
        }
    }

    /// Podman's own word about the checkpoint of a container.
    pub(crate) async fn checkpointed(&self, id: &SandboxId) -> Result<CheckpointInspect, EngineError> {
        self.client.get(&format!("/libpod/containers/{}/json", container::name(id))).await
    }

    /// Where Podman puts the checkpoint of a container, whole or not.
    async fn place(&self, id: &SandboxId) -> Result<Option<PathBuf>, EngineError> {
        match self.checkpointed(id).await {
            Ok(seen) => Ok(Some(Path::new(&seen.static_dir).join("checkpoint"))),
            Err(error) if error.is_absence() => Err(error),
            Err(_) => Ok(None),
        }
    }

    /// Gives a checkpoint up, if there is one.
    pub(crate) async fn discard(&self, id: &SandboxId) -> Result<(), DriverError> {
        let Some(note) = self.store.note(id)? else { return Ok(()) };
        let path = format!("/containers/{}/checkpoints/{}", container::name(id), note.name());
        match self.config.engine {
            Engine::Docker => match self.client.call(Method::DELETE, &path, Carries::Nothing, WORK).await {
                Err(error) if error.is_absence() => return Err(error.into()),
                // One that is not there, or that the engine can't remove: it goes with the container.
                Err(error) if !error.is_not_found() => {
                    tracing::debug!(sandbox = %id, %error, "the checkpoint is not removed");
                }
                _ => {}
            },
            // Podman has no word for it; where it restores, it removes it itself.
            Engine::Podman => {
                let place = match note.path {
                    Some(path) => Some(path),
                    None => self.place(id).await?,
                };
                let place = place.filter(|path| path.ends_with("userdata/checkpoint"));
                if let Some(Err(error)) = place.map(|path| remove_tree(&path)) {
                    tracing::debug!(sandbox = %id, %error, "the checkpoint is not removed");
                }
            }
        }
        self.store.remove_note(id)
    }
}

/// Writes out the file systems that hold what a container can write to: its layer and its mounts.
async fn sync(found: &Inspect) -> Result<(), String> {
    let layer = found.layer().ok_or("the engine does not say where they are")?;
    let places: BTreeSet<PathBuf> = found.writable().chain([layer]).map(openable).collect();
    let mut sync = Command::new("sync");
    sync.arg("--file-system").args(places).stdin(std::process::Stdio::null()).kill_on_drop(true);
    match tokio::time::timeout(SYNC, sync.output()).await {
        Err(_) => Err(format!("it took longer than {} s", SYNC.as_secs())),
        Ok(Err(error)) => Err(format!("sync: {error}")),
        Ok(Ok(done)) if done.status.success() => Ok(()),
        Ok(Ok(done)) => Err(crate::client::said(&String::from_utf8_lossy(&done.stderr))),
    }
}

/// The place itself, or the folder of what can't be opened without more ado: a socket, a device.
fn openable(place: &str) -> PathBuf {
    let place = Path::new(place);
    let special = fs::metadata(place).is_ok_and(|file| !file.is_dir() && !file.is_file());
    place.parent().filter(|_| special).unwrap_or(place).to_owned()
}

#[cfg(test)]
mod tests;
