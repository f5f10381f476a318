//! Choice of the context: what was asked for, or as much as the model knows and memory allows.

use carat_engine::{Limits, ModelFacts};
use carat_model::{
    backend::{CompileOptions, Need},
    layout,
};

use crate::{
    Error, Loaded,
    footprint::{ram_bytes, smallest_context},
};

/// The context down to which a shorter one is chosen rather than that weights leave the device's memory.
const CONTEXT_BEFORE_WEIGHTS: usize = 8192;

/// A context that fits.
#[derive(Clone, Debug)]
pub struct Chosen {
    /// Tokens.
    pub tokens: usize,
    /// Bytes of keys and values.
    pub kv_bytes: u64,
    /// True where more would fit if it were asked for.
    pub more_fits: bool,
    /// Bytes of matrices that lie in host memory for want of the device's.
    pub offloaded_bytes: u64,
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
        tokens = longest(trained, smallest_context(loaded), |tokens| fit.fits(tokens))?;
    }
    if let Some(problem) = fit.problem(tokens)? {
        let was_asked = asked.is_some();
        return Err(Error::ContextTooLarge { problem, was_asked });
    }
    let more = (tokens * 2).min(trained);
    let need = fit.need(tokens)?;
    Ok(Chosen {
        tokens,
        kv_bytes: fit.kv_bytes(tokens)?,
        more_fits: more > tokens && fit.problem(more)?.is_none(),
        offloaded_bytes: need.as_ref().map_or(0, |need| need.offloaded_bytes),
        placement: need.map(|need| need.parts.trim_end().to_owned()),
    })
}

/// How well a context fits.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Fits {
    Not,
    /// With weights in host memory, which make every token slower.
    Offloaded,
    Comfortably,
}

/// The longest context, by halves of what the model was trained for, that is taken without being asked for.
pub(crate) fn longest<E>(
    trained: usize,
    least: usize,
    fits: impl Fn(usize) -> Result<Fits, E>,
) -> Result<usize, E> {
    let mut tokens = trained;
    while tokens > least {
        match fits(tokens)? {
            Fits::Comfortably => break,
            Fits::Offloaded if tokens <= CONTEXT_BEFORE_WEIGHTS => break,
            Fits::Offloaded | Fits::Not => tokens = (tokens / 2).max(least),
        }
    }
    Ok(tokens)
}

/// Search for the contexts that fit.
struct Fit<'a> {
    loaded: &'a Loaded,
    parallel: usize,
    free: u64,
}

impl Fit<'_> {
    fn new(loaded: &Loaded, parallel: usize) -> Result<Fit<'_>, Error> {
        Ok(Fit {
            loaded,
            parallel,
            free: loaded.backend.memory()?.free_bytes,
        })
    }

    fn options(&self, context: usize) -> Result<CompileOptions, Error> {
        let config = self.loaded.engine_config(self.parallel, context);
        let limits = Limits::new(config, ModelFacts::from(&self.loaded.plan))?;
        Ok(limits.compile_options())
    }

    fn kv_bytes(&self, context: usize) -> Result<u64, Error> {
        let bytes = layout::kv_bytes(&self.loaded.plan, &self.options(context)?);
        Ok((bytes.full + bytes.sliding) as u64)
    }

    fn need(&self, context: usize) -> Result<Option<Need>, Error> {
        self.loaded.need(&self.options(context)?)
    }

    /// What a context takes of the machine's memory, and what it may take, where that was said.
    fn of_limit(&self, context: usize) -> Result<Option<(u64, u64)>, Error> {
        let options = self.options(context)?;
        let limit = self.loaded.max_ram_bytes;
        Ok(limit.map(|limit| (ram_bytes(self.loaded, &options), limit)))
    }

    /// How a context fits without being asked for.
    ///
    /// On the CPU, where no limit was set, the model's file can leave memory and come back, keys and values cannot: so they get half
    /// of what is free beside the file, and at least an eighth of what is free at all.
    fn fits(&self, context: usize) -> Result<Fits, Error> {
        if let Some(need) = self.need(context)? {
            return Ok(match need {
                need if need.bytes > self.free => Fits::Not,
                need if need.offloaded_bytes > 0 => Fits::Offloaded,
                _ => Fits::Comfortably,
            });
        }
        let (taken, budget) = if let Some(limited) = self.of_limit(context)? {
            limited
        } else {
            let file = self.loaded.file.file_bytes() as u64;
            let budget = self.free.saturating_sub(file).max(self.free / 4) / 2;
            (self.kv_bytes(context)?, budget)
        };
        if taken <= budget {
            Ok(Fits::Comfortably)
        } else {
            Ok(Fits::Not)
        }
    }

    /// Reason a context does not fit at all.
    fn problem(&self, context: usize) -> Result<Option<String>, Error> {
        let (needed, allowed, [of_what, why]) = match self.need(context)? {
            Some(need) => (need.bytes, self.free, ["of device memory", "are free"]),
            None => match self.of_limit(context)? {
                Some((taken, limit)) if taken > limit => (
                    taken,
                    limit,
                    ["of memory with the model's file", "are allowed"],
                ),
                _ => (
                    self.kv_bytes(context)?,
                    self.free,
                    ["for keys and values", "are free"],
                ),
            },
        };
        let problem = || {
            let (needed, allowed) = (size(needed), size(allowed));
            format!("a context of {context} tokens needs {needed} {of_what}, {allowed} {why}")
        };
        Ok((needed > allowed).then(problem))
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

#[cfg(test)]
mod tests {
    use std::convert::Infallible;

    use super::*;

    /// The context chosen of 131,072 where one up to `comfortable` fits as it is, and one up to `offloaded` with weights in host
    /// memory.
    fn chosen(comfortable: usize, offloaded: usize) -> usize {
        let fits = |tokens| -> Result<Fits, Infallible> {
            Ok(match tokens {
                _ if tokens <= comfortable => Fits::Comfortably,
                _ if tokens <= offloaded => Fits::Offloaded,
                _ => Fits::Not,
            })
        };
        longest(131_072, 2048, fits).unwrap()
    }

    #[test]
    fn a_context_gives_way_before_weights_do_but_not_below_8192() {
        assert_eq!(chosen(131_072, 131_072), 131_072);
        assert_eq!(chosen(20_000, 131_072), 16_384);
        assert_eq!(chosen(8192, 131_072), 8192);
        assert_eq!(chosen(4096, 131_072), 8192);
        assert_eq!(chosen(0, 131_072), 8192);
        assert_eq!(chosen(0, 5000), 4096);
        assert_eq!(chosen(0, 0), 2048);
    }
}
