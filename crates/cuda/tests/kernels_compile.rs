//! Kernels compile without a remark, wherever NVRTC is: it needs no card. A spilled register is a remark. Of kernels that differ
//! in their constants as many are compiled as have every value of each, and those that architectures share for one of them; every
//! one for every architecture is left to those who ask (`--ignored`). Machine code is searched for an instruction that no card runs,
//! which the compiler makes of some copies (`shared_place` in `lib/ptx.cuh`).
//!
//! NVRTC is looked for in the usual folders, in the folder `NVRTC_DIR` names, and in `target/nvrtc`. Where there is none, the
//! cases are listed and marked ignored.

use std::{fs, path::PathBuf};

use carat_cuda::{
    Architecture, BuiltKernel, Coverage, CudaError, KernelChoice, KernelSet, build_kernels,
};
use libtest_mimic::{Arguments, Failed, Trial};

struct Case {
    architecture: &'static str,
    choice: KernelChoice<'static>,
}

const fn case(architecture: &'static str, set: KernelSet, coverage: Coverage) -> Case {
    Case {
        architecture,
        choice: KernelChoice {
            set,
            coverage,
            named: "",
        },
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
    let found = compile(&[], nothing.choice).is_ok();
    let trial = |case: Case| {
        let (set, on_demand) = match (case.choice.set, case.choice.coverage) {
            (_, Coverage::Every) => ("every", true),
            (KernelSet::All, Coverage::EachValue) => ("each_value", false),
            (KernelSet::Own, Coverage::EachValue) => ("own", false),
        };
        Trial::test(format!("compile/{}/{set}", case.architecture), move || {
            let built = compile(&[case.architecture], case.choice)?;
            if built.is_empty() {
                return Err(Failed::from("nothing was compiled"));
            }
            let mut problems = Vec::new();
            for (BuiltKernel { name, remarks, .. }, file) in &built {
                if !remarks.is_empty() {
                    problems.push(format!("{name}: {remarks}"));
                }
                if name.starts_with("gemv.") && copies_to_uniform_places(file) {
                    problems.push(format!("{name} copies to a uniform place"));
                }
            }
            if problems.is_empty() {
                Ok(())
            } else {
                Err(Failed::from(problems.join("\n")))
            }
        })
        .with_ignored_flag(!found || on_demand)
    };
    let mut trials: Vec<Trial> = CASES.map(trial).into();
    let named = Trial::test("compile/named", named_kernels).with_ignored_flag(!found);
    trials.push(named);
    libtest_mimic::run(&arguments, trials).exit();
}

/// Those whose name holds a text are compiled, and no others.
fn named_kernels() -> Result<(), Failed> {
    let choice = |named| KernelChoice {
        set: KernelSet::All,
        coverage: Coverage::Every,
        named,
    };
    let built = compile(&["sm_90a"], choice("select_sampled"))?;
    let names: Vec<&str> = (built.iter())
        .map(|(kernel, _)| kernel.name.as_str())
        .collect();
    assert_eq!(names, ["select_sampled"]);
    assert!(compile(&["sm_90a"], choice("no such kernel"))?.is_empty());
    Ok(())
}

/// Compiles into a folder that is thrown away, and gives the files' bytes. For no architecture it only looks for NVRTC.
fn compile(
    names: &[&str],
    choice: KernelChoice<'_>,
) -> Result<Vec<(BuiltKernel, Vec<u8>)>, CudaError> {
    let architectures: Result<Vec<Architecture>, _> = names.iter().map(|n| n.parse()).collect();
    let folder = tempfile::tempdir().expect("a folder can be made");
    let built = build_kernels(&architectures?, choice, folder.path(), &library_dirs())?;
    let with_bytes = |kernel: BuiltKernel| {
        let file = fs::read(&kernel.file).expect("it was just written");
        (kernel, file)
    };
    Ok(built.into_iter().map(with_bytes).collect())
}

/// Whether a copy to shared memory names its place by a register of the warp: low bits of its 16 bytes. None did when policies came
/// to these copies, and with a policy such a copy is none.
fn copies_to_uniform_places(file: &[u8]) -> bool {
    let texts = texts(file).expect("an image is ELF");
    assert!(!texts.is_empty(), "an image has code");
    let instructions = texts.into_iter().flat_map(|text| text.chunks_exact(16));
    instructions
        .into_iter()
        .any(|bytes| u16::from_le_bytes([bytes[0], bytes[1]]) & 0xfff == 0xdae)
}

/// Contents of the sections of an ELF image, behind whatever head its file has, that hold functions.
fn texts(file: &[u8]) -> Option<Vec<&[u8]>> {
    let start = file.windows(4).position(|bytes| bytes == b"\x7fELF")?;
    let image = &file[start..];
    let number = |at: usize, bytes: usize| -> Option<usize> {
        let mut value = [0; 8];
        value[..bytes].copy_from_slice(image.get(at..at + bytes)?);
        usize::try_from(u64::from_le_bytes(value)).ok()
    };
    let (headers, size, count) = (number(0x28, 8)?, number(0x3a, 2)?, number(0x3c, 2)?);
    let section = |index: usize| headers + index * size;
    let names = number(section(number(0x3e, 2)?) + 0x18, 8)?;
    let mut texts = Vec::new();
    for at in (0..count).map(section) {
        let name = &image[names + number(at, 4)?..];
        if name.starts_with(b".text.") {
            let (from, bytes) = (number(at + 0x18, 8)?, number(at + 0x20, 8)?);
            texts.push(image.get(from..from + bytes)?);
        }
    }
    Some(texts)
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
