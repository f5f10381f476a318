//! Format of each tensor in published files of a kind.
//!
//! A mix is a row of a table: the format of most matrices, that of those which get more bits, and those of the tables.
//! Mixes that are called by a format's name have that format wherever it fits. The `ud-` ones are like the dynamic mixes
//! people publish: formats change from layer to layer and within a layer.

use carat_gguf::QuantType;
use carat_model::synthetic::{Role, TensorPlan};
use clap::builder::PossibleValue;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Mix {
    name: &'static str,
    /// The number other programs know the mix by, in `general.file_type`.
    pub(crate) file_type: u32,
    /// Of most matrices.
    base: QuantType,
    /// Of values and of the way down, in layers that get more bits.
    more: QuantType,
    /// Of keys in those layers.
    keys: QuantType,
    /// Of experts' matrices.
    experts: QuantType,
    embedding: QuantType,
    ple_embedding: QuantType,
    ple_bottleneck: QuantType,
}

impl Mix {
    pub(crate) const Q8_0: Mix = Mix {
        embedding: QuantType::Q8_0,
        ..Mix::of("q8_0", 7, QuantType::Q8_0)
    };
    /// As in the official files trained for four bits.
    pub(crate) const Q4_0: Mix = Mix::of("q4_0", 2, QuantType::Q4_0);
    pub(crate) const Q4_K_M: Mix = Mix {
        more: QuantType::Q6_K,
        ple_embedding: QuantType::Q5_K,
        ple_bottleneck: QuantType::Q4_K,
        ..Mix::of("q4_k_m", 15, QuantType::Q4_K)
    };

    /// One format for all matrices of the layers.
    const fn of(name: &'static str, file_type: u32, quant: QuantType) -> Mix {
        Mix {
            name,
            file_type,
            base: quant,
            more: quant,
            keys: quant,
            experts: quant,
            embedding: QuantType::Q6_K,
            ple_embedding: quant,
            ple_bottleneck: QuantType::F32,
        }
    }

    /// A dynamic mix.
    const fn dynamic(
        name: &'static str,
        file_type: u32,
        [base, more, keys]: [QuantType; 3],
        [embedding, ple_embedding]: [QuantType; 2],
    ) -> Mix {
        Mix {
            more,
            keys,
            embedding,
            ple_embedding,
            ..Mix::of(name, file_type, base)
        }
    }

    /// The format of a tensor of a model with so many layers.
    pub(crate) fn format(self, tensor: &TensorPlan, layers: usize) -> QuantType {
        let more_bits = has_more_bits(tensor.layer, layers);
        let wanted = match tensor.role {
            Role::Vector | Role::Router => QuantType::F32,
            Role::PleProjection => QuantType::BF16,
            Role::PleBottleneck => self.ple_bottleneck,
            Role::TokenEmbedding => self.embedding,
            Role::PleEmbedding => self.ple_embedding,
            Role::AttentionV | Role::FfnDown if more_bits => self.more,
            Role::Matrix if more_bits && tensor.name.contains("attn_k.") => self.keys,
            _ if tensor.name.contains("_exps.") => self.experts,
            _ => self.base,
        };
        fitting(wanted, tensor.columns())
    }
}

static TABLE: [Mix; 34] = {
    use QuantType::{
        BF16, F16, IQ1_M, IQ1_S, IQ2_S, IQ2_XS, IQ2_XXS, IQ3_S, IQ3_XXS, IQ4_NL, IQ4_XS, MXFP4,
        NVFP4, Q1_0, Q2_K, Q3_K, Q4_1, Q4_K, Q5_0, Q5_1, Q5_K, Q6_K, Q8_0, TQ1_0, TQ2_0,
    };
    [
        Mix::Q8_0,
        Mix::Q4_0,
        Mix::Q4_K_M,
        Mix::of("f16", 1, F16),
        Mix::of("bf16", 32, BF16),
        Mix::of("q4_1", 3, Q4_1),
        Mix::of("q5_0", 8, Q5_0),
        Mix::of("q5_1", 9, Q5_1),
        Mix::of("q2_k", 10, Q2_K),
        Mix::of("q3_k", 12, Q3_K),
        Mix::of("q4_k", 14, Q4_K),
        Mix::of("q5_k", 16, Q5_K),
        Mix::of("q6_k", 18, Q6_K),
        Mix::of("iq4_nl", 25, IQ4_NL),
        Mix::of("iq4_xs", 30, IQ4_XS),
        Mix::of("mxfp4", 38, MXFP4),
        Mix::of("nvfp4", 39, NVFP4),
        Mix::of("iq3_s", 26, IQ3_S),
        Mix::of("iq3_xxs", 23, IQ3_XXS),
        Mix::of("iq2_s", 28, IQ2_S),
        Mix::of("iq2_xs", 20, IQ2_XS),
        Mix::of("iq2_xxs", 19, IQ2_XXS),
        Mix::of("iq1_m", 31, IQ1_M),
        Mix::of("iq1_s", 24, IQ1_S),
        Mix::of("tq2_0", 37, TQ2_0),
        Mix::of("tq1_0", 36, TQ1_0),
        Mix::of("q1_0", 40, Q1_0),
        Mix {
            experts: MXFP4,
            ..Mix::of("mxfp4_moe", 38, Q8_0)
        },
        Mix::dynamic("ud-q4_k_xl", 15, [Q4_K, Q6_K, Q5_K], [Q6_K, Q6_K]),
        Mix::dynamic("ud-iq4_xs", 30, [IQ4_XS, Q5_K, Q4_K], [Q6_K, Q5_K]),
        Mix::dynamic("ud-q3_k_xl", 12, [Q3_K, Q6_K, Q4_K], [Q6_K, Q5_K]),
        Mix::dynamic("ud-iq3_xxs", 23, [IQ3_XXS, Q4_K, IQ3_S], [Q5_K, IQ4_XS]),
        Mix::dynamic("ud-iq2_m", 29, [IQ2_S, IQ3_S, Q2_K], [Q5_K, IQ4_XS]),
        Mix::dynamic("ud-iq1_m", 31, [IQ1_M, IQ2_XXS, IQ2_XS], [Q4_K, Q3_K]),
    ]
};

impl clap::ValueEnum for Mix {
    fn value_variants<'a>() -> &'a [Mix] {
        &TABLE
    }

    fn to_possible_value(&self) -> Option<PossibleValue> {
        Some(PossibleValue::new(self.name))
    }
}

/// The rule of the reference quantizer: the first and the last eighth of the layers, and every third between.
fn has_more_bits(layer: usize, layers: usize) -> bool {
    let eighth = layers / 8;
    layer < eighth || layer >= 7 * layers / 8 || (layer - eighth) % 3 == 2
}

/// Format that the reference quantizer takes where rows do not divide into blocks.
fn fitting(wanted: QuantType, columns: usize) -> QuantType {
    match wanted {
        _ if columns.is_multiple_of(wanted.block_len()) => wanted,
        QuantType::Q4_K => QuantType::Q5_0,
        QuantType::Q5_K => QuantType::Q5_1,
        QuantType::Q6_K => QuantType::Q8_0,
        _ if columns.is_multiple_of(QuantType::IQ4_NL.block_len()) => QuantType::IQ4_NL,
        _ => QuantType::F16,
    }
}
