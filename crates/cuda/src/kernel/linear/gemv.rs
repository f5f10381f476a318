//! Twin of `kernels/linear/gemv.cu`: products of up to 8 rows with a matrix that is read once.
//!
//! How warps share a strip's inputs is a function of the shape alone, so sums are the same in every bucket of rows and on
//! every card. How many blocks there are is free, and chosen so that all are resident and the memory stays busy to the end.

use carat_model::weights::Weight;

use crate::kernel::{Addresses, Kernel, Place, RowsAt, Second, Specialization};
use crate::{
    device::{Address, Grid},
    kernel::weights::Packed,
    kernel::{
        panels::{self, PanelFormat},
        params::{Params, params},
    },
};

/// The most rows of a launch.
pub(crate) const MOST_ROWS: usize = 8;
/// Stages of a warp that are under way.
const RING: usize = 3;
/// Columns of a norm that a thread holds: `VALUES` fours.
const NORM_COLUMNS: usize = 4 * 3;
/// The most warps of a block.
const MOST_WARPS: usize = 16;
/// Parts of a joined matrix.
pub(crate) const MOST_PARTS: usize = 3;

params! {
    struct PrologueParams {
        x: Address,
        weight: Address,
        next_weight: Address,
        a: Address,
        sum: Address,
        kind: u32,
        per_column: f32,
        eps: f32,
        by: f32,
        next_eps: f32,
        reserved: u32,
    }
}

params! {
    struct PartParams {
        out: Address,
        first: u32,
        rows: u32,
    }
}

params! {
    struct GemvParams {
        input: PrologueParams,
        w: Address,
        up: Address,
        a_block_1: u32,
        a_block_2: u32,
        a_block_4: u32,
        a_block_8: u32,
        columns: u32,
        padded: u32,
        team_of: u32,
        split: u32,
        teams: u32,
        strips: u32,
        strip_bytes: u32,
        stages: u32,
        all_stages: u32,
        outputs: u32,
        epilogue: u32,
        other_columns: u32,
        other_column: u32,
        top_k: u32,
        choices_summed: u32,
        early: u32,
        rows: RowsAt,
        part_0: PartParams,
        part_1: PartParams,
        part_2: PartParams,
        other: Address,
        route: Address,
        matrix_bytes: u64,
    }
}

/// How a matrix lies on the device.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum GemvForm {
    Panel(PanelFormat),
    F16,
    BF16,
    F32,
}

impl GemvForm {
    pub(crate) fn all() -> impl Iterator<Item = GemvForm> {
        let floats = [GemvForm::F16, GemvForm::BF16, GemvForm::F32];
        PanelFormat::ALL
            .into_iter()
            .map(GemvForm::Panel)
            .chain(floats)
    }

    fn name(self) -> &'static str {
        match self {
            GemvForm::Panel(format) => format.name(),
            GemvForm::F16 => "f16",
            GemvForm::BF16 => "bf16",
            GemvForm::F32 => "f32",
        }
    }

    /// Output rows that a team of warps takes together.
    fn strip(self) -> usize {
        match self {
            GemvForm::Panel(_) => panels::STRIP,
            _ => 4,
        }
    }

    /// Inputs and bytes of a stage of a strip.
    fn stage(self) -> (usize, usize) {
        match self {
            GemvForm::Panel(format) => {
                let units = match format {
                    PanelFormat::Q8 => 2,
                    PanelFormat::Q4 => 4,
                    PanelFormat::K4 | PanelFormat::K5 | PanelFormat::K6 => 1,
                };
                (units * format.unit_inputs(), units * format.unit_bytes())
            }
            GemvForm::F16 | GemvForm::BF16 => (256, 2048),
            GemvForm::F32 => (128, 2048),
        }
    }

    /// Bytes of a strip of panels, of a row of floats.
    fn strip_bytes(self, columns: usize) -> usize {
        match self {
            GemvForm::Panel(format) => format.strip_bytes(columns),
            GemvForm::F16 | GemvForm::BF16 => 2 * columns,
            GemvForm::F32 => 4 * columns,
        }
    }

    /// Bytes of the input of this many rows in shared memory.
    fn input_bytes(self, padded: usize, rows: usize) -> usize {
        match self {
            GemvForm::Panel(format) => {
                let mins = matches!(format, PanelFormat::K4 | PanelFormat::K5);
                let scales = 4 * (1 + usize::from(mins)) * padded / 32;
                rows * (padded + 32 + scales)
            }
            _ => rows * 4 * padded,
        }
    }
}

/// What is done to the input before the product.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Prologue {
    None {
        x: Place,
    },
    Norm {
        x: Place,
        weight: Option<Weight>,
        eps: f32,
    },
    /// The input is `sum = (a + norm(x)) * by`, or its norm; the sum is written, too.
    NormAdd {
        x: Place,
        weight: Option<Weight>,
        eps: f32,
        a: Place,
        by: f32,
        sum: Place,
        next: Option<PrologueNorm>,
    },
}

/// The norm of a sum.
#[derive(Clone, Copy, Debug)]
pub(crate) struct PrologueNorm {
    pub(crate) weight: Option<Weight>,
    pub(crate) eps: f32,
}

/// What becomes of the product.
#[derive(Clone, Debug)]
pub(crate) enum Epilogue {
    /// Written as it is: output rows of a joined matrix in up to three parts, in order.
    Plain(Vec<Part>),
    /// `gelu(gate) * up`. Panels of the two lie strip by strip in one matrix; floats are two matrices.
    GeluPair { out: Place, up: Option<Packed> },
    /// `gelu(y) * other`, a slice of its columns.
    GeluSlice { out: Place, other: Second },
}

/// Output rows `first` on of a joined matrix. Of panels, parts start at whole strips; of floats, at multiples of 4.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Part {
    pub(crate) out: Place,
    pub(crate) first: usize,
    pub(crate) rows: usize,
}

/// What a grid depends on.
#[derive(Clone, Copy, Debug)]
pub(crate) struct GemvShape {
    pub(crate) form: GemvForm,
    pub(crate) columns: usize,
    /// Output rows of the joined matrix up to the last part's end; of a pair, of one of the two.
    pub(crate) outputs: usize,
    pub(crate) pair: bool,
    /// Matrices whose products are summed, each with columns of its own: 1, or a row's choices.
    pub(crate) summed: usize,
    /// Sets of blocks that a row has of its own: 1, or its choices.
    pub(crate) sets: usize,
    pub(crate) card: GemvCard,
}

/// What grids depend on of a card.
#[derive(Clone, Copy, Debug)]
pub(crate) struct GemvCard {
    pub(crate) multiprocessors: usize,
    /// The most shared memory a block may have; a multiprocessor has hardly more.
    pub(crate) shared_bytes: usize,
}

impl GemvShape {
    /// Strips that must stay together.
    fn granule(self) -> usize {
        1 + usize::from(self.pair)
    }

    fn strips(self) -> usize {
        self.outputs.div_ceil(self.form.strip()) * self.granule()
    }

    /// Stages of a strip.
    fn stages(self) -> usize {
        self.columns.div_ceil(self.form.stage().0)
    }

    /// Columns of the whole input up to the end of its last stage.
    fn padded(self) -> usize {
        (self.summed - 1) * self.columns + self.stages() * self.form.stage().0
    }

    /// Warps that share a strip, and how many such teams a block has.
    fn teams(self) -> (usize, usize) {
        let stages = self.stages() * self.summed;
        // A norm's row is held by the block's threads.
        let least = match self.columns.div_ceil(32 * NORM_COLUMNS) {
            warps if warps <= MOST_WARPS => warps,
            _ => 1,
        };
        if matches!(self.form, GemvForm::Panel(_)) || self.strips() < 8 * 132 {
            let few = stages.min(8);
            let most = 12.max(least).min(stages);
            // The least idle warps; of equals, the most warps.
            let split = (few.max(least.min(stages))..=most)
                .min_by_key(|&split| (stages.div_ceil(split) * split, usize::MAX - split))
                .unwrap_or(stages);
            let teams = (8 / split)
                .min(self.strips().div_ceil(132 * self.granule()))
                .max(least.div_ceil(split));
            return (split, teams.max(1));
        }
        // Summing over lanes is dear beside a stage of floats: a warp takes several before.
        let split = stages.div_ceil(5);
        (split, (10 / split).max(least.div_ceil(split)).max(1))
    }

    fn warps(self) -> usize {
        let (split, teams) = self.teams();
        split * teams
    }

    /// Whether a block's threads can hold a row to norm it.
    pub(crate) fn can_norm(self) -> bool {
        self.columns <= self.warps() * 32 * NORM_COLUMNS
    }

    /// Strips of a block.
    fn a_block(self, blocks: usize) -> usize {
        (self.strips() / self.granule()).div_ceil(blocks) * self.granule()
    }

    fn shared_bytes(self, rows: usize, blocks: usize) -> usize {
        let (split, teams) = self.teams();
        let batch = match rows {
            1 | 2 => 8,
            4 => 4,
            _ => 2,
        };
        let batch = (batch * teams).min(self.a_block(blocks));
        let partials = 2 * batch * split * rows * self.form.strip() * 4;
        split * teams * RING * self.form.stage().1
            + partials
            + self.form.input_bytes(self.padded(), rows)
    }

    /// Blocks for as many rows as an entry has (of choices, for one row): all resident, and with equal work. `None` if the
    /// input of so many rows does not fit.
    fn blocks(self, rows: usize) -> Option<usize> {
        // What a block has beyond its own: the driver's share, and what the kernel declares.
        const DECLARED: usize = 2048;
        let GemvCard {
            multiprocessors,
            shared_bytes,
        } = self.card;
        let granules = self.strips() / self.granule();
        let in_flight = self.warps() * RING * self.form.stage().1;
        let resident = |blocks: usize| {
            let by_shared = (shared_bytes + 1024) / (self.shared_bytes(rows, blocks) + DECLARED);
            let by_registers = 65536 / (if rows == 1 { 96 } else { 128 } * 32 * self.warps());
            by_shared.min(by_registers.max(1)) * multiprocessors
        };
        // Measured on an H200: the more bytes are in flight the more of the bandwidth is drawn, whichever multiprocessor has
        // them; yet one that has more blocks than others is a little late.
        let cost = |blocks: usize| {
            let (most, blocks) = (granules.div_ceil(blocks), blocks * self.sets);
            let in_flight = (blocks * in_flight) as f64 / (36e3 * multiprocessors as f64);
            let drawn = 1.0 - (-1.2 * in_flight).exp();
            let latest = most * blocks.div_ceil(multiprocessors) * multiprocessors;
            0.8 * (most * blocks) as f64 / drawn + 0.2 * latest as f64
        };
        let even = (1..=granules).map(|most| granules.div_ceil(most));
        let some = |b: &usize| (*b * self.sets).min(multiprocessors) <= resident(*b);
        let all = |b: &usize| *b == 1 || *b * self.sets <= resident(*b);
        even.filter(some)
            .filter(all)
            .min_by(|&a, &b| cost(a).total_cmp(&cost(b)))
    }

    /// The grid of a bucket with a given number of blocks.
    fn grid_of(self, rows: usize, blocks: usize) -> Grid {
        Grid {
            entry: rows.trailing_zeros() as usize,
            shared_bytes: self.shared_bytes(rows, blocks),
            ..Grid::new((blocks, 1), 32 * self.warps())
        }
    }

    fn grid(self, rows: usize) -> Grid {
        assert!((1..=MOST_ROWS).contains(&rows), "{rows} rows");
        let bucket = rows.next_power_of_two();
        let mut entries = [8, 4, 2, 1].into_iter().filter(|&rows| rows <= bucket);
        let (rows, blocks) = entries
            .find_map(|rows| Some((rows, self.blocks(rows)?)))
            .expect("one row fits");
        let grid = self.grid_of(rows, blocks);
        Grid {
            blocks: (blocks, bucket / rows),
            ..grid
        }
    }

    /// The grid of `gemv_chosen`.
    fn chosen_grid(self, rows: usize) -> Grid {
        let grid = self.grid_of(1, self.blocks(1).expect("one row fits"));
        Grid {
            entry: 4,
            blocks: (grid.blocks.0, rows * self.sets),
            ..grid
        }
    }
}

/// A product with what comes before and after it, for up to [`MOST_ROWS`] rows.
#[derive(Debug)]
pub(crate) struct Gemv {
    pub(crate) prologue: Prologue,
    /// With choices, a stack of matrices.
    pub(crate) w: Packed,
    pub(crate) shape: GemvShape,
    pub(crate) epilogue: Epilogue,
    pub(crate) choices: Option<Choices>,
    /// Starts before the launch before is over.
    pub(crate) early: bool,
}

/// Each row is multiplied with the matrices of a stack that it chose. The input has no `NormAdd` then.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Choices {
    /// `[rows, 2 * top_k]`: numbers of matrices, then their weights.
    pub(crate) route: Place,
    pub(crate) top_k: usize,
    pub(crate) kind: ChoicesKind,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum ChoicesKind {
    /// One input for all choices; the output is `[rows, top_k, outputs]`.
    Each,
    /// An input for each choice, `[rows, top_k, columns]`, products summed by weight. Panels of whole units only.
    Summed,
}

/// What kernels can do with an input: take it as it is, or norm it in any of three ways.
const INPUTS: [&str; 2] = ["plain", "normed"];

pub(crate) fn specializations() -> impl Iterator<Item = Specialization> {
    GemvForm::all().flat_map(|form| INPUTS.map(|input| specialization(form, input)))
}

fn specialization(form: GemvForm, input: &str) -> Specialization {
    Specialization {
        kernel: "gemv",
        entries: &["gemv_1", "gemv_2", "gemv_4", "gemv_8", "gemv_chosen"],
        constants: vec![
            ("WEIGHTS", form.name().to_owned()),
            ("RING", RING.to_string()),
            ("INPUT", input.to_owned()),
        ],
        params_bytes: GemvParams::BYTES,
    }
}

impl Prologue {
    fn params(&self, at: &Addresses, columns: usize) -> PrologueParams {
        let mut params = PrologueParams {
            x: Address::NULL,
            weight: Address::NULL,
            next_weight: Address::NULL,
            a: Address::NULL,
            sum: Address::NULL,
            kind: 0,
            per_column: 1.0 / columns as f32,
            eps: 0.0,
            by: 1.0,
            next_eps: 0.0,
            reserved: 0,
        };
        match *self {
            Prologue::None { x } => params.x = at.place(x),
            Prologue::Norm { x, weight, eps } => {
                params.x = at.place(x);
                params.weight = at.vector(weight);
                params.eps = eps;
                params.kind = 1;
            }
            Prologue::NormAdd {
                x,
                weight,
                eps,
                a,
                by,
                sum,
                next,
            } => {
                params.x = at.place(x);
                params.weight = at.vector(weight);
                params.eps = eps;
                params.a = at.place(a);
                params.by = by;
                params.sum = at.place(sum);
                params.kind = 2;
                if let Some(next) = next {
                    params.next_weight = at.vector(next.weight);
                    params.next_eps = next.eps;
                    params.kind = 3;
                }
            }
        }
        params
    }

    fn reads(&self) -> Vec<Place> {
        match *self {
            Prologue::None { x } | Prologue::Norm { x, .. } => vec![x],
            Prologue::NormAdd { x, a, .. } => vec![x, a],
        }
    }

    fn weights(&self) -> Vec<Packed> {
        match *self {
            Prologue::None { .. } => vec![],
            Prologue::Norm { weight, .. } => Packed::vectors([weight]),
            Prologue::NormAdd { weight, next, .. } => {
                Packed::vectors([weight, next.and_then(|n| n.weight)])
            }
        }
    }

    fn sum(&self) -> Option<Place> {
        match *self {
            Prologue::NormAdd { sum, .. } => Some(sum),
            _ => None,
        }
    }
}

impl PartParams {
    const NONE: PartParams = PartParams {
        out: Address::NULL,
        first: u32::MAX,
        rows: 0,
    };
}

impl GemvShape {
    /// Params of a plain product without addresses: what follows from the shape.
    fn params(self, rows: RowsAt, input: PrologueParams, w: Address) -> GemvParams {
        let (split, teams) = self.teams();
        let a_block =
            |rows: usize| self.blocks(rows).map_or(0, |blocks| self.a_block(blocks)) as u32;
        GemvParams {
            rows,
            input,
            w,
            up: Address::NULL,
            part_0: PartParams::NONE,
            part_1: PartParams::NONE,
            part_2: PartParams::NONE,
            other: Address::NULL,
            route: Address::NULL,
            matrix_bytes: 0,
            columns: self.columns as u32,
            padded: self.padded() as u32,
            outputs: self.outputs as u32,
            strips: self.strips() as u32,
            strip_bytes: self.form.strip_bytes(self.columns) as u32,
            stages: self.stages() as u32,
            all_stages: (self.stages() * self.summed) as u32,
            split: split as u32,
            team_of: (65536 / split + 1) as u32,
            teams: teams as u32,
            a_block_1: a_block(1),
            a_block_2: a_block(2),
            a_block_4: a_block(4),
            a_block_8: a_block(8),
            epilogue: 0,
            other_columns: 0,
            other_column: 0,
            top_k: 0,
            choices_summed: 0,
            early: 0,
        }
    }
}

impl Kernel for Gemv {
    fn specialization(&self) -> Specialization {
        let input = usize::from(!matches!(self.prologue, Prologue::None { .. }));
        specialization(self.shape.form, INPUTS[input])
    }

    fn grid(&self, rows: usize) -> Grid {
        let grid = match self.choices {
            None => self.shape.grid(rows),
            Some(_) => self.shape.chosen_grid(rows),
        };
        Grid {
            early: self.early,
            ..grid
        }
    }

    fn params(&self, at: &Addresses, rows: RowsAt) -> Vec<u8> {
        let input = self.prologue.params(at, self.shape.columns);
        let mut params = self.shape.params(rows, input, at.matrix(&self.w).start);
        let whole = |out: Place| PartParams {
            out: at.place(out),
            first: 0,
            rows: self.shape.outputs as u32,
        };
        match &self.epilogue {
            Epilogue::Plain(parts) => {
                assert!(parts.len() <= MOST_PARTS, "{} parts", parts.len());
                let part = |i: usize| {
                    parts.get(i).map_or(PartParams::NONE, |part| PartParams {
                        out: at.place(part.out),
                        first: part.first as u32,
                        rows: part.rows as u32,
                    })
                };
                (params.part_0, params.part_1, params.part_2) = (part(0), part(1), part(2));
            }
            Epilogue::GeluPair { out, up } => {
                params.part_0 = whole(*out);
                params.up = up.as_ref().map_or(Address::NULL, |up| at.matrix(up).start);
                params.epilogue = 1;
            }
            Epilogue::GeluSlice { out, other } => {
                params.part_0 = whole(*out);
                params.other = at.place(other.place);
                params.other_columns = other.columns as u32;
                params.other_column = other.column as u32;
                params.epilogue = 2;
            }
        }
        if let Some(choices) = self.choices {
            params.route = at.place(choices.route);
            params.matrix_bytes = at.matrix(&self.w).matrix_bytes as u64;
            params.top_k = choices.top_k as u32;
            params.choices_summed = u32::from(choices.kind == ChoicesKind::Summed);
        }
        params.early = u32::from(self.early);
        params.bytes()
    }

    fn weights(&self) -> Vec<Packed> {
        let mut weights = self.prologue.weights();
        weights.push(self.w.clone());
        if let Epilogue::GeluPair { up: Some(up), .. } = &self.epilogue {
            weights.push(up.clone());
        }
        weights
    }

    fn reads(&self) -> Vec<Place> {
        let mut reads = self.prologue.reads();
        reads.extend(self.choices.map(|choices| choices.route));
        if let Epilogue::GeluSlice { other, .. } = &self.epilogue {
            reads.push(other.place);
        }
        reads
    }

    fn writes(&self) -> Vec<Place> {
        let outs: Vec<Place> = match &self.epilogue {
            Epilogue::Plain(parts) => parts.iter().map(|part| part.out).collect(),
            Epilogue::GeluPair { out, .. } | Epilogue::GeluSlice { out, .. } => vec![*out],
        };
        self.prologue.sum().into_iter().chain(outs).collect()
    }
}

#[cfg(test)]
mod tests;
