//! `torpor template …`

use std::collections::BTreeMap;

use clap::Subcommand;
use serde::Serialize;
use torpor_sandbox::spec::size;
use torpor_sdk::v1;

use super::{Outcome, spec::SpecArgs};
use crate::{
    output::{
        table::{age, fields, table},
        view::{self, text},
    },
    parse,
    session::Session,
};

#[derive(Subcommand)]
pub enum TemplateCommand {
    /// Make a template.
    Create(Box<TemplateArgs>),
    /// Show a template in full.
    Get {
        /// Its name.
        name: String,
    },
    /// List templates.
    #[command(visible_alias = "ls")]
    List {
        /// Only those with these labels, as in `team=blue,!old`.
        #[arg(short = 'l', long, default_value = "", hide_default_value = true)]
        selector: String,
    },
    /// Replace what a template says, wholly; sandboxes that were made of it stay as they are.
    Replace {
        /// Only at this version; at the present one when left out.
        #[arg(long, value_name = "NUMBER", value_parser = clap::value_parser!(u64).range(1..))]
        version: Option<u64>,
        #[command(flatten)]
        template: Box<TemplateArgs>,
    },
    /// Remove templates; sandboxes that were made of them stay.
    #[command(visible_alias = "rm")]
    Delete {
        /// Their names.
        #[arg(required = true, value_name = "NAME")]
        names: Vec<String>,
        /// One that isn't there is no failure.
        #[arg(long)]
        allow_missing: bool,
    },
}

#[derive(clap::Args)]
pub struct TemplateArgs {
    /// Its name: a-z, 0-9 and '-'.
    name: String,
    /// A label of the template and of what is made of it. May be repeated.
    #[arg(short, long = "label", value_name = "KEY=VALUE", value_parser = parse::pair)]
    labels: Vec<(String, String)>,
    /// An annotation of the template and of what is made of it. May be repeated.
    #[arg(long = "annotation", value_name = "KEY=VALUE", value_parser = parse::pair)]
    annotations: Vec<(String, String)>,
    #[command(flatten)]
    spec: SpecArgs,
}

/// A template as it is printed.
#[derive(Serialize)]
struct Template {
    name: String,
    workspace: String,
    version: u64,
    labels: BTreeMap<String, String>,
    annotations: BTreeMap<String, String>,
    created: Option<String>,
    changed: Option<String>,
    image: Option<String>,
    command: Vec<String>,
    environment: BTreeMap<String, String>,
    workdir: Option<String>,
    user: Option<String>,
    cpus: Option<u32>,
    memory_bytes: Option<u64>,
    disk_bytes: Option<u64>,
    restart_policy: Option<&'static str>,
    driver: Option<String>,
    machine: Option<String>,
    kernel: Option<String>,
    stop_grace: Option<String>,
    driver_config: serde_json::Map<String, serde_json::Value>,
}

impl From<&v1::Template> for Template {
    fn from(template: &v1::Template) -> Self {
        let spec = template.spec.clone().unwrap_or_default();
        let resources = spec.resources.unwrap_or_default();
        Self {
            name: template.name.clone(),
            workspace: template.workspace.clone(),
            version: template.version,
            labels: template.labels.clone().into_iter().collect(),
            annotations: template.annotations.clone().into_iter().collect(),
            created: template.created.as_ref().map(ToString::to_string),
            changed: template.changed.as_ref().map(ToString::to_string),
            restart_policy: (spec.restart_policy != 0).then(|| view::restart_policy(&spec)),
            stop_grace: spec.stop_grace.as_ref().map(ToString::to_string),
            image: text(&spec.image),
            driver_config: view::driver_config(spec.driver_config.as_ref()),
            command: spec.command,
            environment: spec.environment.into_iter().collect(),
            workdir: text(&spec.workdir),
            user: text(&spec.user),
            cpus: resources.cpus,
            memory_bytes: resources.memory_bytes,
            disk_bytes: resources.disk_bytes,
            driver: text(&spec.driver),
            machine: text(&spec.machine),
            kernel: text(&spec.kernel),
        }
    }
}

/// Runs one of the commands for templates.
pub async fn run(session: &Session, command: TemplateCommand) -> Outcome {
    let client = session.connect().await?;
    match command {
        TemplateCommand::Create(args) => {
            let request = v1::CreateTemplateRequest {
                name: args.name,
                labels: args.labels.into_iter().collect(),
                annotations: args.annotations.into_iter().collect(),
                spec: Some(args.spec.spec(session)?),
                ..Default::default()
            };
            show(session, &client.create_template(request).await?)
        }
        TemplateCommand::Get { name } => show(session, &client.template(&name).await?),
        TemplateCommand::List { selector } => list(session, &client.templates(&selector).await?),
        TemplateCommand::Replace { version, template: args } => {
            let expected_version = match version {
                Some(version) => version,
                None => client.template(&args.name).await?.version,
            };
            let request = v1::UpdateTemplateRequest {
                template: args.name,
                expected_version,
                labels: Some(v1::StringMap { values: args.labels.into_iter().collect() }),
                annotations: Some(v1::StringMap { values: args.annotations.into_iter().collect() }),
                spec: Some(args.spec.spec(session)?),
                ..Default::default()
            };
            show(session, &client.update_template(request).await?)
        }
        TemplateCommand::Delete { names, allow_missing } => {
            let mut code = 0;
            let mut done = Vec::new();
            for name in &names {
                match client.delete_template(name, allow_missing).await {
                    Ok(removed) => done.push((name.as_str(), removed)),
                    Err(error) => {
                        let failure = crate::failure::Failure::from(error);
                        code = if code == 0 { failure.code } else { code };
                        failure.print(if names.len() == 1 { "" } else { name });
                    }
                }
            }
            session.print_removed("name", &done, names.len() == 1, ("deleted", "absent"))?;
            Ok(code)
        }
    }
}

fn show(session: &Session, template: &v1::Template) -> Outcome {
    let shown = Template::from(template);
    session.print(&shown, || vec![template.name.clone()], || human(&shown))?;
    Ok(0)
}

fn pairs(map: &BTreeMap<String, String>) -> String {
    map.iter().map(|(key, value)| format!("{key}={value}")).collect::<Vec<_>>().join(", ")
}

fn human(template: &Template) -> String {
    let or = |value: &Option<String>| value.clone().unwrap_or_default();
    let bytes = |bytes: Option<u64>| bytes.map(size).unwrap_or_default();
    fields([
        ("Name", template.name.clone()),
        ("Workspace", template.workspace.clone()),
        ("Version", template.version.to_string()),
        ("Created", or(&template.created)),
        ("Changed", or(&template.changed)),
        ("Labels", pairs(&template.labels)),
        ("Annotations", pairs(&template.annotations)),
        ("Image", or(&template.image)),
        ("Command", template.command.join(" ")),
        ("Environment", template.environment.keys().cloned().collect::<Vec<_>>().join(", ")),
        ("Workdir", or(&template.workdir)),
        ("User", or(&template.user)),
        ("CPUs", template.cpus.map(|cpus| cpus.to_string()).unwrap_or_default()),
        ("Memory", bytes(template.memory_bytes)),
        ("Disk", bytes(template.disk_bytes)),
        ("Restart", template.restart_policy.unwrap_or_default().to_owned()),
        ("Driver", or(&template.driver)),
        ("Machine", or(&template.machine)),
        ("Kernel", or(&template.kernel)),
        ("Stop grace", or(&template.stop_grace)),
    ])
}

fn list(session: &Session, templates: &[v1::Template]) -> Outcome {
    let rows: Vec<Template> = templates.iter().map(Template::from).collect();
    let names = || templates.iter().map(|template| template.name.clone()).collect();
    let human = || {
        let row = |(template, shown): (&v1::Template, &Template)| {
            [
                shown.name.clone(),
                shown.image.clone().unwrap_or_default(),
                shown.cpus.map(|cpus| cpus.to_string()).unwrap_or_default(),
                shown.memory_bytes.map(size).unwrap_or_default(),
                shown.disk_bytes.map(size).unwrap_or_default(),
                pairs(&shown.labels),
                age(template.changed.as_ref()),
            ]
        };
        let head = ["NAME", "IMAGE", "CPUS", "MEMORY", "DISK", "LABELS", "CHANGED"];
        table(head, templates.iter().zip(&rows).map(row))
    };
    session.print(&rows, names, human)?;
    Ok(0)
}
