//! The terminal that the user sits at: its size, and raw mode that always ends.

use std::{
    io::{self, IsTerminal as _},
    panic,
    sync::{Mutex, PoisonError},
};

use nix::sys::termios::{self, SetArg, Termios};
use torpor_sdk::v1;

/// What the terminal was set to before; shared with the panic hook.
static BEFORE: Mutex<Option<Termios>> = Mutex::new(None);

/// While it lives, standard input is a raw terminal: every key goes to the remote side. Undone by drop, and before a panic
/// prints.
pub struct RawMode(());

impl RawMode {
    pub fn enter() -> io::Result<Self> {
        let before = termios::tcgetattr(io::stdin())?;
        let mut raw = before.clone();
        termios::cfmakeraw(&mut raw);
        *BEFORE.lock().unwrap_or_else(PoisonError::into_inner) = Some(before);
        let earlier = panic::take_hook();
        panic::set_hook(Box::new(move |info| {
            restore();
            earlier(info);
        }));
        let guard = Self(());
        termios::tcsetattr(io::stdin(), SetArg::TCSANOW, &raw)?;
        Ok(guard)
    }
}

impl Drop for RawMode {
    fn drop(&mut self) {
        restore();
    }
}

fn restore() {
    if let Some(before) = BEFORE.lock().unwrap_or_else(PoisonError::into_inner).take() {
        // Fails when the terminal is gone; then there is nothing to restore.
        let _ = termios::tcsetattr(io::stdin(), SetArg::TCSADRAIN, &before);
    }
}

/// The size of the terminal that output goes to; none when it goes elsewhere.
pub fn size() -> Option<v1::WindowSize> {
    let (width, height) = terminal_size::terminal_size_of(io::stdout())
        .or_else(|| terminal_size::terminal_size_of(io::stdin()))?;
    Some(v1::WindowSize { cols: width.0.into(), rows: height.0.into() })
}

/// Whether standard input is a terminal.
pub fn has_input() -> bool {
    io::stdin().is_terminal()
}
