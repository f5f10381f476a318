//! Addresses of the groups of rows that programs run over, one group after another.

use carat_model::plan::{Rows, Value};

use crate::{
    compile::{batch_layout::BatchLayout, rows::SMALL_ROWS},
    device::Address,
    kernel::{Addresses, BatchAt},
};

/// One group of each kind of rows, the whole batch, unless rows are to be the same in any company.
pub(super) struct RowGroups {
    all: Vec<Addresses>,
    sampled: Vec<Addresses>,
}

impl RowGroups {
    /// `kept` are the values that outlive the pass of their group; others are in the same place for every group.
    pub(super) fn new(
        at: &Addresses,
        kept: &[Value],
        layout: &BatchLayout,
        batch: Address,
    ) -> RowGroups {
        let counts = layout.group_counts;
        if counts.max_all == 0 {
            return RowGroups {
                all: vec![at.clone()],
                sampled: vec![at.clone()],
            };
        }
        let of = |rows: Rows, group: usize, batch: BatchAt| {
            let mut at = at.clone();
            for value in kept.iter().filter(|value| at.plan.rows(**value) == rows) {
                let bytes = group * SMALL_ROWS * at.plan.columns(*value) * 4;
                at.values[value.index()] = at.values[value.index()].offset(bytes);
            }
            Addresses { batch, ..at }
        };
        let all = (0..counts.max_all).map(|g| of(Rows::All, g, layout.all_group_at(batch, g)));
        let sampled = (0..counts.max_sampled)
            .map(|g| of(Rows::Sampled, g, layout.sampled_group_at(batch, g)));
        RowGroups {
            all: all.collect(),
            sampled: sampled.collect(),
        }
    }

    pub(super) fn of(&self, rows: Rows) -> &[Addresses] {
        match rows {
            Rows::All => &self.all,
            Rows::Sampled => &self.sampled,
        }
    }
}
