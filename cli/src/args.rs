//! What can be typed. The doc comments here are the help.

use std::path::PathBuf;

use clap::{Args, Parser};

use crate::{commands::Command, output::Format};

const EXIT_CODES: &str = "\
Exit codes:
  0    done
  1    failed
  2    the command line or a value in it is wrong
  3    no such sandbox or image
  4    not possible in the present phase, or not supported (the error names the command to use)
  5    conflict: the name is taken, or the sandbox was changed meanwhile
  6    nothing left: memory, CPUs, addresses or disk
  7    the gateway can't be reached
  8    not allowed: the gateway doesn't know the caller, or its role is too small
  124  a wait ran out of time
  255  the connection was lost while a command ran (exec, shell)
exec and shell otherwise end with the command's own code: 128 + N when signal N killed it, 127 when there
is no such command, 126 when it can't be executed.

Environment:
  TORPOR_ENDPOINT   where the gateway is, as --endpoint
  TORPOR_WORKSPACE  the workspace to work in, as --workspace
  TORPOR_TOKEN      the token to show to the gateway (it is no option: others could see it)";

/// Sandboxes in microVMs that can be put to sleep.
///
/// A suspended sandbox holds no CPU, no memory, no network device and no process; it keeps its identity and its disk.
/// The commands for sandboxes exist twice: `torpor suspend NAME` is `torpor sandbox suspend NAME`.
#[derive(Parser)]
#[command(name = "torpor", version, after_long_help = EXIT_CODES, disable_help_subcommand = true, max_term_width = 110)]
pub struct Cli {
    #[command(flatten)]
    pub global: Global,
    #[command(subcommand)]
    pub command: Command,
}

/// Options of every command.
#[derive(Args)]
pub struct Global {
    /// Where the gateway is: unix:///PATH, https://HOST:PORT, or http://HOST:PORT on this machine.
    #[arg(
        long,
        global = true,
        env = "TORPOR_ENDPOINT",
        value_name = "URL",
        default_value = torpor_sdk::DEFAULT_ENDPOINT,
        help_heading = "Global options"
    )]
    pub endpoint: String,
    /// The workspace to work in; the default one, or that of the token, when none is given.
    #[arg(
        long,
        global = true,
        env = "TORPOR_WORKSPACE",
        value_name = "NAME",
        help_heading = "Global options"
    )]
    pub workspace: Option<String>,
    /// File with the token to show to the gateway; TORPOR_TOKEN holds the token itself.
    #[arg(long, global = true, env = "TORPOR_TOKEN_FILE", value_name = "FILE", help_heading = "Connection")]
    pub token_file: Option<PathBuf>,
    /// Roots that the gateway's certificate may come from, PEM; the system's when none are given.
    #[arg(long, global = true, env = "TORPOR_CA", value_name = "FILE", help_heading = "Connection")]
    pub ca: Option<PathBuf>,
    /// Our certificate to show to the gateway, PEM.
    #[arg(
        long,
        global = true,
        env = "TORPOR_CERT",
        value_name = "FILE",
        requires = "key",
        help_heading = "Connection"
    )]
    pub cert: Option<PathBuf>,
    /// Its key, PEM.
    #[arg(
        long,
        global = true,
        env = "TORPOR_KEY",
        value_name = "FILE",
        requires = "cert",
        help_heading = "Connection"
    )]
    pub key: Option<PathBuf>,
    /// Form of what is printed. json and yaml are stable: one object for one name, a list for several.
    #[arg(short, long, global = true, value_enum, help_heading = "Global options")]
    pub output: Option<Format>,
    /// No progress and no remarks; print names only, as `-o name`, unless -o says otherwise.
    #[arg(short, long, global = true, help_heading = "Global options")]
    pub quiet: bool,
}
