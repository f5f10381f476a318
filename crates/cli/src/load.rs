//! From `-m` to a model that is ready to compile.

use std::{
    path::PathBuf,
    sync::Arc,
    time::{Duration, Instant},
};

use anyhow::{Context, Result, bail};
use carat::{Device, Loaded, footprint, open_device};
use carat_cpu::{CpuBackend, CpuConfig, Isa};
use carat_cuda::{Checks, CudaConfig, CudaError, Fusion, Graphs, MemoryLimit, Pdl, Tier};
use carat_gguf::Gguf;
use carat_model::backend::{Backend, BackendError, CompileOptions, Executor};
use clap::{ValueEnum, builder::PossibleValue};

use crate::{
    args::{BackendName, DebugSwitch, IsaName, TierName},
    fetch,
    misuse::misuse,
    settings::Settings,
    shipped_kernels,
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
        return demo();
    };
    let path = fetch::resolve(name, settings, terminal)
        .with_context(|| format!("cannot load `{name}`"))?;
    let file = Gguf::open(&path).with_context(|| format!("cannot load `{}`", path.display()))?;
    Ok(Arc::new(file))
}

/// The model that ships inside the program.
pub(crate) fn demo() -> Result<Arc<Gguf>> {
    let demo = Gguf::from_bytes(DEMO_NAME, &DEMO.0).context("the demo model is damaged")?;
    Ok(Arc::new(demo))
}

/// The demo model's drafter.
pub(crate) fn demo_drafter() -> Result<Arc<Gguf>> {
    let drafter = Gguf::from_bytes("demo drafter", &DEMO_DRAFTER.0);
    Ok(Arc::new(
        drafter.context("the demo model's drafter is damaged")?,
    ))
}

/// Opens the model on the device that the settings name.
pub(crate) fn open_model(settings: &Settings, terminal: Terminal) -> Result<Loaded> {
    let file = open(settings, terminal)?;
    let backend = match settings.backend {
        Some(name) => backend(name, settings)?,
        None => best_backend(settings, terminal)?,
    };
    load(&file, backend, settings)
}

/// The same on a device that is given.
pub(crate) fn open_model_on(
    backend: Box<dyn Backend>,
    settings: &Settings,
    terminal: Terminal,
) -> Result<Loaded> {
    load(&open(settings, terminal)?, backend, settings)
}

fn load(file: &Arc<Gguf>, backend: Box<dyn Backend>, settings: &Settings) -> Result<Loaded> {
    let mut loaded = Loaded::new(Arc::clone(file), backend, settings.kv())
        .with_context(|| format!("cannot load `{}`", file.path().display()))?;
    loaded.batching = settings.batching();
    if loaded.backend.name() == "cpu" {
        let repacked = settings.repack_bytes()?.unwrap_or(0);
        let limit = settings.ram_bytes()?;
        loaded.max_ram_bytes = limit.map(|limit| limit.saturating_sub(repacked));
    }
    Ok(loaded)
}

/// Prepares the model for batches; where memory is short, says what may help.
pub(crate) fn compile(loaded: &Loaded, options: &CompileOptions) -> Result<Box<dyn Executor>> {
    let taken = footprint::ram_bytes(loaded, options);
    if let Some(limit) = loaded.max_ram_bytes.filter(|limit| taken > *limit) {
        bail!(
            "this takes {} of memory with the model's file, and --ram allows {}; fewer tokens, --kv-type q8_0 or a smaller quantization may do",
            bytes(taken),
            bytes(limit)
        );
    }
    let weights = Arc::clone(&loaded.model.weights);
    let compiled = loaded.backend.compile(&loaded.plan, weights, options);
    let short = matches!(compiled, Err(BackendError::OutOfMemory { .. }));
    let way_out = if short {
        "; fewer tokens, a smaller quantization or another --backend may do"
    } else {
        ""
    };
    let name = loaded.backend.name();
    compiled.with_context(|| format!("cannot prepare the model on `{name}`{way_out}"))
}

/// Reads the weights, with a bar if that takes a while.
pub(crate) fn warm_up(loaded: &Loaded, terminal: Terminal) {
    let start = Instant::now();
    let mut bar = None;
    loaded.warm_up(|done, total| {
        if start.elapsed() > SHOW_AFTER {
            bar.get_or_insert_with(|| terminal.byte_bar(total, "reading the model"))
                .set_position(done);
        }
    });
    if let Some(bar) = bar {
        bar.finish_and_clear();
    }
}

/// Such as `demo (11.02 MiB)`.
pub(crate) fn describe(loaded: &Loaded) -> String {
    format!(
        "{} ({})",
        loaded.model.config.name,
        bytes(loaded.file.file_bytes() as u64)
    )
}

/// The device that computes, or why it cannot and what can instead.
pub(crate) fn backend(name: BackendName, settings: &Settings) -> Result<Box<dyn Backend>> {
    let device = match name {
        BackendName::Reference if !settings.debug.is_empty() => {
            misuse!("the reference has nothing to switch off; leave --debug out")
        }
        BackendName::Reference => Device::Reference,
        BackendName::Cpu => Device::Cpu(cpu_config(settings)?),
        BackendName::Cuda => Device::Cuda {
            cuda: cuda_config(settings)?,
            cpu: beside_card(settings),
        },
    };
    let opened = open_device(&device);
    let opened = if name == BackendName::Cuda {
        opened.context("cannot compute with CUDA (--backend cpu runs on this machine's cores)")?
    } else {
        opened?
    };
    if let Some(degraded_reason) = opened.degraded_reason {
        warn(degraded_reason);
    }
    Ok(opened.backend)
}

/// An NVIDIA card if there is one, else this machine's cores. A card that is there but cannot be used is mentioned.
fn best_backend(settings: &Settings, terminal: Terminal) -> Result<Box<dyn Backend>> {
    let cuda = cuda_config(settings)?;
    // What concerns CUDA alone is no reason to refuse the card; the cores are asked for in full only if they compute.
    let on_cores = cpu_config(settings);
    let device = match &on_cores {
        Ok(cpu) => Device::Best {
            cuda,
            cpu: cpu.clone(),
        },
        Err(_) => Device::Cuda {
            cuda,
            cpu: beside_card(settings),
        },
    };
    let opened = match (open_device(&device), on_cores) {
        (Ok(opened), _) => opened,
        (Err(_), Err(problem)) => return Err(problem),
        (Err(problem), Ok(_)) => return Err(problem.into()),
    };
    if let Some(card) = &opened.card {
        terminal.note(format_args!(
            "computing on the {card}; --backend cpu uses this machine's cores instead"
        ));
    }
    if let Some(degraded_reason) = opened.degraded_reason {
        warn(degraded_reason);
    }
    if let Some(problem) = opened.not_cuda {
        let asked =
            settings.device.is_some() || settings.vram.is_some() || settings.place.is_some();
        let absent = matches!(
            problem,
            CudaError::NoDriver { .. } | CudaError::NoDevice { count: 0, .. }
        );
        if asked || !absent {
            terminal.note(format_args!(
                "computing on this machine's cores, not with CUDA: {problem}"
            ));
        }
    }
    Ok(opened.backend)
}

/// Folder of compiled kernels, and of what was measured with them.
pub(crate) fn kernel_cache() -> Option<PathBuf> {
    std::env::home_dir().map(|home| home.join(".cache/carat/kernels"))
}

/// Cores that compute beside a card.
pub(crate) fn beside_card(settings: &Settings) -> CpuConfig {
    CpuConfig {
        threads: settings.threads,
        ..CpuConfig::default()
    }
}

pub(crate) fn cuda_config(settings: &Settings) -> Result<CudaConfig> {
    Ok(CudaConfig {
        device: settings.device.unwrap_or(0),
        tier: match settings.tier {
            Some(TierName::Portable) => Tier::Portable,
            Some(TierName::Best) | None => Tier::Best,
        },
        memory_limit: settings.vram_bytes()?.map(MemoryLimit::Process),
        placement: settings.placement()?,
        replan: settings.replan,
        cache_dir: kernel_cache(),
        kernels_dir: settings.kernels.clone().or_else(shipped_kernels::folder),
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

/// This machine's cores, as the settings have them.
pub(crate) fn cpu_backend(settings: &Settings) -> Result<CpuBackend> {
    Ok(CpuBackend::new(&cpu_config(settings)?))
}

/// Name of a level of instructions, as `--isa` takes it.
pub(crate) fn isa_name(isa: Isa) -> String {
    let names = IsaName::value_variants().iter();
    let found = names.filter(|name| isa_level(**name) == isa);
    let mut values = found.filter_map(IsaName::to_possible_value);
    let value = values.next();
    value.map_or(String::new(), |value| value.get_name().to_owned())
}

/// The level of instructions behind its name.
fn isa_level(name: IsaName) -> Isa {
    match name {
        IsaName::Scalar => Isa::Scalar,
        IsaName::Neon => Isa::Neon,
        IsaName::I8mm => Isa::I8mm,
        IsaName::Avx2 => Isa::Avx2,
        IsaName::AvxVnni => Isa::AvxVnni,
        IsaName::Avx512 => Isa::Avx512Vnni,
        IsaName::Amx => Isa::Amx,
    }
}

/// Instructions that the processor does not have are refused rather than replaced.
pub(crate) fn cpu_config(settings: &Settings) -> Result<CpuConfig> {
    let of_cuda = |switch: &&DebugSwitch| **switch != DebugSwitch::NoFusion;
    if let Some(switch) = settings.debug.iter().find(of_cuda) {
        let name = switch.to_possible_value();
        misuse!(
            "`--debug {}` concerns CUDA alone; on the CPU there are --debug no-fusion and --isa",
            name.as_ref().map_or("", PossibleValue::get_name)
        );
    }
    let isa = settings.isa.map(isa_level);
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
            names(&|name| isa_level(name).available())
        );
    }
    let config = CpuConfig {
        threads: settings.threads,
        isa,
        repack_bytes: settings.repack_bytes()?.unwrap_or(0),
        fusion: if settings.debugs(DebugSwitch::NoFusion) {
            carat_cpu::Fusion::Off
        } else {
            carat_cpu::Fusion::On
        },
    };
    let backend = CpuBackend::new(&config);
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
    Ok(config)
}
