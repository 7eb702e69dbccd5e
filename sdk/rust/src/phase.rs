//! Phases as the wire has them. Values that this version doesn't know are tolerated: they read as `Unknown`.

use torpor_proto::v1::{self, Phase};

use crate::wait::Goal;

/// Every phase that a sandbox can be in, in the order of the contract.
pub const ALL: [Phase; 11] = [
    Phase::Provisioning,
    Phase::Ready,
    Phase::Suspending,
    Phase::Suspended,
    Phase::Resuming,
    Phase::Stopping,
    Phase::Stopped,
    Phase::Starting,
    Phase::Completed,
    Phase::Error,
    Phase::Deleting,
];

/// A sandbox's phase; `Unspecified` when it carries no status, `Unknown` when a newer gateway sent a phase that this
/// version has no name for.
pub fn of(sandbox: &v1::Sandbox) -> Phase {
    sandbox.status.as_ref().map_or(Phase::Unspecified, |s| from_wire(s.phase))
}

/// The phase of a number on the wire.
pub fn from_wire(number: i32) -> Phase {
    Phase::try_from(number).unwrap_or(Phase::Unknown)
}

/// The name that people see: "Suspended".
pub fn name(phase: Phase) -> &'static str {
    match phase {
        Phase::Unspecified => "Unspecified",
        Phase::Unknown => "Unknown",
        Phase::Provisioning => "Provisioning",
        Phase::Ready => "Ready",
        Phase::Suspending => "Suspending",
        Phase::Suspended => "Suspended",
        Phase::Resuming => "Resuming",
        Phase::Stopping => "Stopping",
        Phase::Stopped => "Stopped",
        Phase::Starting => "Starting",
        Phase::Completed => "Completed",
        Phase::Error => "Error",
        Phase::Deleting => "Deleting",
    }
}

/// The phase with this name, upper or lower case.
pub fn parse(text: &str) -> Option<Phase> {
    ALL.into_iter().find(|&p| name(p).eq_ignore_ascii_case(text))
}

/// What a wait knows after looking at a sandbox.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Outlook {
    /// It is there.
    Arrived,
    /// It may come there by itself.
    Underway,
    /// It can't come there without a further request.
    Hopeless,
}

/// Whether a sandbox is at a goal, may come to it by itself, or can't (rule 12 of the lifecycle contract).
pub fn outlook(sandbox: &v1::Sandbox, goal: Goal) -> Outlook {
    let phase = of(sandbox);
    if goal.phases().contains(&phase) {
        return Outlook::Arrived;
    }
    // A phase of a newer gateway says nothing about where it leads.
    if matches!(phase, Phase::Unknown | Phase::Unspecified) {
        return Outlook::Underway;
    }
    let turned = sandbox.status.as_ref().is_some_and(|s| !s.then.is_empty());
    let may = match goal {
        Goal::Deleted => phase == Phase::Deleting,
        Goal::Phase(wanted) => leads_to(phase, turned, wanted),
        Goal::Running => leads_to(phase, turned, Phase::Ready),
    };
    if may { Outlook::Underway } else { Outlook::Hopeless }
}

fn leads_to(phase: Phase, turned: bool, wanted: Phase) -> bool {
    let by_itself = match phase {
        Phase::Provisioning | Phase::Resuming | Phase::Starting => {
            matches!(wanted, Phase::Ready | Phase::Completed | Phase::Error)
        }
        // Starting: a restart policy may bring the main command back.
        Phase::Ready => matches!(wanted, Phase::Completed | Phase::Error | Phase::Starting),
        Phase::Suspending => matches!(wanted, Phase::Suspended | Phase::Error),
        Phase::Stopping => matches!(wanted, Phase::Stopped | Phase::Error),
        _ => false,
    };
    let by_turning =
        matches!(wanted, Phase::Ready | Phase::Resuming | Phase::Starting | Phase::Completed | Phase::Error);
    by_itself || (turned && phase != Phase::Deleting && by_turning)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn at(phase: i32, then: &str) -> v1::Sandbox {
        let status = v1::SandboxStatus { phase, then: then.into(), ..Default::default() };
        v1::Sandbox { status: Some(status), ..Default::default() }
    }

    #[test]
    fn every_name_reads_back_and_numbers_from_the_future_are_unknown() {
        for phase in ALL {
            assert_eq!(parse(name(phase)), Some(phase));
            assert_eq!(parse(&name(phase).to_lowercase()), Some(phase));
        }
        assert_eq!(of(&at(99, "")), Phase::Unknown);
        assert_eq!(of(&v1::Sandbox::default()), Phase::Unspecified);
    }

    #[test]
    fn a_wait_has_hope_only_on_the_way_to_its_goal() {
        use Outlook::{Arrived, Hopeless, Underway};
        let ready = Goal::Phase(Phase::Ready);
        let suspended = Goal::Phase(Phase::Suspended);
        let cases = [
            (Phase::Ready, "", ready, Arrived),
            (Phase::Resuming, "", ready, Underway),
            (Phase::Error, "", ready, Hopeless),
            (Phase::Suspending, "", ready, Hopeless),
            (Phase::Suspending, "resume", ready, Underway),
            (Phase::Suspending, "", suspended, Underway),
            (Phase::Ready, "", suspended, Hopeless),
            (Phase::Deleting, "", Goal::Deleted, Underway),
            (Phase::Ready, "", Goal::Deleted, Hopeless),
            (Phase::Deleting, "", suspended, Hopeless),
            (Phase::Completed, "", Goal::Running, Arrived),
            (Phase::Completed, "", ready, Hopeless),
        ];
        for (phase, then, goal, expected) in cases {
            assert_eq!(outlook(&at(phase as i32, then), goal), expected, "{phase:?} {then} {goal}");
        }
        assert_eq!(outlook(&at(99, ""), ready), Underway);
    }
}
