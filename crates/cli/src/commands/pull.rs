//! `pull`: a model from Hugging Face into its usual cache.

use anyhow::{Context, Result, bail};

use crate::{
    args::PullArgs,
    fetch,
    hub::ModelRef,
    settings::Settings,
    terminal::{Terminal, bytes, say},
};

pub(crate) fn run(args: &PullArgs, settings: &Settings, terminal: Terminal) -> Result<()> {
    let name = args.model.strip_prefix("hf:").unwrap_or(&args.model);
    let ModelRef::Hub(model) = format!("hf:{name}").parse()? else {
        bail!("`{}` names no model on the hub", args.model);
    };
    let hub = fetch::hub(settings)?;
    if settings.offline == Some(true) {
        return match hub.find_cached(&ModelRef::Hub(model))? {
            Some(path) => say(path.display()),
            None => bail!(
                "`{name}` is not in the cache; run without --offline, or copy the file here and give its path to -m"
            ),
        };
    }
    let pulled = fetch::with_bar(terminal, |watch| hub.pull(&model, watch))
        .with_context(|| format!("cannot pull `{name}`"))?;
    let news = match pulled.received_bytes {
        0 => "already up to date".to_owned(),
        received => format!("{} received", bytes(received)),
    };
    terminal.note(format_args!("{news}, revision {}", pulled.commit.as_str()));
    say(pulled.path.display())
}
