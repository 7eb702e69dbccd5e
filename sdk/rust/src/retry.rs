//! Calls that are made again when the gateway is away for a moment.

use std::{future::Future, time::Duration};

use rand::Rng as _;
use tonic::{Response, Status};

use crate::error::Error;

/// How often and how patiently a call is made again. One attempt always ends before the next begins.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Retry {
    /// All attempts together, at least 1.
    pub attempts: u32,
    /// The pause after the first attempt; it doubles after each.
    pub first_pause: Duration,
    /// The longest pause.
    pub longest_pause: Duration,
}

impl Default for Retry {
    /// Six attempts within about three seconds: a gateway that is restarted is back by then.
    fn default() -> Self {
        Self { attempts: 6, first_pause: Duration::from_millis(100), longest_pause: Duration::from_secs(2) }
    }
}

impl Retry {
    /// The pause after an attempt, counted from 0, with up to a quarter more by chance so that many clients spread.
    pub(crate) fn pause(&self, attempt: u32) -> Duration {
        let doubled = self.first_pause.saturating_mul(1_u32.checked_shl(attempt).unwrap_or(u32::MAX));
        let pause = doubled.min(self.longest_pause);
        pause + pause.mul_f64(rand::rng().random_range(0.0..0.25))
    }

    /// Makes a call until it is answered by something else than UNAVAILABLE. Only for calls that may be repeated: reads,
    /// and verbs that carry a request id.
    pub(crate) async fn call<T, F>(&self, mut call: impl FnMut() -> F) -> Result<T, Error>
    where
        F: Future<Output = Result<Response<T>, Status>>,
    {
        let mut attempt = 0;
        loop {
            match call().await {
                Ok(response) => return Ok(response.into_inner()),
                Err(status) if Error::is_transport(&status) && attempt + 1 < self.attempts => {
                    tokio::time::sleep(self.pause(attempt)).await;
                    attempt += 1;
                }
                Err(status) => return Err(status.into()),
            }
        }
    }
}

/// A new random request id: a verb that is sent again with the same one returns the first result.
pub fn request_id() -> String {
    format!("{:032x}", rand::rng().random::<u128>())
}

#[cfg(test)]
mod tests {
    use std::cell::Cell;

    use super::*;

    const FAST: Retry =
        Retry { attempts: 3, first_pause: Duration::from_millis(1), longest_pause: Duration::from_millis(2) };

    #[tokio::test]
    async fn unavailable_is_tried_again_and_then_given_up() {
        let calls = Cell::new(0);
        let result = FAST.call(|| {
            calls.set(calls.get() + 1);
            async { Err::<Response<()>, _>(Status::unavailable("away")) }
        });
        assert_eq!(result.await.unwrap_err().code(), Some(tonic::Code::Unavailable));
        assert_eq!(calls.get(), 3);
    }

    #[tokio::test]
    async fn other_answers_are_final() {
        let calls = Cell::new(0);
        let result = FAST.call(|| {
            calls.set(calls.get() + 1);
            async { Err::<Response<()>, _>(Status::aborted("stale")) }
        });
        assert!(result.await.is_err());
        assert_eq!(calls.get(), 1);
    }

    #[test]
    fn pauses_grow_to_their_bound_and_never_overflow() {
        let retry = Retry::default();
        assert!(retry.pause(0) < retry.pause(2));
        assert!(retry.pause(500) <= retry.longest_pause.mul_f64(1.25));
    }
}
