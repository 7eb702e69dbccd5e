//! Calls that are made again when the gateway is away, or has too much to do, for a moment.

use std::{future::Future, time::Duration};

use rand::Rng as _;
use tonic::{Response, Status};
use tonic_types::StatusExt as _;

use crate::error::Error;

/// However long a gateway wants to be left alone.
const LONGEST_HINT: Duration = Duration::from_secs(10);

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

    /// Makes a call until it is answered by something else than UNAVAILABLE or OVERLOADED. Only for calls that may be repeated: reads,
    /// and verbs that carry a request id.
    pub(crate) async fn call<T, F>(&self, mut call: impl FnMut() -> F) -> Result<T, Error>
    where
        F: Future<Output = Result<Response<T>, Status>>,
    {
        let mut attempt = 0;
        loop {
            match call().await {
                Ok(response) => return Ok(response.into_inner()),
                Err(status) if attempt + 1 < self.attempts => {
                    let hint = overloaded(&status);
                    if hint.is_none() && !Error::is_transport(&status) {
                        return Err(status.into());
                    }
                    // What the gateway asks for, and the spread of our own.
                    tokio::time::sleep(hint.unwrap_or_default().max(self.pause(attempt))).await;
                    attempt += 1;
                }
                Err(status) => return Err(status.into()),
            }
        }
    }
}

/// When a gateway that has too much to do wants to be asked again.
fn overloaded(status: &Status) -> Option<Duration> {
    if status.code() != tonic::Code::ResourceExhausted {
        return None;
    }
    let info = status.get_details_error_info().filter(|info| info.reason == "OVERLOADED")?;
    let hint = info.metadata.get("retry_after_ms").and_then(|text| text.parse().ok());
    Some(hint.map_or(Duration::ZERO, Duration::from_millis).min(LONGEST_HINT))
}

/// Makes up the id of a request whose caller has given none.
pub(crate) fn fill_in(id: &mut String) {
    if id.is_empty() {
        *id = request_id();
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

    #[tokio::test]
    async fn a_gateway_with_too_much_to_do_is_asked_again_and_one_with_nothing_left_is_not() {
        use tonic_types::{ErrorDetails, StatusExt as _};
        for (reason, times) in [("OVERLOADED", 3), ("EXHAUSTED", 1)] {
            let calls = Cell::new(0);
            let hint: std::collections::HashMap<_, _> =
                [("retry_after_ms".to_owned(), "1".to_owned())].into();
            let details = ErrorDetails::with_error_info(reason, "torpor", hint);
            let result = FAST.call(|| {
                calls.set(calls.get() + 1);
                let status =
                    Status::with_error_details(tonic::Code::ResourceExhausted, "no", details.clone());
                async { Err::<Response<()>, _>(status) }
            });
            assert!(result.await.is_err());
            assert_eq!(calls.get(), times, "{reason}");
        }
    }

    #[test]
    fn pauses_grow_to_their_bound_and_never_overflow() {
        let retry = Retry::default();
        assert!(retry.pause(0) < retry.pause(2));
        assert!(retry.pause(500) <= retry.longest_pause.mul_f64(1.25));
    }
}
