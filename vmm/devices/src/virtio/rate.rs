//! Rate limits: token buckets for bytes and for operations.
//!
//! A request is let through while a bucket isn't in debt, and may put it there: so a request larger than the burst isn't
//! refused for ever, its cost only delays the next ones. Nothing here sleeps or reads a clock.

use std::time::{Duration, Instant};

use torpor_vmm_api::RateLimit;

/// Tokens that come at a steady pace. Counted in billionths.
#[derive(Debug)]
struct Bucket {
    per_second: u64,
    /// Most that gather.
    most: i128,
    /// Below zero: in debt.
    level: i128,
    last: Instant,
}

/// Parts of a token: with them, tokens per second are parts per nanosecond.
const PARTS: i128 = 1_000_000_000;

impl Bucket {
    /// Full at the start. None when there is no limit.
    fn new(per_second: u64, burst: u64, now: Instant) -> Option<Self> {
        let most = i128::from(burst.max(1)) * PARTS;
        (per_second > 0).then_some(Self { per_second, most, level: most, last: now })
    }

    fn wait(&mut self, now: Instant) -> Duration {
        let passed = now.saturating_duration_since(self.last).as_nanos().min(u128::from(u64::MAX)) as i128;
        self.last = self.last.max(now);
        self.level = (self.level + passed * i128::from(self.per_second)).min(self.most);
        let debt = (-self.level).max(0);
        let nanoseconds = (debt + i128::from(self.per_second) - 1) / i128::from(self.per_second);
        Duration::from_nanos(u64::try_from(nanoseconds).unwrap_or(u64::MAX))
    }

    fn take(&mut self, tokens: u64) {
        self.level -= i128::from(tokens) * PARTS;
    }
}

/// One direction of a device under a [`RateLimit`].
#[derive(Debug)]
pub(crate) struct Limiter {
    bytes: Option<Bucket>,
    operations: Option<Bucket>,
}

impl Limiter {
    /// With full buckets; limits of 0 and none at all let everything through.
    pub(crate) fn new(limit: Option<RateLimit>, now: Instant) -> Self {
        let limit = limit.unwrap_or_default();
        Self {
            bytes: Bucket::new(limit.bytes_per_second, limit.burst_bytes, now),
            operations: Bucket::new(limit.operations_per_second, limit.burst_operations, now),
        }
    }

    /// True when it lets everything through.
    pub(crate) fn is_open(&self) -> bool {
        self.bytes.is_none() && self.operations.is_none()
    }

    /// How long the next request has to wait; zero: it may go.
    pub(crate) fn wait(&mut self, now: Instant) -> Duration {
        let buckets = [&mut self.bytes, &mut self.operations];
        let waits = buckets.into_iter().flatten().map(|bucket| bucket.wait(now));
        waits.max().unwrap_or_default()
    }

    /// Counts a request.
    pub(crate) fn take(&mut self, bytes: u64) {
        if let Some(bucket) = &mut self.bytes {
            bucket.take(bytes);
        }
        if let Some(bucket) = &mut self.operations {
            bucket.take(1);
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn limit(bytes_per_second: u64, burst_bytes: u64, operations_per_second: u64) -> Option<RateLimit> {
        Some(RateLimit { bytes_per_second, burst_bytes, operations_per_second, burst_operations: 1 })
    }

    #[test]
    fn no_limit_lets_everything_through() {
        let now = Instant::now();
        for limit in [None, limit(0, 0, 0)] {
            let mut limiter = Limiter::new(limit, now);
            limiter.take(u64::MAX);
            assert!(limiter.is_open());
            assert_eq!(limiter.wait(now), Duration::ZERO);
        }
    }

    #[test]
    fn a_burst_goes_at_once_and_what_follows_waits_its_time() {
        let now = Instant::now();
        let mut limiter = Limiter::new(limit(1000, 500, 0), now);
        limiter.take(500);
        assert_eq!(limiter.wait(now), Duration::ZERO, "the bucket is empty, not in debt");
        limiter.take(250);
        assert_eq!(limiter.wait(now), Duration::from_millis(250));
        assert_eq!(limiter.wait(now + Duration::from_millis(100)), Duration::from_millis(150));
        assert_eq!(limiter.wait(now + Duration::from_millis(250)), Duration::ZERO);
    }

    #[test]
    fn the_slower_of_both_limits_counts() {
        let now = Instant::now();
        let mut limiter = Limiter::new(limit(1 << 30, 1 << 20, 10), now);
        limiter.take(1);
        limiter.take(1);
        assert_eq!(limiter.wait(now), Duration::from_millis(100));
    }

    proptest! {
        #[test]
        fn in_the_long_run_no_more_goes_through_than_the_limit_says(
            rate in 1u64..1 << 40,
            burst in 0u64..1 << 30,
            sizes in prop::collection::vec(0u64..1 << 24, 1..100),
        ) {
            let start = Instant::now();
            let mut now = start;
            let mut limiter = Limiter::new(limit(rate, burst, 0), start);
            let largest = sizes.iter().copied().max().unwrap_or(0);
            let mut sum = 0;
            for size in sizes {
                now += limiter.wait(now);
                prop_assert_eq!(limiter.wait(now), Duration::ZERO);
                limiter.take(size);
                sum += size;
            }
            let allowed = (now - start).as_nanos() * u128::from(rate) / 1_000_000_000 + u128::from(burst.max(1));
            prop_assert!(u128::from(sum) <= allowed + u128::from(largest) + 1);
        }
    }
}
