//! Operands of kernels: symbolic while a plan is lowered, addresses once a program is bound. Mirrors `lib/batch.cuh` and
//! `lib/kv.cuh`.

use std::{collections::HashMap, fmt};

use carat_model::{
    kv::PerGroup,
    plan::{ClusterId, KvSlot, Plan, RopeId, Rows, Value},
    weights::Weight,
};

use crate::{
    device::Address,
    kernel::host::HostAt,
    kernel::params::params,
    kernel::weights::{WeightFormat, WeightOperand},
};

/// A value or buffer that a kernel reads or writes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum Operand {
    Value(Value),
    /// A buffer that lives within one step, by number.
    Scratch(usize),
}

impl fmt::Display for Operand {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Operand::Value(v) => write!(f, "%{}", v.index()),
            Operand::Scratch(i) => write!(f, "s{i}"),
        }
    }
}

params! {
    /// `Rows` in `lib/batch.cuh`.
    pub(crate) struct RowsAt {
        count: Address,
        index: Address,
    }
}

params! {
    /// `RowRefs` in `lib/batch.cuh`.
    pub(crate) struct RowRefsAt {
        position: Address,
        run: Address,
        sliding_end: Address,
    }
}

params! {
    /// `Inputs` in `lib/batch.cuh`.
    pub(crate) struct InputsAt {
        index: Address,
        start: Address,
    }
}

impl InputsAt {
    /// For tables that nothing is fed in place of.
    pub(crate) const NONE: InputsAt = InputsAt {
        index: Address::NULL,
        start: Address::NULL,
    };
}

params! {
    /// `Runs` in `lib/batch.cuh`.
    pub(crate) struct RunsAt {
        count: Address,
        first: Address,
    }
}

params! {
    /// `Tables` in `lib/kv.cuh`.
    pub(crate) struct TablesAt {
        base: Address,
        pages: Address,
    }
}

params! {
    /// `Slot` in `lib/kv.cuh`.
    pub(crate) struct SlotAt {
        keys: Address,
        values: Address,
        tables: TablesAt,
        kv_heads: u32,
        head_dim: u32,
        chunk_pages: u32,
        chunk_shift: u32,
        tied: TiedAt,
    }
}

params! {
    /// What keys are made from values with, the last of `Slot` in `lib/kv.cuh`.
    pub(crate) struct TiedAt {
        key_weight: Address,
        key_frequencies: Address,
    }
}

impl TiedAt {
    /// Where pages have keys.
    pub(crate) const NONE: TiedAt = TiedAt {
        key_weight: Address::NULL,
        key_frequencies: Address::NULL,
    };
}

impl SlotAt {
    /// For kernels that share a struct with one that has a slot.
    pub(crate) const NONE: SlotAt = SlotAt {
        keys: Address::NULL,
        values: Address::NULL,
        tables: TablesAt {
            base: Address::NULL,
            pages: Address::NULL,
        },
        kv_heads: 0,
        head_dim: 0,
        chunk_pages: 0,
        chunk_shift: 0,
        tied: TiedAt::NONE,
    };
}

/// Pages of one slot.
#[derive(Clone, Copy, Debug)]
pub(crate) struct PagesAt {
    pub(crate) keys: Address,
    pub(crate) values: Address,
    /// The first name of pages that all slots of the group have together; no page has it where there are none.
    pub(crate) chunk_pages: u32,
    /// Pages by which they lie further from this slot's first than their names say.
    pub(crate) chunk_shift: u32,
    pub(crate) tied: TiedAt,
}

impl PagesAt {
    /// Whether keys follow from values, so that pages have those alone.
    pub(crate) fn is_tied(&self) -> bool {
        self.tied.key_weight != Address::NULL
    }
}

/// A weight on the device.
#[derive(Clone, Copy, Debug)]
pub(crate) struct MatrixAt {
    pub(crate) start: Address,
    /// From one row to the next; in fragments from one M-tile to the next.
    pub(crate) row_bytes: usize,
    /// From one matrix of a stack to the next.
    pub(crate) matrix_bytes: usize,
}

/// Addresses of the parts of a batch's description.
#[derive(Clone, Copy, Debug)]
pub(crate) struct BatchAt {
    pub(crate) tokens: Address,
    pub(crate) inputs: InputsAt,
    pub(crate) row_refs: RowRefsAt,
    pub(crate) all: RowsAt,
    pub(crate) sampled: RowsAt,
    /// The runs of all rows, and of the sampled ones.
    pub(crate) all_runs: RunsAt,
    pub(crate) sampled_runs: RunsAt,
    pub(crate) tables: PerGroup<TablesAt>,
}

/// Addresses of everything that calls may name.
#[derive(Clone)]
pub(crate) struct Addresses {
    pub(crate) plan: Plan,
    pub(crate) values: Vec<Address>,
    pub(crate) scratch: Vec<Address>,
    pub(crate) weights: HashMap<WeightOperand, MatrixAt>,
    pub(crate) ropes: Vec<Address>,
    /// The cluster of each token, per table.
    pub(crate) clusters: Vec<Address>,
    /// Of each slot.
    pub(crate) kv: Vec<PagesAt>,
    pub(crate) batch: BatchAt,
    pub(crate) host: HostAt,
}

impl Addresses {
    pub(crate) fn operand(&self, operand: Operand) -> Address {
        match operand {
            Operand::Value(v) => self.values[v.index()],
            Operand::Scratch(i) => self.scratch[i],
        }
    }

    pub(crate) fn matrix(&self, w: &WeightOperand) -> MatrixAt {
        *self
            .weights
            .get(w)
            .expect("every weight that a kernel names is placed")
    }

    /// Null where there is no such vector.
    pub(crate) fn vector(&self, w: Option<Weight>) -> Address {
        w.map_or(Address::NULL, |w| {
            self.matrix(&WeightOperand::one(w, WeightFormat::Vector))
                .start
        })
    }

    pub(crate) fn rope(&self, rope: RopeId) -> Address {
        self.ropes[rope.0 as usize]
    }

    pub(crate) fn clusters(&self, table: ClusterId) -> Address {
        self.clusters[table.0 as usize]
    }

    pub(crate) fn slot(&self, slot: KvSlot) -> SlotAt {
        let spec = self.plan.slot(slot);
        let pages = self.kv[slot.0 as usize];
        SlotAt {
            keys: pages.keys,
            values: pages.values,
            tables: *self.batch.tables.get(spec.group),
            kv_heads: spec.kv_heads as u32,
            head_dim: spec.head_dim as u32,
            chunk_pages: pages.chunk_pages,
            chunk_shift: pages.chunk_shift,
            tied: pages.tied,
        }
    }

    pub(crate) fn rows(&self, rows: Rows) -> RowsAt {
        match rows {
            Rows::All => self.batch.all,
            Rows::Sampled => self.batch.sampled,
        }
    }

    pub(crate) fn runs(&self, rows: Rows) -> RunsAt {
        match rows {
            Rows::All => self.batch.all_runs,
            Rows::Sampled => self.batch.sampled_runs,
        }
    }
}
