//! What a stranger tried: odd and large specs, retries that come late, rights and refusals seen from outside, other
//! interfaces' words for the same things. All through real gRPC and HTTP, over the driver that only pretends.
#![allow(clippy::unwrap_used, reason = "tests")]

mod common;

use std::time::Duration;

use common::{World, create, map, no_wait, refused, target};
use prost::Message as _;
use tonic::{Code, Request, Status, transport::Channel};
use torpor_gateway::Config;
use torpor_proto::{
    openshell::{
        datamodel::v1::{ObjectMeta, Provider, WorkspaceSelector, workspace_selector::Selection},
        v1::{self as os, open_shell_client::OpenShellClient},
    },
    v1::{
        self, Phase, access_client::AccessClient, sandboxes_client::SandboxesClient,
        templates_client::TemplatesClient, workspaces_client::WorkspacesClient,
    },
};
use torpor_sandbox::sim::Script;

/// What a page of sandboxes has at most, bytes; a client of gRPC takes 4 MiB of one message when it isn't told otherwise.
const PAGE: usize = 2 << 20;

fn on(config: &mut Config) {
    config.enable_sandbox_updates = true;
}

async fn openshell(world: &World) -> OpenShellClient<Channel> {
    OpenShellClient::new(world.channel().await)
}

async fn get(client: &mut SandboxesClient<Channel>, name: &str) -> v1::Sandbox {
    client.get(v1::GetSandboxRequest { sandbox: name.into() }).await.unwrap().into_inner()
}

/// Specs that no listing could hold, or that could never run, by the field that is named.
fn monsters() -> Vec<(&'static str, v1::SandboxSpec)> {
    let plain = v1::SandboxSpec::default;
    let text = |length: usize| "x".repeat(length);
    let command = |arguments: Vec<String>| v1::SandboxSpec { command: arguments, ..plain() };
    let workdir = |dir: String| v1::SandboxSpec { workdir: dir, ..plain() };
    vec![
        ("workdir", workdir(format!("/{}", text(4095)))),
        ("workdir", workdir(format!("/{}", text(5_000_000)))),
        ("workdir", workdir("/a\n\u{1b}[31m/../b".into())),
        ("image", v1::SandboxSpec { image: text(1025), ..plain() }),
        ("image", v1::SandboxSpec { image: "a\nb".into(), ..plain() }),
        ("kernel", v1::SandboxSpec { kernel: format!("/{}", text(4095)), ..plain() }),
        ("command", command(vec!["a".into(), text(131_072)])),
        ("command", command(std::iter::once("a".into()).chain((0..40_000).map(|_| String::new())).collect())),
        ("command", command(vec![text(131_071), text(131_071)])),
        ("environment", v1::SandboxSpec { environment: map(&[("a", &text(131_070))]), ..plain() }),
        (
            "environment",
            v1::SandboxSpec {
                environment: (0..40_000).map(|n| (format!("{n:x}"), String::new())).collect(),
                ..plain()
            },
        ),
        ("machine", v1::SandboxSpec { machine: text(5_000_000), ..plain() }),
        (
            "endpoints",
            v1::SandboxSpec {
                endpoints: vec![v1::Endpoint { name: text(5_000_000), port: 1, http_path: String::new() }],
                ..plain()
            },
        ),
    ]
}

#[tokio::test(flavor = "multi_thread")]
async fn specs_that_no_listing_could_hold_are_refused_by_their_field_wherever_they_come_in() {
    let world = World::with(Script::default(), on).await;
    let mut client = world.sandboxes().await;
    let mut templates = TemplatesClient::new(world.channel().await);
    client.create(create("web")).await.unwrap();
    let web = client.stop(v1::StopRequest { target: target("web") }).await.unwrap().into_inner();
    for (field, spec) in monsters() {
        let request = v1::CreateSandboxRequest { spec: Some(spec.clone()), ..create("monster") };
        let template = v1::CreateTemplateRequest {
            name: "monster".into(),
            spec: Some(spec.clone()),
            ..Default::default()
        };
        let mut errors =
            vec![client.create(request).await.unwrap_err(), templates.create(template).await.unwrap_err()];
        let update = v1::UpdateSandboxRequest {
            target: Some(v1::Target { expected_version: web.version, ..no_wait("web").unwrap() }),
            workdir: Some(spec.workdir.clone()).filter(|dir| !dir.is_empty()),
            command: Some(v1::StringList { values: spec.command.clone() }).filter(|l| !l.values.is_empty()),
            environment: Some(v1::StringMap { values: spec.environment.clone() })
                .filter(|map| !map.values.is_empty()),
            endpoints: Some(v1::EndpointList { values: spec.endpoints.clone() })
                .filter(|list| !list.values.is_empty()),
            ..Default::default()
        };
        if !["image", "kernel", "machine"].contains(&field) {
            errors.push(client.update(update).await.unwrap_err());
        }
        for error in errors {
            assert_eq!(error.code(), Code::InvalidArgument, "{field}: {error:?}");
            let message = error.message();
            assert!(message.starts_with(field) && message.len() < 2000, "{field}: {message}");
        }
    }
    assert_eq!(get(&mut client, "web").await.version, web.version);
}

#[tokio::test(flavor = "multi_thread")]
async fn the_largest_spec_that_is_taken_fits_into_a_page() {
    let world = World::new(Script::default()).await;
    let mut client = world.sandboxes().await;
    // Variables, arguments, annotations and labels to their limits.
    let spec = v1::SandboxSpec {
        workdir: format!("/{}", "w".repeat(4094)),
        command: vec!["c".repeat(131_000), "c".repeat(131_000)],
        environment: map(&[("a", &"e".repeat(131_000)), ("b", &"e".repeat(131_000))]),
        endpoints: (1..=16)
            .map(|n| v1::Endpoint {
                name: format!("e{n}"),
                port: n,
                http_path: format!("/{}", "p".repeat(1023)),
            })
            .collect(),
        ..Default::default()
    };
    let labels = (0..64).map(|n| (format!("{}/{n}{}", "p".repeat(253), "k".repeat(60)), "v".repeat(63)));
    let request = v1::CreateSandboxRequest {
        spec: Some(spec),
        labels: labels.collect(),
        annotations: map(&[("a", &"a".repeat((256 << 10) - 1))]),
        ..create("large")
    };
    let made = client.create(request).await.unwrap().into_inner();
    assert!(made.encoded_len() > 700_000 && made.encoded_len() < PAGE, "{}", made.encoded_len());
    // A client that was told of no other limit.
    let mut usual = SandboxesClient::new(world.channel().await).max_decoding_message_size(4 << 20);
    let listed = usual.list(v1::ListSandboxesRequest::default()).await.unwrap().into_inner();
    assert_eq!(listed.sandboxes[0].id, made.id);
}

#[tokio::test(flavor = "multi_thread")]
async fn labels_that_were_set_while_an_update_was_pending_stay_when_it_is_done() {
    let world = World::with(Script::default(), on).await;
    let mut client = world.sandboxes().await;
    client.create(create("web")).await.unwrap();
    let before = client.stop(v1::StopRequest { target: target("web") }).await.unwrap().into_inner();
    let words = |pairs: &[(&str, &str)]| Some(v1::StringMap { values: map(pairs) });
    let at = |sandbox: &v1::Sandbox| {
        Some(v1::Target { expected_version: sandbox.version, ..no_wait("web").unwrap() })
    };
    world
        .sim
        .fail_next(torpor_sandbox::sim::Verb::Update, torpor_sandbox::DriverError::backend("write", "full"));
    let older = v1::UpdateSandboxRequest {
        target: at(&before),
        labels: words(&[("by", "older")]),
        annotations: words(&[("note", "older")]),
        environment: words(&[("A", "1")]),
        ..Default::default()
    };
    client.update(older).await.unwrap_err();
    let pending = get(&mut client, "web").await;
    let newer = v1::UpdateSandboxRequest {
        target: at(&pending),
        labels: words(&[("by", "newer")]),
        ..Default::default()
    };
    client.update(newer).await.unwrap();
    let finish = v1::ResumePendingUpdateRequest { target: no_wait("web"), abandon: false };
    let after = client.resume_pending_update(finish).await.unwrap().into_inner();
    assert_eq!(after.labels, map(&[("by", "newer")]), "what was set later");
    assert_eq!(after.annotations, map(&[("note", "older")]), "what nobody has set since");
    assert_eq!(after.spec.unwrap().environment, map(&[("A", "1")]));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_request_id_makes_one_update_also_when_the_gateway_ends_in_between() {
    let mut world = World::with(Script::default(), on).await;
    let mut client = world.sandboxes().await;
    client.create(create("web")).await.unwrap();
    let before = client.stop(v1::StopRequest { target: target("web") }).await.unwrap().into_inner();
    let request = |value: &str| v1::UpdateSandboxRequest {
        target: Some(v1::Target {
            expected_version: before.version,
            request_id: "once".into(),
            ..no_wait("web").unwrap()
        }),
        environment: Some(v1::StringMap { values: map(&[("A", value)]) }),
        ..Default::default()
    };
    let first = client.update(request("1")).await.unwrap().into_inner();
    world.restart().await;
    let mut client = world.sandboxes().await;
    assert_eq!(client.update(request("1")).await.unwrap().into_inner().version, first.version);
    refused(&client.update(request("2")).await.unwrap_err(), Code::InvalidArgument, "REQUEST_ID_REUSED");
    assert_eq!(world.sim.calls(torpor_sandbox::sim::Verb::Update), 1);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_late_retry_brings_no_member_back_and_makes_no_second_workspace() {
    let world = World::new(Script::default()).await;
    let mut client = openshell(&world).await;
    let mut workspaces = WorkspacesClient::new(world.channel().await);
    let make = |name: &str, label: &str, id: &str| v1::CreateWorkspaceRequest {
        name: name.into(),
        labels: map(&[("a", label)]),
        request_id: id.into(),
        ..Default::default()
    };
    let first = workspaces.create(make("team", "b", "w1")).await.unwrap().into_inner();
    assert_eq!(workspaces.create(make("team", "b", "w1")).await.unwrap().into_inner().version, first.version);
    for other in [make("team", "c", "w1"), make("more", "b", "w1")] {
        let error = workspaces.create(other).await.unwrap_err();
        refused(&error, Code::InvalidArgument, "REQUEST_ID_REUSED");
    }
    for odd in ["x".repeat(129), "a\nb".into()] {
        let error = workspaces.create(make("more", "b", &odd)).await.unwrap_err();
        assert!(error.message().starts_with("request_id"), "{error:?}");
    }
    let scope = || Some(WorkspaceSelector { selection: Some(Selection::Workspace("team".into())) });
    let add = |subject: &str| os::AddWorkspaceMemberRequest {
        workspace_scope: scope(),
        principal_subject: subject.into(),
        role: os::WorkspaceRole::Admin.into(),
        request_id: "m1".into(),
    };
    let added = client.add_workspace_member(add("uid:77")).await.unwrap().into_inner();
    let remove = os::RemoveWorkspaceMemberRequest {
        workspace_scope: scope(),
        principal_subject: "uid:77".into(),
        ..Default::default()
    };
    client.remove_workspace_member(remove).await.unwrap();
    assert_eq!(client.add_workspace_member(add("uid:77")).await.unwrap().into_inner(), added);
    let list = v1::ListMembersRequest { workspace: "team".into(), ..Default::default() };
    assert!(workspaces.list_members(list).await.unwrap().into_inner().members.is_empty());
    let error = client.add_workspace_member(add("uid:78")).await.unwrap_err();
    refused(&error, Code::InvalidArgument, "REQUEST_ID_REUSED");
    // Whom nobody can be, is no member.
    for odd in ["uid:abc", "uid:01000", "uid:", "uid:-1", "uid:4294967296"] {
        let set = v1::SetMemberRequest {
            workspace: "team".into(),
            subject: odd.into(),
            role: v1::Role::Viewer.into(),
        };
        assert_eq!(workspaces.set_member(set).await.unwrap_err().code(), Code::InvalidArgument, "{odd}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_retry_in_the_other_interface_is_of_the_first_one_s_sandbox() {
    let world = World::new(Script::default()).await;
    let (mut ours, mut client) = (world.sandboxes().await, openshell(&world).await);
    let made = ours.create(create("box")).await.unwrap().into_inner();
    let stop =
        || os::StopSandboxRequest { name: "box".into(), request_id: "s1".into(), ..Default::default() };
    client.stop_sandbox(stop()).await.unwrap();
    let delete =
        || os::DeleteSandboxRequest { name: made.id.clone(), request_id: "d1".into(), ..Default::default() };
    let first = client.delete_sandbox(delete()).await.unwrap().into_inner();
    assert_eq!(first.sandbox_id, made.id);
    let gone = async {
        while ours.get(v1::GetSandboxRequest { sandbox: made.id.clone() }).await.is_ok() {
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
    };
    tokio::time::timeout(Duration::from_secs(30), gone).await.unwrap();
    // By its id, too, when it is gone: with the id, and as done.
    let again = client.delete_sandbox(delete()).await.unwrap().into_inner();
    assert_eq!(
        (again.sandbox_id.as_str(), again.outcome()),
        (made.id.as_str(), os::DeletionOutcome::Completed)
    );
    let unknown = os::DeleteSandboxRequest { request_id: "d2".into(), ..delete() };
    assert_eq!(client.delete_sandbox(unknown).await.unwrap_err().code(), Code::NotFound);
    // Another one of its name is not the one that was stopped.
    ours.create(create("box")).await.unwrap();
    assert_eq!(client.stop_sandbox(stop()).await.unwrap_err().code(), Code::NotFound);
    assert_eq!(get(&mut ours, "box").await.status.unwrap().phase(), Phase::Ready);
}

#[tokio::test(flavor = "multi_thread")]
async fn what_is_asked_for_in_the_other_interface_is_done_or_refused() {
    let world = World::new(Script::default()).await;
    let (mut ours, mut client) = (world.sandboxes().await, openshell(&world).await);
    let make = |name: &str, spec: os::SandboxSpec| os::CreateSandboxRequest {
        name: name.into(),
        spec: Some(spec),
        ..Default::default()
    };
    let spec = os::SandboxSpec { tty: true, command: vec!["sh".into()], ..Default::default() };
    client.create_sandbox(make("term", spec)).await.unwrap();
    assert!(get(&mut ours, "term").await.spec.unwrap().tty);
    let text =
        |text: &str| prost_types::Value { kind: Some(prost_types::value::Kind::StringValue(text.into())) };
    let within = |key: &str, inner: prost_types::Struct| prost_types::Struct {
        fields: [(
            key.to_owned(),
            prost_types::Value { kind: Some(prost_types::value::Kind::StructValue(inner)) },
        )]
        .into(),
    };
    let wants = |key: &str| prost_types::Struct { fields: [(key.to_owned(), text("1"))].into() };
    let template = os::SandboxTemplate::default;
    let refusals = [
        (
            Code::FailedPrecondition,
            os::SandboxTemplate { resources: Some(within("limits", wants("nvidia.com/gpu"))), ..template() },
        ),
        (
            Code::InvalidArgument,
            os::SandboxTemplate { resources: Some(wants("ephemeral-storage")), ..template() },
        ),
    ];
    for (code, template) in refusals {
        let spec = os::SandboxSpec { template: Some(template.clone()), ..Default::default() };
        let error = client.create_sandbox(make("odd", spec)).await.unwrap_err();
        assert_eq!(error.code(), code, "{template:?}: {error:?}");
        assert_eq!(
            ours.get(v1::GetSandboxRequest { sandbox: "odd".into() }).await.unwrap_err().code(),
            Code::NotFound
        );
    }
    // A provider that is written back as it was shown keeps its credentials.
    let provider = |credentials: &[(&str, &str)], url: &str| Provider {
        metadata: Some(ObjectMeta { name: "keys".into(), ..Default::default() }),
        r#type: "generic".into(),
        credentials: map(credentials).into_iter().collect(),
        config: map(&[("url", url)]).into_iter().collect(),
        ..Default::default()
    };
    let create = os::CreateProviderRequest {
        provider: Some(provider(&[("K", "s3cret-value")], "a")),
        ..Default::default()
    };
    let made = client.create_provider(create).await.unwrap().into_inner().provider.unwrap();
    assert_eq!(made.credentials["K"], "REDACTED");
    let back = os::UpdateProviderRequest {
        provider: Some(provider(&[("K", "REDACTED")], "b")),
        ..Default::default()
    };
    client.update_provider(back).await.unwrap();
    let newest = rusqlite::Connection::open(world.config.state_dir.join("torpor.db")).unwrap();
    let body: Vec<u8> = newest
        .query_row("SELECT body FROM foreign_objects WHERE name = 'keys'", [], |row| row.get(0))
        .unwrap();
    assert_eq!(Provider::decode(body.as_slice()).unwrap().credentials["K"], "s3cret-value");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_token_says_for_what_it_is_in_one_way_only() {
    let world = World::new(Script::default()).await;
    world.sandboxes().await.create(create("box")).await.unwrap();
    let mut client = AccessClient::new(world.channel().await);
    let plain =
        || v1::CreateTokenRequest { name: "t".into(), role: v1::Role::Viewer.into(), ..Default::default() };
    let odd = [
        v1::CreateTokenRequest { all_workspaces: true, workspace: "default".into(), ..plain() },
        v1::CreateTokenRequest { all_workspaces: true, sandbox: "box".into(), role: 0, ..plain() },
        v1::CreateTokenRequest { workspace: "default".into(), sandbox: "box".into(), role: 0, ..plain() },
        v1::CreateTokenRequest { admin: true, ..plain() },
        v1::CreateTokenRequest { role: 0, ..plain() },
    ];
    for request in odd {
        let error = client.create_token(request.clone()).await.unwrap_err();
        assert_eq!(error.code(), Code::InvalidArgument, "{request:?}: {error:?}");
    }
}

fn lines(world: &World, method: &str) -> Vec<serde_json::Value> {
    let text = std::fs::read_to_string(world.config.state_dir.join("audit.log")).unwrap();
    let all = text.lines().map(|line| serde_json::from_str::<serde_json::Value>(line).unwrap());
    all.filter(|line| line["method"] == method).collect()
}

#[tokio::test(flavor = "multi_thread")]
async fn the_audit_log_says_what_was_made_and_whom_what_was_refused_by_whatever_way() {
    let world = World::new(Script::default()).await;
    let channel = world.channel().await;
    let made = world.sandboxes().await.create(create("box")).await.unwrap().into_inner();
    assert!(lines(&world, "torpor.v1.Sandboxes/Create")[0]["about"].as_str().unwrap().contains(&made.id));
    let set = v1::SetMemberRequest {
        workspace: "default".into(),
        subject: "uid:77".into(),
        role: v1::Role::Viewer.into(),
    };
    WorkspacesClient::new(channel.clone()).set_member(set).await.unwrap();
    assert_eq!(lines(&world, "torpor.v1.Workspaces/SetMember")[0]["about"], "default/uid:77");
    // What runs in a sandbox may not delete it, whether it asks by gRPC or by REST.
    let wanted = v1::CreateTokenRequest { name: "in".into(), sandbox: "box".into(), ..Default::default() };
    let within = AccessClient::new(channel.clone()).create_token(wanted).await.unwrap().into_inner();
    let subject = format!("token:{}", within.token.unwrap().id);
    let mut request = Request::new(v1::DeleteSandboxRequest { target: target("box"), ..Default::default() });
    let bearer = format!("Bearer {}", within.secret);
    request.metadata_mut().insert("authorization", bearer.parse().unwrap());
    let error: Status = SandboxesClient::new(channel).delete(request).await.unwrap_err();
    assert_eq!(error.code(), Code::PermissionDenied);
    let head = format!("DELETE /v1/sandboxes/box HTTP/1.1\r\nHost: gateway\r\nAuthorization: {bearer}\r\n");
    let answer = said(&world, &head).await;
    assert!(answer.starts_with("HTTP/1.1 403"), "{answer}");
    let refusals = lines(&world, "torpor.v1.Sandboxes/Delete");
    assert_eq!(refusals.len(), 2, "{refusals:?}");
    assert!(refusals.iter().all(|line| line["subject"] == subject.as_str() && line["by"] == "token"));
}

/// One request without a body over the socket and all of its answer.
async fn said(world: &World, head: &str) -> String {
    exchange(world, &format!("{head}Connection: close\r\n\r\n")).await
}

/// The same of a whole request.
async fn exchange(world: &World, whole: &str) -> String {
    use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
    let mut stream = tokio::net::UnixStream::connect(world.socket()).await.unwrap();
    stream.write_all(whole.as_bytes()).await.unwrap();
    let mut answer = String::new();
    let read = tokio::time::timeout(Duration::from_secs(30), stream.read_to_string(&mut answer));
    read.await.unwrap().unwrap();
    answer
}

#[tokio::test(flavor = "multi_thread")]
async fn a_head_is_a_get_without_its_body_and_a_get_takes_none() {
    let world = World::new(Script::default()).await;
    world.sandboxes().await.create(create("box")).await.unwrap();
    for (path, code) in
        [("/v1/health", 200), ("/v1/sandboxes/box", 200), ("/openapi.json", 200), ("/nothing", 404)]
    {
        let answer = said(&world, &format!("HEAD {path} HTTP/1.1\r\nHost: gateway\r\n")).await;
        assert!(answer.starts_with(&format!("HTTP/1.1 {code}")) && answer.ends_with("\r\n\r\n"), "{answer}");
    }
    let body = "x".repeat(5000);
    let head = format!(
        "GET /v1/sandboxes HTTP/1.1\r\nHost: gateway\r\nContent-Type: application/json\r\nContent-Length: {}\r\n",
        body.len()
    );
    let answer = exchange(&world, &format!("{head}Connection: close\r\n\r\n{body}")).await;
    assert!(answer.starts_with("HTTP/1.1 400") && answer.contains("takes no body"), "{answer}");
}

#[tokio::test(flavor = "multi_thread")]
async fn older_clients_reflect_too_and_learn_of_nothing_that_is_not_served() {
    use tonic_reflection::pb::v1alpha::{
        ServerReflectionRequest, server_reflection_client::ServerReflectionClient,
        server_reflection_request::MessageRequest, server_reflection_response::MessageResponse,
    };
    let world = World::new(Script::default()).await;
    let mut client = ServerReflectionClient::new(world.channel().await);
    let request = ServerReflectionRequest {
        host: String::new(),
        message_request: Some(MessageRequest::ListServices(String::new())),
    };
    let mut answers =
        client.server_reflection_info(tokio_stream::iter([request])).await.unwrap().into_inner();
    let answer = answers.message().await.unwrap().unwrap().message_response.unwrap();
    let MessageResponse::ListServicesResponse(services) = answer else { panic!("{answer:?}") };
    let names: Vec<String> = services.service.into_iter().map(|service| service.name).collect();
    assert!(names.iter().any(|name| name == "torpor.v1.Sandboxes"), "{names:?}");
    assert!(!names.iter().any(|name| name.starts_with("torpor.agent.")), "{names:?}");
}

/// Rights that end while calls come in: whichever is first, no call goes on without them.
#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn no_call_outlives_rights_that_end_while_it_comes_in() {
    let world = World::new(Script::default()).await;
    world.sandboxes().await.create(create("box")).await.unwrap();
    let channel = world.channel().await;
    for round in 0..40_u64 {
        let wanted =
            v1::CreateTokenRequest { name: "t".into(), role: v1::Role::Viewer.into(), ..Default::default() };
        let made = AccessClient::new(channel.clone()).create_token(wanted).await.unwrap().into_inner();
        let watches: Vec<_> = (0..8)
            .map(|_| {
                let (channel, bearer) = (channel.clone(), format!("Bearer {}", made.secret));
                tokio::spawn(async move {
                    let mut request = Request::new(v1::WatchSandboxesRequest::default());
                    request.metadata_mut().insert("authorization", bearer.parse().unwrap());
                    let mut events = SandboxesClient::new(channel).watch(request).await?.into_inner();
                    while events.message().await?.is_some() {}
                    Ok::<(), Status>(())
                })
            })
            .collect();
        tokio::time::sleep(Duration::from_micros(round * 50)).await;
        let revoke = v1::RevokeTokenRequest { id: made.token.unwrap().id, allow_missing: false };
        AccessClient::new(channel.clone()).revoke_token(revoke).await.unwrap();
        for watch in watches {
            let ended =
                tokio::time::timeout(Duration::from_secs(20), watch).await.expect("it goes on").unwrap();
            assert_eq!(ended.unwrap_err().code(), Code::Unauthenticated);
        }
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn large_bodies_are_read_a_few_at_a_time_and_all_are_answered() {
    let world = World::new(Script::default()).await;
    let body = serde_json::json!({ "spec": { "workdir": format!("/{}", "x".repeat(3 << 20)) } }).to_string();
    let head = format!(
        "POST /v1/sandboxes HTTP/1.1\r\nHost: gateway\r\nContent-Type: application/json\r\nContent-Length: {}\r\nConnection: close\r\n\r\n{body}",
        body.len()
    );
    // More than may be held at once, and some whose clients go away in the middle.
    for _ in 0..4 {
        use tokio::io::AsyncWriteExt as _;
        let mut stream = tokio::net::UnixStream::connect(world.socket()).await.unwrap();
        stream.write_all(&head.as_bytes()[..2 << 20]).await.unwrap();
    }
    let all = futures::future::join_all((0..40).map(|_| exchange(&world, &head))).await;
    for answer in all {
        assert!(answer.starts_with("HTTP/1.1 400") && answer.contains("workdir"), "{answer}");
    }
    let health = said(&world, "GET /v1/health HTTP/1.1\r\nHost: gateway\r\n").await;
    assert!(health.contains("SERVING"), "{health}");
}
