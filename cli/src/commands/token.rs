//! `torpor token …` and `torpor whoami`

use std::time::Duration;

use clap::{Args, Subcommand};
use torpor_sdk::v1;

use super::{
    Outcome,
    workspace::{Role, role_name},
};
use crate::{
    output::{
        clean,
        table::{age, table},
    },
    parse,
    session::Session,
};

#[derive(Subcommand)]
pub enum TokenCommand {
    /// Make a token and print its secret, this once.
    Create(CreateArgs),
    /// List tokens, without their secrets: of the workspace that is worked in, or all.
    #[command(visible_alias = "ls")]
    List {
        /// All of the gateway's.
        #[arg(short = 'A', long)]
        all_workspaces: bool,
    },
    /// Make a token good for nothing.
    #[command(visible_alias = "rm")]
    Revoke {
        /// Its id, as it is listed.
        id: String,
        /// It is no failure when it isn't there.
        #[arg(long)]
        ignore_missing: bool,
    },
}

#[derive(Args)]
#[command(group = clap::ArgGroup::new("rights").required(true))]
pub struct CreateArgs {
    /// What to know it by.
    name: String,
    /// What it allows in the workspace that is worked in (--workspace).
    #[arg(long, value_enum, group = "rights")]
    role: Option<Role>,
    /// It allows everything.
    #[arg(long, group = "rights")]
    admin: bool,
    /// For what runs in this sandbox: to see it and to put it to sleep.
    #[arg(long, value_name = "NAME", group = "rights")]
    sandbox: Option<String>,
    /// It is good in every workspace.
    #[arg(short = 'A', long, conflicts_with_all = ["admin", "sandbox"])]
    all_workspaces: bool,
    /// It expires after this time, like 90d, 12h or 30m.
    #[arg(long, value_name = "TIME", value_parser = parse::duration)]
    expires: Option<Duration>,
}

fn shown(token: &v1::Token) -> serde_json::Value {
    serde_json::json!({
        "id": token.id,
        "name": token.name,
        "role": rights(token),
        "workspace": token.workspace,
        "sandbox_id": token.sandbox_id,
        "created_by": token.created_by,
        "created": token.created.as_ref().map(ToString::to_string),
        "expires": token.expires.as_ref().map(ToString::to_string),
    })
}

fn rights(token: &v1::Token) -> &'static str {
    match (token.admin, token.sandbox_id.is_empty()) {
        (true, _) => "admin",
        (false, false) => "sandbox",
        (false, true) => role_name(token.role),
    }
}

/// Runs one of the commands for tokens.
pub async fn run(session: &Session, command: TokenCommand) -> Outcome {
    match command {
        TokenCommand::Create(args) => create(session, args).await,
        TokenCommand::List { all_workspaces } => {
            let all = session.connect().await?.list_tokens("", all_workspaces).await?;
            let values: Vec<_> = all.iter().map(shown).collect();
            let names = || all.iter().map(|token| token.id.clone()).collect();
            let row = |token: &v1::Token| {
                let place = if token.sandbox_id.is_empty() { &token.workspace } else { &token.sandbox_id };
                [
                    token.id.clone(),
                    token.name.clone(),
                    rights(token).to_owned(),
                    place.clone(),
                    token.created_by.clone(),
                    age(token.created.as_ref()),
                    token.expires.as_ref().map(ToString::to_string).unwrap_or_default(),
                ]
            };
            let head = ["ID", "NAME", "ROLE", "WHERE", "MADE BY", "AGE", "EXPIRES"];
            session.print(&values, names, || table(head, all.iter().map(row)))?;
            Ok(0)
        }
        TokenCommand::Revoke { id, ignore_missing } => {
            let removed = session.connect().await?.revoke_token(&id, ignore_missing).await?;
            session.print_removed("id", &[(&id, removed)], true, ("revoked", "was not there"))?;
            Ok(0)
        }
    }
}

async fn create(session: &Session, args: CreateArgs) -> Outcome {
    let request = v1::CreateTokenRequest {
        name: args.name,
        role: args.role.map_or(0, |role| v1::Role::from(role).into()),
        admin: args.admin,
        workspace: String::new(),
        all_workspaces: args.all_workspaces,
        sandbox: args.sandbox.unwrap_or_default(),
        lifetime: args.expires.and_then(|time| time.try_into().ok()),
    };
    let made = session.connect().await?.create_token(request).await?;
    let token = made.token.unwrap_or_default();
    let mut value = shown(&token);
    value["secret"] = made.secret.clone().into();
    // The secret alone, so that it can go into a file.
    session.print(&value, || vec![made.secret.clone()], || format!("{}\n", clean(&made.secret)))?;
    Ok(0)
}

/// Prints who we are to the gateway.
pub async fn who_am_i(session: &Session) -> Outcome {
    let who = session.connect().await?.who_am_i().await?;
    let memberships: Vec<_> = who
        .memberships
        .iter()
        .map(|own| serde_json::json!({ "workspace": own.workspace, "role": role_name(own.role) }))
        .collect();
    let value = serde_json::json!({
        "subject": who.subject,
        "admin": who.admin,
        "by": who.by,
        "workspace": who.workspace,
        "sandbox_id": who.sandbox_id,
        "memberships": memberships,
    });
    let human = || {
        let mut text = format!("{}, known by {}", clean(&who.subject), clean(&who.by));
        if who.admin {
            text.push_str(", an administrator");
        }
        text.push('\n');
        for own in &who.memberships {
            text.push_str(&format!("{} of {}\n", role_name(own.role), clean(&own.workspace)));
        }
        text
    };
    session.print(&value, || vec![who.subject.clone()], human)?;
    Ok(0)
}
