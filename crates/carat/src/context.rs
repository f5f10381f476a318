//! Choice of the context: what was asked for, or as much as the model knows and memory allows.

use carat_engine::{Limits, ModelFacts};
use carat_model::{backend::Need, kv::KvGroup, layout};

use crate::{Error, Loaded, footprint::smallest_context};

/// A context that fits.
#[derive(Clone, Debug)]
pub struct Chosen {
    /// Tokens.
    pub tokens: usize,
    /// Bytes of keys and values.
    pub kv_bytes: u64,
    /// True where more would fit if it were asked for.
    pub more_fits: bool,
    /// Placement of weights, keys and values on devices that have their own memory; in lines for a person.
    pub placement: Option<String>,
}

/// Chooses the context for so many requests side by side.
pub fn choose(loaded: &Loaded, parallel: usize, asked: Option<usize>) -> Result<Chosen, Error> {
    let trained = loaded.model.config.context;
    if let Some(asked) = asked.filter(|asked| *asked > trained) {
        return Err(Error::ContextTooLong { asked, trained });
    }
    let fit = Fit::new(loaded, parallel)?;
    let mut tokens = asked.unwrap_or(trained);
    if asked.is_none() {
        let least = smallest_context(loaded);
        while tokens > least && !fit.comfortable(tokens)? {
            tokens = (tokens / 2).max(least);
        }
    }
    if let Some(problem) = fit.problem(tokens)? {
        let was_asked = asked.is_some();
        return Err(Error::ContextTooLarge { problem, was_asked });
    }
    let more = (tokens * 2).min(trained);
    Ok(Chosen {
        tokens,
        kv_bytes: fit.kv_bytes(tokens),
        more_fits: more > tokens && fit.problem(more)?.is_none(),
        placement: fit
            .need(tokens)?
            .map(|need| need.parts.trim_end().to_owned()),
    })
}

/// Search for the contexts that fit.
struct Fit<'a> {
    loaded: &'a Loaded,
    parallel: usize,
    free: u64,
    /// The weights are copied to a device's own memory, so everything must fit there.
    on_device: bool,
}

impl Fit<'_> {
    fn new(loaded: &Loaded, parallel: usize) -> Result<Fit<'_>, Error> {
        let mut fit = Fit {
            loaded,
            parallel,
            free: loaded.backend.memory()?.free_bytes,
            on_device: false,
        };
        fit.on_device = fit.need(1)?.is_some();
        Ok(fit)
    }

    fn kv_bytes(&self, context: usize) -> u64 {
        let (pages, page) = (
            self.loaded.engine_config(self.parallel, context).pages,
            layout::page_bytes(&self.loaded.plan, self.loaded.kv),
        );
        KvGroup::ALL
            .iter()
            .map(|g| (pages.get(*g) * page.get(*g)) as u64)
            .sum()
    }

    fn need(&self, context: usize) -> Result<Option<Need>, Error> {
        let loaded = self.loaded;
        let config = loaded.engine_config(self.parallel, context);
        let options = Limits::new(config, ModelFacts::from(&loaded.plan))?.compile_options();
        loaded.need(&options)
    }

    /// Whether a context fits without being asked for.
    ///
    /// On the CPU the model's file can leave memory and come back, keys and values cannot: so they get half of what is free
    /// beside the file, and at least an eighth of what is free at all.
    fn comfortable(&self, context: usize) -> Result<bool, Error> {
        if self.on_device {
            return Ok(self.problem(context)?.is_none());
        }
        let file = self.loaded.file.file_bytes() as u64;
        let budget = self.free.saturating_sub(file).max(self.free / 4) / 2;
        Ok(self.kv_bytes(context) <= budget)
    }

    /// Reason a context does not fit at all.
    fn problem(&self, context: usize) -> Result<Option<String>, Error> {
        let (needed, what) = match self.need(context)? {
            Some(need) => (need.bytes, "of device memory"),
            None => (self.kv_bytes(context), "for keys and values"),
        };
        let problem = || {
            format!(
                "a context of {context} tokens needs {} {what}, {} are free",
                size(needed),
                size(self.free)
            )
        };
        Ok((needed > self.free).then(problem))
    }
}

/// Bytes as people read them.
fn size(bytes: u64) -> String {
    let mib = bytes as f64 / f64::from(1 << 20);
    if mib < 1024.0 {
        format!("{mib:.2} MiB")
    } else {
        format!("{:.2} GiB", mib / 1024.0)
    }
}
