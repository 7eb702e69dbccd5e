//! What rows of every kind have in common: columns of JSON, and pages.

use std::fmt::Display;

use serde::{Serialize, de::DeserializeOwned};

use super::StoreError;

/// The text of a column; `id` names its row in errors.
pub(super) fn json(
    id: impl Display,
    what: &'static str,
    value: &impl Serialize,
) -> Result<String, StoreError> {
    serde_json::to_string(value).map_err(|source| StoreError::Row { id: id.to_string(), what, source })
}

/// The opposite.
pub(super) fn parsed<T: DeserializeOwned>(
    id: impl Display,
    what: &'static str,
    text: &str,
) -> Result<T, StoreError> {
    serde_json::from_str(text).map_err(|source| StoreError::Row { id: id.to_string(), what, source })
}

/// At most `size` of the chosen rows, and whether there are more.
pub(super) fn page<T>(
    rows: impl Iterator<Item = Result<T, StoreError>>,
    size: usize,
    chosen: impl Fn(&T) -> bool,
) -> Result<(Vec<T>, bool), StoreError> {
    let mut found = Vec::new();
    for row in rows {
        let row = row?;
        if !chosen(&row) {
            continue;
        }
        if found.len() == size {
            return Ok((found, true));
        }
        found.push(row);
    }
    Ok((found, false))
}
