//! The drivers of this gateway: one match arm each.

use std::{collections::BTreeMap, sync::Arc};

use torpor_sandbox::ComputeDriver;

/// By name.
pub struct Drivers {
    by_name: BTreeMap<String, Arc<dyn ComputeDriver>>,
    default: String,
}

impl Drivers {
    /// These; `default` is used when a request names none.
    pub fn new(drivers: impl IntoIterator<Item = Arc<dyn ComputeDriver>>, default: &str) -> Self {
        let by_name = drivers.into_iter().map(|d| (d.capabilities().name, d)).collect();
        Self { by_name, default: default.to_owned() }
    }

    /// The driver with this name.
    pub fn get(&self, name: &str) -> Option<Arc<dyn ComputeDriver>> {
        self.by_name.get(name).cloned()
    }

    /// Name of the default driver.
    pub fn default_name(&self) -> &str {
        &self.default
    }

    /// Every name.
    pub fn names(&self) -> Vec<&str> {
        self.by_name.keys().map(String::as_str).collect()
    }

    /// Every driver.
    pub fn all(&self) -> impl Iterator<Item = &Arc<dyn ComputeDriver>> {
        self.by_name.values()
    }
}
