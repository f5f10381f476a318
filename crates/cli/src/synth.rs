//! Writes a model of real shape and random weights, for speed runs that need no trained one.
//!
//! Values have the size of trained ones, so nothing overflows or degenerates; the text such a model writes is noise.
//! Tensors are drawn by several threads in pieces of a few megabytes and written in order, so a model of any size takes
//! little memory. The same preset, formats and seed give the same file, whatever the number of threads.

mod mix;
mod preset;
#[cfg(test)]
mod tests;

use std::{
    io::Write,
    ops::ControlFlow,
    path::{Path, PathBuf},
    sync::mpsc::{self, Receiver, Sender},
    thread,
    time::{Duration, Instant},
};

use anyhow::{Context, Result, bail};
use carat_gguf::{
    Gguf, QuantType, Value,
    quant::SplitMix64,
    writer::{Field, Writer, pad},
};
use carat_model::synthetic::{Dimensions, Role, TensorPlan, Vocabulary};

use crate::output::WholeFile;

pub(crate) use mix::Mix;
pub(crate) use preset::Preset;

/// Bytes of a tensor that are drawn at a time.
const PIECE_BYTES: usize = 4 << 20;
/// Pieces of a thread that exist at once: drawn, waiting, being written.
const BUFFERS: usize = 3;

/// `Break` stops the work.
pub(crate) type Progress = dyn FnMut(u64, u64) -> ControlFlow<()>;

pub(crate) struct Options {
    pub(crate) seed: u64,
    /// Take the vocabulary from this file instead of making one up.
    pub(crate) vocabulary: Option<PathBuf>,
    pub(crate) threads: usize,
    /// Told the bytes written so far and in all, a few times per second at the least.
    pub(crate) progress: Box<Progress>,
}

impl Default for Options {
    fn default() -> Options {
        Options {
            seed: 1,
            vocabulary: None,
            threads: thread::available_parallelism().map_or(1, usize::from),
            progress: Box::new(|_, _| ControlFlow::Continue(())),
        }
    }
}

/// Sizes of the written file.
#[derive(Debug)]
pub(crate) struct Summary {
    pub(crate) bytes: u64,
    pub(crate) tensors: usize,
    pub(crate) elapsed: Duration,
}

/// Writes the model to `out`, which appears only once it is complete.
pub(crate) fn write(preset: Preset, mix: Mix, out: &Path, options: Options) -> Result<Summary> {
    write_model(preset.dimensions(), mix, out, options)
}

fn write_model(
    mut dimensions: Dimensions,
    mix: Mix,
    out: &Path,
    mut options: Options,
) -> Result<Summary> {
    let start = Instant::now();
    let mut head = Writer::default();
    let vocabulary = match &options.vocabulary {
        Some(path) => {
            let file = Gguf::open(path)
                .with_context(|| format!("cannot take the vocabulary of `{}`", path.display()))?;
            Tokens::Copied(file)
        }
        None if dimensions.vocab == Vocabulary::PUBLISHED => Tokens::Made(Vocabulary::published()),
        None => Tokens::Made(Vocabulary::packed(dimensions.vocab)),
    };
    dimensions.vocab = vocabulary.count()?;
    dimensions.write_metadata(&mut head);
    head.field("general.file_type", &Field::U32(mix.file_type));
    head.field("general.quantization_version", &Field::U32(2));
    vocabulary.write_metadata(&mut head);

    let jobs = Jobs::plan(&dimensions, mix, options.seed, &mut head);
    let mut file = WholeFile::create(out)?;
    file.fill(|file| {
        head.write_head(file)?;
        jobs.write(file, options.threads.max(1), &mut options.progress)
    })?;
    let bytes = file.commit()?;
    Ok(Summary {
        bytes,
        tensors: jobs.tensors.len(),
        elapsed: start.elapsed(),
    })
}

/// Origin of a model's tokens.
enum Tokens {
    Made(Vocabulary),
    Copied(Gguf),
}

impl Tokens {
    fn count(&self) -> Result<usize> {
        match self {
            Tokens::Made(vocabulary) => Ok(vocabulary.tokens.len()),
            Tokens::Copied(file) => match file.metadata().require("tokenizer.ggml.tokens")? {
                Value::Array(tokens) if !tokens.is_empty() => Ok(tokens.len()),
                _ => bail!("`{}` has no vocabulary", file.path().display()),
            },
        }
    }

    fn write_metadata(&self, head: &mut Writer) {
        match self {
            Tokens::Made(vocabulary) => vocabulary.write_metadata(head),
            Tokens::Copied(file) => {
                for (key, value) in file.metadata().iter() {
                    if key.starts_with("tokenizer.") {
                        head.copy(key, value);
                    }
                }
            }
        }
    }
}

/// All tensors, cut into pieces.
struct Jobs {
    tensors: Vec<(TensorPlan, QuantType)>,
    pieces: Vec<Piece>,
    seed: u64,
    total_bytes: u64,
}

struct Piece {
    tensor: usize,
    bytes: usize,
    /// Bytes of the whole tensor, in its last piece: what the padding after it depends on.
    ends: Option<usize>,
}

impl Jobs {
    fn plan(dimensions: &Dimensions, mix: Mix, seed: u64, head: &mut Writer) -> Jobs {
        let mut jobs = Jobs {
            tensors: Vec::new(),
            pieces: Vec::new(),
            seed,
            total_bytes: 0,
        };
        for (tensor, plan) in dimensions.tensors().into_iter().enumerate() {
            let quant = mix.format(&plan, dimensions.layers());
            let size = head.tensor(&plan.name, &plan.shape, quant);
            let most = PIECE_BYTES / quant.block_bytes() * quant.block_bytes();
            for at in (0..size).step_by(most) {
                let bytes = most.min(size - at);
                jobs.pieces.push(Piece {
                    tensor,
                    bytes,
                    ends: (at + bytes == size).then_some(size),
                });
            }
            jobs.total_bytes += size as u64;
            jobs.tensors.push((plan, quant));
        }
        jobs
    }

    fn draw(&self, index: usize, bytes: &mut Vec<u8>) {
        let piece = &self.pieces[index];
        let (plan, quant) = &self.tensors[piece.tensor];
        bytes.resize(piece.bytes, 0);
        let seed = SplitMix64::part(self.seed, index as u64).next_u64();
        plan.fill(*quant, seed, bytes);
        if *quant == QuantType::F32 && matches!(plan.role, Role::PleBottleneck | Role::Router) {
            truncate_to_bf16(bytes);
        }
    }

    /// Piece `i` is drawn by lane `i % threads`, so the writer knows where the next one comes from.
    fn write(
        &self,
        file: &mut dyn Write,
        threads: usize,
        progress: &mut Progress,
    ) -> std::io::Result<()> {
        thread::scope(|scope| {
            let lanes: Vec<Lane> = (0..threads)
                .map(|first| {
                    let (lane, filled, empty) = Lane::new();
                    scope.spawn(move || {
                        for index in (first..self.pieces.len()).step_by(threads) {
                            // No more buffers come when the writer has given up.
                            let Ok(mut bytes) = empty.recv() else { return };
                            self.draw(index, &mut bytes);
                            let _ = filled.send(bytes);
                        }
                    });
                    lane
                })
                .collect();
            let mut written = 0;
            for (index, piece) in self.pieces.iter().enumerate() {
                let lane = &lanes[index % threads];
                let bytes = lane.filled.recv().expect("a lane draws all its pieces");
                file.write_all(&bytes)?;
                // A lane that has drawn its last piece takes no buffer back.
                let _ = lane.empty.send(bytes);
                if let Some(size) = piece.ends {
                    pad(file, size)?;
                }
                written += piece.bytes as u64;
                if progress(written, self.total_bytes).is_break() {
                    return Err(std::io::ErrorKind::Interrupted.into());
                }
            }
            Ok(())
        })
    }
}

/// The writer's side of a thread that draws. A few buffers go round between the two: that bounds the memory, and they are
/// not asked from the system again and again.
struct Lane {
    filled: Receiver<Vec<u8>>,
    empty: Sender<Vec<u8>>,
}

impl Lane {
    /// The writer's side, and the thread's.
    fn new() -> (Lane, Sender<Vec<u8>>, Receiver<Vec<u8>>) {
        let ((send_filled, filled), (empty, take_empty)) = (mpsc::channel(), mpsc::channel());
        for _ in 0..BUFFERS {
            empty.send(Vec::new()).expect("the receiver is right here");
        }
        (Lane { filled, empty }, send_filled, take_empty)
    }
}

/// Trained weights are BF16, also where a file keeps them as F32.
fn truncate_to_bf16(values: &mut [u8]) {
    for value in values.as_chunks_mut::<4>().0 {
        value[..2].fill(0);
    }
}
