//! What the gateway counts, for Prometheus: families live where they are measured and are written out at a scrape.

pub mod calls;
mod collect;
mod endpoint;
mod text;

use std::{
    borrow::Cow,
    collections::BTreeMap,
    sync::{Mutex, MutexGuard, PoisonError},
    time::Duration,
};

use self::text::Text;
pub use self::{collect::Sources, endpoint::serve};

/// The value of a label.
pub type Label = Cow<'static, str>;

/// Upper bounds of what is measured in requests and calls, seconds.
pub const QUICK: &[f64] = &[0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0];
/// Of how long a phase lasts: from a boot's tenth of a second to days of sleep.
pub const SLOW: &[f64] =
    &[0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0, 1800.0, 3600.0, 21_600.0, 86_400.0];

/// What a family is called and what it means.
#[derive(Clone, Copy, Debug)]
pub struct Name<const L: usize> {
    /// As it is scraped.
    pub name: &'static str,
    /// For people.
    pub help: &'static str,
    /// Of every one of it.
    pub labels: [&'static str; L],
}

/// Counters of one name, by their labels.
#[derive(Debug)]
pub struct Counters<const L: usize> {
    name: Name<L>,
    all: Mutex<BTreeMap<[Label; L], u64>>,
}

/// Histograms of one name, by their labels.
#[derive(Debug)]
pub struct Histograms<const L: usize> {
    name: Name<L>,
    bounds: &'static [f64],
    all: Mutex<BTreeMap<[Label; L], Histogram>>,
}

#[derive(Clone, Debug, Default)]
struct Histogram {
    /// Of each bound, those that fit under it and under none before.
    counts: Vec<u64>,
    sum: f64,
    count: u64,
}

fn locked<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl<const L: usize> Counters<L> {
    /// None yet.
    pub const fn new(name: Name<L>) -> Self {
        Self { name, all: Mutex::new(BTreeMap::new()) }
    }

    /// One more.
    pub fn add(&self, labels: [Label; L]) {
        *locked(&self.all).entry(labels).or_default() += 1;
    }

    fn write(&self, text: &mut Text) {
        text.family(&self.name, "counter");
        for (labels, count) in locked(&self.all).iter() {
            text.sample(self.name.name, &self.name.labels, labels, *count);
        }
    }
}

impl<const L: usize> Histograms<L> {
    /// None yet.
    pub const fn new(name: Name<L>, bounds: &'static [f64]) -> Self {
        Self { name, bounds, all: Mutex::new(BTreeMap::new()) }
    }

    /// One more, that took this long.
    pub fn observe(&self, labels: [Label; L], time: Duration) {
        let seconds = time.as_secs_f64();
        let at = self.bounds.partition_point(|bound| *bound < seconds);
        let mut all = locked(&self.all);
        let one = all.entry(labels).or_default();
        one.counts.resize(self.bounds.len(), 0);
        if let Some(count) = one.counts.get_mut(at) {
            *count += 1;
        }
        one.sum += seconds;
        one.count += 1;
    }

    fn write(&self, text: &mut Text) {
        text.family(&self.name, "histogram");
        let name = self.name.name;
        for (labels, one) in locked(&self.all).iter() {
            let mut under = 0;
            for (bound, count) in self.bounds.iter().zip(&one.counts) {
                under += count;
                text.bucket(name, &self.name.labels, labels, &bound.to_string(), under);
            }
            text.bucket(name, &self.name.labels, labels, "+Inf", one.count);
            text.sample(&format!("{name}_sum"), &self.name.labels, labels, one.sum);
            text.sample(&format!("{name}_count"), &self.name.labels, labels, one.count);
        }
    }
}

/// Phases that sandboxes have left. A store's.
pub type Phases = Histograms<2>;

/// An empty one.
pub fn phases() -> Phases {
    let help =
        "How long a sandbox was in a phase that it has left for another one; to=\"\" when it was deleted.";
    Histograms::new(Name { name: "torpor_phase_seconds", help, labels: ["from", "to"] }, SLOW)
}

/// Calls of drivers. A reconciler's.
#[derive(Debug)]
pub struct DriverCalls {
    seconds: Histograms<2>,
    errors: Counters<3>,
}

impl Default for DriverCalls {
    fn default() -> Self {
        let help = "How long calls of drivers took, whatever came of them.";
        let seconds = Name { name: "torpor_driver_call_seconds", help, labels: ["driver", "verb"] };
        let help =
            "Calls of drivers that failed, by reason; DROPPED: no longer wanted when it was under way.";
        let errors = Name { name: "torpor_driver_errors_total", help, labels: ["driver", "verb", "reason"] };
        Self { seconds: Histograms::new(seconds, QUICK), errors: Counters::new(errors) }
    }
}

impl DriverCalls {
    /// One call, with the reason of its failure.
    pub fn note(&self, driver: &str, verb: &'static str, time: Duration, failed: Option<&'static str>) {
        let driver: Label = driver.to_owned().into();
        if let Some(reason) = failed {
            self.errors.add([driver.clone(), verb.into(), reason.into()]);
        }
        self.seconds.observe([driver, verb.into()], time);
    }

    fn write(&self, text: &mut Text) {
        self.seconds.write(text);
        self.errors.write(text);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_histogram_counts_what_fits_under_each_bound_and_all_under_the_last() {
        let all = Histograms::new(Name { name: "t_seconds", help: "T.", labels: ["a"] }, &[0.1, 1.0]);
        for millis in [50, 100, 101, 5000] {
            all.observe(["x".into()], Duration::from_millis(millis));
        }
        let mut text = Text::default();
        all.write(&mut text);
        let text = text.finish();
        for line in [
            "# HELP t_seconds T.",
            "# TYPE t_seconds histogram",
            "t_seconds_bucket{a=\"x\",le=\"0.1\"} 2",
            "t_seconds_bucket{a=\"x\",le=\"1\"} 3",
            "t_seconds_bucket{a=\"x\",le=\"+Inf\"} 4",
            "t_seconds_sum{a=\"x\"} 5.251",
            "t_seconds_count{a=\"x\"} 4",
        ] {
            assert!(text.lines().any(|one| one == line), "{line}\n{text}");
        }
    }
}
