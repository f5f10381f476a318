//! What keeps CUDA from being used: one variant for each thing a person can do about it.

use std::{io, path::PathBuf};

use carat_model::backend::BackendError;
use cudarc::driver::DriverError;

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
    #[error("the NVIDIA driver did not start: {0}")]
    DriverFailed(#[source] DriverError),
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
         `pip install nvidia-cuda-nvrtc`, name its folder in the settings, or use kernels built ahead with \
         `carat kernels build`", .looked.join(", ")
    )]
    NoNvrtc { looked: Vec<String> },
    #[error(
        "cuBLASLt was not found. Looked for: {}. Install the CUDA toolkit or `pip install nvidia-cublas`, name its folder in \
         the settings, or choose the portable kernels", .looked.join(", ")
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
    #[error("kernel {kernel} was compiled but does not load: {source}")]
    Load { kernel: String, source: DriverError },
    #[error("{}: {source}", .path.display())]
    File { path: PathBuf, source: io::Error },
    #[error("{what}: {source}")]
    Driver { what: String, source: DriverError },
    #[error("{needed_bytes} bytes of device memory needed for {purpose}, {free_bytes} free")]
    OutOfMemory {
        purpose: String,
        needed_bytes: u64,
        free_bytes: u64,
    },
}

/// The driver's number as people write it: 12080 is 12.8.
fn version(number: i32) -> String {
    format!("{}.{}", number / 1000, number % 1000 / 10)
}

impl CudaError {
    pub(crate) fn driver(what: impl Into<String>) -> impl FnOnce(DriverError) -> CudaError {
        move |source| CudaError::Driver {
            what: what.into(),
            source,
        }
    }
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
