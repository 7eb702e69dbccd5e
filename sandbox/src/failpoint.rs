//! Named places in the code where a test may end the process, make a step fail or hold it up. Compiled in under the
//! feature `failpoints` only; without it [`hit`] is nothing at all.
//!
//! The variable `TORPOR_FAILPOINT` arms them: `NAME=ACTION[*N][@K]`, several parted by `;`. ACTION is `abort` (the
//! process ends at once, as by `kill -9`: nothing is flushed, no destructor runs), `error` (the step fails with an error
//! that a repeat may mend) or `sleep(MS)`. `@K`: from the K-th time on that the place is reached; `*N`: so many times at
//! most. Every name is written out where it is hit, so that a test can list them from the source.

/// The fault of a failpoint that was armed with `error`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("failpoint '{0}' was armed with an error")]
pub struct Injected(pub &'static str);

impl From<Injected> for crate::DriverError {
    fn from(injected: Injected) -> Self {
        Self::backend("failpoint", injected)
    }
}

/// The place `name` is reached.
///
/// # Errors
/// Only when a test armed it with `error`.
#[cfg(not(feature = "failpoints"))]
#[inline(always)]
pub fn hit(_name: &'static str) -> Result<(), Injected> {
    Ok(())
}

/// Whether failpoints are compiled in, and what of them is armed: for the log.
pub fn armed() -> Option<String> {
    let armed = || std::env::var("TORPOR_FAILPOINT").ok().filter(|text| !text.is_empty());
    if cfg!(feature = "failpoints") { armed() } else { None }
}

#[cfg(feature = "failpoints")]
pub use on::hit;

#[cfg(feature = "failpoints")]
mod on {
    use std::{
        collections::HashMap,
        sync::{Mutex, OnceLock, PoisonError},
        time::Duration,
    };

    use super::Injected;

    #[derive(Clone, Copy, Debug, PartialEq, Eq)]
    pub(super) enum Action {
        Abort,
        Error,
        Sleep(Duration),
    }

    #[derive(Clone, Copy, Debug, PartialEq, Eq)]
    pub(super) struct Armed {
        pub(super) action: Action,
        /// Times that it still passes before it acts.
        pub(super) pass: u32,
        /// Times that it still acts.
        pub(super) left: u32,
    }

    /// What the variable says; what it says wrongly ends the process, as a test that arms nothing shows nothing.
    pub(super) fn parse(text: &str) -> Result<HashMap<String, Armed>, String> {
        let mut all = HashMap::new();
        for one in text.split(';').map(str::trim).filter(|one| !one.is_empty()) {
            let wrong = || format!("TORPOR_FAILPOINT: '{one}' is not NAME=abort|error|sleep(MS)[*N][@K]");
            let (name, what) = one.split_once('=').ok_or_else(wrong)?;
            let (what, from) = match what.split_once('@') {
                Some((what, from)) => (what, from.parse().map_err(|_| wrong())?),
                None => (what, 1),
            };
            let (what, left) = match what.split_once('*') {
                Some((what, times)) => (what, times.parse().map_err(|_| wrong())?),
                None => (what, u32::MAX),
            };
            let millis = what.strip_prefix("sleep(").and_then(|rest| rest.strip_suffix(')'));
            let action = match (what, millis) {
                ("abort", _) => Action::Abort,
                ("error", _) => Action::Error,
                (_, Some(ms)) => Action::Sleep(Duration::from_millis(ms.parse().map_err(|_| wrong())?)),
                _ => return Err(wrong()),
            };
            all.insert(name.to_owned(), Armed { action, pass: from.max(1) - 1, left });
        }
        Ok(all)
    }

    /// What this time comes to.
    pub(super) fn next(armed: &mut Armed) -> Option<Action> {
        if armed.pass > 0 {
            armed.pass -= 1;
            return None;
        }
        armed.left = armed.left.checked_sub(1)?;
        Some(armed.action)
    }

    fn all() -> &'static Mutex<HashMap<String, Armed>> {
        static ALL: OnceLock<Mutex<HashMap<String, Armed>>> = OnceLock::new();
        ALL.get_or_init(|| match parse(&std::env::var("TORPOR_FAILPOINT").unwrap_or_default()) {
            Ok(all) => Mutex::new(all),
            Err(error) => {
                eprintln!("{error}");
                std::process::exit(2)
            }
        })
    }

    /// The place `name` is reached.
    ///
    /// # Errors
    /// When it is armed with `error`.
    pub fn hit(name: &'static str) -> Result<(), Injected> {
        let mut all = all().lock().unwrap_or_else(PoisonError::into_inner);
        let action = all.get_mut(name).and_then(next);
        drop(all);
        match action {
            None => Ok(()),
            Some(Action::Error) => Err(Injected(name)),
            Some(Action::Sleep(time)) => {
                std::thread::sleep(time);
                Ok(())
            }
            Some(Action::Abort) => {
                eprintln!("failpoint '{name}': the process ends here");
                std::process::abort()
            }
        }
    }
}

#[cfg(all(test, feature = "failpoints"))]
#[allow(clippy::unwrap_used, reason = "tests")]
mod tests {
    use std::time::Duration;

    use super::on::{Action, next, parse};

    #[test]
    fn a_failpoint_passes_acts_and_passes_again_as_it_was_armed() {
        let mut all = parse("a=abort; b=error*2@3;c=sleep(20)").unwrap();
        assert_eq!(next(all.get_mut("a").unwrap()), Some(Action::Abort));
        let b = all.get_mut("b").unwrap();
        let seen: Vec<_> = (0..6).map(|_| next(b).is_some()).collect();
        assert_eq!(seen, [false, false, true, true, false, false]);
        assert_eq!(next(all.get_mut("c").unwrap()), Some(Action::Sleep(Duration::from_millis(20))));
    }

    #[test]
    fn what_arms_nothing_is_refused_by_its_words() {
        for text in ["a", "a=explode", "a=sleep(x)", "a=abort*x", "a=abort@x"] {
            assert!(parse(text).unwrap_err().contains(text), "{text}");
        }
    }
}
