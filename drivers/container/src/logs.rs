//! The console of a container: what its first process, the agent, has said. The main command's output is the agent's to
//! tell.

use hyper::Method;
use torpor_sandbox::SandboxId;

use crate::{
    client::{Carries, QUICK},
    container::name,
    driver::Inner,
};

/// Lines that are asked for.
const LINES: u32 = 400;
/// Before every piece: a byte that names the stream, three zeros, the length in four bytes, highest first.
const HEADER: usize = 8;

/// The end of it; empty when the engine has nothing.
pub(crate) async fn tail(inner: &Inner, id: &SandboxId, bytes: usize) -> Vec<u8> {
    let path = format!("/containers/{}/logs?stdout=true&stderr=true&tail={LINES}", name(id));
    let answer = inner.client.call(Method::GET, &path, Carries::Nothing, QUICK).await;
    let text = answer.map(|answer| pieces(&answer)).unwrap_or_default();
    text[text.len().saturating_sub(bytes)..].to_vec()
}

fn pieces(mut framed: &[u8]) -> Vec<u8> {
    let mut text = Vec::with_capacity(framed.len());
    while let Some((header, rest)) = framed.split_at_checked(HEADER) {
        let length = u32::from_be_bytes([header[4], header[5], header[6], header[7]]) as usize;
        let (piece, rest) = rest.split_at(length.min(rest.len()));
        text.extend_from_slice(piece);
        framed = rest;
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pieces_of_both_streams_are_joined_and_a_cut_one_is_taken_as_it_is() {
        let mut framed = b"\x01\0\0\0\0\0\0\x03one\x02\0\0\0\0\0\0\x04two\n".to_vec();
        framed.extend_from_slice(b"\x01\0\0\0\0\0\0\x09cut");
        assert_eq!(pieces(&framed), b"onetwo\ncut");
        assert_eq!(pieces(b"\x01\0"), b"");
    }
}
