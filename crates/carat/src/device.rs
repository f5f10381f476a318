//! Devices that compute: the one place that names the backends.

use std::sync::Arc;

use carat_cpu::{CpuBackend, CpuConfig};
use carat_cuda::{CudaBackend, CudaConfig, CudaError};
use carat_model::{backend::Backend, reference::Reference};

use crate::Error;

/// A device to compute on.
#[derive(Clone, Debug)]
pub enum Device {
    /// An NVIDIA card if there is one that can be used, else this machine's cores.
    Best {
        /// For the card.
        cuda: CudaConfig,
        /// For the cores.
        cpu: CpuConfig,
    },
    /// This machine's cores.
    Cpu(CpuConfig),
    /// An NVIDIA card.
    Cuda {
        /// For the card.
        cuda: CudaConfig,
        /// For the cores, which compute beside it where weights lie in host memory.
        cpu: CpuConfig,
    },
    /// The scalar definition: slow and exact.
    Reference,
}

impl Default for Device {
    fn default() -> Device {
        Device::Best {
            cuda: CudaConfig::default(),
            cpu: CpuConfig::default(),
        }
    }
}

/// A backend that is ready, and what a person may want to know about the choice.
pub struct OpenedDevice {
    /// Computes.
    pub backend: Box<dyn Backend>,
    /// Name of the card, where one computes.
    pub card: Option<String>,
    /// Reason a card that was looked for does not compute. Where there is no card at all, there is none.
    pub not_cuda: Option<CudaError>,
    /// Reason the card computes more slowly than it could.
    pub degraded_reason: Option<String>,
}

/// Makes a device ready, or says why it is not.
pub fn open_device(device: &Device) -> Result<OpenedDevice, Error> {
    let plain = |backend: Box<dyn Backend>| OpenedDevice {
        backend,
        card: None,
        not_cuda: None,
        degraded_reason: None,
    };
    let on_card = |cuda: CudaBackend, cpu: &CpuConfig| OpenedDevice {
        card: Some(cuda.facts().name),
        degraded_reason: cuda.degraded_reason().map(str::to_owned),
        ..plain(Box::new(cuda.with_host(Arc::new(CpuBackend::new(cpu)))))
    };
    Ok(match device {
        Device::Reference => plain(Box::new(Reference)),
        Device::Cpu(config) => plain(Box::new(CpuBackend::new(config))),
        Device::Cuda { cuda, cpu } => on_card(CudaBackend::new(cuda.clone())?, cpu),
        Device::Best { cuda, cpu } => {
            let usable = CudaBackend::new(cuda.clone()).and_then(|cuda| {
                cuda.ready()?;
                Ok(cuda)
            });
            match usable {
                Ok(cuda) => on_card(cuda, cpu),
                Err(problem) => OpenedDevice {
                    not_cuda: Some(problem),
                    ..plain(Box::new(CpuBackend::new(cpu)))
                },
            }
        }
    })
}
