//! The main command: its input, its last output and its end, for every connection that comes to ask.

use std::{
    collections::VecDeque,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::{Duration, SystemTime},
};

use bytes::Bytes;
use tokio::{
    sync::{mpsc, watch},
    time::sleep,
};
use tokio_stream::wrappers::ReceiverStream;
use tonic::{Status, Streaming};
use torpor_proto::agent::v1::{
    Event, ExecInput, ExecOutput, ExecStart, KeepAlive, MainCommand, MainExit, MainOutput, event, exec_error,
    exec_input, exec_output::Kind,
};

use crate::{agent::Agent, exec};

/// Most bytes of output that are kept. Who reads slower than this fills misses the oldest.
const KEPT: usize = 256 * 1024;
/// A connection that is quiet is given a sign of life this often.
const KEEP_ALIVE: Duration = Duration::from_secs(5);
/// Messages that wait for a command which doesn't read its input.
const WAITING: usize = 4;

/// The way to the main command.
#[derive(Clone)]
struct Inputs {
    /// In the order in which clients send them.
    inputs: mpsc::Sender<Result<ExecInput, Status>>,
    /// Signals and sizes, which don't wait until the command reads.
    urgent: mpsc::Sender<ExecInput>,
    /// A terminal has no end: its input can't be closed.
    tty: bool,
    /// A pipe that somebody has closed, or there is none.
    closed: bool,
}

/// Input, output and end of the main command.
pub struct MainLog {
    ring: Mutex<Ring>,
    changed: watch::Sender<()>,
    /// Kept here, so that a client that leaves doesn't end the command's input.
    input: Mutex<Option<Inputs>>,
}

impl Default for MainLog {
    fn default() -> Self {
        Self { ring: Mutex::default(), changed: watch::Sender::new(()), input: Mutex::default() }
    }
}

#[derive(Default)]
struct Ring {
    chunks: VecDeque<MainOutput>,
    bytes: usize,
    /// Number of the first chunk that is still kept.
    first: u64,
    exit: Option<MainExit>,
}

impl Ring {
    fn push(&mut self, mut chunk: MainOutput) {
        chunk.number = self.first + self.chunks.len() as u64 + 1;
        self.bytes += chunk.data.len();
        self.chunks.push_back(chunk);
        while self.bytes > KEPT {
            let Some(oldest) = self.chunks.pop_front() else {
                return;
            };
            self.bytes -= oldest.data.len();
            self.first += 1;
        }
    }

    /// The chunk at `cursor` or the oldest after it; moves the cursor behind it.
    fn take(&self, cursor: &mut u64) -> Option<MainOutput> {
        let number = (*cursor).max(self.first);
        let chunk = self.chunks.get(usize::try_from(number - self.first).ok()?)?;
        *cursor = number + 1;
        Some(chunk.clone())
    }
}

impl MainLog {
    /// How the main command ended, none while it runs or when there is none.
    pub fn exit(&self) -> Option<MainExit> {
        self.ring().exit
    }

    fn push(&self, data: Bytes, stderr: bool) {
        // A small chunk must not keep the whole buffer that it was read into.
        let data = Bytes::copy_from_slice(&data);
        self.ring().push(MainOutput { data, stderr, number: 0 });
        self.changed.send_replace(());
    }

    fn input(&self) -> MutexGuard<'_, Option<Inputs>> {
        self.input.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn end(&self, code: i32, signal: i32) {
        self.input().take();
        self.ring().exit = Some(MainExit { code, signal, time: Some(SystemTime::now().into()) });
        self.changed.send_replace(());
    }

    fn ring(&self) -> MutexGuard<'_, Ring> {
        self.ring.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Runs the main command in the background.
pub fn start(agent: &Arc<Agent>, main: MainCommand) {
    let start = ExecStart {
        argv: main.argv,
        workdir: main.workdir,
        user: main.user,
        stdin: main.stdin,
        tty: main.tty,
        ..ExecStart::default()
    };
    let (sink, mut output) = mpsc::channel(4);
    let (inputs, inbound) = mpsc::channel(WAITING);
    let (urgent, urgents) = mpsc::channel(WAITING);
    *agent.main.input() = Some(Inputs { inputs, urgent, tty: start.tty, closed: !start.stdin && !start.tty });
    let inbound = exec::Inbound { inputs: Box::pin(ReceiverStream::new(inbound)), urgent: urgents };
    tokio::spawn(exec::run(agent.clone(), start, inbound, sink));
    let agent = agent.clone();
    tokio::spawn(async move {
        while let Some(Ok(ExecOutput { kind })) = output.recv().await {
            match kind {
                Some(Kind::Stdout(data)) => agent.main.push(data, false),
                Some(Kind::Stderr(data)) => agent.main.push(data, true),
                Some(Kind::Exit(exit)) => agent.main.end(exit.code, exit.signal),
                Some(Kind::Error(error)) => {
                    let text = format!("torpor-agent: main command not started: {}\n", error.message);
                    agent.main.push(text.into(), true);
                    // The codes that shells use.
                    let missing = error.kind == i32::from(exec_error::Kind::NotFound);
                    agent.main.end(if missing { 127 } else { 126 }, 0);
                }
                Some(Kind::Started(_)) | None => {}
            }
        }
    });
}

/// Hands one connection's input to the main command, until either ends. Several may do so at once.
///
/// # Errors
/// There is no main command, or it has ended (`FAILED_PRECONDITION`); its input was closed (`ABORTED`).
pub async fn feed(agent: &Agent, mut inbound: Streaming<ExecInput>) -> Result<(), Status> {
    let inputs = agent.main.input().clone();
    let Inputs { inputs, urgent, .. } =
        inputs.ok_or_else(|| Status::failed_precondition("there is no main command that runs"))?;
    loop {
        let message = tokio::select! {
            message = inbound.message() => message?,
            () = inputs.closed() => return Ok(()),
        };
        let Some(ExecInput { kind: Some(kind) }) = message else { return Ok(()) };
        match &kind {
            // The command has begun already.
            exec_input::Kind::Start(_) => {
                return Err(Status::invalid_argument("the main command can't be started by its input"));
            }
            exec_input::Kind::Signal(_) | exec_input::Kind::Resize(_) => {
                // So many at once that some are lost say nothing new.
                let _ = urgent.try_send(ExecInput { kind: Some(kind) });
                continue;
            }
            exec_input::Kind::Stdin(_) | exec_input::Kind::StdinClose(_) => {}
        }
        if !may_write(agent, &kind) {
            return Err(Status::aborted("the input of the main command was closed"));
        }
        if inputs.send(Ok(ExecInput { kind: Some(kind) })).await.is_err() {
            return Ok(());
        }
    }
}

/// Whether the input is open; a pipe that is closed now is closed for all.
fn may_write(agent: &Agent, kind: &exec_input::Kind) -> bool {
    let mut inputs = agent.main.input();
    let Some(inputs) = inputs.as_mut() else { return true };
    let open = !inputs.closed;
    if matches!(kind, exec_input::Kind::StdinClose(_)) && !inputs.tty {
        inputs.closed = true;
    }
    open
}

/// Sends what there is and then what comes, until the reader leaves.
pub async fn follow(agent: Arc<Agent>, sink: mpsc::Sender<Result<Event, Status>>) {
    let mut changed = agent.main.changed.subscribe();
    let mut cursor = 0;
    let mut told = false;
    loop {
        changed.mark_unchanged();
        while let Some(kind) = next(&agent, &mut cursor, &mut told) {
            if !send(&agent, &sink, kind).await {
                return;
            }
        }
        let alive = tokio::select! {
            _ = changed.changed() => true,
            () = sleep(KEEP_ALIVE) => send(&agent, &sink, event::Kind::KeepAlive(KeepAlive {})).await,
            () = sink.closed() => false,
        };
        if !alive {
            return;
        }
    }
}

/// The next output; the end once all output is out.
fn next(agent: &Agent, cursor: &mut u64, told: &mut bool) -> Option<event::Kind> {
    let ring = agent.main.ring();
    if let Some(output) = ring.take(cursor) {
        return Some(event::Kind::MainOutput(output));
    }
    let exit = ring.exit.filter(|_| !*told)?;
    *told = true;
    Some(event::Kind::MainExit(exit))
}

async fn send(agent: &Agent, sink: &mpsc::Sender<Result<Event, Status>>, kind: event::Kind) -> bool {
    let run = agent.state().run;
    sink.send(Ok(Event { run, kind: Some(kind) })).await.is_ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn chunk(byte: u8, length: usize) -> MainOutput {
        MainOutput { data: vec![byte; length].into(), ..MainOutput::default() }
    }

    #[test]
    fn the_ring_is_bounded_and_a_slow_reader_goes_on_with_the_oldest_kept() {
        let mut ring = Ring::default();
        for byte in 0..20 {
            ring.push(chunk(byte, KEPT / 8));
        }
        assert!(ring.bytes <= KEPT);
        let mut cursor = 3;
        let oldest = ring.take(&mut cursor).unwrap();
        assert_eq!((oldest.data[0], oldest.number), (12, 13));
        assert_eq!(ring.take(&mut cursor).unwrap().data[0], 13);
        cursor = 20;
        assert!(ring.take(&mut cursor).is_none());
    }

    #[test]
    fn output_that_was_read_is_not_read_again() {
        let mut ring = Ring::default();
        ring.push(chunk(1, 5));
        let mut cursor = 0;
        assert!(ring.take(&mut cursor).is_some());
        assert!(ring.take(&mut cursor).is_none());
        ring.push(chunk(2, 5));
        assert_eq!(ring.take(&mut cursor).unwrap().data[0], 2);
    }
}
