//! The other interface: retries, and connections whose session ends. The unmodified client is in tests/openshell.

use std::time::Duration;

use tokio::{net::TcpListener, time::timeout};
use tonic::{Code, Status, Streaming, transport::Channel};
use torpor_proto::{
    openshell::{
        datamodel::v1 as dm,
        v1::{self as os, DeletionOutcome, open_shell_client::OpenShellClient},
    },
    v1::{self, workspaces_client::WorkspacesClient},
};
use torpor_sandbox::sim::Script;

use super::common::{World, create, error_info, refused, target};

type Client = OpenShellClient<Channel>;

const LIMIT: Duration = Duration::from_secs(20);

async fn client(world: &World) -> Client {
    OpenShellClient::new(world.channel().await)
}

#[tokio::test]
async fn a_late_retry_does_not_bring_a_removed_member_back() {
    let world = World::new(Script::default()).await;
    let mut client = client(&world).await;
    let add = |subject: &str| os::AddWorkspaceMemberRequest {
        principal_subject: subject.into(),
        role: os::WorkspaceRole::Admin.into(),
        request_id: "m1".into(),
        ..Default::default()
    };
    let first = client.add_workspace_member(add("uid:77")).await.unwrap().into_inner();
    let remove =
        os::RemoveWorkspaceMemberRequest { principal_subject: "uid:77".into(), ..Default::default() };
    client.remove_workspace_member(remove).await.unwrap();
    assert_eq!(client.add_workspace_member(add("uid:77")).await.unwrap().into_inner(), first);
    let members = client.list_workspace_members(os::ListWorkspaceMembersRequest::default()).await.unwrap();
    assert!(members.into_inner().members.is_empty(), "it is no member any more");
    let other = client.add_workspace_member(add("uid:78")).await.unwrap_err();
    refused(&other, Code::InvalidArgument, "REQUEST_ID_REUSED");
}

#[tokio::test]
async fn request_ids_of_new_workspaces_stand_for_all_that_was_asked() {
    let world = World::new(Script::default()).await;
    let mut client = WorkspacesClient::new(world.channel().await);
    let ask = |name: &str, owner: &str, id: &str| v1::CreateWorkspaceRequest {
        name: name.into(),
        owner: owner.into(),
        request_id: id.into(),
        ..Default::default()
    };
    let first = client.create(ask("one", "uid:5", "r1")).await.unwrap().into_inner();
    assert_eq!(client.create(ask("one", "uid:5", "r1")).await.unwrap().into_inner(), first);
    for other in [ask("one", "uid:6", "r1"), ask("two", "uid:5", "r1")] {
        refused(&client.create(other).await.unwrap_err(), Code::InvalidArgument, "REQUEST_ID_REUSED");
    }
    assert_eq!(client.create(ask("one", "uid:5", "r2")).await.unwrap_err().code(), Code::AlreadyExists);
    for unfit in ["x".repeat(129), "a\nb".to_owned()] {
        let error = client.create(ask("three", "", &unfit)).await.unwrap_err();
        assert_eq!(error.code(), Code::InvalidArgument, "{error:?}");
        assert!(error.message().starts_with("request_id"), "{error:?}");
    }
    // Nor is there anybody whom these could be.
    for subject in ["uid:abc", "uid:01000", "uid:4294967296", "uid:-1", "uid:", "1000", "token:x"] {
        let error = client.create(ask("three", subject, "")).await.unwrap_err();
        assert_eq!(error.code(), Code::InvalidArgument, "{subject}: {error:?}");
    }
}

#[tokio::test]
async fn a_retry_is_about_the_sandbox_that_the_first_one_was_about() {
    let world = World::new(Script::default()).await;
    let mut client = client(&world).await;
    let made = world.sandboxes().await.create(create("box")).await.unwrap().into_inner();
    let stop = os::StopSandboxRequest { name: "box".into(), request_id: "s1".into(), ..Default::default() };
    let stopped = client.stop_sandbox(stop.clone()).await.unwrap().into_inner();
    assert_eq!(stopped.sandbox.unwrap().metadata.unwrap().id, made.id);
    let delete = |name: &str, allow_missing| os::DeleteSandboxRequest {
        name: name.into(),
        request_id: "d1".into(),
        allow_missing,
        ..Default::default()
    };
    for allow_missing in [false, true] {
        // By its id, which nothing else has ever had.
        let request = os::DeleteSandboxRequest {
            request_id: format!("d-{allow_missing}"),
            ..delete(&made.id, allow_missing)
        };
        let first = client.delete_sandbox(request.clone()).await;
        if !allow_missing {
            assert_eq!(first.unwrap().into_inner().sandbox_id, made.id);
            let gone = v1::GetSandboxRequest { sandbox: made.id.clone() };
            let mut all = world.sandboxes().await;
            timeout(LIMIT, async { while all.get(gone.clone()).await.is_ok() {} }).await.unwrap();
            let again = client.delete_sandbox(request).await.unwrap().into_inner();
            assert_eq!((again.outcome(), again.sandbox_id), (DeletionOutcome::Completed, made.id.clone()));
        } else {
            assert_eq!(first.unwrap().into_inner().outcome(), DeletionOutcome::AlreadyAbsent);
        }
    }
    world.sandboxes().await.create(create("box")).await.unwrap();
    let error = client.stop_sandbox(stop).await.unwrap_err();
    assert_eq!(error.code(), Code::NotFound, "{error:?}");
    let get = os::GetSandboxRequest { name: "box".into(), ..Default::default() };
    let anew = client.get_sandbox(get).await.unwrap().into_inner().sandbox.unwrap();
    assert_ne!(anew.metadata.unwrap().id, made.id);
    assert_eq!(anew.status.unwrap().phase(), os::SandboxPhase::Ready, "nobody has stopped it");
}

/// A connection to a server of the test, through box and by a session.
async fn connected(client: &mut Client) -> (String, Streaming<os::TcpForwardFrame>) {
    use os::{tcp_forward_frame::Payload, tcp_forward_init::Target};
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let port = listener.local_addr().unwrap().port();
    tokio::spawn(async move {
        let (mut stream, _) = listener.accept().await.unwrap();
        tokio::io::AsyncWriteExt::write_all(&mut stream, b"hello").await.unwrap();
        // Held open until the other side goes.
        let _ = tokio::io::AsyncReadExt::read(&mut stream, &mut [0]).await;
    });
    let ask = os::CreateSshSessionRequest { sandbox: "box".into(), ..Default::default() };
    let session = client.create_ssh_session(ask).await.unwrap().into_inner();
    let init = os::TcpForwardInit {
        sandbox: "box".into(),
        target: Some(Target::Tcp(os::TcpRelayTarget { host: String::new(), port: port.into() })),
        authorization_token: session.token.clone(),
        ..Default::default()
    };
    let begin = os::TcpForwardFrame { payload: Some(Payload::Init(init)) };
    let frames = tokio_stream::StreamExt::chain(tokio_stream::iter([begin]), tokio_stream::pending());
    let mut back = client.forward_tcp(frames).await.unwrap().into_inner();
    let first = timeout(LIMIT, back.message()).await.unwrap().unwrap().unwrap();
    assert_eq!(first.payload, Some(Payload::Data("hello".into())));
    (session.token, back)
}

async fn end_of(mut stream: Streaming<os::TcpForwardFrame>) -> Status {
    timeout(LIMIT, stream.message()).await.expect("it ends").expect_err("with a status")
}

#[tokio::test]
async fn a_connection_says_why_it_ends_with_its_session() {
    let world = World::with_agent(Script::default()).await;
    let mut client = client(&world).await;
    world.sandboxes().await.create(create("box")).await.unwrap();
    let (token, stream) = connected(&mut client).await;
    client.revoke_ssh_session(os::RevokeSshSessionRequest { token, allow_missing: false }).await.unwrap();
    refused(&end_of(stream).await, Code::Aborted, "SSH_SESSION_REVOKED");
    let (_, stream) = connected(&mut client).await;
    let suspend = v1::SuspendRequest { target: target("box"), ..Default::default() };
    world.sandboxes().await.suspend(suspend).await.unwrap();
    let ended = end_of(stream).await;
    assert_ne!(error_info(&ended).0, "SSH_SESSION_REVOKED", "{ended:?}");
    assert!(ended.message().contains("Suspend"), "{ended:?}");
}

#[tokio::test]
async fn messages_of_every_service_may_be_as_large_as_is_said() {
    let world = World::new(Script::default()).await;
    let mut client = client(&world).await;
    let name = "x".repeat(5 << 20);
    let mut templates =
        v1::templates_client::TemplatesClient::new(world.channel().await).max_encoding_message_size(8 << 20);
    let error = templates.get(v1::GetTemplateRequest { template: name }).await.unwrap_err();
    assert_ne!(error.code(), Code::OutOfRange, "{error:?}");
    // What no metadata says is a provider's, and stays so: a credential that reads as it is shown.
    let provider = dm::Provider {
        metadata: Some(dm::ObjectMeta { name: "keys".into(), ..Default::default() }),
        credentials: [("KEY".to_owned(), "REDACTED".to_owned())].into(),
        ..Default::default()
    };
    let made = os::CreateProviderRequest { provider: Some(provider), ..Default::default() };
    assert_eq!(client.create_provider(made).await.unwrap_err().code(), Code::InvalidArgument);
}
