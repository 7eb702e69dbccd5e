//! How a VM is started on either machine with its console on a pipe.

use std::{
    fs,
    io::Read as _,
    path::{Path, PathBuf},
    process::{Child, Command, Stdio},
    sync::mpsc,
    time::{Duration, Instant},
};

use torpor_images::Kernels;
use torpor_vmm_api::{Config, Disk, Jail, Source};

/// Anything may go wrong.
pub(crate) type Outcome<T> = Result<T, Box<dyn std::error::Error>>;

/// A machine.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Which {
    Torpor,
    Qemu,
}

/// Memory of the VMs, bytes.
pub(crate) const MEMORY: u64 = 128 << 20;

/// What a VM is to run.
#[derive(Clone, Debug)]
pub(crate) struct Job {
    pub(crate) kernel: PathBuf,
    pub(crate) initramfs: Option<PathBuf>,
    pub(crate) command_line: String,
    pub(crate) memory_bytes: u64,
    /// Overlay and base.
    pub(crate) disk: Option<(PathBuf, PathBuf)>,
}

impl Job {
    pub(crate) fn of_kernel(kernel: &Path, command_line: &str) -> Self {
        Self {
            kernel: kernel.to_owned(),
            initramfs: None,
            command_line: command_line.to_owned(),
            memory_bytes: MEMORY,
            disk: None,
        }
    }
}

/// Programs and files.
pub(crate) struct Bench {
    vmm: PathBuf,
    kernel: PathBuf,
    unpacked: Option<PathBuf>,
    initramfs: PathBuf,
    pub(crate) folder: tempfile::TempDir,
}

impl Bench {
    pub(crate) fn prepare(vmm: &Path, guest: &Path, kernel: &Path) -> Outcome<Self> {
        let folder = tempfile::tempdir()?;
        let kernels = Kernels::open(folder.path())?;
        let kernel = kernels.from_path(kernel)?;
        let initramfs = kernels.initramfs(&kernel, guest)?;
        // Beside the rest, on the same file system: what is measured is not how the program is read.
        let own = folder.path().join("torpor-vmm");
        fs::copy(vmm, &own)?;
        let unpacked = kernels.unpacked(&kernel)?;
        Ok(Self { vmm: own, kernel: kernel.vmlinuz, unpacked, initramfs, folder })
    }

    pub(crate) fn file(&self, name: &str, bytes: &[u8]) -> Outcome<PathBuf> {
        let path = self.folder.path().join(name);
        fs::write(&path, bytes)?;
        Ok(path)
    }

    /// The stock kernel with our guest.
    pub(crate) fn job(&self, command_line: &str) -> Job {
        Job { initramfs: Some(self.initramfs.clone()), ..Job::of_kernel(&self.kernel, command_line) }
    }

    /// The same with the kernel as the vm driver hands it to torpor-vmm.
    pub(crate) fn unpacked(&self, job: &Job) -> Outcome<Job> {
        let kernel = self.unpacked.clone().ok_or("this kernel can't be unpacked here")?;
        Ok(Job { kernel, ..job.clone() })
    }

    pub(crate) fn start(&self, which: Which, job: &Job) -> Outcome<Running> {
        let mut command = match which {
            Which::Torpor => self.torpor(job)?,
            Which::Qemu => qemu(job),
        };
        let mut child =
            command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::inherit()).spawn()?;
        let mut output = child.stdout.take().ok_or("no pipe")?;
        let (heard, hears) = mpsc::channel();
        std::thread::spawn(move || {
            let mut bytes = [0; 4096];
            while let Ok(count @ 1..) = output.read(&mut bytes) {
                if heard.send(bytes[..count].to_vec()).is_err() {
                    return;
                }
            }
        });
        Ok(Running { child, hears, console: Vec::new() })
    }

    fn torpor(&self, job: &Job) -> Outcome<Command> {
        let path = |path: &PathBuf| Source::Path(path.clone());
        let disks = job.disk.iter().map(|(overlay, base)| Disk::Overlay {
            image: path(overlay),
            path: overlay.clone(),
            base: path(base),
            serial: "root".to_owned(),
            rate: None,
        });
        let config = Config {
            cpus: 1,
            memory_bytes: job.memory_bytes,
            huge_pages: torpor_vmm_api::HugePages::Default,
            kernel: path(&job.kernel),
            initramfs: job.initramfs.as_ref().map(path),
            command_line: job.command_line.clone(),
            disks: disks.collect(),
            net: None,
            vsock: None,
            balloon: false,
            console: Some(Source::Fd(1)),
            console_bytes: 64 << 10,
            control: None,
            control_fd: None,
            end: None,
            jail: Some(Jail { uid: Some(0x7000_0000), root: None, seccomp: true, cgroup: None }),
        };
        let file = self.file("config.json", &serde_json::to_vec(&config)?)?;
        let mut command = Command::new(&self.vmm);
        command.args(["-name", "bench", "--config"]).arg(file);
        Ok(command)
    }
}

fn qemu(job: &Job) -> Command {
    let mut command = Command::new("qemu-system-x86_64");
    let machine = "microvm,rtc=on,acpi=on,isa-serial=on,auto-kernel-cmdline=off";
    command.args(["-M", machine, "-accel", "kvm", "-cpu", "host", "-nodefaults", "-no-user-config"]);
    command.args(["-display", "none", "-smp", "1", "-m", &format!("size={}M", job.memory_bytes >> 20)]);
    command.args(["-chardev", "stdio,id=console", "-serial", "chardev:console", "-no-reboot"]);
    command.arg("-kernel").arg(&job.kernel);
    if let Some(initramfs) = &job.initramfs {
        command.arg("-initrd").arg(initramfs);
    }
    if !job.command_line.is_empty() {
        command.args(["-append", &job.command_line]);
    }
    if let Some((overlay, base)) = &job.disk {
        let file =
            |path: &Path| format!("file.driver=file,file.aio=threads,file.filename={}", path.display());
        command.args(["-blockdev", &format!("driver=raw,node-name=base,read-only=on,{}", file(base))]);
        command.args([
            "-blockdev",
            &format!("driver=qcow2,node-name=disk,discard=unmap,backing=base,{}", file(overlay)),
        ]);
        command.args(["-device", "virtio-blk-device,drive=disk"]);
    }
    command
}

/// A VM; its end is the end of the process.
pub(crate) struct Running {
    pub(crate) child: Child,
    hears: mpsc::Receiver<Vec<u8>>,
    pub(crate) console: Vec<u8>,
}

impl Running {
    /// Until the console has this text.
    pub(crate) fn wait_for(&mut self, text: &str, limit: Duration) -> Outcome<()> {
        let until = Instant::now() + limit;
        loop {
            if self.text().contains(text) {
                return Ok(());
            }
            match self.hears.recv_timeout(until.saturating_duration_since(Instant::now())) {
                Ok(bytes) => self.console.extend(bytes),
                Err(error) => return Err(format!("no '{text}' ({error}); console: {}", self.text()).into()),
            }
        }
    }

    /// Until the process ends; all that the console had.
    pub(crate) fn finish(mut self, limit: Duration) -> Outcome<String> {
        let until = Instant::now() + limit;
        while let Ok(bytes) = self.hears.recv_timeout(until.saturating_duration_since(Instant::now())) {
            self.console.extend(bytes);
        }
        if self.child.try_wait()?.is_none() && Instant::now() >= until {
            return Err(format!("not done within {limit:?}; console: {}", self.text()).into());
        }
        Ok(self.text())
    }

    fn text(&self) -> String {
        String::from_utf8_lossy(&self.console).into_owned()
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        // Both fail only when it is gone already.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}
