//! How much memory a plan needs, by purpose, before any is taken.

use std::fmt;

use carat_model::{
    backend::{CompileOptions, KvGroup, PAGE_TOKENS, PerGroup},
    layout::{Layout, page_bytes},
    plan::{Plan, Rows, Shape, Value},
};

use crate::{batch::BatchLayout, weights::WeightLayout};

/// Where buffers start.
const ALIGN: usize = 256;
/// Keys and values are halves.
const KV_ELEMENT: usize = 2;

/// Bytes by purpose. All but `host_tables` are device memory.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MemoryPlan {
    pub weights: usize,
    /// Tables that the device reads from host memory.
    pub host_tables: usize,
    pub kv: PerGroup<usize>,
    /// Values between steps.
    pub activations: usize,
    /// Values within steps.
    pub scratch: usize,
    /// Descriptions of batches: tokens, positions, page tables.
    pub batch: usize,
}

impl MemoryPlan {
    pub(crate) fn new(
        plan: &Plan,
        options: &CompileOptions,
        weights: &WeightLayout,
        parts: &Parts,
    ) -> MemoryPlan {
        let page = page_bytes(plan, KV_ELEMENT);
        MemoryPlan {
            weights: weights.device_bytes,
            host_tables: weights.host_bytes,
            kv: PerGroup {
                full: page.full * options.pages.full,
                sliding: page.sliding * options.pages.sliding,
            },
            activations: parts.activations.bytes,
            scratch: parts.scratch.bytes,
            batch: BatchLayout::new(options).bytes(),
        }
    }

    /// What the device must have free.
    pub fn device_bytes(&self) -> u64 {
        let kv = self.kv.full + self.kv.sliding;
        (self.weights + kv + self.activations + self.scratch + self.batch) as u64
    }
}

impl fmt::Display for MemoryPlan {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let parts = [
            ("weights", self.weights),
            ("keys and values, full attention", self.kv.full),
            ("keys and values, sliding windows", self.kv.sliding),
            ("activations", self.activations),
            ("scratch", self.scratch),
            ("batch", self.batch),
        ];
        let line = |f: &mut fmt::Formatter<'_>, name: &str, bytes: u64| {
            writeln!(
                f,
                "{name:<34} {:>10.1} MiB",
                bytes as f64 / f64::from(1 << 20)
            )
        };
        for (name, bytes) in parts.into_iter().filter(|(_, bytes)| *bytes > 0) {
            line(f, name, bytes as u64)?;
        }
        line(f, "device memory", self.device_bytes())?;
        if self.host_tables > 0 {
            line(f, "tables in host memory", self.host_tables as u64)?;
        }
        Ok(())
    }
}

/// Buffers in one allocation.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Arena {
    pub(crate) offsets: Vec<usize>,
    pub(crate) bytes: usize,
}

impl Arena {
    fn new(sizes: impl Iterator<Item = usize>) -> Arena {
        let mut arena = Arena::default();
        for bytes in sizes {
            arena.offsets.push(arena.bytes);
            arena.bytes = (arena.bytes + bytes).next_multiple_of(ALIGN);
        }
        arena
    }
}

/// Where values, scratch and KV lie within their allocations.
#[derive(Clone, Debug)]
pub(crate) struct Parts {
    layout: Layout,
    activations: Arena,
    pub(crate) scratch: Arena,
    /// Keys, then values, of each slot.
    pub(crate) kv: PerGroup<Arena>,
}

impl Parts {
    pub(crate) fn new(
        plan: &Plan,
        options: &CompileOptions,
        layout: Layout,
        scratch: &[usize],
    ) -> Parts {
        let rows = |rows: Rows| match rows {
            Rows::All => options.max_rows,
            Rows::Sampled => options.max_sampled,
        };
        let values = |shape: &Shape| rows(shape.rows) * shape.columns * 4;
        let kv =
            |group: KvGroup| {
                let slots = plan.slots.iter().filter(move |s| s.group == group);
                let pages = *options.pages.get(group);
                Arena::new(slots.flat_map(move |s| {
                    [pages * PAGE_TOKENS * s.kv_heads * s.head_dim * KV_ELEMENT; 2]
                }))
            };
        // A step may have all rows, whichever it has in this plan.
        let most = options.max_rows.max(options.max_sampled);
        Parts {
            activations: Arena::new(layout.buffers.iter().map(values)),
            scratch: Arena::new(scratch.iter().map(|columns| most * columns * 4)),
            kv: PerGroup {
                full: kv(KvGroup::Full),
                sliding: kv(KvGroup::Sliding),
            },
            layout,
        }
    }

    /// Where a value starts among the activations.
    pub(crate) fn value(&self, value: Value) -> usize {
        self.activations.offsets[self.layout.buffer(value)]
    }

    pub(crate) fn activation_bytes(&self) -> usize {
        self.activations.bytes
    }
}
