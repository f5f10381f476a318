//! `pull`: a model from Hugging Face into its usual cache.

use anyhow::{Context, Result, bail};

use crate::{
    args::PullArgs,
    fetch,
    hub::ModelRef,
    settings::Settings,
    terminal::{Terminal, bytes, say, warn},
};

pub(crate) fn run(args: &PullArgs, settings: &Settings, terminal: Terminal) -> Result<()> {
    let name = &args.model;
    let model = fetch::on_hub(name)?;
    if !name.contains('/') {
        terminal.note(format_args!("{name} is {model}"));
    }
    let hub = fetch::hub(settings)?;
    let cached = hub.find_cached(&ModelRef::Hub(model.clone()))?;
    if settings.offline == Some(true) {
        return match cached {
            Some(path) => say(path.display()),
            None => bail!(
                "`{name}` is not in the cache, and the network was ruled out by --offline or HF_HUB_OFFLINE; do without, or copy \
                 the file here and give its path to -m"
            ),
        };
    }
    let pulled = fetch::with_bar(terminal, |watch| hub.pull(&model, watch));
    let pulled = match (pulled, cached) {
        (Ok(pulled), _) => pulled,
        // Whether there is a newer one cannot be told, but the one that is here can be used.
        (Err(problem), Some(path)) => {
            warn(format_args!(
                "what is in the cache may be old, as the hub did not answer for it: {problem:#}"
            ));
            return say(path.display());
        }
        (Err(problem), None) => {
            return Err(problem).with_context(|| format!("cannot pull `{name}`"));
        }
    };
    let news = match pulled.received_bytes {
        0 => "already up to date".to_owned(),
        received => format!("{} received", bytes(received)),
    };
    terminal.note(format_args!("{news}, revision {}", pulled.commit.as_str()));
    say(pulled.path.display())
}
