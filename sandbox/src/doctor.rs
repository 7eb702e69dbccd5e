//! What a look at a backend finds.

use serde::Serialize;

/// How bad a finding is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Level {
    /// As it should be.
    Ok,
    /// Works, with less.
    Warn,
    /// Sandboxes can't run.
    Fail,
}

/// One thing that was looked at.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Finding {
    /// What ("engine", "agent-sandbox").
    pub name: &'static str,
    /// How bad.
    pub level: Level,
    /// What was found.
    pub finding: String,
    /// What to do; empty when nothing is to be done.
    pub advice: String,
}

impl Finding {
    /// Of all its parts.
    pub fn new(
        name: &'static str,
        level: Level,
        finding: impl Into<String>,
        advice: impl Into<String>,
    ) -> Self {
        Self { name, level, finding: finding.into(), advice: advice.into() }
    }
}
