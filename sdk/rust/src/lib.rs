//! Rust client of a Torpor gateway.
//!
//! [`Client`] has one method for each verb. Lists follow their page tokens to the end, waits are bound to the id and end
//! as soon as the sandbox can't come to the wanted phase any more, and errors keep the reason, the phase and the next
//! command that the gateway sent along. The messages themselves are the generated ones, in [`v1`].
//!
//! ```no_run
//! # async fn example() -> Result<(), torpor_sdk::Error> {
//! use torpor_sdk::{Client, v1};
//!
//! let client = Client::connect("unix:///run/torpor/gateway.sock").await?;
//! let created = client.create(v1::CreateSandboxRequest::default()).await?;
//! let ready = client.wait(&created.id, v1::Phase::Ready, None).await?;
//! client.suspend(&ready.id, v1::Keep::Disk).await?;
//! client.wait(&ready.id, v1::Phase::Suspended, None).await?;
//! # Ok(())
//! # }
//! ```

#[macro_use]
mod client;
mod access;
mod disk;
mod endpoint;
mod error;
mod exec;
mod files;
mod network;
pub mod phase;
mod retry;
mod update;
mod wait;
mod watch;

pub use client::Client;
pub use disk::{DiskExport, DiskPiece};
pub use endpoint::{DEFAULT_ENDPOINT, Options, Tls};
pub use error::{ApiError, Error};
pub use exec::{Exec, ExecInput, ExecOutput, Output};
pub use files::{Download, FilePiece, LARGEST_PIECE, Upload};
pub use network::{Forward, ForwardInput, ForwardOutput, SshInput};
pub use retry::{Retry, request_id};
pub use tonic::Code;
pub use torpor_proto::v1;
pub use wait::Goal;
pub use watch::{Event, Watch};
