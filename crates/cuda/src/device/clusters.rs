//! How many blocks of clusters a card holds at once.
//!
//! A cluster lies within a graphics processing cluster, and those of one card differ in their number of multiprocessors: some are
//! switched off when it is made. So it is the driver who knows; a grid of one block too many takes twice as long.
#![expect(unsafe_code, reason = "a question to the driver")]

use std::{ptr, sync::Arc};

use cudarc::driver::sys;

use super::{Device, Module};
use crate::error::CudaError;

/// Sizes of clusters that are asked for.
const SIZES: [usize; 7] = [2, 3, 4, 5, 6, 7, 8];
/// The most blocks of a multiprocessor that are asked for.
const MOST: usize = 4;

/// A kernel that does nothing, for any card that has clusters.
const PROBE: &[u8] =
    b".version 7.8\n.target sm_90\n.address_size 64\n.visible .entry probe() { ret; }\n\0";
const PROBE_THREADS: u32 = 128;
/// Shared memory that the driver takes for each block.
const RESERVED: usize = 1 << 10;

/// Blocks that are resident at once, by the size of their clusters and the blocks that one multiprocessor holds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct ClusterCapacity([[u16; MOST]; SIZES.len()]);

impl ClusterCapacity {
    /// Of a card that is not there: graphics processing clusters of 16 multiprocessors.
    pub(crate) fn assumed(multiprocessors: usize) -> ClusterCapacity {
        ClusterCapacity::from_fn(|size, each| {
            (multiprocessors / 16 * (16 / size * size)).max(size) * each
        })
    }

    fn from_fn(mut blocks: impl FnMut(usize, usize) -> usize) -> ClusterCapacity {
        ClusterCapacity(SIZES.map(|size| std::array::from_fn(|n| blocks(size, n + 1) as u16)))
    }

    /// Asks the driver.
    pub(crate) fn of(device: &Arc<Device>) -> Result<ClusterCapacity, CudaError> {
        let probe = device.load("probe", PROBE, &["probe"])?;
        let mut failed = None;
        let capacity = ClusterCapacity::from_fn(|size, each| {
            max_clusters(&probe, size, each).unwrap_or_else(|error| {
                failed = Some(error);
                0
            }) * size
        });
        failed.map_or(Ok(capacity), Err)
    }

    /// Blocks in clusters of a size above 1, where a multiprocessor holds `each` of them.
    pub(crate) fn blocks(self, cluster: usize, each: usize) -> usize {
        let size = SIZES.iter().position(|&size| size == cluster);
        let size = size.expect("clusters have one of the sizes asked for");
        match each.min(MOST) {
            0 => 0,
            each => usize::from(self.0[size][each - 1]),
        }
    }
}

/// Clusters of a size that are resident together, of blocks that leave room for `each` on a multiprocessor.
fn max_clusters(probe: &Module, size: usize, each: usize) -> Result<usize, CudaError> {
    let device = probe.device();
    let mut attribute = sys::CUlaunchAttribute {
        id: sys::CUlaunchAttributeID::CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION,
        pad: [0; 4],
        value: sys::CUlaunchAttributeValue {
            clusterDim: sys::CUlaunchAttributeValue_union__bindgen_ty_1 {
                x: size as u32,
                y: 1,
                z: 1,
            },
        },
    };
    let shared = (device.shared_bytes + RESERVED) / each - RESERVED;
    let config = sys::CUlaunchConfig {
        gridDimX: (size * device.multiprocessors * each) as u32,
        gridDimY: 1,
        gridDimZ: 1,
        blockDimX: PROBE_THREADS,
        blockDimY: 1,
        blockDimZ: 1,
        sharedMemBytes: (shared / 128 * 128) as u32,
        hStream: ptr::null_mut(),
        attrs: &raw mut attribute,
        numAttrs: 1,
    };
    let mut clusters = 0;
    // SAFETY: writes one integer; the function belongs to a loaded module, and the attribute outlives the call.
    unsafe {
        sys::cuOccupancyMaxActiveClusters(&raw mut clusters, probe.function(0), &raw const config)
    }
    .result()
    .map_err(CudaError::driver("asking how many clusters fit"))?;
    Ok(clusters as usize)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_card_that_is_not_there_has_whole_processing_clusters() {
        let capacity = ClusterCapacity::assumed(132);
        assert_eq!(capacity.blocks(4, 1), 128);
        assert_eq!(capacity.blocks(8, 2), 256);
        assert_eq!(capacity.blocks(2, 0), 0);
        assert_eq!(ClusterCapacity::assumed(4).blocks(8, 1), 8);
    }
}
