//! kill -9 of a writer at any time: what it had flushed is there.

#![allow(clippy::unwrap_used)] // helpers of tests

mod common;

use std::io::{BufRead, BufReader, Write};
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use common::model::{CLUSTER, Random};
use common::{Bench, assert_clean, assert_no_corruption, base_content, qemu_tools};
use torpor_overlay::{Block, Lock, check, open};

const SIZE: u64 = 32 * CLUSTER;
const BLOCK: u64 = 4096;
const BLOCKS: u64 = SIZE / BLOCK;
/// A writer flushes, and says so, after this many steps.
const FLUSH: u64 = 12;

/// Step `number` of a writer: a block written, or a whole cluster discarded.
fn step(random: &mut Random) -> (u64, bool) {
    (random.below(BLOCKS), random.below(10) == 0)
}

/// What a block holds after a step has written it.
fn filled(cycle: u64, number: u64) -> Vec<u8> {
    Random::new(cycle << 32 | number).bytes(BLOCK as usize)
}

/// Not a test of its own: the process that is killed.
#[test]
fn writer_process() {
    let Ok(orders) = std::env::var("OVERLAY_WRITER") else { return };
    let words: Vec<&str> = orders.split('|').collect();
    let disk = open(Path::new(words[0]), &[Path::new(words[1])]).unwrap();
    let cycle: u64 = words[2].parse().unwrap();
    let mut random = Random::new(cycle);
    let mut out = std::io::stderr();
    for number in 0.. {
        let (block, discard) = step(&mut random);
        match discard {
            true => disk.discard(block * BLOCK / CLUSTER * CLUSTER, CLUSTER).unwrap(),
            false => disk.write(&filled(cycle, number), block * BLOCK).unwrap(),
        }
        if number % FLUSH == FLUSH - 1 {
            disk.flush().unwrap();
            writeln!(out, "flushed {number}").unwrap();
        }
    }
}

fn start(bench: &Bench, path: &Path, cycle: u64) -> Child {
    Command::new(std::env::current_exe().unwrap())
        .args(["--exact", "writer_process", "--nocapture"])
        .env("OVERLAY_WRITER", format!("{}|{}|{cycle}", path.display(), bench.base.display()))
        .stdout(Stdio::null())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap()
}

/// Kills a writer some time after its first flush; returns the last step that it said was flushed.
fn killed(mut child: Child, random: &mut Random) -> u64 {
    let pipe = child.stderr.take().unwrap();
    let (send, receive) = std::sync::mpsc::channel();
    let reader = std::thread::spawn(move || {
        let mut last = None;
        for line in BufReader::new(pipe).lines().map_while(Result::ok) {
            last = line.strip_prefix("flushed ").and_then(|number| number.parse().ok()).or(last);
            let _ = send.send(());
        }
        last
    });
    receive.recv_timeout(Duration::from_secs(30)).unwrap();
    std::thread::sleep(Duration::from_micros(random.below(30_000)));
    child.kill().unwrap();
    child.wait().unwrap();
    reader.join().unwrap().expect("the writer flushed")
}

/// Every block as the flushed steps left it, or as a later step did; the model becomes what is there.
fn verify(disk: &dyn Block, model: &mut [u8], cycle: u64, flushed: u64) {
    let mut later: Vec<Vec<Vec<u8>>> = vec![Vec::new(); BLOCKS as usize];
    let mut random = Random::new(cycle);
    // The writer may have got further than it could say; this far it can't have got.
    for number in 0..flushed + 100_000 {
        let (block, discard) = step(&mut random);
        let (blocks, content) = match discard {
            true => {
                let first = block * BLOCK / CLUSTER * (CLUSTER / BLOCK);
                (first..first + CLUSTER / BLOCK, vec![0; BLOCK as usize])
            }
            false if number <= flushed + 5000 => (block..block + 1, filled(cycle, number)),
            false => break,
        };
        for block in blocks {
            let at = (block * BLOCK) as usize;
            match number <= flushed {
                true => model[at..at + BLOCK as usize].copy_from_slice(&content),
                false => later[block as usize].push(content.clone()),
            }
        }
    }
    for (block, later) in later.iter().enumerate() {
        let at = block * BLOCK as usize;
        let mut found = vec![0; BLOCK as usize];
        disk.read(&mut found, at as u64).unwrap();
        let known = &mut model[at..at + BLOCK as usize];
        assert!(
            found == known || later.contains(&found),
            "cycle {cycle}: block {block} after step {flushed}"
        );
        known.copy_from_slice(&found);
    }
}

#[test]
fn a_killed_writer_leaves_all_that_it_flushed() {
    kill_writers(25, 99, "a_killed_writer_leaves_all_that_it_flushed");
}

#[test]
#[ignore = "slow ring: 500 kills"]
fn five_hundred_killed_writers_leave_all_that_they_flushed() {
    kill_writers(500, 7, "five_hundred_killed_writers_leave_all_that_they_flushed");
}

fn kill_writers(kills: u64, seed: u64, test: &str) {
    let qemu = qemu_tools(test);
    let bench = Bench::new(20 * CLUSTER);
    let path = bench.overlay(SIZE);
    let mut model = base_content(20 * CLUSTER);
    model.resize(SIZE as usize, 0);
    let mut random = Random::new(seed);
    let mut leaks = 0;
    for cycle in 1..=kills {
        let flushed = killed(start(&bench, &path, cycle), &mut random);
        drop(Lock::acquire(&path).expect("the lock went with the process"));
        let report = check(&path).unwrap();
        assert!(report.unclean && report.damages == 0, "{report:?}");
        leaks += u64::from(report.leaked_clusters > 0);
        if qemu {
            assert_no_corruption(&path);
        }
        let disk = open(&path, &[&bench.base]).unwrap();
        verify(&disk, &mut model, cycle, flushed);
        disk.close().unwrap();
        drop(disk);
        if qemu {
            assert_clean(&path);
        }
    }
    println!("{leaks} of {kills} kills left leaks");
}
