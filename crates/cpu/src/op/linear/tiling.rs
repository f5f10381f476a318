//! Tiles of a product's output: wide enough to read weights in long runs, small enough to share out.

use super::Product;
use carat_cpu_kernels::{
    gemm::{READ_STREAMS, choice::KernelChoice, float, gemv_transposed, packed_int8},
    isa::Isa,
};

/// Weight bytes of a tile whose weights are read as they lie: long enough for the prefetcher, short enough to share out.
const STREAM_BYTES: usize = 96 * 1024;
/// Weight rows of a tile whose weights are unpacked into panels, and fewest where wider ones would leave threads without.
const PANEL_COLUMNS: usize = packed_int8::ROWS * packed_int8::MAX_PANELS;
const NARROW_PANEL_COLUMNS: usize = PANEL_COLUMNS / 2;

/// Output columns (weight rows) of a tile.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Tiling {
    pub(super) tile_columns: usize,
    /// Whether weight rows are taken in the order of [`carat_cpu_kernels::gemm::WeightRows::interleaved`].
    pub(super) interleaved: bool,
}

impl Tiling {
    /// For a product whose largest group has `rows` rows and gets this kernel.
    pub(super) fn new(
        product: &Product<'_>,
        kernel: KernelChoice,
        rows: usize,
        workers: (Isa, usize),
    ) -> Tiling {
        let (isa, threads) = workers;
        let matrix = product.weights.matrix(product.weight);
        // Whether weights come straight from memory, and whether the kernel takes them in any order.
        let (streamed, any_order) = match kernel {
            // A smaller group may be transposed, which takes weight rows as they lie.
            KernelChoice::AmxInt8 => {
                let smaller = product.kernel(isa, rows.min(gemv_transposed::MAX_ROWS));
                (true, smaller != KernelChoice::GemvTransposed)
            }
            KernelChoice::Gemv => (true, rows < gemv_transposed::MIN_ROWS),
            KernelChoice::GemvTransposed => (true, false),
            KernelChoice::Float => (rows <= float::MAX_ROWS, rows <= float::MAX_ROWS),
            KernelChoice::PackedInt8 | KernelChoice::AmxBf16 => (false, false),
        };
        Tiling {
            tile_columns: if streamed {
                streamed_columns(matrix.rows, matrix.row_bytes(), threads)
            } else if matrix.rows >= 4 * threads * PANEL_COLUMNS {
                PANEL_COLUMNS
            } else {
                NARROW_PANEL_COLUMNS
            },
            interleaved: any_order && matrix.rows.is_multiple_of(READ_STREAMS),
        }
    }
}

/// Weight rows of a tile whose weights are read as they lie.
fn streamed_columns(weight_rows: usize, row_bytes: usize, threads: usize) -> usize {
    let fair = weight_rows.div_ceil(4 * threads);
    let rows = (STREAM_BYTES / row_bytes).min(fair).max(8);
    rows.next_multiple_of(gemv_transposed::ROWS)
}
