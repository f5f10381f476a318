//! Specializations of kernels to machine code for one architecture.
//!
//! A kernel is looked for among those compiled ahead, then in the cache, and is compiled if it is in neither; several are
//! compiled in parallel. Nothing here needs a card: [`build_kernels`] compiles everything for machines that have one but
//! no compiler.

use std::{
    collections::HashSet,
    fmt, mem,
    num::NonZero,
    path::{Path, PathBuf},
    str::FromStr,
    sync::Mutex,
    thread,
};

use crate::{
    config::{CudaConfig, Tier},
    device::Capability,
    error::CudaError,
    jit::{
        cache::{self, Entry},
        nvrtc::Nvrtc,
        source,
    },
    kernel::{self, Specialization},
};

/// Target architecture: `sm_80`, `sm_89`, `sm_90a`. The `a` allows what only that one generation has.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Architecture(String);

impl Architecture {
    pub(crate) fn of(capability: Capability, tier: Tier) -> Architecture {
        let Capability { major, minor } = capability;
        let own = match (tier, major) {
            (Tier::Best, 9) => "a",
            _ => "",
        };
        Architecture(format!("sm_{major}{minor}{own}"))
    }

    /// Those whose machine code it runs, the best first: an architecture runs the code of earlier ones of its generation, but for what
    /// carries an `a`.
    fn runs(&self) -> impl Iterator<Item = Architecture> {
        let first = Architecture(format!("sm_{}0", self.number() / 10));
        let other = (first != *self && !self.0.ends_with('a')).then_some(first);
        [self.clone()].into_iter().chain(other)
    }

    fn number(&self) -> i32 {
        let digits = self.0["sm_".len()..].trim_end_matches('a');
        digits.parse().expect("checked when it was made")
    }
}

impl FromStr for Architecture {
    type Err = CudaError;

    fn from_str(text: &str) -> Result<Architecture, CudaError> {
        let number = text
            .strip_prefix("sm_")
            .map(|n| n.strip_suffix('a').unwrap_or(n));
        match number {
            Some(n) if n.len() >= 2 && n.len() <= 3 && n.bytes().all(|b| b.is_ascii_digit()) => {
                Ok(Architecture(text.to_owned()))
            }
            _ => Err(CudaError::NotAnArchitecture(text.to_owned())),
        }
    }
}

impl fmt::Display for Architecture {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(&self.0)
    }
}

pub(crate) struct Compiler {
    architecture: Architecture,
    /// The error is kept until something really must be compiled.
    nvrtc: Result<Nvrtc, Vec<String>>,
    built_ahead: Option<PathBuf>,
    cache: Option<PathBuf>,
}

impl Compiler {
    pub(crate) fn new(architecture: Architecture, config: &CudaConfig) -> Compiler {
        let nvrtc = Nvrtc::find(&config.library_dirs).map_err(|error| match error {
            CudaError::NoNvrtc { looked } => looked,
            other => vec![other.to_string()],
        });
        Compiler {
            architecture,
            nvrtc,
            built_ahead: config.kernels_dir.clone(),
            cache: config.cache_dir.clone(),
        }
    }

    /// Why no kernel can be had: there is neither a compiler nor a folder of kernels built ahead.
    pub(crate) fn ready(&self) -> Result<(), CudaError> {
        match (&self.nvrtc, &self.built_ahead) {
            (Err(looked), None) => Err(CudaError::NoNvrtc {
                looked: looked.clone(),
            }),
            _ => Ok(()),
        }
    }

    /// Version of the compiler, where there is one.
    pub(crate) fn nvrtc_version(&self) -> Option<(i32, i32)> {
        self.nvrtc.as_ref().ok().map(|nvrtc| nvrtc.version)
    }

    /// Machine code of each, in order.
    pub(crate) fn images(&self, wanted: &[&Specialization]) -> Result<Vec<Vec<u8>>, CudaError> {
        in_parallel(wanted, |s| self.image(s))
    }

    fn image(&self, wanted: &Specialization) -> Result<Vec<u8>, CudaError> {
        if let Some(folder) = &self.built_ahead {
            let ahead = |architecture| cache::read(folder, &wanted.file_name(&architecture));
            if let Some(entry) = self.architecture.runs().find_map(ahead) {
                return Ok(entry.image);
            }
        }
        let file = wanted.file_name(&self.architecture);
        if let Some(folder) = &self.cache
            && let Some(entry) = cache::read(folder, &file)
            // Without a compiler there is none that could do better.
            && self.nvrtc.as_ref().map_or(true, |n| n.version == entry.version)
        {
            return Ok(entry.image);
        }
        let nvrtc = self
            .nvrtc
            .as_ref()
            .map_err(|looked| match &self.built_ahead {
                Some(folder) => CudaError::NotBuiltAhead {
                    kernel: wanted.to_string(),
                    architecture: self.architecture.0.clone(),
                    folder: folder.clone(),
                },
                None => CudaError::NoNvrtc {
                    looked: looked.clone(),
                },
            })?;
        let (entry, remarks) = compile(nvrtc, &self.architecture, wanted, Lines::Kept)?;
        if !remarks.is_empty() {
            tracing::warn!(kernel = %wanted, remarks, "the compiler remarks");
        }
        if let Some(folder) = &self.cache
            && let Err((path, problem)) = cache::write(folder, &file, &entry)
        {
            // Slower next time, not wrong.
            tracing::warn!(path = %path.display(), %problem, "a compiled kernel is not kept");
        }
        Ok(entry.image)
    }
}

/// Whether machine code carries names of files and lines, for profiles and sanitizer reports. They are two thirds of it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Lines {
    Kept,
    Dropped,
}

impl Specialization {
    /// Name of its file of machine code, with lines or without.
    fn file_name(&self, architecture: &Architecture) -> String {
        let (source, options) = self.text(architecture);
        cache::file_name(self.kernel, &architecture.0, &source, &options)
    }

    /// The text to compile and the options to do so with.
    fn text(&self, architecture: &Architecture) -> (String, Vec<String>) {
        let mut options = vec![
            format!("--gpu-architecture={architecture}"),
            "--std=c++17".to_owned(),
            "--ptxas-options=--warn-on-spills".to_owned(),
            format!("-DPARAMS_BYTES={}", self.params_bytes),
        ];
        let constants = self.constants.iter();
        options.extend(constants.map(|(name, value)| format!("-D{name}={value}")));
        (source::joined(self.kernel), options)
    }
}

/// The kernel and the compiler's remarks.
fn compile(
    nvrtc: &Nvrtc,
    architecture: &Architecture,
    wanted: &Specialization,
    lines: Lines,
) -> Result<(Entry, String), CudaError> {
    let (source, mut options) = wanted.text(architecture);
    if lines == Lines::Kept {
        options.push("--generate-line-info".to_owned());
    }
    let known = nvrtc.architectures();
    if !known.contains(&architecture.number()) {
        return Err(CudaError::UnknownArchitecture {
            architecture: architecture.to_string(),
            version: nvrtc.version,
            known: known.iter().map(|n| format!("sm_{n}")).collect(),
        });
    }
    let name = format!("{}.cu", wanted.kernel);
    match nvrtc.compile(&name, &source, &options) {
        Ok((image, remarks)) => {
            tracing::debug!(kernel = %wanted, bytes = image.len(), "compiled");
            let version = nvrtc.version;
            Ok((Entry { image, version }, remarks))
        }
        Err((problem, log)) => Err(CudaError::Compile {
            kernel: wanted.to_string(),
            problem,
            log,
        }),
    }
}

/// A kernel compiled ahead.
#[derive(Clone, Debug)]
pub struct BuiltKernel {
    /// Its name and constants, such as `linear.q4_0`.
    pub name: String,
    pub architecture: Architecture,
    pub file: PathBuf,
    /// The compiler's remarks, such as that registers spill; empty if all is well.
    pub remarks: String,
}

/// Kernels of an architecture that are compiled ahead.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum KernelSet {
    All,
    /// Those that no other architecture has.
    Own,
}

/// How many of the kernels that differ in constants alone are compiled.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Coverage {
    Every,
    /// Enough that every value of each constant occurs.
    EachValue,
}

/// Which kernels are compiled.
#[derive(Clone, Copy, Debug)]
pub struct KernelChoice<'a> {
    pub set: KernelSet,
    pub coverage: Coverage,
    /// Those whose names hold this, which all do if it is empty.
    pub named: &'a str,
}

/// Compiles kernels for every given architecture into a folder that [`CudaConfig::kernels_dir`] may name.
pub fn build_kernels(
    architectures: &[Architecture],
    choice: KernelChoice<'_>,
    folder: &Path,
    library_dirs: &[PathBuf],
) -> Result<Vec<BuiltKernel>, CudaError> {
    let nvrtc = Nvrtc::find(library_dirs)?;
    let mut shared = match choice.set {
        KernelSet::All => kernel::catalog::all(),
        KernelSet::Own => Vec::new(),
    };
    let mut hopper = kernel::catalog::hopper();
    for kernels in [&mut shared, &mut hopper] {
        kernels.retain(|kernel| kernel.to_string().contains(choice.named));
        if choice.coverage == Coverage::EachValue {
            *kernels = each_value(mem::take(kernels));
        }
    }
    let pairs = architectures.iter().flat_map(|a| {
        let own = if a.0 == "sm_90a" { &hopper[..] } else { &[] };
        shared.iter().chain(own).map(move |s| (a, s))
    });
    let pairs: Vec<(&Architecture, &Specialization)> = pairs.collect();
    in_parallel(&pairs, |(architecture, wanted)| {
        let file = wanted.file_name(architecture);
        let (entry, remarks) = compile(&nvrtc, architecture, wanted, Lines::Dropped)?;
        cache::write(folder, &file, &entry)
            .map_err(|(path, problem)| CudaError::File { path, problem })?;
        Ok(BuiltKernel {
            name: wanted.to_string(),
            architecture: (*architecture).clone(),
            file: folder.join(file),
            remarks,
        })
    })
}

/// Leaves out what has no value of any constant that those before it lack.
fn each_value(specializations: Vec<Specialization>) -> Vec<Specialization> {
    let mut seen = HashSet::new();
    let mut has_new = |specialization: &Specialization| {
        let kernel = specialization.kernel;
        let mut is_new = seen.insert((kernel, None));
        for constant in &specialization.constants {
            is_new |= seen.insert((kernel, Some(constant.clone())));
        }
        is_new
    };
    let mut kept = specializations;
    kept.retain(|specialization| has_new(specialization));
    kept
}

/// Applies `work` to all items on as many threads as there are processors; results in order, or the first error.
fn in_parallel<T: Sync, R: Send>(
    items: &[T],
    work: impl Fn(&T) -> Result<R, CudaError> + Sync,
) -> Result<Vec<R>, CudaError> {
    let next = Mutex::new(0..items.len());
    let done = Mutex::new(Vec::new());
    let threads = thread::available_parallelism()
        .map_or(1, NonZero::get)
        .min(items.len());
    thread::scope(|scope| {
        for _ in 0..threads {
            scope.spawn(|| {
                loop {
                    // In a statement of its own: `while let` would hold the lock while it works.
                    let taken = next.lock().expect("no worker panics").next();
                    let Some(i) = taken else { break };
                    let result = work(&items[i]);
                    done.lock().expect("no worker panics").push((i, result));
                }
            });
        }
    });
    let mut done = done.into_inner().expect("no worker panicked");
    done.sort_by_key(|(i, _)| *i);
    done.into_iter().map(|(_, result)| result).collect()
}

#[cfg(test)]
mod tests {
    use std::{
        sync::atomic::{AtomicUsize, Ordering},
        time::{Duration, Instant},
    };

    use super::*;

    #[test]
    fn a_few_kernels_have_every_value_of_each_constant() {
        let values = |all: &[Specialization]| -> HashSet<(&str, (&str, String))> {
            let each = |s: &Specialization| {
                let kernel = s.kernel;
                let constants = s.constants.clone().into_iter();
                constants.map(move |constant| (kernel, constant))
            };
            all.iter().flat_map(each).collect()
        };
        let all = kernel::catalog::all();
        let few = each_value(all.clone());
        assert_eq!(values(&few), values(&all));
        let names =
            |all: &[Specialization]| -> HashSet<&str> { all.iter().map(|s| s.kernel).collect() };
        assert_eq!(names(&few), names(&all));
        let gemms = |all: &[Specialization]| all.iter().filter(|s| s.kernel == "gemm").count();
        let (few, all) = (gemms(&few), gemms(&all));
        assert!(2 * few < all, "{few} of {all}");
    }

    #[test]
    fn code_of_the_first_of_a_generation_runs_on_all_of_it() {
        let runs = |name: &str| -> Vec<String> {
            let architecture: Architecture = name.parse().unwrap();
            architecture.runs().map(|a| a.to_string()).collect()
        };
        assert_eq!(runs("sm_80"), ["sm_80"]);
        assert_eq!(runs("sm_89"), ["sm_89", "sm_80"]);
        assert_eq!(runs("sm_90a"), ["sm_90a"]);
        assert_eq!(runs("sm_120"), ["sm_120"]);
        assert_eq!(runs("sm_121"), ["sm_121", "sm_120"]);
    }

    #[test]
    fn kernels_built_ahead_serve_all_of_a_generation_and_no_other() {
        let folder = tempfile::tempdir().unwrap();
        let wanted = &kernel::catalog::all()[0];
        let ampere: Architecture = "sm_80".parse().unwrap();
        let entry = Entry {
            image: vec![1, 2, 3],
            version: (13, 0),
        };
        cache::write(folder.path(), &wanted.file_name(&ampere), &entry).unwrap();
        let compiler = |name: &str| Compiler {
            architecture: name.parse().unwrap(),
            nvrtc: Err(vec!["nowhere".to_owned()]),
            built_ahead: Some(folder.path().to_owned()),
            cache: None,
        };
        for name in ["sm_80", "sm_86", "sm_89"] {
            assert_eq!(compiler(name).image(wanted).unwrap(), entry.image, "{name}");
        }
        for name in ["sm_90", "sm_90a", "sm_120"] {
            let error = compiler(name).image(wanted).unwrap_err();
            let CudaError::NotBuiltAhead { architecture, .. } = error else {
                panic!("{error}");
            };
            assert_eq!(architecture, name);
        }
    }

    #[test]
    fn architectures_are_checked() {
        for good in ["sm_80", "sm_89", "sm_90a", "sm_120"] {
            assert_eq!(good.parse::<Architecture>().unwrap().to_string(), good);
        }
        for bad in ["80", "sm_", "sm_9", "sm_9x", "compute_80", "sm_90ab"] {
            assert!(bad.parse::<Architecture>().is_err(), "{bad}");
        }
    }

    #[test]
    fn a_forced_tier_leaves_out_what_only_one_generation_has() {
        let hopper = Capability { major: 9, minor: 0 };
        let ada = Capability { major: 8, minor: 9 };
        let of = |capability, tier| Architecture::of(capability, tier).to_string();
        assert_eq!(of(hopper, Tier::Best), "sm_90a");
        assert_eq!(of(hopper, Tier::Portable), "sm_90");
        assert_eq!(of(ada, Tier::Best), "sm_89");
    }

    #[test]
    fn kernels_built_ahead_need_no_compiler() {
        let folder = tempfile::tempdir().unwrap();
        let wanted = kernel::catalog::all().remove(0);
        let mut compiler = Compiler {
            architecture: "sm_80".parse().unwrap(),
            nvrtc: Err(vec!["nowhere".to_owned()]),
            built_ahead: Some(folder.path().to_owned()),
            cache: None,
        };
        assert!(matches!(
            compiler.images(&[&wanted]),
            Err(CudaError::NotBuiltAhead { folder: asked, .. }) if asked == folder.path()
        ));
        compiler.built_ahead = None;
        assert!(matches!(
            compiler.images(&[&wanted]),
            Err(CudaError::NoNvrtc { looked }) if looked == ["nowhere"]
        ));
        compiler.built_ahead = Some(folder.path().to_owned());
        let file = wanted.file_name(&compiler.architecture);
        let entry = Entry {
            image: vec![1, 2, 3],
            version: (12, 9),
        };
        cache::write(folder.path(), &file, &entry).unwrap();
        assert_eq!(compiler.images(&[&wanted]).unwrap(), [vec![1, 2, 3]]);
        compiler.architecture = "sm_90a".parse().unwrap();
        assert!(
            compiler.images(&[&wanted]).is_err(),
            "made for another card"
        );
    }

    #[test]
    fn results_come_in_order_and_errors_come_out() {
        let items: Vec<u32> = (0..50).collect();
        assert_eq!(in_parallel(&items, |i| Ok(i * 2)).unwrap()[49], 98);
        let failed = in_parallel(&items, |i| match i {
            7 => Err(CudaError::NotAnArchitecture("seven".into())),
            _ => Ok(()),
        });
        assert!(failed.unwrap_err().to_string().contains("seven"));
    }

    #[test]
    fn work_is_done_side_by_side() {
        let begun = AtomicUsize::new(0);
        let both_at_work = |_: &u32| {
            begun.fetch_add(1, Ordering::SeqCst);
            let start = Instant::now();
            while begun.load(Ordering::SeqCst) < 2 && start.elapsed() < Duration::from_mins(2) {
                thread::yield_now();
            }
            Ok(begun.load(Ordering::SeqCst))
        };
        let expected = thread::available_parallelism()
            .map_or(1, NonZero::get)
            .min(2);
        assert_eq!(in_parallel(&[0, 1], both_at_work).unwrap()[0], expected);
    }
}
