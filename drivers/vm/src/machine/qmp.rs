//! The QEMU machine protocol (docs/interop/qmp-spec in QEMU's sources): JSON lines over a Unix socket.

use std::{io, path::Path, time::Duration};

use serde::Deserialize;
use serde_json::{Value, json};
use tokio::time::timeout;
use torpor_sandbox::DriverError;

use super::{GuestEnd, Monitor, News, lines::Lines};

/// QEMU answers at once unless its main loop hangs.
const ANSWER: Duration = Duration::from_secs(5);
/// The longest line that makes sense: a console ring in base64 fits many times over.
const LONGEST: usize = 4 << 20;

/// A connection to QEMU's monitor.
#[derive(Debug)]
pub(crate) struct Qmp {
    lines: Lines,
    /// Seen on the way to something else.
    end: Option<GuestEnd>,
    /// A disk without room, not yet handed on.
    full: bool,
    ring: &'static str,
    ring_bytes: usize,
    /// Number of the last command: answers carry it, so that one that nobody waits for any more is told from the next.
    last: u64,
}

#[derive(Deserialize)]
struct Line {
    #[serde(rename = "return")]
    result: Option<Value>,
    error: Option<Failure>,
    event: Option<String>,
    id: Option<u64>,
    #[serde(default)]
    data: Value,
}

#[derive(Deserialize)]
struct Failure {
    desc: String,
}

impl Qmp {
    /// Connects and finds out whether the guest has ended already. `ring` is the console's ring buffer device.
    pub(crate) async fn connect(path: &Path, ring: &'static str, ring_bytes: usize) -> io::Result<Self> {
        let lines = Lines::connect(path, "QEMU's monitor", LONGEST).await?;
        let mut qmp = Self { lines, end: None, full: false, ring, ring_bytes, last: 0 };
        qmp.ask(json!({ "execute": "qmp_capabilities" })).await?;
        let status = qmp.ask(json!({ "execute": "query-status" })).await?;
        qmp.end = qmp.end.or_else(|| end_of_status(status["status"].as_str().unwrap_or_default()));
        Ok(qmp)
    }

    fn note(&mut self, line: &Line) {
        self.end = self.end.or(end_of_event(line));
        self.full |= line.event.as_deref() == Some("BLOCK_IO_ERROR") && is_for_room(&line.data);
    }

    /// One command and its answer; events in between are kept.
    async fn ask(&mut self, mut command: Value) -> io::Result<Value> {
        self.last += 1;
        let id = self.last;
        command["id"] = id.into();
        let exchange = async {
            self.lines.send(&command.to_string()).await?;
            loop {
                let line: Line = self.lines.next().await?;
                if line.id.is_some_and(|answered| answered != id) {
                    continue;
                }
                if let Some(error) = line.error {
                    return Err(io::Error::other(format!("QEMU refused {command}: {}", error.desc)));
                }
                if let Some(result) = line.result {
                    return Ok(result);
                }
                self.note(&line);
            }
        };
        timeout(ANSWER, exchange)
            .await
            .map_err(|_| io::Error::new(io::ErrorKind::TimedOut, "QEMU's monitor does not answer"))?
    }
}

fn end_of_status(status: &str) -> Option<GuestEnd> {
    match status {
        "shutdown" => Some(GuestEnd::Reset),
        "guest-panicked" => Some(GuestEnd::Panic),
        "internal-error" | "io-error" => Some(GuestEnd::Crash),
        _ => None,
    }
}

/// Whether an error was for lack of room. QEMU has a word for that, `nospace`, where errors are told in the device's status,
/// which takes a policy that stops the guest; with ours there is only the system's text.
fn is_for_room(data: &Value) -> bool {
    data["nospace"] == true
        || matches!(data["reason"].as_str(), Some("No space left on device" | "Disk quota exceeded"))
}

fn end_of_event(line: &Line) -> Option<GuestEnd> {
    match (line.event.as_deref()?, line.data["reason"].as_str().unwrap_or_default()) {
        ("SHUTDOWN", "guest-shutdown") => Some(GuestEnd::PowerOff),
        ("SHUTDOWN", "guest-panic") | ("GUEST_PANICKED", _) => Some(GuestEnd::Panic),
        ("SHUTDOWN", "guest-reset") => Some(GuestEnd::Reset),
        _ => None,
    }
}

#[async_trait::async_trait]
impl Monitor for Qmp {
    async fn news(&mut self) -> io::Result<News> {
        loop {
            if let Some(end) = self.end {
                return Ok(News::Ended(end));
            }
            if std::mem::take(&mut self.full) {
                return Ok(News::DiskFull);
            }
            let line: Line = self.lines.next().await?;
            self.note(&line);
            // The machine also stops when KVM gives up on the guest; only the status says so.
            if self.end.is_none() && line.event.as_deref() == Some("STOP") {
                let status = self.ask(json!({ "execute": "query-status" })).await?;
                self.end = self.end.or_else(|| end_of_status(status["status"].as_str().unwrap_or_default()));
            }
        }
    }

    async fn console(&mut self) -> io::Result<Vec<u8>> {
        let arguments = json!({ "device": self.ring, "size": self.ring_bytes, "format": "base64" });
        let text = self.ask(json!({ "execute": "ringbuf-read", "arguments": arguments })).await?;
        decode_base64(text.as_str().unwrap_or_default()).ok_or_else(|| {
            io::Error::new(io::ErrorKind::InvalidData, "QEMU sent a console that is not base64")
        })
    }

    async fn grow_disk(&mut self, _bytes: u64) -> io::Result<Result<u64, DriverError>> {
        // QEMU would lay the new tables out in a way that the overlay crate doesn't.
        let text = "a running disk of a QEMU machine; suspend the sandbox first".to_owned();
        Ok(Err(DriverError::Unsupported(text)))
    }

    async fn quit(&mut self) -> io::Result<()> {
        match self.ask(json!({ "execute": "quit" })).await {
            // It may be gone before its answer is.
            Err(error)
                if matches!(error.kind(), io::ErrorKind::UnexpectedEof | io::ErrorKind::ConnectionReset) =>
            {
                Ok(())
            }
            other => other.map(drop),
        }
    }
}

/// Base64 with padding (RFC 4648, section 4).
fn decode_base64(text: &str) -> Option<Vec<u8>> {
    let mut bytes = Vec::with_capacity(text.len() / 4 * 3);
    let (mut bits, mut count) = (0u32, 0);
    for letter in text.bytes().filter(|letter| *letter != b'=') {
        let value = match letter {
            b'A'..=b'Z' => letter - b'A',
            b'a'..=b'z' => letter - b'a' + 26,
            b'0'..=b'9' => letter - b'0' + 52,
            b'+' => 62,
            b'/' => 63,
            _ => return None,
        };
        bits = bits << 6 | u32::from(value);
        count += 6;
        if count >= 8 {
            count -= 8;
            bytes.push((bits >> count) as u8);
            bits &= (1 << count) - 1;
        }
    }
    Some(bytes)
}

#[cfg(test)]
mod tests {
    use tokio::{
        io::{AsyncReadExt as _, AsyncWriteExt as _},
        net::UnixListener,
    };

    use super::*;

    #[test]
    fn base64_of_every_length_is_decoded_and_nonsense_is_not() {
        let decoded = ["", "Zg==", "Zm8=", "Zm9v", "//79"].map(|text| decode_base64(text).unwrap());
        assert_eq!(decoded, [&b""[..], b"f", b"fo", b"foo", &[255, 254, 253]]);
        assert_eq!(decode_base64("Z*=="), None);
    }

    /// Answers each received line with the lines of the script.
    async fn scripted(script: Vec<&'static str>) -> (tempfile::TempDir, io::Result<Qmp>) {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("qmp");
        let listener = UnixListener::bind(&path).unwrap();
        tokio::spawn(async move {
            let (mut stream, _) = listener.accept().await.unwrap();
            stream.write_all(b"{\"QMP\": {}}\n").await.unwrap();
            let mut taken = [0; 4096];
            for answer in script {
                assert_ne!(stream.read(&mut taken).await.unwrap(), 0);
                stream.write_all(answer.as_bytes()).await.unwrap();
            }
        });
        let qmp = Qmp::connect(&path, "console", 64).await;
        (folder, qmp)
    }

    #[tokio::test]
    async fn events_before_an_answer_are_not_lost() {
        let event = "{\"event\": \"SHUTDOWN\", \"data\": {\"guest\": true, \"reason\": \"guest-shutdown\"}}\n\
                     {\"return\": {\"status\": \"shutdown\"}, \"id\": 2}\n";
        let (_folder, qmp) = scripted(vec![
            "{\"return\": {}, \"id\": 1}\n",
            event,
            "{\"return\": \"old\", \"id\": 1}\n{\"return\": \"aGk=\", \"id\": 3}\n",
        ])
        .await;
        let mut qmp = qmp.unwrap();
        assert_eq!(qmp.news().await.unwrap(), News::Ended(GuestEnd::PowerOff));
        assert_eq!(qmp.console().await.unwrap(), b"hi");
        assert_eq!(qmp.quit().await.unwrap_err().kind(), io::ErrorKind::BrokenPipe);
    }

    #[tokio::test]
    async fn a_guest_that_ended_while_nobody_listened_is_told_from_a_running_one() {
        let (_folder, qmp) =
            scripted(vec!["{\"return\": {}}\n", "{\"return\": {\"status\": \"shutdown\"}}\n"]).await;
        assert_eq!(qmp.unwrap().end, Some(GuestEnd::Reset));
        let (_folder, qmp) =
            scripted(vec!["{\"return\": {}}\n", "{\"return\": {\"status\": \"running\"}}\n"]).await;
        assert_eq!(qmp.unwrap().end, None);
    }

    #[tokio::test]
    async fn only_an_error_for_lack_of_room_is_one() {
        let events = "{\"event\": \"BLOCK_IO_ERROR\", \"data\": {\"nospace\": false, \"reason\": \"x\"}}\n\
                      {\"event\": \"BLOCK_IO_ERROR\", \"data\": {\"nospace\": true, \"reason\": \"full\"}}\n\
                      {\"event\": \"SHUTDOWN\", \"data\": {\"reason\": \"guest-reset\"}}\n";
        for (data, full) in [
            (json!({ "reason": "No space left on device" }), true),
            (json!({ "reason": "Disk quota exceeded", "nospace": false }), true),
            (json!({ "reason": "Input/output error" }), false),
        ] {
            assert_eq!(is_for_room(&data), full, "{data}");
        }
        let status = format!("{{\"return\": {{\"status\": \"running\"}}}}\n{events}");
        let status: &'static str = status.leak();
        let (_folder, qmp) = scripted(vec!["{\"return\": {}}\n", status]).await;
        let mut qmp = qmp.unwrap();
        assert_eq!(qmp.news().await.unwrap(), News::DiskFull);
        assert_eq!(qmp.news().await.unwrap(), News::Ended(GuestEnd::Reset));
        assert!(matches!(qmp.grow_disk(1).await.unwrap(), Err(DriverError::Unsupported(_))));
    }

    #[tokio::test]
    async fn a_refused_command_says_what_qemu_said() {
        let (_folder, qmp) =
            scripted(vec!["{\"error\": {\"class\": \"GenericError\", \"desc\": \"no way\"}}\n"]).await;
        assert!(qmp.unwrap_err().to_string().contains("no way"));
    }
}
