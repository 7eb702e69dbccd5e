//! The kinds that the server knows, and what is true of each.

/// Which release of the agent-sandbox controller the cluster runs, and with it which versions are served.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Generation {
    /// v0.4: v1alpha1 with `replicas`, no Suspended condition.
    Alpha,
    /// v0.5.0 to v0.5.3: v1beta1 and v1alpha1; Suspended is True as soon as the pod's deletion was asked for, and stays
    /// True after a resume.
    Early,
    /// v0.5.4 to v0.5.6: the condition is always there and True only when the pod is gone. Both versions are served, and
    /// every Sandbox has a Service.
    Late,
    /// v1.0: the same, with v1beta1 only, and a Service for those that ask for one.
    Stable,
    /// No agent-sandbox at all.
    Absent,
}

impl Generation {
    /// The versions of `agents.x-k8s.io` that are served, preferred first.
    pub fn versions(self) -> &'static [&'static str] {
        match self {
            Self::Alpha => &["v1alpha1"],
            Self::Early | Self::Late => &["v1beta1", "v1alpha1"],
            Self::Stable => &["v1beta1"],
            Self::Absent => &[],
        }
    }
}

/// The group of the Sandbox kind.
pub const GROUP: &str = "agents.x-k8s.io";

#[derive(Debug)]
pub(crate) struct Resource {
    pub(crate) group: &'static str,
    pub(crate) version: &'static str,
    pub(crate) plural: &'static str,
    pub(crate) kind: &'static str,
    pub(crate) namespaced: bool,
    /// `status` is a subresource, and `spec` counts generations.
    pub(crate) status: bool,
}

const fn of(
    group: &'static str,
    version: &'static str,
    plural: &'static str,
    kind: &'static str,
    namespaced: bool,
    status: bool,
) -> Resource {
    Resource { group, version, plural, kind, namespaced, status }
}

pub(crate) const SANDBOXES: usize = 0;
pub(crate) const PODS: usize = 1;
pub(crate) const CLAIMS: usize = 2;
pub(crate) const SERVICES: usize = 3;
pub(crate) const NAMESPACES: usize = 5;
pub(crate) const STORAGE_CLASSES: usize = 6;
pub(crate) const RUNTIME_CLASSES: usize = 7;

/// The first stands for every version of its group that is served.
pub(crate) static RESOURCES: [Resource; 9] = [
    of(GROUP, "v1beta1", "sandboxes", "Sandbox", true, true),
    of("", "v1", "pods", "Pod", true, true),
    of("", "v1", "persistentvolumeclaims", "PersistentVolumeClaim", true, true),
    of("", "v1", "services", "Service", true, true),
    of("", "v1", "events", "Event", true, false),
    of("", "v1", "namespaces", "Namespace", false, true),
    of("storage.k8s.io", "v1", "storageclasses", "StorageClass", false, false),
    of("node.k8s.io", "v1", "runtimeclasses", "RuntimeClass", false, false),
    of("", "v1", "serviceaccounts", "ServiceAccount", true, false),
];

/// Where an object is: the place of its kind in the table, its namespace (empty: of the cluster) and its name.
pub type Key = (usize, String, String);

pub(crate) fn find(group: &str, version: &str, plural: &str, generation: Generation) -> Option<usize> {
    RESOURCES.iter().position(|r| {
        let served =
            if r.group == GROUP { generation.versions().contains(&version) } else { r.version == version };
        r.group == group && r.plural == plural && served
    })
}
