//! `synth`: a random model of real shape.

use std::{ops::ControlFlow, process::ExitCode};

use anyhow::Result;

use crate::{
    args::SynthArgs,
    interrupt::{INTERRUPTED, Interrupt},
    synth::{self, Options},
    terminal::{Terminal, bytes},
};

pub(crate) fn run(args: &SynthArgs, terminal: Terminal) -> Result<ExitCode> {
    let bar = terminal.byte_bar(0, "writing");
    let shown = bar.clone();
    let interrupt = Interrupt::install()?;
    let stop = interrupt.clone();
    let options = Options {
        seed: args.seed,
        vocabulary: args.vocab.clone(),
        progress: Box::new(move |done, total| {
            shown.set_length(total);
            shown.set_position(done);
            if stop.is_set() {
                ControlFlow::Break(())
            } else {
                ControlFlow::Continue(())
            }
        }),
        ..Options::default()
    };
    let summary = synth::write(args.preset, args.quant, &args.out, options);
    bar.finish_and_clear();
    if interrupt.is_set() {
        terminal.note("stopped; nothing was written");
        return Ok(ExitCode::from(INTERRUPTED));
    }
    let summary = summary?;
    terminal.note(format_args!(
        "{} in {} tensors, {:.1} s",
        bytes(summary.bytes),
        summary.tensors,
        summary.elapsed.as_secs_f64()
    ));
    Ok(ExitCode::SUCCESS)
}
