//! Progress of a wait: one line on standard error that tells the step and how long it has taken.

use std::{
    io::{self, Write as _},
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::{Duration, Instant},
};

use tokio::task::JoinHandle;
use torpor_sandbox::spec::size;
use torpor_sdk::{phase, v1};

use crate::output::clean;

const TICK: Duration = Duration::from_millis(200);

/// Shows the steps of one thing until it is dropped; shows nothing when it is off.
pub struct Progress {
    line: Option<Arc<Mutex<Line>>>,
    ticker: Option<JoinHandle<()>>,
}

struct Line {
    label: String,
    step: String,
    amount: String,
    began: Instant,
    step_began: Instant,
}

impl Progress {
    /// Needs a Tokio runtime when it is on.
    pub fn new(on: bool, label: &str) -> Self {
        if !on {
            return Self { line: None, ticker: None };
        }
        let now = Instant::now();
        let line = Line {
            label: clean(label),
            step: String::new(),
            amount: String::new(),
            began: now,
            step_began: now,
        };
        let line = Arc::new(Mutex::new(line));
        let shared = Arc::clone(&line);
        let ticker = tokio::spawn(async move {
            let mut ticks = tokio::time::interval(TICK);
            loop {
                ticks.tick().await;
                locked(&shared).draw();
            }
        });
        Self { line: Some(line), ticker: Some(ticker) }
    }

    /// Takes the step from a sandbox's state.
    pub fn see(&self, sandbox: &v1::Sandbox) {
        let step = sandbox.status.as_ref().map_or("", |s| s.step.as_str());
        let name = phase::name(phase::of(sandbox));
        self.step(&if step.is_empty() { name.to_owned() } else { format!("{name}: {step}") });
    }

    /// Names the step under way; a new one leaves the line of the last one standing.
    pub fn step(&self, step: &str) {
        let Some(line) = &self.line else { return };
        let mut line = locked(line);
        let step = clean(step);
        if line.step == step {
            return;
        }
        if !line.step.is_empty() {
            write(&format!("\r\x1b[K  {:<44} {}\n", line.step, seconds(line.step_began.elapsed())));
        }
        line.step = step;
        line.amount.clear();
        line.step_began = Instant::now();
        line.draw();
    }

    /// How much of the step is done.
    pub fn amount(&self, done: u64, total: u64) {
        let Some(line) = &self.line else { return };
        if total > 0 {
            // Drawn with the next tick: these come often.
            locked(line).amount = format!(" {} of {}", size(done), size(total));
        }
    }
}

impl Progress {
    /// So many bytes so far; of all of them, when that is known.
    pub fn bytes(&self, done: u64, total: u64) {
        let Some(line) = &self.line else { return };
        let of = if total >= done { format!(" of {}", size(total)) } else { String::new() };
        locked(line).amount = format!(" {}{of}", size(done));
    }
}

impl Line {
    fn draw(&self) {
        let elapsed = seconds(self.began.elapsed());
        let text = format!("{}: {}{} ({elapsed})", self.label, self.step, self.amount);
        // A line that wraps can't be drawn over.
        let width = terminal_size::terminal_size_of(io::stderr()).map_or(80, |(w, _)| usize::from(w.0));
        let fits: String = text.chars().take(width.saturating_sub(1)).collect();
        write(&format!("\r\x1b[K{fits}"));
    }
}

impl Drop for Progress {
    fn drop(&mut self) {
        if let Some(ticker) = self.ticker.take() {
            ticker.abort();
            write("\r\x1b[K");
        }
    }
}

fn locked(line: &Mutex<Line>) -> MutexGuard<'_, Line> {
    line.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Progress is worth no failure.
fn write(text: &str) {
    let mut stderr = io::stderr().lock();
    let _ = stderr.write_all(text.as_bytes()).and_then(|()| stderr.flush());
}

/// A time as people read it: "2.1 s".
pub fn seconds(time: Duration) -> String {
    format!("{:.1} s", time.as_secs_f64())
}
