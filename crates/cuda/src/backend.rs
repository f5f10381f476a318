//! The backend: an open card that compiles plans into executors. It chooses the GEMM implementation by what fits into memory, and
//! keeps loaded kernels for the plans that come after.

use std::sync::{Arc, OnceLock};

use carat_model::{
    backend::{Backend, BackendError, Batching, CompileOptions, DraftPlan, Executor, Memory, Need},
    cost::Roofline,
    host_steps::SharedHost,
    plan::Plan,
    weights::Weights,
};

use crate::{
    bus,
    compile::{
        call::Call,
        drafter::prepare_drafter,
        fit::{fitting, size},
        memory::MemoryPlan,
        offload::Rates,
        prepare::Prepared,
        rows::SMALL_ROWS,
        target::{GemmImpl, Target},
    },
    config::{CudaConfig, Pdl, Tier},
    device::{ClusterCapacity, Device, cublaslt::Library},
    error::CudaError,
    jit::{
        compiler::{Architecture, Compiler},
        source,
    },
    kernel::{
        self, Kernel, TableFormat, feed_samples_specialization, move_pages_specialization,
        sample_specializations, update_tables_specialization,
    },
    placement::{HostParts, Placement},
    run::{
        executor::{CudaExecutor, Kernels},
        host_worker::HostWorker,
        modules::Modules,
        roofline,
    },
};

pub struct CudaBackend {
    device: Arc<Device>,
    config: CudaConfig,
    modules: Arc<Modules>,
    /// cuBLASLt, where f16 products are the fastest.
    library: Option<Library>,
    /// Where code is compiled for `sm_90a`: blocks of clusters that fit.
    clusters: Option<ClusterCapacity>,
    /// Why the card is slower than it could be, and what to do about it.
    degraded_reason: Option<String>,
    /// Once it has been asked for.
    bus_rate: OnceLock<Option<f64>>,
    host: Option<SharedHost>,
    host_rate: OnceLock<Option<f64>>,
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
        let hopper = config.tier == Tier::Best && device.capability.major == 9;
        let found = hopper.then(|| Library::find(&config.library_dirs, &device));
        let (library, degraded_reason) = match found {
            Some(Ok(library)) => (Some(library), None),
            Some(Err(error)) => (None, Some(error.to_string())),
            None => (None, None),
        };
        // A driver that does not say costs speed at the most.
        let clusters = hopper.then(|| {
            let asked = ClusterCapacity::of(&device);
            asked.unwrap_or_else(|_| ClusterCapacity::assumed(device.multiprocessors))
        });
        let compiler = Compiler::new(architecture, &config);
        Ok(CudaBackend {
            modules: Arc::new(Modules::new(&device, compiler)),
            device,
            config,
            library,
            clusters,
            degraded_reason,
            bus_rate: OnceLock::new(),
            host: None,
            host_rate: OnceLock::new(),
        })
    }

    /// Why this card cannot compute although it is there: its kernels cannot be had.
    pub fn ready(&self) -> Result<(), CudaError> {
        self.modules.compiler.ready()
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
            nvrtc: self.modules.compiler.nvrtc_version(),
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
        Ok(self.prepare(plan, weights, options, 0)?.memory)
    }

    /// Whether code is compiled for `sm_90a`.
    fn hopper(&self) -> bool {
        self.clusters.is_some()
    }

    /// The fastest choice that fits and leaves some bytes, or the smallest where none does.
    fn prepare(
        &self,
        plan: &Plan,
        weights: &Weights,
        options: &CompileOptions,
        left_bytes: u64,
    ) -> Result<Prepared, BackendError> {
        if let Placement::Given(HostParts { cpu: Some(1..), .. }) = self.config.placement
            && self.host.is_none()
        {
            return Err(BackendError::Unsupported {
                what: "the placement leaves work to the CPU, and none was given to this card"
                    .to_owned(),
            });
        }
        let (free_bytes, _) = self.device.memory()?;
        let gemm = match self.library {
            Some(_) => GemmImpl::CublasLt,
            None => GemmImpl::Native,
        };
        let target = self.target(options, gemm);
        let choice = (target, self.config.tables, &self.config.placement);
        fitting(
            plan,
            weights,
            options,
            choice,
            free_bytes.saturating_sub(left_bytes),
            &|| self.rates(),
        )
    }

    /// Lets a host compute parts of networks whose weights lie in its memory.
    #[must_use]
    pub fn with_host(mut self, host: SharedHost) -> CudaBackend {
        self.host = Some(host);
        self
    }

    /// What weights in host memory are read at.
    fn rates(&self) -> Rates {
        Rates {
            bus: self.bus_rate(),
            host: self.host.as_ref().and_then(|host| self.host_rate(host)),
        }
    }

    /// Bytes per second that a host reads weights at; `None` as below.
    fn host_rate(&self, host: &SharedHost) -> Option<f64> {
        let kept = || {
            let folder = self.config.cache_dir.as_deref()?;
            let name = format!("CPU, {}", host.identity());
            bus::rate(folder, &name, self.config.replan, || host.read_rate())
        };
        *self.host_rate.get_or_init(kept)
    }

    /// Bytes per second that kernels read from host memory; `None` if that could not be measured, or would not be kept.
    fn bus_rate(&self) -> Option<f64> {
        let measure = || {
            let [read, _] = kernel::roofline::specializations();
            self.modules.load([read.clone()]).ok()?;
            roofline::bus_rate(&self.device, &self.modules.get(&read)).ok()
        };
        let card = format!("{} {:?}", self.device.name, self.facts().driver);
        let kept = || {
            let folder = self.config.cache_dir.as_deref()?;
            bus::rate(folder, &card, self.config.replan, measure)
        };
        *self.bus_rate.get_or_init(kept)
    }

    fn target(&self, options: &CompileOptions, gemm: GemmImpl) -> Target {
        Target {
            multiprocessors: self.device.multiprocessors,
            shared_bytes: self.device.shared_bytes,
            hopper: self.hopper(),
            clusters: self.clusters,
            pdl: self.hopper() && self.config.pdl == Pdl::On,
            gemm,
            first_uncopied_layer: None,
            min_packed_weights: self.config.min_packed_weights,
            max_rows: options.max_rows.max(options.max_sampled),
            fusion: self.config.fusion,
            kv: options.kv,
            borrowed_turning_pairs: None,
            borrowed_table: None,
        }
    }
}

/// Rows of a prompt that a card is fed at a time.
pub(crate) fn chunk_rows(batching: Batching) -> usize {
    match batching {
        Batching::Fast => 2048,
        // Nothing is gained by more: they are computed a few at a time, and whoever decodes beside them waits.
        Batching::Invariant => 64,
    }
}

impl Backend for CudaBackend {
    fn name(&self) -> &'static str {
        "cuda"
    }

    fn drafts(&self) -> bool {
        true
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

    fn chunk_rows(&self, batching: Batching) -> usize {
        chunk_rows(batching)
    }

    fn timing_identity(&self) -> Option<String> {
        let CudaConfig {
            fusion,
            tables,
            graphs,
            pdl,
            checks,
            ..
        } = self.config;
        let settings = (fusion, tables, graphs, pdl, checks);
        let kernels = source::digest();
        // Where weights lie decides what a row costs.
        let placement = &self.config.placement;
        let host = self.host.as_ref().map(|host| host.identity());
        Some(format!(
            "{:?} {settings:?} {placement:?} {host:?} {kernels}",
            self.facts()
        ))
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
        Ok(Some(self.memory_plan(plan, weights, options)?.need()))
    }

    fn drafter_need(
        &self,
        drafter: &DraftPlan,
        options: &CompileOptions,
    ) -> Result<Option<Need>, BackendError> {
        let DraftPlan {
            plan,
            weights,
            max_drafts,
        } = drafter;
        let plan = plan.with_products_gathered();
        let target = Target {
            // The target has it, in whichever format.
            borrowed_table: Some(TableFormat::Rows),
            ..self.target(options, GemmImpl::Native)
        };
        let options = (options, *max_drafts);
        let prepared = prepare_drafter(&plan, weights, options, self.config.tables, target)?;
        Ok(Some(prepared.memory.need()))
    }

    fn roofline(&self) -> Result<Option<Roofline>, BackendError> {
        let wanted = kernel::roofline::specializations();
        self.modules.load(wanted.clone())?;
        let modules = wanted.map(|s| self.modules.get(&s));
        let roofline = roofline::measure(&self.device, &modules, self.library.as_ref())?;
        Ok(Some(roofline))
    }

    fn compile(
        &self,
        plan: &Plan,
        weights: Arc<Weights>,
        options: &CompileOptions,
    ) -> Result<Box<dyn Executor>, BackendError> {
        Ok(Box::new(self.compile_leaving(plan, weights, options, 0)?))
    }

    fn compile_with_drafter(
        &self,
        plan: &Plan,
        weights: Arc<Weights>,
        options: &CompileOptions,
        drafter: DraftPlan,
    ) -> Result<Box<dyn Executor>, BackendError> {
        let need = self.drafter_need(&drafter, options)?;
        let left_bytes = need.map_or(0, |need| need.bytes);
        let mut executor = self.compile_leaving(plan, weights, options, left_bytes)?;
        executor.attach_drafter(&drafter.plan, drafter.weights, drafter.max_drafts)?;
        Ok(Box::new(executor))
    }
}

impl CudaBackend {
    /// Compiles a plan so that some bytes of memory are left.
    fn compile_leaving(
        &self,
        plan: &Plan,
        weights: Arc<Weights>,
        options: &CompileOptions,
        left_bytes: u64,
    ) -> Result<CudaExecutor, BackendError> {
        if plan.slots.iter().any(|slot| slot.borrowed.is_some()) {
            return Err(BackendError::Unsupported {
                what: "a draft model runs beside its model alone: name the model, and this one with --draft".to_owned(),
            });
        }
        let prepared = self.prepare(plan, &weights, options, left_bytes)?;
        let (free_bytes, _) = self.device.memory()?;
        let needed_bytes = prepared.memory.device_bytes() + left_bytes;
        tracing::info!(needed_bytes, free_bytes, "memory plan\n{}", prepared.memory);
        if needed_bytes > free_bytes && self.config.placement != Placement::Auto {
            return Err(BackendError::Unsupported {
                what: format!(
                    "this placement of weights needs {} of device memory, {} are free: let more lie in host memory, take \
                     --place auto, a smaller context or --kv-type q8_0",
                    size(needed_bytes as usize),
                    size(free_bytes as usize)
                ),
            });
        }
        if needed_bytes > free_bytes {
            return Err(BackendError::OutOfMemory {
                needed_bytes,
                free_bytes,
            });
        }
        let gemm = prepared.target.gemm;
        let kernels = prepared.calls().filter_map(Call::kernel);
        let sampling = sample_specializations();
        let feed_samples = feed_samples_specialization();
        let move_pages = move_pages_specialization();
        let update_tables = update_tables_specialization();
        let loaders = prepared.weights.kernels(&weights);
        let wanted = kernels.map(Kernel::specialization);
        self.modules.load(
            wanted
                .chain(sampling.clone())
                .chain([
                    feed_samples.clone(),
                    move_pages.clone(),
                    update_tables.clone(),
                ])
                .chain(loaders.clone()),
        )?;
        let modules = &self.modules;
        let loaders = loaders.into_iter().map(|s| (s.clone(), modules.get(&s)));
        let host_worker = match prepared.host_networks.as_slice() {
            [] => None,
            networks => {
                let host = self.host.as_ref();
                let host = host.expect("networks are given to a host that is there");
                let steps = host.host_steps(&weights, networks, SMALL_ROWS)?;
                let networks = (networks, prepared.shared_memory);
                let worker = HostWorker::new(&self.device, &weights, networks, steps)?;
                Some(worker)
            }
        };
        let resident = prepared
            .weights
            .upload(&self.device, &weights, &loaders.collect())?;
        let executor = CudaExecutor::new(
            &self.device,
            plan,
            (weights, resident, host_worker),
            options,
            prepared,
            Kernels {
                modules: Arc::clone(modules),
                sampling: sampling.map(|s| modules.get(&s)),
                feed_samples: modules.get(&feed_samples),
                move_pages: modules.get(&move_pages),
                update_tables: modules.get(&update_tables),
                library: match gemm {
                    GemmImpl::CublasLt => self.library.clone(),
                    GemmImpl::Native => None,
                },
            },
            &self.config,
        )?;
        Ok(executor)
    }
}
