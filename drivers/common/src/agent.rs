//! What is said to every agent, and heard from it.

use std::time::Duration;

use tokio::time::sleep;
use tonic::transport::Channel;
use torpor_proto::agent::v1::{EventsRequest, MainCommand, agent_client::AgentClient, event};
use torpor_sandbox::SandboxSpec;

/// The main command of a sandbox that has one.
pub fn main_command(spec: &SandboxSpec) -> Option<MainCommand> {
    (!spec.command.is_empty()).then(|| MainCommand {
        argv: spec.command.clone(),
        workdir: spec.workdir.clone().unwrap_or_default(),
        user: spec.user.clone().unwrap_or_default(),
        stdin: spec.stdin,
        tty: spec.tty,
    })
}

/// The pauses before a stream that was lost is asked for again: at first, and at most.
#[derive(Clone, Copy, Debug)]
pub struct Pauses {
    /// After a stream that was heard.
    pub first: Duration,
    /// Doubled up to here while there is none.
    pub longest: Duration,
}

/// Reads an agent's events, for as long as it is polled and there is a channel: the end of the main command and the loss of
/// the stream are hints.
pub async fn listen(mut channel: impl FnMut() -> Option<Channel>, hint: impl Fn(), pauses: Pauses) {
    let mut pause = pauses.first;
    while let Some(channel) = channel() {
        if events(channel, &hint).await {
            pause = pauses.first;
            hint();
        }
        sleep(pause).await;
        pause = (pause * 2).min(pauses.longest);
    }
}

/// One stream of events, to its end. True when there was one.
async fn events(channel: Channel, hint: &impl Fn()) -> bool {
    let Ok(answer) = AgentClient::new(channel).events(EventsRequest {}).await else { return false };
    let mut events = answer.into_inner();
    let mut told = false;
    while let Ok(Some(event)) = events.message().await {
        // It ends once; an agent that says so all the time must not crowd out the hints of others.
        if let Some(event::Kind::MainExit(_)) = event.kind
            && !told
        {
            told = true;
            hint();
        }
    }
    true
}
