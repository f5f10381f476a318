//! The vector vocabulary: sixteen lanes of floats, integers and bytes.

/// An array whose element `i` is an expression of `i`: `array![zero; i => f(i)]`. The zero only fills it at first.
macro_rules! array {
    ($zero:expr; $i:ident => $value:expr) => {{
        let mut all = [$zero; _];
        #[allow(
            clippy::needless_range_loop,
            reason = "the index is what the value is made of"
        )]
        for $i in 0..all.len() {
            all[$i] = $value;
        }
        all
    }};
}
pub(crate) use array;

/// A cache line of bytes.
#[derive(Clone, Copy)]
#[repr(align(64))]
pub struct Line(pub [u8; 64]);

/// Lanes of every vector of 32-bit numbers.
pub const LANES: usize = 16;

/// Sixteen f32.
pub trait Floats: Copy {
    fn splat(x: f32) -> Self;
    fn load(from: &[f32; LANES]) -> Self;
    fn store(self, to: &mut [f32; LANES]);
    /// Widens sixteen F16, exactly.
    fn load_f16_bits(from: &[u16; LANES]) -> Self;
    /// Rounds to F16, ties to even.
    fn store_f16_bits(self, to: &mut [u16; LANES]);
    /// Sixteen little-endian F32.
    fn load_f32_bytes(from: &[u8; 4 * LANES]) -> Self;
    /// Sixteen little-endian F32.
    #[inline(always)]
    fn store_f32_bytes(self, to: &mut [u8; 4 * LANES]) {
        let mut lanes = [0.0_f32; LANES];
        self.store(&mut lanes);
        for (bytes, lane) in to.as_chunks_mut().0.iter_mut().zip(lanes) {
            *bytes = lane.to_le_bytes();
        }
    }
    /// Widens sixteen little-endian F16, exactly.
    fn load_f16_bytes(from: &[u8; 2 * LANES]) -> Self;
    /// Widens sixteen little-endian BF16, exactly.
    fn load_bf16_bytes(from: &[u8; 2 * LANES]) -> Self;
    /// Widens sixteen signed bytes.
    fn load_i8_bytes(from: &[u8; LANES]) -> Self;
    /// Eight numbers, each in two neighbouring lanes.
    fn load_twice(from: &[f32; LANES / 2]) -> Self;
    fn add(self, other: Self) -> Self;
    fn sub(self, other: Self) -> Self;
    fn mul(self, other: Self) -> Self;
    fn div(self, other: Self) -> Self;
    /// `self` where it is larger, else `other`: a NaN in `self` is dropped.
    fn max(self, other: Self) -> Self;
    /// `self` where it is smaller, else `other`.
    fn min(self, other: Self) -> Self;
    /// `self * by + plus`, rounded once.
    fn mul_add(self, by: Self, plus: Self) -> Self;
    /// `from - self * by`, rounded once.
    fn neg_mul_add(self, by: Self, from: Self) -> Self;
    /// To the nearest integer, ties to even.
    fn round(self) -> Self;
    fn abs(self) -> Self;
    /// `2^self` for whole numbers from -126 to 127.
    fn exp2_whole(self) -> Self;
    /// `then` where `self < bound`, else `otherwise`.
    fn select_below(self, bound: Self, then: Self, otherwise: Self) -> Self;
    /// Lanes `i` and `i + 8` first, then `i` and `i + 4`, and so on: one order on every instruction set.
    fn sum(self) -> f32;
    /// The largest lane.
    fn largest(self) -> f32;
    /// The lanes as signed bytes; each must lie in -128 to 127.
    fn store_i8(self, to: &mut [i8; LANES]);

    #[inline(always)]
    fn zero() -> Self {
        Self::splat(0.0)
    }

    /// Up to sixteen numbers, the missing ones zero.
    #[inline(always)]
    fn load_part(from: &[f32]) -> Self {
        let mut whole = [0.0; LANES];
        whole[..from.len()].copy_from_slice(from);
        Self::load(&whole)
    }
}

/// One instruction set: its vectors of floats, of integers and of 64 bytes.
pub trait Simd: Copy + 'static {
    type Floats: Floats;
    /// Sixteen i32.
    type Ints: Copy;
    /// Sixty-four bytes, signed or unsigned as the operation says.
    type Bytes: Copy;

    /// Excess of [`Simd::dot_prepared`] for every unit of `x`: it may shift codes to be unsigned.
    const SIGNED_OFFSET: i32;
    /// Thirty-two registers of sixteen lanes, so kernels may hold larger tiles.
    const WIDE: bool;
    /// Activation rows that share an unpacked weight row in registers: 1, 2 or 4.
    const SHARING_ROWS: usize;
    /// Two activation rows are multiplied with two weight rows at once, by [`Simd::totals_by_eights`]. Such a level has no
    /// [`Simd::SIGNED_OFFSET`].
    const PAIRS: bool = false;

    fn ints(x: i32) -> Self::Ints;
    fn load_ints(from: &[i32; LANES]) -> Self::Ints;
    /// Sixteen signed bytes as integers.
    #[inline(always)]
    fn widen(from: &[i8; LANES]) -> Self::Ints {
        Self::load_ints(&array![0; i => i32::from(from[i])])
    }
    fn store_ints(x: Self::Ints, to: &mut [i32; LANES]);
    /// `x - by * y`.
    fn minus_times(x: Self::Ints, by: i32, y: Self::Ints) -> Self::Ints;
    fn to_floats(x: Self::Ints) -> Self::Floats;
    /// `a | b`.
    fn or_ints(a: Self::Ints, b: Self::Ints) -> Self::Ints;
    fn shl_ints(x: Self::Ints, by: u32) -> Self::Ints;
    /// `(x >> shift) & mask` of each four bytes, the first the lowest.
    fn word_field(x: Self::Bytes, shift: u32, mask: i32) -> Self::Ints;
    /// Sixteen times four bytes, the first the lowest, one every `stride` bytes.
    fn load_words_strided(bytes: &[u8], stride: usize) -> Self::Ints;
    /// Sixteen F16, one every `STRIDE` bytes (an even number), widened.
    #[inline(always)]
    fn load_f16_strided<const STRIDE: usize>(bytes: &[u8]) -> Self::Floats {
        Self::Floats::load_f16_bits(&array![0; i => {
            u16::from_le_bytes([bytes[i * STRIDE], bytes[i * STRIDE + 1]])
        }])
    }
    /// The low 16 bits of each lane, widened from F16.
    fn low_f16(x: Self::Ints) -> Self::Floats;
    /// The high 16 bits of each lane, widened from F16.
    fn high_f16(x: Self::Ints) -> Self::Floats;

    fn load_bytes(from: &[u8; 64]) -> Self::Bytes;
    fn load_signed(from: &[i8; 64]) -> Self::Bytes;
    fn store_bytes(x: Self::Bytes, to: &mut [u8; 64]);
    /// Two runs of 32 bytes, one after the other.
    fn join(a: &[u8; 32], b: &[u8; 32]) -> Self::Bytes;
    /// Four runs of 16 bytes, one after the other.
    fn join_four(runs: [&[u8; 16]; 4]) -> Self::Bytes;
    /// Low nibbles of `a`, its high nibbles, low nibbles of `b`, its high nibbles.
    fn nibbles(a: &[u8; 16], b: &[u8; 16]) -> Self::Bytes;
    /// `(run >> first) & mask` of the 32 bytes, then `(run >> second) & mask`.
    fn spread(run: &[u8; 32], first: u32, second: u32, mask: u8) -> Self::Bytes;
    /// `(x >> shift) & mask` of each byte.
    fn field(x: Self::Bytes, shift: u32, mask: u8) -> Self::Bytes;
    /// `x << SHIFT` of each byte; no bit may leave its byte.
    fn shl<const SHIFT: u32>(x: Self::Bytes) -> Self::Bytes;
    fn or(a: Self::Bytes, b: Self::Bytes) -> Self::Bytes;
    /// Quarters 0 and 2 of `a` and of `b`, then quarters 1 and 3 of both.
    fn unzip_quarters(a: Self::Bytes, b: Self::Bytes) -> [Self::Bytes; 2];
    /// `(run >> shift) & mask` of the 16 bytes, for one shift after the other.
    fn spread_four(run: &[u8; 16], shifts: [u32; 4], mask: u8) -> Self::Bytes;
    /// `x - by` of each byte, wrapping.
    fn sub_bytes(x: Self::Bytes, by: u8) -> Self::Bytes;
    /// `a + b` of each byte, wrapping.
    fn add_bytes(a: Self::Bytes, b: Self::Bytes) -> Self::Bytes;
    /// Byte `i` negated where bit `i` is set.
    fn negate(x: Self::Bytes, bits: u64) -> Self::Bytes;
    /// Byte `i` is 16 where bit `i` is set, else 0.
    fn sixteens(bits: u64) -> Self::Bytes;
    /// `table[x]` of each byte, which must be below 16.
    fn lookup(table: &[i8; 16], x: Self::Bytes) -> Self::Bytes;
    /// Four bytes, sixteen times.
    fn splat_quad(quad: [i8; 4]) -> Self::Bytes;

    /// Adds to lane `i` the four products of bytes `4 i ..`. Codes are unsigned and below 128, `x` is within ±127.
    fn dot_unsigned(sum: Self::Ints, codes: Self::Bytes, x: Self::Bytes) -> Self::Ints;
    /// Signed codes in the form that [`Simd::dot_prepared`] takes.
    fn prepare(codes: Self::Bytes) -> Self::Bytes;
    /// The same for signed codes once prepared, plus [`Simd::SIGNED_OFFSET`] times the four `x`.
    fn dot_prepared(sum: Self::Ints, codes: Self::Bytes, x: Self::Bytes) -> Self::Ints;
    /// The totals of a group of 32 columns in sixteen rows, and `from` in each: vector `i` has columns `4 i ..` of all rows,
    /// whose codes are unsigned and below 16.
    #[inline(always)]
    fn dot_group(codes: &[Self::Bytes; 8], x: &[[i8; 4]; 8], from: i32) -> Self::Ints {
        let mut totals = Self::ints(from);
        for (codes, quad) in codes.iter().zip(x) {
            totals = Self::dot_unsigned(totals, *codes, Self::splat_quad(*quad));
        }
        totals
    }
    /// The totals of a group of columns in sixteen rows, for each row of `x`. Codes are signed and lie as
    /// [`Simd::transpose_by_eights`] leaves them, sixteen columns in four lines.
    #[inline(always)]
    fn totals_by_eights<const R: usize>(codes: &[Line], x: [&[[i8; 16]]; R]) -> [Self::Ints; R] {
        let plain = plain_totals_by_eights(codes, x);
        array![Self::ints(0); r => Self::load_ints(&plain[r])]
    }
    /// Lane `i` is the sum of lanes `8 i .. 8 i + 8` of the vectors laid end to end.
    fn sum_by_eight(parts: [Self::Ints; 8]) -> Self::Ints;
    /// Lane `i` is the sum of lanes `4 i .. 4 i + 4` of the vectors laid end to end.
    fn sum_by_four(parts: [Self::Ints; 4]) -> Self::Ints;
    /// The same sums with those of parts 0 and 1 in turns, then those of parts 2 and 3.
    fn sum_by_four_in_turns(parts: [Self::Ints; 4]) -> Self::Ints;

    /// Scales and minimums of two blocks of eight groups, from the first 16 bytes of each: factors as F16, and six bits for
    /// each scale and minimum as Q4_K has them.
    #[inline(always)]
    fn six_bit_scales(headers: [&[u8; 16]; 2]) -> [Self::Floats; 2] {
        let numbers: [_; 2] = array![[[0; 8]; 2]; block => six_bit_numbers(headers[block])];
        let factors: [_; 2] = array![[0; 2]; block => {
            let [d, _, m, _] = array![0; i => u16::from_le_bytes([headers[block][i], headers[block][i + 1]])];
            [d, m]
        }];
        array![Self::Floats::zero(); kind => {
            let codes = array![0; g => numbers[g / 8][kind][g % 8].cast_signed()];
            let factors = array![0; g => factors[g / 8][kind]];
            Self::Floats::load_f16_bits(&factors).mul(Self::to_floats(Self::widen(&codes)))
        }]
    }

    /// Asks for the cache line at an address, which need not be readable.
    fn prefetch(address: *const u8);

    /// Transposes sixteen rows of sixteen 4-byte units.
    fn transpose(rows: &[Line; LANES], columns: &mut [Line; LANES]);
    /// Transposes sixteen rows of eight 8-byte units into eight columns, two lines each.
    #[inline(always)]
    fn transpose_by_eights(rows: &[Line; LANES], columns: &mut [Line; LANES]) {
        for (unit, lines) in columns.as_chunks_mut::<2>().0.iter_mut().enumerate() {
            for (row, line) in rows.iter().enumerate() {
                let start = 8 * (row % 8);
                lines[row / 8].0[start..start + 8].copy_from_slice(&line.0[8 * unit..8 * unit + 8]);
            }
        }
    }
    /// Transposes sixteen rows of four 4-byte units, one row every `stride` bytes, into four columns.
    fn transpose_strided(bytes: &[u8], stride: usize) -> [Self::Bytes; 4];
}

/// That sixteen pieces of `width` bytes, one every `stride` bytes, lie within `bytes`.
#[inline(always)]
pub(super) fn assert_sixteen(bytes: &[u8], stride: usize, width: usize) {
    // A row is far shorter than this, so nothing below can wrap.
    assert!(
        stride < 1 << 26 && (LANES - 1) * stride + width <= bytes.len(),
        "sixteen rows of {stride} bytes lie within {}",
        bytes.len()
    );
}

/// The eight 6-bit scales, then the eight minimums, of the first bytes of a Q4_K or Q5_K block: a byte each, by arithmetic on four
/// bytes at once.
#[inline(always)]
fn six_bit_numbers(header: &[u8; 16]) -> [[u8; 8]; 2] {
    let (words, _) = header.as_chunks();
    let [_, a, b, c] = array![0; i => u32::from_le_bytes(words[i])];
    let joined = |low: u32, high: u32| (u64::from(low) | u64::from(high) << 32).to_le_bytes();
    [
        joined(
            a & 0x3f3f_3f3f,
            c & 0x0f0f_0f0f | ((a >> 6) & 0x0303_0303) << 4,
        ),
        joined(
            b & 0x3f3f_3f3f,
            (c >> 4) & 0x0f0f_0f0f | ((b >> 6) & 0x0303_0303) << 4,
        ),
    ]
}

/// [`Simd::totals_by_eights`] in plain Rust.
#[inline(always)]
pub(super) fn plain_totals_by_eights<const R: usize>(
    codes: &[Line],
    x: [&[[i8; 16]]; R],
) -> [[i32; LANES]; R] {
    let mut totals = [[0; LANES]; R];
    for (totals, x) in totals.iter_mut().zip(x) {
        for (column, x) in x.as_flattened().iter().enumerate() {
            for (row, total) in totals.iter_mut().enumerate() {
                let line = column / 8 * 2 + row / 8;
                let code = codes[line].0[row % 8 * 8 + column % 8].cast_signed();
                *total += i32::from(code) * i32::from(*x);
            }
        }
    }
    totals
}
