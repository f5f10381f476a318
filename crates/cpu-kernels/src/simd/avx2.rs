//! The sixteen lanes as two 256-bit registers. Needs AVX2, FMA and F16C, which every x86 core since 2015 has. Those from
//! 2021 on that have no AVX-512 have AVX-VNNI instead, whose dot products replace three instructions by one.
#![expect(
    unsafe_code,
    reason = "vector intrinsics; the features are checked where the kernel table is chosen"
)]

#[allow(
    clippy::wildcard_imports,
    reason = "the names are the instructions; a list of seventy says nothing"
)]
use std::arch::x86_64::*;
use std::marker::PhantomData;

use super::{Floats, LANES, Line, Simd, array, assert_sixteen, avx512::sum_eight};

/// Wraps intrinsics whose only demand is the instruction set (and pointers that come from array references).
macro_rules! avx2 {
    ($body:expr) => {
        // SAFETY: Values of this module's types are made and used only inside kernels instantiated with `Avx2` or
        // `AvxVnni`, and `Kernels::for_isa` hands those out after `Isa::available` has seen the features. Loads and stores go
        // through references to arrays of at least the width read.
        unsafe { $body }
    };
}

/// 256-bit vectors with one way or another to multiply bytes.
#[derive(Clone, Copy)]
pub struct Vectors<D>(PhantomData<D>);

pub type Avx2 = Vectors<MultiplyAdds>;
pub type AvxVnni = Vectors<Vnni>;

/// Dot products of bytes, as [`Simd`] has them.
pub trait Dots: Copy + 'static {
    const SIGNED_OFFSET: i32;
    fn dot_unsigned(sum: __m256i, codes: __m256i, x: __m256i) -> __m256i;
    fn prepare(codes: __m256i) -> __m256i;
    fn dot_prepared(sum: __m256i, codes: __m256i, x: __m256i) -> __m256i;
    fn dot_group(codes: &[__m256i; 8], x: &[[i8; 4]; 8], from: i32) -> __m256i;
}

/// By way of sums of two products in 16 bits.
#[derive(Clone, Copy)]
pub struct MultiplyAdds;

impl Dots for MultiplyAdds {
    const SIGNED_OFFSET: i32 = 0;

    #[inline(always)]
    fn dot_unsigned(sum: __m256i, codes: __m256i, x: __m256i) -> __m256i {
        avx2!(_mm256_add_epi32(sum, quad_sums(codes, x)))
    }

    #[inline(always)]
    fn prepare(codes: __m256i) -> __m256i {
        codes
    }

    #[inline(always)]
    fn dot_prepared(sum: __m256i, codes: __m256i, x: __m256i) -> __m256i {
        // |c| * (x with the sign of c): 128 * 127 * 2 is just below the saturation of the 16-bit pair sums.
        avx2!({
            let products = quad_sums(_mm256_abs_epi8(codes), _mm256_sign_epi8(x, codes));
            _mm256_add_epi32(sum, products)
        })
    }

    #[inline(always)]
    fn dot_group(codes: &[__m256i; 8], x: &[[i8; 4]; 8], from: i32) -> __m256i {
        // Eight times two products of at most 15 * 127 stay within 16 bits, so they are widened once.
        avx2!({
            let mut pairs = _mm256_setzero_si256();
            for (codes, quad) in codes.iter().zip(x) {
                let products = _mm256_maddubs_epi16(*codes, splat_four(*quad));
                pairs = _mm256_add_epi16(pairs, products);
            }
            let totals = _mm256_madd_epi16(pairs, _mm256_set1_epi16(1));
            _mm256_add_epi32(totals, _mm256_set1_epi32(from))
        })
    }
}

/// One instruction, whose codes must be unsigned.
#[derive(Clone, Copy)]
pub struct Vnni;

impl Dots for Vnni {
    const SIGNED_OFFSET: i32 = 128;

    #[inline(always)]
    fn dot_unsigned(sum: __m256i, codes: __m256i, x: __m256i) -> __m256i {
        avx2!(_mm256_dpbusd_avx_epi32(sum, codes, x))
    }

    #[inline(always)]
    fn prepare(codes: __m256i) -> __m256i {
        avx2!(_mm256_xor_si256(codes, _mm256_set1_epi8(-128)))
    }

    #[inline(always)]
    fn dot_prepared(sum: __m256i, codes: __m256i, x: __m256i) -> __m256i {
        Vnni::dot_unsigned(sum, codes, x)
    }

    #[inline(always)]
    fn dot_group(codes: &[__m256i; 8], x: &[[i8; 4]; 8], from: i32) -> __m256i {
        let mut totals = avx2!(_mm256_set1_epi32(from));
        for (codes, quad) in codes.iter().zip(x) {
            totals = Vnni::dot_unsigned(totals, *codes, splat_four(*quad));
        }
        totals
    }
}

/// Lanes 0 to 7 and 8 to 15.
#[derive(Clone, Copy)]
pub struct Pair<T>(T, T);

/// The same expression for both halves: `both!(a = x, b = y => f(a, b))`.
macro_rules! both {
    ($($name:ident = $pair:expr),+ => $body:expr) => {
        Pair(
            { $(let $name = $pair.0;)+ avx2!($body) },
            { $(let $name = $pair.1;)+ avx2!($body) },
        )
    };
}

/// The two halves of sixteen elements.
#[inline(always)]
fn halves<T>(whole: &[T; LANES]) -> Pair<&[T; 8]> {
    let (low, _) = whole.as_chunks();
    Pair(&low[0], &low[1])
}

#[inline(always)]
fn halves_mut<T>(whole: &mut [T; LANES]) -> [&mut [T; 8]; 2] {
    let (low, high) = whole.split_at_mut(8);
    let (low, _) = low.as_chunks_mut();
    let (high, _) = high.as_chunks_mut();
    [&mut low[0], &mut high[0]]
}

impl Floats for Pair<__m256> {
    #[inline(always)]
    fn splat(x: f32) -> Self {
        let x = avx2!(_mm256_set1_ps(x));
        Pair(x, x)
    }

    #[inline(always)]
    fn load(from: &[f32; LANES]) -> Self {
        both!(half = halves(from) => _mm256_loadu_ps(half.as_ptr()))
    }

    #[inline(always)]
    fn store(self, to: &mut [f32; LANES]) {
        let [low, high] = halves_mut(to);
        avx2!(_mm256_storeu_ps(low.as_mut_ptr(), self.0));
        avx2!(_mm256_storeu_ps(high.as_mut_ptr(), self.1));
    }

    #[inline(always)]
    fn load_f16_bits(from: &[u16; LANES]) -> Self {
        both!(half = halves(from) => _mm256_cvtph_ps(_mm_loadu_si128(half.as_ptr().cast())))
    }

    #[inline(always)]
    fn store_f16_bits(self, to: &mut [u16; LANES]) {
        let rounded = both!(x = self => _mm256_cvtps_ph::<_MM_FROUND_TO_NEAREST_INT>(x));
        let [low, high] = halves_mut(to);
        avx2!(_mm_storeu_si128(low.as_mut_ptr().cast(), rounded.0));
        avx2!(_mm_storeu_si128(high.as_mut_ptr().cast(), rounded.1));
    }

    #[inline(always)]
    fn load_f32_bytes(from: &[u8; 4 * LANES]) -> Self {
        let (from, _) = from.as_chunks::<32>();
        both!(half = Pair(&from[0], &from[1]) => _mm256_loadu_ps(half.as_ptr().cast()))
    }

    #[inline(always)]
    fn load_f16_bytes(from: &[u8; 2 * LANES]) -> Self {
        let (from, _) = from.as_chunks::<16>();
        both!(half = Pair(&from[0], &from[1]) => {
            _mm256_cvtph_ps(_mm_loadu_si128(half.as_ptr().cast()))
        })
    }

    #[inline(always)]
    fn load_bf16_bytes(from: &[u8; 2 * LANES]) -> Self {
        let (from, _) = from.as_chunks::<16>();
        both!(half = Pair(&from[0], &from[1]) => {
            let wide = _mm256_cvtepu16_epi32(_mm_loadu_si128(half.as_ptr().cast()));
            _mm256_castsi256_ps(_mm256_slli_epi32::<16>(wide))
        })
    }

    #[inline(always)]
    fn load_i8_bytes(from: &[u8; LANES]) -> Self {
        let (from, _) = from.as_chunks::<8>();
        both!(half = Pair(&from[0], &from[1]) => {
            _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64(half.as_ptr().cast())))
        })
    }

    #[inline(always)]
    fn load_twice(from: &[f32; LANES / 2]) -> Self {
        avx2!({
            let eight = _mm256_loadu_ps(from.as_ptr());
            Pair(
                _mm256_permutevar8x32_ps(eight, _mm256_set_epi32(3, 3, 2, 2, 1, 1, 0, 0)),
                _mm256_permutevar8x32_ps(eight, _mm256_set_epi32(7, 7, 6, 6, 5, 5, 4, 4)),
            )
        })
    }

    #[inline(always)]
    fn add(self, other: Self) -> Self {
        both!(a = self, b = other => _mm256_add_ps(a, b))
    }

    #[inline(always)]
    fn sub(self, other: Self) -> Self {
        both!(a = self, b = other => _mm256_sub_ps(a, b))
    }

    #[inline(always)]
    fn mul(self, other: Self) -> Self {
        both!(a = self, b = other => _mm256_mul_ps(a, b))
    }

    #[inline(always)]
    fn div(self, other: Self) -> Self {
        both!(a = self, b = other => _mm256_div_ps(a, b))
    }

    #[inline(always)]
    fn max(self, other: Self) -> Self {
        both!(a = self, b = other => _mm256_max_ps(a, b))
    }

    #[inline(always)]
    fn min(self, other: Self) -> Self {
        both!(a = self, b = other => _mm256_min_ps(a, b))
    }

    #[inline(always)]
    fn mul_add(self, by: Self, plus: Self) -> Self {
        both!(a = self, b = by, c = plus => _mm256_fmadd_ps(a, b, c))
    }

    #[inline(always)]
    fn neg_mul_add(self, by: Self, from: Self) -> Self {
        both!(a = self, b = by, c = from => _mm256_fnmadd_ps(a, b, c))
    }

    #[inline(always)]
    fn round(self) -> Self {
        both!(x = self => {
            _mm256_round_ps::<{ _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC }>(x)
        })
    }

    #[inline(always)]
    fn abs(self) -> Self {
        both!(x = self => _mm256_andnot_ps(_mm256_set1_ps(-0.0), x))
    }

    #[inline(always)]
    fn exp2_whole(self) -> Self {
        both!(x = self => {
            let biased = _mm256_add_epi32(_mm256_cvtps_epi32(x), _mm256_set1_epi32(127));
            _mm256_castsi256_ps(_mm256_slli_epi32::<23>(biased))
        })
    }

    #[inline(always)]
    fn select_below(self, bound: Self, then: Self, otherwise: Self) -> Self {
        both!(a = self, b = bound, then = then, otherwise = otherwise => {
            _mm256_blendv_ps(otherwise, then, _mm256_cmp_ps::<_CMP_LT_OQ>(a, b))
        })
    }

    #[inline(always)]
    fn sum(self) -> f32 {
        sum_eight(avx2!(_mm256_add_ps(self.0, self.1)))
    }

    #[inline(always)]
    fn largest(self) -> f32 {
        avx2!({
            let x = _mm256_max_ps(self.0, self.1);
            let x = _mm_max_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps::<1>(x));
            let x = _mm_max_ps(x, _mm_movehl_ps(x, x));
            _mm_cvtss_f32(_mm_max_ss(x, _mm_shuffle_ps::<1>(x, x)))
        })
    }

    #[inline(always)]
    fn store_i8(self, to: &mut [i8; LANES]) {
        avx2!({
            let words = _mm256_packs_epi32(_mm256_cvtps_epi32(self.0), _mm256_cvtps_epi32(self.1));
            // Packing works by halves of a register: put the quarters back in order.
            let words = _mm256_permute4x64_epi64::<0b11_01_10_00>(words);
            let bytes = _mm_packs_epi16(
                _mm256_castsi256_si128(words),
                _mm256_extracti128_si256::<1>(words),
            );
            _mm_storeu_si128(to.as_mut_ptr().cast(), bytes);
        });
    }
}

/// Byte `i` is all ones where bit `i` is set, else 0.
#[inline(always)]
fn set_bytes(bits: u64) -> Pair<__m256i> {
    both!(bits = Pair(bits as u32, (bits >> 32) as u32) => {
        {
            // Byte `i` gets the byte of `bits` that holds bit `i`, and of that only bit `i`.
            let byte_of_bit = _mm256_set_epi64x(
                0x0303_0303_0303_0303,
                0x0202_0202_0202_0202,
                0x0101_0101_0101_0101,
                0,
            );
            let mine = _mm256_set1_epi64x(0x8040_2010_0804_0201_u64.cast_signed());
            let bytes = _mm256_shuffle_epi8(_mm256_set1_epi32(bits.cast_signed()), byte_of_bit);
            _mm256_cmpeq_epi8(_mm256_and_si256(bytes, mine), mine)
        }
    })
}

impl<D: Dots> Simd for Vectors<D> {
    type Floats = Pair<__m256>;
    type Ints = Pair<__m256i>;
    type Bytes = Pair<__m256i>;

    const SIGNED_OFFSET: i32 = D::SIGNED_OFFSET;
    const WIDE: bool = false;
    const SHARING_ROWS: usize = 2;

    #[inline(always)]
    fn ints(x: i32) -> Pair<__m256i> {
        let x = avx2!(_mm256_set1_epi32(x));
        Pair(x, x)
    }

    #[inline(always)]
    fn load_ints(from: &[i32; LANES]) -> Pair<__m256i> {
        both!(half = halves(from) => _mm256_loadu_si256(half.as_ptr().cast()))
    }

    #[inline(always)]
    fn widen(from: &[i8; LANES]) -> Pair<__m256i> {
        let bytes = avx2!(_mm_loadu_si128(from.as_ptr().cast()));
        avx2!(Pair(
            _mm256_cvtepi8_epi32(bytes),
            _mm256_cvtepi8_epi32(_mm_unpackhi_epi64(bytes, bytes)),
        ))
    }

    fn store_ints(x: Pair<__m256i>, to: &mut [i32; LANES]) {
        let [low, high] = halves_mut(to);
        avx2!(_mm256_storeu_si256(low.as_mut_ptr().cast(), x.0));
        avx2!(_mm256_storeu_si256(high.as_mut_ptr().cast(), x.1));
    }

    #[inline(always)]
    fn minus_times(x: Pair<__m256i>, by: i32, y: Pair<__m256i>) -> Pair<__m256i> {
        if by == 0 {
            return x;
        }
        both!(x = x, y = y => {
            _mm256_sub_epi32(x, _mm256_mullo_epi32(y, _mm256_set1_epi32(by)))
        })
    }

    #[inline(always)]
    fn to_floats(x: Pair<__m256i>) -> Pair<__m256> {
        both!(x = x => _mm256_cvtepi32_ps(x))
    }

    #[inline(always)]
    fn load_bytes(from: &[u8; 64]) -> Pair<__m256i> {
        avx2!(Pair(
            _mm256_loadu_si256(from.as_ptr().cast()),
            _mm256_loadu_si256(from[32..].as_ptr().cast())
        ))
    }

    #[inline(always)]
    fn load_signed(from: &[i8; 64]) -> Pair<__m256i> {
        avx2!(Pair(
            _mm256_loadu_si256(from.as_ptr().cast()),
            _mm256_loadu_si256(from[32..].as_ptr().cast())
        ))
    }

    #[inline(always)]
    fn store_bytes(x: Pair<__m256i>, to: &mut [u8; 64]) {
        avx2!(_mm256_storeu_si256(to.as_mut_ptr().cast(), x.0));
        avx2!(_mm256_storeu_si256(to[32..].as_mut_ptr().cast(), x.1));
    }

    #[inline(always)]
    fn join(a: &[u8; 32], b: &[u8; 32]) -> Pair<__m256i> {
        avx2!(Pair(
            _mm256_loadu_si256(a.as_ptr().cast()),
            _mm256_loadu_si256(b.as_ptr().cast())
        ))
    }

    #[inline(always)]
    fn join_four([a, b, c, d]: [&[u8; 16]; 4]) -> Pair<__m256i> {
        both!(runs = Pair([a, b], [c, d]) => {
            let first = _mm256_castsi128_si256(_mm_loadu_si128(runs[0].as_ptr().cast()));
            _mm256_inserti128_si256::<1>(first, _mm_loadu_si128(runs[1].as_ptr().cast()))
        })
    }

    #[inline(always)]
    fn nibbles(a: &[u8; 16], b: &[u8; 16]) -> Pair<__m256i> {
        both!(block = Pair(a, b) => {
            let twice = _mm256_broadcastsi128_si256(_mm_loadu_si128(block.as_ptr().cast()));
            let shifted = _mm256_srlv_epi64(twice, _mm256_set_epi64x(4, 4, 0, 0));
            _mm256_and_si256(shifted, _mm256_set1_epi8(15))
        })
    }

    #[inline(always)]
    fn spread(run: &[u8; 32], first: u32, second: u32, mask: u8) -> Pair<__m256i> {
        let run = avx2!(_mm256_loadu_si256(run.as_ptr().cast()));
        Pair(
            shift_and_mask(run, first, mask),
            shift_and_mask(run, second, mask),
        )
    }

    #[inline(always)]
    fn field(x: Pair<__m256i>, shift: u32, mask: u8) -> Pair<__m256i> {
        Pair(
            shift_and_mask(x.0, shift, mask),
            shift_and_mask(x.1, shift, mask),
        )
    }

    #[inline(always)]
    fn shl<const SHIFT: u32>(x: Pair<__m256i>) -> Pair<__m256i> {
        both!(x = x => _mm256_sll_epi16(x, _mm_cvtsi32_si128(SHIFT.cast_signed())))
    }

    #[inline(always)]
    fn or(a: Pair<__m256i>, b: Pair<__m256i>) -> Pair<__m256i> {
        both!(a = a, b = b => _mm256_or_si256(a, b))
    }

    #[inline(always)]
    fn sub_bytes(x: Pair<__m256i>, by: u8) -> Pair<__m256i> {
        both!(x = x => _mm256_sub_epi8(x, _mm256_set1_epi8(by.cast_signed())))
    }

    #[inline(always)]
    fn add_bytes(a: Pair<__m256i>, b: Pair<__m256i>) -> Pair<__m256i> {
        both!(a = a, b = b => _mm256_add_epi8(a, b))
    }

    #[inline(always)]
    fn negate(x: Pair<__m256i>, bits: u64) -> Pair<__m256i> {
        let set = set_bytes(bits);
        both!(x = x, set = set => _mm256_sub_epi8(_mm256_xor_si256(x, set), set))
    }

    #[inline(always)]
    fn sixteens(bits: u64) -> Pair<__m256i> {
        let set = set_bytes(bits);
        both!(set = set => _mm256_and_si256(set, _mm256_set1_epi8(16)))
    }

    #[inline(always)]
    fn lookup(table: &[i8; 16], x: Pair<__m256i>) -> Pair<__m256i> {
        let table = avx2!(_mm256_broadcastsi128_si256(_mm_loadu_si128(
            table.as_ptr().cast()
        )));
        both!(x = x => _mm256_shuffle_epi8(table, x))
    }

    #[inline(always)]
    fn splat_quad(quad: [i8; 4]) -> Pair<__m256i> {
        let x = splat_four(quad);
        Pair(x, x)
    }

    #[inline(always)]
    fn dot_unsigned(sum: Pair<__m256i>, codes: Pair<__m256i>, x: Pair<__m256i>) -> Pair<__m256i> {
        Pair(
            D::dot_unsigned(sum.0, codes.0, x.0),
            D::dot_unsigned(sum.1, codes.1, x.1),
        )
    }

    #[inline(always)]
    fn prepare(codes: Pair<__m256i>) -> Pair<__m256i> {
        Pair(D::prepare(codes.0), D::prepare(codes.1))
    }

    #[inline(always)]
    fn dot_prepared(sum: Pair<__m256i>, codes: Pair<__m256i>, x: Pair<__m256i>) -> Pair<__m256i> {
        Pair(
            D::dot_prepared(sum.0, codes.0, x.0),
            D::dot_prepared(sum.1, codes.1, x.1),
        )
    }

    #[inline(always)]
    fn sum_by_eight(parts: [Pair<__m256i>; 8]) -> Pair<__m256i> {
        let [a, b, c, d, e, f, g, h] = parts;
        Pair(
            sums_of_eight([a.0, a.1, b.0, b.1, c.0, c.1, d.0, d.1]),
            sums_of_eight([e.0, e.1, f.0, f.1, g.0, g.1, h.0, h.1]),
        )
    }

    #[inline(always)]
    fn sum_by_four(parts: [Pair<__m256i>; 4]) -> Pair<__m256i> {
        let [a, b, c, d] = parts;
        both!(pair = Pair((a, b), (c, d)) => {
            let (a, b) = pair;
            let sums = half_sums([a.0, a.1, b.0, b.1]);
            // Low halves hold sums 0 2 4 6, high halves 1 3 5 7.
            _mm256_permutevar8x32_epi32(sums, _mm256_set_epi32(7, 3, 6, 2, 5, 1, 4, 0))
        })
    }

    #[inline(always)]
    fn sum_by_four_in_turns(parts: [Pair<__m256i>; 4]) -> Pair<__m256i> {
        let [a, b, c, d] = parts;
        both!(pair = Pair((a, b), (c, d)) => {
            let (a, b) = pair;
            let sums = half_sums([a.0, a.1, b.0, b.1]);
            // Low halves hold sums 0 and 2 of `a` and of `b`, high halves 1 and 3.
            _mm256_permutevar8x32_epi32(sums, _mm256_set_epi32(7, 5, 3, 1, 6, 4, 2, 0))
        })
    }

    #[inline(always)]
    fn six_bit_scales([first, second]: [&[u8; 16]; 2]) -> [Pair<__m256>; 2] {
        let both = Pair(first, second);
        // Quads of a block: both factors, the scales' low bits, the minimums', and four bits each of the last four of both.
        let header = both!(from = both => _mm_loadu_si128(from.as_ptr().cast()));
        let numbers = both!(header = header => {
            let low = _mm_shuffle_epi32::<0b10_10_01_01>(header);
            let last = _mm_srlv_epi32(
                _mm_shuffle_epi32::<0b11_11_11_11>(header),
                _mm_set_epi32(4, 0, 0, 0),
            );
            let high = _mm_and_si128(_mm_srli_epi16::<2>(low), _mm_set1_epi8(0x30));
            let last = _mm_or_si128(_mm_and_si128(last, _mm_set1_epi8(15)), high);
            let low = _mm_and_si128(low, _mm_set1_epi8(63));
            _mm_blend_epi32::<0b1010>(low, last)
        });
        let factors = both!(header = header => _mm256_cvtph_ps(header));
        let scales = both!(numbers = numbers, factors = factors => {
            let numbers = _mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(numbers));
            _mm256_mul_ps(_mm256_broadcastss_ps(_mm256_castps256_ps128(factors)), numbers)
        });
        let mins = both!(numbers = numbers, factors = factors => {
            let numbers = _mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(_mm_unpackhi_epi64(numbers, numbers)));
            _mm256_mul_ps(_mm256_permutevar8x32_ps(factors, _mm256_set1_epi32(1)), numbers)
        });
        [scales, mins]
    }

    #[inline(always)]
    fn unzip_quarters(a: Pair<__m256i>, b: Pair<__m256i>) -> [Pair<__m256i>; 2] {
        avx2!([
            Pair(
                _mm256_permute2x128_si256::<0x20>(a.0, a.1),
                _mm256_permute2x128_si256::<0x20>(b.0, b.1),
            ),
            Pair(
                _mm256_permute2x128_si256::<0x31>(a.0, a.1),
                _mm256_permute2x128_si256::<0x31>(b.0, b.1),
            ),
        ])
    }

    #[inline(always)]
    fn spread_four(run: &[u8; 16], [a, b, c, d]: [u32; 4], mask: u8) -> Pair<__m256i> {
        let shifts = Pair((i64::from(a), i64::from(b)), (i64::from(c), i64::from(d)));
        let twice = avx2!(_mm256_broadcastsi128_si256(_mm_loadu_si128(
            run.as_ptr().cast()
        )));
        both!(by = shifts => {
            let shifted = _mm256_srlv_epi64(twice, _mm256_set_epi64x(by.1, by.1, by.0, by.0));
            _mm256_and_si256(shifted, _mm256_set1_epi8(mask.cast_signed()))
        })
    }

    #[inline(always)]
    fn prefetch(address: *const u8) {
        avx2!(_mm_prefetch::<_MM_HINT_T0>(address.cast()));
    }

    #[inline(always)]
    fn transpose_strided(bytes: &[u8], stride: usize) -> [Pair<__m256i>; 4] {
        assert_sixteen(bytes, stride, 16);
        // SAFETY: As in `avx2!`; the sixteen rows lie within `bytes`, asserted above.
        let (low, high) = unsafe {
            let start = bytes.as_ptr();
            (
                transpose_eight(start, stride),
                transpose_eight(start.add(8 * stride), stride),
            )
        };
        array![Pair(low[0], high[0]); u => Pair(low[u], high[u])]
    }

    #[inline(always)]
    fn or_ints(a: Pair<__m256i>, b: Pair<__m256i>) -> Pair<__m256i> {
        both!(a = a, b = b => _mm256_or_si256(a, b))
    }

    #[inline(always)]
    fn shl_ints(x: Pair<__m256i>, by: u32) -> Pair<__m256i> {
        both!(x = x => _mm256_sll_epi32(x, _mm_cvtsi32_si128(by.cast_signed())))
    }

    #[inline(always)]
    fn word_field(x: Pair<__m256i>, shift: u32, mask: i32) -> Pair<__m256i> {
        both!(x = x => {
            let shifted = _mm256_srl_epi32(x, _mm_cvtsi32_si128(shift.cast_signed()));
            _mm256_and_si256(shifted, _mm256_set1_epi32(mask))
        })
    }

    #[inline(always)]
    fn load_words_strided(bytes: &[u8], stride: usize) -> Pair<__m256i> {
        assert_sixteen(bytes, stride, 4);
        let stride = stride as i32;
        let first = avx2!(_mm256_mullo_epi32(
            _mm256_set_epi32(7, 6, 5, 4, 3, 2, 1, 0),
            _mm256_set1_epi32(stride)
        ));
        let second = avx2!(_mm256_add_epi32(first, _mm256_set1_epi32(8 * stride)));
        // Each four bytes gathered lie within `bytes`, asserted above.
        both!(offsets = Pair(first, second) => {
            _mm256_i32gather_epi32::<1>(bytes.as_ptr().cast(), offsets)
        })
    }

    #[inline(always)]
    fn low_f16(x: Pair<__m256i>) -> Pair<__m256> {
        // Signed saturation would change codes above 7fff, unsigned does not once the high bits are gone.
        both!(x = x => {
            let low = _mm256_and_si256(x, _mm256_set1_epi32(0xffff));
            let packed = _mm256_permute4x64_epi64::<0b1000>(_mm256_packus_epi32(low, low));
            _mm256_cvtph_ps(_mm256_castsi256_si128(packed))
        })
    }

    #[inline(always)]
    fn high_f16(x: Pair<__m256i>) -> Pair<__m256> {
        Self::low_f16(both!(x = x => _mm256_srli_epi32::<16>(x)))
    }

    #[inline(always)]
    fn dot_group(codes: &[Pair<__m256i>; 8], x: &[[i8; 4]; 8], from: i32) -> Pair<__m256i> {
        let low = array![codes[0].0; i => codes[i].0];
        let high = array![codes[0].1; i => codes[i].1];
        Pair(D::dot_group(&low, x, from), D::dot_group(&high, x, from))
    }

    #[inline(always)]
    fn transpose(rows: &[Line; LANES], columns: &mut [Line; LANES]) {
        super::Scalar::transpose(rows, columns);
    }
}

/// Eight rows of four units, one every `stride` bytes: each unit of all of them.
///
/// # Safety
/// All rows must be readable.
#[inline(always)]
unsafe fn transpose_eight(start: *const u8, stride: usize) -> [__m256i; 4] {
    // SAFETY: As in `avx2!`; the loads are the caller's promise.
    unsafe {
        // The halves of vector `r` are rows `r` and `r + 4`.
        let mut pairs = [_mm256_setzero_si256(); 4];
        for (r, pair) in pairs.iter_mut().enumerate() {
            let low = _mm_loadu_si128(start.add(r * stride).cast());
            let high = _mm_loadu_si128(start.add((r + 4) * stride).cast());
            *pair = _mm256_inserti128_si256::<1>(_mm256_castsi128_si256(low), high);
        }
        let [a, b, c, d] = pairs;
        let (ab_low, ab_high) = (_mm256_unpacklo_epi32(a, b), _mm256_unpackhi_epi32(a, b));
        let (cd_low, cd_high) = (_mm256_unpacklo_epi32(c, d), _mm256_unpackhi_epi32(c, d));
        [
            _mm256_unpacklo_epi64(ab_low, cd_low),
            _mm256_unpackhi_epi64(ab_low, cd_low),
            _mm256_unpacklo_epi64(ab_high, cd_high),
            _mm256_unpackhi_epi64(ab_high, cd_high),
        ]
    }
}

/// Four bytes, eight times.
#[inline(always)]
fn splat_four([a, b, c, d]: [i8; 4]) -> __m256i {
    avx2!(_mm256_set1_epi32(i32::from_le_bytes([
        a.cast_unsigned(),
        b.cast_unsigned(),
        c.cast_unsigned(),
        d.cast_unsigned(),
    ])))
}

#[inline(always)]
fn shift_and_mask(x: __m256i, shift: u32, mask: u8) -> __m256i {
    avx2!({
        let shifted = _mm256_srl_epi64(x, _mm_cvtsi32_si128(shift.cast_signed()));
        _mm256_and_si256(shifted, _mm256_set1_epi8(mask.cast_signed()))
    })
}

/// Accumulate of four neighbouring products of unsigned and signed bytes.
#[inline(always)]
fn quad_sums(unsigned: __m256i, signed: __m256i) -> __m256i {
    avx2!(_mm256_madd_epi16(
        _mm256_maddubs_epi16(unsigned, signed),
        _mm256_set1_epi16(1)
    ))
}

/// Lane `v` of each half is the sum of that half of vector `v`.
#[inline(always)]
fn half_sums([a, b, c, d]: [__m256i; 4]) -> __m256i {
    avx2!(_mm256_hadd_epi32(
        _mm256_hadd_epi32(a, b),
        _mm256_hadd_epi32(c, d)
    ))
}

/// Lane `v` is the sum of vector `v`.
#[inline(always)]
fn sums_of_eight([a, b, c, d, e, f, g, h]: [__m256i; 8]) -> __m256i {
    let (low, high) = (half_sums([a, b, c, d]), half_sums([e, f, g, h]));
    avx2!(_mm256_add_epi32(
        _mm256_permute2x128_si256::<0x20>(low, high),
        _mm256_permute2x128_si256::<0x31>(low, high)
    ))
}
