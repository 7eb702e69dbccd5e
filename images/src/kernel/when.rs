//! When a guest loads each of its modules. Loading one costs the guest's kernel milliseconds, most of them for its
//! signature: what a start doesn't need waits for its use.

use std::collections::BTreeSet;
use std::path::Path;

use super::modules::{aliases, depends, module_name};
use crate::Error;

/// A reason to load a module. As a word of the list that the agent reads (agent/src/modules.rs).
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
enum When {
    /// At once.
    Always,
    /// At once, if the machine has a virtio device of this kind (virtio 1.2, section 5).
    Virtio(u32),
    /// At once, if the machine has a PCI bus.
    Pci,
    /// Some time after the start, if the machine has a virtio device of this kind.
    Later(u32),
    /// When the kernel asks for one of these names.
    Demand(BTreeSet<String>),
}

/// The reason of a wanted module itself; none: it is only there for others.
fn own(name: &str, file: &[u8]) -> Option<When> {
    Some(match name {
        "virtio" | "virtio_ring" | "virtio_mmio" | "crc32c_generic" | "ext4" => When::Always,
        "virtio_net" => When::Virtio(1),
        "virtio_blk" => When::Virtio(2),
        "virtio_console" => When::Virtio(3),
        "vsock" | "vmw_vsock_virtio_transport" => When::Virtio(19),
        "virtio_pci" => When::Pci,
        "virtio_rng" => When::Later(4),
        "virtio_balloon" => When::Later(5),
        "overlay" | "fuse" => When::Demand(aliases(file).into_iter().chain([name.to_owned()]).collect()),
        _ => return None,
    })
}

/// One line for each module, in the same order: its file's name, and the reasons to load it. Without a reason it is loaded
/// at once.
pub(crate) fn list(modules: &[(String, Vec<u8>)]) -> Result<String, Error> {
    let mut found = Vec::new();
    for (file, bytes) in modules {
        let path = Path::new(file);
        let name = module_name(path).unwrap_or_else(|| file.clone());
        found.push((name, depends(path, bytes)?));
    }
    let mut reasons = vec![BTreeSet::new(); modules.len()];
    // From the last to the first: whatever needs a module stands behind it.
    for index in (0..modules.len()).rev() {
        let (name, needs) = &found[index];
        reasons[index].extend(own(name, &modules[index].1));
        for (before, (other, _)) in found[..index].iter().enumerate() {
            if needs.contains(other) {
                let inherited = reasons[index].clone();
                reasons[before].extend(inherited);
            }
        }
    }
    Ok(modules.iter().zip(&reasons).map(|((file, _), reasons)| line(file, reasons)).collect())
}

fn line(file: &str, reasons: &BTreeSet<When>) -> String {
    let mut line = file.to_owned();
    for reason in reasons {
        match reason {
            When::Always => return format!("{file}\n"),
            When::Virtio(kind) => line += &format!(" virtio:{kind}"),
            When::Pci => line += " pci",
            When::Later(kind) => line += &format!(" later:{kind}"),
            When::Demand(names) => line.extend(names.iter().map(|name| format!(" for:{name}"))),
        }
    }
    if reasons.is_empty() {
        // Nobody here needs it; somebody may ask for it all the same.
        line += &format!(" for:{}", module_name(Path::new(file)).unwrap_or_default());
    }
    line + "\n"
}

#[cfg(test)]
mod tests {
    use super::super::modules::tests::module;
    use super::*;

    fn file(number: usize, name: &str, info: &str) -> (String, Vec<u8>) {
        (format!("{number:02}-{name}.ko"), module(format!("license=GPL\0{info}\0name={name}\0").as_bytes()))
    }

    #[test]
    fn a_module_is_loaded_for_what_needs_it_and_the_rest_waits() {
        let all = [
            file(0, "virtio_ring", "depends="),
            file(1, "virtio", "depends=virtio_ring"),
            file(2, "failover", "depends="),
            file(3, "virtio_net", "depends=failover,virtio"),
            file(4, "virtio_balloon", "depends=virtio"),
            file(5, "libcrc32c", "depends="),
            file(6, "fuse", "alias=fs-fuse\0alias=devname:fuse\0alias=char-major-10-229\0depends="),
        ];
        assert_eq!(
            list(&all).unwrap(),
            "00-virtio_ring.ko\n01-virtio.ko\n02-failover.ko virtio:1\n03-virtio_net.ko virtio:1\n\
             04-virtio_balloon.ko later:5\n05-libcrc32c.ko for:libcrc32c\n\
             06-fuse.ko for:char-major-10-229 for:devname:fuse for:fs-fuse for:fuse\n"
        );
    }
}
