//! `torpor admin`

use std::path::{Path, PathBuf};

use clap::{Args, Subcommand};
use torpor_gateway::{Config, admin};

use super::Outcome;
use crate::failure::{FAILED, Failure};

#[derive(Subcommand)]
pub enum AdminCommand {
    /// Write a copy of the gateway's database to a new file, also while the gateway runs.
    Backup(BackupArgs),
    /// Put a copy in the place of the gateway's database. The gateway must not run.
    Restore(RestoreArgs),
    /// Make a lost database anew from the folders of the sandboxes. The gateway must not run.
    Rebuild(RebuildArgs),
}

#[derive(Args)]
pub struct BackupArgs {
    /// The copy; it must not exist.
    file: PathBuf,
    #[command(flatten)]
    place: Place,
}

#[derive(Args)]
pub struct RestoreArgs {
    /// The copy.
    file: PathBuf,
    #[command(flatten)]
    place: Place,
}

#[derive(Args)]
pub struct RebuildArgs {
    /// Also where there is a database with sandboxes, or one that can't be read. It is moved aside.
    #[arg(long)]
    force: bool,
    #[command(flatten)]
    place: Place,
}

/// Which gateway's.
#[derive(Args)]
pub struct Place {
    /// The gateway's configuration file.
    #[arg(long, value_name = "FILE")]
    config: Option<PathBuf>,
    /// The gateway's state directory [default: /var/lib/torpor].
    #[arg(long, value_name = "DIR")]
    state_dir: Option<PathBuf>,
    /// The gateway's run directory [default: /run/torpor].
    #[arg(long, value_name = "DIR")]
    run_dir: Option<PathBuf>,
}

impl Place {
    /// State directory and run directory.
    pub fn folders(&self) -> Result<(PathBuf, PathBuf), Failure> {
        let config = match &self.config {
            Some(path) => Config::load(path).map_err(|e| Failure::usage(e.to_string()))?,
            None => Config::default(),
        };
        let state_dir = self.state_dir.clone().unwrap_or(config.state_dir);
        let run_dir = self.run_dir.clone().unwrap_or(config.run_dir);
        if !state_dir.is_dir() {
            let dir = state_dir.display();
            let text = format!(
                "state directory '{dir}' is not there; give the gateway's: --config FILE or --state-dir DIR"
            );
            return Err(Failure::usage(text));
        }
        Ok((state_dir, run_dir))
    }
}

fn failed(error: admin::AdminError) -> Failure {
    Failure::new(FAILED, error.to_string())
}

fn moved(old: Option<&Path>) {
    if let Some(old) = old {
        println!("the old database is in {}", old.display());
    }
}

/// Looks after the database.
pub fn run(command: AdminCommand) -> Outcome {
    match command {
        AdminCommand::Backup(args) => {
            let (state_dir, _) = args.place.folders()?;
            let bytes = admin::backup(&state_dir, &args.file).map_err(failed)?;
            println!("{bytes} bytes written to {}", args.file.display());
        }
        AdminCommand::Restore(args) => {
            let (state_dir, _) = args.place.folders()?;
            let (count, old) = admin::restore(&state_dir, &args.file).map_err(failed)?;
            println!(
                "the database knows {count} sandboxes; next: start the gateway, then torpor doctor --orphans"
            );
            moved(old.as_deref());
        }
        AdminCommand::Rebuild(args) => {
            let (state_dir, run_dir) = args.place.folders()?;
            let rebuilt = admin::rebuild(&state_dir, &run_dir, args.force).map_err(failed)?;
            rebuilt.ready.iter().for_each(|name| println!("{name} Ready"));
            rebuilt.stopped.iter().for_each(|name| println!("{name} Stopped"));
            rebuilt.left_out.iter().for_each(|line| eprintln!("warning: left out: {line}"));
            moved(rebuilt.old.as_deref());
            println!("labels and history are lost; next: start the gateway");
        }
    }
    Ok(0)
}
