//! Whether an engine can keep the memory of a container: by CRIU, which writes processes out and brings them back.
//!
//! Looked at once for each time that the engine is reached; what is missing is told in words that say what to do.

use std::{ffi::OsString, path::Path, process::Stdio, time::Duration};

use tokio::{process::Command, time::timeout};

use crate::{client::said, engine::Engine, types::Info};

/// How long `criu check` may take.
const CHECK: Duration = Duration::from_secs(10);
/// Runtimes that make checkpoints, by the end of their path.
const RUNTIMES: [&str; 2] = ["runc", "crun"];

/// What keeps an engine from making checkpoints.
#[derive(Debug)]
pub(crate) struct Cannot {
    /// In words for people.
    pub(crate) why: String,
    /// It stays so until the engine is another one; else the look itself came to nothing.
    pub(crate) lasts: bool,
}

impl Cannot {
    fn lasting(why: String) -> Self {
        Self { why, lasts: true }
    }
}

/// Looks for what keeps the engine from making checkpoints; `Ok` when nothing does.
///
/// # Errors
/// The reason.
pub(crate) async fn probe(engine: Engine, info: &Info, criu: &Path) -> Result<(), Cannot> {
    by_facts(engine, info).map_err(Cannot::lasting)?;
    check(criu).await
}

/// What the engine says of itself.
fn by_facts(engine: Engine, info: &Info) -> Result<(), String> {
    let name = engine.name();
    if info.is_rootless() {
        return Err(format!("{name} runs without root, and checkpoints need it"));
    }
    if engine.checkpoints_are_experimental() && !info.experimental_build {
        return Err(format!(
            "{name} makes checkpoints only with its experimental features: set \"experimental\": true in \
             /etc/docker/daemon.json and restart it"
        ));
    }
    let runtime = info.default_runtime.rsplit('/').next().unwrap_or_default();
    if RUNTIMES.contains(&runtime) {
        return Ok(());
    }
    Err(format!("{name}'s runtime '{}' is not known to make checkpoints; runc and crun do", said(runtime)))
}

/// Programs of administrators are not on everybody's path.
fn path_variable() -> OsString {
    let mut path = std::env::var_os("PATH").unwrap_or_default();
    path.push(":/usr/local/sbin:/usr/sbin:/sbin");
    path
}

/// Runs `criu check`, which says what the kernel lacks.
async fn check(criu: &Path) -> Result<(), Cannot> {
    let path = path_variable();
    let found = std::env::split_paths(&path).map(|folder| folder.join(criu)).find(|file| file.is_file());
    let Some(program) = found else {
        return Err(Cannot::lasting(format!(
            "{} is not installed; checkpoints need it (criu 4 for current kernels)",
            criu.display()
        )));
    };
    let mut command = Command::new(&program);
    command.arg("check").env("PATH", &path).stdin(Stdio::null()).kill_on_drop(true);
    let failed =
        |why: String, lasts| Err(Cannot { why: format!("{} check: {why}", program.display()), lasts });
    match timeout(CHECK, command.output()).await {
        Err(_) => failed(format!("no answer within {} s", CHECK.as_secs()), false),
        Ok(Err(error)) => failed(error.to_string(), false),
        Ok(Ok(done)) if done.status.success() => Ok(()),
        Ok(Ok(done)) => {
            let words = [done.stderr, done.stdout].concat();
            let words = String::from_utf8_lossy(&words);
            let line = words.lines().find(|line| line.contains("Error")).or_else(|| words.lines().last());
            let why = format!("{} ({})", said(line.unwrap_or("it says nothing")), done.status);
            // One that was killed has found nothing out.
            failed(why, done.status.code().is_some())
        }
    }
}

#[cfg(test)]
mod tests {
    use std::{fs, os::unix::fs::PermissionsExt as _, path::PathBuf};

    use super::*;

    fn info(change: impl FnOnce(&mut Info)) -> Info {
        let mut info =
            Info { experimental_build: true, default_runtime: "runc".to_owned(), ..Info::default() };
        change(&mut info);
        info
    }

    #[test]
    fn an_engine_that_makes_no_checkpoints_says_why_not() {
        by_facts(Engine::Docker, &info(|_| ())).unwrap();
        by_facts(Engine::Podman, &info(|i| i.experimental_build = false)).unwrap();
        by_facts(Engine::Podman, &info(|i| i.default_runtime = "/usr/bin/crun".into())).unwrap();
        let why = by_facts(Engine::Docker, &info(|i| i.experimental_build = false)).unwrap_err();
        assert!(why.contains("daemon.json"), "{why}");
        let why = by_facts(Engine::Docker, &info(|i| i.default_runtime = "runsc".into())).unwrap_err();
        assert!(why.contains("runsc"), "{why}");
        let rootless = |i: &mut Info| i.security_options = Some(vec!["name=rootless".into()]);
        assert!(by_facts(Engine::Docker, &info(rootless)).unwrap_err().contains("without root"));
        assert!(by_facts(Engine::Podman, &info(|i| i.rootless = true)).unwrap_err().contains("without root"));
    }

    fn program(folder: &Path, text: &str) -> PathBuf {
        let path = folder.join("criu");
        fs::write(&path, format!("#!/bin/sh\n{text}\n")).unwrap();
        fs::set_permissions(&path, fs::Permissions::from_mode(0o755)).unwrap();
        path
    }

    #[tokio::test]
    async fn criu_must_be_there_and_pass_its_own_check() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("criu");
        let absent = check(&path).await.unwrap_err();
        assert!(absent.lasts && absent.why.contains("not installed"), "{absent:?}");
        program(folder.path(), "[ \"$1\" = check ]");
        check(&path).await.unwrap();
        program(folder.path(), "echo 'Error (criu/x.c:1): no kerndat' >&2; exit 1");
        let why = check(&path).await.unwrap_err();
        assert!(why.lasts && why.why.contains("no kerndat") && why.why.contains("exit status: 1"), "{why:?}");
        // Too little memory, or somebody's hand.
        program(folder.path(), "kill -9 $$");
        let killed = check(&path).await.unwrap_err();
        assert!(!killed.lasts, "{killed:?}");
    }
}
