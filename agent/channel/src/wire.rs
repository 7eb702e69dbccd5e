//! Greetings and frames: encoding, and a decoder that finds its place again after any dirt.

use bytes::{Buf as _, BufMut as _, Bytes, BytesMut};

/// Version of this framing, spoken by both ends.
pub const VERSION: u8 = 1;

/// Most data bytes in one frame.
pub(crate) const MAX_PAYLOAD: usize = 16 * 1024;
pub(crate) const HEADER: usize = 16;
pub(crate) const TRAILER: usize = 8;
/// A whole greeting: magic, version, nonce.
pub(crate) const GREETING: usize = 33;
/// Longer than the rest of any frame that was cut, so that a greeting after it is always seen.
const PADDING: usize = HEADER + MAX_PAYLOAD + TRAILER + 32;

// No zero byte in any of these: padding is zeros.
const HELLO: [u8; 16] = *b"\xf5torpor:hello\xa7\r\n";
const WELCOME: [u8; 16] = *b"\xf6torpor:welcom\xa7\n";
const MARKER: [u8; 2] = [0xd7, 0x1c];

/// Names one session. Drawn anew by the host for each.
pub(crate) type Nonce = [u8; 16];

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Side {
    Host,
    Guest,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Kind {
    /// The host has seen the welcome; the guest may speak.
    Start,
    Data,
    /// No more data from the sender.
    Close,
}

impl Kind {
    fn byte(self) -> u8 {
        match self {
            Self::Start => 1,
            Self::Data => 2,
            Self::Close => 3,
        }
    }

    fn from_byte(byte: u8) -> Option<Self> {
        [Self::Start, Self::Data, Self::Close].into_iter().find(|kind| kind.byte() == byte)
    }
}

/// Marks the frames of one session.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Tag(u64);

impl Tag {
    pub(crate) fn of(nonce: &Nonce) -> Self {
        let number = u128::from_le_bytes(*nonce);
        let mixed = (number as u64 ^ 0x9e37_79b9_7f4a_7c15).wrapping_mul(0xff51_afd7_ed55_8ccd);
        Self(mixed ^ (number >> 64) as u64)
    }
}

pub(crate) fn put_padding(out: &mut BytesMut) {
    out.put_bytes(0, PADDING);
}

/// Writes the greeting that `from` sends.
pub(crate) fn put_greeting(out: &mut BytesMut, from: Side, nonce: &Nonce) {
    out.put_slice(magic(from));
    out.put_u8(VERSION);
    out.put_slice(nonce);
}

/// Writes one frame. `data` has at most [`MAX_PAYLOAD`] bytes.
pub(crate) fn put_frame(out: &mut BytesMut, tag: Tag, kind: Kind, data: &[u8]) {
    debug_assert!(data.len() <= MAX_PAYLOAD);
    out.reserve(HEADER + data.len() + TRAILER);
    out.put_slice(&MARKER);
    out.put_u8(kind.byte());
    out.put_u8(VERSION);
    out.put_u32_le(data.len() as u32);
    out.put_u64_le(tag.0);
    out.put_slice(data);
    out.put_u64_le(!tag.0);
}

fn magic(from: Side) -> &'static [u8; 16] {
    match from {
        Side::Host => &HELLO,
        Side::Guest => &WELCOME,
    }
}

/// Reads the header at the start of `bytes`: kind and length, when it is one of this session.
fn header(bytes: &[u8], tag: Tag) -> Option<(Kind, usize)> {
    let mut head = bytes.get(..HEADER)?;
    if !head.starts_with(&MARKER) {
        return None;
    }
    head.advance(MARKER.len());
    let kind = Kind::from_byte(head.get_u8())?;
    let version = head.get_u8();
    let length = head.get_u32_le() as usize;
    (version == VERSION && length <= MAX_PAYLOAD && head.get_u64_le() == tag.0).then_some((kind, length))
}

#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Item {
    Greeting {
        version: u8,
        nonce: Nonce,
    },
    Frame {
        kind: Kind,
        data: Bytes,
    },
    /// What came is not a frame of the session; the decoder looks for the next greeting.
    Lost,
}

/// Turns bytes into [`Item`]s.
pub(crate) struct Decoder {
    peer: Side,
    buffer: BytesMut,
    tag: Option<Tag>,
    /// True from the first frame of the session on: then frames must follow each other without a gap.
    strict: bool,
}

impl Decoder {
    /// A decoder of what `peer` sends.
    pub(crate) fn new(peer: Side) -> Self {
        Self { peer, buffer: BytesMut::new(), tag: None, strict: false }
    }

    /// Where to put bytes that came in, with room for some.
    pub(crate) fn space(&mut self) -> &mut BytesMut {
        self.buffer.reserve(HEADER + MAX_PAYLOAD + TRAILER);
        &mut self.buffer
    }

    /// Looks for frames of this session from now on. What stands before the first one is skipped: greetings are repeated.
    pub(crate) fn expect(&mut self, tag: Tag) {
        self.tag = Some(tag);
        self.strict = false;
    }

    /// The next item, none when more bytes are needed.
    pub(crate) fn next(&mut self) -> Option<Item> {
        match (self.strict, self.tag) {
            (true, Some(tag)) => self.frame(tag),
            _ => self.scan(),
        }
    }

    fn frame(&mut self, tag: Tag) -> Option<Item> {
        if self.buffer.len() < HEADER {
            // A greeting is longer than a header, so nothing is missed by waiting.
            return None;
        }
        let Some((kind, length)) = header(&self.buffer, tag) else {
            return Some(self.lose());
        };
        if self.buffer.len() < HEADER + length + TRAILER {
            return None;
        }
        self.buffer.advance(HEADER);
        let data = self.buffer.split_to(length).freeze();
        if self.buffer.get_u64_le() != !tag.0 {
            return Some(self.lose());
        }
        Some(Item::Frame { kind, data })
    }

    fn lose(&mut self) -> Item {
        self.tag = None;
        self.strict = false;
        Item::Lost
    }

    fn scan(&mut self) -> Option<Item> {
        let magic = magic(self.peer);
        // Greeting magic and header are both 16 bytes.
        let found = self.buffer.windows(HEADER).enumerate().find_map(|(at, window)| {
            if window == magic {
                return Some((at, None));
            }
            self.tag.filter(|tag| header(window, *tag).is_some()).map(|tag| (at, Some(tag)))
        });
        let Some((at, session)) = found else {
            let keep = self.buffer.len().min(HEADER - 1);
            self.buffer.advance(self.buffer.len() - keep);
            return None;
        };
        self.buffer.advance(at);
        if let Some(tag) = session {
            self.strict = true;
            return self.frame(tag);
        }
        if self.buffer.len() < GREETING {
            return None;
        }
        self.buffer.advance(magic.len());
        let version = self.buffer.get_u8();
        let mut nonce = Nonce::default();
        self.buffer.copy_to_slice(&mut nonce);
        Some(Item::Greeting { version, nonce })
    }
}
