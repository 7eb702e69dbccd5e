//! The table: every (phase, event) pair, and any interleaving of requests and faults comes to rest.

use std::{fmt::Write as _, time::SystemTime};

use proptest::prelude::*;
use torpor_sandbox::{
    Event, Exit, Failure, Keep, Observed, PendingUpdate, Phase, Refusal, Request, RestartPolicy, Run,
    SpecChange, State, Step,
    driver::Ended,
    lifecycle::{Next, Then, may_reach, next, step},
};

const REQUESTS: [(&str, Request); 6] = [
    ("suspend", Request::Suspend(Keep::Disk)),
    ("suspend --memory", Request::Suspend(Keep::Memory)),
    ("resume", Request::Resume { cold_if_needed: false }),
    ("stop", Request::Stop),
    ("start", Request::Start),
    ("delete", Request::Delete),
];

fn at(phase: Phase) -> State {
    State { phase, created: true, run: Run(3), ..State::new() }
}

fn failure() -> Failure {
    let at = SystemTime::UNIX_EPOCH;
    Failure { step: "start".into(), reason: "X".into(), message: "x".into(), console: String::new(), at }
}

/// The page of the docs that holds the table; `BLESS=1` writes it anew.
const PAGE: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../docs/reference/lifecycle-table.md");

fn answer(result: &Result<Next, Refusal>) -> String {
    match result {
        Ok(Next::Same) => "no change".into(),
        Ok(Next::Gone) => "gone".into(),
        Ok(Next::To(to)) => match to.then {
            Some(then) => format!("{}, then {then}", to.phase),
            None => to.phase.to_string(),
        },
        Err(refusal) => match refusal.next {
            Some(next) => format!("refused: {} ({next})", refusal.why),
            None => format!("refused: {}", refusal.why),
        },
    }
}

fn table() -> String {
    let mut page = String::from(
        "# What every verb does in every phase\n\nMade by `BLESS=1 cargo test -p torpor-sandbox --test lifecycle` from the \
         only transition table, `sandbox/src/lifecycle.rs`; the test fails when this page and the table differ. \
         `no change` is success: the sandbox is so already or on the way. In brackets: the command to use instead.\n\n| phase |",
    );
    for (name, _) in REQUESTS {
        let _ = write!(page, " {name} |");
    }
    page.push_str("\n|---|---|---|---|---|---|---|\n");
    for phase in Phase::ALL {
        let _ = write!(page, "| {phase} |");
        for (_, request) in REQUESTS {
            let result = next(&at(phase), &Event::Request(request), RestartPolicy::Never);
            let _ = write!(page, " {} |", answer(&result));
        }
        page.push('\n');
    }
    page
}

#[test]
fn the_table_of_every_phase_and_verb_is_the_page_of_the_docs() {
    if std::env::var_os("BLESS").is_some() {
        std::fs::write(PAGE, table()).unwrap();
    }
    assert_eq!(
        std::fs::read_to_string(PAGE).unwrap(),
        table(),
        "run it with BLESS=1 and read the difference"
    );
}

#[test]
fn a_pending_update_keeps_a_sandbox_from_being_started_and_from_nothing_else() {
    let update = PendingUpdate {
        change: SpecChange::default(),
        labels: None,
        annotations: None,
        request: None,
        since: SystemTime::UNIX_EPOCH,
        failure: None,
    };
    for phase in Phase::ALL.into_iter().filter(|phase| *phase != Phase::Deleting) {
        let pending = State { update: Some(Box::new(update.clone())), ..at(phase) };
        for (verb, request) in REQUESTS {
            let got = next(&pending, &Event::Request(request), RestartPolicy::Never);
            if matches!(request, Request::Resume { .. } | Request::Start) {
                let refusal = got.unwrap_err();
                assert_eq!(
                    (refusal.reason, refusal.next),
                    ("UPDATE_PENDING", Some("update --resume-pending"))
                );
                continue;
            }
            let free = next(&at(phase), &Event::Request(request), RestartPolicy::Never);
            assert_eq!(answer(&got), answer(&free), "{verb} in {phase}");
            // It stays pending, whatever comes of the request.
            if let Ok(Next::To(to)) = got {
                assert_eq!(to.update, pending.update, "{verb} in {phase}");
            }
        }
    }
}

#[test]
fn every_fact_in_every_phase_leads_where_the_contract_says() {
    use Phase::*;
    let ended = |exit: Exit| Event::Ended(Ended { run: Run(3), exit });
    type Row<'a> = (&'a str, Event, &'a [(Phase, Phase)]);
    let facts: [Row<'_>; 9] = [
        ("created", Event::Created, &[]),
        ("started", Event::Started(Run(3)), &[(Provisioning, Ready), (Resuming, Ready), (Starting, Ready)]),
        ("started, an old run", Event::Started(Run(2)), &[]),
        (
            "stopped",
            Event::Stopped { flushed: Some(true), kept: Keep::Disk },
            &[(Suspending, Suspended), (Stopping, Stopped)],
        ),
        ("deleted", Event::Deleted, &[]),
        (
            "ended",
            ended(Exit::Code(0)),
            &[(Provisioning, Completed), (Ready, Completed), (Resuming, Completed), (Starting, Completed)],
        ),
        (
            "lost",
            ended(Exit::Lost("x".into())),
            &[(Provisioning, Error), (Ready, Error), (Resuming, Error), (Starting, Error)],
        ),
        ("interrupted", ended(Exit::Interrupted("x".into())), &[(Ready, Starting)]),
        ("host restarted", Event::HostRestarted, &[(Ready, Starting)]),
    ];
    for (name, event, moves) in facts {
        for phase in Phase::ALL {
            let wanted = moves.iter().find(|(from, _)| *from == phase).map(|(_, to)| *to);
            let got = match next(&at(phase), &event, RestartPolicy::Never).unwrap() {
                Next::Same => None,
                Next::Gone => {
                    assert_eq!((name, phase), ("deleted", Deleting));
                    None
                }
                Next::To(to) => Some(to.phase),
            };
            assert_eq!(got, wanted, "{name} in {phase}");
        }
    }
    for phase in Phase::ALL {
        let fails = matches!(phase, Provisioning | Ready | Suspending | Resuming | Stopping | Starting);
        let got = next(&at(phase), &Event::Failed(failure()), RestartPolicy::Never).unwrap();
        assert_eq!(matches!(got, Next::To(State { phase: Error, .. })), fails, "failed in {phase}");
    }
}

#[test]
fn the_restart_policy_decides_what_an_end_means() {
    let cases = [
        (RestartPolicy::Never, Exit::Code(1), Phase::Completed),
        (RestartPolicy::OnFailure, Exit::Code(0), Phase::Completed),
        (RestartPolicy::OnFailure, Exit::Code(1), Phase::Starting),
        (RestartPolicy::OnFailure, Exit::PowerOff, Phase::Completed),
        (RestartPolicy::OnFailure, Exit::Lost("x".into()), Phase::Starting),
        (RestartPolicy::Always, Exit::Code(0), Phase::Starting),
        (RestartPolicy::Always, Exit::PowerOff, Phase::Starting),
        (RestartPolicy::Never, Exit::Panic("x".into()), Phase::Error),
    ];
    for (policy, exit, wanted) in cases {
        let event = Event::Ended(Ended { run: Run(3), exit: exit.clone() });
        let Next::To(to) = next(&at(Phase::Ready), &event, policy).unwrap() else {
            panic!("{policy:?} {exit:?}")
        };
        assert_eq!(to.phase, wanted, "{policy:?} {exit:?}");
        assert_eq!(to.run, if wanted == Phase::Starting { Run(4) } else { Run(3) });
        assert_eq!(to.restarts, u32::from(wanted == Phase::Starting));
    }
}

#[test]
fn a_boot_that_panics_is_an_error_whatever_the_policy() {
    let event = Event::Ended(Ended { run: Run(3), exit: Exit::Panic("no init".into()) });
    let Next::To(to) = next(&at(Phase::Provisioning), &event, RestartPolicy::Always).unwrap() else {
        panic!()
    };
    assert_eq!((to.phase, to.failure.unwrap().reason.as_str()), (Phase::Error, "KERNEL_PANIC"));
}

#[test]
fn a_stop_asked_for_disarms_every_restart() {
    let event = Event::Ended(Ended { run: Run(3), exit: Exit::Code(1) });
    for phase in [Phase::Suspending, Phase::Stopping, Phase::Deleting] {
        assert_eq!(next(&at(phase), &event, RestartPolicy::Always), Ok(Next::Same));
    }
}

#[test]
fn missing_storage_is_never_made_anew_once_it_was_created() {
    for phase in [Phase::Provisioning, Phase::Resuming, Phase::Starting, Phase::Suspending, Phase::Ready] {
        let Step::Happened(Event::Failed(f)) = step(&at(phase), &Observed::Missing) else {
            panic!("{phase}")
        };
        assert_eq!(f.reason, "DATA_MISSING");
    }
}

#[test]
fn a_gone_memory_image_fails_the_resume_unless_a_boot_is_allowed() {
    let state = State { keep: Keep::Memory, ..at(Phase::Resuming) };
    let gone = Observed::Stopped { memory: false };
    assert!(matches!(step(&state, &gone), Step::Happened(Event::Failed(_))));
    assert_eq!(step(&State { cold_if_needed: true, ..state }, &gone), Step::Start(Keep::Disk));
}

#[test]
fn waits_end_on_phases_that_cannot_lead_there() {
    assert!(may_reach(&at(Phase::Resuming), Phase::Ready));
    assert!(!may_reach(&at(Phase::Error), Phase::Ready));
    assert!(!may_reach(&at(Phase::Suspended), Phase::Ready));
    assert!(may_reach(&State { then: Some(Then::Resume), ..at(Phase::Suspending) }, Phase::Ready));
}

/// A pretended backend for the property test: what one sandbox has there.
#[derive(Clone, Debug, Default)]
struct Backend {
    storage: bool,
    memory: bool,
    compute: Option<(Run, Option<Exit>)>,
}

impl Backend {
    fn observe(&self) -> Observed {
        match &self.compute {
            Some((run, Some(exit))) => Observed::Ended(Ended { run: *run, exit: exit.clone() }),
            Some((run, None)) => Observed::Running { run: *run, agent: true },
            None if self.storage => Observed::Stopped { memory: self.memory },
            None => Observed::Missing,
        }
    }
}

struct World {
    state: Option<State>,
    backend: Backend,
    policy: RestartPolicy,
}

impl World {
    fn feed(&mut self, event: &Event) -> bool {
        let Some(state) = &self.state else { return false };
        match next(state, event, self.policy) {
            Ok(Next::Same) => true,
            Ok(Next::To(to)) => {
                assert!(to.run >= state.run, "runs only grow");
                assert!(!state.created || to.created, "what was created stays created");
                self.state = Some(to);
                true
            }
            Ok(Next::Gone) => {
                self.state = None;
                true
            }
            Err(_) => false,
        }
    }

    /// One turn of a reconciler; false when there is nothing to do.
    fn turn(&mut self, fault: bool) -> bool {
        let Some(state) = self.state.clone() else { return false };
        match step(&state, &self.backend.observe()) {
            Step::Rest | Step::Wait => return false,
            Step::Happened(event) => {
                assert!(self.feed(&event), "a fact is never refused");
            }
            _ if fault => {}
            Step::Create => {
                assert!(!state.created, "storage is made once");
                self.backend.storage = true;
                self.feed(&Event::Created);
            }
            Step::Start(from) => {
                assert!(self.backend.compute.is_none(), "a second compute");
                assert!(from == Keep::Disk || self.backend.memory);
                self.backend.memory = false;
                self.backend.compute = Some((state.run, None));
                self.feed(&Event::Started(state.run));
            }
            Step::Stop(keep) => {
                let alive = self.backend.compute.take().is_some_and(|(_, exit)| exit.is_none());
                self.backend.memory = keep == Keep::Memory && (alive || self.backend.memory);
                let kept = if self.backend.memory { Keep::Memory } else { Keep::Disk };
                self.feed(&Event::Stopped { flushed: Some(alive), kept });
            }
            Step::Delete => self.backend = Backend::default(),
        }
        true
    }
}

#[derive(Clone, Debug)]
enum Act {
    Ask(usize),
    Turn { fault: bool },
    End(u8),
    Vanish,
    HostRestart,
    LateWord,
}

fn acts() -> impl Strategy<Value = Vec<Act>> {
    let act = prop_oneof![
        4 => (0..REQUESTS.len() - 1).prop_map(Act::Ask),
        1 => Just(Act::Ask(REQUESTS.len() - 1)),
        8 => any::<bool>().prop_map(|fault| Act::Turn { fault }),
        1 => (0..5u8).prop_map(Act::End),
        1 => Just(Act::Vanish),
        1 => Just(Act::HostRestart),
        1 => Just(Act::LateWord),
    ];
    prop::collection::vec(act, 0..60)
}

fn exit(kind: u8) -> Exit {
    match kind {
        0 => Exit::Code(0),
        1 => Exit::Code(1),
        2 => Exit::PowerOff,
        3 => Exit::Interrupted("y".into()),
        _ => Exit::Lost("x".into()),
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 4000, ..ProptestConfig::default() })]

    #[test]
    fn any_interleaving_of_requests_and_faults_comes_to_rest(acts in acts(), policy in 0..3u8) {
        let policy = [RestartPolicy::Never, RestartPolicy::OnFailure, RestartPolicy::Always][usize::from(policy)];
        let mut world = World { state: Some(State::new()), backend: Backend::default(), policy };
        let mut wish = None;
        for act in acts {
            match act {
                Act::Ask(which) => {
                    let request = REQUESTS[which].1;
                    // A wish for what is there already, made before anybody has seen that it has just ended, is granted
                    // with what was known.
                    let known = world.state.as_ref().is_some_and(|s| s.phase == Phase::Ready || s.phase.is_booting());
                    let ended_unseen = known && matches!(world.backend.compute, Some((_, Some(_))));
                    let for_what_is = matches!(request, Request::Resume { .. } | Request::Start);
                    if world.feed(&Event::Request(request)) {
                        wish = (!(ended_unseen && for_what_is)).then_some(request);
                    }
                }
                Act::Turn { fault } => drop(world.turn(fault)),
                Act::End(kind) => {
                    if let Some((_, end @ None)) = &mut world.backend.compute {
                        *end = Some(exit(kind));
                        wish = None;
                    }
                }
                Act::Vanish => {
                    if world.backend.compute.take().is_some() { wish = None; }
                }
                Act::HostRestart => {
                    world.backend.compute = None;
                    world.feed(&Event::HostRestarted);
                }
                Act::LateWord => {
                    let old = Run(world.state.as_ref().map_or(0, |s| s.run.0.saturating_sub(1)));
                    world.feed(&Event::Started(old));
                    world.feed(&Event::Ended(Ended { run: old, exit: Exit::Code(1) }));
                }
            }
        }
        let mut turns = 0;
        while world.turn(false) {
            turns += 1;
            prop_assert!(turns < 50, "never at rest: {:?}", world.state);
        }
        let Some(state) = world.state else {
            prop_assert_eq!(world.backend.observe(), Observed::Missing);
            return Ok(());
        };
        prop_assert!(state.phase.is_settled(), "{:?}", state);
        prop_assert_eq!(world.backend.compute.is_some(), state.phase == Phase::Ready, "{:?}", state);
        prop_assert!(state.then.is_none());
        prop_assert_eq!(world.backend.memory, state.phase == Phase::Suspended && state.keep == Keep::Memory);
        let fulfilled = match wish {
            None => true,
            Some(Request::Suspend(_)) => state.phase == Phase::Suspended,
            Some(Request::Stop) => state.phase == Phase::Stopped,
            Some(Request::Resume { .. } | Request::Start) => state.phase == Phase::Ready,
            Some(Request::Delete) => false,
        };
        prop_assert!(fulfilled || state.failure.is_some(), "{wish:?} ended in {state:?}");
    }
}
