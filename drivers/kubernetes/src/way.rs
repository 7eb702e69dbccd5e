//! Which way an agent is reached, where it may have a port of its own: by that port as long as it works, and by the API
//! server's exec otherwise. Exec is also how an agent comes to its credentials: when it has been configured for a run, and
//! whenever its port doesn't let us in. Nobody waits for that: who needs the agent meanwhile goes by exec.

use std::{
    net::IpAddr,
    sync::{
        Arc, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicBool, Ordering},
    },
    time::Duration,
};

use tokio::time::{Instant, timeout};
use tonic::transport::Channel;
use torpor_proto::agent::v1::{EnrollRequest, agent_client::AgentClient};
use torpor_sandbox::words;

use crate::{
    dial::{self, Dialed},
    driver::Inner,
    link,
    live::Live,
    trust::{GATEWAY_NAME, Trust, agent_name},
};

/// For a running pod to have an address.
const ADDRESS: Duration = Duration::from_secs(2);
/// For an agent to take its credentials.
const ENROLL: Duration = Duration::from_secs(5);
/// Agents that are given credentials at once.
pub(crate) const ENROLLING: usize = 16;
const LONGEST_PAUSE: Duration = Duration::from_secs(600);

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum State {
    /// By exec: there is no port so far.
    Exec,
    Port,
    /// By exec until then, after so many failures.
    Avoided(Instant, u32),
}

/// One run's.
#[derive(Debug)]
pub(crate) struct Way {
    state: Mutex<State>,
    /// Somebody is giving it credentials.
    busy: AtomicBool,
    told: AtomicBool,
}

/// Ends with whoever gives credentials.
pub(crate) struct Busy(Arc<Live>);

impl Drop for Busy {
    fn drop(&mut self) {
        self.0.way.busy.store(false, Ordering::Release);
    }
}

impl Way {
    /// Of a run that may have its credentials already, or has none.
    pub(crate) fn new(enrolled: bool) -> Self {
        let state = Mutex::new(if enrolled { State::Port } else { State::Exec });
        Self { state, busy: AtomicBool::new(false), told: AtomicBool::new(false) }
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(crate) fn is_by_port(&self) -> bool {
        *self.lock() == State::Port
    }

    /// Whether its port was not thought of yet, or may be tried again.
    fn is_due(&self) -> bool {
        match *self.lock() {
            State::Exec => true,
            State::Port => false,
            State::Avoided(until, _) => Instant::now() >= until,
        }
    }

    fn avoid(&self, pause: Duration) {
        let mut state = self.lock();
        let times = if let State::Avoided(_, times) = *state { times.saturating_add(1) } else { 1 };
        let pause = pause.saturating_mul(1 << times.saturating_sub(1).min(16)).min(LONGEST_PAUSE);
        *state = State::Avoided(Instant::now() + pause, times);
    }

    /// The same, while credentials are given anew: that is no further failure.
    fn leave(&self, pause: Duration) {
        *self.lock() = State::Avoided(Instant::now() + pause, 0);
    }

    pub(crate) fn go_by_port(&self) {
        *self.lock() = State::Port;
    }
}

impl Live {
    fn begin(self: &Arc<Self>) -> Option<Busy> {
        (!self.way.busy.swap(true, Ordering::Acquire)).then(|| Busy(self.clone()))
    }

    fn avoid_port(&self, inner: &Inner, why: &str) {
        self.way.avoid(inner.config.dial_pause);
        if !self.way.told.swap(true, Ordering::Relaxed) {
            let why = words::said(why);
            tracing::warn!(sandbox = %self.id, run = %self.run, why, "its agent's own port can't be used: it is reached by the API server's exec");
        }
    }
}

impl Inner {
    /// Sees to it that a configured agent answers on its port, when it is time to; nobody waits for it.
    pub(crate) fn see_to_port(self: &Arc<Self>, live: &Arc<Live>) {
        if self.trust.is_some() && live.is_configured() && live.way.is_due() {
            self.enroll(live);
        }
    }

    /// Gives an agent credentials by whatever way there is, and goes by its port if that works then.
    pub(crate) fn enroll(self: &Arc<Self>, live: &Arc<Live>) {
        let Some(busy) = live.begin() else { return };
        let (inner, live) = (self.clone(), live.clone());
        tokio::spawn(async move {
            let _busy = busy;
            let work = async {
                // Never closed.
                let _place = inner.enrolling.acquire().await;
                inner.hand_over(&live).await
            };
            let done = tokio::select! {
                () = live.is_over() => return,
                done = work => done,
            };
            match done {
                Ok(channel) => {
                    tracing::debug!(sandbox = %live.id, run = %live.run, "its agent is reached on its own port");
                    live.go_by_port(channel);
                }
                Err(why) => live.avoid_port(&inner, &why),
            }
        });
    }

    async fn hand_over(self: &Arc<Self>, live: &Arc<Live>) -> Result<Channel, String> {
        let (trust, name) = self.door(live)?;
        let addresses = self.addresses(live).await?;
        let port = self.config.agent_port;
        let made = trust.credentials(&name).map_err(|error| error.to_string())?;
        let asked = EnrollRequest {
            run: live.run.0,
            certificate: made.certificate.into(),
            key: made.key.into(),
            authority: made.authority.into(),
            host_name: GATEWAY_NAME.to_owned(),
            addresses: addresses.iter().map(ToString::to_string).collect(),
            port: port.into(),
        };
        let mut client = AgentClient::new(live.channel(self));
        match timeout(ENROLL, client.enroll(asked)).await {
            Ok(Ok(answer)) if answer.get_ref().port == u32::from(port) => {}
            Ok(Ok(answer)) => return Err(format!("the agent answers on port {}", answer.get_ref().port)),
            Ok(Err(status)) => return Err(format!("the agent takes no credentials: {}", status.message())),
            Err(_) => return Err(format!("the agent took no credentials within {} s", ENROLL.as_secs())),
        }
        let dialed = dial::dial(trust, &addresses, port, &name).await?;
        let channel = link::channel_on(self, live, dialed.stream).await;
        channel.map_err(|error| format!("the connection to its port ended: {error}"))
    }

    fn door(&self, live: &Live) -> Result<(&Trust, String), String> {
        let trust = self.trust.as_ref().ok_or("the configuration says exec")?;
        Ok((trust, agent_name(&live.id, &live.pod).map_err(|error| error.to_string())?))
    }

    /// Of the pod that runs it.
    async fn addresses(&self, live: &Live) -> Result<Vec<IpAddr>, String> {
        let found = self.until(&live.id, ADDRESS, |view| {
            let pod = view.pod.as_ref().filter(|pod| pod.uid == live.pod)?;
            Some(pod.addresses()).filter(|all| !all.is_empty())
        });
        let found = found.await.map_err(|error| error.to_string())?;
        found.ok_or_else(|| "its pod has no address".to_owned())
    }

    /// A connection to its port, as it is known.
    pub(crate) async fn dial(&self, live: &Live) -> Result<Dialed, String> {
        let (trust, name) = self.door(live)?;
        let view = self.cache.view(&live.id).pod.filter(|pod| pod.uid == live.pod);
        let addresses = match view.map(|pod| pod.addresses()).filter(|all| !all.is_empty()) {
            Some(known) => known,
            None => self.addresses(live).await?,
        };
        dial::dial(trust, &addresses, self.config.agent_port, &name).await
    }

    /// Its port did not let us in: by exec for now, and by that it is given other credentials.
    pub(crate) fn port_failed(self: &Arc<Self>, live: &Arc<Live>, why: &str) {
        tracing::debug!(sandbox = %live.id, why, "its agent's own port does not let us in");
        live.way.leave(self.config.dial_pause);
        self.enroll(live);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test(start_paused = true)]
    async fn a_port_that_fails_is_tried_again_after_longer_and_longer_pauses() {
        let way = Way::new(true);
        assert!(way.is_by_port() && !way.is_due());
        let pause = Duration::from_secs(30);
        for seconds in [30, 60, 120, 240, 480, 600, 600] {
            way.avoid(pause);
            assert!(!way.is_by_port() && !way.is_due());
            tokio::time::advance(Duration::from_secs(seconds) - Duration::from_millis(1)).await;
            assert!(!way.is_due(), "{seconds}");
            tokio::time::advance(Duration::from_millis(2)).await;
            assert!(way.is_due(), "{seconds}");
        }
        way.go_by_port();
        way.leave(pause);
        way.avoid(pause);
        tokio::time::advance(pause).await;
        assert!(way.is_due(), "it starts anew");
    }
}
