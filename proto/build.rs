//! Generates the Rust code from the .proto files with protox, so that no protoc is needed.

use std::{env, error::Error, path::PathBuf};

const FILES: [&str; 3] =
    ["torpor/v1/torpor.proto", "torpor/agent/v1/agent.proto", "openshell/v1/openshell.proto"];

/// Messages of `openshell.v1` that are kept as they were sent.
const OPAQUE: [&str; 3] = [
    ".openshell.sandbox.v1.SandboxPolicy",
    ".openshell.sandbox.v1.SettingValue",
    ".openshell.v1.PolicyMergeOperation",
];

fn main() -> Result<(), Box<dyn Error>> {
    println!("cargo:rerun-if-changed=proto");
    let mut compiler = protox::Compiler::new(["proto"])?;
    compiler.include_imports(true).include_source_info(true).open_files(FILES)?;
    let out = PathBuf::from(env::var("OUT_DIR")?);
    // Reflection, REST and the OpenAPI document serve exactly what was compiled, comments and HTTP rules included. (The
    // typed form below has no place for options of other packages and would lose the rules.)
    std::fs::write(out.join("descriptors.bin"), compiler.encode_file_descriptor_set())?;
    let mut descriptors = compiler.file_descriptor_set();
    descriptors.file.retain(|file| file.package() != "google.api");
    // In order, so that the same message always has the same bytes.
    let mut build = tonic_prost_build::configure().bytes(".").btree_map(".openshell");
    for message in OPAQUE {
        build = build.extern_path(message, "crate::opaque::Opaque");
    }
    build.compile_fds(descriptors)?;
    Ok(())
}
