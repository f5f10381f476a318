//! Streaming of offloaded weights in large batches: each matrix is copied to a buffer of the card while earlier launches compute,
//! and multiplied there. A large batch would read it through the bus once per tile of rows; a copy reads it once.
//!
//! Buffers are used in turn. The copy into one starts when the last launch that reads what was in it is over, so with two of them
//! a copy is under way beside the work. All of it is known when a plan is compiled: a program has its list of transfers, and a
//! launch reads the same bits wherever they lie. Small and medium batches read offloaded weights in place, each once.

use std::ops::{Range, RangeInclusive};

use carat_model::phase::Phase;

use super::{
    call::Call,
    memory::Arena,
    weights::{Memory, WeightLayout},
};
use crate::kernel::{WeightFormat, WeightOperand};

/// Buffers to have at least: one is read while another is filled.
const MIN_BUFFERS: usize = 2;

/// One copy of a matrix to the card.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Transfer {
    /// As calls name it.
    pub(crate) operand: WeightOperand,
    pub(crate) buffer: usize,
    pub(crate) bytes: usize,
    /// The first and the last call that reads it.
    readers: RangeInclusive<usize>,
}

/// The copies of a program, in the order of the calls that read them.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Transfers {
    pub(crate) list: Vec<Transfer>,
    /// Buffers that they use in turn.
    buffer_count: usize,
}

impl Transfers {
    pub(crate) fn of(calls: &[Call], weights: &WeightLayout) -> Transfers {
        let streamed = |call: &Call| streamed(call, weights);
        let most = calls.iter().map(|call| streamed(call).len()).max();
        let buffer_count = most.unwrap_or(0).max(MIN_BUFFERS);
        let mut list: Vec<Transfer> = Vec::new();
        for (index, call) in calls.iter().enumerate() {
            let needed = streamed(call);
            // What this call needs besides must not be copied over what it finds.
            let first_kept = (list.len() + needed.len()).saturating_sub(buffer_count);
            for (operand, bytes) in needed {
                let mut held = list.iter_mut().skip(first_kept);
                if let Some(held) = held.find(|t| t.operand == operand) {
                    held.readers = *held.readers.start()..=index;
                    continue;
                }
                list.push(Transfer {
                    operand,
                    buffer: list.len() % buffer_count,
                    bytes,
                    readers: index..=index,
                });
            }
        }
        Transfers { list, buffer_count }
    }

    /// Transfers that start with the program.
    pub(crate) fn at_start(&self) -> Range<usize> {
        0..self.buffer_count.min(self.list.len())
    }

    /// Transfers that a call is the first to read.
    pub(crate) fn awaited_by(&self, call: usize) -> impl Iterator<Item = usize> {
        let all = self.list.iter().enumerate();
        all.filter(move |(_, t)| *t.readers.start() == call)
            .map(|(i, _)| i)
    }

    /// Transfers that a call is the last to read, each with the one that may start then in its buffer.
    pub(crate) fn freed_by(&self, call: usize) -> impl Iterator<Item = (usize, usize)> {
        let followed = self.list.len().saturating_sub(self.buffer_count);
        let followed = self.list[..followed].iter().enumerate();
        let freed = followed.filter(move |(_, t)| *t.readers.end() == call);
        freed.map(|(i, _)| (i, i + self.buffer_count))
    }
}

/// Operands in host memory that a call multiplies with, and their bytes.
fn streamed(call: &Call, weights: &WeightLayout) -> Vec<(WeightOperand, usize)> {
    // Rows that are looked up are few.
    if call.origin.phase == Phase::Embed {
        return Vec::new();
    }
    let read = call.weights().into_iter();
    let multiplied = read.filter(|w| w.format != WeightFormat::Table);
    let placed = multiplied.filter_map(|w| {
        let placement = weights.placement(&w)?;
        (placement.memory == Memory::Host).then(|| (w, placement.bytes()))
    });
    placed.collect()
}

/// Transfers of the programs of large batches, and the buffers that both use: they run one after the other.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Streams {
    pub(crate) front: Transfers,
    pub(crate) tail: Transfers,
    pub(crate) buffers: Arena,
}

impl Streams {
    pub(crate) fn new(front: &[Call], tail: &[Call], weights: &WeightLayout) -> Streams {
        let [front, tail] = [front, tail].map(|calls| Transfers::of(calls, weights));
        let all = || front.list.iter().chain(&tail.list);
        let count = all().map(|t| t.buffer + 1).max().unwrap_or(0);
        let largest = |buffer| {
            let held = all().filter(|t| t.buffer == buffer);
            held.map(|t| t.bytes).max().unwrap_or(0)
        };
        Streams {
            buffers: Arena::new((0..count).map(largest)),
            front,
            tail,
        }
    }
}

#[cfg(test)]
#[expect(
    clippy::needless_raw_string_hashes,
    reason = "as expect-test writes them"
)]
mod tests {
    use std::fmt::Write;

    use carat_gguf::QuantType;
    use carat_model::{
        Model,
        backend::{Batching, CompileOptions},
        gemma4,
        kv::PerGroup,
    };
    use carat_testkit::tiny::{Tiny, Variant};
    use expect_test::expect;

    use super::*;
    use crate::{
        compile::{fit::fitting, offload::Rates, prepare::Prepared, target::Target},
        config::{Fusion, TableMemory},
    };

    /// A model with all its matrices in host memory, for batches of so many rows, all of which may be sampled.
    fn offloaded(model: &Model, rows: usize) -> Prepared {
        let options = CompileOptions {
            pages: PerGroup {
                full: 8,
                sliding: 8,
            },
            chunk_pages: 0,
            host_pages: PerGroup::default(),
            kv: PerGroup::default(),
            max_rows: rows,
            max_sampled: rows,
            probe: false,
            batching: Batching::Fast,
        };
        let target = Target::hopper(Fusion::On, rows);
        let choice = (
            target,
            TableMemory::Device,
            &crate::placement::Placement::Auto,
        );
        fitting(
            &gemma4::plan(model),
            &model.weights,
            &options,
            choice,
            0,
            &Rates::default,
        )
        .unwrap()
    }

    fn model(variant: Variant) -> Model {
        Tiny::new(variant, QuantType::Q4_0).model()
    }

    #[test]
    fn every_launch_finds_its_weights_in_the_buffers() {
        for variant in Variant::ALL {
            let model = model(variant);
            let prepared = offloaded(&model, 100);
            let (streams, layout) = (&prepared.streams, &prepared.weights);
            let programs = [
                (&prepared.front.large, &streams.front),
                (&prepared.tail.large, &streams.tail),
            ];
            for (calls, transfers) in programs {
                assert!(!transfers.list.is_empty(), "{variant:?}");
                let mut held = vec![None; streams.buffers.offsets.len()];
                let mut started = vec![false; transfers.list.len()];
                let mut start = |held: &mut Vec<Option<WeightOperand>>, index: usize| {
                    let transfer = &transfers.list[index];
                    held[transfer.buffer] = Some(transfer.operand.clone());
                    assert!(!std::mem::replace(&mut started[index], true));
                };
                transfers.at_start().for_each(|i| start(&mut held, i));
                for (index, call) in calls.iter().enumerate() {
                    for (operand, bytes) in streamed(call, layout) {
                        let found = held.iter().position(|h| h.as_ref() == Some(&operand));
                        let found = found.unwrap_or_else(|| panic!("{}: {operand:?}", call.label));
                        let end = streams.buffers.offsets.get(found + 1);
                        let end = end.copied().unwrap_or(streams.buffers.bytes);
                        assert!(bytes <= end - streams.buffers.offsets[found]);
                    }
                    transfers
                        .freed_by(index)
                        .for_each(|(_, next)| start(&mut held, next));
                }
                assert!(started.iter().all(|started| *started), "{variant:?}");
                let awaited = (0..calls.len()).flat_map(|call| transfers.awaited_by(call));
                assert!(awaited.eq(0..transfers.list.len()), "{variant:?}");
            }
        }
    }

    #[test]
    fn only_large_batches_have_buffers() {
        let model = model(Variant::Moe26b);
        let streams = |rows| offloaded(&model, rows).streams;
        assert_eq!(streams(64).buffers.bytes, 0);
        let large = offloaded(&model, 65);
        assert!(large.streams.buffers.bytes > 0);
        assert_eq!(large.memory.streaming, large.streams.buffers.bytes);
    }

    #[test]
    fn matrices_take_turns_and_lookups_stay_where_they_are() {
        let model = model(Variant::Moe26b);
        let prepared = offloaded(&model, 100);
        let mut text = String::new();
        let programs = [
            (&prepared.front.large, &prepared.streams.front),
            (&prepared.tail.large, &prepared.streams.tail),
        ];
        for (calls, transfers) in programs {
            for transfer in &transfers.list {
                let names = transfer.operand.parts.iter();
                let names: Vec<&str> = names
                    .map(|w| model.weights.matrix(*w).name.as_str())
                    .collect();
                let first = transfer.readers.start();
                let (label, buffer) = (&calls[*first].label, transfer.buffer);
                writeln!(text, "{label:<22} {buffer} {}", names.join(" ")).unwrap();
            }
        }
        expect![[r#"
            L0.attn.q+k+v          0 blk.0.attn_q.weight blk.0.attn_k.weight blk.0.attn_v.weight
            L0.attn.o              1 blk.0.attn_output.weight
            L0.ffn.gate+up         0 blk.0.ffn_gate.weight blk.0.ffn_up.weight
            L0.ffn.down            1 blk.0.ffn_down.weight
            L0.ffn.experts gate+up 0 blk.0.ffn_gate_up_exps.weight[0..64] blk.0.ffn_gate_up_exps.weight[64..128]
            L0.ffn.experts down    1 blk.0.ffn_down_exps.weight
            L1.attn.q+k+v          0 blk.1.attn_q.weight blk.1.attn_k.weight blk.1.attn_v.weight
            L1.attn.o              1 blk.1.attn_output.weight
            L1.ffn.gate+up         0 blk.1.ffn_gate.weight blk.1.ffn_up.weight
            L1.ffn.down            1 blk.1.ffn_down.weight
            L1.ffn.experts gate+up 0 blk.1.ffn_gate_up_exps.weight[0..64] blk.1.ffn_gate_up_exps.weight[64..128]
            L1.ffn.experts down    1 blk.1.ffn_down_exps.weight
            L2.attn.k              0 blk.2.attn_k.weight
            L2.attn.q              0 blk.2.attn_q.weight
            L2.attn.o              1 blk.2.attn_output.weight
            L2.ffn.gate+up         0 blk.2.ffn_gate.weight blk.2.ffn_up.weight
            L2.ffn.down            1 blk.2.ffn_down.weight
            L2.ffn.experts gate+up 0 blk.2.ffn_gate_up_exps.weight[0..64] blk.2.ffn_gate_up_exps.weight[64..128]
            L2.ffn.experts down    1 blk.2.ffn_down_exps.weight
            head.output            0 token_embd.weight
        "#]].assert_eq(&text);
    }
}
