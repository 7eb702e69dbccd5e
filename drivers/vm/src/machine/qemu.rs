//! QEMU's microvm machine: no firmware to speak of, no PCI, virtio-mmio devices announced by ACPI, as a stock cloud
//! kernel takes them.

use std::{
    ffi::OsString,
    io,
    path::{Path, PathBuf},
};

use async_trait::async_trait;
use serde_json::json;
use torpor_sandbox::DriverError;

use super::{AgentEndpoint, Launch, Machine, Monitor, Plan, qmp::Qmp, tsc};
use crate::probe::Probe;

const RING: &str = "console";
/// The console's ring in QEMU's memory, bytes: a power of two. It is why a console that nobody reads can't grow: QEMU's
/// file and log backends have no bound and a hostile guest could fill the disk with them; a socket loses what is said while no
/// gateway listens.
const RING_BYTES: usize = 64 << 10;

/// QEMU with one accelerator.
#[derive(Debug)]
pub(crate) struct Qemu {
    program: PathBuf,
    accelerator: Accelerator,
    label: String,
    notice: Option<String>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Accelerator {
    Kvm,
    Emulation { tsc_khz: Option<u64> },
}

impl Qemu {
    /// With KVM where the probe found it usable, else in software emulation.
    pub(crate) fn new(program: &Path, probe: &Probe) -> Self {
        let program = program.to_owned();
        if probe.usable {
            return Self { program, accelerator: Accelerator::Kvm, label: "qemu (kvm)".into(), notice: None };
        }
        let notice = format!("software emulation, slow: {}", probe.reason);
        let accelerator = Accelerator::Emulation { tsc_khz: tsc::khz() };
        Self { program, accelerator, label: "qemu (tcg)".into(), notice: Some(notice) }
    }

    fn command_line(&self) -> String {
        // panic=-1 and reboot=t: a panic and a reboot end the machine at once, each with its own reason.
        let mut line = "console=ttyS0 quiet reboot=t panic=-1 cryptomgr.notests i8042.noaux".to_owned();
        if let Accelerator::Emulation { tsc_khz } = self.accelerator {
            line += " no_timer_check tsc=reliable";
            if let Some(khz) = tsc_khz {
                line += &format!(" tsc_early_khz={khz}");
            }
        }
        line
    }

    /// Machine and CPU. Told the counter's speed, an emulated guest needs no interval timer.
    fn machine(&self, cpus: u32) -> Vec<String> {
        let (machine, accelerator, cpu) = match self.accelerator {
            Accelerator::Kvm => ("", "kvm".to_owned(), "host"),
            Accelerator::Emulation { tsc_khz } => {
                let timers = if tsc_khz.is_some() { ",pit=off,pic=off" } else { "" };
                let threads = if cpus > 1 { "multi" } else { "single" };
                // Without erms the guest copies by words: byte-wise string instructions are slow to emulate.
                (timers, format!("tcg,thread={threads}"), "max,-erms")
            }
        };
        let machine = format!("microvm,rtc=on,acpi=on,isa-serial=on,auto-kernel-cmdline=off{machine}");
        vec!["-M".into(), machine, "-accel".into(), accelerator, "-cpu".into(), cpu.into()]
    }
}

/// A comma in the value of an option is written twice (qemu(1)).
fn escaped(path: &Path) -> Result<String, DriverError> {
    let text = path.to_str().ok_or_else(|| {
        DriverError::Invalid(format!("the path {} is not UTF-8, as QEMU needs it", path.display()))
    })?;
    Ok(text.replace(',', ",,"))
}

fn text(path: &Path) -> Result<String, DriverError> {
    escaped(path).map(|text| text.replace(",,", ","))
}

/// The overlay over its base. Both are named here: what the overlay's header says of a backing file is not followed. QEMU's own
/// locks are off: the driver's lock, which this process holds, is the one that counts.
fn disks(launch: &Launch<'_>) -> Result<Vec<String>, DriverError> {
    let cache = json!({ "direct": false, "no-flush": false });
    let file = |path: &Path, read_only: bool| -> Result<serde_json::Value, DriverError> {
        let (filename, discard) = (text(path)?, if read_only { "ignore" } else { "unmap" });
        Ok(
            json!({ "driver": "file", "filename": filename, "locking": "off", "aio": "threads", "discard": discard,
                   "read-only": read_only, "cache": cache }),
        )
    };
    let base = json!({ "driver": "raw", "node-name": "base", "read-only": true, "cache": cache, "file": file(launch.base, true)? });
    let disk = json!({ "driver": "qcow2", "node-name": "disk", "discard": "unmap", "detect-zeroes": "off", "cache": cache,
                       "file": file(launch.overlay, false)?, "backing": "base" });
    let device = "virtio-blk-device,drive=disk,serial=root,werror=report,rerror=report".to_owned();
    Ok(vec![
        "-blockdev".into(),
        base.to_string(),
        "-blockdev".into(),
        disk.to_string(),
        "-device".into(),
        device,
    ])
}

/// Console, agent, monitor.
fn channels(launch: &Launch<'_>) -> Result<Vec<String>, DriverError> {
    let folder = escaped(launch.run_dir)?;
    let socket = |id: &str| format!("socket,id={id},path={folder}/{id}.sock,server=on,wait=off");
    let args = [
        ("-chardev", format!("ringbuf,id={RING},size={RING_BYTES}")),
        ("-serial", format!("chardev:{RING}")),
        ("-chardev", socket("agent")),
        ("-device", "virtio-serial-device,max_ports=2".to_owned()),
        ("-device", "virtserialport,chardev=agent,name=torpor.agent".to_owned()),
        ("-chardev", socket("qmp")),
        ("-mon", "chardev=qmp,mode=control".to_owned()),
    ];
    Ok(args.into_iter().flat_map(|(option, value)| [option.to_owned(), value]).collect())
}

#[async_trait]
impl Machine for Qemu {
    fn name(&self) -> &'static str {
        "qemu"
    }

    fn label(&self) -> &str {
        &self.label
    }

    fn notice(&self) -> Option<String> {
        self.notice.clone()
    }

    fn plan(&self, launch: &Launch<'_>) -> Result<Plan, DriverError> {
        let mut args: Vec<String> = vec!["-name".into(), launch.marker.into()];
        args.extend(self.machine(launch.cpus));
        let one = |option: &str, value: String| [option.to_owned(), value];
        args.extend(["-nodefaults", "-no-user-config"].map(str::to_owned));
        args.extend(one("-display", "none".into()));
        args.extend(one("-smp", launch.cpus.to_string()));
        args.extend(one("-m", format!("size={}M", launch.memory_bytes >> 20)));
        // A guest that has ended stays, without running, until somebody has seen how and has read its console.
        args.extend(one("-action", "reboot=shutdown,shutdown=pause,panic=pause".into()));
        args.extend(one(
            "-sandbox",
            "on,obsolete=deny,elevateprivileges=deny,spawn=deny,resourcecontrol=deny".into(),
        ));
        args.extend(one("-kernel", text(launch.kernel)?));
        args.extend(one("-initrd", text(launch.initramfs)?));
        args.extend(one("-append", self.command_line()));
        args.extend(disks(launch)?);
        args.extend(channels(launch)?);
        args.extend(one("-netdev", format!("tap,id=net,fd={}", launch.tap_fd)));
        args.extend(one("-device", format!("virtio-net-device,netdev=net,mac={}", launch.net.mac)));
        args.extend(one("-device", "virtio-rng-device".into()));
        let args = args.into_iter().map(OsString::from).collect();
        Ok(Plan { program: self.program.clone(), args, inherited: Vec::new() })
    }

    fn agent(&self, run_dir: &Path) -> AgentEndpoint {
        AgentEndpoint::VirtioSerial(run_dir.join("agent.sock"))
    }

    async fn monitor(&self, run_dir: &Path) -> io::Result<Box<dyn Monitor>> {
        let monitor = Qmp::connect(&run_dir.join("qmp.sock"), RING, RING_BYTES).await?;
        Ok(Box::new(monitor))
    }

    fn headroom(&self, _memory_bytes: u64, _disk_bytes: u64) -> u64 {
        512 << 20
    }
}

#[cfg(test)]
mod tests {
    use torpor_netpool::{PoolConfig, Slot};

    use super::*;

    fn plan(accelerator: Accelerator, cpus: u32, run_dir: &str) -> String {
        let qemu = Qemu { program: "qemu".into(), accelerator, label: String::new(), notice: None };
        let net = PoolConfig::default().guest_net("sb-x", Slot(1)).unwrap();
        let launch = Launch {
            marker: "torpor-sb-x-run-3",
            run_dir: Path::new(run_dir),
            kernel: Path::new("/k/vmlinuz"),
            unpacked_kernel: Some(Path::new("/k/vmlinux-1")),
            initramfs: Path::new("/k/initramfs"),
            overlay: Path::new("/s/overlay.qcow2"),
            base: Path::new("/i/base.raw"),
            cpus,
            memory_bytes: 256 << 20,
            net: &net,
            mtu: 1500,
            uid: None,
            tap_fd: 3,
        };
        let plan = qemu.plan(&launch).unwrap();
        plan.args.iter().map(|arg| arg.to_str().unwrap()).collect::<Vec<_>>().join(" ")
    }

    #[test]
    fn an_emulated_machine_is_told_the_counters_speed_and_has_no_interval_timer() {
        let line = plan(Accelerator::Emulation { tsc_khz: Some(2_100_000) }, 1, "/r");
        assert!(line.starts_with(
            "-name torpor-sb-x-run-3 -M microvm,rtc=on,acpi=on,isa-serial=on,auto-kernel-cmdline=off,pit=off,pic=off \
             -accel tcg,thread=single -cpu max,-erms -nodefaults -no-user-config -display none -smp 1 -m size=256M "
        ));
        assert!(line.contains("tsc_early_khz=2100000"));
        let line = plan(Accelerator::Emulation { tsc_khz: None }, 2, "/r");
        assert!(
            !line.contains("pit=off") && !line.contains("tsc_early_khz") && line.contains("thread=multi"),
            "{line}"
        );
    }

    #[test]
    fn kvm_is_used_with_the_hosts_cpu_and_its_own_timers() {
        let line = plan(Accelerator::Kvm, 4, "/r");
        assert!(
            line.contains("-accel kvm -cpu host")
                && !line.contains("tsc=reliable")
                && line.contains("-smp 4"),
            "{line}"
        );
    }

    #[test]
    fn the_base_is_named_explicitly_and_read_only_and_flushes_are_honoured() {
        let line = plan(Accelerator::Kvm, 1, "/r");
        for part in [
            r#""backing":"base""#,
            r#""filename":"/i/base.raw","locking":"off","read-only":true"#,
            r#""filename":"/s/overlay.qcow2","locking":"off","read-only":false"#,
            r#""no-flush":false"#,
            "-netdev tap,id=net,fd=3",
        ] {
            assert!(line.contains(part), "{part} in {line}");
        }
        assert!(!line.contains(r#""no-flush":true"#));
    }

    #[test]
    fn a_comma_in_a_path_can_not_become_an_option() {
        let line = plan(Accelerator::Kvm, 1, "/r,logfile=/etc/passwd");
        assert!(line.contains("path=/r,,logfile=/etc/passwd/agent.sock,server=on"), "{line}");
    }

    #[test]
    fn the_console_has_a_bound() {
        assert!(
            plan(Accelerator::Kvm, 1, "/r")
                .contains("-chardev ringbuf,id=console,size=65536 -serial chardev:console")
        );
    }
}
