//! The tensors a forward pass names, found in a file: names and shapes are checked here, once.

use std::{ops::Range, sync::Arc};

use carat_gguf::{Gguf, GgufError};

use crate::{
    config::{Config, Experts, LayerKind},
    error::ModelError,
    weights::{Matrix, Weight, Weights},
};

/// Everything a forward pass names, layer by layer.
pub struct Model {
    /// Hyper-parameters.
    pub config: Config,
    /// All tensors that are bound.
    pub weights: Arc<Weights>,
    /// Table of token embeddings.
    pub embedding: Weight,
    /// Norm before the head.
    pub output_norm: Weight,
    /// The head: its own tensor, or the embedding again.
    pub output: Weight,
    /// Per-layer embeddings, in models that have them.
    pub ple: Option<Ple>,
    /// In order.
    pub layers: Vec<Layer>,
    /// Divisors of the rotary angles of full-attention layers, one per pair.
    pub rope_divisors: Vec<f32>,
}

/// Per-layer embeddings, cut where rows that will not be sampled end.
pub struct Ple {
    /// Of each layer's slice of the projection.
    pub norm: Weight,
    /// For the layers before the last that writes KV: every row needs them.
    pub front: PleSlices,
    /// For the layers from there on: sampled rows only.
    pub tail: PleSlices,
}

/// The columns of the per-layer table, and the rows of its projection, of some consecutive layers.
pub struct PleSlices {
    /// The first of the layers these are for.
    pub first_layer: usize,
    /// Rows by token.
    pub table: Weight,
    /// Of the token's embedding.
    pub projection: Weight,
}

/// Weights of one layer.
pub struct Layer {
    /// Before attention.
    pub attn_norm: Weight,
    /// Queries.
    pub q: Weight,
    /// Of each query head.
    pub q_norm: Weight,
    /// Present on layers that write keys and values.
    pub own_kv: Option<OwnKv>,
    /// Back to the width of the stream.
    pub o: Weight,
    /// Of what attention gives.
    pub attn_post_norm: Weight,
    /// The dense feed-forward branch.
    pub ffn: DenseFfn,
    /// Experts beside it, in models that have them.
    pub moe: Option<Moe>,
    /// Of what the feed-forward branches give.
    pub ffn_post_norm: Weight,
    /// The layer's own inputs, in models that have them.
    pub ple: Option<LayerPle>,
    /// Of the stream behind the layer; 1 changes nothing.
    pub out_scale: f32,
}

/// Keys and values that a layer computes itself.
pub struct OwnKv {
    /// Keys.
    pub k: Weight,
    /// Of each key head.
    pub k_norm: Weight,
    /// Missing where values are the raw output of the key projection.
    pub v: Option<Weight>,
}

/// A gated feed-forward branch.
pub struct DenseFfn {
    /// Before it.
    pub norm: Weight,
    /// Goes through GELU.
    pub gate: Weight,
    /// Is multiplied with the gate.
    pub up: Weight,
    /// Back to the width of the stream.
    pub down: Weight,
}

/// Experts and their router.
pub struct Moe {
    /// Scores of experts.
    pub router: Weight,
    /// Of the router's own norm.
    pub router_scale: Weight,
    /// By expert; missing where it is 1.
    pub expert_scale: Option<Weight>,
    /// Of what the dense branch gives.
    pub dense_post_norm: Weight,
    /// Before the experts.
    pub norm: Weight,
    /// By expert: goes through GELU.
    pub gate: Weight,
    /// By expert: is multiplied with the gate.
    pub up: Weight,
    /// By expert: back to the width of the stream.
    pub down: Weight,
    /// Of what the experts give.
    pub post_norm: Weight,
}

/// Weights with which a layer takes its own inputs.
pub struct LayerPle {
    /// Of the stream.
    pub gate: Weight,
    /// Back to the width of the stream.
    pub projection: Weight,
    /// Of the result.
    pub post_norm: Weight,
}

impl Model {
    /// Reads the configuration and finds every tensor it asks for.
    pub fn load(file: Arc<Gguf>) -> Result<Model, ModelError> {
        let config = Config::read(&file)?;
        let mut b = Binder::new(&file);
        let embedding = b.matrix("token_embd.weight", config.dim, config.vocab.max(1))?;
        let output = b
            .optional("output.weight", &[config.dim, config.vocab])?
            .unwrap_or(embedding);
        let output_norm = b.vector("output_norm.weight", config.dim)?;
        let ple = config.ple.map(|width| b.ple(&config, width)).transpose()?;
        let layers = (0..config.layers.len())
            .map(|i| b.layer(&config, i))
            .collect::<Result<_, _>>()?;
        b.layer = None;
        let full = config.layers.iter().find(|l| l.kind == LayerKind::Full);
        let divisors = full
            .map(|l| b.vector("rope_freqs.weight", l.head_dim / 2))
            .transpose()?;
        let matrices = b.matrices;
        let weights = Arc::new(Weights::new(file, matrices));
        Ok(Model {
            rope_divisors: divisors.map(|w| weights.vector(w)).unwrap_or_default(),
            config,
            weights,
            embedding,
            output_norm,
            output,
            ple,
            layers,
        })
    }

    /// Values in all tensors of the file.
    pub fn parameter_count(&self) -> u64 {
        let tensors = self.weights.file().tensors();
        tensors
            .map(|t| t.shape.iter().map(|s| *s as u64).product::<u64>())
            .sum()
    }
}

/// Looks tensors up by name and checks their shapes.
pub(crate) struct Binder<'a> {
    file: &'a Gguf,
    pub(crate) matrices: Vec<Matrix>,
    layer: Option<LayerKind>,
}

impl<'a> Binder<'a> {
    pub(crate) fn new(file: &'a Gguf) -> Binder<'a> {
        Binder {
            file,
            matrices: Vec::new(),
            layer: None,
        }
    }
}

impl Binder<'_> {
    pub(crate) fn has(&self, name: &str) -> bool {
        matches!(self.file.tensor(name), Ok(Some(_)) | Err(_))
    }

    pub(crate) fn push(&mut self, matrix: Matrix) -> Weight {
        self.matrices.push(matrix);
        Weight::from_index(self.matrices.len() - 1)
    }

    pub(crate) fn tensor(&self, name: &str, expected: &[usize]) -> Result<Matrix, ModelError> {
        let Some(tensor) = self.file.tensor(name)? else {
            return Err(ModelError::MissingTensor {
                name: name.to_owned(),
                layer: self.layer,
            });
        };
        // Trailing dimensions of 1 may be written or not.
        let found = &tensor.info.shape;
        let padded = |shape: &[usize]| -> [usize; 4] {
            std::array::from_fn(|i| shape.get(i).copied().unwrap_or(1))
        };
        if padded(found) != padded(expected) {
            return Err(ModelError::Shape {
                name: name.to_owned(),
                found: found.clone(),
                expected: expected.to_vec(),
                layer: self.layer,
            });
        }
        let [columns, rows, count, _] = padded(expected);
        let row_stride = tensor.quant.row_bytes(columns);
        Ok(Matrix {
            name: name.to_owned(),
            quant: tensor.quant,
            rows,
            columns,
            row_stride,
            count,
            matrix_stride: rows * row_stride,
            start: 0,
            tensor: tensor.index,
            file: 0,
        })
    }

    pub(crate) fn vector(&mut self, name: &str, length: usize) -> Result<Weight, ModelError> {
        let vector = self.tensor(name, &[length])?;
        Ok(self.push(vector))
    }

    pub(crate) fn matrix(
        &mut self,
        name: &str,
        columns: usize,
        rows: usize,
    ) -> Result<Weight, ModelError> {
        let matrix = self.tensor(name, &[columns, rows])?;
        Ok(self.push(matrix))
    }

    fn optional(&mut self, name: &str, shape: &[usize]) -> Result<Option<Weight>, ModelError> {
        if !self.has(name) {
            return Ok(None);
        }
        let matrix = self.tensor(name, shape)?;
        Ok(Some(self.push(matrix)))
    }

    /// Some rows of every matrix in a tensor.
    fn rows(&mut self, whole: &Matrix, rows: Range<usize>) -> Weight {
        self.push(Matrix {
            name: format!("{}[{}..{}]", whole.name, rows.start, rows.end),
            rows: rows.len(),
            start: rows.start * whole.row_stride,
            ..whole.clone()
        })
    }

    /// Some columns of a tensor, which must begin and end with whole blocks.
    pub(crate) fn columns(&mut self, whole: &Matrix, columns: Range<usize>) -> Weight {
        self.push(Matrix {
            name: format!("{}[:, {}..{}]", whole.name, columns.start, columns.end),
            columns: columns.len(),
            start: whole.quant.row_bytes(columns.start),
            ..whole.clone()
        })
    }

    fn ple(&mut self, config: &Config, width: usize) -> Result<Ple, ModelError> {
        let total = width * config.layers.len();
        let table = self.tensor("per_layer_token_embd.weight", &[total, config.vocab])?;
        let projection = self.tensor("per_layer_model_proj.weight", &[config.dim, total])?;
        let norm = self.vector("per_layer_proj_norm.weight", width)?;
        let cut = width * (config.kv_layers - 1);
        let mut slices = |columns: Range<usize>| PleSlices {
            first_layer: columns.start / width,
            table: self.columns(&table, columns.clone()),
            projection: self.rows(&projection, columns),
        };
        // A cut inside a block cannot be a view; then both parts hold every layer.
        let block = table.quant.block_len();
        let (front, tail) = if cut > 0 && cut.is_multiple_of(block) && total.is_multiple_of(block) {
            (slices(0..cut), slices(cut..total))
        } else {
            (slices(0..total), slices(0..total))
        };
        Ok(Ple { norm, front, tail })
    }

    pub(crate) fn layer(&mut self, config: &Config, i: usize) -> Result<Layer, ModelError> {
        let l = &config.layers[i];
        let dim = config.dim;
        self.layer = Some(l.kind);
        let name = |part: &str| format!("blk.{i}.{part}");
        let [q, k, v] = self.qkv(config, i)?;
        let own_kv = match k {
            Some(k) => Some(OwnKv {
                k,
                k_norm: self.vector(&name("attn_k_norm.weight"), l.head_dim)?,
                v,
            }),
            None => None,
        };
        let moe = self.optional_moe(config, &name)?;
        let ple = config
            .ple
            .map(|width| -> Result<LayerPle, ModelError> {
                Ok(LayerPle {
                    gate: self.matrix(&name("inp_gate.weight"), dim, width)?,
                    projection: self.matrix(&name("proj.weight"), width, dim)?,
                    post_norm: self.vector(&name("post_norm.weight"), dim)?,
                })
            })
            .transpose()?;
        Ok(Layer {
            attn_norm: self.vector(&name("attn_norm.weight"), dim)?,
            q: q.ok_or_else(|| ModelError::MissingTensor {
                name: name("attn_q.weight"),
                layer: self.layer,
            })?,
            q_norm: self.vector(&name("attn_q_norm.weight"), l.head_dim)?,
            own_kv,
            o: self.matrix(&name("attn_output.weight"), l.heads * l.head_dim, dim)?,
            attn_post_norm: self.vector(&name("post_attention_norm.weight"), dim)?,
            ffn: DenseFfn {
                norm: self.vector(&name("ffn_norm.weight"), dim)?,
                gate: self.matrix(&name("ffn_gate.weight"), dim, l.ffn)?,
                up: self.matrix(&name("ffn_up.weight"), dim, l.ffn)?,
                down: self.matrix(&name("ffn_down.weight"), l.ffn, dim)?,
            },
            moe,
            ffn_post_norm: self.vector(&name("post_ffw_norm.weight"), dim)?,
            ple,
            out_scale: self
                .scalar(&name("layer_output_scale.weight"))?
                .unwrap_or(1.0),
        })
    }

    /// Query, key and value projections; keys and values of layers that share are left alone even where a file has them.
    fn qkv(&mut self, config: &Config, i: usize) -> Result<[Option<Weight>; 3], ModelError> {
        let l = &config.layers[i];
        let writes = i < config.kv_layers;
        let (q_rows, kv_rows) = (l.heads * l.head_dim, l.kv_heads * l.head_dim);
        let joined = format!("blk.{i}.attn_qkv.weight");
        if self.has(&joined) {
            let whole = self.tensor(&joined, &[config.dim, q_rows + 2 * kv_rows])?;
            let q = self.rows(&whole, 0..q_rows);
            let k = writes.then(|| self.rows(&whole, q_rows..q_rows + kv_rows));
            let v = writes.then(|| self.rows(&whole, q_rows + kv_rows..q_rows + 2 * kv_rows));
            return Ok([Some(q), k, v]);
        }
        let q = self.matrix(&format!("blk.{i}.attn_q.weight"), config.dim, q_rows)?;
        if !writes {
            return Ok([Some(q), None, None]);
        }
        let k = self.matrix(&format!("blk.{i}.attn_k.weight"), config.dim, kv_rows)?;
        let v = self.optional(&format!("blk.{i}.attn_v.weight"), &[config.dim, kv_rows])?;
        Ok([Some(q), Some(k), v])
    }

    /// The router makes a layer one with experts. Experts without it, or it without a number of experts, are damage.
    fn optional_moe(
        &mut self,
        config: &Config,
        name: &dyn Fn(&str) -> String,
    ) -> Result<Option<Moe>, ModelError> {
        let parts = [
            "ffn_gate_inp",
            "ffn_gate_up_exps",
            "ffn_gate_exps",
            "ffn_up_exps",
            "ffn_down_exps",
        ];
        if !parts
            .iter()
            .any(|part| self.has(&name(&format!("{part}.weight"))))
        {
            return Ok(None);
        }
        match &config.experts {
            Some(experts) => self.moe(experts, config.dim, name).map(Some),
            None => Err(GgufError::MissingKey("gemma4.expert_count".to_owned()).into()),
        }
    }

    fn moe(
        &mut self,
        experts: &Experts,
        dim: usize,
        name: &dyn Fn(&str) -> String,
    ) -> Result<Moe, ModelError> {
        let Experts { count, ffn, .. } = *experts;
        let joined = name("ffn_gate_up_exps.weight");
        let (gate, up) = if self.has(&joined) {
            let whole = self.tensor(&joined, &[dim, 2 * ffn, count])?;
            (self.rows(&whole, 0..ffn), self.rows(&whole, ffn..2 * ffn))
        } else {
            let gate = self.tensor(&name("ffn_gate_exps.weight"), &[dim, ffn, count])?;
            let up = self.tensor(&name("ffn_up_exps.weight"), &[dim, ffn, count])?;
            (self.push(gate), self.push(up))
        };
        let down = self.tensor(&name("ffn_down_exps.weight"), &[ffn, dim, count])?;
        Ok(Moe {
            router: self.matrix(&name("ffn_gate_inp.weight"), dim, count)?,
            router_scale: self.vector(&name("ffn_gate_inp.scale"), dim)?,
            expert_scale: self.optional(&name("ffn_down_exps.scale"), &[count])?,
            dense_post_norm: self.vector(&name("post_ffw_norm_1.weight"), dim)?,
            norm: self.vector(&name("pre_ffw_norm_2.weight"), dim)?,
            gate,
            up,
            down: self.push(down),
            post_norm: self.vector(&name("post_ffw_norm_2.weight"), dim)?,
        })
    }

    fn scalar(&mut self, name: &str) -> Result<Option<f32>, ModelError> {
        if !self.has(name) {
            return Ok(None);
        }
        self.tensor(name, &[1])?;
        let mut value = [0.0];
        if let Some(tensor) = self.file.tensor(name)? {
            tensor.quant.dequantize(tensor.bytes, &mut value);
        }
        Ok(Some(value[0]))
    }
}
