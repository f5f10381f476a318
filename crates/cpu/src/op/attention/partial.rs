//! Split-KV partials of attention.

use carat_cpu_kernels::table::Kernels;

/// The softmax of some positions, not yet divided: for each query the largest score, the sum of exponentials relative to
/// it, and the weighted sum of values.
pub(super) struct SplitPartial<'a> {
    pub(super) largest: &'a mut [f32],
    pub(super) sums: &'a mut [f32],
    /// `[queries, width]`.
    pub(super) values: &'a mut [f32],
}

impl<'a> SplitPartial<'a> {
    /// In memory that may be long enough for more queries.
    pub(super) fn new(memory: &'a mut [f32], queries: usize, width: usize) -> SplitPartial<'a> {
        let (largest, rest) = memory.split_at_mut(queries);
        let (sums, values) = rest.split_at_mut(queries);
        SplitPartial {
            largest,
            sums,
            values: &mut values[..queries * width],
        }
    }

    /// Nothing seen yet.
    pub(super) fn clear(&mut self) {
        self.largest.fill(f32::NEG_INFINITY);
        self.sums.fill(0.0);
        self.values.fill(0.0);
    }

    /// Adds the positions of `next`, which come after ours: rescales both to the larger of the largest scores.
    pub(super) fn merge(&mut self, kernels: &Kernels, next: &SplitPartial<'_>) {
        let queries = self.largest.len();
        let width = self.values.len() / queries;
        for i in 0..queries {
            if next.largest[i] == f32::NEG_INFINITY {
                continue;
            }
            let largest = self.largest[i].max(next.largest[i]);
            let ours = (self.largest[i] - largest).exp();
            let theirs = (next.largest[i] - largest).exp();
            self.largest[i] = largest;
            self.sums[i] = self.sums[i] * ours + next.sums[i] * theirs;
            let values = &mut self.values[i * width..][..width];
            for value in values.iter_mut() {
                *value *= ours;
            }
            kernels.add_weighted(&next.values[i * width..][..width], theirs, values);
        }
    }

    /// Divides by the sums: the softmax is complete.
    pub(super) fn finish(&mut self) {
        let width = self.values.len() / self.sums.len();
        for (values, sum) in self.values.chunks_mut(width).zip(self.sums.iter()) {
            let by = 1.0 / sum;
            for value in values {
                *value *= by;
            }
        }
    }
}
