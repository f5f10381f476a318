//! The one unsafe launch.
#![expect(unsafe_code, reason = "a kernel may write anywhere it was told to")]

use std::ffi::c_void;

use cudarc::driver::result;

use crate::{device::Module, error::CudaError};

/// How many blocks of how many threads, through which of a kernel's entry points. Depends on the number of rows alone.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Grid {
    pub(crate) entry: usize,
    pub(crate) blocks: (usize, usize),
    pub(crate) threads: usize,
    /// Shared memory beyond what the kernel declares.
    pub(crate) shared_bytes: usize,
}

impl Grid {
    pub(crate) fn new(blocks: (usize, usize), threads: usize) -> Grid {
        Grid {
            entry: 0,
            blocks,
            threads,
            shared_bytes: 0,
        }
    }
}

/// Queues a kernel behind all earlier work. `params` are the bytes of the struct the kernel takes, with addresses that stay
/// allocated until the device has been waited for; both are established where programs are bound.
pub(crate) fn launch(module: &Module, grid: Grid, params: &[u8]) -> Result<(), CudaError> {
    let blocks = (grid.blocks.0 as u32, grid.blocks.1 as u32, 1);
    let threads = (grid.threads as u32, 1, 1);
    let mut argument = [params.as_ptr().cast_mut().cast::<c_void>()];
    let stream = module.device().stream();
    // SAFETY: the function belongs to the loaded module. Its single parameter is copied before this returns; it has as many
    // bytes as the kernel's struct, which `PARAMS_BYTES` asserts when the kernel is compiled. The addresses in it are
    // buffers of the program's own, of the sizes its plan gives, or those that weights are loaded to and through, of the
    // sizes their layout gives, so the kernel's preconditions hold.
    unsafe {
        result::launch_kernel(
            module.function(grid.entry),
            blocks,
            threads,
            grid.shared_bytes as u32,
            stream,
            &mut argument,
        )
    }
    .map_err(CudaError::driver("launching a kernel"))
}
