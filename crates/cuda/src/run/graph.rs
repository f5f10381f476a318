//! CUDA graphs: launches captured once and replayed, one call for the driver instead of hundreds, and no gaps between kernels.
//!
//! A graph is captured for a bucket of rows and serves every batch of at most as many: kernels read how many rows there are from
//! device memory. Decoding has one graph per power of two rows; prompts have one per bucket of their chunk.

use std::{
    collections::{HashMap, HashSet, hash_map::Entry},
    sync::Arc,
};

use carat_model::backend::CompileOptions;
use cudarc::driver::{CudaGraph, CudaStream, sys};

use crate::{
    compile::rows::{RowClass, RowCounts, padded_rows},
    error::CudaError,
};

/// The most rows that decode together and still take the next power of two.
const MAX_DECODED: usize = 64;
/// Graphs to keep; batches of yet other sizes are launched one kernel after another.
const MAX_GRAPHS: usize = 64;

/// The row counts to launch for, captured or not: of decoding a power of two, or the most there may be.
pub(crate) fn bucket(rows: RowCounts, options: &CompileOptions) -> RowCounts {
    if rows.all == rows.sampled && rows.all <= MAX_DECODED {
        let max_rows = options.max_rows.min(options.max_sampled);
        let count = rows.all.next_power_of_two().min(max_rows);
        return RowCounts {
            all: count,
            sampled: count,
        };
    }
    let of = |count: usize, max_rows: usize| match (count, RowClass::of(count)) {
        (0, _) => 0,
        (_, RowClass::Small) => count.next_power_of_two().min(max_rows),
        (_, RowClass::Large) => padded_rows(count),
    };
    RowCounts {
        all: of(rows.all, options.max_rows),
        sampled: of(rows.sampled, options.max_sampled),
    }
}

/// A captured graph.
pub(crate) struct Graph(CudaGraph);

impl Graph {
    /// Captures what `record` queues on the stream, without running it.
    pub(crate) fn capture(
        stream: &Arc<CudaStream>,
        record: impl FnOnce() -> Result<(), CudaError>,
    ) -> Result<Graph, CudaError> {
        let mode = sys::CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_THREAD_LOCAL;
        stream
            .begin_capture(mode)
            .map_err(CudaError::driver("starting to capture a graph"))?;
        let recorded = record();
        // Ended in any case: the stream takes no other work while it is captured.
        let graph = stream.end_capture(sys::CUgraphInstantiate_flags(0));
        recorded?;
        let graph = graph.map_err(CudaError::driver("capturing a graph"))?;
        Ok(Graph(
            graph.expect("what was captured without an error is there"),
        ))
    }

    pub(crate) fn launch(&self) -> Result<(), CudaError> {
        let launched = self.0.launch();
        launched.map_err(CudaError::driver("launching a graph"))
    }
}

/// Graphs captured so far.
#[derive(Default)]
pub(crate) struct Graphs {
    captured: HashMap<RowCounts, Graph>,
    /// What ran once as it is: first launches load code, which a capture does not allow.
    seen: HashSet<RowCounts>,
}

impl Graphs {
    /// Replays what was captured for these rows. The first time `record` just queues it, the second time it is captured.
    pub(crate) fn run(
        &mut self,
        stream: &Arc<CudaStream>,
        rows: RowCounts,
        record: impl FnOnce() -> Result<usize, CudaError>,
    ) -> Result<(), CudaError> {
        let full = self.captured.len() >= MAX_GRAPHS && !self.captured.contains_key(&rows);
        if full || self.seen.insert(rows) {
            return record().map(drop);
        }
        let graph = match self.captured.entry(rows) {
            Entry::Occupied(captured) => captured.into_mut(),
            Entry::Vacant(vacant) => {
                let mut launches = 0;
                let graph = Graph::capture(stream, || {
                    launches = record()?;
                    Ok(())
                })?;
                tracing::info!(
                    rows = rows.all,
                    sampled = rows.sampled,
                    launches,
                    "captured a graph"
                );
                vacant.insert(graph)
            }
        };
        graph.launch()
    }
}

#[cfg(test)]
mod tests {
    use carat_model::kv::{KvType, PerGroup};

    use super::*;

    #[test]
    fn buckets_hold_the_rows_and_no_more_than_there_may_be() {
        let options = CompileOptions {
            pages: PerGroup::default(),
            host_pages: PerGroup::default(),
            kv: KvType::F16,
            max_rows: 100,
            max_sampled: 24,
            probe: false,
        };
        let of = |all, sampled| {
            let rows = bucket(RowCounts { all, sampled }, &options);
            (rows.all, rows.sampled)
        };
        assert_eq!(of(1, 1), (1, 1));
        assert_eq!(of(3, 3), (4, 4));
        assert_eq!(of(17, 17), (24, 24));
        assert_eq!(of(5, 1), (8, 1));
        assert_eq!(of(50, 0), (64, 0));
        assert_eq!(of(90, 3), (128, 4));
    }

    #[test]
    fn a_bucket_keeps_the_class_and_stays_within_its_padding() {
        let options = CompileOptions {
            pages: PerGroup::default(),
            host_pages: PerGroup::default(),
            kv: KvType::F16,
            max_rows: 300,
            max_sampled: 40,
            probe: false,
        };
        for all in 1..=options.max_rows {
            for sampled in [0, 1, 5, 8, 9, 33, 40, all] {
                if sampled > all.min(options.max_sampled) {
                    continue;
                }
                let held = bucket(RowCounts { all, sampled }, &options);
                let fits = |rows: usize, held: usize, most: usize| {
                    let empty = rows == 0 && held == 0;
                    empty
                        || (rows..=padded_rows(most)).contains(&held)
                            && RowClass::of(rows) == RowClass::of(held)
                };
                let fit = fits(all, held.all, options.max_rows)
                    && fits(sampled, held.sampled, options.max_sampled);
                assert!(fit, "{all} rows, {sampled} sampled: {held:?}");
            }
        }
    }
}
