//! Names, shapes and the kind of values of all tensors of a model.
//!
//! Values are chosen so that activations stay near one through any number of layers and attention is spread over many
//! positions: the arithmetic sees numbers of the size it sees in trained models.

use carat_gguf::{
    QuantType,
    quant::{SplitMix64, random_blocks},
};

use super::dimensions::{Dimensions, FullValues};

/// A tensor to write.
#[derive(Clone, Debug, PartialEq)]
pub struct TensorPlan {
    /// In the file.
    pub name: String,
    /// Fastest dimension first: `[columns, rows, …]`.
    pub shape: Vec<usize>,
    /// 0 for tensors that belong to no layer.
    pub layer: usize,
    /// Its purpose.
    pub role: Role,
    values: Values,
}

/// Purpose of a tensor, as far as published files choose its format by it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Role {
    /// Norm weights, scales, rotary divisors: F32 everywhere.
    Vector,
    /// Rows by token.
    TokenEmbedding,
    /// Per-layer rows by token.
    PleEmbedding,
    /// From the token embedding to all layers' inputs.
    PleProjection,
    /// Into and out of a layer's own small bottleneck.
    PleBottleneck,
    /// Scores of experts.
    Router,
    /// Values.
    AttentionV,
    /// Back to the width of the stream.
    FfnDown,
    /// Any other matrix.
    Matrix,
}

#[derive(Clone, Copy, Debug, PartialEq)]
enum Values {
    /// Around 0, with this deviation.
    Spread(f32),
    /// A tenth around this.
    Near(f32),
    /// 1 for the first quarter of the pairs, which turn; so large that the rest stand still.
    RotaryDivisors,
}

impl TensorPlan {
    /// Values of a row.
    pub fn columns(&self) -> usize {
        self.shape[0]
    }

    /// Fills `out`, which holds all blocks of the tensor or, for a matrix, some of them, each with a seed of its own.
    pub fn fill(&self, quant: QuantType, seed: u64, out: &mut [u8]) {
        match self.values {
            Values::Spread(std) => random_blocks(quant, seed, std, out),
            Values::Near(base) => {
                let mut rng = SplitMix64::new(seed);
                self.put_floats(quant, out, |_| base * (1.0 + 0.1 * rng.gauss()));
            }
            Values::RotaryDivisors => {
                let turning = self.columns() / 4;
                self.put_floats(quant, out, |j| if j < turning { 1.0 } else { 1e30 });
            }
        }
    }

    fn put_floats(&self, quant: QuantType, out: &mut [u8], mut value: impl FnMut(usize) -> f32) {
        assert_eq!(quant, QuantType::F32, "{} is a vector", self.name);
        for (j, place) in out.as_chunks_mut().0.iter_mut().enumerate() {
            *place = value(j).to_le_bytes();
        }
    }
}

impl Dimensions {
    /// Every tensor, in file order.
    pub fn tensors(&self) -> Vec<TensorPlan> {
        let mut list = List {
            tensors: Vec::new(),
            layer: None,
        };
        let dim = self.dim;
        let embedding = 1.5 / (dim as f32).sqrt();
        list.spread(
            "token_embd.weight",
            &[dim, self.vocab],
            Role::TokenEmbedding,
            embedding,
        );
        list.near("output_norm.weight", dim, 1.0);
        list.put(
            "rope_freqs.weight",
            &[self.head_dim.full / 2],
            Role::Vector,
            Values::RotaryDivisors,
        );
        if self.target_dim > 0 {
            let target = self.target_dim;
            let (pre, post) = (
                "nextn.pre_projection.weight",
                "nextn.post_projection.weight",
            );
            list.matrix(pre, &[2 * target, dim], Role::Matrix);
            list.matrix(post, &[dim, target], Role::Matrix);
        }
        if self.ple > 0 {
            let all = self.ple * self.layers();
            list.spread(
                "per_layer_token_embd.weight",
                &[all, self.vocab],
                Role::PleEmbedding,
                1.0 / (self.ple as f32).sqrt(),
            );
            list.matrix(
                "per_layer_model_proj.weight",
                &[dim, all],
                Role::PleProjection,
            );
            list.near("per_layer_proj_norm.weight", self.ple, 1.0);
        }
        for layer in 0..self.layers() {
            list.layer = Some(layer);
            self.attention(&mut list, layer);
            self.feed_forward(&mut list, layer);
            if self.ple > 0 {
                list.matrix("inp_gate.weight", &[dim, self.ple], Role::PleBottleneck);
                list.matrix("proj.weight", &[self.ple, dim], Role::PleBottleneck);
                list.near("post_norm.weight", dim, 1.0);
            }
            // Below one: each layer adds to the residual stream, and dozens of them follow each other.
            list.near("layer_output_scale.weight", 1, 0.9);
        }
        list.tensors
    }

    fn attention(&self, list: &mut List, layer: usize) {
        let kind = self.kinds[layer];
        let head_dim = self.head_dim.get(kind);
        let (q, kv) = (self.heads * head_dim, self.kv_heads.get(kind) * head_dim);
        list.near("attn_norm.weight", self.dim, 1.0);
        list.matrix("attn_q.weight", &[self.dim, q], Role::Matrix);
        // Scores are not divided by anything: a norm of this size keeps attention from being an arg max.
        list.near(
            "attn_q_norm.weight",
            head_dim,
            2.0 / (head_dim as f32).sqrt(),
        );
        if layer < self.kv_layers() {
            list.matrix("attn_k.weight", &[self.dim, kv], Role::Matrix);
            list.near("attn_k_norm.weight", head_dim, 1.0);
            if kind == crate::config::LayerKind::Sliding
                || self.full_values == FullValues::Projected
            {
                list.matrix("attn_v.weight", &[self.dim, kv], Role::AttentionV);
            }
        }
        list.matrix("attn_output.weight", &[q, self.dim], Role::Matrix);
        list.near("post_attention_norm.weight", self.dim, 1.0);
    }

    fn feed_forward(&self, list: &mut List, layer: usize) {
        let (dim, ffn) = (self.dim, self.ffn[layer]);
        list.near("ffn_norm.weight", dim, 1.0);
        list.matrix("ffn_gate.weight", &[dim, ffn], Role::Matrix);
        list.matrix("ffn_up.weight", &[dim, ffn], Role::Matrix);
        list.matrix("ffn_down.weight", &[ffn, dim], Role::FfnDown);
        list.near("post_ffw_norm.weight", dim, 1.0);
        let Some(e) = self.experts else { return };
        let root = (dim as f32).sqrt();
        list.spread(
            "ffn_gate_inp.weight",
            &[dim, e.count],
            Role::Router,
            3.0 / root,
        );
        list.near("ffn_gate_inp.scale", dim, root);
        list.near("pre_ffw_norm_2.weight", dim, 1.0);
        list.near("post_ffw_norm_1.weight", dim, 1.0);
        list.near("post_ffw_norm_2.weight", dim, 1.0);
        list.matrix(
            "ffn_gate_up_exps.weight",
            &[dim, 2 * e.ffn, e.count],
            Role::Matrix,
        );
        list.matrix(
            "ffn_down_exps.weight",
            &[e.ffn, dim, e.count],
            Role::FfnDown,
        );
        list.near("ffn_down_exps.scale", e.count, 1.0);
    }
}

struct List {
    tensors: Vec<TensorPlan>,
    /// The layer whose tensors are being listed; their names get its prefix.
    layer: Option<usize>,
}

impl List {
    fn put(&mut self, name: &str, shape: &[usize], role: Role, values: Values) {
        self.tensors.push(TensorPlan {
            name: match self.layer {
                Some(layer) => format!("blk.{layer}.{name}"),
                None => name.to_owned(),
            },
            shape: shape.to_vec(),
            layer: self.layer.unwrap_or(0),
            role,
            values,
        });
    }

    fn near(&mut self, name: &str, length: usize, base: f32) {
        self.put(name, &[length], Role::Vector, Values::Near(base));
    }

    fn spread(&mut self, name: &str, shape: &[usize], role: Role, std: f32) {
        self.put(name, shape, role, Values::Spread(std));
    }

    /// A matrix that keeps the size of what it multiplies.
    fn matrix(&mut self, name: &str, shape: &[usize], role: Role) {
        self.spread(name, shape, role, 1.0 / (shape[0] as f32).sqrt());
    }
}
