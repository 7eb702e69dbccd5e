//! Generates the Rust code from the .proto files with protox, so that no protoc is needed.

use std::{env, error::Error, path::PathBuf};

use prost::Message as _;

const FILES: [&str; 2] = ["torpor/v1/torpor.proto", "torpor/agent/v1/agent.proto"];

fn main() -> Result<(), Box<dyn Error>> {
    println!("cargo:rerun-if-changed=proto");
    let descriptors = protox::compile(FILES, ["proto"])?;
    let out = PathBuf::from(env::var("OUT_DIR")?);
    // Reflection serves exactly what was compiled.
    std::fs::write(out.join("descriptors.bin"), descriptors.encode_to_vec())?;
    tonic_prost_build::configure().bytes(".").compile_fds(descriptors)?;
    Ok(())
}
