//! A model's dimensions, and the metadata that states them.

use carat_gguf::writer::{Field, Writer};

use crate::config::{Experts, LayerKind};

/// All dimensions of a model, one field a fact, so that a test can change one.
#[derive(Clone, Debug, PartialEq)]
pub struct Dimensions {
    /// Written into the file.
    pub name: String,
    /// By layer.
    pub kinds: Vec<LayerKind>,
    /// Width of the stream.
    pub dim: usize,
    /// FFN width of each layer.
    pub ffn: Vec<usize>,
    /// Query heads.
    pub heads: usize,
    /// Heads of keys and values.
    pub kv_heads: ByKind<usize>,
    /// Width of a head.
    pub head_dim: ByKind<usize>,
    /// Positions a sliding layer sees, itself included.
    pub window: usize,
    /// The most positions.
    pub context: usize,
    /// Layers at the end that read the keys and values of earlier ones.
    pub shared_kv_layers: usize,
    /// Width of the per-layer embedding; 0 for none.
    pub ple: usize,
    /// Values of full-attention layers; sliding ones always project their own.
    pub full_values: FullValues,
    /// Facts of the experts, if there are any.
    pub experts: Option<Experts>,
    /// Bound of the final logits; 0 for none.
    pub softcap: f32,
    /// Tokens there are.
    pub vocab: usize,
    /// Width of the target's stream, where this is the shape of a drafter; 0 for a model.
    pub target_dim: usize,
}

/// A fact that differs between sliding-window and full-attention layers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ByKind<T> {
    /// Of sliding-window layers.
    pub sliding: T,
    /// Of full-attention layers.
    pub full: T,
}

impl<T: Copy> ByKind<T> {
    /// Of layers of this kind.
    pub fn get(self, kind: LayerKind) -> T {
        match kind {
            LayerKind::Sliding => self.sliding,
            LayerKind::Full => self.full,
        }
    }
}

/// Source of the values of full-attention layers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FullValues {
    /// A matrix of their own.
    Projected,
    /// The key projection before norm and rotation: there is no tensor for values.
    Keys,
}

impl Dimensions {
    /// Every `period`-th layer attends to everything, the others to a window.
    pub fn pattern(layers: usize, period: usize) -> Vec<LayerKind> {
        (1..=layers)
            .map(|n| {
                if n.is_multiple_of(period) {
                    LayerKind::Full
                } else {
                    LayerKind::Sliding
                }
            })
            .collect()
    }

    /// Layers there are.
    pub fn layers(&self) -> usize {
        self.kinds.len()
    }

    /// Layers below this one write keys and values.
    pub fn kv_layers(&self) -> usize {
        self.layers() - self.shared_kv_layers
    }

    /// As the file says it.
    fn architecture(&self) -> &'static str {
        if self.target_dim > 0 {
            crate::drafter::ARCHITECTURES[0]
        } else {
            crate::config::ARCHITECTURE
        }
    }

    /// The metadata of the architecture, without the vocabulary.
    pub fn write_metadata(&self, writer: &mut Writer) {
        let count = |n: usize| u32::try_from(n).expect("dimensions fit 32 bits");
        let architecture = self.architecture();
        writer.field("general.architecture", &Field::Str(architecture));
        writer.field("general.name", &Field::Str(&self.name));
        let mut put =
            |key: &str, field: Field<'_>| writer.field(&format!("{architecture}.{key}"), &field);
        if self.target_dim > 0 {
            put("embedding_length_out", Field::U32(count(self.target_dim)));
            put("nextn_predict_layers", Field::U32(count(self.layers())));
        }
        put("block_count", Field::U32(count(self.layers())));
        put("context_length", Field::U32(count(self.context)));
        put("embedding_length", Field::U32(count(self.dim)));
        put(
            "embedding_length_per_layer_input",
            Field::U32(count(self.ple)),
        );
        put_each(&mut put, "feed_forward_length", &self.ffn);
        put("attention.head_count", Field::U32(count(self.heads)));
        let kv_heads: Vec<usize> = self.kinds.iter().map(|&k| self.kv_heads.get(k)).collect();
        put_each(&mut put, "attention.head_count_kv", &kv_heads);
        for (key, dim) in [
            ("attention.key_length", self.head_dim.full),
            ("attention.value_length", self.head_dim.full),
            ("attention.key_length_swa", self.head_dim.sliding),
            ("attention.value_length_swa", self.head_dim.sliding),
            ("rope.dimension_count", self.head_dim.full),
            ("rope.dimension_count_swa", self.head_dim.sliding),
            ("attention.sliding_window", self.window),
            ("attention.shared_kv_layers", self.shared_kv_layers),
        ] {
            put(key, Field::U32(count(dim)));
        }
        let sliding: Vec<bool> = self
            .kinds
            .iter()
            .map(|kind| *kind == LayerKind::Sliding)
            .collect();
        put("attention.sliding_window_pattern", Field::Bools(&sliding));
        put("attention.layer_norm_rms_epsilon", Field::F32(1e-6));
        put("rope.freq_base", Field::F32(1e6));
        put("rope.freq_base_swa", Field::F32(1e4));
        if self.softcap > 0.0 || self.target_dim == 0 {
            put("final_logit_softcapping", Field::F32(self.softcap));
        }
        if let Some(experts) = self.experts {
            put("expert_count", Field::U32(count(experts.count)));
            put("expert_used_count", Field::U32(count(experts.used)));
            put("expert_feed_forward_length", Field::U32(count(experts.ffn)));
        }
    }
}

/// One number where all layers agree, as published files have it, else an array of i32.
fn put_each(put: &mut impl FnMut(&str, Field<'_>), key: &str, values: &[usize]) {
    let values: Vec<i32> = values
        .iter()
        .map(|&n| i32::try_from(n).expect("dimensions fit 32 bits"))
        .collect();
    match values[..] {
        [first, ref rest @ ..] if rest.iter().all(|v| *v == first) => {
            put(key, Field::U32(first.cast_unsigned()));
        }
        _ => put(key, Field::I32s(&values)),
    }
}
