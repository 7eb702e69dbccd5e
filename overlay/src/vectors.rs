//! Cutting requests and their buffers.

use std::io::{IoSlice, IoSliceMut};
use std::ops::Range;

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

/// Called with the size of one buffer after the other: which part of it lies within `length` bytes from `skip` on, all buffers
/// counted together.
fn within(mut skip: usize, mut length: usize) -> impl FnMut(usize) -> Range<usize> {
    move |size| {
        let start = skip.min(size);
        let count = length.min(size - start);
        (skip, length) = (skip - start, length - count);
        start..start + count
    }
}

/// Works on `length` bytes of buffers from `skip` on, as buffers of their own.
pub(crate) fn part_mut<R>(
    buffers: &mut [IoSliceMut<'_>],
    skip: usize,
    length: usize,
    work: impl FnOnce(&mut [IoSliceMut<'_>]) -> R,
) -> R {
    if let [one] = buffers {
        return work(&mut [IoSliceMut::new(&mut one[skip..skip + length])]);
    }
    let (mut parts, mut within) = (Vec::with_capacity(buffers.len()), within(skip, length));
    for buffer in buffers {
        let range = within(buffer.len());
        if !range.is_empty() {
            parts.push(IoSliceMut::new(&mut buffer[range]));
        }
    }
    work(&mut parts)
}

/// [`part_mut`] for writing.
pub(crate) fn part<R>(
    buffers: &[IoSlice<'_>],
    skip: usize,
    length: usize,
    work: impl FnOnce(&[IoSlice<'_>]) -> R,
) -> R {
    if let [one] = buffers {
        return work(&[IoSlice::new(&one[skip..skip + length])]);
    }
    let (mut parts, mut within) = (Vec::with_capacity(buffers.len()), within(skip, length));
    for buffer in buffers {
        let range = within(buffer.len());
        if !range.is_empty() {
            parts.push(IoSlice::new(&buffer[range]));
        }
    }
    work(&parts)
}

/// Makes buffers all zeros.
pub(crate) fn fill_zeros(buffers: &mut [IoSliceMut<'_>]) {
    buffers.iter_mut().for_each(|buffer| buffer.fill(0));
}

/// Copies the bytes of buffers to the start of another.
pub(crate) fn gather(buffers: &[IoSlice<'_>], target: &mut [u8]) {
    let mut at = 0;
    for buffer in buffers {
        target[at..at + buffer.len()].copy_from_slice(buffer);
        at += buffer.len();
    }
}

/// Copies bytes to buffers that hold as many.
pub(crate) fn scatter(mut bytes: &[u8], buffers: &mut [IoSliceMut<'_>]) {
    for buffer in buffers {
        let (head, rest) = bytes.split_at(buffer.len());
        buffer.copy_from_slice(head);
        bytes = rest;
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
        fn parts_of_buffers_of_any_cut_are_the_same_bytes(
            length in 0usize..3000,
            cuts in prop::collection::vec(prop_oneof![0usize..700, Just(0), Just(512)], 0..8),
            range in (0usize..3000, 0usize..3000),
        ) {
            let data = content(length);
            let parts = cut(&data, &cuts);
            let slices: Vec<IoSlice<'_>> = parts.iter().map(|part| IoSlice::new(part)).collect();
            let skip = range.0.min(length);
            let count = range.1.min(length - skip);
            let mut found = vec![0; count];
            part(&slices, skip, count, |part| {
                assert!(part.iter().all(|buffer| !buffer.is_empty()) || slices.len() == 1);
                gather(part, &mut found);
            });
            prop_assert!(found == data[skip..skip + count]);
            let mut copy = vec![0; length];
            let mut rest = &mut copy[..];
            let mut targets = Vec::new();
            for part in &parts {
                let (head, tail) = rest.split_at_mut(part.len());
                targets.push(IoSliceMut::new(head));
                rest = tail;
            }
            part_mut(&mut targets, skip, count, |part| {
                scatter(&data[skip..skip + count], part);
            });
            let expected: Vec<u8> =
                data.iter().enumerate().map(|(at, byte)| if (skip..skip + count).contains(&at) { *byte } else { 0 }).collect();
            prop_assert!(copy == expected);
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
