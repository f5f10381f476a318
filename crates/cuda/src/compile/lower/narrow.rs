//! Few rows: every product streams its weights once, and what surrounds it happens inside the same kernel.

use carat_gguf::QuantType;
use carat_model::{
    backend::BackendError,
    plan::{Step, Value},
    weights::Weight,
};

use super::{Lowering, ScratchBytes};
use crate::{
    compile::{
        fuse::{Attend, Input, NormAdd, Op, Part, Product, RowNorm, StoreKv, Then, Work},
        rows::NARROW_ROWS,
    },
    kernel::{
        AttendNarrow, Columns, Epilogue, Gemv, GemvCard, GemvForm, GemvPart, GemvShape, HeadNorm,
        Heads, MOST_HEAD_DIM, NormRopeStore, OwnKv, Packed, Place, Prologue, PrologueNorm, Second,
        WeightForm,
        panels::{PanelFormat, STRIP},
    },
};

/// Where parts of joined float matrices start.
const FLOAT_STRIP: usize = 4;
/// Columns of float matrices come in multiples of the values of 16 bytes.
const FLOAT_COLUMNS: usize = 8;

impl Lowering<'_> {
    pub(super) fn narrow(&mut self, op: &Op) -> Result<(), BackendError> {
        let done = match &op.work {
            Work::Product(product) => self.narrow_product(op, product),
            Work::NormAdd(norm_add) => self.wide_norm_add(op, norm_add),
            Work::Attend(attend) => self.narrow_attend(op, attend),
            Work::LayerInputs(inputs) => {
                self.layer_inputs(op, inputs);
                Some(())
            }
            Work::Step(step) => self.narrow_experts(op, step),
            Work::StoreKv(store) => self.store_kv(op, store),
        };
        if done.is_none() {
            self.plainly(op)?;
        }
        Ok(())
    }

    /// How a matrix is streamed, and the form in which it lies for that.
    fn gemv_form(&self, w: Weight) -> Option<(GemvForm, WeightForm)> {
        let matrix = self.weights.matrix(w);
        if let Some(format) = PanelFormat::of(matrix.quant) {
            return Some((GemvForm::Panel(format), WeightForm::Panels));
        }
        let form = match matrix.quant {
            QuantType::F16 => (GemvForm::F16, WeightForm::File),
            QuantType::BF16 => (GemvForm::BF16, WeightForm::File),
            QuantType::F32 if self.weights.narrows(w) => (GemvForm::BF16, WeightForm::Bf16),
            QuantType::F32 => (GemvForm::F32, WeightForm::File),
            _ => (GemvForm::F16, WeightForm::Half),
        };
        matrix.columns.is_multiple_of(FLOAT_COLUMNS).then_some(form)
    }

    fn narrow_product(&mut self, op: &Op, product: &Product) -> Option<()> {
        // Parts of one format are one product.
        let mut runs: Vec<(GemvForm, WeightForm, Vec<Part>)> = Vec::new();
        for part in &product.parts {
            let (gemv, form) = self.gemv_form(part.w)?;
            match runs.last_mut() {
                Some((last, _, parts)) if *last == gemv => parts.push(*part),
                _ => runs.push((gemv, form, vec![*part])),
            }
        }
        let prologue = self.prologue(op, product, runs[0].0)?;
        match (product.then, runs.as_slice()) {
            (Then::Nothing, _) => {
                for (gemv, form, parts) in &runs {
                    self.gemv_parts(op, prologue, (*gemv, *form), parts);
                }
            }
            (Then::GeluPair { out }, [(gemv, form, parts)]) => {
                let (gate, up) = (parts[0], parts[1]);
                let (w, up) = match gemv {
                    GemvForm::Panel(_) => (Packed::interleaved(&[gate.w, up.w]), None),
                    _ => (Packed::one(gate.w, *form), Some(Packed::one(up.w, *form))),
                };
                let epilogue = Epilogue::GeluPair {
                    out: Place::Value(out),
                    up,
                };
                let outputs = self.plan.columns(out);
                self.gemv(op, &parts.clone(), prologue, w, (*gemv, outputs), epilogue);
            }
            (Then::GeluPair { .. }, _) => {
                for (gemv, form, parts) in &runs {
                    self.gemv_parts(op, prologue, (*gemv, *form), parts);
                }
                self.step(self.last_step(op)).ok()?;
            }
            (Then::GeluSlice { other, column, out }, _) => {
                let (gemv, form, parts) = runs[0].clone();
                let epilogue = Epilogue::GeluSlice {
                    out: Place::Value(out),
                    other: Second {
                        place: Place::Value(other),
                        columns: self.plan.columns(other),
                        column,
                    },
                };
                let (w, outputs) = (Packed::one(parts[0].w, form), self.plan.columns(out));
                self.gemv(op, &parts, prologue, w, (gemv, outputs), epilogue);
            }
        }
        Some(())
    }

    pub(super) fn card(&self) -> GemvCard {
        GemvCard {
            multiprocessors: self.target.multiprocessors,
            shared_bytes: self.target.shared_bytes,
        }
    }

    /// What comes before a product; rows too wide to be normed within it are normed by a kernel of their own.
    fn prologue(&mut self, op: &Op, product: &Product, form: GemvForm) -> Option<Prologue> {
        let at = Place::Value;
        let shape = GemvShape {
            form,
            columns: self.weights.matrix(product.parts[0].w).columns,
            outputs: STRIP,
            pair: false,
            summed: 1,
            sets: 1,
            card: self.card(),
        };
        let within = shape.can_norm();
        Some(match product.input {
            Input::Value(x) => Prologue::None { x: at(x) },
            Input::Norm(RowNorm { x, weight, eps }) if within => Prologue::Norm {
                x: at(x),
                weight,
                eps,
            },
            Input::NormAdd(NormAdd {
                norm,
                a,
                by,
                sum,
                next,
            }) if within => Prologue::NormAdd {
                x: at(norm.x),
                weight: norm.weight,
                eps: norm.eps,
                a: at(a),
                by,
                sum: at(sum),
                next: next.map(|n| PrologueNorm {
                    weight: n.weight,
                    eps: n.eps,
                }),
            },
            Input::Norm(_) | Input::NormAdd(_) => {
                return self.norm_apart(op).map(|x| Prologue::None { x });
            }
        })
    }

    /// The steps before a product by their plain kernels; what it then reads.
    fn norm_apart(&mut self, op: &Op) -> Option<Place> {
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
        Some(Place::Value(read))
    }

    /// Parts of one format as one product, each to its value.
    fn gemv_parts(
        &mut self,
        op: &Op,
        prologue: Prologue,
        (gemv, form): (GemvForm, WeightForm),
        parts: &[Part],
    ) {
        let strip = match gemv {
            GemvForm::Panel(_) => STRIP,
            _ => FLOAT_STRIP,
        };
        // Rows of floats are not padded, so a part that ends within a strip ends its product.
        let whole = |part: &Part| self.weights.matrix(part.w).rows.is_multiple_of(strip);
        let floats = !matches!(gemv, GemvForm::Panel(_));
        if floats && parts.len() > 1 && !parts[..parts.len() - 1].iter().all(whole) {
            for part in parts {
                self.gemv_parts(op, prologue, (gemv, form), &[*part]);
            }
            return;
        }
        let mut first = 0;
        let mut end = 0;
        let mut outs = Vec::new();
        for part in parts {
            let rows = self.weights.matrix(part.w).rows;
            outs.push(GemvPart {
                out: Place::Value(part.out),
                first,
                rows,
            });
            end = first + rows;
            first = end.next_multiple_of(strip);
        }
        let weights: Vec<Weight> = parts.iter().map(|p| p.w).collect();
        let w = Packed::stacked(&weights, form);
        self.gemv(op, parts, prologue, w, (gemv, end), Epilogue::Plain(outs));
    }

    fn gemv(
        &mut self,
        op: &Op,
        parts: &[Part],
        prologue: Prologue,
        w: Packed,
        (form, outputs): (GemvForm, usize),
        epilogue: Epilogue,
    ) {
        let shape = GemvShape {
            form,
            columns: self.weights.matrix(parts[0].w).columns,
            outputs,
            pair: matches!(epilogue, Epilogue::GeluPair { .. }),
            summed: 1,
            sets: 1,
            card: self.card(),
        };
        let label = self.product_label(op, parts);
        let kernel = Gemv {
            prologue,
            w,
            shape,
            epilogue,
            choices: None,
            early: self.target.overlap,
        };
        self.call(&label, op.rows, kernel);
    }

    /// Keys and values by themselves, where rows end before queries.
    fn store_kv(&mut self, op: &Op, store: &StoreKv) -> Option<()> {
        let slot = self.plan.slot(store.slot);
        if slot.head_dim > MOST_HEAD_DIM {
            return None;
        }
        let kernel = NormRopeStore {
            k: Place::Value(store.k.x),
            k_weight: store.k.weight,
            k_eps: store.k.eps,
            v: Place::Value(store.v.x),
            v_weight: store.v.weight,
            v_eps: store.v.eps,
            rope: store.rope,
            slot: store.slot,
            kv_heads: slot.kv_heads,
            head_dim: slot.head_dim,
        };
        self.call(&op.label, op.rows, kernel);
        Some(())
    }

    fn narrow_attend(&mut self, op: &Op, attend: &Attend) -> Option<()> {
        let slot = self.plan.slot(attend.slot);
        let heads = Heads {
            count: self.plan.columns(attend.out) / slot.head_dim,
            kv_count: slot.kv_heads,
            head_dim: slot.head_dim,
        };
        let window = slot.window;
        if !AttendNarrow::takes(heads) {
            return None;
        }
        let columns = |value: Value| Columns {
            place: Place::Value(value),
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
            fixed: NARROW_ROWS * columns * 4,
        };
        let records = words(AttendNarrow::record_columns(heads, window));
        let tickets = words(AttendNarrow::ticket_columns(heads, window));
        let kernel = AttendNarrow {
            q,
            q_norm,
            own_kv,
            rope: attend.rope,
            slot: attend.slot,
            heads,
            window,
            records: self.scratch.place("attention records", records),
            tickets: self.scratch.place("attention tickets", tickets),
            out: Place::Value(attend.out),
            early: self.target.overlap,
        };
        self.call(&op.label, op.rows, kernel);
        Some(())
    }
}
