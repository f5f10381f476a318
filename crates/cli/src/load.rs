//! From `-m` to a model that is ready to compile.

use std::{
    sync::Arc,
    time::{Duration, Instant},
};

use anyhow::{Context, Result, bail};
use carat_cpu::{CpuBackend, CpuConfig, Isa};
use carat_cuda::{Checks, CudaBackend, CudaConfig, CudaError, Fusion, Graphs, Pdl, Tier};
use carat_gguf::Gguf;
use carat_model::{
    Model,
    backend::{Backend, BackendError, Batching, CompileOptions, Executor},
    gemma4,
    kv::KvType,
    plan::{Plan, Step},
    reference::Reference,
};
use clap::{ValueEnum, builder::PossibleValue};

use crate::{
    args::{BackendName, DebugSwitch, IsaName, TierName},
    draft::Drafts,
    fetch,
    settings::Settings,
    terminal::{Terminal, bytes, warn},
};

/// Aligned as a mapped file would be.
#[repr(align(64))]
struct Aligned<T: ?Sized>(T);

/// The model that answers where none is named; it ships inside the program.
static DEMO: &Aligned<[u8]> = &Aligned(*include_bytes!("../../../assets/pip-q8_0.gguf"));
const DEMO_NAME: &str = "demo";
/// Its drafter.
static DEMO_DRAFTER: &Aligned<[u8]> =
    &Aligned(*include_bytes!("../../../assets/pip-drafter-q8_0.gguf"));

/// Loading that is over before this needs no bar.
const SHOW_AFTER: Duration = Duration::from_millis(300);

/// Opens what `-m` names, fetched first if it must be, or the demo model.
pub(crate) fn open(settings: &Settings, terminal: Terminal) -> Result<Arc<Gguf>> {
    let Some(name) = &settings.model else {
        terminal.note("no -m given: using the demo model, Pip (10.7 M parameters, simple English)");
        let demo = Gguf::from_bytes(DEMO_NAME, &DEMO.0).context("the demo model is damaged")?;
        return Ok(Arc::new(demo));
    };
    let path = fetch::resolve(name, settings, terminal)
        .with_context(|| format!("cannot load `{name}`"))?;
    let file = Gguf::open(&path).with_context(|| format!("cannot load `{}`", path.display()))?;
    Ok(Arc::new(file))
}

/// The demo model's drafter.
pub(crate) fn demo_drafter() -> Result<Arc<Gguf>> {
    let drafter = Gguf::from_bytes("demo drafter", &DEMO_DRAFTER.0);
    Ok(Arc::new(
        drafter.context("the demo model's drafter is damaged")?,
    ))
}

/// A model file, checked and described, the device that will run it, and how that will keep keys and values.
pub(crate) struct Loaded {
    pub(crate) file: Arc<Gguf>,
    pub(crate) model: Model,
    pub(crate) plan: Plan,
    pub(crate) backend: Box<dyn Backend>,
    pub(crate) kv: KvType,
    /// Nobody, unless the command asks for drafts.
    pub(crate) drafts: Drafts,
    pub(crate) batching: Batching,
}

impl Loaded {
    pub(crate) fn open(settings: &Settings, terminal: Terminal) -> Result<Loaded> {
        let file = open(settings, terminal)?;
        let model = Model::load(Arc::clone(&file))
            .with_context(|| format!("cannot load `{}`", file.path().display()))?;
        Ok(Loaded {
            plan: gemma4::plan(&model),
            backend: match settings.backend {
                Some(name) => backend(name, settings)?,
                None => best_backend(settings, terminal)?,
            },
            kv: settings.kv(),
            drafts: Drafts::default(),
            batching: settings.batching(),
            model,
            file,
        })
    }

    /// The same with whoever drafts for it.
    pub(crate) fn open_with_drafts(settings: &Settings, terminal: Terminal) -> Result<Loaded> {
        let mut loaded = Loaded::open(settings, terminal)?;
        let backend = loaded.backend.as_ref();
        loaded.drafts = Drafts::open(settings, &loaded.model, backend, terminal)?;
        Ok(loaded)
    }

    pub(crate) fn compile(&self, options: &CompileOptions) -> Result<Box<dyn Executor>> {
        let weights = Arc::clone(&self.model.weights);
        let compiled = self.backend.compile(&self.plan, weights, options);
        let short = matches!(compiled, Err(BackendError::OutOfMemory { .. }));
        let way_out = if short {
            "; fewer tokens, a smaller quantization or another --backend may do"
        } else {
            ""
        };
        let name = self.backend.name();
        compiled.with_context(|| format!("cannot prepare the model on `{name}`{way_out}"))
    }

    /// Brings the weights that every token reads into memory, with a bar if that takes a while: a file that was not read
    /// lately would otherwise make the first token slow without a word. Tables that are looked up row by row stay out.
    pub(crate) fn warm_up(&self, terminal: Terminal) {
        const PAGE: usize = 4096;
        const CHUNK: usize = 16 << 20;
        let weights = &self.model.weights;
        let used = |step: &Step| match *step {
            Step::Linear { w, .. } | Step::Route { w, .. } => vec![w],
            Step::Experts { gate, up, down, .. } => vec![gate, up, down],
            _ => Vec::new(),
        };
        let steps = self.plan.steps.iter();
        let read: Vec<&[u8]> = steps
            .flat_map(|s| used(&s.step))
            .map(|w| weights.bytes(w))
            .collect();
        let total: usize = read.iter().map(|b| b.len()).sum();
        let start = Instant::now();
        let mut bar = None;
        let mut done = 0;
        let mut sum = 0u8;
        for chunk in read.iter().flat_map(|b| b.chunks(CHUNK)) {
            sum = chunk
                .iter()
                .step_by(PAGE)
                .fold(sum, |s, b| s.wrapping_add(*b));
            done += chunk.len() as u64;
            if start.elapsed() > SHOW_AFTER {
                let bar =
                    bar.get_or_insert_with(|| terminal.byte_bar(total as u64, "reading the model"));
                bar.set_position(done);
            }
        }
        std::hint::black_box(sum);
        if let Some(bar) = bar {
            bar.finish_and_clear();
        }
    }

    /// Such as `demo (11.02 MiB)`.
    pub(crate) fn describe(&self) -> String {
        format!(
            "{} ({})",
            self.model.config.name,
            bytes(self.file.file_bytes() as u64)
        )
    }
}

/// The device that computes, or why it cannot and what can instead.
pub(crate) fn backend(name: BackendName, settings: &Settings) -> Result<Box<dyn Backend>> {
    Ok(match name {
        BackendName::Reference if !settings.debug.is_empty() => {
            bail!("the reference has nothing to switch off; leave --debug out")
        }
        BackendName::Reference => Box::new(Reference),
        BackendName::Cpu => Box::new(cpu_backend(settings)?),
        BackendName::Cuda => {
            let backend = CudaBackend::new(cuda_config(settings)?)
                .context("cannot compute with CUDA (--backend cpu runs on this machine's cores)")?;
            if let Some(degraded_reason) = backend.degraded_reason() {
                warn(degraded_reason);
            }
            Box::new(backend)
        }
    })
}

/// An NVIDIA card if there is one, else this machine's cores. A card that is there but cannot be used is mentioned.
fn best_backend(settings: &Settings, terminal: Terminal) -> Result<Box<dyn Backend>> {
    let usable = CudaBackend::new(cuda_config(settings)?).and_then(|cuda| {
        cuda.ready()?;
        Ok(cuda)
    });
    match usable {
        Ok(cuda) => {
            let card = cuda.facts().name;
            terminal.note(format_args!(
                "computing on the {card}; --backend cpu uses this machine's cores instead"
            ));
            if let Some(degraded_reason) = cuda.degraded_reason() {
                warn(degraded_reason);
            }
            Ok(Box::new(cuda))
        }
        Err(problem) => {
            let asked = settings.device.is_some() || settings.vram.is_some();
            let absent = matches!(
                problem,
                CudaError::NoDriver { .. } | CudaError::NoDevice { count: 0, .. }
            );
            if asked || !absent {
                terminal.note(format_args!(
                    "computing on this machine's cores, not with CUDA: {problem}"
                ));
            }
            Ok(Box::new(cpu_backend(settings)?))
        }
    }
}

pub(crate) fn cuda_config(settings: &Settings) -> Result<CudaConfig> {
    Ok(CudaConfig {
        device: settings.device.unwrap_or(0),
        tier: match settings.tier {
            Some(TierName::Portable) => Tier::Portable,
            Some(TierName::Best) | None => Tier::Best,
        },
        memory_limit: settings.vram_bytes()?,
        cache_dir: std::env::home_dir().map(|home| home.join(".cache/carat/kernels")),
        kernels_dir: settings.kernels.clone(),
        fusion: if settings.debugs(DebugSwitch::NoFusion) {
            Fusion::Off
        } else {
            Fusion::On
        },
        graphs: if settings.debugs(DebugSwitch::NoGraphs) {
            Graphs::Off
        } else {
            Graphs::On
        },
        pdl: if settings.debugs(DebugSwitch::NoPdl) {
            Pdl::Off
        } else {
            Pdl::On
        },
        checks: if settings.debugs(DebugSwitch::CheckLaunches) {
            Checks::EachLaunch
        } else {
            Checks::EachBatch
        },
        ..CudaConfig::default()
    })
}

/// This machine's cores. Instructions that the processor does not have are refused rather than replaced.
pub(crate) fn cpu_backend(settings: &Settings) -> Result<CpuBackend> {
    let level = |name: IsaName| match name {
        IsaName::Scalar => Isa::Scalar,
        IsaName::Neon => Isa::Neon,
        IsaName::I8mm => Isa::I8mm,
        IsaName::Avx2 => Isa::Avx2,
        IsaName::AvxVnni => Isa::AvxVnni,
        IsaName::Avx512 => Isa::Avx512Vnni,
        IsaName::Amx => Isa::Amx,
    };
    let of_cuda = |switch: &&DebugSwitch| **switch != DebugSwitch::NoFusion;
    if let Some(switch) = settings.debug.iter().find(of_cuda) {
        let name = switch.to_possible_value();
        bail!(
            "`--debug {}` concerns CUDA alone; on the CPU there are --debug no-fusion and --isa",
            name.as_ref().map_or("", PossibleValue::get_name)
        );
    }
    let isa = settings.isa.map(level);
    if !isa.is_none_or(Isa::available) {
        let names = |wanted: &dyn Fn(IsaName) -> bool| {
            let found = IsaName::value_variants().iter().filter(|n| wanted(**n));
            let values = found.filter_map(IsaName::to_possible_value);
            let names: Vec<String> = values.map(|v| v.get_name().to_owned()).collect();
            names.join(", ")
        };
        bail!(
            "this processor does not have `{}`, which --isa names; it has {}, and uses the best of them without --isa",
            names(&|name| Some(name) == settings.isa),
            names(&|name| level(name).available())
        );
    }
    let backend = CpuBackend::new(&CpuConfig {
        threads: settings.threads,
        isa,
        repack_bytes: settings.repack_bytes()?.unwrap_or(0),
        fusion: if settings.debugs(DebugSwitch::NoFusion) {
            carat_cpu::Fusion::Off
        } else {
            carat_cpu::Fusion::On
        },
    });
    if let Some(size) = settings.repack.as_deref() {
        if !backend.repacks() {
            bail!(
                "--repack {size} would keep weights as AMX tiles, which this CPU does not have or may not use; leave it out"
            );
        }
        if backend.memory().is_ok_and(|memory| memory.free_bytes == 0) {
            bail!("--repack {size} is all the memory that is free, or more; give less");
        }
    }
    Ok(backend)
}
