//! Every step in every format against the reference by its plain kernel, and products by the fast ones.
//!
//! Plain kernels are held to the bounds of the cases. The fast ones take a step only together with its neighbours, so of a
//! case, which is one step, they have a product at the most: matrices and experts, in batches of both classes and on both
//! tiers. What is fused around products is checked bit by bit beside each kernel, and in whole models by `golden`.

mod harness;

use std::sync::Arc;

use carat_cuda::{CudaBackend, Fusion, Tier};
use carat_testkit::{
    cases::{self, Bound, Case},
    contract::{self, Promise},
};
use libtest_mimic::{Failed, Trial};

fn main() {
    let plain = harness::open(|config| config.fusion = Fusion::Off);
    let best = harness::open(|config| config.tier = Tier::Best);
    let portable = harness::open(|config| config.tier = Tier::Portable);
    let mut trials = Vec::new();
    for case in cases::all().into_iter().chain(cases::eight_bit_kv()) {
        trials.push(trial("plain", plain.as_ref().ok(), case));
    }
    for (name, backend) in [("best", &best), ("portable", &portable)] {
        for case in cases::all().into_iter().filter_map(fast) {
            trials.push(trial(name, backend.as_ref().ok(), case));
        }
    }
    for (name, backend) in [("plain", &plain), ("best", &best), ("portable", &portable)] {
        for promise in contract::ALL {
            trials.push(promised(name, backend.as_ref().ok(), promise));
        }
    }
    harness::run(plain.and(best).and(portable).map(drop), trials);
}

fn promised(how: &str, backend: Option<&Arc<CudaBackend>>, promise: Promise) -> Trial {
    let backend = backend.cloned();
    let ignored = backend.is_none();
    Trial::test(format!("{how}/{}", promise.name), move || {
        let backend = backend.ok_or("no card")?;
        promise.check(backend.as_ref()).map_err(Failed::from)
    })
    .with_ignored_flag(ignored)
}

/// A case as the fast kernels are to pass it, if it is one for them. Rows from one to eight share a kernel, so of these the
/// first and the odd one are enough.
fn fast(mut case: Case) -> Option<Case> {
    let (step, rows) = case.name.split_once('/')?;
    let rows: usize = rows.rsplit_once("rows")?.1.parse().ok()?;
    let wanted = ["linear", "experts"].contains(&step) && ![2, 3].contains(&rows);
    // Matrices of floats are multiplied in f16 then.
    if rows > 8 && case.bound == Bound::Float {
        case.bound = Bound::HalfKv;
    }
    wanted.then_some(case)
}

fn trial(how: &str, backend: Option<&Arc<CudaBackend>>, case: Case) -> Trial {
    let backend = backend.cloned();
    let ignored = backend.is_none();
    Trial::test(format!("{how}/{}", case.name), move || {
        let backend = backend.ok_or("no card")?;
        case.check(backend.as_ref()).map_err(Failed::from)
    })
    .with_ignored_flag(ignored)
}
