//! A tree to a raw ext4 disk, the same bytes for the same tree.

use std::collections::HashSet;
use std::fs::{self, File};
use std::os::unix::fs::MetadataExt;
use std::path::Path;

use super::inodes;
use crate::error::At;
use crate::fsutil::sorted_entries;
use crate::staging::Staging;
use crate::tool::Tool;
use crate::{Error, OnProgress, tell};

const MKE2FS: Tool = Tool::new("mke2fs", "e2fsprogs");

/// Label by which a guest can tell its root disk.
const LABEL: &str = "torpor-root";
/// The same in every image: a disk is told by its digest, and a random one would make every build another image.
const UUID: &str = "7a3f0c52-54cc-4a1e-9d0b-60a2d1f4e8c7";
const HASH_SEED: &str = "c1b7e0aa-3f5d-4f0e-8a27-0d2b94c6f315";

/// All features by name, beginning with none. `resize_inode` and `64bit` let the guest's kernel
/// grow the file system while it is mounted.
const FEATURES: &str = "none,has_journal,ext_attr,resize_inode,dir_index,filetype,extent,64bit,flex_bg,sparse_super,\
                        large_file,huge_file,dir_nlink,extra_isize,metadata_csum";

const BLOCK: u64 = 4096;
/// The cluster of a qcow2 overlay: a base ends at the end of a cluster.
const CLUSTER: u64 = 64 << 10;
const INODE: u64 = 256;
/// Bytes of a block group, the unit in which a file system grows, and the inodes of each: one for 16 KiB.
const GROUP: u64 = 128 << 20;
const GROUP_INODES: u64 = 8192;
/// A journal does not grow with its file system, so this one is made for the later size; but all of it ends up in
/// the overlay of every sandbox that writes for a while, so it is not larger than need be.
const JOURNAL_MIB: u64 = 32;
/// Descriptor blocks are reserved for growth up to this many blocks (1 TiB).
const RESIZE_BLOCKS: u64 = 1 << 28;
/// Room for bitmaps, descriptors and their copies, for the rule that a journal takes no more than half of the free
/// space, and for a guest that mounts the disk before growing it. Costs nothing: it is a hole.
const SLACK: u64 = 80 << 20;

/// Stands in for the host's mke2fs.conf, which has no say. It names the usage types that mke2fs derives from a size,
/// because it would warn about each one that it doesn't find.
const CONFIG: &str = "[fs_types]\n\tfloppy = {\n\t}\n\tsmall = {\n\t}\n\tbig = {\n\t}\n\thuge = {\n\t}\n";

/// Makes `disk` from the tree at `root`. Times of the file system itself are `epoch`, those of files their own.
pub(crate) fn make(
    root: &Path,
    disk: &Path,
    epoch: i64,
    staging: &Staging,
    progress: OnProgress<'_>,
) -> Result<(), Error> {
    let need = measure(root)?;
    let size = disk_size(&need);
    let inodes = inodes(&need).max(size.div_ceil(GROUP) * GROUP_INODES);
    tell(progress, "make disk", format!("{} files, {} MiB", need.nodes, size >> 20));
    File::create_new(disk).and_then(|file| file.set_len(size)).at("create", disk)?;

    let config = staging.join("mke2fs.conf");
    fs::write(&config, CONFIG).at("write", &config)?;
    let mut command = MKE2FS.command_in(staging)?;
    command
        .env("MKE2FS_CONFIG", &config)
        .env("E2FSPROGS_FAKE_TIME", epoch.to_string())
        .env("SOURCE_DATE_EPOCH", epoch.to_string())
        .args(["-q", "-F", "-t", "ext4", "-O", FEATURES, "-e", "remount-ro", "-m", "0"])
        .args(["-L", LABEL, "-U", UUID, "-b", &BLOCK.to_string(), "-I", &INODE.to_string()])
        .args(["-N", &inodes.to_string(), "-J", &format!("size={JOURNAL_MIB}")])
        // Inode tables are complete, so that no guest begins its life with zeroing them. The journal needs no
        // zeroing either: the file is new and reads as zeros.
        .args(["-E", &format!("hash_seed={HASH_SEED},resize={RESIZE_BLOCKS},lazy_itable_init=0,lazy_journal_init=1,nodiscard")])
        .arg("-d")
        .arg(root)
        .arg(disk);
    MKE2FS.run(&mut command, "make the file system", &mut |_| ())?;
    inodes::settle_times(disk)?;
    dig_holes(disk)
}

/// Zeros that mke2fs wrote become holes. Only saves space, so a host without the program goes without.
fn dig_holes(disk: &Path) -> Result<(), Error> {
    let tool = Tool::new("fallocate", "util-linux");
    if let Ok(mut command) = tool.command() {
        tool.run(command.arg("--dig-holes").arg(disk), "dig holes", &mut |_| ()).ok();
    }
    File::open(disk).and_then(|file| file.sync_all()).at("sync", disk)
}

#[derive(Debug, Default, PartialEq, Eq)]
struct Need {
    /// Files, directories, links and devices.
    nodes: u64,
    bytes: u64,
}

fn inodes(need: &Need) -> u64 {
    need.nodes * 5 / 4 + 1024
}

fn disk_size(need: &Need) -> u64 {
    let content = need.bytes + need.bytes / 8;
    let tables = inodes(need).max(content.div_ceil(GROUP) * GROUP_INODES) * INODE;
    let total = content + tables + (JOURNAL_MIB << 20) + SLACK;
    total.next_multiple_of(CLUSTER)
}

/// What a tree needs, from names and sizes only: how the host stores it must not show in the disk.
fn measure(root: &Path) -> Result<Need, Error> {
    let mut need = Need::default();
    let mut linked = HashSet::new();
    let mut todo = vec![root.to_owned()];
    while let Some(dir) = todo.pop() {
        let mut names = 0;
        for path in sorted_entries(&dir)? {
            let meta = path.symlink_metadata().at("look at", &path)?;
            names += path.file_name().map_or(0, |name| name.len() as u64) + 12;
            if meta.is_dir() {
                todo.push(path);
                need.nodes += 1;
                continue;
            }
            if meta.nlink() > 1 && !linked.insert((meta.dev(), meta.ino())) {
                continue;
            }
            need.nodes += 1;
            if meta.is_file() || meta.is_symlink() {
                need.bytes += meta.len().next_multiple_of(BLOCK);
            }
        }
        // Blocks of a hashed directory are between half and completely full.
        need.bytes += (names * 2).next_multiple_of(BLOCK).max(BLOCK);
    }
    Ok(need)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_disk_ends_with_a_cluster_and_has_room_for_its_tree() {
        for (nodes, bytes) in [(1, 4096), (30_000, 300 << 20), (2_000_000, 40 << 30)] {
            let size = disk_size(&Need { nodes, bytes });
            assert_eq!(size % CLUSTER, 0);
            assert!(size > bytes + nodes * INODE + (JOURNAL_MIB << 20));
        }
    }

    #[test]
    fn a_file_with_two_names_is_counted_once() {
        let dir = tempfile::tempdir().unwrap();
        std::fs::write(dir.path().join("a"), [1; 5000]).unwrap();
        std::fs::hard_link(dir.path().join("a"), dir.path().join("b")).unwrap();
        assert_eq!(measure(dir.path()).unwrap(), Need { nodes: 1, bytes: 8192 + 4096 });
    }
}
