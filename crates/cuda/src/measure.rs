//! What this card can do at the most: the bounds that `bench` sets speeds against.

use std::sync::Arc;

use carat_model::cost::Rates;

use crate::{
    device::{Address, Device, Module},
    error::CudaError,
    kernel::Specialization,
    launch::{Grid, launch},
    params::{Params, params},
};

/// Far more than any cache.
const READ_BYTES: usize = 1 << 30;
const PASSES: usize = 5;
const THREADS: usize = 512;
const BLOCKS_PER_MULTIPROCESSOR: usize = 2;
/// Pieces that a thread has under way, and the bytes of one.
const AT_ONCE: usize = 8;
const PIECE: usize = 16;

params! {
    struct ReadRateParams {
        data: Address,
        sums: Address,
        count: u64,
    }
}

pub(crate) fn specialization() -> Specialization {
    Specialization {
        kernel: "read_rate",
        entries: &["fill", "read_rate"],
        constants: Vec::new(),
        params_bytes: ReadRateParams::BYTES,
    }
}

/// Bytes a second, the best of some passes.
pub(crate) fn read_rate(device: &Arc<Device>, module: &Module) -> Result<f64, CudaError> {
    let blocks = device.multiprocessors * BLOCKS_PER_MULTIPROCESSOR;
    let (free, _) = device.memory()?;
    let round = blocks * THREADS * AT_ONCE * PIECE;
    let bytes = (READ_BYTES.min(free as usize / 2) / round).max(1) * round;
    let data = device.allocate("measuring", bytes)?;
    let sums = device.allocate("measuring", blocks * THREADS * 4)?;
    let params = ReadRateParams {
        data: data.address(),
        sums: sums.address(),
        count: (bytes / PIECE) as u64,
    };
    let mut best = f64::INFINITY;
    device.bind()?;
    let grid = |entry| Grid {
        entry,
        ..Grid::new((blocks, 1), THREADS)
    };
    launch(module, grid(0), &params.bytes())?;
    for _ in 0..PASSES {
        let start = device.moment()?;
        launch(module, grid(1), &params.bytes())?;
        let end = device.moment()?;
        device.wait("measuring the memory")?;
        best = best.min(start.until(&end)?.as_secs_f64());
    }
    Ok(bytes as f64 / best)
}
