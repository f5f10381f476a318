//! The sixteen lanes in plain Rust: the definition of every operation, and the fallback where no other set fits.

use half::{bf16, f16};

use super::{Floats, LANES, Line, Simd, array, assert_sixteen};

#[derive(Clone, Copy)]
pub struct Scalar;

type Lanes = [f32; LANES];

#[inline(always)]
fn zip(a: Lanes, b: Lanes, f: impl Fn(f32, f32) -> f32) -> Lanes {
    std::array::from_fn(|i| f(a[i], b[i]))
}

impl Floats for Lanes {
    #[inline(always)]
    fn splat(x: f32) -> Lanes {
        [x; LANES]
    }

    #[inline(always)]
    fn load(from: &[f32; LANES]) -> Lanes {
        *from
    }

    #[inline(always)]
    fn store(self, to: &mut [f32; LANES]) {
        *to = self;
    }

    #[inline(always)]
    fn load_f16_bits(from: &[u16; LANES]) -> Lanes {
        from.map(|bits| f16::from_bits(bits).to_f32())
    }

    #[inline(always)]
    fn store_f16_bits(self, to: &mut [u16; LANES]) {
        *to = self.map(|x| f16::from_f32(x).to_bits());
    }

    #[inline(always)]
    fn load_f32_bytes(from: &[u8; 4 * LANES]) -> Lanes {
        std::array::from_fn(|i| f32::from_le_bytes(from.as_chunks().0[i]))
    }

    #[inline(always)]
    fn load_f16_bytes(from: &[u8; 2 * LANES]) -> Lanes {
        std::array::from_fn(|i| f16::from_le_bytes(from.as_chunks().0[i]).to_f32())
    }

    #[inline(always)]
    fn load_bf16_bytes(from: &[u8; 2 * LANES]) -> Lanes {
        std::array::from_fn(|i| bf16::from_le_bytes(from.as_chunks().0[i]).to_f32())
    }

    #[inline(always)]
    fn load_i8_bytes(from: &[u8; LANES]) -> Lanes {
        from.map(|byte| f32::from(byte.cast_signed()))
    }

    #[inline(always)]
    fn load_twice(from: &[f32; LANES / 2]) -> Lanes {
        std::array::from_fn(|i| from[i / 2])
    }

    #[inline(always)]
    fn add(self, other: Lanes) -> Lanes {
        zip(self, other, |a, b| a + b)
    }

    #[inline(always)]
    fn sub(self, other: Lanes) -> Lanes {
        zip(self, other, |a, b| a - b)
    }

    #[inline(always)]
    fn mul(self, other: Lanes) -> Lanes {
        zip(self, other, |a, b| a * b)
    }

    #[inline(always)]
    fn div(self, other: Lanes) -> Lanes {
        zip(self, other, |a, b| a / b)
    }

    #[inline(always)]
    fn max(self, other: Lanes) -> Lanes {
        zip(self, other, |a, b| if a > b { a } else { b })
    }

    #[inline(always)]
    fn min(self, other: Lanes) -> Lanes {
        zip(self, other, |a, b| if a < b { a } else { b })
    }

    #[inline(always)]
    fn mul_add(self, by: Lanes, plus: Lanes) -> Lanes {
        std::array::from_fn(|i| self[i].mul_add(by[i], plus[i]))
    }

    #[inline(always)]
    fn neg_mul_add(self, by: Lanes, from: Lanes) -> Lanes {
        std::array::from_fn(|i| (-self[i]).mul_add(by[i], from[i]))
    }

    #[inline(always)]
    fn round(self) -> Lanes {
        self.map(f32::round_ties_even)
    }

    #[inline(always)]
    fn abs(self) -> Lanes {
        self.map(f32::abs)
    }

    #[inline(always)]
    fn exp2_whole(self) -> Lanes {
        self.map(|x| f32::from_bits(((x as i32 + 127) as u32) << 23))
    }

    #[inline(always)]
    fn select_below(self, bound: Lanes, then: Lanes, otherwise: Lanes) -> Lanes {
        std::array::from_fn(|i| {
            if self[i] < bound[i] {
                then[i]
            } else {
                otherwise[i]
            }
        })
    }

    #[inline(always)]
    fn sum(mut self) -> f32 {
        for width in [8, 4, 2, 1] {
            for i in 0..width {
                self[i] += self[i + width];
            }
        }
        self[0]
    }

    #[inline(always)]
    fn largest(self) -> f32 {
        self.into_iter().fold(f32::NEG_INFINITY, f32::max)
    }

    #[inline(always)]
    fn store_i8(self, to: &mut [i8; LANES]) {
        *to = self.map(|x| x as i8);
    }
}

impl Simd for Scalar {
    type Floats = Lanes;
    type Ints = [i32; LANES];
    type Bytes = [u8; 64];

    const SIGNED_OFFSET: i32 = 0;
    const WIDE: bool = false;
    const SHARING_ROWS: usize = 1;

    #[inline(always)]
    fn ints(x: i32) -> [i32; LANES] {
        [x; LANES]
    }

    #[inline(always)]
    fn load_ints(from: &[i32; LANES]) -> [i32; LANES] {
        *from
    }

    fn store_ints(x: [i32; LANES], to: &mut [i32; LANES]) {
        *to = x;
    }

    #[inline(always)]
    fn minus_times(x: [i32; LANES], by: i32, y: [i32; LANES]) -> [i32; LANES] {
        std::array::from_fn(|i| x[i] - by * y[i])
    }

    #[inline(always)]
    fn to_floats(x: [i32; LANES]) -> Lanes {
        x.map(|x| x as f32)
    }

    #[inline(always)]
    fn load_bytes(from: &[u8; 64]) -> [u8; 64] {
        *from
    }

    #[inline(always)]
    fn load_signed(from: &[i8; 64]) -> [u8; 64] {
        from.map(i8::cast_unsigned)
    }

    #[inline(always)]
    fn store_bytes(x: [u8; 64], to: &mut [u8; 64]) {
        *to = x;
    }

    #[inline(always)]
    fn join(a: &[u8; 32], b: &[u8; 32]) -> [u8; 64] {
        std::array::from_fn(|i| if i < 32 { a[i] } else { b[i - 32] })
    }

    #[inline(always)]
    fn join_four(runs: [&[u8; 16]; 4]) -> [u8; 64] {
        std::array::from_fn(|i| runs[i / 16][i % 16])
    }

    #[inline(always)]
    fn nibbles(a: &[u8; 16], b: &[u8; 16]) -> [u8; 64] {
        std::array::from_fn(|i| {
            let byte = if i < 32 { a[i % 16] } else { b[i % 16] };
            if i % 32 < 16 { byte & 15 } else { byte >> 4 }
        })
    }

    #[inline(always)]
    fn spread(run: &[u8; 32], first: u32, second: u32, mask: u8) -> [u8; 64] {
        std::array::from_fn(|i| (run[i % 32] >> if i < 32 { first } else { second }) & mask)
    }

    #[inline(always)]
    fn field(x: [u8; 64], shift: u32, mask: u8) -> [u8; 64] {
        x.map(|x| (x >> shift) & mask)
    }

    #[inline(always)]
    fn shl<const SHIFT: u32>(x: [u8; 64]) -> [u8; 64] {
        x.map(|x| x << SHIFT)
    }

    #[inline(always)]
    fn or(a: [u8; 64], b: [u8; 64]) -> [u8; 64] {
        std::array::from_fn(|i| a[i] | b[i])
    }

    #[inline(always)]
    fn sub_bytes(x: [u8; 64], by: u8) -> [u8; 64] {
        x.map(|x| x.wrapping_sub(by))
    }

    #[inline(always)]
    fn add_bytes(a: [u8; 64], b: [u8; 64]) -> [u8; 64] {
        std::array::from_fn(|i| a[i].wrapping_add(b[i]))
    }

    #[inline(always)]
    fn negate(x: [u8; 64], bits: u64) -> [u8; 64] {
        std::array::from_fn(|i| {
            if bits >> i & 1 == 1 {
                x[i].wrapping_neg()
            } else {
                x[i]
            }
        })
    }

    #[inline(always)]
    fn sixteens(bits: u64) -> [u8; 64] {
        std::array::from_fn(|i| ((bits >> i) as u8 & 1) << 4)
    }

    #[inline(always)]
    fn lookup(table: &[i8; 16], x: [u8; 64]) -> [u8; 64] {
        x.map(|x| table[usize::from(x & 15)].cast_unsigned())
    }

    #[inline(always)]
    fn splat_quad(quad: [i8; 4]) -> [u8; 64] {
        std::array::from_fn(|i| quad[i % 4].cast_unsigned())
    }

    #[inline(always)]
    fn dot_unsigned(sum: [i32; LANES], codes: [u8; 64], x: [u8; 64]) -> [i32; LANES] {
        std::array::from_fn(|lane| {
            (4 * lane..4 * lane + 4).fold(sum[lane], |sum, i| {
                sum + i32::from(codes[i]) * i32::from(x[i].cast_signed())
            })
        })
    }

    #[inline(always)]
    fn prepare(codes: [u8; 64]) -> [u8; 64] {
        codes
    }

    #[inline(always)]
    fn dot_prepared(sum: [i32; LANES], codes: [u8; 64], x: [u8; 64]) -> [i32; LANES] {
        std::array::from_fn(|lane| {
            (4 * lane..4 * lane + 4).fold(sum[lane], |sum, i| {
                sum + i32::from(codes[i].cast_signed()) * i32::from(x[i].cast_signed())
            })
        })
    }

    #[inline(always)]
    fn sum_by_eight(parts: [[i32; LANES]; 8]) -> [i32; LANES] {
        std::array::from_fn(|i| {
            let start = 8 * (i % 2);
            parts[i / 2][start..start + 8].iter().sum()
        })
    }

    #[inline(always)]
    fn sum_by_four(parts: [[i32; LANES]; 4]) -> [i32; LANES] {
        std::array::from_fn(|i| {
            let start = 4 * (i % 4);
            parts[i / 4][start..start + 4].iter().sum()
        })
    }

    #[inline(always)]
    fn sum_by_four_in_turns(parts: [[i32; LANES]; 4]) -> [i32; LANES] {
        let sums = Self::sum_by_four(parts);
        std::array::from_fn(|i| sums[8 * (i / 8) + 4 * (i % 2) + i % 8 / 2])
    }

    #[inline(always)]
    fn unzip_quarters(a: [u8; 64], b: [u8; 64]) -> [[u8; 64]; 2] {
        let both = [a, b];
        std::array::from_fn(|odd| {
            std::array::from_fn(|i| both[i / 32][32 * (i % 32 / 16) + 16 * odd + i % 16])
        })
    }

    #[inline(always)]
    fn spread_four(run: &[u8; 16], shifts: [u32; 4], mask: u8) -> [u8; 64] {
        std::array::from_fn(|i| (run[i % 16] >> shifts[i / 16]) & mask)
    }

    #[inline(always)]
    fn prefetch(_: *const u8) {}

    #[inline(always)]
    fn or_ints(a: [i32; LANES], b: [i32; LANES]) -> [i32; LANES] {
        array![0; i => a[i] | b[i]]
    }

    #[inline(always)]
    fn shl_ints(x: [i32; LANES], by: u32) -> [i32; LANES] {
        x.map(|x| x << by)
    }

    #[inline(always)]
    fn word_field(x: [u8; 64], shift: u32, mask: i32) -> [i32; LANES] {
        let (words, _) = x.as_chunks();
        array![0; i => (u32::from_le_bytes(words[i]) >> shift).cast_signed() & mask]
    }

    #[inline(always)]
    fn load_words_strided(bytes: &[u8], stride: usize) -> [i32; LANES] {
        assert_sixteen(bytes, stride, 4);
        array![0; i => {
            let at = i * stride;
            i32::from_le_bytes([bytes[at], bytes[at + 1], bytes[at + 2], bytes[at + 3]])
        }]
    }

    #[inline(always)]
    fn low_f16(x: [i32; LANES]) -> Lanes {
        Lanes::load_f16_bits(&x.map(|x| x as u16))
    }

    #[inline(always)]
    fn high_f16(x: [i32; LANES]) -> Lanes {
        Lanes::load_f16_bits(&x.map(|x| (x >> 16) as u16))
    }

    #[inline(always)]
    fn transpose_strided(bytes: &[u8], stride: usize) -> [[u8; 64]; 4] {
        assert_sixteen(bytes, stride, 16);
        let mut columns = [[0; 64]; 4];
        for row in 0..LANES {
            let (units, _) = bytes[row * stride..][..16].as_chunks::<4>();
            for (column, unit) in columns.iter_mut().zip(units) {
                column[4 * row..4 * row + 4].copy_from_slice(unit);
            }
        }
        columns
    }

    #[inline(always)]
    fn transpose(rows: &[Line; LANES], columns: &mut [Line; LANES]) {
        for (unit, column) in columns.iter_mut().enumerate() {
            for (row, line) in rows.iter().enumerate() {
                column.0[4 * row..4 * row + 4].copy_from_slice(&line.0[4 * unit..4 * unit + 4]);
            }
        }
    }
}
