//! Tensor maps: where a matrix lies and how the memory system of Hopper copies a box of it to shared memory, as the driver encodes it.
#![expect(unsafe_code, reason = "the driver writes the map")]

use std::{ffi::c_void, ptr};

use cudarc::driver::sys;

use super::Address;

/// Columns of a box of f16: a row of a swizzle atom, 128 bytes.
const BOX_COLUMNS: u32 = 64;

/// A map in a kernel's params. Mirrors `TensorMap` in `kernels/lib/ptx.cuh`.
#[derive(Clone, Copy, Debug)]
#[repr(C, align(64))]
pub(crate) struct TensorMap([u64; 16]);

impl TensorMap {
    /// More rows than any matrix has: of one whose kernel knows which are there.
    pub(crate) const ANY_ROWS: usize = 1 << 31;

    /// Of an f16 matrix `[rows, columns]`, in boxes of 64 columns of so many rows, swizzled as wgmma reads them. What a box has behind
    /// the last row is zeros.
    pub(crate) fn f16(at: Address, [rows, columns]: [usize; 2], box_rows: usize) -> TensorMap {
        let mut map = sys::CUtensorMap { opaque: [0; 16] };
        let (sizes, row_bytes) = ([columns as u64, rows as u64], [2 * columns as u64]);
        let (box_sizes, steps) = ([BOX_COLUMNS, box_rows as u32], [1, 1]);
        // SAFETY: writes the map alone, and reads as many sizes as a matrix has dimensions. Nothing is read at the matrix's address.
        let encoded = unsafe {
            sys::cuTensorMapEncodeTiled(
                &raw mut map,
                sys::CUtensorMapDataType::CU_TENSOR_MAP_DATA_TYPE_FLOAT16,
                2,
                ptr::with_exposed_provenance_mut::<c_void>(at.0 as usize),
                sizes.as_ptr(),
                row_bytes.as_ptr(),
                box_sizes.as_ptr(),
                steps.as_ptr(),
                sys::CUtensorMapInterleave::CU_TENSOR_MAP_INTERLEAVE_NONE,
                sys::CUtensorMapSwizzle::CU_TENSOR_MAP_SWIZZLE_128B,
                sys::CUtensorMapL2promotion::CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
                sys::CUtensorMapFloatOOBfill::CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE,
            )
        };
        encoded
            .result()
            .expect("rows are whole atoms, and buffers start at multiples of 256 bytes");
        TensorMap(map.opaque)
    }

    pub(crate) fn words(self) -> [u64; 16] {
        self.0
    }
}
