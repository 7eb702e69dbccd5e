//! Logs: the console that the driver keeps, or the main command's output that the gateway keeps.

use std::{
    pin::Pin,
    time::{Duration, SystemTime},
};

use bytes::Bytes;
use futures::Stream;
use tokio::sync::mpsc;
use tokio_stream::wrappers::ReceiverStream;
use tonic::Status;
use torpor_proto::v1::{self, logs_request::Source};
use torpor_sandbox::Phase;

use super::Shared;
use crate::{
    error::ApiError,
    mainlog::{Log, Position, Record as Piece},
    store::Record,
};

/// How often a console that is followed is looked at.
const LOOK: Duration = Duration::from_millis(300);
/// The most of a console that is kept and shown, bytes.
const CONSOLE: usize = 1 << 20;
/// What a command has just written is on its way for less than this.
const UNDER_WAY: Duration = Duration::from_millis(150);
/// For the gateway to hear a sandbox that has just become Ready.
const HEARD_WITHIN: Duration = Duration::from_secs(2);
const BUFFER: usize = 8;

type Chunks = Pin<Box<dyn Stream<Item = Result<v1::LogChunk, Status>> + Send>>;
pub(super) type Out = mpsc::Sender<Result<v1::LogChunk, Status>>;

/// Streams logs.
pub async fn logs(service: Shared, request: v1::LogsRequest) -> Result<Chunks, Status> {
    let record = service.store.get(&request.sandbox).await?;
    let since = request.since.map(SystemTime::try_from).transpose();
    let since = since.map_err(|e| ApiError::invalid("since", e))?;
    let source = source_of(&record, request.source)?;
    if source == Source::Console && since.is_some() {
        let problem = "the lines of a console have no times; give a number of lines, or the source main";
        return Err(ApiError::invalid("since", problem).into());
    }
    let (out, chunks) = mpsc::channel(BUFFER);
    tokio::spawn(async move {
        let work = async {
            match source {
                Source::Main => main_output(&service, &record, &request, since, &out).await,
                _ => console(&service, &record, &request, &out).await,
            }
        };
        tokio::select! {
            () = work => {}
            () = service.end.cancelled() => {}
            () = out.closed() => {}
        }
    });
    Ok(Box::pin(ReceiverStream::new(chunks)))
}

/// The main command's output where there is one, unless the sandbox failed: then the console tells more.
fn source_of(record: &Record, asked: i32) -> Result<Source, ApiError> {
    match Source::try_from(asked) {
        Ok(Source::Unspecified) if record.spec.command.is_empty() || record.state.phase == Phase::Error => {
            Ok(Source::Console)
        }
        Ok(Source::Unspecified) => Ok(Source::Main),
        Ok(source) => Ok(source),
        Err(_) => Err(ApiError::invalid("source", format!("{asked} is not known"))),
    }
}

async fn send(out: &Out, data: Bytes) -> bool {
    data.is_empty() || out.send(Ok(v1::LogChunk { data, ..v1::LogChunk::default() })).await.is_ok()
}

/// Where the last `lines` lines begin; 0 for all of them.
fn last_lines(data: &[u8], lines: u32) -> usize {
    if lines == 0 {
        return 0;
    }
    let body = data.strip_suffix(b"\n").unwrap_or(data);
    let breaks = body.iter().enumerate().rev().filter(|(_, b)| **b == b'\n');
    breaks.map(|(at, _)| at + 1).nth(lines as usize - 1).unwrap_or(0)
}

/// The rest of some pieces without so many bytes at their beginning.
fn without(pieces: Vec<Piece>, mut skip: usize) -> Vec<Piece> {
    let cut = pieces.into_iter().filter_map(|mut piece| {
        let gone = skip.min(piece.data.len());
        skip -= gone;
        let _ = piece.data.split_to(gone);
        (!piece.data.is_empty()).then_some(piece)
    });
    cut.collect()
}

async fn send_pieces(out: &Out, pieces: Vec<Piece>) -> bool {
    for Piece { time, stderr, data, .. } in pieces {
        if out.send(Ok(v1::LogChunk { data, time: Some(time.into()), stderr })).await.is_err() {
            return false;
        }
    }
    true
}

async fn read(log: &std::sync::Arc<Log>, at: &mut Position) -> Option<Vec<Piece>> {
    let (log, from) = (log.clone(), *at);
    let read = tokio::task::spawn_blocking(move || {
        let mut at = from;
        log.read(&mut at).map(|pieces| (pieces, at))
    });
    match read.await {
        Ok(Ok((pieces, now))) => {
            *at = now;
            Some(pieces)
        }
        Ok(Err(error)) => {
            tracing::warn!(%error, "the output of a main command can't be read");
            None
        }
        Err(_) => None,
    }
}

/// What the main command has written; with `follow` then what it writes, until it ends or the sandbox does.
pub(super) async fn main_output(
    service: &Shared,
    record: &Record,
    request: &v1::LogsRequest,
    since: Option<SystemTime>,
    out: &Out,
) {
    let log = service.main_logs.of(&record.id);
    let mut news = log.news();
    let ready = record.state.phase == Phase::Ready && !record.spec.command.is_empty();
    let run = record.state.run;
    if ready {
        let _ = tokio::time::timeout(HEARD_WITHIN, news.wait_for(|live| live.heard(run))).await;
    }
    if ready && !request.follow {
        // Whoever asks right after a word was written finds it. Not for ever: some never pause.
        let quiet = async {
            while let Ok(Ok(())) = tokio::time::timeout(UNDER_WAY, news.changed()).await {
                if news.borrow().ended(run) {
                    break;
                }
            }
        };
        let _ = tokio::time::timeout(HEARD_WITHIN, quiet).await;
    }
    let mut at = Position::default();
    let Some(mut pieces) = read(&log, &mut at).await else { return };
    if let Some(since) = since {
        pieces.retain(|piece| piece.time >= since);
    }
    let skip = {
        let whole: Vec<u8> = pieces.iter().flat_map(|piece| piece.data.iter().copied()).collect();
        last_lines(&whole, request.tail_lines)
    };
    let pieces = without(pieces, skip);
    if !send_pieces(out, pieces).await || !request.follow || !ready {
        return;
    }
    loop {
        let ended = news.borrow_and_update().ended(run);
        let Some(pieces) = read(&log, &mut at).await else { return };
        if !send_pieces(out, pieces).await || ended || news.changed().await.is_err() {
            return;
        }
    }
}

async fn console(service: &Shared, record: &Record, request: &v1::LogsRequest, out: &Out) {
    let Some(driver) = service.drivers.get(&record.spec.driver) else { return };
    let mut seen = driver.console(&record.id, CONSOLE).await;
    let from = last_lines(&seen, request.tail_lines);
    if !send(out, Bytes::copy_from_slice(&seen[from..])).await || !request.follow {
        return;
    }
    loop {
        tokio::time::sleep(LOOK).await;
        match service.store.get(record.id.as_str()).await {
            Ok(latest) if latest.state.phase == Phase::Ready || !latest.state.phase.is_settled() => {}
            _ => return,
        }
        let now = driver.console(&record.id, CONSOLE).await;
        if now == seen {
            continue;
        }
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
        assert_eq!(last_lines(b"a\nb\nc\n", 2), 2);
        assert_eq!(last_lines(b"a\nb\nc", 1), 4);
        assert_eq!(last_lines(b"a\n", 5), 0);
        assert_eq!(last_lines(b"a\nb\n", 0), 0);
    }

    #[test]
    fn a_ring_that_turns_shows_nothing_twice() {
        assert_eq!(overlap(b"", b"abc"), 0);
        assert_eq!(overlap(b"abc", b"abcdef"), 3);
        assert_eq!(overlap(b"abcdef", b"cdefgh"), 4);
        assert_eq!(overlap(b"abcdef", b"xyz"), 0);
    }
}
