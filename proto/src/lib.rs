//! The wire: generated from `proto/proto/*.proto`, nothing else.
#![allow(missing_docs, reason = "generated code; the .proto files carry the comments")]
#![allow(clippy::all, clippy::pedantic, reason = "generated code")]

/// The API that the CLI and the SDKs use.
pub mod v1 {
    tonic::include_proto!("torpor.v1");
}

/// What host and guest agent say to each other.
pub mod agent {
    /// Version 1.
    pub mod v1 {
        tonic::include_proto!("torpor.agent.v1");
    }
}

/// The compiled descriptors of every file, for gRPC reflection.
pub const DESCRIPTORS: &[u8] = include_bytes!(concat!(env!("OUT_DIR"), "/descriptors.bin"));
