//! The backend: an open card that compiles plans into executors. It chooses the GEMM implementation by what fits into memory, and
//! keeps loaded kernels for the plans that come after.

use std::{
    collections::HashMap,
    sync::{Arc, Mutex, PoisonError},
};

use carat_model::{
    backend::{Backend, BackendError, Batching, CompileOptions, Executor, Memory, Need},
    cost::Roofline,
    plan::{Plan, Step},
    weights::Weights,
};

use crate::{
    compile::{
        call::Call,
        fit::fitting,
        memory::MemoryPlan,
        prepare::Prepared,
        rows::SMALL_ROWS,
        target::{GemmImpl, Target},
    },
    config::{CudaConfig, Pdl, Tier},
    device::{Device, Module, cublaslt::Library},
    error::CudaError,
    jit::compiler::{Architecture, Compiler},
    kernel::{
        self, Kernel, Specialization, feed_samples_specialization, move_pages_specialization,
        sample_specializations,
    },
    run::{
        executor::{CudaExecutor, Kernels},
        roofline,
    },
};

pub struct CudaBackend {
    device: Arc<Device>,
    compiler: Compiler,
    config: CudaConfig,
    /// Kernels already loaded, for the plans that come after.
    modules: Mutex<HashMap<Specialization, Arc<Module>>>,
    /// cuBLASLt, where f16 products are the fastest.
    library: Option<Library>,
    /// Why the card is slower than it could be, and what to do about it.
    degraded_reason: Option<String>,
}

/// The card, and the libraries that it is used with.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DeviceFacts {
    pub name: String,
    /// Major and minor.
    pub compute_capability: (i32, i32),
    pub architecture: Architecture,
    /// The newest CUDA that the driver supports: major and minor.
    pub driver: (i32, i32),
    /// Version of the compiler of kernels, where one is found.
    pub nvrtc: Option<(i32, i32)>,
    /// That cuBLASLt multiplies prompts where memory allows.
    pub cublaslt: bool,
}

impl CudaBackend {
    pub fn new(config: CudaConfig) -> Result<CudaBackend, CudaError> {
        let device = Device::open(config.device, config.memory_limit)?;
        let architecture = Architecture::of(device.capability, config.tier);
        tracing::info!(name = device.name, %architecture, "opened a CUDA device");
        // Hopper's tensor cores are fast enough in f16; elsewhere int8 over fragments is faster.
        let wants_library = config.tier == Tier::Best && device.capability.major == 9;
        let found = wants_library.then(|| Library::find(&config.library_dirs, &device));
        let (library, degraded_reason) = match found {
            Some(Ok(library)) => (Some(library), None),
            Some(Err(error)) => (None, Some(error.to_string())),
            None => (None, None),
        };
        Ok(CudaBackend {
            compiler: Compiler::new(architecture, &config),
            device,
            config,
            modules: Mutex::default(),
            library,
            degraded_reason,
        })
    }

    /// Why this card cannot compute although it is there: its kernels cannot be had.
    pub fn ready(&self) -> Result<(), CudaError> {
        self.compiler.ready()
    }

    /// Why this card is slower than it could be, and what to do about it, in a sentence for a person.
    pub fn degraded_reason(&self) -> Option<&str> {
        self.degraded_reason.as_deref()
    }

    pub fn facts(&self) -> DeviceFacts {
        let capability = self.device.capability;
        DeviceFacts {
            name: self.device.name.clone(),
            compute_capability: (capability.major, capability.minor),
            architecture: Architecture::of(capability, self.config.tier),
            driver: {
                let version = self.device.driver_version;
                (version / 1000, version % 1000 / 10)
            },
            nvrtc: self.compiler.nvrtc_version(),
            cublaslt: self.library.is_some(),
        }
    }

    /// The most bytes this backend has held on the device at a time.
    pub fn peak_bytes(&self) -> u64 {
        self.device.peak()
    }

    /// Bytes that this backend holds on the device now, by purpose.
    pub fn held_bytes(&self) -> impl Iterator<Item = (&'static str, u64)> {
        self.device
            .held()
            .into_iter()
            .filter(|(_, bytes)| *bytes > 0)
    }

    /// Memory that compiling would take, without taking it.
    pub fn memory_plan(
        &self,
        plan: &Plan,
        weights: &Weights,
        options: &CompileOptions,
    ) -> Result<MemoryPlan, BackendError> {
        Ok(self.prepare(plan, weights, options)?.memory)
    }

    /// Loads kernels; those not seen before are compiled in parallel.
    fn load(&self, wanted: impl IntoIterator<Item = Specialization>) -> Result<(), CudaError> {
        let mut loaded = self.modules.lock().unwrap_or_else(PoisonError::into_inner);
        let mut missing: Vec<Specialization> = Vec::new();
        for wanted in wanted {
            if !loaded.contains_key(&wanted) && !missing.contains(&wanted) {
                missing.push(wanted);
            }
        }
        let images = self.compiler.images(&missing.iter().collect::<Vec<_>>())?;
        for (specialization, image) in missing.into_iter().zip(images) {
            let name = specialization.to_string();
            let module = self.device.load(&name, &image, specialization.entries)?;
            loaded.insert(specialization, Arc::new(module));
        }
        Ok(())
    }

    /// A kernel that was loaded.
    fn module(&self, wanted: &Specialization) -> Arc<Module> {
        let loaded = self.modules.lock().unwrap_or_else(PoisonError::into_inner);
        Arc::clone(&loaded[wanted])
    }

    /// Whether code is compiled for `sm_90a`.
    fn hopper(&self) -> bool {
        self.config.tier == Tier::Best && self.device.capability.major == 9
    }

    /// The fastest choice that fits, or the smallest where none does.
    fn prepare(
        &self,
        plan: &Plan,
        weights: &Weights,
        options: &CompileOptions,
    ) -> Result<Prepared, BackendError> {
        let (free_bytes, _) = self.device.memory()?;
        let gemm = match self.library {
            Some(_) => GemmImpl::CublasLt,
            None => GemmImpl::Native,
        };
        let target = self.target(plan, weights, options, gemm);
        let choice = (target, self.config.tables);
        fitting(plan, weights, options, choice, free_bytes)
    }

    fn target(
        &self,
        plan: &Plan,
        weights: &Weights,
        options: &CompileOptions,
        gemm: GemmImpl,
    ) -> Target {
        let short_launches = matrix_bytes(plan, weights) <= MAX_BYTES_FOR_PDL;
        Target {
            multiprocessors: self.device.multiprocessors,
            shared_bytes: self.device.shared_bytes,
            hopper: self.hopper(),
            pdl: self.hopper() && short_launches && self.config.pdl == Pdl::On,
            gemm,
            first_uncopied_layer: None,
            min_packed_weights: self.config.min_packed_weights,
            max_rows: options.max_rows.max(options.max_sampled),
            fusion: self.config.fusion,
            kv: options.kv,
        }
    }
}

/// Bytes of a matrix, on average, up to which decoding gains from PDL. On an H200
/// decoding gains 11 % in E4B Q8_0 (13 MB), and loses 3 % in 12B Q4_0 (20 MB), 7 % in 31B Q4_0 (41 MB).
const MAX_BYTES_FOR_PDL: usize = 16 << 20;

/// Bytes of the matrices that every row is multiplied with, on average.
fn matrix_bytes(plan: &Plan, weights: &Weights) -> usize {
    let steps = plan.steps.iter();
    let sizes = steps.filter_map(|labelled| match labelled.step {
        Step::Linear { w, .. } => Some(weights.bytes(w).len()),
        _ => None,
    });
    let (count, sum) = sizes.fold((0, 0), |(count, sum), bytes| (count + 1, sum + bytes));
    sum / count.max(1)
}

impl Backend for CudaBackend {
    fn name(&self) -> &'static str {
        "cuda"
    }

    fn exact_rows(&self) -> usize {
        SMALL_ROWS
    }

    fn memory(&self) -> Result<Memory, BackendError> {
        let (free_bytes, total_bytes) = self.device.memory()?;
        Ok(Memory {
            total_bytes,
            free_bytes,
        })
    }

    fn chunk_rows(&self) -> usize {
        2048
    }

    fn peak_bytes(&self) -> Option<u64> {
        Some(self.device.peak())
    }

    fn need(
        &self,
        plan: &Plan,
        weights: &Weights,
        options: &CompileOptions,
    ) -> Result<Option<Need>, BackendError> {
        let memory = self.memory_plan(plan, weights, options)?;
        Ok(Some(Need {
            bytes: memory.device_bytes(),
            parts: memory.to_string(),
        }))
    }

    fn roofline(&self) -> Result<Option<Roofline>, BackendError> {
        let wanted = kernel::roofline::specializations();
        self.load(wanted.clone())?;
        let modules = wanted.map(|s| self.module(&s));
        let roofline = roofline::measure(&self.device, &modules, self.library.as_ref())?;
        Ok(Some(roofline))
    }

    fn compile(
        &self,
        plan: &Plan,
        weights: Arc<Weights>,
        options: &CompileOptions,
    ) -> Result<Box<dyn Executor>, BackendError> {
        if options.batching == Batching::Invariant {
            return Err(BackendError::Unsupported {
                what: "batch-invariant results are not there on CUDA yet; `--backend cpu` has them"
                    .to_owned(),
            });
        }
        let prepared = self.prepare(plan, &weights, options)?;
        let (free_bytes, _) = self.device.memory()?;
        let needed_bytes = prepared.memory.device_bytes();
        tracing::info!(needed_bytes, free_bytes, "memory plan\n{}", prepared.memory);
        if needed_bytes > free_bytes {
            return Err(BackendError::OutOfMemory {
                needed_bytes,
                free_bytes,
            });
        }
        let gemm = prepared.gemm;
        let kernels = prepared.calls().filter_map(Call::kernel);
        let sampling = sample_specializations();
        let feed_samples = feed_samples_specialization();
        let move_pages = move_pages_specialization();
        let loaders = prepared.weights.kernels(&weights);
        let wanted = kernels.map(Kernel::specialization);
        self.load(
            wanted
                .chain(sampling.clone())
                .chain([feed_samples.clone(), move_pages.clone()])
                .chain(loaders.clone()),
        )?;
        let loaders = loaders.into_iter().map(|s| (s.clone(), self.module(&s)));
        let weights = prepared
            .weights
            .upload(&self.device, &weights, &loaders.collect())?;
        let executor = CudaExecutor::new(
            &self.device,
            plan,
            weights,
            options,
            prepared,
            Kernels {
                of: &|kernel| self.module(&kernel.specialization()),
                sampling: sampling.map(|s| self.module(&s)),
                feed_samples: self.module(&feed_samples),
                move_pages: self.module(&move_pages),
                library: match gemm {
                    GemmImpl::CublasLt => self.library.clone(),
                    GemmImpl::Native => None,
                },
            },
            &self.config,
        )?;
        Ok(Box::new(executor))
    }
}
