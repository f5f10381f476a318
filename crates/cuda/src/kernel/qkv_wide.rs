//! Twin of `kernels/qkv_wide.cu`.

use carat_model::{
    plan::{KvSlot, RopeId},
    weights::Weight,
};

use super::{Addresses, Kernel, Place, PlacesAt, RowsAt, SlotAt, Specialization};
use crate::{
    device::Address,
    launch::Grid,
    params::{Params, params},
    weights::Packed,
};

/// Widths of heads that there are kernels for.
pub(crate) const HEAD_DIMS: [usize; 6] = [16, 32, 64, 128, 256, 512];
const THREADS: usize = 128;

params! {
    struct QkvWideParams {
        rows: RowsAt,
        places: PlacesAt,
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
pub(crate) struct QkvWide {
    pub(crate) x: Place,
    pub(crate) stride: usize,
    /// One of [`HEAD_DIMS`].
    pub(crate) head_dim: usize,
    pub(crate) rope: RopeId,
    pub(crate) queries: Option<Queries>,
    pub(crate) keys_values: Option<KeysValues>,
}

/// `out = rope(norm(x[column..]))`, halves `[rows, heads * head_dim]`.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Queries {
    pub(crate) column: usize,
    pub(crate) heads: usize,
    pub(crate) weight: Option<Weight>,
    pub(crate) eps: f32,
    pub(crate) out: Place,
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
}

pub(super) fn specialization(head_dim: usize) -> Specialization {
    Specialization {
        kernel: "qkv_wide",
        entries: &["qkv_wide"],
        constants: vec![("HEAD_DIM", head_dim.to_string())],
        params_bytes: QkvWideParams::BYTES,
    }
}

impl Kernel for QkvWide {
    fn specialization(&self) -> Specialization {
        assert!(
            HEAD_DIMS.contains(&self.head_dim),
            "heads of {}",
            self.head_dim
        );
        specialization(self.head_dim)
    }

    fn grid(&self, rows: usize) -> Grid {
        Grid::new((rows, 1), THREADS)
    }

    fn params(&self, at: &Addresses, rows: RowsAt) -> Vec<u8> {
        let (q, kv) = (self.queries, self.keys_values);
        QkvWideParams {
            rows,
            places: at.batch.places,
            slot: kv.map_or(SlotAt::NONE, |kv| at.slot(kv.slot)),
            x: at.place(self.x),
            q_weight: at.vector(q.and_then(|q| q.weight)),
            k_weight: at.vector(kv.and_then(|kv| kv.k_weight)),
            frequencies: at.rope(self.rope),
            q: q.map_or(Address::NULL, |q| at.place(q.out)),
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

    fn weights(&self) -> Vec<Packed> {
        Packed::vectors([
            self.queries.and_then(|q| q.weight),
            self.keys_values.and_then(|kv| kv.k_weight),
        ])
    }

    fn reads(&self) -> Vec<Place> {
        vec![self.x]
    }

    fn writes(&self) -> Vec<Place> {
        self.queries.iter().map(|q| q.out).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{
        kernel::{
            NormRope, NormRopeStore,
            testing::{PAGES, Table},
        },
        testing::{half, halves, normals},
    };

    const EPS: f32 = 1e-6;
    const ROPE: RopeId = RopeId(0);
    const SLOT: KvSlot = KvSlot(0);

    #[derive(Clone, Copy)]
    struct Case {
        head_dim: usize,
        q_heads: usize,
        kv_heads: usize,
        values_are_keys: bool,
    }

    fn cut(x: &[f32], stride: usize, column: usize, columns: usize) -> Vec<f32> {
        let rows = x.chunks_exact(stride);
        rows.flat_map(|row| row[column..column + columns].to_vec())
            .collect()
    }

    /// Both ways on the same input: the bits of queries and pages are the same, and the values are right.
    fn check(table: &mut Table, case: Case) {
        let Case {
            head_dim,
            q_heads,
            kv_heads,
            values_are_keys,
        } = case;
        let (rows, room) = (5, 7);
        let (q_columns, kv_columns) = (q_heads * head_dim, kv_heads * head_dim);
        let k_column = q_columns + 4;
        let v_column = if values_are_keys {
            k_column
        } else {
            k_column + kv_columns
        };
        let stride = v_column + kv_columns + 8;
        let x = normals(head_dim as u64, room * stride);
        let (q_weight, k_weight) = (normals(2, head_dim), normals(3, head_dim));
        let frequencies: Vec<f32> = (0..head_dim / 2)
            .map(|j| 10000f32.powf(-(j as f32) / (head_dim / 2) as f32))
            .collect();
        let positions = table.places(room);
        table.rope(&frequencies);
        table.slot(kv_heads.max(1), head_dim);
        let x_at = table.put(&x);
        let q_at = table.put(&cut(&x, stride, 0, q_columns.max(1)));
        let k_at = table.put(&cut(&x, stride, k_column, kv_columns.max(1)));
        let v_at = table.put(&cut(&x, stride, v_column, kv_columns.max(1)));
        let (q_w, k_w) = (table.weight(&q_weight), table.weight(&k_weight));
        let plain = table.poison(room * q_columns + 1);
        let wide = table.put(&vec![0x7e00u16; room * q_columns + 1]);
        if q_heads > 0 {
            table.run(
                rows,
                room,
                &NormRope {
                    x: q_at,
                    weight: Some(q_w),
                    eps: EPS,
                    rope: ROPE,
                    columns: q_columns,
                    head_dim,
                    out: plain,
                },
            );
        }
        if kv_heads > 0 {
            table.run(
                rows,
                room,
                &NormRopeStore {
                    k: k_at,
                    k_weight: Some(k_w),
                    k_eps: EPS,
                    v: v_at,
                    v_weight: None,
                    v_eps: EPS,
                    rope: ROPE,
                    slot: SLOT,
                    kv_heads,
                    head_dim,
                },
            );
        }
        let pages = table.take_pages();
        table.run(
            rows,
            room,
            &QkvWide {
                x: x_at,
                stride,
                head_dim,
                rope: ROPE,
                queries: (q_heads > 0).then_some(Queries {
                    column: 0,
                    heads: q_heads,
                    weight: Some(q_w),
                    eps: EPS,
                    out: wide,
                }),
                keys_values: (kv_heads > 0).then_some(KeysValues {
                    k_column,
                    k_weight: Some(k_w),
                    k_eps: EPS,
                    v_column,
                    v_eps: EPS,
                    heads: kv_heads,
                    slot: SLOT,
                }),
            },
        );
        let size = PAGES * 32 * kv_heads.max(1) * head_dim;
        assert_eq!(pages[0].len(), size);
        let found = table.take_pages();
        assert!(found == pages, "pages differ: heads of {head_dim}");
        let (plain, wide) = (
            table.get::<f32>(plain, rows * q_columns),
            table.get::<u16>(wide, room * q_columns + 1),
        );
        assert_eq!(
            wide[..rows * q_columns],
            halves(&plain),
            "heads of {head_dim}"
        );
        assert!(wide[rows * q_columns..].iter().all(|bits| *bits == 0x7e00));
        // Against f64, so that both cannot be wrong together.
        for row in 0..rows.min(q_columns * rows) {
            for h in 0..q_heads {
                let head = &x[row * stride + h * head_dim..][..head_dim];
                let mean =
                    head.iter().map(|v| f64::from(*v).powi(2)).sum::<f64>() / head_dim as f64;
                let scale = 1.0 / (mean + f64::from(EPS)).sqrt();
                let normed = |j: usize| f64::from(head[j]) * scale * f64::from(q_weight[j]);
                for j in 0..head_dim / 2 {
                    let angle = f64::from(positions[row] as f32 * frequencies[j]);
                    let (a, b) = (normed(j), normed(j + head_dim / 2));
                    let found =
                        |j: usize| f64::from(half(wide[(row * q_heads + h) * head_dim + j]));
                    let expected = [
                        a * angle.cos() - b * angle.sin(),
                        a * angle.sin() + b * angle.cos(),
                    ];
                    assert!((found(j) - expected[0]).abs() < 2e-3 * (1.0 + expected[0].abs()));
                    assert!(
                        (found(j + head_dim / 2) - expected[1]).abs()
                            < 2e-3 * (1.0 + expected[1].abs())
                    );
                }
            }
        }
        table.clear();
    }

    #[test]
    #[ignore = "needs a card"]
    fn qkv_wide_has_the_bits_of_the_plain_kernels() {
        let mut table = Table::new();
        for head_dim in HEAD_DIMS {
            for (q_heads, kv_heads, values_are_keys) in [
                (3, 1, false),
                (5, 2, true),
                (8, 2, false),
                (2, 0, false),
                (0, 3, false),
            ] {
                check(
                    &mut table,
                    Case {
                        head_dim,
                        q_heads,
                        kv_heads,
                        values_are_keys,
                    },
                );
            }
        }
    }

    #[test]
    #[ignore = "needs a card"]
    fn qkv_wide_timing() {
        for (head_dim, q_heads, kv_heads) in [(256, 8, 2), (512, 8, 2), (256, 16, 8)] {
            for rows in [512, 2048] {
                let mut table = Table::new();
                let columns = (q_heads + 2 * kv_heads) * head_dim;
                let turns = Table::turns(rows * columns * 6);
                table.places_with_pages(rows);
                table.rope(&normals(1, head_dim / 2));
                table.slot_with_pages(kv_heads, head_dim, rows / 32);
                let (q_w, k_w) = (
                    table.weight(&normals(2, head_dim)),
                    table.weight(&normals(3, head_dim)),
                );
                let x = table.big(turns * rows * columns * 4);
                let out = table.big(turns * rows * q_heads * head_dim * 2);
                let call = |turn: usize| QkvWide {
                    x: table.shifted(x, turn * rows * columns * 4),
                    stride: columns,
                    head_dim,
                    rope: ROPE,
                    queries: Some(Queries {
                        column: 0,
                        heads: q_heads,
                        weight: Some(q_w),
                        eps: EPS,
                        out: table.shifted(out, turn * rows * q_heads * head_dim * 2),
                    }),
                    keys_values: Some(KeysValues {
                        k_column: q_heads * head_dim,
                        k_weight: Some(k_w),
                        k_eps: EPS,
                        v_column: (q_heads + kv_heads) * head_dim,
                        v_eps: EPS,
                        heads: kv_heads,
                        slot: SLOT,
                    }),
                };
                let calls: Vec<QkvWide> = (0..turns).map(call).collect();
                let name = format!("qkv_wide {q_heads}+2*{kv_heads} heads of {head_dim}");
                table.time(&name, rows, rows * columns * 6, &calls);
            }
        }
    }
}
