//! Start: the same container again, and its agent configured for the run.

use std::{
    path::Path,
    sync::Arc,
    time::{Duration, SystemTime},
};

use hyper::Method;
use tokio::time::{sleep, timeout};
use tonic::Code;
use torpor_driver_common::{Turn, agent::main_command};
use torpor_proto::agent::v1::{ConfigureRequest, agent_client::AgentClient};
use torpor_sandbox::{Change, DriverError, Keep, Run, SandboxId, SandboxSpec, failpoint::hit};

use crate::{
    client::{EngineError, WORK, encoded, said},
    driver::Inner,
    live::Live,
    logs,
    memory::Note,
    run::Record,
    types::Inspect,
};

/// Pause between two tries of a first call.
const AGAIN: Duration = Duration::from_millis(50);
/// How long one first call may take before it is tried anew.
const CONFIGURE: Duration = Duration::from_secs(30);
/// How often a container is looked at while its agent is waited for.
const LOOK: Duration = Duration::from_millis(500);
/// What of the console goes with a failure, bytes.
const CONSOLE: usize = 4096;

impl Inner {
    pub(crate) async fn start(
        self: &Arc<Self>,
        id: &SandboxId,
        from: Keep,
        run: Run,
    ) -> Result<Change, DriverError> {
        let turn = self.turns.turn(id).await;
        let spec = self.store.specs.read(id)?;
        let found = self.inspect(id).await?.ok_or_else(|| {
            DriverError::DataMissing(format!("the container {} is gone", crate::container::name(id)))
        })?;
        let dir = self.run_dir(id);
        let record = dir.record()?;
        if found.state.is_up() {
            let record = record.filter(|record| record.run == run && !record.is_replaced(&found));
            let record = record.ok_or_else(|| {
                let text =
                    format!("another start of the container is there; it must be stopped before run {run}");
                DriverError::Invalid(text)
            })?;
            let live = self.hear(id, &record)?;
            live.seen(&found, &dir);
            self.bring_up(&live, &spec, &found, record, &turn).await?;
            self.no_more_memory(id, &turn).await?;
            return Ok(Change::Already);
        }
        // An engine that was asked by a gateway that is gone may be about to start it, in the folder that there is.
        let asked = record.as_ref().is_some_and(|record| record.run == run && record.is_pending(&found));
        if !asked && (record.is_some() || dir.exists()) {
            self.unhear(id);
            dir.remove()?;
        }
        self.check_image(&found, &spec).await?;
        self.check_mounts(&spec).await?;
        let memory = match from {
            Keep::Disk => None,
            Keep::Memory => Some(self.usable_memory(id, &found, run).await?),
        };
        if memory.is_none() {
            self.no_more_memory(id, &turn).await?;
            self.fit_limits(id, &found, &spec).await?;
            self.store.link_agent(id)?;
        }
        let (inner, wanted, before) = (self.clone(), id.clone(), found);
        let launched =
            self.turns.step(id, &turn, async move { inner.launch(&wanted, run, &before, memory).await });
        let (live, record, found) = launched.await?;
        hit("container.start.launched")?;
        self.bring_up(&live, &spec, &found, record, &turn).await?;
        self.no_more_memory(id, &turn).await?;
        Ok(Change::Done)
    }

    /// What this run may go on from: memory that nobody else has gone on from.
    async fn usable_memory(&self, id: &SandboxId, found: &Inspect, run: Run) -> Result<Note, DriverError> {
        let note = self.memory_of(id, found).await?;
        note.filter(|note| note.used.is_none_or(|used| used == run)).ok_or_else(|| {
            let cause = "its memory is not there; the workspace is: `torpor start` boots from it";
            failed("restore", cause.to_owned(), b"")
        })
    }

    async fn no_more_memory(self: &Arc<Self>, id: &SandboxId, turn: &Turn) -> Result<(), DriverError> {
        let (inner, wanted) = (self.clone(), id.clone());
        self.turns.step(id, turn, async move { inner.discard(&wanted).await }).await
    }

    /// The container must still be of the image that the sandbox is bound to, and that image must be there.
    async fn check_image(&self, found: &Inspect, spec: &SandboxSpec) -> Result<(), DriverError> {
        let digest = |text: &str| text.trim_start_matches("sha256:").to_owned();
        if digest(&found.image) != digest(&spec.image_digest) {
            let text = format!("the container is of {}, the sandbox of {}", found.image, spec.image_digest);
            return Err(DriverError::BaseChanged(text));
        }
        let path = format!("/images/{}/json", encoded(&spec.image_digest));
        match self.client.get::<serde_json::Value>(&path).await {
            Ok(_) => Ok(()),
            Err(error) if error.is_not_found() => Err(DriverError::BaseMissing(format!(
                "{} ({}) is not among {}'s images any more; pull or load it again",
                spec.image,
                spec.image_digest,
                self.config.engine.name()
            ))),
            Err(error) => Err(error.into()),
        }
    }

    /// An engine would make a missing volume anew, and empty.
    async fn check_mounts(&self, spec: &SandboxSpec) -> Result<(), DriverError> {
        for volume in &spec.volumes {
            if volume.is_bind() {
                if !Path::new(&volume.source).exists() {
                    return Err(DriverError::MountMissing(format!("{} of the host is gone", volume.source)));
                }
                continue;
            }
            let path = format!("/volumes/{}", encoded(&volume.source));
            match self.client.get::<serde_json::Value>(&path).await {
                Ok(_) => {}
                Err(error) if error.is_not_found() => {
                    return Err(DriverError::MountMissing(format!("the volume {} is gone", volume.source)));
                }
                Err(error) => return Err(error.into()),
            }
        }
        Ok(())
    }

    /// Starts the container and sees it started.
    async fn launch(
        &self,
        id: &SandboxId,
        run: Run,
        before: &Inspect,
        memory: Option<Note>,
    ) -> Result<(Arc<Live>, Record, Inspect), DriverError> {
        let dir = self.run_dir(id);
        dir.make()?;
        let mut record = Record::new(run, before);
        dir.write(&record)?;
        hit("container.launch.noted")?;
        let live = self.hear(id, &record)?;
        hit("container.launch.listening")?;
        let asked = match &memory {
            None => self.ask(Method::POST, id, "/start", WORK).await,
            Some(note) => {
                let note = Note { used: Some(run), ..note.clone() };
                self.store.write_note(id, &note)?;
                hit("container.memory.restoring")?;
                self.ask_to_restore(id, &note).await
            }
        };
        hit("container.launch.asked")?;
        let found = match self.inspect(id).await? {
            Some(found) if found.state.is_up() => found,
            other => return Err(self.not_launched(id, asked.err(), other, memory).await),
        };
        record.started_at = Some(found.state.started_at.clone());
        dir.write(&record)?;
        live.seen(&found, &dir);
        hit("container.launch.started")?;
        Ok((live, record, found))
    }

    /// Nothing runs; what was made for it goes.
    async fn not_launched(
        &self,
        id: &SandboxId,
        error: Option<EngineError>,
        found: Option<Inspect>,
        memory: Option<Note>,
    ) -> DriverError {
        if error.as_ref().is_some_and(EngineError::is_absence) {
            // It may still come about: whoever looks next finds out.
            return error.map_or(DriverError::Missing, DriverError::from);
        }
        let console = logs::tail(self, id, CONSOLE).await;
        self.unhear(id);
        if let Err(error) = self.run_dir(id).remove() {
            tracing::warn!(sandbox = %id, %error, "a failed start left something; stop will find it");
        }
        match (error, found) {
            (Some(error), _) => {
                let why = error.to_string();
                match (refused(error), memory) {
                    // It waits for the host, and nothing has gone on from the memory.
                    (short @ (DriverError::Exhausted(_) | DriverError::NoSpace(_)), Some(note)) => {
                        self.store.write_note(id, &Note { used: None, ..note }).err().unwrap_or(short)
                    }
                    (_, Some(_)) => failed("restore", why, &console),
                    (refusal, None) => refusal,
                }
            }
            (None, Some(found)) => {
                let cause = format!("the container ended at once with code {}", found.state.exit_code);
                failed("start", cause, &console)
            }
            (None, None) => DriverError::DataMissing("the container was removed".to_owned()),
        }
    }

    /// Waits for the agent; what doesn't come up is put down again.
    async fn bring_up(
        self: &Arc<Self>,
        live: &Arc<Live>,
        spec: &SandboxSpec,
        found: &Inspect,
        record: Record,
        turn: &Turn,
    ) -> Result<(), DriverError> {
        let id = &live.id;
        let limit = self.config.start_timeout;
        let ready = tokio::select! {
            ready = timeout(limit, configure(live, spec, found)) => {
                ready.unwrap_or_else(|_| Err(format!("the agent did not answer within {} s", limit.as_secs())))
            }
            why = self.gone(id) => Err(why),
        };
        let Err(cause) = ready else {
            // A later gateway must know that there is something to flush before anybody hears that it is ready.
            let dir = self.run_dir(id);
            let started_at = record.started_at.clone().or_else(|| Some(found.state.started_at.clone()));
            let news = Record { configured: true, boot_id: live.boot_id(), started_at, ..record.clone() };
            return if news == record {
                Ok(())
            } else {
                self.turns.step(id, turn, async move { dir.write(&news) }).await
            };
        };
        let console = logs::tail(self, id, CONSOLE).await;
        self.put_down(id, turn, None).await?;
        Err(failed("boot", cause, &console))
    }

    /// Ends when the container does.
    async fn gone(&self, id: &SandboxId) -> String {
        loop {
            sleep(LOOK).await;
            match self.inspect(id).await {
                Ok(Some(found)) if !found.state.is_up() => {
                    return format!("the container ended with code {}", found.state.exit_code);
                }
                Ok(None) => return "the container was removed".to_owned(),
                // An engine that is away says nothing of the container.
                Ok(Some(_)) | Err(_) => {}
            }
        }
    }
}

fn failed(step: &str, cause: String, console: &[u8]) -> DriverError {
    let console = String::from_utf8_lossy(console).into_owned();
    DriverError::Failed { step: step.to_owned(), cause, console }
}

/// An engine's refusal to start; what it lacks is waited for.
fn refused(error: EngineError) -> DriverError {
    let text = error.to_string();
    let lower = text.to_lowercase();
    let exhausted = ["no available ipv4 addresses", "no ip addresses available", "cannot allocate memory"];
    if exhausted.iter().any(|words| lower.contains(words)) {
        return DriverError::Exhausted(text);
    }
    error.into()
}

/// Configures the agent as soon as it answers.
async fn configure(live: &Arc<Live>, spec: &SandboxSpec, found: &Inspect) -> Result<(), String> {
    let mut client = AgentClient::new(live.channel());
    loop {
        match timeout(CONFIGURE, client.configure(request(live, spec, found))).await {
            Ok(Ok(answer)) => {
                let answer = answer.into_inner();
                if answer.run != live.run.0 {
                    return Err(format!("the agent answered for run {} instead of {}", answer.run, live.run));
                }
                live.set_configured(&answer.boot_id);
                return Ok(());
            }
            // No connection yet, or it was lost.
            Ok(Err(status))
                if matches!(status.code(), Code::Unavailable | Code::Unknown | Code::Cancelled) =>
            {
                tracing::debug!(sandbox = %live.id, code = ?status.code(), "the agent is not there yet");
            }
            Ok(Err(status)) => {
                return Err(format!("the agent refused its configuration: {}", said(status.message())));
            }
            Err(_) => {}
        }
        sleep(AGAIN).await;
    }
}

fn request(live: &Live, spec: &SandboxSpec, found: &Inspect) -> ConfigureRequest {
    ConfigureRequest {
        run: live.run.0,
        sandbox_id: live.id.to_string(),
        hostname: spec.hostname.clone(),
        time: Some(SystemTime::now().into()),
        environment: environment(spec, found).collect(),
        main: main_command(spec),
        ..ConfigureRequest::default()
    }
}

/// What the image sets, and over it what the sandbox does. What engines add themselves is about the first process, which
/// is the agent.
fn environment<'a>(spec: &'a SandboxSpec, found: &'a Inspect) -> impl Iterator<Item = (String, String)> + 'a {
    const OF_ENGINES: [&str; 4] = ["HOSTNAME", "HOME", "TERM", "container"];
    let of_image = found.config.env.iter().flatten().filter_map(|pair| pair.split_once('='));
    let of_image = of_image.filter(|(name, _)| !name.is_empty() && !OF_ENGINES.contains(name));
    let of_image = of_image.map(|(name, value)| (name.to_owned(), value.to_owned()));
    of_image.chain(spec.environment.clone())
}
