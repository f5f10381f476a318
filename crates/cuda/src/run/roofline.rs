//! The card's roofline: the peaks that `bench` sets speeds against.
//!
//! The memory's rate is that of one kernel that reads. The tensor cores' is that of the GEMM of large batches: cuBLASLt with an
//! f16 product large enough to keep the card full, or, for the native GEMM, its int8 instructions with nothing else around
//! them.

use std::{sync::Arc, time::Duration};

use carat_model::cost::Roofline;

use crate::{
    device::{
        Buffer, Device, Grid, Module,
        cublaslt::{Gemm, Library, MatmulShape, Operands, Out, WORKSPACE_BYTES},
        launch,
    },
    error::CudaError,
    kernel::{
        params::Params,
        roofline::{MultiplyPeakParams, ReadPeakParams},
    },
};

/// Far more than any cache.
const READ_BYTES: usize = 1 << 30;
const BUS_BYTES: usize = 128 << 20;
const PASSES: usize = 5;
const THREADS: usize = 512;
const BLOCKS_PER_MULTIPROCESSOR: usize = 2;
/// Pieces that a thread has in flight, and the bytes of one.
const AT_ONCE: usize = 8;
const PIECE: usize = 16;

/// A product of a prompt's rows with a model's matrix. Outputs are so many per multiprocessor that tiles of any usual size fill
/// them evenly.
const ROWS: usize = 2048;
const COLUMNS: usize = 2560;
const OUTPUTS_PER_MULTIPROCESSOR: usize = 128;

const MULTIPLY_THREADS: usize = 256;
const ROUNDS: usize = 600;
/// Multiply-adds of a warp's round: 8 products of 16 by 8 by 32.
const ROUND: usize = 8 * 16 * 8 * 32;

pub(crate) fn measure(
    device: &Arc<Device>,
    [read, multiply]: &[Arc<Module>; 2],
    library: Option<&Library>,
) -> Result<Roofline, CudaError> {
    device.bind()?;
    Ok(Roofline {
        read_bytes_per_second: read_peak(device, read)?,
        multiply_adds_per_second: match library {
            Some(library) => product_rate(device, read, library)?,
            None => multiply_peak(device, multiply)?,
        },
    })
}

/// The shortest of some passes, after one that does not count.
fn best(
    device: &Device,
    what: &str,
    mut pass: impl FnMut() -> Result<(), CudaError>,
) -> Result<f64, CudaError> {
    pass()?;
    let mut best = Duration::MAX;
    for _ in 0..PASSES {
        let start = device.moment()?;
        pass()?;
        let end = device.moment()?;
        device.wait(what)?;
        best = best.min(start.until(&end)?);
    }
    Ok(best.as_secs_f64())
}

/// Bytes per second.
fn read_peak(device: &Arc<Device>, module: &Module) -> Result<f64, CudaError> {
    let (free, _) = device.memory()?;
    let round = round_bytes(device);
    let bytes = (READ_BYTES.min(free as usize / 2) / round).max(1) * round;
    let data = noise(device, module, bytes)?;
    let seconds = best(device, "measuring the memory", || {
        launch_read(device, module, 1, &data)
    })?;
    Ok(bytes as f64 / seconds)
}

/// Bytes per second that kernels read from host memory, through the bus.
pub(crate) fn bus_rate(device: &Arc<Device>, read: &Module) -> Result<f64, CudaError> {
    device.bind()?;
    let round = round_bytes(device);
    let bytes = (BUS_BYTES / round).max(1) * round;
    let mut host = device.allocate_host("measuring", bytes)?;
    let pattern = host.bytes_mut().chunks_exact_mut(8).zip(1u64..);
    for (word, i) in pattern {
        word.copy_from_slice(&i.wrapping_mul(0x9e37_79b9_7f4a_7c15).to_ne_bytes());
    }
    let sums = device.allocate("measuring", sum_bytes(device))?;
    let params = ReadPeakParams {
        data: host.address(),
        sums: sums.address(),
        count: (bytes / PIECE) as u64,
    };
    let seconds = best(device, "measuring the bus", || {
        launch(read, read_grid(device, 1), &params.bytes())
    })?;
    Ok(bytes as f64 / seconds)
}

/// Bytes that all threads read at once.
fn round_bytes(device: &Device) -> usize {
    device.multiprocessors * BLOCKS_PER_MULTIPROCESSOR * THREADS * AT_ONCE * PIECE
}

/// Memory to read, and to write sums to.
struct Noise {
    data: Buffer,
    sums: Buffer,
    bytes: usize,
}

/// Zeros are read and multiplied faster than anything else. A whole number of rounds.
fn noise(device: &Arc<Device>, module: &Module, bytes: usize) -> Result<Noise, CudaError> {
    let noise = Noise {
        data: device.allocate("measuring", bytes)?,
        sums: device.allocate("measuring", sum_bytes(device))?,
        bytes,
    };
    launch_read(device, module, 0, &noise)?;
    Ok(noise)
}

fn launch_read(
    device: &Device,
    module: &Module,
    entry: usize,
    noise: &Noise,
) -> Result<(), CudaError> {
    let params = ReadPeakParams {
        data: noise.data.address(),
        sums: noise.sums.address(),
        count: (noise.bytes / PIECE) as u64,
    };
    launch(module, read_grid(device, entry), &params.bytes())
}

fn read_grid(device: &Device, entry: usize) -> Grid {
    let blocks = device.multiprocessors * BLOCKS_PER_MULTIPROCESSOR;
    Grid {
        entry,
        ..Grid::new((blocks, 1), THREADS)
    }
}

/// Bytes of a sum per thread.
fn sum_bytes(device: &Device) -> usize {
    device.multiprocessors * BLOCKS_PER_MULTIPROCESSOR * THREADS * 4
}

/// Multiply-adds per second of cuBLASLt, in f16.
fn product_rate(
    device: &Arc<Device>,
    module: &Module,
    library: &Library,
) -> Result<f64, CudaError> {
    let outputs = OUTPUTS_PER_MULTIPROCESSOR * device.multiprocessors;
    let shape = MatmulShape {
        rows: ROWS,
        outputs,
        columns: COLUMNS,
        stride: outputs,
    };
    let round = round_bytes(device);
    let f16 = |rows: usize| noise(device, module, (2 * rows * COLUMNS).next_multiple_of(round));
    let (weights, x) = (f16(outputs)?, f16(ROWS)?);
    let out = device.allocate("measuring", 2 * ROWS * outputs)?;
    let workspace = device.allocate("measuring", WORKSPACE_BYTES)?;
    let operands = Operands {
        weights: weights.data.address(),
        x: x.data.address(),
        out: out.address(),
        workspace: workspace.address(),
    };
    let gemm = Gemm::new(library, shape, Out::F16, 1.0, WORKSPACE_BYTES)?;
    let seconds = best(device, "measuring products", || gemm.launch(operands))?;
    Ok((ROWS * outputs * COLUMNS) as f64 / seconds)
}

/// Multiply-adds per second of the int8 instructions of the native GEMM.
fn multiply_peak(device: &Arc<Device>, module: &Module) -> Result<f64, CudaError> {
    let blocks = device.multiprocessors * BLOCKS_PER_MULTIPROCESSOR;
    let sums = device.allocate("measuring", blocks * MULTIPLY_THREADS * 4)?;
    let params = MultiplyPeakParams {
        sums: sums.address(),
        rounds: ROUNDS as u32,
    };
    let grid = Grid::new((blocks, 1), MULTIPLY_THREADS);
    let seconds = best(device, "measuring products", || {
        launch(module, grid, &params.bytes())
    })?;
    let warps = blocks * MULTIPLY_THREADS / 32;
    Ok((warps * ROUNDS * ROUND) as f64 / seconds)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::kernel::roofline::specializations;
    use crate::{
        config::Tier,
        testing::{Card, library_dirs},
    };

    #[test]
    #[ignore = "needs a card"]
    fn rates_are_those_of_a_card() {
        let card = Card::open(Tier::Best);
        let modules = specializations().map(|s| Arc::new(card.load(&s)));
        let own = measure(&card.device, &modules, None).unwrap();
        assert!(own.read_bytes_per_second > 1e11, "{own:?}");
        assert!(own.multiply_adds_per_second > 1e12, "{own:?}");
        if let Ok(library) = Library::find(&library_dirs(), &card.device) {
            let roofline = measure(&card.device, &modules, Some(&library)).unwrap();
            assert!(roofline.multiply_adds_per_second > 1e12, "{roofline:?}");
        }
        let bus = bus_rate(&card.device, &modules[0]).unwrap();
        assert!((1e9..own.read_bytes_per_second).contains(&bus), "{bus}");
        assert!(card.device.held().values().all(|held| *held == 0));
    }
}
