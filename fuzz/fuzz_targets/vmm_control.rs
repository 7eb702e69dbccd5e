//! What whoever starts a VMM and talks to it may send: the configuration, and the control socket's stream of requests.
#![no_main]

use std::collections::BTreeSet;
use std::ops::ControlFlow;

use libfuzzer_sys::fuzz_target;
use torpor_fuzz::Bytes;
use torpor_vmm_api::{Config, LONGEST_REQUEST, MOST_CPUS, Request, Requests};

/// A configuration that is taken is one that can be, and says the same when it is written down.
fn config(text: &[u8]) {
    let Ok(config) = serde_json::from_slice::<Config>(text) else { return };
    let again = serde_json::from_slice::<Config>(&serde_json::to_vec(&config).unwrap()).unwrap();
    assert_eq!(again, config);
    if let Err(error) = config.validate() {
        assert!(!error.field.is_empty() && !error.problem.is_empty());
        return;
    }
    assert!((1..=MOST_CPUS).contains(&config.cpus) && config.memory_bytes.is_multiple_of(2 << 20));
    assert!(config.memory_bytes > 0 && !config.command_line.contains('\0'));
    let descriptors = config.descriptors();
    let numbers: BTreeSet<i32> = descriptors.iter().map(|(_, fd)| *fd).collect();
    assert!(numbers.len() == descriptors.len() && numbers.iter().all(|fd| *fd >= 0 && *fd != 2));
}

type Heard = (Vec<Result<Request, String>>, bool);

/// What is heard of a stream that comes in these pieces.
fn heard<'a>(pieces: impl Iterator<Item = &'a [u8]>) -> Heard {
    let (mut requests, mut all) = (Requests::default(), Vec::new());
    for piece in pieces {
        let taken = requests.take(piece, |request| {
            all.push(request);
            ControlFlow::Continue(())
        });
        if taken.is_err() {
            return (all, true);
        }
    }
    (all, false)
}

fn stream(mut bytes: Bytes<'_>) {
    let piece = 1 + usize::from(bytes.byte());
    let whole = heard(std::iter::once(bytes.0));
    assert_eq!(heard(bytes.0.chunks(piece)), whole);
    let longest = bytes.0.split(|byte| *byte == b'\n').map(<[u8]>::len).max().unwrap_or(0);
    assert_eq!(whole.1, longest > LONGEST_REQUEST);
    for request in whole.0.iter().flatten() {
        let text = serde_json::to_vec(request).unwrap();
        assert_eq!(serde_json::from_slice::<Request>(&text).unwrap(), *request);
    }
}

fuzz_target!(|input: &[u8]| {
    match input.split_first() {
        Some((0..0x80, rest)) => config(rest),
        Some((_, rest)) => stream(Bytes(rest)),
        None => {}
    }
});
