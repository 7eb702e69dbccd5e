//! Looking after the workspace disks of sandboxes, of which nearly all needs one that nothing runs.
//!
//! Each operation holds the sandbox's turn, so that a verb waits for it, and the overlay's lock. It does not hold the step:
//! what `observe` sees (a disk, and no run) stays true all the time.

use std::{
    fs::{self, File},
    io::{self, Read as _},
    ops::ControlFlow,
    os::unix::fs::MetadataExt as _,
    panic::{AssertUnwindSafe, catch_unwind, resume_unwind},
    path::{Path, PathBuf},
};

use async_trait::async_trait;
use torpor_driver_common::{Turn, turns::blocking};
use torpor_overlay::{Block, Format, Lock, Raw};
use torpor_sandbox::{
    DriverError, SandboxId,
    disk::{
        Compacted, Compaction, DiskCare, DiskCheck, DiskFormat, DiskLayer, DiskPiece, DiskReport, DiskSink,
        DiskState, DiskWatch,
    },
};

use crate::{driver::VmDriver, errors, host::Host};

/// What an overlay's tables count in, bytes.
const CLUSTER: u64 = 64 << 10;
/// Most bytes in one piece of an export.
const PIECE: usize = 256 << 10;
/// Zeros of an export are left out in units of so many bytes.
const GRAIN: usize = 64 << 10;
static ZEROS: [u8; GRAIN] = [0; GRAIN];
/// How often an export says how far it has come, bytes.
const TOLD: u64 = 16 << 20;
/// Layers beneath a disk that are followed; the overlay crate opens no more.
const MOST_LAYERS: usize = 9;
/// How every qcow2 image begins (QEMU's docs/interop/qcow2.txt).
const QCOW2_MAGIC: [u8; 4] = *b"QFI\xfb";

#[async_trait]
impl DiskCare for VmDriver {
    async fn report(&self, id: &SandboxId, check: bool) -> Result<DiskReport, DriverError> {
        let wanted = id.clone();
        if check {
            return self.at_rest(id, move |host| checked_report(host, &wanted)).await;
        }
        let host = self.host.clone();
        blocking(move || report(&host, &wanted)).await
    }

    async fn grow(&self, id: &SandboxId, bytes: u64) -> Result<u64, DriverError> {
        let (turn, wanted) = (self.turns.turn(id).await, id.clone());
        let Some(vm) = self.live(id).await?.filter(|vm| vm.seen().exit.is_none()) else {
            let (of, held) = (id.clone(), turn.clone());
            let size = self.at_rest_in(held, move |host| grow(host, &of, bytes)).await?;
            // In a step: others note other things in the same file.
            self.step(id, &turn, move |host| host.store.note_disk_size(&wanted, size)).await?;
            return Ok(size);
        };
        let size = vm.grow_disk(bytes).await?;
        let noted = self.step(id, &turn, move |host| {
            host.store.note_disk_size(&wanted, size)?;
            host.store.spec(&wanted)
        });
        // The guest's file system follows when its agent is configured again; at its next start, if not now.
        if let Err(why) = vm.settle_in(&self.host, &noted.await?).await {
            tracing::warn!(sandbox = %id, why, "the disk is larger, but its file system is not yet");
        }
        Ok(size)
    }

    async fn compact(
        &self,
        id: &SandboxId,
        how: Compaction,
        watch: DiskWatch,
    ) -> Result<Compacted, DriverError> {
        let wanted = id.clone();
        self.at_rest(id, move |host| compact(host, &wanted, how, watch)).await
    }

    async fn export(&self, id: &SandboxId, format: DiskFormat, sink: DiskSink) -> Result<(), DriverError> {
        let wanted = id.clone();
        self.at_rest(id, move |host| export(host, &wanted, format, &sink)).await
    }
}

impl VmDriver {
    /// Blocking work on a disk, with the sandbox's turn in hand to its end, also when nobody waits for it any more.
    async fn at_rest<T: Send + 'static>(
        &self,
        id: &SandboxId,
        work: impl FnOnce(&Host) -> Result<T, DriverError> + Send + 'static,
    ) -> Result<T, DriverError> {
        self.at_rest_in(self.turns.turn(id).await, work).await
    }

    async fn at_rest_in<T: Send + 'static>(
        &self,
        turn: Turn,
        work: impl FnOnce(&Host) -> Result<T, DriverError> + Send + 'static,
    ) -> Result<T, DriverError> {
        let host = self.host.clone();
        blocking(move || {
            let _turn = turn;
            work(&host)
        })
        .await
    }
}

/// The files of a sandbox's disk.
struct Files {
    overlay: PathBuf,
    base: PathBuf,
}

impl Files {
    fn of(host: &Host, id: &SandboxId) -> Result<Self, DriverError> {
        let spec = host.store.spec(id)?;
        Ok(Self { overlay: host.store.overlay(id), base: host.assets.base_path(&spec.image_digest) })
    }
}

fn report(host: &Host, id: &SandboxId) -> Result<DiskReport, DriverError> {
    let files = Files::of(host, id)?;
    let info = torpor_overlay::inspect(&files.overlay).map_err(errors::overlay)?;
    let mut layers = vec![DiskLayer {
        path: files.overlay.display().to_string(),
        digest: String::new(),
        format: Some(DiskFormat::Qcow2),
        virtual_bytes: info.virtual_bytes,
        used_bytes: info.used_bytes,
    }];
    let mut beneath = info.base.digest;
    while !beneath.is_empty() && layers.len() < MOST_LAYERS {
        let (layer, next) = base_layer(&host.assets.base_path(&beneath), beneath);
        layers.push(layer);
        beneath = next;
    }
    let locked = torpor_overlay::is_locked(&files.overlay).map_err(errors::overlay)?;
    let state = match (info.sealed, locked) {
        (true, _) => DiskState::Sealed,
        (false, true) => DiskState::InUse,
        (false, false) => DiskState::AtRest,
    };
    let (virtual_bytes, used_bytes) = (info.virtual_bytes, info.used_bytes);
    Ok(DiskReport { virtual_bytes, used_bytes, layers, generation: info.generation, state, check: None })
}

/// A file that a disk stands on, and the digest of what that stands on in turn.
fn base_layer(path: &Path, digest: String) -> (DiskLayer, String) {
    let shown = path.display().to_string();
    let missing = DiskLayer { path: shown, digest, format: None, virtual_bytes: 0, used_bytes: 0 };
    let Ok(found) = path.metadata() else { return (missing, String::new()) };
    let used_bytes = found.blocks() * 512;
    let raw = |missing| DiskLayer {
        format: Some(DiskFormat::Raw),
        virtual_bytes: found.len(),
        used_bytes,
        ..missing
    };
    match torpor_overlay::inspect(path) {
        Ok(info) if begins_as_qcow2(path) => {
            let format = Some(DiskFormat::Qcow2);
            let layer = DiskLayer { format, virtual_bytes: info.virtual_bytes, used_bytes, ..missing };
            (layer, info.base.digest)
        }
        _ => (raw(missing), String::new()),
    }
}

fn begins_as_qcow2(path: &Path) -> bool {
    let mut magic = [0; 4];
    File::open(path).and_then(|mut file| file.read_exact(&mut magic)).is_ok() && magic == QCOW2_MAGIC
}

fn checked_report(host: &Host, id: &SandboxId) -> Result<DiskReport, DriverError> {
    let mut report = report(host, id)?;
    let overlay = host.store.overlay(id);
    let _lock = Lock::acquire(&overlay).map_err(errors::overlay)?;
    report.check = Some(match torpor_overlay::check(&overlay) {
        Ok(found) => DiskCheck {
            damages: found.damage,
            damage_count: found.damages,
            leaked_bytes: found.leaked_clusters * CLUSTER,
            leaked_clusters: found.leaked_clusters,
            data_bytes: found.data_clusters * CLUSTER,
            unclean: found.unclean,
        },
        // So bad that its tables can't be followed.
        Err(error @ torpor_overlay::Error::Corrupt { .. }) => {
            DiskCheck { damages: vec![error.to_string()], damage_count: 1, ..DiskCheck::default() }
        }
        Err(error) => return Err(errors::overlay(error)),
    });
    Ok(report)
}

fn grow(host: &Host, id: &SandboxId, bytes: u64) -> Result<u64, DriverError> {
    let files = Files::of(host, id)?;
    torpor_overlay::grow(&files.overlay, bytes).map_err(errors::overlay)?;
    // In whole clusters, so perhaps a little more than was asked for.
    Ok(torpor_overlay::inspect(&files.overlay).map_err(errors::overlay)?.virtual_bytes)
}

fn compact(
    host: &Host,
    id: &SandboxId,
    how: Compaction,
    mut watch: DiskWatch,
) -> Result<Compacted, DriverError> {
    let files = Files::of(host, id)?;
    let done = match how {
        Compaction::GiveBack => {
            let give_back = |tell: &mut dyn FnMut(u64, u64)| {
                torpor_overlay::compact(&files.overlay, &[&files.base], tell)
            };
            interruptible("disk compact", &mut *watch, give_back)?
        }
        Compaction::Rewrite => {
            let rewrite = |tell: &mut dyn FnMut(u64, u64)| torpor_overlay::rewrite(&files.overlay, tell);
            interruptible("disk compact", &mut *watch, rewrite)?
        }
    };
    Ok(Compacted { used_before: done.used_before, used_after: done.used_after })
}

/// Why an unwinding came from here.
struct Ended;

/// Runs work of the overlay crate that tells its progress but can't be told to end: it is unwound from inside of its own
/// call, and clears away what it has begun, as it would when it failed. Nothing of it is used afterwards.
fn interruptible<T>(
    name: &'static str,
    watch: &mut dyn FnMut(u64, u64) -> ControlFlow<()>,
    work: impl FnOnce(&mut dyn FnMut(u64, u64)) -> Result<T, torpor_overlay::Error>,
) -> Result<T, DriverError> {
    let run = AssertUnwindSafe(|| {
        work(&mut |done, all| {
            if watch(done, all).is_break() {
                // Not a panic: no hook is called, nothing is printed.
                resume_unwind(Box::new(Ended));
            }
        })
    });
    match catch_unwind(run) {
        Ok(result) => result.map_err(errors::overlay),
        Err(cause) if cause.is::<Ended>() => Err(DriverError::Cancelled(name)),
        Err(cause) => resume_unwind(cause),
    }
}

fn export(host: &Host, id: &SandboxId, format: DiskFormat, sink: &DiskSink) -> Result<(), DriverError> {
    let files = Files::of(host, id)?;
    let _lock = Lock::acquire(&files.overlay).map_err(errors::overlay)?;
    let disk = torpor_overlay::open_read_only(&files.overlay, &[&files.base]).map_err(errors::overlay)?;
    match format {
        DiskFormat::Raw => stream(&disk, &files.overlay, sink),
        DiskFormat::Qcow2 => {
            let temporary = host.store.export_file(id);
            let file = as_qcow2(&disk, &temporary, sink)?;
            let copy = Raw::from_file(file, false).map_err(|source| unread(&temporary, source))?;
            stream(&copy, &temporary, sink)
        }
    }
}

/// Makes a qcow2 file of a disk, and opens it. Its name is gone afterwards, its bytes go with the file.
fn as_qcow2(disk: &dyn Block, path: &Path, sink: &DiskSink) -> Result<File, DriverError> {
    let mut watch = |done, all| match sink.is_closed() {
        true => ControlFlow::Break(()),
        false => {
            // A slow client misses some of these.
            let _ = sink.try_send(DiskPiece::Preparing(done, all));
            ControlFlow::Continue(())
        }
    };
    let write = |tell: &mut dyn FnMut(u64, u64)| torpor_overlay::export(disk, path, Format::Qcow2, tell);
    interruptible("disk export", &mut watch, write)?;
    let opened = File::open(path);
    let removed = fs::remove_file(path);
    let file = opened.map_err(|source| unread(path, source))?;
    removed.map_err(|source| DriverError::backend(format!("remove {}", path.display()), source))?;
    Ok(file)
}

fn unread(path: &Path, source: io::Error) -> DriverError {
    DriverError::backend(format!("read {}", path.display()), source)
}

/// Hands out all of a disk but its zeros.
fn stream(disk: &dyn Block, path: &Path, sink: &DiskSink) -> Result<(), DriverError> {
    let send = |piece| sink.blocking_send(piece).map_err(|_| DriverError::Cancelled("disk export"));
    let all = disk.size();
    send(DiskPiece::Size(all))?;
    let mut buffer = vec![0; PIECE];
    let (mut at, mut told) = (0, 0);
    while at < all {
        let next = disk.skip_zeros(at).map_err(|source| unread(path, source))?;
        at = at.max(next / GRAIN as u64 * GRAIN as u64).min(all);
        let chunk = &mut buffer[..(PIECE as u64).min(all - at) as usize];
        disk.read(chunk, at).map_err(|source| unread(path, source))?;
        for (offset, run) in runs(chunk) {
            send(DiskPiece::Data(at + offset as u64, run.to_vec()))?;
        }
        at += chunk.len() as u64;
        if at - told >= TOLD {
            told = at;
            send(DiskPiece::Reached(at))?;
        }
    }
    send(DiskPiece::Reached(all))
}

/// The parts of a chunk that aren't zeros, with their offsets.
fn runs(chunk: &[u8]) -> Vec<(usize, &[u8])> {
    let mut runs: Vec<(usize, usize)> = Vec::new();
    for (number, grain) in chunk.chunks(GRAIN).enumerate() {
        let (start, end) = (number * GRAIN, number * GRAIN + grain.len());
        match runs.last_mut() {
            _ if grain == &ZEROS[..grain.len()] => {}
            Some(run) if run.1 == start => run.1 = end,
            _ => runs.push((start, end)),
        }
    }
    runs.into_iter().map(|(start, end)| (start, &chunk[start..end])).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn zeros_are_left_out_and_neighbours_go_together() {
        let mut chunk = vec![0; 3 * GRAIN + 5];
        assert!(runs(&chunk).is_empty());
        (chunk[0], chunk[GRAIN], chunk[3 * GRAIN + 4]) = (1, 2, 3);
        let found: Vec<_> = runs(&chunk).iter().map(|(at, run)| (*at, run.len())).collect();
        assert_eq!(found, [(0, 2 * GRAIN), (3 * GRAIN, 5)]);
    }

    #[test]
    fn a_watch_that_says_so_ends_the_work_and_a_panic_stays_a_panic() {
        let dropped = std::cell::Cell::new(0);
        struct Counts<'a>(&'a std::cell::Cell<u32>);
        impl Drop for Counts<'_> {
            fn drop(&mut self) {
                self.0.set(self.0.get() + 1);
            }
        }
        let mut watch = |done, _| if done > 2 { ControlFlow::Break(()) } else { ControlFlow::Continue(()) };
        let ended = interruptible("disk compact", &mut watch, |tell| {
            let _counts = Counts(&dropped);
            (0..9).for_each(|done| tell(done, 9));
            Ok(())
        });
        assert!(matches!(ended, Err(DriverError::Cancelled("disk compact"))));
        assert_eq!(dropped.get(), 1);
        assert_eq!(
            interruptible("x", &mut watch, |tell| {
                tell(1, 2);
                Ok(7)
            })
            .unwrap(),
            7
        );
        let panicked = catch_unwind(AssertUnwindSafe(|| {
            let _ = interruptible("x", &mut watch, |_| -> Result<(), _> { resume_unwind(Box::new("other")) });
        }));
        assert_eq!(panicked.unwrap_err().downcast_ref::<&str>(), Some(&"other"));
    }
}
