//! Memory of a plan, by purpose, before any is taken.

use std::fmt;

use carat_model::{
    backend::{CompileOptions, Need},
    kv::{KvGroup, PAGE_TOKENS, PerGroup},
    layout::Layout,
    plan::{Plan, Rows, Shape, SlotSpec, Value},
};

use super::{
    batch_layout::{BatchLayout, PageTables},
    rows::padded_rows,
    scratch::Scratch,
    target::GemmImpl,
    weights::WeightLayout,
};
use crate::{
    device::{MIN_ALLOCATION, cublaslt::WORKSPACE_BYTES},
    kernel::sampler_bytes,
    placement::HostParts,
};

/// Alignment of buffers.
const ALIGN: usize = 256;

/// Bytes by purpose. All but those in host memory are device memory.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MemoryPlan {
    pub weights: usize,
    /// Weights that are larger on the device than in the file.
    pub expanded_weights: usize,
    /// Tables that the device reads from host memory.
    pub host_tables: usize,
    /// Matrices that the device reads from host memory.
    pub host_weights: usize,
    pub kv: PerGroup<usize>,
    /// Values between steps.
    pub activations: usize,
    /// Values within steps.
    pub scratch: usize,
    /// Descriptions of batches: tokens, positions, page tables.
    pub batch: usize,
    /// Sampling's scratch between its launches.
    pub sampling: usize,
    /// Workspace of cuBLASLt.
    pub workspace: usize,
    /// Buffers that prompts bring weights into from host memory.
    pub streaming: usize,
    /// Frequencies of RoPE, and the least that each allocation takes.
    pub frequencies: usize,
    /// What lies in host memory, as a file would have it.
    pub placement: HostParts,
    /// What was done without for want of memory, and what that costs, in lines for a person.
    pub given_up: Vec<String>,
}

/// Allocations of an executor, some of which may be of nothing.
const BUFFERS: usize = 12;

/// Bytes of the frequencies of all kinds of RoPE.
fn frequency_bytes(plan: &Plan) -> usize {
    let tables = plan.ropes.iter().map(|rope| rope.frequencies.len());
    size_of::<f32>() * tables.sum::<usize>()
}

impl MemoryPlan {
    pub(crate) fn new(
        plan: &Plan,
        options: &CompileOptions,
        weights: &WeightLayout,
        parts: &Parts,
        gemm: GemmImpl,
    ) -> MemoryPlan {
        MemoryPlan {
            weights: weights.device_bytes,
            expanded_weights: weights.expanded_bytes,
            host_tables: weights.host_table_bytes,
            host_weights: weights.host_bytes - weights.host_table_bytes,
            kv: PerGroup {
                full: parts.kv.full.bytes,
                sliding: parts.kv.sliding.bytes,
            },
            activations: parts.activations.bytes,
            scratch: parts.scratch.bytes,
            batch: BatchLayout::new(options, PageTables::Stay).bytes(),
            sampling: sampler_bytes(plan.vocab(), options.max_sampled),
            workspace: match gemm {
                GemmImpl::CublasLt => WORKSPACE_BYTES,
                GemmImpl::Native => 0,
            },
            streaming: 0,
            frequencies: frequency_bytes(plan) + BUFFERS * MIN_ALLOCATION,
            placement: HostParts::default(),
            given_up: Vec::new(),
        }
    }

    /// As engines ask for it.
    pub(crate) fn need(&self) -> Need {
        Need {
            bytes: self.device_bytes(),
            offloaded_bytes: self.host_weights as u64,
            parts: self.to_string(),
        }
    }

    /// Bytes that the device must have free.
    pub fn device_bytes(&self) -> u64 {
        let kv = self.kv.full + self.kv.sliding;
        let weights = self.weights + self.expanded_weights;
        let values = self.activations + self.scratch;
        let beside =
            self.batch + self.sampling + self.workspace + self.streaming + self.frequencies;
        (weights + kv + values + beside) as u64
    }
}

impl fmt::Display for MemoryPlan {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let parts = [
            ("weights", self.weights),
            ("weights, dequantized to f16", self.expanded_weights),
            ("keys and values, full attention", self.kv.full),
            ("keys and values, sliding windows", self.kv.sliding),
            ("activations", self.activations),
            ("scratch", self.scratch),
            ("batch", self.batch),
            ("sampling", self.sampling),
            ("cuBLASLt workspace", self.workspace),
            ("buffers for streamed weights", self.streaming),
            ("RoPE frequencies", self.frequencies),
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
        let in_host = [
            ("tables in host memory", self.host_tables),
            ("weights in host memory", self.host_weights),
        ];
        for (name, bytes) in in_host.into_iter().filter(|(_, bytes)| *bytes > 0) {
            line(f, name, bytes as u64)?;
        }
        for line in &self.given_up {
            writeln!(f, "{line}")?;
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
    pub(crate) fn new(sizes: impl Iterator<Item = usize>) -> Arena {
        let mut arena = Arena::default();
        for bytes in sizes {
            arena.offsets.push(arena.bytes);
            arena.bytes = (arena.bytes + bytes).next_multiple_of(ALIGN);
        }
        arena
    }
}

/// Offsets of values, scratch and KV within their allocations.
#[derive(Clone, Debug)]
pub(crate) struct Parts {
    layout: Layout,
    activations: Arena,
    pub(crate) scratch: Arena,
    pub(crate) kv: PerGroup<KvPages>,
}

/// Pages of a group's slots in one allocation: keys of one slot after another and of the chunk pages, then values alike. So the chunk
/// pages lie as far from a slot's keys as from its values, in pages. Where keys follow from values, there are those of one slot: all
/// have them at the same place.
#[derive(Clone, Debug, Default)]
pub(crate) struct KvPages {
    pub(crate) slots: Vec<SlotPages>,
    pub(crate) bytes: usize,
}

/// Offsets of one slot's pages, and where the chunk pages are.
#[derive(Clone, Debug)]
pub(crate) struct SlotPages {
    pub(crate) keys: usize,
    pub(crate) values: usize,
    /// The first name of a chunk page.
    pub(crate) chunk_pages: u32,
    /// Pages by which chunk pages lie further from this slot's first than their names say.
    pub(crate) chunk_shift: u32,
}

impl KvPages {
    fn new(plan: &Plan, options: &CompileOptions, group: KvGroup) -> KvPages {
        let (pages, kv) = (*options.pages.get(group), *options.kv.get(group));
        let page = |slot: &SlotSpec| PAGE_TOKENS * slot.kv_heads * kv.head_bytes(slot.head_dim);
        let own = plan.own_slots(group);
        let count = own.clone().count();
        let chunk_pages = options.named_pages(group) - pages;
        let held: usize = own.clone().map(|slot| pages * page(slot)).sum();
        let chunk = own
            .clone()
            .next()
            .map_or(0, |slot| chunk_pages * page(slot));
        let tied = group == KvGroup::Full && !plan.tied_keys().is_empty();
        let values = (held + chunk).next_multiple_of(ALIGN);
        // Made keys are f16.
        let f16_page = |slot: &SlotSpec| PAGE_TOKENS * slot.kv_heads * slot.head_dim * 2;
        let made = own.clone().next().map_or(0, |slot| pages * f16_page(slot));
        let keys = if tied { made } else { values }.next_multiple_of(ALIGN);
        let mut offset = 0;
        let slots = own.enumerate().map(|(place, slot)| {
            let at = SlotPages {
                keys: if tied { 0 } else { offset },
                values: keys + offset,
                chunk_pages: pages as u32,
                chunk_shift: ((count - 1 - place) * pages) as u32,
            };
            offset += pages * page(slot);
            at
        });
        KvPages {
            slots: slots.collect(),
            bytes: keys + values,
        }
    }
}

impl Parts {
    pub(crate) fn new(
        plan: &Plan,
        options: &CompileOptions,
        layout: Layout,
        scratch: &Scratch,
    ) -> Parts {
        let rows = |rows: Rows| match rows {
            Rows::All => padded_rows(options.max_rows),
            Rows::Sampled => padded_rows(options.max_sampled),
        };
        let values = |shape: &Shape| rows(shape.rows) * shape.columns * 4;
        // A step may have all rows, whichever it has in this plan.
        let rows_held = padded_rows(options.max_rows.max(options.max_sampled));
        Parts {
            activations: Arena::new(layout.buffers.iter().map(values)),
            scratch: Arena::new(scratch.sizes().map(|s| rows_held * s.per_row + s.fixed)),
            kv: PerGroup {
                full: KvPages::new(plan, options, KvGroup::Full),
                sliding: KvPages::new(plan, options, KvGroup::Sliding),
            },
            layout,
        }
    }

    pub(crate) fn stores(&self, value: Value) -> bool {
        self.layout.stores(value)
    }

    /// Offset of a stored value among the activations.
    pub(crate) fn value(&self, value: Value) -> usize {
        self.activations.offsets[self.layout.buffer(value)]
    }

    pub(crate) fn activation_bytes(&self) -> usize {
        self.activations.bytes
    }
}

#[cfg(test)]
#[expect(
    clippy::needless_raw_string_hashes,
    reason = "as expect-test writes them"
)]
mod tests {
    use carat_gguf::QuantType;
    use carat_model::{gemma4, kv::KvType, layout::page_bytes, synthetic::Dimensions};
    use carat_testkit::tiny::{Tiny, Variant};
    use expect_test::expect;

    use super::*;
    use crate::{
        compile::{prepare::prepare, target::Target},
        config::{Fusion, TableMemory},
        kernel::Operand,
    };

    fn options(rows: usize) -> CompileOptions {
        CompileOptions {
            pages: PerGroup {
                full: 64,
                sliding: 16,
            },
            chunk_pages: 0,
            host_pages: PerGroup::default(),
            kv: PerGroup::default(),
            max_rows: rows,
            max_sampled: 8,
            probe: false,
            batching: carat_model::backend::Batching::Fast,
        }
    }

    fn plan(variant: Variant, rows: usize, tables: TableMemory) -> MemoryPlan {
        let model = Tiny::new(variant, QuantType::Q8_0).model();
        let plan = gemma4::plan(&model);
        let target = Target::hopper(Fusion::On, rows);
        let prepared = prepare(&plan, &model.weights, &options(rows), tables, target);
        prepared.expect("tiny models are supported").memory
    }

    #[test]
    fn a_plan_is_printed_by_purpose() {
        expect![[r#"
            weights                                   0.3 MiB
            weights, dequantized to f16               0.0 MiB
            keys and values, full attention           0.5 MiB
            keys and values, sliding windows          0.1 MiB
            activations                               0.8 MiB
            scratch                                   1.4 MiB
            batch                                     0.6 MiB
            sampling                                  0.4 MiB
            RoPE frequencies                          0.0 MiB
            device memory                             4.1 MiB
            tables in host memory                     0.1 MiB
        "#]]
        .assert_eq(&plan(Variant::E4b, 512, TableMemory::Host).to_string());
    }

    #[test]
    fn pages_hold_keys_and_values_in_their_type() {
        let memory = plan(Variant::Dense31b, 32, TableMemory::Device);
        // Two sliding layers of 4 heads of 16, one full layer of 2 heads of 32; keys and values, 2 bytes.
        assert_eq!(memory.kv.sliding, 16 * 32 * 2 * (4 * 16) * 2 * 2);
        assert_eq!(memory.kv.full, 64 * 32 * (2 * 32) * 2 * 2);

        let model = Tiny::new(Variant::Dense31b, QuantType::Q8_0).model();
        let options = CompileOptions {
            kv: PerGroup {
                full: KvType::Q8_0,
                sliding: KvType::F16,
            },
            ..options(32)
        };
        let target = Target {
            kv: options.kv,
            ..Target::hopper(Fusion::On, 32)
        };
        let prepared = prepare(
            &gemma4::plan(&model),
            &model.weights,
            &options,
            TableMemory::Device,
            target,
        );
        let memory = prepared.expect("compiles").memory;
        // A block of 32 values is 34 bytes; keys that are made from them are f16.
        assert_eq!(memory.kv.sliding, 16 * 32 * 2 * (4 * 16) * 2 * 2);
        assert_eq!(memory.kv.full, 64 * 32 * 2 * (34 + 64));
    }

    #[test]
    fn full_layers_that_hold_values_alone_have_keys_at_one_place() {
        let mut tiny = Tiny::new(Variant::Dense31b, QuantType::Q8_0);
        tiny.dimensions.kinds = Dimensions::pattern(9, 3);
        tiny.dimensions.ffn = vec![64; 9];
        let model = tiny.model();
        let plan = gemma4::plan(&model);
        let pages = KvPages::new(&plan, &options(16), KvGroup::Full);
        let tensor = 64 * 32 * (2 * 32) * 2;
        assert_eq!(pages.bytes, (1 + 3) * tensor);
        for (place, slot) in pages.slots.iter().enumerate() {
            assert_eq!((slot.keys, slot.values), (0, (1 + place) * tensor));
        }
        assert_eq!(
            page_bytes(&plan, KvType::F16.into()).full * 64,
            3 * tensor,
            "what is saved of a page"
        );
    }

    #[test]
    fn activations_grow_with_rows_and_weights_do_not() {
        let (small, large) = (
            plan(Variant::Moe26b, 16, TableMemory::Device),
            plan(Variant::Moe26b, 256, TableMemory::Device),
        );
        assert_eq!(small.weights, large.weights);
        assert!(large.activations > 4 * small.activations);
        assert!(large.scratch > small.scratch);
    }

    #[test]
    fn scratch_grows_with_buckets_of_rows() {
        let of = |rows| plan(Variant::Dense12b, rows, TableMemory::Device).scratch;
        assert_eq!(of(17), of(32));
        assert!(of(33) > of(32));
    }

    #[test]
    fn buffers_are_shared_but_never_within_a_call() {
        for variant in Variant::ALL {
            let model = Tiny::new(variant, QuantType::Q8_0).model();
            let plan = gemma4::plan(&model);
            for gemm in [GemmImpl::Native, GemmImpl::CublasLt] {
                let target = Target {
                    gemm,
                    ..Target::hopper(Fusion::On, 16)
                };
                let prepared = prepare(
                    &plan,
                    &model.weights,
                    &options(16),
                    TableMemory::Device,
                    target,
                );
                let prepared = prepared.unwrap();
                for call in prepared.calls() {
                    let offset = |operand: &Operand| match operand {
                        Operand::Value(v) => Some(prepared.parts.value(*v)),
                        Operand::Scratch(_) => None,
                    };
                    let (reads, writes) = (call.reads(), call.writes());
                    let reads: Vec<usize> = reads.iter().filter_map(offset).collect();
                    let writes: Vec<usize> = writes.iter().filter_map(offset).collect();
                    for (i, write) in writes.iter().enumerate() {
                        assert!(!reads.contains(write), "{}", call.label);
                        assert!(!writes[..i].contains(write), "{}", call.label);
                    }
                }
            }
        }
    }
}
