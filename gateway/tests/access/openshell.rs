//! Who may call what of `openshell.v1`, by the same callers as in the matrix of our own interface.

use prost::Message as _;
use prost_reflect::{DescriptorPool, DynamicMessage};

const OPEN: &str = "+uu++++++";
const KNOWN: &str = "uuu++++d+";
const SEES: &str = "uuu+++nd+";
const DOES: &str = "uuud++nd+";
const OWNS: &str = "uuudd+nd+";
const ADMIN: &str = "uuuddddd+";

/// Every method that is served with a message, as JSON, that speaks of team/box; in this order, since some need what others
/// make.
const ROWS: &[(&str, &str, &str)] = &[
    ("Health", "{}", OPEN),
    ("GetCurrentUser", "{}", KNOWN),
    ("GetGatewayInfo", "{}", KNOWN),
    ("GetGatewayConfig", "{}", KNOWN),
    ("CreateSandbox", "{}", DOES),
    ("GetSandbox", r#"{"name": "box"}"#, "uuu+++n++"),
    ("ListSandboxes", "{}", SEES),
    ("CreateSandboxTemplate", r#"{"template": {"metadata": {"name": "base"}, "spec": {}}}"#, DOES),
    ("GetSandboxTemplate", r#"{"name": "base"}"#, SEES),
    ("ListSandboxTemplates", "{}", SEES),
    ("DeleteSandboxTemplate", r#"{"name": "base", "allowMissing": true}"#, DOES),
    ("CreateProvider", r#"{"provider": {"metadata": {"name": "keys"}, "type": "generic"}}"#, DOES),
    ("GetProvider", r#"{"name": "keys"}"#, SEES),
    ("ListProviders", "{}", SEES),
    ("UpdateProvider", r#"{"provider": {"metadata": {"name": "keys"}}}"#, DOES),
    ("AttachSandboxProvider", r#"{"sandbox": "box", "provider": "keys"}"#, DOES),
    ("ListSandboxProviders", r#"{"sandbox": "box"}"#, SEES),
    ("DetachSandboxProvider", r#"{"sandbox": "box", "provider": "keys"}"#, DOES),
    ("DeleteProvider", r#"{"name": "keys", "allowMissing": true}"#, DOES),
    ("ExposeService", r#"{"sandbox": "box", "name": "web", "targetPort": 8080}"#, DOES),
    ("GetService", r#"{"sandbox": "box", "name": "web"}"#, SEES),
    ("ListServices", r#"{"sandbox": "box"}"#, SEES),
    // For an outsider there is no such sandbox, so neither its service.
    ("DeleteService", r#"{"sandbox": "box", "name": "web", "allowMissing": true}"#, "uuud+++d+"),
    ("CreateSshSession", r#"{"sandbox": "box"}"#, DOES),
    // One that isn't there is nobody's.
    ("RevokeSshSession", r#"{"token": "none", "allowMissing": true}"#, KNOWN),
    ("ExecSandbox", r#"{"sandbox": "box", "command": ["true"]}"#, DOES),
    ("ExecSandboxInteractive", r#"{"start": {"sandbox": "box", "command": ["true"]}}"#, DOES),
    ("ForwardTcp", r#"{"init": {"sandbox": "box", "tcp": {"port": 80}}}"#, DOES),
    ("GetSandboxConfig", r#"{"name": "box"}"#, SEES),
    ("UpdateConfig", r#"{"sandbox": "box", "settingKey": "a", "deleteSetting": true}"#, DOES),
    ("GetSandboxLogs", r#"{"sandbox": "box"}"#, SEES),
    ("WatchSandbox", r#"{"sandbox": "box", "followStatus": true}"#, SEES),
    ("CreateWorkspace", r#"{"name": "made"}"#, ADMIN),
    ("GetWorkspace", r#"{"name": "team"}"#, SEES),
    ("ListWorkspaces", "{}", KNOWN),
    ("DeleteWorkspace", r#"{"name": "made", "allowMissing": true}"#, ADMIN),
    ("AddWorkspaceMember", r#"{"principalSubject": "uid:4243", "role": "WORKSPACE_ROLE_USER"}"#, OWNS),
    ("ListWorkspaceMembers", "{}", SEES),
    ("RemoveWorkspaceMember", r#"{"principalSubject": "uid:4243", "allowMissing": true}"#, OWNS),
    ("StopSandbox", r#"{"name": "box"}"#, "uuud++n++"),
    ("StartSandbox", r#"{"name": "box"}"#, DOES),
    ("DeleteSandbox", r#"{"name": "nobody"}"#, "uuudnnndn"),
];

/// As the matrix of our own interface.
pub fn matrix() -> Vec<(String, Vec<u8>, &'static str)> {
    let pool = DescriptorPool::decode(torpor_proto::DESCRIPTORS).unwrap();
    let service = pool.get_service_by_name("openshell.v1.OpenShell").unwrap();
    let row = |(name, json, expected): &(&str, &str, &'static str)| {
        let method = service.methods().find(|method| method.name() == *name).unwrap();
        let mut json = serde_json::Deserializer::from_str(json);
        let message = DynamicMessage::deserialize(method.input(), &mut json).unwrap();
        (format!("openshell.v1.OpenShell/{name}"), message.encode_to_vec(), *expected)
    };
    ROWS.iter().map(row).collect()
}
