//! Twin of `kernels/attention/keys_from_values.cu`: keys of layers whose pages hold values alone, for attention that reads both.

use carat_model::{
    kv::KvType,
    plan::{KvSlot, Rows},
};

use crate::kernel::{
    Addresses, HOPPER_MULTIPROCESSORS, Kernel, Operand, RowRefsAt, RowsAt, RunsAt, SlotAt,
    Specialization, specialization::kv_constants,
};
use crate::{
    device::Grid,
    kernel::params::{Params, params},
};

const THREADS: usize = 256;
/// Enough to keep a card's memory busy.
const BLOCKS: usize = 4 * HOPPER_MULTIPROCESSORS;

params! {
    struct KeysFromValuesParams {
        rows: RowsAt,
        row_refs: RowRefsAt,
        runs: RunsAt,
        slot: SlotAt,
        turning_pairs: u32,
        window: u32,
    }
}

pub(crate) fn specialization(kv: KvType) -> Specialization {
    Specialization {
        kernel: "keys_from_values",
        entries: &["keys_from_values"],
        constants: kv_constants(kv, true).collect(),
        params_bytes: KeysFromValuesParams::BYTES,
    }
}

/// Keys of all positions that some rows see, to the place that all slots of the group have for them.
#[derive(Debug)]
pub(crate) struct KeysFromValues {
    /// The rows whose runs attend next.
    pub(crate) rows: Rows,
    pub(crate) slot: KvSlot,
    pub(crate) kv: KvType,
    pub(crate) turning_pairs: usize,
    pub(crate) window: Option<usize>,
}

impl Kernel for KeysFromValues {
    fn specialization(&self) -> Specialization {
        specialization(self.kv)
    }

    fn grid(&self, _rows: usize) -> Grid {
        Grid::new((BLOCKS, 1), THREADS)
    }

    fn params(&self, at: &Addresses, rows: RowsAt) -> Vec<u8> {
        KeysFromValuesParams {
            rows,
            row_refs: at.batch.row_refs,
            runs: at.runs(self.rows),
            slot: at.slot(self.slot),
            turning_pairs: self.turning_pairs as u32,
            window: self.window.unwrap_or(0) as u32,
        }
        .bytes()
    }

    fn reads(&self) -> Vec<Operand> {
        vec![]
    }

    fn writes(&self) -> Vec<Operand> {
        vec![]
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{
        config::Tier,
        device::Address,
        kernel::attention::{
            flash_decode::tests::{Case, Kv, Ready, RunRows, heads},
            host_pages::HostPages,
        },
        testing::{Card, relative_error},
    };

    /// Keys of every position that a run sees, against f64; no other cell is touched, and values stay as they are.
    #[test]
    #[ignore = "needs a card"]
    fn keys_of_all_that_is_seen_are_made_from_values() {
        let card = Card::open(Tier::Best);
        let run = |position, rows| RunRows { position, rows };
        for (kv_heads, head_dim, turning) in [(1, 512, 64), (2, 512, 256), (4, 128, 30), (2, 32, 4)]
        {
            for kv in [KvType::F16, KvType::Q8_0] {
                let case = Case {
                    heads: heads(2, kv_heads, head_dim).with_kv(kv).tied(turning),
                    window: None,
                    kv: Kv::Shared,
                    runs: vec![run(90, 7), run(0, 1), run(31, 33)],
                };
                let batch = case.batch();
                let ready = Ready::new(&card, &case, &batch);
                let runs = card.upload(&[3u32, 0, 7, 8, 41]);
                let params = KeysFromValuesParams {
                    rows: ready.params.rows,
                    row_refs: ready.params.row_refs,
                    runs: RunsAt {
                        count: runs.address(),
                        first: crate::testing::at::<u32>(&runs, 1),
                    },
                    slot: ready.params.slot,
                    turning_pairs: turning as u32,
                    window: 0,
                };
                let module = card.load(&specialization(kv));
                card.run(&module, Grid::new((BLOCKS, 1), THREADS), &params.bytes());
                let mut made = HostPages::poisoned(KvType::F16, 0, kv_heads, head_dim);
                made.bytes = card.download(&ready.keys, batch.keys.bytes.len());
                let (mut found, mut expected) = (Vec::new(), Vec::new());
                for (r, run) in case.runs.iter().enumerate() {
                    for position in 0..run.position + run.rows {
                        for head in 0..kv_heads {
                            let cell = batch.cell(r, position, head);
                            let key = batch.tied_key(&batch.values.get(cell), position);
                            expected.extend(key.iter().map(|k| *k as f32));
                            found.extend(made.get(cell).iter().map(|k| *k as f32));
                            made.poison(cell);
                        }
                    }
                }
                let error = relative_error(&found, &expected);
                assert!(error < 5e-4, "{error:.1e} for {case:?}");
                assert!(made == batch.keys, "other cells were written: {case:?}");
                let values: Vec<u8> = card.download(&ready.values, batch.values.bytes.len());
                assert!(
                    values == batch.values.bytes,
                    "values were changed: {case:?}"
                );
                assert_ne!(params.slot.tied.key_weight, Address::NULL);
            }
        }
    }
}
