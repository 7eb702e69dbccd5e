//! The engine's images: found, pulled and made of a root file system.

use std::{io, path::Path, process::Stdio};

use async_trait::async_trait;
use bytes::BytesMut;
use futures::{Stream, StreamExt as _};
use http_body_util::{BodyExt, StreamBody};
use hyper::{Method, body::Frame};
use tokio::{
    io::{AsyncRead, AsyncReadExt as _},
    process::Command,
    time::timeout,
};
use torpor_sandbox::{DriverError, ImageCare, ImageFound, ImageSource, OnStep};

use crate::{
    auth,
    client::{Body, Carries, EngineError, encoded, said},
    driver::Inner,
    events::Lines,
    types::{ImageInspect, Pulled},
};

/// How long an engine may say nothing while it fetches.
const SILENCE: std::time::Duration = std::time::Duration::from_secs(300);
/// Pieces of an archive, bytes.
const PIECE: usize = 256 << 10;

#[async_trait]
impl ImageCare for Inner {
    async fn find(&self, name: &str) -> Result<Option<ImageFound>, DriverError> {
        check_name(name)?;
        match self.client.get::<ImageInspect>(&format!("/images/{}/json", encoded(name))).await {
            Ok(image) => Ok(Some(found(image))),
            Err(error) if error.is_not_found() => Ok(None),
            Err(error) => Err(error.into()),
        }
    }

    async fn pull(&self, name: &str, tell: OnStep<'_>) -> Result<ImageFound, DriverError> {
        check_name(name)?;
        let (repository, tag) = parts(name);
        let mut path = format!("/images/create?fromImage={}", encoded(repository));
        if let Some(tag) = tag {
            path.push_str(&format!("&tag={}", encoded(tag)));
        }
        tell("pull", name.to_owned());
        let files = match &self.config.auth_file {
            Some(file) => vec![file.clone()],
            None => self.config.engine.auth_files(),
        };
        let auth = auth::header(&files, name).await?;
        let answer = self.client.stream(Method::POST, &path, Carries::Nothing, auth).await;
        let answer = answer.map_err(|error| not_pulled(name, error))?;
        self.follow(answer, tell).await.map_err(|why| refusal(name, &why))?;
        match self.find(name).await? {
            Some(found) => Ok(found),
            None => Err(DriverError::BaseMissing(format!("{name}: pulled, and not there"))),
        }
    }

    async fn import(
        &self,
        name: &str,
        source: &ImageSource,
        tell: OnStep<'_>,
    ) -> Result<ImageFound, DriverError> {
        check_name(name)?;
        let (repository, tag) = parts(name);
        let tag = tag.filter(|tag| !tag.starts_with("sha256:")).unwrap_or("latest");
        let path = format!("/images/create?fromSrc=-&repo={}&tag={}", encoded(repository), encoded(tag));
        tell("import", format!("{name} into {}", self.config.engine.name()));
        let (body, packing) = match source {
            ImageSource::Tar(file) => (archive(file).await?, None),
            ImageSource::Dir(folder) => {
                let (body, packing) = packed(folder)?;
                (body, Some(packing))
            }
        };
        let answer = self.client.stream(Method::POST, &path, Carries::Tar(body), None).await;
        let imported = match answer {
            Ok(answer) => self.follow(answer, tell).await.map_err(|why| {
                DriverError::Invalid(format!("import {name} into {}: {why}", self.config.engine.name()))
            }),
            Err(error) => Err(error.into()),
        };
        if let Some(packing) = packing {
            packed_whole(packing, imported.is_ok()).await?;
        }
        imported?;
        self.find(&format!("{repository}:{tag}"))
            .await?
            .ok_or_else(|| DriverError::BaseMissing(format!("{name}: imported, and not there")))
    }
}

impl Inner {
    /// Reads what is told of a pull to its end; the error is the engine's.
    async fn follow(&self, mut answer: hyper::body::Incoming, tell: OnStep<'_>) -> Result<(), String> {
        let mut lines = Lines::default();
        loop {
            let frame = match timeout(SILENCE, answer.frame()).await {
                Err(_) => return Err(format!("nothing was heard for {} s", SILENCE.as_secs())),
                Ok(None) => break,
                Ok(Some(frame)) => frame.map_err(|error| format!("it was broken off: {error}"))?,
            };
            let Some(data) = frame.data_ref() else { continue };
            lines.take(data);
            while let Some(line) = lines.next() {
                step(&line, tell)?;
            }
        }
        let rest = lines.rest();
        if rest.is_empty() { Ok(()) } else { step(&rest, tell) }
    }
}

fn step(line: &[u8], tell: OnStep<'_>) -> Result<(), String> {
    let Ok(pulled) = serde_json::from_slice::<Pulled>(line) else { return Ok(()) };
    if !pulled.error.is_empty() {
        return Err(said(&pulled.error));
    }
    let layer = if pulled.id.is_empty() { String::new() } else { format!("{} ", said(&pulled.id)) };
    let part = match pulled.progress {
        Some(progress) if progress.total > 0 => format!(" {}/{} bytes", progress.current, progress.total),
        _ => String::new(),
    };
    tell("pull", format!("{layer}{}{part}", said(&pulled.status)));
    Ok(())
}

fn found(image: ImageInspect) -> ImageFound {
    let digest = match image.id.strip_prefix("sha256:") {
        Some(_) => image.id,
        None => format!("sha256:{}", image.id),
    };
    ImageFound { digest, names: image.repo_tags.unwrap_or_default(), bytes: image.size }
}

/// Repository, and tag or digest. Without one an engine would fetch every tag there is.
fn parts(name: &str) -> (&str, Option<&str>) {
    if let Some((repository, digest)) = name.split_once('@') {
        return (repository, Some(digest));
    }
    let start = name.rfind('/').map_or(0, |at| at + 1);
    match name[start..].rfind(':') {
        Some(at) => (&name[..start + at], Some(&name[start + at + 1..])),
        None => (name, Some("latest")),
    }
}

fn check_name(name: &str) -> Result<(), DriverError> {
    let fits = |b: u8| b.is_ascii_alphanumeric() || b"._-/:@".contains(&b);
    let inside = name.split('/').all(|part| !part.is_empty() && part != "." && part != "..");
    if !name.is_empty() && name.len() <= 512 && name.bytes().all(fits) && inside {
        return Ok(());
    }
    let shown = torpor_sandbox::id::clip(name);
    Err(DriverError::Invalid(format!("image: '{shown}' is no name of an image")))
}

fn not_pulled(name: &str, error: EngineError) -> DriverError {
    match &error {
        EngineError::Refused { message, .. } => refusal(name, message),
        _ => error.into(),
    }
}

/// What can't be had is told from what can't be had now.
fn refusal(name: &str, why: &str) -> DriverError {
    const NEVER: [&str; 10] = [
        "not found",
        "manifest unknown",
        "denied",
        "unauthorized",
        "no basic auth credentials",
        "authentication required",
        "does not exist",
        "name unknown",
        "invalid reference",
        "short-name",
    ];
    let lower = why.to_lowercase();
    if NEVER.iter().any(|words| lower.contains(words)) {
        return DriverError::BaseMissing(format!("{name}: {why}"));
    }
    DriverError::backend(format!("pull {name}"), why.to_owned())
}

async fn archive(file: &Path) -> Result<Body, DriverError> {
    let opened = tokio::fs::File::open(file).await;
    let opened =
        opened.map_err(|error| DriverError::Invalid(format!("path: '{}': {error}", file.display())))?;
    Ok(BodyExt::boxed(StreamBody::new(frames(opened))))
}

/// tar at work, and what it comes to.
type Packing = tokio::task::JoinHandle<io::Result<std::process::Output>>;

/// The tree as an archive, as it is made.
fn packed(folder: &Path) -> Result<(Body, Packing), DriverError> {
    let failed = |error| DriverError::backend(format!("pack {} with tar", folder.display()), error);
    let mut tar = Command::new("tar");
    tar.args(["--create", "--numeric-owner", "--xattrs", "--one-file-system", "--file=-", "--directory"])
        .arg(folder)
        .arg(".")
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .kill_on_drop(true);
    let mut child = tar.spawn().map_err(failed)?;
    let out = child.stdout.take().ok_or_else(|| failed(io::Error::other("it has no output")))?;
    // Its words are read while it packs: a pipe that is full would stop it.
    let packing = tokio::spawn(child.wait_with_output());
    Ok((BodyExt::boxed(StreamBody::new(frames(out))), packing))
}

/// An archive that was cut short makes an image all the same.
async fn packed_whole(packing: Packing, expected: bool) -> Result<(), DriverError> {
    let ended = packing.await.map_err(io::Error::other).and_then(|ended| ended);
    let ended = ended.map_err(|error| DriverError::backend("wait for tar", error))?;
    if ended.status.success() || !expected {
        return Ok(());
    }
    let words = String::from_utf8_lossy(&ended.stderr);
    let why = format!("{}: {}", ended.status, said(&words));
    Err(DriverError::backend("pack the root file system with tar", why))
}

fn frames(
    from: impl AsyncRead + Unpin + Send + 'static,
) -> impl Stream<Item = Result<Frame<bytes::Bytes>, io::Error>> + Send {
    futures::stream::try_unfold(from, |mut from| async move {
        let mut piece = BytesMut::with_capacity(PIECE);
        let read = from.read_buf(&mut piece).await?;
        Ok::<_, io::Error>((read > 0).then(|| (piece.freeze(), from)))
    })
    .map(|piece| piece.map(Frame::data))
}

#[cfg(test)]
mod tests {
    use std::sync::Mutex;

    use super::*;

    #[test]
    fn a_name_has_a_tag_or_a_digest_and_the_port_of_a_registry_is_neither() {
        assert_eq!(parts("alpine"), ("alpine", Some("latest")));
        assert_eq!(parts("r.test:5000/a/b"), ("r.test:5000/a/b", Some("latest")));
        assert_eq!(parts("r.test:5000/a/b:3"), ("r.test:5000/a/b", Some("3")));
        assert_eq!(parts("a@sha256:0"), ("a", Some("sha256:0")));
    }

    #[test]
    fn names_that_could_lead_elsewhere_in_the_engines_api_are_refused() {
        for bad in ["", "../containers", "a/../b", "a b", "a?b", "a//b", "a\n", "/a"] {
            assert!(check_name(bad).is_err(), "{bad}");
        }
        assert!(check_name("docker.io/library/alpine:3.20").is_ok());
    }

    #[test]
    fn progress_is_told_and_an_error_in_the_middle_ends_it() {
        let told = Mutex::new(Vec::new());
        let tell =
            |name: &'static str, detail: String| told.lock().unwrap().push(format!("{name}: {detail}"));
        let line = br#"{"status":"Downloading","id":"3f4d","progressDetail":{"current":5,"total":10},"progress":"[=>]"}"#;
        step(line, &tell).unwrap();
        step(br#"{"status":"Pulling from a","progressDetail":{}}"#, &tell).unwrap();
        assert_eq!(*told.lock().unwrap(), ["pull: 3f4d Downloading 5/10 bytes", "pull: Pulling from a"]);
        assert_eq!(step(br#"{"error":"manifest unknown"}"#, &tell).unwrap_err(), "manifest unknown");
        assert!(matches!(refusal("a", "manifest unknown"), DriverError::BaseMissing(_)));
        assert!(refusal("a", "connection reset by peer").is_transient());
    }
}
