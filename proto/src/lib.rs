//! The wire: generated from `proto/proto/*.proto`, and nothing else but a type for messages that aren't understood.
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

#[cfg(feature = "openshell")]
pub mod opaque;

/// The part of the public `openshell` interface that clients need of a gateway.
#[cfg(feature = "openshell")]
pub mod openshell {
    /// The service.
    pub mod v1 {
        tonic::include_proto!("openshell.v1");
    }

    /// What objects have in common.
    pub mod datamodel {
        /// Version 1.
        pub mod v1 {
            tonic::include_proto!("openshell.datamodel.v1");
        }
    }

    /// Policies and settings.
    pub mod sandbox {
        /// Version 1.
        pub mod v1 {
            tonic::include_proto!("openshell.sandbox.v1");
        }
    }
}

/// The compiled descriptors of every file, for gRPC reflection.
pub const DESCRIPTORS: &[u8] = include_bytes!(concat!(env!("OUT_DIR"), "/descriptors.bin"));
