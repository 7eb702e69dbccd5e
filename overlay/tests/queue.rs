//! Many requests in flight over one disk.

#![allow(clippy::unwrap_used)] // helpers of tests

mod common;

use std::io;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::mpsc::{Receiver, channel};
use std::sync::{Arc, Condvar, Mutex};
use std::time::Duration;

use common::Bench;
use futures::executor::block_on;
use futures::future::join_all;
use torpor_overlay::fault::{Faulty, Request};
use torpor_overlay::{Block, Hook, Limits, Queue, Raw, open};

const MIB: u64 = 1 << 20;
const BLOCK: u64 = 4096;

fn no_hook() -> Hook {
    Arc::new(|| Ok(()))
}

/// A gate that requests wait at until it is opened.
#[derive(Clone, Default)]
struct Gate(Arc<(Mutex<bool>, Condvar)>);

impl Gate {
    fn open(&self) {
        *self.0.0.lock().unwrap() = true;
        self.0.1.notify_all();
    }

    fn pass(&self) {
        let open =
            self.0.1.wait_timeout_while(self.0.0.lock().unwrap(), Duration::from_secs(60), |open| !*open);
        assert!(!open.unwrap().1.timed_out());
    }
}

/// A raw disk that lets every request wait at a gate, and fails writes to odd blocks.
fn gated(bench: &Bench, gate: &Gate) -> Arc<dyn Block> {
    let (disk, gate) = (Raw::open(&bench.base).unwrap(), gate.clone());
    Arc::new(Faulty::new(
        disk,
        Box::new(move |request| {
            if !matches!(request, Request::Close) {
                gate.pass();
            }
            matches!(request, Request::Write(offset) if offset / BLOCK % 2 == 1).then_some(5)
        }),
    ))
}

fn all<T>(receiver: &Receiver<T>, count: usize) -> Vec<T> {
    (0..count).map(|_| receiver.recv_timeout(Duration::from_secs(60)).unwrap()).collect()
}

fn submit_write(
    queue: &Queue,
    block: u64,
    send: std::sync::mpsc::Sender<(u64, Option<i32>)>,
) -> io::Result<()> {
    let work = move |disk: &dyn Block| disk.write(&[block as u8 + 1; BLOCK as usize], block * BLOCK);
    let completion = move |result: io::Result<()>| {
        send.send((block, result.err().and_then(|error| error.raw_os_error()))).unwrap()
    };
    queue.submit(work, completion).map_err(|refused| refused.error)
}

#[test]
fn sixty_four_requests_in_flight_get_each_its_own_result() {
    let bench = Bench::new(MIB);
    let gate = Gate::default();
    let queue = Queue::new(gated(&bench, &gate), Limits { threads: 3, depth: 64 }, no_hook());
    let (send, receive) = channel();
    for block in 0..64 {
        submit_write(&queue, block, send.clone()).unwrap();
    }
    assert_eq!(queue.in_flight(), 64);
    let refused = submit_write(&queue, 64, send.clone()).unwrap_err();
    assert_eq!(refused.kind(), io::ErrorKind::WouldBlock);
    gate.open();
    let mut results = all(&receive, 64);
    results.sort_unstable();
    for (block, (found, error)) in (0..).zip(results) {
        assert_eq!((found, error), (block, (block % 2 == 1).then_some(5)));
    }
    queue.close().unwrap();
    let content = std::fs::read(&bench.base).unwrap();
    for block in 0..64 {
        let written =
            content[block * BLOCK as usize..][..BLOCK as usize].iter().all(|byte| *byte == block as u8 + 1);
        assert_eq!(written, block % 2 == 0, "block {block}");
    }
}

#[test]
fn close_waits_for_what_is_in_flight_and_refuses_what_comes_later() {
    let bench = Bench::new(MIB);
    let gate = Gate::default();
    let queue = Queue::new(gated(&bench, &gate), Limits::default(), no_hook());
    let (send, receive) = channel();
    (0..20).for_each(|block| submit_write(&queue, block * 2, send.clone()).unwrap());
    let closer = std::thread::spawn({
        let queue = queue.clone();
        move || queue.close()
    });
    // Until the closing has begun, requests are still taken.
    let refused = loop {
        match submit_write(&queue, 0, send.clone()) {
            Ok(()) => std::thread::yield_now(),
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => std::thread::yield_now(),
            Err(error) => break error,
        }
    };
    assert_eq!(refused.kind(), io::ErrorKind::NotConnected);
    assert!(!closer.is_finished() && queue.in_flight() >= 20);
    gate.open();
    closer.join().unwrap().unwrap();
    assert_eq!(queue.in_flight(), 0);
    assert!(receive.try_iter().count() >= 20, "every completion was called before close returned");
    assert_eq!(queue.close().unwrap_err().errors[0].kind(), io::ErrorKind::NotConnected);
    assert_eq!(block_on(queue.flush()).unwrap_err().kind(), io::ErrorKind::NotConnected);
}

#[test]
fn a_completion_finds_room_for_the_next_request_at_any_depth() {
    let bench = Bench::new(MIB);
    for depth in [1, 7] {
        let disk: Arc<dyn Block> = Arc::new(Raw::open(&bench.base).unwrap());
        let queue = Queue::new(disk, Limits { threads: 2, depth }, no_hook());
        let (send, receive) = channel();
        for _ in 0..depth {
            chain(queue.clone(), 2000, send.clone());
        }
        all(&receive, depth);
        queue.close().unwrap();
    }
}

fn chain(queue: Queue, left: u32, send: std::sync::mpsc::Sender<()>) {
    let next = queue.clone();
    let work = move |disk: &dyn Block| disk.read(&mut [0; 16], u64::from(left));
    let completion = move |result: io::Result<()>| {
        result.unwrap();
        match left {
            0 => send.send(()).unwrap(),
            _ => chain(next, left - 1, send),
        }
    };
    assert!(queue.submit(work, completion).is_ok());
}

#[test]
fn futures_do_what_a_disk_does_however_many_there_are() {
    let bench = Bench::new(2 * MIB);
    let path = bench.overlay(8 * MIB);
    let disk = Arc::new(open(&path, &[&bench.base]).unwrap());
    let queue = Queue::new(disk, Limits { threads: 3, depth: 8 }, no_hook());
    let task = |number: u64| {
        let queue = queue.clone();
        async move {
            let (at, data) = (number * 40_000, vec![number as u8 + 1; 30_000]);
            let (written, mut data) = queue.write(data, at).await;
            written.unwrap();
            queue.write_zeroes(at + 10, 100).await.unwrap();
            queue.flush().await.unwrap();
            let (read, found) = queue.read(vec![0; 30_000], at).await;
            read.unwrap();
            data[10..110].fill(0);
            assert!(found == data);
            queue.discard(at, 40_000).await.unwrap();
        }
    };
    block_on(join_all((0..150).map(task)));
    let (read, buffer) = block_on(queue.read(vec![0; 10], 8 * MIB));
    assert_eq!((read.unwrap_err().kind(), buffer.len()), (io::ErrorKind::InvalidInput, 10));
    queue.close().unwrap();
    let (read, buffer) = block_on(queue.read(vec![0; 10], 0));
    assert_eq!((read.unwrap_err().kind(), buffer.len()), (io::ErrorKind::NotConnected, 10));
}

#[test]
fn futures_that_wait_for_room_end_with_the_queue() {
    let bench = Bench::new(MIB);
    let gate = Gate::default();
    let queue = Queue::new(gated(&bench, &gate), Limits { threads: 1, depth: 1 }, no_hook());
    let waiting: Vec<_> = (0..5)
        .map(|number| {
            let queue = queue.clone();
            std::thread::spawn(move || block_on(queue.write(vec![9; 10], number * 2 * BLOCK)).0)
        })
        .collect();
    while queue.in_flight() == 0 {
        std::thread::yield_now();
    }
    let closer = std::thread::spawn({
        let queue = queue.clone();
        move || queue.close()
    });
    let results = |waiting: Vec<std::thread::JoinHandle<io::Result<()>>>| {
        waiting.into_iter().map(|thread| thread.join().unwrap()).filter(|result| result.is_ok()).count()
    };
    while !waiting.iter().any(|thread| thread.is_finished()) {
        std::thread::yield_now();
    }
    gate.open();
    closer.join().unwrap().unwrap();
    assert_eq!(results(waiting), 1, "one was in flight, the others had no room yet");
}

#[test]
fn what_nobody_was_told_of_is_reported_by_close() {
    let bench = Bench::new(MIB);
    let gate = Gate::default();
    let plan = {
        let gate = gate.clone();
        move |request| match request {
            Request::Flush => {
                gate.pass();
                Some(28)
            }
            Request::Close => Some(5),
            _ => None,
        }
    };
    let disk = Faulty::new(Raw::open(&bench.base).unwrap(), Box::new(plan));
    let queue = Queue::new(Arc::new(disk), Limits { threads: 1, depth: 64 }, no_hook());
    // A future that is dropped once its request is in flight.
    let mut unwanted = Box::pin(queue.flush());
    assert!(
        unwanted.as_mut().poll(&mut std::task::Context::from_waker(std::task::Waker::noop())).is_pending()
    );
    drop(unwanted);
    let (send, receive) = channel();
    let panicking = |_: &dyn Block| -> io::Result<()> { std::panic::resume_unwind(Box::new("on purpose")) };
    let told = send.clone();
    assert!(
        queue.submit(panicking, move |result| told.send(result.unwrap_err().to_string()).unwrap()).is_ok()
    );
    assert!(queue.submit(|_| Ok(()), |_| std::panic::resume_unwind(Box::new("on purpose"))).is_ok());
    let inner = queue.clone();
    let closes =
        move |_: io::Result<()>| send.send(inner.close().unwrap_err().errors[0].to_string()).unwrap();
    assert!(queue.submit(|_| Ok(()), closes).is_ok());
    gate.open();
    assert_eq!(all(&receive, 2), ["a request panicked", "a completion can't close its queue"]);
    let error = queue.close().unwrap_err();
    let numbers: Vec<_> = error.errors.iter().map(io::Error::raw_os_error).collect();
    assert_eq!((numbers, error.more), (vec![Some(28), None, Some(5)], 0), "{error}");
}

#[test]
fn the_hook_runs_first_in_every_thread_and_only_there() {
    let bench = Bench::new(MIB);
    let (hooked, gate) = (Arc::new(Mutex::new(Vec::new())), Gate::default());
    let hook = {
        let hooked = Arc::clone(&hooked);
        Arc::new(move || {
            hooked.lock().unwrap().push(std::thread::current().id());
            Ok(())
        })
    };
    let queue = Queue::new(gated(&bench, &gate), Limits { threads: 4, depth: 64 }, hook);
    assert!(hooked.lock().unwrap().is_empty(), "threads start when they are needed");
    let (send, receive) = channel();
    for block in 0..32 {
        let (send, hooked) = (send.clone(), Arc::clone(&hooked));
        let work = move |disk: &dyn Block| disk.read(&mut [0; 10], block);
        let completion = move |_: io::Result<()>| {
            send.send(hooked.lock().unwrap().contains(&std::thread::current().id())).unwrap()
        };
        assert!(queue.submit(work, completion).is_ok());
    }
    gate.open();
    assert!(all(&receive, 32).into_iter().all(|hooked| hooked));
    let threads = hooked.lock().unwrap().len();
    assert!((1..=4).contains(&threads), "{threads}");
    queue.close().unwrap();
}

#[test]
fn a_hook_that_fails_fails_the_requests_and_is_reported() {
    let bench = Bench::new(MIB);
    let hook = Arc::new(|| Err(io::Error::other("no filter")));
    let queue = Queue::new(Arc::new(Raw::open(&bench.base).unwrap()), Limits::default(), hook);
    let mut failed = 0;
    for _ in 0..10 {
        failed += u64::from(block_on(queue.flush()).unwrap_err().to_string().contains("no filter"));
    }
    assert_eq!(failed, 10);
    let error = queue.close().unwrap_err();
    assert!(error.to_string().contains("no filter"), "{error}");
}

#[test]
fn a_dropped_queue_still_does_what_it_took() {
    let bench = Bench::new(MIB);
    let gate = Gate::default();
    let queue = Queue::new(gated(&bench, &gate), Limits { threads: 2, depth: 64 }, no_hook());
    let (send, receive) = channel();
    (0..20).for_each(|block| submit_write(&queue, block * 2, send.clone()).unwrap());
    drop(queue);
    gate.open();
    assert_eq!(all(&receive, 20).len(), 20);
}

#[test]
fn a_request_alone_starts_one_thread() {
    let bench = Bench::new(MIB);
    let started = Arc::new(AtomicUsize::new(0));
    let hook = {
        let started = Arc::clone(&started);
        Arc::new(move || {
            started.fetch_add(1, Ordering::SeqCst);
            Ok(())
        })
    };
    let queue = Queue::new(Arc::new(Raw::open(&bench.base).unwrap()), Limits::default(), hook);
    block_on(queue.flush()).unwrap();
    assert_eq!(started.load(Ordering::SeqCst), 1);
    queue.close().unwrap();
}
