//! `list`: the models in the Hugging Face cache, as `-m` takes them.

use anyhow::Result;

use crate::{
    fetch,
    hub::Role,
    settings::Settings,
    terminal::{Terminal, bytes, say},
};

pub(crate) fn run(settings: &Settings, terminal: Terminal) -> Result<()> {
    let models = fetch::hub(settings)?.cached(None)?;
    let models: Vec<_> = models.iter().filter(|m| m.role == Role::Model).collect();
    if models.is_empty() {
        terminal
            .note("no GGUF models in the Hugging Face cache; `carat pull OWNER/REPO` fetches one");
    }
    for model in models {
        let name = format!("hf:{}:{}", model.repo, model.file);
        let parts = if model.part_count > 1 {
            format!(" in {} parts", model.part_count)
        } else {
            String::new()
        };
        say(format_args!(
            "{name}\n    {}{parts}, revision {}, {}",
            bytes(model.size_bytes),
            model.commit.as_str(),
            model.path.display()
        ))?;
    }
    Ok(())
}
