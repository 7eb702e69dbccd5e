//! `torpor sandbox disk`, and what the fake gateway says about disks.

use std::fs;

use bytes::Bytes;
use serde_json::Value;
use tokio::sync::mpsc;
use tokio_stream::wrappers::ReceiverStream;
use tonic::{Code, Status};
use torpor_sdk::v1::{self, Phase, export_disk_chunk::Kind};

use crate::fake::{Fake, refusal, sandbox};

/// Of the exported disk.
const SIZE: u64 = (1 << 20) + 5;

pub fn report(sandbox: &v1::Sandbox, checked: bool) -> v1::DiskReport {
    let hurt = sandbox.name == "hurt";
    let check = v1::DiskCheck {
        damages: if hurt { vec!["cluster 7 is \x1b[31mused twice".into()] } else { vec![] },
        damage_count: u64::from(hurt),
        leaked_bytes: 3 << 16,
        leaked_clusters: 3,
        data_bytes: 5 << 20,
        unclean: hurt,
    };
    let layer = |path: &str, digest: &str, format: v1::DiskFormat| v1::DiskLayer {
        path: path.into(),
        digest: digest.into(),
        format: format.into(),
        virtual_bytes: 10 << 30,
        used_bytes: 6 << 20,
    };
    v1::DiskReport {
        sandbox_id: sandbox.id.clone(),
        name: sandbox.name.clone(),
        virtual_bytes: 10 << 30,
        used_bytes: 6 << 20,
        layers: vec![
            layer("/s/overlay.qcow2", "", v1::DiskFormat::Qcow2),
            layer("/i/base.raw", "sha256:0123456789abcdef", v1::DiskFormat::Raw),
            layer("/i/gone.raw", "sha256:f", v1::DiskFormat::Unspecified),
        ],
        generation: 4,
        state: v1::DiskState::AtRest.into(),
        check: checked.then_some(check),
        host: Some(v1::HostDisk {
            path: "/s".into(),
            free_bytes: 1 << 20,
            total_bytes: 1 << 40,
            reserve_bytes: 1 << 30,
            pressure: true,
        }),
        ..Default::default()
    }
}

pub fn compaction() -> Vec<Result<v1::CompactDiskProgress, Status>> {
    let result = v1::CompactDiskResult { used_before_bytes: 8 << 20, used_after_bytes: 3 << 20 };
    vec![
        Ok(v1::CompactDiskProgress { done_bytes: 1, total_bytes: 2, result: None }),
        Ok(v1::CompactDiskProgress { result: Some(result), ..Default::default() }),
    ]
}

/// A disk of "head" at its beginning, zeros, and "tail" at its end; what goes wrong follows from the sandbox's name.
pub fn export(name: &str) -> Vec<Result<v1::ExportDiskChunk, Status>> {
    let extent = |offset, data: &'static [u8]| {
        Kind::Extent(v1::ExportDiskExtent { offset, data: Bytes::from_static(data) })
    };
    let progress = |done_bytes| Kind::Progress(v1::ExportDiskProgress { done_bytes, total_bytes: SIZE });
    let mut kinds = vec![
        progress(SIZE / 2),
        Kind::Start(v1::ExportDiskStart { size_bytes: SIZE }),
        extent(0, b"head"),
        progress(1000),
        extent(SIZE - 4, b"tail"),
        Kind::End(v1::ExportDiskEnd { data_bytes: 8 }),
    ];
    match name {
        "cut" => kinds.truncate(5),
        "backwards" => kinds.swap(2, 4),
        "short" => drop(kinds.remove(2)),
        "turned" => kinds.truncate(4),
        _ => {}
    }
    let mut all: Vec<_> =
        kinds.into_iter().map(|kind| Ok(v1::ExportDiskChunk { kind: Some(kind) })).collect();
    if name == "turned" {
        let text = "disk export ended: the sandbox was resumed meanwhile";
        all.push(Err(refusal(Code::Aborted, text, "TURNED_ROUND", "torpor get turned")));
    }
    all
}

pub fn send<T: Send + 'static>(all: Vec<Result<T, Status>>) -> ReceiverStream<Result<T, Status>> {
    let (sender, receiver) = mpsc::channel(1);
    tokio::spawn(async move {
        for one in all {
            if sender.send(one).await.is_err() {
                return;
            }
        }
    });
    ReceiverStream::new(receiver)
}

fn fake(names: &[&str]) -> Fake {
    let fake = Fake::start();
    names.iter().for_each(|name| fake.put(sandbox(name, Phase::Suspended)));
    fake
}

#[test]
fn a_disk_is_shown_by_the_short_form_and_a_sandbox_called_grow_by_show() {
    let fake = fake(&["web", "grow"]);
    for args in [
        &["disk", "web"][..],
        &["sandbox", "disk", "web"],
        &["sandbox", "disk", "show", "web"],
        &["disk", "show", "grow"],
    ] {
        let done = fake.run(args);
        assert_eq!(done.code, 0, "{}", done.stderr);
        for word in
            ["10 GiB", "6 MiB on the host", "at rest", "/s/overlay.qcow2", "qcow2", "MISSING", "PRESSURE"]
        {
            assert!(done.stdout.contains(word), "{args:?}: no {word} in\n{}", done.stdout);
        }
        assert!(!done.stdout.contains("Check"), "{}", done.stdout);
    }
    assert_eq!(fake.run(&["disk"]).code, 2);
    assert_eq!(fake.run(&["disk", "nobody"]).code, 3);
}

#[test]
fn a_check_is_shown_and_damage_is_a_failure_without_driving_the_terminal() {
    let fake = fake(&["web", "hurt"]);
    let done = fake.run(&["disk", "web", "--check"]);
    assert_eq!(done.code, 0, "{}", done.stderr);
    assert!(done.stdout.contains("in order") && done.stdout.contains("192 KiB"), "{}", done.stdout);
    let done = fake.run(&["disk", "show", "--check", "hurt"]);
    assert_eq!(done.code, 1);
    assert!(
        done.stdout.contains("DAMAGED in one place") && done.stdout.contains("cluster 7"),
        "{}",
        done.stdout
    );
    assert!(!done.stdout.contains('\x1b'));
    assert_eq!(fake.calls().iter().filter(|call| call.ends_with(" check")).count(), 2);
}

#[test]
fn a_disk_as_json_has_words_for_what_is_known_and_null_for_what_is_not() {
    let fake = fake(&["web"]);
    let done = fake.run(&["disk", "web", "--check", "-o", "json"]);
    let json: Value = serde_json::from_str(&done.stdout).unwrap();
    assert_eq!(
        (&json["name"], &json["id"], &json["state"]),
        (&"web".into(), &"sb-web".into(), &"at_rest".into())
    );
    assert_eq!((&json["virtual_bytes"], &json["generation"]), (&(10_u64 << 30).into(), &4.into()));
    assert_eq!((&json["operation"], &json["layers"][0]["digest"]), (&Value::Null, &Value::Null));
    assert_eq!((&json["layers"][1]["format"], &json["layers"][2]["format"]), (&"raw".into(), &Value::Null));
    assert_eq!(
        (&json["check"]["damages"], &json["check"]["leaked_clusters"]),
        (&Value::Array(vec![]), &3.into())
    );
    assert_eq!(json["host"]["pressure"], true);
    assert!(fake.run(&["disk", "web", "-o", "yaml"]).stdout.contains("check: null"));
    assert_eq!(fake.run(&["disk", "web", "-o", "name"]).stdout, "web\n");
}

#[test]
fn growing_and_compacting_say_what_became_of_it() {
    let fake = fake(&["web"]);
    let done = fake.run(&["disk", "grow", "web", "20G"]);
    assert_eq!((done.code, done.stdout.contains("20 GiB")), (0, true), "{done:?}");
    assert_eq!(fake.run(&["disk", "grow", "web", "20GB"]).code, 2);
    let done = fake.run(&["sandbox", "disk", "compact", "web"]);
    assert_eq!(done.stdout, "web takes 3 MiB on the host, 8 MiB before\n", "{done:?}");
    let done = fake.run(&["disk", "compact", "--rewrite", "web", "-o", "json"]);
    let json: Value = serde_json::from_str(&done.stdout).unwrap();
    assert_eq!(json["used_after_bytes"], 3 << 20);
    assert!(fake.calls().contains(&"compact web rewrite".to_owned()));

    let next = "torpor suspend web";
    fake.refuse("grow", refusal(Code::FailedPrecondition, "sandbox 'web' is Ready", "NOT_AT_REST", next));
    let done = fake.run(&["disk", "grow", "web", "30G"]);
    assert!(done.code == 4 && done.stderr.contains("next: torpor suspend web"), "{done:?}");
}

#[test]
fn an_exported_disk_is_sparse_whole_and_its_owners_only() {
    use std::os::unix::fs::{MetadataExt as _, PermissionsExt as _};
    let (fake, dir) = (fake(&["web"]), tempfile::tempdir().unwrap());
    let file = dir.path().join("web.raw");
    let path = file.to_str().unwrap();
    let done = fake.run(&["disk", "export", "web", path]);
    assert_eq!(done.code, 0, "{}", done.stderr);
    let bytes = fs::read(&file).unwrap();
    assert_eq!(bytes.len() as u64, SIZE);
    assert!(bytes.starts_with(b"head\0") && bytes.ends_with(b"\0tail"));
    assert!(bytes[4..bytes.len() - 4].iter().all(|b| *b == 0));
    let found = file.metadata().unwrap();
    assert!(found.blocks() * 512 < 100_000, "not sparse: {} blocks", found.blocks());
    assert_eq!(found.permissions().mode() & 0o777, 0o600);

    let again = fake.run(&["disk", "export", "web", path]);
    assert!(again.code == 2 && again.stderr.contains("--force"), "{again:?}");
    assert_eq!(fake.run(&["disk", "export", "web", path, "--force", "-q"]).stdout, "web\n");

    let qcow2 = dir.path().join("web.qcow2");
    fake.run(&["disk", "export", "web", qcow2.to_str().unwrap()]);
    fake.run(&["disk", "export", "web", qcow2.to_str().unwrap(), "--force", "--format", "raw"]);
    let formats: Vec<_> =
        fake.calls().iter().filter_map(|c| c.strip_prefix("export web ").map(str::to_owned)).collect();
    assert_eq!(formats, ["DISK_FORMAT_RAW", "DISK_FORMAT_RAW", "DISK_FORMAT_QCOW2", "DISK_FORMAT_RAW"]);
    assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 2, "something is left over");
}

#[test]
fn an_export_to_standard_output_has_all_its_zeros() {
    let fake = fake(&["web"]);
    let done = fake.torpor(&["disk", "export", "web", "-"]).output().unwrap();
    assert!(done.status.success() && done.stdout.len() as u64 == SIZE);
    assert!(done.stdout.starts_with(b"head\0") && done.stdout.ends_with(b"\0tail"));
}

#[test]
fn an_export_that_does_not_end_well_leaves_no_file() {
    let names = ["cut", "backwards", "short", "turned"];
    let (fake, dir) = (fake(&names), tempfile::tempdir().unwrap());
    let file = dir.path().join("disk");
    for (name, code, word) in [
        ("cut", 7, "before the disk did"),
        ("backwards", 1, "out of order"),
        ("short", 1, "pieces missing"),
        ("turned", 5, "resumed meanwhile"),
        ("nobody", 3, "nobody"),
    ] {
        let done = fake.run(&["disk", "export", name, file.to_str().unwrap()]);
        assert!(done.code == code && done.stderr.contains(word), "{name}: {done:?}");
        assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 0, "{name} left a file");
    }
    let full = fake.run(&["disk", "export", "turned", "/dev/full"]);
    assert!(full.code == 2 && full.stderr.contains("no regular file"), "{full:?}");
}
