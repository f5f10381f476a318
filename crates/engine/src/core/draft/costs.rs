//! Cost of rows: the time of a batch by its rows, measured once at start, so that lengths of drafts depend on no clock.

use std::time::Duration;

/// Times of batches whose rows are all sampled, and of draft steps, by their rows.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct StepCosts {
    /// Of the target, in increasing order of rows.
    pub target: Vec<(usize, Duration)>,
    /// Of one step of the drafter; empty where there is none.
    pub drafter: Vec<(usize, Duration)>,
}

impl StepCosts {
    /// Costs for a device that was not measured: it reads all weights for one row, and hardly computes for more.
    pub fn assumed() -> StepCosts {
        let micros = Duration::from_micros;
        StepCosts {
            target: vec![(1, micros(1000)), (8, micros(1200)), (64, micros(4000))],
            drafter: vec![(1, micros(80)), (8, micros(100)), (64, micros(300))],
        }
    }

    /// Seconds of a batch.
    pub(crate) fn target(&self, rows: usize) -> f64 {
        between(&self.target, rows)
    }

    /// Seconds of one draft step; 0 without a drafter.
    pub(crate) fn drafter(&self, rows: usize) -> f64 {
        between(&self.drafter, rows)
    }
}

/// Between two measured rows on the line through them, and beyond the last in proportion to it.
fn between(table: &[(usize, Duration)], rows: usize) -> f64 {
    let seconds = |entry: &(usize, Duration)| entry.1.as_secs_f64();
    let (Some(first), Some(last)) = (table.first(), table.last()) else {
        return 0.0;
    };
    if rows <= first.0 {
        return seconds(first);
    }
    if rows >= last.0 {
        return seconds(last) * rows as f64 / last.0 as f64;
    }
    let above = table.partition_point(|(measured, _)| *measured < rows);
    let (low, high) = (&table[above - 1], &table[above]);
    let share = (rows - low.0) as f64 / (high.0 - low.0) as f64;
    seconds(low) + share * (seconds(high) - seconds(low))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn costs_lie_between_what_was_measured() {
        let millis = |rows, ms| (rows, Duration::from_millis(ms));
        let costs = StepCosts {
            target: vec![millis(1, 10), millis(4, 16), millis(8, 16)],
            drafter: Vec::new(),
        };
        let found = [1, 2, 4, 6, 8, 16].map(|rows| (costs.target(rows) * 1e3).round());
        assert_eq!(found, [10.0, 12.0, 16.0, 16.0, 16.0, 32.0]);
        assert_eq!(costs.drafter(3), 0.0);
    }
}
