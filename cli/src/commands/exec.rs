//! `torpor exec`

use std::{
    io::{self, Write as _},
    thread,
    time::Duration,
};

use bytes::Bytes;
use clap::Args;
use tokio::{
    signal::unix::{Signal, SignalKind, signal},
    sync::{mpsc, oneshot},
};
use torpor_sdk::{Code, Error, Exec, ExecInput, ExecOutput, Output, v1};

use super::Outcome;
use crate::{
    failure::{BROKEN_PIPE, FAILED, Failure, LOST},
    input, parse,
    session::Session,
    terminal::{self, RawMode},
};

/// Chunks between the network and our standard output: beyond it the network waits, so that memory stays flat.
const CHUNKS_IN_FLIGHT: usize = 4;
/// An interrupt that is typed this often ends us, even when the other side doesn't answer.
const INTERRUPTS_TO_GIVE_UP: u32 = 3;

#[derive(Args)]
pub struct ExecArgs {
    /// Attach our standard input. Without it the command reads nothing, and ours is left alone.
    #[arg(short, long)]
    interactive: bool,
    /// Give the command a terminal.
    #[arg(short, long)]
    tty: bool,
    #[command(flatten)]
    environment: parse::Environment,
    /// Where the command starts.
    #[arg(short, long, value_name = "DIR", default_value = "", hide_default_value = true)]
    workdir: String,
    /// Who runs it: a name or number, with an optional :group.
    #[arg(short, long, default_value = "", hide_default_value = true)]
    user: String,
    /// End the command and all it started after this time, as in 30s; its code is 124 then.
    #[arg(long, value_name = "TIME", value_parser = parse::duration)]
    timeout: Option<Duration>,
    /// Name or id.
    name: String,
    /// The command, after `--`.
    #[arg(last = true, required = true, value_name = "COMMAND")]
    command: Vec<String>,
}

/// Runs a command in a sandbox.
pub async fn run(session: &Session, args: ExecArgs) -> Outcome {
    let timeout = args.timeout.and_then(parse::limit).map(prost_types::Duration::try_from).transpose();
    let start = v1::ExecStart {
        sandbox: args.name,
        argv: args.command,
        environment: args.environment.read()?,
        workdir: args.workdir,
        user: args.user,
        stdin: args.interactive,
        tty: args.tty,
        size: None,
        timeout: timeout.map_err(|e| Failure::usage(format!("--timeout: {e}")))?,
    };
    attach(session, start).await
}

/// Starts a command and connects it to our own input, output and signals until it ends.
pub async fn attach(session: &Session, mut start: v1::ExecStart) -> Outcome {
    let raw = start.tty && start.stdin;
    if raw && !terminal::has_input() {
        return Err(Failure::usage("-i and -t together need a terminal as standard input; leave out -t"));
    }
    if start.tty {
        // In the start itself, so that the first line is drawn right.
        start.size = terminal::size();
        if let Ok(term) = std::env::var("TERM") {
            start.environment.entry("TERM".to_owned()).or_insert(term);
        }
    }
    let stdin = start.stdin;
    let client = session.connect().await?;
    // From here on no signal ends us by itself: the terminal must be given back, the command must be told.
    let mut signals = Signals::new(start.tty, start.tty)?;
    let exec = tokio::select! {
        exec = client.exec(start) => exec?,
        number = signals.deadly() => return Err(Failure::silent(128_u8.saturating_add(number))),
    };
    let guard = if raw { Some(raw_mode()?) } else { None };
    let end = drive(exec, &mut signals, stdin).await;
    drop(guard);
    conclude(session, end?)
}

/// Every key is a byte for the command, until the guard is dropped.
pub(super) fn raw_mode() -> Result<RawMode, Failure> {
    RawMode::enter()
        .map_err(|error| Failure::new(FAILED, format!("the terminal can't be set to raw mode: {error}")))
}

/// How it came to an end.
pub(super) enum End {
    Exit(v1::ExecExit),
    /// The user left it by the keys for that.
    Left,
    /// Whoever read our output is gone.
    BrokenPipe,
    /// A signal to us.
    Signal(u8),
}

pub(super) fn conclude(session: &Session, end: End) -> Outcome {
    let exit = match end {
        End::Left => return Ok(0),
        End::BrokenPipe => return Err(Failure::silent(BROKEN_PIPE)),
        End::Signal(number) => return Err(Failure::silent(128_u8.saturating_add(number))),
        End::Exit(exit) => exit,
    };
    if !session.quiet {
        let remark = match (exit.timed_out, exit.signal) {
            (true, _) => "the command ran out of time and was ended\n".to_owned(),
            (false, 0) => String::new(),
            (false, number) => format!("the command was killed by signal {number}\n"),
        };
        let _ = io::stderr().write_all(remark.as_bytes());
    }
    // As an operating system does it: the lowest eight bits.
    Ok(exit.code.to_le_bytes()[0])
}

async fn drive(exec: Exec, signals: &mut Signals, stdin: bool) -> Result<End, Failure> {
    let Exec { input, output } = exec;
    let keys = async {
        if stdin {
            forward_stdin(&input).await;
        }
        std::future::pending::<()>().await;
    };
    tokio::select! {
        end = forward_output(output) => end,
        number = signals.forward(&input) => Ok(End::Signal(number)),
        () = keys => Ok(End::BrokenPipe),
    }
}

/// Writes what comes to our own output, to the end.
pub(super) async fn forward_output(mut output: ExecOutput) -> Result<End, Failure> {
    let (writer, written) = Writer::spawn();
    let mut started = false;
    let exit = loop {
        let chunk = match output.next().await {
            Ok(Some(Output::Started(_))) => {
                started = true;
                continue;
            }
            Ok(Some(Output::Exit(exit))) => break exit,
            Ok(Some(Output::Stdout(bytes))) => Chunk::Stdout(bytes),
            Ok(Some(Output::Stderr(bytes))) => Chunk::Stderr(bytes),
            Ok(None) => return Err(Error::Protocol("a command ended without an exit").into()),
            Err(error) => {
                // What came before the break is shown first.
                drop(writer);
                let _ = written.await;
                return Err(broken(error, started));
            }
        };
        started = true;
        if writer.0.send(chunk).await.is_err() {
            break v1::ExecExit::default();
        }
    };
    drop(writer);
    match written.await {
        Ok(Err(error)) if error.kind() == io::ErrorKind::BrokenPipe => Ok(End::BrokenPipe),
        Ok(Err(error)) => Err(error.into()),
        _ => Ok(End::Exit(exit)),
    }
}

fn broken(error: Error, started: bool) -> Failure {
    let unknown = matches!(&error, Error::Lost(_)) || error.code() == Some(Code::Unavailable);
    let mut failure = Failure::from(error);
    if started {
        // No code that the command itself could have ended with.
        failure.code = LOST;
        if unknown {
            failure.told.message.push_str("; whether the command still runs is not known");
        }
    }
    failure
}

enum Chunk {
    Stdout(Bytes),
    Stderr(Bytes),
}

/// Writes in a thread of its own: a terminal that is held up must hold up the command, not our signals.
struct Writer(mpsc::Sender<Chunk>);

impl Writer {
    /// Ends when the sender is dropped and all is written, or with the first error of standard output.
    fn spawn() -> (Self, oneshot::Receiver<io::Result<()>>) {
        let (chunks, mut received) = mpsc::channel(CHUNKS_IN_FLIGHT);
        let (done, written) = oneshot::channel();
        thread::spawn(move || {
            let result = write_all(&mut received);
            // The sender must not wait for a thread that is gone.
            drop(received);
            let _ = done.send(result);
        });
        (Self(chunks), written)
    }
}

fn write_all(chunks: &mut mpsc::Receiver<Chunk>) -> io::Result<()> {
    // Standard output of Rust looks for line ends; a descriptor of our own writes chunks as they are.
    let mut stdout = std::fs::File::from(nix::unistd::dup(io::stdout())?);
    while let Some(chunk) = chunks.blocking_recv() {
        match chunk {
            Chunk::Stdout(bytes) => stdout.write_all(&bytes)?,
            // Losing remarks is no reason to lose results.
            Chunk::Stderr(bytes) => drop(io::stderr().write_all(&bytes)),
        }
    }
    Ok(())
}

async fn forward_stdin(command: &ExecInput) {
    let mut chunks = input::pieces(1);
    while let Some(chunk) = chunks.recv().await {
        if !command.write(chunk).await {
            return;
        }
    }
    command.close().await;
}

/// The signals that we take note of.
pub(super) struct Signals {
    /// The command is told of window sizes.
    tty: bool,
    /// Whatever would end a program ends us, and the command is not told.
    ends_us: bool,
    interrupt: Signal,
    terminate: Signal,
    hangup: Signal,
    quit: Signal,
    window: Signal,
}

const SIGHUP: u8 = 1;
const SIGINT: u8 = 2;
const SIGQUIT: u8 = 3;
const SIGTERM: u8 = 15;

impl Signals {
    pub(super) fn new(tty: bool, ends_us: bool) -> Result<Self, Failure> {
        let take =
            |kind| signal(kind).map_err(|e| Failure::new(FAILED, format!("can't receive signals: {e}")));
        Ok(Self {
            tty,
            ends_us,
            interrupt: take(SignalKind::interrupt())?,
            terminate: take(SignalKind::terminate())?,
            hangup: take(SignalKind::hangup())?,
            quit: take(SignalKind::quit())?,
            window: take(SignalKind::window_change())?,
        })
    }

    /// The next signal that would end a program.
    pub(super) async fn deadly(&mut self) -> u8 {
        tokio::select! {
            _ = self.interrupt.recv() => SIGINT,
            _ = self.terminate.recv() => SIGTERM,
            _ = self.hangup.recv() => SIGHUP,
            _ = self.quit.recv() => SIGQUIT,
        }
    }

    /// Tells the command of signals and window sizes. Returns when one must end us instead: with a terminal any (keys are
    /// bytes there, so it came from outside and hangs up), without one the third interrupt.
    pub(super) async fn forward(&mut self, input: &ExecInput) -> u8 {
        let mut interrupts = 0;
        loop {
            let number = tokio::select! {
                _ = self.window.recv() => None,
                _ = self.interrupt.recv() => Some(SIGINT),
                _ = self.terminate.recv() => Some(SIGTERM),
                _ = self.hangup.recv() => Some(SIGHUP),
                _ = self.quit.recv() => Some(SIGQUIT),
            };
            let input = input.clone();
            match number {
                Some(number) if self.ends_us => return number,
                Some(number) => {
                    interrupts += u32::from(number == SIGINT);
                    if interrupts >= INTERRUPTS_TO_GIVE_UP {
                        return SIGINT;
                    }
                    // Not awaited: input that the command doesn't read may be ahead of it.
                    tokio::spawn(async move { input.signal(number.into()).await });
                }
                None => {
                    if let (true, Some(size)) = (self.tty, terminal::size()) {
                        tokio::spawn(async move { input.resize(size.cols, size.rows).await });
                    }
                }
            }
        }
    }
}
