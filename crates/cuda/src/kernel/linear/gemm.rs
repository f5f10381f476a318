//! Twin of `kernels/linear/gemm.cu`: products with many rows on the tensor cores of any card.
//!
//! A shape and a bucket of rows decide tile, grid and splits; nothing else does, so rows come out the same in every
//! batch of their bucket. `partials` and `tickets` are scratch that all products of a program may share, since they run
//! one after another; tickets must be zero before the first and are left so.

#[cfg(test)]
mod tests;

use crate::kernel::{Addresses, Kernel, Place, Q8Places, RowsAt, Specialization, XRows};
use crate::{
    device::{Address, Grid},
    kernel::weights::Packed,
    kernel::{
        panels::{PanelFormat, STRIP},
        params::{Params, params},
    },
};

/// Outputs of a block.
const TILE_OUTPUTS: usize = 128;
/// Inputs of a stage.
const STAGE_INPUTS: usize = 64;
const THREADS: usize = 256;
/// Rows of a tile, by entry point.
const TILES: [usize; 4] = [16, 32, 64, 128];
const ENTRIES: &[&str] = &["gemm_16", "gemm_32", "gemm_64", "gemm_128"];
/// Constants that tell each tile how many stages it has.
const STAGES: [&str; 4] = ["STAGES_16", "STAGES_32", "STAGES_64", "STAGES_128"];
/// The most stages of a tile: narrow ones live on bytes in flight.
const MOST_STAGES: [usize; 4] = [8, 8, 4, 4];
/// Half of what a multiprocessor of the smaller cards has, less what the kernel declares. Two blocks of the widest tile
/// share one: they hide each other's waits better than more stages of one would.
const HALF_SHARED_BYTES: usize = (50 << 10) - (9 << 10);
/// Shared memory that every supported card gives a block, less what the kernel declares.
const SHARED_BYTES: usize = (99 << 10) - (10 << 10);
/// The least a split is worth, in stages.
const LEAST_STAGES: usize = 4;

params! {
    struct GemmParams {
        rows: RowsAt,
        w: Address,
        x: Address,
        x_scales: Address,
        x_sums: Address,
        out: Address,
        codes: Address,
        scales: Address,
        sums: Address,
        partials: Address,
        tickets: Address,
        tiles: Address,
        tile_count: Address,
        sorted: Address,
        columns: u32,
        outputs: u32,
        out_stride: u32,
        x_share: u32,
    }
}

/// How weights lie.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum GemmWeights {
    Panels(PanelFormat),
    /// Halves, row after row.
    Halves,
}

impl GemmWeights {
    fn name(self) -> &'static str {
        match self {
            GemmWeights::Panels(format) => format.name(),
            GemmWeights::Halves => "f16",
        }
    }

    /// Bytes of a stage of a strip in shared memory, and of a token, its scales and sums included.
    fn stage_bytes(self) -> (usize, usize) {
        match self {
            GemmWeights::Panels(PanelFormat::Q8) => (1088, 64 + 8),
            GemmWeights::Panels(PanelFormat::Q4) => (576, 64 + 8),
            GemmWeights::Panels(PanelFormat::K4) => (640, 64 + 16),
            GemmWeights::Panels(PanelFormat::K5) => (768, 64 + 16),
            GemmWeights::Panels(PanelFormat::K6) => (864, 64 + 8),
            GemmWeights::Halves => (2048, 128),
        }
    }

    /// Stages that a tile works on or waits for, and their bytes.
    fn stages(self, entry: usize) -> (usize, usize) {
        let (strip, token) = self.stage_bytes();
        let stage = TILE_OUTPUTS / STRIP * strip + TILES[entry] * token;
        let stages = if TILES[entry] == 128 && self.blocks_together(128) == 2 {
            (HALF_SHARED_BYTES / stage).clamp(2, MOST_STAGES[entry])
        } else {
            let most = (SHARED_BYTES / stage).min(MOST_STAGES[entry]);
            most - most % self.together(entry)
        };
        (stages, stages * stage)
    }

    /// Stages between barriers.
    fn together(self, entry: usize) -> usize {
        match self {
            GemmWeights::Panels(_) if TILES[entry] < 128 => 2,
            _ => 1,
        }
    }

    /// Blocks of the tile of this many rows that a multiprocessor holds.
    fn blocks_together(self, tile: usize) -> usize {
        match self {
            GemmWeights::Panels(PanelFormat::K4 | PanelFormat::K5 | PanelFormat::K6)
                if tile == 128 =>
            {
                1
            }
            _ => 2,
        }
    }
}

/// What becomes of the sums.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum Epilogue {
    Floats,
    /// Strips are gates and ups in turn: `gelu(gate) * up` in the Q8 form.
    GeluPair,
}

/// Everything that grids and scratch depend on.
#[derive(Clone, Copy, Debug)]
pub(crate) struct GemmShape {
    pub(crate) weights: GemmWeights,
    pub(crate) epilogue: Epilogue,
    pub(crate) columns: usize,
    /// Bytes that a value is the sum of: 1, or 2 in the Q16 form.
    pub(crate) terms: usize,
    /// Rows of the weights: gates and ups together.
    pub(crate) outputs: usize,
    /// Of the card.
    pub(crate) multiprocessors: usize,
    /// For products with the matrices that each row chose.
    pub(crate) groups: Option<Groups>,
}

/// Experts, stacked one after another, of which every row chose some. Outputs have a row a choice.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Groups {
    pub(crate) experts: usize,
    pub(crate) top_k: usize,
}

impl Groups {
    /// The entry point whose tile suits what an expert has of this many rows.
    pub(crate) fn entry(self, rows: usize) -> usize {
        // Experts have unequal shares, and a tile that is not full costs as much as a full one.
        match rows * self.top_k / self.experts {
            0..=6 => 0,
            7..=20 => 1,
            21..=300 => 2,
            _ => 3,
        }
    }

    /// Choices of a tile.
    pub(crate) fn tile(self, rows: usize) -> usize {
        TILES[self.entry(rows)]
    }

    /// As many tiles as there can be: every expert's last may have one choice.
    pub(crate) fn most_tiles(self, rows: usize) -> usize {
        let choices = rows * self.top_k;
        let experts = self.experts.min(choices);
        experts + (choices - experts) / self.tile(rows)
    }
}

/// The tiles of grouped products, which `ExpertTiles` makes: choices by expert (a word each), tiles (three words each),
/// and how many there are (a word).
#[derive(Clone, Copy, Debug)]
pub(crate) struct GroupPlaces {
    pub(crate) sorted: Place,
    pub(crate) tiles: Place,
    pub(crate) tile_count: Place,
}

/// The entry point whose tile suits this many rows.
fn entry(rows: usize) -> usize {
    let fits = TILES.iter().position(|&tile| rows <= tile);
    fits.unwrap_or(TILES.len() - 1)
}

/// Scratch that a product needs, in bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct GemmScratch {
    pub(crate) partials: usize,
    pub(crate) tickets: usize,
}

impl GemmShape {
    fn stages(&self) -> usize {
        (self.terms * self.columns).div_ceil(STAGE_INPUTS)
    }

    fn output_tiles(&self) -> usize {
        self.outputs.div_ceil(TILE_OUTPUTS)
    }

    fn entry(&self, rows: usize) -> usize {
        self.groups
            .map_or_else(|| entry(rows), |groups| groups.entry(rows))
    }

    fn row_tiles(&self, rows: usize) -> usize {
        self.groups.map_or_else(
            || rows.div_ceil(TILES[entry(rows)]),
            |groups| groups.most_tiles(rows),
        )
    }

    /// How often the inputs are split: what should take least time. Starting and joining cost as much as some stages.
    /// Narrow tiles wait for memory, which multiprocessors share evenly: the one with most blocks is the last. Wide
    /// ones compute in waves; a wave that leaves every multiprocessor a block at most is the faster for it.
    fn splits(&self, rows: usize) -> usize {
        if self.groups.is_some() {
            // How many tiles there are is not known here, and there are many.
            return 1;
        }
        let tile = TILES[self.entry(rows)];
        let tiles = self.row_tiles(rows) * self.output_tiles();
        let cost = |splits: usize| {
            let (blocks, stages) = (tiles * splits, self.stages().div_ceil(splits) as f64);
            let joined = if splits > 1 { splits as f64 } else { 0.0 };
            if tile <= 32 {
                let most = blocks.div_ceil(self.multiprocessors) as f64;
                return most * (stages + 2.0) + if splits > 1 { 6.0 + joined } else { 0.0 };
            }
            let together = self.multiprocessors * self.weights.blocks_together(tile);
            let rest = match blocks % together {
                0 => 0.0,
                rest if rest <= self.multiprocessors => 0.6,
                _ => 1.0,
            };
            let join = if splits > 1 { 1.5 } else { 0.0 };
            ((blocks / together) as f64 + rest) * (stages + 1.0 + join + 0.4 * joined)
        };
        let most = (self.stages() / LEAST_STAGES).clamp(1, 16);
        (1..=most)
            .min_by(|&a, &b| cost(a).total_cmp(&cost(b)))
            .expect("one at least")
    }

    pub(crate) fn grid(&self, rows: usize) -> Grid {
        let entry = self.entry(rows);
        Grid {
            entry,
            blocks: (
                self.row_tiles(rows),
                self.output_tiles() * self.splits(rows),
            ),
            threads: THREADS,
            shared_bytes: self.weights.stages(entry).1,
            early: false,
        }
    }

    pub(crate) fn scratch(&self, rows: usize) -> GemmScratch {
        let (tile, splits) = (TILES[self.entry(rows)], self.splits(rows));
        if splits == 1 {
            return GemmScratch {
                partials: 0,
                tickets: 0,
            };
        }
        let tiles = self.row_tiles(rows) * self.output_tiles();
        GemmScratch {
            partials: tiles * splits * tile * TILE_OUTPUTS * 4,
            tickets: tiles * 4,
        }
    }

    fn specialization(&self) -> Specialization {
        let rows = match self.groups {
            Some(_) => "grouped",
            None => "dense",
        };
        specialization(self.weights, self.epilogue, rows, self.terms)
    }
}

fn specialization(
    weights: GemmWeights,
    epilogue: Epilogue,
    rows: &'static str,
    terms: usize,
) -> Specialization {
    let epilogue = match epilogue {
        Epilogue::Floats => "f32",
        Epilogue::GeluPair => "gelu_pair",
    };
    let mut constants = vec![
        ("WEIGHTS", weights.name().to_owned()),
        ("EPILOGUE", epilogue.to_owned()),
        ("ROWS", rows.to_owned()),
        ("TERMS", terms.to_string()),
    ];
    for (entry, name) in STAGES.into_iter().enumerate() {
        constants.push((name, weights.stages(entry).0.to_string()));
    }
    Specialization {
        kernel: "gemm",
        entries: ENTRIES,
        constants,
        params_bytes: GemmParams::BYTES,
    }
}

/// Every way of calling it.
pub(crate) fn specializations() -> Vec<Specialization> {
    let halves = specialization(GemmWeights::Halves, Epilogue::Floats, "dense", 1);
    let mut all = vec![halves];
    for weights in PanelFormat::ALL.map(GemmWeights::Panels) {
        for epilogue in [Epilogue::Floats, Epilogue::GeluPair] {
            all.extend(["dense", "grouped"].map(|rows| specialization(weights, epilogue, rows, 1)));
        }
        all.push(specialization(weights, Epilogue::Floats, "dense", 2));
    }
    all
}

/// What weights are multiplied with: bytes for panels, halves for halves.
#[derive(Clone, Copy, Debug)]
pub(crate) enum GemmInput {
    /// The Q8 form, or Q16 if the shape has two terms.
    Bytes(Q8Places),
    Halves {
        values: Place,
        /// A factor a row.
        factors: Option<Place>,
    },
}

#[derive(Clone, Copy, Debug)]
pub(crate) enum GemmOutput {
    /// From `column` on, `stride` floats from row to row.
    Floats {
        out: Place,
        column: usize,
        stride: usize,
    },
    Products(Q8Places),
}

#[derive(Debug)]
pub(crate) struct Gemm {
    pub(crate) shape: GemmShape,
    pub(crate) x: GemmInput,
    pub(crate) w: Packed,
    pub(crate) out: GemmOutput,
    pub(crate) partials: Place,
    pub(crate) tickets: Place,
    /// Where the shape has groups: their tiles, and what rows of `x` there are.
    pub(crate) groups: Option<(GroupPlaces, XRows)>,
}

impl Kernel for Gemm {
    fn specialization(&self) -> Specialization {
        self.shape.specialization()
    }

    fn grid(&self, rows: usize) -> Grid {
        self.shape.grid(rows)
    }

    fn params(&self, at: &Addresses, rows: RowsAt) -> Vec<u8> {
        let place = |place: Place| at.place(place);
        let (x, x_scales, x_sums) = match self.x {
            GemmInput::Bytes(x) => (place(x.codes), place(x.scales), place(x.sums)),
            GemmInput::Halves { values, factors } => {
                let factors = factors.map_or(Address::NULL, place);
                (place(values), factors, Address::NULL)
            }
        };
        let none = Address::NULL;
        let (out, out_stride, [codes, scales, sums]) = match self.out {
            GemmOutput::Floats {
                out,
                column,
                stride,
            } => (place(out).offset(4 * column), stride, [none; 3]),
            GemmOutput::Products(out) => (none, 0, out.all().map(place)),
        };
        let ([sorted, tiles, tile_count], x_share) = match self.groups {
            None => ([none; 3], 1),
            Some((groups, x_rows)) => {
                let top_k = self.shape.groups.map_or(1, |groups| groups.top_k);
                let x_share = match x_rows {
                    XRows::One => top_k,
                    XRows::EachChoice => 1,
                };
                let places = [groups.sorted, groups.tiles, groups.tile_count];
                (places.map(place), x_share)
            }
        };
        GemmParams {
            rows,
            w: at.matrix(&self.w).start,
            x,
            x_scales,
            x_sums,
            out,
            codes,
            scales,
            sums,
            partials: place(self.partials),
            tickets: place(self.tickets),
            tiles,
            tile_count,
            sorted,
            columns: self.shape.columns as u32,
            outputs: self.shape.outputs as u32,
            out_stride: out_stride as u32,
            x_share: x_share as u32,
        }
        .bytes()
    }

    fn weights(&self) -> Vec<Packed> {
        vec![self.w.clone()]
    }

    fn reads(&self) -> Vec<Place> {
        let mut reads = match self.x {
            GemmInput::Bytes(x) => x.all().to_vec(),
            GemmInput::Halves { values, factors } => [values].into_iter().chain(factors).collect(),
        };
        if let Some((groups, _)) = self.groups {
            reads.extend([groups.sorted, groups.tiles, groups.tile_count]);
        }
        reads
    }

    fn writes(&self) -> Vec<Place> {
        match self.out {
            GemmOutput::Floats { out, .. } => vec![out],
            GemmOutput::Products(out) => out.all().to_vec(),
        }
    }
}
