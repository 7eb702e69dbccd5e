//! `torpor serve`

use std::{
    env,
    ffi::OsString,
    io::{self, IsTerminal as _},
    os::{
        linux::net::SocketAddrExt as _,
        unix::{
            ffi::OsStrExt as _,
            net::{SocketAddr, UnixDatagram},
        },
    },
    path::PathBuf,
    time::Duration,
};

use clap::{Args, ValueEnum};
use torpor_gateway::Config;
use tracing_subscriber::EnvFilter;

use super::Outcome;
use crate::failure::{FAILED, Failure};

/// How long work that was told to end is waited for.
const LAST_WORK: Duration = Duration::from_secs(10);

/// Runs until SIGTERM or SIGINT. Sandboxes that run go on running; the next gateway finds them.
#[derive(Args)]
pub struct ServeArgs {
    /// Database, disks and images [default: /var/lib/torpor].
    #[arg(long, value_name = "DIR")]
    state_dir: Option<PathBuf>,
    /// Sockets and pid files of what runs [default: /run/torpor].
    #[arg(long, value_name = "DIR")]
    run_dir: Option<PathBuf>,
    /// Where clients connect [default: unix:///run/torpor/gateway.sock].
    #[arg(long, value_name = "URL")]
    listen: Option<String>,
    /// Configuration file (TOML). Options here win over it.
    #[arg(long, value_name = "FILE")]
    config: Option<PathBuf>,
    /// How much is logged; the variable TORPOR_LOG may hold a finer filter.
    #[arg(long, value_enum, default_value = "info")]
    log_level: LogLevel,
}

#[derive(Clone, Copy, ValueEnum)]
enum LogLevel {
    Error,
    Warn,
    Info,
    Debug,
    Trace,
}

impl LogLevel {
    fn as_str(self) -> &'static str {
        match self {
            Self::Error => "error",
            Self::Warn => "warn",
            Self::Info => "info",
            Self::Debug => "debug",
            Self::Trace => "trace",
        }
    }
}

/// Runs the gateway.
pub fn run(args: ServeArgs) -> Outcome {
    start_log(args.log_level)?;
    let config = configuration(args)?;
    let failed = |what: &str, e: &dyn std::fmt::Display| Failure::new(FAILED, format!("{what}: {e}"));
    let runtime = tokio::runtime::Runtime::new().map_err(|e| failed("the gateway can't start", &e))?;
    let served = runtime.block_on(torpor_gateway::serve(config, ready));
    // A disk on which something was still done then is looked over at its next start.
    runtime.shutdown_timeout(LAST_WORK);
    served.map_err(|e| failed("the gateway can't serve", &e))?;
    Ok(0)
}

fn configuration(args: ServeArgs) -> Result<Config, Failure> {
    let mut config = match &args.config {
        Some(path) => Config::load(path).map_err(|e| Failure::usage(e.to_string()))?,
        None => Config::default(),
    };
    let absolute = |dir: PathBuf| {
        std::path::absolute(&dir).map_err(|e| Failure::usage(format!("folder '{}': {e}", dir.display())))
    };
    if let Some(dir) = args.state_dir {
        config.state_dir = absolute(dir)?;
    }
    if let Some(dir) = args.run_dir {
        config.run_dir = absolute(dir)?;
    }
    if let Some(listen) = args.listen {
        config.listen = listen;
    }
    Ok(config)
}

fn start_log(level: LogLevel) -> Result<(), Failure> {
    let filter = match env::var("TORPOR_LOG") {
        Ok(text) => {
            EnvFilter::try_new(&text).map_err(|e| Failure::usage(format!("TORPOR_LOG='{text}': {e}")))?
        }
        Err(_) => EnvFilter::new(level.as_str()),
    };
    let log = tracing_subscriber::fmt()
        .with_env_filter(filter)
        .with_writer(io::stderr)
        .with_ansi(io::stderr().is_terminal());
    // The journal has its own time.
    let started =
        if env::var_os("JOURNAL_STREAM").is_some() { log.without_time().try_init() } else { log.try_init() };
    started.map_err(|e| Failure::new(FAILED, format!("the log can't be started: {e}")))
}

fn ready(endpoint: &str) {
    eprintln!("torpor {} serves at {endpoint}", env!("CARGO_PKG_VERSION"));
    if let Some(socket) = env::var_os("NOTIFY_SOCKET")
        && let Err(error) = notify(&socket)
    {
        eprintln!("warning: systemd can't be told that the gateway is ready: {error}");
    }
}

/// Tells systemd, as sd_notify(3) has it: a datagram to a path, or to an abstract name after '@'.
fn notify(socket: &OsString) -> io::Result<()> {
    let bytes = socket.as_bytes();
    let address = match bytes.strip_prefix(b"@") {
        Some(name) => SocketAddr::from_abstract_name(name)?,
        None => SocketAddr::from_pathname(socket)?,
    };
    UnixDatagram::unbound()?.send_to_addr(b"READY=1", &address).map(drop)
}
