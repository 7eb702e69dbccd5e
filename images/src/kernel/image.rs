//! Which release a boot image is.

use std::fs;
use std::path::Path;

use super::modules::number;
use crate::Error;
use crate::error::At;

const ELF: &[u8] = b"\x7fELF";
/// Offsets of the x86 setup header (Documentation/arch/x86/boot): its magic, and where the version text is.
const HEADER_MAGIC: usize = 0x202;
const VERSION_POINTER: usize = 0x20e;
const SETUP: usize = 0x200;
const BANNER: &[u8] = b"Linux version ";
const MAX_RELEASE: usize = 64;

/// The release of the bzImage or vmlinux at `path`; empty when it doesn't say.
pub(crate) fn release(path: &Path) -> Result<String, Error> {
    let bytes = fs::read(path).at("read kernel", path)?;
    if is_bz_image(&bytes) {
        let pointer = number(&bytes, VERSION_POINTER, 2).unwrap_or(0);
        return Ok(if pointer == 0 { String::new() } else { word_at(&bytes, pointer + SETUP) });
    }
    if bytes.starts_with(ELF) {
        // The banner is in the read-only data; a template of it ("%s") may come first.
        let mut found = bytes.windows(BANNER.len()).enumerate().filter(|(_, window)| *window == BANNER);
        let release = found.find_map(|(at, _)| {
            let word = word_at(&bytes, at + BANNER.len());
            word.starts_with(|first: char| first.is_ascii_digit()).then_some(word)
        });
        return Ok(release.unwrap_or_default());
    }
    Err(Error::BadKernel { path: path.to_owned(), why: "it is neither a bzImage nor an ELF vmlinux" })
}

/// Whether a boot image has the setup header.
pub(crate) fn is_bz_image(bytes: &[u8]) -> bool {
    bytes.get(HEADER_MAGIC..HEADER_MAGIC + 4) == Some(b"HdrS")
}

/// A word that can stand in a path; anything else is as good as none.
fn word_at(bytes: &[u8], at: usize) -> String {
    let rest = bytes.get(at..).unwrap_or_default();
    let end = rest.iter().take(MAX_RELEASE).position(|b| *b == 0 || b.is_ascii_whitespace()).unwrap_or(0);
    let usable = |b: &u8| b.is_ascii_alphanumeric() || b"._+~-".contains(b);
    let word = &rest[..end];
    if word.iter().all(usable) && !word.starts_with(b".") {
        String::from_utf8_lossy(word).into_owned()
    } else {
        String::new()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_release_is_read_from_either_format() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("kernel");

        let mut bz = vec![0; 0x400];
        bz[HEADER_MAGIC..HEADER_MAGIC + 4].copy_from_slice(b"HdrS");
        bz[VERSION_POINTER..VERSION_POINTER + 2].copy_from_slice(&0x100_u16.to_le_bytes());
        bz[0x300..0x30d].copy_from_slice(b"6.1.0-x (me) ");
        fs::write(&path, &bz).unwrap();
        assert_eq!(release(&path).unwrap(), "6.1.0-x");

        fs::write(&path, b"\x7fELF... Linux version %s Linux version 6.9.1 (me)").unwrap();
        assert_eq!(release(&path).unwrap(), "6.9.1");
        fs::write(&path, b"\x7fELF... Linux version 6/../../x (me)").unwrap();
        assert_eq!(release(&path).unwrap(), "");

        fs::write(&path, b"#!/bin/sh\n").unwrap();
        assert!(matches!(release(&path), Err(Error::BadKernel { .. })));
    }
}
