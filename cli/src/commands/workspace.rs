//! `torpor workspace …`

use clap::{Subcommand, ValueEnum};
use serde::Serialize;
use torpor_sdk::v1;

use super::Outcome;
use crate::{
    output::{
        clean,
        table::{age, table},
    },
    parse,
    session::Session,
};

#[derive(Subcommand)]
pub enum WorkspaceCommand {
    /// Make a workspace.
    Create {
        /// Letters, digits and hyphens, as of a host name.
        name: String,
        /// A label, may be given several times.
        #[arg(short, long, value_name = "KEY=VALUE", value_parser = parse::pair)]
        label: Vec<(String, String)>,
        /// Its first owner: uid:NUMBER, cert:NAME or oidc:SUBJECT.
        #[arg(long, value_name = "SUBJECT", default_value = "", hide_default_value = true)]
        owner: String,
    },
    /// List the workspaces that one may look into.
    #[command(visible_alias = "ls")]
    List {
        /// Only those with these labels: key=value,other!=x,present,!absent
        #[arg(short = 'l', long, value_name = "LABELS", default_value = "", hide_default_value = true)]
        selector: String,
    },
    /// Show a workspace; the one that is worked in when none is named.
    Get {
        /// Its name.
        #[arg(default_value = "", hide_default_value = true)]
        name: String,
    },
    /// Remove an empty workspace, with its members, tokens and templates.
    #[command(visible_alias = "rm")]
    Delete {
        /// Its name.
        name: String,
        /// It is no failure when it isn't there.
        #[arg(long)]
        ignore_missing: bool,
    },
    /// Who may do what in the workspace that is worked in (--workspace).
    #[command(arg_required_else_help = true)]
    Member {
        #[command(subcommand)]
        command: MemberCommand,
    },
}

#[derive(Subcommand)]
pub enum MemberCommand {
    /// List the members.
    #[command(visible_alias = "ls")]
    List,
    /// Give somebody a role, in place of the one it has.
    Set {
        /// uid:NUMBER, cert:NAME or oidc:SUBJECT; `torpor whoami` shows one's own.
        subject: String,
        /// A viewer sees, an editor makes and uses sandboxes, an owner says who is a member.
        #[arg(long, value_enum)]
        role: Role,
    },
    /// Take the role back.
    #[command(visible_alias = "rm")]
    Remove {
        /// As it is listed.
        subject: String,
        /// It is no failure when it has none.
        #[arg(long)]
        ignore_missing: bool,
    },
}

/// What somebody may do in a workspace.
#[derive(Clone, Copy, Debug, ValueEnum)]
pub enum Role {
    Viewer,
    Editor,
    Owner,
}

impl From<Role> for v1::Role {
    fn from(role: Role) -> Self {
        match role {
            Role::Viewer => Self::Viewer,
            Role::Editor => Self::Editor,
            Role::Owner => Self::Owner,
        }
    }
}

/// As it is typed.
pub fn role_name(role: i32) -> &'static str {
    match v1::Role::try_from(role) {
        Ok(v1::Role::Viewer) => "viewer",
        Ok(v1::Role::Editor) => "editor",
        Ok(v1::Role::Owner) => "owner",
        _ => "",
    }
}

#[derive(Serialize)]
struct Shown {
    name: String,
    sandboxes: u64,
    role: &'static str,
    labels: std::collections::BTreeMap<String, String>,
    version: u64,
    created: Option<String>,
}

impl From<&v1::Workspace> for Shown {
    fn from(workspace: &v1::Workspace) -> Self {
        Self {
            name: workspace.name.clone(),
            sandboxes: workspace.sandboxes,
            role: role_name(workspace.role),
            labels: workspace.labels.clone().into_iter().collect(),
            version: workspace.version,
            created: workspace.created.as_ref().map(ToString::to_string),
        }
    }
}

/// Runs one of the commands for workspaces.
pub async fn run(session: &Session, command: WorkspaceCommand) -> Outcome {
    let client = session.connect().await?;
    match command {
        WorkspaceCommand::Create { name, label, owner } => {
            let labels = label.into_iter().collect();
            let request = v1::CreateWorkspaceRequest { name, labels, owner, ..Default::default() };
            show(session, &client.create_workspace(request).await?)
        }
        WorkspaceCommand::Get { name } => show(session, &client.get_workspace(&name).await?),
        WorkspaceCommand::List { selector } => {
            let all = client.list_workspaces(&selector).await?;
            let shown: Vec<Shown> = all.iter().map(Shown::from).collect();
            let names = || all.iter().map(|workspace| workspace.name.clone()).collect();
            session.print(&shown, names, || rows(&all))?;
            Ok(0)
        }
        WorkspaceCommand::Delete { name, ignore_missing } => {
            let removed = client.delete_workspace(&name, ignore_missing).await?;
            session.print_removed("name", &[(&name, removed)], true, ("deleted", "was not there"))?;
            Ok(0)
        }
        WorkspaceCommand::Member { command } => member(session, command).await,
    }
}

fn rows(all: &[v1::Workspace]) -> String {
    let row = |workspace: &v1::Workspace| {
        [
            workspace.name.clone(),
            workspace.sandboxes.to_string(),
            role_name(workspace.role).to_owned(),
            age(workspace.created.as_ref()),
        ]
    };
    table(["NAME", "SANDBOXES", "ROLE", "AGE"], all.iter().map(row))
}

fn show(session: &Session, workspace: &v1::Workspace) -> Outcome {
    let human = || rows(std::slice::from_ref(workspace));
    session.print(&Shown::from(workspace), || vec![workspace.name.clone()], human)?;
    Ok(0)
}

fn shown_member(member: &v1::Member) -> serde_json::Value {
    serde_json::json!({
        "workspace": member.workspace,
        "subject": member.subject,
        "role": role_name(member.role),
        "created": member.created.as_ref().map(ToString::to_string),
    })
}

async fn member(session: &Session, command: MemberCommand) -> Outcome {
    let client = session.connect().await?;
    match command {
        MemberCommand::List => {
            let all = client.list_members("").await?;
            let shown: Vec<_> = all.iter().map(shown_member).collect();
            let names = || all.iter().map(|member| member.subject.clone()).collect();
            let row = |member: &v1::Member| {
                [member.subject.clone(), role_name(member.role).to_owned(), age(member.created.as_ref())]
            };
            session.print(&shown, names, || table(["SUBJECT", "ROLE", "AGE"], all.iter().map(row)))?;
        }
        MemberCommand::Set { subject, role } => {
            let set = client.set_member("", &subject, role.into()).await?;
            let human = || {
                let role = role_name(set.role);
                format!("{} is {role} of {}\n", clean(&set.subject), clean(&set.workspace))
            };
            session.print(&shown_member(&set), || vec![set.subject.clone()], human)?;
        }
        MemberCommand::Remove { subject, ignore_missing } => {
            let removed = client.remove_member("", &subject, ignore_missing).await?;
            let words = ("is no member any more", "was no member");
            session.print_removed("subject", &[(&subject, removed)], true, words)?;
        }
    }
    Ok(0)
}
