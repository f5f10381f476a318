//! Outputs in every kind that products read, against those in f32.

use half::f16;

use super::{Case, FlashDecodeParams, Params, PreparedRows, Ready};
use crate::{
    kernel::{
        activation::{TILE_TOKENS, tile_bytes, tile_index},
        linear::gemv::MAX_ROWS,
    },
    testing::Card,
};

/// Outputs as products want them, from the bits of those in f32.
pub(super) fn check(card: &Card, case: &Case, ready: &Ready, found: &[f32]) {
    let columns = case.heads.count * case.heads.head_dim;
    let rows = found.len() / columns;
    let run_as = |out_kind: u32, bytes: usize| -> Vec<u8> {
        let out = card.upload(&vec![0xaau8; bytes]);
        let params = FlashDecodeParams {
            out: out.address(),
            out_kind,
            ..ready.params
        };
        card.run(&ready.module, ready.grid, &params.bytes());
        card.download(&out, bytes)
    };
    let halves = |bytes: Vec<u8>| -> Vec<u16> {
        let (halves, _) = bytes.as_chunks();
        halves
            .iter()
            .map(|half| u16::from_le_bytes(*half))
            .collect()
    };
    let nearest: Vec<u16> = found.iter().map(|v| f16::from_f32(*v).to_bits()).collect();
    let f16s = halves(run_as(1, 2 * found.len()));
    assert!(f16s == nearest, "in f16: {case:?}");
    if columns.is_multiple_of(64) && rows <= TILE_TOKENS {
        let tiles = halves(run_as(2, tile_bytes(columns)));
        let place = |i: usize| tiles[tile_index(i / columns, i % columns)];
        assert!(
            (0..found.len()).map(place).eq(nearest),
            "in token tiles: {case:?}"
        );
    }
    if case.heads.fill_blocks() && rows <= MAX_ROWS {
        let prepared = run_as(3, PreparedRows::bytes(columns));
        check_prepared(&prepared, found, columns);
    }
}

/// Prepared rows against the definition of their codes. A value halfway between two may go either way: reciprocals are approximate.
fn check_prepared(prepared: &[u8], rows: &[f32], columns: usize) {
    let (codes, floats) = prepared.split_at(MAX_ROWS * columns);
    let (floats, _) = floats.as_chunks();
    let (scales, sums) = floats.split_at(MAX_ROWS * columns / 32);
    for (r, row) in rows.chunks_exact(columns).enumerate() {
        for (b, block) in row.chunks_exact(32).enumerate() {
            let largest = block.iter().fold(0.0f32, |a, v| a.max(v.abs()));
            let scale = largest * (1.0f32 / 127.0);
            let found = &codes[r * columns + 32 * b..][..32];
            let found: Vec<i8> = found.iter().map(|code| *code as i8).collect();
            for (value, code) in block.iter().zip(&found) {
                let steps = f64::from(*value) / f64::from(scale);
                let off = (steps - f64::from(*code)).abs();
                assert!(off < 0.5 + 1e-4, "row {r}, block {b}: {steps} as {code}");
            }
            let sum: i32 = found.iter().map(|code| i32::from(*code)).sum();
            let at = b * MAX_ROWS + r;
            assert_eq!(f32::from_le_bytes(scales[at]), scale, "row {r}, block {b}");
            assert_eq!(f32::from_le_bytes(sums[at]), scale * sum as f32);
        }
    }
}
