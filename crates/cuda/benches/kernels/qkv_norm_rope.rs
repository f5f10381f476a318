//! Head norms, RoPE and the store to KV pages in one kernel.

use carat_model::kv::KvType;

use crate::{
    kernel::{
        KeysValues, QkvNormRope, Queries,
        attention::qkv_norm_rope::tests::{EPS, ROPE, SLOT},
        testing::Table,
    },
    testing::normals,
};

pub(crate) fn all() {
    for (head_dim, q_heads, kv_heads) in [(256, 8, 2), (512, 8, 2), (256, 16, 8)] {
        for rows in [512, 2048] {
            let mut table = Table::new();
            let columns = (q_heads + 2 * kv_heads) * head_dim;
            let rotations = Table::rotations(rows * columns * 6);
            table.rows_with_pages(rows);
            table.rope(&normals(1, head_dim / 2));
            table.slot_with_pages(kv_heads, head_dim, KvType::F16, rows / 32);
            let (q_w, k_w) = (
                table.weight(&normals(2, head_dim)),
                table.weight(&normals(3, head_dim)),
            );
            let x = table.big(rotations * rows * columns * 4);
            let out = table.big(rotations * rows * q_heads * head_dim * 2);
            let call = |rotation: usize| QkvNormRope {
                x: table.shifted(x, rotation * rows * columns * 4),
                stride: columns,
                head_dim,
                rope: ROPE,
                pdl: false,
                queries: Some(Queries {
                    column: 0,
                    heads: q_heads,
                    weight: Some(q_w),
                    eps: EPS,
                    out: table.shifted(out, rotation * rows * q_heads * head_dim * 2),
                }),
                keys_values: Some(KeysValues {
                    k_column: q_heads * head_dim,
                    k_weight: Some(k_w),
                    k_eps: EPS,
                    v_column: (q_heads + kv_heads) * head_dim,
                    v_eps: EPS,
                    heads: kv_heads,
                    slot: SLOT,
                    kv: KvType::F16,
                }),
            };
            let calls: Vec<QkvNormRope> = (0..rotations).map(call).collect();
            let name = format!("qkv_norm_rope {q_heads}+2*{kv_heads} heads of {head_dim}");
            table.time(&name, rows, rows * columns * 6, &calls);
        }
    }
}
