//! Tile registers of Sapphire Rapids and later (AMX-TILE, AMX-BF16 and AMX-INT8). The instructions have no stable intrinsics, so
//! they are written out.
#![expect(
    unsafe_code,
    reason = "tile instructions; they are checked for where the kernel table is chosen"
)]

use std::{
    arch::{
        asm,
        x86_64::{
            __m512, __m512bh, __m512i, _MM_HINT_T1, _mm_loadu_ps, _mm_prefetch, _mm256_loadu_ps,
            _mm512_broadcast_f32x4, _mm512_broadcast_f32x8, _mm512_castpd_ps, _mm512_cvtepi32_ps,
            _mm512_cvtne2ps_pbh, _mm512_gf2p8affine_epi64_epi8, _mm512_load_si512, _mm512_loadu_ps,
            _mm512_loadu_si512, _mm512_permutexvar_epi8, _mm512_set_epi64, _mm512_set1_pd,
            _mm512_set1_ps, _mm512_shuffle_epi8, _mm512_store_si512,
        },
    },
    marker::PhantomData,
};

use super::{
    Avx512, LANES, Line, Simd, array,
    tiles::{Accumulate, IN_FLIGHT, Tile, Tiles, Totals},
};
use crate::matrix::MatrixMut;

/// The state component of tile data, which a process asks the kernel for.
#[cfg(target_os = "linux")]
const TILE_DATA: u64 = 18;
#[cfg(target_os = "linux")]
const REQUEST_PERMISSION: u64 = 0x1023;

/// Whether the processor has the tile instructions and the kernel lets this process use them.
pub fn permitted() -> bool {
    let leaf = std::arch::x86_64::__cpuid_count(7, 0);
    let all = 1 << 22 | 1 << 24 | 1 << 25;
    leaf.edx & all == all && request()
}

#[cfg(target_os = "linux")]
fn request() -> bool {
    // SAFETY: The call takes no addresses. It allows all threads of this process to use the registers, however often it
    // is made, or refuses.
    let refused = unsafe { libc::syscall(libc::SYS_arch_prctl, REQUEST_PERMISSION, TILE_DATA) };
    refused == 0
}

#[cfg(not(target_os = "linux"))]
fn request() -> bool {
    false
}

/// Rows and bytes of each register, as the processor reads them.
#[repr(C, align(64))]
struct TileConfig {
    palette: u8,
    start_row: u8,
    reserved: [u8; 14],
    row_bytes: [u16; 16],
    rows: [u8; 16],
}

/// Registers 0 to 3 hold sums, or the int8 products in flight, 4 and 5 left tiles, 6 and 7 right ones.
pub struct AmxTiles {
    /// The registers belong to the thread that took them.
    thread: PhantomData<*const ()>,
}

const LINE: usize = 64;

/// From sixteen lines in memory to a register.
macro_rules! load {
    ($register:literal, $from:expr, $stride:expr) => {
        // SAFETY: The caller names sixteen rows of 64 bytes, `stride` bytes apart, which it may read.
        unsafe {
            asm!(
                concat!("tileloadd ", $register, ", [{from} + {stride}]"),
                from = in(reg) $from,
                stride = in(reg) $stride,
                options(nostack, readonly)
            )
        }
    };
}

/// From a register to sixteen lines in memory.
macro_rules! store {
    ($register:literal, $to:expr, $stride:expr) => {
        // SAFETY: The caller names sixteen rows of 64 bytes, `stride` bytes apart, which it may write.
        unsafe {
            asm!(
                concat!("tilestored [{to} + {stride}], ", $register),
                to = in(reg) $to,
                stride = in(reg) $stride,
                options(nostack)
            )
        }
    };
}

/// An instruction that stays within the registers.
macro_rules! within {
    ($instruction:literal) => {
        // SAFETY: Changes nothing but tile registers, which this thread took.
        unsafe { asm!($instruction, options(nostack, nomem)) }
    };
}

impl Tiles for AmxTiles {
    type Vectors = Avx512;

    #[inline(always)]
    fn take() -> AmxTiles {
        let mut config = TileConfig {
            palette: 1,
            start_row: 0,
            reserved: [0; 14],
            row_bytes: [0; 16],
            rows: [0; 16],
        };
        config.row_bytes[..8].fill(LINE as u16);
        config.rows[..8].fill(LANES as u8);
        // SAFETY: `Isa::Amx` was found available, so the instruction exists and the kernel lets us. The palette is the
        // first, and no shape is larger than its registers.
        unsafe {
            asm!("ldtilecfg [{}]", in(reg) &raw const config, options(nostack, readonly));
        }
        AmxTiles {
            thread: PhantomData,
        }
    }

    #[inline(always)]
    fn multiply<const M: usize, const N: usize>(
        &mut self,
        left: [&[Tile]; M],
        right: [&[Tile]; N],
        accumulate: Accumulate,
        sums: &mut MatrixMut<'_>,
    ) {
        let steps = right[0].len();
        let terms = left[0].len() / steps;
        assert!(
            (1..=2).contains(&M)
                && (1..=2).contains(&N)
                && left.iter().all(|tiles| tiles.len() == steps * terms)
                && right.iter().all(|tiles| tiles.len() == steps)
                && sums.rows() == M * LANES
                && sums.columns() == N * LANES,
            "tiles fit each other and the sums"
        );
        // Four squares of the block, whose shape was checked above.
        let (start, elements) = (sums.start(), sums.stride());
        let stride = elements * size_of::<f32>();
        let square =
            |row: usize, column: usize| start.wrapping_add(row * LANES * elements + column * LANES);
        if accumulate == Accumulate::FromZero {
            within!("tilezero tmm0");
            within!("tilezero tmm1");
            within!("tilezero tmm2");
            within!("tilezero tmm3");
        } else {
            load!("tmm0", square(0, 0), stride);
            if N == 2 {
                load!("tmm1", square(0, 1), stride);
            }
            if M == 2 {
                load!("tmm2", square(1, 0), stride);
            }
            if M == 2 && N == 2 {
                load!("tmm3", square(1, 1), stride);
            }
        }
        // Addresses of tiles within the slices whose lengths were checked above.
        let tile = |tiles: &[Tile], i: usize| tiles.as_ptr().wrapping_add(i);
        for step in 0..steps {
            load!("tmm6", tile(right[0], step), LINE);
            if N == 2 {
                load!("tmm7", tile(right[1], step), LINE);
            }
            for i in step * terms..(step + 1) * terms {
                load!("tmm4", tile(left[0], i), LINE);
                within!("tdpbf16ps tmm0, tmm4, tmm6");
                if N == 2 {
                    within!("tdpbf16ps tmm1, tmm4, tmm7");
                }
                if M == 2 {
                    load!("tmm5", tile(left[1], i), LINE);
                    within!("tdpbf16ps tmm2, tmm5, tmm6");
                    if N == 2 {
                        within!("tdpbf16ps tmm3, tmm5, tmm7");
                    }
                }
            }
        }
        store!("tmm0", square(0, 0), stride);
        if N == 2 {
            store!("tmm1", square(0, 1), stride);
        }
        if M == 2 {
            store!("tmm2", square(1, 0), stride);
        }
        if M == 2 && N == 2 {
            store!("tmm3", square(1, 1), stride);
        }
    }

    #[inline(always)]
    fn start_int8(&mut self, slot: usize, left: &[Tile], right: &[Tile]) {
        assert_eq!(left.len(), right.len(), "tiles come in pairs");
        match slot {
            0 => within!("tilezero tmm0"),
            1 => within!("tilezero tmm1"),
            2 => within!("tilezero tmm2"),
            3 => within!("tilezero tmm3"),
            _ => panic!("{IN_FLIGHT} products at once"),
        }
        for (left, right) in left.iter().zip(right) {
            load!("tmm4", left, LINE);
            load!("tmm6", right, LINE);
            match slot {
                0 => within!("tdpbssd tmm0, tmm4, tmm6"),
                1 => within!("tdpbssd tmm1, tmm4, tmm6"),
                2 => within!("tdpbssd tmm2, tmm4, tmm6"),
                _ => within!("tdpbssd tmm3, tmm4, tmm6"),
            }
        }
    }

    #[inline(always)]
    fn finish_int8(&mut self, slot: usize, totals: &mut Totals) {
        let to = &raw mut *totals;
        match slot {
            0 => store!("tmm0", to, LINE),
            1 => store!("tmm1", to, LINE),
            2 => store!("tmm2", to, LINE),
            3 => store!("tmm3", to, LINE),
            _ => panic!("{IN_FLIGHT} products at once"),
        }
    }

    #[inline(always)]
    fn repeat<const N: usize>(from: &[f32; N]) -> __m512 {
        let start = from.as_ptr();
        // SAFETY: Only `Isa::Amx` uses this, and that has AVX-512. Each arm reads `N` numbers.
        unsafe {
            match N {
                1 => _mm512_set1_ps(*start),
                2 => _mm512_castpd_ps(_mm512_set1_pd(start.cast::<f64>().read_unaligned())),
                4 => _mm512_broadcast_f32x4(_mm_loadu_ps(start)),
                8 => _mm512_broadcast_f32x8(_mm256_loadu_ps(start)),
                16 => _mm512_loadu_ps(start),
                _ => panic!("{N} numbers do not fill lanes"),
            }
        }
    }

    #[inline(always)]
    fn q4_0_codes(blocks: &[u8; 16 * 18]) -> [__m512i; 8] {
        array![Avx512::load_bytes(&[0; 64]); pair => {
            // The last two blocks are read from further left, so as not to read past them.
            let start = (PAIR_BYTES * pair).min(blocks.len() - LINE);
            let indices = &Q4_0_BYTE_OF_CODE[usize::from(start < PAIR_BYTES * pair)];
            // SAFETY: Only `Isa::Amx` uses this, and that has VBMI and GFNI. A line from `start` on is within the blocks.
            unsafe {
                let line = _mm512_loadu_si512(blocks.as_ptr().add(start).cast());
                let indices = _mm512_load_si512(indices.0.as_ptr().cast());
                let bytes = _mm512_permutexvar_epi8(indices, line);
                let (low, high) = (nibble_matrix(0), nibble_matrix(4));
                let matrices = _mm512_set_epi64(high, high, low, low, high, high, low, low);
                _mm512_gf2p8affine_epi64_epi8::<0b1111_1000>(bytes, matrices)
            }
        }]
    }

    #[inline(always)]
    fn prefetch(address: *const u8) {
        // SAFETY: A hint, which faults at no address.
        unsafe { _mm_prefetch::<_MM_HINT_T1>(address.cast()) };
    }

    #[inline(always)]
    fn to_bf16(low: __m512, high: __m512, to: &mut Line) {
        // SAFETY: Only `Isa::Amx` uses this type, and that has BF16 vectors. A line is 64 aligned bytes.
        unsafe {
            let rounded = _mm512_cvtne2ps_pbh(high, low);
            _mm512_store_si512(
                to.0.as_mut_ptr().cast(),
                std::mem::transmute::<__m512bh, __m512i>(rounded),
            );
        }
    }

    #[inline(always)]
    fn widen_pair(units: &Line, pair: usize) -> [__m512; 2] {
        let [low, high] = &BYTE_OF_NUMBER[pair];
        [widen_units(units, low), widen_units(units, high)]
    }
}

/// Bytes of two blocks of Q4_0.
const PAIR_BYTES: usize = 2 * 18;

/// For each code of two blocks of Q4_0, the byte that it is in: of a line that starts with them, and of the last line of
/// sixteen blocks.
static Q4_0_BYTE_OF_CODE: [Line; 2] = [q4_0_byte_of_code(0), q4_0_byte_of_code(LINE - PAIR_BYTES)];

const fn q4_0_byte_of_code(first: usize) -> Line {
    let mut indices = [0; 64];
    let mut code = 0;
    while code < 64 {
        indices[code] = (first + code / 32 * 18 + 2 + code % 16) as u8;
        code += 1;
    }
    Line(indices)
}

/// The matrix that takes a byte to the nibble from bit `shift` on, its highest bit repeated to the left. Flipping bit 3 and
/// those to the left of it then subtracts 8.
const fn nibble_matrix(shift: u32) -> i64 {
    let mut rows = [0; 8];
    let mut bit = 0;
    while bit < 8 {
        let from = if bit < 3 { bit } else { 3 };
        rows[7 - bit] = 1 << (shift as usize + from);
        bit += 1;
    }
    i64::from_le_bytes(rows)
}

/// For each byte of a line of numbers, the byte of the quarter that it is, or a sign that makes it zero: the pairs of two
/// units, from `unit` on.
const fn byte_of_number(unit: u8, pair: u8) -> Line {
    let mut indices = [0x80; 64];
    let mut number = 0;
    while number < LANES {
        let (unit, byte) = (unit + number as u8 % 4 / 2, 2 * pair + number as u8 % 2);
        indices[4 * number] = 4 * unit + byte;
        number += 1;
    }
    Line(indices)
}

/// Of both halves of a right line, for both pairs.
static BYTE_OF_NUMBER: [[Line; 2]; 2] = [
    [byte_of_number(0, 0), byte_of_number(2, 0)],
    [byte_of_number(0, 1), byte_of_number(2, 1)],
];

#[inline(always)]
fn widen_units(units: &Line, indices: &Line) -> __m512 {
    // SAFETY: Only `Isa::Amx` uses this, and that has AVX-512. Lines are 64 aligned bytes.
    unsafe {
        let indices = _mm512_load_si512(indices.0.as_ptr().cast());
        let units = _mm512_load_si512(units.0.as_ptr().cast());
        _mm512_cvtepi32_ps(_mm512_shuffle_epi8(units, indices))
    }
}

impl Drop for AmxTiles {
    fn drop(&mut self) {
        // SAFETY: Gives back what `take` took; nothing of this thread uses the registers any more.
        unsafe { asm!("tilerelease", options(nostack, nomem)) };
    }
}
