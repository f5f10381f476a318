//! Every kernel compiles for every supported architecture, wherever NVRTC is: it needs no card.
//!
//! NVRTC is looked for in the usual places, in the folder `NVRTC_DIR` names, and in `target/nvrtc`. Where there is none, the
//! cases are listed and marked ignored.

use std::path::PathBuf;

use carat_cuda::{Architecture, CudaError, build_kernels};
use libtest_mimic::{Arguments, Failed, Trial};

const ARCHITECTURES: [&str; 3] = ["sm_80", "sm_89", "sm_90a"];

fn main() {
    let arguments = Arguments::from_args();
    let found = compile(&[]).is_ok();
    let trial = |name: &'static str| {
        Trial::test(format!("compile/{name}"), move || match compile(&[name]) {
            Ok(0) => Err(Failed::from("nothing was compiled")),
            Ok(_) => Ok(()),
            Err(error) => Err(Failed::from(error.to_string())),
        })
        .with_ignored_flag(!found)
    };
    let trials = ARCHITECTURES.map(trial).into();
    libtest_mimic::run(&arguments, trials).exit();
}

/// Compiles into a folder that is thrown away. For no architecture it only looks for NVRTC.
fn compile(names: &[&str]) -> Result<usize, CudaError> {
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
