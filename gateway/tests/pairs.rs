//! Every verb in every phase through the real API: the answers are pinned in docs/reference/verbs.md, made by
//! `BLESS=1 cargo test -p torpor-gateway --test pairs`. What was accepted comes true when the transition goes on; two
//! clients that ask for two things at once get one of them.
#![allow(clippy::unwrap_used, reason = "tests")]

mod common;

use std::{fmt::Write as _, path::PathBuf, time::Duration};

use common::{World, create, error_info, no_wait, phase};
use tonic::{Code, Status, transport::Channel};
use torpor_proto::v1::{self, Phase, sandboxes_client::SandboxesClient};
use torpor_sandbox::sim::Script;

type Client = SandboxesClient<Channel>;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Verb {
    Create,
    Get,
    Suspend,
    SuspendMemory,
    Resume,
    Stop,
    Start,
    Delete,
    Exec,
    History,
    SetEgress,
    Update,
    Relabel,
    Expose,
    Forward,
}

use Verb::*;

const VERBS: [Verb; 15] = [
    Create,
    Get,
    Suspend,
    SuspendMemory,
    Resume,
    Stop,
    Start,
    Delete,
    Exec,
    History,
    SetEgress,
    Update,
    Relabel,
    Expose,
    Forward,
];
const CHANGES: [Verb; 6] = [Suspend, SuspendMemory, Resume, Stop, Start, Delete];

impl Verb {
    fn title(self) -> &'static str {
        match self {
            Create => "create (the same name)",
            Get => "get",
            Suspend => "suspend",
            SuspendMemory => "suspend --memory",
            Resume => "resume",
            Stop => "stop",
            Start => "start",
            Delete => "delete",
            Exec => "exec",
            History => "history",
            SetEgress => "network --egress (another policy)",
            Update => "update (another command)",
            Relabel => "update (another label)",
            Expose => "expose",
            Forward => "forward",
        }
    }

    /// Where a sandbox is to rest; none: it is to be gone.
    fn wish(self) -> Option<Phase> {
        match self {
            Suspend | SuspendMemory => Some(Phase::Suspended),
            Stop => Some(Phase::Stopped),
            Resume | Start => Some(Phase::Ready),
            _ => None,
        }
    }
}

/// What a verb leaves in the record, as the answer says it.
async fn ask(client: &mut Client, verb: Verb, name: &str) -> Result<String, Status> {
    let target = no_wait(name);
    let sandbox = match verb {
        Create => client.create(v1::CreateSandboxRequest { wait: false, ..create(name) }).await?,
        Get => client.get(v1::GetSandboxRequest { sandbox: name.into() }).await?,
        Suspend => client.suspend(v1::SuspendRequest { target, keep: 0 }).await?,
        SuspendMemory => client.suspend(v1::SuspendRequest { target, keep: v1::Keep::Memory.into() }).await?,
        Resume => client.resume(v1::ResumeRequest { target, ..Default::default() }).await?,
        Stop => client.stop(v1::StopRequest { target }).await?,
        Start => client.start(v1::StartRequest { target }).await?,
        Delete => {
            let done = client.delete(v1::DeleteSandboxRequest { target, allow_missing: false }).await?;
            return Ok(format!("{:?}", done.into_inner().outcome()));
        }
        Exec => {
            let start =
                v1::ExecStart { sandbox: name.into(), argv: vec!["true".into()], ..Default::default() };
            let input = v1::ExecInput { kind: Some(v1::exec_input::Kind::Start(start)) };
            client.exec(futures::stream::iter([input])).await?;
            return Ok("runs".to_owned());
        }
        History => {
            client.history(v1::HistoryRequest { sandbox: name.into(), ..Default::default() }).await?;
            return Ok("answered".to_owned());
        }
        SetEgress => {
            let egress = v1::Egress { policy: v1::egress::Policy::None.into(), ..Default::default() };
            client.set_egress(v1::SetEgressRequest { target, egress: Some(egress) }).await?
        }
        Update | Relabel => {
            let get = v1::GetSandboxRequest { sandbox: name.into() };
            let expected_version = client.get(get).await?.into_inner().version;
            let target = target.map(|target| v1::Target { expected_version, ..target });
            let command = (verb == Update).then(|| v1::StringList { values: vec!["other".into()] });
            let values = [("other".to_owned(), "label".to_owned())].into();
            let labels = (verb == Relabel).then_some(v1::StringMap { values });
            client.update(v1::UpdateSandboxRequest { target, command, labels, ..Default::default() }).await?
        }
        Expose => {
            let port = v1::ExposeRequest { sandbox: name.into(), port: 80, ..Default::default() };
            client.expose(port).await?;
            return Ok("exposed".to_owned());
        }
        Forward => {
            let start = v1::ForwardStart { sandbox: name.into(), port: 80 };
            let input = v1::ForwardInput { kind: Some(v1::forward_input::Kind::Start(start)) };
            client.forward(futures::stream::iter([input])).await?;
            return Ok("connected".to_owned());
        }
    };
    let sandbox = sandbox.into_inner();
    let then = &sandbox.status.as_ref().unwrap().then;
    let then = if then.is_empty() { String::new() } else { format!(", then {then}") };
    Ok(format!("{:?}{then}", phase(&sandbox)))
}

/// As a cell of the table: a success with the phase in the answer, or the code, the reason and the next command.
fn cell(answer: &Result<String, Status>) -> String {
    match answer {
        Ok(text) => text.clone(),
        Err(status) => {
            let (reason, next) = error_info(status);
            let next =
                if next.is_empty() { String::new() } else { format!(" → `{}`", next.replace('|', "\\|")) };
            let code = format!("{:?}", status.code());
            format!("{code} `{reason}`{next}")
        }
    }
}

/// A row of the table: a phase, how to get there, and what goes on there.
struct Row {
    title: &'static str,
    /// Asked for one after the other and waited for.
    before: &'static [Verb],
    command: &'static [&'static str],
    /// Asked for when verbs have become slow, so that it is under way.
    last: Option<Verb>,
    /// The phase in which every verb is asked for.
    phase: Phase,
}

const ROWS: [Row; 12] = [
    Row { title: "Provisioning", before: &[], command: &[], last: Some(Create), phase: Phase::Provisioning },
    Row { title: "Ready", before: &[Create], command: &[], last: None, phase: Phase::Ready },
    Row {
        title: "Suspending",
        before: &[Create],
        command: &[],
        last: Some(Suspend),
        phase: Phase::Suspending,
    },
    Row {
        title: "Suspended (disk)",
        before: &[Create, Suspend],
        command: &[],
        last: None,
        phase: Phase::Suspended,
    },
    Row {
        title: "Suspended (memory)",
        before: &[Create, SuspendMemory],
        command: &[],
        last: None,
        phase: Phase::Suspended,
    },
    Row {
        title: "Resuming",
        before: &[Create, Suspend],
        command: &[],
        last: Some(Resume),
        phase: Phase::Resuming,
    },
    Row { title: "Stopping", before: &[Create], command: &[], last: Some(Stop), phase: Phase::Stopping },
    Row { title: "Stopped", before: &[Create, Stop], command: &[], last: None, phase: Phase::Stopped },
    Row {
        title: "Starting",
        before: &[Create, Stop],
        command: &[],
        last: Some(Start),
        phase: Phase::Starting,
    },
    Row {
        title: "Completed",
        before: &[Create],
        command: &["exit", "0"],
        last: None,
        phase: Phase::Completed,
    },
    Row { title: "Error", before: &[Create], command: &["panic"], last: None, phase: Phase::Error },
    Row { title: "Deleting", before: &[Create], command: &[], last: Some(Delete), phase: Phase::Deleting },
];

const SLOW: Duration = Duration::from_millis(600);

async fn now(client: &mut Client, name: &str) -> Option<v1::Sandbox> {
    match client.get(v1::GetSandboxRequest { sandbox: name.into() }).await {
        Ok(sandbox) => Some(sandbox.into_inner()),
        Err(status) if status.code() == Code::NotFound => None,
        Err(status) => panic!("{status:?}"),
    }
}

async fn until(client: &mut Client, name: &str, wanted: impl Fn(Option<&v1::Sandbox>) -> bool, what: &str) {
    for _ in 0..1500 {
        let seen = now(client, name).await;
        if wanted(seen.as_ref()) {
            return;
        }
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
    let seen = now(client, name).await.map(|s| s.status);
    panic!("{what}: {seen:?}");
}

fn rests_in(wanted: Option<Phase>) -> impl Fn(Option<&v1::Sandbox>) -> bool {
    move |seen| match (seen, wanted) {
        (None, None) => true,
        (Some(seen), Some(wanted)) => phase(seen) == wanted && seen.status.as_ref().unwrap().then.is_empty(),
        _ => false,
    }
}

fn name_of(verb: Verb) -> String {
    format!("sandbox-{}", VERBS.iter().position(|v| *v == verb).unwrap())
}

async fn make(client: &mut Client, name: &str, command: &[&str], wait: bool) {
    let command = command.iter().map(|&word| word.to_owned()).collect();
    let spec = Some(v1::SandboxSpec { command, ..Default::default() });
    let request = v1::CreateSandboxRequest { spec, wait: false, ..create(name) };
    client.create(request).await.unwrap();
    if wait {
        let settled = |s: Option<&v1::Sandbox>| {
            s.is_some_and(|s| matches!(phase(s), Phase::Ready | Phase::Completed | Phase::Error))
        };
        until(client, name, settled, "made").await;
    }
}

/// The answers of one row, after which what was accepted has come true.
async fn answers(row: &Row) -> Vec<String> {
    let world = World::with(Script::default(), |config| config.enable_sandbox_updates = true).await;
    let mut client = world.sandboxes().await;
    for verb in VERBS {
        let name = name_of(verb);
        for step in row.before {
            match step {
                Create => make(&mut client, &name, row.command, true).await,
                step => {
                    ask(&mut client, *step, &name).await.unwrap();
                    until(&mut client, &name, rests_in(step.wish()), row.title).await;
                }
            }
        }
    }
    if row.last.is_none() {
        for verb in VERBS {
            until(&mut client, &name_of(verb), rests_in(Some(row.phase)), row.title).await;
        }
        // What is left of a run that failed is put down a moment later.
        let running = if row.phase == Phase::Ready { VERBS.len() } else { 0 };
        let end = tokio::time::Instant::now() + Duration::from_secs(15);
        while world.sim.running().len() != running && tokio::time::Instant::now() < end {
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
    }
    world.sim.set_script(Script { delay: (SLOW, SLOW), ..Script::default() });
    let mut cells = Vec::new();
    for verb in VERBS {
        let name = name_of(verb);
        match row.last {
            Some(Create) => make(&mut client, &name, row.command, false).await,
            Some(last) => drop(ask(&mut client, last, &name).await.unwrap()),
            None => {}
        }
        let seen = now(&mut client, &name).await.unwrap();
        assert_eq!(phase(&seen), row.phase, "{}: {}", row.title, verb.title());
        let answer = ask(&mut client, verb, &name).await;
        let seen = cell(&answer).replace(&name, "NAME");
        cells.push(seen);
        // Looked at below, once all have been asked.
        drop(answer);
    }
    world.sim.set_script(Script::default());
    for (verb, cell) in VERBS.iter().zip(&cells) {
        let name = name_of(*verb);
        let accepted = CHANGES.contains(verb) && !cell.contains('`');
        let wanted = match (accepted, row.last) {
            (true, _) => verb.wish(),
            (false, Some(Create)) => Some(Phase::Ready),
            (false, Some(last)) => last.wish(),
            (false, None) => Some(row.phase),
        };
        // A main command that ends does so again after every start.
        let ends = !row.command.is_empty() && wanted == Some(Phase::Ready);
        let wanted = if ends { Some(row.phase) } else { wanted };
        until(&mut client, &name, rests_in(wanted), &format!("{}, then {}", row.title, verb.title())).await;
    }
    assert!(world.sim.violations().is_empty(), "{}: {:?}", row.title, world.sim.violations());
    cells
}

fn page(rows: &[(&str, Vec<String>)]) -> String {
    let mut text = String::from(
        "# What the API answers to every verb in every phase\n\n\
         Made by `BLESS=1 cargo test -p torpor-gateway --test pairs` from the answers of a gateway; the test fails when this \
         page and the answers differ. A phase alone: success, with the record in that phase as the answer (nothing is waited \
         for). Otherwise the gRPC code, the reason in `google.rpc.ErrorInfo` and the command to use instead. `exec` and \
         `forward` ask for more than the sim driver of this test has, so that their answer in Ready is the driver's.\n",
    );
    for (at, verb) in VERBS.iter().enumerate() {
        let _ = write!(text, "\n## {}\n\n| phase | answer |\n|---|---|\n", verb.title());
        for (title, cells) in rows {
            let _ = writeln!(text, "| {title} | {} |", cells[at]);
        }
    }
    text
}

#[tokio::test(flavor = "multi_thread")]
async fn every_verb_in_every_phase_is_answered_as_the_page_says_and_what_was_accepted_comes_true() {
    use futures::StreamExt as _;
    let answered = futures::stream::iter(&ROWS).map(|row| async move { (row.title, answers(row).await) });
    let rows: Vec<_> = answered.buffered(6).collect().await;
    let made = page(&rows);
    let path = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../docs/reference/verbs.md");
    if std::env::var_os("BLESS").is_some() {
        std::fs::write(&path, &made).unwrap();
    }
    let pinned = std::fs::read_to_string(&path).unwrap_or_default();
    for (made, pinned) in made.lines().zip(pinned.lines()) {
        assert_eq!(made, pinned, "the page differs: BLESS=1 makes it anew");
    }
    assert_eq!(made.lines().count(), pinned.lines().count(), "the page differs: BLESS=1 makes it anew");
}

#[tokio::test(flavor = "multi_thread")]
async fn two_clients_that_ask_for_two_things_at_once_get_one_of_them() {
    let delay = (Duration::from_millis(1), Duration::from_millis(12));
    let world = World::new(Script { delay, ..Script::default() }).await;
    let (mut first, mut second) = (world.sandboxes().await, world.sandboxes().await);
    for before in [Create, Suspend, Stop] {
        let mut cases = Vec::new();
        for (a, one) in CHANGES.iter().enumerate() {
            for (b, other) in CHANGES.iter().enumerate() {
                let name = format!("{}-{a}-{b}", before.title().split(' ').next().unwrap());
                make(&mut first, &name, &[], true).await;
                if before != Create {
                    ask(&mut first, before, &name).await.unwrap();
                    until(&mut first, &name, rests_in(before.wish()), "before").await;
                }
                let (x, y) = tokio::join!(ask(&mut first, *one, &name), ask(&mut second, *other, &name));
                for answer in [&x, &y] {
                    let refused = answer.as_ref().err().map(Status::code);
                    let expected = [None, Some(Code::FailedPrecondition), Some(Code::NotFound)];
                    assert!(expected.contains(&refused), "{name}: {answer:?}");
                }
                cases.push((name, *one, x.is_ok(), *other, y.is_ok()));
            }
        }
        for (name, one, x, other, y) in cases {
            let mut wishes: Vec<Option<Phase>> = Vec::new();
            wishes.extend(x.then(|| one.wish()));
            wishes.extend(y.then(|| other.wish()));
            if wishes.is_empty() {
                wishes.push(if before == Create { Some(Phase::Ready) } else { before.wish() });
            }
            // A delete is never turned round.
            if wishes.contains(&None) {
                wishes.retain(Option::is_none);
            }
            let fulfilled = |seen: Option<&v1::Sandbox>| wishes.iter().any(|wish| rests_in(*wish)(seen));
            until(&mut first, &name, fulfilled, &format!("{name}: {one:?} {x}, {other:?} {y}")).await;
        }
    }
    assert!(world.sim.violations().is_empty(), "{:?}", world.sim.violations());
}
