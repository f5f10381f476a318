//! Random models of every variant, in memory, in any format: each has all that sets its variant apart and little else.
//!
//! ```
//! use carat_gguf::QuantType;
//! use carat_testkit::tiny::{Tiny, Variant};
//!
//! let mut tiny = Tiny::new(Variant::E2b, QuantType::Q4_0);
//! tiny.dimensions.window = 4;
//! let model = tiny.model();
//! assert_eq!(model.config.window, 4);
//! ```

use std::sync::Arc;

use carat_gguf::{
    Gguf, QuantType,
    quant::SplitMix64,
    writer::{Writer, write_tensor},
};
use carat_model::{
    Model, TokenId,
    config::Experts,
    synthetic::{ByKind, Dimensions, Role, TensorPlan, Vocabulary, dimensions::FullValues},
};

/// The published models that differ in more than size.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Variant {
    /// Per-layer embeddings, a shared KV tail twice as wide, one KV head.
    E2b,
    /// Per-layer embeddings, a shared KV tail of even width, more KV heads.
    E4b,
    /// Keys serve as values in full-attention layers, which have one KV head.
    Dense12b,
    /// As 12B, with experts beside the dense FFN.
    Moe26b,
    /// As 12B, with several KV heads everywhere.
    Dense31b,
}

impl Variant {
    pub const ALL: [Variant; 5] = [
        Variant::E2b,
        Variant::E4b,
        Variant::Dense12b,
        Variant::Moe26b,
        Variant::Dense31b,
    ];

    /// Small dimensions of the variant whose rows are whole blocks of `block` values.
    pub fn dimensions(self, block: usize) -> Dimensions {
        // Heads of 16 and 32 at the least.
        let unit = block.max(64);
        let (layers, period) = match self {
            Variant::E2b => (6, 2),
            Variant::E4b => (6, 3),
            Variant::Dense12b | Variant::Moe26b | Variant::Dense31b => (3, 3),
        };
        let dense = Dimensions {
            name: format!("tiny {self:?}"),
            kinds: Dimensions::pattern(layers, period),
            dim: unit,
            ffn: vec![unit; layers],
            heads: 4,
            kv_heads: ByKind {
                sliding: 2,
                full: 1,
            },
            head_dim: ByKind {
                sliding: unit / 4,
                full: unit / 2,
            },
            window: 8,
            context: 256,
            shared_kv_layers: 0,
            ple: 0,
            full_values: FullValues::Keys,
            experts: None,
            softcap: 30.0,
            vocab: 400,
            target_dim: 0,
        };
        let small = Dimensions {
            full_values: FullValues::Projected,
            ple: block.max(32),
            ..dense.clone()
        };
        match self {
            Variant::E2b => Dimensions {
                kv_heads: ByKind {
                    sliding: 1,
                    full: 1,
                },
                shared_kv_layers: 2,
                ffn: [vec![unit; 4], vec![2 * unit; 2]].concat(),
                ..small
            },
            Variant::E4b => Dimensions {
                kv_heads: ByKind {
                    sliding: 2,
                    full: 2,
                },
                shared_kv_layers: 3,
                ..small
            },
            Variant::Dense12b => dense,
            Variant::Moe26b => Dimensions {
                experts: Some(Experts {
                    count: 6,
                    used: 2,
                    ffn: unit,
                }),
                ..dense
            },
            Variant::Dense31b => Dimensions {
                heads: 8,
                kv_heads: ByKind {
                    sliding: 4,
                    full: 2,
                },
                ..dense
            },
        }
    }
}

/// The formats of a model's matrices. Vectors and the router are F32.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Formats {
    pub matrices: QuantType,
    pub embedding: QuantType,
    pub ple_embedding: QuantType,
    pub ple_projection: QuantType,
    pub ple_bottleneck: QuantType,
}

impl Formats {
    fn of(self, tensor: &TensorPlan) -> QuantType {
        match tensor.role {
            Role::Vector | Role::Router => QuantType::F32,
            Role::TokenEmbedding => self.embedding,
            Role::PleEmbedding => self.ple_embedding,
            Role::PleProjection => self.ple_projection,
            Role::PleBottleneck => self.ple_bottleneck,
            Role::AttentionV | Role::FfnDown | Role::Matrix => self.matrices,
        }
    }
}

/// A model to be made. Change what a test is about, then call [`Tiny::model`].
#[derive(Clone, Debug, PartialEq)]
pub struct Tiny {
    pub dimensions: Dimensions,
    pub formats: Formats,
    pub seed: u64,
}

impl Tiny {
    /// A model in one format, but for the tensors that published files keep as floats.
    pub fn new(variant: Variant, quant: QuantType) -> Tiny {
        Tiny {
            dimensions: variant.dimensions(quant.block_len()),
            formats: Formats {
                matrices: quant,
                embedding: quant,
                ple_embedding: quant,
                ple_projection: QuantType::BF16,
                ple_bottleneck: QuantType::F32,
            },
            seed: 1,
        }
    }

    /// The file's bytes.
    pub fn bytes(&self) -> Vec<u8> {
        let mut writer = Writer::default();
        self.dimensions.write_metadata(&mut writer);
        Vocabulary::packed(self.dimensions.vocab).write_metadata(&mut writer);
        let tensors = self.dimensions.tensors();
        let sizes: Vec<usize> = tensors
            .iter()
            .map(|t| writer.tensor(&t.name, &t.shape, self.formats.of(t)))
            .collect();
        let mut out = Vec::new();
        writer
            .write_head(&mut out)
            .expect("memory takes all writes");
        for (index, (tensor, size)) in (0..).zip(tensors.iter().zip(sizes)) {
            let seed = SplitMix64::part(self.seed, index).next_u64();
            let mut bytes = vec![0; size];
            tensor.fill(self.formats.of(tensor), seed, &mut bytes);
            write_tensor(&mut out, &bytes).expect("memory takes all writes");
        }
        out
    }

    pub fn file(&self) -> Gguf {
        Gguf::from_bytes(&self.dimensions.name, self.bytes()).expect("tiny files are valid")
    }

    pub fn model(&self) -> Model {
        Model::load(Arc::new(self.file())).expect("tiny models are complete")
    }

    /// `<bos>` and then random ordinary tokens.
    pub fn prompt(&self, length: usize) -> Vec<TokenId> {
        let mut rng = SplitMix64::part(self.seed, u64::MAX);
        let ordinary = 24..self.dimensions.vocab;
        let random = |_| (ordinary.start + rng.below(ordinary.len())) as TokenId;
        [2].into_iter()
            .chain((1..length).map(random))
            .take(length)
            .collect()
    }
}

#[cfg(test)]
mod tests {
    use carat_model::{
        backend::Backend, config::LayerKind, evaluate, gemma4, reference::Reference,
    };

    use super::*;

    #[test]
    fn every_variant_loads_in_every_format() {
        for variant in Variant::ALL {
            for quant in QuantType::all() {
                let tiny = Tiny::new(variant, quant);
                let model = tiny.model();
                let (config, dimensions) = (&model.config, &tiny.dimensions);
                assert_eq!(config.vocab, dimensions.vocab);
                assert_eq!(config.kv_layers, dimensions.kv_layers());
                assert_eq!(config.ple.unwrap_or(0), dimensions.ple);
                assert_eq!(config.experts, dimensions.experts);
                for ((layer, kind), ffn) in config
                    .layers
                    .iter()
                    .zip(&dimensions.kinds)
                    .zip(&dimensions.ffn)
                {
                    assert_eq!((layer.kind, layer.ffn), (*kind, *ffn), "{variant:?}");
                    assert_eq!(layer.kv_heads, dimensions.kv_heads.get(*kind));
                    assert_eq!(layer.head_dim, dimensions.head_dim.get(*kind));
                }
            }
        }
    }

    #[test]
    fn files_are_small_and_repeat_by_seed() {
        for variant in Variant::ALL {
            let tiny = Tiny::new(variant, QuantType::Q4_0);
            let bytes = tiny.bytes();
            assert!(
                bytes.len() < 320 << 10,
                "{variant:?}: {} bytes",
                bytes.len()
            );
            assert!(bytes == tiny.bytes());
            let other = Tiny {
                seed: 2,
                ..tiny.clone()
            };
            assert!(bytes != other.bytes());
        }
    }

    #[test]
    fn logits_are_finite_and_of_moderate_size() {
        for variant in Variant::ALL {
            for quant in [QuantType::F32, QuantType::Q4_0, QuantType::MXFP4] {
                let tiny = Tiny::new(variant, quant);
                let (model, tokens) = (tiny.model(), tiny.prompt(20));
                let plan = gemma4::plan(&model);
                let options = evaluate::options(tokens.len(), usize::MAX);
                let mut executor = Reference
                    .compile(&plan, model.weights, &options)
                    .expect("the reference compiles everything");
                let logits =
                    evaluate::logits(executor.as_mut(), &plan, &tokens, usize::MAX).expect("runs");
                let square: f32 = logits.iter().map(|x| x * x).sum();
                let rms = (square / logits.len() as f32).sqrt();
                assert!((0.5..5.0).contains(&rms), "{variant:?} {quant}: rms {rms}");
            }
        }
    }

    #[test]
    fn shared_tails_have_a_source_of_each_kind() {
        for variant in [Variant::E2b, Variant::E4b] {
            let dimensions = variant.dimensions(32);
            let own = &dimensions.kinds[..dimensions.kv_layers()];
            assert!(own.contains(&LayerKind::Sliding) && own.contains(&LayerKind::Full));
            let tail = &dimensions.kinds[dimensions.kv_layers()..];
            assert!(tail.contains(&LayerKind::Sliding) && tail.contains(&LayerKind::Full));
        }
    }

    #[test]
    fn prompts_start_with_bos_and_stay_in_the_vocabulary() {
        let tiny = Tiny::new(Variant::E4b, QuantType::Q8_0);
        let prompt = tiny.prompt(100);
        assert_eq!((prompt.len(), prompt[0]), (100, 2));
        assert!(prompt[1..].iter().all(|id| (24..400).contains(id)));
        assert!(tiny.prompt(0).is_empty());
    }
}
