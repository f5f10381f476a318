//! The machine: processor, memory, card, and the libraries that the card is used with.

use std::{
    fs,
    path::{Path, PathBuf},
};

use anyhow::Result;
use carat_cpu::CpuBackend;
use carat_cuda::{CudaBackend, CudaError};
use carat_model::{backend::Backend, cost::Roofline};
use serde::Serialize;

use super::models::Device;
use crate::{
    load::{cuda_config, isa_name},
    roofline,
    settings::Settings,
    terminal::Terminal,
};

/// Folders of the first core's caches, as Linux shows them.
const CACHES: &str = "/sys/devices/system/cpu/cpu0/cache";

#[derive(Debug, Serialize)]
pub(super) struct Processor {
    pub(super) name: Option<String>,
    /// Threads that models would be computed with.
    pub(super) threads: usize,
    /// Level in use, as `--isa` names it.
    pub(super) instructions: String,
    /// Such as `L2 2048K`, of the first core.
    pub(super) caches: Vec<String>,
}

impl Processor {
    pub(super) fn look(cpu: &CpuBackend) -> Processor {
        Processor {
            name: fs::read_to_string("/proc/cpuinfo")
                .ok()
                .and_then(|text| processor_name(&text)),
            threads: cpu.threads(),
            instructions: isa_name(cpu.isa()),
            caches: caches(Path::new(CACHES)),
        }
    }
}

/// Missing where the system does not tell, as on most Arm machines.
fn processor_name(cpuinfo: &str) -> Option<String> {
    let line = cpuinfo
        .lines()
        .find(|line| line.starts_with("model name"))?;
    Some(line.split_once(':')?.1.trim().to_owned())
}

fn caches(folder: &Path) -> Vec<String> {
    let one = |index: usize| -> Option<String> {
        let read = |name: &str| -> Option<String> {
            let path = folder.join(format!("index{index}")).join(name);
            Some(fs::read_to_string(path).ok()?.trim().to_owned())
        };
        let kind = match read("type")?.as_str() {
            "Data" => "d",
            "Instruction" => "i",
            _ => "",
        };
        Some(format!("L{}{kind} {}", read("level")?, read("size")?))
    };
    (0..).map_while(one).collect()
}

#[derive(Debug, Serialize)]
pub(super) struct Memory {
    pub(super) total_bytes: u64,
    pub(super) free_bytes: u64,
    /// With all threads; `None` where it could not be measured.
    pub(super) read_bytes_per_second: Option<f64>,
    pub(super) multiply_adds_per_second: Option<f64>,
}

impl Memory {
    pub(super) fn look(cpu: &CpuBackend, rates: Option<Roofline>) -> Result<Memory> {
        let memory = cpu.memory()?;
        Ok(Memory {
            total_bytes: memory.total_bytes,
            free_bytes: memory.free_bytes,
            read_bytes_per_second: rates.map(|r| r.read_bytes_per_second),
            multiply_adds_per_second: rates.map(|r| r.multiply_adds_per_second),
        })
    }
}

/// An NVIDIA card; without one, little is filled in.
#[derive(Debug, Default, Serialize)]
pub(super) struct Card {
    pub(super) name: Option<String>,
    pub(super) architecture: Option<String>,
    pub(super) total_bytes: Option<u64>,
    pub(super) free_bytes: Option<u64>,
    pub(super) read_bytes_per_second: Option<f64>,
    pub(super) multiply_adds_per_second: Option<f64>,
    /// The newest CUDA that the driver supports.
    pub(super) driver_cuda: Option<String>,
    /// Version of the library that compiles kernels.
    pub(super) nvrtc: Option<String>,
    /// Whether cuBLASLt multiplies prompts; elsewhere Carat's own kernels do.
    pub(super) cublaslt: Option<bool>,
    /// Reason that the card cannot compute, or computes slower than it could, and the way out.
    pub(super) problem: Option<String>,
    /// Kernels that came with the program or that `--kernels` names.
    pub(super) kernels_ahead: Option<PathBuf>,
    pub(super) kernel_cache: Option<PathBuf>,
    pub(super) kernel_cache_bytes: u64,
}

impl Card {
    /// The card, and the device that models run on if it can compute.
    pub(super) fn look(settings: &Settings, terminal: Terminal) -> Result<(Card, Option<Device>)> {
        let config = cuda_config(settings)?;
        let mut card = Card {
            kernel_cache_bytes: config.cache_dir.as_deref().map_or(0, folder_bytes),
            kernel_cache: config.cache_dir.clone(),
            kernels_ahead: config.kernels_dir.clone(),
            ..Card::default()
        };
        let cuda = match CudaBackend::new(config) {
            Ok(cuda) => cuda,
            Err(CudaError::NoDriver { .. } | CudaError::NoDevice { count: 0, .. }) => {
                return Ok((card, None));
            }
            Err(problem) => {
                card.problem = Some(problem.to_string());
                return Ok((card, None));
            }
        };
        let facts = cuda.facts();
        let version = |(major, minor): (i32, i32)| format!("{major}.{minor}");
        card.name = Some(facts.name);
        card.architecture = Some(facts.architecture.to_string());
        card.driver_cuda = Some(version(facts.driver));
        card.nvrtc = facts.nvrtc.map(version);
        card.cublaslt = Some(facts.cublaslt);
        if let Ok(memory) = cuda.memory() {
            card.total_bytes = Some(memory.total_bytes);
            card.free_bytes = Some(memory.free_bytes);
        }
        if let Err(problem) = cuda.ready() {
            card.problem = Some(problem.to_string());
            return Ok((card, None));
        }
        card.problem = cuda.degraded_reason().map(str::to_owned);
        let rates = roofline::measured(&cuda, terminal)?;
        card.read_bytes_per_second = rates.map(|r| r.read_bytes_per_second);
        card.multiply_adds_per_second = rates.map(|r| r.multiply_adds_per_second);
        Ok((card, Some(Device::cuda(rates))))
    }
}

/// Bytes of the files in a folder; 0 where there is none.
fn folder_bytes(folder: &Path) -> u64 {
    let entries = fs::read_dir(folder).into_iter().flatten().flatten();
    let files = entries.filter_map(|entry| entry.metadata().ok());
    files.filter(fs::Metadata::is_file).map(|m| m.len()).sum()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_processor_is_named_where_the_system_names_it() {
        let text = "processor\t: 0\nmodel name\t: Some CPU @ 2 GHz\n";
        assert_eq!(processor_name(text).as_deref(), Some("Some CPU @ 2 GHz"));
        assert_eq!(processor_name("processor\t: 0\n"), None);
    }

    #[test]
    fn caches_are_read_in_order_until_there_is_none() {
        let folder = tempfile::tempdir().unwrap();
        for (index, kind, level, size) in [
            (0, "Data", "1", "48K"),
            (1, "Instruction", "1", "32K"),
            (2, "Unified", "2", "2048K"),
        ] {
            let one = folder.path().join(format!("index{index}"));
            fs::create_dir(&one).unwrap();
            fs::write(one.join("type"), format!("{kind}\n")).unwrap();
            fs::write(one.join("level"), level).unwrap();
            fs::write(one.join("size"), size).unwrap();
        }
        assert_eq!(caches(folder.path()), ["L1d 48K", "L1i 32K", "L2 2048K"]);
        assert!(caches(&folder.path().join("nowhere")).is_empty());
    }

    #[test]
    fn a_folder_weighs_what_its_files_do() {
        let folder = tempfile::tempdir().unwrap();
        fs::write(folder.path().join("a"), [0; 100]).unwrap();
        fs::write(folder.path().join("b"), [0; 23]).unwrap();
        fs::create_dir(folder.path().join("c")).unwrap();
        assert_eq!(folder_bytes(folder.path()), 123);
        assert_eq!(folder_bytes(&folder.path().join("nowhere")), 0);
    }
}
