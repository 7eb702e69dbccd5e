//! The header that each packet begins with (virtio 1.2, 5.10.6).

/// Bytes of a header.
pub(super) const HEADER_BYTES: usize = 44;
/// The host's context id.
pub(super) const HOST_CID: u64 = 2;
/// The only type of connection here.
pub(super) const STREAM: u16 = 1;
/// Most bytes of data in one packet to the guest; its buffers are smaller.
pub(super) const MAX_DATA: usize = 64 << 10;

/// What a packet is for.
pub(super) mod operation {
    pub(in super::super) const REQUEST: u16 = 1;
    pub(in super::super) const RESPONSE: u16 = 2;
    pub(in super::super) const RESET: u16 = 3;
    pub(in super::super) const SHUTDOWN: u16 = 4;
    pub(in super::super) const DATA: u16 = 5;
    pub(in super::super) const CREDIT_UPDATE: u16 = 6;
    pub(in super::super) const CREDIT_REQUEST: u16 = 7;
}

/// Flags of a shutdown: who says it will not receive, or not send, any more.
pub(super) mod shut {
    pub(in super::super) const RECEIVE: u32 = 1;
    pub(in super::super) const SEND: u32 = 2;
    pub(in super::super) const BOTH: u32 = 3;
}

/// A header.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Header {
    pub(super) source_cid: u64,
    pub(super) target_cid: u64,
    pub(super) source_port: u32,
    pub(super) target_port: u32,
    /// Bytes of data that follow.
    pub(super) length: u32,
    pub(super) kind: u16,
    pub(super) operation: u16,
    pub(super) flags: u32,
    /// The sender's buffer for this connection, bytes.
    pub(super) window: u32,
    /// Bytes that the sender has taken out of it, ever, modulo 2^32.
    pub(super) forwarded: u32,
}

impl Header {
    pub(super) fn parse(bytes: &[u8; HEADER_BYTES]) -> Self {
        let number = |at: usize, length: usize| {
            bytes[at..at + length].iter().rev().fold(0_u64, |number, byte| number << 8 | u64::from(*byte))
        };
        Self {
            source_cid: number(0, 8),
            target_cid: number(8, 8),
            source_port: number(16, 4) as u32,
            target_port: number(20, 4) as u32,
            length: number(24, 4) as u32,
            kind: number(28, 2) as u16,
            operation: number(30, 2) as u16,
            flags: number(32, 4) as u32,
            window: number(36, 4) as u32,
            forwarded: number(40, 4) as u32,
        }
    }

    pub(super) fn bytes(&self) -> [u8; HEADER_BYTES] {
        let mut bytes = [0; HEADER_BYTES];
        let mut put = |at: usize, field: &[u8]| bytes[at..at + field.len()].copy_from_slice(field);
        put(0, &self.source_cid.to_le_bytes());
        put(8, &self.target_cid.to_le_bytes());
        put(16, &self.source_port.to_le_bytes());
        put(20, &self.target_port.to_le_bytes());
        put(24, &self.length.to_le_bytes());
        put(28, &self.kind.to_le_bytes());
        put(30, &self.operation.to_le_bytes());
        put(32, &self.flags.to_le_bytes());
        put(36, &self.window.to_le_bytes());
        put(40, &self.forwarded.to_le_bytes());
        bytes
    }

    /// The reset that answers this packet.
    pub(super) fn reset(&self) -> Self {
        Self {
            source_cid: self.target_cid,
            target_cid: self.source_cid,
            source_port: self.target_port,
            target_port: self.source_port,
            kind: self.kind,
            operation: operation::RESET,
            ..Self::default()
        }
    }
}

#[cfg(test)]
mod tests {
    use virtio_vsock::packet::{PacketHeader, VsockPacket};

    use super::*;

    #[test]
    fn a_header_lies_in_memory_as_the_vsock_crate_lays_it_out() {
        assert_eq!(size_of::<PacketHeader>(), HEADER_BYTES);
        let header = Header {
            source_cid: 0x0102_0304_0506_0708,
            target_cid: 0x1112_1314_1516_1718,
            source_port: 0x2122_2324,
            target_port: 0x3132_3334,
            length: 0x4142_4344,
            kind: 0x5152,
            operation: 0x6162,
            flags: 0x7172_7374,
            window: 0x8182_8384,
            forwarded: 0x9192_9394,
        };
        let bytes = header.bytes();
        assert_eq!(Header::parse(&bytes), header);
        let mut memory = [0; HEADER_BYTES];
        // SAFETY: the memory outlives the packet; there is no data.
        let mut packet = unsafe { VsockPacket::new(&mut memory, None).unwrap() };
        packet.set_header_from_raw(&bytes).unwrap();
        assert_eq!((packet.src_cid(), packet.dst_cid()), (header.source_cid, header.target_cid));
        assert_eq!((packet.src_port(), packet.dst_port()), (header.source_port, header.target_port));
        assert_eq!(
            (packet.len(), packet.type_(), packet.op()),
            (header.length, header.kind, header.operation)
        );
        assert_eq!(
            (packet.flags(), packet.buf_alloc(), packet.fwd_cnt()),
            (header.flags, header.window, header.forwarded)
        );
    }
}
