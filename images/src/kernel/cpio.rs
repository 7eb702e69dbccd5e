//! A cpio archive in the "newc" format, as the kernel unpacks it (Documentation/driver-api/early-userspace).
//! The same entries make the same bytes: numbers are counted up and all times are zero.

const MAGIC: &str = "070701";
const TRAILER: &str = "TRAILER!!!";
const S_IFREG: u32 = 0o100_000;
const S_IFDIR: u32 = 0o040_000;
const S_IFCHR: u32 = 0o020_000;

/// An archive in the making; everything in it belongs to root.
#[derive(Debug, Default)]
pub(crate) struct Cpio {
    bytes: Vec<u8>,
    entries: u32,
}

impl Cpio {
    pub(crate) fn directory(&mut self, name: &str) {
        self.entry(name, S_IFDIR | 0o755, 2, (0, 0), &[]);
    }

    pub(crate) fn file(&mut self, name: &str, mode: u32, content: &[u8]) {
        self.entry(name, S_IFREG | mode, 1, (0, 0), content);
    }

    pub(crate) fn character_device(&mut self, name: &str, mode: u32, device: (u32, u32)) {
        self.entry(name, S_IFCHR | mode, 1, device, &[]);
    }

    /// The whole archive, padded as loaders expect it.
    pub(crate) fn finish(mut self) -> Vec<u8> {
        self.entries = u32::MAX; // the trailer's inode number is 0
        self.entry(TRAILER, 0, 1, (0, 0), &[]);
        self.pad(512);
        self.bytes
    }

    fn entry(&mut self, name: &str, mode: u32, links: u32, device: (u32, u32), content: &[u8]) {
        self.entries = self.entries.wrapping_add(1);
        // Agent and modules are far from 4 GiB.
        let (size, name_size) = (content.len() as u32, name.len() as u32 + 1);
        let fields = [self.entries, mode, 0, 0, links, 0, size, 0, 0, device.0, device.1, name_size, 0];
        self.bytes.extend_from_slice(MAGIC.as_bytes());
        for field in fields {
            self.bytes.extend_from_slice(format!("{field:08x}").as_bytes());
        }
        self.bytes.extend_from_slice(name.as_bytes());
        self.bytes.push(0);
        self.pad(4);
        self.bytes.extend_from_slice(content);
        self.pad(4);
    }

    fn pad(&mut self, to: usize) {
        self.bytes.resize(self.bytes.len().next_multiple_of(to), 0);
    }
}

#[cfg(test)]
mod tests {
    use std::io::Write;
    use std::process::{Command, Stdio};

    use super::*;

    fn sample() -> Vec<u8> {
        let mut cpio = Cpio::default();
        cpio.directory("dev");
        cpio.character_device("dev/console", 0o600, (5, 1));
        cpio.file("init", 0o755, b"hello");
        cpio.finish()
    }

    #[test]
    fn another_reader_lists_what_was_written() {
        let listed = Command::new("cpio")
            .args(["-itv", "--quiet", "--numeric-uid-gid"])
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn();
        let Ok(mut child) = listed else {
            let _ = std::io::Write::write_fmt(
                &mut std::io::stderr(),
                format_args!("SKIP another_reader_lists_what_was_written: no cpio\n"),
            );
            return;
        };
        child.stdin.take().unwrap().write_all(&sample()).unwrap();
        let output = child.wait_with_output().unwrap();
        let text = String::from_utf8(output.stdout).unwrap();
        let lines: Vec<&str> = text.lines().collect();
        assert!(output.status.success());
        assert!(lines[0].starts_with("drwxr-xr-x   2 0        0"), "{text}");
        assert!(lines[1].starts_with("crw-------") && lines[1].contains("5,   1"), "{text}");
        assert!(lines[2].starts_with("-rwxr-xr-x") && lines[2].ends_with("init"), "{text}");
    }

    #[test]
    fn the_same_entries_make_the_same_bytes() {
        assert_eq!(sample(), sample());
        assert_eq!(sample().len() % 512, 0);
    }
}
