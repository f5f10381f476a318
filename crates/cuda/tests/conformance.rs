//! Every step in every format against the reference, fused and in single steps.

mod harness;

use std::sync::Arc;

use carat_cuda::{CudaBackend, Fusion};
use carat_testkit::cases;
use libtest_mimic::{Failed, Trial};

fn main() {
    let single = harness::open(|config| config.fusion = Fusion::Off);
    let fused = harness::open(|config| config.fusion = Fusion::On);
    let mut trials = Vec::new();
    for (name, backend) in [("single", &single), ("fused", &fused)] {
        for case in cases::all() {
            trials.push(trial(name, backend.as_ref().ok().cloned(), case));
        }
    }
    harness::run(single.and(fused).map(drop), trials);
}

fn trial(how: &str, backend: Option<Arc<CudaBackend>>, case: cases::Case) -> Trial {
    let ignored = backend.is_none();
    Trial::test(format!("{how}/{}", case.name), move || {
        let backend = backend.ok_or("no card")?;
        case.check(backend.as_ref()).map_err(Failed::from)
    })
    .with_ignored_flag(ignored)
}
