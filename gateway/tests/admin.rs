//! The database copied, put back and made anew; a damaged one is named with the next command.
#![allow(clippy::unwrap_used, reason = "tests")]

mod common;

use std::{collections::BTreeMap, fs, path::Path, time::Duration};

use common::{World, create, phase};
use torpor_gateway::{Gateway, admin};
use torpor_proto::v1::{self, Phase};
use torpor_sandbox::{Resources, SandboxId, SandboxSpec, sim::Script};

async fn list(world: &World) -> BTreeMap<String, Phase> {
    let request = v1::ListSandboxesRequest::default();
    let all = world.sandboxes().await.list(request).await.unwrap().into_inner().sandboxes;
    all.iter().map(|s| (s.name.clone(), phase(s))).collect()
}

async fn suspend(world: &World, name: &str) {
    let target = common::target(name);
    world.sandboxes().await.suspend(v1::SuspendRequest { target, keep: 0 }).await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn a_copy_made_while_the_gateway_works_can_be_put_back() {
    let mut world = World::new(Script::default()).await;
    let mut client = world.sandboxes().await;
    for n in 0..20 {
        client.create(create(&format!("s{n}"))).await.unwrap();
    }
    suspend(&world, "s3").await;
    let copy = world.dir.path().join("copy.db");
    let busy = tokio::spawn({
        let mut client = client.clone();
        async move {
            for n in 20..200 {
                let made =
                    client.create(v1::CreateSandboxRequest { wait: false, ..create(&format!("s{n}")) }).await;
                if made.is_err() {
                    return;
                }
            }
        }
    });
    let (state, to) = (world.config.state_dir.clone(), copy.clone());
    let bytes = tokio::task::spawn_blocking(move || admin::backup(&state, &to)).await.unwrap().unwrap();
    assert_eq!(bytes, fs::metadata(&copy).unwrap().len());
    let mode = std::os::unix::fs::PermissionsExt::mode(&fs::metadata(&copy).unwrap().permissions());
    assert_eq!(mode & 0o777, 0o600);
    assert!(admin::backup(&world.config.state_dir, &copy).is_err(), "a copy is never written over");
    let _ = busy.await;
    suspend(&world, "s4").await;
    let running = admin::restore(&world.config.state_dir, &copy).unwrap_err();
    assert!(running.to_string().contains("in use"), "{running}");

    world.stop().await;
    let (count, old) = admin::restore(&world.config.state_dir, &copy).unwrap();
    assert!((20..=200).contains(&count), "{count}");
    assert!(old.unwrap().join("torpor.db").exists());
    world.start().await;
    tokio::time::sleep(Duration::from_millis(300)).await;
    let names = list(&world).await;
    assert_eq!((names.len() as u64, names["s3"], names["s0"]), (count, Phase::Suspended, Phase::Ready));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_restore_that_can_not_be_written_leaves_the_database_and_its_own_name_is_a_copy_too() {
    let mut world = World::new(Script::default()).await;
    world.sandboxes().await.create(create("a")).await.unwrap();
    let state = world.config.state_dir.clone();
    let copy = world.dir.path().join("copy.db");
    admin::backup(&state, &copy).unwrap();
    world.stop().await;
    let (database, part) = (state.join("torpor.db"), state.join("torpor.db.part"));
    // Something that can't be made way for stands where the next one is written.
    fs::create_dir(&part).unwrap();
    for refused in [
        admin::restore(&state, &copy).unwrap_err().to_string(),
        admin::rebuild(&state, &world.config.run_dir, true).unwrap_err().to_string(),
    ] {
        assert!(!refused.is_empty());
        let away = fs::read_dir(&state).unwrap().flatten();
        let away = away.filter(|entry| entry.file_name().to_string_lossy().contains("away")).count();
        assert!(database.exists() && away == 0, "{refused}");
    }
    fs::remove_dir(&part).unwrap();

    fs::copy(&copy, &part).unwrap();
    let refused = admin::restore(&state, &part).unwrap_err().to_string();
    assert!(refused.contains("nothing was changed") && part.exists(), "{refused}");
    let (count, old) = admin::restore(&state, &database).unwrap();
    assert!(count == 1 && old.unwrap().join("torpor.db").exists() && !part.exists());
    world.start().await;
    assert_eq!(list(&world).await.len(), 1);
}

fn damage(path: &Path) {
    let mut bytes = fs::read(path).unwrap();
    let middle = bytes.len() / 3;
    bytes[middle..].iter_mut().for_each(|byte| *byte ^= 0x5a);
    fs::write(path, bytes).unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn a_damaged_database_keeps_the_gateway_from_starting_and_names_the_ways_out() {
    let mut world = World::new(Script::default()).await;
    world.sandboxes().await.create(create("a")).await.unwrap();
    let copy = world.dir.path().join("copy.db");
    admin::backup(&world.config.state_dir, &copy).unwrap();
    world.stop().await;
    let database = world.config.state_dir.join("torpor.db");
    damage(&database);
    let error = match Gateway::start(world.config.clone()).await {
        Err(error) => error.to_string(),
        Ok(_) => panic!("it started on a damaged database"),
    };
    assert!(error.contains("torpor admin restore") && error.contains("torpor admin rebuild"), "{error}");
    let refused =
        admin::rebuild(&world.config.state_dir, &world.config.run_dir, false).unwrap_err().to_string();
    assert!(refused.contains("--force"), "{refused}");

    let bad = world.dir.path().join("bad.db");
    fs::copy(&database, &bad).unwrap();
    let refused = admin::restore(&world.config.state_dir, &bad).unwrap_err().to_string();
    assert!(refused.contains("bad.db") && refused.contains("nothing was changed"), "{refused}");

    admin::restore(&world.config.state_dir, &copy).unwrap();
    world.start().await;
    assert_eq!(list(&world).await.len(), 1);
}

fn spec(name: &str) -> SandboxSpec {
    SandboxSpec {
        hostname: name.into(),
        stop_grace: Duration::from_secs(1),
        ..SandboxSpec::of(
            "sim",
            "debian",
            "sha256:sim",
            Resources { cpus: 1, memory_bytes: 1 << 29, disk_bytes: 1 << 30 },
        )
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_lost_database_is_made_anew_from_the_folders_and_what_runs_goes_on() {
    let mut world = World::new(Script::default()).await;
    world.sandboxes().await.create(create("old")).await.unwrap();
    let (state, run) = (world.config.state_dir.clone(), world.config.run_dir.clone());
    let refused = admin::rebuild(&state, &run, false).unwrap_err().to_string();
    assert!(refused.contains("in use"), "{refused}");
    world.stop().await;
    let refused = admin::rebuild(&state, &run, false).unwrap_err().to_string();
    assert!(refused.contains("knows 1 sandboxes"), "{refused}");

    let ids: Vec<SandboxId> = (0..4).map(|_| SandboxId::generate()).collect();
    for (id, name) in ids.iter().zip(["web", "db", "web", ""]) {
        let folder = state.join("sandboxes").join(id.as_str());
        fs::create_dir_all(&folder).unwrap();
        let text = if name.is_empty() { "{".to_owned() } else { serde_json::to_string(&spec(name)).unwrap() };
        fs::write(folder.join("spec.json"), text).unwrap();
    }
    // The second one runs.
    let boot = fs::read_to_string("/proc/sys/kernel/random/boot_id").unwrap();
    let record = serde_json::json!({
        "run": 7, "host_boot": boot.trim(), "process": {"pid": 1}, "net": {"slot": 3}, "cpus": "0", "memory_bytes": 1 << 29
    });
    let folder = run.join(ids[1].as_str());
    fs::create_dir_all(&folder).unwrap();
    fs::write(folder.join("vm.json"), record.to_string()).unwrap();

    let rebuilt = admin::rebuild(&state, &run, true).unwrap();
    assert_eq!((rebuilt.ready, rebuilt.stopped.len(), rebuilt.left_out.len()), (vec!["db".to_owned()], 2, 1));
    assert!(rebuilt.old.unwrap().join("torpor.db").exists());
    let db = rusqlite::Connection::open(state.join("torpor.db")).unwrap();
    let row = |sql: &str| db.query_row(sql, [], |row| row.get::<_, String>(0)).unwrap();
    assert_eq!(
        row("SELECT phase || ' ' || json_extract(state, '$.run') FROM sandboxes WHERE name = 'db'"),
        "Ready 7"
    );
    assert_eq!(row("SELECT slot || ' ' || run FROM leases"), "3 7");
    assert_eq!(
        row(
            "SELECT group_concat(to_phase) FROM history JOIN sandboxes ON id = sandbox_id WHERE name = 'web'"
        ),
        "Provisioning,Stopped"
    );
    drop(db);
    fs::remove_dir_all(run.join(ids[1].as_str())).unwrap();
    let orphans = admin::orphans(&state, &run).unwrap();
    assert_eq!(orphans.iter().map(|o| &o.id).collect::<Vec<_>>(), [&ids[3]], "its folder can't be read");
    world.start().await;
    assert_eq!(list(&world).await["web"], Phase::Stopped);
}

const VOLUME: &str = "TORPOR_TEST_VOLUME";
/// Of the gateway's image, which may nothing that a user may not.
const USER: u32 = 10001;

/// Not a test by itself: what the next one starts as another user.
#[tokio::test(flavor = "multi_thread")]
async fn the_gateway_of_a_user() {
    let Some(volume) = std::env::var_os(VOLUME).map(std::path::PathBuf::from) else { return };
    let config = |state_dir| torpor_gateway::Config {
        state_dir,
        run_dir: volume.with_file_name("run"),
        listen: format!("unix://{}/gateway.sock", volume.with_file_name("run").display()),
        drivers: vec!["sim".into()],
        ..torpor_gateway::Config::default()
    };
    let told = match Gateway::start(config(volume.clone())).await {
        Err(error) => error.to_string(),
        Ok(_) => panic!("it started where others may look into"),
    };
    let below = volume.join("state");
    assert!(told.contains(&format!("state_dir = \"{}\"", below.display())), "{told}");
    assert!(told.contains("2775") && told.contains("uid 0"), "{told}");
    let gateway = Gateway::start(config(below.clone())).await.unwrap();
    gateway.end().await;
    let mode = std::os::unix::fs::PermissionsExt::mode(&fs::metadata(&below).unwrap().permissions());
    assert_eq!(mode & 0o077, 0, "{mode:o}");
}

/// The root of a cluster's volume belongs to root, with the pod's group: nobody but root can change its mode.
#[test]
fn a_volume_of_roots_is_refused_with_the_remedy_and_a_folder_below_it_is_taken() {
    use std::os::unix::{fs::PermissionsExt as _, process::CommandExt as _};
    let test = "a_volume_of_roots_is_refused_with_the_remedy_and_a_folder_below_it_is_taken";
    if !nix::unistd::geteuid().is_root() {
        let required = std::env::var("REQUIRE").unwrap_or_default();
        assert!(!required.split(',').any(|word| word == "root"), "{test}: needs root");
        let _ = std::io::Write::write_fmt(&mut std::io::stderr(), format_args!("SKIP {test}: needs root\n"));
        return;
    }
    let dir = tempfile::tempdir().unwrap();
    fs::set_permissions(dir.path(), fs::Permissions::from_mode(0o755)).unwrap();
    let volume = dir.path().join("volume");
    for folder in [&volume, &dir.path().join("run")] {
        fs::create_dir(folder).unwrap();
        std::os::unix::fs::chown(folder, None, Some(USER)).unwrap();
        fs::set_permissions(folder, fs::Permissions::from_mode(0o2775)).unwrap();
    }
    // The tree may lie where that user can't look.
    let program = dir.path().join("program");
    fs::copy(std::env::current_exe().unwrap(), &program).unwrap();
    let done = std::process::Command::new(&program)
        .args(["--exact", "the_gateway_of_a_user", "--nocapture"])
        .env(VOLUME, &volume)
        .env("TMPDIR", dir.path())
        .current_dir(dir.path())
        .uid(USER)
        .gid(USER)
        .output()
        .unwrap();
    let said = format!("{}{}", String::from_utf8_lossy(&done.stdout), String::from_utf8_lossy(&done.stderr));
    assert!(done.status.success() && said.contains("1 passed"), "{said}");
}
