//! One test on an executor, as often as it is asked for. Several executors may take turns.

use std::time::Instant;

use anyhow::Result;
use carat::Loaded;
use carat_model::{TokenId, backend::Executor, sampling};

use super::{Case, Feeder};

/// Passes before those that count: a device may load code in the first and record its launches in the second.
pub(in crate::commands) const WARM_UPS: u32 = 2;

pub(in crate::commands) struct Repeated<'a> {
    pub(super) feeder: Feeder<'a>,
    case: Case,
    vocab: u64,
    repetitions: u32,
}

impl<'a> Repeated<'a> {
    /// Brings each sequence to the test's depth.
    pub(in crate::commands) fn new(
        executor: &'a mut dyn Executor,
        loaded: &Loaded,
        case: Case,
    ) -> Result<Repeated<'a>> {
        let held = case.pages(loaded.plan.window());
        let mut test = Repeated {
            feeder: Feeder::new(executor, case.length(), case.sequences, held),
            case,
            vocab: loaded.plan.vocab() as u64,
            repetitions: 0,
        };
        for sequence in 0..case.sequences {
            let first = sequence * case.depth;
            let filler = test.tokens(first..first + case.depth);
            for chunk in filler.chunks(case.batch) {
                test.feeder.feed(sequence, chunk, 0)?;
            }
        }
        Ok(test)
    }

    /// The seconds of one repetition.
    pub(in crate::commands) fn once(&mut self) -> Result<f64> {
        let case = self.case;
        // Rewinding is enough: every position is written before it is read.
        self.feeder.rewind(case.depth);
        self.repetitions += 1;
        let tokens = self.tokens(0..case.timed_tokens());
        let start = Instant::now();
        if case.prompt > 0 {
            let last = tokens.len().div_ceil(case.batch) - 1;
            for (i, chunk) in tokens.chunks(case.batch).enumerate() {
                self.feeder.feed(0, chunk, usize::from(i == last))?;
            }
        } else {
            for step in tokens.chunks(case.sequences) {
                self.feeder.generate(step)?;
            }
        }
        Ok(start.elapsed().as_secs_f64())
    }

    /// Random ones, others in each repetition.
    fn tokens(&self, places: std::ops::Range<usize>) -> Vec<TokenId> {
        let random = |i: usize| sampling::random(self.repetitions.into(), i as u64, 0);
        places
            .map(|i| (random(i) % self.vocab) as TokenId)
            .collect()
    }
}
