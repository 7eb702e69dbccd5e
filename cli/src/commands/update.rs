//! `torpor update`

use std::{collections::HashMap, time::Duration};

use clap::Args;
use torpor_sdk::{Client, Code, Error, v1};

use super::{
    Outcome,
    network::EgressArgs,
    spec::{Restart, stop_grace},
    verb::Results,
};
use crate::{failure::Failure, parse, session::Session};

/// How often an update is made anew because the sandbox was changed meanwhile.
const TRIES: usize = 5;

/// What makes no sense together with an update that was asked for before.
const CHANGES: [&str; 26] = [
    "version",
    "labels",
    "annotations",
    "env",
    "env_file",
    "unset",
    "clear_env",
    "cpus",
    "memory",
    "disk",
    "workdir",
    "user",
    "restart",
    "stop_grace",
    "image",
    "egress",
    "allow",
    "allow_names",
    "no_command",
    "stdin",
    "no_stdin",
    "tty",
    "no_tty",
    "endpoints",
    "no_serves",
    "command",
];

#[derive(Args)]
pub struct UpdateArgs {
    /// Name or id.
    name: String,
    /// Only at this version of the sandbox; at the present one when left out.
    #[arg(long, value_name = "NUMBER", value_parser = clap::value_parser!(u64).range(1..))]
    version: Option<u64>,
    /// Set a label, or take one away with `KEY-`. May be repeated.
    #[arg(short, long = "label", value_name = "KEY=VALUE|KEY-", value_parser = change)]
    labels: Vec<Change>,
    /// Set an annotation, or take one away with `KEY-`. May be repeated.
    #[arg(long = "annotation", value_name = "KEY=VALUE|KEY-", value_parser = change)]
    annotations: Vec<Change>,
    #[command(flatten)]
    environment: parse::Environment,
    /// Take an environment variable away. May be repeated.
    #[arg(long = "unset-env", value_name = "KEY")]
    unset: Vec<String>,
    /// Take all environment variables away, before --env sets some.
    #[arg(long)]
    clear_env: bool,
    /// Virtual CPUs.
    #[arg(long, value_parser = clap::value_parser!(u32).range(1..))]
    cpus: Option<u32>,
    /// Guest memory, as in 512M or 1GiB.
    #[arg(long, value_name = "SIZE", value_parser = parse::size)]
    memory: Option<u64>,
    /// Virtual size of the disk, as in 10G; never smaller than it is.
    #[arg(long, value_name = "SIZE", value_parser = parse::size)]
    disk: Option<u64>,
    /// Where the main command starts; empty: in the user's home.
    #[arg(short = 'w', long, value_name = "DIR")]
    workdir: Option<String>,
    /// Who runs the main command; empty: root.
    #[arg(short, long)]
    user: Option<String>,
    /// What happens when the main command ends.
    #[arg(long, value_enum)]
    restart: Option<Restart>,
    /// How long processes may take to end at suspend and stop, as in 10s.
    #[arg(long, value_name = "TIME", value_parser = parse::duration)]
    stop_grace: Option<Duration>,
    /// Another image. No driver can do that at present; the refusal says why.
    #[arg(long)]
    image: Option<String>,
    #[command(flatten)]
    egress: EgressArgs,
    /// Give the main command an input, for `torpor attach`.
    #[arg(short = 'i', long)]
    stdin: bool,
    /// The main command has no input any more.
    #[arg(long, conflicts_with = "stdin")]
    no_stdin: bool,
    /// Give the main command a terminal, for `torpor attach`.
    #[arg(long)]
    tty: bool,
    /// The main command has no terminal any more.
    #[arg(long, conflicts_with = "tty")]
    no_tty: bool,
    /// Declare something that the sandbox serves, in place of the one of that name, or take one away with `NAME-`. May be
    /// repeated.
    #[arg(long = "serves", value_name = "NAME=PORT[/PATH]|NAME-", value_parser = served)]
    endpoints: Vec<Served>,
    /// Take all declared endpoints away, before --serves declares some.
    #[arg(long)]
    no_serves: bool,
    /// No main command any more: the sandbox idles until it is used.
    #[arg(long, conflicts_with = "command")]
    no_command: bool,
    /// Do what an update that stopped on the way has not done yet.
    #[arg(long, conflicts_with_all = CHANGES)]
    resume_pending: bool,
    /// Give up what an update that stopped on the way has not done yet.
    #[arg(long, conflicts_with = "resume_pending", conflicts_with_all = CHANGES)]
    abandon_pending: bool,
    /// Another main command.
    #[arg(last = true, value_name = "COMMAND")]
    command: Vec<String>,
}

/// A key with its new value; without one, it goes.
type Change = (String, Option<String>);

/// An endpoint's name with what it is now; without that, it goes.
type Served = (String, Option<v1::Endpoint>);

/// "name=port/path" or "name-".
fn served(text: &str) -> Result<Served, String> {
    match text.strip_suffix('-').filter(|name| !name.is_empty() && !name.contains('=')) {
        Some(name) => Ok((name.to_owned(), None)),
        None => parse::endpoint(text).map(|endpoint| (endpoint.name.clone(), Some(endpoint))),
    }
}

fn endpoints(args: &UpdateArgs, present: &v1::Sandbox) -> Option<v1::EndpointList> {
    if args.endpoints.is_empty() && !args.no_serves {
        return None;
    }
    let mut values = match &present.spec {
        Some(spec) if !args.no_serves => spec.endpoints.clone(),
        _ => Vec::new(),
    };
    for (name, endpoint) in &args.endpoints {
        let at = values.iter().position(|there| there.name == *name);
        match (at, endpoint) {
            (Some(at), Some(endpoint)) => values[at] = endpoint.clone(),
            (Some(at), None) => drop(values.remove(at)),
            (None, Some(endpoint)) => values.push(endpoint.clone()),
            (None, None) => {}
        }
    }
    Some(v1::EndpointList { values })
}

/// What two opposite options say together.
fn switch(on: bool, off: bool) -> Option<bool> {
    (on || off).then_some(on)
}

/// "key=value" or "key-".
fn change(text: &str) -> Result<Change, String> {
    if let Ok((key, value)) = parse::pair(text) {
        return Ok((key, Some(value)));
    }
    match text.strip_suffix('-') {
        Some(key) if !key.is_empty() => Ok((key.to_owned(), None)),
        _ => Err("it must be KEY=VALUE or KEY-".to_owned()),
    }
}

fn changed(present: &HashMap<String, String>, changes: &[Change]) -> Option<v1::StringMap> {
    if changes.is_empty() {
        return None;
    }
    let mut values = present.clone();
    for (key, value) in changes {
        match value {
            Some(value) => drop(values.insert(key.clone(), value.clone())),
            None => drop(values.remove(key)),
        }
    }
    Some(v1::StringMap { values })
}

/// What is set, on top of what is there.
struct Settled {
    environment: Option<HashMap<String, String>>,
    egress: Option<v1::Egress>,
    stop_grace: Option<prost_types::Duration>,
}

/// Changes a sandbox that is there.
pub async fn run(session: &Session, mut args: UpdateArgs) -> Outcome {
    let client = session.connect().await?;
    let mut results = Results::new(session, 1);
    let done = if args.resume_pending || args.abandon_pending {
        client.resume_pending_update(&args.name, args.abandon_pending).await
    } else {
        let settled = settle(&mut args)?;
        update(&client, &args, &settled).await
    };
    results.add("", done.map_err(Failure::from))?;
    results.finish()
}

fn settle(args: &mut UpdateArgs) -> Result<Settled, Failure> {
    let environment = args.environment.read()?;
    let environment = (!environment.is_empty()).then_some(environment);
    let given = args.egress.given();
    // POLICY_UNSPECIFIED is the gateway's default.
    let egress = std::mem::take(&mut args.egress).wanted()?;
    let egress = if given { Some(egress.unwrap_or_default()) } else { None };
    let settled = Settled { environment, egress, stop_grace: stop_grace(args.stop_grace)? };
    let request = request(args, &settled, &v1::Sandbox::default());
    if request == (v1::UpdateSandboxRequest { target: request.target.clone(), ..Default::default() }) {
        return Err(Failure::usage("nothing to change: `torpor update --help` shows what can be"));
    }
    Ok(settled)
}

async fn update(client: &Client, args: &UpdateArgs, settled: &Settled) -> Result<v1::Sandbox, Error> {
    let mut tries = 1..TRIES;
    loop {
        let present = client.get(&args.name).await?;
        match client.update(request(args, settled, &present)).await {
            // Somebody changed it in between: what was asked for holds on top of that, too.
            Err(error)
                if error.code() == Some(Code::Aborted)
                    && args.version.is_none()
                    && tries.next().is_some() => {}
            done => return done,
        }
    }
}

fn request(args: &UpdateArgs, settled: &Settled, present: &v1::Sandbox) -> v1::UpdateSandboxRequest {
    let resources = v1::Resources { cpus: args.cpus, memory_bytes: args.memory, disk_bytes: args.disk };
    let command = (args.no_command || !args.command.is_empty())
        .then(|| v1::StringList { values: args.command.clone() });
    v1::UpdateSandboxRequest {
        target: Some(v1::Target {
            // The id: another one of the same name is not meant.
            sandbox: if present.id.is_empty() { args.name.clone() } else { present.id.clone() },
            expected_version: args.version.unwrap_or(present.version),
            ..Default::default()
        }),
        image: args.image.clone(),
        command,
        environment: environment(args, settled, present),
        labels: changed(&present.labels, &args.labels),
        // Those of the gateway's own stay by themselves, and nobody may set them.
        annotations: changed(&present.annotations, &args.annotations).map(|mut all| {
            all.values.retain(|key, _| {
                args.annotations.iter().any(|(changed, _)| changed == key)
                    || !torpor_sandbox::spec::RESERVED_PREFIXES.iter().any(|prefix| key.starts_with(prefix))
            });
            all
        }),
        resources: (resources != v1::Resources::default()).then_some(resources),
        egress: settled.egress.clone(),
        restart_policy: Restart::wire(args.restart),
        stop_grace: settled.stop_grace,
        workdir: args.workdir.clone(),
        user: args.user.clone(),
        endpoints: endpoints(args, present),
        stdin: switch(args.stdin, args.no_stdin),
        tty: switch(args.tty, args.no_tty),
    }
}

fn environment(args: &UpdateArgs, settled: &Settled, present: &v1::Sandbox) -> Option<v1::StringMap> {
    if settled.environment.is_none() && args.unset.is_empty() && !args.clear_env {
        return None;
    }
    let mut values = match &present.spec {
        Some(spec) if !args.clear_env => spec.environment.clone(),
        _ => HashMap::new(),
    };
    values.retain(|key, _| !args.unset.contains(key));
    values.extend(settled.environment.clone().unwrap_or_default());
    Some(v1::StringMap { values })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_label_is_set_or_taken_away() {
        assert_eq!(change("a=b"), Ok(("a".into(), Some("b".into()))));
        assert_eq!(change("a="), Ok(("a".into(), Some(String::new()))));
        assert_eq!(change("a=b-"), Ok(("a".into(), Some("b-".into()))));
        assert_eq!(change("a-"), Ok(("a".into(), None)));
        assert!(["", "-", "a", "=b"].into_iter().all(|text| change(text).is_err()));
        let present = HashMap::from([("a".to_owned(), "1".to_owned()), ("b".to_owned(), "2".to_owned())]);
        let after = changed(&present, &[("a".into(), None), ("c".into(), Some("3".into()))]).unwrap().values;
        assert_eq!(
            after,
            HashMap::from([("b".to_owned(), "2".to_owned()), ("c".to_owned(), "3".to_owned())])
        );
        assert_eq!(changed(&present, &[]), None);
    }

    #[test]
    fn an_endpoint_is_declared_anew_or_taken_away_and_the_others_stay() {
        use clap::Parser as _;
        #[derive(clap::Parser)]
        struct Line {
            #[command(flatten)]
            update: UpdateArgs,
        }
        let endpoint = |name: &str, port| v1::Endpoint { name: name.into(), port, ..Default::default() };
        let spec =
            v1::SandboxSpec { endpoints: vec![endpoint("a", 1), endpoint("b", 2)], ..Default::default() };
        let present = v1::Sandbox { spec: Some(spec), ..Default::default() };
        let of = |options: &[&str]| {
            let line = [&["update", "web"], options].concat();
            endpoints(&Line::try_parse_from(line).unwrap().update, &present).map(|list| list.values)
        };
        assert_eq!(of(&[]), None);
        assert_eq!(of(&["--no-serves"]), Some(vec![]));
        let changed = of(&["--serves", "b=3", "--serves", "a-", "--serves", "c=4", "--serves", "none-"]);
        assert_eq!(changed, Some(vec![endpoint("b", 3), endpoint("c", 4)]));
        assert_eq!(of(&["--no-serves", "--serves", "c=4"]), Some(vec![endpoint("c", 4)]));
        assert!(["-", "a", "a=", "a=b-", "=1"].into_iter().all(|text| served(text).is_err()));
        assert_eq!(
            (switch(true, false), switch(false, true), switch(false, false)),
            (Some(true), Some(false), None)
        );
    }
}
