//! `torpor cp`

mod receive;
mod send;

use std::{
    ffi::{OsStr, OsString},
    io::Write as _,
    path::PathBuf,
};

use clap::{Args, builder::TypedValueParser as _};
use serde::Serialize;
use torpor_agent_files::{FileError, Problem, Time, shown};
use torpor_sandbox::spec::size;
use torpor_sdk::Error;

use super::Outcome;
use crate::{
    failure::{FAILED, Failure, USAGE},
    output::{self, Format, clean},
    session::Session,
};

const LONG_ABOUT: &str = "\
Copy files between here and a ready sandbox.

One of the two sides is NAME:PATH, the other a path here, or '-' for standard input or output. What begins with '/', '.' or \
'~' is always a path here. Folders are copied with all that is in them: into TARGET when that is a folder, else as TARGET; \
SOURCE/. stands for what is in the folder. Modes and times of files come along; symlinks stay symlinks and are followed by \
nobody, except at SOURCE itself. Sockets, pipes and devices are left out.

A file appears whole or not at all. What has come of one when the copy breaks stays beside it under a name of its own \
(.torpor-part-…), and --resume goes on from there.";

/// Copy files between here and a ready sandbox.
#[derive(Args)]
#[command(long_about = LONG_ABOUT)]
pub struct CpArgs {
    /// Go on with a copy that broke: files that are complete are left alone, and of the one under way only the rest comes,
    /// when its beginning is still the same.
    #[arg(long)]
    resume: bool,
    /// Make the folder of TARGET and those above it when they are missing.
    #[arg(short, long)]
    parents: bool,
    /// Who owns what is made in the sandbox: a name or number, with an optional :group. root when not given.
    #[arg(short, long, default_value = "", hide_default_value = true)]
    user: String,
    /// NAME:PATH in a sandbox, a path here, or '-' for standard input.
    #[arg(value_parser = clap::builder::OsStringValueParser::new().try_map(side))]
    source: Side,
    /// NAME:PATH in a sandbox, a path here, or '-' for standard output.
    #[arg(value_parser = clap::builder::OsStringValueParser::new().try_map(side))]
    target: Side,
}

/// One of the two sides of a copy.
#[derive(Clone, Debug, PartialEq, Eq)]
enum Side {
    Here(PathBuf),
    /// Standard input or output.
    Stream,
    There(Remote),
}

/// A path in a sandbox.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Remote {
    sandbox: String,
    path: String,
}

fn side(text: OsString) -> Result<Side, String> {
    if text == "-" {
        return Ok(Side::Stream);
    }
    if text.is_empty() {
        return Err("a path is needed".to_owned());
    }
    let Some((name, path)) = text.to_str().and_then(named) else { return Ok(Side::Here(text.into())) };
    if path.is_empty() {
        return Err(format!("'{name}:' names no path: write {name}:/PATH, or ./{name}: for a file here"));
    }
    Ok(Side::There(Remote { sandbox: name.to_owned(), path: path.to_owned() }))
}

/// A sandbox's name and a path, unless the text begins as a path does.
fn named(text: &str) -> Option<(&str, &str)> {
    let (name, path) = text.split_once(':')?;
    let fits = |c: char| c.is_ascii_alphanumeric() || matches!(c, '-' | '_' | '.' | '/');
    let is_path = name.is_empty() || name.starts_with(['/', '.', '~', '-']) || !name.chars().all(fits);
    (!is_path).then_some((name, path))
}

impl Remote {
    /// The folder that holds it, and its last part; none when that is no name (`/`, `a/.`, `a/..`).
    fn split(&self) -> (&str, Option<&str>) {
        let path = self.path.trim_end_matches('/');
        let (folder, name) = path.rsplit_once('/').map_or(("", path), |(folder, name)| (folder, name));
        let name = (!matches!(name, "" | "." | "..")).then_some(name);
        let folder = match folder {
            "" => "/",
            folder => folder,
        };
        (folder, name)
    }
}

/// What was copied.
#[derive(Debug, Default, Serialize)]
struct Report {
    sandbox: String,
    /// `to` the sandbox or `from` it.
    direction: &'static str,
    source: String,
    target: String,
    files: u64,
    directories: u64,
    symlinks: u64,
    bytes: u64,
    /// Complete already.
    unchanged: u64,
    /// Left out.
    skipped: Vec<Skipped>,
}

#[derive(Debug, Serialize)]
struct Skipped {
    path: String,
    why: String,
}

impl Report {
    fn skip(&mut self, path: &[u8], why: &str) {
        self.skipped.push(Skipped { path: shown(path), why: clean(why) });
    }

    fn print(&self, session: &Session) -> Result<(), Failure> {
        if !session.quiet {
            for skipped in &self.skipped {
                let _ = writeln!(std::io::stderr(), "left out: {}: {}", skipped.path, skipped.why);
            }
        }
        match session.format {
            Format::Name => output::lines([self.target.as_str()].into_iter()),
            Format::Table => {
                let mut parts = vec![counted(self.files, "file")];
                for (count, what) in [
                    (self.directories, "folder"),
                    (self.symlinks, "symlink"),
                    (self.unchanged, "unchanged file"),
                ] {
                    if count > 0 {
                        parts.push(counted(count, what));
                    }
                }
                let (from, to) = (clean(&self.source), clean(&self.target));
                output::text(&format!("{from} -> {to}: {}, {}\n", parts.join(", "), size(self.bytes)))
            }
            format => output::structured(format, self),
        }
    }
}

fn counted(count: u64, what: &str) -> String {
    format!("{count} {what}{}", if count == 1 { "" } else { "s" })
}

/// How the copy is made.
struct Plan<'a> {
    session: &'a Session,
    remote: Remote,
    resume: bool,
    parents: bool,
    user: String,
}

/// Copies.
pub async fn run(session: &Session, args: CpArgs) -> Outcome {
    let plan = |remote| Plan {
        session,
        remote,
        resume: args.resume,
        parents: args.parents,
        user: args.user.clone(),
    };
    match (&args.source, &args.target) {
        (Side::Here(path), Side::There(remote)) => send::files(&plan(remote.clone()), path).await,
        (Side::Stream, Side::There(_)) | (Side::There(_), Side::Stream) if args.resume => {
            Err(Failure::usage("--resume can't go on with a stream: name a file"))
        }
        (Side::Stream, Side::There(remote)) => send::stream(&plan(remote.clone())).await,
        (Side::There(_), _) if !args.user.is_empty() => {
            Err(Failure::usage("--user is for files that are made in a sandbox"))
        }
        (Side::There(remote), Side::Here(path)) => receive::files(&plan(remote.clone()), path).await,
        (Side::There(remote), Side::Stream) => receive::stream(&plan(remote.clone())).await,
        (Side::There(_), Side::There(_)) => Err(Failure::usage(
            "one of the two sides must be here: copy to a file here first, or pipe through '-'",
        )),
        (Side::Here(_) | Side::Stream, Side::Here(_) | Side::Stream) => {
            Err(Failure::usage("one of the two sides must be in a sandbox, as in: torpor cp FILE NAME:/PATH"))
        }
    }
}

/// The bytes of an earlier try are not the beginning of the file: it comes anew.
fn prefix_differs(error: &Failure) -> bool {
    error.told.reason == "PREFIX_DIFFERS"
}

/// Whether two files were changed last at the same time.
fn same_time(there: Option<&prost_types::Timestamp>, here: Option<Time>) -> bool {
    there.map(|time| (time.seconds, i64::from(time.nanos)))
        == here.map(|(seconds, nanos)| (seconds, i64::from(nanos)))
}

/// Nothing is at that path of the sandbox.
fn is_missing(error: &Error) -> bool {
    error.reason() == Some("FILE_NOT_FOUND")
}

impl From<FileError> for Failure {
    fn from(error: FileError) -> Self {
        let code = if error.problem == Problem::BadPath { USAGE } else { FAILED };
        let mut failure = Self::new(code, error.message);
        if error.problem == Problem::PrefixDiffers {
            failure.told.reason = "PREFIX_DIFFERS".to_owned();
        }
        failure
    }
}

fn bytes_of(path: &OsStr) -> &[u8] {
    std::os::unix::ffi::OsStrExt::as_bytes(path)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn there(sandbox: &str, path: &str) -> Result<Side, String> {
        Ok(Side::There(Remote { sandbox: sandbox.into(), path: path.into() }))
    }

    #[test]
    fn a_side_is_here_in_a_sandbox_or_a_stream() {
        let here = |text: &str| Ok(Side::Here(text.into()));
        let read = |text: &str| side(text.into());
        assert_eq!(read("-"), Ok(Side::Stream));
        assert_eq!(read("box:/a b"), there("box", "/a b"));
        assert_eq!(read("team/box:x:y"), there("team/box", "x:y"));
        assert_eq!(read("box:-"), there("box", "-"));
        for text in
            ["/a:b", "./a:b", "../a:b", "~x:y", "a b:c", "$(x):y", "plain", "new\nline:x", "-x:y", ":x"]
        {
            assert_eq!(read(text), here(text), "{text}");
        }
        assert!(read("box:").unwrap_err().contains("box:/PATH"));
        assert!(read("").is_err());
    }

    #[test]
    fn a_remote_path_has_a_folder_and_a_name_unless_it_is_no_name() {
        let split = |path: &str| {
            let remote = Remote { sandbox: "box".into(), path: path.into() };
            let (folder, name) = remote.split();
            (folder.to_owned(), name.map(str::to_owned))
        };
        assert_eq!(split("/a/b"), ("/a".into(), Some("b".into())));
        assert_eq!(split("/a/b//"), ("/a".into(), Some("b".into())));
        assert_eq!(split("b"), ("/".into(), Some("b".into())));
        assert_eq!(split("/b"), ("/".into(), Some("b".into())));
        for path in ["/", "/a/.", "..", "a/../"] {
            assert_eq!(split(path).1, None, "{path}");
        }
    }
}
