//! The recorded surface of the API: `cargo xtask check` compares, `cargo xtask golden` records.

use std::{
    fs, io,
    path::{Path, PathBuf},
};

use prost_reflect::DescriptorPool;

use crate::{
    root,
    surface::{Difference, Surface},
};

const FILE: &str = "proto/golden/api.txt";
const HEAD: &str = "\
# What clients of the .proto files stand on; `cargo xtask golden` writes it, `cargo xtask check` compares. A line that goes
# or changes breaks somebody: programs, JSON, or paths of the REST API.
";

/// Compiles .proto files.
pub fn compile(includes: &[PathBuf], files: &[PathBuf]) -> Result<DescriptorPool, String> {
    let failed = |e: protox::Error| format!("the .proto files can't be compiled: {e}");
    let mut compiler = protox::Compiler::new(includes).map_err(failed)?;
    compiler.include_imports(true).open_files(files).map_err(failed)?;
    Ok(compiler.descriptor_pool())
}

/// Every .proto file below a folder but Google's, relative to it.
fn find(top: &Path, folder: &Path, found: &mut Vec<PathBuf>) -> io::Result<()> {
    for entry in fs::read_dir(folder)? {
        let path = entry?.path();
        let Ok(inner) = path.strip_prefix(top) else { continue };
        if path.is_dir() && !inner.starts_with("google") {
            find(top, &path, found)?;
        } else if path.extension().is_some_and(|e| e == "proto") {
            found.push(inner.to_owned());
        }
    }
    found.sort();
    Ok(())
}

fn present() -> Result<Surface, String> {
    let top = root().join("proto/proto");
    let mut files = Vec::new();
    find(&top, &top, &mut files).map_err(|e| format!("{}: {e}", top.display()))?;
    Ok(Surface::read(&compile(&[top], &files)?))
}

fn recorded() -> Result<Surface, String> {
    match fs::read_to_string(root().join(FILE)) {
        Ok(text) => Ok(Surface::parse(&text)),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(Surface::default()),
        Err(error) => Err(format!("{FILE}: {error}")),
    }
}

/// What a check finds.
pub fn faults() -> Result<Vec<String>, String> {
    let Difference { breaks, added } = present()?.since(&recorded()?);
    let mut faults: Vec<String> = breaks.into_iter().map(|what| format!("the API breaks: {what}")).collect();
    if !added.is_empty() {
        let first = added.first().map(String::as_str).unwrap_or_default();
        faults.push(format!(
            "{} additions to the API are not recorded ({first} …): cargo xtask golden",
            added.len()
        ));
    }
    Ok(faults)
}

/// Records the present surface; one that breaks clients only when that is meant.
pub fn record(breaking: bool) -> Result<(), String> {
    let present = present()?;
    let Difference { breaks, added } = present.since(&recorded()?);
    if !breaks.is_empty() && !breaking {
        let list = breaks.join("\n  ");
        return Err(format!(
            "this would break clients; `cargo xtask golden --breaking` records it all the same\n  {list}"
        ));
    }
    let path = root().join(FILE);
    if let Some(folder) = path.parent() {
        fs::create_dir_all(folder).map_err(|e| format!("{}: {e}", folder.display()))?;
    }
    fs::write(&path, format!("{HEAD}{}", present.text())).map_err(|e| format!("{FILE}: {e}"))?;
    println!("{FILE}: {} additions, {} breaks recorded", added.len(), breaks.len());
    Ok(())
}
