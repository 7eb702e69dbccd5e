//! The disk calls of `torpor.v1.Sandboxes`.

use std::{pin::Pin, sync::Arc};

use bytes::Bytes;
use futures::{Stream, StreamExt as _};
use tokio_stream::wrappers::ReceiverStream;
use tonic::Status;
use torpor_proto::v1::{self, export_disk_chunk::Kind as Chunk};
use torpor_sandbox::{
    DiskFormat,
    disk::{DiskCheck, DiskLayer, DiskPiece, DiskState},
};

use super::{Shared, convert, sandboxes::allowed, to_its_end, to_status};
use crate::{
    access::Caller,
    disks::{CompactStep, DiskView, ExportStep, Steps},
    error::ApiError,
    service::Target,
    store::Record,
};

type Events<T> = Pin<Box<dyn Stream<Item = Result<T, Status>> + Send>>;

/// The same, as it goes to a client.
fn stream<T: Send + 'static, W: 'static>(
    steps: Steps<T>,
    mut convert: impl FnMut(T) -> W + Send + 'static,
) -> Events<W> {
    Box::pin(ReceiverStream::new(steps).map(move |step| step.map(&mut convert).map_err(to_status)))
}

async fn named(caller: &Caller, sandbox: &str, field: &'static str) -> Result<Target, Status> {
    if sandbox.is_empty() {
        return Err(ApiError::invalid(field, "a name or id is needed").into());
    }
    let sandbox = caller.key(sandbox).await?;
    Ok(Target { sandbox, ..Target::default() })
}

pub async fn get(
    service: &Shared,
    caller: &Caller,
    request: v1::GetDiskRequest,
) -> Result<v1::DiskReport, Status> {
    let target = named(caller, &request.sandbox, "sandbox").await?;
    let view = service.disk(&target.sandbox, request.check).await?;
    Ok(report(view))
}

pub async fn grow(
    service: &Shared,
    caller: &Caller,
    request: v1::GrowDiskRequest,
) -> Result<Arc<Record>, Status> {
    let (target, _) = allowed(caller, request.target).await?;
    // In a task of its own: a caller that goes away must not keep the new size from being written down.
    let service = service.clone();
    to_its_end(async move { service.grow_disk(target, request.size_bytes).await }).await
}

pub async fn compact(
    service: &Shared,
    caller: &Caller,
    request: v1::CompactDiskRequest,
) -> Result<Events<v1::CompactDiskProgress>, Status> {
    let (target, _) = allowed(caller, request.target).await?;
    let steps = service.compact_disk(&target, request.rewrite).await?;
    let shown = |step| match step {
        CompactStep::Progress(done_bytes, total_bytes) => {
            v1::CompactDiskProgress { done_bytes, total_bytes, result: None }
        }
        CompactStep::Done(done) => v1::CompactDiskProgress {
            result: Some(v1::CompactDiskResult {
                used_before_bytes: done.used_before,
                used_after_bytes: done.used_after,
            }),
            ..v1::CompactDiskProgress::default()
        },
    };
    Ok(stream(steps, shown))
}

pub async fn export(
    service: &Shared,
    caller: &Caller,
    request: v1::ExportDiskRequest,
) -> Result<Events<v1::ExportDiskChunk>, Status> {
    let format = match v1::DiskFormat::try_from(request.format) {
        Ok(v1::DiskFormat::Unspecified | v1::DiskFormat::Raw) => DiskFormat::Raw,
        Ok(v1::DiskFormat::Qcow2) => DiskFormat::Qcow2,
        Err(_) => {
            return Err(ApiError::invalid("format", format!("{} is not known", request.format)).into());
        }
    };
    let target = named(caller, &request.sandbox, "sandbox").await?;
    let steps = service.export_disk(&target, format).await?;
    let (mut size_bytes, mut data_bytes) = (0, 0);
    let shown = move |step| {
        let progress =
            |done_bytes, total_bytes| Chunk::Progress(v1::ExportDiskProgress { done_bytes, total_bytes });
        let kind = match step {
            ExportStep::Piece(DiskPiece::Preparing(done, all)) => progress(done, all),
            ExportStep::Piece(DiskPiece::Size(size)) => {
                size_bytes = size;
                Chunk::Start(v1::ExportDiskStart { size_bytes })
            }
            ExportStep::Piece(DiskPiece::Data(offset, data)) => {
                data_bytes += data.len() as u64;
                Chunk::Extent(v1::ExportDiskExtent { offset, data: Bytes::from(data) })
            }
            ExportStep::Piece(DiskPiece::Reached(offset)) => progress(offset, size_bytes),
            ExportStep::End => Chunk::End(v1::ExportDiskEnd { data_bytes }),
        };
        v1::ExportDiskChunk { kind: Some(kind) }
    };
    Ok(stream(steps, shown))
}

fn report(view: DiskView) -> v1::DiskReport {
    let state = match view.report.state {
        DiskState::AtRest => v1::DiskState::AtRest,
        DiskState::InUse => v1::DiskState::InUse,
        DiskState::Sealed => v1::DiskState::Sealed,
    };
    v1::DiskReport {
        sandbox_id: view.record.id.to_string(),
        name: view.record.name,
        version: view.record.version,
        virtual_bytes: view.report.virtual_bytes,
        used_bytes: view.report.used_bytes,
        layers: view.report.layers.into_iter().map(layer).collect(),
        generation: view.report.generation,
        state: state.into(),
        check: view.report.check.map(check),
        operation: view.running.map_or_else(String::new, |kind| kind.name().to_owned()),
        host: view.space.as_ref().map(convert::host_disk),
    }
}

fn layer(layer: DiskLayer) -> v1::DiskLayer {
    let format = match layer.format {
        None => v1::DiskFormat::Unspecified,
        Some(DiskFormat::Raw) => v1::DiskFormat::Raw,
        Some(DiskFormat::Qcow2) => v1::DiskFormat::Qcow2,
    };
    v1::DiskLayer {
        path: layer.path,
        digest: layer.digest,
        format: format.into(),
        virtual_bytes: layer.virtual_bytes,
        used_bytes: layer.used_bytes,
    }
}

fn check(check: DiskCheck) -> v1::DiskCheck {
    v1::DiskCheck {
        damages: check.damages,
        damage_count: check.damage_count,
        leaked_bytes: check.leaked_bytes,
        leaked_clusters: check.leaked_clusters,
        data_bytes: check.data_bytes,
        unclean: check.unclean,
    }
}
