//! The backend: an open card that compiles plans into executors. It chooses the GEMM implementation by what fits into memory, and
//! keeps loaded kernels for the plans that come after.

use std::{
    path::PathBuf,
    rc::Rc,
    sync::{Arc, OnceLock},
};

use carat_model::{
    backend::{Backend, BackendError, Batching, CompileOptions, DraftPlan, Executor, Memory, Need},
    cost::Roofline,
    host_steps::SharedHost,
    plan::Plan,
    weights::Weights,
};

use crate::{
    bus,
    choices::{self, Alternative, Alternatives, ChoiceInForce, ChoiceOrigin, Kernels},
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
    config::{CudaConfig, KeptChoices, Pdl, Tier},
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
        executor::{self, CudaExecutor},
        host_worker::HostWorker,
        modules::Modules,
        roofline,
        upload::ResidentWeights,
    },
    tuned_models::{self, CardIdentity, Kept, TunedModels},
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
    /// Choices that were measured on this card.
    tuned: TunedModels,
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
        let (library, without_library) = match found {
            Some(Ok(library)) => (Some(library), None),
            Some(Err(error)) => (None, Some(error.to_string())),
            None => (None, None),
        };
        let (tuned, without_choices) = match (&config.cache_dir, config.kept_choices) {
            (Some(folder), KeptChoices::Used) => {
                TunedModels::read(folder, &identity(&device, config.tier))
            }
            _ => (TunedModels::default(), None),
        };
        let reasons: Vec<String> = without_library.into_iter().chain(without_choices).collect();
        let degraded_reason = (!reasons.is_empty()).then(|| reasons.join("; "));
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
            tuned,
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
        let (free_bytes, _) = self.device.memory()?;
        let free_bytes = free_bytes.saturating_sub(left_bytes);
        let alternatives = self.kept(weights).with_all(self.config.alternatives);
        self.prepare_with(alternatives, plan, weights, options, free_bytes)
    }

    /// With these choices, the fastest that fits into so many bytes, or the smallest where none does.
    pub(crate) fn prepare_with(
        &self,
        alternatives: Alternatives,
        plan: &Plan,
        weights: &Weights,
        options: &CompileOptions,
        free_bytes: u64,
    ) -> Result<Prepared, BackendError> {
        if let Placement::Given(HostParts { cpu: Some(1..), .. }) = self.config.placement
            && self.host.is_none()
        {
            return Err(BackendError::Unsupported {
                what: "the placement leaves work to the CPU, and none was given to this card"
                    .to_owned(),
            });
        }
        let target = Target {
            alternatives,
            ..self.target(options, self.gemm())
        };
        let choice = (target, self.config.tables, &self.config.placement);
        fitting(plan, weights, options, choice, free_bytes, &|| self.rates())
    }

    fn gemm(&self) -> GemmImpl {
        match self.library {
            Some(_) => GemmImpl::CublasLt,
            None => GemmImpl::Native,
        }
    }

    /// What was measured on this card for such a model. Where nothing can be compiled, kernels compiled ahead are all there are.
    fn kept(&self, weights: &Weights) -> Alternatives {
        match self.tuned.of_model(weights) {
            Kept::Choices(kept) if self.modules.compiler.nvrtc_version().is_some() => kept,
            Kept::Choices(kept) => kept.of_kernels_ahead(),
            Kept::Nothing | Kept::Elsewhere => Alternatives::default(),
        }
    }

    /// Choices that make a difference on this card, as they are made for a model.
    pub fn choices(&self, plan: &Plan, weights: &Weights) -> Vec<ChoiceInForce> {
        let kernels = Kernels {
            fusion: self.config.fusion,
            pdl: self.may_use_pdl(),
            gemm: self.gemm(),
        };
        let others = (self.kept(weights), self.config.alternatives);
        choices::in_force(plan, weights, kernels, others)
    }

    /// Whether the kernels that a value takes can be had: compiled here, if not ahead.
    pub fn can_choose(&self, value: Alternative) -> bool {
        !value.needs_compiler() || self.modules.compiler.nvrtc_version().is_some()
    }

    fn may_use_pdl(&self) -> bool {
        self.hopper() && self.config.pdl == Pdl::On
    }

    /// Keeps choices that were measured on this card for such a model, under a name for people, and returns the file. They are in force for
    /// backends that are opened afterwards.
    pub fn keep_choices(
        &self,
        (weights, name): (&Weights, &str),
        values: Alternatives,
    ) -> Result<PathBuf, CudaError> {
        let folder = self.choices_folder()?;
        let card = identity(&self.device, self.config.tier);
        tuned_models::keep(folder, &card, (weights, name), values)
            .map_err(|(path, problem)| CudaError::File { path, problem })
    }

    /// Forgets what is kept of choices for such a model on this card, and returns the file.
    pub fn forget_choices(&self, weights: &Weights) -> Result<PathBuf, CudaError> {
        let folder = self.choices_folder()?;
        let card = identity(&self.device, self.config.tier);
        tuned_models::forget(folder, &card, weights)
            .map_err(|(path, problem)| CudaError::File { path, problem })
    }

    pub(crate) fn free_bytes(&self) -> Result<u64, CudaError> {
        Ok(self.device.memory()?.0)
    }

    fn choices_folder(&self) -> Result<&PathBuf, CudaError> {
        self.config.cache_dir.as_ref().ok_or(CudaError::NoCache)
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
            pdl: self.may_use_pdl(),
            gemm,
            first_uncopied_layer: None,
            alternatives: self.config.alternatives,
            max_rows: options.max_rows.max(options.max_sampled),
            fusion: self.config.fusion,
            kv: options.kv,
            borrowed_turning_pairs: None,
            borrowed_table: None,
        }
    }
}

/// All that measured choices depend on besides the model.
fn identity(device: &Device, tier: Tier) -> CardIdentity {
    let version = device.driver_version;
    CardIdentity {
        card: format!(
            "{}, capability {}.{}, {} multiprocessors",
            device.name, device.capability.major, device.capability.minor, device.multiprocessors
        ),
        build: format!(
            "driver for CUDA {}.{}, tier {tier:?}, carat {}, kernels {}",
            version / 1000,
            version % 1000 / 10,
            env!("CARGO_PKG_VERSION"),
            source::digest()
        ),
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
            alternatives,
            ..
        } = self.config;
        let settings = (fusion, tables, graphs, pdl, checks, alternatives);
        let tuned = &self.tuned;
        let kernels = source::digest();
        // Where weights lie decides what a row costs.
        let placement = &self.config.placement;
        let host = self.host.as_ref().map(|host| host.identity());
        Some(format!(
            "{:?} {settings:?} {placement:?} {host:?} {kernels} {tuned:?}",
            self.facts()
        ))
    }

    fn tuning(&self, plan: &Plan, weights: &Weights) -> Option<String> {
        let in_force = self.choices(plan, weights);
        Some(match self.tuned.of_model(weights) {
            Kept::Nothing => "not tuned; `carat tune` measures".to_owned(),
            Kept::Elsewhere => {
                "tuned with another driver, tier or version; `carat tune` measures again".to_owned()
            }
            Kept::Choices(_) => {
                let tuned = in_force.iter().filter(|c| c.origin == ChoiceOrigin::Tuned);
                let tuned: Vec<String> =
                    tuned.map(|c| format!("{} {}", c.choice, c.value)).collect();
                match tuned.as_slice() {
                    [] => "tuned, as the model of the card has it".to_owned(),
                    some => format!("tuned, {}", some.join(", ")),
                }
            }
        })
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
        self.compile_prepared(plan, weights, options, (prepared, left_bytes), None)
    }

    /// Compiles what is prepared so that some bytes of memory are left, with weights that lie on the card already where they are given.
    pub(crate) fn compile_prepared(
        &self,
        plan: &Plan,
        weights: Arc<Weights>,
        options: &CompileOptions,
        (prepared, left_bytes): (Prepared, u64),
        resident: Option<Rc<ResidentWeights>>,
    ) -> Result<CudaExecutor, BackendError> {
        let (free_bytes, _) = self.device.memory()?;
        let there = &prepared.weights;
        let there_bytes = match resident {
            Some(_) => (there.device_bytes + there.expanded_bytes) as u64,
            None => 0,
        };
        let needed_bytes = prepared.memory.device_bytes() + left_bytes;
        let needed_bytes = needed_bytes.saturating_sub(there_bytes);
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
        let resident = if let Some(resident) = resident {
            resident
        } else {
            let loaders = loaders.collect();
            Rc::new(prepared.weights.upload(&self.device, &weights, &loaders)?)
        };
        let executor = CudaExecutor::new(
            &self.device,
            plan,
            (weights, resident, host_worker),
            options,
            prepared,
            executor::Kernels {
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
