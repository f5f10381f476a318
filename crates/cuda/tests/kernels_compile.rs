//! Every kernel compiles for every supported architecture without a remark, wherever NVRTC is: it needs no card. A spilled
//! register is a remark. One architecture is left to those who ask for it.
//!
//! NVRTC is looked for in the usual folders, in the folder `NVRTC_DIR` names, and in `target/nvrtc`. Where there is none, the
//! cases are listed and marked ignored.

use std::path::PathBuf;

use carat_cuda::{Architecture, BuiltKernel, CudaError, build_kernels};
use libtest_mimic::{Arguments, Failed, Trial};

const ARCHITECTURES: [&str; 3] = ["sm_80", "sm_89", "sm_90a"];
/// Takes the code of `sm_80`, instruction for instruction, and as long to compile: shown as ignored, for `--ignored` to run.
const ON_DEMAND: &str = "sm_89";

fn main() {
    let arguments = Arguments::from_args();
    let found = compile(&[]).is_ok();
    let trial = |name: &'static str| {
        Trial::test(format!("compile/{name}"), move || {
            let built = compile(&[name])?;
            if built.is_empty() {
                return Err(Failed::from("nothing was compiled"));
            }
            match built.iter().find(|kernel| !kernel.remarks.is_empty()) {
                Some(kernel) => Err(Failed::from(format!("{}: {}", kernel.name, kernel.remarks))),
                None => Ok(()),
            }
        })
        .with_ignored_flag(!found || name == ON_DEMAND)
    };
    let trials = ARCHITECTURES.map(trial).into();
    libtest_mimic::run(&arguments, trials).exit();
}

/// Compiles into a folder that is thrown away. For no architecture it only looks for NVRTC.
fn compile(names: &[&str]) -> Result<Vec<BuiltKernel>, CudaError> {
    let architectures: Result<Vec<Architecture>, _> = names.iter().map(|n| n.parse()).collect();
    let folder = tempfile::tempdir().expect("a folder can be made");
    build_kernels(&architectures?, folder.path(), &library_dirs())
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
