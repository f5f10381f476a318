//! Slots whose keys follow from their values: both come from one projection, so a cache may hold the values alone.

use super::{KvSlot, Plan, Rope, RopeId, SlotSpec, Step, Value};
use crate::{kv::KvGroup, weights::Weight};

/// How the keys of a slot follow from its values, head by head: `rope(weight * value)`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TiedKeys {
    /// By column of a head.
    pub weight: Weight,
    /// Turns the key of each position.
    pub rope: RopeId,
}

/// Radians a position that turn no component of any context by what a 32-bit number shows.
const STILL: f32 = 1e-13;

impl Rope {
    /// Pairs from the first to the last that turns. Those behind it stay as they are at every position.
    pub fn turning_pairs(&self) -> usize {
        let turns = |frequency: &f32| frequency.abs() > STILL;
        self.frequencies
            .iter()
            .rposition(turns)
            .map_or(0, |j| j + 1)
    }
}

impl Plan {
    /// The slots that store values alone, in the order of the plan: those of full attention, if the keys of every one follow from its
    /// values and all are of one shape, so that keys can be made at one place for one layer after another. Empty if they do not.
    pub fn tied_keys(&self) -> Vec<(KvSlot, TiedKeys)> {
        let shape = |slot: &SlotSpec| (slot.kv_heads, slot.head_dim);
        let mut own = self.own_slots(KvGroup::Full).map(shape);
        let first = own.next();
        let count = own.clone().count() + usize::from(first.is_some());
        let tied: Vec<(KvSlot, TiedKeys)> = self
            .steps
            .iter()
            .filter_map(|s| self.tied(&s.step))
            .collect();
        let one_rope = tied.windows(2).all(|pair| pair[0].1.rope == pair[1].1.rope);
        if own.all(|shape| Some(shape) == first) && tied.len() == count && one_rope {
            tied
        } else {
            Vec::new()
        }
    }

    /// A store of full attention whose key is the value under a weight, turned.
    fn tied(&self, step: &Step) -> Option<(KvSlot, TiedKeys)> {
        let Step::StoreKv { k, v, slot } = *step else {
            return None;
        };
        let spec = self.slot(slot);
        if spec.group != KvGroup::Full {
            return None;
        }
        let Step::Rope {
            x: normed, rope, ..
        } = *self.step_of(k)?
        else {
            return None;
        };
        let norm = |value: Value| match *self.step_of(value)? {
            Step::Norm {
                x,
                weight,
                group,
                eps,
                ..
            } => Some((weight, (x, group, eps))),
            _ => None,
        };
        let ((k_weight, k_of), (v_weight, v_of)) = (norm(normed)?, norm(v)?);
        let head_dim = spec.head_dim;
        let follows = v_weight.is_none() && k_of == v_of && k_of.1 == head_dim;
        let tied = TiedKeys {
            weight: k_weight?,
            rope,
        };
        // Halves of a head that backends can take apart by vectors.
        let whole = head_dim.is_multiple_of(32) && head_dim <= 512;
        let turns = self.rope(rope).turning_pairs() > 0;
        (follows && whole && turns).then_some((slot, tied))
    }

    fn step_of(&self, value: Value) -> Option<&Step> {
        let writes = |step: &&Step| step.out() == Some(value);
        self.steps
            .iter()
            .map(|labelled| &labelled.step)
            .find(writes)
    }
}
