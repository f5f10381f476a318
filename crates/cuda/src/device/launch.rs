//! The one unsafe launch, with or without programmatic dependent launch (PDL).
#![expect(unsafe_code, reason = "a kernel may write anywhere it was told to")]

use std::{ffi::c_void, ptr};

use cudarc::driver::sys;

use crate::{device::Module, error::CudaError};

/// Blocks, threads and entry point of a launch. Depends on the number of rows alone.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Grid {
    pub(crate) entry: usize,
    pub(crate) blocks: (usize, usize),
    pub(crate) threads: usize,
    /// Shared memory beyond what the kernel declares.
    pub(crate) shared_bytes: usize,
    /// Programmatic dependent launch: may start before the launch before is over; the kernel waits for that itself.
    pub(crate) pdl: bool,
    /// Neighbouring blocks, along the first dimension, that run at the same time and reach each other's shared memory.
    pub(crate) cluster: usize,
}

impl Grid {
    pub(crate) fn new(blocks: (usize, usize), threads: usize) -> Grid {
        Grid {
            entry: 0,
            blocks,
            threads,
            shared_bytes: 0,
            pdl: false,
            cluster: 1,
        }
    }
}

/// Queues a kernel behind all earlier work. `params` are the bytes of the struct the kernel takes, with addresses that stay
/// allocated until the device has been waited for; both are established where programs are bound.
pub(crate) fn launch(module: &Module, grid: Grid, params: &[u8]) -> Result<(), CudaError> {
    launch_in(module.device().stream(), module, grid, params)
}

/// The same in the stream of page moves.
pub(crate) fn launch_aside(module: &Module, grid: Grid, params: &[u8]) -> Result<(), CudaError> {
    launch_in(module.device().moving_stream(), module, grid, params)
}

fn launch_in(
    stream: sys::CUstream,
    module: &Module,
    grid: Grid,
    params: &[u8],
) -> Result<(), CudaError> {
    let mut argument = [params.as_ptr().cast_mut().cast::<c_void>()];
    let attribute = |id, value| sys::CUlaunchAttribute {
        id,
        pad: [0; 4],
        value,
    };
    let pdl = attribute(
        sys::CUlaunchAttributeID::CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION,
        sys::CUlaunchAttributeValue {
            programmaticStreamSerializationAllowed: i32::from(grid.pdl),
        },
    );
    let cluster = attribute(
        sys::CUlaunchAttributeID::CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION,
        sys::CUlaunchAttributeValue {
            clusterDim: sys::CUlaunchAttributeValue_union__bindgen_ty_1 {
                x: grid.cluster as u32,
                y: 1,
                z: 1,
            },
        },
    );
    // Those that are asked for stand first.
    let (mut attributes, count) = match (grid.pdl, grid.cluster > 1) {
        (_, true) => ([cluster, pdl], 1 + usize::from(grid.pdl)),
        (asked, false) => ([pdl, cluster], usize::from(asked)),
    };
    let config = sys::CUlaunchConfig {
        gridDimX: grid.blocks.0 as u32,
        gridDimY: grid.blocks.1 as u32,
        gridDimZ: 1,
        blockDimX: grid.threads as u32,
        blockDimY: 1,
        blockDimZ: 1,
        sharedMemBytes: grid.shared_bytes as u32,
        hStream: stream,
        attrs: attributes.as_mut_ptr(),
        numAttrs: count as u32,
    };
    let function = module.function(grid.entry);
    // SAFETY: the function belongs to the loaded module. Its single parameter is copied before this returns; it has as many
    // bytes as the kernel's struct, which `PARAMS_BYTES` asserts when the kernel is compiled. The addresses in it are
    // buffers of the program's own, of the sizes its plan gives, or those that weights are loaded to and through, of the
    // sizes their layout gives, so the kernel's preconditions hold. A kernel that is launched with PDL waits for the launch
    // before it by itself.
    unsafe {
        sys::cuLaunchKernelEx(
            &raw const config,
            function,
            argument.as_mut_ptr(),
            ptr::null_mut(),
        )
    }
    .result()
    .map_err(CudaError::driver("launching a kernel"))
}
