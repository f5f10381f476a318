//! Attention of large batches: head norms and RoPE of queries, keys and values in one launch, then flash attention. Of medium ones
//! that launch has keys and values alone: queries are normed and rotated where they attend, with keys split.
//!
//! Raw queries, keys and values are columns of one buffer where one product made them.

use carat_model::plan::{Labelled, Step, Value};

use super::{
    Lowering,
    large_batch::{ActivationFormat, Columns, Materialized},
};
use crate::{
    compile::{
        fuse::{Attend, Op, StoreKv, Work},
        rows::RowClass,
    },
    kernel::{
        Activation, AttentionOut, AttentionShape, FlashPrefill, HEAD_DIMS, KeysAndValues,
        KeysValues, Operand, QkvNormRope, Queries,
    },
};

impl Lowering<'_> {
    /// Whether an op stores or attends by the kernels of large batches, which read their inputs side by side.
    pub(super) fn takes_columns(&self, op: &Op) -> bool {
        match &op.work {
            Work::StoreKv(store) => {
                let head_dim = self.plan.slot(store.slot).head_dim;
                HEAD_DIMS.contains(&head_dim)
            }
            Work::Attend(attend) => {
                let anywhere = Operand::Scratch(0);
                let out = AttentionOut::F32(anywhere);
                self.attend_kernel(op, attend, anywhere, out).is_some()
            }
            _ => false,
        }
    }

    pub(super) fn attend_kernel(
        &self,
        op: &Op,
        attend: &Attend,
        q: Operand,
        out: AttentionOut,
    ) -> Option<FlashPrefill> {
        let slot = self.plan.slot(attend.slot);
        let heads = AttentionShape {
            heads: self.plan.columns(attend.out) / slot.head_dim,
            kv_heads: slot.kv_heads,
            head_dim: slot.head_dim,
            window: slot.window,
            kv: KeysAndValues {
                kv: self.kv(attend.slot),
                tied: self.turning_pairs(attend.slot).is_some(),
            },
        };
        FlashPrefill::new(op.rows, (q, out), attend.slot, heads, self.target.hopper)
    }

    /// The buffer and columns that a value lies in.
    pub(super) fn columns_of(&self, value: Value) -> Columns {
        let contiguous = Columns {
            of: Operand::Value(value),
            stride: self.plan.columns(value),
            column: 0,
        };
        let wider = self.large.columns.get(&value).copied();
        wider.unwrap_or(contiguous)
    }

    /// Norms and RoPE: queries to f16, keys and values to their pages.
    pub(super) fn large_qkv(
        &mut self,
        op: &Op,
        attend: Option<(&Attend, Operand)>,
        store: Option<&StoreKv>,
    ) -> Option<()> {
        if !self.takes_columns(op) {
            return None;
        }
        let (q, rope) = match (attend, store) {
            (Some((a, out)), _) => (Some((a.q, out)), a.rope),
            (None, Some(s)) => (None, s.rope),
            (None, None) => return None,
        };
        let head_dim = self.plan.rope(rope).head_dim;
        let q_at = q.map(|(q, out)| (self.columns_of(q.x), q, out));
        let kv_at = store.map(|s| (self.columns_of(s.k.x), self.columns_of(s.v.x), s));
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
            kv: self.kv(s.slot),
        });
        let steps = &self.plan.steps[op.steps.clone()];
        // Steps that a launch finishes: keys and values in their pages, rotated queries (whose RoPE is the op's last).
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
            let label = Labelled::joined(finished.into_iter().flatten());
            let kernel = QkvNormRope {
                x: at.of,
                stride: at.stride,
                head_dim,
                rope,
                queries,
                keys_values,
                pdl: self.pdl(),
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

    pub(super) fn large_attend(&mut self, op: &Op, attend: &Attend) -> Option<()> {
        const ATTENDED: [&str; 4] = [
            "attended f16",
            "attended codes",
            "attended scales",
            "attended sums",
        ];
        if !self.takes_columns(op) {
            return None;
        }
        let columns = self.plan.columns(attend.out);
        let format = self.sole_format(attend.out);
        if self.class == RowClass::Medium {
            let f16 = format.filter(|format| {
                matches!(format, ActivationFormat::F16 | ActivationFormat::F16Tiles)
            });
            let activation = f16.map(|format| self.activation(format, ATTENDED, columns));
            if self.medium_attend(op, attend, activation).is_some() {
                return Some(());
            }
        }
        let activation = format
            // Flash attention writes rows as they are: for products by wgmma its output is converted.
            .filter(|format| {
                !matches!(
                    format,
                    ActivationFormat::F16Tiles | ActivationFormat::F16Permuted
                )
            })
            .map(|format| self.activation(format, ATTENDED, columns));
        let wanted = match activation {
            None => AttentionOut::F32(Operand::Value(attend.out)),
            Some(Activation::F16(f16)) => AttentionOut::F16(f16),
            Some(Activation::Int8(operands)) => AttentionOut::Int8(operands),
            Some(
                Activation::Int8HiLo { .. } | Activation::F16Tiles(_) | Activation::F16Permuted(_),
            ) => {
                unreachable!("attention writes none of them")
            }
        };
        let q = self.scratch("queries", 2 * columns);
        let (kernel, activation) = if let Some(kernel) = self.attend_kernel(op, attend, q, wanted) {
            (kernel, activation)
        } else {
            let out = AttentionOut::F32(Operand::Value(attend.out));
            (self.attend_kernel(op, attend, q, out)?, None)
        };
        self.large_qkv(op, Some((attend, q)), attend.store.as_ref())?;
        self.origin = op.origin;
        self.make_keys(&op.label, op.rows, attend.slot);
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
}

/// Raw projections that an op reads which stores or attends.
pub(super) fn raw_inputs(op: &Op) -> Vec<Value> {
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
