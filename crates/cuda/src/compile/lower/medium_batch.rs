//! Medium batches: few enough rows that weights cost more than arithmetic, too many for a GEMV. Products with large matrices, on
//! other cards than Hopper of up to 16 rows, read packed weights and f16 activations, each weight once; attention splits keys, since a
//! row that decodes is no tile of queries. All else is lowered as for large batches.

use carat_model::weights::Weight;

use super::{
    Lowering, ScratchBytes,
    large_batch::{Materialized, ProductOut, f16_operand},
};
use crate::{
    compile::{
        call::Buckets,
        fuse::{Attend, LinearPart, Op},
        rows::{MEDIUM_ROWS, RowClass, buckets},
        target::GemmImpl,
    },
    kernel::{
        Activation, ColumnSlice, Columns, DecodeOut, FlashDecode, GemmMedium, GemmMediumEpilogue,
        GemmMediumKernel, GemmMediumOut, GemmMediumShape, HeadNorm, Heads, Operand, PleBranch,
        PleProduct, WeightFormat, WeightOperand, activation::tile_bytes, fragment::FragmentFormat,
    },
};

/// The largest bucket of which `gemm_medium` multiplies packed weights as they are, where cuBLASLt is there to multiply f16 copies.
/// Measured on an H200 beside its time for large matrices: 0.6 to 0.85 at 16 rows, 1.1 at 32, 1.6 to 1.9 at 64.
const PACKED_ROWS: usize = 16;

impl Lowering<'_> {
    fn packed_rows(&self) -> usize {
        match self.medium_kernel() {
            GemmMediumKernel::Warps => PACKED_ROWS,
            GemmMediumKernel::Warpgroups => MEDIUM_ROWS,
        }
    }

    pub(super) fn medium_kernel(&self) -> GemmMediumKernel {
        if self.target.hopper {
            GemmMediumKernel::Warpgroups
        } else {
            GemmMediumKernel::Warps
        }
    }

    /// Scratch for token tiles, or as many rows as there may be.
    pub(super) fn tile_scratch(&mut self, name: &'static str, columns: usize) -> Operand {
        let bytes = ScratchBytes {
            per_row: 2 * columns,
            fixed: tile_bytes(columns),
        };
        self.scratch.operand(name, bytes)
    }

    /// Buckets that multiply packed weights.
    pub(super) fn packed_buckets(&self) -> Buckets {
        Buckets::up_to(self.packed_rows())
    }

    fn fragment_format(&self, part: LinearPart) -> Option<FragmentFormat> {
        FragmentFormat::of(self.weights.matrix(part.w).quant)
    }

    /// Whether these matrices are multiplied as they are packed.
    pub(super) fn reads_packed(&self, parts: &[LinearPart]) -> bool {
        let packed = |part: &LinearPart| {
            let matrix = self.weights.matrix(part.w);
            let inputs = match self.medium_kernel() {
                GemmMediumKernel::Warps => 32,
                GemmMediumKernel::Warpgroups => 64,
            };
            let fits = matrix.count == 1 && matrix.columns.is_multiple_of(inputs);
            fits && self.fragment_format(*part).is_some()
        };
        let weights: usize = (parts.iter())
            .map(|part| self.weights.matrix(part.w))
            .map(|matrix| matrix.rows * matrix.columns)
            .sum();
        // The native GEMM has no f16 copies to leave aside, and reads packed weights itself.
        let target = self.class == RowClass::Medium && self.gemm_impl(parts) == GemmImpl::CublasLt;
        target && weights >= self.choices.packed_from && parts.iter().all(packed)
    }

    /// Buckets that multiply the copies, beside those that multiply packed weights; none if there are no larger ones.
    pub(super) fn f16_buckets(&self, packed: bool) -> Option<Buckets> {
        match packed {
            false => Some(Buckets::ALL),
            true if self.target.max_rows > self.packed_rows() => {
                Some(Buckets::above(self.packed_rows()))
            }
            true => None,
        }
    }

    /// The one format of gate and up, if both are multiplied as they are packed, by one product.
    pub(super) fn packed_pair(&self, parts: &[LinearPart]) -> Option<FragmentFormat> {
        let [gate, up] = parts else {
            return None;
        };
        let format = self.fragment_format(*gate)?;
        let alike = self.fragment_format(*up) == Some(format)
            && self.weights.matrix(gate.w).rows == self.weights.matrix(up.w).rows;
        (alike && self.reads_packed(parts)).then_some(format)
    }

    /// Gates and ups in f16, `scale` times their values.
    pub(super) fn packed_gate_up(
        &mut self,
        format: FragmentFormat,
        parts: &[LinearPart],
        x: Operand,
        out: Operand,
        scale: f32,
    ) -> GemmMedium {
        let matrices: Vec<Weight> = parts.iter().map(|p| p.w).collect();
        let outputs = matrices.iter().map(|w| self.weights.matrix(*w).rows).sum();
        let shape = self.medium_shape(format, GemmMediumEpilogue::F16Pair, matrices[0], outputs);
        let w = WeightOperand::interleaved(&matrices);
        let out = GemmMediumOut::F16Pair { out, scale };
        self.gemm_medium(shape, x, w, out, Scaled::Yes)
    }

    /// Parts side by side, as f32; neighbours of one format in one launch.
    pub(super) fn packed_products(
        &mut self,
        label: &str,
        op: &Op,
        parts: &[LinearPart],
        input: Materialized,
        target: ProductOut,
    ) {
        let runs = self.joined_parts(parts);
        let scaled = match input.factor {
            Some(_) => Scaled::Yes,
            None => Scaled::No,
        };
        let mut column = 0;
        for run in &runs {
            let outputs: usize = run
                .iter()
                .map(|part| self.weights.matrix(part.w).rows)
                .sum();
            let format = self.fragment_format(run[0]).expect("all parts are packed");
            let matrices: Vec<Weight> = run.iter().map(|p| p.w).collect();
            let shape = self.medium_shape(format, GemmMediumEpilogue::F32, matrices[0], outputs);
            let out = GemmMediumOut::F32 {
                out: target.operand,
                column,
                stride: target.stride,
            };
            let w = WeightOperand::stacked(&matrices, WeightFormat::Fragments);
            let kernel = self.gemm_medium(shape, f16_operand(input.activation), w, out, scaled);
            let named = if runs.len() > 1 {
                self.product_label(op, run)
            } else {
                label.to_owned()
            };
            self.call(&named, op.rows, kernel);
            column += outputs;
        }
    }

    /// Attention with keys split, over keys and values that are stored before it: a row may see others of its batch. Writes
    /// `activation`, which is f16, or the value; `None` where the kernel does not take such heads.
    pub(super) fn medium_attend(
        &mut self,
        op: &Op,
        attend: &Attend,
        activation: Option<Activation>,
    ) -> Option<()> {
        let slot = self.plan.slot(attend.slot);
        let (head_dim, window) = (slot.head_dim, slot.window);
        let count = self.plan.columns(attend.out) / head_dim;
        let heads = Heads {
            count,
            kv_count: slot.kv_heads,
            head_dim,
            kv: self.kv(attend.slot),
            turning_pairs: self.turning_pairs(attend.slot),
            wide_steps: self.wide_steps(attend.slot, count),
        };
        if !FlashDecode::takes(heads) {
            return None;
        }
        if let Some(store) = &attend.store {
            self.large_qkv(op, None, Some(store))?;
            self.origin = op.origin;
        }
        let (mut partials, mut arrivals) = (0, 0);
        for rows in buckets(MEDIUM_ROWS) {
            let needed = FlashDecode::bucket_words(heads, window, rows);
            partials = partials.max(4 * needed.0);
            arrivals = arrivals.max(4 * needed.1);
        }
        let fixed = |fixed: usize| ScratchBytes { per_row: 0, fixed };
        let q = self.columns_of(attend.q.x);
        let kernel = FlashDecode {
            q: Columns {
                operand: q.of,
                first: q.column,
                stride: q.stride,
            },
            q_norm: HeadNorm {
                weight: attend.q.weight,
                eps: attend.q.eps,
            },
            own_kv: None,
            rope: attend.rope,
            slot: attend.slot,
            heads,
            window,
            partials: self.scratch.operand("attention partials", fixed(partials)),
            arrivals: self.scratch.operand("attention arrivals", fixed(arrivals)),
            out: match activation {
                Some(Activation::F16(f16)) => DecodeOut::F16(f16),
                Some(Activation::F16Tiles(tiles)) => DecodeOut::Tiles(tiles),
                _ => DecodeOut::F32(Operand::Value(attend.out)),
            },
            pdl: self.pdl(),
        };
        self.call(&op.label, op.rows, kernel);
        if let Some(activation) = activation {
            let materialized = Materialized {
                activation,
                factor: None,
                scale: 1.0,
            };
            self.large.materialized.insert(attend.out, materialized);
        }
        Some(())
    }

    /// The gate of per-layer embeddings, where it has a kernel of its own that writes such an activation.
    pub(super) fn ple_gate(
        &self,
        parts: &[LinearPart],
        input: Materialized,
        (slice, out): (ColumnSlice, Activation),
    ) -> Option<PleBranch> {
        let ([part], Activation::F16(out)) = (parts, out) else {
            return None;
        };
        let matrix = self.weights.matrix(part.w);
        let sizes = (matrix.columns, matrix.rows);
        self.ple_product(PleProduct::Gate(slice), *part, input, sizes, out)
    }

    /// The product behind it.
    pub(super) fn ple_proj(
        &self,
        parts: &[LinearPart],
        input: Materialized,
        target: ProductOut,
    ) -> Option<PleBranch> {
        let [part] = parts else {
            return None;
        };
        let matrix = self.weights.matrix(part.w);
        let sizes = (matrix.rows, matrix.columns);
        let whole = target.stride == matrix.rows;
        let kernel = self.ple_product(PleProduct::Proj, *part, input, sizes, target.operand);
        kernel.filter(|_| whole)
    }

    fn ple_product(
        &self,
        product: PleProduct,
        part: LinearPart,
        input: Materialized,
        (columns, width): (usize, usize),
        out: Operand,
    ) -> Option<PleBranch> {
        let Activation::F16(x) = input.activation else {
            return None;
        };
        let ours = self.class == RowClass::Medium && self.target.hopper;
        let copied = self.gemm_impl(&[part]) == GemmImpl::CublasLt && input.factor.is_none();
        (ours && copied && PleBranch::takes(columns, width)).then(|| PleBranch {
            product,
            x,
            w: WeightOperand::one(part.w, WeightFormat::F16),
            out,
            columns,
            pdl: self.pdl(),
        })
    }

    fn medium_shape(
        &self,
        format: FragmentFormat,
        epilogue: GemmMediumEpilogue,
        w: Weight,
        outputs: usize,
    ) -> GemmMediumShape {
        GemmMediumShape {
            format,
            epilogue,
            columns: self.weights.matrix(w).columns,
            outputs,
            multiprocessors: self.target.multiprocessors,
            shared_bytes: self.target.shared_bytes,
            clusters: self.target.clusters,
            kernel: self.medium_kernel(),
        }
    }

    fn gemm_medium(
        &mut self,
        shape: GemmMediumShape,
        x: Operand,
        w: WeightOperand,
        out: GemmMediumOut,
        scaled: Scaled,
    ) -> GemmMedium {
        let needed = shape.scratch(self.target.max_rows.min(MEDIUM_ROWS));
        let fixed = |fixed: usize| ScratchBytes { per_row: 0, fixed };
        let pdl = self.product_pdl(shape.columns * shape.outputs);
        GemmMedium {
            shape,
            x,
            w,
            out,
            partials: self
                .scratch
                .operand("product partials", fixed(needed.partials)),
            arrivals: self
                .scratch
                .operand("product arrivals", fixed(needed.arrivals)),
            scaled: scaled == Scaled::Yes,
            pdl,
        }
    }
}

/// Whether one factor per row is still missing from a product.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Scaled {
    Yes,
    No,
}
