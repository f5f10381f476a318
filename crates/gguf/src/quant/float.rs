//! F32, F16 and BF16: a "block" is one value.

pub(super) fn f32_block(block: &[u8], out: &mut [f32]) {
    out[0] = f32::from_le_bytes([block[0], block[1], block[2], block[3]]);
}

pub(super) fn f16_block(block: &[u8], out: &mut [f32]) {
    out[0] = super::half_at(block, 0);
}

pub(super) fn bf16_block(block: &[u8], out: &mut [f32]) {
    out[0] = half::bf16::from_le_bytes([block[0], block[1]]).to_f32();
}
