//! Twin of `kernels/attention/qkv_norm_rope.cu`: head norms, RoPE and KV store of large batches, in one launch.

use carat_model::{
    kv::KvType,
    plan::{KvSlot, RopeId},
    weights::Weight,
};

use crate::kernel::{
    Addresses, Kernel, Operand, RowRefsAt, RowsAt, SlotAt, Specialization,
    specialization::kv_constant,
};
use crate::{
    device::{Address, Grid},
    kernel::params::{Params, params},
    kernel::weights::WeightOperand,
};

/// Head sizes that are compiled for.
pub(crate) const HEAD_DIMS: [usize; 6] = [16, 32, 64, 128, 256, 512];
const THREADS: usize = 128;

params! {
    struct QkvNormRopeParams {
        rows: RowsAt,
        row_refs: RowRefsAt,
        slot: SlotAt,
        x: Address,
        q_weight: Address,
        k_weight: Address,
        frequencies: Address,
        q: Address,
        stride: u32,
        q_column: u32,
        k_column: u32,
        v_column: u32,
        q_heads: u32,
        kv_heads: u32,
        q_eps: f32,
        k_eps: f32,
        v_eps: f32,
    }
}

/// Queries, keys and values of one layer out of the rows of `x`, which has `stride` columns.
#[derive(Debug)]
pub(crate) struct QkvNormRope {
    pub(crate) x: Operand,
    pub(crate) stride: usize,
    /// One of [`HEAD_DIMS`].
    pub(crate) head_dim: usize,
    pub(crate) rope: RopeId,
    pub(crate) queries: Option<Queries>,
    pub(crate) keys_values: Option<KeysValues>,
    /// Launched with PDL.
    pub(crate) pdl: bool,
}

/// `out = rope(norm(x[column..]))`, f16 `[rows, heads * head_dim]`.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Queries {
    pub(crate) column: usize,
    pub(crate) heads: usize,
    pub(crate) weight: Option<Weight>,
    pub(crate) eps: f32,
    pub(crate) out: Operand,
}

/// `rope(norm(x[k_column..]))` and `norm(x[v_column..])`, into their pages. Both columns may be the same.
#[derive(Clone, Copy, Debug)]
pub(crate) struct KeysValues {
    pub(crate) k_column: usize,
    pub(crate) k_weight: Option<Weight>,
    pub(crate) k_eps: f32,
    pub(crate) v_column: usize,
    pub(crate) v_eps: f32,
    pub(crate) heads: usize,
    pub(crate) slot: KvSlot,
    pub(crate) kv: KvType,
}

pub(crate) fn specialization(head_dim: usize, kv: KvType) -> Specialization {
    Specialization {
        kernel: "qkv_norm_rope",
        entries: &["qkv_norm_rope"],
        constants: [("HEAD_DIM", head_dim.to_string())]
            .into_iter()
            .chain(kv_constant(kv))
            .collect(),
        params_bytes: QkvNormRopeParams::BYTES,
    }
}

impl Kernel for QkvNormRope {
    fn specialization(&self) -> Specialization {
        assert!(
            HEAD_DIMS.contains(&self.head_dim),
            "heads of {}",
            self.head_dim
        );
        let kv = self.keys_values.map_or_else(KvType::default, |kv| kv.kv);
        specialization(self.head_dim, kv)
    }

    fn grid(&self, rows: usize) -> Grid {
        Grid {
            pdl: self.pdl,
            ..Grid::new((rows, 1), THREADS)
        }
    }

    fn params(&self, at: &Addresses, rows: RowsAt) -> Vec<u8> {
        let (q, kv) = (self.queries, self.keys_values);
        QkvNormRopeParams {
            rows,
            row_refs: at.batch.row_refs,
            slot: kv.map_or(SlotAt::NONE, |kv| at.slot(kv.slot)),
            x: at.operand(self.x),
            q_weight: at.vector(q.and_then(|q| q.weight)),
            k_weight: at.vector(kv.and_then(|kv| kv.k_weight)),
            frequencies: at.rope(self.rope),
            q: q.map_or(Address::NULL, |q| at.operand(q.out)),
            stride: self.stride as u32,
            q_column: q.map_or(0, |q| q.column) as u32,
            k_column: kv.map_or(0, |kv| kv.k_column) as u32,
            v_column: kv.map_or(0, |kv| kv.v_column) as u32,
            q_heads: q.map_or(0, |q| q.heads) as u32,
            kv_heads: kv.map_or(0, |kv| kv.heads) as u32,
            q_eps: q.map_or(0.0, |q| q.eps),
            k_eps: kv.map_or(0.0, |kv| kv.k_eps),
            v_eps: kv.map_or(0.0, |kv| kv.v_eps),
        }
        .bytes()
    }

    fn weights(&self) -> Vec<WeightOperand> {
        WeightOperand::vectors([
            self.queries.and_then(|q| q.weight),
            self.keys_values.and_then(|kv| kv.k_weight),
        ])
    }

    fn reads(&self) -> Vec<Operand> {
        vec![self.x]
    }

    fn writes(&self) -> Vec<Operand> {
        self.queries.iter().map(|q| q.out).collect()
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;
    use crate::{
        kernel::{
            KvNormRopeStore, RmsNorm, Rope,
            testing::{POISON, Table},
        },
        testing::{f16_bits, f16_value, normals},
    };

    pub(crate) const EPS: f32 = 1e-6;
    pub(crate) const ROPE: RopeId = RopeId(0);
    pub(crate) const SLOT: KvSlot = KvSlot(0);
    /// Rows of a bucket, and how many there are.
    const ROOM: usize = 7;
    const ROWS: usize = 5;

    #[derive(Clone, Copy)]
    struct Case {
        head_dim: usize,
        q_heads: usize,
        kv_heads: usize,
        values_are_keys: bool,
        kv: KvType,
    }

    fn cut(x: &[f32], stride: usize, column: usize, columns: usize) -> Vec<f32> {
        let rows = x.chunks_exact(stride);
        rows.flat_map(|row| row[column..column + columns].to_vec())
            .collect()
    }

    /// A head normed and rotated in f64.
    fn exact(head: &[f32], weight: &[f32], frequencies: &[f32], position: u32) -> Vec<f64> {
        let squares = head.iter().map(|v| f64::from(*v).powi(2));
        let mean = squares.sum::<f64>() / head.len() as f64;
        let scale = 1.0 / (mean + f64::from(EPS)).sqrt();
        let normed = head.iter().zip(weight);
        let mut out: Vec<f64> = normed
            .map(|(v, w)| f64::from(*v) * scale * f64::from(*w))
            .collect();
        let (first, second) = out.split_at_mut(head.len() / 2);
        for ((a, b), frequency) in first.iter_mut().zip(second).zip(frequencies) {
            let (sin, cos) = f64::from(position as f32 * frequency).sin_cos();
            (*a, *b) = (*a * cos - *b * sin, *a * sin + *b * cos);
        }
        out
    }

    impl Case {
        fn q_columns(&self) -> usize {
            self.q_heads * self.head_dim
        }

        /// First column of keys, of values, and the length of a row. There are gaps.
        fn columns(&self) -> (usize, usize, usize) {
            let kv = self.kv_heads * self.head_dim;
            let k = self.q_columns() + 4;
            let v = k + if self.values_are_keys { 0 } else { kv };
            (k, v, v + kv + 8)
        }

        /// Queries to `out` as floats, keys and values to their pages.
        fn run_plain(
            &self,
            table: &mut Table,
            x: &[f32],
            (q_w, k_w): (Weight, Weight),
            out: Operand,
        ) {
            let (k, v, stride) = self.columns();
            let (q_columns, kv_columns) = (self.q_columns(), self.kv_heads * self.head_dim);
            if self.q_heads > 0 {
                let x = table.put(&cut(x, stride, 0, q_columns));
                let normed = table.poison(ROOM * q_columns);
                let norm = RmsNorm {
                    x,
                    weight: Some(q_w),
                    columns: q_columns,
                    group: self.head_dim,
                    eps: EPS,
                    out: normed,
                };
                let rope = Rope {
                    x: normed,
                    table: ROPE,
                    columns: q_columns,
                    head_dim: self.head_dim,
                    out,
                };
                table.run(ROWS, ROOM, &norm);
                table.run(ROWS, ROOM, &rope);
            }
            if self.kv_heads > 0 {
                let keys_values = KvNormRopeStore {
                    k: table.put(&cut(x, stride, k, kv_columns)),
                    k_weight: Some(k_w),
                    k_eps: EPS,
                    v: table.put(&cut(x, stride, v, kv_columns)),
                    v_weight: None,
                    v_eps: EPS,
                    rope: ROPE,
                    slot: SLOT,
                    kv: self.kv,
                    kv_heads: self.kv_heads,
                    head_dim: self.head_dim,
                };
                table.run(ROWS, ROOM, &keys_values);
            }
        }

        fn run_fused(
            &self,
            table: &mut Table,
            x: &[f32],
            (q_w, k_w): (Weight, Weight),
            out: Operand,
        ) {
            let (k_column, v_column, stride) = self.columns();
            let fused = QkvNormRope {
                x: table.put(x),
                stride,
                head_dim: self.head_dim,
                rope: ROPE,
                pdl: false,
                queries: (self.q_heads > 0).then_some(Queries {
                    column: 0,
                    heads: self.q_heads,
                    weight: Some(q_w),
                    eps: EPS,
                    out,
                }),
                keys_values: (self.kv_heads > 0).then_some(KeysValues {
                    k_column,
                    k_weight: Some(k_w),
                    k_eps: EPS,
                    v_column,
                    v_eps: EPS,
                    heads: self.kv_heads,
                    slot: SLOT,
                    kv: self.kv,
                }),
            };
            table.run(ROWS, ROOM, &fused);
        }
    }

    /// Plain and fused kernels on the same input: the bits of queries and pages are the same, and the values are right.
    fn check(table: &mut Table, case: Case) {
        let (head_dim, q_columns, (_, _, stride)) =
            (case.head_dim, case.q_columns(), case.columns());
        let x = normals(head_dim as u64, ROOM * stride);
        let (q_weight, k_weight) = (normals(2, head_dim), normals(3, head_dim));
        let frequencies: Vec<f32> = (0..head_dim / 2)
            .map(|j| 10000f32.powf(-(j as f32) / (head_dim / 2) as f32))
            .collect();
        let positions = table.operands(ROOM);
        table.rope(&frequencies);
        table.slot(case.kv_heads.max(1), head_dim, case.kv);
        let weights = (table.weight(&q_weight), table.weight(&k_weight));
        let plain = table.poison(ROOM * q_columns + 1);
        let fused = table.put(&vec![POISON; ROOM * q_columns + 1]);
        case.run_plain(table, &x, weights, plain);
        let pages = table.take_pages();
        case.run_fused(table, &x, weights, fused);
        assert!(table.take_pages() == pages, "pages: heads of {head_dim}");
        let plain = table.get::<f32>(plain, ROWS * q_columns);
        let fused = table.get::<u16>(fused, ROOM * q_columns + 1);
        let (found, rest) = fused.split_at(ROWS * q_columns);
        assert_eq!(found, f16_bits(&plain), "heads of {head_dim}");
        assert!(rest.iter().all(|bits| *bits == POISON));
        // Against f64, so that both cannot be wrong together.
        for (i, found) in found.chunks_exact(head_dim).enumerate() {
            let (row, h) = (i / case.q_heads, i % case.q_heads);
            let head = &x[row * stride + h * head_dim..][..head_dim];
            let expected = exact(head, &q_weight, &frequencies, positions[row]);
            for (found, expected) in found.iter().zip(expected) {
                let error = (f64::from(f16_value(*found)) - expected).abs();
                assert!(error < 2e-3 * (1.0 + expected.abs()), "heads of {head_dim}");
            }
        }
        table.clear();
    }

    #[test]
    #[ignore = "needs a card"]
    fn qkv_norm_rope_has_the_bits_of_the_plain_kernels() {
        let mut table = Table::new();
        for head_dim in HEAD_DIMS {
            for (q_heads, kv_heads, values_are_keys) in [
                (3, 1, false),
                (5, 2, true),
                (8, 2, false),
                (2, 0, false),
                (0, 3, false),
            ] {
                for kv in [KvType::F16, KvType::Q8_0] {
                    let case = Case {
                        head_dim,
                        q_heads,
                        kv_heads,
                        values_are_keys,
                        kv,
                    };
                    check(&mut table, case);
                }
            }
        }
    }
}
