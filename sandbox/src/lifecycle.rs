//! The only transition table.
//!
//! `next` says what an event makes of a state; `step` says what is to be done about a state, given what was observed.
//! Both are pure: the gateway's reconciler loads, observes, asks, swaps and acts. Nothing else makes a [`Phase`].

use std::{fmt, time::SystemTime};

use serde::{Deserialize, Serialize};

use crate::{
    driver::{Ended, Exit, Observed},
    id::Run,
    spec::RestartPolicy,
    update::PendingUpdate,
};

/// Where a sandbox is. Written, by compare-and-swap, before a driver is asked for anything.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
pub enum Phase {
    /// Its storage is being made and it is started for the first time.
    Provisioning,
    /// Its agent is connected.
    Ready,
    /// On the way to Suspended.
    Suspending,
    /// Holds nothing of the host but its disk (and a memory image, when kept).
    Suspended,
    /// On the way back to Ready after a suspend.
    Resuming,
    /// On the way to Stopped.
    Stopping,
    /// As Suspended, and only `start` wakes it.
    Stopped,
    /// On the way to Ready after a stop, an end or a restart.
    Starting,
    /// The main command has ended and the restart policy leaves it; nothing runs.
    Completed,
    /// Something failed; nothing runs, the disk is kept.
    Error,
    /// Everything is being removed.
    Deleting,
}

impl Phase {
    /// Every phase, in the order of the contract.
    pub const ALL: [Self; 11] = [
        Self::Provisioning,
        Self::Ready,
        Self::Suspending,
        Self::Suspended,
        Self::Resuming,
        Self::Stopping,
        Self::Stopped,
        Self::Starting,
        Self::Completed,
        Self::Error,
        Self::Deleting,
    ];

    /// The name on the wire and in the database.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Provisioning => "Provisioning",
            Self::Ready => "Ready",
            Self::Suspending => "Suspending",
            Self::Suspended => "Suspended",
            Self::Resuming => "Resuming",
            Self::Stopping => "Stopping",
            Self::Stopped => "Stopped",
            Self::Starting => "Starting",
            Self::Completed => "Completed",
            Self::Error => "Error",
            Self::Deleting => "Deleting",
        }
    }

    /// The phase with this name.
    pub fn parse(name: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|p| p.as_str() == name)
    }

    /// On the way to Ready.
    pub fn is_booting(self) -> bool {
        matches!(self, Self::Provisioning | Self::Resuming | Self::Starting)
    }

    /// Nothing is under way: the sandbox stays so until somebody asks or something happens.
    pub fn is_settled(self) -> bool {
        matches!(self, Self::Ready | Self::Suspended | Self::Stopped | Self::Completed | Self::Error)
    }
}

impl fmt::Display for Phase {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.as_str())
    }
}

/// What is kept beside identity and configuration, or what a start goes on from.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum Keep {
    /// The disk: processes are not brought back.
    #[default]
    Disk,
    /// The disk and a memory image: processes go on where they were.
    Memory,
}

impl fmt::Display for Keep {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            Self::Disk => "disk",
            Self::Memory => "memory",
        })
    }
}

/// The durable half of a sandbox that the table works on.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct State {
    /// Where it is.
    pub phase: Phase,
    /// Suspending: what is to be kept. Suspended: what is kept. Resuming: what it goes on from. Otherwise disk.
    pub keep: Keep,
    /// The present or last start.
    pub run: Run,
    /// Its storage was made. From then on missing storage is an error, never a reason to make it anew.
    pub created: bool,
    /// What comes next, when a request turned a suspend or stop round.
    pub then: Option<Then>,
    /// Starts by the restart policy since the last request.
    pub restarts: u32,
    /// Of these, those in a row after runs that did not last: the next one waits the longer for each.
    #[serde(default)]
    pub streak: u32,
    /// How the main command ended, when Completed.
    pub exit: Option<Exit>,
    /// The last failure; kept until the sandbox is Ready again.
    pub failure: Option<Failure>,
    /// Whether the guest flushed its disk at the last suspend or stop; none: not known.
    pub flushed: Option<bool>,
    /// Boot from the disk when the memory image can't be used.
    pub cold_if_needed: bool,
    /// A change of its spec that is not done yet: until it is, nothing starts it. Made and ended at rest only.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub update: Option<Box<PendingUpdate>>,
}

/// The request that waits for the present transition to end.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum Then {
    /// Resume once Suspended.
    Resume,
    /// Start once Suspended or Stopped.
    Start,
}

impl fmt::Display for Then {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            Self::Resume => "resume",
            Self::Start => "start",
        })
    }
}

/// The last step of a failure, named.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Failure {
    /// What was being done ("start").
    pub step: String,
    /// Code for programs ("BASE_CHANGED").
    pub reason: String,
    /// Cause for people.
    pub message: String,
    /// The end of the console.
    #[serde(default)]
    pub console: String,
    /// When.
    pub at: SystemTime,
}

impl State {
    /// A sandbox that was just asked for.
    pub fn new() -> Self {
        Self {
            phase: Phase::Provisioning,
            keep: Keep::Disk,
            run: Run(1),
            created: false,
            then: None,
            restarts: 0,
            streak: 0,
            exit: None,
            failure: None,
            flushed: None,
            cold_if_needed: false,
            update: None,
        }
    }

    fn to(&self, phase: Phase) -> Self {
        let keep = if phase == Phase::Suspended { self.keep } else { Keep::Disk };
        Self { phase, keep, then: None, ..self.clone() }
    }

    fn keeping(mut self, keep: Keep) -> Self {
        self.keep = keep;
        self
    }

    /// The next run, on the way to Ready.
    fn boot(&self, phase: Phase, from: Keep) -> Self {
        Self { run: self.run.next(), exit: None, ..self.to(phase) }.keeping(from)
    }

    fn asked(mut self) -> Self {
        (self.restarts, self.streak) = (0, 0);
        self
    }
}

impl Default for State {
    fn default() -> Self {
        Self::new()
    }
}

/// What a user or a policy asks for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum Request {
    /// Free compute, keep this.
    Suspend(Keep),
    /// Bring back; with `cold_if_needed` boot from the disk when the memory image can't be used.
    Resume {
        /// See above.
        cold_if_needed: bool,
    },
    /// Free compute; only `Start` wakes it.
    Stop,
    /// Boot from the disk.
    Start,
    /// Remove everything.
    Delete,
}

impl Request {
    /// The command of the CLI.
    pub fn verb(self) -> &'static str {
        match self {
            Self::Suspend(_) => "suspend",
            Self::Resume { .. } => "resume",
            Self::Stop => "stop",
            Self::Start => "start",
            Self::Delete => "delete",
        }
    }
}

/// Something that happened.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Event {
    /// Somebody asked.
    Request(Request),
    /// Storage is there.
    Created,
    /// This run's compute is there and its agent is connected.
    Started(Run),
    /// Compute was seen to be stopped and everything was given back.
    Stopped {
        /// Whether the guest flushed; none when nobody saw it.
        flushed: Option<bool>,
        /// What is kept.
        kept: Keep,
    },
    /// Nothing is left.
    Deleted,
    /// A run ended by itself.
    Ended(Ended),
    /// A step failed for good.
    Failed(Failure),
    /// The host was restarted: everything that ran is gone through no fault of its own.
    HostRestarted,
}

/// Why a request is not possible now.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("cannot {verb} while {phase}: {why}")]
pub struct Refusal {
    /// What was asked for.
    pub verb: &'static str,
    /// Where the sandbox is.
    pub phase: Phase,
    /// The reason.
    pub why: &'static str,
    /// The command to use instead.
    pub next: Option<&'static str>,
    /// Code for programs.
    pub reason: &'static str,
}

/// What an event makes of a state.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Next {
    /// Nothing changes: already so, already on the way, or about another run.
    Same,
    /// The new state.
    To(State),
    /// The record goes away.
    Gone,
}

/// What is to be done.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Step {
    /// Nothing: settled.
    Rest,
    /// Look again later: the backend can't tell.
    Wait,
    /// `driver.create`
    Create,
    /// `driver.start` of the state's run.
    Start(Keep),
    /// `driver.stop`
    Stop(Keep),
    /// `driver.delete`
    Delete,
    /// Nothing to do outside: an event to feed to `next`.
    Happened(Event),
}

/// What `event` makes of `state`.
///
/// # Errors
/// A request that is not possible in this phase, with the reason and the next command.
pub fn next(state: &State, event: &Event, policy: RestartPolicy) -> Result<Next, Refusal> {
    match event {
        Event::Request(request) => on_request(state, *request),
        fact => Ok(on_fact(state, fact, policy)),
    }
}

fn on_request(state: &State, request: Request) -> Result<Next, Refusal> {
    if request == Request::Delete {
        return Ok(if state.phase == Phase::Deleting {
            Next::Same
        } else {
            Next::To(state.to(Phase::Deleting))
        });
    }
    let starts = matches!(request, Request::Resume { .. } | Request::Start);
    if starts && state.update.is_some() && state.phase != Phase::Deleting {
        return refuse_for(
            state,
            request,
            "UPDATE_PENDING",
            "an update of it is not done",
            Some(FINISH_UPDATE),
        );
    }
    match state.phase {
        Phase::Deleting => refuse(state, request, "it is being deleted", None),
        Phase::Ready | Phase::Provisioning | Phase::Resuming | Phase::Starting => {
            on_request_awake(state, request)
        }
        Phase::Suspending => on_request_suspending(state, request),
        Phase::Suspended => on_request_suspended(state, request),
        Phase::Stopping | Phase::Stopped => on_request_stopped(state, request),
        Phase::Completed | Phase::Error => on_request_ended(state, request),
    }
}

/// The command that ends a pending update.
pub const FINISH_UPDATE: &str = "update --resume-pending";

fn refuse(
    state: &State,
    request: Request,
    why: &'static str,
    next: Option<&'static str>,
) -> Result<Next, Refusal> {
    refuse_for(state, request, "WRONG_PHASE", why, next)
}

fn refuse_for(
    state: &State,
    request: Request,
    reason: &'static str,
    why: &'static str,
    next: Option<&'static str>,
) -> Result<Next, Refusal> {
    Err(Refusal { verb: request.verb(), phase: state.phase, why, next, reason })
}

/// Ready, or on the way there.
fn on_request_awake(state: &State, request: Request) -> Result<Next, Refusal> {
    match request {
        Request::Suspend(Keep::Memory) if state.phase != Phase::Ready => {
            refuse(state, request, "there is no memory to keep before it is Ready", Some("wait"))
        }
        Request::Suspend(keep) => Ok(Next::To(state.to(Phase::Suspending).keeping(keep).asked())),
        Request::Stop => Ok(Next::To(state.to(Phase::Stopping).asked())),
        Request::Resume { .. } | Request::Start | Request::Delete => Ok(Next::Same),
    }
}

fn on_request_suspending(state: &State, request: Request) -> Result<Next, Refusal> {
    let with_then = |then| {
        if state.then == then { Next::Same } else { Next::To(State { then, ..state.clone() }) }
    };
    match request {
        Request::Suspend(Keep::Memory) if state.keep == Keep::Disk => {
            refuse(state, request, "it is being suspended with its disk only", Some("wait"))
        }
        Request::Suspend(keep) if keep != state.keep => {
            Ok(Next::To(State { then: None, ..state.clone() }.keeping(keep)))
        }
        Request::Suspend(_) => Ok(with_then(None)),
        Request::Resume { cold_if_needed } => Ok(match with_then(Some(Then::Resume)) {
            Next::To(to) => Next::To(State { cold_if_needed, ..to }),
            same => same,
        }),
        Request::Start => Ok(with_then(Some(Then::Start))),
        Request::Stop => Ok(Next::To(state.to(Phase::Stopping))),
        Request::Delete => Ok(Next::Same),
    }
}

fn on_request_suspended(state: &State, request: Request) -> Result<Next, Refusal> {
    match request {
        Request::Suspend(keep) if keep == state.keep => {
            // A turn-round that has not been carried out yet is taken back.
            Ok(if state.then.is_some() {
                Next::To(State { then: None, ..state.clone() })
            } else {
                Next::Same
            })
        }
        Request::Suspend(Keep::Disk) => Ok(Next::To(state.to(Phase::Suspending))),
        Request::Suspend(Keep::Memory) => {
            refuse(state, request, "its memory was not kept and can't be made from the disk", Some("resume"))
        }
        Request::Resume { cold_if_needed } => {
            let to = state.boot(Phase::Resuming, state.keep).asked();
            Ok(Next::To(State { cold_if_needed, ..to }))
        }
        Request::Start => Ok(Next::To(state.boot(Phase::Starting, Keep::Disk).asked())),
        Request::Stop => Ok(Next::To(state.to(Phase::Stopping))),
        Request::Delete => Ok(Next::Same),
    }
}

/// Stopped, or on the way there.
fn on_request_stopped(state: &State, request: Request) -> Result<Next, Refusal> {
    match request {
        Request::Suspend(_) => {
            refuse(state, request, "a stopped sandbox holds nothing of the host already", Some("start"))
        }
        Request::Resume { .. } => {
            refuse(state, request, "it was stopped, and only start wakes it", Some("start"))
        }
        Request::Stop if state.then.is_some() => Ok(Next::To(State { then: None, ..state.clone() })),
        Request::Start if state.phase == Phase::Stopped => {
            Ok(Next::To(state.boot(Phase::Starting, Keep::Disk).asked()))
        }
        Request::Start if state.then.is_none() => {
            Ok(Next::To(State { then: Some(Then::Start), ..state.clone() }))
        }
        Request::Stop | Request::Start | Request::Delete => Ok(Next::Same),
    }
}

/// Completed or Error: nothing runs, or what is left is being given back.
fn on_request_ended(state: &State, request: Request) -> Result<Next, Refusal> {
    match request {
        Request::Suspend(Keep::Memory) => {
            refuse(state, request, "nothing runs whose memory could be kept", Some("start"))
        }
        Request::Suspend(Keep::Disk) => Ok(Next::To(state.to(Phase::Suspending).asked())),
        Request::Stop => Ok(Next::To(state.to(Phase::Stopping).asked())),
        Request::Resume { .. } => Ok(Next::To(state.boot(Phase::Resuming, Keep::Disk).asked())),
        Request::Start => Ok(Next::To(state.boot(Phase::Starting, Keep::Disk).asked())),
        Request::Delete => Ok(Next::Same),
    }
}

fn on_fact(state: &State, fact: &Event, policy: RestartPolicy) -> Next {
    match fact {
        Event::Request(_) => Next::Same,
        Event::Created if state.created => Next::Same,
        Event::Created => Next::To(State { created: true, ..state.clone() }),
        Event::Started(run) if *run == state.run && state.phase.is_booting() => {
            Next::To(State { failure: None, flushed: None, ..state.to(Phase::Ready) })
        }
        Event::Started(_) => Next::Same,
        Event::Stopped { flushed, kept } => on_stopped(state, *flushed, *kept),
        Event::Deleted if state.phase == Phase::Deleting => Next::Gone,
        Event::Deleted => Next::Same,
        Event::Ended(ended) => on_ended(state, ended, policy),
        Event::Failed(failure) => on_failed(state, failure),
        Event::HostRestarted if state.phase == Phase::Ready => {
            Next::To(State { streak: 0, ..state.boot(Phase::Starting, Keep::Disk) })
        }
        Event::HostRestarted => Next::Same,
    }
}

fn on_stopped(state: &State, flushed: Option<bool>, kept: Keep) -> Next {
    // What comes next is carried out in a turn of its own, so that whoever waits for the rest in between sees it.
    let rest = |phase, keep| Next::To(State { flushed, then: state.then, ..state.to(phase) }.keeping(keep));
    match state.phase {
        Phase::Suspending if state.keep == Keep::Memory => rest(Phase::Suspended, kept),
        Phase::Suspending => rest(Phase::Suspended, Keep::Disk),
        Phase::Stopping => rest(Phase::Stopped, Keep::Disk),
        // Compute that nobody asked for was put down; what it did to the disk makes a memory image worthless.
        Phase::Suspended if state.keep != kept => Next::To(State { ..state.clone() }.keeping(kept)),
        _ => Next::Same,
    }
}

fn on_ended(state: &State, ended: &Ended, policy: RestartPolicy) -> Next {
    let alive = state.phase == Phase::Ready || state.phase.is_booting();
    if ended.run != state.run || !alive {
        return Next::Same;
    }
    if matches!(ended.exit, Exit::Interrupted(_)) {
        // What was wanted still is. While it was on its way up, that goes on as it is.
        let up = state.phase == Phase::Ready;
        // Slower each time, unless the run before has lasted: whoever is root in a container can do it, too.
        let streak = state.streak.saturating_add(1);
        let again = || State { streak, ..state.boot(Phase::Starting, Keep::Disk) };
        return if up { Next::To(again()) } else { Next::Same };
    }
    let by_itself = matches!(ended.exit, Exit::Code(_) | Exit::PowerOff);
    let restart = match policy {
        RestartPolicy::Always => true,
        RestartPolicy::OnFailure => !ended.exit.is_success(),
        RestartPolicy::Never => false,
    };
    // A boot that fails is an error, whatever the policy: it would only fail again.
    if restart && (by_itself || state.phase == Phase::Ready) {
        let (restarts, streak) = (state.restarts.saturating_add(1), state.streak.saturating_add(1));
        return Next::To(State { restarts, streak, ..state.boot(Phase::Starting, Keep::Disk) });
    }
    if by_itself && (state.phase == Phase::Ready || matches!(ended.exit, Exit::Code(_))) {
        return Next::To(State {
            exit: Some(ended.exit.clone()),
            failure: None,
            ..state.to(Phase::Completed)
        });
    }
    let (reason, message) = match &ended.exit {
        Exit::Code(code) => ("RUN_FAILED", format!("the main command ended with code {code}")),
        Exit::PowerOff => ("RUN_FAILED", "the guest switched itself off before it was ready".to_owned()),
        Exit::Panic(text) => ("KERNEL_PANIC", text.clone()),
        Exit::Lost(text) | Exit::Interrupted(text) => ("COMPUTE_LOST", text.clone()),
    };
    let step = if state.phase == Phase::Ready { "run" } else { "start" };
    let failure = Failure {
        step: step.to_owned(),
        reason: reason.to_owned(),
        message,
        console: String::new(),
        at: SystemTime::now(),
    };
    Next::To(State { failure: Some(failure), ..state.to(Phase::Error) })
}

fn on_failed(state: &State, failure: &Failure) -> Next {
    match state.phase {
        // It may boot instead, as its user said: the memory image is given up.
        Phase::Resuming if state.keep == Keep::Memory && state.cold_if_needed => {
            Next::To(State { failure: Some(failure.clone()), ..state.clone() }.keeping(Keep::Disk))
        }
        // These hold nothing that could fail, or (deleting) go on until it is done.
        Phase::Suspended | Phase::Stopped | Phase::Completed | Phase::Error | Phase::Deleting => Next::Same,
        _ => Next::To(State { failure: Some(failure.clone()), ..state.to(Phase::Error) }),
    }
}

/// What is to be done about `state`, when the backend shows `observed`.
pub fn step(state: &State, observed: &Observed) -> Step {
    match state.phase {
        Phase::Deleting if *observed == Observed::Missing => Step::Happened(Event::Deleted),
        Phase::Deleting => Step::Delete,
        Phase::Provisioning | Phase::Resuming | Phase::Starting => step_booting(state, observed),
        Phase::Ready => step_ready(state, observed),
        Phase::Suspending | Phase::Stopping => step_stopping(state, observed),
        Phase::Suspended | Phase::Stopped | Phase::Completed | Phase::Error => step_resting(state, observed),
    }
}

fn failed(step: &str, reason: &str, message: &str) -> Step {
    Step::Happened(Event::Failed(Failure {
        step: step.to_owned(),
        reason: reason.to_owned(),
        message: message.to_owned(),
        console: String::new(),
        at: SystemTime::now(),
    }))
}

fn step_booting(state: &State, observed: &Observed) -> Step {
    if !state.created {
        return Step::Create;
    }
    match observed {
        Observed::Unknown(_) => Step::Wait,
        Observed::Missing => failed(
            "start",
            "DATA_MISSING",
            "the backend has nothing of this sandbox any more; its disk is never made anew",
        ),
        Observed::Running { run, agent: true } if *run == state.run => Step::Happened(Event::Started(*run)),
        Observed::Running { run, agent: false } if *run == state.run => Step::Start(state.keep),
        // What is left of it is put down, and it is started again.
        Observed::Ended(Ended { exit: Exit::Interrupted(_), .. }) => Step::Stop(Keep::Disk),
        Observed::Ended(ended) if ended.run == state.run => Step::Happened(Event::Ended(ended.clone())),
        // An older life: put down first. It may have written to the disk, so no memory image outlives it.
        Observed::Running { .. } | Observed::Ended(_) => Step::Stop(Keep::Disk),
        Observed::Stopped { memory: false } if state.keep == Keep::Memory && !state.cold_if_needed => failed(
            "start",
            "MEMORY_MISSING",
            "the memory image is gone; the disk is there: start boots from it",
        ),
        Observed::Stopped { memory: false } => Step::Start(Keep::Disk),
        Observed::Stopped { memory: true } => Step::Start(state.keep),
    }
}

fn step_ready(state: &State, observed: &Observed) -> Step {
    let lost = |text: &str| {
        Step::Happened(Event::Ended(Ended { run: state.run, exit: Exit::Lost(text.to_owned()) }))
    };
    match observed {
        Observed::Unknown(_) => Step::Wait,
        Observed::Running { run, .. } if *run == state.run => Step::Rest,
        Observed::Ended(ended) if ended.run == state.run => Step::Happened(Event::Ended(ended.clone())),
        Observed::Running { run, .. } => {
            lost(&format!("compute of run {run} is there instead of run {}", state.run))
        }
        Observed::Ended(_) | Observed::Stopped { .. } => lost("the compute is gone"),
        Observed::Missing => {
            failed("run", "DATA_MISSING", "the backend has nothing of this sandbox any more")
        }
    }
}

fn step_stopping(state: &State, observed: &Observed) -> Step {
    if !state.created {
        return Step::Create;
    }
    match observed {
        Observed::Unknown(_) => Step::Wait,
        Observed::Missing => {
            failed("stop", "DATA_MISSING", "the backend has nothing of this sandbox any more")
        }
        Observed::Running { .. } | Observed::Ended(_) => Step::Stop(state.keep),
        Observed::Stopped { memory: true } if state.keep == Keep::Disk => Step::Stop(Keep::Disk),
        Observed::Stopped { memory } => {
            let kept = if *memory { Keep::Memory } else { Keep::Disk };
            Step::Happened(Event::Stopped { flushed: None, kept })
        }
    }
}

fn step_resting(state: &State, observed: &Observed) -> Step {
    match observed {
        Observed::Unknown(_) if matches!(state.phase, Phase::Error | Phase::Completed) => Step::Wait,
        Observed::Running { .. } | Observed::Ended(_) => Step::Stop(Keep::Disk),
        _ => match state.then {
            Some(Then::Resume) if state.phase == Phase::Suspended => {
                Step::Happened(Event::Request(Request::Resume { cold_if_needed: state.cold_if_needed }))
            }
            Some(_) => Step::Happened(Event::Request(Request::Start)),
            None => Step::Rest,
        },
    }
}

/// Whether a sandbox in this state can still come to `wanted` without a further request. Waits end when it can't.
pub fn may_reach(state: &State, wanted: Phase) -> bool {
    if state.phase == wanted {
        return true;
    }
    let heading = match state.phase {
        Phase::Provisioning | Phase::Resuming | Phase::Starting => {
            [Phase::Ready, Phase::Completed].contains(&wanted)
        }
        Phase::Ready => wanted == Phase::Completed,
        Phase::Suspending => wanted == Phase::Suspended,
        Phase::Stopping => wanted == Phase::Stopped,
        _ => false,
    };
    heading || (state.then.is_some() && [Phase::Ready, Phase::Resuming, Phase::Starting].contains(&wanted))
}
