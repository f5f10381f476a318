//! Memory that a model takes while it runs, told before it does: for programs that keep several within a budget.

use carat_engine::{EngineConfig, Limits, ModelFacts};
use carat_model::{
    backend::CompileOptions,
    kv::KvGroup,
    layout::{self, Layout},
    plan::Rows,
};

use crate::{
    Error, Loaded,
    context::{Fits, longest},
};

/// Memory per token of a vocabulary: its text, its place in the tokenizer, and what grammars keep of it. With the 262,144
/// tokens of Gemma 4 the tokenizer was seen to take 45 MiB, and grammars 133 MiB.
const BYTES_PER_TOKEN: u64 = 720;
/// Whatever else an engine takes: its threads' stacks, tables, queues.
const ENGINE_BYTES: u64 = 32 << 20;
/// A conversation needs this much, however short memory is.
const SMALLEST_CONTEXT: usize = 2048;

/// Bytes that an engine with these settings takes: of the device's memory where it has its own, else of the machine's, with the whole
/// file.
pub fn footprint(loaded: &Loaded, config: &EngineConfig) -> Result<u64, Error> {
    Ok(taken(loaded, config)?.0)
}

/// Bytes that an engine takes, and those of weights that it reads through a device's bus instead.
fn taken(loaded: &Loaded, config: &EngineConfig) -> Result<(u64, u64), Error> {
    let limits = Limits::new(config.clone(), ModelFacts::from(&loaded.plan))?;
    let options = limits.compile_options();
    Ok(match loaded.need(&options)? {
        Some(need) => (need.bytes, need.offloaded_bytes),
        None => (ram_bytes(loaded, &options), 0),
    })
}

/// Bytes of the machine's memory that it takes where the processor computes, with the whole file.
pub fn ram_bytes(loaded: &Loaded, options: &CompileOptions) -> u64 {
    let drafter = loaded.drafts.drafter.as_ref();
    let files = loaded.file.file_bytes() + drafter.map_or(0, |d| d.weights.file().file_bytes());
    let page = layout::page_bytes(&loaded.plan, options.kv);
    let held = layout::kv_bytes(&loaded.plan, options);
    let groups = KvGroup::ALL.iter();
    let kv = groups.map(|g| held.get(*g) + options.host_pages.get(*g) * page.get(*g));
    let shared = Layout::shared(&loaded.plan.with_products_gathered());
    let workspace = shared.buffers.iter().map(|shape| {
        let rows = match shape.rows {
            Rows::All => options.max_rows,
            Rows::Sampled => options.max_sampled,
        };
        shape.columns * rows * size_of::<f32>()
    });
    let computed = kv.sum::<usize>() + workspace.sum::<usize>();
    let copied = loaded.model.weights.narrowed_bytes();
    let text = loaded.model.config.vocab as u64 * BYTES_PER_TOKEN;
    (files + copied + computed) as u64 + text + ENGINE_BYTES
}

/// The smallest context that is chosen for a model.
pub fn smallest_context(loaded: &Loaded) -> usize {
    loaded.model.config.context.min(SMALLEST_CONTEXT)
}

/// The largest context, by halves of what the model was trained for, with which an engine takes at most so many bytes; the smallest
/// there is where none does.
pub fn largest_context(loaded: &Loaded, parallel: usize, bytes: u64) -> Result<usize, Error> {
    longest(
        loaded.model.config.context,
        smallest_context(loaded),
        |tokens| {
            let config = loaded.engine_config(parallel, tokens);
            Ok(match taken(loaded, &config)? {
                (taken, _) if taken > bytes => Fits::Not,
                (_, 0) => Fits::Comfortably,
                _ => Fits::Offloaded,
            })
        },
    )
}
