//! `rm`: a model out of the Hugging Face cache.

use anyhow::Result;

use crate::{
    args::RmArgs,
    fetch,
    settings::Settings,
    terminal::{Terminal, bytes, say},
};

pub(crate) fn run(args: &RmArgs, settings: &Settings, terminal: Terminal) -> Result<()> {
    let model = fetch::on_hub(&args.model)?;
    let removed = fetch::hub(settings)?.remove(&model)?;
    for name in &removed.names {
        say(format_args!("hf:{}:{name}", model.repo))?;
    }
    terminal.note(format_args!(
        "removed, {} are free again",
        bytes(removed.freed_bytes)
    ));
    Ok(())
}
