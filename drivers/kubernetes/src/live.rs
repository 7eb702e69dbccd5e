//! A run whose agent this driver hears: started by it, or found running after a restart of the gateway.

use std::{
    collections::HashMap,
    sync::{
        Arc, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicBool, Ordering},
    },
    time::Duration,
};

use tokio::{
    sync::broadcast,
    time::{Instant, timeout},
};
use tokio_util::sync::CancellationToken;
use tonic::transport::Channel;
use torpor_driver_common::agent::{Pauses, listen};
use torpor_proto::agent::v1::{StatusRequest, StatusResponse, agent_client::AgentClient};
use torpor_sandbox::{Run, SandboxId, words};

use crate::{driver::Inner, link, store::Record};

/// Before a lost stream of events is asked for again.
const PAUSES: Pauses = Pauses { first: Duration::from_millis(500), longest: Duration::from_secs(30) };
/// A connection that nobody has used for so long is let go: every one of them is one of the API server's.
const IDLE: Duration = Duration::from_secs(60);

/// The runs that are heard. Never held over a wait.
pub(crate) type Map = Mutex<HashMap<SandboxId, Arc<Live>>>;

pub(crate) struct Live {
    pub(crate) id: SandboxId,
    pub(crate) run: Run,
    /// The pod that this is about.
    pub(crate) pod: String,
    /// It has a main command, so that its agent has something to tell.
    main: bool,
    channel: Mutex<Option<(Channel, Instant)>>,
    configured: AtomicBool,
    boot_id: Mutex<Option<String>>,
    over: CancellationToken,
    hints: broadcast::Sender<SandboxId>,
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Live {
    /// The one connection, made anew when it was let go.
    pub(crate) fn channel(&self, inner: &Arc<Inner>) -> Channel {
        let mut slot = lock(&self.channel);
        let channel = slot.take().map_or_else(|| link::channel(inner, &self.id), |(channel, _)| channel);
        *slot = Some((channel.clone(), Instant::now()));
        channel
    }

    /// Calls that are under way keep their connection.
    fn let_go(&self) {
        lock(&self.channel).take_if(|(_, used)| used.elapsed() >= IDLE);
    }

    /// Asks the agent how it is; none when it doesn't answer in time.
    pub(crate) async fn status(
        self: &Arc<Self>,
        inner: &Arc<Inner>,
        limit: Duration,
    ) -> Option<StatusResponse> {
        let mut client = AgentClient::new(self.channel(inner));
        let status = timeout(limit, client.status(StatusRequest {})).await.ok()?.ok()?.into_inner();
        if status.configured && status.run == self.run.0 {
            self.set_configured(inner, &status.boot_id);
        }
        Some(status)
    }

    /// The agent says that it is configured for this run: from now on it has events to tell.
    pub(crate) fn set_configured(self: &Arc<Self>, inner: &Arc<Inner>, boot_id: &str) {
        if let Some(boot_id) = words::boot_id(boot_id) {
            *lock(&self.boot_id) = Some(boot_id.to_owned());
        }
        if !self.configured.swap(true, Ordering::Relaxed) && self.main {
            tokio::spawn(hear_events(self.clone(), Arc::downgrade(inner)));
        }
    }

    pub(crate) fn is_configured(&self) -> bool {
        self.configured.load(Ordering::Relaxed)
    }

    pub(crate) fn boot_id(&self) -> Option<String> {
        lock(&self.boot_id).clone()
    }
}

impl std::fmt::Debug for Live {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Live").field("id", &self.id).field("run", &self.run).finish_non_exhaustive()
    }
}

impl Inner {
    /// The run that is heard, if one is.
    pub(crate) fn heard(&self, id: &SandboxId) -> Option<Arc<Live>> {
        lock(&self.live).get(id).cloned()
    }

    /// Hears this run in this pod: as before, or from now on.
    pub(crate) fn hear(self: &Arc<Self>, id: &SandboxId, record: &Record, pod: &str) -> Arc<Live> {
        let mut all = lock(&self.live);
        if let Some(known) = all.get(id) {
            if known.run == record.run && known.pod == pod {
                return known.clone();
            }
            known.over.cancel();
        }
        let main = self.store.specs.read(id).is_ok_and(|spec| !spec.command.is_empty());
        let live = Arc::new(Live {
            id: id.clone(),
            run: record.run,
            pod: pod.to_owned(),
            main,
            channel: Mutex::default(),
            configured: AtomicBool::new(false),
            boot_id: Mutex::new(record.boot_id.clone()),
            over: CancellationToken::new(),
            hints: self.hints.clone(),
        });
        all.insert(id.clone(), live.clone());
        drop(all);
        if record.configured {
            live.set_configured(self, record.boot_id.as_deref().unwrap_or_default());
        }
        live
    }

    /// Nothing runs any more.
    pub(crate) fn unhear(&self, id: &SandboxId) {
        if let Some(live) = lock(&self.live).remove(id) {
            live.over.cancel();
        }
    }

    pub(crate) fn unhear_all(&self) {
        lock(&self.live).drain().for_each(|(_, live)| live.over.cancel());
    }
}

/// Lets go of connections that nobody uses, for as long as the driver lives.
pub(crate) async fn tidy(inner: Arc<Inner>) {
    loop {
        tokio::time::sleep(IDLE / 2).await;
        lock(&inner.live).values().for_each(|live| live.let_go());
    }
}

/// Hears the agent of a run, until nobody needs it any more or the driver is gone.
async fn hear_events(live: Arc<Live>, inner: std::sync::Weak<Inner>) {
    let channel = || inner.upgrade().map(|inner| live.channel(&inner));
    let hint = || drop(live.hints.send(live.id.clone()));
    tokio::select! {
        () = live.over.cancelled() => {}
        () = listen(channel, hint, PAUSES) => {}
    }
}
