//! `torpor sandbox network`, and the options for where a sandbox may send to.

use clap::{Args, ValueEnum};
use torpor_sdk::v1;

use super::Outcome;
use crate::{
    failure::Failure,
    output::{
        network::{Egress, Network},
        table::fields,
        view::text,
    },
    session::Session,
};

#[derive(Args)]
pub struct NetworkArgs {
    /// Name or id.
    name: String,
    #[command(flatten)]
    egress: EgressArgs,
}

/// Where a sandbox may send to.
#[derive(Args, Default)]
pub struct EgressArgs {
    /// Where the sandbox may send to; the gateway's default when left out, or `allow` where rules are given. Never to the
    /// host, to other sandboxes or to metadata services.
    #[arg(long, value_enum, value_name = "POLICY")]
    egress: Option<Policy>,
    /// A network, address or port that the policy `allow` lets through, as in 192.0.2.0/24, 192.0.2.7:443 or
    /// 0.0.0.0/0:53/udp. May be repeated.
    #[arg(long, value_name = "CIDR[:PORT[-PORT][/tcp|udp]]")]
    allow: Vec<String>,
    /// With the policy `allow`: let the sandbox ask name servers, too.
    #[arg(long)]
    allow_names: bool,
}

#[derive(Clone, Copy, PartialEq, Eq, ValueEnum)]
enum Policy {
    /// What the gateway's configuration says.
    Default,
    /// Everywhere.
    Open,
    /// Everywhere but private networks.
    Public,
    /// Nowhere.
    None,
    /// To what --allow names.
    Allow,
}

impl EgressArgs {
    /// Whether anything was said.
    pub fn given(&self) -> bool {
        self.egress.is_some() || !self.allow.is_empty() || self.allow_names
    }

    /// What the gateway is told; the rules are for it to read.
    pub fn wanted(self) -> Result<Option<v1::Egress>, Failure> {
        use v1::egress::Policy as Wire;
        let rules = !self.allow.is_empty() || self.allow_names;
        let policy = match self.egress {
            None if rules => Policy::Allow,
            None => Policy::Default,
            Some(policy) => policy,
        };
        if rules && policy != Policy::Allow {
            return Err(Failure::usage("--allow and --allow-names go with --egress allow only"));
        }
        let policy = match policy {
            Policy::Default => return Ok(None),
            Policy::Open => Wire::Open,
            Policy::Public => Wire::Public,
            Policy::None => Wire::None,
            Policy::Allow => Wire::Allow,
        };
        let (allow, allow_names) = (self.allow, self.allow_names);
        Ok(Some(v1::Egress { policy: policy.into(), allow, allow_names }))
    }
}

/// Shows the network of a sandbox, after it was changed if that was asked for.
pub async fn run(session: &Session, args: NetworkArgs) -> Outcome {
    let client = session.connect().await?;
    let sandbox = match args.egress.given() {
        true => client.set_egress(&args.name, args.egress.wanted()?).await?,
        false => client.get(&args.name).await?,
    };
    let exposed = client.exposed(&sandbox.id).await?;
    let (spec, status) =
        (sandbox.spec.clone().unwrap_or_default(), sandbox.status.clone().unwrap_or_default());
    let host = status.host.clone().unwrap_or_default();
    let network = Network {
        id: sandbox.id.clone(),
        name: sandbox.name.clone(),
        egress: Egress::of(&spec, &status),
        ip: text(&host.ip),
        mac: text(&host.mac),
        tap: text(&host.tap),
        exposed: exposed.iter().map(Into::into).collect(),
    };
    let human = || {
        let mut out = fields([
            ("Network of", format!("{} ({})", sandbox.name, sandbox.id)),
            ("Egress", network.egress.as_ref().map(Egress::line).unwrap_or_default()),
            ("Address", network.ip.clone().unwrap_or_default()),
            ("MAC", network.mac.clone().unwrap_or_default()),
            ("Device", network.tap.clone().unwrap_or_default()),
        ]);
        for port in &exposed {
            out.push_str(&fields([("Exposed", super::expose::line(port))]));
        }
        out
    };
    session.print(&network, || vec![sandbox.name.clone()], human)?;
    Ok(0)
}
