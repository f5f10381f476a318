//! Costs of constraining, counted for whoever wants to know: plain atomics, read at any time.

use std::{
    sync::atomic::{AtomicU64, Ordering::Relaxed},
    time::Duration,
};

/// Upper bounds of the buckets of a [`Histogram`], in microseconds. What takes longer is in one bucket more.
pub const BUCKET_MICROS: [u64; 14] = [
    10, 20, 50, 100, 200, 500, 1_000, 2_000, 5_000, 10_000, 50_000, 200_000, 1_000_000, 2_000_000,
];

/// Durations by size.
#[derive(Debug, Default)]
pub struct Histogram {
    buckets: [AtomicU64; BUCKET_MICROS.len() + 1],
    nanos: AtomicU64,
}

impl Histogram {
    pub(crate) fn add(&self, duration: Duration) {
        let nanos = u64::try_from(duration.as_nanos()).unwrap_or(u64::MAX);
        let bucket = BUCKET_MICROS.partition_point(|most| most.saturating_mul(1000) < nanos);
        self.buckets[bucket].fetch_add(1, Relaxed);
        self.nanos.fetch_add(nanos, Relaxed);
    }

    /// Durations in each bucket, not summed up.
    pub fn counts(&self) -> [u64; BUCKET_MICROS.len() + 1] {
        std::array::from_fn(|bucket| self.buckets[bucket].load(Relaxed))
    }

    /// Sum of all durations.
    pub fn total(&self) -> Duration {
        Duration::from_nanos(self.nanos.load(Relaxed))
    }
}

/// Counters of one [`Grammars`](crate::Grammars).
#[derive(Debug, Default)]
pub struct Meter {
    /// Masks that were computed, whoever did; constant ones are not counted.
    pub mask: Histogram,
    /// Time for which a draw waited for a mask: next to nothing where it was computed beside the forward pass.
    pub mask_wait: Histogram,
    /// Grammars that were compiled.
    pub compile: Histogram,
    pub(crate) cached: AtomicU64,
    pub(crate) forced: AtomicU64,
    pub(crate) failed: AtomicU64,
}

impl Meter {
    /// Grammars that were found compiled.
    pub fn cached_grammars(&self) -> u64 {
        self.cached.load(Relaxed)
    }

    /// Tokens that were taken without asking the model.
    pub fn forced_tokens(&self) -> u64 {
        self.forced.load(Relaxed)
    }

    /// Answers that were cut off because their grammar ran into a limit.
    pub fn failed_answers(&self) -> u64 {
        self.failed.load(Relaxed)
    }
}

pub(crate) fn count(counter: &AtomicU64) {
    counter.fetch_add(1, Relaxed);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn durations_fall_into_the_bucket_that_holds_them() {
        let histogram = Histogram::default();
        for micros in [0, 10, 11, 2_000_000, 2_000_001] {
            histogram.add(Duration::from_micros(micros));
        }
        let counts = histogram.counts();
        assert_eq!((counts[0], counts[1], counts[13], counts[14]), (2, 1, 1, 1));
        assert_eq!(histogram.total(), Duration::from_micros(4_000_022));
    }
}
