//! The layout of weights on the device: those that calls name, each once per format, with its placement.
//!
//! Lowering decides in which format a kernel reads a weight; what no call names is not loaded. Placements are decided here,
//! purely; [`upload`](crate::run::upload) then moves the bytes.

use std::collections::{BTreeMap, BTreeSet, HashMap, HashSet};

use carat_gguf::QuantType;
use carat_model::weights::{Matrix, Weight, Weights};

use crate::{
    config::TableMemory,
    kernel::{
        Dequantize, HalfKind, Join, Pack, Specialization, WeightFormat, WeightOperand,
        fragment::{self, FragmentFormat},
    },
};

/// Alignment of weights: what the widest loads and copies want.
const ALIGN: usize = 256;

/// Memory that a weight is placed in.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Memory {
    Device,
    /// Device memory for weights that are larger there than in the file.
    Expanded,
    /// Page-locked memory of the host, which the device reads through the bus.
    Host,
}

/// Weights that lie in host memory.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct HostWeights {
    /// Tables that are only looked up.
    pub(crate) tables: TableMemory,
    /// Matrices, in every format that calls name them in. One that is joined with others takes them along.
    pub(crate) matrices: BTreeSet<Weight>,
    /// Of a hundred rows of a feed-forward matrix among them, those that the host multiplies in small batches.
    pub(crate) cpu_share: u8,
}

impl From<TableMemory> for HostWeights {
    fn from(tables: TableMemory) -> HostWeights {
        HostWeights {
            tables,
            matrices: BTreeSet::new(),
            cpu_share: 0,
        }
    }
}

impl HostWeights {
    fn memory(&self, operand: &WeightOperand) -> Memory {
        let listed = operand.parts.iter().any(|w| self.matrices.contains(w));
        match operand.format {
            WeightFormat::Vector => Memory::Device,
            WeightFormat::Table if self.tables == TableMemory::Host => Memory::Host,
            _ if listed => Memory::Host,
            WeightFormat::F16 => Memory::Expanded,
            _ => Memory::Device,
        }
    }
}

/// Placement of an operand: memory, offset and strides.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Placement {
    pub(crate) memory: Memory,
    pub(crate) offset: usize,
    /// From one row to the next; in fragments from one M-tile to the next.
    pub(crate) row_bytes: usize,
    /// From one matrix of a stack to the next.
    pub(crate) matrix_bytes: usize,
    bytes: usize,
    /// Offset of each part in a matrix, and its own stride from row to row or M-tile to M-tile.
    parts: Vec<(usize, usize)>,
}

impl Placement {
    /// Bytes of all its matrices.
    pub(crate) fn bytes(&self) -> usize {
        self.bytes
    }
}

/// One format that a weight's rows are loaded in, and where to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct LoadTarget {
    pub(crate) format: WeightFormat,
    pub(crate) memory: Memory,
    /// Offset of the first row, or M-tile, of the first matrix.
    pub(crate) start: usize,
    /// From row to row, or M-tile to M-tile.
    pub(crate) stride: usize,
    pub(crate) matrix_bytes: usize,
}

/// Placements of everything that calls name.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct WeightLayout {
    /// Operands that calls name, and the one that each shares memory with.
    canonical: BTreeMap<WeightOperand, WeightOperand>,
    placements: BTreeMap<WeightOperand, Placement>,
    pub(crate) device_bytes: usize,
    pub(crate) expanded_bytes: usize,
    /// All of the host's memory, and what of it tables take.
    pub(crate) host_bytes: usize,
    pub(crate) host_table_bytes: usize,
}

impl WeightLayout {
    pub(crate) fn new(
        weights: &Weights,
        named: &BTreeSet<WeightOperand>,
        host: &HostWeights,
    ) -> WeightLayout {
        let mut layout = WeightLayout {
            canonical: canonical(weights, named),
            ..WeightLayout::default()
        };
        for operand in layout.canonical.values().cloned().collect::<BTreeSet<_>>() {
            let memory = host.memory(&operand);
            let end = match memory {
                Memory::Device => &mut layout.device_bytes,
                Memory::Expanded => &mut layout.expanded_bytes,
                Memory::Host => &mut layout.host_bytes,
            };
            let placement = placement(weights, &operand, memory, *end);
            let start = *end;
            *end = (placement.offset + placement.bytes).next_multiple_of(ALIGN);
            if (memory, operand.format) == (Memory::Host, WeightFormat::Table) {
                layout.host_table_bytes += layout.host_bytes - start;
            }
            layout.placements.insert(operand, placement);
        }
        layout
    }

    /// Operands that calls name, with their placements.
    pub(crate) fn named(&self) -> impl Iterator<Item = (&WeightOperand, &Placement)> {
        let placement = |(named, canonical)| (named, &self.placements[canonical]);
        self.canonical.iter().map(placement)
    }

    /// Placement of an operand that calls name.
    pub(crate) fn placement(&self, named: &WeightOperand) -> Option<&Placement> {
        let canonical = self.canonical.get(named)?;
        self.placements.get(canonical)
    }

    /// Bytes of f16 copies of these weights.
    pub(crate) fn copies_of(&self, weights: &HashSet<Weight>) -> usize {
        let copies = self.placements.iter();
        let copies = copies.filter(|(operand, p)| {
            p.memory == Memory::Expanded && operand.parts.iter().any(|w| weights.contains(w))
        });
        copies.map(|(_, p)| p.bytes).sum()
    }

    /// Bytes of device memory that these weights, and what they are joined with, take.
    pub(crate) fn device_bytes_of(&self, weights: &HashSet<Weight>) -> usize {
        let placed = self.placements.iter().filter(|(operand, p)| {
            p.memory != Memory::Host
                && operand.format != WeightFormat::Vector
                && operand.parts.iter().any(|w| weights.contains(w))
        });
        placed.map(|(_, p)| p.bytes).sum()
    }

    /// Bytes of host memory that matrices, and what they are joined with, take; but for those of operands seen before.
    pub(crate) fn host_matrix_bytes<'a>(
        &'a self,
        weights: &[Weight],
        seen: &mut HashSet<&'a WeightOperand>,
    ) -> usize {
        let placed = self.placements.iter().filter(|(operand, p)| {
            p.memory == Memory::Host && operand.parts.iter().any(|w| weights.contains(w))
        });
        let new = placed.filter(|(operand, _)| seen.insert(operand));
        new.map(|(_, p)| p.bytes).sum()
    }

    /// Every weight to load, with all its targets, so that each is read once.
    pub(crate) fn targets(&self) -> BTreeMap<Weight, Vec<LoadTarget>> {
        let mut targets: BTreeMap<Weight, Vec<LoadTarget>> = BTreeMap::new();
        for (operand, placement) in &self.placements {
            for (&weight, &(start, stride)) in operand.parts.iter().zip(&placement.parts) {
                targets.entry(weight).or_default().push(LoadTarget {
                    format: operand.format,
                    memory: placement.memory,
                    start: placement.offset + start,
                    stride,
                    matrix_bytes: placement.matrix_bytes,
                });
            }
        }
        targets
    }

    /// The kernels that loading takes.
    pub(crate) fn kernels(&self, weights: &Weights) -> Vec<Specialization> {
        let mut kernels = Vec::new();
        for (weight, targets) in self.targets() {
            let quant = weights.matrix(weight).quant;
            for kernel in targets.iter().filter_map(|t| loader(quant, t.format)) {
                if !kernels.contains(&kernel) {
                    kernels.push(kernel);
                }
            }
        }
        kernels
    }
}

/// The kernel that brings rows into a format; none where copying does.
pub(crate) fn loader(quant: QuantType, format: WeightFormat) -> Option<Specialization> {
    match format {
        WeightFormat::Vector | WeightFormat::Table | WeightFormat::File => None,
        WeightFormat::Fragments => Some(Pack::specialization(quant)),
        WeightFormat::F16 => Some(Dequantize::specialization(quant, HalfKind::F16)),
        WeightFormat::Bf16 => Some(Dequantize::specialization(quant, HalfKind::Bf16)),
    }
}

/// The canonical operand of each named one: views of the same bytes become one weight, formats that hold the same bytes one
/// format.
fn canonical(
    weights: &Weights,
    named: &BTreeSet<WeightOperand>,
) -> BTreeMap<WeightOperand, WeightOperand> {
    let mut views = HashMap::new();
    let mut same_view = |weight: Weight| {
        let m = weights.matrix(weight);
        let start = weights.bytes(weight).as_ptr() as usize;
        let shape = (m.quant, m.columns, m.rows, m.count);
        let view = (start, shape, m.row_stride, m.matrix_stride);
        *views.entry(view).or_insert(weight)
    };
    let mut with_format = |operand: &WeightOperand| {
        let all = |quant| {
            operand
                .parts
                .iter()
                .all(|w| weights.matrix(*w).quant == quant)
        };
        WeightOperand {
            parts: operand.parts.iter().map(|w| same_view(*w)).collect(),
            join: operand.join,
            format: match operand.format {
                WeightFormat::F16 if all(QuantType::F16) => WeightFormat::File,
                WeightFormat::Bf16 if all(QuantType::BF16) => WeightFormat::File,
                format => format,
            },
        }
    };
    let canonical: Vec<WeightOperand> = named.iter().map(&mut with_format).collect();
    let multiplied: BTreeSet<WeightOperand> = canonical.iter().cloned().collect();
    let merged = |operand: WeightOperand| {
        let file = WeightOperand {
            format: WeightFormat::File,
            ..operand.clone()
        };
        match operand.format {
            // A table that is multiplied with is more than a table.
            WeightFormat::Table if multiplied.contains(&file) => file,
            _ => operand,
        }
    };
    let canonical = canonical.into_iter().map(merged);
    named.iter().cloned().zip(canonical).collect()
}

fn placement(
    weights: &Weights,
    operand: &WeightOperand,
    memory: Memory,
    offset: usize,
) -> Placement {
    let matrices: Vec<&Matrix> = operand.parts.iter().map(|w| weights.matrix(*w)).collect();
    let first = matrices[0];
    let alike = |same: &dyn Fn(&Matrix) -> bool| {
        let names = || matrices.iter().map(|m| m.name.as_str()).collect::<Vec<_>>();
        assert!(
            matrices.iter().all(|m| same(m)),
            "cannot join {:?}",
            names()
        );
    };
    alike(&|m| (m.columns, m.count) == (first.columns, first.count));
    let mut rows_at_once = 1;
    let row_bytes = match operand.format {
        WeightFormat::Vector => {
            assert_eq!((operand.parts.len(), first.rows, first.count), (1, 1, 1));
            first.columns * 4
        }
        WeightFormat::Table | WeightFormat::File => {
            alike(&|m| m.quant == first.quant);
            first.row_bytes()
        }
        WeightFormat::Fragments => {
            alike(&|m| FragmentFormat::of(m.quant) == FragmentFormat::of(first.quant));
            rows_at_once = fragment::M_TILE;
            let format =
                FragmentFormat::of(first.quant).expect("lowering knows which have fragments");
            format.m_tile_bytes(first.columns)
        }
        WeightFormat::F16 | WeightFormat::Bf16 => first.columns * 2,
    };
    let mut matrix_bytes = 0;
    let parts = matrices.iter().enumerate().map(|(i, m)| {
        let start = matrix_bytes;
        matrix_bytes += m.rows.div_ceil(rows_at_once) * row_bytes;
        match operand.join {
            Join::Stacked => (start, row_bytes),
            Join::Interleaved => (i * row_bytes, matrices.len() * row_bytes),
        }
    });
    let parts = parts.collect();
    if operand.join == Join::Interleaved {
        assert_eq!(
            operand.format,
            WeightFormat::Fragments,
            "only fragments are interleaved"
        );
        alike(&|m| m.rows.div_ceil(rows_at_once) == first.rows.div_ceil(rows_at_once));
    }
    Placement {
        memory,
        offset,
        row_bytes,
        matrix_bytes,
        bytes: matrix_bytes * first.count,
        parts,
    }
}

#[cfg(test)]
mod tests {
    use carat_model::{Model, gemma4};
    use carat_testkit::tiny::{Tiny, Variant};

    use super::*;
    use crate::{
        compile::{
            call::Call, fuse::fuse, host_networks::HostNetworks, lower::lower, rows::RowClass,
            scratch::Scratch, target,
        },
        config::Fusion,
        testing::weights_of,
    };

    fn model(variant: Variant) -> Model {
        Tiny::new(variant, QuantType::Q4_0).model()
    }

    /// Operands that the plain kernels name.
    fn named(model: &Model) -> BTreeSet<WeightOperand> {
        let plan = gemma4::plan(model);
        let (ops, target) = (
            fuse(&plan, Fusion::Off),
            target::Target::hopper(Fusion::Off, 8),
        );
        let mut scratch = Scratch::default();
        let weights = &model.weights;
        let calls = lower(
            &plan,
            weights,
            &ops,
            RowClass::Small,
            target,
            (&mut scratch, &mut HostNetworks::default()),
        );
        let calls = calls.expect("tiny models are supported");
        calls.iter().flat_map(Call::weights).collect()
    }

    fn layout(model: &Model, named: &BTreeSet<WeightOperand>, tables: TableMemory) -> WeightLayout {
        WeightLayout::new(&model.weights, named, &tables.into())
    }

    /// Everything in every format, and all the ways to join.
    fn all_formats(model: &Model) -> BTreeSet<WeightOperand> {
        let mut all = named(model);
        let matrices: Vec<WeightOperand> = all
            .iter()
            .filter(|p| p.format == WeightFormat::File)
            .cloned()
            .collect();
        for operand in matrices {
            let w = operand.parts[0];
            let m = model.weights.matrix(w);
            all.insert(WeightOperand::one(w, WeightFormat::F16));
            if FragmentFormat::of(m.quant).is_some() {
                all.insert(WeightOperand::one(w, WeightFormat::Fragments));
            }
        }
        let layer = &model.layers[0];
        let own = layer.own_kv.as_ref().expect("the first layer stores");
        let qkv: Vec<Weight> = [Some(layer.q), Some(own.k), own.v]
            .into_iter()
            .flatten()
            .collect();
        all.insert(WeightOperand::stacked(&qkv, WeightFormat::Fragments));
        all.insert(WeightOperand::interleaved(&[layer.ffn.gate, layer.ffn.up]));
        all
    }

    #[test]
    fn weights_do_not_overlap_and_are_aligned() {
        for variant in Variant::ALL {
            let model = model(variant);
            let layout = layout(&model, &all_formats(&model), TableMemory::Device);
            for (memory, bytes) in [
                (Memory::Device, layout.device_bytes),
                (Memory::Expanded, layout.expanded_bytes),
                (Memory::Host, layout.host_bytes),
            ] {
                let mut end = 0;
                for placement in layout.placements.values().filter(|s| s.memory == memory) {
                    assert!(placement.offset >= end && placement.offset.is_multiple_of(ALIGN));
                    end = placement.offset + placement.bytes;
                }
                assert_eq!(end.next_multiple_of(ALIGN), bytes, "{memory:?}");
            }
            assert_eq!(layout.host_bytes, 0);
        }
    }

    #[test]
    fn parts_of_a_join_fill_it_without_overlap() {
        for variant in Variant::ALL {
            let model = model(variant);
            let layout = layout(&model, &all_formats(&model), TableMemory::Device);
            for (operand, placement) in &layout.placements {
                let m_tile = if operand.format == WeightFormat::Fragments {
                    fragment::M_TILE
                } else {
                    1
                };
                let mut starts = Vec::new();
                for (weight, (start, stride)) in operand.parts.iter().zip(&placement.parts) {
                    let rows = model.weights.matrix(*weight).rows.div_ceil(m_tile);
                    starts.extend((0..rows).map(|r| start + r * stride));
                }
                starts.sort_unstable();
                let expected: Vec<usize> = (0..placement.matrix_bytes)
                    .step_by(placement.row_bytes)
                    .collect();
                assert_eq!(starts, expected, "{operand:?}");
            }
        }
    }

    #[test]
    fn tables_move_to_the_host_unless_they_are_multiplied_with() {
        let model = model(Variant::E4b);
        let named = named(&model);
        let here = layout(&model, &named, TableMemory::Device);
        let there = layout(&model, &named, TableMemory::Host);
        let names = |layout: &WeightLayout| -> Vec<String> {
            let placements = layout
                .placements
                .iter()
                .filter(|(_, s)| s.memory == Memory::Host);
            let name = |p: &WeightOperand| model.weights.matrix(p.parts[0]).name.clone();
            placements.map(|(p, _)| name(p)).collect()
        };
        assert!(names(&here).is_empty());
        let names = names(&there);
        assert!(!names.is_empty());
        assert!(
            names.iter().all(|n| n.starts_with("per_layer_token_embd")),
            "{names:?}"
        );
        assert_eq!(here.device_bytes, there.device_bytes + there.host_bytes);
    }

    #[test]
    fn matrices_move_to_the_host_in_every_format_with_what_they_are_joined_with() {
        let model = model(Variant::Moe26b);
        let (all, layer) = (all_formats(&model), &model.layers[0]);
        let here = layout(&model, &all, TableMemory::Device);
        let experts = layer.moe.as_ref().expect("has experts");
        let host = HostWeights {
            tables: TableMemory::Device,
            matrices: [layer.ffn.up, experts.down].into(),
            cpu_share: 0,
        };
        let there = WeightLayout::new(&model.weights, &all, &host);
        let mut moved = 0;
        for (operand, placement) in &there.placements {
            let listed = operand.parts.iter().any(|w| host.matrices.contains(w));
            assert_eq!(placement.memory == Memory::Host, listed, "{operand:?}");
            moved += usize::from(listed);
        }
        // As they are in the file, as f16, in fragments; and gate and up together.
        assert!(moved >= 6, "{moved}");
        assert!(there.expanded_bytes < here.expanded_bytes);
        assert_eq!(there.host_table_bytes, 0);
        let total = |l: &WeightLayout| l.device_bytes + l.expanded_bytes + l.host_bytes;
        assert_eq!(total(&here), total(&there));
        let listed = host.matrices.iter().copied().collect();
        let (left, taken) = (here.device_bytes_of(&listed), there.host_bytes);
        assert!(
            (left..left + moved * ALIGN).contains(&taken),
            "{left} {taken}"
        );
        assert_eq!(there.device_bytes_of(&listed), 0);
    }

    #[test]
    fn what_no_call_names_is_not_loaded() {
        let model = model(Variant::E4b);
        let mut named = named(&model);
        let all = layout(&model, &named, TableMemory::Device);
        let q = WeightOperand::one(model.layers[0].q, WeightFormat::File);
        assert!(named.remove(&q));
        let without = layout(&model, &named, TableMemory::Device);
        assert!(without.device_bytes < all.device_bytes);
        assert!(!without.targets().contains_key(&model.layers[0].q));
        assert!(without.named().all(|(operand, _)| *operand != q));
    }

    #[test]
    fn a_weight_is_read_once_for_all_its_formats() {
        let model = model(Variant::Dense12b);
        let w = model.layers[0].o;
        let named = [
            WeightFormat::File,
            WeightFormat::Fragments,
            WeightFormat::F16,
        ]
        .map(|format| WeightOperand::one(w, format));
        let layout = layout(&model, &named.into(), TableMemory::Device);
        let targets = layout.targets();
        assert_eq!(targets.len(), 1);
        assert_eq!(targets[&w].len(), 3);
        let kernels: Vec<String> = layout
            .kernels(&model.weights)
            .iter()
            .map(ToString::to_string)
            .collect();
        assert_eq!(kernels, ["pack.q4_0.q4.576", "dequantize.q4_0.f16"]);
        let (m, expanded) = (model.weights.matrix(w), layout.expanded_bytes);
        assert_eq!(expanded, (m.rows * m.columns * 2).next_multiple_of(ALIGN));
    }

    #[test]
    fn formats_of_the_same_bytes_are_placed_once() {
        let mut tiny = Tiny::new(Variant::Dense12b, QuantType::BF16);
        tiny.formats.embedding = QuantType::F16;
        let model = tiny.model();
        let (table, o) = (model.embedding, model.layers[0].o);
        let named = [
            WeightOperand::one(table, WeightFormat::Table),
            WeightOperand::one(table, WeightFormat::F16),
            WeightOperand::one(o, WeightFormat::File),
            WeightOperand::one(o, WeightFormat::Bf16),
        ];
        let layout = layout(&model, &named.clone().into(), TableMemory::Host);
        assert_eq!(layout.placements.len(), 2);
        assert_eq!((layout.expanded_bytes, layout.host_bytes), (0, 0));
        assert_eq!(layout.named().count(), named.len());
        assert!(layout.kernels(&model.weights).is_empty());
    }

    #[test]
    fn experts_are_joined_matrix_by_matrix() {
        let model = model(Variant::Moe26b);
        let experts = model.layers[0].moe.as_ref().expect("has experts");
        let operand = WeightOperand::interleaved(&[experts.gate, experts.up]);
        let layout = layout(&model, &[operand.clone()].into(), TableMemory::Device);
        let m = model.weights.matrix(experts.gate);
        let format = FragmentFormat::of(m.quant).unwrap();
        let placement = &layout.placements[&operand];
        assert_eq!(placement.row_bytes, format.m_tile_bytes(m.columns));
        assert_eq!(
            placement.matrix_bytes,
            2 * format.fragment_bytes(m.rows, m.columns)
        );
        assert_eq!(placement.bytes, m.count * placement.matrix_bytes);
        assert_eq!(
            placement.parts,
            [
                (0, 2 * placement.row_bytes),
                (placement.row_bytes, 2 * placement.row_bytes)
            ]
        );
    }

    #[test]
    fn only_floats_with_zero_lower_bits_are_exact_in_bf16() {
        let upper: Vec<u8> = (0..64u32).flat_map(|i| [0, 0, i as u8, 0x40]).collect();
        let mut lower = upper.clone();
        lower[4 * 63] = 1;
        let shape = || vec![32, 2];
        let weights = weights_of(&[
            ("upper", shape(), QuantType::F32, upper.clone()),
            ("lower", shape(), QuantType::F32, lower),
            ("bf16", shape(), QuantType::BF16, vec![7; 128]),
            ("f16", shape(), QuantType::F16, vec![0; 128]),
            ("q8_0", shape(), QuantType::Q8_0, vec![0; 68]),
        ]);
        let found: Vec<&str> = weights
            .iter()
            .filter(|(weight, _)| weights.is_exact_bf16(*weight))
            .map(|(_, m)| m.name.as_str())
            .collect();
        assert_eq!(found, ["upper", "bf16"]);
    }
}
