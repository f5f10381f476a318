//! CUDA graphs: launches captured once and replayed, one call for the driver instead of hundreds, and no gaps between kernels.
//!
//! A graph is captured for a bucket of rows and serves every batch of at most as many: kernels read how many rows there are from
//! device memory. Decoding has one graph per power of two rows; prompts have one per bucket of their chunk.

use std::{
    collections::{HashMap, HashSet},
    fmt::Debug,
    hash::Hash,
    sync::Arc,
};

use carat_model::backend::{Batching, CompileOptions};
use cudarc::driver::{CudaGraph, CudaStream, sys};

use crate::{
    compile::rows::{RowClass, RowCounts, SMALL_ROWS, padded_rows},
    error::CudaError,
};

/// The most rows that decode together and still take the next power of two.
const MAX_DECODED: usize = 64;
/// Graphs to keep.
const MAX_GRAPHS: usize = 64;

/// The row counts to launch for, captured or not: of decoding a power of two, or the most there may be.
pub(crate) fn bucket(rows: RowCounts, options: &CompileOptions) -> RowCounts {
    if options.batching == Batching::Invariant && rows.all > SMALL_ROWS {
        // Whole groups, so that none is launched without rows.
        return RowCounts {
            all: rows.all.next_multiple_of(SMALL_ROWS),
            sampled: rows.sampled.next_multiple_of(SMALL_ROWS),
        };
    }
    if is_decoding(rows) {
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
        (_, RowClass::Medium | RowClass::Large) => padded_rows(count),
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

/// Everything that launches depend on.
pub(crate) trait GraphKey: Copy + Debug + Eq + Hash {
    /// Whether its graph is kept whatever others come.
    fn stays(self) -> bool;
}

impl GraphKey for RowCounts {
    /// Decoding comes back after any prompt, and has few graphs.
    fn stays(self) -> bool {
        is_decoding(self)
    }
}

/// Graphs captured so far.
pub(crate) struct Graphs<K> {
    held: Held<K, Graph>,
    /// Captures that failed; their batches are launched one kernel after another.
    failures: u64,
}

impl<K> Default for Graphs<K> {
    fn default() -> Graphs<K> {
        Graphs {
            held: Held::default(),
            failures: 0,
        }
    }
}

impl<K: GraphKey> Graphs<K> {
    /// Replays what was captured for a key. The first time `record` just queues it, the second time it is captured.
    pub(crate) fn run(
        &mut self,
        stream: &Arc<CudaStream>,
        key: K,
        mut record: impl FnMut() -> Result<usize, CudaError>,
    ) -> Result<(), CudaError> {
        if let Some(graph) = self.held.get(key) {
            return graph.launch();
        }
        if !self.held.is_due(key) {
            return record().map(drop);
        }
        let mut launches = 0;
        let captured = Graph::capture(stream, || {
            launches = record()?;
            Ok(())
        });
        let graph = match captured {
            Ok(graph) => graph,
            Err(error) => {
                self.failures += 1;
                self.held.give_up(key);
                tracing::warn!(
                    ?key,
                    failures = self.failures,
                    %error,
                    "a graph could not be captured; its kernels are launched one by one"
                );
                return record().map(drop);
            }
        };
        tracing::info!(?key, launches, "captured a graph");
        graph.launch()?;
        if let Some(evicted) = self.held.insert(key, graph) {
            // It may still run.
            let waited = stream.synchronize();
            waited.map_err(CudaError::driver("waiting for a graph to be freed"))?;
            drop(evicted);
        }
        Ok(())
    }
}

/// At most [`MAX_GRAPHS`] graphs: the least recently used of those that do not stay makes room for another.
struct Held<K, G> {
    graphs: HashMap<K, (G, u64)>,
    /// Keys of what ran once as it is: first launches load code, which a capture does not allow.
    seen: HashSet<K>,
    given_up: HashSet<K>,
    uses: u64,
}

impl<K, G> Default for Held<K, G> {
    fn default() -> Held<K, G> {
        Held {
            graphs: HashMap::new(),
            seen: HashSet::new(),
            given_up: HashSet::new(),
            uses: 0,
        }
    }
}

impl<K: GraphKey, G> Held<K, G> {
    fn get(&mut self, key: K) -> Option<&G> {
        self.uses += 1;
        let (graph, last_use) = self.graphs.get_mut(&key)?;
        *last_use = self.uses;
        Some(graph)
    }

    /// Whether a key without a graph is to get one: the second time it comes.
    fn is_due(&mut self, key: K) -> bool {
        !self.given_up.contains(&key) && !self.seen.insert(key)
    }

    fn give_up(&mut self, key: K) {
        self.given_up.insert(key);
    }

    /// Adds a graph and returns the one that made room for it. A key that lost its own starts again.
    fn insert(&mut self, key: K, graph: G) -> Option<G> {
        let mut evicted = None;
        if self.graphs.len() >= MAX_GRAPHS {
            let passing = self.graphs.iter().filter(|(key, _)| !key.stays());
            let oldest = passing.min_by_key(|(_, (_, last_use))| *last_use);
            let oldest = oldest.map(|(key, _)| *key);
            evicted = oldest.and_then(|key| {
                self.seen.remove(&key);
                self.graphs.remove(&key)
            });
        }
        self.graphs.insert(key, (graph, self.uses));
        evicted.map(|(graph, _)| graph)
    }
}

fn is_decoding(rows: RowCounts) -> bool {
    rows.all == rows.sampled && rows.all <= MAX_DECODED
}

#[cfg(test)]
mod tests {
    use carat_model::kv::PerGroup;

    use super::*;

    #[test]
    fn buckets_hold_the_rows_and_no_more_than_there_may_be() {
        let options = CompileOptions {
            pages: PerGroup::default(),
            chunk_pages: 0,
            host_pages: PerGroup::default(),
            kv: PerGroup::default(),
            max_rows: 100,
            max_sampled: 24,
            probe: false,
            batching: carat_model::backend::Batching::Fast,
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
            chunk_pages: 0,
            host_pages: PerGroup::default(),
            kv: PerGroup::default(),
            max_rows: 300,
            max_sampled: 40,
            probe: false,
            batching: carat_model::backend::Batching::Fast,
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

    #[test]
    fn the_least_recently_used_makes_room_and_decoding_stays() {
        let rows = |all, sampled| RowCounts { all, sampled };
        let mut held = Held::default();
        let run = |held: &mut Held<RowCounts, usize>, rows: RowCounts| {
            if held.get(rows).is_some() {
                return Ok(None);
            }
            if held.is_due(rows) {
                return Ok(held.insert(rows, rows.all));
            }
            Err("launched one by one")
        };
        let decoding = rows(1, 1);
        assert!(run(&mut held, decoding).is_err());
        assert_eq!(run(&mut held, decoding), Ok(None));
        for all in 1..MAX_GRAPHS {
            assert!(run(&mut held, rows(100 + all, 1)).is_err());
            assert_eq!(run(&mut held, rows(100 + all, 1)), Ok(None));
        }
        // The first prompt is used again, so the second is the oldest but for decoding.
        assert_eq!(run(&mut held, rows(101, 1)), Ok(None));
        assert!(run(&mut held, rows(999, 1)).is_err());
        assert_eq!(run(&mut held, rows(999, 1)), Ok(Some(102)));
        assert!(held.get(decoding).is_some() && held.get(rows(101, 1)).is_some());
        assert_eq!(held.graphs.len(), MAX_GRAPHS);
        // Rows that lost their graph start again.
        assert!(run(&mut held, rows(102, 1)).is_err());
        assert_eq!(run(&mut held, rows(102, 1)), Ok(Some(103)));
        held.give_up(rows(7, 7));
        assert!(run(&mut held, rows(7, 7)).is_err() && run(&mut held, rows(7, 7)).is_err());
    }
}
