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
    sync::{broadcast, watch},
    time::{Instant, timeout},
};
use tokio_util::sync::CancellationToken;
use tonic::transport::Channel;
use torpor_driver_common::agent::{Pauses, listen};
use torpor_proto::agent::v1::{StatusRequest, StatusResponse, agent_client::AgentClient};
use torpor_sandbox::{Run, SandboxId, words};

use crate::{driver::Inner, link, store::Record, way::Way};

/// Before a lost stream of events is asked for again.
const PAUSES: Pauses = Pauses { first: Duration::from_millis(500), longest: Duration::from_secs(30) };
/// A configured agent whose pod the cluster calls running is asked how it is so often, when there is no connection anyway.
const ASK: Duration = Duration::from_secs(600);

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
    /// When it is asked how it is, though there is no connection.
    ask_at: Mutex<Instant>,
    boot_id: Mutex<Option<String>>,
    /// How it is reached.
    pub(crate) way: Way,
    /// Told of a channel that takes the place of the one before.
    moved: watch::Sender<()>,
    over: CancellationToken,
    hints: broadcast::Sender<SandboxId>,
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Live {
    /// The one connection, made anew when it was let go.
    pub(crate) fn channel(self: &Arc<Self>, inner: &Arc<Inner>) -> Channel {
        inner.see_to_port(self);
        let mut slot = lock(&self.channel);
        let channel = slot.take().map_or_else(|| link::channel(inner, self), |(channel, _)| channel);
        *slot = Some((channel.clone(), Instant::now()));
        channel
    }

    /// The same, without counting as a use of it.
    fn channel_for_a_look(self: &Arc<Self>, inner: &Arc<Inner>) -> Channel {
        let there = lock(&self.channel).as_ref().map(|(channel, _)| channel.clone());
        there.unwrap_or_else(|| self.channel(inner))
    }

    /// From now on it is this one, by its own port. What is under way by the other one ends there.
    pub(crate) fn go_by_port(&self, channel: Channel) {
        *lock(&self.channel) = Some((channel, Instant::now()));
        self.way.go_by_port();
        self.moved.send_replace(());
    }

    /// Waits for the end of the run.
    pub(crate) async fn is_over(&self) {
        self.over.cancelled().await;
    }

    /// Calls that are under way keep their connection. So does the wait for the word of a main command's end, which must
    /// not have one of its own beside it.
    fn let_go(&self, idle: Duration) {
        if self.main {
            return;
        }
        lock(&self.channel).take_if(|(_, used)| used.elapsed() >= idle);
    }

    /// Whether more than its pod is to be looked at. The agent is the pod's first process: it ends with it, so that one that
    /// has answered for this run need not say so again and again, at the price of a connection each time.
    pub(crate) fn is_to_be_asked(&self) -> bool {
        !self.is_configured()
            || self.main
            || lock(&self.channel).is_some()
            || Instant::now() >= *lock(&self.ask_at)
    }

    /// Asks the agent how it is; none when it doesn't answer in time.
    pub(crate) async fn status(
        self: &Arc<Self>,
        inner: &Arc<Inner>,
        limit: Duration,
    ) -> Option<StatusResponse> {
        let mut client = AgentClient::new(self.channel_for_a_look(inner));
        let status = timeout(limit, client.status(StatusRequest {})).await.ok()?.ok()?.into_inner();
        if status.configured && status.run == self.run.0 {
            *lock(&self.ask_at) = Instant::now() + ASK;
            self.set_configured(inner, &status.boot_id);
        }
        Some(status)
    }

    /// The agent says that it is configured for this run: from now on it has events to tell.
    pub(crate) fn set_configured(self: &Arc<Self>, inner: &Arc<Inner>, boot_id: &str) {
        if let Some(boot_id) = words::boot_id(boot_id) {
            *lock(&self.boot_id) = Some(boot_id.to_owned());
        }
        if self.configured.swap(true, Ordering::Relaxed) {
            return;
        }
        if self.main {
            tokio::spawn(hear_events(self.clone(), Arc::downgrade(inner)));
        }
        inner.see_to_port(self);
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
            ask_at: Mutex::new(Instant::now() + spread(id)),
            boot_id: Mutex::new(record.boot_id.clone()),
            way: Way::new(self.trust.is_some() && record.configured),
            moved: watch::channel(()).0,
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

    /// How many of those that are heard are reached by exec, and on ports of their own.
    pub(crate) fn links(&self) -> [usize; 2] {
        let all = lock(&self.live);
        let by_port = all.values().filter(|live| live.way.is_by_port()).count();
        [all.len() - by_port, by_port]
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
        let idle = inner.config.idle;
        tokio::time::sleep(idle / 2).await;
        lock(&inner.live).values().for_each(|live| live.let_go(idle));
    }
}

/// A part of the time between two looks that is a sandbox's own: a gateway that starts does not ask all of them at once.
fn spread(id: &SandboxId) -> Duration {
    let sum = id.as_str().bytes().fold(7_u32, |sum, byte| sum.wrapping_mul(31).wrapping_add(byte.into()));
    ASK.mul_f64(f64::from(sum % 1000) / 1000.0)
}

/// Hears the agent of a run, until nobody needs it any more or the driver is gone.
async fn hear_events(live: Arc<Live>, inner: std::sync::Weak<Inner>) {
    let mut moved = live.moved.subscribe();
    let hint = || drop(live.hints.send(live.id.clone()));
    loop {
        let channel = || inner.upgrade().map(|inner| live.channel(&inner));
        tokio::select! {
            () = live.over.cancelled() => return,
            // Its end is told anew there.
            Ok(()) = moved.changed() => {}
            () = listen(channel, hint, PAUSES) => return,
        }
    }
}
