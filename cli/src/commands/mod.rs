//! The commands, one file each.

#[cfg(feature = "gateway")]
mod admin;
mod attach;
mod completions;
mod cp;
mod create;
mod delete;
mod disk;
#[cfg(feature = "gateway")]
pub mod doctor;
mod exec;
mod expose;
mod forward;
mod get;
mod history;
mod image;
mod info;
mod list;
mod logs;
mod man;
mod network;
mod recover;
mod resume;
#[cfg(feature = "gateway")]
mod serve;
mod shell;
mod spec;
mod ssh;
mod start;
mod stop;
mod suspend;
mod template;
mod token;
mod update;
mod verb;
mod wait;
mod watch;
mod workspace;

use std::future::Future;

use clap::Subcommand;

use crate::{
    failure::{FAILED, Failure},
    session::Session,
};

/// How a command ends: the exit code, or what went wrong.
pub type Outcome = Result<u8, Failure>;

#[derive(Subcommand)]
pub enum Command {
    #[command(flatten)]
    Verb(Verb),
    /// The commands for sandboxes, which also exist without `sandbox`.
    #[command(visible_alias = "sb", arg_required_else_help = true)]
    Sandbox {
        #[command(subcommand)]
        verb: Verb,
    },
    /// Images that sandboxes are made of.
    #[command(arg_required_else_help = true)]
    Image {
        #[command(subcommand)]
        command: image::ImageCommand,
    },
    /// Workspaces: names are unique in one, and its members have rights in it.
    #[command(visible_alias = "ws", arg_required_else_help = true)]
    Workspace {
        #[command(subcommand)]
        command: workspace::WorkspaceCommand,
    },
    /// Access tokens.
    #[command(arg_required_else_help = true)]
    Token {
        #[command(subcommand)]
        command: token::TokenCommand,
    },
    /// Show who we are to the gateway, and what we may do.
    Whoami,
    /// Specs under a name, to make sandboxes of.
    #[command(arg_required_else_help = true)]
    Template {
        #[command(subcommand)]
        command: template::TemplateCommand,
    },
    /// Show what the gateway is and what it has left.
    Info,
    /// Run the gateway: the daemon that keeps the sandboxes.
    #[cfg(feature = "gateway")]
    Serve(serve::ServeArgs),
    /// Check whether this machine can run sandboxes, and say what to do about what is missing.
    #[cfg(feature = "gateway")]
    Doctor(doctor::DoctorArgs),
    /// Look after the gateway's database: copy it, put it back, make it anew.
    #[cfg(feature = "gateway")]
    #[command(arg_required_else_help = true)]
    Admin {
        #[command(subcommand)]
        command: admin::AdminCommand,
    },
    /// Print the completion script of a shell.
    Completions(completions::CompletionsArgs),
    /// Write the manual pages into a folder.
    #[command(hide = true)]
    Man(man::ManArgs),
}

/// The commands for sandboxes.
#[derive(Subcommand)]
pub enum Verb {
    /// Make a sandbox and wait until it is ready.
    Create(Box<create::CreateArgs>),
    /// List sandboxes, suspended ones too.
    #[command(visible_alias = "ls")]
    List(list::ListArgs),
    /// Show sandboxes in full.
    Get(get::GetArgs),
    /// Run a command in a ready sandbox; its exit code becomes ours.
    Exec(exec::ExecArgs),
    /// Open a shell in a ready sandbox.
    Shell(shell::ShellArgs),
    /// Free all compute of sandboxes; keep their disks.
    Suspend(suspend::SuspendArgs),
    /// Bring suspended sandboxes back on the same disk.
    Resume(resume::ResumeArgs),
    /// Bring sandboxes out of Error, on the disks that they have.
    Recover(recover::RecoverArgs),
    /// As suspend, and nothing but `start` wakes them.
    Stop(stop::StopArgs),
    /// Boot sandboxes from their disks.
    Start(start::StartArgs),
    /// Remove sandboxes with their disks.
    #[command(visible_alias = "rm")]
    Delete(delete::DeleteArgs),
    /// Change a sandbox: its labels and annotations at any time, all else at rest.
    Update(Box<update::UpdateArgs>),
    /// Wait until sandboxes have a phase.
    Wait(wait::WaitArgs),
    /// Print every change as it happens.
    Watch(watch::WatchArgs),
    /// Print the output of a sandbox's main command or its console.
    Logs(logs::LogsArgs),
    /// Show the phases that a sandbox went through.
    History(history::HistoryArgs),
    /// Show or change where a sandbox may send to.
    Network(network::NetworkArgs),
    /// Make a port of a sandbox one of the gateway's host, also while the sandbox sleeps.
    Expose(expose::ExposeArgs),
    #[command(visible_alias = "copy")]
    Cp(cp::CpArgs),
    /// Follow the main command of a ready sandbox and end as it does.
    Attach(attach::AttachArgs),
    /// Open an SSH session to a ready sandbox, by the SSH server of its image.
    Ssh(ssh::SshArgs),
    /// Print what OpenSSH's client needs to reach sandboxes by name: `ssh NAME.torpor`.
    SshConfig(ssh::SshConfigArgs),
    /// Carry one SSH connection on standard input and output, for ssh's ProxyCommand.
    #[command(hide = true)]
    SshProxy(ssh::SshProxyArgs),
    /// Carry connections from here to ports of a ready sandbox.
    Forward(forward::ForwardArgs),
    /// Show, check, grow, compact or export the disk of a sandbox.
    Disk(disk::DiskArgs),
}

/// Runs a command to its end.
pub fn run(session: &Session, command: Command) -> Outcome {
    match command {
        Command::Verb(verb) | Command::Sandbox { verb } => block_on(run_verb(session, verb)),
        Command::Image { command } => block_on(image::run(session, command)),
        Command::Workspace { command } => block_on(workspace::run(session, command)),
        Command::Token { command } => block_on(token::run(session, command)),
        Command::Whoami => block_on(token::who_am_i(session)),
        Command::Template { command } => block_on(template::run(session, command)),
        Command::Info => block_on(info::run(session)),
        #[cfg(feature = "gateway")]
        Command::Serve(args) => serve::run(args),
        #[cfg(feature = "gateway")]
        Command::Doctor(args) => doctor::run(session, &args),
        #[cfg(feature = "gateway")]
        Command::Admin { command } => admin::run(command),
        Command::Completions(args) => completions::run(&args),
        Command::Man(args) => man::run(&args),
    }
}

async fn run_verb(session: &Session, verb: Verb) -> Outcome {
    match verb {
        Verb::Create(args) => create::run(session, *args).await,
        Verb::List(args) => list::run(session, args).await,
        Verb::Get(args) => get::run(session, args).await,
        Verb::Exec(args) => exec::run(session, args).await,
        Verb::Shell(args) => shell::run(session, args).await,
        Verb::Suspend(args) => suspend::run(session, args).await,
        Verb::Resume(args) => resume::run(session, args).await,
        Verb::Recover(args) => recover::run(session, args).await,
        Verb::Stop(args) => stop::run(session, args).await,
        Verb::Start(args) => start::run(session, args).await,
        Verb::Delete(args) => delete::run(session, args).await,
        Verb::Update(args) => update::run(session, *args).await,
        Verb::Wait(args) => wait::run(session, args).await,
        Verb::Watch(args) => watch::run(session, args).await,
        Verb::Logs(args) => logs::run(session, args).await,
        Verb::History(args) => history::run(session, args).await,
        Verb::Network(args) => network::run(session, args).await,
        Verb::Expose(args) => expose::run(session, args).await,
        Verb::Cp(args) => cp::run(session, args).await,
        Verb::Attach(args) => attach::run(session, args).await,
        Verb::Ssh(args) => ssh::ssh(session, args).await,
        Verb::SshConfig(args) => ssh::config(session, args).await,
        Verb::SshProxy(args) => ssh::proxy_command(session, args).await,
        Verb::Forward(args) => forward::run(session, args).await,
        Verb::Disk(args) => disk::run(session, args).await,
    }
}

/// A client needs one thread: it waits most of the time.
fn within_runtime<T>(future: impl Future<Output = T>) -> Result<T, Failure> {
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .map_err(|e| Failure::new(FAILED, format!("can't start: {e}")))?;
    let result = runtime.block_on(future);
    // A thread that still looks up a host name must not keep the program.
    runtime.shutdown_background();
    Ok(result)
}

fn block_on(future: impl Future<Output = Outcome>) -> Outcome {
    within_runtime(future)?
}
