//! Time the host spends on a step of many sequences that decode, on a device that takes no time.
//!
//! ```text
//! cargo bench -p carat-engine --bench host_step
//! ```
//!
//! A line per number of sequences and depth: p50 and p99 in microseconds of the whole step, and of the part of it that is
//! [`Batch::check`], which every executor calls once per batch.

#![expect(clippy::print_stdout, reason = "a benchmark prints its results")]

use std::time::{Duration, Instant};

use carat_engine::{
    EngineConfig, Limits, ModelFacts, Request, RequestId,
    core::{Pipeline, Scheduler, Update},
};
use carat_gguf::QuantType;
use carat_model::{
    backend::{BackendError, Batch, CompileOptions, Draw, Executor, Outputs, RowResult, Ticket},
    gemma4,
    kv::{HostPageId, KvGroup, PageMove},
    plan::{Plan, Value},
    sampling::Sampling,
};
use carat_testkit::tiny::{Tiny, Variant};

const STEPS: usize = 2000;

/// Checks batches and draws zeros.
struct Nothing {
    plan: Plan,
    options: CompileOptions,
    submitted: u64,
    /// Sampled rows of the batches in flight, the oldest first.
    sampled: Vec<usize>,
    checking: Duration,
}

impl Executor for Nothing {
    fn submit(&mut self, batch: &Batch<'_>) -> Result<Ticket, BackendError> {
        let begun = Instant::now();
        let before = self.sampled.last().copied().unwrap_or(0);
        batch.check(&self.plan, &self.options, before)?;
        self.checking = begun.elapsed();
        self.sampled.push(batch.sampled_count());
        self.submitted += 1;
        Ok(Ticket(self.submitted))
    }

    fn draw(&mut self, _: &Ticket, draws: &[Draw<'_>]) -> Result<(), BackendError> {
        std::hint::black_box(draws);
        Ok(())
    }

    fn lookahead(&self, _: &Ticket) -> bool {
        true
    }

    fn collect(&mut self, _: Ticket, out: &mut Outputs) -> Result<(), BackendError> {
        let sampled = self.sampled.remove(0);
        out.rows.clear();
        out.rows.resize(sampled, RowResult::default());
        Ok(())
    }

    fn move_pages(&mut self, _: &[PageMove]) -> Result<(), BackendError> {
        Ok(())
    }

    fn host_page(&mut self, _: KvGroup, _: HostPageId) -> Result<&mut [u8], BackendError> {
        Ok(&mut [])
    }

    fn probed(&self, _: Value) -> Option<&[f32]> {
        None
    }
}

fn measure(sequences: usize, depth: usize) {
    let mut tiny = Tiny::new(Variant::Dense12b, QuantType::F32);
    tiny.dimensions.window = 1024;
    let plan = gemma4::plan(&tiny.model());
    let facts = ModelFacts::from(&plan);
    // The first decodes until the last has computed its prompt.
    let context = depth + STEPS + 4000;
    let mut config = EngineConfig::comfortable(context, sequences, 4096, facts);
    config.prefill_rows = config.max_rows;
    let limits = Limits::new(config, facts).expect("it is roomy");
    let executor = Nothing {
        plan,
        options: limits.compile_options(),
        submitted: 0,
        sampled: Vec::new(),
        checking: Duration::ZERO,
    };
    let mut pipeline = Pipeline::new(Scheduler::new(limits), executor);
    for n in 0..sequences {
        // No two begin alike.
        let token = |i: usize| ((i * (n + 1)) % 399) as u32;
        let request = Request {
            sampling: Sampling::greedy(),
            ..Request::new((n..n + depth).map(token).collect())
        };
        let id = RequestId(n as u64 + 1);
        pipeline.scheduler().submit(id, request).expect("it fits");
    }
    let mut step = || {
        let begun = Instant::now();
        pipeline.step().expect("nothing can fail");
        let updates = pipeline.results().1;
        let tokens = updates.filter(|u| matches!(u, Update::Token { .. }));
        let tokens = tokens.count();
        (begun.elapsed(), pipeline.executor().checking, tokens)
    };
    while step().2 < sequences {}
    let times: Vec<_> = (0..STEPS).map(|_| step()).collect();
    assert!(times.iter().all(|(_, _, tokens)| *tokens == sequences));
    let (whole_50, whole_99) = percentiles(times.iter().map(|t| t.0));
    let (check_50, check_99) = percentiles(times.iter().map(|t| t.1));
    println!(
        "{sequences:>4} x {depth:>6}: step p50 {whole_50:7.1} p99 {whole_99:7.1}, of it check p50 {check_50:7.1} p99 {check_99:7.1} us"
    );
}

/// The median and what one in a hundred exceeds, in microseconds.
fn percentiles(times: impl Iterator<Item = Duration>) -> (f64, f64) {
    let mut times: Vec<Duration> = times.collect();
    times.sort_unstable();
    let at = |part: f64| times[(times.len() as f64 * part) as usize].as_secs_f64() * 1e6;
    (at(0.5), at(0.99))
}

fn main() {
    for (sequences, depth) in [(64, 8_192), (256, 8_192), (64, 100_000)] {
        measure(sequences, depth);
    }
}
