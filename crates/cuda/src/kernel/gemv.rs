//! Twin of `kernels/gemv.cu`: products of up to 8 rows with a matrix that is read once.
//!
//! How warps share a strip's inputs is a function of the shape alone, so sums are the same in every bucket of rows and on
//! every card. How many blocks there are is free, and chosen so that all are resident and the memory stays busy to the end.

use carat_model::weights::Weight;

use super::{Addresses, Kernel, Place, RowsAt, Second, Specialization};
use crate::{
    device::Address,
    launch::Grid,
    panels::{self, PanelFormat},
    params::{Params, params},
    weights::Packed,
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
        eps: f32,
        by: f32,
        next_eps: f32,
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
        rows: RowsAt,
        input: PrologueParams,
        w: Address,
        up: Address,
        part_0: PartParams,
        part_1: PartParams,
        part_2: PartParams,
        other: Address,
        route: Address,
        matrix_bytes: u64,
        columns: u32,
        outputs: u32,
        strips: u32,
        strip_bytes: u32,
        split: u32,
        epilogue: u32,
        other_columns: u32,
        other_column: u32,
        top_k: u32,
        choices_summed: u32,
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
    fn input_bytes(self, columns: usize, rows: usize) -> usize {
        match self {
            GemvForm::Panel(format) => {
                let padded = columns.next_multiple_of(format.unit_inputs());
                let mins = matches!(format, PanelFormat::K4 | PanelFormat::K5);
                let scales = 4 * (1 + usize::from(mins)) * padded / 32;
                rows * (padded + 32 + scales)
            }
            _ => rows * 4 * columns.next_multiple_of(self.stage().0),
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
    /// Of the card.
    pub(crate) multiprocessors: usize,
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
        self.columns.div_ceil(self.form.stage().0) * self.summed
    }

    /// Warps that share a strip, and how many such teams a block has.
    fn teams(self) -> (usize, usize) {
        let stages = self.stages();
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

    fn shared_bytes(self, rows: usize, blocks: usize) -> usize {
        let (split, teams) = self.teams();
        let most = (self.strips() / self.granule()).div_ceil(blocks) * self.granule();
        let batch = match rows {
            1 | 2 => 8,
            4 => 4,
            _ => 2,
        };
        let batch = (batch * teams).min(most);
        let partials = 2 * batch * split * rows * self.form.strip() * 4;
        split * teams * RING * self.form.stage().1
            + partials
            + self.form.input_bytes(self.columns * self.summed, rows)
    }

    /// Blocks for a bucket of rows, `beside` such sets of blocks running at once.
    fn blocks(self, rows: usize, beside: usize) -> usize {
        // Of the smallest card we know of these kinds; registers bound blocks, too.
        const SHARED: usize = 226 << 10;
        let registers = if rows == 1 { 96 } else { 120 };
        let granules = self.strips() / self.granule();
        let in_flight = self.warps() * RING * self.form.stage().1;
        let fit = |blocks: usize| {
            let by_shared = SHARED / (self.shared_bytes(rows, blocks) + 2048);
            let by_registers = 65536 / (registers * 32 * self.warps());
            by_shared.min(by_registers).max(1) * self.multiprocessors
        };
        // How much of the bandwidth this many blocks draw.
        let rate = |blocks: usize| {
            let bytes = (blocks * in_flight) as f64 / (36e3 * self.multiprocessors as f64);
            let wide = blocks as f64 / (0.6 * self.multiprocessors as f64);
            bytes.min(wide).min(1.0)
        };
        let cost = |blocks: usize| {
            let (whole, rest) = (granules / blocks, granules % blocks);
            let mut cost = (whole * blocks * beside) as f64 / rate(blocks * beside);
            if rest > 0 {
                cost += (rest * beside) as f64 / rate(rest * beside);
            }
            cost
        };
        let fitting = (1..=granules).filter(|&b| b == 1 || b * beside <= fit(b));
        fitting
            .min_by(|&a, &b| cost(a).total_cmp(&cost(b)))
            .expect("at least one block")
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
        let rows = rows.next_power_of_two();
        self.grid_of(rows, self.blocks(rows, 1))
    }

    /// The grid of `gemv_chosen` for this many sets of blocks, each with a row of its own.
    fn chosen_grid(self, sets: usize) -> Grid {
        let grid = self.grid_of(1, self.blocks(1, sets));
        Grid {
            entry: 4,
            blocks: (grid.blocks.0, sets),
            ..grid
        }
    }
}

impl Choices {
    /// Sets of blocks a row.
    fn sets(self) -> usize {
        match self.kind {
            ChoicesKind::Each => self.top_k,
            ChoicesKind::Summed => 1,
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

pub(super) fn specialization(form: GemvForm) -> Specialization {
    Specialization {
        kernel: "gemv",
        entries: &["gemv_1", "gemv_2", "gemv_4", "gemv_8", "gemv_chosen"],
        constants: vec![
            ("WEIGHTS", form.name().to_owned()),
            ("RING", RING.to_string()),
            ("INPUT_FIRST", "1".to_owned()),
        ],
        params_bytes: GemvParams::BYTES,
    }
}

impl Prologue {
    fn params(&self, at: &Addresses) -> PrologueParams {
        let mut params = PrologueParams {
            x: Address::NULL,
            weight: Address::NULL,
            next_weight: Address::NULL,
            a: Address::NULL,
            sum: Address::NULL,
            kind: 0,
            eps: 0.0,
            by: 1.0,
            next_eps: 0.0,
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
            outputs: self.outputs as u32,
            strips: self.strips() as u32,
            strip_bytes: self.form.strip_bytes(self.columns) as u32,
            split: self.teams().0 as u32,
            epilogue: 0,
            other_columns: 0,
            other_column: 0,
            top_k: 0,
            choices_summed: 0,
        }
    }
}

impl Kernel for Gemv {
    fn specialization(&self) -> Specialization {
        specialization(self.shape.form)
    }

    fn grid(&self, rows: usize) -> Grid {
        match self.choices {
            None => self.shape.grid(rows),
            Some(choices) => self.shape.chosen_grid(rows * choices.sets()),
        }
    }

    fn params(&self, at: &Addresses, rows: RowsAt) -> Vec<u8> {
        let mut params = self
            .shape
            .params(rows, self.prologue.params(at), at.matrix(&self.w).start);
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
