//! Gemma 4's hyper-parameters from GGUF metadata, every per-layer fact resolved once.
//!
//! The file is the authority: nothing is derived from a model's size or name. Scalars that may be per-layer arrays are
//! arrays here, and a layer knows whose keys and values it reads.

use std::fmt;

use carat_gguf::{Gguf, GgufError, Metadata};

use crate::error::ModelError;

/// Hyper-parameters of a model, every per-layer fact resolved.
#[derive(Clone, Debug, PartialEq)]
pub struct Config {
    /// As the file calls it.
    pub name: String,
    /// Width of the stream.
    pub dim: usize,
    /// Tokens there are.
    pub vocab: usize,
    /// Positions the model was trained for.
    pub context: usize,
    /// Added to mean squares in norms.
    pub eps: f32,
    /// Bound of the final logits; `None` leaves them alone.
    pub softcap: Option<f32>,
    /// Positions a sliding layer sees, itself included.
    pub window: usize,
    /// Width of the per-layer embedding; `None` where the model has none.
    pub ple: Option<usize>,
    /// Facts of the experts, in models that have them.
    pub experts: Option<Experts>,
    /// Of rotary frequencies.
    pub rope_base: RopeBase,
    /// In order.
    pub layers: Vec<Layer>,
    /// Layers below this one write keys and values; those from it on share them.
    pub kv_layers: usize,
}

/// Base of rotary frequencies, by kind of layer.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct RopeBase {
    /// Of full-attention layers.
    pub full: f32,
    /// Of sliding-window layers.
    pub sliding: f32,
}

/// Facts of the experts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Experts {
    /// Per layer.
    pub count: usize,
    /// Per row.
    pub used: usize,
    /// Width of an expert's inner values.
    pub ffn: usize,
}

/// Kind of a layer's attention.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LayerKind {
    /// Within a window.
    Sliding,
    /// To everything before.
    Full,
}

impl fmt::Display for LayerKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            LayerKind::Sliding => "sliding-window",
            LayerKind::Full => "full-attention",
        })
    }
}

/// Facts of one layer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Layer {
    /// Kind of its attention.
    pub kind: LayerKind,
    /// Query heads.
    pub heads: usize,
    /// Heads of keys and values.
    pub kv_heads: usize,
    /// Width of a head.
    pub head_dim: usize,
    /// Width of the dense branch's inner values.
    pub ffn: usize,
    /// The layer whose keys and values this one reads: itself, or the last of its kind that writes any.
    pub kv_source: usize,
}

pub(crate) const ARCHITECTURE: &str = "gemma4";

impl Config {
    /// Reads and checks a file's metadata.
    pub fn read(file: &Gguf) -> Result<Config, ModelError> {
        let m = file.metadata();
        match m.str("general.architecture")? {
            Some(ARCHITECTURE) => {}
            Some(found) if crate::drafter::ARCHITECTURES.contains(&found) => {
                return Err(ModelError::Architecture {
                    found: found.to_owned(),
                    hint: "; this file is a draft model and runs only beside its target: give it with --draft",
                });
            }
            found => {
                return Err(ModelError::Architecture {
                    found: found.unwrap_or("(none)").to_owned(),
                    hint: " models only",
                });
            }
        }
        let keys = Keys {
            metadata: m,
            architecture: ARCHITECTURE,
        };
        let layer_count = keys.count("block_count")?;
        // Each layer brings several tensors, so a damaged count shows here before anything is sized by it.
        if layer_count > file.tensors().len() {
            return Err(keys.complain(
                "block_count",
                layer_count,
                "more layers than the file has tensors",
            ));
        }
        let kv_layers = layer_count - keys.shared(layer_count)?;
        let layers = Config::layers(&keys, layer_count, kv_layers)?;
        let experts = match keys.optional_count("expert_count")? {
            None | Some(0) => None,
            Some(count) => Some(Experts {
                count,
                used: keys.uniform("expert_used_count", layer_count)?,
                ffn: keys.uniform("expert_feed_forward_length", layer_count)?,
            }),
        };
        if let Some(e) = experts.filter(|e| e.used > e.count) {
            return Err(keys.complain(
                "expert_used_count",
                e.used,
                "more experts than the model has",
            ));
        }
        Ok(Config {
            name: printable(m.str("general.name")?.unwrap_or("unnamed")),
            dim: keys.count("embedding_length")?,
            vocab: Config::vocab(file)?,
            context: keys.count("context_length")?,
            eps: keys.positive("attention.layer_norm_rms_epsilon")?,
            softcap: match keys.metadata.f32(&keys.name("final_logit_softcapping"))? {
                Some(0.0) => None,
                _ => keys.optional_positive("final_logit_softcapping")?,
            },
            window: keys.count("attention.sliding_window")?,
            ple: keys
                .optional_count("embedding_length_per_layer_input")?
                .filter(|width| *width > 0),
            experts,
            rope_base: RopeBase {
                full: keys.positive("rope.freq_base")?,
                sliding: keys.optional_positive("rope.freq_base_swa")?.unwrap_or(1e4),
            },
            layers,
            kv_layers,
        })
    }

    /// Rows of the embedding table, which must be as many as the tokenizer has tokens.
    pub(crate) fn vocab(file: &Gguf) -> Result<usize, ModelError> {
        let tokens = file.metadata().array("tokenizer.ggml.tokens")?;
        let tokens = tokens.map(carat_gguf::Array::len);
        let rows = file
            .tensor("token_embd.weight")?
            .and_then(|t| t.info.shape.get(1).copied())
            .unwrap_or(0);
        match tokens.filter(|tokens| *tokens != rows && rows > 0) {
            Some(tokens) => Err(ModelError::Vocabulary { tokens, rows }),
            None => Ok(rows),
        }
    }

    /// Layers of which the first `kv_layers` write keys and values.
    pub(crate) fn layers(
        keys: &Keys<'_>,
        count: usize,
        kv_layers: usize,
    ) -> Result<Vec<Layer>, ModelError> {
        let pattern = keys.name("attention.sliding_window_pattern");
        let sliding = keys
            .metadata
            .array(&pattern)?
            .ok_or_else(|| GgufError::MissingKey(pattern.clone()))?
            .bools()
            .filter(|bools| bools.len() == count)
            .ok_or_else(|| {
                keys.complain(
                    "attention.sliding_window_pattern",
                    "of another form",
                    "an array of one bool a layer is expected",
                )
            })?;
        let heads = keys.each("attention.head_count", count)?;
        let kv_heads = match keys.optional_each("attention.head_count_kv", count)? {
            Some(kv_heads) => kv_heads,
            None => heads.clone(),
        };
        let ffn = keys.each("feed_forward_length", count)?;
        let full_dim = keys.head_dim("key_length", "value_length", None)?;
        let sliding_dim = keys.head_dim("key_length_swa", "value_length_swa", Some(full_dim))?;
        for (key, dim) in [
            ("rope.dimension_count", full_dim),
            ("rope.dimension_count_swa", sliding_dim),
        ] {
            if let Some(turned) = keys.optional_count(key)?.filter(|turned| *turned != dim) {
                return Err(keys.complain(
                    key,
                    turned,
                    &format!("it must equal the head size {dim}"),
                ));
            }
        }
        (0..count)
            .map(|i| {
                let kv_source = if i < kv_layers {
                    Some(i)
                } else {
                    (0..kv_layers).rfind(|&source| sliding[source] == sliding[i])
                };
                let kv_source = kv_source.ok_or_else(|| {
                    keys.complain(
                        "attention.shared_kv_layers",
                        count - kv_layers,
                        &format!("layer {i} has no earlier layer of its kind to share with"),
                    )
                })?;
                if !heads[i].is_multiple_of(kv_heads[kv_source]) {
                    let problem = format!(
                        "{} query heads of layer {i} cannot share it evenly",
                        heads[i]
                    );
                    return Err(keys.complain(
                        "attention.head_count_kv",
                        kv_heads[kv_source],
                        &problem,
                    ));
                }
                Ok(Layer {
                    kind: if sliding[i] {
                        LayerKind::Sliding
                    } else {
                        LayerKind::Full
                    },
                    heads: heads[i],
                    kv_heads: kv_heads[i],
                    head_dim: if sliding[i] { sliding_dim } else { full_dim },
                    ffn: ffn[i],
                    kv_source,
                })
            })
            .collect()
    }
}

/// A file's text without what would move a terminal's cursor or break a table.
pub(crate) fn printable(text: &str) -> String {
    text.chars()
        .map(|c| if c.is_control() { ' ' } else { c })
        .collect()
}

/// Metadata under the architecture's prefix, as counts that are not zero.
pub(crate) struct Keys<'a> {
    pub(crate) metadata: &'a Metadata,
    pub(crate) architecture: &'a str,
}

/// No dimension of a real model comes near; a damaged one must not overflow sizes computed from it.
const LARGEST: u32 = 1 << 24;

impl Keys<'_> {
    /// A key with the architecture's prefix.
    pub(crate) fn name(&self, key: &str) -> String {
        format!("{}.{key}", self.architecture)
    }

    pub(crate) fn complain(
        &self,
        key: &str,
        value: impl fmt::Display,
        problem: &str,
    ) -> ModelError {
        ModelError::Setting {
            key: self.name(key),
            value: value.to_string(),
            problem: problem.to_owned(),
        }
    }

    fn sized(&self, key: &str, value: u32) -> Result<usize, ModelError> {
        match value {
            0 => Err(self.complain(key, 0, "it must be above 0")),
            1..=LARGEST => Ok(value as usize),
            _ => Err(self.complain(key, value, "no Gemma 4 model is that large")),
        }
    }

    /// May be missing or zero.
    pub(crate) fn optional_count(&self, key: &str) -> Result<Option<usize>, ModelError> {
        match self.metadata.u32(&self.name(key))? {
            None => Ok(None),
            Some(0) => Ok(Some(0)),
            Some(value) => self.sized(key, value).map(Some),
        }
    }

    pub(crate) fn count(&self, key: &str) -> Result<usize, ModelError> {
        let value = self
            .metadata
            .u32(&self.name(key))?
            .ok_or_else(|| GgufError::MissingKey(self.name(key)))?;
        self.sized(key, value)
    }

    fn optional_each(&self, key: &str, count: usize) -> Result<Option<Vec<usize>>, ModelError> {
        let Some(values) = self.metadata.u32_each(&self.name(key), count)? else {
            return Ok(None);
        };
        let sized: Result<_, _> = values.into_iter().map(|v| self.sized(key, v)).collect();
        sized.map(Some)
    }

    fn each(&self, key: &str, count: usize) -> Result<Vec<usize>, ModelError> {
        self.optional_each(key, count)?
            .ok_or_else(|| GgufError::MissingKey(self.name(key)).into())
    }

    /// A count that may be written per layer but must be the same for all.
    fn uniform(&self, key: &str, count: usize) -> Result<usize, ModelError> {
        let values = self.each(key, count)?;
        match values.iter().find(|v| **v != values[0]) {
            Some(other) => Err(self.complain(key, other, "it must be the same for every layer")),
            None => Ok(values[0]),
        }
    }

    pub(crate) fn optional_positive(&self, key: &str) -> Result<Option<f32>, ModelError> {
        let given = self.metadata.f32(&self.name(key))?.is_some();
        given.then(|| self.positive(key)).transpose()
    }

    pub(crate) fn positive(&self, key: &str) -> Result<f32, ModelError> {
        let value = self
            .metadata
            .f32(&self.name(key))?
            .ok_or_else(|| GgufError::MissingKey(self.name(key)))?;
        if value > 0.0 && value.is_finite() {
            Ok(value)
        } else {
            Err(self.complain(key, value, "it must be above 0"))
        }
    }

    fn shared(&self, layer_count: usize) -> Result<usize, ModelError> {
        let key = "attention.shared_kv_layers";
        match self.optional_count(key)?.unwrap_or(0) {
            shared if shared < layer_count => Ok(shared),
            shared => Err(self.complain(key, shared, "at least one layer must keep its own")),
        }
    }

    /// The head size of a kind of layer; keys and values must agree on it.
    fn head_dim(
        &self,
        key: &str,
        value: &str,
        default: Option<usize>,
    ) -> Result<usize, ModelError> {
        let (key, value) = (format!("attention.{key}"), format!("attention.{value}"));
        let k = match (self.optional_count(&key)?, default) {
            (Some(k), _) if k > 0 => k,
            (_, Some(default)) => default,
            _ => self.count(&key)?,
        };
        let v = self.optional_count(&value)?.filter(|v| *v > 0).unwrap_or(k);
        if k != v {
            return Err(self.complain(&value, v, &format!("it must equal {key}, {k}")));
        }
        if k % 2 != 0 {
            return Err(self.complain(&key, k, "it must be even, for rotary pairs"));
        }
        Ok(k)
    }
}
