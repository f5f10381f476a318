//! Format of each tensor in published files of a kind.

use carat_gguf::QuantType;
use carat_model::synthetic::{Role, TensorPlan};

#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
#[expect(non_camel_case_types, reason = "the names people know")]
pub(crate) enum Mix {
    #[value(name = "q8_0")]
    Q8_0,
    /// As in the official files trained for four bits.
    #[value(name = "q4_0")]
    Q4_0,
    #[value(name = "q4_k_m")]
    Q4_K_M,
}

impl Mix {
    /// The number other programs know the mix by, in `general.file_type`.
    pub(crate) fn file_type(self) -> u32 {
        match self {
            Mix::Q4_0 => 2,
            Mix::Q8_0 => 7,
            Mix::Q4_K_M => 15,
        }
    }

    /// The format of a tensor of a model with so many layers.
    pub(crate) fn format(self, tensor: &TensorPlan, layers: usize) -> QuantType {
        let wanted = match (self, tensor.role) {
            (_, Role::Vector | Role::Router) | (Mix::Q8_0 | Mix::Q4_0, Role::PleBottleneck) => {
                QuantType::F32
            }
            (_, Role::PleProjection) => QuantType::BF16,
            (Mix::Q8_0, _) => QuantType::Q8_0,
            (Mix::Q4_0 | Mix::Q4_K_M, Role::TokenEmbedding) => QuantType::Q6_K,
            (Mix::Q4_0, _) => QuantType::Q4_0,
            (Mix::Q4_K_M, Role::PleEmbedding) => QuantType::Q5_K,
            (Mix::Q4_K_M, Role::AttentionV | Role::FfnDown)
                if has_more_bits(tensor.layer, layers) =>
            {
                QuantType::Q6_K
            }
            (Mix::Q4_K_M, _) => QuantType::Q4_K,
        };
        fitting(wanted, tensor.columns())
    }
}

/// The rule of the reference quantizer: the first and the last eighth of the layers, and every third between.
fn has_more_bits(layer: usize, layers: usize) -> bool {
    let eighth = layers / 8;
    layer < eighth || layer >= 7 * layers / 8 || (layer - eighth) % 3 == 2
}

/// Format that the reference quantizer takes where rows do not divide into blocks of 256.
fn fitting(wanted: QuantType, columns: usize) -> QuantType {
    match wanted {
        _ if columns.is_multiple_of(wanted.block_len()) => wanted,
        QuantType::Q4_K => QuantType::Q5_0,
        QuantType::Q5_K => QuantType::Q5_1,
        _ => QuantType::Q8_0,
    }
}
