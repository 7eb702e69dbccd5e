//! Whether what a sandbox serves is served: each declared endpoint is looked at while its sandbox is Ready, at a modest rate.
//! The sandbox's agent connects, from inside; what it finds is classified here. Results are of the present, and not kept
//! over a restart of the gateway.

use std::{
    collections::{HashMap, HashSet},
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::{Duration, SystemTime},
};

use bytes::Bytes;
use tokio::{
    sync::{Semaphore, broadcast::error::RecvError},
    time::{sleep, timeout},
};
use torpor_proto::agent::v1::{ForwardInput, forward_input::Kind};
use torpor_sandbox::{Endpoint, Phase, SandboxId, words::said};

use crate::{
    forward::{self, Forward, NoForward, Piece},
    service::Service,
    store::Record,
};

/// Between two looks at one sandbox.
const PAUSE: Duration = Duration::from_secs(5);
/// The same as long as something does not serve: servers start a moment after their sandbox.
const SHORT_PAUSE: Duration = Duration::from_secs(1);
/// How often that is, before the longer pause.
const SHORT_PAUSES: u32 = 20;
/// How long one endpoint may take to answer.
const PATIENCE: Duration = Duration::from_secs(3);
/// Looks at once, of all sandboxes.
const AT_ONCE: usize = 64;
/// Of an answer, no more is read: its first line is in there, or it is none of HTTP.
const MOST_READ: usize = 4096;

/// What came of a look.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Finding {
    /// It serves: the connection was taken, and a GET was answered with a status below 400.
    Ok {
        /// Of HTTP.
        status: Option<u16>,
    },
    /// Nothing listens there.
    Refused(String),
    /// No answer within a few seconds.
    Timeout,
    /// The connection broke before an answer.
    Reset,
    /// What was answered is no HTTP.
    BadHttp,
    /// HTTP, with a status from 400 on.
    HttpError(u16),
    /// The agent could not be asked.
    Unknown(String),
}

/// A finding with its times.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Observation {
    /// What.
    pub finding: Finding,
    /// When it was found last.
    pub observed: SystemTime,
    /// Since when it has been so.
    pub since: SystemTime,
}

/// What was found last of a sandbox's endpoints, by their names; and what they were then.
type Seen = HashMap<String, (Endpoint, Observation)>;

/// The last observations, by sandbox and the endpoint's name.
#[derive(Default)]
pub struct Endpoints {
    seen: Mutex<HashMap<SandboxId, Seen>>,
    /// Sandboxes that somebody looks at.
    looked_at: Mutex<HashSet<SandboxId>>,
}

fn locked<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Endpoints {
    /// What was found last of an endpoint, as it is declared now.
    pub fn get(&self, id: &SandboxId, endpoint: &Endpoint) -> Option<Observation> {
        let seen = locked(&self.seen);
        let (of, observation) = seen.get(id)?.get(&endpoint.name)?;
        (of == endpoint).then(|| observation.clone())
    }

    /// Forgets what is not declared any more.
    fn keep(&self, id: &SandboxId, declared: &[Endpoint]) {
        if let Some(ours) = locked(&self.seen).get_mut(id) {
            ours.retain(|_, (of, _)| declared.contains(of));
        }
    }

    /// Whether it is another finding than the last one.
    fn put(&self, id: &SandboxId, endpoint: &Endpoint, finding: Finding) -> bool {
        let now = SystemTime::now();
        let mut seen = locked(&self.seen);
        let ours = seen.entry(id.clone()).or_default();
        let before =
            ours.get(&endpoint.name).filter(|(of, before)| of == endpoint && before.finding == finding);
        let (since, changed) = (before.map_or(now, |(_, before)| before.since), before.is_none());
        let observation = Observation { finding, observed: now, since };
        ours.insert(endpoint.name.clone(), (endpoint.clone(), observation));
        changed
    }
}

impl Service {
    /// Looks at the endpoints of every Ready sandbox until the gateway ends.
    pub async fn look_at_endpoints(self: Arc<Self>) {
        let mut changes = self.store.subscribe();
        let places = Arc::new(Semaphore::new(AT_ONCE));
        self.look_at_all(&places).await;
        loop {
            let change = tokio::select! {
                change = changes.recv() => change,
                () = self.end.cancelled() => return,
            };
            match change {
                Ok(change) if change.gone => drop(locked(&self.endpoints.seen).remove(&change.record.id)),
                Ok(change) => {
                    self.endpoints.keep(&change.record.id, &change.record.spec.endpoints);
                    self.look_at(&change.record, &places);
                }
                Err(RecvError::Lagged(_)) => self.look_at_all(&places).await,
                Err(RecvError::Closed) => return,
            }
        }
    }

    async fn look_at_all(self: &Arc<Self>, places: &Arc<Semaphore>) {
        let ids = match self.store.in_phase(Phase::Ready).await {
            Ok(ids) => ids,
            Err(error) => return tracing::error!(%error, "cannot read whose endpoints to look at"),
        };
        for id in ids {
            if let Ok(record) = self.store.get(id.as_str()).await {
                self.look_at(&record, places);
            }
        }
    }

    /// Sees to it that one task looks at a Ready sandbox that declares something.
    fn look_at(self: &Arc<Self>, record: &Record, places: &Arc<Semaphore>) {
        let declares = record.state.phase == Phase::Ready && !record.spec.endpoints.is_empty();
        if !declares || !locked(&self.endpoints.looked_at).insert(record.id.clone()) {
            return;
        }
        let (this, id, places) = (self.clone(), record.id.clone(), places.clone());
        tokio::spawn(async move {
            tokio::select! {
                () = this.keep_looking(&id, &places) => {}
                () = this.end.cancelled() => {}
            }
        });
    }

    /// Until the sandbox leaves Ready.
    async fn keep_looking(&self, id: &SandboxId, places: &Semaphore) {
        let mut short = SHORT_PAUSES;
        loop {
            if self.ready_record(id).await.is_none() {
                locked(&self.endpoints.looked_at).remove(id);
                // It may have come back in between, unheard because somebody seemed to look at it.
                if self.ready_record(id).await.is_none()
                    || !locked(&self.endpoints.looked_at).insert(id.clone())
                {
                    return;
                }
            }
            let session = self.sessions.join(id);
            let Some(record) = self.ready_record(id).await else { continue };
            let serves = tokio::select! {
                serves = self.look_once(&record, places) => serves,
                () = session.cancelled() => continue,
            };
            short = if serves { SHORT_PAUSES } else { short.saturating_sub(1) };
            let pause = if serves || short == 0 { PAUSE } else { SHORT_PAUSE };
            tokio::select! {
                () = sleep(pause) => {}
                () = session.cancelled() => {}
            }
        }
    }

    async fn ready_record(&self, id: &SandboxId) -> Option<Record> {
        self.store.get(id.as_str()).await.ok().filter(|record| record.state.phase == Phase::Ready)
    }

    /// Whether all of them serve.
    async fn look_once(&self, record: &Record, places: &Semaphore) -> bool {
        let mut all = true;
        for endpoint in &record.spec.endpoints {
            let Ok(_place) = places.acquire().await else { return all };
            let finding = self.find(record, endpoint).await;
            all &= matches!(finding, Finding::Ok { .. });
            if self.endpoints.put(&record.id, endpoint, finding) {
                self.progress.noticed(&record.id);
            }
        }
        all
    }

    async fn find(&self, record: &Record, endpoint: &Endpoint) -> Finding {
        let unknown = |text: String| Finding::Unknown(said(&text));
        let driver = match self.driver(&record.spec.driver) {
            Ok(driver) => driver,
            Err(error) => return unknown(error.to_string()),
        };
        let channel = match driver.agent(&record.id).await {
            Ok(channel) => channel,
            Err(error) => return unknown(error.to_string()),
        };
        let look = async {
            match forward::open(channel, endpoint.port).await {
                Err(NoForward::Refused(message)) => Finding::Refused(message),
                Err(NoForward::TooMany(message)) => Finding::Unknown(message),
                Err(NoForward::Failed(status)) => unknown(status.message().to_owned()),
                Ok(forward) => match &endpoint.http_path {
                    None => Finding::Ok { status: None },
                    Some(path) => get(forward, endpoint.port, path).await,
                },
            }
        };
        timeout(PATIENCE, look).await.unwrap_or(Finding::Timeout)
    }
}

/// Asks for a path by HTTP/1.1; only the first line of the answer matters.
async fn get(mut forward: Forward, port: u16, path: &str) -> Finding {
    let request = format!(
        "GET {path} HTTP/1.1\r\nHost: localhost:{port}\r\nUser-Agent: torpor\r\nAccept: */*\r\nConnection: close\r\n\r\n"
    );
    let data = ForwardInput { kind: Some(Kind::Data(Bytes::from(request))) };
    if forward.input.send(data).await.is_err() {
        return Finding::Reset;
    }
    let mut answer = Vec::new();
    loop {
        match forward::next(&mut forward.output).await {
            Some(Piece::Data(data)) => {
                answer.extend_from_slice(&data[..data.len().min(MOST_READ - answer.len())]);
                if answer.contains(&b'\n') || answer.len() >= MOST_READ {
                    return judge(&answer);
                }
            }
            Some(Piece::Close) if answer.is_empty() => return Finding::Reset,
            Some(Piece::Close) => return judge(&answer),
            None => return Finding::Reset,
        }
    }
}

/// What the first line of an answer says (RFC 9112, section 4).
fn judge(answer: &[u8]) -> Finding {
    let line = answer.split(|byte| *byte == b'\n').next().unwrap_or_default();
    let line = std::str::from_utf8(line).unwrap_or_default();
    let mut words = line.trim_end_matches('\r').splitn(3, ' ');
    let version = words.next().is_some_and(|word| matches!(word, "HTTP/1.0" | "HTTP/1.1"));
    let status = words.next().filter(|word| word.len() == 3).and_then(|word| word.parse::<u16>().ok());
    match status.filter(|status| version && (100..600).contains(status)) {
        None => Finding::BadHttp,
        Some(status) if status >= 400 => Finding::HttpError(status),
        Some(status) => Finding::Ok { status: Some(status) },
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_first_line_of_an_answer_is_judged_and_nothing_else_is_believed() {
        assert_eq!(judge(b"HTTP/1.1 200 OK\r\nX: y\r\n"), Finding::Ok { status: Some(200) });
        assert_eq!(judge(b"HTTP/1.0 301"), Finding::Ok { status: Some(301) });
        assert_eq!(judge(b"HTTP/1.1 503 busy\r\n"), Finding::HttpError(503));
        for bad in [
            &b""[..],
            b"SSH-2.0-x\r\n",
            b"HTTP/2 200\n",
            b"HTTP/1.1 2000\n",
            b"HTTP/1.1 +20 x\n",
            b"\xff\xfe",
        ] {
            assert_eq!(judge(bad), Finding::BadHttp, "{bad:?}");
        }
    }
}
