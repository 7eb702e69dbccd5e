//! Which calls there are, and who may make them: one table. What isn't in it is refused.

use crate::store::Role;

/// What a caller needs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Need {
    /// Nothing.
    Nothing,
    /// To be known.
    Identity,
    /// This role in the workspace that is spoken of.
    Role(Role),
    /// To be an administrator of the gateway.
    Admin,
}

/// A method's class.
#[derive(Clone, Copy, Debug)]
pub struct Method {
    /// As in the path of a call: "torpor.v1.Sandboxes/Create".
    pub path: &'static str,
    /// What its caller needs.
    pub need: Need,
    /// It changes something, and is written to the audit log.
    pub changes: bool,
    /// What runs in a sandbox may call it for its own one.
    pub from_within: bool,
}

const fn sees(path: &'static str) -> Method {
    Method { path, need: Need::Role(Role::Viewer), changes: false, from_within: false }
}

const fn does(path: &'static str) -> Method {
    Method { path, need: Need::Role(Role::Editor), changes: true, from_within: false }
}

/// As `sees`, for those that read what is inside a sandbox.
const fn reads(path: &'static str) -> Method {
    Method { path, need: Need::Role(Role::Editor), changes: false, from_within: false }
}

const fn owns(path: &'static str) -> Method {
    Method { path, need: Need::Role(Role::Owner), changes: true, from_within: false }
}

const fn admin(path: &'static str) -> Method {
    Method { path, need: Need::Admin, changes: true, from_within: false }
}

const fn known(path: &'static str) -> Method {
    Method { path, need: Need::Identity, changes: false, from_within: false }
}

const fn open(path: &'static str) -> Method {
    Method { path, need: Need::Nothing, changes: false, from_within: true }
}

const fn within(method: Method) -> Method {
    Method { from_within: true, ..method }
}

/// Every method that is served.
pub const METHODS: &[Method] = &[
    does("torpor.v1.Sandboxes/Create"),
    within(sees("torpor.v1.Sandboxes/Get")),
    sees("torpor.v1.Sandboxes/List"),
    sees("torpor.v1.Sandboxes/Watch"),
    within(does("torpor.v1.Sandboxes/Suspend")),
    does("torpor.v1.Sandboxes/Resume"),
    within(does("torpor.v1.Sandboxes/Stop")),
    does("torpor.v1.Sandboxes/Start"),
    does("torpor.v1.Sandboxes/Delete"),
    does("torpor.v1.Sandboxes/Exec"),
    does("torpor.v1.Sandboxes/Attach"),
    sees("torpor.v1.Sandboxes/Logs"),
    within(sees("torpor.v1.Sandboxes/History")),
    does("torpor.v1.Sandboxes/Update"),
    does("torpor.v1.Sandboxes/ResumePendingUpdate"),
    does("torpor.v1.Sandboxes/SetEgress"),
    does("torpor.v1.Sandboxes/Expose"),
    sees("torpor.v1.Sandboxes/ListExposed"),
    does("torpor.v1.Sandboxes/Unexpose"),
    does("torpor.v1.Sandboxes/Forward"),
    does("torpor.v1.Sandboxes/Ssh"),
    sees("torpor.v1.Sandboxes/GetDisk"),
    does("torpor.v1.Sandboxes/GrowDisk"),
    does("torpor.v1.Sandboxes/CompactDisk"),
    reads("torpor.v1.Sandboxes/ExportDisk"),
    does("torpor.v1.Sandboxes/CreateSshSession"),
    does("torpor.v1.Sandboxes/RevokeSshSession"),
    does("torpor.v1.Files/Upload"),
    reads("torpor.v1.Files/Download"),
    reads("torpor.v1.Files/Stat"),
    reads("torpor.v1.Files/List"),
    does("torpor.v1.Files/MakeDirectory"),
    does("torpor.v1.Files/Remove"),
    does("torpor.v1.Templates/Create"),
    sees("torpor.v1.Templates/Get"),
    sees("torpor.v1.Templates/List"),
    does("torpor.v1.Templates/Update"),
    does("torpor.v1.Templates/Delete"),
    known("torpor.v1.Images/List"),
    admin("torpor.v1.Images/Build"),
    admin("torpor.v1.Images/Pull"),
    admin("torpor.v1.Images/Import"),
    admin("torpor.v1.Images/Remove"),
    admin("torpor.v1.Workspaces/Create"),
    sees("torpor.v1.Workspaces/Get"),
    known("torpor.v1.Workspaces/List"),
    admin("torpor.v1.Workspaces/Delete"),
    owns("torpor.v1.Workspaces/SetMember"),
    owns("torpor.v1.Workspaces/RemoveMember"),
    sees("torpor.v1.Workspaces/ListMembers"),
    within(known("torpor.v1.Access/WhoAmI")),
    owns("torpor.v1.Access/CreateToken"),
    owns("torpor.v1.Access/ListTokens"),
    owns("torpor.v1.Access/RevokeToken"),
    known("torpor.v1.Gateway/Info"),
    open("torpor.v1.Gateway/Health"),
    open("openshell.v1.OpenShell/Health"),
    known("openshell.v1.OpenShell/GetCurrentUser"),
    known("openshell.v1.OpenShell/GetGatewayInfo"),
    does("openshell.v1.OpenShell/CreateSandbox"),
    within(sees("openshell.v1.OpenShell/GetSandbox")),
    sees("openshell.v1.OpenShell/ListSandboxes"),
    does("openshell.v1.OpenShell/CreateSandboxTemplate"),
    sees("openshell.v1.OpenShell/GetSandboxTemplate"),
    sees("openshell.v1.OpenShell/ListSandboxTemplates"),
    does("openshell.v1.OpenShell/DeleteSandboxTemplate"),
    sees("openshell.v1.OpenShell/ListSandboxProviders"),
    does("openshell.v1.OpenShell/AttachSandboxProvider"),
    does("openshell.v1.OpenShell/DetachSandboxProvider"),
    does("openshell.v1.OpenShell/DeleteSandbox"),
    within(does("openshell.v1.OpenShell/StopSandbox")),
    does("openshell.v1.OpenShell/StartSandbox"),
    does("openshell.v1.OpenShell/CreateSshSession"),
    does("openshell.v1.OpenShell/ExposeService"),
    sees("openshell.v1.OpenShell/GetService"),
    sees("openshell.v1.OpenShell/ListServices"),
    does("openshell.v1.OpenShell/DeleteService"),
    does("openshell.v1.OpenShell/RevokeSshSession"),
    does("openshell.v1.OpenShell/ExecSandbox"),
    does("openshell.v1.OpenShell/ForwardTcp"),
    does("openshell.v1.OpenShell/ExecSandboxInteractive"),
    does("openshell.v1.OpenShell/CreateProvider"),
    sees("openshell.v1.OpenShell/GetProvider"),
    sees("openshell.v1.OpenShell/ListProviders"),
    does("openshell.v1.OpenShell/UpdateProvider"),
    does("openshell.v1.OpenShell/DeleteProvider"),
    sees("openshell.v1.OpenShell/GetSandboxConfig"),
    known("openshell.v1.OpenShell/GetGatewayConfig"),
    does("openshell.v1.OpenShell/UpdateConfig"),
    sees("openshell.v1.OpenShell/GetSandboxLogs"),
    sees("openshell.v1.OpenShell/WatchSandbox"),
    admin("openshell.v1.OpenShell/CreateWorkspace"),
    sees("openshell.v1.OpenShell/GetWorkspace"),
    known("openshell.v1.OpenShell/ListWorkspaces"),
    admin("openshell.v1.OpenShell/DeleteWorkspace"),
    owns("openshell.v1.OpenShell/AddWorkspaceMember"),
    owns("openshell.v1.OpenShell/RemoveWorkspaceMember"),
    sees("openshell.v1.OpenShell/ListWorkspaceMembers"),
    open("grpc.health.v1.Health/Check"),
    open("grpc.health.v1.Health/Watch"),
    open("grpc.health.v1.Health/List"),
    known("grpc.reflection.v1.ServerReflection/ServerReflectionInfo"),
    // What older clients ask for.
    known("grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo"),
];

/// The method of a path, "/torpor.v1.Sandboxes/Create".
pub fn of_path(path: &str) -> Option<&'static Method> {
    let path = path.strip_prefix('/')?;
    METHODS.iter().find(|method| method.path == path)
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use prost::Message as _;

    use super::*;

    #[test]
    fn every_method_that_is_served_is_in_the_table_once() {
        let all = prost_types::FileDescriptorSet::decode(torpor_proto::DESCRIPTORS).unwrap();
        let mut declared = BTreeSet::new();
        for file in &all.file {
            for service in &file.service {
                for method in &service.method {
                    declared.insert(format!("{}.{}/{}", file.package(), service.name(), method.name()));
                }
            }
        }
        // The guest's own interface is served by agents, not by the gateway.
        declared.retain(|path| !path.starts_with("torpor.agent."));
        let listed: BTreeSet<String> = METHODS.iter().map(|method| method.path.to_owned()).collect();
        assert_eq!(listed.len(), METHODS.len(), "a method is listed twice");
        let ours = |path: &&String| !path.starts_with("grpc.");
        let missing: Vec<_> = declared.difference(&listed).collect();
        let stale: Vec<_> = listed.difference(&declared).filter(ours).collect();
        assert!(
            missing.is_empty() && stale.is_empty(),
            "without a class: {missing:?}; not declared: {stale:?}"
        );
    }
}
