//! Loaded kernels: compiled or found in the cache when they are first wanted, and kept for the plans that come after.

use std::{
    collections::HashMap,
    sync::{Arc, Mutex, PoisonError},
};

use crate::{
    device::{Device, Module},
    error::CudaError,
    jit::compiler::Compiler,
    kernel::Specialization,
};

pub(crate) struct Modules {
    device: Arc<Device>,
    pub(crate) compiler: Compiler,
    loaded: Mutex<HashMap<Specialization, Arc<Module>>>,
}

impl Modules {
    pub(crate) fn new(device: &Arc<Device>, compiler: Compiler) -> Modules {
        Modules {
            device: Arc::clone(device),
            compiler,
            loaded: Mutex::default(),
        }
    }

    /// Loads kernels; those not seen before are compiled in parallel.
    pub(crate) fn load(
        &self,
        wanted: impl IntoIterator<Item = Specialization>,
    ) -> Result<(), CudaError> {
        let mut loaded = self.loaded.lock().unwrap_or_else(PoisonError::into_inner);
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
    pub(crate) fn get(&self, wanted: &Specialization) -> Arc<Module> {
        let loaded = self.loaded.lock().unwrap_or_else(PoisonError::into_inner);
        Arc::clone(&loaded[wanted])
    }
}
