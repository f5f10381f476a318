//! Settings: the settings file under the flags, as one value. `file` reads the one, `sources`
//! joins them for a model, `print` shows where each came from.
//!
//! Everything here is optional; what stays unset is decided by the model (sampling) or the machine (threads, context).

mod file;
mod print;
mod sources;

use std::{collections::BTreeMap, path::PathBuf};

use anyhow::{Result, bail};
use carat_cuda::Placement;
use carat_gguf::Metadata;
use carat_model::{
    backend::Batching,
    kv::{KvType, PerGroup},
    sampling::Sampling,
};
use serde::{Deserialize, Serialize};

use crate::{
    args::{
        BackendName, DebugSwitch, DraftArgs, GenerateArgs, IsaName, KvTypes, MaxTokens, ModelArgs,
        SamplingArgs, Seed, ServeArgs, TierName,
    },
    misuse::misuse,
};
pub(crate) use sources::Sources;

#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub(crate) struct Settings {
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) model: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) offline: Option<bool>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) backend: Option<BackendName>,
    /// Number of the NVIDIA card.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) device: Option<usize>,
    /// Device memory to use at the most, such as `12GiB`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) vram: Option<String>,
    /// Memory of the machine to use at the most, such as `16GiB`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) ram: Option<String>,
    /// Where weights lie: `auto`, `card`, or a file.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) place: Option<String>,
    /// Set of kernels that a card gets.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) tier: Option<TierName>,
    /// Kernels that were compiled ahead.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) kernels: Option<PathBuf>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) threads: Option<usize>,
    /// The best instructions the CPU may use.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) isa: Option<IsaName>,
    /// Number format of keys and values.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) kv_type: Option<KvTypes>,
    /// The same tokens in any company.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) invariant: Option<bool>,
    /// Memory for weights that stay unpacked, such as `4GiB`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) repack: Option<String>,
    /// Source of drafts: `auto`, `ngram`, `off`, or a drafter.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) draft: Option<String>,
    /// Tokens of a draft at the most.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) draft_max: Option<usize>,
    /// For once, so from flags alone.
    #[serde(skip)]
    pub(crate) replan: bool,
    /// For finding faults, so from flags alone.
    #[serde(skip)]
    pub(crate) debug: Vec<DebugSwitch>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) context: Option<usize>,
    #[serde(skip_serializing_if = "Option::is_none")]
    /// -1 is no limit.
    pub(crate) max_tokens: Option<i64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) system: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) think: Option<bool>,
    pub(crate) sampling: SamplingSettings,
    /// Settings of single models, by the names that `-m` takes for them.
    #[serde(skip_serializing_if = "BTreeMap::is_empty")]
    pub(crate) models: BTreeMap<String, Settings>,
}

#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub(crate) struct SamplingSettings {
    #[serde(skip_serializing_if = "Option::is_none")]
    temperature: Option<f32>,
    #[serde(skip_serializing_if = "Option::is_none")]
    top_k: Option<usize>,
    #[serde(skip_serializing_if = "Option::is_none")]
    top_p: Option<f32>,
    #[serde(skip_serializing_if = "Option::is_none")]
    min_p: Option<f32>,
    #[serde(skip_serializing_if = "Option::is_none")]
    repeat_penalty: Option<f32>,
    #[serde(skip_serializing_if = "Option::is_none")]
    presence_penalty: Option<f32>,
    #[serde(skip_serializing_if = "Option::is_none")]
    frequency_penalty: Option<f32>,
    #[serde(skip_serializing_if = "Option::is_none")]
    penalty_window: Option<usize>,
    #[serde(skip_serializing_if = "Option::is_none")]
    seed: Option<u64>,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    logit_bias: Vec<(u32, f32)>,
}

impl Settings {
    pub(crate) fn with_model(mut self, flags: &ModelArgs) -> Result<Settings> {
        if let [first, second, ..] = &flags.model[..] {
            misuse!(
                "-m names `{first}` and `{second}`; only `serve` takes several models, give one"
            );
        }
        self.model = flags.model.first().cloned().or(self.model);
        self.with_device(flags)
    }

    fn with_device(mut self, flags: &ModelArgs) -> Result<Settings> {
        self.backend = flags.backend.or(self.backend);
        if flags.n_gpu_layers.as_deref() == Some("0") && flags.backend.is_none() {
            self.backend = Some(BackendName::Cpu);
        }
        self.device = flags.device.or(self.device);
        self.vram = flags.vram.clone().or(self.vram);
        self.place = flags.place.clone().or(self.place);
        self.tier = flags.tier.or(self.tier);
        self.kernels = flags.kernels.clone().or(self.kernels);
        self.ram = flags.ram.clone().or(self.ram);
        self.vram_bytes()?;
        self.ram_bytes()?;
        self.placement()?;
        self.threads = flags.threads.or(self.threads);
        self.isa = flags.isa.or(self.isa);
        self.kv_type = flags.kv_type.or(self.kv_type);
        self.invariant = flags.invariant.then_some(true).or(self.invariant);
        self.repack = flags.repack.clone().or(self.repack);
        self.repack_bytes()?;
        self.replan = flags.replan;
        self.debug.clone_from(&flags.debug);
        match self.threads {
            Some(0) => bail!("0 threads cannot compute; give at least 1, or leave -t out"),
            Some(n) if n > 4096 => {
                bail!("{n} threads are more than any machine has; give at most 4096")
            }
            _ => Ok(self),
        }
    }

    fn with_drafts(mut self, flags: &DraftArgs) -> Settings {
        self.draft = flags.draft.clone().or(self.draft);
        self.draft_max = flags.draft_max.or(self.draft_max);
        self
    }

    pub(crate) fn with_serve(self, flags: &ServeArgs) -> Result<Settings> {
        // Several are no setting of one model: the command reads them.
        let s = match &flags.model.model[..] {
            [_, _, ..] => self.with_device(&flags.model)?,
            _ => self.with_model(&flags.model)?,
        };
        let mut s = s.with_drafts(&flags.draft);
        s.context = flags.context.or(s.context);
        s.sampling = s.sampling.with(&flags.sampling);
        if s.context == Some(0) {
            bail!("a context of 0 tokens leaves nothing to write");
        }
        Ok(s)
    }

    pub(crate) fn with_generation(self, flags: &GenerateArgs) -> Result<Settings> {
        let mut s = self.with_model(&flags.model)?.with_drafts(&flags.draft);
        s.context = flags.context.or(s.context);
        s.max_tokens = match flags.max_tokens {
            Some(MaxTokens(most)) => most.map_or(-1, |n| n as i64).into(),
            None => s.max_tokens,
        };
        s.system = flags.system.clone().or(s.system);
        s.think = match (flags.think, flags.no_think) {
            (true, _) => Some(true),
            (_, true) => Some(false),
            _ => s.think,
        };
        s.sampling = s.sampling.with(&flags.sampling);
        if s.context == Some(0) {
            bail!("a context of 0 tokens leaves nothing to write");
        }
        s.token_limit()?;
        Ok(s)
    }

    /// The most tokens to generate, if there is a limit.
    pub(crate) fn token_limit(&self) -> Result<Option<usize>> {
        match self.max_tokens {
            None | Some(-1) => Ok(None),
            Some(n) => match usize::try_from(n) {
                Ok(n) if n > 0 => Ok(Some(n)),
                _ => bail!("max_tokens is {n}; a number above 0 is expected, or -1 for no limit"),
            },
        }
    }

    pub(crate) fn kv(&self) -> PerGroup<KvType> {
        self.kv_type.map(|types| types.0).unwrap_or_default()
    }

    pub(crate) fn batching(&self) -> Batching {
        match self.invariant {
            Some(true) => Batching::Invariant,
            Some(false) | None => Batching::Fast,
        }
    }

    pub(crate) fn debugs(&self, switch: DebugSwitch) -> bool {
        self.debug.contains(&switch)
    }

    /// The limit on device memory, if one is set.
    pub(crate) fn vram_bytes(&self) -> Result<Option<u64>> {
        self.vram.as_deref().map(memory_size).transpose()
    }

    /// The limit on the machine's memory, if one is set.
    pub(crate) fn ram_bytes(&self) -> Result<Option<u64>> {
        self.ram.as_deref().map(memory_size).transpose()
    }

    /// Where weights lie on a card.
    pub(crate) fn placement(&self) -> Result<Placement> {
        let path = match self.place.as_deref() {
            None | Some("auto") => return Ok(Placement::Auto),
            Some("card") => return Ok(Placement::Card),
            Some(path) => path,
        };
        let text = match std::fs::read_to_string(path) {
            Ok(text) => text,
            Err(error) => {
                misuse!("--place takes auto, card or a file; `{path}` cannot be read: {error}")
            }
        };
        match text.parse() {
            Ok(parts) => Ok(Placement::Given(parts)),
            Err(error) => misuse!("`{path}` is no placement of weights: {error}"),
        }
    }

    /// Memory for weights that stay unpacked, if any is set.
    pub(crate) fn repack_bytes(&self) -> Result<Option<u64>> {
        self.repack.as_deref().map(memory_size).transpose()
    }
}

/// Bytes of a size such as `12GiB`, `8000MB` or a plain number.
pub(crate) fn memory_size(text: &str) -> Result<u64> {
    const UNITS: [(&str, u64); 7] = [
        ("GiB", 1 << 30),
        ("MiB", 1 << 20),
        ("KiB", 1 << 10),
        ("GB", 1_000_000_000),
        ("MB", 1_000_000),
        ("KB", 1_000),
        ("G", 1 << 30),
    ];
    let trimmed = text.trim();
    let unit = UNITS.iter().find(|(name, _)| {
        let start = trimmed.len().saturating_sub(name.len());
        trimmed
            .get(start..)
            .is_some_and(|end| end.eq_ignore_ascii_case(name))
    });
    let (number, unit) = match unit {
        Some((name, bytes)) => (&trimmed[..trimmed.len() - name.len()], *bytes),
        None => (trimmed, 1),
    };
    match number.trim().parse::<f64>() {
        Ok(n) if n > 0.0 && n * unit as f64 <= 1e15 => Ok((n * unit as f64) as u64),
        _ => bail!("`{text}` is no size of memory; give one such as 12GiB or 8000MB"),
    }
}

impl SamplingSettings {
    fn with(mut self, flags: &SamplingArgs) -> SamplingSettings {
        self.temperature = flags.temperature.or(self.temperature);
        self.top_k = flags.top_k.or(self.top_k);
        self.top_p = flags.top_p.or(self.top_p);
        self.min_p = flags.min_p.or(self.min_p);
        self.repeat_penalty = flags.repeat_penalty.or(self.repeat_penalty);
        self.presence_penalty = flags.presence_penalty.or(self.presence_penalty);
        self.frequency_penalty = flags.frequency_penalty.or(self.frequency_penalty);
        self.penalty_window = flags.penalty_window.or(self.penalty_window);
        if let Some(Seed(seed)) = flags.seed {
            self.seed = seed;
        }
        self.logit_bias.extend(&flags.logit_bias);
        self
    }

    /// A sentence for each setting that replaces one of the model's own by another.
    pub(crate) fn overrides(&self, model: &Metadata) -> Result<Vec<String>> {
        let gemma = Sampling::default();
        let own =
            |key: &str, default: f32| -> Result<f32> { Ok(model.f32(key)?.unwrap_or(default)) };
        let own_top_k = model
            .u32("general.sampling.top_k")?
            .map_or(gemma.top_k, |k| k as usize);
        let habits = [
            (
                "temperature",
                self.temperature,
                own("general.sampling.temp", gemma.temperature)?,
            ),
            ("top-k", self.top_k.map(|k| k as f32), own_top_k as f32),
            (
                "top-p",
                self.top_p,
                own("general.sampling.top_p", gemma.top_p)?,
            ),
            (
                "min-p",
                self.min_p,
                own("general.sampling.min_p", gemma.min_p)?,
            ),
        ];
        let changed = habits.into_iter().filter_map(|(name, asked, own)| {
            let asked = asked.filter(|asked| *asked != own)?;
            Some(format!("{name} {asked}, where the model's own is {own}"))
        });
        Ok(changed.collect())
    }

    /// The model's own habits under what was asked for; an unset seed becomes `fresh_seed`.
    pub(crate) fn resolve(&self, model: &Metadata, fresh_seed: u64) -> Result<Sampling> {
        let gemma = Sampling::default();
        let sampling = Sampling {
            temperature: self
                .temperature
                .or(model.f32("general.sampling.temp")?)
                .unwrap_or(gemma.temperature),
            top_k: self
                .top_k
                .or(model.u32("general.sampling.top_k")?.map(|k| k as usize))
                .unwrap_or(gemma.top_k),
            top_p: self
                .top_p
                .or(model.f32("general.sampling.top_p")?)
                .unwrap_or(gemma.top_p),
            min_p: self
                .min_p
                .or(model.f32("general.sampling.min_p")?)
                .unwrap_or(gemma.min_p),
            repeat_penalty: self.repeat_penalty.unwrap_or(gemma.repeat_penalty),
            presence_penalty: self.presence_penalty.unwrap_or(gemma.presence_penalty),
            frequency_penalty: self.frequency_penalty.unwrap_or(gemma.frequency_penalty),
            penalty_window: self.penalty_window.unwrap_or(gemma.penalty_window),
            logit_bias: self.logit_bias.clone(),
            seed: self.seed.unwrap_or(fresh_seed),
        };
        match sampling.complaint() {
            Some(complaint) => bail!("{complaint}"),
            None => Ok(sampling),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_of_memory_are_read_as_people_write_them() {
        assert_eq!(memory_size("12GiB").unwrap(), 12 << 30);
        assert_eq!(memory_size("1.5 gb").unwrap(), 1_500_000_000);
        assert_eq!(memory_size("24G").unwrap(), 24 << 30);
        assert_eq!(memory_size("4096").unwrap(), 4096);
        for bad in ["", "GiB", "-1GiB", "many", "nanGB", "1e99"] {
            let error = memory_size(bad).unwrap_err().to_string();
            assert!(error.contains("12GiB"), "{error}");
        }
    }

    #[test]
    fn flags_win_over_the_file() {
        let file: Settings =
            toml::from_str("model = 'a.gguf'\n[sampling]\ntop_k = 3\ntop_p = 0.5").unwrap();
        let flags = SamplingArgs {
            top_k: Some(9),
            ..SamplingArgs::default()
        };
        let merged = file.sampling.with(&flags);
        assert_eq!((merged.top_k, merged.top_p), (Some(9), Some(0.5)));
    }
}
