//! `kernels build`: the CUDA backend's kernels, compiled ahead.

use anyhow::{Context, Result};
use carat_cuda::{Architecture, Coverage, KernelSet, build_kernels};

use crate::{
    args::KernelsBuildArgs,
    terminal::{Terminal, say},
};

pub(crate) fn build(args: &KernelsBuildArgs, terminal: Terminal) -> Result<()> {
    let architectures = args
        .arch
        .iter()
        .map(|name| name.parse::<Architecture>())
        .collect::<Result<Vec<_>, _>>()?;
    let built = build_kernels(
        &architectures,
        (KernelSet::All, Coverage::Every),
        &args.out,
        &args.library_dir,
    )
    .with_context(|| format!("cannot build kernels into `{}`", args.out.display()))?;
    terminal.note(format_args!(
        "{} kernels for {}",
        built.len(),
        args.arch.join(", ")
    ));
    say(args.out.display())
}
