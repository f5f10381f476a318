//! Products of large batches over packed weights on Hopper: experts of the 26B-A4B, and whole matrices beside cuBLASLt's figures.

use crate::{
    config::Tier,
    device::{Address, Buffer, launch},
    kernel::{
        ExpertGroups, ExpertTiles, GROUPED_TOKENS, GemmPackedEpilogue, GemmPackedShape,
        GemmWeights, HOPPER_MULTIPROCESSORS, RowsAt,
        fragment::FragmentFormat,
        linear::{
            gemm::tests::{Matrix, group},
            gemm_packed::GemmPackedParams,
        },
        params::Params,
    },
    testing::{Card, f16_bits, normals},
};

use super::gemm::repeated;

struct Timed<'a> {
    card: &'a Card,
    name: &'a str,
    shape: GemmPackedShape,
    /// Of all experts together.
    w_rows: usize,
    share: usize,
}

impl Timed<'_> {
    fn time(&self, rows: usize) {
        let Timed {
            card, shape, share, ..
        } = *self;
        let GemmPackedShape {
            columns, outputs, ..
        } = shape;
        let top_k = shape.groups.map_or(1, |groups| groups.top_k);
        let part = Matrix::new(GemmWeights::Fragments(shape.format), 64, columns, 3).bytes;
        let matrix_bytes = part.len() / 64 * self.w_rows;
        // More than four times a large L2.
        let matrices = (300usize << 20).div_ceil(matrix_bytes);
        let w = repeated(card, &part, matrices * matrix_bytes);
        let x: Vec<u8> = f16_bits(&normals(5, 64 * columns))
            .iter()
            .flat_map(|v| v.to_ne_bytes())
            .collect();
        let x = repeated(card, &x, rows * top_k / share * columns * 2);
        let out_bytes = rows * top_k * outputs * 4;
        let out = card.device.allocate("test", out_bytes).expect("memory");
        let grouped = (shape.groups).map(|groups| group(card, groups, rows, rows, 3));
        let at = |of: fn(&crate::kernel::linear::gemm::tests::Grouped) -> &Buffer| {
            grouped.as_ref().map_or(Address::NULL, |g| of(g).address())
        };
        let count = card.upload(&[rows as u32]);
        let module = card.load(&shape.specialization());
        let grid = shape.grid(rows);
        let mut params = GemmPackedParams {
            rows: RowsAt {
                count: count.address(),
                index: Address::NULL,
            },
            w: w.address(),
            x: x.address(),
            out: out.address(),
            tiles: at(|g| &g.tiles),
            tile_count: at(|g| &g.tile_count),
            sorted: at(|g| &g.sorted),
            columns: columns as u32,
            outputs: outputs as u32,
            m_tiles: (outputs / 16) as u32,
            out_stride: match shape.epilogue {
                GemmPackedEpilogue::F32 | GemmPackedEpilogue::F16 => outputs as u32,
                GemmPackedEpilogue::Geglu => outputs as u32 / 2,
            },
            x_share: share as u32,
            scale: 1.0,
        };
        let taken = card.time(50, |i| {
            params.w = w.address().offset(i % matrices * matrix_bytes);
            launch(&module, grid, &params.bytes()).expect("launches");
        });
        let seconds = taken.as_secs_f64();
        let tflops = 2.0 * (rows * top_k * outputs * columns) as f64 / seconds / 1e12;
        let rate = matrix_bytes as f64 / seconds / 1e9;
        println!(
            "gemm_packed {} {outputs}x{columns} rows {rows}: {:.1} us, {tflops:.0} TFLOPS, {rate:.0} GB/s",
            self.name,
            seconds * 1e6
        );
    }
}

fn shape(
    format: FragmentFormat,
    epilogue: GemmPackedEpilogue,
    (outputs, columns): (usize, usize),
) -> GemmPackedShape {
    GemmPackedShape {
        format,
        epilogue,
        columns,
        outputs,
        multiprocessors: HOPPER_MULTIPROCESSORS,
        groups: None,
    }
}

/// Both products of a layer of the 26B-A4B. Experts are chosen unevenly.
pub(crate) fn grouped() {
    let card = Card::open(Tier::Best);
    let groups = ExpertGroups {
        experts: 128,
        top_k: 8,
        tiles: ExpertTiles::Of(GROUPED_TOKENS),
    };
    for (epilogue, sizes, share) in [
        (GemmPackedEpilogue::Geglu, (1408, 2816), 8),
        (GemmPackedEpilogue::F16, (2816, 704), 1),
    ] {
        let timed = Timed {
            card: &card,
            name: "grouped q4",
            shape: GemmPackedShape {
                groups: Some(groups),
                ..shape(FragmentFormat::Q4, epilogue, sizes)
            },
            w_rows: sizes.0 * 128,
            share,
        };
        for rows in [16, 64, 512, 2048] {
            timed.time(rows);
        }
    }
}

/// Matrices of E4B and 12B.
pub(crate) fn dense() {
    let card = Card::open(Tier::Best);
    let (f32, geglu) = (GemmPackedEpilogue::F32, GemmPackedEpilogue::Geglu);
    let (q8, q4) = (FragmentFormat::Q8, FragmentFormat::Q4);
    for (name, format, epilogue, sizes) in [
        ("e4b q8 gate|up", q8, geglu, (20480, 2560)),
        ("e4b q8 down", q8, f32, (2560, 10240)),
        ("12b q4 qkv", q4, f32, (8192, 3840)),
        ("12b q4 o", q4, f32, (3840, 4096)),
        ("12b q4 gate|up", q4, geglu, (30720, 3840)),
        ("12b q4 down", q4, f32, (3840, 15360)),
    ] {
        let timed = Timed {
            card: &card,
            name,
            shape: shape(format, epilogue, sizes),
            w_rows: sizes.0,
            share: 1,
        };
        for rows in [64, 512, 2048] {
            timed.time(rows);
        }
    }
}
