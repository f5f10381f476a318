//! Many rows: products are matrix multiplications, and what they read is stored in the form they want.
//!
//! A value that only products read exists in their form alone. Raw queries, keys and values lie side by side in one buffer,
//! as one product writes them. Where NVIDIA's library multiplies, the product of gate and up is stored as halves with a
//! factor a row, which goes along with what is made of it until a norm takes it in.

use std::collections::{HashMap, HashSet};

use carat_model::{
    backend::BackendError,
    plan::{Plan, Rows, Step, Value},
};

use super::Lowering;
use crate::{
    compile::{
        call::{Call, Launch, LibraryProduct},
        fuse::{
            Attend, Input, NormAdd, Op, Part, Product, RowNorm, StoreKv, Then, Work, joined_label,
        },
        target::Products,
    },
    device::cublaslt::Out,
    kernel::{
        AttendOut, AttendWide, Attention, Convert, Form, GELU_MOST_COLUMNS, GeluMulWide, HEAD_DIMS,
        KeysValues, NORM_MOST_COLUMNS, NormAddWide, NormOut, NormWide, Packed, Place, QkvWide,
        Queries, Second, WeightForm,
    },
};

/// Gate and up are stored as halves times this, so that none overflows; GELU's kernel multiplies back.
const GATE_UP_SCALE: f32 = 1.0 / 64.0;

/// What products of wide batches read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Kind {
    Halves,
    Bytes,
    /// Bytes, and the rest as bytes again.
    TwoBytes,
}

/// What is known of values while wide ops are lowered.
#[derive(Default)]
pub(super) struct State {
    /// The ops that read a value, by their number.
    readers: HashMap<Value, Vec<usize>>,
    /// Values that are read behind these ops, too, as they are in the plan.
    kept: HashSet<Value>,
    /// Values that exist in a product's form.
    made: HashMap<Value, Made>,
    /// Values that are columns of a wider buffer.
    columns: HashMap<Value, Columns>,
    /// Values that must still be multiplied by a factor a row.
    factors: HashMap<Value, Place>,
}

impl State {
    pub(super) fn of(plan: &Plan, ops: &[Op]) -> State {
        let steps = match ops {
            [first, .., last] => first.steps.start..last.steps.end,
            [only] => only.steps.clone(),
            [] => 0..0,
        };
        let behind = plan.steps.iter().skip(steps.end);
        let kept = behind.flat_map(|s| s.step.inputs());
        let mut state = State {
            kept: kept.chain([plan.hidden, plan.logits]).collect(),
            ..State::default()
        };
        for (i, op) in ops.iter().enumerate() {
            let steps = &plan.steps[op.steps.clone()];
            for value in steps.iter().flat_map(|s| s.step.inputs()) {
                let readers = state.readers.entry(value).or_default();
                if readers.last() != Some(&i) {
                    readers.push(i);
                }
            }
        }
        state
    }
}

#[derive(Clone, Copy)]
struct Made {
    form: Form,
    factor: Option<Place>,
}

#[derive(Clone, Copy)]
struct Columns {
    of: Place,
    stride: usize,
    column: usize,
}

impl Lowering<'_> {
    pub(super) fn wide(&mut self, op: &Op) -> Result<(), BackendError> {
        let done = match &op.work {
            Work::Product(product) => self.wide_product(op, product),
            Work::NormAdd(norm_add) => self.wide_norm_add(op, norm_add),
            Work::StoreKv(store) => self.wide_qkv(op, None, Some(store)),
            Work::Attend(attend) => self.wide_attend(op, attend),
            Work::LayerInputs(inputs) => {
                self.layer_inputs(op, inputs);
                Some(())
            }
            Work::Step(Step::Norm { .. }) => self.wide_norm(op),
            Work::Step(step) => self.wide_experts(op, step),
        };
        if done.is_none() {
            self.plainly(op)?;
        }
        Ok(())
    }

    fn readers(&self, value: Value) -> impl Iterator<Item = &Op> {
        let readers = self.wide.readers.get(&value);
        readers.into_iter().flatten().map(|i| &self.ops[*i])
    }

    /// Whether nobody reads a value but ops of this kind.
    fn only_for(&self, value: Value, of_kind: impl Fn(&Op) -> bool) -> bool {
        !self.wide.kept.contains(&value) && self.readers(value).all(of_kind)
    }

    /// What a product reads its input as; `None` if it is left to plain kernels.
    fn kind(&self, product: &Product) -> Option<Kind> {
        let matrices = || product.parts.iter().map(|p| self.weights.matrix(p.w));
        let columns = matrices().next()?.columns;
        let single = matrices().all(|m| m.count == 1);
        let halves = columns.is_multiple_of(32) && matrices().all(|m| m.rows.is_multiple_of(8));
        match self.target.products {
            Products::Library => (single && halves).then_some(Kind::Halves),
            Products::Own => self.own_kind(product).filter(|_| single),
        }
    }

    /// The form of a value that only products read, and all alike.
    fn sole_kind(&self, value: Value) -> Option<Kind> {
        let mut kinds = self.readers(value).map(|op| match &op.work {
            Work::Product(p) if p.input == Input::Value(value) => self.kind(p),
            _ => None,
        });
        let first = kinds.next()??;
        let alike = kinds.all(|kind| kind == Some(first));
        (alike && !self.wide.kept.contains(&value)).then_some(first)
    }

    /// Room for a value of this width in a form, under a name that neighbours do not use.
    fn form(&mut self, kind: Kind, names: [&'static str; 4], columns: usize) -> Form {
        let [halves, codes, scales, sums] = names;
        match kind {
            Kind::Halves => Form::F16(self.scratch(halves, 2 * columns)),
            Kind::Bytes => Form::Q8(self.bytes([codes, scales, sums], columns)),
            Kind::TwoBytes => Form::Q16 {
                both: self.bytes([codes, scales, sums], 2 * columns),
                columns,
            },
        }
    }

    pub(super) fn wide_norm_add(&mut self, op: &Op, norm_add: &NormAdd) -> Option<()> {
        let next = norm_add.next.map(|next| NormOut {
            weight: next.weight,
            eps: next.eps,
            values: Some(Place::Value(next.out)),
            form: None,
        });
        self.norm_add_call(op, norm_add, None, next)
    }

    fn norm_add_call(
        &mut self,
        op: &Op,
        norm_add: &NormAdd,
        sum_form: Option<Form>,
        next: Option<NormOut>,
    ) -> Option<()> {
        let columns = self.plan.columns(norm_add.sum);
        if columns > NORM_MOST_COLUMNS || !columns.is_multiple_of(4) {
            return None;
        }
        let kernel = NormAddWide {
            x: Place::Value(norm_add.norm.x),
            factor: self.wide.factors.get(&norm_add.norm.x).copied(),
            weight: norm_add.norm.weight,
            eps: norm_add.norm.eps,
            a: Place::Value(norm_add.a),
            by: norm_add.by,
            sum: Place::Value(norm_add.sum),
            sum_form,
            next,
            columns,
        };
        self.call_for_step(self.first_step(op), op.rows, kernel);
        Some(())
    }

    /// A norm of whole rows by itself, where something must be taken in with it.
    fn wide_norm(&mut self, op: &Op) -> Option<()> {
        let Work::Step(Step::Norm {
            x,
            weight,
            group,
            eps,
            out,
        }) = op.work
        else {
            return None;
        };
        let columns = self.plan.columns(x);
        if group != columns || columns > NORM_MOST_COLUMNS || !columns.is_multiple_of(4) {
            return None;
        }
        let kernel = NormWide {
            x: Place::Value(x),
            factor: self.wide.factors.get(&x).copied(),
            columns,
            out: NormOut {
                weight,
                eps,
                values: Some(Place::Value(out)),
                form: None,
            },
        };
        self.call(&op.label, op.rows, kernel);
        Some(())
    }

    /// The input of a product in its form, made by whatever comes before it.
    fn product_input(&mut self, op: &Op, input: &Input, kind: Kind) -> Option<Made> {
        const NORMED: [&str; 4] = [
            "normed halves",
            "normed codes",
            "normed scales",
            "normed sums",
        ];
        const OTHER: [&str; 4] = ["input halves", "input codes", "input scales", "input sums"];
        let made = |form| Made { form, factor: None };
        match *input {
            Input::Value(x) => {
                if let Some(made) = self.wide.made.get(&x) {
                    return Some(*made);
                }
                let columns = self.plan.columns(x);
                let form = self.form(kind, OTHER, columns);
                let kernel = Convert {
                    a: Place::Value(x),
                    gelu_mul: None,
                    columns,
                    out: form,
                };
                let label = format!("{} convert", op.label);
                self.call(&label, op.rows, kernel);
                self.wide.made.insert(x, made(form));
                // The buffer is another value's from the next one on.
                self.wide.made.retain(|v, m| *v == x || m.form != form);
                Some(made(form))
            }
            Input::Norm(RowNorm { x, weight, eps }) => {
                let columns = self.plan.columns(x);
                if columns > NORM_MOST_COLUMNS || !columns.is_multiple_of(4) {
                    return None;
                }
                let form = self.form(kind, NORMED, columns);
                let kernel = NormWide {
                    x: Place::Value(x),
                    factor: self.wide.factors.get(&x).copied(),
                    columns,
                    out: NormOut {
                        weight,
                        eps,
                        values: None,
                        form: Some(form),
                    },
                };
                self.call_for_step(self.first_step(op), op.rows, kernel);
                Some(made(form))
            }
            Input::NormAdd(norm_add) => {
                let form = self.form(kind, NORMED, self.plan.columns(norm_add.sum));
                let next = norm_add.next.map(|next| NormOut {
                    weight: next.weight,
                    eps: next.eps,
                    values: None,
                    form: Some(form),
                });
                let sum_form = next.is_none().then_some(form);
                self.norm_add_call(op, &norm_add, sum_form, next)?;
                Some(made(form))
            }
        }
    }

    fn wide_product(&mut self, op: &Op, product: &Product) -> Option<()> {
        let kind = self.kind(product)?;
        let input = self.product_input(op, &product.input, kind)?;
        match product.then {
            Then::Nothing => self.product_parts(op, product, input),
            Then::GeluPair { out } if self.gelu_pair(op, product, out, input) => {}
            Then::GeluPair { .. } => {
                self.product_parts(op, product, input);
                self.step(self.last_step(op)).ok()?;
            }
            Then::GeluSlice { other, column, out } => {
                self.gelu_slice(op, product, (other, column, out), input);
            }
        }
        Some(())
    }

    /// Whether its parts are queries, keys and values, of wide kernels and nobody else.
    pub(super) fn attended(&self, product: &Product) -> bool {
        let ours = |value: Value| product.parts.iter().any(|p| p.out == value);
        let reads_ours =
            |reader: &Op| self.takes_columns(reader) && raw_inputs(reader).into_iter().all(ours);
        let mut parts = product.parts.iter();
        parts.all(|part| self.only_for(part.out, reads_ours))
    }

    /// Every part to where its readers look for it: side by side if those are queries, keys and values, else a value each.
    fn product_parts(&mut self, op: &Op, product: &Product, input: Made) {
        if self.attended(product) {
            let widths = product.parts.iter().map(|p| self.plan.columns(p.out));
            let stride = widths.sum();
            let of = self.scratch_floats("q|k|v", stride);
            let mut column = 0;
            for part in &product.parts {
                let place = Columns { of, stride, column };
                self.wide.columns.insert(part.out, place);
                column += self.plan.columns(part.out);
            }
            self.multiply(op, &product.parts, input, Target { place: of, stride });
            return;
        }
        for part in &product.parts {
            let target = Target {
                place: Place::Value(part.out),
                stride: self.plan.columns(part.out),
            };
            self.multiply(op, &[*part], input, target);
            if let Some(factor) = input.factor {
                self.wide.factors.insert(part.out, factor);
            }
        }
    }

    /// `gelu(gate) * up` in the form of its one reader; `false` if that is not possible.
    fn gelu_pair(&mut self, op: &Op, product: &Product, out: Value, input: Made) -> bool {
        let Some(kind) = self.sole_kind(out) else {
            return false;
        };
        let columns = self.plan.columns(out);
        match (self.target.products, kind) {
            (Products::Library, Kind::Halves) => {
                let takes_factor = |value: Value| {
                    self.only_for(value, |op| match &op.work {
                        Work::NormAdd(n)
                        | Work::Product(Product {
                            input: Input::NormAdd(n),
                            ..
                        }) => n.norm.x == value && n.a != value,
                        Work::Product(Product {
                            input: Input::Norm(n),
                            ..
                        }) => n.x == value,
                        Work::Step(Step::Norm { x, group, .. }) => {
                            *x == value && *group == self.plan.columns(value)
                        }
                        _ => false,
                    })
                };
                let reader_takes = self.only_for(out, |op| match &op.work {
                    Work::Product(p) => {
                        p.then == Then::Nothing && p.parts.iter().all(|p| takes_factor(p.out))
                    }
                    _ => false,
                });
                if !reader_takes || columns > GELU_MOST_COLUMNS || input.factor.is_some() {
                    return false;
                }
                let both = self.scratch("gate|up", 4 * columns);
                let call = LibraryProduct {
                    x: halves(input.form),
                    w: joined(&product.parts, WeightForm::Half),
                    out: both,
                    kind: Out::F16,
                    alpha: GATE_UP_SCALE,
                    outputs: 2 * columns,
                    columns: self.weights.matrix(product.parts[0].w).columns,
                    stride: 2 * columns,
                    scaled: true,
                };
                let label = self.product_label(op, &product.parts);
                self.library_call(&label, op.rows, call);
                let (halves, factor) = (
                    self.scratch("gated halves", 2 * columns),
                    self.scratch_floats("gated factor", 1),
                );
                let kernel = GeluMulWide {
                    x: both,
                    x_scale: 1.0 / GATE_UP_SCALE,
                    columns,
                    out: halves,
                    factor,
                };
                self.call_for_step(self.last_step(op), op.rows, kernel);
                let made = Made {
                    form: Form::F16(halves),
                    factor: Some(factor),
                };
                self.wide.made.insert(out, made);
                true
            }
            (Products::Own, Kind::Bytes) => {
                let made = self.own_gelu_pair(op, product, out, input.form);
                if let Some(form) = made {
                    let made = Made { form, factor: None };
                    self.wide.made.insert(out, made);
                }
                made.is_some()
            }
            _ => false,
        }
    }

    /// `gelu(product) * other[column..]`, in the form of its reader.
    fn gelu_slice(
        &mut self,
        op: &Op,
        product: &Product,
        (other, column, out): (Value, usize, Value),
        input: Made,
    ) {
        const GATED: [&str; 4] = ["slice halves", "slice codes", "slice scales", "slice sums"];
        let columns = self.plan.columns(out);
        let Some(kind) = self.sole_kind(out).filter(|_| columns.is_multiple_of(32)) else {
            self.product_parts(op, product, input);
            self.step(self.last_step(op))
                .expect("elementwise steps are always supported");
            return;
        };
        let gate = self.scratch_floats("slice gate", columns);
        let target = Target {
            place: gate,
            stride: columns,
        };
        self.multiply(op, &product.parts, input, target);
        let form = self.form(kind, GATED, columns);
        let kernel = Convert {
            a: gate,
            gelu_mul: Some(Second {
                place: Place::Value(other),
                columns: self.plan.columns(other),
                column,
            }),
            columns,
            out: form,
        };
        self.call_for_step(self.last_step(op), op.rows, kernel);
        let made = Made { form, factor: None };
        self.wide.made.insert(out, made);
    }

    /// Parts side by side, as f32.
    fn multiply(&mut self, op: &Op, parts: &[Part], input: Made, target: Target) {
        let label = self.product_label(op, parts);
        match self.target.products {
            Products::Library => {
                let outputs = parts.iter().map(|p| self.weights.matrix(p.w).rows).sum();
                let call = LibraryProduct {
                    x: halves(input.form),
                    w: joined(parts, WeightForm::Half),
                    out: target.place,
                    kind: Out::F32,
                    alpha: 1.0,
                    outputs,
                    columns: self.weights.matrix(parts[0].w).columns,
                    stride: target.stride,
                    scaled: input.factor.is_some(),
                };
                self.library_call(&label, op.rows, call);
            }
            Products::Own => {
                let x = (input.form, input.factor);
                self.own_products(&label, op, parts, x, target);
            }
        }
    }

    fn library_call(&mut self, label: &str, rows: Rows, product: LibraryProduct) {
        self.calls.push(Call {
            label: label.to_owned(),
            origin: self.origin,
            rows,
            launch: Launch::Library(product),
        });
    }

    /// Whether an op stores or attends by wide kernels, which read their inputs side by side.
    fn takes_columns(&self, op: &Op) -> bool {
        match &op.work {
            Work::StoreKv(store) => {
                let head_dim = self.plan.slot(store.slot).head_dim;
                HEAD_DIMS.contains(&head_dim)
            }
            Work::Attend(attend) => {
                let anywhere = Place::Scratch(0);
                let out = AttendOut::F32(anywhere);
                self.attend_kernel(op, attend, anywhere, out).is_some()
            }
            _ => false,
        }
    }

    fn attend_kernel(
        &self,
        op: &Op,
        attend: &Attend,
        q: Place,
        out: AttendOut,
    ) -> Option<AttendWide> {
        let slot = self.plan.slot(attend.slot);
        let heads = Attention {
            heads: self.plan.columns(attend.out) / slot.head_dim,
            kv_heads: slot.kv_heads,
            head_dim: slot.head_dim,
            window: slot.window,
        };
        AttendWide::new(op.rows, (q, out), attend.slot, heads, self.target.hopper)
    }

    /// Norms and turns: queries to halves, keys and values to their pages.
    fn wide_qkv(
        &mut self,
        op: &Op,
        attend: Option<(&Attend, Place)>,
        store: Option<&StoreKv>,
    ) -> Option<()> {
        if !self.takes_columns(op) {
            return None;
        }
        let columns_of = |this: &Self, value: Value| {
            let contiguous = Columns {
                of: Place::Value(value),
                stride: this.plan.columns(value),
                column: 0,
            };
            this.wide.columns.get(&value).copied().unwrap_or(contiguous)
        };
        let (q, rope) = match (attend, store) {
            (Some((a, out)), _) => (Some((a.q, out)), a.rope),
            (None, Some(s)) => (None, s.rope),
            (None, None) => return None,
        };
        let head_dim = self.plan.rope(rope).head_dim;
        let q_at = q.map(|(q, out)| (columns_of(self, q.x), q, out));
        let kv_at = store.map(|s| (columns_of(self, s.k.x), columns_of(self, s.v.x), s));
        let queries = q_at.map(|(at, q, out)| Queries {
            column: at.column,
            heads: self.plan.columns(q.x) / head_dim,
            weight: q.weight,
            eps: q.eps,
            out,
        });
        let keys_values = kv_at.map(|(k, v, s)| KeysValues {
            k_column: k.column,
            k_weight: s.k.weight,
            k_eps: s.k.eps,
            v_column: v.column,
            v_eps: s.v.eps,
            heads: self.plan.slot(s.slot).kv_heads,
            slot: s.slot,
        });
        let steps = &self.plan.steps[op.steps.clone()];
        // What a launch finishes: keys and values in their pages, rotated queries (whose rotation is the op's last).
        let stored = steps
            .iter()
            .find(|s| matches!(s.step, Step::StoreKv { .. }));
        let rotated = steps.iter().rfind(|s| matches!(s.step, Step::Rope { .. }));
        self.origin = stored
            .or(rotated)
            .map_or(op.origin, |s| self.plan.origin(s));
        let mut call = |at: Columns, queries: Option<_>, keys_values: Option<_>| {
            let finished = [
                stored.filter(|_| keys_values.is_some()),
                rotated.filter(|_| queries.is_some()),
            ];
            let label = joined_label(finished.into_iter().flatten());
            let kernel = QkvWide {
                x: at.of,
                stride: at.stride,
                head_dim,
                rope,
                queries,
                keys_values,
            };
            self.call(&label, op.rows, kernel);
        };
        match (q_at, kv_at) {
            (Some((q, ..)), Some((k, v, _))) if q.of == k.of && k.of == v.of => {
                call(q, queries, keys_values);
            }
            (q, kv) => {
                if let Some((k, v, _)) = kv {
                    if k.of != v.of {
                        return None;
                    }
                    call(k, None, keys_values);
                }
                if let Some((q, ..)) = q {
                    call(q, queries, None);
                }
            }
        }
        Some(())
    }

    fn wide_attend(&mut self, op: &Op, attend: &Attend) -> Option<()> {
        const ATTENDED: [&str; 4] = [
            "attended halves",
            "attended codes",
            "attended scales",
            "attended sums",
        ];
        if !self.takes_columns(op) {
            return None;
        }
        let columns = self.plan.columns(attend.out);
        let form = self
            .sole_kind(attend.out)
            .map(|kind| self.form(kind, ATTENDED, columns));
        let wanted = match form {
            None => AttendOut::F32(Place::Value(attend.out)),
            Some(Form::F16(halves)) => AttendOut::F16(halves),
            Some(Form::Q8(places)) => AttendOut::Q8(places),
            Some(Form::Q16 { .. }) => unreachable!("only norms make it"),
        };
        let q = self.scratch("queries", 2 * columns);
        let (kernel, form) = if let Some(kernel) = self.attend_kernel(op, attend, q, wanted) {
            (kernel, form)
        } else {
            let out = AttendOut::F32(Place::Value(attend.out));
            (self.attend_kernel(op, attend, q, out)?, None)
        };
        self.wide_qkv(op, Some((attend, q)), attend.store.as_ref())?;
        self.origin = op.origin;
        self.call(&op.label, op.rows, kernel);
        if let Some(form) = form {
            let made = Made { form, factor: None };
            self.wide.made.insert(attend.out, made);
        }
        Some(())
    }
}

/// Where a product goes.
#[derive(Clone, Copy)]
pub(super) struct Target {
    pub(super) place: Place,
    pub(super) stride: usize,
}

/// What an op that stores or attends reads.
fn raw_inputs(op: &Op) -> Vec<Value> {
    let stored = |store: &StoreKv| [store.k.x, store.v.x];
    match &op.work {
        Work::StoreKv(store) => stored(store).to_vec(),
        Work::Attend(attend) => {
            let kv = attend.store.iter().flat_map(stored);
            kv.chain([attend.q.x]).collect()
        }
        _ => Vec::new(),
    }
}

/// Where halves are; the library reads nothing else.
fn halves(form: Form) -> Place {
    match form {
        Form::F16(halves) => halves,
        Form::Q8(_) | Form::Q16 { .. } => unreachable!("chosen as the product's kind"),
    }
}

fn joined(parts: &[Part], form: WeightForm) -> Packed {
    let weights: Vec<_> = parts.iter().map(|p| p.w).collect();
    Packed::stacked(&weights, form)
}
