//! Default sampling: as the model's file says, with another seed each time.

use std::hash::{BuildHasher, RandomState};

use carat_gguf::Metadata;
use carat_model::sampling::Sampling;

use crate::Error;

/// The file's own habits, Gemma's where it has none.
pub fn file_sampling(file: &Metadata, seed: u64) -> Result<Sampling, Error> {
    let gemma = Sampling::default();
    Ok(Sampling {
        temperature: file
            .f32("general.sampling.temp")?
            .unwrap_or(gemma.temperature),
        top_k: file
            .u32("general.sampling.top_k")?
            .map_or(gemma.top_k, |k| k as usize),
        top_p: file.f32("general.sampling.top_p")?.unwrap_or(gemma.top_p),
        min_p: file.f32("general.sampling.min_p")?.unwrap_or(gemma.min_p),
        seed,
        ..gemma
    })
}

/// Another number each time, from the source of randomness the standard library has.
pub fn fresh_seed() -> u64 {
    RandomState::new().hash_one(0u8)
}
