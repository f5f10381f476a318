//! The harness of the device tests: finds a card, and says so when there is none.
//!
//! Without a card every case is listed and marked ignored. `GPU_REQUIRED=1` turns a missing card into a failure, so that a
//! machine that should have one cannot pass by skipping. `NVRTC_DIR` names a folder with the compiler.

use std::{path::PathBuf, sync::Arc};

use carat_cuda::{Alternative, Alternatives, CudaBackend, CudaConfig};
use libtest_mimic::{Arguments, Failed, Trial};

/// Opens the card with the given settings.
pub(crate) fn open(change: impl FnOnce(&mut CudaConfig)) -> Result<Arc<CudaBackend>, String> {
    let mut config = CudaConfig {
        cache_dir: Some(std::env::temp_dir().join("carat-test-kernels")),
        library_dirs: library_dirs(),
        alternatives: Alternatives::default().with(Alternative::PackedFrom(0)),
        ..CudaConfig::default()
    };
    change(&mut config);
    CudaBackend::new(config)
        .map(Arc::new)
        .map_err(|error| error.to_string())
}

/// Runs the cases one after another if there is a card. `cases` gets the card, or why there is none.
pub(crate) fn run(opened: Result<(), String>, mut trials: Vec<Trial>) {
    let mut arguments = Arguments::from_args();
    // One stream, and a device that is busy with one case at a time: times and failures belong to their case.
    arguments.test_threads = Some(1);
    if let Err(problem) = opened {
        if required() {
            // Alone and whatever the filter: nothing may look as if it had passed.
            (arguments.filter, arguments.exact) = (None, false);
            trials = vec![Trial::test("a card is required", move || {
                Err(Failed::from(problem))
            })];
        } else if !arguments.list {
            #[expect(clippy::print_stderr, reason = "why everything is skipped")]
            {
                eprintln!("no CUDA: {problem}");
            }
        }
    }
    libtest_mimic::run(&arguments, trials).exit();
}

#[expect(
    clippy::disallowed_methods,
    reason = "settings of the test harness, not of the program"
)]
pub(crate) fn required() -> bool {
    std::env::var_os("GPU_REQUIRED").is_some_and(|v| v == "1")
}

#[expect(
    clippy::disallowed_methods,
    reason = "settings of the test harness, not of the program"
)]
fn library_dirs() -> Vec<PathBuf> {
    let given = std::env::var_os("NVRTC_DIR").map(PathBuf::from);
    let built = PathBuf::from(concat!(env!("CARGO_MANIFEST_DIR"), "/../../target/nvrtc"));
    given.into_iter().chain([built]).collect()
}
