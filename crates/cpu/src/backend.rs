//! The backend: threads, instructions, and whether a model fits.

use std::sync::Arc;

use carat_model::{
    backend::{Backend, BackendError, Batching, CompileOptions, Executor, KvGroup, Memory},
    cost::Roofline,
    layout::Layout,
    plan::{Plan, Rows},
    weights::Weights,
};

use crate::{
    executor::CpuExecutor,
    lower::{BatchRows, Fusion, ProgramOp, list, lower},
    memory,
    op::{
        kv,
        repack::{self, Repacked},
        workers::Workers,
    },
    pool::Pool,
    roofline,
};
use carat_cpu_kernels::{
    gemm::row_class::{RowClasses, SMALL_ROWS},
    isa::Isa,
    table::Kernels,
};

/// Choices that concern the CPU alone.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct CpuConfig {
    /// Threads to compute with, the caller's included; `None` takes as many as the process may use.
    pub threads: Option<usize>,
    /// The highest level of instructions to use; `None` takes the best there is.
    pub isa: Option<Isa>,
    /// Memory for repacked weights, kept once a prompt has used them; only with [`CpuBackend::repacks`].
    pub repack_bytes: u64,
    pub fusion: Fusion,
}

/// Compiles plans for this machine's processor.
pub struct CpuBackend {
    threads: usize,
    asked_threads: Option<usize>,
    kernels: &'static Kernels,
    repack_bytes: u64,
    fusion: Fusion,
}

impl CpuBackend {
    pub fn new(config: &CpuConfig) -> CpuBackend {
        // Knows the affinity mask and the control group's quota.
        let allowed = std::thread::available_parallelism().map_or(1, usize::from);
        let kernels = Kernels::for_isa(config.isa.unwrap_or_else(Isa::detect));
        CpuBackend {
            threads: config.threads.unwrap_or(allowed).max(1),
            asked_threads: config.threads,
            kernels,
            // Nothing would be kept, so none of it is set aside.
            repack_bytes: kernels.tiles().map_or(0, |_| config.repack_bytes),
            fusion: config.fusion,
        }
    }

    /// Whether repacked weights are kept if there is memory for it: where prompts are multiplied in tiles.
    pub fn repacks(&self) -> bool {
        self.kernels.tiles().is_some()
    }

    pub fn threads(&self) -> usize {
        self.threads
    }

    /// Threads that compute for a device: all but one, which its driver is fed by, unless a number was asked for.
    pub(crate) fn host_threads(&self) -> usize {
        self.asked_threads.unwrap_or(self.threads - 1).max(1)
    }

    pub(crate) fn kernels(&self) -> &'static Kernels {
        self.kernels
    }

    /// The level in use.
    pub fn isa(&self) -> Isa {
        self.kernels.isa()
    }

    /// The operations that a plan becomes and that run for a batch of so many rows. Looks at no weight's values.
    pub fn program(&self, plan: &Plan, weights: &Weights, batch: BatchRows) -> Vec<ProgramOp> {
        list(plan, weights, self.fusion, self.isa(), batch)
    }
}

impl Backend for CpuBackend {
    fn name(&self) -> &'static str {
        "cpu"
    }

    fn memory(&self) -> Result<Memory, BackendError> {
        let Some(memory) = memory::available() else {
            return Err(BackendError::Unsupported {
                what: "this system does not tell how much memory is free".to_owned(),
            });
        };
        Ok(Memory {
            free_bytes: memory.free_bytes.saturating_sub(self.repack_bytes),
            ..memory
        })
    }

    fn drafts(&self) -> bool {
        true
    }

    fn exact_rows(&self) -> usize {
        // Tiles make another class of large batches.
        self.kernels.tiles().map_or(usize::MAX, |_| SMALL_ROWS)
    }

    fn chunk_rows(&self, batching: Batching) -> usize {
        // Tiles multiply so fast that unpacking the weights, once per batch, is a fifth of the time with 512 rows.
        if batching == Batching::Fast && self.kernels.tiles().is_some() {
            1024
        } else {
            512
        }
    }

    fn roofline(&self) -> Result<Option<Roofline>, BackendError> {
        roofline::peak_rates(self.kernels, self.threads).map(Some)
    }

    fn compile(
        &self,
        plan: &Plan,
        weights: Arc<Weights>,
        options: &CompileOptions,
    ) -> Result<Box<dyn Executor>, BackendError> {
        let plan = &plan.with_products_gathered();
        let layout = if options.probe {
            Layout::separate(plan)
        } else {
            Layout::shared(plan)
        };
        // Kept for products in BF16 tiles, which one class for all batches does without.
        let repack_bytes = match options.batching {
            Batching::Fast => self.repack_bytes.min(repack::max_bytes(&weights)),
            Batching::Invariant => 0,
        };
        let needed_bytes = buffer_bytes(&layout, options)
            + kv_bytes(plan, options)
            + repack_bytes
            + weights.narrowed_bytes() as u64;
        if let Some(Memory { free_bytes, .. }) = memory::available()
            && needed_bytes > free_bytes
        {
            return Err(BackendError::OutOfMemory {
                needed_bytes,
                free_bytes,
            });
        }
        promise(needed_bytes)?;
        let weights = Arc::new(weights.with_floats_narrowed());
        let program = lower(plan, &weights, layout, self.fusion);
        let pool =
            Pool::new(self.threads).map_err(|error| BackendError::Device(Box::new(error)))?;
        let classes = RowClasses::new(self.kernels.isa(), options.batching);
        let workers = Workers::new(pool, self.kernels, classes, Repacked::new(repack_bytes));
        tracing::debug!(
            isa = ?self.kernels.isa(),
            threads = self.threads,
            needed_bytes,
            "compiled for the cpu"
        );
        let program = (program, self.fusion);
        Ok(Box::new(CpuExecutor::new(
            plan, weights, options, program, workers,
        )))
    }
}

/// An error if the system would not give so much address space. Vectors of this size are made in many places and abort where
/// they get nothing; asking once, for all of them, is the one place that can fail.
fn promise(needed_bytes: u64) -> Result<(), BackendError> {
    let bytes = usize::try_from(needed_bytes).unwrap_or(usize::MAX);
    let refused = |_| BackendError::OutOfMemory {
        needed_bytes,
        free_bytes: memory::available().map_or(0, |memory| memory.free_bytes),
    };
    Vec::<u8>::new().try_reserve_exact(bytes).map_err(refused)
}

fn buffer_bytes(layout: &Layout, options: &CompileOptions) -> u64 {
    let elements = layout.buffers.iter().map(|shape| {
        shape.columns
            * match shape.rows {
                Rows::All => options.max_rows,
                Rows::Sampled => options.max_sampled,
            }
    });
    (elements.sum::<usize>() * size_of::<f32>()) as u64
}

fn kv_bytes(plan: &Plan, options: &CompileOptions) -> u64 {
    let tied = !plan.tied_keys().is_empty();
    let slots = plan.slots.iter();
    let bytes = slots.map(|spec| {
        let (kv, alone) = (
            *options.kv.get(spec.group),
            tied && spec.group == KvGroup::Full,
        );
        options.pages.get(spec.group) * kv::page_bytes(spec, kv, alone)
    });
    let shared = kv::chunk_page_bytes(plan, options.kv) * options.chunk_pages;
    (bytes.sum::<usize>() + shared) as u64
}
