//! Buffers that values share, and bytes of KV pages.

use std::ops::Range;

use crate::{
    backend::CompileOptions,
    kv::{KvGroup, KvType, PAGE_TOKENS, PerGroup},
    plan::{Plan, Shape, Value},
};

/// A buffer for every value; values whose lifetimes do not meet may have the same one.
#[derive(Clone, Debug, PartialEq)]
pub struct Layout {
    /// Extent of each buffer.
    pub buffers: Vec<Shape>,
    buffer_of: Vec<usize>,
}

impl Layout {
    /// Shares buffers wherever possible. The input of a step never shares with its output.
    pub fn shared(plan: &Plan) -> Layout {
        let single: Vec<Range<usize>> = (0..plan.steps.len()).map(|i| i..i + 1).collect();
        Layout::grouped(plan, &single, |_| true)
    }

    /// As [`Layout::shared`], for a backend that runs some consecutive steps as one: nothing that a group of steps reads
    /// or writes shares a buffer within it. The groups are in order and cover all steps. Values that are not stored, because
    /// they exist only inside a group, get no buffer.
    pub fn grouped(plan: &Plan, groups: &[Range<usize>], stored: impl Fn(Value) -> bool) -> Layout {
        let touched = |group: &Range<usize>| {
            let steps = plan.steps[group.clone()].iter();
            let values =
                steps.flat_map(|labelled| labelled.step.inputs().chain(labelled.step.out()));
            values.filter(|value| stored(*value))
        };
        let mut last_use = vec![0; plan.value_count()];
        for (i, group) in groups.iter().enumerate() {
            for value in touched(group) {
                last_use[value.index()] = i;
            }
        }
        for kept in [plan.hidden, plan.logits] {
            last_use[kept.index()] = usize::MAX;
        }
        let mut layout = Layout {
            buffers: Vec::new(),
            buffer_of: vec![usize::MAX; plan.value_count()],
        };
        let mut free: Vec<usize> = Vec::new();
        for (i, group) in groups.iter().enumerate() {
            for out in plan.steps[group.clone()]
                .iter()
                .filter_map(|s| s.step.out())
                .filter(|value| stored(*value))
            {
                layout.buffer_of[out.index()] = layout.take(&mut free, plan.shape(out));
            }
            let mut ended: Vec<usize> = touched(group)
                .filter(|v| last_use[v.index()] == i)
                .map(|v| layout.buffer(v))
                .collect();
            ended.sort_unstable();
            ended.dedup();
            free.extend(ended);
        }
        layout
    }

    /// A buffer of its own for every value, so that all can be looked at afterwards.
    pub fn separate(plan: &Plan) -> Layout {
        let values = plan.steps.iter().filter_map(|s| s.step.out());
        let mut buffer_of = vec![usize::MAX; plan.value_count()];
        let mut buffers = Vec::new();
        for value in values {
            buffer_of[value.index()] = buffers.len();
            buffers.push(plan.shape(value));
        }
        Layout { buffers, buffer_of }
    }

    /// Gives a stored value a buffer of its own.
    pub fn set_apart(&mut self, plan: &Plan, value: Value) {
        assert!(self.stores(value), "{value:?} is not stored");
        self.buffer_of[value.index()] = self.buffers.len();
        self.buffers.push(plan.shape(value));
    }

    /// Buffer of a stored value.
    pub fn buffer(&self, value: Value) -> usize {
        let buffer = self.buffer_of[value.index()];
        assert_ne!(buffer, usize::MAX, "{value:?} is not stored");
        buffer
    }

    /// Whether a value has a buffer at all.
    pub fn stores(&self, value: Value) -> bool {
        self.buffer_of[value.index()] != usize::MAX
    }

    /// A free buffer for the same rows: the narrowest that is wide enough, else the widest, made wider.
    fn take(&mut self, free: &mut Vec<usize>, shape: Shape) -> usize {
        let missing = |b: usize| shape.columns.saturating_sub(self.buffers[b].columns);
        let best = (0..free.len())
            .filter(|&i| self.buffers[free[i]].rows == shape.rows)
            .min_by_key(|&i| (missing(free[i]), self.buffers[free[i]].columns));
        if let Some(i) = best {
            let buffer = free.swap_remove(i);
            let columns = &mut self.buffers[buffer].columns;
            *columns = shape.columns.max(*columns);
            return buffer;
        }
        self.buffers.push(shape);
        self.buffers.len() - 1
    }
}

/// Bytes of the keys and values that a plan is compiled with, per group.
pub fn kv_bytes(plan: &Plan, options: &CompileOptions) -> PerGroup<usize> {
    let page = page_bytes(plan, options.kv);
    // All slots have them together.
    let chunk_page = match plan.own_slots(KvGroup::Sliding).count() {
        0 => 0,
        slots => page.sliding / slots,
    };
    PerGroup {
        full: page.full * options.pages.full,
        sliding: page.sliding * options.pages.sliding + chunk_page * options.chunk_pages,
    }
}

/// Bytes of one page in each group, keys and values of all slots of the plan's own together; values alone where keys follow from them.
pub fn page_bytes(plan: &Plan, kv: PerGroup<KvType>) -> PerGroup<usize> {
    let full = if plan.tied_keys().is_empty() { 2 } else { 1 };
    let mut bytes = PerGroup::default();
    for (group, tensors) in [(KvGroup::Full, full), (KvGroup::Sliding, 2)] {
        let own = plan.own_slots(group);
        let per_token = own.map(|s| tensors * s.kv_heads * kv.get(group).head_bytes(s.head_dim));
        *bytes.get_mut(group) = per_token.sum::<usize>() * PAGE_TOKENS;
    }
    bytes
}
