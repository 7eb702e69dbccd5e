//! What a driver asks of a block device (virtio 1.2, section 5.2.6): from a chain of buffers to a checked request.

use virtio_bindings::virtio_blk::{
    VIRTIO_BLK_ID_BYTES, VIRTIO_BLK_S_IOERR, VIRTIO_BLK_S_UNSUPP, VIRTIO_BLK_T_DISCARD, VIRTIO_BLK_T_FLUSH,
    VIRTIO_BLK_T_GET_ID, VIRTIO_BLK_T_IN, VIRTIO_BLK_T_OUT, VIRTIO_BLK_T_WRITE_ZEROES,
    VIRTIO_BLK_WRITE_ZEROES_FLAG_UNMAP,
};

use crate::virtio::segments::{LastByte, Segments};

/// Bytes of a sector, in which the protocol counts whatever the block size is.
pub(crate) const SECTOR: u64 = 512;
/// Most ranges of one discard or write-zeroes request.
pub(crate) const MAX_RANGES: u32 = 32;
/// Most sectors of one such range: 256 MiB, so that the work of a request is bounded.
pub(crate) const MAX_RANGE_SECTORS: u32 = 1 << 19;
/// Longest buffer of a transfer that a driver is told of, bytes.
pub(crate) const MAX_SEGMENT: u32 = 128 << 10;
/// Most buffers of a transfer that a driver is told of: a chain as long as the queue also holds header and status.
pub(crate) const MAX_SEGMENTS: u32 = super::QUEUE_SIZE as u32 - 2;
/// Most bytes of one read or write: what a driver that keeps to these two can ask for, 31.75 MiB. How long a request keeps
/// its device busy, and a pause or a reset waiting, is bounded by it; memory is not needed for it at all, as data goes
/// straight between file and guest.
pub(crate) const MAX_TRANSFER: u64 = MAX_SEGMENT as u64 * MAX_SEGMENTS as u64;
/// Bytes of a serial number.
pub(crate) const ID_BYTES: usize = VIRTIO_BLK_ID_BYTES as usize;

/// What a driver may ask of one disk.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Limits {
    /// The disk's size, bytes.
    pub(crate) size: u64,
    /// Nothing may be changed.
    pub(crate) read_only: bool,
}

/// A range of bytes inside the disk.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Range {
    pub(crate) offset: u64,
    pub(crate) length: u64,
}

/// A checked request. Its data is what is left of the chain's buffers.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Request {
    /// Fill the writable buffers from this offset.
    Read(u64),
    /// Write the readable buffers to this offset.
    Write(u64),
    /// Make durable what was written.
    Flush,
    /// The serial number.
    Identify,
    /// Give ranges up.
    Discard(Vec<Range>),
    /// Make ranges read as zeros.
    WriteZeroes(Vec<Range>),
    /// Not to be done: the status to answer with.
    Refused(u8),
}

impl Request {
    /// It needs room on the host, perhaps.
    pub(crate) fn changes(&self) -> bool {
        matches!(self, Self::Write(_) | Self::Discard(_) | Self::WriteZeroes(_))
    }
}

/// A request that can't even be answered: the device is broken.
#[derive(Debug, thiserror::Error, PartialEq, Eq)]
pub(crate) enum Malformed {
    /// Nowhere to put the status.
    #[error("a request has no writable byte for its status")]
    NoStatus,
    /// Less than a header.
    #[error("a request has a header of {0} bytes instead of 16")]
    Header(usize),
}

const IO_ERROR: Request = Request::Refused(VIRTIO_BLK_S_IOERR as u8);
const UNSUPPORTED: Request = Request::Refused(VIRTIO_BLK_S_UNSUPP as u8);

/// Takes the header off the readable buffers and the status byte off the writable ones; what is left is the data.
pub(crate) fn parse(
    readable: &mut Segments,
    writable: &mut Segments,
    limits: &Limits,
) -> Result<(Request, LastByte), Malformed> {
    let status = writable.take_last().ok_or(Malformed::NoStatus)?;
    let mut header = [0; 16];
    match readable.take_front(&mut header) {
        16 => {}
        short => return Err(Malformed::Header(short)),
    }
    let [kind, _, sector_low, sector_high] = words(&header);
    let sector = u64::from(sector_high) << 32 | u64::from(sector_low);
    let request = match kind {
        VIRTIO_BLK_T_IN if writable.bytes() > MAX_TRANSFER => IO_ERROR,
        VIRTIO_BLK_T_IN => transfer(sector, writable.bytes(), limits).map_or(IO_ERROR, Request::Read),
        VIRTIO_BLK_T_OUT if limits.read_only || readable.bytes() > MAX_TRANSFER => IO_ERROR,
        VIRTIO_BLK_T_OUT => transfer(sector, readable.bytes(), limits).map_or(IO_ERROR, Request::Write),
        VIRTIO_BLK_T_FLUSH => Request::Flush,
        VIRTIO_BLK_T_GET_ID => Request::Identify,
        VIRTIO_BLK_T_DISCARD | VIRTIO_BLK_T_WRITE_ZEROES if limits.read_only => UNSUPPORTED,
        VIRTIO_BLK_T_DISCARD => ranges(readable, limits, 0).map_or_else(|refused| refused, Request::Discard),
        VIRTIO_BLK_T_WRITE_ZEROES => ranges(readable, limits, VIRTIO_BLK_WRITE_ZEROES_FLAG_UNMAP)
            .map_or_else(|refused| refused, Request::WriteZeroes),
        _ => UNSUPPORTED,
    };
    Ok((request, status))
}

fn words(bytes: &[u8; 16]) -> [u32; 4] {
    std::array::from_fn(|at| {
        let at = at * 4;
        u32::from_le_bytes([bytes[at], bytes[at + 1], bytes[at + 2], bytes[at + 3]])
    })
}

/// The offset of a transfer, if it is whole sectors inside the disk.
fn transfer(sector: u64, bytes: u64, limits: &Limits) -> Option<u64> {
    let offset = sector.checked_mul(SECTOR)?;
    let inside = offset.checked_add(bytes)? <= limits.size;
    (inside && bytes.is_multiple_of(SECTOR)).then_some(offset)
}

/// The ranges of a discard or write-zeroes request, with these flags allowed.
fn ranges(readable: &mut Segments, limits: &Limits, allowed: u32) -> Result<Vec<Range>, Request> {
    let bytes = readable.bytes();
    if bytes == 0 || !bytes.is_multiple_of(16) || bytes > u64::from(MAX_RANGES) * 16 {
        return Err(IO_ERROR);
    }
    let mut ranges = Vec::with_capacity(bytes as usize / 16);
    let mut entry = [0; 16];
    while readable.take_front(&mut entry) == entry.len() {
        let [sector_low, sector_high, sectors, flags] = words(&entry);
        let sector = u64::from(sector_high) << 32 | u64::from(sector_low);
        if flags & !allowed != 0 {
            return Err(UNSUPPORTED);
        }
        if sectors > MAX_RANGE_SECTORS {
            return Err(IO_ERROR);
        }
        let length = u64::from(sectors) * SECTOR;
        let offset = transfer(sector, length, limits).ok_or(IO_ERROR)?;
        ranges.push(Range { offset, length });
    }
    Ok(ranges)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const LIMITS: Limits = Limits { size: 1 << 20, read_only: false };

    fn header(kind: u32, sector: u64) -> Vec<u8> {
        let mut bytes = kind.to_le_bytes().to_vec();
        bytes.extend([0; 4]);
        bytes.extend(sector.to_le_bytes());
        bytes
    }

    fn range(sector: u64, sectors: u32, flags: u32) -> Vec<u8> {
        let mut bytes = sector.to_le_bytes().to_vec();
        bytes.extend(sectors.to_le_bytes());
        bytes.extend(flags.to_le_bytes());
        bytes
    }

    /// Segments over pieces of our own memory.
    fn segments(pieces: &mut [Vec<u8>]) -> Segments {
        let mut segments = Segments::default();
        for piece in pieces.iter_mut().filter(|piece| !piece.is_empty()) {
            segments.push(piece.as_mut_ptr(), piece.len());
        }
        segments
    }

    fn parse_bytes(readable: &[u8], writable: usize, limits: &Limits) -> Result<Request, Malformed> {
        let mut pieces = [readable.to_vec()];
        let mut room = [vec![0; writable]];
        let (mut readable, mut writable) = (segments(&mut pieces), segments(&mut room));
        parse(&mut readable, &mut writable, limits).map(|(request, _)| request)
    }

    fn parse_ok(readable: &[u8], writable: usize) -> Request {
        parse_bytes(readable, writable, &LIMITS).unwrap()
    }

    #[test]
    fn each_kind_of_request_is_understood() {
        assert_eq!(parse_ok(&header(0, 2), 1025), Request::Read(1024));
        assert_eq!(parse_ok(&[header(1, 3), vec![1; 512]].concat(), 1), Request::Write(1536));
        assert_eq!(parse_ok(&header(4, 0), 1), Request::Flush);
        assert_eq!(parse_ok(&header(8, 0), 21), Request::Identify);
        let two = [header(11, 0), range(1, 2, 0), range(4, 8, 0)].concat();
        let ranges = vec![Range { offset: 512, length: 1024 }, Range { offset: 2048, length: 4096 }];
        assert_eq!(parse_ok(&two, 1), Request::Discard(ranges));
        let zeroes = [header(13, 0), range(0, 1, 1)].concat();
        assert_eq!(parse_ok(&zeroes, 1), Request::WriteZeroes(vec![Range { offset: 0, length: 512 }]));
        for unknown in [2, 3, 5, 9, 14, 24, u32::MAX] {
            assert_eq!(parse_ok(&header(unknown, 0), 513), UNSUPPORTED, "{unknown}");
        }
    }

    #[test]
    fn transfers_that_are_not_whole_sectors_inside_the_disk_are_io_errors() {
        assert_eq!(parse_ok(&header(0, 2047), 513), Request::Read((1 << 20) - 512));
        for (sector, bytes) in
            [(0, 511), (0, 513), (2047, 1024), (2048, 512), (u64::MAX, 512), (1 << 55, 512), (2049, 0)]
        {
            assert_eq!(parse_ok(&header(0, sector), bytes + 1), IO_ERROR, "{sector} {bytes}");
            assert_eq!(
                parse_ok(&[header(1, sector), vec![0; bytes]].concat(), 1),
                IO_ERROR,
                "{sector} {bytes}"
            );
        }
    }

    #[test]
    fn a_transfer_has_a_largest_size() {
        let limits = Limits { size: 1 << 40, read_only: false };
        let most = MAX_TRANSFER as usize;
        assert_eq!(parse_bytes(&header(0, 8), most + 1, &limits), Ok(Request::Read(4096)));
        assert_eq!(parse_bytes(&header(0, 8), most + 513, &limits), Ok(IO_ERROR));
        let write = |bytes| parse_bytes(&[header(1, 8), vec![0; bytes]].concat(), 1, &limits);
        assert_eq!(write(most), Ok(Request::Write(4096)));
        assert_eq!(write(most + 512), Ok(IO_ERROR));
    }

    #[test]
    fn ranges_with_unknown_flags_too_many_or_too_large_are_refused() {
        let ask = |kind, ranges: &[Vec<u8>]| parse_ok(&[header(kind, 0), ranges.concat()].concat(), 1);
        assert_eq!(ask(11, &[range(0, 1, 1)]), UNSUPPORTED);
        assert_eq!(ask(13, &[range(0, 1, 2)]), UNSUPPORTED);
        assert_eq!(ask(11, &[]), IO_ERROR);
        assert_eq!(ask(11, &[vec![0; 15]]), IO_ERROR);
        assert_eq!(ask(11, &[range(0, 1, 0), range(2048, 1, 0)]), IO_ERROR);
        assert_eq!(ask(11, &[range(u64::MAX, u32::MAX, 0)]), IO_ERROR);
        assert_eq!(ask(11, &vec![range(0, 1, 0); 33]), IO_ERROR);
        assert!(matches!(ask(11, &vec![range(0, 1, 0); 32]), Request::Discard(_)));
        let large = Limits { size: u64::MAX, read_only: false };
        let bytes = [header(11, 0), range(0, MAX_RANGE_SECTORS + 1, 0)].concat();
        assert_eq!(parse_bytes(&bytes, 1, &large), Ok(IO_ERROR));
    }

    #[test]
    fn nothing_changes_a_read_only_disk() {
        let limits = Limits { read_only: true, ..LIMITS };
        assert_eq!(parse_bytes(&[header(1, 0), vec![0; 512]].concat(), 1, &limits), Ok(IO_ERROR));
        assert_eq!(parse_bytes(&[header(11, 0), range(0, 1, 0)].concat(), 1, &limits), Ok(UNSUPPORTED));
        assert_eq!(parse_bytes(&[header(13, 0), range(0, 1, 0)].concat(), 1, &limits), Ok(UNSUPPORTED));
        assert_eq!(parse_bytes(&header(0, 0), 513, &limits), Ok(Request::Read(0)));
    }

    #[test]
    fn a_request_without_room_for_a_status_or_with_half_a_header_is_malformed() {
        assert_eq!(parse_bytes(&header(0, 0), 0, &LIMITS), Err(Malformed::NoStatus));
        assert_eq!(parse_bytes(&header(0, 0)[..15], 1, &LIMITS), Err(Malformed::Header(15)));
        assert_eq!(parse_bytes(&[], 1, &LIMITS), Err(Malformed::Header(0)));
    }

    proptest! {
        #[test]
        fn how_the_bytes_are_cut_into_buffers_makes_no_difference(
            kind in prop::sample::select(vec![0u32, 1, 4, 8, 11, 13, 77]),
            sector in prop_oneof![0u64..2100, any::<u64>()],
            data in prop::collection::vec(any::<u8>(), 0..1100),
            room in 1usize..1100,
            cuts in prop::collection::vec(1usize..40, 0..60),
        ) {
            let bytes = [header(kind, sector), data].concat();
            let whole = parse_bytes(&bytes, room, &LIMITS);
            let mut rest = &bytes[..];
            let mut pieces = Vec::new();
            for cut in &cuts {
                let (piece, after) = rest.split_at((*cut).min(rest.len()));
                pieces.push(piece.to_vec());
                rest = after;
            }
            pieces.push(rest.to_vec());
            let mut rooms: Vec<Vec<u8>> = cuts.iter().map(|cut| vec![0; *cut]).collect();
            let rooms_sum: usize = cuts.iter().sum();
            rooms.push(vec![0; room.saturating_sub(rooms_sum)]);
            prop_assume!(rooms_sum <= room);
            let (mut readable, mut writable) = (segments(&mut pieces), segments(&mut rooms));
            let cut = parse(&mut readable, &mut writable, &LIMITS);
            prop_assert_eq!(cut.map(|(request, _)| request), whole);
            prop_assert_eq!(writable.bytes() as usize, room - 1);
        }

        #[test]
        fn what_is_accepted_lies_inside_the_disk(
            kind in prop::sample::select(vec![0u32, 1, 11, 13]),
            sector in prop_oneof![0u64..2100, any::<u64>()],
            data in prop::collection::vec(any::<u8>(), 0..600),
            room in 1usize..2000,
        ) {
            let length = data.len() as u64;
            match parse_bytes(&[header(kind, sector), data].concat(), room, &LIMITS).unwrap() {
                Request::Read(offset) => prop_assert!(offset + room as u64 - 1 <= LIMITS.size),
                Request::Write(offset) => prop_assert!(offset + length <= LIMITS.size),
                Request::Discard(ranges) | Request::WriteZeroes(ranges) => {
                    for range in ranges {
                        prop_assert!(range.offset + range.length <= LIMITS.size);
                    }
                }
                Request::Refused(status) => prop_assert!(status != 0),
                other => prop_assert!(false, "{other:?}"),
            }
        }
    }
}
