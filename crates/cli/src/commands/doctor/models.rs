//! The models on this machine, and what each of them would do here.

use std::{path::Path, sync::Arc};

use anyhow::Result;
use carat::{Device as LibraryDevice, Loaded, context, open_device};
use carat_gguf::Gguf;
use carat_model::cost::{self, BatchShape, Roofline};
use serde::Serialize;

use crate::{
    args::BackendName,
    fetch,
    hub::{ModelRef, Role},
    load,
    settings::Settings,
};

/// The device that models would run on.
pub(super) struct Device {
    name: BackendName,
    rates: Option<Roofline>,
}

impl Device {
    pub(super) fn cpu(rates: Option<Roofline>) -> Device {
        Device {
            name: BackendName::Cpu,
            rates,
        }
    }

    pub(super) fn cuda(rates: Option<Roofline>) -> Device {
        Device {
            name: BackendName::Cuda,
            rates,
        }
    }

    fn label(&self) -> &'static str {
        match self.name {
            BackendName::Cuda => "cuda",
            BackendName::Cpu | BackendName::Reference => "cpu",
        }
    }

    fn open(&self, settings: &Settings) -> Result<Box<dyn carat_model::backend::Backend>> {
        let device = match self.name {
            BackendName::Cuda => LibraryDevice::Cuda {
                cuda: load::cuda_config(settings)?,
                cpu: load::beside_card(settings),
            },
            BackendName::Cpu | BackendName::Reference => {
                LibraryDevice::Cpu(load::cpu_config(settings)?)
            }
        };
        Ok(open_device(&device)?.backend)
    }
}

/// A model on this machine.
#[derive(Debug, Serialize)]
pub(super) struct Candidate {
    /// As `-m` takes it; `demo` is what answers without.
    pub(super) name: String,
    pub(super) bytes: u64,
    /// `cpu` or `cuda`.
    pub(super) backend: &'static str,
    /// Tokens of context that would be chosen; `None` where the model does not fit.
    pub(super) context: Option<usize>,
    /// Tokens of context that it was trained for.
    pub(super) trained_context: Option<usize>,
    /// Bytes of matrices that would lie in host memory, for want of the card's.
    pub(super) offloaded_bytes: u64,
    /// Where weights, keys and values would lie, in lines for a person; `None` on the CPU.
    pub(super) placement: Option<String>,
    /// What was measured of choices that depend on the card; `None` on the CPU.
    pub(super) tuning: Option<String>,
    /// Bound of decode at an empty context, if reading and multiplying alone took time; `None` where the bus would set it.
    pub(super) tokens_per_second_bound: Option<f64>,
    /// Reason that it cannot run here.
    pub(super) problem: Option<String>,
}

/// The demo, what the settings name, and what is in the cache of the hub.
pub(super) fn candidates(settings: &Settings, device: &Device) -> Vec<Candidate> {
    let mut files = vec![("demo".to_owned(), load::demo())];
    let open = |path: &Path| -> Result<Arc<Gguf>> { Ok(Arc::new(Gguf::open(path)?)) };
    if let Some(name) = &settings.model {
        // A model that would have to be fetched first is not on this machine.
        if let Ok(ModelRef::Path(path)) = name.parse() {
            files.push((name.clone(), open(&path)));
        }
    }
    // Without a place for a cache there is nothing in it.
    let cached = fetch::hub(settings).and_then(|hub| hub.cached(None));
    for model in cached.unwrap_or_default() {
        if model.role == Role::Model {
            let name = format!("hf:{}:{}", model.repo, model.file);
            files.push((name, open(&model.path)));
        }
    }
    let each = files.into_iter();
    each.map(|(name, file)| examine(name, file, device, settings))
        .collect()
}

fn examine(
    name: String,
    file: Result<Arc<Gguf>>,
    device: &Device,
    settings: &Settings,
) -> Candidate {
    let mut model = Candidate {
        name,
        bytes: 0,
        backend: device.label(),
        context: None,
        trained_context: None,
        offloaded_bytes: 0,
        placement: None,
        tuning: None,
        tokens_per_second_bound: None,
        problem: None,
    };
    let loaded = file.and_then(|file| {
        model.bytes = file.file_bytes() as u64;
        Ok(Loaded::new(file, device.open(settings)?, settings.kv())?)
    });
    let loaded = match loaded {
        Ok(loaded) => loaded,
        Err(problem) => {
            model.problem = Some(format!("{problem:#}"));
            return model;
        }
    };
    model.trained_context = Some(loaded.model.config.context);
    match context::choose(&loaded, 1, settings.context) {
        Ok(chosen) => {
            model.context = Some(chosen.tokens);
            model.offloaded_bytes = chosen.offloaded_bytes;
            model.placement = chosen.placement;
        }
        Err(problem) => model.problem = Some(problem.to_string()),
    }
    model.tuning = (loaded.backend).tuning(&loaded.plan, &loaded.model.weights);
    let decode = BatchShape::decode(0, loaded.kv);
    let cost = cost::of(&loaded.plan, &loaded.model.weights, decode);
    let bound = device.rates.map(|rates| 1.0 / rates.bound(&cost).seconds);
    model.tokens_per_second_bound = bound.filter(|_| model.offloaded_bytes == 0);
    model
}
