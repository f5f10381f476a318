//! Sixteen lanes, one way per instruction set: the vocabulary every kernel is written in.
//!
//! A kernel is one generic body over [`Simd`]; [`crate::table`] instantiates it once per instruction set. All sets have
//! the same sixteen lanes, the same single-rounding multiply-add and the same folding order in [`Floats::sum`], so their
//! results are equal to the last bit and the plain-Rust [`Scalar`] is the twin that the others are tested against.
//!
//! The methods are `#[inline(always)]` without a target feature of their own: they take the features of the function
//! they are inlined into, which is always one of the entry points of [`crate::table`]. What is not inlined there calls
//! each instruction as a function, which is correct and a hundred times slower; so hot code builds arrays with
//! [`array!`] instead of closures, which the compiler may leave alone.
//!
//! - [`vector`]: the traits [`Simd`] and [`Floats`]; [`math`]: elementary functions over them
//! - [`scalar`], `avx2`, `avx512`, `neon`: the instruction sets
//! - [`tiles`]: the trait [`Tiles`] of processors with tile registers; `amx`: those of x86

#[cfg(target_arch = "x86_64")]
pub mod amx;
#[cfg(target_arch = "x86_64")]
mod avx2;
#[cfg(target_arch = "x86_64")]
mod avx512;
mod math;
#[cfg(target_arch = "aarch64")]
mod neon;
mod scalar;
mod tiles;
mod vector;

#[cfg(target_arch = "x86_64")]
pub use avx2::{Avx2, AvxVnni};
#[cfg(target_arch = "x86_64")]
pub use avx512::Avx512;
pub use math::{exp, gelu, sin_cos, tanh};
#[cfg(target_arch = "aarch64")]
pub use neon::{I8mm, Neon};
pub use scalar::Scalar;
pub use tiles::{Accumulate, IN_FLIGHT, K_STEP, Tile, Tiles, Totals, unit_of_row};
pub(crate) use vector::array;
use vector::assert_sixteen;
#[cfg(target_arch = "aarch64")]
use vector::plain_totals_by_eights;
pub use vector::{Floats, LANES, Line, Simd};
