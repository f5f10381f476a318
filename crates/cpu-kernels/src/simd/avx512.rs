//! The sixteen lanes as one 512-bit register. Needs F, BW, VL, DQ and VNNI, which came together in servers from 2019.
#![expect(
    unsafe_code,
    reason = "vector intrinsics; the features are checked where the kernel table is chosen"
)]

#[allow(
    clippy::wildcard_imports,
    reason = "the names are the instructions; a list of seventy says nothing"
)]
use std::arch::x86_64::*;

use super::{Floats, LANES, Line, Simd, assert_sixteen};

/// Wraps intrinsics whose only demand is the instruction set (and pointers that come from array references).
macro_rules! avx512 {
    ($body:expr) => {
        // SAFETY: Values of this module's types are made and used only inside kernels instantiated with `Avx512`, and
        // `Kernels::for_isa` hands those out after `Isa::available` has seen the features. Loads and stores go
        // through references to arrays of the full width.
        unsafe { $body }
    };
}

#[derive(Clone, Copy)]
pub struct Avx512;

impl Floats for __m512 {
    #[inline(always)]
    fn splat(x: f32) -> Self {
        avx512!(_mm512_set1_ps(x))
    }

    #[inline(always)]
    fn load(from: &[f32; LANES]) -> Self {
        avx512!(_mm512_loadu_ps(from.as_ptr()))
    }

    #[inline(always)]
    fn store(self, to: &mut [f32; LANES]) {
        avx512!(_mm512_storeu_ps(to.as_mut_ptr(), self));
    }

    #[inline(always)]
    fn load_f16_bits(from: &[u16; LANES]) -> Self {
        avx512!(_mm512_cvtph_ps(_mm256_loadu_si256(from.as_ptr().cast())))
    }

    #[inline(always)]
    fn store_f16_bits(self, to: &mut [u16; LANES]) {
        avx512!(_mm256_storeu_si256(
            to.as_mut_ptr().cast(),
            _mm512_cvtps_ph::<{ _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC }>(self)
        ));
    }

    #[inline(always)]
    fn load_f32_bytes(from: &[u8; 4 * LANES]) -> Self {
        avx512!(_mm512_loadu_ps(from.as_ptr().cast()))
    }

    #[inline(always)]
    fn load_f16_bytes(from: &[u8; 2 * LANES]) -> Self {
        avx512!(_mm512_cvtph_ps(_mm256_loadu_si256(from.as_ptr().cast())))
    }

    #[inline(always)]
    fn load_bf16_bytes(from: &[u8; 2 * LANES]) -> Self {
        avx512!(_mm512_castsi512_ps(_mm512_slli_epi32::<16>(
            _mm512_cvtepu16_epi32(_mm256_loadu_si256(from.as_ptr().cast()))
        )))
    }

    #[inline(always)]
    fn load_i8_bytes(from: &[u8; LANES]) -> Self {
        avx512!(_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(
            from.as_ptr().cast()
        ))))
    }

    #[inline(always)]
    fn load_twice(from: &[f32; LANES / 2]) -> Self {
        avx512!({
            let index = _mm512_set_epi32(7, 7, 6, 6, 5, 5, 4, 4, 3, 3, 2, 2, 1, 1, 0, 0);
            _mm512_permutexvar_ps(
                index,
                _mm512_castps256_ps512(_mm256_loadu_ps(from.as_ptr())),
            )
        })
    }

    #[inline(always)]
    fn add(self, other: Self) -> Self {
        avx512!(_mm512_add_ps(self, other))
    }

    #[inline(always)]
    fn sub(self, other: Self) -> Self {
        avx512!(_mm512_sub_ps(self, other))
    }

    #[inline(always)]
    fn mul(self, other: Self) -> Self {
        avx512!(_mm512_mul_ps(self, other))
    }

    #[inline(always)]
    fn div(self, other: Self) -> Self {
        avx512!(_mm512_div_ps(self, other))
    }

    #[inline(always)]
    fn max(self, other: Self) -> Self {
        avx512!(_mm512_max_ps(self, other))
    }

    #[inline(always)]
    fn min(self, other: Self) -> Self {
        avx512!(_mm512_min_ps(self, other))
    }

    #[inline(always)]
    fn mul_add(self, by: Self, plus: Self) -> Self {
        avx512!(_mm512_fmadd_ps(self, by, plus))
    }

    #[inline(always)]
    fn neg_mul_add(self, by: Self, from: Self) -> Self {
        avx512!(_mm512_fnmadd_ps(self, by, from))
    }

    #[inline(always)]
    fn round(self) -> Self {
        avx512!(_mm512_roundscale_ps::<
            { _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC },
        >(self))
    }

    #[inline(always)]
    fn abs(self) -> Self {
        avx512!(_mm512_abs_ps(self))
    }

    #[inline(always)]
    fn exp2_whole(self) -> Self {
        avx512!({
            let biased = _mm512_add_epi32(_mm512_cvtps_epi32(self), _mm512_set1_epi32(127));
            _mm512_castsi512_ps(_mm512_slli_epi32::<23>(biased))
        })
    }

    #[inline(always)]
    fn select_below(self, bound: Self, then: Self, otherwise: Self) -> Self {
        avx512!(_mm512_mask_blend_ps(
            _mm512_cmp_ps_mask::<_CMP_LT_OQ>(self, bound),
            otherwise,
            then
        ))
    }

    #[inline(always)]
    fn sum(self) -> f32 {
        avx512!({
            let high = _mm512_extractf32x8_ps::<1>(self);
            sum_eight(_mm256_add_ps(_mm512_castps512_ps256(self), high))
        })
    }

    #[inline(always)]
    fn largest(self) -> f32 {
        avx512!(_mm512_reduce_max_ps(self))
    }

    #[inline(always)]
    fn store_i8(self, to: &mut [i8; LANES]) {
        avx512!(_mm_storeu_si128(
            to.as_mut_ptr().cast(),
            _mm512_cvtsepi32_epi8(_mm512_cvtps_epi32(self))
        ));
    }
}

/// The last three folds of [`Floats::sum`].
#[inline(always)]
pub(super) fn sum_eight(x: __m256) -> f32 {
    avx512!({
        let x = _mm_add_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps::<1>(x));
        let x = _mm_add_ps(x, _mm_movehl_ps(x, x));
        _mm_cvtss_f32(_mm_add_ss(x, _mm_shuffle_ps::<1>(x, x)))
    })
}

/// Shift counts for the two halves of a register.
#[inline(always)]
fn by_halves(first: u32, second: u32) -> __m512i {
    let (a, b) = (i64::from(first), i64::from(second));
    avx512!(_mm512_set_epi64(b, b, b, b, a, a, a, a))
}

impl Simd for Avx512 {
    type Floats = __m512;
    type Ints = __m512i;
    type Bytes = __m512i;

    // The multiply wants one side unsigned: signed codes are shifted up by 128.
    const SIGNED_OFFSET: i32 = 128;
    const WIDE: bool = true;
    const SHARING_ROWS: usize = 4;

    #[inline(always)]
    fn ints(x: i32) -> __m512i {
        avx512!(_mm512_set1_epi32(x))
    }

    #[inline(always)]
    fn load_ints(from: &[i32; LANES]) -> __m512i {
        avx512!(_mm512_loadu_si512(from.as_ptr().cast()))
    }

    #[inline(always)]
    fn widen(from: &[i8; LANES]) -> __m512i {
        avx512!(_mm512_cvtepi8_epi32(_mm_loadu_si128(from.as_ptr().cast())))
    }

    fn store_ints(x: __m512i, to: &mut [i32; LANES]) {
        avx512!(_mm512_storeu_si512(to.as_mut_ptr().cast(), x));
    }

    #[inline(always)]
    fn minus_times(x: __m512i, by: i32, y: __m512i) -> __m512i {
        if by == 0 {
            return x;
        }
        if by.count_ones() == 1 {
            let shift = avx512!(_mm_cvtsi32_si128(by.trailing_zeros().cast_signed()));
            return avx512!(_mm512_sub_epi32(x, _mm512_sll_epi32(y, shift)));
        }
        avx512!(_mm512_sub_epi32(
            x,
            _mm512_mullo_epi32(y, _mm512_set1_epi32(by))
        ))
    }

    #[inline(always)]
    fn to_floats(x: __m512i) -> __m512 {
        avx512!(_mm512_cvtepi32_ps(x))
    }

    #[inline(always)]
    fn load_bytes(from: &[u8; 64]) -> __m512i {
        avx512!(_mm512_loadu_si512(from.as_ptr().cast()))
    }

    #[inline(always)]
    fn load_signed(from: &[i8; 64]) -> __m512i {
        avx512!(_mm512_loadu_si512(from.as_ptr().cast()))
    }

    #[inline(always)]
    fn store_bytes(x: __m512i, to: &mut [u8; 64]) {
        avx512!(_mm512_storeu_si512(to.as_mut_ptr().cast(), x));
    }

    #[inline(always)]
    fn join(a: &[u8; 32], b: &[u8; 32]) -> __m512i {
        avx512!(_mm512_inserti64x4::<1>(
            _mm512_castsi256_si512(_mm256_loadu_si256(a.as_ptr().cast())),
            _mm256_loadu_si256(b.as_ptr().cast())
        ))
    }

    #[inline(always)]
    fn join_four([a, b, c, d]: [&[u8; 16]; 4]) -> __m512i {
        avx512!({
            // Read as values: the load intrinsics leave copies on the stack here.
            let read = |from: &[u8; 16]| std::ptr::read_unaligned(from.as_ptr().cast());
            let two = _mm512_inserti32x4::<1>(_mm512_castsi128_si512(read(a)), read(b));
            _mm512_inserti32x4::<3>(_mm512_inserti32x4::<2>(two, read(c)), read(d))
        })
    }

    #[inline(always)]
    fn nibbles(a: &[u8; 16], b: &[u8; 16]) -> __m512i {
        avx512!({
            // Read as values: the load intrinsics leave copies on the stack here.
            let read = |from: &[u8; 16]| std::ptr::read_unaligned(from.as_ptr().cast());
            let both = _mm256_inserti128_si256::<1>(_mm256_castsi128_si256(read(a)), read(b));
            let index = _mm512_set_epi64(3, 2, 3, 2, 1, 0, 1, 0);
            let twice = _mm512_permutexvar_epi64(index, _mm512_castsi256_si512(both));
            let shifted = _mm512_srlv_epi64(twice, _mm512_set_epi64(4, 4, 0, 0, 4, 4, 0, 0));
            _mm512_and_si512(shifted, _mm512_set1_epi8(15))
        })
    }

    #[inline(always)]
    fn spread(run: &[u8; 32], first: u32, second: u32, mask: u8) -> __m512i {
        avx512!({
            let twice = _mm512_broadcast_i64x4(_mm256_loadu_si256(run.as_ptr().cast()));
            let shifted = _mm512_srlv_epi64(twice, by_halves(first, second));
            _mm512_and_si512(shifted, _mm512_set1_epi8(mask.cast_signed()))
        })
    }

    #[inline(always)]
    fn field(x: __m512i, shift: u32, mask: u8) -> __m512i {
        avx512!({
            let shifted = _mm512_srlv_epi64(x, _mm512_set1_epi64(i64::from(shift)));
            _mm512_and_si512(shifted, _mm512_set1_epi8(mask.cast_signed()))
        })
    }

    #[inline(always)]
    fn shl<const SHIFT: u32>(x: __m512i) -> __m512i {
        avx512!(_mm512_slli_epi16::<SHIFT>(x))
    }

    #[inline(always)]
    fn or(a: __m512i, b: __m512i) -> __m512i {
        avx512!(_mm512_or_si512(a, b))
    }

    #[inline(always)]
    fn sub_bytes(x: __m512i, by: u8) -> __m512i {
        avx512!(_mm512_sub_epi8(x, _mm512_set1_epi8(by.cast_signed())))
    }

    #[inline(always)]
    fn add_bytes(a: __m512i, b: __m512i) -> __m512i {
        avx512!(_mm512_add_epi8(a, b))
    }

    #[inline(always)]
    fn negate(x: __m512i, bits: u64) -> __m512i {
        avx512!(_mm512_mask_sub_epi8(x, bits, _mm512_setzero_si512(), x))
    }

    #[inline(always)]
    fn sixteens(bits: u64) -> __m512i {
        avx512!(_mm512_maskz_set1_epi8(bits, 16))
    }

    #[inline(always)]
    fn lookup(table: &[i8; 16], x: __m512i) -> __m512i {
        avx512!({
            let table = _mm512_broadcast_i32x4(_mm_loadu_si128(table.as_ptr().cast()));
            _mm512_shuffle_epi8(table, x)
        })
    }

    #[inline(always)]
    fn splat_quad(quad: [i8; 4]) -> __m512i {
        let [a, b, c, d] = quad;
        avx512!(_mm512_set1_epi32(i32::from_le_bytes([
            a.cast_unsigned(),
            b.cast_unsigned(),
            c.cast_unsigned(),
            d.cast_unsigned(),
        ])))
    }

    #[inline(always)]
    fn dot_unsigned(sum: __m512i, codes: __m512i, x: __m512i) -> __m512i {
        avx512!(_mm512_dpbusd_epi32(sum, codes, x))
    }

    #[inline(always)]
    fn prepare(codes: __m512i) -> __m512i {
        avx512!(_mm512_xor_si512(codes, _mm512_set1_epi8(-128)))
    }

    #[inline(always)]
    fn dot_prepared(sum: __m512i, codes: __m512i, x: __m512i) -> __m512i {
        avx512!(_mm512_dpbusd_epi32(sum, codes, x))
    }

    #[inline(always)]
    fn sum_by_eight(parts: [__m512i; 8]) -> __m512i {
        let low = quarter_sums([parts[0], parts[1], parts[2], parts[3]]);
        let high = quarter_sums([parts[4], parts[5], parts[6], parts[7]]);
        avx512!({
            // A quarter holds half of a sum of eight: add quarters 0 and 1, 2 and 3.
            let even = _mm512_shuffle_i32x4::<0b10_00_10_00>(low, high);
            let odd = _mm512_shuffle_i32x4::<0b11_01_11_01>(low, high);
            let sums = _mm512_add_epi32(even, odd);
            let index = _mm512_set_epi32(15, 11, 14, 10, 13, 9, 12, 8, 7, 3, 6, 2, 5, 1, 4, 0);
            _mm512_permutexvar_epi32(index, sums)
        })
    }

    #[inline(always)]
    fn sum_by_four(parts: [__m512i; 4]) -> __m512i {
        let sums = quarter_sums(parts);
        avx512!({
            let index = _mm512_set_epi32(15, 11, 7, 3, 14, 10, 6, 2, 13, 9, 5, 1, 12, 8, 4, 0);
            _mm512_permutexvar_epi32(index, sums)
        })
    }

    #[inline(always)]
    fn sum_by_four_in_turns(parts: [__m512i; 4]) -> __m512i {
        let sums = quarter_sums(parts);
        avx512!({
            let index = _mm512_set_epi64(7, 5, 3, 1, 6, 4, 2, 0);
            _mm512_permutexvar_epi64(index, sums)
        })
    }

    #[inline(always)]
    fn six_bit_scales([first, second]: [&[u8; 16]; 2]) -> [__m512; 2] {
        // Quads of a block: both factors, the scales' low bits, the minimums', and four bits each of the last four of both.
        avx512!({
            let read = |from: &[u8; 16]| std::ptr::read_unaligned(from.as_ptr().cast());
            let both =
                _mm256_inserti128_si256::<1>(_mm256_castsi128_si256(read(first)), read(second));
            let low = _mm256_shuffle_epi32::<0b10_10_01_01>(both);
            let last = _mm256_srlv_epi32(
                _mm256_shuffle_epi32::<0b11_11_11_11>(both),
                _mm256_set_epi32(4, 0, 0, 0, 4, 0, 0, 0),
            );
            let high = _mm256_and_si256(_mm256_srli_epi16::<2>(low), _mm256_set1_epi8(0x30));
            let last = _mm256_or_si256(_mm256_and_si256(last, _mm256_set1_epi8(15)), high);
            let low = _mm256_and_si256(low, _mm256_set1_epi8(63));
            // Eight scales and eight minimums of each block; then all scales, all minimums.
            let numbers = _mm256_blend_epi32::<0b1010_1010>(low, last);
            let numbers = _mm256_permute4x64_epi64::<0b11_01_10_00>(numbers);
            let scales = _mm256_castsi256_si128(numbers);
            let mins = _mm256_extracti128_si256::<1>(numbers);
            let d = _mm256_shuffle_epi8(both, _mm256_set1_epi16(0x0100));
            let dmin = _mm256_shuffle_epi8(both, _mm256_set1_epi16(0x0302));
            let scaled = |factors, numbers| {
                let numbers = _mm512_cvtepi32_ps(_mm512_cvtepu8_epi32(numbers));
                _mm512_mul_ps(_mm512_cvtph_ps(factors), numbers)
            };
            [scaled(d, scales), scaled(dmin, mins)]
        })
    }

    #[inline(always)]
    fn unzip_quarters(a: __m512i, b: __m512i) -> [__m512i; 2] {
        avx512!([
            _mm512_shuffle_i32x4::<0b10_00_10_00>(a, b),
            _mm512_shuffle_i32x4::<0b11_01_11_01>(a, b),
        ])
    }

    #[inline(always)]
    fn spread_four(run: &[u8; 16], [a, b, c, d]: [u32; 4], mask: u8) -> __m512i {
        let [a, b, c, d] = [i64::from(a), i64::from(b), i64::from(c), i64::from(d)];
        avx512!({
            let all = _mm512_broadcast_i32x4(_mm_loadu_si128(run.as_ptr().cast()));
            let shifted = _mm512_srlv_epi64(all, _mm512_set_epi64(d, d, c, c, b, b, a, a));
            _mm512_and_si512(shifted, _mm512_set1_epi8(mask.cast_signed()))
        })
    }

    #[inline(always)]
    fn prefetch(address: *const u8) {
        avx512!(_mm_prefetch::<_MM_HINT_T0>(address.cast()));
    }

    #[inline(always)]
    fn transpose_strided(bytes: &[u8], stride: usize) -> [__m512i; 4] {
        assert_sixteen(bytes, stride, 16);
        let start = bytes.as_ptr();
        // SAFETY: As in `avx512!`; the sixteen loads of sixteen bytes lie within `bytes`, asserted above.
        unsafe {
            // Quarter `q` of vector `r` is row `4 q + r`.
            let mut quads = [_mm512_setzero_si512(); 4];
            for (r, quad) in quads.iter_mut().enumerate() {
                let first = start.add(r * stride);
                let one = _mm512_castsi128_si512(_mm_loadu_si128(first.cast()));
                let two = _mm_loadu_si128(first.add(4 * stride).cast());
                let three = _mm_loadu_si128(first.add(8 * stride).cast());
                let four = _mm_loadu_si128(first.add(12 * stride).cast());
                let both = _mm512_inserti32x4::<1>(one, two);
                *quad = _mm512_inserti32x4::<3>(_mm512_inserti32x4::<2>(both, three), four);
            }
            let [a, b, c, d] = quads;
            let (ab_low, ab_high) = (_mm512_unpacklo_epi32(a, b), _mm512_unpackhi_epi32(a, b));
            let (cd_low, cd_high) = (_mm512_unpacklo_epi32(c, d), _mm512_unpackhi_epi32(c, d));
            [
                _mm512_unpacklo_epi64(ab_low, cd_low),
                _mm512_unpackhi_epi64(ab_low, cd_low),
                _mm512_unpacklo_epi64(ab_high, cd_high),
                _mm512_unpackhi_epi64(ab_high, cd_high),
            ]
        }
    }

    #[inline(always)]
    fn or_ints(a: __m512i, b: __m512i) -> __m512i {
        avx512!(_mm512_or_si512(a, b))
    }

    #[inline(always)]
    fn shl_ints(x: __m512i, by: u32) -> __m512i {
        avx512!(_mm512_sll_epi32(x, _mm_cvtsi32_si128(by.cast_signed())))
    }

    #[inline(always)]
    fn word_field(x: __m512i, shift: u32, mask: i32) -> __m512i {
        avx512!({
            let shifted = _mm512_srl_epi32(x, _mm_cvtsi32_si128(shift.cast_signed()));
            _mm512_and_si512(shifted, _mm512_set1_epi32(mask))
        })
    }

    #[inline(always)]
    fn load_f16_strided<const STRIDE: usize>(bytes: &[u8]) -> __m512 {
        let order = const { Order::of_f16(STRIDE) };
        assert!(bytes.len() >= 15 * STRIDE + 2, "sixteen F16 within bytes");
        // Reads lie within `bytes`, too: the masks let nothing through but the sixteen.
        avx512!({
            let mut all = _mm512_setzero_si512();
            for window in 0..LANES / order.in_window {
                let start = window * (order.in_window * STRIDE - 2);
                let from = bytes.as_ptr().wrapping_add(start).cast();
                all = _mm512_mask_loadu_epi16(all, order.mask << window, from);
            }
            let indices = _mm512_loadu_si512(order.indices.as_ptr().cast());
            _mm512_cvtph_ps(_mm512_castsi512_si256(_mm512_permutexvar_epi16(
                indices, all,
            )))
        })
    }

    #[inline(always)]
    fn load_words_strided(bytes: &[u8], stride: usize) -> __m512i {
        assert_sixteen(bytes, stride, 4);
        avx512!({
            let steps = _mm512_set_epi32(15, 14, 13, 12, 11, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0);
            let indices = _mm512_mullo_epi32(steps, _mm512_set1_epi32(stride as i32));
            // Each four bytes gathered lie within `bytes`, asserted above.
            _mm512_i32gather_epi32::<1>(indices, bytes.as_ptr().cast())
        })
    }

    #[inline(always)]
    fn low_f16(x: __m512i) -> __m512 {
        avx512!(_mm512_cvtph_ps(_mm512_cvtepi32_epi16(x)))
    }

    #[inline(always)]
    fn high_f16(x: __m512i) -> __m512 {
        Self::low_f16(avx512!(_mm512_srli_epi32::<16>(x)))
    }

    #[inline(always)]
    fn transpose(rows: &[Line; LANES], columns: &mut [Line; LANES]) {
        avx512!({
            let mut units = [_mm512_setzero_si512(); LANES];
            for (unit, row) in units.iter_mut().zip(rows) {
                *unit = _mm512_load_si512(row.0.as_ptr().cast());
            }
            // Quads of rows first: quarter `q` of `quads[4 r + u]` holds unit `4 q + u` of rows `4 r .. 4 r + 4`.
            let mut quads = [_mm512_setzero_si512(); LANES];
            for r in 0..4 {
                let [a, b, c, d] = [
                    units[4 * r],
                    units[4 * r + 1],
                    units[4 * r + 2],
                    units[4 * r + 3],
                ];
                let (ab_low, ab_high) = (_mm512_unpacklo_epi32(a, b), _mm512_unpackhi_epi32(a, b));
                let (cd_low, cd_high) = (_mm512_unpacklo_epi32(c, d), _mm512_unpackhi_epi32(c, d));
                quads[4 * r] = _mm512_unpacklo_epi64(ab_low, cd_low);
                quads[4 * r + 1] = _mm512_unpackhi_epi64(ab_low, cd_low);
                quads[4 * r + 2] = _mm512_unpacklo_epi64(ab_high, cd_high);
                quads[4 * r + 3] = _mm512_unpackhi_epi64(ab_high, cd_high);
            }
            // Then the 4 by 4 quarters of each unit.
            for u in 0..4 {
                let (a, b, c, d) = (quads[u], quads[4 + u], quads[8 + u], quads[12 + u]);
                let ab_even = _mm512_shuffle_i32x4::<0b10_00_10_00>(a, b);
                let ab_odd = _mm512_shuffle_i32x4::<0b11_01_11_01>(a, b);
                let cd_even = _mm512_shuffle_i32x4::<0b10_00_10_00>(c, d);
                let cd_odd = _mm512_shuffle_i32x4::<0b11_01_11_01>(c, d);
                let quarters = [
                    _mm512_shuffle_i32x4::<0b10_00_10_00>(ab_even, cd_even),
                    _mm512_shuffle_i32x4::<0b10_00_10_00>(ab_odd, cd_odd),
                    _mm512_shuffle_i32x4::<0b11_01_11_01>(ab_even, cd_even),
                    _mm512_shuffle_i32x4::<0b11_01_11_01>(ab_odd, cd_odd),
                ];
                for q in 0..4 {
                    _mm512_store_si512(columns[4 * q + u].0.as_mut_ptr().cast(), quarters[q]);
                }
            }
        });
    }
}

/// Lane `v` of each quarter is the sum of that quarter of vector `v`.
#[inline(always)]
fn quarter_sums([a, b, c, d]: [__m512i; 4]) -> __m512i {
    avx512!({
        let ab = _mm512_add_epi32(_mm512_unpacklo_epi32(a, b), _mm512_unpackhi_epi32(a, b));
        let cd = _mm512_add_epi32(_mm512_unpacklo_epi32(c, d), _mm512_unpackhi_epi32(c, d));
        _mm512_add_epi32(_mm512_unpacklo_epi64(ab, cd), _mm512_unpackhi_epi64(ab, cd))
    })
}

/// Gathering of sixteen F16 that stand a stride apart: windows of 64 bytes hold several each, and each window is read
/// one F16 further to the left than the one before, so that all find their own lane in one register.
struct Order {
    in_window: usize,
    /// Of the first window.
    mask: u32,
    indices: [u16; 32],
}

impl Order {
    const fn of_f16(stride: usize) -> Order {
        assert!(
            stride.is_multiple_of(2) && stride >= LANES,
            "an even stride"
        );
        // As many as still fit when the last window is read furthest to the left.
        let mut in_window = 4;
        while (in_window - 1) * stride / 2 + LANES / in_window > 32 {
            in_window /= 2;
        }
        let (mut mask, mut indices) = (0, [0; 32]);
        let mut i = 0;
        while i < LANES {
            let position = i % in_window * stride / 2;
            mask |= 1 << position;
            indices[i] = (position + i / in_window) as u16;
            i += 1;
        }
        Order {
            in_window,
            mask,
            indices,
        }
    }
}
