//! What of a sandbox can be changed, and the limits of a container that is there.

use hyper::Method;
use torpor_sandbox::{DriverError, Field, SandboxId, SandboxSpec};

use crate::{
    client::{Carries, WORK},
    container,
    driver::Inner,
    engine::Engine,
    types::Inspect,
};

/// What an agent is told at every start, and what the gateway looks at by itself. The rest is fixed when the container is
/// made, and a new container would have none of the old one's files; but Docker changes limits of a container that is there.
pub(crate) fn updates(engine: Engine) -> &'static [Field] {
    use Field::*;
    match engine {
        Engine::Docker => {
            &[Command, Environment, Workdir, User, Cpus, Memory, Restart, StopGrace, Endpoints, Stdin, Tty]
        }
        Engine::Podman => &[Command, Environment, Workdir, User, Restart, StopGrace, Endpoints, Stdin, Tty],
    }
}

/// Why not the others.
pub(crate) fn why_not(field: Field) -> Option<&'static str> {
    match field {
        Field::Cpus | Field::Memory => Some(
            "Podman keeps the limits of a container that it has made (those of one that runs last until its end)",
        ),
        Field::Disk => Some("the engine sets no bound to a container's files"),
        Field::Egress => Some("where a container may send to is its engine's networks' to say"),
        _ => None,
    }
}

impl Inner {
    /// Gives a container that is at rest the limits of its sandbox, which an update may have changed. Done at the start and
    /// not at the update, so that an engine that is away keeps nobody from an update, and a half of one leaves nothing.
    pub(crate) async fn fit_limits(
        &self,
        id: &SandboxId,
        found: &Inspect,
        spec: &SandboxSpec,
    ) -> Result<(), DriverError> {
        if self.config.engine != Engine::Docker {
            return Ok(());
        }
        let wanted = container::limits(spec, &self.client.learn().await?.info);
        let there = found.host_config.clone().unwrap_or_default();
        if wanted.iter().all(|(key, value)| there.get(key) == Some(value)) {
            return Ok(());
        }
        let path = format!("/containers/{}/update", container::name(id));
        self.client.call(Method::POST, &path, Carries::Json(wanted.into()), WORK).await?;
        Ok(())
    }
}
