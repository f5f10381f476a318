//! Batches that were submitted and not collected: their memory, and who draws which of their rows.

use std::sync::Arc;

use carat_model::{
    TokenId,
    backend::{self as model, Outputs, RowOutput},
    sampling::{Sampling, TokenMask},
};

use crate::{
    compile::{batch_layout::BatchLayout, rows::RowCounts},
    device::{Device, Event, HostBuffer},
    error::CudaError,
};

/// A place for a batch, so that one can be queued while another is under way.
pub(super) struct InFlight {
    pub(super) words: HostBuffer,
    /// Embeddings that rows are fed, read by the device where they are; as large as was needed so far.
    pub(super) inputs: Option<HostBuffer>,
    /// Its draw, for the copy to the device.
    pub(super) settings: HostBuffer,
    /// Behind all work of the batch that had this place last.
    pub(super) done: Option<Event>,
    pub(super) batch: Option<Submitted>,
}

impl InFlight {
    pub(super) fn new(device: &Arc<Device>, layout: &BatchLayout) -> Result<InFlight, CudaError> {
        Ok(InFlight {
            words: device.allocate_host("batch", layout.words * 4)?,
            inputs: None,
            settings: device.allocate_host("batch", layout.draw_words() * 4)?,
            done: None,
            batch: None,
        })
    }
}

/// A batch that was submitted and not collected.
pub(super) struct Submitted {
    pub(super) rows: RowCounts,
    /// Of sampled rows.
    pub(super) positions: Vec<usize>,
    /// Words of the batch that are in use; what happens to logits comes behind them.
    pub(super) used: usize,
    pub(super) results: Results,
}

/// Results of a submitted batch, for `collect`.
pub(super) enum Results {
    NotDrawn,
    /// Those of all sampled rows once the device is done, but for those of the host.
    Drawn {
        rows: Vec<DeviceRow>,
        on_host: Vec<HostDraw>,
    },
    Ready(Outputs),
}

/// Results that the device leaves for a sampled row.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum DeviceRow {
    /// Nothing: the host draws it.
    Nothing,
    Token,
    Logprobs,
}

/// A row that the host draws, once its logits are there.
pub(super) struct HostDraw {
    /// Among the sampled ones.
    pub(super) row: usize,
    sampling: Sampling,
    history: Vec<TokenId>,
    mask: Option<TokenMask>,
    output: RowOutput,
}

impl HostDraw {
    pub(super) fn new(row: usize, draw: &model::Draw<'_>) -> HostDraw {
        // Penalties look at no more.
        let recent = draw
            .history
            .len()
            .saturating_sub(draw.sampling.penalty_window);
        HostDraw {
            row,
            sampling: draw.sampling.clone(),
            history: draw.history[recent..].to_vec(),
            mask: draw.mask.cloned(),
            output: draw.output,
        }
    }

    pub(super) fn draw(&self) -> model::Draw<'_> {
        model::Draw {
            sampling: &self.sampling,
            history: &self.history,
            mask: self.mask.as_ref(),
            output: self.output,
        }
    }
}
