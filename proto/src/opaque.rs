//! Messages that are carried but not understood.

use std::fmt;

use prost::{
    DecodeError, Message,
    bytes::{Buf, BufMut},
    encoding::{self, DecodeContext, WireType},
};

/// Any message, as the bytes that it came in: fields that nobody here knows are given back as they were sent.
#[derive(Clone, Default, PartialEq, Eq, Hash)]
pub struct Opaque(Vec<u8>);

impl Opaque {
    /// Its encoding.
    pub fn bytes(&self) -> &[u8] {
        &self.0
    }
}

impl From<Vec<u8>> for Opaque {
    fn from(encoded: Vec<u8>) -> Self {
        Self(encoded)
    }
}

/// It may hold secrets: only its size is told.
impl fmt::Debug for Opaque {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Opaque({} bytes)", self.0.len())
    }
}

impl Message for Opaque {
    fn encode_raw(&self, buf: &mut impl BufMut) {
        buf.put_slice(&self.0);
    }

    fn merge_field(
        &mut self,
        tag: u32,
        wire_type: WireType,
        buf: &mut impl Buf,
        ctx: DecodeContext,
    ) -> Result<(), DecodeError> {
        match wire_type {
            WireType::Varint => {
                let value = encoding::decode_varint(buf)?;
                encoding::encode_key(tag, wire_type, &mut self.0);
                encoding::encode_varint(value, &mut self.0);
            }
            WireType::ThirtyTwoBit => {
                let mut value = 0;
                encoding::fixed32::merge(wire_type, &mut value, buf, ctx)?;
                encoding::fixed32::encode(tag, &value, &mut self.0);
            }
            WireType::SixtyFourBit => {
                let mut value = 0;
                encoding::fixed64::merge(wire_type, &mut value, buf, ctx)?;
                encoding::fixed64::encode(tag, &value, &mut self.0);
            }
            WireType::LengthDelimited => {
                let mut value = Vec::new();
                encoding::bytes::merge(wire_type, &mut value, buf, ctx)?;
                encoding::bytes::encode(tag, &value, &mut self.0);
            }
            // Groups are not of proto3.
            WireType::StartGroup | WireType::EndGroup => encoding::skip_field(wire_type, tag, buf, ctx)?,
        }
        Ok(())
    }

    fn encoded_len(&self) -> usize {
        self.0.len()
    }

    fn clear(&mut self) {
        self.0.clear();
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::openshell::v1::SandboxSpec;

    #[test]
    fn fields_that_nobody_knows_are_given_back_as_they_were_sent() {
        // 1: varint 300; 2: "abc"; 3: fixed32; 4: fixed64; 900: "z".
        let policy = [
            &[0x08, 0xac, 0x02, 0x12, 3][..],
            b"abc",
            &[0x1d, 1, 2, 3, 4, 0x21, 1, 2, 3, 4, 5, 6, 7, 8, 0xa2, 0x38, 1],
            b"z",
        ]
        .concat();
        let spec = SandboxSpec { policy: Some(policy.clone().into()), ..SandboxSpec::default() };
        let back = SandboxSpec::decode(spec.encode_to_vec().as_slice()).expect("decodes");
        assert_eq!(back.policy.expect("is there").bytes(), policy);
    }

    #[test]
    fn what_is_cut_short_is_refused() {
        assert!(Opaque::decode(&[0x12, 3, b'a'][..]).is_err());
        assert!(Opaque::decode(&[0x21, 1][..]).is_err());
        assert!(Opaque::decode(&[0x0b, 0x08, 0x01][..]).is_err(), "a group without an end");
    }
}
