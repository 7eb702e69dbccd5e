//! What has happened to a sandbox, and the words for it in its history and in the log.

use torpor_sandbox::{Event, Exit, Phase};

use crate::store::Record;

/// A verb's answer, as far as the table cares.
pub enum Done {
    /// This has happened.
    News(News),
    /// Nothing is known of it: the backend is looked at.
    Look,
}

/// What has happened, and what is written of it.
pub struct News {
    /// What.
    pub event: Event,
    /// The loan goes back with it.
    pub release: bool,
    /// For the history.
    pub why: String,
}

impl News {
    /// With the usual words.
    pub fn of(event: Event, release: bool) -> Self {
        Self { why: why(&event), event, release }
    }
}

/// The reason of a change that nobody asked for, for the history.
pub fn why(event: &Event) -> String {
    match event {
        Event::Request(request) => format!("{}, asked for meanwhile", request.verb()),
        Event::Created => "disk made".to_owned(),
        Event::Started(_) => "agent connected".to_owned(),
        Event::Stopped { flushed: Some(true), .. } => "stopped, disk flushed by the guest".to_owned(),
        Event::Stopped { flushed: Some(false), .. } => "stopped, not flushed by the guest".to_owned(),
        Event::Stopped { flushed: None, .. } => "seen to be stopped".to_owned(),
        Event::Deleted => "nothing is left".to_owned(),
        Event::Ended(ended) => match &ended.exit {
            Exit::Code(code) => format!("main command ended with code {code}"),
            Exit::PowerOff => "guest switched itself off".to_owned(),
            Exit::Panic(text) => format!("guest kernel panic: {text}"),
            Exit::Lost(text) => format!("compute lost: {text}"),
            Exit::Interrupted(text) => format!("compute interrupted: {text}"),
        },
        Event::Failed(failure) => format!("{} failed: {}: {}", failure.step, failure.reason, failure.message),
        Event::HostRestarted => "host was restarted".to_owned(),
    }
}

/// Says a change of phase.
pub fn log_change(before: &Record, after: &Record, event: &Event) {
    if before.state.phase == after.state.phase {
        return;
    }
    let (id, name, from, to) = (&after.id, &after.name, before.state.phase, after.state.phase);
    if to == Phase::Error {
        tracing::error!(%id, name, %from, %to, why = why(event));
    } else {
        tracing::info!(%id, name, %from, %to, why = why(event));
    }
}
