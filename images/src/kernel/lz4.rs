//! LZ4's "legacy" frames, in which kernels are packed (lz4 doc/lz4_Frame_format.md and lz4_Block_format.md): no program of
//! a usual host unpacks them.

const MAGIC: [u8; 4] = [0x02, 0x21, 0x4c, 0x18];
/// A run of literals or a copy whose length has this value goes on in the next bytes.
const MORE: usize = 15;
/// The shortest copy.
const SHORTEST: usize = 4;

/// The unpacked bytes; none when the frame is broken or makes more than `limit` bytes.
pub(crate) fn unpack(frame: &[u8], limit: usize) -> Option<Vec<u8>> {
    let mut rest = frame.strip_prefix(&MAGIC)?;
    let mut out = Vec::new();
    while !rest.is_empty() {
        let (size, after) = rest.split_at_checked(4)?;
        if size == MAGIC {
            // Frames may follow each other.
            rest = after;
            continue;
        }
        let size = u32::from_le_bytes(size.try_into().ok()?) as usize;
        let (block, after) = after.split_at_checked(size)?;
        // Copies don't reach beyond their block.
        let begin = out.len();
        unpack_block(block, begin, limit, &mut out)?;
        rest = after;
    }
    Some(out)
}

fn unpack_block(mut rest: &[u8], begin: usize, limit: usize, out: &mut Vec<u8>) -> Option<()> {
    while let Some((token, after)) = rest.split_first() {
        rest = after;
        let literals = length(usize::from(token >> 4), &mut rest)?;
        let (bytes, after) = rest.split_at_checked(literals)?;
        out.extend_from_slice(bytes);
        rest = after;
        if rest.is_empty() {
            // The last sequence has literals only.
            break;
        }
        let (back, after) = rest.split_at_checked(2)?;
        rest = after;
        let back = usize::from(u16::from_le_bytes([back[0], back[1]]));
        let copied = length(usize::from(token & 0xf), &mut rest)?.checked_add(SHORTEST)?;
        let from = out.len().checked_sub(back).filter(|from| back > 0 && *from >= begin)?;
        if out.len().checked_add(copied)? > limit {
            return None;
        }
        // The copy may reach into what it makes.
        for at in from..from + copied {
            out.push(out[at]);
        }
    }
    (out.len() <= limit).then_some(())
}

fn length(first: usize, rest: &mut &[u8]) -> Option<usize> {
    let mut length = first;
    if first == MORE {
        loop {
            let (more, after) = rest.split_first()?;
            *rest = after;
            length = length.checked_add(usize::from(*more))?;
            if *more != u8::MAX {
                break;
            }
        }
    }
    Some(length)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn frame(block: &[u8]) -> Vec<u8> {
        [&MAGIC[..], &(block.len() as u32).to_le_bytes(), block].concat()
    }

    #[test]
    fn literals_and_copies_that_overlap_are_unpacked() {
        // "ab", then 4 + 15 + 3 bytes from two back, then "c".
        let block = [0x2f, b'a', b'b', 2, 0, 3, 0x10, b'c'];
        assert_eq!(unpack(&frame(&block), 100).unwrap(), [b"ab".repeat(12), b"c".to_vec()].concat());
        assert_eq!(unpack(&frame(&block), 24), None, "more than the limit");
    }

    #[test]
    fn what_is_broken_is_refused() {
        let block = [0x2f, b'a', b'b', 2, 0, 3, 0x10, b'c'];
        for cut in [1, 2, 4, 5] {
            assert_eq!(unpack(&frame(&block[..cut]), 100), None, "{cut}");
        }
        assert_eq!(unpack(&frame(&[0x20, b'a', b'b', 3, 0]), 100), None, "from before the block");
        assert_eq!(unpack(&frame(&[0x20, b'a', b'b', 0, 0]), 100), None, "from nowhere");
        assert_eq!(unpack(b"\x28\xb5\x2f\xfd", 100), None);
    }

    #[test]
    fn the_lz4_program_and_we_agree() {
        use std::io::Write as _;
        use std::process::{Command, Stdio};
        let child =
            Command::new("lz4").args(["-l", "-9", "-c"]).stdin(Stdio::piped()).stdout(Stdio::piped()).spawn();
        let Ok(mut child) = child else {
            let _ = std::io::Write::write_fmt(
                &mut std::io::stderr(),
                format_args!("SKIP the_lz4_program_and_we_agree: no lz4\n"),
            );
            return;
        };
        let text: Vec<u8> = (0..300_000_u32).flat_map(|n| (n / 7 % 251).to_le_bytes()).collect();
        child.stdin.take().unwrap().write_all(&text).unwrap();
        let packed = child.wait_with_output().unwrap().stdout;
        assert_eq!(unpack(&packed, text.len()).unwrap(), text);
    }
}
