//! Credentials of registries, as `docker login` and `podman login` leave them: in a file, or with a program that the file
//! names (docker-credential-NAME, which is asked for one registry and answers in JSON).

use std::{collections::HashMap, ffi::OsStr, fs, io, path::PathBuf, process::Stdio, time::Duration};

use base64::{Engine as _, engine::general_purpose};
use nix::{
    sys::signal::{Signal, killpg},
    unistd::Pid,
};
use serde::Deserialize;
use serde_json::json;
use tokio::{
    io::{AsyncRead, AsyncReadExt as _, AsyncWriteExt as _},
    process::{Child, Command},
    time::timeout,
};
use torpor_sandbox::DriverError;

use crate::client::said;

/// How long a helper may take: some ask a service of a cloud.
const HELP: Duration = Duration::from_secs(20);
/// Largest answer of a helper, bytes.
const LARGEST: u64 = 64 << 10;
/// Docker's own registry, as files and helpers know it.
const INDEX: &str = "https://index.docker.io/v1/";
/// The user's name that says that the secret is a token.
const TOKEN: &str = "<token>";
/// What helpers say when they have nothing, with a failure.
const NOTHING: &str = "credentials not found";

/// Why the credentials of a registry can't be had.
#[derive(Debug, thiserror::Error)]
pub(crate) enum AuthError {
    #[error("{path} names the credential helper '{name}', which is no name of a program")]
    Name { path: String, name: String },
    #[error("the credential helper {program} that {path} names can't be run: {source}")]
    Run {
        path: String,
        program: String,
        #[source]
        source: io::Error,
    },
    #[error("the credential helper {program} did not answer for {registry} within {} s", HELP.as_secs())]
    Silent { program: String, registry: String },
    #[error("the credential helper {program} has no credentials for {registry}: {said}")]
    Refused { program: String, registry: String, said: String },
    #[error("what the credential helper {program} answers for {registry} is no JSON of credentials")]
    Garbled { program: String, registry: String },
}

impl From<AuthError> for DriverError {
    fn from(error: AuthError) -> Self {
        match error {
            AuthError::Silent { .. } => Self::backend("look for credentials", error),
            _ => Self::Invalid(error.to_string()),
        }
    }
}

#[derive(Debug, Default, Deserialize)]
#[serde(default)]
struct File {
    auths: HashMap<String, Entry>,
    #[serde(rename = "credHelpers")]
    helpers: HashMap<String, String>,
    #[serde(rename = "credsStore")]
    store: String,
}

#[derive(Debug, Default, Deserialize)]
#[serde(default)]
struct Entry {
    auth: String,
    #[serde(rename = "identitytoken")]
    identity_token: String,
}

/// What a helper answers.
#[derive(Deserialize)]
#[serde(rename_all = "PascalCase")]
struct Answer {
    username: String,
    secret: String,
}

/// The header that gives the engine what it needs for the registry of this image; none: it tries without.
///
/// # Errors
/// A helper that a file names and that can't be asked. Files that can't be read are passed over.
pub(crate) async fn header(files: &[PathBuf], image: &str) -> Result<Option<String>, AuthError> {
    header_by(files, image, &std::env::var_os("PATH").unwrap_or_default()).await
}

/// The same with helpers of these folders.
async fn header_by(files: &[PathBuf], image: &str, folders: &OsStr) -> Result<Option<String>, AuthError> {
    for path in files {
        let Ok(text) = fs::read(path) else { continue };
        let file = serde_json::from_slice::<File>(&text);
        let file = file
            .inspect_err(|error| tracing::warn!(file = %path.display(), %error, "credentials can't be read"));
        let Ok(file) = file else { continue };
        if let Some(header) = of_file(&file, &path.display().to_string(), image, folders).await? {
            return Ok(Some(header));
        }
    }
    Ok(None)
}

/// A helper for the registry goes before the file's own words, as with Docker's and Podman's own clients.
async fn of_file(file: &File, path: &str, image: &str, folders: &OsStr) -> Result<Option<String>, AuthError> {
    let registry = registry(image);
    let names = names(image);
    let helper = names.iter().find_map(|name| file.helpers.get(name));
    let helper = helper.or_else(|| Some(&file.store).filter(|name| !name.is_empty()));
    if let Some(helper) = helper.filter(|name| !name.is_empty()) {
        let key = if registry == "docker.io" { INDEX } else { registry };
        if let Some(answer) = ask(helper, path, key, folders).await? {
            return Ok(Some(encoded(registry, &answer.username, &answer.secret)));
        }
    }
    Ok(names.iter().find_map(|name| credentials(registry, file.auths.get(name)?)))
}

fn credentials(registry: &str, entry: &Entry) -> Option<String> {
    if !entry.identity_token.is_empty() {
        return Some(encoded(registry, TOKEN, &entry.identity_token));
    }
    let plain = general_purpose::STANDARD.decode(&entry.auth).ok()?;
    let plain = String::from_utf8(plain).ok()?;
    let (user, password) = plain.split_once(':')?;
    Some(encoded(registry, user, password))
}

fn encoded(registry: &str, user: &str, secret: &str) -> String {
    let value = match user {
        TOKEN => json!({"identitytoken": secret, "serveraddress": registry}),
        _ => json!({"username": user, "password": secret, "serveraddress": registry}),
    };
    general_purpose::URL_SAFE.encode(value.to_string())
}

/// A helper and whatever it starts; they end with this.
struct Group(Option<Pid>);

impl Group {
    fn of(child: &Child) -> Self {
        Self(child.id().and_then(|id| i32::try_from(id).ok()).map(Pid::from_raw))
    }
}

impl Drop for Group {
    fn drop(&mut self) {
        if let Some(group) = self.0 {
            let _gone = killpg(group, Signal::SIGKILL);
        }
    }
}

/// What is said, up to a byte more than the largest; whoever says more finds nobody listening.
async fn bounded(output: Option<impl AsyncRead + Unpin>) -> Vec<u8> {
    let mut bytes = Vec::new();
    if let Some(output) = output {
        // What was read before an error is judged as any other.
        let _broken = output.take(LARGEST + 1).read_to_end(&mut bytes).await;
    }
    bytes
}

/// Asks a helper; none when it has nothing.
async fn ask(name: &str, path: &str, registry: &str, folders: &OsStr) -> Result<Option<Answer>, AuthError> {
    let fits = |byte: u8| byte.is_ascii_alphanumeric() || b"-_.".contains(&byte);
    if name.is_empty() || !name.bytes().all(fits) {
        let name = said(&torpor_sandbox::id::clip(name));
        return Err(AuthError::Name { path: path.to_owned(), name });
    }
    let program = format!("docker-credential-{name}");
    let run = |source| AuthError::Run { path: path.to_owned(), program: program.clone(), source };
    let mut child = Command::new(&program)
        .arg("get")
        .env("PATH", folders)
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .process_group(0)
        .kill_on_drop(true)
        .spawn()
        .map_err(run)?;
    let group = Group::of(&child);
    let talk = async move {
        let _unread = match child.stdin.take() {
            // One that ends without reading has said what it has to say.
            Some(mut input) => input.write_all(format!("{registry}\n").as_bytes()).await,
            None => Ok(()),
        };
        let (output, errors) = (child.stdout.take(), child.stderr.take());
        let ends = async move {
            let status = child.wait().await;
            // Nobody that it leaves behind keeps its output open.
            drop(group);
            status
        };
        let (status, answer, words) = tokio::join!(ends, bounded(output), bounded(errors));
        Ok::<_, io::Error>((status?, answer, words))
    };
    let (status, answer, words) = match timeout(HELP, talk).await {
        Err(_) => return Err(AuthError::Silent { program, registry: registry.to_owned() }),
        Ok(done) => done.map_err(run)?,
    };
    let registry = registry.to_owned();
    if !status.success() {
        if [&answer, &words].iter().any(|text| String::from_utf8_lossy(text).contains(NOTHING)) {
            return Ok(None);
        }
        // What it answers may hold the secret, even then.
        let words = Some(said(&String::from_utf8_lossy(&words))).filter(|words| !words.is_empty());
        let words = words.as_deref().unwrap_or("it says nothing on its standard error");
        return Err(AuthError::Refused { program, registry, said: format!("{words} ({status})") });
    }
    let fits = u64::try_from(answer.len()).is_ok_and(|length| length <= LARGEST);
    match fits.then(|| serde_json::from_slice::<Answer>(&answer)) {
        Some(Ok(answer)) => Ok(Some(answer)),
        // What it says may hold the secret.
        _ => Err(AuthError::Garbled { program, registry }),
    }
}

/// The part before the first slash, when it can be a host; else Docker's own registry.
fn registry(image: &str) -> &str {
    match image.split_once('/') {
        Some((host, _)) if host.contains(['.', ':']) || host == "localhost" => host,
        _ => "docker.io",
    }
}

/// What a file may call it, the closest first: Podman has credentials for parts of a registry.
fn names(image: &str) -> Vec<String> {
    let registry = registry(image);
    let mut names = Vec::new();
    if let Some(path) = image.strip_prefix(registry).and_then(|rest| rest.strip_prefix('/')) {
        let path = path.split_once('@').map_or(path, |(path, _)| path);
        let path = path.rsplit_once(':').filter(|(_, tag)| !tag.contains('/')).map_or(path, |(path, _)| path);
        let mut part = Some(path);
        while let Some(now) = part {
            names.push(format!("{registry}/{now}"));
            part = now.rsplit_once('/').map(|(above, _)| above);
        }
    }
    names.extend([registry.to_owned(), format!("https://{registry}")]);
    if registry == "docker.io" {
        names.extend([INDEX.to_owned(), "index.docker.io".to_owned()]);
    }
    names
}

#[cfg(test)]
mod tests {
    use std::{os::unix::fs::PermissionsExt as _, path::Path};

    use super::*;

    fn decoded(header: &str) -> serde_json::Value {
        serde_json::from_slice(&general_purpose::URL_SAFE.decode(header).unwrap()).unwrap()
    }

    async fn of(file: &Path, image: &str) -> Option<serde_json::Value> {
        let files = ["/nonexistent/none".into(), file.to_owned()];
        header(&files, image).await.unwrap().map(|header| decoded(&header))
    }

    #[tokio::test]
    async fn the_credentials_are_those_of_the_images_registry() {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("config.json");
        // "ann:secret:1", and a token.
        let text = r#"{"auths": {"registry.test:5000": {"auth": "YW5uOnNlY3JldDox"},
            "registry.test:5000/team": {"auth": "Ym9iOngK"},
            "https://index.docker.io/v1/": {"identitytoken": "t"}}}"#;
        fs::write(&file, text).unwrap();
        let own = of(&file, "registry.test:5000/other/web:1").await.unwrap();
        assert_eq!((own["username"].as_str(), own["password"].as_str()), (Some("ann"), Some("secret:1")));
        assert_eq!(of(&file, "registry.test:5000/team/web:1").await.unwrap()["username"], "bob");
        assert_eq!(of(&file, "alpine").await.unwrap()["identitytoken"], "t");
        assert_eq!(of(&file, "other.test/alpine").await, None);
    }

    #[tokio::test]
    async fn helpers_are_asked_for_their_registry_and_what_they_lack_is_told() {
        let script = "#!/bin/sh\nread r; case $r in
            h.test) echo '{\"ServerURL\":\"h.test\",\"Username\":\"<token>\",\"Secret\":\"t\"}' ;;
            https://index.docker.io/v1/) echo '{\"Username\":\"ann\",\"Secret\":\"s\"}' ;;
            bad.test) echo garbage ;;
            none.test) echo 'credentials not found in native keychain'; exit 1 ;;
            long.test) exec /usr/bin/yes ;;
            left.test) /bin/sleep 1000 & echo $! >$0.pid; echo '{\"Username\":\"bob\",\"Secret\":\"s\"}' ;;
            *) echo 'a secret'; echo 'the keyring is locked' >&2; exit 1 ;;
            esac";
        let folder = tempfile::tempdir().unwrap();
        let program = folder.path().join("docker-credential-test");
        fs::write(&program, script).unwrap();
        fs::set_permissions(&program, fs::Permissions::from_mode(0o755)).unwrap();
        let of = |image: &'static str| {
            let (files, folder) = ([folder.path().join("config.json")], folder.path().as_os_str());
            async move { header_by(&files, image, folder).await }
        };
        let json = |header: Option<String>| header.map(|header| decoded(&header)).unwrap();
        let file = folder.path().join("config.json");
        let text = json!({
            "credsStore": "test", "credHelpers": {"odd.test": "../odd", "gone.test": "no-such-helper-here"},
            "auths": {"none.test": {"auth": "YW5uOnNlY3JldDox"}},
        });
        fs::write(&file, text.to_string()).unwrap();
        assert_eq!(json(of("h.test/a").await.unwrap())["identitytoken"], "t");
        assert_eq!(json(of("alpine:3").await.unwrap())["username"], "ann");
        // It has none: the file may.
        assert_eq!(json(of("none.test/a").await.unwrap())["username"], "ann");
        let why = async |image| DriverError::from(of(image).await.unwrap_err()).to_string();
        let locked = why("locked.test/a").await;
        assert!(locked.contains("the keyring is locked") && !locked.contains("secret"), "{locked}");
        assert!(why("long.test/a").await.contains("no credentials"));
        // What it leaves behind holds its output open.
        assert_eq!(json(of("left.test/a").await.unwrap())["username"], "bob");
        let left = fs::read_to_string(program.with_extension("pid")).unwrap();
        let state = || fs::read_to_string(format!("/proc/{}/stat", left.trim())).unwrap_or_default();
        let ended = |state: &str| state.is_empty() || state.contains(") Z ");
        for _ in 0..500 {
            if ended(&state()) {
                break;
            }
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
        assert!(ended(&state()), "{}", state());
        assert!(why("bad.test/a").await.contains("no JSON"));
        assert!(why("odd.test/a").await.contains("no name of a program"));
        let gone = why("gone.test/a").await;
        assert!(
            gone.contains("docker-credential-no-such-helper-here") && gone.contains("config.json"),
            "{gone}"
        );
    }

    #[test]
    fn an_images_first_part_is_its_registry_when_it_can_be_a_host() {
        assert_eq!(registry("localhost/a"), "localhost");
        assert_eq!(registry("a.test/b:1"), "a.test");
        assert_eq!([registry("library/alpine"), registry("alpine:3")], ["docker.io"; 2]);
        assert_eq!(names("a.test:1/b/c:2@sha256:0")[..3], ["a.test:1/b/c", "a.test:1/b", "a.test:1"]);
    }
}
