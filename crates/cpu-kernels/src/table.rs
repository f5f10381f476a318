//! The table of kernels: each generic body compiled once per instruction set, chosen once at start.
#![expect(
    unsafe_code,
    reason = "calls functions that need instructions the compiler does not take for granted"
)]

use std::ops::Range;

use carat_gguf::QuantType;

use super::{
    attention::{self, PageScores},
    elementwise,
    gemm::{
        WeightRows,
        activations::{self, Chunk, Row},
        amx_bf16::{self, TileOperands},
        amx_int8::{self, ActivationColumns},
        float, format, gemv, gemv_transposed,
        packed_int8::{self, FourRows, Panel},
    },
    isa::Isa,
    kv_page::{self, PageHead, PageRow},
    roofline,
    tied_keys::{self, TiedKeys},
};
use crate::{
    matrix::MatrixMut,
    simd::{Accumulate, Scalar, Tile, Tiles},
};

/// From a list of kernels: the table, a safe method for each, and the instantiations for each instruction set.
macro_rules! kernels {
    ($($(#[$doc:meta])* fn $name:ident($($arg:ident: $type:ty),*) $(-> $result:ty)? = $module:ident::$body:ident;)*) => {
        pub struct Kernels {
            isa: Isa,
            tiles: Option<&'static TileKernels>,
            $($name: unsafe fn($($type),*) $(-> $result)?,)*
        }

        impl Kernels {
            $(
                $(#[$doc])*
                #[inline]
                pub fn $name(&self, $($arg: $type),*) $(-> $result)? {
                    // SAFETY: `for_isa` filled the table with functions whose instructions this processor has.
                    unsafe { (self.$name)($($arg),*) }
                }
            )*
        }

        mod scalar {
            use super::*;

            $(pub(super) fn $name($($arg: $type),*) $(-> $result)? { $module::$body::<Scalar>($($arg),*) })*

            pub(super) const KERNELS: Kernels = Kernels { isa: Isa::Scalar, tiles: None, $($name,)* };
        }

        #[cfg(target_arch = "aarch64")]
        mod neon {
            use super::*;
            use crate::simd::Neon;

            $(
                #[target_feature(enable = "neon,dotprod")]
                pub(super) fn $name($($arg: $type),*) $(-> $result)? { $module::$body::<Neon>($($arg),*) }
            )*

            pub(super) const KERNELS: Kernels = Kernels { isa: Isa::Neon, tiles: None, $($name,)* };
        }

        #[cfg(target_arch = "aarch64")]
        mod i8mm {
            use super::*;
            use crate::simd::I8mm;

            $(
                #[target_feature(enable = "neon,dotprod,i8mm")]
                pub(super) fn $name($($arg: $type),*) $(-> $result)? { $module::$body::<I8mm>($($arg),*) }
            )*

            pub(super) const KERNELS: Kernels = Kernels { isa: Isa::I8mm, tiles: None, $($name,)* };
        }

        #[cfg(target_arch = "x86_64")]
        mod avx2 {
            use super::*;
            use crate::simd::Avx2;

            $(
                #[target_feature(enable = "avx2,fma,f16c")]
                pub(super) fn $name($($arg: $type),*) $(-> $result)? { $module::$body::<Avx2>($($arg),*) }
            )*

            pub(super) const KERNELS: Kernels = Kernels { isa: Isa::Avx2, tiles: None, $($name,)* };
        }

        #[cfg(target_arch = "x86_64")]
        mod avx_vnni {
            use super::*;
            use crate::simd::AvxVnni;

            $(
                #[target_feature(enable = "avx2,fma,f16c,avxvnni")]
                pub(super) fn $name($($arg: $type),*) $(-> $result)? { $module::$body::<AvxVnni>($($arg),*) }
            )*

            pub(super) const KERNELS: Kernels = Kernels { isa: Isa::AvxVnni, tiles: None, $($name,)* };
        }

        #[cfg(target_arch = "x86_64")]
        mod avx512 {
            use super::*;
            use crate::simd::Avx512;

            $(
                #[target_feature(
                    enable = "avx2,fma,f16c,avx512f,avx512bw,avx512vl,avx512dq,avx512vnni"
                )]
                pub(super) fn $name($($arg: $type),*) $(-> $result)? { $module::$body::<Avx512>($($arg),*) }
            )*

            pub(super) const KERNELS: Kernels = Kernels { isa: Isa::Avx512Vnni, tiles: None, $($name,)* };
            pub(super) const WITH_TILES: Kernels = Kernels {
                isa: Isa::Amx,
                tiles: Some(const { &amx::TILES }),
                ..KERNELS
            };
        }
    };
}

kernels! {
    fn gemv(quant: QuantType, weights: WeightRows<'_>, x: &[Row<'_>], out: &mut [f32]) = gemv::gemv;
    fn gemv_transposed(quant: QuantType, weights: WeightRows<'_>, x: &[Row<'_>], sums: &mut gemv_transposed::Accumulators, out: &mut [f32]) = gemv_transposed::gemv_transposed;
    fn pack_int8(quant: QuantType, weights: WeightRows<'_>, panel: &mut Panel) = packed_int8::pack_int8;
    fn arrange_int8(x: &[Row<'_>], group: usize, arranged: &mut [FourRows]) = packed_int8::arrange_int8;
    fn gemm_packed_int8(panels: &[Panel], x: &[FourRows], sums: &mut packed_int8::Accumulators) = packed_int8::gemm_packed_int8;
    fn gemm_float(quant: QuantType, weights: WeightRows<'_>, x: &[&[f32]], out: &mut [f32]) = float::gemm_float;
    fn widen(quant: QuantType, weights: WeightRows<'_>, out: &mut [u8]) = float::widen;
    fn dequantize(quant: QuantType, row: &[u8], scale: f32, out: &mut [f32]) = format::dequantize;
    fn quantize(x: &[f32], row: &mut [Chunk]) = activations::quantize;
    fn norm(x: &[f32], weight: Option<&[f32]>, eps: f32, out: &mut [f32]) = elementwise::norm;
    fn rotate(x: &[f32], cos: &[f32], sin: &[f32], out: &mut [f32]) = elementwise::rotate;
    fn add(a: &[f32], b: &[f32], out: &mut [f32]) = elementwise::add;
    fn scale(x: &[f32], by: f32, out: &mut [f32]) = elementwise::scale;
    fn gelu_mul(gate: &[f32], up: &[f32], out: &mut [f32]) = elementwise::gelu_mul;
    fn softcap(x: &[f32], cap: f32, out: &mut [f32]) = elementwise::softcap;
    fn add_weighted(x: &[f32], weight: f32, sum: &mut [f32]) = elementwise::add_weighted;
    fn scores(queries: &[&[f32]], keys: PageHead<'_>, out: &mut [&mut PageScores]) = attention::scores;
    fn make_keys(tied: &TiedKeys, values: PageHead<'_>, position: usize, made: &mut [f32]) = tied_keys::make_keys;
    fn tied_scores(tied: &TiedKeys, queries: &[&[f32]], values: PageHead<'_>, made: &[f32], out: &mut [&mut PageScores]) = tied_keys::tied_scores;
    fn partial_softmax(scores: &mut [f32], visible: Range<usize>) -> (f32, f32) = attention::partial_softmax;
    fn accumulate_values(weights: &[&PageScores], values: PageHead<'_>, out: &mut [f32]) = attention::accumulate_values;
    fn to_f16(x: &[f32], out: &mut [PageRow]) = kv_page::to_f16;
    fn to_q8_0(x: &[f32], codes: &mut PageRow) -> [u8; 2] = kv_page::to_q8_0;
    fn dots(rounds: usize) -> f32 = roofline::dots;
    fn read(data: &[u8]) -> f32 = roofline::read;
}

/// The same for kernels on tile registers, which only one level has.
macro_rules! tile_kernels {
    ($($(#[$doc:meta])* fn $name:ident($($arg:ident: $type:ty),*) = $module:ident::$body:ident;)*) => {
        pub struct TileKernels {
            $($name: unsafe fn($($type),*),)*
        }

        impl TileKernels {
            $(
                $(#[$doc])*
                #[inline]
                pub fn $name(&self, $($arg: $type),*) {
                    // SAFETY: A table is handed out where its instructions were found, and the plain one needs none.
                    unsafe { (self.$name)($($arg),*) }
                }
            )*
        }

        impl TileKernels {
            /// The kernels over any implementation of tiles, compiled where they are asked for.
            ///
            /// # Safety
            ///
            /// The processor has the instructions of `T`.
            pub const unsafe fn over<T: Tiles>() -> TileKernels {
                TileKernels { $($name: $module::$body::<T>,)* }
            }
        }

        #[cfg(target_arch = "x86_64")]
        mod amx {
            use super::*;
            use crate::simd::amx::AmxTiles;

            $(
                #[target_feature(
                    enable = "avx2,fma,f16c,avx512f,avx512bw,avx512vl,avx512dq,avx512vnni,avx512bf16,avx512vbmi,gfni"
                )]
                pub(super) fn $name($($arg: $type),*) { $module::$body::<AmxTiles>($($arg),*) }
            )*

            pub(super) const TILES: TileKernels = TileKernels { $($name,)* };
        }
    };
}

tile_kernels! {
    fn to_bf16(rows: &[&[f32]], tiles: &mut [Tile]) = amx_bf16::to_bf16;
    fn split_bf16(rows: &[&[f32]], tiles: &mut [Tile]) = amx_bf16::split_bf16;
    fn pack_bf16(quant: QuantType, weights: WeightRows<'_>, first: usize, tiles: &mut [Tile]) = amx_bf16::pack_bf16;
    fn gemm_bf16(operands: &TileOperands<'_>, accumulate: Accumulate, out: &mut MatrixMut<'_>) = amx_bf16::gemm_bf16;
    fn gemm_int8(quant: QuantType, weights: WeightRows<'_>, columns: &ActivationColumns, sets: Range<usize>, scratch: &mut amx_int8::Scratch, out: &mut [f32]) = amx_int8::gemm_int8;
}

impl Kernels {
    /// The table of an instruction set, or of the best below it that this processor has.
    pub fn for_isa(isa: Isa) -> &'static Kernels {
        #[cfg(target_arch = "x86_64")]
        {
            if isa >= Isa::Amx && Isa::Amx.available() {
                return const { &avx512::WITH_TILES };
            }
            if isa >= Isa::Avx512Vnni && Isa::Avx512Vnni.available() {
                return const { &avx512::KERNELS };
            }
            if isa >= Isa::AvxVnni && Isa::AvxVnni.available() {
                return const { &avx_vnni::KERNELS };
            }
            if isa >= Isa::Avx2 && Isa::Avx2.available() {
                return const { &avx2::KERNELS };
            }
        }
        #[cfg(target_arch = "aarch64")]
        {
            if isa >= Isa::I8mm && Isa::I8mm.available() {
                return const { &i8mm::KERNELS };
            }
            if isa >= Isa::Neon && Isa::Neon.available() {
                return const { &neon::KERNELS };
            }
        }
        let _ = isa;
        const { &scalar::KERNELS }
    }

    pub fn isa(&self) -> Isa {
        self.isa
    }

    /// Kernels for tiles, where this level has registers for them.
    pub fn tiles(&self) -> Option<&'static TileKernels> {
        self.tiles
    }

    /// Every table this processor can run, the plain one first.
    pub fn all() -> Vec<&'static Kernels> {
        Isa::ALL
            .into_iter()
            .filter(|isa| isa.available())
            .map(Kernels::for_isa)
            .collect()
    }
}
