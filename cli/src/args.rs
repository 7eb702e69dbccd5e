//! What can be typed. The doc comments here are the help.

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
  124  a wait ran out of time
  255  the connection was lost while a command ran (exec, shell)
exec and shell otherwise end with the command's own code: 128 + N when signal N killed it, 127 when there
is no such command, 126 when it can't be executed.

Environment:
  TORPOR_ENDPOINT  where the gateway is, as --endpoint";

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
    /// Where the gateway is: unix:///PATH or http://HOST:PORT.
    #[arg(
        long,
        global = true,
        env = "TORPOR_ENDPOINT",
        value_name = "URL",
        default_value = torpor_sdk::DEFAULT_ENDPOINT,
        help_heading = "Global options"
    )]
    pub endpoint: String,
    /// Form of what is printed. json and yaml are stable: one object for one name, a list for several.
    #[arg(short, long, global = true, value_enum, help_heading = "Global options")]
    pub output: Option<Format>,
    /// No progress and no remarks; print names only, as `-o name`, unless -o says otherwise.
    #[arg(short, long, global = true, help_heading = "Global options")]
    pub quiet: bool,
}
