//! What /proc says about processes and memory.

use std::fs;

use nix::unistd::Pid;

/// Set in the flags of a kernel thread.
const PF_KTHREAD: u64 = 0x0020_0000;

/// One living process.
struct Process {
    pid: Pid,
    parent: Pid,
    kernel: bool,
}

/// Every process that is neither this one nor a kernel thread nor dead.
pub fn others() -> Vec<Pid> {
    let own = Pid::this();
    all()
        .into_iter()
        .filter(|process| process.pid != own && !process.kernel)
        .map(|process| process.pid)
        .collect()
}

/// The living children, grandchildren and so on of `root`.
pub fn descendants(root: Pid) -> Vec<Pid> {
    let processes = all();
    let mut found = vec![root];
    let mut next = 0;
    while let Some(&parent) = found.get(next) {
        found.extend(processes.iter().filter(|process| process.parent == parent).map(|process| process.pid));
        next += 1;
    }
    found.remove(0);
    found
}

fn all() -> Vec<Process> {
    let Ok(entries) = fs::read_dir("/proc") else {
        return Vec::new();
    };
    entries
        .filter_map(|entry| entry.ok()?.file_name().to_str()?.parse().ok())
        .filter_map(|pid| parse(pid, &fs::read_to_string(format!("/proc/{pid}/stat")).ok()?))
        .collect()
}

/// Reads a line of /proc/PID/stat; none for a zombie.
fn parse(pid: i32, stat: &str) -> Option<Process> {
    // The name may hold spaces and parentheses; what follows the last one is fixed.
    let mut fields = stat.rsplit_once(')')?.1.split_ascii_whitespace();
    let state = fields.next()?;
    let parent = fields.next()?.parse().ok()?;
    let flags: u64 = fields.nth(4)?.parse().ok()?;
    (!matches!(state, "Z" | "X")).then(|| Process {
        pid: Pid::from_raw(pid),
        parent: Pid::from_raw(parent),
        kernel: flags & PF_KTHREAD != 0,
    })
}

/// Total and available memory in bytes, zeros when /proc/meminfo can't be read.
pub fn memory() -> (u64, u64) {
    let text = fs::read_to_string("/proc/meminfo").unwrap_or_default();
    let bytes = |name: &str| {
        let line = text.lines().find_map(|line| line.strip_prefix(name))?;
        let kib: u64 = line.trim().strip_suffix("kB")?.trim().parse().ok()?;
        Some(kib * 1024)
    };
    (bytes("MemTotal:").unwrap_or(0), bytes("MemAvailable:").unwrap_or(0))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_process_name_with_parentheses_is_read_over() {
        let process = parse(7, "7 (a) b) c) S 3 7 7 0 -1 2097216 0 0").unwrap();
        assert_eq!((process.parent, process.kernel), (Pid::from_raw(3), true));
        assert!(parse(7, "7 (x) Z 3 7 7 0 -1 0 0").is_none());
    }

    #[test]
    fn this_process_is_a_descendant_of_its_parent() {
        assert!(descendants(Pid::parent()).contains(&Pid::this()));
        assert!(!others().contains(&Pid::this()));
    }
}
