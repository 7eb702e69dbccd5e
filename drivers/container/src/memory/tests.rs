//! What of a checkpoint counts, over an engine that answers what it is told to.

use std::os::unix::fs::PermissionsExt as _;

use torpor_sandbox::Observed;

use super::*;
use crate::fake::{Fake, Rule};

const GRACE: Duration = Duration::from_secs(1);
const UP: &str = r#"{"Status":"running","Running":true,"Pid":4,"StartedAt":"monday"}"#;
const DOWN: &str = r#"{"Status":"exited","ExitCode":137,"StartedAt":"monday"}"#;
/// Stopped after another start.
const LATER: &str = r#"{"Status":"exited","StartedAt":"tuesday"}"#;
const WORKS: &str = "/bin/true";
const BROKEN: &str = "/bin/false";

async fn suspend(fake: &Fake) -> Result<Stopped, DriverError> {
    fake.inner.put_to_sleep(&fake.id, GRACE).await
}

fn noted(fake: &Fake, change: impl FnOnce(&mut Note)) {
    let mut note = Note::new(Run(1), &fake.found());
    change(&mut note);
    fake.inner.store.write_note(&fake.id, &note).unwrap();
}

fn note(fake: &Fake) -> Option<Note> {
    fake.inner.store.note(&fake.id).unwrap()
}

/// Docker with a container at rest and a checkpoint of its first run.
fn docker(state: &'static str, criu: &str) -> Fake {
    let fake = Fake::new(Engine::Docker, state, criu);
    fake.rule("/checkpoints HTTP", 200, r#"[{"Name":"run-1"}]"#, None);
    fake
}

/// Podman with what it says of the checkpoint of its container.
fn podman(state: &'static str, whole: bool) -> Fake {
    let fake = Fake::new(Engine::Podman, state, WORKS);
    let place = fake.folder.path().join("userdata/checkpoint");
    fs::create_dir_all(&place).unwrap();
    let file = if whole { "inventory.img" } else { "pages-1.img" };
    fs::write(place.join(file), "").unwrap();
    let seen = json!({
        "StaticDir": fake.folder.path().join("userdata"),
        "State": {"Checkpointed": whole, "CheckpointPath": if whole { place.to_str() } else { None }.unwrap_or("")},
    });
    fake.rule("GET /libpod/containers", 200, seen.to_string(), None);
    fake
}

#[tokio::test(flavor = "multi_thread")]
async fn a_checkpoint_that_nobody_saw_made_is_no_memory_and_one_that_is_made_needs_no_more_criu() {
    let fake = docker(DOWN, BROKEN);
    noted(&fake, |_| ());
    assert_eq!(suspend(&fake).await.unwrap().kept, Keep::Disk);
    assert_eq!(note(&fake), None);
    noted(&fake, |note| note.made = true);
    let stopped = suspend(&fake).await.unwrap();
    assert_eq!(stopped.kept, Keep::Memory, "{:?}", stopped.detail);
    assert_eq!(fake.inner.observe(&fake.id).await.unwrap(), Observed::Stopped { memory: true });
    assert_eq!(suspend(&fake).await.unwrap().kept, Keep::Memory);
    // One of another boot may have lost some of it, unless it was written out.
    noted(&fake, |note| (note.made, note.host_boot) = (true, "another".to_owned()));
    assert_eq!(suspend(&fake).await.unwrap().kept, Keep::Disk);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_checkpoint_is_worthless_once_something_has_run_in_its_container() {
    let fake = docker(DOWN, WORKS);
    noted(&fake, |note| (note.made, note.kept) = (true, true));
    fake.world().state = LATER;
    assert_eq!(fake.inner.observe(&fake.id).await.unwrap(), Observed::Stopped { memory: false });
    let refused = fake.inner.start(&fake.id, Keep::Memory, Run(2)).await.unwrap_err();
    assert!(matches!(&refused, DriverError::Failed { step, .. } if step == "restore"), "{refused}");
    assert_eq!(suspend(&fake).await.unwrap().kept, Keep::Disk);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_restore_that_the_host_has_nothing_left_for_costs_no_memory() {
    let fake = docker(DOWN, WORKS);
    noted(&fake, |note| (note.made, note.kept) = (true, true));
    fake.rule("/start?checkpoint=run-1", 500, r#"{"message":"no available IPv4 addresses"}"#, None);
    for run in 2..=3 {
        let short = fake.inner.start(&fake.id, Keep::Memory, Run(run)).await.unwrap_err();
        assert!(matches!(short, DriverError::Exhausted(_)), "{short}");
        assert_eq!(note(&fake).unwrap().used, None);
        assert_eq!(fake.inner.observe(&fake.id).await.unwrap(), Observed::Stopped { memory: true });
    }
    fake.world().rules.retain(|rule| rule.status != 500);
    fake.rule("/start?checkpoint=run-1", 500, r#"{"message":"criu failed"}"#, None);
    let failed = fake.inner.start(&fake.id, Keep::Memory, Run(4)).await.unwrap_err();
    assert!(matches!(failed, DriverError::Failed { .. }), "{failed}");
    assert_eq!(fake.inner.observe(&fake.id).await.unwrap(), Observed::Stopped { memory: false });
}

#[tokio::test(flavor = "multi_thread")]
async fn a_refusal_after_the_checkpoint_was_made_takes_nothing_away() {
    let fake = podman(UP, true);
    fake.runs(Run(1));
    fake.rule("/checkpoint?fileLocks", 500, r#"{"message":"cleaning up"}"#, Some(DOWN));
    let stopped = suspend(&fake).await.unwrap();
    assert_eq!(stopped.kept, Keep::Memory, "{:?}", stopped.detail);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_checkpoint_under_way_is_waited_for_and_not_asked_for_twice() {
    let fake = podman(UP, true);
    fake.runs(Run(1));
    noted(&fake, |_| ());
    fake.becomes(DOWN);
    let stopped = suspend(&fake).await.unwrap();
    assert_eq!(stopped.kept, Keep::Memory, "{:?}", stopped.detail);
    assert!(!fake.was_asked("/checkpoint?fileLocks"));
}

#[tokio::test(flavor = "multi_thread")]
async fn an_address_that_is_given_back_late_costs_no_memory() {
    let fake = docker(UP, WORKS);
    fake.runs(Run(1));
    fake.world().address = "172.17.0.2";
    let made = Rule { request: "POST /containers", status: 201, body: String::new(), then: Some(DOWN) };
    fake.world().rules.insert(0, made);
    let late = suspend(&fake).await.unwrap_err();
    assert!(late.is_transient(), "{late}");
    fake.world().address = "";
    let stopped = suspend(&fake).await.unwrap();
    assert_eq!(stopped.kept, Keep::Memory, "{:?}", stopped.detail);
}

#[tokio::test(flavor = "multi_thread")]
async fn images_that_came_to_nothing_are_removed_where_podman_has_them() {
    let fake = podman(DOWN, false);
    noted(&fake, |_| ());
    assert_eq!(suspend(&fake).await.unwrap().kept, Keep::Disk);
    assert!(!fake.folder.path().join("userdata/checkpoint").exists());
}

#[tokio::test(flavor = "multi_thread")]
async fn a_container_that_goes_between_two_looks_is_gone() {
    let fake = Fake::new(Engine::Podman, r#"{"Status":"exited","Pid":4}"#, WORKS);
    fake.rule("GET /libpod/containers", 404, "{}", None);
    assert!(fake.inner.inspect(&fake.id).await.unwrap().is_none());
}

#[tokio::test(flavor = "multi_thread")]
async fn a_look_that_came_to_nothing_is_not_kept() {
    let fake = docker(DOWN, BROKEN);
    let criu = fake.folder.path().join("criu");
    fs::remove_file(&criu).unwrap();
    fs::write(&criu, "#!/bin/sh\nkill -9 $$\n").unwrap();
    fs::set_permissions(&criu, fs::Permissions::from_mode(0o755)).unwrap();
    let unknown = fake.inner.keeps_memory().await.unwrap_err();
    assert!(unknown.is_transient() && fake.inner.client.can_keep().is_none(), "{unknown}");
    fs::remove_file(&criu).unwrap();
    std::os::unix::fs::symlink(WORKS, &criu).unwrap();
    fake.inner.keeps_memory().await.unwrap();
}

#[test]
fn what_can_not_be_opened_is_written_out_by_its_folder() {
    let folder = tempfile::tempdir().unwrap();
    let (socket, file) = (folder.path().join("sock"), folder.path().join("file"));
    let _listener = std::os::unix::net::UnixListener::bind(&socket).unwrap();
    fs::write(&file, "").unwrap();
    assert_eq!(openable(socket.to_str().unwrap()), folder.path());
    assert_eq!(openable(file.to_str().unwrap()), file);
}
