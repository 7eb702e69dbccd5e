//! The care of workspace disks: who may, when, and what becomes of it. Wire types are not known here.

use std::{ops::ControlFlow, sync::Arc, time::Duration};

use tokio::sync::mpsc::{self, error::SendTimeoutError};
use torpor_sandbox::{
    ComputeDriver, DiskCare, DiskFormat, DiskReport, DriverError, Keep, Observed, Phase, SandboxId,
    disk::{Compacted, Compaction, DiskPiece},
    spec::size,
};

use crate::{
    error::{ApiError, Code, RETRY_AFTER, next_command, with_causes},
    maintenance::{Guard, Kind, MOST, Refused},
    pressure::{ADVICE, Claim, NEW_DISK, Space},
    service::{Service, Target, place_of, request_key},
    store::{Record, StoreError},
};

/// Pieces between a disk and a client: beyond it the disk waits.
const PIECES: usize = 4;
/// How long the client of an export may take nothing, until the disk is let go.
const CLIENT_PATIENCE: Duration = Duration::from_secs(60);
/// What the sizes of disks are rounded up to, bytes.
const ROUNDED: u64 = 64 << 10;

/// A disk as it is shown.
#[derive(Clone, Debug)]
pub struct DiskView {
    /// Whose it is.
    pub record: Record,
    /// What the driver says.
    pub report: DiskReport,
    /// What is being done with it.
    pub running: Option<Kind>,
    /// The file system it lies on.
    pub space: Option<Space>,
}

/// How far a compaction is.
#[derive(Clone, Copy, Debug)]
pub enum CompactStep {
    /// Bytes looked at, and all of them.
    Progress(u64, u64),
    /// The end.
    Done(Compacted),
}

/// How far an export is.
#[derive(Clone, Debug)]
pub enum ExportStep {
    /// Something of it.
    Piece(DiskPiece),
    /// All was handed out.
    End,
}

/// What a stream of an operation carries.
pub type Steps<T> = mpsc::Receiver<Result<T, ApiError>>;

/// A sandbox at rest (or, to grow its disk, Ready), and the right to work on its disk.
pub(crate) struct AtRest {
    pub record: Record,
    pub driver: Arc<dyn ComputeDriver>,
    pub guard: Guard,
}

impl Service {
    /// What a disk is; with `check` also whether it is in order.
    ///
    /// # Errors
    /// `NOT_FOUND`; `FAILED_PRECONDITION` with `check` when the sandbox isn't at rest; the driver's.
    pub async fn disk(&self, sandbox: &str, check: bool) -> Result<DiskView, ApiError> {
        let target = Target { sandbox: sandbox.to_owned(), ..Target::default() };
        let (record, report) = if check {
            let AtRest { record, driver, guard } = self.at_rest(&target, Kind::Check).await?;
            let id = record.id.clone();
            // In a task of its own: a caller that goes away must not open the way before the work has ended.
            let work = tokio::spawn(async move {
                let report = care(&driver)?.report(&id, true).await;
                drop(guard);
                report
            });
            let report = work.await.map_err(ApiError::internal)?;
            (record, report)
        } else {
            let record = self.store.get(sandbox).await?;
            let driver = self.driver(&record.spec.driver)?;
            let report = care(&driver).map_err(|e| self.disk_failed(&record, &e))?;
            let report = report.report(&record.id, false).await;
            (record, report)
        };
        let report = report.map_err(|error| self.disk_failed(&record, &error))?;
        let running = self.maintenance.running(&record.id);
        Ok(DiskView { record, report, running, space: self.pressure.look() })
    }

    /// Makes a disk larger; the record says so afterwards.
    ///
    /// # Errors
    /// `INVALID_ARGUMENT` below the present size or above what is possible, `FAILED_PRECONDITION` unless it is at rest or
    /// Ready on a machine whose disks grow while they are used,
    /// `ABORTED` for a stale version, the driver's.
    pub async fn grow_disk(&self, target: Target, bytes: u64) -> Result<Arc<Record>, ApiError> {
        let asked = format!("{} {bytes}", target.sandbox);
        let request = request_key(place_of(&target.sandbox), target.request_id.clone(), "disk grow", &asked)?;
        if let Some(key) = &request
            && let Some(id) = self.store.replayed(key.clone()).await?
        {
            return Ok(Arc::new(self.store.get(&id).await?));
        }
        let AtRest { record, driver, guard } = self.at_rest(&target, Kind::Grow).await?;
        let present = record.spec.resources.disk_bytes;
        if bytes < present {
            let problem =
                format!("{} asked for; the disk has {} and never shrinks", size(bytes), size(present));
            return Err(ApiError::invalid("size_bytes", problem).about(&record));
        }
        let grown = match care(&driver) {
            Ok(disks) => disks.grow(&record.id, bytes).await,
            Err(error) => Err(error),
        };
        let grown = grown.map_err(|error| match error {
            // Not while it runs.
            DriverError::Unsupported(_) if runs_settled(&record) && driver.disks().is_some() => {
                not_at_rest(&record, Kind::Grow, &format!("torpor suspend {}", record.name))
            }
            DriverError::Invalid(problem) => ApiError::invalid("size_bytes", problem).about(&record),
            error => self.disk_failed(&record, &error),
        })?;
        let applied = self.store.resized(&record.id, grown, request).await?;
        drop(guard);
        Ok(applied.record)
    }

    /// Gives back to the host what the guest no longer uses. Goes on when its caller goes away.
    ///
    /// # Errors
    /// `FAILED_PRECONDITION` unless it is at rest, `ABORTED` for a stale version, `RESOURCE_EXHAUSTED` without room to
    /// write the disk anew; what comes later is in the stream.
    pub async fn compact_disk(
        self: &Arc<Self>,
        target: &Target,
        rewrite: bool,
    ) -> Result<Steps<CompactStep>, ApiError> {
        let (kind, how) = match rewrite {
            true => (Kind::Rewrite, Compaction::Rewrite),
            false => (Kind::Compact, Compaction::GiveBack),
        };
        let AtRest { record, driver, guard } = self.at_rest(target, kind).await?;
        let claim = match rewrite {
            true => Some(self.room_for_copy(&record, &driver, 1, "written anew").await?),
            false => None,
        };
        let (out, steps) = mpsc::channel(PIECES);
        let (tell, cancel) = (out.clone(), guard.cancel().clone());
        let watch = move |done, all| {
            // A slow client misses some of these.
            let _ = tell.try_send(Ok(CompactStep::Progress(done, all)));
            if cancel.is_cancelled() { ControlFlow::Break(()) } else { ControlFlow::Continue(()) }
        };
        let this = self.clone();
        tokio::spawn(async move {
            let done = match care(&driver) {
                Ok(disks) => disks.compact(&record.id, how, Box::new(watch)).await,
                Err(error) => Err(error),
            };
            let last =
                done.map(CompactStep::Done).map_err(|error| this.operation_failed(&record, &guard, &error));
            drop((guard, claim));
            // Nobody may listen any more.
            let _ = out.send(last).await;
        });
        Ok(steps)
    }

    /// Hands out a disk. Ends when its caller goes away.
    ///
    /// # Errors
    /// As [`Service::compact_disk`].
    pub async fn export_disk(
        self: &Arc<Self>,
        target: &Target,
        format: DiskFormat,
    ) -> Result<Steps<ExportStep>, ApiError> {
        let AtRest { record, driver, guard } = self.at_rest(target, Kind::Export).await?;
        let claim = match format {
            DiskFormat::Qcow2 => {
                Some(self.room_for_copy(&record, &driver, usize::MAX, "exported as qcow2").await?)
            }
            DiskFormat::Raw => None,
        };
        let (out, steps) = mpsc::channel(1);
        let this = self.clone();
        tokio::spawn(async move {
            let last = hand_out(&driver, &record.id, format, &guard, &out).await;
            let last = last.map_err(|end| match end {
                ExportEnd::Failed(error) => this.operation_failed(&record, &guard, &error),
                ExportEnd::Stalled => stalled(&record),
            });
            // First the way is free, then the client is told: it may be slow to listen, or gone.
            drop((guard, claim));
            let _ = out.send(last.map(|()| ExportStep::End)).await;
        });
        Ok(steps)
    }

    /// Takes the right to work on the disk of a sandbox that is, and stays, at rest.
    pub(crate) async fn at_rest(&self, target: &Target, kind: Kind) -> Result<AtRest, ApiError> {
        let record = self.store.get(&target.sandbox).await?;
        let guard = self.maintenance.begin(&record.id, kind, &self.end).map_err(|refused| {
            let Refused::Busy(running) = refused else { return too_many(&record, kind) };
            let message = format!(
                "sandbox '{}': {} must wait until {} has ended",
                record.name,
                kind.name(),
                running.name()
            );
            let error = ApiError::new(Code::FailedPrecondition, "DISK_BUSY", message).about(&record);
            error.with("operation", running.name()).with("next", show_command(&record))
        })?;
        // Only what is read from here on holds: see the module `maintenance`.
        let record = self.store.get(record.id.as_str()).await?;
        if let Some(expected) = target.expected_version.filter(|&expected| expected != record.version) {
            let (name, found) = (record.name, record.version);
            return Err(StoreError::Stale { name, expected, found }.into());
        }
        let driver = self.driver(&record.spec.driver)?;
        if kind == Kind::Grow && runs_settled(&record) {
            return Ok(AtRest { record, driver, guard });
        }
        rests(&record, kind)?;
        match driver.observe(&record.id).await {
            // What is missing is for the driver to name.
            Ok(Observed::Stopped { .. } | Observed::Missing) => {
                let record = self.grown_before(record, &driver).await?;
                Ok(AtRest { record, driver, guard })
            }
            Ok(seen) => {
                let message = match seen {
                    Observed::Unknown(why) => {
                        format!("sandbox '{}': whether it runs can't be told: {why}", record.name)
                    }
                    _ => format!("sandbox '{}': something of its last run is still there", record.name),
                };
                let error = ApiError::new(Code::FailedPrecondition, "NOT_AT_REST", message);
                Err(error.about(&record).with("next", format!("torpor get {}", record.name)))
            }
            Err(error) => Err(self.disk_failed(&record, &error)),
        }
    }

    /// Writes down what a `disk grow` came to whose gateway ended before it could: the disk is larger than its record
    /// says. The caller has the disk to itself.
    async fn grown_before(
        &self,
        record: Record,
        driver: &Arc<dyn ComputeDriver>,
    ) -> Result<Record, ApiError> {
        let Ok(disks) = care(driver) else { return Ok(record) };
        // A disk that can't be looked at is for the operation itself to name.
        let Ok(found) = disks.report(&record.id, false).await else { return Ok(record) };
        let bytes = found.virtual_bytes;
        if bytes < record.spec.resources.disk_bytes.saturating_add(ROUNDED) {
            return Ok(record);
        }
        // No change to the disk, but the driver writes it down, too.
        let Ok(grown) = disks.grow(&record.id, bytes).await else { return Ok(record) };
        tracing::info!(id = %record.id, grown, "the disk was grown before; now the record says so");
        let applied = self.store.resized(&record.id, grown, None).await?;
        Ok(Arc::unwrap_or_clone(applied.record))
    }

    /// Refuses to fill the host's disk with a copy of this many layers of a sandbox's; sets the room aside otherwise.
    async fn room_for_copy(
        &self,
        record: &Record,
        driver: &Arc<dyn ComputeDriver>,
        layers: usize,
        what: &str,
    ) -> Result<Claim, ApiError> {
        let report = match care(driver) {
            Ok(disks) => disks.report(&record.id, false).await,
            Err(error) => Err(error),
        };
        let report = report.map_err(|error| self.disk_failed(record, &error))?;
        let needed = report.layers.iter().take(layers).map(|layer| layer.used_bytes).sum::<u64>() + NEW_DISK;
        self.pressure.claim(needed).map_err(|found| {
            let message = format!(
                "sandbox '{}': to be {what}, its disk needs up to {} beside it; {} are free on the file system of {}, of which {} are kept for what runs and {} are for other copies under way",
                record.name,
                size(needed),
                size(found.space.free),
                found.space.dir.display(),
                size(found.space.reserve),
                size(found.claimed)
            );
            let error = ApiError::new(Code::ResourceExhausted, "DISK_PRESSURE", message);
            error.about(record).with("next", ADVICE)
        })
    }

    /// Refuses a new disk that the host has no room for.
    ///
    /// # Errors
    /// `RESOURCE_EXHAUSTED`.
    pub fn room_for_disk(&self) -> Result<(), ApiError> {
        match self.pressure.look_now() {
            Some(space) if space.free < NEW_DISK => {
                let message = format!(
                    "only {} are free on the file system of {}; a new workspace disk needs at least {}",
                    size(space.free),
                    space.dir.display(),
                    size(NEW_DISK)
                );
                Err(ApiError::new(Code::ResourceExhausted, "DISK_PRESSURE", message).with("next", ADVICE))
            }
            _ => Ok(()),
        }
    }

    /// What a failure of an operation is, when it may have been cancelled.
    fn operation_failed(&self, record: &Record, guard: &Guard, error: &DriverError) -> ApiError {
        match (error, guard.cancelled_for()) {
            (DriverError::Cancelled(what), Some(verb)) => {
                let done = match verb {
                    "delete" => "deleted",
                    "resume" => "resumed",
                    "stop" => "stopped",
                    _ => "started",
                };
                let message =
                    format!("sandbox '{}': {what} ended: the sandbox was {done} meanwhile", record.name);
                ApiError::new(Code::Aborted, "TURNED_ROUND", message).about(record)
            }
            (DriverError::Cancelled(_), None) => StoreError::Closed.into(),
            (error, _) => self.disk_failed(record, error),
        }
    }

    fn disk_failed(&self, record: &Record, error: &DriverError) -> ApiError {
        if matches!(error, DriverError::NoSpace(_)) {
            self.pressure.note_failure();
        }
        let (code, reason) = (Code::of_driver(error), error.reason());
        let message = format!("sandbox '{}': {}", record.name, with_causes(error));
        let next = match error {
            DriverError::NoSpace(_) => ADVICE.to_owned(),
            DriverError::Locked { .. } => "end the process that holds the disk, then try again".to_owned(),
            DriverError::Unsupported(_) | DriverError::Invalid(_) => show_command(record),
            _ => next_command(reason, record),
        };
        ApiError::new(code, reason, message).about(record).with("next", next)
    }
}

fn care(driver: &Arc<dyn ComputeDriver>) -> Result<&dyn DiskCare, DriverError> {
    driver.disks().ok_or_else(|| {
        let text = format!("the {} driver has no disks to look after", driver.capabilities().name);
        DriverError::Unsupported(text)
    })
}

fn show_command(record: &Record) -> String {
    format!("torpor sandbox disk show {}", record.name)
}

/// Refuses a sandbox that runs, or will run without being asked again, or whose memory image would be lost.
fn rests(record: &Record, kind: Kind) -> Result<(), ApiError> {
    let (name, state) = (&record.name, &record.state);
    let next = match state.phase {
        Phase::Suspended | Phase::Stopped | Phase::Completed | Phase::Error if state.then.is_none() => {
            if state.phase == Phase::Suspended && state.keep == Keep::Memory && kind.changes_disk() {
                let message = format!(
                    "sandbox '{name}' is suspended with its memory, which {} would make worthless",
                    kind.name()
                );
                let error = ApiError::new(Code::FailedPrecondition, "MEMORY_KEPT", message).about(record);
                return Err(error.with("next", format!("torpor stop {name}   (the memory is given up)")));
            }
            return Ok(());
        }
        Phase::Suspending if state.then.is_none() => format!("torpor wait {name} --for Suspended"),
        Phase::Stopping if state.then.is_none() => format!("torpor wait {name} --for Stopped"),
        Phase::Deleting => String::new(),
        _ if kind == Kind::Update => format!("torpor stop {name}"),
        _ => format!("torpor suspend {name}"),
    };
    Err(not_at_rest(record, kind, &next))
}

fn not_at_rest(record: &Record, kind: Kind, next: &str) -> ApiError {
    let message = format!(
        "sandbox '{}' is {}: {} needs a sandbox at rest, whose disk nobody uses",
        record.name,
        record.state.phase,
        kind.name()
    );
    let error = ApiError::new(Code::FailedPrecondition, "NOT_AT_REST", message).about(record);
    if next.is_empty() { error } else { error.with("next", next) }
}

/// Whether a sandbox runs and nothing else was asked of it.
fn runs_settled(record: &Record) -> bool {
    record.state.phase == Phase::Ready && record.state.then.is_none()
}

/// Why an export didn't come to its end.
enum ExportEnd {
    /// The driver's.
    Failed(DriverError),
    /// Its client took nothing for too long.
    Stalled,
}

/// How passing on has ended.
#[derive(Debug, PartialEq, Eq)]
enum PassedOn {
    All,
    /// Cancelled, or nobody listens any more.
    Ended,
    Stalled,
}

/// Passes the pieces of an export on until it ends, its client goes away or stalls, or it is cancelled. When this returns,
/// the driver's work has ended.
async fn hand_out(
    driver: &Arc<dyn ComputeDriver>,
    id: &SandboxId,
    format: DiskFormat,
    guard: &Guard,
    out: &mpsc::Sender<Result<ExportStep, ApiError>>,
) -> Result<(), ExportEnd> {
    let disks = care(driver).map_err(ExportEnd::Failed)?;
    let (sink, pieces) = mpsc::channel(PIECES);
    match tokio::join!(disks.export(id, format, sink), pass_on(pieces, guard, out, CLIENT_PATIENCE)) {
        (_, PassedOn::Stalled) => Err(ExportEnd::Stalled),
        (Ok(()), PassedOn::Ended) => Err(ExportEnd::Failed(DriverError::Cancelled(Kind::Export.name()))),
        (result, _) => result.map_err(ExportEnd::Failed),
    }
}

/// Owns the receiver: its end ends the driver's work.
async fn pass_on(
    mut pieces: mpsc::Receiver<DiskPiece>,
    guard: &Guard,
    out: &mpsc::Sender<Result<ExportStep, ApiError>>,
    patience: Duration,
) -> PassedOn {
    loop {
        let piece = tokio::select! {
            piece = pieces.recv() => piece,
            () = guard.cancel().cancelled() => return PassedOn::Ended,
            () = out.closed() => return PassedOn::Ended,
        };
        let Some(piece) = piece else { return PassedOn::All };
        tokio::select! {
            sent = out.send_timeout(Ok(ExportStep::Piece(piece)), patience) => match sent {
                Ok(()) => {}
                Err(SendTimeoutError::Closed(_)) => return PassedOn::Ended,
                Err(SendTimeoutError::Timeout(_)) => return PassedOn::Stalled,
            },
            () = guard.cancel().cancelled() => return PassedOn::Ended,
        }
    }
}

fn stalled(record: &Record) -> ApiError {
    let message = format!(
        "sandbox '{}': {} ended: its client took nothing for {} seconds",
        record.name,
        Kind::Export.name(),
        CLIENT_PATIENCE.as_secs()
    );
    let next = "export to a file, and send that on";
    ApiError::new(Code::DeadlineExceeded, "CLIENT_STALLED", message).about(record).with("next", next)
}

fn too_many(record: &Record, kind: Kind) -> ApiError {
    let message = format!(
        "sandbox '{}': {} must wait: {MOST} operations on other disks are under way, and there are never more",
        record.name,
        kind.name()
    );
    ApiError::new(Code::ResourceExhausted, "OVERLOADED", message)
        .about(record)
        .with("retry_after_ms", RETRY_AFTER.as_millis().to_string())
        .with("next", "the same again when one of them has ended")
}

#[cfg(test)]
mod tests {
    use tokio_util::sync::CancellationToken;

    use super::*;
    use crate::maintenance::Maintenance;

    #[tokio::test]
    async fn an_export_whose_client_takes_nothing_is_given_up() {
        let (all, end) = (Arc::new(Maintenance::default()), CancellationToken::new());
        let guard = all.begin(&SandboxId::generate(), Kind::Export, &end).unwrap();
        let (sink, pieces) = mpsc::channel(PIECES);
        let (out, mut client) = mpsc::channel(1);
        for at in 0..3 {
            sink.send(DiskPiece::Reached(at)).await.unwrap();
        }
        let passed = pass_on(pieces, &guard, &out, Duration::from_millis(20)).await;
        assert_eq!(passed, PassedOn::Stalled);
        // The driver's work finds nobody to hand more to.
        assert!(sink.is_closed());
        assert!(matches!(client.recv().await, Some(Ok(ExportStep::Piece(DiskPiece::Reached(0))))));

        let (sink, pieces) = mpsc::channel(PIECES);
        sink.send(DiskPiece::Reached(7)).await.unwrap();
        drop(sink);
        assert_eq!(pass_on(pieces, &guard, &out, Duration::from_secs(60)).await, PassedOn::All);
    }
}
