//! Kernels compile without a remark, wherever NVRTC is: it needs no card. A spilled register is a remark. Of kernels that differ
//! in their constants as many are compiled as have every value of each, and those that architectures share for one of them; every
//! one for every architecture is left to those who ask (`--ignored`).
//!
//! NVRTC is looked for in the usual folders, in the folder `NVRTC_DIR` names, and in `target/nvrtc`. Where there is none, the
//! cases are listed and marked ignored.

use std::path::PathBuf;

use carat_cuda::{Architecture, BuiltKernel, Coverage, CudaError, KernelSet, build_kernels};
use libtest_mimic::{Arguments, Failed, Trial};

struct Case {
    architecture: &'static str,
    set: KernelSet,
    coverage: Coverage,
}

const fn case(architecture: &'static str, set: KernelSet, coverage: Coverage) -> Case {
    Case {
        architecture,
        set,
        coverage,
    }
}

const CASES: [Case; 5] = [
    case("sm_80", KernelSet::All, Coverage::EachValue),
    case("sm_90a", KernelSet::Own, Coverage::EachValue),
    case("sm_80", KernelSet::All, Coverage::Every),
    case("sm_89", KernelSet::All, Coverage::Every),
    case("sm_90a", KernelSet::All, Coverage::Every),
];

fn main() {
    let arguments = Arguments::from_args();
    let nothing = case("", KernelSet::Own, Coverage::EachValue);
    let found = compile(&[], &nothing).is_ok();
    let trial = |case: Case| {
        let (set, on_demand) = match (case.set, case.coverage) {
            (_, Coverage::Every) => ("every", true),
            (KernelSet::All, Coverage::EachValue) => ("each_value", false),
            (KernelSet::Own, Coverage::EachValue) => ("own", false),
        };
        Trial::test(format!("compile/{}/{set}", case.architecture), move || {
            let built = compile(&[case.architecture], &case)?;
            if built.is_empty() {
                return Err(Failed::from("nothing was compiled"));
            }
            match built.iter().find(|kernel| !kernel.remarks.is_empty()) {
                Some(kernel) => Err(Failed::from(format!("{}: {}", kernel.name, kernel.remarks))),
                None => Ok(()),
            }
        })
        .with_ignored_flag(!found || on_demand)
    };
    let trials = CASES.map(trial).into();
    libtest_mimic::run(&arguments, trials).exit();
}

/// Compiles into a folder that is thrown away. For no architecture it only looks for NVRTC.
fn compile(names: &[&str], case: &Case) -> Result<Vec<BuiltKernel>, CudaError> {
    let architectures: Result<Vec<Architecture>, _> = names.iter().map(|n| n.parse()).collect();
    let folder = tempfile::tempdir().expect("a folder can be made");
    let kernels = (case.set, case.coverage);
    build_kernels(&architectures?, kernels, folder.path(), &library_dirs())
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
