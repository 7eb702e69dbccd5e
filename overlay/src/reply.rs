//! A result that one thread leaves and a future waits for.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::{Context, Poll, Waker};

/// Where a request leaves its result for a future.
pub(crate) struct Reply<T>(Mutex<Letter<T>>);

enum Letter<T> {
    Open(Option<Waker>),
    Here(T),
    /// The future is gone.
    Unwanted,
}

impl<T> Reply<T> {
    /// Both ends.
    pub(crate) fn new() -> (Arc<Self>, Waiting<T>) {
        let reply = Arc::new(Self(Mutex::new(Letter::Open(None))));
        (Arc::clone(&reply), Waiting(reply))
    }

    fn lock(&self) -> MutexGuard<'_, Letter<T>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Leaves the result, and returns it when nobody wants it.
    pub(crate) fn give(&self, value: T) -> Option<T> {
        let mut letter = self.lock();
        let waker = match &mut *letter {
            Letter::Open(waker) => waker.take(),
            _ => return Some(value),
        };
        *letter = Letter::Here(value);
        drop(letter);
        waker.into_iter().for_each(Waker::wake);
        None
    }
}

/// The future of it.
pub(crate) struct Waiting<T>(Arc<Reply<T>>);

impl<T> Future for Waiting<T> {
    type Output = T;

    fn poll(self: std::pin::Pin<&mut Self>, context: &mut Context<'_>) -> Poll<T> {
        let mut letter = self.0.lock();
        match std::mem::replace(&mut *letter, Letter::Open(Some(context.waker().clone()))) {
            Letter::Here(value) => Poll::Ready(value),
            _ => Poll::Pending,
        }
    }
}

impl<T> Drop for Waiting<T> {
    fn drop(&mut self) {
        *self.0.lock() = Letter::Unwanted;
    }
}
