//! Which modules a guest needs before its root disk is mounted, in an order that loads.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::{Path, PathBuf};

use crate::Error;
use crate::error::At;
use crate::fsutil::sorted_entries;
use crate::tool::Tool;

/// Without these no root disk is seen or mounted.
const REQUIRED: &[&str] = &["virtio", "virtio_ring", "virtio_blk", "ext4"];

/// Wanted in this order; those that a kernel doesn't have are left out. crc32c stands before ext4 because its
/// checksums are asked for by name, which no dependency shows.
const WANTED: &[&str] = &[
    "virtio",
    "virtio_ring",
    "virtio_mmio",
    "virtio_pci",
    "virtio_blk",
    "virtio_console",
    "vsock",
    "vmw_vsock_virtio_transport",
    "virtio_net",
    "virtio_rng",
    "virtio_balloon",
    "crc32c_generic",
    "libcrc32c",
    "crc16",
    "mbcache",
    "jbd2",
    "ext4",
    "overlay",
    "fuse",
];

/// A module, not compressed.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Module {
    /// With underscores, as the kernel says it.
    pub(crate) name: String,
    pub(crate) bytes: Vec<u8>,
}

/// The wanted modules below `dir` (a `lib/modules/<release>`) and all that they need, dependencies first.
pub(crate) fn closure(dir: &Path) -> Result<Vec<Module>, Error> {
    let mut files = BTreeMap::new();
    index(dir, &mut files)?;
    let mut walk = Walk { dir, files, builtin: builtin(dir), done: BTreeSet::new(), order: Vec::new() };
    for name in WANTED {
        if walk.files.contains_key(*name) || REQUIRED.contains(name) {
            walk.visit(name)?;
        }
    }
    Ok(walk.order)
}

struct Walk<'a> {
    dir: &'a Path,
    files: BTreeMap<String, PathBuf>,
    /// [`None`] beside a hand-made kernel without that list: then what is missing may be built in.
    builtin: Option<BTreeSet<String>>,
    done: BTreeSet<String>,
    order: Vec<Module>,
}

impl Walk<'_> {
    fn visit(&mut self, name: &str) -> Result<(), Error> {
        if !self.done.insert(name.to_owned()) {
            return Ok(());
        }
        let Some(path) = self.files.get(name) else {
            if self.builtin.as_ref().is_none_or(|all| all.contains(name)) {
                return Ok(());
            }
            return Err(Error::ModuleMissing { module: name.into(), dir: self.dir.to_owned() });
        };
        let bytes = read(path)?;
        let depends = depends(path, &bytes)?;
        for dependency in depends {
            self.visit(&dependency)?;
        }
        self.order.push(Module { name: name.into(), bytes });
        Ok(())
    }
}

fn index(dir: &Path, files: &mut BTreeMap<String, PathBuf>) -> Result<(), Error> {
    for path in sorted_entries(dir)? {
        let meta = path.symlink_metadata().at("look at", &path)?;
        if meta.is_dir() {
            index(&path, files)?;
        } else if let Some(name) = module_name(&path) {
            files.entry(name).or_insert(path);
        }
    }
    Ok(())
}

/// `drivers/virtio-rng.ko.xz` is the module `virtio_rng`; so is `07-virtio_rng.ko`, which is how we keep it.
pub(crate) fn module_name(path: &Path) -> Option<String> {
    let name = path.file_name()?.to_str()?;
    let stem = [".ko", ".ko.xz", ".ko.zst", ".ko.gz"].iter().find_map(|end| name.strip_suffix(end))?;
    let numbered = stem.split_once('-').filter(|(number, _)| number.bytes().all(|b| b.is_ascii_digit()));
    Some(numbered.map_or(stem, |(_, rest)| rest).replace('-', "_"))
}

fn builtin(dir: &Path) -> Option<BTreeSet<String>> {
    let text = fs::read_to_string(dir.join("modules.builtin")).ok()?;
    Some(text.lines().filter_map(|line| module_name(Path::new(line))).collect())
}

fn read(path: &Path) -> Result<Vec<u8>, Error> {
    let tool = match path.extension().and_then(|end| end.to_str()) {
        Some("xz") => Tool::new("xz", "xz-utils"),
        Some("zst") => Tool::new("zstd", "zstd"),
        Some("gz") => Tool::new("gzip", "gzip"),
        _ => return fs::read(path).at("read", path),
    };
    tool.run(tool.command()?.arg("-dc").arg(path), "unpack a kernel module", &mut |_| ())
}

/// The names after `depends=` in the section `.modinfo`, with underscores.
pub(crate) fn depends(path: &Path, elf: &[u8]) -> Result<Vec<String>, Error> {
    let bad = |why| Error::BadModule { path: path.to_owned(), why };
    let info = section(elf, b".modinfo")
        .ok_or_else(|| bad("it is not a 64-bit ELF file with module information"))?;
    let value = info.split(|b| *b == 0).find_map(|field| field.strip_prefix(b"depends="));
    let value = value.ok_or_else(|| bad("its module information names no dependencies"))?;
    let text = std::str::from_utf8(value).map_err(|_| bad("its dependencies are no text"))?;
    Ok(text.split(',').filter(|name| !name.is_empty()).map(|name| name.replace('-', "_")).collect())
}

/// The other names by which the kernel asks for the module: those after `alias=` that have no blanks or wildcards.
pub(crate) fn aliases(elf: &[u8]) -> Vec<String> {
    let info = section(elf, b".modinfo").unwrap_or_default();
    let aliases = info.split(|b| *b == 0).filter_map(|field| field.strip_prefix(b"alias="));
    let plain = |text: &&str| text.bytes().all(|b| b.is_ascii_graphic() && b != b'*');
    aliases.filter_map(|text| std::str::from_utf8(text).ok()).filter(plain).map(str::to_owned).collect()
}

/// The bytes of a section of a little-endian ELF64 file; every offset is checked, for the file is foreign.
fn section<'a>(elf: &'a [u8], wanted: &[u8]) -> Option<&'a [u8]> {
    if elf.get(..6)? != b"\x7fELF\x02\x01" {
        return None;
    }
    let table = number(elf, 0x28, 8)?;
    let (size, count, names) = (number(elf, 0x3a, 2)?, number(elf, 0x3c, 2)?, number(elf, 0x3e, 2)?);
    let header = |index: usize| {
        let at = table.checked_add(index.checked_mul(size)?)?;
        elf.get(at..at.checked_add(64)?)
    };
    let content = |header: &[u8]| {
        let start = number(header, 0x18, 8)?;
        elf.get(start..start.checked_add(number(header, 0x20, 8)?)?)
    };
    let strings = content(header(names)?)?;
    (0..count).find_map(|index| {
        let header = header(index)?;
        let name = strings.get(number(header, 0, 4)?..)?;
        let name = &name[..name.iter().position(|b| *b == 0)?];
        if name == wanted { content(header) } else { None }
    })
}

/// A little-endian number of so many bytes.
pub(crate) fn number(bytes: &[u8], at: usize, width: usize) -> Option<usize> {
    let field = bytes.get(at..at.checked_add(width)?)?;
    let value = field.iter().rev().fold(0_u64, |value, byte| value << 8 | u64::from(*byte));
    usize::try_from(value).ok()
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;

    /// The least ELF file that has a section `.modinfo`.
    pub(crate) fn module(info: &[u8]) -> Vec<u8> {
        let strings = b"\0.modinfo\0";
        let mut elf = vec![0; 64];
        elf[..6].copy_from_slice(b"\x7fELF\x02\x01");
        let (info_at, strings_at) = (64, 64 + info.len());
        let table = strings_at + strings.len();
        elf[0x28..0x30].copy_from_slice(&(table as u64).to_le_bytes());
        elf[0x3a] = 64;
        elf[0x3c] = 2;
        elf[0x3e] = 1;
        elf.extend_from_slice(info);
        elf.extend_from_slice(strings);
        for (name, at, size) in [(1_u32, info_at, info.len()), (0, strings_at, strings.len())] {
            let mut header = [0; 64];
            header[..4].copy_from_slice(&name.to_le_bytes());
            header[0x18..0x20].copy_from_slice(&(at as u64).to_le_bytes());
            header[0x20..0x28].copy_from_slice(&(size as u64).to_le_bytes());
            elf.extend_from_slice(&header);
        }
        elf
    }

    fn tree(modules: &[(&str, &str)]) -> tempfile::TempDir {
        let dir = tempfile::tempdir().unwrap();
        fs::create_dir(dir.path().join("kernel")).unwrap();
        for (file, needs) in modules {
            let info = format!("license=GPL\0depends={needs}\0name=x\0");
            fs::write(dir.path().join("kernel").join(file), module(info.as_bytes())).unwrap();
        }
        fs::write(
            dir.path().join("modules.builtin"),
            "kernel/fs/ext4/ext4.ko\nkernel/drivers/virtio/virtio.ko\n",
        )
        .unwrap();
        dir
    }

    fn names(dir: &Path) -> Vec<String> {
        closure(dir).unwrap().into_iter().map(|module| module.name).collect()
    }

    #[test]
    fn dependencies_come_first_and_built_in_modules_are_left_out() {
        let dir = tree(&[
            ("virtio_ring.ko", ""),
            ("virtio_blk.ko", "virtio_ring,virtio"),
            ("virtio-rng.ko", "rng-core,virtio_ring"),
            ("rng-core.ko", ""),
            ("unrelated.ko", ""),
        ]);
        assert_eq!(names(dir.path()), ["virtio_ring", "virtio_blk", "rng_core", "virtio_rng"]);
    }

    #[test]
    fn a_missing_disk_driver_is_named() {
        let dir = tree(&[("virtio_ring.ko", "")]);
        let error = closure(dir.path()).unwrap_err();
        assert!(error.to_string().contains("virtio_blk"), "{error}");
    }

    #[test]
    fn a_ring_of_dependencies_ends() {
        let dir = tree(&[("virtio_ring.ko", "virtio_blk"), ("virtio_blk.ko", "virtio_ring")]);
        assert_eq!(names(dir.path()).len(), 2);
    }

    #[test]
    fn compressed_modules_are_unpacked() {
        let dir = tree(&[("virtio_ring.ko", ""), ("virtio_blk.ko", "virtio_ring")]);
        let file = dir.path().join("kernel/virtio_blk.ko");
        let plain = fs::read(&file).unwrap();
        let done = std::process::Command::new("xz").arg(&file).status();
        if !done.is_ok_and(|status| status.success()) {
            let _ = std::io::Write::write_fmt(
                &mut std::io::stderr(),
                format_args!("SKIP compressed_modules_are_unpacked: no xz\n"),
            );
            return;
        }
        let modules = closure(dir.path()).unwrap();
        assert_eq!(modules[1], Module { name: "virtio_blk".into(), bytes: plain });
    }

    #[test]
    fn damaged_modules_are_refused_without_a_panic() {
        let good = module(b"depends=a\0");
        assert_eq!(depends(Path::new("m"), &good).unwrap(), ["a"]);
        for cut in 0..good.len() {
            depends(Path::new("m"), &good[..cut]).unwrap_err();
        }
        for at in 0..64 {
            let mut bad = good.clone();
            bad[at] = 0xff;
            depends(Path::new("m"), &bad).ok();
        }
    }
}
