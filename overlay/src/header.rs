//! The qcow2 header: parsed from any bytes, written for our layout.
//!
//! Format: qemu's docs/interop/qcow2.txt. All numbers are big-endian.

use std::os::unix::ffi::OsStrExt;

use serde::{Deserialize, Serialize};

use crate::base::BaseIdentity;
use crate::create::Layer;
use crate::error::Flaw;
use crate::layout::{CLUSTER, CLUSTER_BITS, Layout};

/// "QFI\xfb".
const MAGIC: u32 = 0x5146_49fb;
/// Header extension: name of the backing file's format.
const EXT_BACKING_FORMAT: u32 = 0xe279_2aca;
/// Header extension of ours ("Torp"): generation, state, identity of the base.
const EXT_TORPOR: u32 = 0x546f_7270;
/// Length of the header fields of version 3 that we write.
const V3_LENGTH: usize = 104;
/// Length of the fixed part of our extension: layout version, JSON length, generation, state, reserved.
const TORPOR_FIXED: usize = 32;
/// Version of our extension's layout.
const TORPOR_VERSION: u32 = 1;
/// Longest backing file name that the format allows.
const MAX_BACKING_NAME: usize = 1023;
/// How much of a file is read to find the header, its extensions and the backing file's name.
pub(crate) const PREFIX: u64 = CLUSTER;
/// Offset of the virtual size, which grow changes together with the L1 size.
pub(crate) const OFFSET_SIZE: usize = 24;
/// Offset of the number of L1 entries.
pub(crate) const OFFSET_L1_SIZE: usize = 36;

/// Incompatible feature: refcounts may be wrong (lazy refcounts after a crash).
pub(crate) const INCOMPATIBLE_DIRTY: u64 = 1;
/// Incompatible feature: the image was marked corrupt.
pub(crate) const INCOMPATIBLE_CORRUPT: u64 = 1 << 1;
/// Incompatible feature: guest data is in another file.
pub(crate) const INCOMPATIBLE_EXTERNAL_DATA: u64 = 1 << 2;
/// Incompatible feature: another compression than deflate.
pub(crate) const INCOMPATIBLE_COMPRESSION: u64 = 1 << 3;
/// Incompatible feature: L2 entries of 16 bytes with subclusters.
pub(crate) const INCOMPATIBLE_EXTENDED_L2: u64 = 1 << 4;
const INCOMPATIBLE_KNOWN: u64 = INCOMPATIBLE_DIRTY
    | INCOMPATIBLE_CORRUPT
    | INCOMPATIBLE_EXTERNAL_DATA
    | INCOMPATIBLE_COMPRESSION
    | INCOMPATIBLE_EXTENDED_L2;

/// What the last writer left behind.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum State {
    /// Closed in order.
    Clean,
    /// Open for writing, or its writer died.
    Open,
    /// Read-only for ever: other overlays stand on it.
    Sealed,
}

impl State {
    pub(crate) fn to_number(self) -> u64 {
        match self {
            Self::Clean => 0,
            Self::Open => 1,
            Self::Sealed => 2,
        }
    }

    fn from_number(number: u64) -> Result<Self, Flaw> {
        match number {
            0 => Ok(Self::Clean),
            1 => Ok(Self::Open),
            2 => Ok(Self::Sealed),
            other => {
                Err(Flaw::unsupported(format!("state {other} in the torpor header extension is unknown")))
            }
        }
    }
}

/// What kind of file an overlay stands on.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub(crate) enum BaseFormat {
    /// It stands alone.
    None,
    /// A raw image.
    #[default]
    Raw,
    /// A sealed overlay of ours.
    Qcow2,
}

impl BaseFormat {
    /// The name in the backing format extension.
    fn name(self) -> Option<&'static str> {
        match self {
            Self::None => None,
            Self::Raw => Some("raw"),
            Self::Qcow2 => Some("qcow2"),
        }
    }
}

/// The JSON in our header extension.
#[derive(Debug, Serialize, Deserialize)]
struct Recorded {
    #[serde(flatten)]
    identity: BaseIdentity,
    #[serde(default)]
    format: BaseFormat,
}

/// Our header extension.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Torpor {
    /// Raised at every open for writing.
    pub(crate) generation: u64,
    /// What the last writer left behind.
    pub(crate) state: State,
    /// The base that the overlay stands on.
    pub(crate) identity: BaseIdentity,
    /// What the base is.
    pub(crate) format: BaseFormat,
    /// File offset of the generation (8 bytes); the state (8 bytes) follows.
    pub(crate) offset: u64,
}

/// A parsed header of any qcow2 image.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Header {
    pub(crate) version: u32,
    pub(crate) cluster_bits: u32,
    pub(crate) virtual_bytes: u64,
    pub(crate) encryption: u32,
    pub(crate) l1_entries: u32,
    pub(crate) l1_offset: u64,
    pub(crate) refcount_table_offset: u64,
    pub(crate) refcount_table_clusters: u32,
    pub(crate) snapshots: u32,
    pub(crate) incompatible: u64,
    pub(crate) compatible: u64,
    pub(crate) autoclear: u64,
    pub(crate) refcount_order: u32,
    pub(crate) compression: u8,
    /// Backing file name as it stands there; empty when there is none.
    pub(crate) backing_name: Vec<u8>,
    /// Backing file format, empty when not given.
    pub(crate) backing_format: Vec<u8>,
    pub(crate) torpor: Option<Torpor>,
}

impl Header {
    /// Parses the first bytes of a file (up to [`PREFIX`]). Never panics, allocates at most what it was given.
    pub(crate) fn parse(bytes: &[u8]) -> Result<Self, Flaw> {
        let fields = Fields(bytes);
        if fields.u32(0)? != MAGIC {
            return Err(Flaw::corrupt("it doesn't begin with the qcow2 magic number"));
        }
        let version = fields.u32(4)?;
        let mut header = Self {
            version,
            cluster_bits: fields.u32(20)?,
            virtual_bytes: fields.u64(OFFSET_SIZE)?,
            encryption: fields.u32(32)?,
            l1_entries: fields.u32(OFFSET_L1_SIZE)?,
            l1_offset: fields.u64(40)?,
            refcount_table_offset: fields.u64(48)?,
            refcount_table_clusters: fields.u32(56)?,
            snapshots: fields.u32(60)?,
            incompatible: 0,
            compatible: 0,
            autoclear: 0,
            refcount_order: 4,
            compression: 0,
            backing_name: Vec::new(),
            backing_format: Vec::new(),
            torpor: None,
        };
        let length = header.parse_version(&fields)?;
        header.check_ranges()?;
        header.backing_name = header.parse_backing_name(&fields)?;
        header.parse_extensions(&fields, length)?;
        Ok(header)
    }

    /// Bytes of a cluster of this image.
    pub(crate) fn cluster_bytes(&self) -> u64 {
        1 << self.cluster_bits
    }

    fn parse_version(&mut self, fields: &Fields<'_>) -> Result<usize, Flaw> {
        match self.version {
            2 => Ok(72),
            3 => self.parse_version_3(fields),
            other => Err(Flaw::unsupported(format!("qcow2 version {other} is unknown (2 and 3 are known)"))),
        }
    }

    fn parse_version_3(&mut self, fields: &Fields<'_>) -> Result<usize, Flaw> {
        self.incompatible = fields.u64(72)?;
        self.compatible = fields.u64(80)?;
        self.autoclear = fields.u64(88)?;
        self.refcount_order = fields.u32(96)?;
        let length = fields.u32(100)? as usize;
        let unknown = self.incompatible & !INCOMPATIBLE_KNOWN;
        if unknown != 0 {
            return Err(Flaw::unsupported(format!("incompatible feature bits {unknown:#x} are unknown")));
        }
        if length < V3_LENGTH || !length.is_multiple_of(8) {
            return Err(Flaw::corrupt(format!("the header length is {length}")));
        }
        if length > V3_LENGTH {
            self.compression = fields.bytes(V3_LENGTH, 1)?[0];
        }
        Ok(length)
    }

    fn check_ranges(&self) -> Result<(), Flaw> {
        if !(9..=21).contains(&self.cluster_bits) {
            return Err(Flaw::corrupt(format!("cluster bits are {}, not 9 to 21", self.cluster_bits)));
        }
        if self.refcount_order > 6 {
            return Err(Flaw::corrupt(format!("the refcount order is {}, above 6", self.refcount_order)));
        }
        let mask = self.cluster_bytes() - 1;
        for (name, offset) in [("L1", self.l1_offset), ("refcount", self.refcount_table_offset)] {
            if offset & mask != 0 || offset > i64::MAX as u64 {
                return Err(Flaw::corrupt(format!("the {name} table's offset {offset:#x} is no cluster's")));
            }
        }
        Ok(())
    }

    fn parse_backing_name(&self, fields: &Fields<'_>) -> Result<Vec<u8>, Flaw> {
        let (offset, length) = (fields.u64(8)?, fields.u32(16)? as usize);
        if offset == 0 {
            return Ok(Vec::new());
        }
        if length > MAX_BACKING_NAME || offset > self.cluster_bytes() {
            return Err(Flaw::corrupt(format!("the backing name has {length} bytes at offset {offset}")));
        }
        let offset = usize::try_from(offset).map_err(|_| Flaw::corrupt("the backing name lies too far"))?;
        Ok(fields.bytes(offset, length)?.to_vec())
    }

    fn parse_extensions(&mut self, fields: &Fields<'_>, start: usize) -> Result<(), Flaw> {
        let end = match fields.u64(8)? {
            0 => self.cluster_bytes().min(PREFIX) as usize,
            offset => offset as usize,
        };
        let mut at = start;
        // A header without an end mark may fill its room to the last byte.
        while at + 8 <= end {
            let (kind, length) = (fields.u32(at)?, fields.u32(at + 4)? as usize);
            if kind == 0 {
                break;
            }
            if length > end - at - 8 {
                return Err(Flaw::corrupt(format!("header extension {kind:#010x} has {length} bytes")));
            }
            let data = fields.bytes(at + 8, length)?;
            match kind {
                EXT_BACKING_FORMAT => self.backing_format = data.to_vec(),
                EXT_TORPOR => self.torpor = Some(Torpor::parse(data, at as u64 + 8)?),
                _ => {}
            }
            at += 8 + length.next_multiple_of(8);
        }
        Ok(())
    }
}

impl Torpor {
    fn parse(data: &[u8], offset: u64) -> Result<Self, Flaw> {
        let fields = Fields(data);
        let version = fields.u32(0)?;
        if version != TORPOR_VERSION {
            return Err(Flaw::unsupported(format!(
                "torpor header extension of version {version} is unknown"
            )));
        }
        let json = fields.bytes(TORPOR_FIXED, fields.u32(4)? as usize)?;
        let recorded: Recorded = serde_json::from_slice(json)
            .map_err(|error| Flaw::corrupt(format!("the base identity isn't readable: {error}")))?;
        Ok(Self {
            generation: fields.u64(8)?,
            state: State::from_number(fields.u64(16)?)?,
            identity: recorded.identity,
            format: recorded.format,
            offset: offset + 8,
        })
    }
}

/// The two numbers of our extension that change in place, as they stand in the file.
pub(crate) fn generation_and_state(generation: u64, state: State) -> [u8; 16] {
    let mut bytes = [0; 16];
    bytes[..8].copy_from_slice(&generation.to_be_bytes());
    bytes[8..].copy_from_slice(&state.to_number().to_be_bytes());
    bytes
}

/// The header of a new overlay of ours: fields, our extension, backing format, backing name.
pub(crate) fn encode(layout: &Layout, layer: &Layer<'_>) -> Result<Vec<u8>, Flaw> {
    let name = layer.path.as_os_str().as_bytes();
    if name.len() > MAX_BACKING_NAME {
        return Err(Flaw::unsupported(format!(
            "the base's path has {} bytes, more than the {MAX_BACKING_NAME} that qcow2 allows",
            name.len()
        )));
    }
    let json = serde_json::to_vec(&Recorded { identity: layer.identity.clone(), format: layer.format })
        .map_err(|error| Flaw::unsupported(format!("the base identity isn't writable: {error}")))?;
    // Our extension comes first: generation and state then lie in the file's first sector at a multiple of 8,
    // so that one write of both can't be torn.
    let mut extensions = Vec::new();
    push_extension(&mut extensions, EXT_TORPOR, &torpor_payload(&json, layer.generation));
    if let Some(name) = layer.format.name() {
        push_extension(&mut extensions, EXT_BACKING_FORMAT, name.as_bytes());
    }
    push_extension(&mut extensions, 0, &[]);
    let offset = match layer.format {
        BaseFormat::None => 0,
        _ => (V3_LENGTH + extensions.len()) as u64,
    };
    let mut bytes = fixed_fields(layout, offset, name.len() as u32);
    bytes.extend_from_slice(&extensions);
    bytes.extend_from_slice(name);
    Ok(bytes)
}

fn fixed_fields(layout: &Layout, backing_offset: u64, backing_length: u32) -> Vec<u8> {
    let mut bytes = Vec::with_capacity(4096);
    let numbers32 = |bytes: &mut Vec<u8>, number: u32| bytes.extend_from_slice(&number.to_be_bytes());
    let numbers64 = |bytes: &mut Vec<u8>, number: u64| bytes.extend_from_slice(&number.to_be_bytes());
    numbers32(&mut bytes, MAGIC);
    numbers32(&mut bytes, 3);
    numbers64(&mut bytes, backing_offset);
    numbers32(&mut bytes, backing_length);
    numbers32(&mut bytes, CLUSTER_BITS);
    numbers64(&mut bytes, layout.virtual_bytes);
    numbers32(&mut bytes, 0); // encryption: none
    numbers32(&mut bytes, layout.l2.1 as u32);
    numbers64(&mut bytes, layout.l1.0 * CLUSTER);
    numbers64(&mut bytes, layout.refcount_table.0 * CLUSTER);
    numbers32(&mut bytes, layout.refcount_table.1 as u32);
    numbers32(&mut bytes, 0); // internal snapshots: none
    numbers64(&mut bytes, 0);
    numbers64(&mut bytes, 0); // incompatible, compatible and autoclear features: none
    numbers64(&mut bytes, 0);
    numbers64(&mut bytes, 0);
    numbers32(&mut bytes, 4); // refcounts of 2^4 bits
    numbers32(&mut bytes, V3_LENGTH as u32);
    bytes
}

fn torpor_payload(json: &[u8], generation: u64) -> Vec<u8> {
    let mut payload = Vec::with_capacity(TORPOR_FIXED + json.len());
    payload.extend_from_slice(&TORPOR_VERSION.to_be_bytes());
    payload.extend_from_slice(&(json.len() as u32).to_be_bytes());
    payload.extend_from_slice(&generation_and_state(generation, State::Clean));
    payload.extend_from_slice(&[0; 8]);
    payload.extend_from_slice(json);
    payload
}

fn push_extension(to: &mut Vec<u8>, kind: u32, data: &[u8]) {
    to.extend_from_slice(&kind.to_be_bytes());
    to.extend_from_slice(&(data.len() as u32).to_be_bytes());
    to.extend_from_slice(data);
    to.resize(to.len().next_multiple_of(8), 0);
}

/// Bounds-checked big-endian access.
struct Fields<'a>(&'a [u8]);

impl Fields<'_> {
    fn bytes(&self, offset: usize, length: usize) -> Result<&[u8], Flaw> {
        offset
            .checked_add(length)
            .and_then(|end| self.0.get(offset..end))
            .ok_or_else(|| Flaw::corrupt(format!("the header ends before offset {offset} + {length} bytes")))
    }

    fn array<const N: usize>(&self, offset: usize) -> Result<[u8; N], Flaw> {
        let mut array = [0; N];
        array.copy_from_slice(self.bytes(offset, N)?);
        Ok(array)
    }

    fn u32(&self, offset: usize) -> Result<u32, Flaw> {
        self.array(offset).map(u32::from_be_bytes)
    }

    fn u64(&self, offset: usize) -> Result<u64, Flaw> {
        self.array(offset).map(u64::from_be_bytes)
    }
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use proptest::prelude::*;

    use super::*;

    fn sample() -> Vec<u8> {
        let identity = BaseIdentity { digest: format!("sha256:{}", "a".repeat(64)), size: 1 << 20 };
        let layout = Layout::for_size(10 << 30).unwrap();
        let path = Path::new("/images/base.raw");
        encode(&layout, &Layer { path, format: BaseFormat::Raw, identity: &identity, generation: 0 }).unwrap()
    }

    #[test]
    fn a_written_header_is_read_back() {
        let header = Header::parse(&sample()).unwrap();
        assert_eq!(header.virtual_bytes, 10 << 30);
        assert_eq!(header.backing_name, b"/images/base.raw");
        assert_eq!(header.backing_format, b"raw");
        let torpor = header.torpor.unwrap();
        assert_eq!((torpor.generation, torpor.state, torpor.identity.size), (0, State::Clean, 1 << 20));
    }

    #[test]
    fn generation_and_state_share_the_first_sector_and_can_not_be_torn() {
        let offset = Header::parse(&sample()).unwrap().torpor.unwrap().offset;
        assert_eq!(offset % 8, 0);
        assert!(offset + 16 <= 512);
    }

    #[test]
    fn unknown_feature_bits_and_versions_are_unsupported() {
        let mut bytes = sample();
        bytes[72] = 0x80;
        assert!(matches!(Header::parse(&bytes), Err(Flaw::Unsupported(_))));
        let mut bytes = sample();
        bytes[7] = 4;
        assert!(matches!(Header::parse(&bytes), Err(Flaw::Unsupported(_))));
    }

    #[test]
    fn a_header_cut_anywhere_is_an_error_and_no_panic() {
        let bytes = sample();
        for length in 0..bytes.len() {
            assert!(Header::parse(&bytes[..length]).is_err(), "{length}");
        }
    }

    proptest! {
        #[test]
        fn changed_headers_never_panic(changes in prop::collection::vec((0usize..400, any::<u8>()), 1..12)) {
            let mut bytes = sample();
            for (at, value) in changes {
                if let Some(byte) = bytes.get_mut(at) {
                    *byte = value;
                }
            }
            let _ = Header::parse(&bytes);
        }

        #[test]
        fn arbitrary_bytes_after_the_magic_never_panic(tail in prop::collection::vec(any::<u8>(), 0..600)) {
            let mut bytes = MAGIC.to_be_bytes().to_vec();
            bytes.extend(tail);
            let _ = Header::parse(&bytes);
        }
    }
}
