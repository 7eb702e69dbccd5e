//! Logs as lines.

use futures::StreamExt as _;
use prost_types::Timestamp;
use tonic::Status;
use torpor_proto::{
    openshell::v1 as os,
    v1::{self, logs_request::Source, sandboxes_server::Sandboxes as _},
};

use super::{Events, OpenShellApi, call::Call};
use crate::error::ApiError;

/// Levels, the least first; what a sandbox writes is all INFO.
const LEVELS: [&str; 5] = ["TRACE", "DEBUG", "INFO", "WARN", "ERROR"];
const OURS: &str = "INFO";
/// Most bytes of one answer, since clients take messages of 4 MiB.
const LARGEST: usize = 2 << 20;
/// Phase changes that an answer holds, at most.
const TRANSITIONS: i32 = 500;

/// Where lines come from.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Sources {
    /// Of the sandbox; none: nothing of it.
    pub sandbox: Option<Source>,
    /// Phase changes.
    pub gateway: bool,
}

/// What is wanted: by the names of the sources, and a least level.
///
/// # Errors
/// `INVALID_ARGUMENT`.
pub fn wanted(names: &[String], least: &str) -> Result<Sources, ApiError> {
    let level = match least.to_uppercase().as_str() {
        "" => Some(0),
        "WARNING" => Some(3),
        level => LEVELS.iter().position(|known| *known == level),
    };
    let level = level.ok_or_else(|| {
        let problem = format!("'{}' is none of {}", least.escape_debug(), LEVELS.join(", "));
        ApiError::invalid("min_level", problem)
    })?;
    let mut sources = Sources::default();
    for name in names {
        match name.as_str() {
            "gateway" => sources.gateway = true,
            "sandbox" => sources.sandbox = Some(Source::Unspecified),
            "console" => sources.sandbox = Some(Source::Console),
            "main" => sources.sandbox = Some(Source::Main),
            other => {
                let problem =
                    format!("'{}': sandbox, console, main and gateway are known", other.escape_debug());
                return Err(ApiError::invalid("sources", problem));
            }
        }
    }
    if names.is_empty() {
        sources.sandbox = Some(Source::Unspecified);
    }
    if LEVELS[level..].contains(&OURS) { Ok(sources) } else { Ok(Sources::default()) }
}

fn name(source: Source) -> &'static str {
    match source {
        Source::Console => "console",
        Source::Main => "main",
        _ => "sandbox",
    }
}

/// Makes lines of pieces.
pub struct Lines {
    sandbox: String,
    source: &'static str,
    rest: Vec<u8>,
    time: Option<Timestamp>,
    stderr: bool,
}

impl Lines {
    /// Of a sandbox's source.
    pub fn new(sandbox: &str, source: Source) -> Self {
        Self {
            sandbox: sandbox.to_owned(),
            source: name(source),
            rest: Vec::new(),
            time: None,
            stderr: false,
        }
    }

    /// The lines that are whole now. A piece is of the stream that its first line is of.
    pub fn push(&mut self, piece: &v1::LogChunk) -> Vec<os::SandboxLogLine> {
        (self.time, self.stderr) = (piece.time, piece.stderr);
        let begin = self.rest.len();
        self.rest.extend_from_slice(&piece.data);
        // What was left over ends no line.
        let Some(end) = piece.data.iter().rposition(|byte| *byte == b'\n') else {
            // A line without an end is cut, so that nobody makes the gateway hold it all.
            let whole = if self.rest.len() > LARGEST { std::mem::take(&mut self.rest) } else { Vec::new() };
            return self.lines(&whole);
        };
        let end = begin + end;
        let rest = self.rest.split_off(end + 1);
        let whole = std::mem::replace(&mut self.rest, rest);
        self.lines(&whole[..end])
    }

    /// What is left at the end.
    pub fn finish(mut self) -> Vec<os::SandboxLogLine> {
        let rest = std::mem::take(&mut self.rest);
        self.lines(&rest)
    }

    fn lines(&self, data: &[u8]) -> Vec<os::SandboxLogLine> {
        if data.is_empty() {
            return Vec::new();
        }
        data.split(|byte| *byte == b'\n').map(|line| self.line(line)).collect()
    }

    fn line(&self, text: &[u8]) -> os::SandboxLogLine {
        let text = String::from_utf8_lossy(text.strip_suffix(b"\r").unwrap_or(text));
        os::SandboxLogLine {
            sandbox_id: self.sandbox.clone(),
            event_time: self.time,
            level: OURS.to_owned(),
            target: self.source.to_owned(),
            message: text.into_owned(),
            source: "sandbox".to_owned(),
            fields: self.stderr.then(|| ("stream".to_owned(), "stderr".to_owned())).into_iter().collect(),
        }
    }
}

/// The pieces that a sandbox has written.
///
/// # Errors
/// As `torpor.v1.Sandboxes/Logs`.
pub async fn pieces(
    api: &OpenShellApi,
    call: &Call,
    key: &str,
    source: Source,
    tail: u32,
    follow: bool,
) -> Result<Events<v1::LogChunk>, Status> {
    let request = v1::LogsRequest {
        sandbox: key.to_owned(),
        source: source.into(),
        tail_lines: tail,
        follow,
        ..v1::LogsRequest::default()
    };
    Ok(api.sandboxes().logs(call.ask(call.caller.current(), request)).await?.into_inner())
}

/// Phase changes, the oldest first.
///
/// # Errors
/// As `torpor.v1.Sandboxes/History`.
pub async fn transitions(api: &OpenShellApi, call: &Call, key: &str) -> Result<Vec<v1::Transition>, Status> {
    let request =
        v1::HistoryRequest { sandbox: key.to_owned(), page_size: TRANSITIONS, page_token: String::new() };
    let page = api.sandboxes().history(call.ask(call.caller.current(), request)).await?.into_inner();
    let mut transitions = page.transitions;
    transitions.reverse();
    Ok(transitions)
}

/// "Ready" of PHASE_READY; empty for none.
pub fn phase_name(phase: v1::Phase) -> String {
    let name = phase.as_str_name().trim_start_matches("PHASE_");
    if phase == v1::Phase::Unspecified {
        return String::new();
    }
    name.chars().take(1).chain(name.chars().skip(1).map(|c| c.to_ascii_lowercase())).collect()
}

fn transition_line(id: &str, transition: v1::Transition) -> os::SandboxLogLine {
    let (from, to) = (phase_name(transition.from()), phase_name(transition.to()));
    let mut fields = std::collections::BTreeMap::new();
    fields.insert("run".to_owned(), transition.run.to_string());
    fields.insert("version".to_owned(), transition.version.to_string());
    os::SandboxLogLine {
        sandbox_id: id.to_owned(),
        event_time: transition.time,
        level: OURS.to_owned(),
        target: "lifecycle".to_owned(),
        message: format!("{from} -> {to}: {}", transition.why),
        source: "gateway".to_owned(),
        fields,
    }
}

/// Whether it is not older; what has no time never is.
pub fn after(time: Option<&Timestamp>, since: Option<&Timestamp>) -> bool {
    match (time, since) {
        (Some(time), Some(since)) => (time.seconds, time.nanos) >= (since.seconds, since.nanos),
        _ => true,
    }
}

/// What is there now.
pub async fn get(
    api: &OpenShellApi,
    call: Call,
    message: os::GetSandboxLogsRequest,
) -> Result<os::GetSandboxLogsResponse, Status> {
    let record = call.record(&api.service, message.workspace_scope, &message.sandbox).await?;
    let sources = wanted(&message.sources, &message.min_level)?;
    let id = record.id.as_str();
    let mut logs = Vec::new();
    if sources.gateway {
        let since = message.since_time.as_ref();
        let transitions = transitions(api, &call, id).await?.into_iter();
        let recent = transitions.filter(|transition| after(transition.time.as_ref(), since));
        logs.extend(recent.map(|transition| transition_line(id, transition)));
    }
    if let Some(source) = sources.sandbox {
        // The last lines are chosen from those that are not too old.
        let tail = if message.since_time.is_some() { 0 } else { message.lines };
        let mut pieces = pieces(api, &call, id, source, tail, false).await?;
        let mut lines = Lines::new(id, source);
        while let Some(piece) = pieces.next().await {
            logs.extend(lines.push(&piece?));
        }
        logs.extend(lines.finish());
        // What has no time may be as new as any.
        logs.retain(|line| after(line.event_time.as_ref(), message.since_time.as_ref()));
    }
    let buffer_total = u32::try_from(logs.len()).unwrap_or(u32::MAX);
    let most = if message.lines == 0 { usize::MAX } else { message.lines as usize };
    let mut bytes = 0;
    let fit = logs.iter().rev().take(most).take_while(|line| {
        bytes += line.message.len() + 100;
        bytes <= LARGEST
    });
    let logs = logs.split_off(logs.len() - fit.count());
    Ok(os::GetSandboxLogsResponse { logs, buffer_total })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pieces_become_whole_lines() {
        let mut lines = Lines::new("sb-1", Source::Console);
        let text = |lines: Vec<os::SandboxLogLine>| lines.into_iter().map(|l| l.message).collect::<Vec<_>>();
        let piece = |data: &'static [u8]| v1::LogChunk { data: data.into(), ..v1::LogChunk::default() };
        assert!(lines.push(&piece(b"hel")).is_empty());
        assert_eq!(text(lines.push(&piece(b"lo\r\nworld\n\nrest"))), ["hello", "world", ""]);
        assert_eq!(text(lines.push(&piece(b"\xff\n"))), ["rest\u{fffd}"]);
        let told = lines.push(&v1::LogChunk { data: b"x\n".as_slice().into(), stderr: true, ..piece(b"") });
        assert_eq!(told[0].fields["stream"], "stderr");
        assert!(lines.push(&piece(b"end")).is_empty());
        assert_eq!(text(lines.finish()), ["end"]);
    }

    #[test]
    fn sources_and_levels_are_known_or_refused() {
        let names = |names: &[&str]| names.iter().map(|name| (*name).to_owned()).collect::<Vec<_>>();
        assert_eq!(wanted(&[], "").unwrap().sandbox, Some(Source::Unspecified));
        assert!(wanted(&names(&["gateway"]), "info").unwrap().gateway);
        assert_eq!(wanted(&names(&["gateway", "main"]), "ERROR").unwrap(), Sources::default());
        assert!(wanted(&names(&["kernel"]), "").is_err());
        assert!(wanted(&[], "loud").is_err());
    }

    #[test]
    fn phases_have_names_for_people() {
        assert_eq!(phase_name(v1::Phase::Ready), "Ready");
        assert_eq!(phase_name(v1::Phase::Unspecified), "");
    }
}
