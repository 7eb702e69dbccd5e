//! A run of a container whose agent this driver hears: started by it, or found running after a restart of the gateway.

use std::{
    collections::HashMap,
    sync::{
        Arc, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicBool, Ordering},
    },
    time::Duration,
};

use tokio::{sync::broadcast, time::timeout};
use tokio_util::sync::CancellationToken;
use tonic::transport::Channel;
use torpor_driver_common::{
    agent::{Pauses, listen},
    files::failed,
};
use torpor_proto::agent::v1::{StatusRequest, StatusResponse, agent_client::AgentClient};
use torpor_sandbox::{DriverError, Run, SandboxId, driver::HostFacts, words};

use crate::{
    driver::Inner,
    link::Link,
    run::{Record, RunDir},
    types::Inspect,
};

/// Before a lost stream of events is asked for again.
const PAUSES: Pauses = Pauses { first: Duration::from_millis(250), longest: Duration::from_secs(10) };

/// The runs that are heard. Never held over a wait.
pub(crate) type Map = Mutex<HashMap<SandboxId, Arc<Live>>>;

#[derive(Debug)]
pub(crate) struct Live {
    pub(crate) id: SandboxId,
    pub(crate) run: Run,
    link: Link,
    configured: AtomicBool,
    boot_id: Mutex<Option<String>>,
    facts: Mutex<HostFacts>,
    over: CancellationToken,
    hints: broadcast::Sender<SandboxId>,
}

impl Live {
    fn new(
        id: &SandboxId,
        record: &Record,
        dir: &RunDir,
        hints: broadcast::Sender<SandboxId>,
    ) -> Result<Arc<Self>, DriverError> {
        let folder = dir.agent_dir();
        let link = Link::listen(&folder).map_err(|error| failed("listen in", &folder, error))?;
        let live = Arc::new(Self {
            id: id.clone(),
            run: record.run,
            link,
            configured: AtomicBool::new(false),
            boot_id: Mutex::new(record.boot_id.clone()),
            facts: Mutex::default(),
            over: CancellationToken::new(),
            hints,
        });
        if record.configured {
            live.set_configured(record.boot_id.as_deref().unwrap_or_default());
        }
        Ok(live)
    }

    pub(crate) fn channel(&self) -> Channel {
        self.link.channel.clone()
    }

    /// Hangs up, and hears the agent no more.
    pub(crate) fn close(&self) {
        self.end();
        self.link.close();
    }

    /// Nobody needs it any more.
    fn end(&self) {
        self.over.cancel();
    }

    /// Asks the agent how it is; none when it doesn't answer in time.
    pub(crate) async fn status(self: &Arc<Self>, limit: Duration) -> Option<StatusResponse> {
        let mut client = AgentClient::new(self.channel());
        let status = timeout(limit, client.status(StatusRequest {})).await.ok()?.ok()?.into_inner();
        if status.configured && status.run == self.run.0 {
            self.set_configured(&status.boot_id);
        }
        Some(status)
    }

    /// The agent says that it is configured for this run: from now on it has events to tell.
    pub(crate) fn set_configured(self: &Arc<Self>, boot_id: &str) {
        if let Some(boot_id) = words::boot_id(boot_id) {
            *lock(&self.boot_id) = Some(boot_id.to_owned());
        }
        if !self.configured.swap(true, Ordering::Relaxed) {
            tokio::spawn(hear_events(self.clone()));
        }
    }

    pub(crate) fn is_configured(&self) -> bool {
        self.configured.load(Ordering::Relaxed)
    }

    pub(crate) fn boot_id(&self) -> Option<String> {
        lock(&self.boot_id).clone()
    }

    pub(crate) fn facts(&self) -> HostFacts {
        lock(&self.facts).clone()
    }

    /// What the engine shows of it, for people.
    pub(crate) fn seen(&self, found: &Inspect, dir: &RunDir) {
        let (ip, mac) = found.addresses();
        *lock(&self.facts) = HostFacts {
            pid: u32::try_from(found.state.pid).unwrap_or_default(),
            ip: ip.to_owned(),
            mac: mac.to_owned(),
            run_dir: dir.path().display().to_string(),
            ..HostFacts::default()
        };
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Inner {
    /// The run that is heard, if one is.
    pub(crate) fn heard(&self, id: &SandboxId) -> Option<Arc<Live>> {
        lock(&self.live).get(id).cloned()
    }

    /// Hears this run: as before, or from now on.
    pub(crate) fn hear(&self, id: &SandboxId, record: &Record) -> Result<Arc<Live>, DriverError> {
        let mut live = lock(&self.live);
        if let Some(known) = live.get(id) {
            if known.run == record.run {
                return Ok(known.clone());
            }
            known.end();
        }
        let new = Live::new(id, record, &self.run_dir(id), self.hints.clone())?;
        live.insert(id.clone(), new.clone());
        Ok(new)
    }

    /// Nothing runs any more.
    pub(crate) fn unhear(&self, id: &SandboxId) {
        if let Some(live) = lock(&self.live).remove(id) {
            live.end();
        }
    }

    pub(crate) fn unhear_all(&self) {
        lock(&self.live).drain().for_each(|(_, live)| live.end());
    }
}

/// Hears the agent of a run, until nobody needs it any more.
async fn hear_events(live: Arc<Live>) {
    let hint = || drop(live.hints.send(live.id.clone()));
    tokio::select! {
        () = live.over.cancelled() => {}
        () = listen(|| Some(live.channel()), hint, PAUSES) => {}
    }
}
