//! Who may call what, as it should be: said once more, apart from the gateway's own table.

use prost::Message as _;
use torpor_proto::v1;

/// Every method with a message that speaks of team/box, and what becomes of it for callers with: nothing, a wrong token,
/// an expired one, and those of a viewer, an editor and an owner of the workspace, an owner of another one, the
/// sandbox itself, an administrator. u: not known, d: denied, n: not found, +: let in.
pub fn matrix() -> Vec<(&'static str, Vec<u8>, &'static str)> {
    let target = || Some(v1::Target { sandbox: "box".into(), ..Default::default() });
    let sandbox = || "box".to_owned();
    let attach = v1::AttachStart { sandbox: sandbox(), ..Default::default() };
    let exec = v1::ExecStart { sandbox: sandbox(), argv: vec!["true".into()], ..Default::default() };
    let forward = v1::ForwardStart { sandbox: sandbox(), port: 80 };
    let member = || "uid:4242".to_owned();
    let upload = v1::UploadStart { sandbox: sandbox(), path: "/x".into(), ..Default::default() };
    vec![
        ("torpor.v1.Sandboxes/Create", v1::CreateSandboxRequest::default().encode_to_vec(), "uuud++nd+"),
        (
            "torpor.v1.Sandboxes/Get",
            v1::GetSandboxRequest { sandbox: sandbox() }.encode_to_vec(),
            "uuu+++n++",
        ),
        ("torpor.v1.Sandboxes/List", v1::ListSandboxesRequest::default().encode_to_vec(), "uuu+++nd+"),
        ("torpor.v1.Sandboxes/Watch", v1::WatchSandboxesRequest::default().encode_to_vec(), "uuu+++nd+"),
        (
            "torpor.v1.Sandboxes/Suspend",
            v1::SuspendRequest { target: target(), keep: 0 }.encode_to_vec(),
            "uuud++n++",
        ),
        (
            "torpor.v1.Sandboxes/Resume",
            v1::ResumeRequest { target: target(), ..Default::default() }.encode_to_vec(),
            "uuud++nd+",
        ),
        ("torpor.v1.Sandboxes/Stop", v1::StopRequest { target: target() }.encode_to_vec(), "uuud++n++"),
        ("torpor.v1.Sandboxes/Start", v1::StartRequest { target: target() }.encode_to_vec(), "uuud++nd+"),
        (
            "torpor.v1.Sandboxes/Exec",
            v1::ExecInput { kind: Some(v1::exec_input::Kind::Start(exec)) }.encode_to_vec(),
            "uuud++nd+",
        ),
        (
            "torpor.v1.Sandboxes/Attach",
            v1::ExecInput { kind: Some(v1::exec_input::Kind::Attach(attach)) }.encode_to_vec(),
            "uuud++nd+",
        ),
        (
            "torpor.v1.Sandboxes/Logs",
            v1::LogsRequest { sandbox: sandbox(), ..Default::default() }.encode_to_vec(),
            "uuu+++nd+",
        ),
        (
            "torpor.v1.Sandboxes/History",
            v1::HistoryRequest { sandbox: sandbox(), ..Default::default() }.encode_to_vec(),
            "uuu+++n++",
        ),
        (
            "torpor.v1.Sandboxes/SetEgress",
            v1::SetEgressRequest { target: target(), egress: None }.encode_to_vec(),
            "uuud++nd+",
        ),
        (
            "torpor.v1.Sandboxes/Expose",
            v1::ExposeRequest { sandbox: sandbox(), port: 80, ..Default::default() }.encode_to_vec(),
            "uuud++nd+",
        ),
        ("torpor.v1.Sandboxes/ListExposed", v1::ListExposedRequest::default().encode_to_vec(), "uuu+++nd+"),
        (
            "torpor.v1.Sandboxes/Unexpose",
            v1::UnexposeRequest { sandbox: sandbox(), port: 81, allow_missing: true }.encode_to_vec(),
            "uuud++nd+",
        ),
        (
            "torpor.v1.Sandboxes/Forward",
            v1::ForwardInput { kind: Some(v1::forward_input::Kind::Start(forward)) }.encode_to_vec(),
            "uuud++nd+",
        ),
        (
            "torpor.v1.Sandboxes/GetDisk",
            v1::GetDiskRequest { sandbox: sandbox(), check: false }.encode_to_vec(),
            "uuu+++nd+",
        ),
        (
            "torpor.v1.Sandboxes/GrowDisk",
            v1::GrowDiskRequest { target: target(), size_bytes: 1 }.encode_to_vec(),
            "uuud++nd+",
        ),
        (
            "torpor.v1.Sandboxes/CompactDisk",
            v1::CompactDiskRequest { target: target(), rewrite: false }.encode_to_vec(),
            "uuud++nd+",
        ),
        (
            "torpor.v1.Sandboxes/ExportDisk",
            v1::ExportDiskRequest { sandbox: sandbox(), format: 0 }.encode_to_vec(),
            "uuud++nd+",
        ),
        ("torpor.v1.Images/List", Vec::new(), "uuu++++d+"),
        (
            "torpor.v1.Images/Build",
            v1::BuildImageRequest { recipe: "none".into(), ..Default::default() }.encode_to_vec(),
            "uuuddddd+",
        ),
        (
            "torpor.v1.Images/Pull",
            v1::PullImageRequest { driver: "sim".into(), ..Default::default() }.encode_to_vec(),
            "uuuddddd+",
        ),
        (
            "torpor.v1.Images/Import",
            v1::ImportImageRequest { name: "x".into(), path: "relative".into() }.encode_to_vec(),
            "uuuddddd+",
        ),
        (
            "torpor.v1.Images/Remove",
            v1::RemoveImageRequest { image: "none".into(), allow_missing: true }.encode_to_vec(),
            "uuuddddd+",
        ),
        (
            "torpor.v1.Workspaces/Create",
            v1::CreateWorkspaceRequest { name: "third".into(), ..Default::default() }.encode_to_vec(),
            "uuuddddd+",
        ),
        ("torpor.v1.Workspaces/Get", Vec::new(), "uuu+++nd+"),
        ("torpor.v1.Workspaces/List", Vec::new(), "uuu++++d+"),
        (
            "torpor.v1.Workspaces/Delete",
            v1::DeleteWorkspaceRequest { name: "third".into(), allow_missing: true }.encode_to_vec(),
            "uuuddddd+",
        ),
        (
            "torpor.v1.Workspaces/SetMember",
            v1::SetMemberRequest { subject: member(), role: v1::Role::Viewer.into(), ..Default::default() }
                .encode_to_vec(),
            "uuudd+nd+",
        ),
        (
            "torpor.v1.Workspaces/RemoveMember",
            v1::RemoveMemberRequest { subject: member(), allow_missing: true, ..Default::default() }
                .encode_to_vec(),
            "uuudd+nd+",
        ),
        ("torpor.v1.Workspaces/ListMembers", Vec::new(), "uuu+++nd+"),
        ("torpor.v1.Access/WhoAmI", Vec::new(), "uuu++++++"),
        (
            "torpor.v1.Access/CreateToken",
            v1::CreateTokenRequest { name: "t".into(), role: v1::Role::Viewer.into(), ..Default::default() }
                .encode_to_vec(),
            "uuudd+nd+",
        ),
        ("torpor.v1.Access/ListTokens", Vec::new(), "uuudd+nd+"),
        (
            "torpor.v1.Access/RevokeToken",
            v1::RevokeTokenRequest { id: "none".into(), allow_missing: true }.encode_to_vec(),
            "uuudd+nd+",
        ),
        (
            "torpor.v1.Sandboxes/Update",
            v1::UpdateSandboxRequest { target: target(), ..Default::default() }.encode_to_vec(),
            "uuud++nd+",
        ),
        (
            "torpor.v1.Sandboxes/ResumePendingUpdate",
            v1::ResumePendingUpdateRequest { target: target(), abandon: false }.encode_to_vec(),
            "uuud++nd+",
        ),
        (
            "torpor.v1.Sandboxes/CreateSshSession",
            v1::CreateSshSessionRequest {
                sandbox: sandbox(),
                public_key:
                    "ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAAIO+EWVDaX1vX3HCNILPRmszrHANdFrsya0DT3xI2xswR".into(),
                lifetime: None,
            }
            .encode_to_vec(),
            "uuud++nd+",
        ),
        // Of a session that nobody has.
        (
            "torpor.v1.Sandboxes/RevokeSshSession",
            v1::RevokeSshSessionRequest { token: "none".into(), allow_missing: false }.encode_to_vec(),
            "uuunnnndn",
        ),
        (
            "torpor.v1.Sandboxes/Ssh",
            v1::SshInput { kind: Some(v1::ssh_input::Kind::Session("none".into())) }.encode_to_vec(),
            "uuunnnndn",
        ),
        (
            "torpor.v1.Files/Upload",
            v1::UploadInput { kind: Some(v1::upload_input::Kind::Start(upload)) }.encode_to_vec(),
            "uuud++nd+",
        ),
        (
            "torpor.v1.Files/Download",
            v1::DownloadRequest { sandbox: sandbox(), path: "/x".into(), ..Default::default() }
                .encode_to_vec(),
            "uuud++nd+",
        ),
        (
            "torpor.v1.Files/Stat",
            v1::StatFileRequest { sandbox: sandbox(), path: "/x".into() }.encode_to_vec(),
            "uuud++nd+",
        ),
        (
            "torpor.v1.Files/List",
            v1::ListFilesRequest { sandbox: sandbox(), path: "/x".into(), ..Default::default() }
                .encode_to_vec(),
            "uuud++nd+",
        ),
        (
            "torpor.v1.Files/MakeDirectory",
            v1::MakeDirectoryRequest { sandbox: sandbox(), path: "/x".into(), ..Default::default() }
                .encode_to_vec(),
            "uuud++nd+",
        ),
        (
            "torpor.v1.Files/Remove",
            v1::RemoveFileRequest { sandbox: sandbox(), path: "/x".into(), ..Default::default() }
                .encode_to_vec(),
            "uuud++nd+",
        ),
        (
            "torpor.v1.Templates/Create",
            v1::CreateTemplateRequest { name: "t".into(), request_id: "one".into(), ..Default::default() }
                .encode_to_vec(),
            "uuud++nd+",
        ),
        (
            "torpor.v1.Templates/Get",
            v1::GetTemplateRequest { template: "t".into() }.encode_to_vec(),
            "uuu+++nd+",
        ),
        ("torpor.v1.Templates/List", Vec::new(), "uuu+++nd+"),
        (
            "torpor.v1.Templates/Update",
            v1::UpdateTemplateRequest { template: "t".into(), ..Default::default() }.encode_to_vec(),
            "uuud++nd+",
        ),
        (
            "torpor.v1.Templates/Delete",
            v1::DeleteTemplateRequest { template: "t".into(), allow_missing: true, ..Default::default() }
                .encode_to_vec(),
            "uuud++nd+",
        ),
        ("torpor.v1.Gateway/Info", Vec::new(), "uuu++++d+"),
        ("torpor.v1.Gateway/Health", Vec::new(), "+uu++++++"),
        (
            "torpor.v1.Sandboxes/Delete",
            v1::DeleteSandboxRequest {
                target: target().map(|t| v1::Target { wait: true, ..t }),
                allow_missing: true,
            }
            .encode_to_vec(),
            // The sandbox's own token has gone with it by then.
            "uuud++nu+",
        ),
    ]
}
