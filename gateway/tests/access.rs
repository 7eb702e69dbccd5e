//! Who may do what: every method by every kind of caller, and every way of being known.
#![allow(clippy::unwrap_used, reason = "tests")]

mod common;
#[path = "access/matrix.rs"]
mod matrix;
#[path = "access/openshell.rs"]
mod openshell;

use std::{collections::BTreeSet, path::PathBuf, time::Duration};

use common::World;
use matrix::matrix;
use prost::Message;
use tonic::{
    Code, Request, Status,
    codec::{Codec, DecodeBuf, Decoder, EncodeBuf, Encoder},
    transport::{Certificate, Channel, ClientTlsConfig, Endpoint, Identity},
};
use torpor_gateway::config::{Anonymous, OidcConfig, TcpConfig};
use torpor_proto::openshell::{datamodel::v1::ObjectMeta, v1 as os};
use torpor_proto::v1::{
    self, access_client::AccessClient, gateway_client::GatewayClient, sandboxes_client::SandboxesClient,
    templates_client::TemplatesClient, workspaces_client::WorkspacesClient,
};
use torpor_sandbox::sim::Script;

/// Messages as they are on the wire.
#[derive(Clone, Copy, Default)]
struct Raw;

impl Codec for Raw {
    type Encode = Vec<u8>;
    type Decode = Vec<u8>;
    type Encoder = Self;
    type Decoder = Self;

    fn encoder(&mut self) -> Self {
        Self
    }

    fn decoder(&mut self) -> Self {
        Self
    }
}

impl Encoder for Raw {
    type Item = Vec<u8>;
    type Error = Status;

    fn encode(&mut self, item: Vec<u8>, buffer: &mut EncodeBuf<'_>) -> Result<(), Status> {
        bytes::BufMut::put_slice(buffer, &item);
        Ok(())
    }
}

impl Decoder for Raw {
    type Item = Vec<u8>;
    type Error = Status;

    fn decode(&mut self, buffer: &mut DecodeBuf<'_>) -> Result<Option<Vec<u8>>, Status> {
        let mut item = vec![0; bytes::Buf::remaining(buffer)];
        bytes::Buf::copy_to_slice(buffer, &mut item);
        Ok(Some(item))
    }
}

/// How the call of any method goes: the first answer, or why there is none.
async fn outcome(channel: &Channel, token: Option<&str>, path: &str, message: &[u8]) -> Result<(), Status> {
    let mut client = tonic::client::Grpc::new(channel.clone());
    client.ready().await.unwrap();
    let mut request = Request::new(message.to_vec());
    request.metadata_mut().insert("x-torpor-workspace", "team".parse().unwrap());
    if let Some(token) = token {
        request.metadata_mut().insert("authorization", format!("Bearer {token}").parse().unwrap());
    }
    let path = format!("/{path}").parse().unwrap();
    let mut answers = client.server_streaming(request, path, Raw).await?.into_inner();
    // A stream that has nothing to say was let in.
    match tokio::time::timeout(Duration::from_millis(300), answers.message()).await {
        Ok(answer) => answer.map(drop),
        Err(_) => Ok(()),
    }
}

/// The answer to one call in workspace "team", as it is on the wire.
async fn answer(channel: &Channel, token: &str, path: &str, message: &impl Message) -> Vec<u8> {
    let mut client = tonic::client::Grpc::new(channel.clone());
    client.ready().await.unwrap();
    let mut request = Request::new(message.encode_to_vec());
    request.metadata_mut().insert("x-torpor-workspace", "team".parse().unwrap());
    request.metadata_mut().insert("authorization", format!("Bearer {token}").parse().unwrap());
    client.unary(request, format!("/{path}").parse().unwrap(), Raw).await.unwrap().into_inner()
}

fn letter(outcome: &Result<(), Status>) -> char {
    match outcome.as_ref().map_err(Status::code) {
        Err(Code::Unauthenticated) => 'u',
        Err(Code::PermissionDenied) => 'd',
        Err(Code::NotFound) => 'n',
        _ => '+',
    }
}

fn plain(anonymous: Anonymous) -> TcpConfig {
    TcpConfig {
        address: free_address(),
        certificate: PathBuf::new(),
        key: PathBuf::new(),
        client_ca: PathBuf::new(),
        plaintext: true,
        anonymous,
    }
}

fn free_address() -> std::net::SocketAddr {
    std::net::TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap()
}

async fn tcp(address: std::net::SocketAddr) -> Channel {
    Endpoint::from_shared(format!("http://{address}")).unwrap().connect().await.unwrap()
}

async fn workspace(channel: &Channel, name: &str) {
    let request = v1::CreateWorkspaceRequest { name: name.into(), ..Default::default() };
    WorkspacesClient::new(channel.clone()).create(request).await.unwrap();
}

async fn sandbox(channel: &Channel, name: &str) -> v1::Sandbox {
    let request = v1::CreateSandboxRequest { name: name.into(), wait: true, ..Default::default() };
    SandboxesClient::new(channel.clone()).create(request).await.unwrap().into_inner()
}

async fn token(channel: &Channel, request: v1::CreateTokenRequest) -> v1::CreateTokenResponse {
    let name = if request.name.is_empty() { "test".to_owned() } else { request.name };
    let request = v1::CreateTokenRequest { name, ..request };
    AccessClient::new(channel.clone()).create_token(request).await.unwrap().into_inner()
}

async fn role(channel: &Channel, workspace: &str, role: v1::Role) -> String {
    let request = v1::CreateTokenRequest {
        workspace: workspace.into(),
        role: role.into(),
        name: format!("{role:?}-of-{workspace}"),
        ..Default::default()
    };
    token(channel, request).await.secret
}

#[tokio::test(flavor = "multi_thread")]
async fn every_method_lets_in_whom_it_should_and_nobody_else() {
    let rows = matrix().into_iter().map(|(path, message, expected)| (path.to_owned(), message, expected));
    every_cell_is_right(rows.collect()).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn every_method_of_the_other_interface_lets_in_whom_it_should_and_nobody_else() {
    every_cell_is_right(openshell::matrix()).await;
}

async fn every_cell_is_right(rows: Vec<(String, Vec<u8>, &str)>) {
    let listener = plain(Anonymous::None);
    let address = listener.address;
    let world = World::with(Script::default(), |config| config.tcp = vec![listener]).await;
    let admin = world.channel().await;
    workspace(&admin, "team").await;
    workspace(&admin, "other").await;
    let made = sandbox(&admin, "team/box").await;
    assert_eq!((made.name.as_str(), made.workspace.as_str()), ("box", "team"));
    let expired = v1::CreateTokenRequest {
        admin: true,
        lifetime: Some(prost_types::Duration { seconds: 0, nanos: 1 }),
        ..Default::default()
    };
    let within = v1::CreateTokenRequest { sandbox: "team/box".into(), ..Default::default() };
    let full = v1::CreateTokenRequest { admin: true, ..Default::default() };
    let callers = [
        None,
        Some(format!("tpr_0011223344556677_{}", "0".repeat(64))),
        Some(token(&admin, expired).await.secret),
        Some(role(&admin, "team", v1::Role::Viewer).await),
        Some(role(&admin, "team", v1::Role::Editor).await),
        Some(role(&admin, "team", v1::Role::Owner).await),
        Some(role(&admin, "other", v1::Role::Owner).await),
        Some(token(&admin, within).await.secret),
        Some(token(&admin, full).await.secret),
    ];
    let channel = tcp(address).await;
    let mut wrong = Vec::new();
    for (path, message, expected) in rows {
        let mut found = String::new();
        let mut said = Vec::new();
        for caller in &callers {
            let outcome = outcome(&channel, caller.as_deref(), &path, &message).await;
            found.push(letter(&outcome));
            said.push(outcome.err().map(|status| status.message().to_owned()));
        }
        if found != expected {
            wrong.push(format!("{path}: {found}, not {expected}: {said:?}"));
        }
    }
    assert!(wrong.is_empty(), "{wrong:#?}");
}

#[test]
fn the_matrix_has_every_method_of_our_own_interface() {
    let all = prost_types::FileDescriptorSet::decode(torpor_proto::DESCRIPTORS).unwrap();
    let declared: BTreeSet<String> = all
        .file
        .iter()
        .filter(|file| file.package() == "torpor.v1")
        .flat_map(|file| &file.service)
        .flat_map(|service| {
            service.method.iter().map(|method| format!("torpor.v1.{}/{}", service.name(), method.name()))
        })
        .collect();
    let tested: BTreeSet<String> = matrix().into_iter().map(|(path, ..)| path.to_owned()).collect();
    let missing: Vec<_> = declared.difference(&tested).collect();
    assert!(missing.is_empty(), "{missing:?}");
}

#[tokio::test(flavor = "multi_thread")]
async fn names_are_unique_in_a_workspace_and_nobody_looks_into_another_s() {
    let world = World::new(Script::default()).await;
    let admin = world.channel().await;
    workspace(&admin, "team").await;
    let one = sandbox(&admin, "box").await;
    let other = sandbox(&admin, "team/box").await;
    assert_ne!(one.id, other.id);
    let mut client = SandboxesClient::new(admin.clone());
    let get = |name: &str| v1::GetSandboxRequest { sandbox: name.into() };
    assert_eq!(client.get(get("team/box")).await.unwrap().into_inner().id, other.id);
    assert_eq!(client.get(get("box")).await.unwrap().into_inner().id, one.id);
    let listed = client.list(v1::ListSandboxesRequest::default()).await.unwrap().into_inner();
    assert_eq!(listed.sandboxes.iter().map(|s| &s.id).collect::<Vec<_>>(), [&one.id]);
    let everywhere = v1::ListSandboxesRequest { all_workspaces: true, ..Default::default() };
    assert_eq!(client.list(everywhere.clone()).await.unwrap().into_inner().sandboxes.len(), 2);
    // A viewer of team sees that one only, by whatever way of asking.
    let secret = role(&admin, "team", v1::Role::Viewer).await;
    let viewer = |mut request: Request<()>| {
        request.metadata_mut().insert("authorization", format!("Bearer {secret}").parse().unwrap());
        Ok(request)
    };
    let mut viewer = SandboxesClient::with_interceptor(admin.clone(), viewer);
    let listed = viewer.list(everywhere).await.unwrap().into_inner();
    assert_eq!(listed.sandboxes.iter().map(|s| &s.id).collect::<Vec<_>>(), [&other.id]);
    assert_eq!(viewer.get(get("box")).await.unwrap().into_inner().id, other.id);
    for hidden in [
        one.id.as_str(),
        "default/box",
        "default/team/box",
        "team/team/box",
        "/box",
        &format!("team/{}", one.id),
    ] {
        assert_eq!(viewer.get(get(hidden)).await.unwrap_err().code(), Code::NotFound, "{hidden}");
    }
    let mut events = viewer
        .watch(v1::WatchSandboxesRequest { all_workspaces: true, ..Default::default() })
        .await
        .unwrap()
        .into_inner();
    let first = events.message().await.unwrap().unwrap();
    assert_eq!(first.sandbox.unwrap().id, other.id);
    assert!(events.message().await.unwrap().unwrap().sandbox.is_none(), "synced");
    // Neither the change nor the end of the hidden one is told.
    let target = |name: &str| Some(v1::Target { sandbox: name.into(), wait: true, ..Default::default() });
    client.delete(v1::DeleteSandboxRequest { target: target("box"), ..Default::default() }).await.unwrap();
    client
        .delete(v1::DeleteSandboxRequest { target: target("team/box"), ..Default::default() })
        .await
        .unwrap();
    loop {
        let event = events.message().await.unwrap().unwrap();
        assert_eq!(event.sandbox.as_ref().unwrap().id, other.id, "{event:?}");
        if event.kind() == v1::sandbox_event::Kind::Deleted {
            break;
        }
    }
    // The workspace goes when it is empty.
    let delete = v1::DeleteWorkspaceRequest { name: "team".into(), allow_missing: false };
    let gone = WorkspacesClient::new(admin).delete(delete).await.unwrap().into_inner();
    assert!(gone.removed);
    // Its tokens went with it.
    let status = viewer.list(v1::ListSandboxesRequest::default()).await.unwrap_err();
    assert_eq!(status.code(), Code::Unauthenticated, "{status:?}");
}

#[tokio::test(flavor = "multi_thread")]
async fn request_ids_of_one_workspace_mean_nothing_in_another() {
    let world = World::new(Script::default()).await;
    let admin = world.channel().await;
    workspace(&admin, "team").await;
    let mut client = SandboxesClient::new(admin.clone());
    let create = |name: &str, id: &str| v1::CreateSandboxRequest {
        name: name.into(),
        request_id: id.into(),
        ..Default::default()
    };
    let one = client.create(create("box", "id-1")).await.unwrap().into_inner();
    let other = client.create(create("team/box", "id-1")).await.unwrap().into_inner();
    assert_ne!(one.id, other.id);
    for (name, made) in [("box", &one), ("team/box", &other)] {
        assert_eq!(client.create(create(name, "id-1")).await.unwrap().into_inner().id, made.id);
    }
    let reused = client.create(create("team/more", "id-1")).await.unwrap_err();
    assert!(reused.message().contains("'id-1'"), "{reused:?}");
    // Nor does one that looks like another workspace's.
    assert!(client.create(create("more", "team\u{1f}id-1")).await.is_err());
}

#[tokio::test(flavor = "multi_thread")]
async fn viewers_see_the_names_of_variables_and_only_editors_their_values() {
    let world = World::new(Script::default()).await;
    let admin = world.channel().await;
    workspace(&admin, "team").await;
    let environment = [("API_KEY".to_owned(), "s3cret-value".to_owned())];
    let spec = v1::SandboxSpec { environment: environment.clone().into(), ..Default::default() };
    let request = v1::CreateTemplateRequest {
        name: "team/base".into(),
        spec: Some(spec.clone()),
        ..Default::default()
    };
    TemplatesClient::new(admin.clone()).create(request).await.unwrap();
    let request =
        v1::CreateSandboxRequest { name: "team/box".into(), spec: Some(spec), ..Default::default() };
    SandboxesClient::new(admin.clone()).create(request).await.unwrap();
    let within = v1::CreateTokenRequest { sandbox: "team/box".into(), ..Default::default() };
    let [viewer, editor] =
        [role(&admin, "team", v1::Role::Viewer).await, role(&admin, "team", v1::Role::Editor).await];
    // In the words of another interface too, which keeps what it was sent.
    let workload = os::SandboxWorkloadConfig { environment: environment.into(), ..Default::default() };
    let template = os::SandboxWorkloadTemplate {
        metadata: Some(ObjectMeta { name: "theirs".into(), ..Default::default() }),
        spec: Some(os::SandboxWorkloadTemplateSpec { workload: Some(workload), ..Default::default() }),
    };
    let create = os::CreateSandboxTemplateRequest { template: Some(template), ..Default::default() };
    answer(&admin, &editor, "openshell.v1.OpenShell/CreateSandboxTemplate", &create).await;
    let get = os::GetSandboxTemplateRequest { name: "theirs".into(), ..Default::default() };
    for (secret, seen) in [(&viewer, false), (&editor, true)] {
        let shown = answer(&admin, secret, "openshell.v1.OpenShell/GetSandboxTemplate", &get).await;
        let text = String::from_utf8_lossy(&shown).into_owned();
        assert!(text.contains("API_KEY") && text.contains("s3cret-value") == seen, "{text}");
    }
    for (secret, seen) in
        [(viewer, "REDACTED"), (editor, "s3cret-value"), (token(&admin, within).await.secret, "s3cret-value")]
    {
        let as_them = |mut request: Request<()>| {
            request.metadata_mut().insert("authorization", format!("Bearer {secret}").parse().unwrap());
            Ok(request)
        };
        let mut client = SandboxesClient::with_interceptor(admin.clone(), as_them);
        let mut shown = vec![
            client
                .get(v1::GetSandboxRequest { sandbox: "box".into() })
                .await
                .unwrap()
                .into_inner()
                .spec
                .unwrap(),
        ];
        if let Ok(listed) = client.list(v1::ListSandboxesRequest::default()).await {
            shown.push(listed.into_inner().sandboxes.remove(0).spec.unwrap());
            let watch = v1::WatchSandboxesRequest::default();
            let mut events = client.watch(watch).await.unwrap().into_inner();
            let event = events.message().await.unwrap().unwrap();
            shown.push(event.sandbox.unwrap().spec.unwrap());
            let mut client = TemplatesClient::with_interceptor(admin.clone(), as_them);
            let get = v1::GetTemplateRequest { template: "base".into() };
            shown.push(client.get(get).await.unwrap().into_inner().spec.unwrap());
            let listed = client.list(v1::ListTemplatesRequest::default()).await.unwrap().into_inner();
            shown.push(listed.templates[0].spec.clone().unwrap());
        }
        for spec in shown {
            assert_eq!(spec.environment, [("API_KEY".to_owned(), seen.to_owned())].into());
        }
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_token_is_good_until_it_is_revoked_and_never_for_more_than_its_maker_has() {
    let world = World::new(Script::default()).await;
    let admin = world.channel().await;
    workspace(&admin, "team").await;
    let made = token(
        &admin,
        v1::CreateTokenRequest {
            workspace: "team".into(),
            role: v1::Role::Owner.into(),
            ..Default::default()
        },
    )
    .await;
    let secret = made.secret.clone();
    let owner = move |mut request: Request<()>| {
        request.metadata_mut().insert("authorization", format!("Bearer {secret}").parse().unwrap());
        Ok(request)
    };
    let mut client = AccessClient::with_interceptor(admin.clone(), owner);
    let who = client.who_am_i(v1::WhoAmIRequest {}).await.unwrap().into_inner();
    let id = made.token.as_ref().unwrap().id.clone();
    assert_eq!(
        (who.subject, who.by.as_str(), who.workspace.as_str()),
        (format!("token:{id}"), "token", "team")
    );
    let editor =
        v1::CreateTokenRequest { name: "e".into(), role: v1::Role::Editor.into(), ..Default::default() };
    let lesser = client.create_token(editor.clone()).await.unwrap().into_inner();
    assert_eq!(lesser.token.unwrap().workspace, "team");
    for beyond in [
        v1::CreateTokenRequest { admin: true, role: 0, ..editor.clone() },
        v1::CreateTokenRequest { all_workspaces: true, ..editor.clone() },
    ] {
        assert_eq!(client.create_token(beyond).await.unwrap_err().code(), Code::PermissionDenied);
    }
    let elsewhere = v1::CreateTokenRequest { workspace: "default".into(), ..editor };
    assert_eq!(client.create_token(elsewhere).await.unwrap_err().code(), Code::NotFound);
    let listed = client.list_tokens(v1::ListTokensRequest::default()).await.unwrap().into_inner();
    assert_eq!(listed.tokens.len(), 2);
    // Neither the database nor the audit log holds a secret.
    for name in ["torpor.db", "torpor.db-wal", "audit.log"] {
        let held = std::fs::read(world.config.state_dir.join(name)).unwrap();
        for secret in [&made.secret, &lesser.secret] {
            let part = &secret.as_bytes()[secret.len() - 32..];
            assert!(!held.windows(32).any(|window| window == part), "{name} holds a secret");
        }
    }
    // What is under way ends with the token; so do the tokens that were made with it.
    let mut watcher = SandboxesClient::new(admin.clone());
    let mut request = Request::new(v1::WatchSandboxesRequest::default());
    request.metadata_mut().insert("authorization", format!("Bearer {}", made.secret).parse().unwrap());
    let mut events = watcher.watch(request).await.unwrap().into_inner();
    assert!(events.message().await.unwrap().is_some());
    let revoke = v1::RevokeTokenRequest { id, allow_missing: false };
    AccessClient::new(admin.clone()).revoke_token(revoke).await.unwrap();
    let ended = tokio::time::timeout(Duration::from_secs(20), events.message()).await.unwrap().unwrap_err();
    assert_eq!(ended.code(), Code::Unauthenticated, "{ended:?}");
    let mut request = Request::new(v1::WhoAmIRequest {});
    request.metadata_mut().insert("authorization", format!("Bearer {}", lesser.secret).parse().unwrap());
    let status = AccessClient::new(admin).who_am_i(request).await.unwrap_err();
    assert_eq!(status.code(), Code::Unauthenticated);
    let status = client.who_am_i(v1::WhoAmIRequest {}).await.unwrap_err();
    assert_eq!(status.code(), Code::Unauthenticated);
}

#[tokio::test(flavor = "multi_thread")]
async fn changes_and_refusals_are_in_the_audit_log_with_who_made_them() {
    let listener = plain(Anonymous::Viewer);
    let address = listener.address;
    let world = World::with(Script::default(), |config| config.tcp = vec![listener]).await;
    sandbox(&world.channel().await, "box").await;
    let mut stranger = SandboxesClient::new(tcp(address).await);
    stranger.get(v1::GetSandboxRequest { sandbox: "box".into() }).await.unwrap();
    let target = Some(v1::Target { sandbox: "box".into(), ..Default::default() });
    let status =
        stranger.delete(v1::DeleteSandboxRequest { target, ..Default::default() }).await.unwrap_err();
    assert_eq!(status.code(), Code::PermissionDenied);
    let text = std::fs::read_to_string(world.config.state_dir.join("audit.log")).unwrap();
    let lines: Vec<serde_json::Value> =
        text.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    let of = |method: &str| lines.iter().filter(|line| line["method"] == method).collect::<Vec<_>>();
    let made = of("torpor.v1.Sandboxes/Create");
    let uid = format!("uid:{}", nix::unistd::geteuid());
    assert_eq!(made.len(), 1, "{text}");
    assert_eq!((&made[0]["subject"], &made[0]["outcome"]), (&uid.into(), &"ok".into()));
    let refused = of("torpor.v1.Sandboxes/Delete");
    assert_eq!((&refused[0]["subject"], &refused[0]["about"]), (&"anonymous".into(), &"box".into()));
    assert_eq!(refused[0]["outcome"], "7", "{text}");
    assert!(of("torpor.v1.Sandboxes/Get").is_empty(), "{text}");
}

struct Authority {
    dir: tempfile::TempDir,
    issuer: rcgen::CertifiedIssuer<'static, rcgen::KeyPair>,
}

impl Authority {
    fn new() -> Self {
        let mut params = rcgen::CertificateParams::new(Vec::new()).unwrap();
        params.is_ca = rcgen::IsCa::Ca(rcgen::BasicConstraints::Unconstrained);
        let issuer =
            rcgen::CertifiedIssuer::self_signed(params, rcgen::KeyPair::generate().unwrap()).unwrap();
        Self { dir: tempfile::tempdir().unwrap(), issuer }
    }

    fn issue(&self, common_name: &str) -> (String, String) {
        let mut params = rcgen::CertificateParams::new(vec!["localhost".to_owned()]).unwrap();
        params.distinguished_name.push(rcgen::DnType::CommonName, common_name);
        let key = rcgen::KeyPair::generate().unwrap();
        (params.signed_by(&key, &self.issuer).unwrap().pem(), key.serialize_pem())
    }

    fn file(&self, name: &str, text: &str) -> PathBuf {
        let path = self.dir.path().join(name);
        std::fs::write(&path, text).unwrap();
        path
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_client_certificate_says_who_it_is_and_a_stranger_s_is_refused() {
    let (ours, theirs) = (Authority::new(), Authority::new());
    let (certificate, key) = ours.issue("gateway");
    let listener = TcpConfig {
        address: free_address(),
        certificate: ours.file("server.pem", &certificate),
        key: ours.file("server.key", &key),
        client_ca: ours.file("ca.pem", &ours.issuer.pem()),
        plaintext: false,
        anonymous: Anonymous::None,
    };
    let address = listener.address;
    let world = World::with(Script::default(), |config| {
        config.tcp = vec![listener];
        config.admins = ["cert:root".to_owned()].into();
    })
    .await;
    let tls = |identity: Option<(String, String)>| {
        let config = ClientTlsConfig::new()
            .ca_certificate(Certificate::from_pem(ours.issuer.pem()))
            .domain_name("localhost");
        let config = match identity {
            Some((certificate, key)) => config.identity(Identity::from_pem(certificate, key)),
            None => config,
        };
        Endpoint::from_shared(format!("https://{address}")).unwrap().tls_config(config).unwrap()
    };
    let who = async |identity| {
        let channel = tls(identity).connect().await.map_err(|e| Status::unavailable(e.to_string()))?;
        AccessClient::new(channel).who_am_i(v1::WhoAmIRequest {}).await.map(tonic::Response::into_inner)
    };
    let alice = who(Some(ours.issue("alice"))).await.unwrap();
    assert_eq!(
        (alice.subject.as_str(), alice.admin, alice.by.as_str()),
        ("cert:alice", false, "certificate")
    );
    assert!(who(Some(ours.issue("root"))).await.unwrap().admin);
    assert_eq!(who(None).await.unwrap_err().code(), Code::Unauthenticated);
    let refused = who(Some(theirs.issue("root"))).await.unwrap_err();
    // The connection is broken off, in one way or another.
    assert!([Code::Unavailable, Code::Unknown, Code::Cancelled].contains(&refused.code()), "{refused:?}");
    // A membership is in force at once, and its end too.
    let admin = world.channel().await;
    let mut workspaces = WorkspacesClient::new(admin.clone());
    let channel = tls(Some(ours.issue("alice"))).connect().await.unwrap();
    let mut alice = SandboxesClient::new(channel.clone());
    let list = v1::ListSandboxesRequest::default();
    assert_eq!(alice.list(list.clone()).await.unwrap_err().code(), Code::NotFound);
    let member = v1::SetMemberRequest {
        workspace: "default".into(),
        subject: "cert:alice".into(),
        role: v1::Role::Editor.into(),
    };
    workspaces.set_member(member.clone()).await.unwrap();
    sandbox(&channel, "hers").await;
    // Tokens that she has made go with it, and so does what is under way with them.
    let owner = v1::SetMemberRequest { role: v1::Role::Owner.into(), ..member };
    workspaces.set_member(owner).await.unwrap();
    let mut request = Request::new(v1::WatchSandboxesRequest::default());
    let made = role(&channel, "default", v1::Role::Viewer).await;
    request.metadata_mut().insert("authorization", format!("Bearer {made}").parse().unwrap());
    let mut events = SandboxesClient::new(admin.clone()).watch(request).await.unwrap().into_inner();
    assert!(events.message().await.unwrap().is_some());
    let remove = v1::RemoveMemberRequest {
        workspace: "default".into(),
        subject: "cert:alice".into(),
        allow_missing: false,
    };
    workspaces.remove_member(remove).await.unwrap();
    let ended = async {
        loop {
            if let Err(status) = events.message().await.map(|event| event.expect("it ended in order")) {
                break status;
            }
        }
    };
    let ended = tokio::time::timeout(Duration::from_secs(20), ended).await.unwrap();
    assert_eq!(ended.code(), Code::Unauthenticated, "{ended:?}");
    assert_eq!(alice.list(list).await.unwrap_err().code(), Code::NotFound);
    // Plaintext on a TLS port is no way in.
    let plain = Endpoint::from_shared(format!("http://{address}")).unwrap().connect().await;
    if let Ok(channel) = plain {
        let health = GatewayClient::new(channel).health(v1::HealthRequest {}).await;
        assert!(health.is_err());
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_token_of_the_trusted_issuer_is_accepted_and_every_other_one_refused() {
    use jsonwebtoken::{Algorithm, EncodingKey, Header};
    let key = rcgen::KeyPair::generate().unwrap();
    let point = rcgen::PublicKeyData::der_bytes(&key).to_vec();
    let text = |bytes: &[u8]| base64::Engine::encode(&base64::prelude::BASE64_URL_SAFE_NO_PAD, bytes);
    let set = serde_json::json!({ "keys": [{
        "kty": "EC", "crv": "P-256", "kid": "one", "alg": "ES256", "use": "sig",
        "x": text(&point[1..33]), "y": text(&point[33..65]),
    }] });
    let dir = tempfile::tempdir().unwrap();
    let jwks = dir.path().join("keys.json");
    std::fs::write(&jwks, set.to_string()).unwrap();
    let world = World::with(Script::default(), |config| {
        config.oidc = Some(OidcConfig {
            issuer: "https://issuer.example".into(),
            audience: "torpor".into(),
            jwks: jwks.display().to_string(),
            subject_claim: "sub".into(),
        });
    })
    .await;
    let now = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).unwrap().as_secs();
    let good = serde_json::json!({
        "sub": "alice", "iss": "https://issuer.example", "aud": "torpor", "exp": now + 300,
    });
    let signed = |claims: &serde_json::Value, kid: &str, key: &rcgen::KeyPair| {
        let header = Header { kid: Some(kid.into()), ..Header::new(Algorithm::ES256) };
        jsonwebtoken::encode(&header, claims, &EncodingKey::from_ec_der(&key.serialize_der())).unwrap()
    };
    let channel = world.channel().await;
    let who = async |token: String| {
        let named = move |mut request: Request<()>| {
            request.metadata_mut().insert("authorization", format!("Bearer {token}").parse().unwrap());
            Ok(request)
        };
        let mut client = AccessClient::with_interceptor(channel.clone(), named);
        client.who_am_i(v1::WhoAmIRequest {}).await.map(tonic::Response::into_inner)
    };
    let alice = who(signed(&good, "one", &key)).await.unwrap();
    assert_eq!((alice.subject.as_str(), alice.by.as_str(), alice.admin), ("oidc:alice", "oidc", false));
    let with = |claim: &str, value: serde_json::Value| {
        let mut claims = good.clone();
        claims[claim] = value;
        claims
    };
    let other = rcgen::KeyPair::generate().unwrap();
    let shared = Header { kid: Some("one".into()), ..Header::new(Algorithm::HS256) };
    let bad = [
        ("expired", signed(&with("exp", (now - 300).into()), "one", &key)),
        ("for others", signed(&with("aud", "others".into()), "one", &key)),
        ("of another issuer", signed(&with("iss", "https://evil.example".into()), "one", &key)),
        ("not yet good", signed(&with("nbf", (now + 3000).into()), "one", &key)),
        ("of nobody", signed(&with("sub", "".into()), "one", &key)),
        ("signed by another key", signed(&good, "one", &other)),
        ("signed by an unknown key", signed(&good, "two", &other)),
        (
            "signed with a shared secret",
            jsonwebtoken::encode(&shared, &good, &EncodingKey::from_secret(&point)).unwrap(),
        ),
        ("not signed", format!("{}.{}.", text(br#"{"alg":"none"}"#), text(good.to_string().as_bytes()))),
        ("no token", "x".to_owned()),
    ];
    for (what, token) in bad {
        let status = who(token).await.expect_err(what);
        assert_eq!(status.code(), Code::Unauthenticated, "{what}: {status:?}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn files_and_ports_of_the_host_are_for_administrators() {
    let world = World::new(Script::default()).await;
    let admin = world.channel().await;
    let editor = role(&admin, "default", v1::Role::Editor).await;
    let mut client = SandboxesClient::new(admin);
    let volume = |source: &str| v1::Volume { source: source.into(), target: "/v".into(), read_only: true };
    let spec = |spec: v1::SandboxSpec| v1::CreateSandboxRequest { spec: Some(spec), ..Default::default() };
    let port = v1::ExposeAtCreate { port: 80, host: "0.0.0.0:0".into(), wake: false };
    let refused = [
        spec(v1::SandboxSpec { volumes: vec![volume("/etc")], ..Default::default() }),
        spec(v1::SandboxSpec { kernel: "/boot/vmlinuz".into(), ..Default::default() }),
        v1::CreateSandboxRequest { expose: vec![port], ..Default::default() },
    ];
    for request in refused {
        let mut asked = Request::new(request.clone());
        asked.metadata_mut().insert("authorization", format!("Bearer {editor}").parse().unwrap());
        let status = client.create(asked).await.unwrap_err();
        assert_eq!(status.code(), Code::PermissionDenied, "{request:?}: {status:?}");
        let as_admin = client.create(request.clone()).await;
        assert_ne!(as_admin.err().map(|status| status.code()), Some(Code::PermissionDenied), "{request:?}");
    }
    client.create(common::create("box")).await.unwrap();
    for (host, allowed) in [("0.0.0.0:0", false), ("127.0.0.1:80", false), ("127.0.0.1:0", true)] {
        let request = v1::ExposeRequest { sandbox: "box".into(), port: 80, host: host.into(), wake: false };
        let mut asked = Request::new(request);
        asked.metadata_mut().insert("authorization", format!("Bearer {editor}").parse().unwrap());
        let code = client.expose(asked).await.err().map(|status| status.code());
        assert_eq!(code != Some(Code::PermissionDenied), allowed, "{host}: {code:?}");
    }
}
