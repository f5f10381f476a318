//! Rows that a batch is launched as, where some of them see ahead of themselves.

use carat_model::backend::{BackendError, Batch, Batching, CompileOptions, RowRef};

use crate::compile::{
    call::Call,
    rows::{ByClass, RowCounts, SMALL_ROWS},
};

/// The programs of small batches, of all rows and of the sampled ones, that compute keys and values of a row while it attends:
/// their rows see none ahead.
#[derive(Clone, Copy, Debug)]
pub(crate) struct SeesBackOnly {
    all: bool,
    sampled: bool,
}

impl SeesBackOnly {
    pub(crate) fn new(front: &ByClass<Vec<Call>>, tail: &ByClass<Vec<Call>>) -> SeesBackOnly {
        let decodes = |call: &Call| {
            let kernel = call.kernel();
            kernel.is_some_and(|kernel| kernel.specialization().kernel == "flash_decode")
        };
        SeesBackOnly {
            all: front.small.iter().any(decodes),
            sampled: tail.small.iter().any(decodes),
        }
    }

    /// The rows that a checked batch is launched as: with rows that see ahead it is a large one.
    pub(crate) fn launched(
        self,
        batch: &Batch<'_>,
        options: &CompileOptions,
    ) -> Result<RowCounts, BackendError> {
        let raised = |count: usize, most: usize, what: &str| match count {
            _ if options.batching == Batching::Invariant => Err(BackendError::Unsupported {
                what: format!(
                    "{what} that see ahead: CUDA does not compute them the same in any company; leave out --invariant"
                ),
            }),
            _ if count > SMALL_ROWS => Ok(count),
            _ if most > SMALL_ROWS => Ok(SMALL_ROWS + 1),
            _ => Err(BackendError::Unsupported {
                what: format!(
                    "{what} that see ahead: CUDA takes them where a batch may have more than {SMALL_ROWS}, not {most}"
                ),
            }),
        };
        let mut rows = RowCounts {
            all: batch.feeds.len(),
            sampled: batch.sampled_count(),
        };
        let ahead = |row: RowRef| batch.runs[row.run].sliding_end(row.row) > row.position + 1;
        if self.all && batch.all_rows().any(ahead) {
            rows.all = raised(rows.all, options.max_rows, "rows")?;
        }
        if self.sampled && batch.sampled_rows().any(ahead) {
            rows.sampled = raised(rows.sampled, options.max_sampled, "sampled rows")?;
        }
        Ok(rows)
    }
}

#[cfg(test)]
mod tests {
    use carat_gguf::QuantType;
    use carat_model::{
        backend::{Run, token_feeds},
        gemma4,
        kv::PerGroup,
    };
    use carat_testkit::tiny::{Tiny, Variant};

    use super::*;
    use crate::{
        compile::{
            prepare::{Prepared, prepare},
            target::Target,
        },
        config::{Fusion, TableMemory},
    };

    fn options(max_rows: usize) -> CompileOptions {
        CompileOptions {
            pages: PerGroup {
                full: 8,
                sliding: 8,
            },
            chunk_pages: 0,
            host_pages: PerGroup::default(),
            kv: PerGroup::default(),
            max_rows,
            max_sampled: 4,
            probe: false,
            batching: carat_model::backend::Batching::Fast,
        }
    }

    #[test]
    fn rows_that_see_ahead_are_a_large_batch_unless_kernels_are_plain() {
        let launched = |fusion, max_rows, ends: Option<&[u32]>| {
            let model = Tiny::new(Variant::Dense12b, QuantType::Q8_0).model();
            let (plan, options) = (gemma4::plan(&model), options(max_rows));
            let target = Target::hopper(fusion, max_rows);
            let prepared = prepare(&plan, &model.weights, &options, TableMemory::Device, target);
            let Prepared { front, tail, .. } = prepared.unwrap();
            let run = Run {
                rows: 0..3,
                position: 0,
                pages: PerGroup::default(),
                sampled: 1,
                visible_end: ends,
                table: None,
            };
            let batch = Batch {
                feeds: &token_feeds(&[1, 2, 3]),
                runs: &[run],
            };
            let rows = SeesBackOnly::new(&front, &tail).launched(&batch, &options);
            rows.map(|rows| (rows.all, rows.sampled)).ok()
        };
        let (ahead, back) = (Some([2, 2, 3].as_slice()), Some([1, 2, 3].as_slice()));
        assert_eq!(launched(Fusion::On, 64, ahead), Some((9, 1)));
        assert_eq!(launched(Fusion::On, 64, back), Some((3, 1)));
        assert_eq!(launched(Fusion::On, 64, None), Some((3, 1)));
        assert_eq!(launched(Fusion::On, 8, ahead), None);
        assert_eq!(launched(Fusion::Off, 8, ahead), Some((3, 1)));
    }
}
