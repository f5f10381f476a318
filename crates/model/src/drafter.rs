//! A draft model: the tensors of a `gemma4-assistant` file, bound beside those of its target.
//!
//! A drafter has no keys and values. Each of its layers reads those of the last target layer of the same kind that writes any, and
//! its input is the target's token embedding beside the target's last hidden state. So a drafter can only be loaded with its
//! target, and everything that must agree between the two is checked here.
//!
//! Two dialects of the file are about: the names of today (`nextn.pre_projection`), and older ones (`mtp.pre_projection`, an
//! underscore in the architecture). Their contents are the same.

use std::sync::Arc;

use carat_gguf::{Gguf, GgufError};

use crate::{
    TokenId,
    bind::{Binder, Layer, Model},
    config::{Config, Keys, LayerKind, RopeBase, printable},
    error::ModelError,
    weights::{Weight, Weights},
};

/// Names of the architecture, in either dialect.
pub(crate) const ARCHITECTURES: [&str; 2] = ["gemma4-assistant", "gemma4_assistant"];
/// Clusters that the published models take, where a file does not say.
const CLUSTERS_TAKEN: usize = 32;

/// Everything that a draft step names.
pub struct Drafter {
    /// Hyper-parameters. A layer's `kv_source` is a layer of the target.
    pub config: Config,
    /// Tensors of both files that are bound.
    pub weights: Arc<Weights>,
    /// The target's table of token embeddings.
    pub embedding: Weight,
    /// Width of the target's stream.
    pub target_dim: usize,
    /// Columns of the projection that the embedding meets.
    pub pre_token: Weight,
    /// Columns of the projection that the state meets.
    pub pre_state: Weight,
    /// In order.
    pub layers: Vec<Layer>,
    /// Norm before the head.
    pub output_norm: Weight,
    /// The head: the drafter's own table of token embeddings.
    pub output: Weight,
    /// To the state of the next step.
    pub post: Weight,
    /// The head by clusters, in files that have it.
    pub clusters: Option<Clusters>,
    /// Divisors of the rotary angles of full-attention layers, one per pair.
    pub rope_divisors: Vec<f32>,
}

/// The head by clusters: only tokens of the nearest clusters get a logit.
pub struct Clusters {
    /// A row per cluster.
    pub centroids: Weight,
    /// All tokens, those of the first cluster first.
    pub tokens: Vec<TokenId>,
    /// Clusters that are taken.
    pub top: usize,
}

impl Drafter {
    /// Whether a file says that it is a drafter.
    pub fn is_one(file: &Gguf) -> bool {
        let architecture = file.metadata().str("general.architecture");
        matches!(architecture, Ok(Some(found)) if ARCHITECTURES.contains(&found))
    }

    /// Reads a drafter's file and finds every tensor it asks for, in its own file and in that of `target`.
    pub fn load(file: Arc<Gguf>, target: &Model) -> Result<Drafter, ModelError> {
        let architecture = file.metadata().str("general.architecture")?;
        let Some(architecture) = ARCHITECTURES.into_iter().find(|a| Some(*a) == architecture)
        else {
            return Err(ModelError::Architecture {
                found: architecture.unwrap_or("(none)").to_owned(),
                hint: " with drafters of the architecture `gemma4-assistant`",
            });
        };
        let keys = Keys {
            metadata: file.metadata(),
            architecture,
        };
        let config = read_config(&file, &keys, target)?;
        let target_dim = target.config.dim;
        let mut b = Binder::new(&file);
        let [pre, post] = ["pre_projection", "post_projection"].map(|part| {
            let names = ["nextn", "mtp"].map(|dialect| format!("{dialect}.{part}.weight"));
            let found = names.iter().position(|name| b.has(name));
            names
                .into_iter()
                .nth(found.unwrap_or(0))
                .unwrap_or_default()
        });
        let pre = b.tensor(&pre, &[2 * target_dim, config.dim])?;
        if !target_dim.is_multiple_of(pre.quant.block_len()) {
            return Err(ModelError::Setting {
                key: format!("{architecture}.embedding_length_out"),
                value: target_dim.to_string(),
                problem: format!(
                    "it does not divide into the {} blocks of the projection",
                    pre.quant
                ),
            });
        }
        let pre_token = b.columns(&pre, 0..target_dim);
        let pre_state = b.columns(&pre, target_dim..2 * target_dim);
        let post = b.matrix(&post, config.dim, target_dim)?;
        let output = b.matrix("token_embd.weight", config.dim, config.vocab.max(1))?;
        let output_norm = b.vector("output_norm.weight", config.dim)?;
        let layers = (0..config.layers.len())
            .map(|i| b.layer(&config, i))
            .collect::<Result<_, _>>()?;
        let clusters = bind_clusters(&mut b, &file, &keys, &config)?;
        let full = config.layers.iter().find(|l| l.kind == LayerKind::Full);
        let divisors = full
            .map(|l| b.vector("rope_freqs.weight", l.head_dim / 2))
            .transpose()?;
        let mut embedding = target.weights.matrix(target.embedding).clone();
        embedding.file = 1;
        embedding.name = format!("target:{}", embedding.name);
        let embedding = b.push(embedding);
        let matrices = b.matrices;
        let files = vec![file, target.weights.shared_file()];
        let weights = Arc::new(Weights::of_files(files, matrices));
        Ok(Drafter {
            rope_divisors: divisors.map(|w| weights.vector(w)).unwrap_or_default(),
            config,
            weights,
            embedding,
            target_dim,
            pre_token,
            pre_state,
            layers,
            output_norm,
            output,
            post,
            clusters,
        })
    }
}

fn agree(what: &str, found: usize, expected: usize) -> Result<(), ModelError> {
    if found == expected {
        return Ok(());
    }
    Err(ModelError::Mismatch {
        what: what.to_owned(),
        found,
        expected,
    })
}

fn read_config(file: &Gguf, keys: &Keys<'_>, target: &Model) -> Result<Config, ModelError> {
    let its = &target.config;
    let count = keys.count("block_count")?;
    // Each layer brings several tensors, so a damaged count shows here before anything is sized by it.
    if count > file.tensors().len() {
        return Err(keys.complain(
            "block_count",
            count,
            "more layers than the file has tensors",
        ));
    }
    let target_dim = match keys.optional_count("embedding_length_out")? {
        Some(dim) => dim,
        None => keys
            .optional_count("n_embd_backbone")?
            .ok_or_else(|| GgufError::MissingKey(keys.name("embedding_length_out")))?,
    };
    agree("the width of the model's stream", target_dim, its.dim)?;
    let vocab = Config::vocab(file)?;
    agree("the vocabulary", vocab, its.vocab)?;
    let window = keys.count("attention.sliding_window")?;
    agree("the sliding window", window, its.window)?;
    let mut layers = Config::layers(keys, count, count)?;
    for (i, layer) in layers.iter_mut().enumerate() {
        let writes = its.layers[..its.kv_layers].iter();
        let Some(source) = writes.clone().rposition(|l| l.kind == layer.kind) else {
            let kind = layer.kind;
            let what = format!("layers of the model that a {kind} layer could read: the number");
            return Err(ModelError::Mismatch {
                what,
                found: 1,
                expected: 0,
            });
        };
        let read = &its.layers[source];
        let of = |what: &str| format!("{what} of layer {i}");
        agree(&of("the head size"), layer.head_dim, read.head_dim)?;
        agree(&of("the number of KV heads"), layer.kv_heads, read.kv_heads)?;
        layer.kv_source = source;
    }
    if window < 2 && layers.iter().any(|l| l.kind == LayerKind::Sliding) {
        // A drafter sees the window less the position that it drafts from.
        return Err(keys.complain("attention.sliding_window", window, "it must be 2 or more"));
    }
    Ok(Config {
        name: printable(keys.metadata.str("general.name")?.unwrap_or("unnamed")),
        dim: keys.count("embedding_length")?,
        vocab,
        context: its.context,
        eps: keys.positive("attention.layer_norm_rms_epsilon")?,
        softcap: None,
        window,
        ple: None,
        experts: None,
        rope_base: RopeBase {
            full: keys.positive("rope.freq_base")?,
            sliding: keys.optional_positive("rope.freq_base_swa")?.unwrap_or(1e4),
        },
        layers,
        kv_layers: 0,
    })
}

/// The head by clusters, if the file has both of its tensors.
fn bind_clusters(
    b: &mut Binder<'_>,
    file: &Gguf,
    keys: &Keys<'_>,
    config: &Config,
) -> Result<Option<Clusters>, ModelError> {
    let dialects = [
        ("masked_embd_centroids.weight", "masked_embd_ordering"),
        ("mtp.centroids.weight", "mtp.token_ordering.weight"),
    ];
    for (centroids, ordering) in dialects {
        let Some(tokens) = file.integers(ordering)?.filter(|_| b.has(centroids)) else {
            continue;
        };
        let rows = file
            .tensor(centroids)?
            .map_or(0, |tensor| tensor.info.shape.get(1).copied().unwrap_or(1));
        let wrong = |problem: &str| ModelError::Setting {
            key: ordering.to_owned(),
            value: format!("of {} tokens", tokens.len()),
            problem: problem.to_owned(),
        };
        if tokens.len() != config.vocab || rows == 0 || !tokens.len().is_multiple_of(rows) {
            return Err(wrong(
                "every token must be in one of the clusters, all of one size",
            ));
        }
        let mut seen = vec![false; config.vocab];
        for token in &tokens {
            let place = usize::try_from(*token).ok().and_then(|t| seen.get_mut(t));
            if place.is_none_or(|seen| std::mem::replace(seen, true)) {
                return Err(wrong("it must name every token once"));
            }
        }
        let top = keys
            .optional_count("centroid_top_k")?
            .filter(|top| *top > 0);
        return Ok(Some(Clusters {
            centroids: b.matrix(centroids, config.dim, rows)?,
            tokens: tokens.iter().map(|token| *token as TokenId).collect(),
            top: top.unwrap_or(CLUSTERS_TAKEN).min(rows),
        }));
    }
    Ok(None)
}
