//! The backend: an open card that compiles plans.

use std::{
    collections::HashMap,
    sync::{Arc, Mutex, PoisonError},
};

use carat_model::{
    backend::{Backend, BackendError, CompileOptions, Executor, Memory},
    layout::Layout,
    plan::Plan,
    weights::Weights,
};

use crate::{
    compiler::{Architecture, Compiler},
    config::CudaConfig,
    device::{Device, Module},
    error::CudaError,
    executor::CudaExecutor,
    fuse::{Op, fuse},
    kernel::Specialization,
    lower::{Call, lower},
    memory::{MemoryPlan, Parts},
    weights::WeightLayout,
};

pub struct CudaBackend {
    device: Arc<Device>,
    compiler: Compiler,
    config: CudaConfig,
    /// Kernels already loaded, for the plans that come after.
    modules: Mutex<HashMap<Specialization, Arc<Module>>>,
}

/// What the card is.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DeviceFacts {
    pub name: String,
    /// Major and minor.
    pub compute_capability: (i32, i32),
    pub architecture: Architecture,
}

impl CudaBackend {
    pub fn new(config: CudaConfig) -> Result<CudaBackend, CudaError> {
        let device = Device::open(config.device)?;
        let architecture = Architecture::of(device.capability, config.tier);
        tracing::info!(name = device.name, %architecture, "opened a CUDA device");
        Ok(CudaBackend {
            compiler: Compiler::new(architecture, &config),
            device,
            config,
            modules: Mutex::default(),
        })
    }

    pub fn facts(&self) -> DeviceFacts {
        let capability = self.device.capability;
        DeviceFacts {
            name: self.device.name.clone(),
            compute_capability: (capability.major, capability.minor),
            architecture: Architecture::of(capability, self.config.tier),
        }
    }

    /// What this backend holds on the device now, by purpose.
    pub fn held_bytes(&self) -> impl Iterator<Item = (&'static str, u64)> {
        self.device
            .held()
            .into_iter()
            .filter(|(_, bytes)| *bytes > 0)
    }

    /// What compiling would take, without taking it.
    pub fn memory_plan(
        &self,
        plan: &Plan,
        weights: &Weights,
        options: &CompileOptions,
    ) -> Result<MemoryPlan, BackendError> {
        Ok(prepare(plan, weights, options, &self.config)?.memory)
    }

    /// Loaded kernels for these calls, in order; those not seen before are compiled side by side.
    fn modules(&self, calls: &[Call]) -> Result<Vec<Arc<Module>>, CudaError> {
        let wanted: Vec<Specialization> = calls.iter().map(|c| c.kernel.specialization()).collect();
        let mut loaded = self.modules.lock().unwrap_or_else(PoisonError::into_inner);
        let mut missing: Vec<&Specialization> = Vec::new();
        for specialization in &wanted {
            if !loaded.contains_key(specialization) && !missing.contains(&specialization) {
                missing.push(specialization);
            }
        }
        let images = self.compiler.images(&missing)?;
        for (specialization, image) in missing.into_iter().zip(images) {
            let name = specialization.to_string();
            let module = self.device.load(&name, &image, specialization.entries)?;
            loaded.insert(specialization.clone(), Arc::new(module));
        }
        Ok(wanted.iter().map(|s| Arc::clone(&loaded[s])).collect())
    }
}

/// A plan, ready to take memory.
pub(crate) struct Prepared {
    pub(crate) calls: Vec<Call>,
    pub(crate) weights: WeightLayout,
    pub(crate) parts: Parts,
    pub(crate) memory: MemoryPlan,
}

/// Everything that can be known without a device.
pub(crate) fn prepare(
    plan: &Plan,
    weights: &Weights,
    options: &CompileOptions,
    config: &CudaConfig,
) -> Result<Prepared, BackendError> {
    let ops = fuse(plan, config.fusion);
    let lowered = lower(plan, weights, &ops)?;
    let layout = if options.probe {
        Layout::separate(plan)
    } else {
        let groups: Vec<_> = ops.iter().map(|op: &Op| op.steps.clone()).collect();
        Layout::grouped(plan, &groups)
    };
    let parts = Parts::new(plan, options, layout, &lowered.scratch);
    let weights = WeightLayout::new(plan, weights, config.tables);
    Ok(Prepared {
        memory: MemoryPlan::new(plan, options, &weights, &parts),
        calls: lowered.calls,
        weights,
        parts,
    })
}

impl Backend for CudaBackend {
    fn name(&self) -> &'static str {
        "cuda"
    }

    fn memory(&self) -> Result<Memory, BackendError> {
        let (free_bytes, total_bytes) = self.device.memory()?;
        Ok(Memory {
            total_bytes,
            free_bytes,
        })
    }

    fn compile(
        &self,
        plan: &Plan,
        weights: Arc<Weights>,
        options: &CompileOptions,
    ) -> Result<Box<dyn Executor>, BackendError> {
        let prepared = prepare(plan, &weights, options, &self.config)?;
        let (free_bytes, _) = self.device.memory()?;
        let needed_bytes = prepared.memory.device_bytes();
        tracing::info!(needed_bytes, free_bytes, "memory plan\n{}", prepared.memory);
        if needed_bytes > free_bytes {
            return Err(BackendError::OutOfMemory {
                needed_bytes,
                free_bytes,
            });
        }
        let modules = self.modules(&prepared.calls)?;
        let executor = CudaExecutor::new(
            &self.device,
            plan,
            &weights,
            options,
            prepared,
            modules,
            self.config.checks,
        )?;
        Ok(Box::new(executor))
    }
}
