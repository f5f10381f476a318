//! Settings that concern CUDA alone, resolved by the caller and passed down by value.

use std::path::PathBuf;

use crate::{choices::Alternatives, placement::Placement};

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
    /// Choices that are made otherwise than by the model of the card or by what is kept. Tests have small models multiply packed weights
    /// that way.
    pub alternatives: Alternatives,
    /// What [`CudaConfig::cache_dir`] keeps of choices that were measured on the card.
    pub kept_choices: KeptChoices,
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
            alternatives: Alternatives::default(),
            kept_choices: KeptChoices::Used,
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

/// Use of choices that were measured on the card.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum KeptChoices {
    #[default]
    Used,
    /// The model of the card decides.
    Ignored,
}

/// When a failing kernel is noticed.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Checks {
    #[default]
    EachBatch,
    /// Waits after every launch, so an error names its step. Slow, and without graphs.
    EachLaunch,
}
