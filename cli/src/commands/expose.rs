//! `torpor expose …`

use clap::{Args, Subcommand};
use torpor_sdk::v1;

use super::Outcome;
use crate::{
    output::{
        clean,
        network::Exposed,
        table::{age, table},
    },
    session::Session,
};

#[derive(Args)]
#[command(args_conflicts_with_subcommands = true, subcommand_negates_reqs = true)]
pub struct ExposeArgs {
    #[command(subcommand)]
    command: Option<ExposeCommand>,
    /// Name or id. A sandbox that is called like one of the commands is named by its id.
    #[arg(required = true)]
    name: Option<String>,
    /// The port in the sandbox.
    #[arg(required = true, value_parser = clap::value_parser!(u32).range(1..=65535))]
    port: Option<u32>,
    /// Where the gateway's host listens; a free port of 127.0.0.1 when left out, and for port 0 a free one.
    #[arg(long, value_name = "ADDRESS:PORT", default_value = "", hide_default_value = true)]
    host: String,
    /// A connection resumes the sandbox when it is suspended. Without it, it is answered 503 (HTTP).
    #[arg(long)]
    wake: bool,
}

#[derive(Subcommand)]
pub enum ExposeCommand {
    /// List exposed ports: of one sandbox, or of all.
    #[command(visible_alias = "ls")]
    List {
        /// Name or id.
        name: Option<String>,
    },
    /// Take an exposed port back; its connections end.
    #[command(visible_alias = "rm")]
    Remove {
        /// Name or id.
        name: String,
        /// The port in the sandbox.
        #[arg(value_parser = clap::value_parser!(u32).range(1..=65535))]
        port: u32,
        /// It is no failure when it isn't exposed.
        #[arg(long)]
        ignore_missing: bool,
    },
}

/// Runs one of the commands for exposed ports.
pub async fn run(session: &Session, args: ExposeArgs) -> Outcome {
    match args.command {
        Some(ExposeCommand::List { name }) => list(session, &name.unwrap_or_default()).await,
        Some(ExposeCommand::Remove { name, port, ignore_missing }) => {
            remove(session, &name, port, ignore_missing).await
        }
        None => {
            let (sandbox, port) = (args.name.unwrap_or_default(), args.port.unwrap_or_default());
            expose(session, v1::ExposeRequest { sandbox, port, host: args.host, wake: args.wake }).await
        }
    }
}

/// "8080 at 127.0.0.1:40123, wakes it".
pub fn line(port: &v1::ExposedPort) -> String {
    let wake = if port.wake { ", wakes it" } else { "" };
    let problem =
        if port.problem.is_empty() { String::new() } else { format!(", NOT NOW: {}", port.problem) };
    format!("{} at {}{wake}{problem}", port.port, port.host)
}

async fn expose(session: &Session, request: v1::ExposeRequest) -> Outcome {
    let port = session.connect().await?.expose(request).await?;
    let human = || format!("{} {}\n", clean(&port.sandbox), clean(&line(&port)));
    session.print(&Exposed::from(&port), || vec![port.host.clone()], human)?;
    Ok(0)
}

async fn list(session: &Session, name: &str) -> Outcome {
    let ports = session.connect().await?.exposed(name).await?;
    let rows: Vec<Exposed> = ports.iter().map(Exposed::from).collect();
    let names = || ports.iter().map(|port| port.host.clone()).collect();
    let human = || {
        let row = |port: &v1::ExposedPort| {
            let wake = if port.wake { "wake" } else { "" };
            [
                port.sandbox.clone(),
                port.port.to_string(),
                port.host.clone(),
                wake.to_owned(),
                port.connections.to_string(),
                age(port.created.as_ref()),
                port.problem.clone(),
            ]
        };
        let head = ["SANDBOX", "PORT", "HOST", "WHEN ASLEEP", "CONNECTIONS", "AGE", "PROBLEM"];
        table(head, ports.iter().map(row))
    };
    session.print(&rows, names, human)?;
    Ok(0)
}

async fn remove(session: &Session, name: &str, port: u32, ignore_missing: bool) -> Outcome {
    let removed = session.connect().await?.unexpose(name, port, ignore_missing).await?;
    let value = serde_json::json!({ "sandbox": name, "port": port, "removed": removed });
    let word = if removed { "is no longer exposed" } else { "was not exposed" };
    session.print(&value, || vec![name.to_owned()], || format!("{} {port} {word}\n", clean(name)))?;
    Ok(0)
}
