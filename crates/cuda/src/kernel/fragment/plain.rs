//! Packing and reading fragments one code at a time: the definition that faster code is compared with.

use carat_gguf::{
    QuantType,
    quant::{CODES_GROUP, IQ4_VALUES, MXFP4_VALUES, k_scale_min, q3_k_scales},
};

use super::{FragmentFormat, M_TILE, code_table::CodeTable};

/// Offsets into a K-block, plane after plane. Codes, or their low four bits, are at 0; an empty plane starts where the next one
/// does.
struct Offsets {
    /// The codes' bits above the low ones.
    high: usize,
    /// 16 bytes per row: scales, or scales and minimums alternating. Of T4 two bytes per row, part after part.
    sub_scales: usize,
    /// The f16 scales, and minimums' scales, of a row. Of T1 those of all rows for 128 inputs, then those for the next.
    scales: usize,
    /// The code table.
    table: usize,
}

impl Offsets {
    /// The sub-scale of a row's input in T4.
    fn t4_sub_scale(&self, row: usize, input: usize) -> usize {
        self.sub_scales + input / 64 * 2 * M_TILE + 2 * row + input / 32 % 2
    }
}

impl FragmentFormat {
    fn offsets(self) -> Offsets {
        let (low_bits, high_bits) = self.code_bits();
        let codes = M_TILE * self.k_block_inputs();
        let high = codes * low_bits as usize / 8;
        let sub_scales = high + codes * high_bits as usize / 8;
        let scales = sub_scales + M_TILE * self.scale_bytes().0;
        Offsets {
            high,
            sub_scales,
            scales,
            table: scales + M_TILE * self.scale_bytes().1,
        }
    }

    /// Byte and shift of a code's low bits and of its high bits within a K-block, for a row of the M-tile and an input of
    /// the K-block.
    fn code_at(self, row: usize, input: usize) -> [(usize, usize); 2] {
        let (half, part) = (row / 8, input / 64);
        if self.has_short_steps() {
            let (group, quad, byte) = (input % 64 / 16, input % 16 / 4, input % 4);
            let lane = 4 * (row % 8) + quad;
            let operand = 2 * group + half;
            let high = self.offsets().high;
            let nibble = (512 * part + 16 * lane + 4 * group + byte, 4 * half);
            // Two bits of each of a lane's operands, and one bit of each.
            let pair = 256 * part + 8 * lane + operand / 4 * 4;
            let one = high + 128 * part + 4 * lane;
            // Where an operand's codes are in nibbles side by side.
            let (run, shift) = (2 * half + byte / 2, 4 * (byte % 2));
            return match self {
                FragmentFormat::F4 => [(512 * part + 16 * lane + 4 * group + run, shift), (0, 0)],
                FragmentFormat::T3 => [
                    (pair + run, shift + 2 * (group % 2)),
                    (one + run, shift + group),
                ],
                FragmentFormat::T2 => [(pair + run, shift + 2 * (group % 2)), (0, 0)],
                FragmentFormat::T1 => [(128 * part + 4 * lane + run, shift + group), (0, 0)],
                FragmentFormat::K2 => [(pair + byte, 2 * (operand % 4)), (0, 0)],
                _ => [nibble, (high + pair + byte, 2 * (operand % 4))],
            };
        }
        let (step, quad, byte) = (input % 64 / 32, input % 32 / 8, input % 4);
        let lane = 4 * (row % 8) + quad;
        // Number of the A operand's register, of four.
        let register = half + 2 * (input % 8 / 4);
        let high = self.offsets().high + 128 * part + 4 * lane + byte;
        let low = if self == FragmentFormat::Q8 {
            (512 * step + 16 * lane + 4 * register + byte, 0)
        } else {
            let word = 512 * part + 16 * lane + 4 * (2 * step + register / 2);
            if self.is_looked_up() {
                (word + 2 * half + byte / 2, 4 * (byte % 2))
            } else {
                (word + byte, 4 * half)
            }
        };
        [low, (high, 4 * step + register)]
    }

    fn put_code(self, k_block: &mut [u8], row: usize, input: usize, code: u8) {
        let (low_bits, high_bits) = self.code_bits();
        let [low, high] = self.code_at(row, input);
        k_block[low.0] |= (code & mask(low_bits)) << low.1;
        if high_bits > 0 {
            k_block[high.0] |= (code >> low_bits & mask(high_bits)) << high.1;
        }
    }

    fn code(self, k_block: &[u8], row: usize, input: usize) -> u8 {
        let (low_bits, high_bits) = self.code_bits();
        let [low, high] = self.code_at(row, input);
        let mut code = k_block[low.0] >> low.1 & mask(low_bits);
        if high_bits > 0 {
            code |= (k_block[high.0] >> high.1 & mask(high_bits)) << low_bits;
        }
        code
    }

    /// One value of a packed matrix: exactly what dequantizing the file's row gives.
    pub(crate) fn value(self, fragments: &[u8], columns: usize, row: usize, column: usize) -> f32 {
        let (at, inputs) = (self.offsets(), self.k_block_inputs());
        let start =
            row / M_TILE * self.m_tile_bytes(columns) + column / inputs * self.k_block_bytes();
        let k_block = &fragments[start..start + self.k_block_bytes()];
        let (row, input) = (row % M_TILE, column % inputs);
        let code = self.code(k_block, row, input);
        let sub_scale = |i: usize| k_block[at.sub_scales + 16 * row + i];
        match self {
            FragmentFormat::Q8 => {
                f16_at(k_block, at.scales + 4 * row + 2 * (input / 32))
                    * f32::from(code.cast_signed())
            }
            FragmentFormat::Q4 => {
                let code = (code << 4).cast_signed() >> 4;
                f16_at(k_block, at.scales + 4 * row + 2 * (input / 32)) * f32::from(code)
            }
            FragmentFormat::Q5 => {
                let code = (code << 3).cast_signed() >> 3;
                f16_at(k_block, at.scales + 4 * row + 2 * (input / 32)) * f32::from(code)
            }
            FragmentFormat::N4 => {
                f16_at(k_block, at.scales + 4 * row + 2 * (input / 32))
                    * f32::from(IQ4_VALUES[usize::from(code)])
            }
            FragmentFormat::M4 | FragmentFormat::M5 => {
                // The code's sign bit turned is the code of the file.
                let code = code ^ if self == FragmentFormat::M4 { 8 } else { 16 };
                let both = at.scales + 8 * row + 4 * (input / 32);
                f16_at(k_block, both) * f32::from(code) + f16_at(k_block, both + 2)
            }
            FragmentFormat::K2 => {
                let both = sub_scale(input / 16);
                let d = f16_at(k_block, at.scales + 4 * row);
                let dmin = f16_at(k_block, at.scales + 4 * row + 2);
                d * f32::from(both & 15) * f32::from(code) - dmin * f32::from(both >> 4)
            }
            FragmentFormat::K4 | FragmentFormat::K5 => {
                let (scale, min) = (sub_scale(input / 32 * 2), sub_scale(input / 32 * 2 + 1));
                let d = f16_at(k_block, at.scales + 4 * row);
                let dmin = f16_at(k_block, at.scales + 4 * row + 2);
                d * f32::from(scale) * f32::from(code) - dmin * f32::from(min)
            }
            FragmentFormat::K6 => {
                let code = (code << 2).cast_signed() >> 2;
                let scale = sub_scale(input / 16).cast_signed();
                f16_at(k_block, at.scales + 2 * row) * f32::from(scale) * f32::from(code)
            }
            FragmentFormat::T4
            | FragmentFormat::F4
            | FragmentFormat::T3
            | FragmentFormat::T2
            | FragmentFormat::T1 => {
                let word = |i: usize| {
                    let bytes = &k_block[at.table + 4 * i..][..4];
                    u32::from_le_bytes(bytes.try_into().expect("four bytes"))
                };
                let (factor, shift) = (f32::from_bits(word(4)), word(5));
                let scale = match self {
                    FragmentFormat::T4 => {
                        f32::from(k_block[at.t4_sub_scale(row, input)].cast_signed())
                    }
                    FragmentFormat::F4 => {
                        f32::from_bits(u32::from(sub_scale(input / CODES_GROUP)) << shift)
                    }
                    FragmentFormat::T3 => f32::from(sub_scale(input / CODES_GROUP).cast_signed()),
                    _ => 1.0,
                };
                let entry = k_block[at.table + usize::from(code)].cast_signed();
                let of_row = match self {
                    FragmentFormat::T1 => 2 * M_TILE * (input / 128) + 2 * row,
                    _ => 2 * row,
                };
                f16_at(k_block, at.scales + of_row) * (scale * factor) * f32::from(entry)
            }
        }
    }
}

fn mask(bits: u32) -> u8 {
    0xff >> (8 - bits)
}

fn f16_at(bytes: &[u8], at: usize) -> f32 {
    let mut value = [0.0];
    QuantType::F16.dequantize(&bytes[at..at + 2], &mut value);
    value[0]
}

/// Packs the rows of a matrix. `quant` must have fragments; `row` gives a row's bytes in the file.
pub(crate) fn pack<'a>(
    quant: QuantType,
    rows: usize,
    columns: usize,
    row: impl Fn(usize) -> &'a [u8],
) -> Vec<u8> {
    let format = FragmentFormat::of(quant).expect("a format that has fragments");
    let mut fragments = vec![0; format.fragment_bytes(rows, columns)];
    let (inputs, bytes) = (format.k_block_inputs(), format.k_block_bytes());
    for r in 0..rows {
        let m_tile = r / M_TILE * format.m_tile_bytes(columns);
        let blocks = row(r).chunks_exact(quant.block_bytes());
        for (i, block) in blocks.enumerate() {
            let column = i * quant.block_len();
            let k_block = &mut fragments[m_tile + column / inputs * bytes..][..bytes];
            pack_block(quant, block, k_block, r % M_TILE, column % inputs);
        }
    }
    if let Some(table) = CodeTable::of(quant) {
        let words = table.words().map(u32::to_le_bytes);
        for k_block in fragments.chunks_exact_mut(bytes) {
            k_block[format.offsets().table..].copy_from_slice(words.as_flattened());
        }
    }
    fragments
}

/// Puts one block of the file into its K-block, from this input on.
fn pack_block(quant: QuantType, block: &[u8], k_block: &mut [u8], row: usize, first: usize) {
    let format = FragmentFormat::of(quant).expect("a format that has fragments");
    for j in 0..quant.block_len() {
        format.put_code(k_block, row, first + j, file_code(quant, block, j));
    }
    let at = format.offsets();
    let sub_scales = at.sub_scales + 16 * row..at.sub_scales + 16 * (row + 1);
    match format {
        FragmentFormat::Q8 | FragmentFormat::Q4 | FragmentFormat::Q5 | FragmentFormat::N4 => {
            let scale = at.scales + 4 * row + 2 * (first / 32);
            k_block[scale..scale + 2].copy_from_slice(&block[..2]);
        }
        FragmentFormat::M4 | FragmentFormat::M5 => {
            let both = at.scales + 8 * row + 4 * (first / 32);
            k_block[both..both + 4].copy_from_slice(&block[..4]);
        }
        FragmentFormat::K2 => {
            k_block[sub_scales].copy_from_slice(&block[..16]);
            k_block[at.scales + 4 * row..][..4].copy_from_slice(&block[80..]);
        }
        FragmentFormat::K4 | FragmentFormat::K5 => {
            let pairs = k_block[sub_scales].chunks_exact_mut(2);
            for (j, pair) in pairs.enumerate() {
                let (scale, min) = k_scale_min(&block[4..16], j);
                pair.copy_from_slice(&[scale, min]);
            }
            k_block[at.scales + 4 * row..][..4].copy_from_slice(&block[..4]);
        }
        FragmentFormat::K6 => {
            k_block[sub_scales].copy_from_slice(&block[192..208]);
            k_block[at.scales + 2 * row..][..2].copy_from_slice(&block[208..]);
        }
        FragmentFormat::T4 => {
            for sub in 0..8 {
                k_block[at.t4_sub_scale(row, 32 * sub)] = table_sub_scale(quant, block, 2 * sub);
            }
            k_block[at.scales + 2 * row..][..2].copy_from_slice(&table_scale(quant, block));
        }
        FragmentFormat::T2 | FragmentFormat::T1 => {
            let scale = at.scales + 2 * M_TILE * (first / 128) + 2 * row;
            k_block[scale..scale + 2].copy_from_slice(&table_scale(quant, block));
        }
        FragmentFormat::F4 | FragmentFormat::T3 => {
            let groups = &mut k_block[sub_scales][first / CODES_GROUP..];
            for (group, byte) in groups
                .iter_mut()
                .take(quant.block_len() / CODES_GROUP)
                .enumerate()
            {
                *byte = table_sub_scale(quant, block, group);
            }
            k_block[at.scales + 2 * row..][..2].copy_from_slice(&table_scale(quant, block));
        }
    }
}

/// The f16 scale of a block of a format with a table; 1 where groups have all there is.
fn table_scale(quant: QuantType, block: &[u8]) -> [u8; 2] {
    let at = match quant {
        QuantType::MXFP4 | QuantType::NVFP4 => return 0x3c00u16.to_le_bytes(),
        QuantType::IQ1_M => {
            let nibble = |k: usize| u16::from(block[49 + 2 * k] >> 4) << (4 * k);
            return (nibble(0) | nibble(1) | nibble(2) | nibble(3)).to_le_bytes();
        }
        QuantType::Q3_K => 108,
        QuantType::TQ1_0 => 52,
        QuantType::TQ2_0 => 64,
        _ => 0,
    };
    [block[at], block[at + 1]]
}

/// The sub-scale of a group of 16.
fn table_sub_scale(quant: QuantType, block: &[u8], group: usize) -> u8 {
    let centred = |scale: u8| scale.wrapping_sub(32);
    match quant {
        QuantType::IQ4_XS => {
            let sub = group / 2;
            let low = block[4 + sub / 2] >> (4 * (sub % 2)) & 15;
            centred(low | (block[2 + sub / 4] >> (2 * (sub % 4)) & 3) << 4)
        }
        QuantType::Q3_K => centred(q3_k_scales(&block[96..108])[group]),
        QuantType::MXFP4 => block[0],
        QuantType::NVFP4 if block[group] == 0x7f => 0,
        QuantType::NVFP4 => block[group] & 0x7f,
        _ => {
            // The group's whole scale is a small number times the block's.
            let (_, scales) = codes_and_scales(quant, block);
            let table = CodeTable::of(quant).expect("a format with a table");
            let one = f16_at(&table_scale(quant, block), 0) * table.factor;
            (scales[group] / one).round() as u8
        }
    }
}

fn codes_and_scales(quant: QuantType, block: &[u8]) -> ([i8; 256], [f32; 16]) {
    let (mut codes, mut scales) = ([[0; 8]; 32], [0.0; 16]);
    let length = quant.block_len();
    let definition = quant.codes().expect("defined by codes");
    definition(
        block,
        &mut codes[..length / 8],
        &mut scales[..length / CODES_GROUP],
    );
    (*codes.as_flattened().as_array().expect("256 codes"), scales)
}

/// The value of a code, before all scales.
fn table_value(quant: QuantType, block: &[u8], j: usize) -> i8 {
    let nibble = |codes: &[u8]| usize::from(codes[j % 16] >> (j % 32 / 16 * 4) & 15);
    match quant {
        QuantType::IQ4_XS => IQ4_VALUES[nibble(&block[8 + j / 32 * 16..])],
        QuantType::MXFP4 => MXFP4_VALUES[nibble(&block[1..])],
        QuantType::Q3_K => {
            let (half, step, byte) = (j / 128, j % 128 / 32, j % 32);
            let low = block[32 + 32 * half + byte] >> (2 * step) & 3;
            let high = block[byte] >> (4 * half + step) & 1;
            (low | high << 2).cast_signed() - 4
        }
        _ => codes_and_scales(quant, block).0[j],
    }
}

/// Code `j` of a block of the file as fragments hold it: centred codes as two's complement, cut to their bits.
fn file_code(quant: QuantType, block: &[u8], j: usize) -> u8 {
    let nibble = |codes: &[u8]| codes[j % 16] >> (j / 16 * 4) & 15;
    // Of the K formats: two runs of 32 values share their bytes.
    let sub_nibble = |codes: &[u8]| codes[j / 64 * 32 + j % 32] >> (j / 32 % 2 * 4) & 15;
    match quant {
        QuantType::Q8_0 => block[2 + j],
        QuantType::Q5_0 => {
            let fifth = block[2 + j / 8] >> (j % 8) & 1;
            (nibble(&block[6..]) | fifth << 4).wrapping_sub(16) & 31
        }
        QuantType::Q5_1 => {
            let fifth = block[4 + j / 8] >> (j % 8) & 1;
            (nibble(&block[8..]) | fifth << 4).wrapping_sub(16) & 31
        }
        QuantType::IQ4_NL => nibble(&block[2..]),
        QuantType::Q4_0 => nibble(&block[2..]).wrapping_sub(8) & 15,
        QuantType::Q4_1 => nibble(&block[4..]).wrapping_sub(8) & 15,
        QuantType::Q2_K => block[16 + j / 128 * 32 + j % 32] >> (j % 128 / 32 * 2) & 3,
        QuantType::Q4_K => sub_nibble(&block[16..]),
        QuantType::Q5_K => {
            let fifth = block[16 + j % 32] >> (j / 32) & 1;
            sub_nibble(&block[48..]) | fifth << 4
        }
        QuantType::Q6_K => {
            let (half, quarter, l) = (j / 128, j % 128 / 32, j % 32);
            let low = block[64 * half + 32 * (quarter % 2) + l] >> (quarter / 2 * 4) & 15;
            let high = block[128 + 32 * half + l] >> (2 * quarter) & 3;
            (low | high << 4).wrapping_sub(32) & 63
        }
        _ => {
            let table = CodeTable::of(quant).unwrap_or_else(|| panic!("{quant} has no fragments"));
            let value = table_value(quant, block, j);
            let code = table.values.iter().position(|&entry| entry == value);
            code.expect("a value of the table") as u8
        }
    }
}

#[cfg(test)]
mod tests {
    use std::collections::HashSet;

    use carat_gguf::quant::random_blocks;

    use super::*;
    use crate::kernel::load::pack::tests::packed;

    #[test]
    fn packed_values_are_those_of_the_file_bit_for_bit() {
        for quant in packed() {
            let format = FragmentFormat::of(quant).unwrap();
            // Whole M-tiles and odd ones; one K-block, and in short blocks a K-block and a half.
            for (rows, columns) in [(16, 256), (1, 512), (37, 768), (5, 3 * quant.block_len())] {
                let row_bytes = quant.row_bytes(columns);
                let mut bytes = vec![0; rows * row_bytes];
                random_blocks(quant, 5, 0.3, &mut bytes);
                let row = |r: usize| &bytes[r * row_bytes..(r + 1) * row_bytes];
                let fragments = pack(quant, rows, columns, row);
                assert_eq!(fragments.len(), format.fragment_bytes(rows, columns));
                for r in 0..rows {
                    let mut expected = vec![0.0; columns];
                    quant.dequantize(row(r), &mut expected);
                    for (c, expected) in expected.iter().enumerate() {
                        let value = format.value(&fragments, columns, r, c);
                        assert_eq!(value.to_bits(), expected.to_bits(), "{quant} {r} {c}");
                    }
                }
            }
        }
    }

    #[test]
    fn padding_stands_for_zeros() {
        for quant in packed() {
            let format = FragmentFormat::of(quant).unwrap();
            let columns = 3 * quant.block_len();
            let row = vec![0x5a; quant.row_bytes(columns)];
            let fragments = pack(quant, 3, columns, |_| &row);
            let padded = format.k_blocks(columns) * format.k_block_inputs();
            for r in 0..M_TILE {
                for c in if r < 3 { columns } else { 0 }..padded {
                    assert_eq!(
                        format.value(&fragments, columns, r, c),
                        0.0,
                        "{quant} {r} {c}"
                    );
                }
            }
        }
    }

    #[test]
    fn every_bit_of_a_k_block_has_one_use() {
        for format in FragmentFormat::ALL {
            let (low_bits, high_bits) = format.code_bits();
            let mut bits = HashSet::new();
            for row in 0..M_TILE {
                for input in 0..format.k_block_inputs() {
                    let [low, high] = format.code_at(row, input);
                    for (bits_of, (byte, shift)) in [(low_bits, low), (high_bits, high)] {
                        for bit in 0..bits_of as usize {
                            assert!(bits.insert(8 * byte + shift + bit), "{format:?}");
                        }
                    }
                }
            }
            let scales = match format {
                FragmentFormat::Q8
                | FragmentFormat::Q4
                | FragmentFormat::Q5
                | FragmentFormat::N4
                | FragmentFormat::T1 => 4,
                FragmentFormat::M4 | FragmentFormat::M5 => 8,
                FragmentFormat::K2 | FragmentFormat::K4 | FragmentFormat::K5 => 16 + 4,
                FragmentFormat::T4 => 8 + 2,
                FragmentFormat::K6 | FragmentFormat::F4 | FragmentFormat::T3 => 16 + 2,
                FragmentFormat::T2 => 2,
            };
            let behind = M_TILE * scales + format.table_bytes();
            assert_eq!(bits.len() / 8 + behind, format.k_block_bytes());
            let at = format.offsets();
            assert_eq!(bits.iter().max(), Some(&(8 * at.sub_scales - 1)));
        }
    }

    /// The operands as kernels take them, from the bytes, against the values they should hold.
    #[test]
    fn a_lane_finds_its_operands_side_by_side() {
        let word =
            |bytes: &[u8], at: usize| u32::from_le_bytes(bytes[at..at + 4].try_into().unwrap());
        let byte = |word: u32, b: usize| (word >> (8 * b)) as u8;
        // Four nibbles as bytes.
        let spread = |run: u32| (0..4).fold(0, |bytes, b| bytes | (run >> (4 * b) & 15) << (8 * b));
        for quant in packed() {
            let format = FragmentFormat::of(quant).unwrap();
            let columns = format.k_block_inputs();
            let row_bytes = quant.row_bytes(columns);
            let mut bytes = vec![0; 16 * row_bytes];
            random_blocks(quant, 9, 1.0, &mut bytes);
            let row = |r: usize| &bytes[r * row_bytes..(r + 1) * row_bytes];
            let fragments = pack(quant, 16, columns, row);
            let code = |r: usize, k: usize| {
                let length = quant.block_len();
                let block = &row(r)[k / length * quant.block_bytes()..][..quant.block_bytes()];
                file_code(quant, block, k % length)
            };
            for (lane, part) in (0..32).flat_map(|l| (0..columns / 64).map(move |p| (l, p))) {
                let (group, quad) = (lane / 4, lane % 4);
                for o in 0..8 {
                    // Operand `o` of a part: register `o % 4` of step `o / 4`, or `o % 2` of group `o / 2`.
                    let (step, register) = (o / 4, o % 4);
                    let (r, k) = if format.has_short_steps() {
                        (group + 8 * (o % 2), 64 * part + 16 * (o / 2) + 4 * quad)
                    } else {
                        let k = 64 * part + 32 * step + 8 * quad + 4 * (register / 2);
                        (group + 8 * (register % 2), k)
                    };
                    // Past the end where codes have no nibbles.
                    let at = (512 * part + 16 * lane + 4 * (o / 2)).min(fragments.len() - 4);
                    let nibbles = word(&fragments, at) >> (4 * (o % 2)) & 0x0f0f_0f0f;
                    let operand = match format {
                        FragmentFormat::Q8 => {
                            word(&fragments, 512 * step + 16 * lane + 4 * register)
                        }
                        FragmentFormat::Q4 | FragmentFormat::M4 | FragmentFormat::K4 => nibbles,
                        FragmentFormat::N4 | FragmentFormat::T4 | FragmentFormat::F4 => {
                            spread(word(&fragments, at) >> (16 * (o % 2)))
                        }
                        FragmentFormat::Q5 | FragmentFormat::M5 => {
                            let high = word(&fragments, 512 + 4 * lane);
                            nibbles | (high >> o & 0x0101_0101) << 4
                        }
                        FragmentFormat::K2 => {
                            let pairs = word(&fragments, 256 * part + 8 * lane + 4 * (o / 4));
                            pairs >> (2 * (o % 4)) & 0x0303_0303
                        }
                        FragmentFormat::T3 => {
                            let pairs = word(&fragments, 256 * part + 8 * lane + 4 * (o / 4));
                            let ones = word(&fragments, 1024 + 128 * part + 4 * lane);
                            let codes = pairs >> (2 * (o / 2 % 2)) & 0x3333_3333
                                | (ones >> (o / 2) & 0x1111_1111) << 2;
                            spread(codes >> (16 * (o % 2)))
                        }
                        FragmentFormat::T2 => {
                            let pairs = word(&fragments, 256 * part + 8 * lane + 4 * (o / 4));
                            spread((pairs >> (2 * (o / 2 % 2)) & 0x3333_3333) >> (16 * (o % 2)))
                        }
                        FragmentFormat::T1 => {
                            let ones = word(&fragments, 128 * part + 4 * lane);
                            spread((ones >> (o / 2) & 0x1111_1111) >> (16 * (o % 2)))
                        }
                        FragmentFormat::K5 => {
                            let high = word(&fragments, 2048 + 128 * part + 4 * lane);
                            nibbles | (high >> o & 0x0101_0101) << 4
                        }
                        FragmentFormat::K6 => {
                            let high = word(&fragments, 2048 + 256 * part + 8 * lane + 4 * (o / 4));
                            nibbles | (high >> (2 * (o % 4)) & 0x0303_0303) << 4
                        }
                    };
                    for b in 0..4 {
                        assert_eq!(byte(operand, b), code(r, k + b), "{quant} {lane} {o} {b}");
                    }
                }
            }
        }
    }

    #[test]
    fn formats_without_fragments_are_floats() {
        let without: Vec<&str> = QuantType::all()
            .filter(|&quant| FragmentFormat::of(quant).is_none())
            .map(QuantType::name)
            .collect();
        let expected = "F32 F16 BF16";
        assert_eq!(without.join(" "), expected);
    }
}
