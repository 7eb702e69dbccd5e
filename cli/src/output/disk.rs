//! The stable form of what the gateway sends about disks.

use serde::Serialize;
use torpor_sdk::v1;

use super::view::text;

/// A file's format, as a word; none for a file that is missing.
pub fn disk_format(format: v1::DiskFormat) -> Option<&'static str> {
    match format {
        v1::DiskFormat::Unspecified => None,
        v1::DiskFormat::Raw => Some("raw"),
        v1::DiskFormat::Qcow2 => Some("qcow2"),
    }
}

/// Who may write to a disk, as a word.
pub fn disk_state(state: v1::DiskState) -> &'static str {
    match state {
        v1::DiskState::Unspecified => "unknown",
        v1::DiskState::AtRest => "at_rest",
        v1::DiskState::InUse => "in_use",
        v1::DiskState::Sealed => "sealed",
    }
}

/// `disk show -o json`.
#[derive(Serialize)]
pub struct DiskReport {
    name: String,
    id: String,
    version: u64,
    virtual_bytes: u64,
    used_bytes: u64,
    generation: u64,
    state: &'static str,
    operation: Option<String>,
    layers: Vec<Layer>,
    check: Option<Check>,
    host: Option<HostDisk>,
}

#[derive(Serialize)]
struct Layer {
    path: String,
    digest: Option<String>,
    format: Option<&'static str>,
    virtual_bytes: u64,
    used_bytes: u64,
}

#[derive(Serialize)]
struct Check {
    damages: Vec<String>,
    damage_count: u64,
    leaked_bytes: u64,
    leaked_clusters: u64,
    data_bytes: u64,
    unclean: bool,
}

/// The file system of the gateway's disks.
#[derive(Serialize)]
pub struct HostDisk {
    path: String,
    free_bytes: u64,
    total_bytes: u64,
    reserve_bytes: u64,
    pressure: bool,
}

impl From<&v1::DiskReport> for DiskReport {
    fn from(report: &v1::DiskReport) -> Self {
        let layer = |l: &v1::DiskLayer| Layer {
            path: l.path.clone(),
            digest: text(&l.digest),
            format: disk_format(l.format()),
            virtual_bytes: l.virtual_bytes,
            used_bytes: l.used_bytes,
        };
        let check = |c: &v1::DiskCheck| Check {
            damages: c.damages.clone(),
            damage_count: c.damage_count,
            leaked_bytes: c.leaked_bytes,
            leaked_clusters: c.leaked_clusters,
            data_bytes: c.data_bytes,
            unclean: c.unclean,
        };
        Self {
            name: report.name.clone(),
            id: report.sandbox_id.clone(),
            version: report.version,
            virtual_bytes: report.virtual_bytes,
            used_bytes: report.used_bytes,
            generation: report.generation,
            state: disk_state(report.state()),
            operation: text(&report.operation),
            layers: report.layers.iter().map(layer).collect(),
            check: report.check.as_ref().map(check),
            host: report.host.as_ref().map(HostDisk::from),
        }
    }
}

impl From<&v1::HostDisk> for HostDisk {
    fn from(host: &v1::HostDisk) -> Self {
        Self {
            path: host.path.clone(),
            free_bytes: host.free_bytes,
            total_bytes: host.total_bytes,
            reserve_bytes: host.reserve_bytes,
            pressure: host.pressure,
        }
    }
}

/// `disk compact -o json`.
#[derive(Serialize)]
pub struct Compacted {
    name: String,
    used_before_bytes: u64,
    used_after_bytes: u64,
}

impl Compacted {
    pub fn new(name: &str, result: &v1::CompactDiskResult) -> Self {
        Self {
            name: name.to_owned(),
            used_before_bytes: result.used_before_bytes,
            used_after_bytes: result.used_after_bytes,
        }
    }
}

/// `disk export -o json`.
#[derive(Serialize)]
pub struct Exported {
    pub name: String,
    pub file: String,
    pub format: Option<&'static str>,
    pub size_bytes: u64,
    pub data_bytes: u64,
}
