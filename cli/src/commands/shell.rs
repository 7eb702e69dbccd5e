//! `torpor shell`

use clap::Args;
use torpor_sdk::v1;

use super::{Outcome, exec};
use crate::{parse, session::Session, terminal};

/// The image's own shell, else bash, else sh: whatever the image holds, /bin/sh is the least of it.
const LOGIN: &str =
    r#"for s in "${SHELL:-}" /bin/bash /bin/sh; do if [ -x "$s" ]; then exec "$s" -l; fi; done"#;

#[derive(Args)]
pub struct ShellArgs {
    /// Name or id.
    name: String,
    #[command(flatten)]
    environment: parse::Environment,
    /// Where it starts.
    #[arg(short, long, value_name = "DIR", default_value = "", hide_default_value = true)]
    workdir: String,
    /// Who it runs as: a name or number, with an optional :group.
    #[arg(short, long, default_value = "", hide_default_value = true)]
    user: String,
}

/// Opens a login shell, on a terminal when there is one here; else commands are read from standard input.
pub async fn run(session: &Session, args: ShellArgs) -> Outcome {
    let start = v1::ExecStart {
        sandbox: args.name,
        argv: ["/bin/sh", "-c", LOGIN].map(str::to_owned).to_vec(),
        environment: args.environment.read()?,
        workdir: args.workdir,
        user: args.user,
        stdin: true,
        tty: terminal::has_input(),
        ..Default::default()
    };
    exec::attach(session, start).await
}
