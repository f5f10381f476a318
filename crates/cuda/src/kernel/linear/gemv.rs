//! Twin of `kernels/linear/gemv.cu`: products of up to 8 rows with a matrix that is read once, with a prologue (norm, residual add)
//! and an epilogue (GELU) in the same launch.
//!
//! The split of an M-tile's inputs over warps is a function of the shape alone, so sums are the same in every bucket of rows
//! and on every card. The number of blocks is free, and chosen so that all are resident and the memory stays busy to the end.

use carat_model::weights::Weight;

use super::prepare_rows::PreparedRows;
use crate::kernel::{Addresses, ColumnSlice, ExpertInput, Kernel, Operand, RowsAt, Specialization};
use crate::{
    device::{Address, Grid},
    kernel::weights::WeightOperand,
    kernel::{
        fragment::{self, FragmentFormat},
        params::{Params, params},
    },
};

mod shape;

use shape::GroupedSize;
pub(crate) use shape::{GemvDevice, GemvShape};

/// The most rows of a launch.
pub(crate) const MAX_ROWS: usize = 8;
/// Stages of a warp's cp.async ring that kernels compiled ahead have.
pub(crate) const USUAL_STAGES: usize = 3;
/// Those of one row in [`GemvShape::alone`].
pub(crate) const ALONE_STAGES: usize = 5;
const ALONE_FORMAT: FragmentFormat = FragmentFormat::Q8;
/// The most blocks of a cluster.
const MAX_CLUSTER: usize = 8;
/// Parts of a joined matrix.
pub(crate) const MAX_PARTS: usize = 3;

params! {
    pub(crate) struct GemvPrologueParams {
        x: Address,
        weight: Address,
        following_weight: Address,
        residual: Address,
        sum: Address,
        kind: u32,
        per_column: f32,
        eps: f32,
        scale: f32,
        following_eps: f32,
        reserved: u32,
    }
}

params! {
    pub(crate) struct OutputRowsParams {
        out: Address,
        first: u32,
        rows: u32,
    }
}

params! {
    pub(crate) struct GemvParams {
        input: GemvPrologueParams,
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
        m_tiles: u32,
        m_tile_bytes: u32,
        stages: u32,
        outputs: u32,
        epilogue: u32,
        other_columns: u32,
        other_column: u32,
        top_k: u32,
        input_per_expert: u32,
        pdl: u32,
        alone: u32,
        rows: RowsAt,
        part_0: OutputRowsParams,
        part_1: OutputRowsParams,
        part_2: OutputRowsParams,
        other: Address,
        route: Address,
        matrix_bytes: u64,
        granule: u32,
        reserved: u32,
    }
}

/// Format of the matrix.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum GemvWeights {
    Fragments(FragmentFormat),
    F16,
    BF16,
    F32,
}

impl GemvWeights {
    pub(crate) fn all() -> impl Iterator<Item = GemvWeights> {
        let floats = [GemvWeights::F16, GemvWeights::BF16, GemvWeights::F32];
        FragmentFormat::ALL
            .into_iter()
            .map(GemvWeights::Fragments)
            .chain(floats)
    }

    pub(crate) fn name(self) -> &'static str {
        match self {
            GemvWeights::Fragments(format) => format.name(),
            GemvWeights::F16 => "f16",
            GemvWeights::BF16 => "bf16",
            GemvWeights::F32 => "f32",
        }
    }

    /// Whether they are multiplied as int8 codes.
    pub(crate) fn are_packed(self) -> bool {
        matches!(self, GemvWeights::Fragments(_))
    }

    /// Output rows that a team of warps takes together.
    fn m_tile(self) -> usize {
        match self {
            GemvWeights::Fragments(_) => fragment::M_TILE,
            _ => 4,
        }
    }

    /// Inputs and bytes of a stage of an M-tile.
    fn stage(self) -> (usize, usize) {
        match self {
            GemvWeights::Fragments(format) => {
                let k_blocks = match format {
                    FragmentFormat::Q8 => 2,
                    FragmentFormat::Q4
                    | FragmentFormat::Q5
                    | FragmentFormat::N4
                    | FragmentFormat::M4
                    | FragmentFormat::M5 => 4,
                    _ => 1,
                };
                (
                    k_blocks * format.k_block_inputs(),
                    k_blocks * format.k_block_bytes(),
                )
            }
            GemvWeights::F16 | GemvWeights::BF16 => (256, 2048),
            GemvWeights::F32 => (128, 2048),
        }
    }

    /// Bytes of an M-tile of fragments, of a row of floats.
    pub(crate) fn m_tile_bytes(self, columns: usize) -> usize {
        match self {
            GemvWeights::Fragments(format) => format.m_tile_bytes(columns),
            GemvWeights::F16 | GemvWeights::BF16 => 2 * columns,
            GemvWeights::F32 => 4 * columns,
        }
    }

    /// Bytes of the input of this many rows in shared memory.
    fn input_bytes(self, padded: usize, rows: usize) -> usize {
        match self {
            GemvWeights::Fragments(format) => {
                let scales = 4 * (1 + usize::from(format.has_minimums())) * padded / 32;
                rows * (padded + 32 + scales)
            }
            _ => rows * 4 * padded,
        }
    }
}

/// Prologue: what is done to the input before the product.
#[derive(Clone, Copy, Debug)]
pub(crate) enum GemvPrologue {
    /// Done by a launch before.
    Ready(PreparedRows),
    None {
        x: Operand,
    },
    Norm {
        x: Operand,
        weight: Option<Weight>,
        eps: f32,
    },
    /// The input is `sum = (residual + norm(x)) * scale`, or its norm; the sum is written, too.
    ResidualNorm {
        x: Operand,
        weight: Option<Weight>,
        eps: f32,
        residual: Operand,
        scale: f32,
        sum: Operand,
        following: Option<GemvPrologueNorm>,
    },
}

/// The norm of a sum.
#[derive(Clone, Copy, Debug)]
pub(crate) struct GemvPrologueNorm {
    pub(crate) weight: Option<Weight>,
    pub(crate) eps: f32,
}

/// Epilogue: what becomes of the product.
#[derive(Clone, Debug)]
pub(crate) enum GemvEpilogue {
    /// Written as it is: output rows of a joined matrix in up to three parts, in order.
    Plain(Vec<OutputRows>),
    /// `gelu(gate) * up`. Fragments of the two alternate M-tile by M-tile in one matrix; floats are two matrices.
    Geglu {
        out: Operand,
        up: Option<WeightOperand>,
    },
    /// The same as prepared rows of the product that follows; of fragments, where [`GemvShape::ends_in_blocks`].
    GegluCodes { out: PreparedRows },
    /// `gelu(y) * other`, a slice of its columns.
    GeluMulSlice { out: Operand, other: ColumnSlice },
}

/// Output rows `first` on of a joined matrix. Of fragments, parts start at whole M-tiles; of floats, at multiples of 4.
#[derive(Clone, Copy, Debug)]
pub(crate) struct OutputRows {
    pub(crate) out: Operand,
    pub(crate) first: usize,
    pub(crate) rows: usize,
}

/// A product with what comes before and after it, for up to [`MAX_ROWS`] rows.
#[derive(Clone, Debug)]
pub(crate) struct Gemv {
    pub(crate) prologue: GemvPrologue,
    /// With routed experts, a stack of matrices.
    pub(crate) w: WeightOperand,
    pub(crate) shape: GemvShape,
    pub(crate) epilogue: GemvEpilogue,
    pub(crate) routed: Option<RoutedExperts>,
    /// Launched with PDL.
    pub(crate) pdl: bool,
    pub(crate) overlap: Overlap,
}

/// How a launch with PDL overlaps those around it, beyond fetching weights. Mirrored by the kernel.
#[expect(
    clippy::struct_excessive_bools,
    reason = "flags, as the kernel has them"
)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Overlap {
    /// The launch behind it starts when the launch before it is over, not sooner.
    pub(crate) late_trigger: bool,
    /// Its input was there before the launch before it started, so it need not wait to prepare it.
    pub(crate) early_input: bool,
    /// Its route was, so it need not wait to fetch weights.
    pub(crate) early_route: bool,
    /// The launch behind it starts when its last weights have been asked for; with several rows it does so anyway.
    pub(crate) last_trigger: bool,
}

impl Overlap {
    fn flags(self, pdl: bool) -> u32 {
        let flags = [
            self.late_trigger,
            self.early_input,
            self.early_route,
            self.last_trigger,
        ];
        let bits = flags
            .iter()
            .zip([2, 4, 8, 16])
            .map(|(&on, bit)| u32::from(on) * bit);
        if pdl { bits.sum::<u32>() + 1 } else { 0 }
    }
}

/// Each row is multiplied with the matrices of a stack that it is routed to. The prologue is no `ResidualNorm` then.
#[derive(Clone, Copy, Debug)]
pub(crate) struct RoutedExperts {
    /// `[rows, 2 * top_k]`: indices of experts, then their weights.
    pub(crate) route: Operand,
    /// Outputs are `[rows, top_k, outputs]`.
    pub(crate) input: ExpertInput,
    /// Whether blocks share all touched experts equally, and each goes on from one to the next, rather than have one each. The input is
    /// prepared rows then, or as it is.
    pub(crate) grouped: bool,
}

/// Kinds of prologue that are compiled apart: the input as it is, or normed in any of three ways.
pub(crate) const INPUTS: [&str; 2] = ["plain", "normed"];
/// The input that a launch before has prepared; it needs no clusters.
const READY: &str = "ready";

pub(crate) fn specializations(clusters: bool) -> impl Iterator<Item = Specialization> {
    let floats = GemvWeights::all().flat_map(move |weights| {
        INPUTS.map(|input| specialization(weights, input, clusters, false))
    });
    let codes = FragmentFormat::ALL.map(GemvWeights::Fragments).into_iter();
    floats.chain(codes.map(move |weights| specialization(weights, INPUTS[1], clusters, true)))
}

/// Those of prepared inputs.
pub(crate) fn ready_specializations() -> impl Iterator<Item = Specialization> {
    let packed = FragmentFormat::ALL.map(GemvWeights::Fragments).into_iter();
    packed
        .flat_map(|weights| [false, true].map(|codes| specialization(weights, READY, false, codes)))
}

/// Those of [`GemvShape::alone`].
pub(crate) fn alone_specializations() -> impl Iterator<Item = Specialization> {
    let kinds = [
        (INPUTS[0], false),
        (INPUTS[1], false),
        (INPUTS[1], true),
        (READY, false),
        (READY, true),
    ];
    kinds.into_iter().map(|(input, codes)| {
        let rings = [ALONE_STAGES, USUAL_STAGES];
        let kind = (GemvWeights::Fragments(ALONE_FORMAT), input);
        with_rings(rings, kind, input != READY, codes)
    })
}

/// With `codes`, outputs are those of [`GemvEpilogue::GegluCodes`].
pub(crate) fn specialization(
    weights: GemvWeights,
    input: &str,
    clusters: bool,
    codes: bool,
) -> Specialization {
    with_rings([USUAL_STAGES; 2], (weights, input), clusters, codes)
}

/// The same with rings of so many stages, for one row and for more.
fn with_rings(
    [alone, ring]: [usize; 2],
    (weights, input): (GemvWeights, &str),
    clusters: bool,
    codes: bool,
) -> Specialization {
    Specialization {
        kernel: "gemv",
        entries: &[
            "gemv_1",
            "gemv_2",
            "gemv_4",
            "gemv_8",
            "gemv_routed_1",
            "gemv_routed_2",
            "gemv_routed_4",
            "gemv_routed_8",
            "gemv_grouped",
        ],
        constants: vec![
            ("WEIGHTS", weights.name().to_owned()),
            ("RING", ring.to_string()),
            ("RING_1", alone.to_string()),
            ("INPUT", input.to_owned()),
            ("CLUSTER", (usize::from(clusters) * MAX_CLUSTER).to_string()),
            ("M_TILE_STAGE_BYTES", weights.stage().1.to_string()),
            ("CODES", u32::from(codes).to_string()),
        ],
        params_bytes: GemvParams::BYTES,
    }
}

/// Those of `gemv_grouped`.
pub(crate) fn grouped_specializations() -> impl Iterator<Item = Specialization> {
    let packed = FragmentFormat::ALL.map(GemvWeights::Fragments).into_iter();
    packed.flat_map(|weights| [false, true].map(|ready| grouped_specialization(weights, ready)))
}

/// Experts of many rows, with prepared rows or with the input as it is.
fn grouped_specialization(weights: GemvWeights, ready: bool) -> Specialization {
    let size = GroupedSize::of(weights, ready);
    let input = if ready { READY } else { INPUTS[0] };
    let mut grouped = with_rings([size.ring; 2], (weights, input), false, false);
    let more = [("GROUPED", 1), ("GROUPED_REGISTERS", size.registers)];
    let more = more.map(|(name, value)| (name, value.to_string()));
    grouped.constants.extend(more);
    grouped
}

impl GemvPrologue {
    pub(crate) fn norms(&self) -> bool {
        matches!(
            self,
            GemvPrologue::Norm { .. } | GemvPrologue::ResidualNorm { .. }
        )
    }

    /// The kind that is compiled for it.
    pub(super) fn input(&self) -> &'static str {
        match self {
            GemvPrologue::Ready(_) => READY,
            GemvPrologue::None { .. } => INPUTS[0],
            GemvPrologue::Norm { .. } | GemvPrologue::ResidualNorm { .. } => INPUTS[1],
        }
    }

    pub(super) fn params(&self, at: &Addresses, columns: usize) -> GemvPrologueParams {
        let mut params = GemvPrologueParams {
            x: Address::NULL,
            weight: Address::NULL,
            following_weight: Address::NULL,
            residual: Address::NULL,
            sum: Address::NULL,
            kind: 0,
            per_column: 1.0 / columns as f32,
            eps: 0.0,
            scale: 1.0,
            following_eps: 0.0,
            reserved: 0,
        };
        match *self {
            GemvPrologue::Ready(rows) => {
                [params.x, params.weight, params.following_weight] = rows.addresses(at);
            }
            GemvPrologue::None { x } => params.x = at.operand(x),
            GemvPrologue::Norm { x, weight, eps } => {
                params.x = at.operand(x);
                params.weight = at.vector(weight);
                params.eps = eps;
                params.kind = 1;
            }
            GemvPrologue::ResidualNorm {
                x,
                weight,
                eps,
                residual,
                scale,
                sum,
                following,
            } => {
                params.x = at.operand(x);
                params.weight = at.vector(weight);
                params.eps = eps;
                params.residual = at.operand(residual);
                params.scale = scale;
                params.sum = at.operand(sum);
                params.kind = 2;
                if let Some(norm) = following {
                    params.following_weight = at.vector(norm.weight);
                    params.following_eps = norm.eps;
                    params.kind = 3;
                }
            }
        }
        params
    }

    pub(super) fn reads(&self) -> Vec<Operand> {
        match *self {
            GemvPrologue::Ready(rows) => vec![rows.at],
            GemvPrologue::None { x } | GemvPrologue::Norm { x, .. } => vec![x],
            GemvPrologue::ResidualNorm { x, residual, .. } => vec![x, residual],
        }
    }

    pub(super) fn weights(&self) -> Vec<WeightOperand> {
        match *self {
            GemvPrologue::Ready(_) | GemvPrologue::None { .. } => vec![],
            GemvPrologue::Norm { weight, .. } => WeightOperand::vectors([weight]),
            GemvPrologue::ResidualNorm {
                weight, following, ..
            } => WeightOperand::vectors([weight, following.and_then(|n| n.weight)]),
        }
    }

    pub(super) fn sum(&self) -> Option<Operand> {
        match *self {
            GemvPrologue::ResidualNorm { sum, .. } => Some(sum),
            _ => None,
        }
    }
}

impl OutputRowsParams {
    const NONE: OutputRowsParams = OutputRowsParams {
        out: Address::NULL,
        first: u32::MAX,
        rows: 0,
    };
}

impl GemvShape {
    /// What is compiled for it, with this kind of input.
    pub(crate) fn specialization(self, input: &str) -> Specialization {
        let clusters = self.card.clusters.is_some() && !self.ready;
        let rings = [self.ring(1), self.ring(MAX_ROWS)];
        with_rings(rings, (self.weights, input), clusters, self.codes)
    }

    /// What is compiled for `gemv_grouped`.
    fn grouped_specialization(self) -> Specialization {
        grouped_specialization(self.weights, self.ready)
    }

    /// Params of a plain product without addresses: what follows from the shape.
    pub(crate) fn params(self, rows: RowsAt, input: GemvPrologueParams, w: Address) -> GemvParams {
        let (split, teams) = self.teams();
        let a_block = |rows: usize| {
            self.blocks(rows)
                .map_or(0, |blocks| self.a_block(blocks) as u32)
        };
        GemvParams {
            rows,
            input,
            w,
            up: Address::NULL,
            part_0: OutputRowsParams::NONE,
            part_1: OutputRowsParams::NONE,
            part_2: OutputRowsParams::NONE,
            other: Address::NULL,
            route: Address::NULL,
            matrix_bytes: 0,
            columns: self.columns as u32,
            padded: self.padded() as u32,
            outputs: self.outputs as u32,
            m_tiles: self.m_tiles() as u32,
            m_tile_bytes: self.weights.m_tile_bytes(self.columns) as u32,
            stages: self.stages() as u32,
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
            input_per_expert: 0,
            pdl: 0,
            alone: self.blocks(1).map_or(0, |blocks| self.shares(blocks)),
            granule: self.granule() as u32,
            reserved: 0,
        }
    }
}

impl Kernel for Gemv {
    fn specialization(&self) -> Specialization {
        match self.routed {
            Some(routed) if routed.grouped => self.shape.grouped_specialization(),
            _ => self.shape.specialization(self.prologue.input()),
        }
    }

    fn grid(&self, rows: usize) -> Grid {
        let grid = match self.routed {
            None => self.shape.grid(rows),
            Some(routed) if routed.grouped => self.shape.grouped_grid(),
            Some(_) => self.shape.routed_grid(rows),
        };
        Grid {
            pdl: self.pdl,
            ..grid
        }
    }

    fn params(&self, at: &Addresses, rows: RowsAt) -> Vec<u8> {
        let input = self.prologue.params(at, self.shape.columns);
        let mut params = self.shape.params(rows, input, at.matrix(&self.w).start);
        let whole = |out: Operand| OutputRowsParams {
            out: at.operand(out),
            first: 0,
            rows: self.shape.outputs as u32,
        };
        match &self.epilogue {
            GemvEpilogue::Plain(parts) => {
                assert!(parts.len() <= MAX_PARTS, "{} parts", parts.len());
                let part = |i: usize| {
                    parts
                        .get(i)
                        .map_or(OutputRowsParams::NONE, |part| OutputRowsParams {
                            out: at.operand(part.out),
                            first: part.first as u32,
                            rows: part.rows as u32,
                        })
                };
                (params.part_0, params.part_1, params.part_2) = (part(0), part(1), part(2));
            }
            GemvEpilogue::Geglu { out, up } => {
                params.part_0 = whole(*out);
                params.up = up.as_ref().map_or(Address::NULL, |up| at.matrix(up).start);
                params.epilogue = 1;
            }
            GemvEpilogue::GegluCodes { out } => {
                params.part_0 = whole(out.at);
                params.other_columns = out.padded as u32;
            }
            GemvEpilogue::GeluMulSlice { out, other } => {
                params.part_0 = whole(*out);
                params.other = at.operand(other.operand);
                params.other_columns = other.columns as u32;
                params.other_column = other.column as u32;
                params.epilogue = 2;
            }
        }
        if let Some(routed) = self.routed {
            params.route = at.operand(routed.route);
            params.matrix_bytes = at.matrix(&self.w).matrix_bytes as u64;
            params.top_k = self.shape.top_k.unwrap_or(1) as u32;
            params.input_per_expert = u32::from(routed.input == ExpertInput::PerExpert);
        }
        params.pdl = self.overlap.flags(self.pdl);
        params.bytes()
    }

    fn weights(&self) -> Vec<WeightOperand> {
        let mut weights = self.prologue.weights();
        weights.push(self.w.clone());
        if let GemvEpilogue::Geglu { up: Some(up), .. } = &self.epilogue {
            weights.push(up.clone());
        }
        weights
    }

    fn delay_trigger(&mut self) -> bool {
        self.overlap.late_trigger = true;
        self.pdl
    }

    fn reads(&self) -> Vec<Operand> {
        let mut reads = self.prologue.reads();
        reads.extend(self.routed.map(|routed| routed.route));
        if let GemvEpilogue::GeluMulSlice { other, .. } = &self.epilogue {
            reads.push(other.operand);
        }
        reads
    }

    fn writes(&self) -> Vec<Operand> {
        let outs: Vec<Operand> = match &self.epilogue {
            GemvEpilogue::Plain(parts) => parts.iter().map(|part| part.out).collect(),
            GemvEpilogue::GegluCodes { out } => vec![out.at],
            GemvEpilogue::Geglu { out, .. } | GemvEpilogue::GeluMulSlice { out, .. } => vec![*out],
        };
        self.prologue.sum().into_iter().chain(outs).collect()
    }
}

#[cfg(test)]
pub(crate) mod tests;
