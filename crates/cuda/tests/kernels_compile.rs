//! Every kernel compiles without a remark, wherever NVRTC is: it needs no card. A spilled register is a remark. Kernels that
//! architectures share are compiled for one of them; for the others they are left to those who ask (`--ignored`).
//!
//! NVRTC is looked for in the usual folders, in the folder `NVRTC_DIR` names, and in `target/nvrtc`. Where there is none, the
//! cases are listed and marked ignored.

use std::path::PathBuf;

use carat_cuda::{Architecture, BuiltKernel, CudaError, KernelSet, build_kernels};
use libtest_mimic::{Arguments, Failed, Trial};

struct Case {
    architecture: &'static str,
    set: KernelSet,
    on_demand: bool,
}

const CASES: [Case; 4] = [
    Case {
        architecture: "sm_80",
        set: KernelSet::All,
        on_demand: false,
    },
    Case {
        architecture: "sm_90a",
        set: KernelSet::Own,
        on_demand: false,
    },
    // The code of `sm_80`, instruction for instruction.
    Case {
        architecture: "sm_89",
        set: KernelSet::All,
        on_demand: true,
    },
    Case {
        architecture: "sm_90a",
        set: KernelSet::All,
        on_demand: true,
    },
];

fn main() {
    let arguments = Arguments::from_args();
    let found = compile(&[], KernelSet::Own).is_ok();
    let trial = |case: Case| {
        let set = match case.set {
            KernelSet::All => "all",
            KernelSet::Own => "own",
        };
        Trial::test(format!("compile/{}/{set}", case.architecture), move || {
            let built = compile(&[case.architecture], case.set)?;
            if built.is_empty() {
                return Err(Failed::from("nothing was compiled"));
            }
            match built.iter().find(|kernel| !kernel.remarks.is_empty()) {
                Some(kernel) => Err(Failed::from(format!("{}: {}", kernel.name, kernel.remarks))),
                None => Ok(()),
            }
        })
        .with_ignored_flag(!found || case.on_demand)
    };
    let trials = CASES.map(trial).into();
    libtest_mimic::run(&arguments, trials).exit();
}

/// Compiles into a folder that is thrown away. For no architecture it only looks for NVRTC.
fn compile(names: &[&str], set: KernelSet) -> Result<Vec<BuiltKernel>, CudaError> {
    let architectures: Result<Vec<Architecture>, _> = names.iter().map(|n| n.parse()).collect();
    let folder = tempfile::tempdir().expect("a folder can be made");
    build_kernels(&architectures?, set, folder.path(), &library_dirs())
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
