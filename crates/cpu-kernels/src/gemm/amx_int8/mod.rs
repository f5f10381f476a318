//! GEMM of small batches in int8 tiles, where there are registers for those: the bits of [`super::gemv`], faster.
//!
//! - [`columns`]: activations arranged for tiles, once per product
//! - [`product`]: weights unpacked as they are read, for all rows at once

mod columns;
mod product;

pub use columns::{ActivationColumns, group_of};
#[cfg_attr(
    all(not(target_arch = "x86_64"), not(test)),
    expect(unused_imports, reason = "no other processor has such tiles yet")
)]
pub use product::gemm_int8;
pub use product::{MIN_ROWS, Scratch};
