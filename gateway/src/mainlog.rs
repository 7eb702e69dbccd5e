//! What main commands write, kept in files of the gateway: bounded, and readable also while a sandbox sleeps.
//!
//! Each sandbox with a main command has `logs/ID/main.log` in the state directory, and the one before it as `main.log.1`. A
//! piece of output is one line that describes it and then its bytes. The agent numbers the pieces, so that what it sends
//! again to a gateway that comes back is not kept twice.

use std::{
    collections::HashMap,
    fs::{self, File},
    io::{self, Read as _, Seek as _, SeekFrom, Write as _},
    path::{Path, PathBuf},
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::{Duration, SystemTime},
};

use bytes::Bytes;
use tokio::sync::{broadcast::error::RecvError, watch};
use torpor_proto::agent::v1::{EventsRequest, MainOutput, StatusRequest, agent_client::AgentClient, event};
use torpor_sandbox::{Phase, Run, SandboxId, words};

use crate::service::Service;

/// Most bytes of one file; there are two for a sandbox.
const LARGEST: u64 = 1 << 20;
/// Between two tries to hear an agent.
const AGAIN: Duration = Duration::from_secs(1);
const LONG_AGAIN: Duration = Duration::from_secs(15);

/// Whether the main command runs, as far as the gateway hears it, and in which run of its sandbox.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Live {
    /// Nobody listens to the sandbox yet.
    Unheard,
    /// Its output comes.
    Running(Run),
    /// It has ended, or the sandbox has.
    Ended(Run),
}

impl Live {
    /// Whether something is known of this run or a later one.
    pub fn heard(self, run: Run) -> bool {
        matches!(self, Self::Running(of) | Self::Ended(of) if of >= run)
    }

    /// Whether nothing more comes of this run.
    pub fn ended(self, run: Run) -> bool {
        matches!(self, Self::Ended(of) if of >= run) || matches!(self, Self::Running(of) if of > run)
    }
}

/// One piece of output.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Record {
    /// When the gateway received it.
    pub time: SystemTime,
    /// Of the two streams.
    pub stderr: bool,
    /// As it was written.
    pub data: Bytes,
    boot: String,
    number: u64,
}

/// How far a reader has read: files given up so far, and bytes of the present one.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Position {
    turn: u64,
    offset: u64,
}

/// The log of one sandbox.
pub struct Log {
    folder: PathBuf,
    state: Mutex<State>,
    news: watch::Sender<Live>,
}

#[derive(Default)]
struct State {
    loaded: bool,
    /// Grows when a file is given up; a reader's first position is before all.
    turn: u64,
    size: u64,
    /// Of the last piece that is kept.
    boot: String,
    number: u64,
}

impl Log {
    fn new(folder: PathBuf) -> Self {
        Self { folder, state: Mutex::default(), news: watch::Sender::new(Live::Unheard) }
    }

    fn now(&self) -> PathBuf {
        self.folder.join("main.log")
    }

    fn before(&self) -> PathBuf {
        self.folder.join("main.log.1")
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Takes up what an earlier gateway has kept.
    fn load(&self, state: &mut State) -> io::Result<()> {
        if state.loaded {
            return Ok(());
        }
        state.turn = 1;
        let mut whole = read_from(&self.now(), 0)?;
        let mut last = None;
        let good = parse(&whole, |record| last = Some(record));
        if good < whole.len() {
            // Cut short by the end of the gateway or a full disk.
            File::options().write(true).open(self.now())?.set_len(good as u64)?;
        }
        state.size = good as u64;
        if last.is_none() {
            whole = read_from(&self.before(), 0)?;
            parse(&whole, |record| last = Some(record));
        }
        if let Some(last) = last {
            (state.boot, state.number) = (last.boot, last.number);
        }
        state.loaded = true;
        Ok(())
    }

    /// Keeps a piece, unless it is kept already. Blocks.
    ///
    /// # Errors
    /// When it can't be written.
    pub fn append(&self, boot: &str, output: &MainOutput) -> io::Result<()> {
        let mut state = self.state();
        self.load(&mut state)?;
        if state.boot == boot && output.number <= state.number {
            return Ok(());
        }
        let time = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default().as_millis();
        let stream = if output.stderr { 'e' } else { 'o' };
        let mut piece =
            format!("{time} {stream} {} {boot} {}\n", output.number, output.data.len()).into_bytes();
        piece.extend_from_slice(&output.data);
        piece.push(b'\n');
        fs::create_dir_all(&self.folder)?;
        if state.size > 0 && state.size + piece.len() as u64 > LARGEST {
            fs::rename(self.now(), self.before())?;
            state.turn += 1;
            state.size = 0;
        }
        let mut file = File::options().create(true).append(true).open(self.now())?;
        if let Err(error) = file.write_all(&piece) {
            // Half a piece would hide all that come after it.
            let _ = file.set_len(state.size);
            return Err(error);
        }
        state.size += piece.len() as u64;
        state.boot = boot.to_owned();
        state.number = output.number;
        Ok(())
    }

    /// What came after a position, which moves on. Blocks.
    ///
    /// # Errors
    /// When the files can't be read.
    pub fn read(&self, at: &mut Position) -> io::Result<Vec<Record>> {
        let mut state = self.state();
        self.load(&mut state)?;
        let mut bytes = Vec::new();
        let mut offset = at.offset;
        if at.turn != state.turn {
            // Of a file that was given up since; of one that is gone nothing.
            let from = if at.turn + 1 == state.turn { at.offset } else { 0 };
            bytes = read_from(&self.before(), from)?;
            offset = 0;
        }
        bytes.extend(read_from(&self.now(), offset)?);
        *at = Position { turn: state.turn, offset: state.size };
        drop(state);
        let mut records = Vec::new();
        parse(&bytes, |record| records.push(record));
        Ok(records)
    }

    /// Changes when there is something to read, or the command has begun or ended.
    pub fn news(&self) -> watch::Receiver<Live> {
        self.news.subscribe()
    }

    fn tell(&self, live: Live) {
        self.news.send_replace(live);
    }
}

/// A file from an offset on; empty when there is none.
fn read_from(path: &Path, offset: u64) -> io::Result<Vec<u8>> {
    let mut file = match File::open(path) {
        Ok(file) => file,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Vec::new()),
        Err(error) => return Err(error),
    };
    file.seek(SeekFrom::Start(offset))?;
    let mut bytes = Vec::new();
    file.read_to_end(&mut bytes)?;
    Ok(bytes)
}

/// Hands out each whole piece; how many bytes they were.
fn parse(bytes: &[u8], mut each: impl FnMut(Record)) -> usize {
    let mut at = 0;
    while let Some((record, length)) = one(&bytes[at..]) {
        each(record);
        at += length;
    }
    at
}

fn one(bytes: &[u8]) -> Option<(Record, usize)> {
    let end = bytes.iter().take(200).position(|byte| *byte == b'\n')?;
    let mut words = std::str::from_utf8(&bytes[..end]).ok()?.split(' ');
    let millis = words.next()?.parse().ok()?;
    let stderr = words.next()? == "e";
    let number = words.next()?.parse().ok()?;
    let boot = words.next()?.to_owned();
    let length: usize = words.next()?.parse().ok()?;
    let from = end + 1;
    let to = from.checked_add(length)?;
    if bytes.get(to) != Some(&b'\n') {
        return None;
    }
    let time = SystemTime::UNIX_EPOCH.checked_add(Duration::from_millis(millis))?;
    let data = Bytes::copy_from_slice(&bytes[from..to]);
    Some((Record { time, stderr, data, boot, number }, to + 1))
}

/// The logs of all sandboxes.
pub struct MainLogs {
    folder: PathBuf,
    logs: Mutex<HashMap<SandboxId, Arc<Log>>>,
    heard: Mutex<std::collections::HashSet<SandboxId>>,
}

impl MainLogs {
    /// Logs below a state directory.
    pub fn new(state_dir: &Path) -> Self {
        Self { folder: state_dir.join("logs"), logs: Mutex::default(), heard: Mutex::default() }
    }

    /// The log of a sandbox.
    pub fn of(&self, id: &SandboxId) -> Arc<Log> {
        let mut logs = self.logs.lock().unwrap_or_else(PoisonError::into_inner);
        logs.entry(id.clone()).or_insert_with(|| Arc::new(Log::new(self.folder.join(id.as_str())))).clone()
    }

    fn remove(&self, id: &SandboxId) {
        self.logs.lock().unwrap_or_else(PoisonError::into_inner).remove(id);
        let folder = self.folder.join(id.as_str());
        match fs::remove_dir_all(&folder) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => {
                tracing::warn!(%id, %error, "the log of a deleted sandbox can't be removed");
            }
            _ => {}
        }
    }

    /// Ids that have a folder here.
    fn ids(&self) -> Vec<SandboxId> {
        let entries = fs::read_dir(&self.folder).into_iter().flatten().flatten();
        entries.filter_map(|entry| entry.file_name().to_str()?.parse().ok()).collect()
    }

    /// Whether nobody listens to the sandbox yet: whoever asks does from now on.
    fn begin(&self, id: &SandboxId) -> bool {
        self.heard.lock().unwrap_or_else(PoisonError::into_inner).insert(id.clone())
    }

    fn end(&self, id: &SandboxId) {
        self.heard.lock().unwrap_or_else(PoisonError::into_inner).remove(id);
    }
}

impl Service {
    /// Listens to every Ready sandbox that has a main command, until the gateway ends.
    pub async fn look_after_main_logs(self: Arc<Self>) {
        let mut changes = self.store.subscribe();
        let mut look = true;
        loop {
            if std::mem::take(&mut look) {
                self.hear_all().await;
            }
            tokio::select! {
                () = self.end.cancelled() => return,
                change = changes.recv() => match change {
                    Ok(change) if change.gone => self.main_logs.remove(&change.record.id),
                    Ok(change)
                        if change.record.state.phase == Phase::Ready
                            && !change.record.spec.command.is_empty() =>
                    {
                        self.hear(&change.record.id);
                    }
                    Ok(_) => {}
                    Err(RecvError::Lagged(_)) => look = true,
                    Err(RecvError::Closed) => return,
                },
            }
        }
    }

    async fn hear_all(self: &Arc<Self>) {
        let (ready, known) = match (self.store.in_phase(Phase::Ready).await, self.store.all_ids().await) {
            (Ok(ready), Ok(known)) => (ready, known),
            (Err(error), _) | (_, Err(error)) => {
                return tracing::error!(%error, "the sandboxes whose output is kept can't be listed");
            }
        };
        for id in self.main_logs.ids().into_iter().filter(|id| !known.contains(id)) {
            self.main_logs.remove(&id);
        }
        for id in ready {
            if self.store.get(id.as_str()).await.is_ok_and(|record| !record.spec.command.is_empty()) {
                self.hear(&id);
            }
        }
    }

    fn hear(self: &Arc<Self>, id: &SandboxId) {
        if !self.main_logs.begin(id) {
            return;
        }
        let (service, id) = (self.clone(), id.clone());
        // The one that is read now: once the sandbox is gone there would be another, and its readers would wait for ever.
        let log = self.main_logs.of(&id);
        tokio::spawn(async move {
            let mut run = Run::default();
            tokio::select! {
                () = service.keep(&id, &log, &mut run) => {}
                () = service.end.cancelled() => {}
            }
            log.tell(Live::Ended(run));
            service.main_logs.end(&id);
            // It may have become Ready between the last look and the end of this.
            if service.is_ready(&id).await && !service.end.is_cancelled() {
                service.hear(&id);
            }
        });
    }

    async fn is_ready(&self, id: &SandboxId) -> bool {
        self.store.get(id.as_str()).await.is_ok_and(|record| record.state.phase == Phase::Ready)
    }

    /// Keeps what comes until the sandbox is not Ready any more.
    async fn keep(&self, id: &SandboxId, log: &Arc<Log>, run: &mut Run) {
        let mut pause = AGAIN;
        while let Ok(record) = self.store.get(id.as_str()).await {
            if record.state.phase != Phase::Ready {
                return;
            }
            *run = record.state.run;
            if let Some(driver) = self.drivers.get(&record.spec.driver)
                && let Ok(channel) = driver.agent(id).await
            {
                let heard = keep_stream(id, *run, log, AgentClient::new(channel)).await;
                pause = if heard { AGAIN } else { pause };
            }
            tokio::time::sleep(pause).await;
            pause = (pause * 2).min(LONG_AGAIN);
        }
    }
}

/// One stream of output, to its end. True when there was one.
async fn keep_stream(
    id: &SandboxId,
    run: Run,
    log: &Arc<Log>,
    mut agent: AgentClient<tonic::transport::Channel>,
) -> bool {
    let Ok(status) = agent.status(StatusRequest {}).await else { return false };
    // A guest that has no such name is one whose output can't be told apart.
    let boot = words::boot_id(&status.into_inner().boot_id).unwrap_or("-").to_owned();
    let Ok(events) = agent.events(EventsRequest {}).await else { return false };
    let mut events = events.into_inner();
    log.tell(Live::Running(run));
    while let Ok(Some(event)) = events.message().await {
        match event.kind {
            Some(event::Kind::MainOutput(output)) => {
                let (to, boot) = (log.clone(), boot.clone());
                let kept = tokio::task::spawn_blocking(move || to.append(&boot, &output)).await;
                log.tell(Live::Running(run));
                if let Ok(Err(error)) = kept {
                    tracing::warn!(%id, %error, "output of a main command can't be kept");
                    // A disk that is full is not asked for every line.
                    tokio::time::sleep(AGAIN).await;
                }
            }
            Some(event::Kind::MainExit(_)) => log.tell(Live::Ended(run)),
            Some(event::Kind::KeepAlive(_)) | None => {}
        }
    }
    true
}

#[cfg(test)]
mod tests {
    use super::*;

    fn output(number: u64, data: &str) -> MainOutput {
        MainOutput { data: data.to_owned().into(), stderr: number.is_multiple_of(2), number }
    }

    fn text(records: &[Record]) -> String {
        records.iter().map(|record| String::from_utf8_lossy(&record.data).into_owned()).collect()
    }

    #[test]
    fn output_is_kept_once_over_restarts_of_gateway_and_sandbox() {
        let dir = tempfile::tempdir().unwrap();
        let log = Log::new(dir.path().join("x"));
        let mut at = Position::default();
        assert!(log.read(&mut at).unwrap().is_empty());
        for number in 1..4 {
            log.append("a", &output(number, &format!("{number}\n"))).unwrap();
        }
        assert_eq!(text(&log.read(&mut at).unwrap()), "1\n2\n3\n");
        // Half a piece at the end, as after a power cut.
        File::options().append(true).open(log.now()).unwrap().write_all(b"17 o 4 a 900\nhal").unwrap();
        let again = Log::new(dir.path().join("x"));
        for number in 2..5 {
            again.append("a", &output(number, &format!("{number}\n"))).unwrap();
        }
        again.append("b", &output(1, "new boot")).unwrap();
        let records = again.read(&mut Position::default()).unwrap();
        assert_eq!(text(&records), "1\n2\n3\n4\nnew boot");
        assert_eq!(records.iter().map(|r| r.stderr).collect::<Vec<_>>(), [false, true, false, true, false]);
    }

    #[test]
    fn the_files_are_bounded_and_a_reader_misses_nothing_over_a_rotation() {
        let dir = tempfile::tempdir().unwrap();
        let log = Log::new(dir.path().to_owned());
        let (mut at, mut seen) = (Position::default(), 0);
        let piece = "x\n".repeat(50_000);
        for number in 1..=40 {
            log.append("a", &output(number, &piece)).unwrap();
            if number % 5 == 0 {
                seen += log.read(&mut at).unwrap().len();
            }
        }
        assert_eq!(seen, 40);
        let sizes: u64 = [log.now(), log.before()].iter().map(|path| path.metadata().unwrap().len()).sum();
        assert!(sizes <= 2 * LARGEST && sizes > LARGEST, "{sizes}");
        let oldest = log.read(&mut Position::default()).unwrap();
        assert!(oldest.len() < 40 && oldest.last().unwrap().number == 40);
    }
}
