//! The table as programs for the kernel (seccomp(2)).

use std::collections::{BTreeMap, BTreeSet};
use std::io;
use std::sync::OnceLock;

use seccompiler::{
    BpfProgram, SeccompAction, SeccompCmpArgLen, SeccompCmpOp, SeccompCondition, SeccompFilter, SeccompRule,
    TargetArch, sock_filter,
};
use torpor_vmm_api::ThreadKind;

use crate::table::{Check, DEVICES, RULES, Rule, Width};

/// The table can't be made into programs: a mistake in it.
#[derive(Debug, thiserror::Error)]
#[error("the system call filter of {kind} threads can't be built")]
pub struct FilterError {
    /// Whose.
    pub kind: &'static str,
    /// Why.
    pub source: seccompiler::BackendError,
}

/// One program per kind of thread, each made when it is first needed: what a process does before its guest runs counts.
#[derive(Debug)]
pub struct Filters {
    on: bool,
    /// In the order of [`ThreadKind::ALL`].
    programs: [OnceLock<BpfProgram>; ThreadKind::ALL.len()],
}

impl Filters {
    /// The filters.
    pub fn on() -> Self {
        Self { on: true, programs: Default::default() }
    }

    /// No filters, for debugging.
    pub fn off() -> Self {
        Self { on: false, programs: Default::default() }
    }

    /// Filters the calling thread from here on, and all threads that it starts. A thread that has a filter already (its
    /// starter's) is bound by both. The process must have `no_new_privs` or be root's.
    ///
    /// # Errors
    /// The kernel's, or a mistake in the table ([`FilterError`]). The thread must not go on.
    pub fn install(&self, kind: ThreadKind) -> io::Result<()> {
        let place = ThreadKind::ALL.iter().position(|other| *other == kind);
        let Some(place) = place.filter(|_| self.on) else { return Ok(()) };
        let program = match self.programs[place].get() {
            Some(program) => program,
            None => {
                let made = compile(kind).map_err(|source| FilterError { kind: kind.name(), source });
                let made = made.map_err(io::Error::other)?;
                self.programs[place].get_or_init(|| made)
            }
        };
        let length = u16::try_from(program.len()).map_err(io::Error::other)?;
        // `sock_filter` is the kernel's structure in both crates.
        let filter = libc::sock_fprog { len: length, filter: program.as_ptr().cast_mut().cast() };
        // SAFETY: the structure and the program that it points to live until the call returns; the kernel copies and
        // doesn't write.
        let result =
            unsafe { libc::syscall(libc::SYS_seccomp, libc::SECCOMP_SET_MODE_FILTER, 0, &raw const filter) };
        match result {
            0 => Ok(()),
            _ => Err(io::Error::last_os_error()),
        }
    }
}

fn compile(kind: ThreadKind) -> Result<BpfProgram, seccompiler::BackendError> {
    let mut calls: BTreeMap<i64, Vec<SeccompRule>> = BTreeMap::new();
    let mut free = BTreeSet::new();
    for rule in RULES.iter().filter(|rule| is_for(rule, kind)) {
        // A call without conditions is one for the kernel's own table of such calls: it then runs no filter at all.
        if rule.when.is_empty() {
            free.insert(rule.number);
        }
        let known = calls.entry(rule.number).or_default();
        for checks in rule.when {
            known.push(SeccompRule::new(checks.iter().map(condition).collect::<Result<_, _>>()?)?);
        }
    }
    free.iter().for_each(|number| drop(calls.insert(*number, Vec::new())));
    let architecture = TargetArch::try_from(std::env::consts::ARCH)?;
    let filter = SeccompFilter::new(calls, SeccompAction::KillProcess, SeccompAction::Allow, architecture)?;
    let program: BpfProgram = filter.try_into()?;
    Ok(match kind {
        ThreadKind::Starter => [&without_clone3(), program.as_slice()].concat(),
        _ => program,
    })
}

/// A thread is bound by its starter's filter too, so the starter's holds all that devices' threads may do.
fn is_for(rule: &Rule, kind: ThreadKind) -> bool {
    let inherited = kind == ThreadKind::Starter && rule.who.iter().any(|who| DEVICES.contains(who));
    inherited || rule.who.contains(&kind)
}

/// The C library starts threads by clone3, whose flags no filter can see, and by clone where that isn't there: it is told so.
fn without_clone3() -> [sock_filter; 3] {
    let step = |code: u32, jf, k: u32| sock_filter { code: code as u16, jt: 0, jf, k };
    [
        // The call's number is the first field of what a filter sees.
        step(libc::BPF_LD | libc::BPF_W | libc::BPF_ABS, 0, 0),
        step(libc::BPF_JMP | libc::BPF_JEQ | libc::BPF_K, 1, libc::SYS_clone3 as u32),
        step(libc::BPF_RET | libc::BPF_K, 0, libc::SECCOMP_RET_ERRNO | libc::ENOSYS as u32),
    ]
}

fn condition(check: &Check) -> Result<SeccompCondition, seccompiler::BackendError> {
    let length = match check.width {
        Width::Int => SeccompCmpArgLen::Dword,
        Width::Long => SeccompCmpArgLen::Qword,
    };
    let operator = match check.mask {
        u64::MAX => SeccompCmpOp::Eq,
        mask => SeccompCmpOp::MaskedEq(mask),
    };
    SeccompCondition::new(check.argument, length, operator, check.value)
}
