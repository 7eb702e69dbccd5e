//! What is said to a guest's agent at its start and at its end.

use std::{
    sync::Arc,
    time::{Duration, SystemTime},
};

use tokio::time::{Instant, sleep, timeout, timeout_at};
use tonic::Code;
use torpor_driver_common::agent::main_command;
use torpor_proto::agent::v1::{ConfigureRequest, Network, ShutdownRequest, agent_client::AgentClient};
use torpor_sandbox::{SandboxSpec, words::said};

use crate::{host::Host, vm::Vm};

/// Pause between two tries of a first call.
const AGAIN: Duration = Duration::from_millis(100);
/// How long one first call may take before it is tried anew.
const CONFIGURE: Duration = Duration::from_secs(30);
/// Fresh entropy for the guest, bytes.
const ENTROPY: usize = 64;
/// How long an agent of which nothing was heard is asked whether it has begun to work.
const BOOTING: Duration = Duration::from_millis(500);
/// What of a deadline is kept back for the end of the machine.
const RESERVE: Duration = Duration::from_millis(500);
/// How long a guest that has flushed may take to switch itself off; nothing is lost when it doesn't.
const POWER_OFF: Duration = Duration::from_secs(3);
/// How long the machine's process may take to end in order.
const QUIT: Duration = Duration::from_secs(3);

impl Vm {
    /// Configures the agent as soon as it answers. The error says what was seen instead.
    pub(crate) async fn wait_ready(
        &self,
        spec: &SandboxSpec,
        network: Option<Network>,
        limit: Duration,
    ) -> Result<(), String> {
        tokio::select! {
            seen = self.over() => Err(match seen.exit {
                Some(exit) => describe(&exit),
                None => "the VM process is gone".to_owned(),
            }),
            ready = timeout(limit, self.configure(spec, network)) => {
                ready.unwrap_or_else(|_| Err(format!("the agent did not answer within {} s", limit.as_secs())))
            }
        }
    }

    /// Configures a guest that works once more, so that it takes in what has changed around it: its file system grows to
    /// its disk. The error says what was seen instead.
    pub(crate) async fn settle_in(
        self: &Arc<Self>,
        host: &Arc<Host>,
        spec: &SandboxSpec,
    ) -> Result<(), String> {
        let (host, vm) = (Arc::clone(host), Arc::clone(self));
        let network = tokio::task::spawn_blocking(move || vm.network(&host)).await;
        let network = network.map_err(|error| error.to_string())?;
        self.wait_ready(spec, network, CONFIGURE).await
    }

    async fn configure(&self, spec: &SandboxSpec, network: Option<Network>) -> Result<(), String> {
        let mut client = AgentClient::new(self.channel.clone());
        loop {
            // First an answer of any kind: a request that waits for a guest to boot would bring it an old time.
            if self.status(CONFIGURE).await.is_none() {
                sleep(AGAIN).await;
                continue;
            }
            let request = self.request(spec, network.clone());
            match timeout(CONFIGURE, client.configure(request)).await {
                Ok(Ok(answer)) => {
                    let answer = answer.into_inner();
                    if answer.run != self.record.run.0 {
                        return Err(format!(
                            "the agent answered for run {} instead of {}",
                            answer.run, self.record.run
                        ));
                    }
                    self.set_configured(&answer.boot_id);
                    return Ok(());
                }
                // No connection yet, or it was lost.
                Ok(Err(status))
                    if matches!(status.code(), Code::Unavailable | Code::Unknown | Code::Cancelled) =>
                {
                    let (sandbox, code) = (&self.record.sandbox, status.code());
                    tracing::debug!(%sandbox, ?code, "the agent is not there yet");
                }
                Ok(Err(status)) => {
                    return Err(format!("the agent refused its configuration: {}", said(status.message())));
                }
                Err(_) => {}
            }
            sleep(AGAIN).await;
        }
    }

    /// What the guest is told of its network. Blocks: it reads the host's routes and name servers.
    pub(crate) fn network(&self, host: &Host) -> Option<Network> {
        let net = self.record.net.as_ref()?;
        Some(Network {
            mac: net.mac.to_string(),
            address: format!("{}/{}", net.guest_ip, net.prefix),
            gateway: net.host_ip.to_string(),
            mtu: host.mtu(),
            nameservers: host.nameservers(net.host_ip),
            search_domains: Vec::new(),
        })
    }

    fn request(&self, spec: &SandboxSpec, network: Option<Network>) -> ConfigureRequest {
        ConfigureRequest {
            run: self.record.run.0,
            sandbox_id: self.record.sandbox.to_string(),
            hostname: match spec.hostname.as_str() {
                "" => self.record.sandbox.to_string(),
                name => name.to_owned(),
            },
            time: Some(SystemTime::now().into()),
            network,
            environment: spec.environment.clone().into_iter().collect(),
            main: main_command(spec),
            entropy: entropy().into(),
        }
    }

    /// Asks the guest to flush and switch itself off, until then at the latest. The error says why it isn't known to
    /// have flushed.
    pub(crate) async fn shut_down(&self, until: Instant) -> Result<(), String> {
        if let Some(exit) = self.seen().exit {
            return Err(format!("it had ended before: {}", describe(&exit)));
        }
        let left = until.saturating_duration_since(Instant::now());
        // A guest that has not come so far holds nothing worth waiting for; one that has may use the whole deadline.
        if !self.is_configured() && !self.has_begun(BOOTING.min(left)).await {
            return Err("its agent had not answered yet".to_owned());
        }
        let ask = until.checked_sub(RESERVE.min(left / 4)).unwrap_or(until);
        // The agent kills at half of its grace, and needs the rest to sync.
        let grace = ask.saturating_duration_since(Instant::now()).mul_f64(0.8);
        let request = ShutdownRequest { grace: grace.try_into().ok() };
        let mut client = AgentClient::new(self.channel.clone());
        let answer = tokio::select! {
            answer = timeout_at(ask, client.shutdown(request)) => answer,
            seen = self.over() => {
                let end = seen.exit.as_ref().map_or("the VM process is gone".to_owned(), describe);
                return Err(format!("it ended before it said that it had flushed: {end}"));
            }
        };
        match answer {
            Ok(Ok(answer)) => {
                let answer = answer.into_inner();
                if answer.flushed {
                    Ok(())
                } else {
                    Err(format!("the guest could not flush: {}", said(&answer.detail)))
                }
            }
            Ok(Err(status)) => Err(format!("the agent did not shut down: {}", said(status.message()))),
            Err(_) => Err(format!("the agent did not answer within {:.1} s", left.as_secs_f64())),
        }
    }

    async fn has_begun(&self, limit: Duration) -> bool {
        self.status(limit).await.is_some_and(|status| status.configured)
    }

    /// Lets a guest that has flushed switch itself off, then lets the machine's process end in order. May fail: the
    /// caller looks.
    pub(crate) async fn end_process(&self, flushed: bool, in_order: bool) {
        if flushed {
            let _ended = timeout(POWER_OFF, self.over()).await.is_ok();
        }
        // Also for a guest that did not flush: what the machine itself still holds of its disk is written then.
        if flushed || in_order || self.seen().exit.is_some() {
            self.quit().await;
            let _ended = timeout(QUIT, self.gone()).await.is_ok();
        }
    }
}

/// An end in words.
fn describe(exit: &torpor_sandbox::Exit) -> String {
    use torpor_sandbox::Exit;
    match exit {
        Exit::Code(code) => format!("the main command ended with code {code}"),
        Exit::PowerOff => "the guest switched itself off".to_owned(),
        Exit::Panic(text) | Exit::Lost(text) | Exit::Interrupted(text) => text.clone(),
    }
}

fn entropy() -> Vec<u8> {
    use std::io::Read as _;
    let mut bytes = vec![0; ENTROPY];
    let read = std::fs::File::open("/dev/urandom").and_then(|mut file| file.read_exact(&mut bytes));
    if read.is_ok() { bytes } else { Vec::new() }
}
