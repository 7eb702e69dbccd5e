//! Sessions over a pipe that hosts come and go on, cut anywhere, with dirt in both directions.
#![allow(clippy::unwrap_used, reason = "tests")]

use std::{
    io,
    pin::Pin,
    sync::{Arc, Mutex},
    task::{Context, Poll},
    time::Duration,
};

use proptest::prelude::*;
use tokio::io::{
    AsyncRead, AsyncReadExt as _, AsyncWrite, AsyncWriteExt as _, DuplexStream, ReadBuf, duplex,
};
use torpor_agent_channel::{guest, host};

const LIMIT: Duration = Duration::from_secs(20);

/// The host's side of a pipe that outlives its users, as a serial port outlives the gateway.
#[derive(Clone)]
struct Port(Arc<Mutex<DuplexStream>>);

impl Port {
    /// A user of the port that dies after it has written `writes` bytes.
    fn user(&self, writes: usize) -> User {
        User { port: self.clone(), left: writes }
    }

    async fn dirty(&self, bytes: &[u8]) {
        self.user(usize::MAX).write_all(bytes).await.unwrap();
    }
}

struct User {
    port: Port,
    left: usize,
}

impl AsyncRead for User {
    fn poll_read(self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut *self.port.0.lock().unwrap()).poll_read(cx, buf)
    }
}

impl AsyncWrite for User {
    fn poll_write(mut self: Pin<&mut Self>, cx: &mut Context<'_>, data: &[u8]) -> Poll<io::Result<usize>> {
        if self.left == 0 {
            return Poll::Ready(Err(io::ErrorKind::BrokenPipe.into()));
        }
        let some = &data[..data.len().min(self.left)];
        let result = Pin::new(&mut *self.port.0.lock().unwrap()).poll_write(cx, some);
        if let Poll::Ready(Ok(written)) = result {
            self.left -= written;
        }
        result
    }

    fn poll_flush(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<io::Result<()>> {
        Poll::Ready(Ok(()))
    }

    fn poll_shutdown(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<io::Result<()>> {
        Poll::Ready(Ok(()))
    }
}

fn pipe(size: usize) -> (Port, DuplexStream) {
    let (host, guest) = duplex(size);
    (Port(Arc::new(Mutex::new(host))), guest)
}

/// A guest that greets every session with `hello` and then echoes; keeps what each session got.
fn echoing(io: DuplexStream) -> Arc<Mutex<Vec<Vec<u8>>>> {
    let got = Arc::new(Mutex::new(Vec::new()));
    let all = got.clone();
    let mut sessions = guest::serve(io);
    tokio::spawn(async move {
        while let Some(session) = sessions.next().await {
            let all = all.clone();
            let index = {
                let mut all = all.lock().unwrap();
                all.push(Vec::new());
                all.len() - 1
            };
            tokio::spawn(echo(session, all, index));
        }
    });
    got
}

async fn echo(session: guest::Session, all: Arc<Mutex<Vec<Vec<u8>>>>, index: usize) {
    let (mut read, mut write) = tokio::io::split(session);
    let mut buffer = vec![0; 5000];
    let _ = write.write_all(b"hello").await;
    loop {
        let count = read.read(&mut buffer).await.unwrap_or(0);
        if count == 0 {
            let _ = write.shutdown().await;
            return;
        }
        all.lock().unwrap()[index].extend_from_slice(&buffer[..count]);
        // A session whose host died can't be answered, but is still read to its end.
        let _ = write.write_all(&buffer[..count]).await;
    }
}

/// Sends `data` on a new session and wants exactly that back, then the end.
async fn exact(port: &Port, data: &[u8]) {
    let stream = host::connect(port.user(usize::MAX), LIMIT).await.unwrap();
    let (mut read, mut write) = tokio::io::split(stream);
    let send = async {
        write.write_all(data).await.unwrap();
        write.shutdown().await.unwrap();
    };
    let mut back = Vec::new();
    let receive = async { read.read_to_end(&mut back).await.unwrap() };
    tokio::time::timeout(LIMIT, async { tokio::join!(send, receive) }).await.unwrap();
    let want = [b"hello", data].concat();
    assert!(back == want, "{} bytes came back, {} wanted", back.len(), want.len());
}

/// A host that dies: writes `data` until its budget is used up, reads only some of what comes.
async fn dying(port: &Port, writes: usize, data: &[u8], reads: usize) {
    let Ok(Ok(stream)) =
        tokio::time::timeout(Duration::from_millis(300), host::connect(port.user(writes), LIMIT)).await
    else {
        return;
    };
    let (mut read, mut write) = tokio::io::split(stream);
    let send = async {
        let _ = write.write_all(data).await;
        let _ = write.flush().await;
    };
    let receive = async {
        let _ = read.read_exact(&mut vec![0; reads]).await;
    };
    let _ = tokio::time::timeout(Duration::from_millis(100), async { tokio::join!(send, receive) }).await;
}

fn run(test: impl Future<Output = ()>) {
    tokio::runtime::Builder::new_current_thread().enable_time().build().unwrap().block_on(test);
}

fn pattern(length: usize, seed: u8) -> Vec<u8> {
    (0..length).map(|at| (at as u64).wrapping_mul(0x9e37_79b9).to_le_bytes()[2] ^ seed).collect()
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 40, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn a_session_after_random_dirt_in_both_directions_is_exact(
        to_guest in prop::collection::vec(any::<u8>(), 0..40_000),
        to_host in prop::collection::vec(any::<u8>(), 0..40_000),
        length in 0..60_000usize,
    ) {
        run(async {
            let (port, mut guest) = pipe(1 << 20);
            port.dirty(&to_guest).await;
            guest.write_all(&to_host).await.unwrap();
            echoing(guest);
            exact(&port, &pattern(length, 7)).await;
        });
    }

    #[test]
    fn a_session_after_hosts_that_died_at_any_byte_is_exact(
        deaths in prop::collection::vec((0..60_000usize, 0..40_000usize, 0..20_000usize), 1..4),
        size in prop::sample::select(vec![700, 20_000, 1 << 20]),
        length in 0..60_000usize,
    ) {
        run(async {
            let (port, guest) = pipe(size);
            let got = echoing(guest);
            for (index, (writes, length, reads)) in deaths.iter().enumerate() {
                dying(&port, *writes, &pattern(*length, index as u8), *reads).await;
            }
            exact(&port, &pattern(length, 99)).await;
            // No session ever saw a byte that was not sent on it, not even one that was cut.
            for got in got.lock().unwrap().iter() {
                let clean = (0..deaths.len())
                    .map(|index| pattern(got.len(), index as u8))
                    .chain([pattern(got.len(), 99)])
                    .any(|sent| sent == *got);
                assert!(clean, "a session got {} bytes that nobody sent on it", got.len());
            }
        });
    }

    #[test]
    fn stale_sessions_mixed_with_garbage_do_not_disturb_the_next(
        pieces in prop::collection::vec((any::<prop::sample::Index>(), any::<prop::sample::Index>()), 1..6),
        garbage in prop::collection::vec(any::<u8>(), 0..300),
    ) {
        run(async {
            let recorded = recording().await;
            let (port, guest) = pipe(1 << 20);
            for (from, to) in pieces {
                let (from, to) = (from.index(recorded.len()), to.index(recorded.len()));
                port.dirty(&recorded[from.min(to)..from.max(to)]).await;
                port.dirty(&garbage).await;
            }
            echoing(guest);
            exact(&port, &pattern(30_000, 3)).await;
        });
    }
}

/// Every byte that one host sent in a whole session.
async fn recording() -> Vec<u8> {
    let (host_side, mut middle) = duplex(1 << 20);
    let (mut relay, guest) = duplex(1 << 20);
    echoing(guest);
    let record = tokio::spawn(async move {
        let mut bytes = Vec::new();
        let (mut from_host, mut from_guest) = (vec![0; 4096], vec![0; 4096]);
        loop {
            tokio::select! {
                count = middle.read(&mut from_host) => {
                    let count = count.unwrap();
                    if count == 0 { return bytes; }
                    bytes.extend_from_slice(&from_host[..count]);
                    relay.write_all(&from_host[..count]).await.unwrap();
                }
                count = relay.read(&mut from_guest) => {
                    let count = count.unwrap();
                    let _ = middle.write_all(&from_guest[..count]).await;
                }
            }
        }
    });
    let mut stream = host::connect(host_side, LIMIT).await.unwrap();
    stream.write_all(&pattern(20_000, 55)).await.unwrap();
    stream.shutdown().await.unwrap();
    drop(stream);
    record.await.unwrap()
}

#[test]
fn a_new_session_ends_the_one_before() {
    run(async {
        let (port, guest) = pipe(1 << 16);
        let mut sessions = guest::serve(guest);
        let first = host::connect(port.user(usize::MAX), LIMIT).await.unwrap();
        let mut first_seen = sessions.next().await.unwrap();
        let _second = host::connect(port.user(usize::MAX), LIMIT).await.unwrap();
        assert_eq!(first_seen.read(&mut [0; 8]).await.unwrap(), 0);
        assert!(sessions.next().await.is_some());
        drop(first);
    });
}

#[test]
fn a_guest_that_starts_late_and_lost_the_first_bytes_is_reached() {
    run(async {
        let (port, mut guest) = pipe(1 << 20);
        let late = tokio::spawn(async move {
            // More than the padding and less than everything: a greeting is cut in two.
            guest.read_exact(&mut vec![0; 16_500]).await.unwrap();
            tokio::time::sleep(Duration::from_millis(450)).await;
            echoing(guest);
        });
        exact(&port, b"after a late start").await;
        late.await.unwrap();
    });
}

#[test]
fn nobody_on_the_other_side_is_a_timeout_that_says_how_long() {
    run(async {
        let (port, _guest) = pipe(64);
        let error = host::connect(port.user(usize::MAX), Duration::from_millis(250)).await.unwrap_err();
        assert_eq!(error.to_string(), "no guest agent answered on the channel within 250 ms");
    });
}

#[test]
fn the_end_of_the_pipe_ends_the_session_and_the_sessions() {
    run(async {
        let (host_side, guest) = duplex(1 << 16);
        let mut sessions = guest::serve(guest);
        let stream = host::connect(host_side, LIMIT).await.unwrap();
        let mut session = sessions.next().await.unwrap();
        drop(stream);
        assert_eq!(session.read(&mut [0; 8]).await.unwrap(), 0);
        assert!(sessions.next().await.is_none());
    });
}

#[test]
fn a_reader_that_stands_still_stops_the_writer() {
    run(async {
        let (port, guest) = pipe(4096);
        let mut sessions = guest::serve(guest);
        let mut stream = host::connect(port.user(usize::MAX), LIMIT).await.unwrap();
        let _unread = sessions.next().await.unwrap();
        let chunk = vec![1; 16 * 1024];
        let mut taken = 0;
        while let Ok(result) = tokio::time::timeout(Duration::from_millis(200), stream.write(&chunk)).await {
            taken += result.unwrap();
            assert!(taken < 1 << 20, "{taken} bytes were taken without a reader");
        }
    });
}

#[test]
fn a_large_transfer_arrives_whole() {
    run(async {
        let (port, guest) = pipe(1 << 16);
        let mut sessions = guest::serve(guest);
        let total = 64 << 20;
        let sending = tokio::spawn(async move {
            let mut session = sessions.next().await.unwrap();
            let chunk = pattern(1 << 20, 0);
            for _ in 0..total >> 20 {
                session.write_all(&chunk).await.unwrap();
            }
            session.shutdown().await.unwrap();
            // Kept until the host has read all: dropping the sessions would close the pipe.
            sessions.next().await
        });
        let start = std::time::Instant::now();
        let mut stream = host::connect(port.user(usize::MAX), LIMIT).await.unwrap();
        let (chunk, mut buffer, mut count) = (pattern(1 << 20, 0), vec![0; 1 << 16], 0);
        loop {
            let read = stream.read(&mut buffer).await.unwrap();
            if read == 0 {
                break;
            }
            assert!((0..read).step_by(97).all(|at| buffer[at] == chunk[(count + at) % chunk.len()]));
            count += read;
        }
        assert_eq!(count, total);
        println!("{} MiB in {:?}", total >> 20, start.elapsed());
        sending.abort();
    });
}
