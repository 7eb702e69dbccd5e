//! The engine's events, as hints: they may be late, doubled or lost, and name actions differently on each engine. Whoever
//! gets a hint looks, so that a late word of an old run does nothing.

use std::{sync::Arc, time::Duration};

use bytes::{Buf as _, BytesMut};
use http_body_util::BodyExt as _;
use hyper::{Method, body::Incoming};
use serde_json::json;
use torpor_sandbox::SandboxId;

use crate::{
    client::{Carries, EngineError, encoded},
    container::named,
    driver::Inner,
    types::Event,
};

/// Pause before an engine that went away is tried again.
const AGAIN: Duration = Duration::from_millis(250);
/// The longest pause.
const LONG_AGAIN: Duration = Duration::from_secs(5);
/// Longest event, bytes; labels may be long.
const LONGEST: usize = 1 << 20;

/// Follows the events for as long as the driver lives.
pub(crate) async fn follow(inner: Arc<Inner>) {
    let mut pause = AGAIN;
    let mut was_there = true;
    loop {
        // Not after it: Podman answers with its first event only.
        tokio::spawn(Inner::find_out(Arc::downgrade(&inner)));
        match connect(&inner).await {
            Ok(events) => {
                if !was_there {
                    tracing::info!(engine = inner.config.engine.name(), "the engine is back");
                }
                (pause, was_there) = (AGAIN, true);
                // Whatever happened while nobody listened.
                hint_all(&inner).await;
                read(&inner, events).await;
                inner.client.forget();
                hint_all(&inner).await;
            }
            Err(error) if was_there => {
                was_there = false;
                let error = torpor_sandbox::DriverError::from(error);
                tracing::warn!(%error, "the engine is not there; its sandboxes wait until it is back");
            }
            Err(_) => {}
        }
        tokio::time::sleep(pause).await;
        pause = (pause * 2).min(LONG_AGAIN);
    }
}

async fn connect(inner: &Inner) -> Result<Incoming, EngineError> {
    let filter = json!({"type": ["container"]}).to_string();
    let path = format!("/events?filters={}", encoded(&filter));
    inner.client.stream(Method::GET, &path, Carries::Nothing, None).await
}

async fn hint_all(inner: &Inner) {
    let ids = match inner.labelled().await {
        Ok(ids) => ids,
        Err(_) => inner.store.specs.list().unwrap_or_default(),
    };
    for id in ids {
        hint(inner, id);
    }
}

fn hint(inner: &Inner, id: SandboxId) {
    let _nobody = inner.hints.send(id).is_err();
}

async fn read(inner: &Inner, mut events: Incoming) {
    let mut lines = Lines::default();
    while let Some(Ok(frame)) = events.frame().await {
        let Some(data) = frame.data_ref() else { continue };
        lines.take(data);
        while let Some(line) = lines.next() {
            if let Some(id) = subject(&line) {
                hint(inner, id);
            }
        }
        if lines.0.len() > LONGEST {
            return;
        }
    }
}

/// The sandbox that an event is about.
fn subject(line: &[u8]) -> Option<SandboxId> {
    let event: Event = serde_json::from_slice(line).ok()?;
    named(event.actor.attributes?.get("name")?)
}

/// Lines out of pieces that end anywhere.
#[derive(Debug, Default)]
pub(crate) struct Lines(BytesMut);

impl Lines {
    pub(crate) fn take(&mut self, data: &[u8]) {
        self.0.extend_from_slice(data);
    }

    /// The next whole line that is not empty.
    pub(crate) fn next(&mut self) -> Option<BytesMut> {
        loop {
            let end = self.0.iter().position(|byte| *byte == b'\n')?;
            let line = self.0.split_to(end);
            self.0.advance(1);
            if !line.iter().all(u8::is_ascii_whitespace) {
                return Some(line);
            }
        }
    }

    /// What came after the last line's end.
    pub(crate) fn rest(self) -> BytesMut {
        self.0
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_event_of_either_engine_names_its_sandbox_and_others_name_none() {
        let id = SandboxId::generate();
        let of = |name: &str| {
            format!(r#"{{"Type":"container","Action":"die","Actor":{{"Attributes":{{"name":"{name}"}}}}}}"#)
        };
        assert_eq!(subject(of(&format!("torpor-{id}")).as_bytes()), Some(id));
        for other in
            [of("web"), "{}".to_owned(), "nonsense".to_owned(), r#"{"Actor":{"Attributes":null}}"#.to_owned()]
        {
            assert_eq!(subject(other.as_bytes()), None);
        }
    }

    #[test]
    fn lines_are_found_wherever_pieces_end() {
        let mut lines = Lines::default();
        lines.take(b"{\"a\"");
        assert!(lines.next().is_none());
        lines.take(b":1}\r\n\n{}\n{");
        assert_eq!(lines.next().unwrap(), &b"{\"a\":1}\r"[..]);
        assert_eq!(lines.next().unwrap(), &b"{}"[..]);
        assert!(lines.next().is_none());
        assert_eq!(lines.rest(), &b"{"[..]);
    }
}
