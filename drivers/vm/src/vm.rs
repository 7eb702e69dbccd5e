//! A VM that this driver watches: started by it, or found running after a restart of the gateway.

use std::{
    io,
    sync::{
        Arc, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicBool, Ordering},
    },
    time::Duration,
};

use tokio::{
    sync::{broadcast, mpsc, oneshot, watch},
    task::AbortHandle,
    time::{Instant, timeout},
};
use tonic::transport::Channel;
use torpor_driver_common::agent::{Pauses, listen};
use torpor_netpool::{Egress, GuestNet};
use torpor_proto::agent::v1::{StatusRequest, StatusResponse, agent_client::AgentClient};
use torpor_sandbox::{DriverError, Egress as OwnEgress, Exit, Run, SandboxId, words};

use crate::{
    agent,
    machine::{GuestEnd, LastWords, Machine, Monitor, News},
    process::Handle,
    rundir::{Record, RunDir},
};

/// How often what the guest wrote is taken over while it lives.
const DRAIN: Duration = Duration::from_secs(5);
/// The least time between two words about a disk without room: QEMU tells of each write.
const SHORT_AGAIN: Duration = Duration::from_secs(15);
/// Pause before a lost monitor is asked for again.
const AGAIN: Duration = Duration::from_millis(250);
/// Before a lost stream of events is.
const PAUSES: Pauses = Pauses { first: AGAIN, longest: Duration::from_secs(10) };
/// What of the console is searched for a panic, bytes.
const SEARCHED: usize = 64 << 10;
const PANIC: &str = "Kernel panic - not syncing";

/// What was seen of its end.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Seen {
    /// The guest has ended by itself; its process may be there still.
    pub(crate) exit: Option<Exit>,
    /// Why what the guest has written may not all be on its disk, where its machine has said so.
    pub(crate) disk_error: Option<String>,
    /// The process is gone and reaped.
    pub(crate) gone: bool,
}

#[derive(Debug)]
enum Ask {
    /// Take over what the guest wrote, then answer.
    Drain(oneshot::Sender<()>),
    /// Make the disk so large, in bytes.
    Grow(u64, oneshot::Sender<Result<u64, DriverError>>),
    Quit,
}

/// A watched VM. All of it is shared and cheap to hold; the watcher ends with the process.
#[derive(Debug)]
pub(crate) struct Vm {
    pub(crate) record: Record,
    pub(crate) dir: RunDir,
    pub(crate) handle: Handle,
    pub(crate) channel: Channel,
    seen: watch::Receiver<Seen>,
    ask: mpsc::Sender<Ask>,
    /// As it is now: its policy may change.
    net: Mutex<Option<GuestNet>>,
    /// The policy of its spec by which disk, record and firewall are known to go, all of them.
    settled: Mutex<Option<Option<OwnEgress>>>,
    configured: AtomicBool,
    boot_id: Mutex<Option<String>>,
    tasks: Mutex<Vec<AbortHandle>>,
}

impl Vm {
    /// Begins to watch. Every end is a hint; `exit` is how the guest was seen to end before.
    pub(crate) fn watch(
        record: Record,
        dir: RunDir,
        handle: Handle,
        exit: Option<Exit>,
        machine: Arc<dyn Machine>,
        hints: broadcast::Sender<SandboxId>,
        shortages: broadcast::Sender<SandboxId>,
    ) -> Arc<Self> {
        let channel = agent::channel(&machine.agent(dir.path()));
        let (seen_by, seen) = watch::channel(Seen { exit, ..Seen::default() });
        let (ask, asked) = mpsc::channel(8);
        let configured = AtomicBool::new(record.configured);
        let boot_id = Mutex::new(record.boot_id.clone());
        let (tasks, settled, net) = (Mutex::default(), Mutex::default(), Mutex::new(record.net.clone()));
        let vm = Arc::new(Self {
            record,
            dir,
            handle,
            channel,
            seen,
            ask,
            net,
            settled,
            configured,
            boot_id,
            tasks,
        });
        let watcher = Watcher {
            vm: Arc::clone(&vm),
            machine,
            hints: hints.clone(),
            shortages,
            seen: seen_by,
            asked,
            monitor: None,
        };
        let watching = [tokio::spawn(watcher.run()), tokio::spawn(hear_events(Arc::clone(&vm), hints))];
        lock(&vm.tasks).extend(watching.iter().map(tokio::task::JoinHandle::abort_handle));
        vm
    }

    /// Looks away: its monitor and its agent are free for another driver. The VM goes on.
    pub(crate) fn abandon(&self) {
        lock(&self.tasks).drain(..).for_each(|task| task.abort());
    }

    /// What was seen of its end, up to now.
    pub(crate) fn seen(&self) -> Seen {
        self.seen.borrow().clone()
    }

    /// Waits until the guest has ended or the process is gone.
    pub(crate) async fn over(&self) -> Seen {
        let mut seen = self.seen.clone();
        let found = seen.wait_for(|seen| seen.gone || seen.exit.is_some()).await.map(|seen| seen.clone());
        found.unwrap_or_else(|_| self.seen())
    }

    /// Waits until the process is gone.
    pub(crate) async fn gone(&self) {
        let mut seen = self.seen.clone();
        let _closed = seen.wait_for(|seen| seen.gone).await.is_err();
    }

    /// Asks the machine to end its process in order.
    pub(crate) async fn quit(&self) {
        let _gone = self.ask.send(Ask::Quit).await.is_err();
    }

    /// Makes the disk larger under the running guest; its size then, bytes.
    pub(crate) async fn grow_disk(&self, bytes: u64) -> Result<u64, DriverError> {
        let (answer, answered) = oneshot::channel();
        let lost = || DriverError::backend("grow the disk", "the VM is ending");
        self.ask.send(Ask::Grow(bytes, answer)).await.map_err(|_| lost())?;
        answered.await.map_err(|_| lost())?
    }

    /// Takes over what the guest wrote, if that can be done soon.
    pub(crate) async fn drain(&self, limit: Duration) {
        let (answer, answered) = oneshot::channel();
        if self.ask.try_send(Ask::Drain(answer)).is_ok() {
            let _ = timeout(limit, answered).await;
        }
    }

    /// Asks the agent how it is; none when it doesn't answer in time.
    pub(crate) async fn status(&self, limit: Duration) -> Option<StatusResponse> {
        let mut client = AgentClient::new(self.channel.clone());
        let status = timeout(limit, client.status(StatusRequest {})).await.ok()?.ok()?.into_inner();
        if status.configured && status.run == self.record.run.0 {
            self.set_configured(&status.boot_id);
        }
        Some(status)
    }

    /// The guest's boot, once the agent has told it.
    pub(crate) fn boot_id(&self) -> Option<String> {
        lock(&self.boot_id).clone()
    }

    /// Work on the files of the run, which may wait for a disk.
    pub(crate) async fn on_disk<T: Send + 'static>(
        &self,
        work: impl FnOnce(&RunDir) -> io::Result<T> + Send + 'static,
    ) -> io::Result<T> {
        let dir = self.dir.clone();
        tokio::task::spawn_blocking(move || work(&dir)).await.map_err(io::Error::other)?
    }

    /// Whether the guest was ever seen to have been configured for this run.
    pub(crate) fn is_configured(&self) -> bool {
        self.configured.load(Ordering::Relaxed)
    }

    /// The agent says that it is configured for this run, and in which boot.
    pub(crate) fn set_configured(&self, boot_id: &str) {
        if let Some(boot_id) = words::boot_id(boot_id) {
            *lock(&self.boot_id) = Some(boot_id.to_owned());
        }
        self.configured.store(true, Ordering::Relaxed);
    }

    /// The record with what is known by now; none when that is what was read.
    pub(crate) fn news(&self) -> Option<Record> {
        let record = self.record_now();
        (record != self.record).then_some(record)
    }

    /// The record with what is known by now.
    pub(crate) fn record_now(&self) -> Record {
        let (configured, boot_id, net) = (self.is_configured(), self.boot_id(), self.net());
        Record { configured, boot_id, net, ..self.record.clone() }
    }

    /// Names and addresses, and where its guest may send to now.
    pub(crate) fn net(&self) -> Option<GuestNet> {
        lock(&self.net).clone()
    }

    /// Whether this policy of its spec is noted and in force.
    pub(crate) fn goes_by(&self, own: &Option<OwnEgress>) -> bool {
        lock(&self.settled).as_ref() == Some(own)
    }

    pub(crate) fn set_settled(&self, own: Option<Option<OwnEgress>>) {
        *lock(&self.settled) = own;
    }

    /// What the firewall has been told.
    pub(crate) fn set_egress(&self, egress: Egress) {
        *lock(&self.settled) = None;
        if let Some(net) = &mut *lock(&self.net) {
            net.egress = Some(egress);
        }
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Hears the agent of a VM, to the VM's end.
async fn hear_events(vm: Arc<Vm>, hints: broadcast::Sender<SandboxId>) {
    let hint = || drop(hints.send(vm.record.sandbox.clone()));
    tokio::select! {
        _ = vm.over() => {}
        () = listen(|| Some(vm.channel.clone()), hint, PAUSES) => {}
    }
}

struct Watcher {
    vm: Arc<Vm>,
    machine: Arc<dyn Machine>,
    hints: broadcast::Sender<SandboxId>,
    shortages: broadcast::Sender<SandboxId>,
    seen: watch::Sender<Seen>,
    asked: mpsc::Receiver<Ask>,
    monitor: Option<Box<dyn Monitor>>,
}

/// What woke the watcher.
enum Woken {
    ProcessEnded(Option<String>),
    News(io::Result<News>),
    Asked(Option<Ask>),
    Time,
}

impl Watcher {
    async fn run(mut self) {
        let process = self.vm.handle.clone();
        let ended = process.ended();
        tokio::pin!(ended);
        let mut drain_at = Instant::now() + DRAIN;
        let mut asking = true;
        let mut short_at: Option<Instant> = None;
        loop {
            self.connect().await;
            let pause = if self.monitor.is_none() { Instant::now() + AGAIN } else { drain_at };
            let watching = self.seen.borrow().exit.is_none();
            let woken = tokio::select! {
                status = &mut ended => Woken::ProcessEnded(status),
                news = news(&mut self.monitor), if watching => Woken::News(news),
                ask = self.asked.recv(), if asking => Woken::Asked(ask),
                () = tokio::time::sleep_until(pause) => Woken::Time,
            };
            match woken {
                Woken::ProcessEnded(status) => return self.process_ended(status).await,
                Woken::News(Ok(News::Ended(end))) => self.guest_ended(end).await,
                Woken::News(Ok(News::DiskFull)) if short_at.is_some_and(|at| at.elapsed() < SHORT_AGAIN) => {}
                Woken::News(Ok(News::DiskFull)) => {
                    short_at = Some(Instant::now());
                    let _nobody = self.shortages.send(self.vm.record.sandbox.clone()).is_err();
                }
                Woken::News(Err(_)) => self.monitor = None,
                Woken::Asked(Some(ask)) => self.answer(ask).await,
                Woken::Asked(None) => asking = false,
                Woken::Time if Instant::now() >= drain_at => {
                    self.drain().await;
                    drain_at = Instant::now() + DRAIN;
                }
                Woken::Time => {}
            }
        }
    }

    async fn connect(&mut self) {
        if self.monitor.is_none() {
            self.monitor = self.machine.monitor(self.vm.dir.path()).await.ok();
        }
    }

    async fn drain(&mut self) {
        let Some(monitor) = &mut self.monitor else { return };
        match monitor.console().await {
            Ok(text) => {
                if let Err(error) = self.vm.on_disk(move |dir| dir.add_console(&text)).await {
                    tracing::warn!(sandbox = %self.vm.record.sandbox, %error, "the console can't be kept");
                }
            }
            Err(_) => self.monitor = None,
        }
    }

    async fn answer(&mut self, ask: Ask) {
        match ask {
            Ask::Drain(answer) => {
                self.drain().await;
                let _nobody = answer.send(()).is_err();
            }
            Ask::Grow(bytes, answer) => {
                let grown = match &mut self.monitor {
                    Some(monitor) => monitor.grow_disk(bytes).await,
                    None => Err(io::ErrorKind::NotConnected.into()),
                };
                let grown = grown.unwrap_or_else(|error| {
                    self.monitor = None;
                    Err(DriverError::backend("ask the VM to grow its disk", error))
                });
                let _nobody = answer.send(grown).is_err();
            }
            Ask::Quit => {
                self.drain().await;
                if let Some(monitor) = &mut self.monitor
                    && monitor.quit().await.is_err()
                {
                    self.monitor = None;
                }
            }
        }
    }

    async fn guest_ended(&mut self, end: GuestEnd) {
        self.drain().await;
        // A machine that writes its end down does so before it says that there is one.
        let machine = Arc::clone(&self.machine);
        let words = self.vm.on_disk(move |dir| last_words(dir, &*machine)).await.unwrap_or_default();
        self.note_end(end, words).await;
    }

    async fn note_end(&mut self, end: GuestEnd, words: LastWords) {
        let panic = self.vm.on_disk(|dir| Ok(panic_line(&dir.console(SEARCHED)))).await.ok().flatten();
        if let Some(error) = &words.disk_error {
            tracing::error!(sandbox = %self.vm.record.sandbox, error, "what the guest has written may not all be on its disk");
            self.seen.send_modify(|seen| seen.disk_error = words.disk_error.clone());
        }
        let exit = exit_of(end, words, panic);
        self.record(exit).await;
    }

    async fn process_ended(mut self, status: Option<String>) {
        let machine = Arc::clone(&self.machine);
        match self.vm.on_disk(move |dir| last_words(dir, &*machine)).await {
            Ok(words) if words.end.is_some() && self.seen.borrow().exit.is_none() => {
                let end = words.end.unwrap_or(GuestEnd::Crash);
                self.note_end(end, words).await;
            }
            Ok(_) => {}
            Err(error) => {
                tracing::warn!(sandbox = %self.vm.record.sandbox, %error, "the console's end can't be kept");
            }
        }
        if self.seen.borrow().exit.is_none() {
            let how = status.unwrap_or_else(|| "nobody saw how".to_owned());
            let said = self.vm.on_disk(|dir| Ok(dir.log_tail())).await.unwrap_or_default();
            let said = if said.is_empty() { String::new() } else { format!("; it said: {said}") };
            let process = self.vm.handle.identity().pid;
            self.record(Exit::Lost(format!("the VM process {process} ended: {how}{said}"))).await;
        }
        self.seen.send_modify(|seen| seen.gone = true);
        self.hint();
        // Whoever asks from now on is told by the closed queue.
        self.asked.close();
    }

    /// Says how it ended, to a later gateway too.
    async fn record(&mut self, exit: Exit) {
        let (run, noted) = (self.vm.record.run, exit.clone());
        let note = self.vm.on_disk(move |dir| {
            // During a stop the folder may be gone already; then nobody needs to know any more.
            if dir.exists() { dir.write_exit(run, &noted).map_err(io::Error::other) } else { Ok(()) }
        });
        if let Err(error) = note.await {
            tracing::warn!(sandbox = %self.vm.record.sandbox, %error, "the end of the run can't be noted");
        }
        self.seen.send_modify(|seen| seen.exit = Some(exit));
        self.hint();
    }

    fn hint(&self) {
        let _nobody = self.hints.send(self.vm.record.sandbox.clone()).is_err();
    }
}

/// What the process left when it ended; its console goes to the rest of it.
fn last_words(dir: &RunDir, machine: &dyn Machine) -> io::Result<LastWords> {
    let words = machine.last_words(dir.path());
    if dir.exists() {
        dir.add_console(&words.console)?;
    }
    Ok(words)
}

/// Notes how a run ended whose process went while no gateway watched, where the process has left word of it. Blocks.
pub(crate) fn note_unseen_end(dir: &RunDir, run: Run, machine: &dyn Machine) -> io::Result<()> {
    let words = last_words(dir, machine)?;
    if let (Some(_), Some(error)) = (words.end, &words.disk_error) {
        tracing::error!(run_dir = %dir.path().display(), error, "what a guest has written may not all be on its disk");
    }
    let (None, Some(end)) = (dir.exit(run), words.end) else { return Ok(()) };
    let exit = exit_of(end, words, panic_line(&dir.console(SEARCHED)));
    dir.write_exit(run, &exit).map_err(io::Error::other)
}

fn exit_of(end: GuestEnd, words: LastWords, panic: Option<String>) -> Exit {
    if let Some(error) = words.disk_error {
        return Exit::Lost(words::said(&error));
    }
    let detail = words.detail;
    match (end, panic) {
        (GuestEnd::PowerOff, _) | (GuestEnd::Reset, None) => Exit::PowerOff,
        (_, Some(line)) => Exit::Panic(line),
        (GuestEnd::Panic, None) => Exit::Panic("the guest's kernel panicked".to_owned()),
        (GuestEnd::Ordered, None) => Exit::Lost("the VM process was told to end".to_owned()),
        (GuestEnd::Crash, None) => {
            let why = detail.map(|detail| format!(": {}", words::said(&detail))).unwrap_or_default();
            Exit::Lost(format!("the machine gave up on the guest{why}"))
        }
    }
}

async fn news(monitor: &mut Option<Box<dyn Monitor>>) -> io::Result<News> {
    match monitor {
        Some(monitor) => monitor.news().await,
        None => std::future::pending().await,
    }
}

/// The line in which a kernel says why it panicked.
pub(crate) fn panic_line(console: &[u8]) -> Option<String> {
    let text = String::from_utf8_lossy(console);
    let line = text.lines().rev().find(|line| line.contains(PANIC))?;
    Some(line[line.find(PANIC)?..].chars().filter(|c| !c.is_control()).take(300).collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_reason_of_a_panic_is_found_without_time_stamp_and_control_characters() {
        let console = b"[ 1.0] x\r\n[    2.5] Kernel panic - not syncing: VFS: Unable to mount\x1b root fs\r\n[ 2.6] more";
        assert_eq!(panic_line(console).unwrap(), "Kernel panic - not syncing: VFS: Unable to mount root fs");
        assert_eq!(panic_line(b"all is well"), None);
    }
}
