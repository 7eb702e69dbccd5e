//! Paths of a foreign tree, kept inside it.

use std::collections::VecDeque;
use std::ffi::{OsStr, OsString};
use std::fs;
use std::io;
use std::path::{Component, Path, PathBuf};

use crate::Error;
use crate::error::At;

const MAX_LINKS: u32 = 40;

/// What to do about a directory on the way that doesn't exist.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Missing {
    /// Make it.
    Create,
    /// Stop: there is nothing.
    Stop,
}

/// Where the tree's path `path` lies below `root`; [`None`] when a directory on the way is missing and stays so.
///
/// Directories on the way may be relative links that stay inside (`bin -> usr/bin`); an absolute link, one that climbs
/// out, or `..` in the path itself is refused. The last part is never followed. Nobody else may change `root` meanwhile.
pub(crate) fn locate(root: &Path, path: &Path, missing: Missing) -> Result<Option<PathBuf>, Error> {
    let refuse = |why: String| Err(Error::BadEntry { entry: path.display().to_string(), why });
    let Some((last, parents)) = split(path)? else { return Ok(Some(root.to_owned())) };
    let mut todo: VecDeque<OsString> = parents.into_iter().map(OsStr::to_owned).collect();
    let mut here: Vec<OsString> = Vec::new();
    let mut links = 0;
    while let Some(part) = todo.pop_front() {
        if part == ".." {
            if here.pop().is_none() {
                return refuse("a link on its way climbs out of the root".into());
            }
            continue;
        }
        here.push(part);
        let candidate = join(root, &here);
        match fs::symlink_metadata(&candidate) {
            Ok(meta) if meta.is_dir() => {}
            Ok(meta) if meta.is_symlink() => {
                links += 1;
                let target = fs::read_link(&candidate).at("read link", &candidate)?;
                if target.is_absolute() {
                    return refuse(format!("it passes through the absolute link {}", show(&here)));
                }
                if links > MAX_LINKS {
                    return refuse("too many links on its way".into());
                }
                here.pop();
                push_target(&mut todo, &target);
            }
            Ok(_) => return refuse(format!("{} is not a directory", show(&here))),
            Err(error) if error.kind() == io::ErrorKind::NotFound => match missing {
                Missing::Create => fs::create_dir(&candidate).at("create directory", &candidate)?,
                Missing::Stop => return Ok(None),
            },
            Err(error) => return Err(error).at("look at", candidate),
        }
    }
    Ok(Some(join(root, &here).join(last)))
}

fn push_target(todo: &mut VecDeque<OsString>, target: &Path) {
    for part in target.components().rev() {
        match part {
            Component::Normal(name) => todo.push_front(name.to_owned()),
            Component::ParentDir => todo.push_front("..".into()),
            Component::CurDir | Component::RootDir | Component::Prefix(_) => {}
        }
    }
}

/// The last part and those before it; [`None`] for the root itself.
fn split(path: &Path) -> Result<Option<(&OsStr, Vec<&OsStr>)>, Error> {
    let mut parts = Vec::new();
    for part in path.components() {
        match part {
            Component::Normal(name) => parts.push(name),
            Component::CurDir | Component::RootDir => {}
            Component::ParentDir | Component::Prefix(_) => {
                let entry = path.display().to_string();
                return Err(Error::BadEntry { entry, why: "its path holds '..'".into() });
            }
        }
    }
    Ok(parts.pop().map(|last| (last, parts)))
}

fn join(root: &Path, parts: &[OsString]) -> PathBuf {
    parts.iter().fold(root.to_owned(), |path, part| path.join(part))
}

fn show(parts: &[OsString]) -> String {
    parts.iter().collect::<PathBuf>().display().to_string()
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::symlink;

    use super::*;

    fn at(root: &Path, path: &str) -> Result<Option<PathBuf>, Error> {
        locate(root, Path::new(path), Missing::Stop)
    }

    #[test]
    fn paths_stay_below_the_root() {
        let dir = tempfile::tempdir().unwrap();
        let root = dir.path();
        fs::create_dir_all(root.join("usr/bin")).unwrap();
        symlink("usr/bin", root.join("bin")).unwrap();
        symlink("/usr/bin", root.join("abs")).unwrap();
        symlink("usr/../../..", root.join("out")).unwrap();
        symlink("loop", root.join("loop")).unwrap();
        fs::write(root.join("file"), b"").unwrap();

        assert_eq!(at(root, "./bin/sh").unwrap(), Some(root.join("usr/bin/sh")));
        assert_eq!(at(root, "/etc").unwrap(), Some(root.join("etc")));
        assert_eq!(at(root, "none/sh").unwrap(), None);
        assert_eq!(at(root, ".").unwrap(), Some(root.to_owned()));
        for bad in ["../x", "usr/../../x", "abs/sh", "out/x", "loop/x", "file/x"] {
            assert!(matches!(at(root, bad), Err(Error::BadEntry { .. })), "{bad}");
        }
        assert_eq!(at(root, "abs").unwrap(), Some(root.join("abs")), "the last part is not followed");
    }
}
