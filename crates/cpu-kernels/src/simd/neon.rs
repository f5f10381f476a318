//! The sixteen lanes as four 128-bit registers. Needs the dot products of Arm v8.2, which Cortex-A76, Neoverse N1, Apple M1
//! and their successors have; the rest of NEON belongs to the target. Older cores run the plain kernels. Cortex-A710,
//! Neoverse V1 and N2, Apple M2 and later ones also multiply two rows of eight bytes with two others (the extension I8MM),
//! in one instruction that does the work of two dot products.
#![expect(
    unsafe_code,
    reason = "loads and stores, and three instructions without stable intrinsics; the two that not every processor has are \
              checked where the kernel table is chosen"
)]

#[allow(
    clippy::wildcard_imports,
    reason = "the names are the instructions; a list of sixty says nothing"
)]
use std::arch::{aarch64::*, asm};

use super::{Floats, LANES, Line, Simd, array, assert_sixteen, plain_totals_by_eights};

/// 128-bit vectors with or without products of two rows with two rows.
#[derive(Clone, Copy)]
pub struct Vectors<const PAIRS: bool>;

pub type Neon = Vectors<false>;
pub type I8mm = Vectors<true>;

/// Lanes 0 to 3, 4 to 7, 8 to 11 and 12 to 15.
#[derive(Clone, Copy)]
pub struct Quad<T>(T, T, T, T);

/// Wraps intrinsics whose only demand is the instruction set (and pointers that come from array references).
macro_rules! neon {
    ($body:expr) => {
        // SAFETY: The target has NEON. The products that it may lack are used only inside kernels instantiated with `Neon`
        // or `I8mm`, and `Kernels::for_isa` hands those out after `Isa::available` has seen them. Loads and stores go
        // through references to arrays of the full width.
        unsafe { $body }
    };
}

/// The same expression for all four quarters: `each!(a = x, b = y => f(a, b))`.
macro_rules! each {
    ($($name:ident = $quad:expr),+ => $body:expr) => {
        match ($($quad,)+) {
            ($($name,)+) => Quad(
                { $(let $name = $name.0;)+ neon!($body) },
                { $(let $name = $name.1;)+ neon!($body) },
                { $(let $name = $name.2;)+ neon!($body) },
                { $(let $name = $name.3;)+ neon!($body) },
            ),
        }
    };
}

/// The four quarters of `4 N` elements.
#[inline(always)]
fn quarters<const N: usize, T>(whole: &[T]) -> Quad<&[T; N]> {
    let (parts, _) = whole.as_chunks();
    Quad(&parts[0], &parts[1], &parts[2], &parts[3])
}

#[inline(always)]
fn quarters_mut<const N: usize, T>(whole: &mut [T]) -> Quad<&mut [T; N]> {
    match whole.as_chunks_mut() {
        ([a, b, c, d], []) => Quad(a, b, c, d),
        _ => unreachable!("four quarters fill the whole"),
    }
}

impl Floats for Quad<float32x4_t> {
    #[inline(always)]
    fn splat(x: f32) -> Self {
        let x = neon!(vdupq_n_f32(x));
        Quad(x, x, x, x)
    }

    #[inline(always)]
    fn load(from: &[f32; LANES]) -> Self {
        each!(quarter = quarters::<4, f32>(from) => vld1q_f32(quarter.as_ptr()))
    }

    #[inline(always)]
    fn store(self, to: &mut [f32; LANES]) {
        each!(x = self, quarter = quarters_mut::<4, f32>(to) => vst1q_f32(quarter.as_mut_ptr(), x));
    }

    #[inline(always)]
    fn load_f16_bits(from: &[u16; LANES]) -> Self {
        each!(quarter = quarters::<4, u16>(from) => {
            vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16(quarter.as_ptr())))
        })
    }

    #[inline(always)]
    fn store_f16_bits(self, to: &mut [u16; LANES]) {
        each!(x = self, quarter = quarters_mut::<4, u16>(to) => {
            vst1_u16(quarter.as_mut_ptr(), vreinterpret_u16_f16(vcvt_f16_f32(x)));
        });
    }

    #[inline(always)]
    fn load_f32_bytes(from: &[u8; 4 * LANES]) -> Self {
        each!(quarter = quarters::<16, u8>(from) => {
            vreinterpretq_f32_u8(vld1q_u8(quarter.as_ptr()))
        })
    }

    #[inline(always)]
    fn load_f16_bytes(from: &[u8; 2 * LANES]) -> Self {
        each!(quarter = quarters::<8, u8>(from) => {
            vcvt_f32_f16(vreinterpret_f16_u8(vld1_u8(quarter.as_ptr())))
        })
    }

    #[inline(always)]
    fn load_bf16_bytes(from: &[u8; 2 * LANES]) -> Self {
        each!(quarter = quarters::<8, u8>(from) => {
            let wide = vmovl_u16(vreinterpret_u16_u8(vld1_u8(quarter.as_ptr())));
            vreinterpretq_f32_u32(vshlq_n_u32::<16>(wide))
        })
    }

    #[inline(always)]
    fn load_i8_bytes(from: &[u8; LANES]) -> Self {
        neon!({
            let bytes = vreinterpretq_s8_u8(vld1q_u8(from.as_ptr()));
            let (low, high) = (vmovl_s8(vget_low_s8(bytes)), vmovl_high_s8(bytes));
            Quad(
                vcvtq_f32_s32(vmovl_s16(vget_low_s16(low))),
                vcvtq_f32_s32(vmovl_high_s16(low)),
                vcvtq_f32_s32(vmovl_s16(vget_low_s16(high))),
                vcvtq_f32_s32(vmovl_high_s16(high)),
            )
        })
    }

    #[inline(always)]
    fn load_twice(from: &[f32; LANES / 2]) -> Self {
        neon!({
            let (low, high) = (vld1q_f32(from.as_ptr()), vld1q_f32(from[4..].as_ptr()));
            Quad(
                vzip1q_f32(low, low),
                vzip2q_f32(low, low),
                vzip1q_f32(high, high),
                vzip2q_f32(high, high),
            )
        })
    }

    #[inline(always)]
    fn add(self, other: Self) -> Self {
        each!(a = self, b = other => vaddq_f32(a, b))
    }

    #[inline(always)]
    fn sub(self, other: Self) -> Self {
        each!(a = self, b = other => vsubq_f32(a, b))
    }

    #[inline(always)]
    fn mul(self, other: Self) -> Self {
        each!(a = self, b = other => vmulq_f32(a, b))
    }

    #[inline(always)]
    fn div(self, other: Self) -> Self {
        each!(a = self, b = other => vdivq_f32(a, b))
    }

    // The maximum and minimum of this instruction set keep a NaN of either side.
    #[inline(always)]
    fn max(self, other: Self) -> Self {
        each!(a = self, b = other => vbslq_f32(vcgtq_f32(a, b), a, b))
    }

    #[inline(always)]
    fn min(self, other: Self) -> Self {
        each!(a = self, b = other => vbslq_f32(vcltq_f32(a, b), a, b))
    }

    #[inline(always)]
    fn mul_add(self, by: Self, plus: Self) -> Self {
        each!(a = self, b = by, c = plus => vfmaq_f32(c, a, b))
    }

    #[inline(always)]
    fn neg_mul_add(self, by: Self, from: Self) -> Self {
        each!(a = self, b = by, c = from => vfmsq_f32(c, a, b))
    }

    #[inline(always)]
    fn round(self) -> Self {
        each!(x = self => vrndnq_f32(x))
    }

    #[inline(always)]
    fn abs(self) -> Self {
        each!(x = self => vabsq_f32(x))
    }

    #[inline(always)]
    fn exp2_whole(self) -> Self {
        each!(x = self => {
            let biased = vaddq_s32(vcvtq_s32_f32(x), vdupq_n_s32(127));
            vreinterpretq_f32_s32(vshlq_n_s32::<23>(biased))
        })
    }

    #[inline(always)]
    fn select_below(self, bound: Self, then: Self, otherwise: Self) -> Self {
        each!(a = self, b = bound, then = then, otherwise = otherwise => {
            vbslq_f32(vcltq_f32(a, b), then, otherwise)
        })
    }

    #[inline(always)]
    fn sum(self) -> f32 {
        neon!({
            let four = vaddq_f32(vaddq_f32(self.0, self.2), vaddq_f32(self.1, self.3));
            vpadds_f32(vadd_f32(vget_low_f32(four), vget_high_f32(four)))
        })
    }

    #[inline(always)]
    fn largest(self) -> f32 {
        neon!(vmaxnmvq_f32(vmaxnmq_f32(
            vmaxnmq_f32(self.0, self.1),
            vmaxnmq_f32(self.2, self.3)
        )))
    }

    #[inline(always)]
    fn store_i8(self, to: &mut [i8; LANES]) {
        let words = each!(x = self => vqmovn_s32(vcvtq_s32_f32(x)));
        neon!({
            let low = vqmovn_s16(vcombine_s16(words.0, words.1));
            let high = vqmovn_s16(vcombine_s16(words.2, words.3));
            vst1q_s8(to.as_mut_ptr(), vcombine_s8(low, high));
        });
    }
}

/// Byte `i` is all ones where bit `i` is set, else 0.
#[inline(always)]
fn set_bytes(bits: u64) -> Quad<uint8x16_t> {
    let [a, b, c, d, e, f, g, h] = bits.to_le_bytes();
    each!(pair = Quad((a, b), (c, d), (e, f), (g, h)) => {
        // Byte `i` gets the byte of `bits` that holds bit `i`, and of that only bit `i` counts.
        let mine = vreinterpretq_u8_u64(vdupq_n_u64(0x8040_2010_0804_0201));
        let bytes = vcombine_u8(vdup_n_u8(pair.0), vdup_n_u8(pair.1));
        vtstq_u8(bytes, mine)
    })
}

impl<const PAIRS: bool> Simd for Vectors<PAIRS> {
    type Floats = Quad<float32x4_t>;
    type Ints = Quad<int32x4_t>;
    type Bytes = Quad<uint8x16_t>;

    const SIGNED_OFFSET: i32 = 0;
    // Thirty-two registers, but of four lanes: eight vectors.
    const WIDE: bool = false;
    const SHARING_ROWS: usize = 2;
    const PAIRS: bool = PAIRS;

    #[inline(always)]
    fn ints(x: i32) -> Quad<int32x4_t> {
        let x = neon!(vdupq_n_s32(x));
        Quad(x, x, x, x)
    }

    #[inline(always)]
    fn load_ints(from: &[i32; LANES]) -> Quad<int32x4_t> {
        each!(quarter = quarters::<4, i32>(from) => vld1q_s32(quarter.as_ptr()))
    }

    fn store_ints(x: Quad<int32x4_t>, to: &mut [i32; LANES]) {
        each!(x = x, quarter = quarters_mut::<4, i32>(to) => vst1q_s32(quarter.as_mut_ptr(), x));
    }

    #[inline(always)]
    fn minus_times(x: Quad<int32x4_t>, by: i32, y: Quad<int32x4_t>) -> Quad<int32x4_t> {
        if by == 0 {
            return x;
        }
        each!(x = x, y = y => vmlsq_n_s32(x, y, by))
    }

    #[inline(always)]
    fn to_floats(x: Quad<int32x4_t>) -> Quad<float32x4_t> {
        each!(x = x => vcvtq_f32_s32(x))
    }

    #[inline(always)]
    fn load_bytes(from: &[u8; 64]) -> Quad<uint8x16_t> {
        each!(quarter = quarters::<16, u8>(from) => vld1q_u8(quarter.as_ptr()))
    }

    #[inline(always)]
    fn load_signed(from: &[i8; 64]) -> Quad<uint8x16_t> {
        each!(quarter = quarters::<16, i8>(from) => {
            vreinterpretq_u8_s8(vld1q_s8(quarter.as_ptr()))
        })
    }

    #[inline(always)]
    fn store_bytes(x: Quad<uint8x16_t>, to: &mut [u8; 64]) {
        each!(x = x, quarter = quarters_mut::<16, u8>(to) => vst1q_u8(quarter.as_mut_ptr(), x));
    }

    #[inline(always)]
    fn join(a: &[u8; 32], b: &[u8; 32]) -> Quad<uint8x16_t> {
        neon!(Quad(
            vld1q_u8(a.as_ptr()),
            vld1q_u8(a[16..].as_ptr()),
            vld1q_u8(b.as_ptr()),
            vld1q_u8(b[16..].as_ptr())
        ))
    }

    #[inline(always)]
    fn join_four([a, b, c, d]: [&[u8; 16]; 4]) -> Quad<uint8x16_t> {
        neon!(Quad(
            vld1q_u8(a.as_ptr()),
            vld1q_u8(b.as_ptr()),
            vld1q_u8(c.as_ptr()),
            vld1q_u8(d.as_ptr())
        ))
    }

    #[inline(always)]
    fn nibbles(a: &[u8; 16], b: &[u8; 16]) -> Quad<uint8x16_t> {
        neon!({
            let (a, b) = (vld1q_u8(a.as_ptr()), vld1q_u8(b.as_ptr()));
            let low = vdupq_n_u8(15);
            Quad(
                vandq_u8(a, low),
                vshrq_n_u8::<4>(a),
                vandq_u8(b, low),
                vshrq_n_u8::<4>(b),
            )
        })
    }

    #[inline(always)]
    fn spread(run: &[u8; 32], first: u32, second: u32, mask: u8) -> Quad<uint8x16_t> {
        let (a, b) = neon!((vld1q_u8(run.as_ptr()), vld1q_u8(run[16..].as_ptr())));
        Quad(
            shift_and_mask(a, first, mask),
            shift_and_mask(b, first, mask),
            shift_and_mask(a, second, mask),
            shift_and_mask(b, second, mask),
        )
    }

    #[inline(always)]
    fn field(x: Quad<uint8x16_t>, shift: u32, mask: u8) -> Quad<uint8x16_t> {
        Quad(
            shift_and_mask(x.0, shift, mask),
            shift_and_mask(x.1, shift, mask),
            shift_and_mask(x.2, shift, mask),
            shift_and_mask(x.3, shift, mask),
        )
    }

    #[inline(always)]
    fn shl<const SHIFT: u32>(x: Quad<uint8x16_t>) -> Quad<uint8x16_t> {
        each!(x = x => vshlq_u8(x, vdupq_n_s8(SHIFT as i8)))
    }

    #[inline(always)]
    fn or(a: Quad<uint8x16_t>, b: Quad<uint8x16_t>) -> Quad<uint8x16_t> {
        each!(a = a, b = b => vorrq_u8(a, b))
    }

    #[inline(always)]
    fn sub_bytes(x: Quad<uint8x16_t>, by: u8) -> Quad<uint8x16_t> {
        each!(x = x => vsubq_u8(x, vdupq_n_u8(by)))
    }

    #[inline(always)]
    fn add_bytes(a: Quad<uint8x16_t>, b: Quad<uint8x16_t>) -> Quad<uint8x16_t> {
        each!(a = a, b = b => vaddq_u8(a, b))
    }

    #[inline(always)]
    fn negate(x: Quad<uint8x16_t>, bits: u64) -> Quad<uint8x16_t> {
        each!(x = x, set = set_bytes(bits) => vsubq_u8(veorq_u8(x, set), set))
    }

    #[inline(always)]
    fn sixteens(bits: u64) -> Quad<uint8x16_t> {
        each!(set = set_bytes(bits) => vandq_u8(set, vdupq_n_u8(16)))
    }

    #[inline(always)]
    fn lookup(table: &[i8; 16], x: Quad<uint8x16_t>) -> Quad<uint8x16_t> {
        let table = neon!(vreinterpretq_u8_s8(vld1q_s8(table.as_ptr())));
        each!(x = x => vqtbl1q_u8(table, x))
    }

    #[inline(always)]
    fn splat_quad(quad: [i8; 4]) -> Quad<uint8x16_t> {
        let [a, b, c, d] = quad;
        // Not `map`, which is a call where it is not inlined.
        let quad = [
            a.cast_unsigned(),
            b.cast_unsigned(),
            c.cast_unsigned(),
            d.cast_unsigned(),
        ];
        let x = neon!(vreinterpretq_u8_u32(vdupq_n_u32(u32::from_le_bytes(quad))));
        Quad(x, x, x, x)
    }

    #[inline(always)]
    fn dot_unsigned(
        sum: Quad<int32x4_t>,
        codes: Quad<uint8x16_t>,
        x: Quad<uint8x16_t>,
    ) -> Quad<int32x4_t> {
        // Below 128 both readings of a byte are the same.
        add_products(sum, codes, x)
    }

    #[inline(always)]
    fn prepare(codes: Quad<uint8x16_t>) -> Quad<uint8x16_t> {
        codes
    }

    #[inline(always)]
    fn dot_prepared(
        sum: Quad<int32x4_t>,
        codes: Quad<uint8x16_t>,
        x: Quad<uint8x16_t>,
    ) -> Quad<int32x4_t> {
        add_products(sum, codes, x)
    }

    #[inline(always)]
    fn totals_by_eights<const R: usize>(
        codes: &[Line],
        x: [&[[i8; 16]]; R],
    ) -> [Quad<int32x4_t>; R] {
        if PAIRS {
            return paired_totals(codes, x);
        }
        let plain = plain_totals_by_eights(codes, x);
        array![Self::ints(0); r => Self::load_ints(&plain[r])]
    }

    #[inline(always)]
    fn sum_by_eight([a, b, c, d, e, f, g, h]: [Quad<int32x4_t>; 8]) -> Quad<int32x4_t> {
        each!(pair = Quad((a, b), (c, d), (e, f), (g, h)) => {
            let (a, b) = pair;
            let (a_low, a_high) = (vaddq_s32(a.0, a.1), vaddq_s32(a.2, a.3));
            let (b_low, b_high) = (vaddq_s32(b.0, b.1), vaddq_s32(b.2, b.3));
            vpaddq_s32(vpaddq_s32(a_low, a_high), vpaddq_s32(b_low, b_high))
        })
    }

    #[inline(always)]
    fn sum_by_four([a, b, c, d]: [Quad<int32x4_t>; 4]) -> Quad<int32x4_t> {
        each!(x = Quad(a, b, c, d) => {
            vpaddq_s32(vpaddq_s32(x.0, x.1), vpaddq_s32(x.2, x.3))
        })
    }

    #[inline(always)]
    fn sum_by_four_in_turns([a, b, c, d]: [Quad<int32x4_t>; 4]) -> Quad<int32x4_t> {
        let pairs = Quad(
            [a.0, b.0, a.1, b.1],
            [a.2, b.2, a.3, b.3],
            [c.0, d.0, c.1, d.1],
            [c.2, d.2, c.3, d.3],
        );
        each!(x = pairs => {
            vpaddq_s32(vpaddq_s32(x[0], x[1]), vpaddq_s32(x[2], x[3]))
        })
    }

    #[inline(always)]
    fn unzip_quarters(a: Quad<uint8x16_t>, b: Quad<uint8x16_t>) -> [Quad<uint8x16_t>; 2] {
        [Quad(a.0, a.2, b.0, b.2), Quad(a.1, a.3, b.1, b.3)]
    }

    #[inline(always)]
    fn spread_four(run: &[u8; 16], [a, b, c, d]: [u32; 4], mask: u8) -> Quad<uint8x16_t> {
        let run = neon!(vld1q_u8(run.as_ptr()));
        Quad(
            shift_and_mask(run, a, mask),
            shift_and_mask(run, b, mask),
            shift_and_mask(run, c, mask),
            shift_and_mask(run, d, mask),
        )
    }

    #[inline(always)]
    fn prefetch(address: *const u8) {
        // SAFETY: A hint, which faults at no address.
        unsafe {
            asm!(
                "prfm pldl1keep, [{address}]",
                address = in(reg) address,
                options(readonly, nostack, preserves_flags)
            );
        }
    }

    #[inline(always)]
    fn or_ints(a: Quad<int32x4_t>, b: Quad<int32x4_t>) -> Quad<int32x4_t> {
        each!(a = a, b = b => vorrq_s32(a, b))
    }

    #[inline(always)]
    fn shl_ints(x: Quad<int32x4_t>, by: u32) -> Quad<int32x4_t> {
        each!(x = x => vshlq_s32(x, vdupq_n_s32(by.cast_signed())))
    }

    #[inline(always)]
    fn word_field(x: Quad<uint8x16_t>, shift: u32, mask: i32) -> Quad<int32x4_t> {
        each!(x = x => {
            let shifted = vshlq_u32(vreinterpretq_u32_u8(x), vdupq_n_s32(-shift.cast_signed()));
            vandq_s32(vreinterpretq_s32_u32(shifted), vdupq_n_s32(mask))
        })
    }

    #[inline(always)]
    fn load_words_strided(bytes: &[u8], stride: usize) -> Quad<int32x4_t> {
        assert_sixteen(bytes, stride, 4);
        let words = array![0; i => {
            let at = i * stride;
            i32::from_le_bytes([bytes[at], bytes[at + 1], bytes[at + 2], bytes[at + 3]])
        }];
        Self::load_ints(&words)
    }

    #[inline(always)]
    fn low_f16(x: Quad<int32x4_t>) -> Quad<float32x4_t> {
        each!(x = x => {
            let low = vmovn_u32(vreinterpretq_u32_s32(x));
            vcvt_f32_f16(vreinterpret_f16_u16(low))
        })
    }

    #[inline(always)]
    fn high_f16(x: Quad<int32x4_t>) -> Quad<float32x4_t> {
        Self::low_f16(each!(x = x => vshrq_n_s32::<16>(x)))
    }

    #[inline(always)]
    fn transpose_strided(bytes: &[u8], stride: usize) -> [Quad<uint8x16_t>; 4] {
        assert_sixteen(bytes, stride, 16);
        let start = bytes.as_ptr();
        let none = neon!(vdupq_n_u8(0));
        let [a, b, c, d] = array![Quad(none, none, none, none); four => {
            transpose_four(each!(row = Quad(0, 1, 2, 3) => {
                // The sixteen rows lie within `bytes`, asserted above.
                vld1q_u8(start.add((4 * four + row) * stride))
            }))
        }];
        [
            Quad(a.0, b.0, c.0, d.0),
            Quad(a.1, b.1, c.1, d.1),
            Quad(a.2, b.2, c.2, d.2),
            Quad(a.3, b.3, c.3, d.3),
        ]
    }

    #[inline(always)]
    fn transpose(rows: &[Line; LANES], columns: &mut [Line; LANES]) {
        // Four by four units at a time.
        for (r, [a, b, c, d]) in rows.as_chunks().0.iter().enumerate() {
            for (u, columns) in columns.as_chunks_mut().0.iter_mut().enumerate() {
                let columns_of_four = transpose_four(each!(row = Quad(a, b, c, d) => {
                    vld1q_u8(row.0.as_chunks::<16>().0[u].as_ptr())
                }));
                let [a, b, c, d] = columns;
                each!(x = columns_of_four, column = Quad(a, b, c, d) => {
                    vst1q_u8(column.0.as_chunks_mut::<16>().0[r].as_mut_ptr(), x);
                });
            }
        }
    }

    #[inline(always)]
    fn transpose_by_eights(rows: &[Line; LANES], columns: &mut [Line; LANES]) {
        // Two by two units at a time.
        for (r, [a, b]) in rows.as_chunks().0.iter().enumerate() {
            let (a, b) = (a.0.as_chunks::<16>().0, b.0.as_chunks::<16>().0);
            for (u, columns) in columns.as_chunks_mut::<4>().0.iter_mut().enumerate() {
                let (a, b) = neon!((vld1q_u8(a[u].as_ptr()), vld1q_u8(b[u].as_ptr())));
                // Two units, and of each the two lines of its column.
                let [even, odd] = zip_halves(a, b);
                for (line, units) in [(r / 4, even), (2 + r / 4, odd)] {
                    let (quarters, _) = columns[line].0.as_chunks_mut::<16>();
                    neon!(vst1q_u8(quarters[r % 4].as_mut_ptr(), units));
                }
            }
        }
    }
}

/// Four rows of four 4-byte units to four columns.
#[inline(always)]
fn transpose_four(rows: Quad<uint8x16_t>) -> Quad<uint8x16_t> {
    let rows = each!(row = rows => vreinterpretq_u32_u8(row));
    neon!({
        let ab_even = vreinterpretq_u64_u32(vtrn1q_u32(rows.0, rows.1));
        let ab_odd = vreinterpretq_u64_u32(vtrn2q_u32(rows.0, rows.1));
        let cd_even = vreinterpretq_u64_u32(vtrn1q_u32(rows.2, rows.3));
        let cd_odd = vreinterpretq_u64_u32(vtrn2q_u32(rows.2, rows.3));
        Quad(
            vreinterpretq_u8_u64(vtrn1q_u64(ab_even, cd_even)),
            vreinterpretq_u8_u64(vtrn1q_u64(ab_odd, cd_odd)),
            vreinterpretq_u8_u64(vtrn2q_u64(ab_even, cd_even)),
            vreinterpretq_u8_u64(vtrn2q_u64(ab_odd, cd_odd)),
        )
    })
}

/// The first eight bytes of both, and the second eight.
#[inline(always)]
fn zip_halves(a: uint8x16_t, b: uint8x16_t) -> [uint8x16_t; 2] {
    neon!({
        let (a, b) = (vreinterpretq_u64_u8(a), vreinterpretq_u64_u8(b));
        [
            vreinterpretq_u8_u64(vzip1q_u64(a, b)),
            vreinterpretq_u8_u64(vzip2q_u64(a, b)),
        ]
    })
}

/// [`Simd::totals_by_eights`], two rows of `x` at a time. Beside an odd last one there are zeros.
#[inline(always)]
#[allow(
    clippy::needless_range_loop,
    reason = "of the arrays half is used, and zipped iterators are left as calls"
)]
fn paired_totals<const R: usize>(codes: &[Line], x: [&[[i8; 16]]; R]) -> [Quad<int32x4_t>; R] {
    let (codes, _) = codes.as_chunks::<4>();
    let x: [&[[i8; 16]]; R] = array![[].as_slice(); r => &x[r][..codes.len()]];
    let none = neon!(vdupq_n_u8(0));
    // A register has two outputs of one row of `x`, then the same two of the next. Half of this array would do, but its length
    // cannot be said; the compiler drops what is not used.
    let mut sums = [[neon!(vdupq_n_s32(0)); LANES / 2]; R];
    for sixteen in 0..codes.len() {
        let mut pairs = [[none; 2]; R];
        for pair in 0..R.div_ceil(2) {
            let first = load_sixteen(&x[2 * pair][sixteen]);
            let second = if 2 * pair + 1 < R {
                load_sixteen(&x[2 * pair + 1][sixteen])
            } else {
                none
            };
            pairs[pair] = zip_halves(first, second);
        }
        for eight in 0..2 {
            for weight_pair in 0..LANES / 2 {
                let line = &codes[sixteen][2 * eight + weight_pair / 4];
                let (weights, _) = line.0.as_chunks::<16>();
                let weights = neon!(vld1q_u8(weights[weight_pair % 4].as_ptr()));
                for pair in 0..R.div_ceil(2) {
                    let sum = &mut sums[pair][weight_pair];
                    *sum = add_paired_products(*sum, pairs[pair][eight], weights);
                }
            }
        }
    }
    array![Quad(sums[0][0], sums[0][0], sums[0][0], sums[0][0]); r => {
        let [a, b, c, d, e, f, g, h] = sums[r / 2];
        each!(pair = Quad((a, b), (c, d), (e, f), (g, h)) => {
            let (a, b) = (vreinterpretq_s64_s32(pair.0), vreinterpretq_s64_s32(pair.1));
            vreinterpretq_s32_s64(if r % 2 == 0 { vzip1q_s64(a, b) } else { vzip2q_s64(a, b) })
        })
    }]
}

#[inline(always)]
fn load_sixteen(from: &[i8; 16]) -> uint8x16_t {
    neon!(vreinterpretq_u8_s8(vld1q_s8(from.as_ptr())))
}

#[inline(always)]
fn shift_and_mask(x: uint8x16_t, shift: u32, mask: u8) -> uint8x16_t {
    // This shift goes left, and right by negative numbers.
    neon!(vandq_u8(
        vshlq_u8(x, vdupq_n_s8(-(shift as i8))),
        vdupq_n_u8(mask)
    ))
}

/// Adds to each lane four neighbouring products of signed bytes. The intrinsic, `vdotq_s32`, is not stable.
#[inline(always)]
fn add_products(sum: Quad<int32x4_t>, a: Quad<uint8x16_t>, b: Quad<uint8x16_t>) -> Quad<int32x4_t> {
    each!(sum = sum, a = a, b = b => {
        let mut sum = sum;
        asm!(
            // The assembler must know the instruction also where a caller was not compiled for it.
            ".arch_extension dotprod",
            "sdot {sum:v}.4s, {a:v}.16b, {b:v}.16b",
            sum = inout(vreg) sum,
            a = in(vreg) a,
            b = in(vreg) b,
            options(pure, nomem, nostack, preserves_flags)
        );
        sum
    })
}

/// The dot products of both halves of `a` with both halves of `b`, signed bytes: the first of `a` with the first of `b`, with the
/// second, the second of `a` with the first, with the second. The intrinsic, `vmmlaq_s32`, is not stable.
#[inline(always)]
fn add_paired_products(sum: int32x4_t, a: uint8x16_t, b: uint8x16_t) -> int32x4_t {
    neon!({
        let mut sum = sum;
        asm!(
            ".arch_extension i8mm",
            "smmla {sum:v}.4s, {a:v}.16b, {b:v}.16b",
            sum = inout(vreg) sum,
            a = in(vreg) a,
            b = in(vreg) b,
            options(pure, nomem, nostack, preserves_flags)
        );
        sum
    })
}
