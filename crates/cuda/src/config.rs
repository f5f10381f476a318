//! Settings that concern CUDA alone, resolved by the caller and passed down by value.

use std::path::PathBuf;

use crate::placement::Placement;

/// Measured on an H200 (E4B and 12B): at 32 rows, products of so many weights and more take 0.5 to 0.9 of cuBLASLt's time, smaller
/// ones 1.3.
pub(crate) const MIN_PACKED_WEIGHTS: usize = 15_000_000;

#[derive(Clone, Debug)]
pub struct CudaConfig {
    /// Index of the card, in the driver's order.
    pub device: usize,
    pub tier: Tier,
    pub fusion: Fusion,
    pub tables: TableMemory,
    pub placement: Placement,
    /// Measure what placements are told by again, instead of believing [`CudaConfig::cache_dir`].
    pub replan: bool,
    pub graphs: Graphs,
    pub pdl: Pdl,
    pub checks: Checks,
    /// Weights of a product from which on medium batches multiply them as they are packed, not their f16 copies. Tests set it to
    /// zero, so that small models do so, too.
    pub min_packed_weights: usize,
    /// Device memory to use at the most; `None` may use all that is free.
    pub memory_limit: Option<MemoryLimit>,
    /// Folder that keeps compiled kernels between runs; `None` keeps none.
    pub cache_dir: Option<PathBuf>,
    /// Kernels compiled ahead by [`build_kernels`](crate::build_kernels); with them NVRTC is not needed.
    pub kernels_dir: Option<PathBuf>,
    /// Folders to look for NVRTC and cuBLASLt in, before the usual ones.
    pub library_dirs: Vec<PathBuf>,
}

/// Bytes of device memory to use at the most.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum MemoryLimit {
    /// All that the process takes on the card: buffers, the driver's context, and what is kept back for code and graphs.
    Process(u64),
    /// What buffers take, to the byte; what the driver takes for itself is not counted.
    Buffers(u64),
}

impl Default for CudaConfig {
    fn default() -> CudaConfig {
        CudaConfig {
            device: 0,
            tier: Tier::Best,
            fusion: Fusion::On,
            tables: TableMemory::Device,
            placement: Placement::Auto,
            replan: false,
            graphs: Graphs::On,
            pdl: Pdl::On,
            checks: Checks::EachBatch,
            min_packed_weights: MIN_PACKED_WEIGHTS,
            memory_limit: None,
            cache_dir: None,
            kernels_dir: None,
            library_dirs: Vec::new(),
        }
    }
}

/// Family of kernels that a card gets.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Tier {
    /// The best the card can run.
    #[default]
    Best,
    /// Kernels that every card since Ampere runs, so that path can be tested on newer ones.
    Portable,
}

/// Fusion of runs of steps into one kernel; off for bisecting.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Fusion {
    #[default]
    On,
    Off,
}

/// Memory of tables that are only looked up, such as the per-layer embeddings.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum TableMemory {
    #[default]
    Device,
    /// In host memory that the device reads through the bus: a few kilobytes per token.
    Host,
}

/// CUDA graphs: launches of a batch are captured once per bucket of rows and replayed. The results are the same bits.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Graphs {
    #[default]
    On,
    Off,
}

/// Programmatic dependent launch: decoding's launches start before those before them are over, to fetch weights meanwhile.
/// Hopper only.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Pdl {
    #[default]
    On,
    Off,
}

/// When a failing kernel is noticed.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Checks {
    #[default]
    EachBatch,
    /// Waits after every launch, so an error names its step. Slow, and without graphs.
    EachLaunch,
}
