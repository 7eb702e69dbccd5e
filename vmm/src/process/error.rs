//! Why a VM can't be started.

use std::error::Error;
use std::io;
use std::os::fd::RawFd;
use std::path::PathBuf;

use torpor_vmm_api::ConfigError;
use torpor_vmm_jail::JailError;

/// Everything that can go wrong before the guest runs. The causes are in `source()`: [`with_causes`].
#[derive(Debug, thiserror::Error)]
pub(super) enum StartError {
    #[error("read the configuration from {from}")]
    ReadConfig { from: String, source: io::Error },
    #[error("the configuration has more than {0} bytes")]
    LongConfig(u64),
    #[error("the configuration can't be understood")]
    Json(#[source] serde_json::Error),
    #[error(transparent)]
    Config(#[from] ConfigError),
    #[error("the configuration's {field} is descriptor {fd}, which isn't open")]
    Descriptor { field: String, fd: RawFd, source: io::Error },
    #[error("open the configuration's {field} {}", path.display())]
    Open { field: String, path: PathBuf, source: io::Error },
    #[error("make the {what} socket {}", path.display())]
    Socket { what: &'static str, path: PathBuf, source: io::Error },
    #[error("open the overlay")]
    Overlay(#[from] torpor_overlay::Error),
    #[error(transparent)]
    Jail(#[from] JailError),
    #[error("{what}")]
    Host { what: &'static str, source: io::Error },
    #[error("make the {what} device")]
    Device { what: String, source: io::Error },
    #[error("build the machine")]
    Machine(#[source] Box<dyn Error + Send + Sync>),
}

impl StartError {
    /// For a failed call: what was attempted.
    pub(super) fn host<E: Into<io::Error>>(what: &'static str) -> impl FnOnce(E) -> Self {
        move |source| Self::Host { what, source: source.into() }
    }
}

/// An error and its causes in one line. A cause that its effect's text ends with already isn't said twice.
pub(super) fn with_causes(error: &dyn Error) -> String {
    let mut text = error.to_string();
    let mut next = error.source();
    while let Some(cause) = next {
        let said = cause.to_string();
        if !text.ends_with(&said) {
            text += ": ";
            text += &said;
        }
        next = cause.source();
    }
    text.replace('\n', " ")
}
