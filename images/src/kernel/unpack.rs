//! The kernel inside a bzImage, so that no guest has to unpack it at each start.
//!
//! Source: Linux Documentation/arch/x86/boot.rst (setup header, `payload_offset`, `payload_length`). The payload is a
//! compressed ELF file with the table of its relocations behind it, and, except for gzip, the four bytes of its unpacked
//! size behind that.

use std::fs;
use std::path::Path;

use super::image::is_bz_image;
use super::lz4;
use super::modules::number;
use crate::staging::Staging;
use crate::tool::Tool;

/// Counted up when the same bzImage makes another file.
pub(crate) const FILE: &str = "vmlinux-1";

const SETUP_SECTORS: usize = 0x1f1;
const PAYLOAD: usize = 0x248;
const PAYLOAD_BYTES: usize = 0x24c;
const INIT_SIZE: usize = 0x260;
/// More than any kernel has.
const LARGEST: usize = 512 << 20;

const ELF_HEADER: usize = 64;
const PROGRAM_HEADER: usize = 56;
const SEGMENT_LOAD: u32 = 1;
const SEGMENT_NOTE: u32 = 4;
const PAGE: usize = 4096;

/// What is inside the bzImage at `path`, for a loader: an ELF file with the parts that are loaded, without the zeros at
/// their ends, and the relocations behind. None when it can't be had: the kernel unpacks itself then.
pub(crate) fn vmlinux(path: &Path, staging: &Staging) -> Option<Vec<u8>> {
    let image = fs::read(path).ok()?;
    if !is_bz_image(&image) {
        return None;
    }
    let sectors = match image[SETUP_SECTORS] {
        0 => 4,
        sectors => usize::from(sectors),
    };
    let begin = (sectors + 1) * 512 + word(&image, PAYLOAD)?;
    let payload = image.get(begin..begin.checked_add(word(&image, PAYLOAD_BYTES)?)?)?;
    let limit = word(&image, INIT_SIZE)?.min(LARGEST);
    trimmed(&unpacked(payload, limit, staging)?)
}

fn unpacked(payload: &[u8], limit: usize, staging: &Staging) -> Option<Vec<u8>> {
    let stream = payload.get(..payload.len().checked_sub(4)?)?;
    let bytes = match payload {
        [0x02, 0x21, 0x4c, 0x18, ..] => lz4::unpack(stream, limit)?,
        [0x1f, 0x8b, ..] => by_tool(Tool::new("gzip", "gzip"), payload, staging)?,
        [0xfd, b'7', b'z', b'X', b'Z', 0, ..] => by_tool(Tool::new("xz", "xz-utils"), stream, staging)?,
        [0x28, 0xb5, 0x2f, 0xfd, ..] => by_tool(Tool::new("zstd", "zstd"), stream, staging)?,
        _ => return None,
    };
    (bytes.len() == word(payload, payload.len() - 4)? && bytes.len() <= limit).then_some(bytes)
}

fn by_tool(tool: Tool, stream: &[u8], staging: &Staging) -> Option<Vec<u8>> {
    let file = staging.join("payload");
    fs::write(&file, stream).ok()?;
    let mut command = tool.command_in(staging).ok()?;
    let unpacked = tool.run(command.arg("-dc").arg(&file), "unpack a kernel", &mut |_| ());
    fs::remove_file(&file).ok()?;
    unpacked.ok()
}

/// A segment that is kept: where it was in the file, how much of it there is, where it is now.
struct Segment {
    from: usize,
    bytes: usize,
    to: usize,
}

/// The file with only what a loader reads. Sections, which are for debuggers, are left out.
fn trimmed(elf: &[u8]) -> Option<Vec<u8>> {
    const CLASS_64_LITTLE_ENDIAN: &[u8] = b"\x7fELF\x02\x01";
    if elf.get(..6)? != CLASS_64_LITTLE_ENDIAN {
        return None;
    }
    let (table, size, count) = (long(elf, 32)?, half(elf, 54)?, half(elf, 56)?);
    if size != PROGRAM_HEADER || count == 0 {
        return None;
    }
    let headers_end = ELF_HEADER + count * PROGRAM_HEADER;
    let mut out = elf.get(..ELF_HEADER)?.to_vec();
    put_long(&mut out, 32, ELF_HEADER);
    put_long(&mut out, 40, 0);
    // Size, number and name section of the section headers.
    out[58..64].fill(0);
    out.extend_from_slice(elf.get(table..table.checked_add(count * PROGRAM_HEADER)?)?);
    let (mut kept, mut end) = (Vec::new(), headers_end);
    for at in (ELF_HEADER..headers_end).step_by(PROGRAM_HEADER) {
        let (kind, from, bytes) = (word(&out, at)? as u32, long(&out, at + 8)?, long(&out, at + 32)?);
        let content = elf.get(from..from.checked_add(bytes)?)?;
        end = end.max(from + bytes);
        if kind != SEGMENT_LOAD {
            continue;
        }
        let used = content.iter().rposition(|byte| *byte != 0).map_or(0, |last| last + 1);
        let to = out.len().next_multiple_of(PAGE);
        out.resize(to, 0);
        out.extend_from_slice(&content[..used]);
        put_long(&mut out, at + 8, to);
        put_long(&mut out, at + 32, used);
        kept.push(Segment { from, bytes: used, to });
    }
    for at in (ELF_HEADER..headers_end).step_by(PROGRAM_HEADER) {
        if word(&out, at)? as u32 != SEGMENT_NOTE {
            continue;
        }
        // Notes are a piece of what is loaded.
        let (from, bytes) = (long(&out, at + 8)?, long(&out, at + 32)?);
        let inside = |s: &&Segment| from >= s.from && from + bytes <= s.from + s.bytes;
        let around = kept.iter().find(inside)?;
        put_long(&mut out, at + 8, around.to + from - around.from);
    }
    let (sections, section_bytes, sections_count) = (long(elf, 40)?, half(elf, 58)?, half(elf, 60)?);
    end = end.max(sections.checked_add(section_bytes * sections_count)?);
    // Words, at the first multiple of their size behind all else: there the loader looks for them.
    out.resize(out.len().next_multiple_of(4), 0);
    out.extend_from_slice(elf.get(end..)?);
    Some(out)
}

fn put_long(bytes: &mut [u8], at: usize, value: usize) {
    bytes[at..at + 8].copy_from_slice(&(value as u64).to_le_bytes());
}

fn half(bytes: &[u8], at: usize) -> Option<usize> {
    number(bytes, at, 2)
}

fn word(bytes: &[u8], at: usize) -> Option<usize> {
    number(bytes, at, 4)
}

fn long(bytes: &[u8], at: usize) -> Option<usize> {
    number(bytes, at, 8)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// An ELF file with two loaded segments, of which the second ends in zeros, a note in the first, a section table, and four
    /// bytes behind it all.
    fn elf() -> Vec<u8> {
        let mut elf = vec![0; 0x3000];
        elf[..6].copy_from_slice(b"\x7fELF\x02\x01");
        put_long(&mut elf, 32, 64);
        put_long(&mut elf, 40, 0x3000);
        elf[54..58].copy_from_slice(&[56, 0, 3, 0]);
        elf[58..62].copy_from_slice(&[64, 0, 1, 0]);
        for (index, (kind, from, bytes)) in
            [(SEGMENT_LOAD, 0x1000, 0x800), (SEGMENT_LOAD, 0x2000, 0x1000), (SEGMENT_NOTE, 0x1010, 0x10)]
                .into_iter()
                .enumerate()
        {
            let at = 64 + 56 * index;
            elf[at..at + 4].copy_from_slice(&kind.to_le_bytes());
            put_long(&mut elf, at + 8, from);
            put_long(&mut elf, at + 32, bytes);
            put_long(&mut elf, at + 40, bytes);
        }
        elf[0x1000..0x1800].fill(1);
        elf[0x2000..0x2003].fill(2);
        elf.resize(0x3040, 0);
        elf.extend_from_slice(b"move");
        elf
    }

    #[test]
    fn what_is_loaded_and_the_relocations_are_kept_and_zeros_and_sections_are_not() {
        let out = trimmed(&elf()).unwrap();
        let segment = |index: usize| {
            let at = 64 + 56 * index;
            (long(&out, at + 8).unwrap(), long(&out, at + 32).unwrap(), long(&out, at + 40).unwrap())
        };
        assert_eq!(segment(0), (0x1000, 0x800, 0x800));
        assert_eq!(segment(1), (0x2000, 3, 0x1000));
        assert_eq!(segment(2).0, 0x1010);
        assert_eq!(&out[0x2000..0x2003], [2; 3]);
        assert_eq!(&out[0x2003..], b"\0move");
        assert_eq!((long(&out, 40), half(&out, 60)), (Some(0), Some(0)));
    }

    #[test]
    fn a_broken_file_is_no_kernel() {
        for cut in [0, 5, 63, 70, 0x1800, 0x3030] {
            assert!(trimmed(&elf()[..cut]).is_none(), "{cut}");
        }
        let mut far = elf();
        far[64 + 8..64 + 16].fill(0xff);
        assert!(trimmed(&far).is_none());
    }
}
