//! Debian's stock cloud kernel, in the project's box.
#![allow(clippy::unwrap_used, reason = "a test ends where something is missing")]

mod support;

use std::fs::File;
use std::io::{Read as _, pipe};
use std::os::fd::OwnedFd;
use std::path::PathBuf;
use std::sync::{Arc, Condvar, Mutex};
use std::time::Duration;

use support::{Around, file, initramfs, kvm, skip, unpack};
use torpor_vmm::hypervisor::kvm::Kvm;
use torpor_vmm::machine::{Machine, Plan, SerialPort};
use torpor_vmm_api::End;
use torpor_vmm_devices::legacy::{Console, Serial};
use vmm_sys_util::eventfd::{EFD_NONBLOCK, EventFd};

/// Does what the command line's `t.end` says, after it has said that it is there.
const INIT: &str = r#"#!/bin/busybox sh
B=/bin/busybox
$B mkdir -p /proc /dev
$B mount -t proc proc /proc
$B mount -t devtmpfs dev /dev
for word in $($B cat /proc/cmdline); do case $word in t.*) eval "${word#t.}" ;; esac; done
echo "MARK cpus=$($B nproc)" >/dev/ttyS0
case $end in
reboot) $B reboot -f ;;
panic) exit 1 ;;
idle) $B sleep 1000 ;;
button) until $B grep -q 'ACPI:Ged' /proc/interrupts && $B awk '/ACPI:Ged/ { n = $2 } END { exit n == 0 }' /proc/interrupts; do $B sleep 0.1; done ;;
esac
$B poweroff -f
"#;

struct Stock {
    kvm: Kvm,
    kernel: Vec<u8>,
    initramfs: Vec<u8>,
}

/// The kernel below the target directory, or where `TORPOR_TEST_KERNEL` says.
fn kernel() -> Option<PathBuf> {
    if let Some(path) = std::env::var_os("TORPOR_TEST_KERNEL") {
        return Some(path.into());
    }
    let folder = concat!(env!("CARGO_MANIFEST_DIR"), "/../target/guest-kernel/boot");
    let mut names = std::fs::read_dir(folder).ok()?.filter_map(|entry| entry.ok().map(|entry| entry.path()));
    names.find(|path| path.file_name().is_some_and(|name| name.to_string_lossy().starts_with("vmlinuz")))
}

/// What a stock guest needs, or none after a word about it.
fn stock(test: &str) -> Option<Stock> {
    if std::env::var_os("TORPOR_BOX").is_none() {
        skip(test, "box", "a stock kernel wants a whole KVM: run it in tests/box/ring");
        return None;
    }
    let missing = |what: &str| {
        skip(test, "box", what);
        None
    };
    let Some(path) = kernel() else { return missing("there is no kernel in target/guest-kernel/boot") };
    let Ok(busybox) = std::fs::read("/usr/bin/busybox") else { return missing("there is no busybox") };
    let files: [(&str, u32, &[u8]); 5] = [
        ("bin", 0o40_755, b""),
        ("dev", 0o40_755, b""),
        ("proc", 0o40_755, b""),
        ("bin/busybox", 0o100_755, &busybox),
        ("init", 0o100_755, INIT.as_bytes()),
    ];
    Some(Stock { kvm: kvm(test)?, kernel: std::fs::read(path).unwrap(), initramfs: initramfs(&files) })
}

/// What came out of the serial port.
#[derive(Default)]
struct Output {
    text: Mutex<String>,
    grown: Condvar,
}

impl Output {
    fn wait_for(&self, wanted: &str) {
        let text = self.text.lock().unwrap();
        let limit = Duration::from_secs(60);
        let (text, waited) =
            self.grown.wait_timeout_while(text, limit, |text| !text.contains(wanted)).unwrap();
        assert!(!waited.timed_out(), "no {wanted:?} in {text:?}");
    }
}

struct Running {
    machine: Machine,
    around: Arc<Around>,
    output: Arc<Output>,
}

fn start(stock: &Stock, cpus: u8, words: &str) -> Running {
    let (mut reader, writer) = pipe().unwrap();
    let output = Arc::new(Output::default());
    let collected = Arc::clone(&output);
    std::thread::spawn(move || {
        let mut bytes = [0; 4096];
        while let Ok(count @ 1..) = reader.read(&mut bytes) {
            collected.text.lock().unwrap().push_str(&String::from_utf8_lossy(&bytes[..count]));
            collected.grown.notify_all();
        }
    });
    let line = EventFd::new(EFD_NONBLOCK).unwrap();
    let console = Console::open(File::from(OwnedFd::from(writer)), 0).unwrap();
    let serial = SerialPort { device: Arc::new(Serial::new(line.try_clone().unwrap(), console)), line };
    let plan = Plan {
        cpus,
        memory_bytes: 128 << 20,
        huge_pages: torpor_vmm_api::HugePages::Default,
        kernel: file(&stock.kernel),
        initramfs: Some(file(&stock.initramfs)),
        command_line: format!("console=ttyS0 quiet cryptomgr.notests panic=-1 {words}"),
        devices: Vec::new(),
        serial: Some(serial),
    };
    let around = Around::new();
    let mut machine = Machine::build(plan, &stock.kvm, around.clone()).unwrap();
    machine.start().unwrap();
    Running { machine, around, output }
}

/// The guest's end, after its mark.
fn end(running: Running) -> (End, String) {
    let end = running.around.end();
    assert!(running.machine.close().all_closed());
    let text = running.output.text.lock().unwrap().clone();
    assert!(text.contains("MARK"), "{text}");
    (end, text)
}

#[test]
fn a_stock_bzimage_boots_with_one_and_four_cpus_and_powers_off() {
    let Some(stock) = stock("a_stock_bzimage_boots_with_one_and_four_cpus_and_powers_off") else { return };
    for cpus in [1, 4] {
        let (end, text) = end(start(&stock, cpus, ""));
        assert_eq!(end, End::PowerOff, "{text}");
        assert!(text.contains(&format!("cpus={cpus}")), "{text}");
    }
}

#[test]
fn a_stock_vmlinux_boots_by_its_pvh_note() {
    let Some(mut stock) = stock("a_stock_vmlinux_boots_by_its_pvh_note") else { return };
    stock.kernel = unpack(&stock.kernel);
    let (end, text) = end(start(&stock, 1, ""));
    assert_eq!(end, End::PowerOff, "{text}");
}

#[test]
fn reboots_and_panics_end_the_vm_each_in_its_way() {
    let Some(stock) = stock("reboots_and_panics_end_the_vm_each_in_its_way") else { return };
    let cases = [
        ("t.end=reboot", End::Reset),
        ("t.end=reboot reboot=k", End::Reset),
        ("t.end=reboot reboot=t", End::TripleFault),
        // Without the panic notifier's module, a panic is the reset that follows it.
        ("t.end=panic", End::Reset),
    ];
    for (words, wanted) in cases {
        let (end, text) = end(start(&stock, 1, words));
        assert_eq!(end, wanted, "{words}: {text}");
    }
}

#[test]
fn three_vms_run_at_once() {
    let Some(stock) = stock("three_vms_run_at_once") else { return };
    let running: Vec<_> = (0..3).map(|_| start(&stock, 1, "")).collect();
    for running in running {
        assert_eq!(end(running).0, End::PowerOff);
    }
}

/// Processor time of this process so far, in clock ticks.
fn ticks() -> u64 {
    let stat = std::fs::read_to_string("/proc/self/stat").unwrap();
    let fields: Vec<_> = stat.rsplit(')').next().unwrap().split_whitespace().collect();
    fields[11].parse::<u64>().unwrap() + fields[12].parse::<u64>().unwrap()
}

#[test]
fn an_idle_guest_costs_no_processor_time_and_the_power_button_reaches_a_waiting_one() {
    let Some(stock) =
        stock("an_idle_guest_costs_no_processor_time_and_the_power_button_reaches_a_waiting_one")
    else {
        return;
    };
    let idle = start(&stock, 1, "t.end=idle");
    idle.output.wait_for("MARK");
    std::thread::sleep(Duration::from_millis(500));
    let before = ticks();
    std::thread::sleep(Duration::from_secs(3));
    let used = ticks() - before;
    // 3 s are 300 ticks.
    assert!(used <= 15, "{used} ticks of processor time in 3 s");
    idle.machine.close();

    let waiting = start(&stock, 1, "t.end=button");
    waiting.output.wait_for("MARK");
    assert!(!waiting.around.ended());
    waiting.machine.power_button().unwrap();
    assert_eq!(end(waiting).0, End::PowerOff);
}
