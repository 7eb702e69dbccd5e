//! What other crates' errors mean for whoever asked the driver.

use torpor_netpool::{LedgerError, linux::NetError};
use torpor_sandbox::DriverError;

/// An overlay's error. The text of the original names the path and what to do.
pub(crate) fn overlay(error: torpor_overlay::Error) -> DriverError {
    use torpor_overlay::Error;
    match error {
        Error::Locked { holder, ref path } => {
            DriverError::Locked { holder, detail: path.display().to_string() }
        }
        Error::BaseMissing { .. } => DriverError::BaseMissing(error.to_string()),
        Error::BaseChanged { .. } => DriverError::BaseChanged(error.to_string()),
        Error::DataMissing { .. } => DriverError::DataMissing(error.to_string()),
        Error::Corrupt { .. } => DriverError::Corrupt(error.to_string()),
        Error::NoSpace { ref source, .. } => DriverError::NoSpace(format!("{error}: {source}")),
        Error::TooSmall { .. } | Error::TooLarge { .. } => DriverError::Invalid(error.to_string()),
        Error::Unsupported { .. } | Error::Sealed { .. } => DriverError::Unsupported(error.to_string()),
        _ => DriverError::backend("prepare the workspace disk", error),
    }
}

/// A network object's error.
pub(crate) fn net(context: &str) -> impl FnOnce(NetError) -> DriverError {
    let context = context.to_owned();
    move |error| DriverError::backend(context, error)
}

/// The ledger's error.
pub(crate) fn ledger(error: LedgerError) -> DriverError {
    DriverError::backend("read the loan", error)
}
