//! What a test's guest and the test itself must see alike.

/// Bytes of a block of the load.
pub const BLOCK: usize = 4 << 10;

/// xorshift64*: repeatable places.
#[derive(Debug)]
pub struct Places(u64);

impl Places {
    /// From any seed.
    pub fn new(seed: u64) -> Self {
        Self(seed | 1)
    }

    /// The next one, below `limit`.
    pub fn below(&mut self, limit: u64) -> u64 {
        self.0 ^= self.0 >> 12;
        self.0 ^= self.0 << 25;
        self.0 ^= self.0 >> 27;
        self.0.wrapping_mul(0x2545_f491_4f6c_dd1d) % limit
    }
}

/// Where the load puts block `number` on a disk of `blocks` blocks: scattered, with many blocks written again by later numbers.
pub fn place(number: u64, blocks: u64) -> u64 {
    Places::new(number.wrapping_mul(0x9e37_79b9_7f4a_7c15)).below(blocks)
}
