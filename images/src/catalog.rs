//! The images of a host.
//!
//! ```text
//! <state>/images/<64 hex digits>/base.raw     the disk; its SHA-256 is the directory's name; mode 0444
//!                               /image.json   digest, size, when it was made
//!               /names/<name>.json            which digest a name stands for
//!               /.tmp-*                       work in progress, never an image
//! ```
//! An image appears by one rename of a complete and synced directory, and a name by one rename of a file.

use std::collections::BTreeMap;
use std::fs::{self, Permissions};
use std::io;
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::time::{SystemTime, UNIX_EPOCH};

use serde::{Deserialize, Serialize};

use crate::build::{self, Source, debian};
use crate::error::At;
use crate::fsutil::{
    make_dir, read_json, rename_synced, sha256_file, sorted_entries, sync_dir, to_json, write_synced,
};
use crate::name::{check_name, digest_prefix, is_hex};
use crate::staging::{self, Staging};
use crate::{Error, OnProgress, tell};

const BASE: &str = "base.raw";
const RECORD: &str = "image.json";
const NAMES: &str = "names";
const SHA256: &str = "sha256:";

/// One image under one name.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Image {
    /// Its name; empty when no name stands for it any more.
    pub name: String,
    /// `sha256:` and the SHA-256 of the disk's bytes.
    pub digest: String,
    /// Size of the disk in bytes, a multiple of 64 KiB.
    pub size_bytes: u64,
    /// What the disk takes on the host, in bytes: it is sparse.
    pub used_bytes: u64,
    /// When it was made, in seconds since 1970.
    pub created: u64,
    /// The raw disk, to be opened for reading only.
    pub path: PathBuf,
}

#[derive(Serialize, Deserialize)]
struct Record {
    digest: String,
    size_bytes: u64,
    created: u64,
}

#[derive(Serialize, Deserialize)]
struct Name {
    digest: String,
}

/// The images below a state directory. Any number of processes may use one at the same time.
#[derive(Debug, Clone)]
pub struct Catalog {
    dir: PathBuf,
}

impl Catalog {
    /// Opens the catalog `<state_dir>/images`, which is made if it isn't there, and takes away what killed builds left.
    ///
    /// # Errors
    /// [`Error::Io`].
    pub fn open(state_dir: &Path) -> Result<Self, Error> {
        let dir = state_dir.join("images");
        make_dir(&dir.join(NAMES))?;
        let dir = dir.canonicalize().at("find", &dir)?;
        staging::sweep(&dir)?;
        Ok(Self { dir })
    }

    /// All images by name, and those without a name at the end.
    ///
    /// # Errors
    /// [`Error::Io`]. A name whose image is gone is left out here, and reported by [`Catalog::resolve`].
    pub fn list(&self) -> Result<Vec<Image>, Error> {
        let names = self.names()?;
        let mut images = Vec::new();
        for (name, digest) in &names {
            match self.load(name, digest) {
                Err(Error::Broken { .. }) => {}
                image => images.push(image?),
            }
        }
        for hex in self.digests()? {
            let digest = format!("{SHA256}{hex}");
            if !names.values().any(|named| *named == digest) {
                match self.load("", &digest) {
                    Err(Error::Broken { .. }) => {}
                    image => images.push(image?),
                }
            }
        }
        Ok(images)
    }

    /// The image of this name, or of this digest (whole, or its first 12 or more digits, `sha256:` left out or not).
    ///
    /// # Errors
    /// [`Error::UnknownImage`] with what there is, [`Error::Ambiguous`], [`Error::Broken`] when its data is gone.
    pub fn resolve(&self, name_or_digest: &str) -> Result<Image, Error> {
        let names = self.names()?;
        if let Some(digest) = names.get(name_or_digest) {
            return self.load(name_or_digest, digest);
        }
        let digest = self.find_digest(name_or_digest, &names)?;
        let name = names.iter().find(|(_, named)| **named == digest).map_or("", |(name, _)| name.as_str());
        self.load(name, &digest)
    }

    /// Reads the whole disk and compares its digest: finds damage that no size or time shows.
    ///
    /// # Errors
    /// [`Error::Broken`] when the bytes are others, [`Error::Io`].
    pub fn verify(&self, image: &Image) -> Result<(), Error> {
        let found = format!("{SHA256}{}", sha256_file(&image.path)?);
        if found == image.digest {
            return Ok(());
        }
        let name = if image.name.is_empty() { &image.digest } else { &image.name };
        Err(Error::Broken {
            name: name.clone(),
            why: format!("its bytes have the digest {found}"),
            path: image.path.clone(),
        })
    }

    /// Removes a name, and the image with it when no other name stands for it. Given a digest, removes the image and
    /// all its names. `in_use` says how many sandboxes stand on a digest (`sha256:...`); the caller sees to it that no
    /// new one comes meanwhile. Returns the bytes that became free on the host.
    ///
    /// # Errors
    /// [`Error::InUse`] when the image would go and is in use, and those of [`Catalog::resolve`].
    pub fn remove(&self, name_or_digest: &str, in_use: &dyn Fn(&str) -> u32) -> Result<u64, Error> {
        // Where the data goes, made first: making it takes the same guard.
        let staging = Staging::new(&self.dir)?;
        let _guard = staging::guard(&self.dir)?;
        let names = self.names()?;
        let (digest, going): (String, Vec<&String>) = match names.get_key_value(name_or_digest) {
            Some((name, digest)) => (digest.clone(), vec![name]),
            None => {
                let digest = self.find_digest(name_or_digest, &names)?;
                let going =
                    names.iter().filter(|(_, named)| **named == digest).map(|(name, _)| name).collect();
                (digest, going)
            }
        };
        let all_names = names.values().filter(|named| **named == digest).count();
        let last = going.len() == all_names;
        if last {
            let count = in_use(&digest);
            if count > 0 {
                return Err(Error::InUse { name: name_or_digest.into(), count });
            }
        }
        for name in going {
            let path = self.name_path(name);
            fs::remove_file(&path).at("remove", &path)?;
        }
        sync_dir(&self.dir.join(NAMES))?;
        if last { self.remove_data(&digest, &staging) } else { Ok(0) }
    }

    /// Makes an image of a root file system and gives it a name. A name that exists moves to the new image; the old
    /// image stays under its digest. The same tree makes the same image.
    ///
    /// # Errors
    /// [`Error::BadName`], [`Error::NeedsRoot`], [`Error::BadSource`], [`Error::BadEntry`] (an archive that reaches
    /// outside of itself), [`Error::ToolMissing`], [`Error::ToolFailed`], [`Error::Io`]. Nothing is left of a failed try.
    pub fn import(&self, name: &str, source: &Source, progress: OnProgress<'_>) -> Result<Image, Error> {
        check_name(name)?;
        build::check_root()?;
        let staging = Staging::new(&self.dir)?;
        let tree = build::fetch(source, &self.dir, &staging, progress)?;
        self.finish(name, &tree, &staging, progress)
    }

    /// Builds a small Debian of the host's own release from the host's package sources, with `extra_packages` added.
    ///
    /// # Errors
    /// As [`Catalog::import`]; [`Error::BadPackage`].
    pub fn build_debian(
        &self,
        name: &str,
        extra_packages: &[String],
        progress: OnProgress<'_>,
    ) -> Result<Image, Error> {
        check_name(name)?;
        build::check_root()?;
        let staging = Staging::new(&self.dir)?;
        let tree = debian::build(extra_packages, &staging, progress)?;
        self.finish(name, &tree, &staging, progress)
    }

    fn finish(
        &self,
        name: &str,
        tree: &Path,
        staging: &Staging,
        progress: OnProgress<'_>,
    ) -> Result<Image, Error> {
        let disk = build::make_disk(tree, staging, progress)?;
        tell(progress, "hash", "");
        let hex = sha256_file(&disk)?;
        let digest = format!("{SHA256}{hex}");
        tell(progress, "add to catalog", &digest);
        let ready = staging.join("image");
        fs::create_dir(&ready).at("create directory", &ready)?;
        let base = ready.join(BASE);
        fs::set_permissions(&disk, Permissions::from_mode(0o444)).at("set the mode of", &disk)?;
        rename_synced(&disk, &base)?;
        let size_bytes = base.metadata().at("look at", &base)?.len();
        let record = ready.join(RECORD);
        let made = Record { digest: digest.clone(), size_bytes, created: now() };
        write_synced(&record, &to_json(&record, &made)?)?;
        sync_dir(&ready)?;
        self.publish(name, &hex, &ready, staging)?;
        self.load(name, &digest)
    }

    /// Under the catalog's lock, so that no removal comes between the image and its name.
    fn publish(&self, name: &str, hex: &str, ready: &Path, staging: &Staging) -> Result<(), Error> {
        let _guard = staging::guard(&self.dir)?;
        let target = self.dir.join(hex);
        match rename_synced(ready, &target) {
            // The same image is there already: the new copy goes with the scratch directory.
            Err(Error::Io { source, .. }) if is_taken(&source) && target.join(RECORD).exists() => {}
            done => done?,
        }
        let file = staging.join("name.json");
        write_synced(&file, &to_json(&file, &Name { digest: format!("{SHA256}{hex}") })?)?;
        rename_synced(&file, &self.name_path(name))
    }

    /// Moves the image away by one rename, so that a removal that is cut short leaves no half image.
    fn remove_data(&self, digest: &str, staging: &Staging) -> Result<u64, Error> {
        let hex = digest.strip_prefix(SHA256).unwrap_or(digest);
        let dir = self.dir.join(hex);
        let freed = dir.join(BASE).metadata().map_or(0, |meta| meta.blocks() * 512);
        match fs::rename(&dir, staging.join("image")) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => {}
            done => done.at("remove", &dir)?,
        }
        sync_dir(&self.dir)?;
        Ok(freed)
    }

    fn name_path(&self, name: &str) -> PathBuf {
        self.dir.join(NAMES).join(format!("{name}.json"))
    }

    /// Name to digest.
    fn names(&self) -> Result<BTreeMap<String, String>, Error> {
        let mut names = BTreeMap::new();
        for path in sorted_entries(&self.dir.join(NAMES))? {
            let Some(name) = path.file_name().and_then(|name| name.to_str()?.strip_suffix(".json")) else {
                continue;
            };
            if check_name(name).is_err() {
                continue;
            }
            match read_json::<Name>(&path) {
                // Removed between the listing and now.
                Err(Error::Io { source, .. }) if source.kind() == io::ErrorKind::NotFound => {}
                read => {
                    names.insert(name.to_owned(), read?.digest);
                }
            }
        }
        Ok(names)
    }

    /// The hex digests of all images.
    fn digests(&self) -> Result<Vec<String>, Error> {
        let names = sorted_entries(&self.dir)?;
        let names = names.iter().filter_map(|path| path.file_name()?.to_str());
        Ok(names.filter(|name| is_hex(name, 64)).map(str::to_owned).collect())
    }

    fn find_digest(&self, wanted: &str, names: &BTreeMap<String, String>) -> Result<String, Error> {
        let all = self.digests()?;
        let mut matches: Vec<String> = match digest_prefix(wanted) {
            Some(prefix) => {
                all.iter().filter(|hex| hex.starts_with(prefix)).map(|hex| format!("{SHA256}{hex}")).collect()
            }
            None => Vec::new(),
        };
        match (matches.len(), matches.pop()) {
            (1, Some(digest)) => Ok(digest),
            (0, _) | (_, None) => {
                Err(Error::UnknownImage { wanted: wanted.into(), known: known(names, &all) })
            }
            (_, Some(last)) => {
                matches.push(last);
                Err(Error::Ambiguous { wanted: wanted.into(), matches })
            }
        }
    }

    fn load(&self, name: &str, digest: &str) -> Result<Image, Error> {
        let shown = if name.is_empty() { digest } else { name };
        let broken = |why: &str, path: &Path| Error::Broken {
            name: shown.into(),
            why: why.into(),
            path: path.to_owned(),
        };
        let hex = digest.strip_prefix(SHA256).unwrap_or_default();
        if !is_hex(hex, 64) {
            return Err(broken("its name stands for something that is no digest", &self.name_path(name)));
        }
        let dir = self.dir.join(hex);
        let path = dir.join(BASE);
        let Ok(record) = read_json::<Record>(&dir.join(RECORD)) else {
            return Err(broken("its record is missing or can't be read", &dir.join(RECORD)));
        };
        let Ok(meta) = path.metadata() else { return Err(broken("its disk is missing", &path)) };
        if meta.len() != record.size_bytes || record.digest != digest {
            return Err(broken("its disk is not the one that its record describes", &path));
        }
        Ok(Image {
            name: name.into(),
            digest: record.digest,
            size_bytes: record.size_bytes,
            used_bytes: meta.blocks() * 512,
            created: record.created,
            path,
        })
    }
}

/// What there is, as a user would name it.
fn known(names: &BTreeMap<String, String>, digests: &[String]) -> Vec<String> {
    let nameless = digests
        .iter()
        .map(|hex| format!("{SHA256}{hex}"))
        .filter(|d| !names.values().any(|named| named == d));
    names.keys().cloned().chain(nameless).collect()
}

fn is_taken(error: &io::Error) -> bool {
    matches!(error.kind(), io::ErrorKind::DirectoryNotEmpty | io::ErrorKind::AlreadyExists)
}

fn now() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_secs())
}
