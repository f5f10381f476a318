//! Weights on the device: what the plan names, each once, rows packed, in the file's own format.
//!
//! Where everything goes is decided first and purely; then the bytes are copied through page-locked memory, one half filled
//! while the other is on its way.

use std::{
    collections::{BTreeMap, HashMap},
    sync::Arc,
};

use carat_model::{
    plan::{Plan, Step},
    weights::{Weight, Weights},
};

use crate::{
    config::TablePlace,
    device::{Address, Buffer, Device, Event, HostBuffer},
    error::CudaError,
    kernel::MatrixAt,
};

/// Where weights start: what the widest loads and copies want.
const ALIGN: usize = 256;
/// One half of the memory that copies go through, unless there is less to copy.
const HALF: usize = 16 << 20;

/// How a plan uses a weight.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
enum Use {
    /// One row, which kernels read as f32.
    Vector,
    /// Only looked up, a row a token.
    Table,
    Matrix,
}

/// Where a weight goes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Slot {
    usage: Use,
    memory: TablePlace,
    offset: usize,
    /// Another weight that is the same view of the same tensor, and stands for both.
    same_as: Option<Weight>,
}

/// Where each weight of a plan goes.
#[derive(Debug)]
pub(crate) struct WeightLayout {
    slots: BTreeMap<Weight, Slot>,
    pub(crate) device_bytes: usize,
    pub(crate) host_bytes: usize,
}

impl WeightLayout {
    pub(crate) fn new(plan: &Plan, weights: &Weights, tables: TablePlace) -> WeightLayout {
        let mut layout = WeightLayout {
            slots: BTreeMap::new(),
            device_bytes: 0,
            host_bytes: 0,
        };
        let mut seen: HashMap<(usize, usize, usize, usize, Use), Weight> = HashMap::new();
        for (weight, usage) in uses(plan) {
            let m = weights.matrix(weight);
            let start = weights.bytes(weight).as_ptr() as usize;
            let view = (start, m.columns, m.rows, m.row_stride, usage);
            let same_as = seen.get(&view).copied();
            let memory = match usage {
                Use::Table => tables,
                Use::Vector | Use::Matrix => TablePlace::Device,
            };
            let end = match memory {
                TablePlace::Device => &mut layout.device_bytes,
                TablePlace::Host => &mut layout.host_bytes,
            };
            let offset = *end;
            if same_as.is_none() {
                let bytes = match usage {
                    Use::Vector => m.columns * 4,
                    Use::Table | Use::Matrix => m.bytes(),
                };
                *end = (offset + bytes).next_multiple_of(ALIGN);
                seen.insert(view, weight);
            }
            let slot = Slot {
                usage,
                memory,
                offset,
                same_as,
            };
            layout.slots.insert(weight, slot);
        }
        layout
    }

    fn place(&self, weight: Weight) -> &Slot {
        let slot = &self.slots[&weight];
        slot.same_as.map_or(slot, |same| &self.slots[&same])
    }

    /// Copies everything. The file is not looked at afterwards.
    pub(crate) fn upload(
        &self,
        device: &Arc<Device>,
        weights: &Weights,
    ) -> Result<ResidentWeights, CudaError> {
        let buffer = device.allocate("weights", self.device_bytes)?;
        let mut host = match self.host_bytes {
            0 => None,
            bytes => Some(device.allocate_host("tables", bytes)?),
        };
        let mut upload = Upload::new(device, &buffer, self.device_bytes)?;
        for (&weight, slot) in self.slots.iter().filter(|(_, s)| s.same_as.is_none()) {
            match (slot.memory, slot.usage) {
                (TablePlace::Device, Use::Vector) => {
                    let values = weights.vector(weight);
                    let bytes: Vec<u8> = values.iter().flat_map(|v| v.to_ne_bytes()).collect();
                    upload.put(slot.offset, &bytes)?;
                }
                (TablePlace::Device, _) => {
                    let mut offset = slot.offset;
                    for piece in pieces(weights, weight) {
                        upload.put(offset, piece)?;
                        offset += piece.len();
                    }
                }
                (TablePlace::Host, _) => {
                    let host = host.as_mut().expect("allocated if any table is there");
                    let mut offset = slot.offset;
                    for piece in pieces(weights, weight) {
                        host.bytes_mut()[offset..offset + piece.len()].copy_from_slice(piece);
                        offset += piece.len();
                    }
                }
            }
        }
        upload.finish()?;
        let start = |memory| match memory {
            TablePlace::Device => buffer.address(),
            TablePlace::Host => host.as_ref().map_or(Address::NULL, HostBuffer::address),
        };
        let at = self.slots.keys().map(|&weight| {
            let (slot, m) = (self.place(weight), weights.matrix(weight));
            let at = MatrixAt {
                start: start(slot.memory).offset(slot.offset),
                row_bytes: m.row_bytes(),
                matrix_bytes: m.row_bytes() * m.rows,
            };
            (weight, at)
        });
        Ok(ResidentWeights {
            at: at.collect(),
            _device: buffer,
            _host: host,
        })
    }
}

/// Weights that kernels can read.
pub(crate) struct ResidentWeights {
    pub(crate) at: HashMap<Weight, MatrixAt>,
    _device: Buffer,
    _host: Option<HostBuffer>,
}

/// Every weight a plan names; one that is multiplied with is more than a table.
fn uses(plan: &Plan) -> BTreeMap<Weight, Use> {
    let mut uses = BTreeMap::new();
    let mut note = |weight: Weight, usage: Use| {
        let known = uses.entry(weight).or_insert(usage);
        *known = usage.max(*known);
    };
    for labelled in &plan.steps {
        match labelled.step {
            Step::Embed { table, .. } => note(table, Use::Table),
            Step::Norm {
                weight: Some(w), ..
            } => note(w, Use::Vector),
            Step::Linear { w, .. } => note(w, Use::Matrix),
            Step::Route {
                w, expert_scale, ..
            } => {
                note(w, Use::Matrix);
                if let Some(scale) = expert_scale {
                    note(scale, Use::Vector);
                }
            }
            Step::Experts { gate, up, down, .. } => {
                for w in [gate, up, down] {
                    note(w, Use::Matrix);
                }
            }
            _ => {}
        }
    }
    uses
}

/// A view's bytes without what lies between its rows, in as few pieces as there are.
fn pieces(weights: &Weights, weight: Weight) -> impl Iterator<Item = &[u8]> {
    let m = weights.matrix(weight);
    let bytes = weights.bytes(weight);
    let row_bytes = m.row_bytes();
    let packed_rows = m.row_stride == row_bytes;
    let packed = packed_rows && (m.count == 1 || m.matrix_stride == m.rows * row_bytes);
    let (count, rows, length) = match (packed, packed_rows) {
        (true, _) => (1, 1, m.bytes()),
        (false, true) => (m.count, 1, m.rows * row_bytes),
        (false, false) => (m.count, m.rows, row_bytes),
    };
    (0..count * rows).map(move |i| {
        let start = i / rows * m.matrix_stride + i % rows * m.row_stride;
        &bytes[start..start + length]
    })
}

/// Copies pieces to a buffer, in rising order of offset, through two halves of page-locked memory in turn.
struct Upload<'a> {
    device: &'a Device,
    to: &'a Buffer,
    halves: [HostBuffer; 2],
    /// When the device is done with each half.
    done: [Option<Event>; 2],
    current: usize,
    filled: usize,
    /// Where the current half goes.
    offset: usize,
    half_bytes: usize,
}

impl<'a> Upload<'a> {
    fn new(device: &'a Arc<Device>, to: &'a Buffer, bytes: usize) -> Result<Upload<'a>, CudaError> {
        let half_bytes = HALF.min(bytes);
        let half = || device.allocate_host("upload", half_bytes);
        Ok(Upload {
            device,
            to,
            halves: [half()?, half()?],
            done: [None, None],
            current: 0,
            filled: 0,
            offset: 0,
            half_bytes,
        })
    }

    fn put(&mut self, mut offset: usize, mut bytes: &[u8]) -> Result<(), CudaError> {
        while !bytes.is_empty() {
            // Gaps between weights travel along while they are small: fewer, larger copies.
            let gap = offset.checked_sub(self.offset + self.filled);
            match gap {
                Some(gap) if gap < ALIGN && self.filled + gap < self.half_bytes => {
                    self.filled += gap;
                }
                _ => {
                    self.flush()?;
                    self.offset = offset;
                }
            }
            let length = bytes.len().min(self.half_bytes - self.filled);
            let (now, later) = bytes.split_at(length);
            let half = self.halves[self.current].bytes_mut();
            half[self.filled..self.filled + length].copy_from_slice(now);
            self.filled += length;
            offset += length;
            bytes = later;
        }
        Ok(())
    }

    fn flush(&mut self) -> Result<(), CudaError> {
        if self.filled > 0 {
            let half = &self.halves[self.current];
            self.device
                .copy_in(half, self.to, self.offset, self.filled)?;
            self.done[self.current] = Some(self.device.event()?);
            self.current = 1 - self.current;
            self.offset += self.filled;
            self.filled = 0;
        }
        if let Some(event) = self.done[self.current].take() {
            event.wait()?;
        }
        Ok(())
    }

    fn finish(mut self) -> Result<(), CudaError> {
        self.flush()?;
        self.device.wait("copying weights")
    }
}

#[cfg(test)]
mod tests {
    use carat_gguf::QuantType;
    use carat_model::gemma4;
    use carat_testkit::tiny::{Tiny, Variant};

    use super::*;

    fn layout(variant: Variant, tables: TablePlace) -> (Weights, WeightLayout) {
        let model = Tiny::new(variant, QuantType::Q4_0).model();
        let plan = gemma4::plan(&model);
        let layout = WeightLayout::new(&plan, &model.weights, tables);
        let weights = Arc::into_inner(model.weights).expect("nobody else has them");
        (weights, layout)
    }

    #[test]
    fn weights_do_not_overlap_and_are_aligned() {
        for variant in Variant::ALL {
            let (weights, layout) = layout(variant, TablePlace::Device);
            let mut end = 0;
            for (weight, slot) in layout.slots.iter().filter(|(_, s)| s.same_as.is_none()) {
                assert!(slot.offset >= end && slot.offset % ALIGN == 0);
                end = slot.offset + weights.matrix(*weight).bytes();
            }
            assert!(end <= layout.device_bytes);
            assert_eq!(layout.host_bytes, 0);
        }
    }

    #[test]
    fn tables_move_to_the_host_unless_they_are_multiplied_with() {
        let (weights, here) = layout(Variant::E4b, TablePlace::Device);
        let (_, there) = layout(Variant::E4b, TablePlace::Host);
        let tables = there
            .slots
            .iter()
            .filter(|(_, s)| s.memory == TablePlace::Host);
        let names: Vec<&str> = tables
            .map(|(w, _)| weights.matrix(*w).name.as_str())
            .collect();
        assert!(
            names.iter().all(|n| n.starts_with("per_layer_token_embd")),
            "{names:?}"
        );
        assert!(!names.is_empty());
        assert_eq!(here.device_bytes, there.device_bytes + there.host_bytes);
    }

    #[test]
    fn pieces_are_the_rows_without_what_lies_between() {
        let (weights, layout) = layout(Variant::E2b, TablePlace::Device);
        let mut strided = 0;
        for &weight in layout.slots.keys() {
            let m = weights.matrix(weight);
            let packed: Vec<u8> = pieces(&weights, weight).flatten().copied().collect();
            let rows = (0..m.count).flat_map(|i| (0..m.rows).map(move |r| (i, r)));
            let expected: Vec<u8> = rows
                .flat_map(|(i, r)| weights.row(weight, i, r).to_vec())
                .collect();
            assert!(packed == expected, "{}", m.name);
            strided += usize::from(m.row_stride != m.row_bytes());
        }
        assert!(strided > 0, "the per-layer table is cut by columns");
    }
}
