//! The rows of `openshell.v1`, and of the services that every gRPC server has.

use prost::Message;
use torpor_proto::openshell::{datamodel::v1 as dm, sandbox::v1 as policies, v1 as os};

/// Rights as in torpor.v1: to see, to do, to own; what an administrator alone may; what everybody who is known may; what
/// strangers may.
const SEES: &str = "uuu+++nd+";
const DOES: &str = "uuud++nd+";
const OWNS: &str = "uuudd+nd+";
const ADMIN: &str = "uuuddddd+";
const KNOWN: &str = "uuu++++d+";
const OPEN: &str = "+uu++++++";

fn bytes<M: Message>(message: M) -> Vec<u8> {
    message.encode_to_vec()
}

fn meta(name: &str) -> Option<dm::ObjectMeta> {
    Some(dm::ObjectMeta { name: name.into(), ..Default::default() })
}

fn provider() -> Option<dm::Provider> {
    Some(dm::Provider { metadata: meta("keys"), ..Default::default() })
}

/// Method, message, and what becomes of it, as in [`super::matrix`].
pub fn rows() -> Vec<(&'static str, Vec<u8>, &'static str)> {
    let mut rows = sandboxes();
    rows.extend(records());
    rows.extend([
        ("grpc.health.v1.Health/Check", Vec::new(), OPEN),
        ("grpc.health.v1.Health/Watch", Vec::new(), OPEN),
        ("grpc.health.v1.Health/List", Vec::new(), OPEN),
        // list_services
        ("grpc.reflection.v1.ServerReflection/ServerReflectionInfo", vec![0x3a, 0], KNOWN),
        ("grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo", vec![0x3a, 0], KNOWN),
    ]);
    rows
}

fn sandboxes() -> Vec<(&'static str, Vec<u8>, &'static str)> {
    let boxed = || "box".to_owned();
    let exec =
        os::ExecSandboxRequest { sandbox: boxed(), command: vec!["true".into()], ..Default::default() };
    let interactive = os::exec_sandbox_input::Payload::Start(exec.clone());
    let init = os::TcpForwardInit {
        sandbox: boxed(),
        workspace: "team".into(),
        target: Some(os::tcp_forward_init::Target::Tcp(os::TcpRelayTarget {
            port: 80,
            ..Default::default()
        })),
        ..Default::default()
    };
    let forward = os::tcp_forward_frame::Payload::Init(init);
    vec![
        ("openshell.v1.OpenShell/CreateSandbox", bytes(os::CreateSandboxRequest::default()), DOES),
        (
            "openshell.v1.OpenShell/GetSandbox",
            bytes(os::GetSandboxRequest { name: boxed(), ..Default::default() }),
            "uuu+++n++",
        ),
        ("openshell.v1.OpenShell/ListSandboxes", Vec::new(), SEES),
        (
            "openshell.v1.OpenShell/StopSandbox",
            bytes(os::StopSandboxRequest { name: boxed(), ..Default::default() }),
            "uuud++n++",
        ),
        (
            "openshell.v1.OpenShell/StartSandbox",
            bytes(os::StartSandboxRequest { name: boxed(), ..Default::default() }),
            DOES,
        ),
        // Of one that isn't there: the others need theirs.
        (
            "openshell.v1.OpenShell/DeleteSandbox",
            bytes(os::DeleteSandboxRequest { name: "none".into(), ..Default::default() }),
            "uuudnnndn",
        ),
        ("openshell.v1.OpenShell/ExecSandbox", bytes(exec), DOES),
        (
            "openshell.v1.OpenShell/ExecSandboxInteractive",
            bytes(os::ExecSandboxInput { payload: Some(interactive) }),
            DOES,
        ),
        ("openshell.v1.OpenShell/ForwardTcp", bytes(os::TcpForwardFrame { payload: Some(forward) }), DOES),
        (
            "openshell.v1.OpenShell/CreateSshSession",
            bytes(os::CreateSshSessionRequest { sandbox: boxed(), ..Default::default() }),
            DOES,
        ),
        // Of a session that nobody has.
        (
            "openshell.v1.OpenShell/RevokeSshSession",
            bytes(os::RevokeSshSessionRequest { token: "none".into(), allow_missing: false }),
            "uuunnnndn",
        ),
        (
            "openshell.v1.OpenShell/WatchSandbox",
            bytes(os::WatchSandboxRequest { sandbox: boxed(), follow_status: true, ..Default::default() }),
            SEES,
        ),
        (
            "openshell.v1.OpenShell/GetSandboxLogs",
            bytes(os::GetSandboxLogsRequest { sandbox: boxed(), ..Default::default() }),
            SEES,
        ),
        (
            "openshell.v1.OpenShell/ExposeService",
            bytes(os::ExposeServiceRequest {
                sandbox: boxed(),
                name: "web".into(),
                target_port: 8080,
                ..Default::default()
            }),
            DOES,
        ),
        (
            "openshell.v1.OpenShell/GetService",
            bytes(os::GetServiceRequest { sandbox: boxed(), name: "web".into(), ..Default::default() }),
            SEES,
        ),
        ("openshell.v1.OpenShell/ListServices", Vec::new(), SEES),
        (
            "openshell.v1.OpenShell/DeleteService",
            bytes(os::DeleteServiceRequest { sandbox: boxed(), name: "other".into(), ..Default::default() }),
            "uuudnnndn",
        ),
        (
            "openshell.v1.OpenShell/UpdateConfig",
            bytes(os::UpdateConfigRequest {
                sandbox: boxed(),
                setting_key: "k".into(),
                setting_value: Some(Default::default()),
                ..Default::default()
            }),
            DOES,
        ),
        (
            "openshell.v1.OpenShell/GetSandboxConfig",
            bytes(policies::GetSandboxConfigRequest { name: boxed(), ..Default::default() }),
            SEES,
        ),
        (
            "openshell.v1.OpenShell/ListSandboxProviders",
            bytes(os::ListSandboxProvidersRequest { sandbox: boxed(), ..Default::default() }),
            SEES,
        ),
    ]
}

fn records() -> Vec<(&'static str, Vec<u8>, &'static str)> {
    let template = os::SandboxWorkloadTemplate { metadata: meta("theirs"), ..Default::default() };
    let member = || "uid:4243".to_owned();
    vec![
        ("openshell.v1.OpenShell/Health", Vec::new(), OPEN),
        ("openshell.v1.OpenShell/GetCurrentUser", Vec::new(), KNOWN),
        ("openshell.v1.OpenShell/GetGatewayInfo", Vec::new(), KNOWN),
        ("openshell.v1.OpenShell/GetGatewayConfig", Vec::new(), KNOWN),
        (
            "openshell.v1.OpenShell/CreateSandboxTemplate",
            bytes(os::CreateSandboxTemplateRequest { template: Some(template), ..Default::default() }),
            DOES,
        ),
        (
            "openshell.v1.OpenShell/GetSandboxTemplate",
            bytes(os::GetSandboxTemplateRequest { name: "theirs".into(), ..Default::default() }),
            SEES,
        ),
        ("openshell.v1.OpenShell/ListSandboxTemplates", Vec::new(), SEES),
        (
            "openshell.v1.OpenShell/DeleteSandboxTemplate",
            bytes(os::DeleteSandboxTemplateRequest {
                name: "theirs".into(),
                allow_missing: true,
                ..Default::default()
            }),
            DOES,
        ),
        (
            "openshell.v1.OpenShell/CreateProvider",
            bytes(os::CreateProviderRequest { provider: provider(), ..Default::default() }),
            DOES,
        ),
        (
            "openshell.v1.OpenShell/GetProvider",
            bytes(os::GetProviderRequest { name: "keys".into(), ..Default::default() }),
            SEES,
        ),
        ("openshell.v1.OpenShell/ListProviders", Vec::new(), SEES),
        (
            "openshell.v1.OpenShell/UpdateProvider",
            bytes(os::UpdateProviderRequest { provider: provider(), ..Default::default() }),
            DOES,
        ),
        (
            "openshell.v1.OpenShell/AttachSandboxProvider",
            bytes(os::AttachSandboxProviderRequest {
                sandbox: "box".into(),
                provider: "keys".into(),
                ..Default::default()
            }),
            DOES,
        ),
        (
            "openshell.v1.OpenShell/DetachSandboxProvider",
            bytes(os::DetachSandboxProviderRequest {
                sandbox: "box".into(),
                provider: "keys".into(),
                ..Default::default()
            }),
            DOES,
        ),
        (
            "openshell.v1.OpenShell/DeleteProvider",
            bytes(os::DeleteProviderRequest {
                name: "keys".into(),
                allow_missing: true,
                ..Default::default()
            }),
            DOES,
        ),
        (
            "openshell.v1.OpenShell/CreateWorkspace",
            bytes(os::CreateWorkspaceRequest { name: "third".into(), ..Default::default() }),
            ADMIN,
        ),
        ("openshell.v1.OpenShell/GetWorkspace", bytes(os::GetWorkspaceRequest { name: "team".into() }), SEES),
        ("openshell.v1.OpenShell/ListWorkspaces", Vec::new(), KNOWN),
        (
            "openshell.v1.OpenShell/DeleteWorkspace",
            bytes(os::DeleteWorkspaceRequest { name: "third".into(), ..Default::default() }),
            ADMIN,
        ),
        (
            "openshell.v1.OpenShell/AddWorkspaceMember",
            bytes(os::AddWorkspaceMemberRequest {
                principal_subject: member(),
                role: os::WorkspaceRole::User.into(),
                ..Default::default()
            }),
            OWNS,
        ),
        (
            "openshell.v1.OpenShell/RemoveWorkspaceMember",
            bytes(os::RemoveWorkspaceMemberRequest {
                principal_subject: member(),
                allow_missing: true,
                ..Default::default()
            }),
            OWNS,
        ),
        ("openshell.v1.OpenShell/ListWorkspaceMembers", Vec::new(), SEES),
    ]
}
