//! `kernels build`: the CUDA backend's kernels, compiled ahead.

use anyhow::{Context, Result, bail};
use carat_cuda::{Architecture, Coverage, KernelChoice, KernelSet, build_kernels};

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
    let choice = KernelChoice {
        set: KernelSet::All,
        coverage: Coverage::Every,
        named: args.only.as_deref().unwrap_or_default(),
    };
    let built = build_kernels(&architectures, choice, &args.out, &args.library_dir)
        .with_context(|| format!("cannot build kernels into `{}`", args.out.display()))?;
    if let (true, Some(name)) = (built.is_empty(), &args.only) {
        let archs = args.arch.join(", ");
        bail!(
            "no kernel for {archs} has `{name}` in its name: such as gemv.q4_0.normed, or all of gemv"
        );
    }
    terminal.note(format_args!(
        "{} kernels for {}",
        built.len(),
        args.arch.join(", ")
    ));
    say(args.out.display())
}
