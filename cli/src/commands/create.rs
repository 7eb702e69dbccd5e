//! `torpor create`

use clap::Args;
use torpor_sdk::{Goal, v1};

use super::{
    Outcome,
    spec::SpecArgs,
    verb::{Patience, Results, await_one},
};
use crate::{failure::Failure, parse, session::Session};

#[derive(Args)]
pub struct CreateArgs {
    /// Name of the sandbox: a-z, 0-9 and '-'. Made up when left out.
    #[arg(value_parser = clap::builder::NonEmptyStringValueParser::new())]
    name: Option<String>,
    /// A template that says what is left out here (`torpor template list`).
    #[arg(short, long, value_name = "NAME")]
    template: Option<String>,
    /// A label. May be repeated.
    #[arg(short, long = "label", value_name = "KEY=VALUE", value_parser = parse::pair)]
    labels: Vec<(String, String)>,
    /// An annotation: text of any kind, for programs of yours. May be repeated.
    #[arg(long = "annotation", value_name = "KEY=VALUE", value_parser = parse::pair)]
    annotations: Vec<(String, String)>,
    /// A port of the sandbox that is exposed from the beginning, at a free port of the gateway's host or at the one given;
    /// with `+wake` a connection resumes the sandbox. May be repeated.
    #[arg(long = "expose", value_name = "PORT[=ADDRESS:PORT][+wake]", value_parser = exposed)]
    expose: Vec<v1::ExposeAtCreate>,
    #[command(flatten)]
    spec: SpecArgs,
    #[command(flatten)]
    patience: Patience,
}

/// "8080", "8080=127.0.0.1:8080", "8080+wake".
fn exposed(text: &str) -> Result<v1::ExposeAtCreate, String> {
    let (rest, wake) = match text.strip_suffix("+wake") {
        Some(rest) => (rest, true),
        None => (text, false),
    };
    let (port, host) = rest.split_once('=').unwrap_or((rest, ""));
    match port.parse::<u16>() {
        Ok(port) if port > 0 => Ok(v1::ExposeAtCreate { port: port.into(), host: host.to_owned(), wake }),
        _ => Err(format!("'{port}' is not a port: 1 to 65535 are")),
    }
}

/// Makes a sandbox and waits until it runs.
pub async fn run(session: &Session, args: CreateArgs) -> Outcome {
    let patience = Patience { no_wait: args.patience.no_wait, timeout: args.patience.timeout };
    let request = request(session, args)?;
    let client = session.connect().await?;
    let created = client.create(request).await?;
    let mut results = Results::new(session, 1);
    let result = if patience.no_wait {
        Ok(created)
    } else {
        await_one(session, &client, &created, Goal::Running, parse::limit(patience.timeout)).await
    };
    results.add("", result)?;
    results.finish()
}

fn request(session: &Session, args: CreateArgs) -> Result<v1::CreateSandboxRequest, Failure> {
    Ok(v1::CreateSandboxRequest {
        name: args.name.unwrap_or_default(),
        labels: args.labels.into_iter().collect(),
        annotations: args.annotations.into_iter().collect(),
        template: args.template.unwrap_or_default(),
        expose: args.expose,
        spec: Some(args.spec.spec(session)?),
        ..Default::default()
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_port_may_have_an_address_and_may_wake() {
        let of = |text: &str| exposed(text).map(|port| (port.port, port.host, port.wake));
        assert_eq!(of("80"), Ok((80, String::new(), false)));
        assert_eq!(of("80=0.0.0.0:8080+wake"), Ok((80, "0.0.0.0:8080".into(), true)));
        assert!(["", "0", "x", "70000", "=1", "80:90"].into_iter().all(|text| of(text).is_err()));
    }
}
