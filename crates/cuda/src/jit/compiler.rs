//! Specializations of kernels to machine code for one architecture.
//!
//! A kernel is looked for among those compiled ahead, then in the cache, and is compiled if it is in neither; several are
//! compiled in parallel. Nothing here needs a card: [`build_kernels`] compiles everything for machines that have one but
//! no compiler.

use std::{
    fmt,
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
        let (source, options) = wanted.text(&self.architecture);
        let file = cache::file_name(wanted.kernel, &self.architecture.0, &source, &options);
        if let Some(folder) = &self.built_ahead
            && let Some(entry) = cache::read(folder, &file)
        {
            return Ok(entry.image);
        }
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
        let (entry, remarks) = compile(nvrtc, &self.architecture, wanted, (&source, &options))?;
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

impl Specialization {
    /// The text to compile and the options to do so with.
    fn text(&self, architecture: &Architecture) -> (String, Vec<String>) {
        let mut options = vec![
            format!("--gpu-architecture={architecture}"),
            "--std=c++17".to_owned(),
            // Names of files and lines in profiles and sanitizer reports.
            "--generate-line-info".to_owned(),
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
    (source, options): (&str, &[String]),
) -> Result<(Entry, String), CudaError> {
    let known = nvrtc.architectures();
    if !known.contains(&architecture.number()) {
        return Err(CudaError::UnknownArchitecture {
            architecture: architecture.to_string(),
            version: nvrtc.version,
            known: known.iter().map(|n| format!("sm_{n}")).collect(),
        });
    }
    let name = format!("{}.cu", wanted.kernel);
    match nvrtc.compile(&name, source, options) {
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

/// Compiles kernels for every given architecture into a folder that [`CudaConfig::kernels_dir`] may name.
pub fn build_kernels(
    architectures: &[Architecture],
    set: KernelSet,
    folder: &Path,
    library_dirs: &[PathBuf],
) -> Result<Vec<BuiltKernel>, CudaError> {
    let nvrtc = Nvrtc::find(library_dirs)?;
    let shared = match set {
        KernelSet::All => kernel::catalog::all(),
        KernelSet::Own => Vec::new(),
    };
    let hopper = kernel::catalog::hopper();
    let pairs = architectures.iter().flat_map(|a| {
        let own = if a.0 == "sm_90a" { &hopper[..] } else { &[] };
        shared.iter().chain(own).map(move |s| (a, s))
    });
    let pairs: Vec<(&Architecture, &Specialization)> = pairs.collect();
    in_parallel(&pairs, |(architecture, wanted)| {
        let (source, options) = wanted.text(architecture);
        let file = cache::file_name(wanted.kernel, &architecture.0, &source, &options);
        let (entry, remarks) = compile(&nvrtc, architecture, wanted, (&source, &options))?;
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
        let (source, options) = wanted.text(&compiler.architecture);
        let file = cache::file_name(wanted.kernel, "sm_80", &source, &options);
        let entry = Entry {
            image: vec![1, 2, 3],
            version: (12, 9),
        };
        cache::write(folder.path(), &file, &entry).unwrap();
        assert_eq!(compiler.images(&[&wanted]).unwrap(), [vec![1, 2, 3]]);
        compiler.architecture = "sm_89".parse().unwrap();
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
            while begun.load(Ordering::SeqCst) < 2 && start.elapsed() < Duration::from_secs(10) {
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
