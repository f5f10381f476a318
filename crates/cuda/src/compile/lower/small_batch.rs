//! Small batches: every product is a GEMV that streams its weights once, with norms and residual adds as its prologue and GELU as
//! its epilogue; attention is one launch from raw projections to outputs.

use carat_gguf::QuantType;
use carat_model::{
    backend::BackendError,
    plan::{Rows, Step, Value},
    weights::Weight,
};

use super::{Lowering, ScratchBytes};
use crate::{
    compile::{
        call::Buckets,
        fuse::{
            Attend, Epilogue, FollowingNorm, LinearPart, Op, Product, Prologue, ResidualNorm,
            RowNorm, StoreKv, Work,
        },
        rows::SMALL_ROWS,
    },
    kernel::{
        ColumnSlice, Columns, DecodeOut, FlashDecode, Gemv, GemvDevice, GemvEpilogue, GemvPrologue,
        GemvPrologueNorm, GemvShape, GemvWeights, HeadNorm, Heads, KvNormRopeStore, MAX_HEAD_DIM,
        Operand, OutputRows, Overlap, OwnKv, PrepareRows, PreparedRows, WeightFormat,
        WeightOperand,
        fragment::{FragmentFormat, M_TILE},
    },
};

/// Alignment of parts of joined float matrices, in rows.
const FLOAT_M_TILE: usize = 4;
/// Columns of float matrices come in multiples of the values of 16 bytes.
const FLOAT_COLUMNS: usize = 8;

impl Lowering<'_> {
    pub(super) fn small_batch(&mut self, op: &Op) -> Result<(), BackendError> {
        let done = match &op.work {
            Work::Product(product) => self
                .host_product(op, product)
                .or_else(|| self.small_product(op, product)),
            Work::ResidualNorm(residual_norm) => self.large_residual_norm(op, residual_norm),
            Work::Attend(attend) => self.small_attend(op, attend),
            Work::LayerInputs(inputs) => {
                self.ple_inputs(op, inputs);
                Some(())
            }
            Work::Route(routing) => self.route(op, routing),
            Work::Experts(experts) => self
                .host_experts(op, experts)
                .or_else(|| self.small_experts(op, experts)),
            Work::Step(_) => None,
            Work::StoreKv(store) => self.store_kv(op, store),
        };
        if done.is_none() {
            self.plainly(op)?;
        }
        Ok(())
    }

    /// The GEMV that streams a matrix, and the format it wants.
    pub(super) fn gemv_format(&self, w: Weight) -> Option<(GemvWeights, WeightFormat)> {
        let matrix = self.weights.matrix(w);
        if let Some(format) = FragmentFormat::of(matrix.quant) {
            return Some((GemvWeights::Fragments(format), WeightFormat::Fragments));
        }
        let format = match matrix.quant {
            QuantType::F16 => (GemvWeights::F16, WeightFormat::File),
            QuantType::BF16 => (GemvWeights::BF16, WeightFormat::File),
            QuantType::F32 if self.weights.is_exact_bf16(w) => {
                (GemvWeights::BF16, WeightFormat::Bf16)
            }
            QuantType::F32 => (GemvWeights::F32, WeightFormat::File),
            _ => (GemvWeights::F16, WeightFormat::F16),
        };
        matrix
            .columns
            .is_multiple_of(FLOAT_COLUMNS)
            .then_some(format)
    }

    fn small_product(&mut self, op: &Op, product: &Product) -> Option<()> {
        // Parts of one format are one product.
        let mut runs: Vec<(GemvWeights, WeightFormat, Vec<LinearPart>)> = Vec::new();
        for part in &product.parts {
            let (gemv, format) = self.gemv_format(part.w)?;
            match runs.last_mut() {
                Some((last, _, parts)) if *last == gemv => parts.push(*part),
                _ => runs.push((gemv, format, vec![*part])),
            }
        }
        let prologue = self.prologue(op, product, runs[0].0)?;
        match (product.epilogue, runs.as_slice()) {
            (Epilogue::Nothing, _) => {
                for (gemv, format, parts) in &runs {
                    self.gemv_parts(op, prologue, (*gemv, *format), parts);
                }
            }
            (Epilogue::Geglu { out }, [(gemv, format, parts)]) => {
                let (gate, up) = (parts[0], parts[1]);
                let (w, up) = match gemv {
                    GemvWeights::Fragments(_) => {
                        (WeightOperand::interleaved(&[gate.w, up.w]), None)
                    }
                    _ => (
                        WeightOperand::one(gate.w, *format),
                        Some(WeightOperand::one(up.w, *format)),
                    ),
                };
                let outputs = self.plan.columns(out);
                let shape = GemvShape {
                    normed: prologue.norms(),
                    ..self.shape(gate.w, *gemv, outputs, true)
                };
                let epilogue = match self.prepared_inner(out, shape) {
                    Some(out) => GemvEpilogue::GegluCodes { out },
                    None => GemvEpilogue::Geglu {
                        out: Operand::Value(out),
                        up,
                    },
                };
                self.gemv(op, &parts.clone(), prologue, w, (*gemv, outputs), epilogue);
            }
            (Epilogue::Geglu { .. }, _) => {
                for (gemv, format, parts) in &runs {
                    self.gemv_parts(op, prologue, (*gemv, *format), parts);
                }
                self.step(self.last_step(op)).ok()?;
            }
            (Epilogue::GeluMulSlice { other, column, out }, _) => {
                let (gemv, format, parts) = runs[0].clone();
                let epilogue = GemvEpilogue::GeluMulSlice {
                    out: Operand::Value(out),
                    other: ColumnSlice {
                        operand: Operand::Value(other),
                        columns: self.plan.columns(other),
                        column,
                    },
                };
                let (w, outputs) = (
                    WeightOperand::one(parts[0].w, format),
                    self.plan.columns(out),
                );
                self.gemv(op, &parts, prologue, w, (gemv, outputs), epilogue);
            }
        }
        Some(())
    }

    /// The shape of a product with matrices like this one.
    fn shape(&self, w: Weight, gemv: GemvWeights, outputs: usize, pair: bool) -> GemvShape {
        GemvShape {
            weights: gemv,
            columns: self.weights.matrix(w).columns,
            outputs,
            pair,
            codes: false,
            top_k: None,
            ready: false,
            normed: false,
            card: self.card(),
        }
    }

    /// The matrix that a value is multiplied with, such as down a network's inner values, if nothing else reads it.
    pub(super) fn only_reader(&self, value: Value) -> Option<LinearPart> {
        let reader = self.ops.iter().find_map(|op| match &op.work {
            Work::Product(p) if p.input == Prologue::Value(value) => match p.parts.as_slice() {
                [reader] if p.epilogue == Epilogue::Nothing => Some(*reader),
                _ => None,
            },
            _ => None,
        })?;
        let reads = |op: &Op| matches!(&op.work, Work::Product(p) if p.parts[0] == reader);
        self.only_for(value, reads).then_some(reader)
    }

    /// Where a network's inner values go as prepared rows: where down alone reads them, and blocks of gate and up end in whole blocks of
    /// 32 whatever the number of rows.
    fn prepared_inner(&mut self, inner: Value, shape: GemvShape) -> Option<PreparedRows> {
        let whole = |rows: usize| {
            let ready = rows >= self.choices.prepared_from;
            let by_chance = GemvShape { ready, ..shape };
            let codes = GemvShape {
                codes: true,
                ..by_chance
            };
            // Elsewhere than on Hopper, blocks of other sizes than the best were not measured.
            codes.ends_in_blocks(rows) && (self.target.hopper || by_chance.ends_in_blocks(rows))
        };
        if !shape.weights.are_packed() || ![1, 2, 4, 8].into_iter().all(whole) {
            return None;
        }
        // The host reads floats.
        if self.begun.contains_key(&inner) {
            return None;
        }
        self.prepared_for_reader("prepared inner rows", inner)
    }

    /// Where a value goes as prepared rows: where one packed product alone reads it, whose last stage ends with it.
    fn prepared_for_reader(&mut self, name: &'static str, value: Value) -> Option<PreparedRows> {
        let reader = self.only_reader(value)?;
        let (gemv, _) = self.gemv_format(reader.w)?;
        let padded = self
            .shape(reader.w, gemv, self.plan.columns(reader.out), false)
            .padded();
        if !gemv.are_packed() || padded != self.plan.columns(value) {
            return None;
        }
        let bytes = ScratchBytes {
            per_row: 0,
            fixed: PreparedRows::bytes(padded),
        };
        let at = self.scratch.operand(name, bytes);
        let rows = PreparedRows { at, padded };
        self.prepared.insert(value, rows);
        Some(rows)
    }

    pub(super) fn card(&self) -> GemvDevice {
        GemvDevice {
            multiprocessors: self.target.multiprocessors,
            shared_bytes: self.target.shared_bytes,
            clusters: self.target.clusters,
            ring: self.choices.gemv_stages,
        }
    }

    /// The prologue of a product; rows too wide to be normed within it are normed by a kernel of their own.
    fn prologue(&mut self, op: &Op, product: &Product, gemv: GemvWeights) -> Option<GemvPrologue> {
        let at = Operand::Value;
        let shape = GemvShape {
            weights: gemv,
            columns: self.weights.matrix(product.parts[0].w).columns,
            outputs: M_TILE,
            pair: false,
            codes: false,
            top_k: None,
            ready: false,
            normed: true,
            card: self.card(),
        };
        let within = shape.can_norm();
        Some(match product.input {
            Prologue::Value(x) => match self.prepared.get(&x) {
                Some(&rows) => GemvPrologue::Ready(rows),
                None => GemvPrologue::None { x: at(x) },
            },
            // Branches are joined by a kernel of their own, which writes the sum; its norm is left to the product.
            Prologue::ResidualNorm(joined) if within && joined.branches.is_some() => {
                self.residual_norm_call(op, &joined, None, None)?;
                let x = at(joined.sum);
                match joined.following {
                    Some(FollowingNorm { weight, eps, .. }) => {
                        GemvPrologue::Norm { x, weight, eps }
                    }
                    None => GemvPrologue::None { x },
                }
            }
            Prologue::Norm(RowNorm { x, weight, eps }) if within => GemvPrologue::Norm {
                x: at(x),
                weight,
                eps,
            },
            Prologue::ResidualNorm(ResidualNorm {
                norm,
                residual,
                scale,
                sum,
                following,
                branches: _,
            }) if within => GemvPrologue::ResidualNorm {
                x: at(norm.x),
                weight: norm.weight,
                eps: norm.eps,
                residual: at(residual),
                scale,
                sum: at(sum),
                following: following.map(|n| GemvPrologueNorm {
                    weight: n.weight,
                    eps: n.eps,
                }),
            },
            Prologue::Norm(_) | Prologue::ResidualNorm(_) => {
                return self.norm_apart(op).map(|x| GemvPrologue::None { x });
            }
        })
    }

    /// The steps before a product by their plain kernels; returns what it then reads.
    fn norm_apart(&mut self, op: &Op) -> Option<Operand> {
        let steps = &self.plan.steps[op.steps.clone()];
        let first = steps
            .iter()
            .position(|s| matches!(s.step, Step::Linear { .. }))?;
        for labelled in &steps[..first] {
            self.step(labelled).ok()?;
        }
        let read: Value = match &steps[first].step {
            Step::Linear { x, .. } => *x,
            _ => unreachable!("found as a linear step"),
        };
        Some(Operand::Value(read))
    }

    /// Parts of one format as one product, each to its value.
    fn gemv_parts(
        &mut self,
        op: &Op,
        prologue: GemvPrologue,
        (gemv, format): (GemvWeights, WeightFormat),
        parts: &[LinearPart],
    ) {
        let m_tile = match gemv {
            GemvWeights::Fragments(_) => M_TILE,
            _ => FLOAT_M_TILE,
        };
        // Rows of floats are not padded, so a part that ends within an M-tile ends its product.
        let whole = |part: &LinearPart| self.weights.matrix(part.w).rows.is_multiple_of(m_tile);
        let floats = !gemv.are_packed();
        if floats && parts.len() > 1 && !parts[..parts.len() - 1].iter().all(whole) {
            for part in parts {
                self.gemv_parts(op, prologue, (gemv, format), &[*part]);
            }
            return;
        }
        let mut first = 0;
        let mut end = 0;
        let mut outs = Vec::new();
        for part in parts {
            let rows = self.weights.matrix(part.w).rows;
            outs.push(OutputRows {
                out: Operand::Value(part.out),
                first,
                rows,
            });
            end = first + rows;
            first = end.next_multiple_of(m_tile);
        }
        let weights: Vec<Weight> = parts.iter().map(|p| p.w).collect();
        let w = WeightOperand::stacked(&weights, format);
        self.gemv(
            op,
            parts,
            prologue,
            w,
            (gemv, end),
            GemvEpilogue::Plain(outs),
        );
    }

    fn gemv(
        &mut self,
        op: &Op,
        parts: &[LinearPart],
        prologue: GemvPrologue,
        w: WeightOperand,
        (gemv, outputs): (GemvWeights, usize),
        epilogue: GemvEpilogue,
    ) {
        let pair = matches!(
            epilogue,
            GemvEpilogue::Geglu { .. } | GemvEpilogue::GegluCodes { .. }
        );
        let shape = GemvShape {
            codes: matches!(epilogue, GemvEpilogue::GegluCodes { .. }),
            normed: prologue.norms(),
            ..self.shape(parts[0].w, gemv, outputs, pair)
        };
        let label = self.product_label(op, parts);
        let kernel = Gemv {
            prologue,
            w,
            shape,
            epilogue,
            routed: None,
            pdl: self.product_pdl(shape.columns * shape.outputs),
            overlap: Overlap {
                last_trigger: self.has_short_launches() || shape.alone(),
                ..Overlap::default()
            },
        };
        match gemv {
            GemvWeights::Fragments(format) => self.gemv_by_rows(op.rows, &label, kernel, format),
            _ => self.call(&label, op.rows, kernel),
        }
    }

    /// Whether launches of little work lie between the large ones. Where each lets the next one start at once, several wait on the
    /// multiprocessors by the time a large one begins, and leave it little room. Measured with one row: E4B and 26B-A4B are 1.5 to 2.6 %
    /// faster where launches start late, 12B is 2.7 % slower, 31B as fast.
    fn has_short_launches(&self) -> bool {
        let is_short = |op: &Op| matches!(op.work, Work::LayerInputs(_) | Work::Experts(_));
        self.ops.iter().any(is_short)
    }

    /// A packed product: several rows are prepared once, by a launch before it; few by each of its blocks.
    fn gemv_by_rows(&mut self, rows: Rows, label: &str, mut kernel: Gemv, format: FragmentFormat) {
        if let GemvPrologue::Ready(_) = kernel.prologue {
            kernel.shape.ready = true;
            return self.call(label, rows, kernel);
        }
        let padded = kernel.shape.padded();
        let bytes = ScratchBytes {
            per_row: 0,
            fixed: PreparedRows::bytes(padded),
        };
        let out = PreparedRows {
            at: self.scratch.operand("prepared rows", bytes),
            padded,
        };
        let prepare = PrepareRows {
            prologue: kernel.prologue,
            columns: kernel.shape.columns,
            out,
            threads: 32 * kernel.shape.warps(),
            sums: format.has_minimums(),
            pdl: self.pdl(),
            early: false,
        };
        let ready = Gemv {
            prologue: GemvPrologue::Ready(out),
            shape: GemvShape {
                ready: true,
                ..kernel.shape
            },
            ..kernel.clone()
        };
        let buckets = self.buckets;
        let unprepared_rows = self.choices.prepared_from - 1;
        self.buckets = Buckets::up_to(unprepared_rows);
        self.call(label, rows, kernel);
        self.buckets = Buckets::above(unprepared_rows);
        self.call(&format!("{label} input"), rows, prepare);
        self.call(label, rows, ready);
        self.buckets = buckets;
    }

    /// Keys and values by themselves, where rows end before queries.
    fn store_kv(&mut self, op: &Op, store: &StoreKv) -> Option<()> {
        let slot = self.plan.slot(store.slot);
        if slot.head_dim > MAX_HEAD_DIM {
            return None;
        }
        let kernel = KvNormRopeStore {
            k: Operand::Value(store.k.x),
            k_weight: store.k.weight,
            k_eps: store.k.eps,
            v: Operand::Value(store.v.x),
            v_weight: store.v.weight,
            v_eps: store.v.eps,
            rope: store.rope,
            slot: store.slot,
            kv: self.kv(store.slot),
            kv_heads: slot.kv_heads,
            head_dim: slot.head_dim,
        };
        self.call(&op.label, op.rows, kernel);
        Some(())
    }

    fn small_attend(&mut self, op: &Op, attend: &Attend) -> Option<()> {
        let slot = self.plan.slot(attend.slot);
        let count = self.plan.columns(attend.out) / slot.head_dim;
        let heads = Heads {
            count,
            kv_count: slot.kv_heads,
            head_dim: slot.head_dim,
            kv: self.kv(attend.slot),
            turning_pairs: self.turning_pairs(attend.slot),
            wide_steps: self.wide_steps(attend.slot, count),
        };
        let window = self.window(slot);
        if !FlashDecode::takes(heads) {
            return None;
        }
        let columns = |value: Value| Columns {
            operand: Operand::Value(value),
            first: 0,
            stride: self.plan.columns(value),
        };
        let norm = |n: RowNorm| HeadNorm {
            weight: n.weight,
            eps: n.eps,
        };
        let own_kv = attend.store.map(|store| OwnKv {
            k: columns(store.k.x),
            k_norm: norm(store.k),
            v: columns(store.v.x),
            v_eps: store.v.eps,
        });
        let (q, q_norm) = (columns(attend.q.x), norm(attend.q));
        let words = |columns: usize| ScratchBytes {
            per_row: 0,
            fixed: SMALL_ROWS * columns * 4,
        };
        let partials = words(FlashDecode::partial_columns(heads, window));
        let arrivals = words(FlashDecode::arrival_columns(heads, window));
        let out = if heads.fill_blocks() {
            self.prepared_for_reader("prepared attended rows", attend.out)
        } else {
            None
        };
        let out = match out {
            Some(rows) => DecodeOut::Prepared(rows),
            None => DecodeOut::F32(Operand::Value(attend.out)),
        };
        let kernel = FlashDecode {
            q,
            q_norm,
            own_kv,
            rope: attend.rope,
            slot: attend.slot,
            heads,
            window,
            partials: self.scratch.operand("attention partials", partials),
            arrivals: self.scratch.operand("attention arrivals", arrivals),
            out,
            pdl: self.pdl(),
        };
        self.call(&op.label, op.rows, kernel);
        Some(())
    }
}
