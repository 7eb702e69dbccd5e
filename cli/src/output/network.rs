//! The stable form of what the gateway sends about the network.

use serde::Serialize;
use torpor_sdk::v1;

use super::view::{text, time};

/// Where a sandbox may send to.
#[derive(Serialize)]
pub struct Egress {
    policy: &'static str,
    allow: Vec<String>,
    allow_names: bool,
    /// It is the gateway's default, and not the sandbox's own.
    default: bool,
}

/// A policy, as it is typed.
pub fn policy(egress: &v1::Egress) -> &'static str {
    match egress.policy() {
        v1::egress::Policy::Unspecified => "default",
        v1::egress::Policy::Open => "open",
        v1::egress::Policy::Public => "public",
        v1::egress::Policy::None => "none",
        v1::egress::Policy::Allow => "allow",
    }
}

impl Egress {
    /// None: the gateway does not tell.
    pub fn of(spec: &v1::SandboxSpec, status: &v1::SandboxStatus) -> Option<Self> {
        let egress = status.egress.as_ref().or(spec.egress.as_ref())?;
        Some(Self {
            policy: policy(egress),
            allow: egress.allow.clone(),
            allow_names: egress.allow_names,
            default: spec.egress.is_none(),
        })
    }

    /// In one line.
    pub fn line(&self) -> String {
        let mut line = self.policy.to_owned();
        if self.default {
            line.push_str(" (the gateway's default)");
        }
        if self.policy == "allow" {
            let names = self.allow_names.then(|| "names".to_owned());
            let all: Vec<String> = self.allow.iter().cloned().chain(names).collect();
            line.push_str(&format!(
                " {}",
                if all.is_empty() { "nothing".to_owned() } else { all.join(", ") }
            ));
        }
        line
    }
}

/// `sandbox network -o json`.
#[derive(Serialize)]
pub struct Network {
    pub id: String,
    pub name: String,
    pub egress: Option<Egress>,
    pub ip: Option<String>,
    pub mac: Option<String>,
    pub tap: Option<String>,
    pub exposed: Vec<Exposed>,
}

/// `expose -o json`, and a row of `expose list -o json`.
#[derive(Serialize)]
pub struct Exposed {
    sandbox: String,
    sandbox_id: String,
    port: u32,
    host: String,
    wake: bool,
    created: Option<String>,
    connections: u32,
    problem: Option<String>,
}

impl From<&v1::ExposedPort> for Exposed {
    fn from(port: &v1::ExposedPort) -> Self {
        Self {
            sandbox: port.sandbox.clone(),
            sandbox_id: port.sandbox_id.clone(),
            port: port.port,
            host: port.host.clone(),
            wake: port.wake,
            created: time(port.created.as_ref()),
            connections: port.connections,
            problem: text(&port.problem),
        }
    }
}

/// `forward -o json`: one for each port, once it is listened for.
#[derive(Serialize)]
pub struct Forwarded {
    pub name: String,
    pub id: String,
    pub local: String,
    pub port: u16,
}
