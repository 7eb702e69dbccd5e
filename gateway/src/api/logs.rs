//! Logs: the console that the driver keeps, or the main command's output that the agent keeps.

use std::{pin::Pin, time::Duration};

use bytes::Bytes;
use futures::{Stream, StreamExt as _};
use tokio::sync::mpsc;
use tokio_stream::wrappers::ReceiverStream;
use tonic::Status;
use torpor_proto::{
    agent::v1 as agent,
    v1::{self, logs_request::Source},
};

use super::{Shared, exec, to_status};
use crate::{error::ApiError, store::Record};

/// How often a console that is followed is looked at.
const LOOK: Duration = Duration::from_millis(300);
/// The most of a console that is kept and shown, bytes.
const CONSOLE: usize = 1 << 20;
/// The agent replays what it has kept in one go: a pause means that this was all.
const PAUSE: Duration = Duration::from_millis(500);
const BUFFER: usize = 8;

type Chunks = Pin<Box<dyn Stream<Item = Result<v1::LogChunk, Status>> + Send>>;
type Out = mpsc::Sender<Result<v1::LogChunk, Status>>;

/// Streams logs.
pub async fn logs(service: Shared, request: v1::LogsRequest) -> Result<Chunks, Status> {
    let record = service.store.get(&request.sandbox).await.map_err(|e| to_status(e.into()))?;
    let source = match Source::try_from(request.source) {
        Ok(Source::Unspecified)
            if record.spec.command.is_empty() || record.state.phase != torpor_sandbox::Phase::Ready =>
        {
            Source::Console
        }
        Ok(Source::Unspecified) => Source::Main,
        Ok(source) => source,
        Err(_) => {
            return Err(to_status(ApiError::invalid("source", format!("{} is not known", request.source))));
        }
    };
    let (out, chunks) = mpsc::channel(BUFFER);
    if source == Source::Main {
        let (record, channel, session) = service.connect(&request.sandbox).await.map_err(to_status)?;
        let mut client = agent::agent_client::AgentClient::new(channel);
        let events =
            client.events(agent::EventsRequest {}).await.map_err(|s| exec::agent_failed(&record, &s))?;
        tokio::spawn(async move {
            tokio::select! {
                () = main_output(events.into_inner(), &request, &out) => {}
                () = session.cancelled() => {}
                () = service.end.cancelled() => {}
                () = out.closed() => {}
            }
        });
    } else {
        tokio::spawn(async move {
            tokio::select! {
                () = console(&service, &record, &request, &out) => {}
                () = service.end.cancelled() => {}
                () = out.closed() => {}
            }
        });
    }
    Ok(Box::pin(ReceiverStream::new(chunks)))
}

async fn send(out: &Out, data: Bytes) -> bool {
    data.is_empty() || out.send(Ok(v1::LogChunk { data })).await.is_ok()
}

/// The last `lines` lines; all for 0.
fn last_lines(data: &[u8], lines: u32) -> &[u8] {
    if lines == 0 {
        return data;
    }
    let body = data.strip_suffix(b"\n").unwrap_or(data);
    let breaks = body.iter().enumerate().rev().filter(|(_, b)| **b == b'\n');
    let from = breaks.map(|(at, _)| at + 1).nth(lines as usize - 1).unwrap_or(0);
    &data[from..]
}

async fn main_output(mut events: tonic::Streaming<agent::Event>, request: &v1::LogsRequest, out: &Out) {
    let mut kept = Vec::new();
    // First what the agent has kept, so that only its last lines are shown when asked for.
    while let Ok(Some(Ok(event))) = tokio::time::timeout(PAUSE, events.next()).await {
        match event.kind {
            Some(agent::event::Kind::MainOutput(output)) => kept.extend_from_slice(&output.data),
            Some(agent::event::Kind::MainExit(_) | agent::event::Kind::KeepAlive(_)) | None => break,
        }
        if kept.len() > CONSOLE {
            break;
        }
    }
    if !send(out, Bytes::copy_from_slice(last_lines(&kept, request.tail_lines))).await || !request.follow {
        return;
    }
    while let Some(Ok(event)) = events.next().await {
        match event.kind {
            Some(agent::event::Kind::MainOutput(output)) => {
                if !send(out, output.data).await {
                    return;
                }
            }
            Some(agent::event::Kind::MainExit(_)) => return,
            Some(agent::event::Kind::KeepAlive(_)) | None => {}
        }
    }
}

async fn console(service: &Shared, record: &Record, request: &v1::LogsRequest, out: &Out) {
    let Some(driver) = service.drivers.get(&record.spec.driver) else { return };
    let mut seen = driver.console(&record.id, CONSOLE).await;
    if !send(out, Bytes::copy_from_slice(last_lines(&seen, request.tail_lines))).await || !request.follow {
        return;
    }
    loop {
        tokio::time::sleep(LOOK).await;
        match service.store.get(record.id.as_str()).await {
            Ok(latest)
                if latest.state.phase == torpor_sandbox::Phase::Ready || !latest.state.phase.is_settled() => {
            }
            _ => return,
        }
        let now = driver.console(&record.id, CONSOLE).await;
        if !send(out, Bytes::copy_from_slice(&now[overlap(&seen, &now)..])).await {
            return;
        }
        seen = now;
    }
}

/// How much of the beginning of `now` was the end of `seen`: the console is kept in a ring that loses its beginning.
/// In time linear in both (Knuth, Morris and Pratt), since the guest chooses what stands there.
fn overlap(seen: &[u8], now: &[u8]) -> usize {
    let fall = borders(now);
    let mut matched = 0;
    for &byte in seen {
        while matched > 0 && (matched == now.len() || now[matched] != byte) {
            matched = fall[matched - 1];
        }
        if now.get(matched) == Some(&byte) {
            matched += 1;
        }
    }
    matched
}

/// For every beginning of `text`, how long its longest border is: a proper beginning that is also its end.
fn borders(text: &[u8]) -> Vec<usize> {
    let mut borders = vec![0; text.len()];
    let mut length = 0;
    for at in 1..text.len() {
        while length > 0 && text[at] != text[length] {
            length = borders[length - 1];
        }
        if text[at] == text[length] {
            length += 1;
        }
        borders[at] = length;
    }
    borders
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_last_lines_are_whole_lines() {
        assert_eq!(last_lines(b"a\nb\nc\n", 2), b"b\nc\n");
        assert_eq!(last_lines(b"a\nb\nc", 1), b"c");
        assert_eq!(last_lines(b"a\n", 5), b"a\n");
        assert_eq!(last_lines(b"a\nb\n", 0), b"a\nb\n");
    }

    #[test]
    fn a_ring_that_turns_shows_nothing_twice() {
        assert_eq!(overlap(b"", b"abc"), 0);
        assert_eq!(overlap(b"abc", b"abcdef"), 3);
        assert_eq!(overlap(b"abcdef", b"cdefgh"), 4);
        assert_eq!(overlap(b"abcdef", b"xyz"), 0);
    }
}
