//! Cutting requests at clusters.

use std::io::{self, IoSlice, IoSliceMut};

use crate::layout::CLUSTER;

/// A range inside one cluster.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Piece {
    pub(crate) offset: u64,
    pub(crate) length: u64,
}

impl Piece {
    /// The part of a range before its first whole cluster; all of a range inside one cluster.
    pub(crate) fn head(offset: u64, length: u64) -> Option<Self> {
        let to_end = offset.next_multiple_of(CLUSTER) - offset;
        let length = length.min(to_end);
        (length > 0).then_some(Self { offset, length })
    }

    /// The part of a range after its last whole cluster, unless [`Piece::head`] is that.
    pub(crate) fn tail(offset: u64, length: u64) -> Option<Self> {
        let start = (offset + length) / CLUSTER * CLUSTER;
        let length = (offset + length) % CLUSTER;
        (length > 0 && start >= offset).then_some(Self { offset: start, length })
    }
}

/// Calls with buffers of one piece, which end where clusters do, until all is read. A cluster that lies in several
/// buffers goes through one of our own, so that no cluster is met twice.
pub(crate) fn for_each_read(
    buffers: &mut [IoSliceMut<'_>],
    offset: u64,
    mut read: impl FnMut(u64, &mut [u8]) -> io::Result<()>,
) -> io::Result<()> {
    let mut bounce = Vec::new();
    let mut at = offset;
    let (mut index, mut used) = (0, 0);
    while index < buffers.len() {
        let room = (CLUSTER - at % CLUSTER) as usize;
        let here = buffers[index].len() - used;
        if here >= room || index + 1 == buffers.len() {
            let count = direct(at, here, index + 1 == buffers.len());
            if count > 0 {
                read(at, &mut buffers[index][used..used + count])?;
            }
            at += count as u64;
            (index, used) = step(index, used + count, buffers[index].len());
            continue;
        }
        let rest = here + buffers[index + 1..].iter().map(|buffer| buffer.len()).sum::<usize>();
        bounce.resize(rest.min(room), 0);
        if !bounce.is_empty() {
            read(at, &mut bounce)?;
        }
        at += bounce.len() as u64;
        let mut from = &bounce[..];
        while !from.is_empty() {
            let count = from.len().min(buffers[index].len() - used);
            buffers[index][used..used + count].copy_from_slice(&from[..count]);
            from = &from[count..];
            (index, used) = step(index, used + count, buffers[index].len());
        }
        if bounce.is_empty() {
            index += 1;
        }
    }
    Ok(())
}

/// [`for_each_read`] in the other direction.
pub(crate) fn for_each_write(
    buffers: &[IoSlice<'_>],
    offset: u64,
    mut write: impl FnMut(u64, &[u8]) -> io::Result<()>,
) -> io::Result<()> {
    let mut bounce = Vec::new();
    let mut at = offset;
    let (mut index, mut used) = (0, 0);
    while index < buffers.len() {
        let room = (CLUSTER - at % CLUSTER) as usize;
        let here = buffers[index].len() - used;
        if here >= room || index + 1 == buffers.len() {
            let count = direct(at, here, index + 1 == buffers.len());
            if count > 0 {
                write(at, &buffers[index][used..used + count])?;
            }
            at += count as u64;
            (index, used) = step(index, used + count, buffers[index].len());
            continue;
        }
        bounce.clear();
        while index < buffers.len() && bounce.len() < room {
            let count = (room - bounce.len()).min(buffers[index].len() - used);
            bounce.extend_from_slice(&buffers[index][used..used + count]);
            (index, used) = step(index, used + count, buffers[index].len());
        }
        if !bounce.is_empty() {
            write(at, &bounce)?;
        }
        at += bounce.len() as u64;
    }
    Ok(())
}

/// How much of a buffer goes without a copy: all of it that ends with a cluster, or with the request.
fn direct(at: u64, here: usize, last: bool) -> usize {
    match last {
        true => here,
        false => here - ((at + here as u64) % CLUSTER) as usize,
    }
}

fn step(index: usize, used: usize, length: usize) -> (usize, usize) {
    match used == length {
        true => (index + 1, 0),
        false => (index, used),
    }
}

/// True for all zeros.
pub(crate) fn is_zero(bytes: &[u8]) -> bool {
    let (words, rest) = bytes.as_chunks::<16>();
    words.iter().all(|word| u128::from_ne_bytes(*word) == 0) && rest.iter().all(|byte| *byte == 0)
}

/// The range of whole sectors (of 4096 bytes) outside which there are only zeros; empty when all is zeros.
pub(crate) fn without_zeros(bytes: &[u8]) -> (usize, usize) {
    let sector = 4096;
    let filled = |sector: &[u8]| !is_zero(sector);
    let Some(first) = bytes.chunks(sector).position(filled) else { return (0, 0) };
    let last = bytes.chunks(sector).rposition(filled).unwrap_or(first);
    (first * sector, ((last + 1) * sector).min(bytes.len()))
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn content(length: usize) -> Vec<u8> {
        (0..length).map(|at| (at % 251) as u8).collect()
    }

    /// Splits bytes into buffers at the given lengths.
    fn cut<'a>(mut bytes: &'a [u8], lengths: &[usize]) -> Vec<&'a [u8]> {
        let mut parts = Vec::new();
        for length in lengths {
            let (part, rest) = bytes.split_at((*length).min(bytes.len()));
            parts.push(part);
            bytes = rest;
        }
        parts.push(bytes);
        parts
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(200))]
        #[test]
        fn buffers_of_any_cut_carry_the_same_bytes(
            offset in 0u64..140_000,
            length in 0usize..300_000,
            cuts in prop::collection::vec(prop_oneof![0usize..70_000, Just(0), Just(4096), Just(65_536)], 0..8),
        ) {
            let data = content(length);
            let parts = cut(&data, &cuts);
            let slices: Vec<IoSlice<'_>> = parts.iter().map(|part| IoSlice::new(part)).collect();
            let mut written = vec![0; offset as usize + length];
            let mut last = None;
            for_each_write(&slices, offset, |at, piece| {
                let end = (at + piece.len() as u64 - 1) / CLUSTER;
                assert_ne!(last.replace(end), Some(at / CLUSTER), "no cluster is met twice");
                written[at as usize..at as usize + piece.len()].copy_from_slice(piece);
                Ok(())
            }).unwrap();
            prop_assert!(written[offset as usize..] == data[..]);
            let mut copy = vec![0; length];
            let mut rest = &mut copy[..];
            let mut targets = Vec::new();
            for part in &parts {
                let (head, tail) = rest.split_at_mut(part.len());
                targets.push(IoSliceMut::new(head));
                rest = tail;
            }
            for_each_read(&mut targets, offset, |at, piece| {
                piece.copy_from_slice(&written[at as usize..at as usize + piece.len()]);
                Ok(())
            }).unwrap();
            prop_assert!(copy == data);
        }

        #[test]
        fn head_whole_clusters_and_tail_make_up_a_range(offset in 0u64..300_000, length in 0u64..300_000) {
            let whole = ((offset + length) / CLUSTER).saturating_sub(offset.div_ceil(CLUSTER)) * CLUSTER;
            let parts = [Piece::head(offset, length), Piece::tail(offset, length)];
            let ends: u64 = parts.into_iter().flatten().map(|piece| piece.length).sum();
            prop_assert_eq!(whole + ends, length);
        }

        #[test]
        fn only_zeros_are_left_out(spots in prop::collection::vec(0usize..65_536, 0..3)) {
            let mut bytes = vec![0; 65_536];
            spots.iter().for_each(|spot| bytes[*spot] = 1);
            let (start, end) = without_zeros(&bytes);
            prop_assert!(is_zero(&bytes[..start]) && is_zero(&bytes[end..]));
            prop_assert_eq!(start == end, spots.is_empty());
        }
    }
}
