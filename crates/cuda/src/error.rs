//! Errors of the backend: one variant for each thing a person can do about it.

use std::{io, path::PathBuf};

use carat_model::backend::BackendError;
use cudarc::driver::{DriverError, sys::CUresult};

#[derive(Debug, thiserror::Error)]
pub enum CudaError {
    #[error(
        "no NVIDIA driver: the library `{library}` was not found. Install the driver, or use another backend"
    )]
    NoDriver { library: &'static str },
    #[error(
        "the NVIDIA driver is too old: it supports CUDA {}, Carat needs {} or newer. Update the driver",
        version(*.found), version(*.needed)
    )]
    DriverTooOld { found: i32, needed: i32 },
    #[error("the NVIDIA driver did not start: {:?}. Restart the machine or reinstall the driver", .0.0)]
    DriverFailed(DriverError),
    #[error("there is no CUDA device {index}: {}", match .count {
        0 => "the driver sees no card".to_owned(),
        count => format!("the driver sees {count}, numbered from 0"),
    })]
    NoDevice { index: usize, count: usize },
    #[error(
        "{name} has compute capability {major}.{minor}; Carat's kernels need 8.0 (Ampere, 2020) or newer. Use another backend"
    )]
    TooOldCard {
        name: String,
        major: i32,
        minor: i32,
    },
    #[error(
        "kernels must be compiled, but NVRTC was not found. Looked for: {}. Install the CUDA toolkit or \
         `pip install nvidia-cuda-nvrtc`, name its folder in the loader's path (LD_LIBRARY_PATH), or give --kernels a folder \
         that `carat kernels build` has made on another machine; --backend cpu needs none", .looked.join(", ")
    )]
    NoNvrtc { looked: Vec<String> },
    #[error(
        "kernel {kernel} for {architecture} is not in {}, and NVRTC, which could compile it, was not found. `carat kernels \
         build` of this version, for this architecture, makes those of all published models; a model of other shapes needs \
         NVRTC (`pip install nvidia-cuda-nvrtc`), and --backend cpu needs neither", .folder.display()
    )]
    NotBuiltAhead {
        kernel: String,
        architecture: String,
        folder: PathBuf,
    },
    #[error(
        "cuBLASLt was not found, so prompts are computed by Carat's own kernels, which are slower on this card. Looked for: {}. \
         Install the CUDA toolkit or `pip install nvidia-cublas`, or name its folder in the loader's path (LD_LIBRARY_PATH)",
        .looked.join(", ")
    )]
    NoCublasLt { looked: Vec<String> },
    #[error("cuBLASLt, {what}: {problem}")]
    CublasLt { what: String, problem: String },
    #[error(
        "NVRTC {}.{} does not know the architecture {architecture}; a newer one does. It knows: {}",
        .version.0, .version.1, .known.join(" ")
    )]
    UnknownArchitecture {
        architecture: String,
        version: (i32, i32),
        known: Vec<String>,
    },
    #[error("`{0}` is not an architecture such as sm_80, sm_89 or sm_90a")]
    NotAnArchitecture(String),
    #[error("kernel {kernel} does not compile: {problem}\n{log}")]
    Compile {
        kernel: String,
        problem: String,
        log: String,
    },
    #[error(
        "kernel {kernel} was compiled but does not load: {:?}. An older compiler or a newer driver may do: this one's images \
         may be too new for the driver", .problem.0
    )]
    Load {
        kernel: String,
        problem: DriverError,
    },
    #[error("there is no home folder to keep choices in; HOME names one")]
    NoCache,
    #[error("{}: {problem}", .path.display())]
    File { path: PathBuf, problem: io::Error },
    #[error("{what}: {:?}", .problem.0)]
    Driver { what: String, problem: DriverError },
    #[error(
        "the card stopped working, {what}: {:?}. Start again; if it fails again, the system's log may say why, and --backend cpu \
         computes without it", .problem.0
    )]
    Lost { what: String, problem: DriverError },
    #[error("no thread can be started to compute beside the card: {problem}")]
    HostThread { problem: io::Error },
    #[error(
        "the CPU failed in its part of the work. Start again; with `cpu 0` in the file of --place the card does without it"
    )]
    HostSteps,
    #[error(
        "a limit of {} MiB of device memory leaves nothing for a model: the driver takes {} MiB of it for itself, and {} more are kept back for it; allow more",
        limit_bytes >> 20, driver_bytes >> 20, kept_back_bytes >> 20
    )]
    LimitTooLow {
        limit_bytes: u64,
        driver_bytes: u64,
        kept_back_bytes: u64,
    },
    #[error("{needed_bytes} bytes of device memory needed for {purpose}, {free_bytes} free")]
    OutOfMemory {
        purpose: String,
        needed_bytes: u64,
        free_bytes: u64,
    },
    #[error(
        "{bytes} bytes of this machine's memory cannot be page-locked for {purpose} ({problem}): close other programs, raise the limit of locked memory (`ulimit -l`), or take a smaller quantization"
    )]
    HostMemory {
        purpose: &'static str,
        bytes: usize,
        problem: DriverError,
    },
}

/// The driver's number as people write it: 12080 is 12.8.
fn version(number: i32) -> String {
    format!("{}.{}", number / 1000, number % 1000 / 10)
}

impl CudaError {
    pub(crate) fn driver(what: impl Into<String>) -> impl FnOnce(DriverError) -> CudaError {
        move |problem| {
            let what = what.into();
            if is_final(problem) {
                CudaError::Lost { what, problem }
            } else {
                CudaError::Driver { what, problem }
            }
        }
    }
}

/// Whether every later call will fail, too: a kernel went wrong, or the card did. Only a new process can go on.
fn is_final(problem: DriverError) -> bool {
    use CUresult as E;
    matches!(
        problem.0,
        E::CUDA_ERROR_DEVICE_UNAVAILABLE
            | E::CUDA_ERROR_ECC_UNCORRECTABLE
            | E::CUDA_ERROR_NVLINK_UNCORRECTABLE
            | E::CUDA_ERROR_ILLEGAL_ADDRESS
            | E::CUDA_ERROR_LAUNCH_TIMEOUT
            | E::CUDA_ERROR_CONTEXT_IS_DESTROYED
            | E::CUDA_ERROR_ASSERT
            | E::CUDA_ERROR_HARDWARE_STACK_ERROR
            | E::CUDA_ERROR_ILLEGAL_INSTRUCTION
            | E::CUDA_ERROR_MISALIGNED_ADDRESS
            | E::CUDA_ERROR_INVALID_ADDRESS_SPACE
            | E::CUDA_ERROR_INVALID_PC
            | E::CUDA_ERROR_LAUNCH_FAILED
    )
}

impl From<CudaError> for BackendError {
    fn from(error: CudaError) -> BackendError {
        match error {
            CudaError::OutOfMemory {
                needed_bytes,
                free_bytes,
                ..
            } => BackendError::OutOfMemory {
                needed_bytes,
                free_bytes,
            },
            other => BackendError::Device(Box::new(other)),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn errors_say_what_was_found_and_the_way_out() {
        let old = CudaError::DriverTooOld {
            found: 11040,
            needed: 12000,
        };
        assert_eq!(
            old.to_string(),
            "the NVIDIA driver is too old: it supports CUDA 11.4, Carat needs 12.0 or newer. Update the driver"
        );
        let none = CudaError::NoDevice { index: 1, count: 0 };
        assert_eq!(
            none.to_string(),
            "there is no CUDA device 1: the driver sees no card"
        );
        let two = CudaError::NoDevice { index: 2, count: 2 };
        assert!(two.to_string().ends_with("sees 2, numbered from 0"));
    }

    #[test]
    fn a_lost_card_is_told_apart_from_a_call_that_failed() {
        let error = |code| CudaError::driver("running a batch")(DriverError(code)).to_string();
        assert_eq!(
            error(CUresult::CUDA_ERROR_INVALID_VALUE),
            "running a batch: CUDA_ERROR_INVALID_VALUE"
        );
        let lost = error(CUresult::CUDA_ERROR_LAUNCH_FAILED);
        assert!(
            lost.starts_with("the card stopped working, running a batch: CUDA_ERROR_LAUNCH_FAILED"),
            "{lost}"
        );
        assert!(lost.contains("--backend cpu"), "{lost}");
    }

    #[test]
    fn memory_errors_keep_their_numbers_across_the_border() {
        let error = CudaError::OutOfMemory {
            purpose: "weights".into(),
            needed_bytes: 10,
            free_bytes: 7,
        };
        assert!(matches!(
            BackendError::from(error),
            BackendError::OutOfMemory {
                needed_bytes: 10,
                free_bytes: 7
            }
        ));
    }
}
