//! Scratch: buffers that kernels of neighbouring ops share, sized by their largest use.

use crate::kernel::Operand;

/// Buffers that live within an op, or between neighbours, by name.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Scratch {
    buffers: Vec<(&'static str, ScratchBytes)>,
}

/// Size of a scratch buffer.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct ScratchBytes {
    pub(crate) per_row: usize,
    pub(crate) fixed: usize,
}

impl Scratch {
    pub(super) fn operand(&mut self, name: &'static str, bytes: ScratchBytes) -> Operand {
        let known = self.buffers.iter().position(|(n, _)| *n == name);
        let index = known.unwrap_or_else(|| {
            self.buffers.push((name, ScratchBytes::default()));
            self.buffers.len() - 1
        });
        let held = &mut self.buffers[index].1;
        held.per_row = held.per_row.max(bytes.per_row);
        held.fixed = held.fixed.max(bytes.fixed);
        Operand::Scratch(index)
    }

    pub(crate) fn sizes(&self) -> impl Iterator<Item = ScratchBytes> {
        self.buffers.iter().map(|(_, bytes)| *bytes)
    }
}
