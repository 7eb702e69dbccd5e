//! Templates, and what a create brings along, through real gRPC, over the driver that only pretends.
#![allow(clippy::unwrap_used, reason = "tests")]

mod common;

use common::{World, channel, create, map, no_wait, phase, refused, target};
use tonic::{Code, Status, transport::Channel};
use torpor_proto::v1::{
    self, Phase, delete_sandbox_response::Outcome, templates_client::TemplatesClient,
    workspaces_client::WorkspacesClient,
};
use torpor_sandbox::sim::{Script, Verb};

type Client = TemplatesClient<Channel>;

const GIB: u64 = 1 << 30;

async fn templates(world: &World) -> Client {
    TemplatesClient::new(channel(world.socket()).await)
}

fn words(words: &[&str]) -> Vec<String> {
    words.iter().map(|word| (*word).to_owned()).collect()
}

/// Says something of everything.
fn full() -> v1::SandboxSpec {
    v1::SandboxSpec {
        command: words(&["serve", "--port", "80"]),
        environment: map(&[("A", "template"), ("B", "template")]),
        workdir: "/srv".into(),
        user: "www".into(),
        resources: Some(v1::Resources { cpus: Some(2), memory_bytes: Some(GIB), disk_bytes: Some(20 * GIB) }),
        restart_policy: v1::RestartPolicy::Always.into(),
        driver: "sim".into(),
        machine: "qemu".into(),
        stop_grace: Some(prost_types::Duration { seconds: 3, nanos: 0 }),
        egress: Some(v1::Egress { policy: v1::egress::Policy::None.into(), ..Default::default() }),
        ..Default::default()
    }
}

fn template(name: &str) -> v1::CreateTemplateRequest {
    v1::CreateTemplateRequest {
        name: name.into(),
        labels: map(&[("team", "blue"), ("tier", "web")]),
        annotations: map(&[("owner", "ada")]),
        spec: Some(full()),
        ..Default::default()
    }
}

async fn get(client: &mut Client, name: &str) -> Result<v1::Template, Status> {
    client.get(v1::GetTemplateRequest { template: name.into() }).await.map(tonic::Response::into_inner)
}

#[tokio::test(flavor = "multi_thread")]
async fn a_template_is_made_read_changed_by_its_version_and_removed() {
    let mut world = World::new(Script::default()).await;
    let mut client = templates(&world).await;
    let request = v1::CreateTemplateRequest { request_id: "t1".into(), ..template("web") };
    let made = client.create(request.clone()).await.unwrap().into_inner();
    assert_eq!((made.name.as_str(), made.workspace.as_str(), made.version), ("web", "default", 1));
    assert_eq!(made.spec, Some(full()), "what is absent stays absent");
    // The same request again is the same template; another one of its name is none.
    assert_eq!(client.create(request).await.unwrap().into_inner(), made);
    let taken = client.create(template("web")).await.unwrap_err();
    refused(&taken, Code::AlreadyExists, "TEMPLATE_TAKEN");
    let other = v1::CreateTemplateRequest { request_id: "t1".into(), ..template("other") };
    refused(&client.create(other).await.unwrap_err(), Code::InvalidArgument, "REQUEST_ID_REUSED");

    world.restart().await;
    let mut client = templates(&world).await;
    assert_eq!(get(&mut client, "web").await.unwrap(), made);
    assert_eq!(get(&mut client, "default/web").await.unwrap(), made);

    let change = v1::UpdateTemplateRequest {
        template: "web".into(),
        expected_version: 1,
        labels: Some(v1::StringMap::default()),
        ..Default::default()
    };
    let changed = client.update(change.clone()).await.unwrap().into_inner();
    assert_eq!((changed.version, changed.labels.len()), (2, 0));
    assert_eq!((&changed.spec, &changed.annotations), (&made.spec, &made.annotations), "left alone");
    refused(&client.update(change).await.unwrap_err(), Code::Aborted, "STALE_VERSION");
    let blind = v1::UpdateTemplateRequest { template: "web".into(), ..Default::default() };
    assert!(client.update(blind).await.unwrap_err().message().starts_with("expected_version:"));

    let delete = |expected_version, allow_missing| v1::DeleteTemplateRequest {
        template: "web".into(),
        expected_version,
        allow_missing,
    };
    refused(&client.delete(delete(1, false)).await.unwrap_err(), Code::Aborted, "STALE_VERSION");
    assert!(client.delete(delete(2, false)).await.unwrap().into_inner().removed);
    let gone = client.delete(delete(0, false)).await.unwrap_err();
    refused(&gone, Code::NotFound, "TEMPLATE_NOT_FOUND");
    assert!(!client.delete(delete(0, true)).await.unwrap().into_inner().removed);
    refused(&get(&mut client, "web").await.unwrap_err(), Code::NotFound, "TEMPLATE_NOT_FOUND");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_create_takes_from_its_template_what_it_does_not_say_itself() {
    let world = World::new(Script::default()).await;
    let mut client = templates(&world).await;
    client.create(template("web")).await.unwrap();
    let mut sandboxes = world.sandboxes().await;
    let of = |name: &str| v1::CreateSandboxRequest { template: "web".into(), ..create(name) };

    let plain = sandboxes.create(of("plain")).await.unwrap().into_inner();
    let spec = plain.spec.unwrap();
    assert_eq!(v1::SandboxSpec { image: String::new(), ..spec.clone() }, full());
    assert_eq!(spec.image, "debian", "what nobody says is the gateway's default");
    assert_eq!(plain.labels, map(&[("team", "blue"), ("tier", "web")]));
    let provenance = [("owner", "ada"), ("torpor.dev/template", "web"), ("torpor.dev/template-version", "1")];
    assert_eq!(plain.annotations, map(&provenance));

    let own = v1::SandboxSpec {
        command: words(&["sleep"]),
        environment: map(&[("B", "own"), ("C", "own")]),
        resources: Some(v1::Resources { memory_bytes: Some(2 * GIB), ..Default::default() }),
        restart_policy: v1::RestartPolicy::Never.into(),
        ..Default::default()
    };
    let request = v1::CreateSandboxRequest {
        spec: Some(own),
        labels: map(&[("team", "red")]),
        annotations: map(&[("owner", "eve")]),
        request_id: "c1".into(),
        ..of("own")
    };
    let made = sandboxes.create(request.clone()).await.unwrap().into_inner();
    let spec = made.spec.clone().unwrap();
    assert_eq!(spec.command, ["sleep"], "a list is taken whole");
    assert_eq!(spec.environment, map(&[("A", "template"), ("B", "own"), ("C", "own")]), "maps are merged");
    let resources = spec.resources.unwrap();
    assert_eq!((resources.cpus, resources.memory_bytes), (Some(2), Some(2 * GIB)));
    assert_eq!((spec.restart_policy(), spec.workdir.as_str()), (v1::RestartPolicy::Never, "/srv"));
    assert_eq!(made.labels, map(&[("team", "red"), ("tier", "web")]));
    assert_eq!(made.annotations["owner"], "eve");

    // Each keeps to the bounds, and so must both together.
    let large = "x".repeat(200 << 10);
    let annotated = v1::CreateTemplateRequest { annotations: map(&[("a", &large)]), ..template("large") };
    client.create(annotated).await.unwrap();
    let request_of_both = v1::CreateSandboxRequest {
        template: "large".into(),
        annotations: map(&[("b", &large)]),
        ..create("both")
    };
    let error = sandboxes.create(request_of_both).await.unwrap_err();
    assert!(error.message().starts_with("annotations:"), "{error:?}");

    // A retry finds the first result, whatever has become of the template.
    client.delete(v1::DeleteTemplateRequest { template: "web".into(), ..Default::default() }).await.unwrap();
    assert_eq!(sandboxes.create(request).await.unwrap().into_inner().id, made.id);
    let missing = sandboxes.create(of("late")).await.unwrap_err();
    refused(&missing, Code::NotFound, "TEMPLATE_NOT_FOUND");
    assert_eq!(world.sim.stored().len(), 2);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_template_that_could_never_be_used_is_refused_by_its_field() {
    let world = World::new(Script::default()).await;
    let mut client = templates(&world).await;
    let with = |spec| v1::CreateTemplateRequest { spec: Some(spec), ..template("web") };
    let resources = |cpus, memory_bytes, disk_bytes| Some(v1::Resources { cpus, memory_bytes, disk_bytes });
    let bad = [
        ("name:", v1::CreateTemplateRequest { name: "Not A Name".into(), ..template("web") }),
        ("labels:", v1::CreateTemplateRequest { labels: map(&[("torpor.dev/x", "")]), ..template("web") }),
        (
            "annotations:",
            v1::CreateTemplateRequest {
                annotations: map(&[("torpor.dev/template", "x")]),
                ..template("web")
            },
        ),
        ("resources.cpus:", with(v1::SandboxSpec { resources: resources(Some(0), None, None), ..full() })),
        (
            "resources.memory_bytes:",
            with(v1::SandboxSpec { resources: resources(None, Some(1), None), ..full() }),
        ),
        (
            "resources.disk_bytes:",
            with(v1::SandboxSpec { resources: resources(None, None, Some(0)), ..full() }),
        ),
        ("driver:", with(v1::SandboxSpec { driver: "cloud".into(), ..full() })),
        ("machine:", with(v1::SandboxSpec { machine: "xen".into(), ..full() })),
        ("environment:", with(v1::SandboxSpec { environment: map(&[("A=B", "")]), ..full() })),
        ("workdir:", with(v1::SandboxSpec { workdir: "relative".into(), ..full() })),
        ("restart_policy:", with(v1::SandboxSpec { restart_policy: 9, ..full() })),
    ];
    for (field, request) in bad {
        let error = client.create(request).await.unwrap_err();
        assert_eq!(error.code(), Code::InvalidArgument, "{field} {error:?}");
        assert!(error.message().starts_with(field), "{field} {error:?}");
    }
    let list = client.list(v1::ListTemplatesRequest::default()).await.unwrap().into_inner();
    assert!(list.templates.is_empty());
}

#[tokio::test(flavor = "multi_thread")]
async fn templates_are_listed_by_name_in_pages_and_by_labels() {
    let world = World::new(Script::default()).await;
    let mut client = templates(&world).await;
    for number in (0..25).rev() {
        let parity = if number % 2 == 0 { "even" } else { "odd" };
        let labels = map(&[("parity", parity)]);
        let name = format!("t{number:02}");
        client.create(v1::CreateTemplateRequest { labels, ..template(&name) }).await.unwrap();
    }
    let mut names = Vec::new();
    let mut request =
        v1::ListTemplatesRequest { page_size: 4, label_selector: "parity=even".into(), ..Default::default() };
    loop {
        let page = client.list(request.clone()).await.unwrap().into_inner();
        assert!(page.templates.len() <= 4);
        names.extend(page.templates.into_iter().map(|template| template.name));
        if page.next_page_token.is_empty() {
            break;
        }
        request.page_token = page.next_page_token;
    }
    let wanted: Vec<_> = (0..25).step_by(2).map(|number| format!("t{number:02}")).collect();
    assert_eq!(names, wanted);
    for bad in [
        v1::ListTemplatesRequest { page_token: "p1.3".into(), ..Default::default() },
        v1::ListTemplatesRequest { page_size: -1, ..Default::default() },
        v1::ListTemplatesRequest { page_size: 1001, ..Default::default() },
        v1::ListTemplatesRequest { label_selector: "a b=c".into(), ..Default::default() },
    ] {
        assert_eq!(client.list(bad).await.unwrap_err().code(), Code::InvalidArgument);
    }
    // Clients take messages of 4 MiB: large templates come on more pages.
    let large = "x".repeat(100 << 10);
    for number in 0..25 {
        let spec = v1::SandboxSpec { environment: map(&[("BIG", &large), ("BIGGER", &large)]), ..full() };
        let labels = map(&[("size", "large")]);
        let name = format!("large{number:02}");
        let request = v1::CreateTemplateRequest { labels, spec: Some(spec), ..template(&name) };
        client.create(request).await.unwrap();
    }
    let mut request = v1::ListTemplatesRequest { label_selector: "size=large".into(), ..Default::default() };
    let (mut found, mut pages) = (0, 0);
    loop {
        let page = client.list(request.clone()).await.unwrap().into_inner();
        (found, pages) = (found + page.templates.len(), pages + 1);
        if page.next_page_token.is_empty() {
            break;
        }
        request.page_token = page.next_page_token;
    }
    assert!(found == 25 && pages > 1, "{found} on {pages} pages");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_name_is_a_templates_own_in_its_workspace_only() {
    let world = World::new(Script::default()).await;
    let mut client = templates(&world).await;
    let mut workspaces = WorkspacesClient::new(channel(world.socket()).await);
    workspaces
        .create(v1::CreateWorkspaceRequest { name: "team".into(), ..Default::default() })
        .await
        .unwrap();
    client.create(template("web")).await.unwrap();
    let own = v1::CreateTemplateRequest {
        spec: Some(v1::SandboxSpec { command: words(&["of-team"]), ..full() }),
        ..template("team/web")
    };
    let made = client.create(own).await.unwrap().into_inner();
    assert_eq!((made.workspace.as_str(), made.name.as_str()), ("team", "web"));
    let mut sandboxes = world.sandboxes().await;
    let of = |name: &str| v1::CreateSandboxRequest { template: "web".into(), ..create(name) };
    let theirs = sandboxes.create(of("team/box")).await.unwrap().into_inner();
    assert_eq!(theirs.spec.unwrap().command, ["of-team"]);
    let ours = sandboxes.create(of("box")).await.unwrap().into_inner();
    assert_eq!(ours.spec.unwrap().command, full().command);
    let nowhere = client.create(template("nowhere/web")).await.unwrap_err();
    assert_eq!(nowhere.code(), Code::NotFound);

    let list = client.list(v1::ListTemplatesRequest::default()).await.unwrap().into_inner();
    assert_eq!(list.templates.len(), 1);
    let delete = v1::DeleteSandboxRequest { target: target("team/box"), allow_missing: false };
    sandboxes.delete(delete).await.unwrap();
    let gone = v1::DeleteWorkspaceRequest { name: "team".into(), ..Default::default() };
    workspaces.delete(gone).await.unwrap();
    assert_eq!(get(&mut client, "team/web").await.unwrap_err().code(), Code::NotFound, "it went along");
}

fn free_port() -> u16 {
    std::net::TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port()
}

async fn exposed(world: &World, name: &str) -> Vec<v1::ExposedPort> {
    let request = v1::ListExposedRequest { sandbox: name.into() };
    world.sandboxes().await.list_exposed(request).await.unwrap().into_inner().ports
}

#[tokio::test(flavor = "multi_thread")]
async fn ports_are_exposed_from_the_beginning_or_nothing_is_made() {
    let world = World::new(Script::default()).await;
    let mut client = world.sandboxes().await;
    let port = |port, host: &str, wake| v1::ExposeAtCreate { port, host: host.into(), wake };
    let host = format!("127.0.0.1:{}", free_port());
    let request = v1::CreateSandboxRequest {
        expose: vec![port(80, &host, true), port(8080, "", false)],
        request_id: "c1".into(),
        ..create("web")
    };
    let made = client.create(request.clone()).await.unwrap().into_inner();
    let ports = exposed(&world, "web").await;
    assert_eq!(ports.iter().map(|p| (p.port, p.wake)).collect::<Vec<_>>(), [(80, true), (8080, false)]);
    assert_eq!(ports[0].host, host);
    assert!(ports.iter().all(|port| port.problem.is_empty()), "{ports:?}");
    tokio::net::TcpStream::connect(&host).await.unwrap();
    // A retry of the whole is the first one.
    assert_eq!(client.create(request).await.unwrap().into_inner().id, made.id);

    // One that can't be refuses all of it.
    let taken = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let taken = taken.local_addr().unwrap().to_string();
    let free = format!("127.0.0.1:{}", free_port());
    let bad = [
        (Code::AlreadyExists, vec![port(81, &free, false), port(80, &host, false)]),
        (Code::InvalidArgument, vec![port(81, &free, false), port(0, "", false)]),
        (Code::InvalidArgument, vec![port(81, &free, false), port(81, "", false)]),
        (Code::InvalidArgument, vec![port(81, &free, false), port(82, "somewhere", false)]),
        (Code::InvalidArgument, (1..=65).map(|number| port(number, "", false)).collect()),
    ];
    for (code, expose) in bad {
        let error = client.create(v1::CreateSandboxRequest { expose, ..create("bad") }).await.unwrap_err();
        assert_eq!(error.code(), code, "{error:?}");
        let missing = client.get(v1::GetSandboxRequest { sandbox: "bad".into() }).await.unwrap_err();
        assert_eq!(missing.code(), Code::NotFound, "nothing is made");
        // The socket of the port that could be is given back.
        tokio::net::TcpListener::bind(&free).await.unwrap();
    }
    drop(taken);
    assert_eq!(world.sim.stored().len(), 1);
    // A name that is taken gives its sockets back, too.
    let again = v1::CreateSandboxRequest { expose: vec![port(81, &free, false)], ..create("web") };
    assert_eq!(client.create(again).await.unwrap_err().code(), Code::AlreadyExists);
    tokio::net::TcpListener::bind(&free).await.unwrap();

    let mut world = world;
    world.restart().await;
    let ports = exposed(&world, "web").await;
    assert_eq!((ports.len(), ports[0].host.as_str()), (2, host.as_str()));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_delete_says_what_it_came_to_and_a_retry_says_the_same() {
    let world = World::new(Script::default()).await;
    let mut client = world.sandboxes().await;
    let delete = |name: &str, id: &str, wait: bool, allow_missing: bool| v1::DeleteSandboxRequest {
        target: Some(v1::Target { request_id: id.into(), wait, ..no_wait(name).unwrap() }),
        allow_missing,
    };
    let first = client.create(create("web")).await.unwrap().into_inner();
    let done = client.delete(delete("web", "d1", true, false)).await.unwrap().into_inner();
    assert_eq!((done.outcome(), done.id), (Outcome::Completed, first.id.clone()));
    // The name lives on, as another sandbox: the retry does not touch it.
    let second = client.create(create("web")).await.unwrap().into_inner();
    let again = client.delete(delete("web", "d1", true, false)).await.unwrap().into_inner();
    assert_eq!((again.outcome(), again.id), (Outcome::Completed, first.id.clone()));
    assert_eq!(
        client.get(v1::GetSandboxRequest { sandbox: "web".into() }).await.unwrap().into_inner().id,
        second.id
    );
    // By the id of one that is gone.
    let gone = client.delete(delete(&first.id, "", false, false)).await.unwrap_err();
    refused(&gone, Code::NotFound, "SANDBOX_NOT_FOUND");
    let gone = client.delete(delete(&first.id, "", false, true)).await.unwrap().into_inner();
    assert_eq!((gone.outcome(), gone.id.as_str()), (Outcome::AlreadyAbsent, ""));

    // One that was absent stays so for its request, whatever was made meanwhile.
    let absent = client.delete(delete("later", "d2", true, true)).await.unwrap().into_inner();
    assert_eq!(absent.outcome(), Outcome::AlreadyAbsent);
    let later = client.create(create("later")).await.unwrap().into_inner();
    let absent = client.delete(delete("later", "d2", true, true)).await.unwrap().into_inner();
    assert_eq!(absent.outcome(), Outcome::AlreadyAbsent);
    let there = client.get(v1::GetSandboxRequest { sandbox: "later".into() }).await.unwrap().into_inner();
    assert_eq!((phase(&there), there.id), (Phase::Ready, later.id));
    let reused = client.delete(delete("web", "d2", true, true)).await.unwrap_err();
    refused(&reused, Code::InvalidArgument, "REQUEST_ID_REUSED");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_wait_for_a_delete_is_bound_to_the_id() {
    let world = World::new(common::slow()).await;
    let mut client = world.sandboxes().await;
    let first = client.create(create("web")).await.unwrap().into_inner();
    let accepted = v1::DeleteSandboxRequest { target: no_wait("web"), allow_missing: false };
    let accepted = client.delete(accepted).await.unwrap().into_inner();
    assert_eq!((accepted.outcome(), accepted.id), (Outcome::Accepted, first.id.clone()));
    let (mut waiting, id) = (client.clone(), first.id.clone());
    let waiting = tokio::spawn(async move {
        let request = v1::DeleteSandboxRequest { target: target(&id), allow_missing: true };
        waiting.delete(request).await.unwrap().into_inner()
    });
    // As soon as the name is free another one has it, and keeps it.
    let second = loop {
        match client.create(v1::CreateSandboxRequest { wait: false, ..create("web") }).await {
            Ok(made) => break made.into_inner(),
            Err(error) => {
                refused(&error, Code::AlreadyExists, "NAME_TAKEN");
                tokio::time::sleep(std::time::Duration::from_millis(2)).await;
            }
        }
    };
    let done = tokio::time::timeout(std::time::Duration::from_secs(20), waiting).await.unwrap().unwrap();
    assert!(
        (done.outcome() == Outcome::Completed && done.id == first.id)
            || done.outcome() == Outcome::AlreadyAbsent,
        "{done:?}"
    );
    assert_ne!(second.id, first.id);
    assert_eq!(
        client.get(v1::GetSandboxRequest { sandbox: "web".into() }).await.unwrap().into_inner().id,
        second.id
    );
    assert_eq!(world.sim.calls(Verb::Delete), 1);
}
