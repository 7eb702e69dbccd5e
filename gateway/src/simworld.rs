//! The sim driver's world in a file, so that it outlives the gateway as virtual machines do.

use std::{
    fs::{self, File},
    io::{self, BufRead as _, BufReader, Write as _},
    path::Path,
    sync::Arc,
};

use torpor_sandbox::sim::{Kept, Script, SimDriver};

/// Below the state directory.
const FOLDER: &str = "sim";
const FILE: &str = "world";

/// What is kept there; lines that can't be read are left out, the last one may be half a line.
fn read(path: &Path) -> io::Result<Vec<Kept>> {
    let file = match File::open(path) {
        Ok(file) => file,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Vec::new()),
        Err(error) => return Err(error),
    };
    let mut kept = Vec::new();
    for line in BufReader::new(file).lines() {
        kept.extend(serde_json::from_str(&line?).ok());
    }
    Ok(kept)
}

/// Every piece that was ever kept in `state_dir`, oldest first.
///
/// # Errors
/// The file's.
pub fn pieces(state_dir: &Path) -> io::Result<Vec<Kept>> {
    read(&state_dir.join(FOLDER).join(FILE))
}

/// The sim driver over the world in `state_dir`. Its pieces are written as they come and not flushed: they outlive the
/// process, not the host, as a running machine would.
///
/// # Errors
/// The file's.
pub fn open(state_dir: &Path, script: Script) -> io::Result<Arc<SimDriver>> {
    let folder = state_dir.join(FOLDER);
    fs::create_dir_all(&folder)?;
    let path = folder.join(FILE);
    let kept = read(&path)?;
    let mut file = File::options().create(true).append(true).open(&path)?;
    let keeper = move |piece: &Kept| {
        let line = serde_json::to_string(piece).map_err(io::Error::from);
        if let Err(error) = line.and_then(|line| file.write_all(format!("{line}\n").as_bytes())) {
            tracing::error!(%error, "the pretended world is not kept");
        }
    };
    Ok(SimDriver::outliving(script, kept, Box::new(keeper)))
}
