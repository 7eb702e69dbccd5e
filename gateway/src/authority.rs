//! Clients of gRPC's C core (Python, C++, Ruby, PHP, C#) call the server at a unix socket by the socket's path, with its
//! slashes percent-encoded: `:authority: run%2Ftorpor%2Fgateway.sock`. An authority has no percent signs outside of its
//! userinfo (RFC 9110 4.2, `http::uri::Authority`), so HTTP/2 here ends every such call with PROTOCOL_ERROR, and has no
//! switch. On unix connections, where the authority means nothing, those signs are made hyphens before HTTP/2 reads them.
//!
//! Nothing else changes, no length above all: a value that is as long as it was takes the same place in HPACK's table
//! (RFC 7541 4.1), so both sides go on with the same one, and it need not be known here. Values in Huffman's code stay as
//! they are; the C core sends none.

/// How every HTTP/2 connection begins (RFC 9113 3.4).
const PREFACE: &[u8] = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n";
/// Of a frame's head, bytes.
const HEAD: usize = 9;
const HEADERS: u8 = 1;
const CONTINUATION: u8 = 9;
const END_HEADERS: u8 = 0x4;
const PADDED: u8 = 0x8;
const PRIORITY: u8 = 0x20;
/// What stands before the fields of a frame with that flag, bytes.
const PRIORITY_LENGTH: usize = 5;
/// The name whose values are changed, and its place in HPACK's static table.
const NAME: &[u8] = b":authority";
const INDEX: u32 = 1;

/// Reads what one client sends, and changes its authorities.
#[derive(Debug, Default)]
pub struct Authorities {
    at: At,
    fields: Fields,
}

/// Where in the client's bytes.
#[derive(Debug)]
enum At {
    /// So much of the preface was there.
    Preface(usize),
    Head([u8; HEAD], usize),
    /// A padded frame: the next byte says by how much. `rest`: what comes after it; `lead`: before the fields.
    PadLength {
        rest: usize,
        lead: usize,
        last: bool,
    },
    Frame(Frame),
    /// It is no HTTP/2, or none that can be read: it stays as it is.
    Off,
}

impl Default for At {
    fn default() -> Self {
        Self::Preface(0)
    }
}

/// What is left of a frame: something, fields, something.
#[derive(Clone, Copy, Debug)]
struct Frame {
    lead: usize,
    fields: usize,
    rest: usize,
    /// The header block ends with it.
    last: bool,
}

impl Frame {
    fn next(self) -> At {
        if self.lead + self.fields + self.rest == 0 { At::Head([0; HEAD], 0) } else { At::Frame(self) }
    }
}

fn frame_of(head: [u8; HEAD]) -> At {
    let [a, b, c, kind, flags, ..] = head;
    let length = u32::from_be_bytes([0, a, b, c]) as usize;
    let last = flags & END_HEADERS != 0;
    let lead = if flags & PRIORITY != 0 { PRIORITY_LENGTH } else { 0 };
    match kind {
        HEADERS if flags & PADDED != 0 => match length.checked_sub(1) {
            Some(rest) => At::PadLength { rest, lead, last },
            None => At::Off,
        },
        HEADERS => match length.checked_sub(lead) {
            Some(fields) => Frame { lead, fields, rest: 0, last }.next(),
            None => At::Off,
        },
        CONTINUATION => Frame { lead: 0, fields: length, rest: 0, last }.next(),
        _ => Frame { lead: length, fields: 0, rest: 0, last: false }.next(),
    }
}

impl Authorities {
    /// Takes the next bytes of the client, in pieces of any size.
    pub fn mend(&mut self, mut bytes: &mut [u8]) {
        while !bytes.is_empty() && !matches!(self.at, At::Off) {
            let taken = self.take(bytes);
            bytes = &mut std::mem::take(&mut bytes)[taken..];
        }
    }

    /// Takes some of the bytes; how many.
    fn take(&mut self, bytes: &mut [u8]) -> usize {
        let (taken, next) = match std::mem::replace(&mut self.at, At::Off) {
            At::Off => (bytes.len(), At::Off),
            At::Preface(there) => match (bytes[0] == PREFACE[there], there + 1 == PREFACE.len()) {
                (false, _) => (1, At::Off),
                (true, false) => (1, At::Preface(there + 1)),
                (true, true) => (1, At::Head([0; HEAD], 0)),
            },
            At::Head(mut head, there) => {
                let taken = bytes.len().min(HEAD - there);
                head[there..there + taken].copy_from_slice(&bytes[..taken]);
                (taken, if there + taken == HEAD { frame_of(head) } else { At::Head(head, there + taken) })
            }
            At::PadLength { rest, lead, last } => {
                let padding = usize::from(bytes[0]);
                let fields = rest.checked_sub(lead + padding);
                (1, fields.map_or(At::Off, |fields| Frame { lead, fields, rest: padding, last }.next()))
            }
            At::Frame(frame) if frame.lead > 0 => {
                let taken = bytes.len().min(frame.lead);
                (taken, Frame { lead: frame.lead - taken, ..frame }.next())
            }
            At::Frame(frame) if frame.fields > 0 => {
                let taken = bytes.len().min(frame.fields);
                bytes[..taken].iter_mut().for_each(|byte| self.fields.take(byte));
                let left = Frame { fields: frame.fields - taken, ..frame };
                if left.fields == 0 && left.last {
                    self.fields = Fields::default();
                }
                (taken, if matches!(self.fields, Fields::Broken) { At::Off } else { left.next() })
            }
            At::Frame(frame) => {
                let taken = bytes.len().min(frame.rest);
                (taken, Frame { rest: frame.rest - taken, ..frame }.next())
            }
        };
        self.at = next;
        taken
    }
}

/// Where in a header block, in HPACK's form (RFC 7541 6).
#[derive(Clone, Copy, Debug, Default)]
enum Fields {
    #[default]
    Start,
    /// In a number that goes on.
    Number {
        value: u32,
        shift: u32,
        of: Of,
    },
    NameLength,
    Name {
        left: u32,
        seen: usize,
        ours: bool,
    },
    ValueLength {
        ours: bool,
    },
    Value {
        left: u32,
        ours: bool,
    },
    Broken,
}

/// What a number says.
#[derive(Clone, Copy, Debug)]
enum Of {
    /// A field of the table, or the table's size: nothing follows.
    Nothing,
    /// The place of a name in the table; none: it follows. Its value follows.
    Name,
    NameLength {
        coded: bool,
    },
    ValueLength {
        ours: bool,
        coded: bool,
    },
}

/// The first byte of a number with so many bits in it.
fn number(byte: u8, bits: u32, of: Of) -> Fields {
    let most = (1_u32 << bits) - 1;
    let value = u32::from(byte) & most;
    if value == most { Fields::Number { value, shift: 0, of } } else { of.with(value) }
}

impl Of {
    /// What comes after the number.
    fn with(self, value: u32) -> Fields {
        match self {
            Self::Nothing => Fields::Start,
            Self::Name if value == 0 => Fields::NameLength,
            Self::Name => Fields::ValueLength { ours: value == INDEX },
            Self::NameLength { .. } if value == 0 => Fields::ValueLength { ours: false },
            Self::NameLength { coded } => {
                Fields::Name { left: value, seen: 0, ours: !coded && value as usize == NAME.len() }
            }
            Self::ValueLength { .. } if value == 0 => Fields::Start,
            Self::ValueLength { ours, coded } => Fields::Value { left: value, ours: ours && !coded },
        }
    }
}

impl Fields {
    fn take(&mut self, byte: &mut u8) {
        let coded = *byte & 0x80 != 0;
        *self = match *self {
            Self::Broken => Self::Broken,
            Self::Start if coded => number(*byte, 7, Of::Nothing),
            Self::Start if *byte & 0x40 != 0 => number(*byte, 6, Of::Name),
            Self::Start if *byte & 0x20 != 0 => number(*byte, 5, Of::Nothing),
            Self::Start => number(*byte, 4, Of::Name),
            // Far longer than any that is taken.
            Self::Number { shift, .. } if shift > 21 => Self::Broken,
            Self::Number { value, shift, of } => {
                let value = value + (u32::from(*byte & 0x7f) << shift);
                if coded { Self::Number { value, shift: shift + 7, of } } else { of.with(value) }
            }
            Self::NameLength => number(*byte, 7, Of::NameLength { coded }),
            Self::Name { left, seen, ours } => {
                let ours = ours && NAME.get(seen) == Some(byte);
                if left == 1 {
                    Self::ValueLength { ours }
                } else {
                    Self::Name { left: left - 1, seen: seen + 1, ours }
                }
            }
            Self::ValueLength { ours } => number(*byte, 7, Of::ValueLength { ours, coded }),
            Self::Value { left, ours } => {
                if ours && *byte == b'%' {
                    *byte = b'-';
                }
                if left == 1 { Self::Start } else { Self::Value { left: left - 1, ours } }
            }
        };
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn frame(kind: u8, flags: u8, payload: &[u8]) -> Vec<u8> {
        let length = u32::try_from(payload.len()).unwrap().to_be_bytes();
        [&length[1..], &[kind, flags, 0, 0, 0, 1], payload].concat()
    }

    fn text(value: &[u8]) -> Vec<u8> {
        // Lengths of 127 and more go on in the next byte.
        match u8::try_from(value.len()).unwrap() {
            short @ 0..127 => [&[short], value].concat(),
            long => [&[127, long - 127], value].concat(),
        }
    }

    /// The bytes after they were taken in pieces of this size.
    fn taken(bytes: &[u8], size: usize) -> Vec<u8> {
        let (mut bytes, mut authorities) = (bytes.to_vec(), Authorities::default());
        bytes.chunks_mut(size).for_each(|piece| authorities.mend(piece));
        bytes
    }

    fn check(frames: &[Vec<u8>], wanted: &[Vec<u8>]) {
        let whole = |frames: &[Vec<u8>]| [PREFACE, &frames.concat()].concat();
        for size in [1, 2, 3, 7, 1000] {
            assert_eq!(taken(&whole(frames), size), whole(wanted), "in pieces of {size}");
        }
    }

    const PATH: &[u8] = b"run%2Ftorpor%2Fgateway.sock";
    const MENDED: &[u8] = b"run-2Ftorpor-2Fgateway.sock";

    /// As the C core writes it, among others: name and value in letters, kept in the table (01000000), and a field of the
    /// table (1.......) before it.
    fn block(authority: &[u8]) -> Vec<u8> {
        let path = [&[0x44][..], &text(b"/a%20b")].concat();
        let long = [&[0x40][..], &text(b"x-long"), &text(&[b'%'; 200])].concat();
        [&[0x83, 0x3f, 0xe1, 0x1f][..], &path, &[0x40], &text(NAME), &text(authority), &long, &[0xff, 0x10]]
            .concat()
    }

    #[test]
    fn percent_signs_of_an_authority_become_hyphens_and_nothing_else_changes() {
        let data = frame(0, 1, b"\x00\x00\x00\x00\x0b:authority%");
        let frames = |authority| {
            let indexed = [&[0x41][..], &text(authority), &[0x01], &text(authority)].concat();
            [
                frame(4, 0, &[0; 12]),
                frame(HEADERS, END_HEADERS, &block(authority)),
                data.clone(),
                frame(HEADERS, END_HEADERS, &indexed),
                data.clone(),
            ]
        };
        check(&frames(PATH), &frames(MENDED));
    }

    #[test]
    fn blocks_may_be_padded_weighted_and_in_several_frames() {
        let frames = |authority: &[u8]| {
            let block = block(authority);
            let (first, second) = block.split_at(26);
            let (second, third) = second.split_at(1);
            let padded = [&[3][..], b"%%%%%", first, b"%%%"].concat();
            [
                frame(HEADERS, PADDED | PRIORITY, &padded),
                frame(CONTINUATION, 0, second),
                frame(CONTINUATION, END_HEADERS, third),
                frame(HEADERS, END_HEADERS | PRIORITY, &[b"%%%%%", block.as_slice()].concat()),
            ]
        };
        check(&frames(PATH), &frames(MENDED));
    }

    #[test]
    fn what_is_no_http_2_or_is_broken_stays_as_it_is() {
        let coded = [&[0x41, 0x80 | 3][..], b"%%%"].concat();
        let number = [0x7f, 0xff, 0xff, 0xff, 0xff, 0xff, 0x41, 1, b'%'];
        for frames in [
            [frame(HEADERS, END_HEADERS, &coded)],
            [frame(HEADERS, END_HEADERS, &number)],
            [frame(HEADERS, PADDED, &[200, b'%'])],
            [frame(HEADERS, PADDED, b"")],
        ] {
            check(&frames, &frames);
        }
        let http1 = b"GET /%20 HTTP/1.1\r\nhost: a%2Fb\r\n\r\n";
        assert_eq!(taken(http1, 3), http1);
    }
}
