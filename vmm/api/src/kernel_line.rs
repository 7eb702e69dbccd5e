//! The command line of a stock Linux kernel on this machine.

/// panic=-1 and reboot=t: a panic and a reboot end the machine at once. The rest is what a kernel does not have to find out
/// on this machine: there is no keyboard, and the console is for what goes wrong. trace_eval_init: replaces names by numbers
/// in the text that describes each of two thousand trace events, a twentieth of a boot; only readers of that text miss it.
const ALWAYS: &str = "console=ttyS0 quiet reboot=t panic=-1 cryptomgr.notests i8042.noaux i8042.nokbd \
    initcall_blacklist=trace_eval_init";
/// Guests of up to so many bytes report free memory in small pieces.
const SMALL: u64 = 1 << 30;
/// Of 64 KiB: 2 to the power of so many pages.
const SMALL_REPORT: u32 = 4;

/// Whether the kernel of this host makes huge pages of what nobody asked it to.
pub fn host_makes_huge_pages() -> bool {
    // A kernel without the file has no such pages.
    std::fs::read_to_string("/sys/kernel/mm/transparent_hugepage/enabled")
        .is_ok_and(|text| text.contains("[always]"))
}

/// The command line for a guest with so much memory, on a host that makes huge pages unasked or doesn't.
pub fn kernel_line(memory_bytes: u64, huge_pages: bool) -> String {
    let mut line = ALWAYS.to_owned();
    // In a small guest free memory hardly ever lies together in the 2 MiB that a kernel reports by itself. Where the host
    // backs guests by huge pages, parts of them would stay all the same.
    if memory_bytes <= SMALL && !huge_pages {
        line += &format!(" page_reporting.page_reporting_order={SMALL_REPORT}");
    }
    line
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn small_guests_report_free_memory_in_small_pieces_where_the_host_can_use_them() {
        let order = "page_reporting.page_reporting_order=4";
        assert!(kernel_line(256 << 20, false).ends_with(order));
        assert!(!kernel_line(256 << 20, true).contains(order));
        assert!(!kernel_line(2 << 30, false).contains(order));
    }
}
