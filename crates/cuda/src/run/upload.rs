//! Upload of weights. Rows go through two page-locked buffers, one filled while the other is copied: straight to their
//! placement, or in the file's format to a staging buffer, from where kernels bring them into their formats.
//!
//! Each weight is read once for all its formats. While it lasts, this takes 16 MiB of device memory beside the weights, or an
//! M-tile of the widest one.

use std::{
    collections::HashMap,
    ops::Range,
    sync::Arc,
    thread::{self, available_parallelism},
};

use carat_model::weights::{Matrix, Weight, Weights};

use crate::{
    compile::weights::{LoadTarget, Memory, WeightLayout, loader},
    device::{Address, Buffer, Device, Event, HostBuffer, Module, launch},
    error::CudaError,
    kernel::{
        Dequantize, MatrixAt, Pack, Specialization, WeightFormat, WeightOperand, fragment::M_TILE,
    },
};

/// Bytes of one weight that a buffer holds, if an M-tile is not more.
const PIECE_BYTES: usize = 16 << 20;

/// The most threads that copy a piece out of the file: one alone has a fraction of the bus' rate.
const MAX_COPIERS: usize = 8;
/// Bytes of a piece that are worth a thread.
const BYTES_PER_COPIER: usize = 1 << 20;

/// Weights that kernels can read.
pub(crate) struct ResidentWeights {
    pub(crate) at: HashMap<WeightOperand, MatrixAt>,
    #[cfg_attr(not(test), expect(dead_code, reason = "holds what `at` names"))]
    buffers: Buffers,
}

/// The kernels of [`WeightLayout::kernels`], loaded.
pub(crate) type Loaders = HashMap<Specialization, Arc<Module>>;

impl WeightLayout {
    /// Loads everything. The file is not looked at afterwards.
    pub(crate) fn upload(
        &self,
        device: &Arc<Device>,
        weights: &Weights,
        loaders: &Loaders,
    ) -> Result<ResidentWeights, CudaError> {
        self.upload_by(PIECE_BYTES, device, weights, loaders)
    }

    fn upload_by(
        &self,
        piece_bytes: usize,
        device: &Arc<Device>,
        weights: &Weights,
        loaders: &Loaders,
    ) -> Result<ResidentWeights, CudaError> {
        let mut buffers = Buffers::new(device, self)?;
        let targets = self.targets();
        let piece = |(w, targets): (&Weight, &Vec<LoadTarget>)| {
            let m = weights.matrix(*w);
            let widened = targets.iter().filter(|t| t.format == WeightFormat::Vector);
            let vectors = widened.map(|_| m.columns * 4);
            vectors.fold(piece_rows(m, piece_bytes) * m.row_bytes(), usize::max)
        };
        let largest = targets.iter().map(piece).max().unwrap_or(0);
        let mut upload = Upload {
            device,
            weights,
            loaders,
            piece_bytes,
            staging_host: DoubleBuffer::new(device, largest)?,
            staging: (!loaders.is_empty())
                .then(|| device.allocate("staging", largest))
                .transpose()?,
            buffers: &mut buffers,
        };
        for (weight, targets) in &targets {
            upload.put(*weight, targets)?;
        }
        device.wait("loading weights")?;
        let at = self.named().map(|(operand, placement)| {
            let at = MatrixAt {
                start: buffers.address(placement.memory).offset(placement.offset),
                row_bytes: placement.row_bytes,
                matrix_bytes: placement.matrix_bytes,
            };
            (operand.clone(), at)
        });
        Ok(ResidentWeights {
            at: at.collect(),
            buffers,
        })
    }
}

/// Rows of a matrix that travel together: whole M-tiles, unless the matrix ends.
fn piece_rows(m: &Matrix, bytes: usize) -> usize {
    let m_tiles = bytes / m.row_bytes() / M_TILE;
    (m_tiles.max(1) * M_TILE).min(m.rows)
}

/// Copies rows of one matrix, packed, by several threads where they are many.
fn copy_rows(weights: &Weights, weight: Weight, index: usize, rows: Range<usize>, to: &mut [u8]) {
    let cores = available_parallelism().map_or(1, usize::from);
    let copiers = (to.len() / BYTES_PER_COPIER).clamp(1, cores.min(MAX_COPIERS));
    let share = rows.len().div_ceil(copiers).max(1);
    let row_bytes = weights.matrix(weight).row_bytes();
    let copy = move |(to, first): (&mut [u8], usize)| {
        let rows = first..first + to.len() / row_bytes;
        copy_share(weights, weight, index, rows, to);
    };
    let mut shares = to.chunks_mut(share * row_bytes).zip(rows.step_by(share));
    let own = shares.next();
    thread::scope(|scope| {
        for share in shares {
            scope.spawn(move || copy(share));
        }
        own.map(copy);
    });
}

/// Copies rows of one matrix, packed.
fn copy_share(weights: &Weights, weight: Weight, index: usize, rows: Range<usize>, to: &mut [u8]) {
    let m = weights.matrix(weight);
    let row_bytes = m.row_bytes();
    if m.row_stride == row_bytes {
        let start = index * m.matrix_stride + rows.start * row_bytes;
        to.copy_from_slice(&weights.bytes(weight)[start..start + rows.len() * row_bytes]);
    } else {
        for (to, row) in to.chunks_exact_mut(row_bytes).zip(rows) {
            to.copy_from_slice(weights.row(weight, index, row));
        }
    }
}

/// Memory that weights stay in.
struct Buffers {
    device: Buffer,
    expanded: Option<Buffer>,
    host: Option<HostBuffer>,
}

impl Buffers {
    fn new(device: &Arc<Device>, layout: &WeightLayout) -> Result<Buffers, CudaError> {
        let some = |bytes: usize| (bytes > 0).then_some(bytes);
        let expanded = some(layout.expanded_bytes);
        let host = some(layout.host_bytes);
        Ok(Buffers {
            device: device.allocate("weights", layout.device_bytes)?,
            expanded: expanded
                .map(|bytes| device.allocate("expanded weights", bytes))
                .transpose()?,
            host: host
                .map(|bytes| device.allocate_host("weights", bytes))
                .transpose()?,
        })
    }

    /// Device memory of one kind; there is some if anything goes there.
    fn on_device(&self, memory: Memory) -> &Buffer {
        match memory {
            Memory::Expanded => self.expanded.as_ref().expect("something goes there"),
            Memory::Device | Memory::Host => &self.device,
        }
    }

    fn address(&self, memory: Memory) -> Address {
        match (memory, &self.host) {
            (Memory::Host, Some(host)) => host.address(),
            _ => self.on_device(memory).address(),
        }
    }
}

struct Upload<'a> {
    device: &'a Device,
    weights: &'a Weights,
    loaders: &'a Loaders,
    piece_bytes: usize,
    staging_host: DoubleBuffer<'a>,
    /// A piece in the file's format; there if kernels take part. Work is queued in order, so one is enough.
    staging: Option<Buffer>,
    buffers: &'a mut Buffers,
}

impl Upload<'_> {
    /// Loads a weight in all its formats.
    fn put(&mut self, weight: Weight, targets: &[LoadTarget]) -> Result<(), CudaError> {
        let m = self.weights.matrix(weight);
        for target in targets.iter().filter(|t| t.format == WeightFormat::Vector) {
            let values = self.weights.vector(weight);
            let host = self.staging_host.next()?.bytes_mut();
            for (to, value) in host.chunks_exact_mut(4).zip(&values) {
                to.copy_from_slice(&value.to_ne_bytes());
            }
            let buffer = self.buffers.on_device(target.memory);
            self.staging_host
                .copy(buffer, target.start, values.len() * 4)?;
            self.staging_host.sent()?;
        }
        let copied =
            |t: &LoadTarget| t.memory == Memory::Host && loader(m.quant, t.format).is_none();
        for target in targets.iter().filter(|t| copied(t)) {
            let host = self.buffers.host.as_mut().expect("something goes there");
            for index in 0..m.count {
                let start = target.start + index * target.matrix_bytes;
                let to = &mut host.bytes_mut()[start..start + m.rows * m.row_bytes()];
                copy_rows(self.weights, weight, index, 0..m.rows, to);
            }
        }
        let others = |t: &&LoadTarget| t.format != WeightFormat::Vector && !copied(t);
        let targets: Vec<LoadTarget> = targets.iter().filter(others).copied().collect();
        if targets.is_empty() {
            return Ok(());
        }
        let at_once = piece_rows(m, self.piece_bytes);
        for index in 0..m.count {
            for first in (0..m.rows).step_by(at_once) {
                let rows = first..(first + at_once).min(m.rows);
                let host = self.staging_host.next()?.bytes_mut();
                let host = &mut host[..rows.len() * m.row_bytes()];
                copy_rows(self.weights, weight, index, rows.clone(), host);
                self.send(m, index, &rows, &targets)?;
                self.staging_host.sent()?;
            }
        }
        Ok(())
    }

    /// Sends the rows in the current buffer to all their targets.
    fn send(
        &self,
        m: &Matrix,
        index: usize,
        rows: &Range<usize>,
        targets: &[LoadTarget],
    ) -> Result<(), CudaError> {
        let bytes = rows.len() * m.row_bytes();
        if targets.iter().any(|t| loader(m.quant, t.format).is_some()) {
            self.staging_host.copy(self.staging(), 0, bytes)?;
        }
        for target in targets {
            let steps = match target.format {
                WeightFormat::Fragments => rows.start / M_TILE,
                _ => rows.start,
            };
            let offset = target.start + index * target.matrix_bytes + steps * target.stride;
            match loader(m.quant, target.format) {
                None => {
                    let buffer = self.buffers.on_device(target.memory);
                    self.staging_host.copy(buffer, offset, bytes)?;
                }
                // It writes through the bus where the placement is in host memory.
                Some(kernel) => {
                    let to = self.buffers.address(target.memory).offset(offset);
                    self.convert(&kernel, m, rows.len(), target, to)?;
                }
            }
        }
        Ok(())
    }

    fn staging(&self) -> &Buffer {
        self.staging.as_ref().expect("there, as kernels are")
    }

    /// Brings the staged rows into a format.
    fn convert(
        &self,
        kernel: &Specialization,
        m: &Matrix,
        rows: usize,
        target: &LoadTarget,
        to: Address,
    ) -> Result<(), CudaError> {
        let (quant, columns, from) = (m.quant, m.columns, self.staging().address());
        let (grid, params) = if target.format == WeightFormat::Fragments {
            let job = Pack {
                quant,
                from,
                rows,
                columns,
                fragments: to,
                m_tile_bytes: target.stride,
            };
            (job.grid(), job.params())
        } else {
            let job = Dequantize {
                quant,
                from,
                rows,
                columns,
                to,
            };
            (job.grid(), job.params())
        };
        self.device.bind()?;
        launch(&self.loaders[kernel], grid, &params)
    }
}

/// Two page-locked buffers that are used alternately.
struct DoubleBuffer<'a> {
    device: &'a Device,
    buffers: [HostBuffer; 2],
    /// Events after which the device is done with each.
    done: [Option<Event>; 2],
    current: usize,
}

impl<'a> DoubleBuffer<'a> {
    fn new(device: &'a Arc<Device>, bytes: usize) -> Result<DoubleBuffer<'a>, CudaError> {
        let buffer = || device.allocate_host("upload", bytes);
        Ok(DoubleBuffer {
            device,
            buffers: [buffer()?, buffer()?],
            done: [None, None],
            current: 0,
        })
    }

    /// The other buffer, once the device is done with it.
    fn next(&mut self) -> Result<&mut HostBuffer, CudaError> {
        self.current = 1 - self.current;
        if let Some(event) = self.done[self.current].take() {
            event.wait()?;
        }
        Ok(&mut self.buffers[self.current])
    }

    /// Starts a copy of the current buffer's beginning.
    fn copy(&self, to: &Buffer, offset: usize, bytes: usize) -> Result<(), CudaError> {
        self.device
            .copy_in(&self.buffers[self.current], to, offset, bytes)
    }

    /// All copies of the current buffer have been started.
    fn sent(&mut self) -> Result<(), CudaError> {
        self.done[self.current] = Some(self.device.event()?);
        Ok(())
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use std::collections::BTreeSet;

    use carat_gguf::{QuantType, quant::random_blocks};
    use carat_testkit::tiny::{Tiny, Variant};

    use super::*;
    use crate::{
        compile::weights::HostWeights,
        config::{TableMemory, Tier},
        kernel::{
            Join,
            fragment::{FragmentFormat, pack},
        },
        testing::{Card, weights_of},
    };

    #[test]
    fn rows_are_copied_without_what_lies_between() {
        let model = Tiny::new(Variant::E2b, QuantType::Q4_0).model();
        let mut strided = 0;
        for (weight, m) in model.weights.iter() {
            for index in 0..m.count {
                let rows = m.rows / 3..m.rows;
                let mut packed = vec![0; rows.len() * m.row_bytes()];
                copy_rows(&model.weights, weight, index, rows.clone(), &mut packed);
                let row = |r| model.weights.row(weight, index, r).to_vec();
                let expected: Vec<u8> = rows.flat_map(row).collect();
                assert!(packed == expected, "{}", m.name);
            }
            strided += usize::from(m.row_stride != m.row_bytes());
        }
        assert!(strided > 0, "the per-layer table is cut by columns");
    }

    #[test]
    fn many_rows_are_copied_by_several_threads() {
        let shape = [512, 6000];
        let bytes = random(QuantType::Q8_0, &shape, 11);
        assert!(bytes.len() > 3 * BYTES_PER_COPIER);
        let weights = weights_of(&[("w", shape.to_vec(), QuantType::Q8_0, bytes.clone())]);
        let row_bytes = QuantType::Q8_0.row_bytes(shape[0]);
        for rows in [0..6000, 1..5998, 7..8, 3..2000] {
            let mut copied = vec![0; rows.len() * row_bytes];
            copy_rows(
                &weights,
                weights.find("w").unwrap(),
                0,
                rows.clone(),
                &mut copied,
            );
            assert!(copied == bytes[rows.start * row_bytes..rows.end * row_bytes]);
        }
    }

    #[test]
    fn pieces_are_whole_m_tiles() {
        let model = Tiny::new(Variant::E2b, QuantType::Q4_0).model();
        let m = model.weights.matrix(model.embedding);
        assert_eq!((m.rows, m.row_bytes()), (400, 36));
        let rows = [1, 36 * 16, 36 * 47, 36 * 48, 1 << 20].map(|bytes| piece_rows(m, bytes));
        assert_eq!(rows, [16, 16, 32, 48, 400]);
        let vector = model.weights.matrix(model.output_norm);
        assert_eq!(piece_rows(vector, 1), 1);
    }

    pub(crate) fn random(quant: QuantType, shape: &[usize], seed: u64) -> Vec<u8> {
        let mut bytes = vec![0; quant.row_bytes(shape[0]) * shape[1..].iter().product::<usize>()];
        random_blocks(quant, seed, 0.1, &mut bytes);
        bytes
    }

    /// One matrix of an operand, as the plain code has it.
    fn expected(weights: &Weights, operand: &WeightOperand, index: usize) -> Vec<u8> {
        let parts = operand.parts.iter().map(|&weight| {
            let m = weights.matrix(weight);
            let row = |r| weights.row(weight, index, r);
            let values = |r| {
                let mut values = vec![0.0f32; m.columns];
                m.quant.dequantize(row(r), &mut values);
                values.into_iter()
            };
            let rows = 0..m.rows;
            match operand.format {
                WeightFormat::Fragments => pack(m.quant, m.rows, m.columns, row),
                WeightFormat::Table | WeightFormat::File => {
                    rows.flat_map(|r| row(r).to_vec()).collect()
                }
                WeightFormat::Vector => rows.flat_map(values).flat_map(f32::to_le_bytes).collect(),
                WeightFormat::Bf16 => {
                    let upper = |v: f32| [v.to_le_bytes()[2], v.to_le_bytes()[3]];
                    rows.flat_map(values).flat_map(upper).collect()
                }
                WeightFormat::F16 => unreachable!("compared by value"),
            }
        });
        let parts: Vec<Vec<u8>> = parts.collect();
        if operand.join == Join::Stacked {
            return parts.concat();
        }
        let m = weights.matrix(operand.parts[0]);
        let m_tile = FragmentFormat::of(m.quant).unwrap().m_tile_bytes(m.columns);
        let m_tiles = (0..parts[0].len()).step_by(m_tile);
        let interleaved = |at: usize| parts.iter().flat_map(move |p| p[at..at + m_tile].to_vec());
        m_tiles.flat_map(interleaved).collect()
    }

    /// F16 that are near the values, to the rounding of f16.
    fn check_f16(weights: &Weights, operand: &WeightOperand, found: &[u8]) {
        let mut found = found.chunks_exact(2).map(|bytes| {
            let mut value = [0.0];
            QuantType::F16.dequantize(bytes, &mut value);
            value[0]
        });
        for &weight in &operand.parts {
            let m = weights.matrix(weight);
            for r in 0..m.rows {
                let mut values = vec![0.0; m.columns];
                m.quant.dequantize(weights.row(weight, 0, r), &mut values);
                for value in values {
                    let rounded = found.next().unwrap();
                    assert!(
                        (rounded - value).abs() <= value.abs() / 2048.0 + 1e-7,
                        "{}",
                        m.name
                    );
                }
            }
        }
        assert_eq!(found.next(), None);
    }

    #[test]
    #[ignore = "needs a card"]
    fn upload_brings_every_format_to_its_placement() {
        let card = Card::open(Tier::Best);
        let exact: Vec<u8> = (0..20 * 96u32)
            .flat_map(|i| [0, 0, i as u8, 0x3f])
            .collect();
        let tensor = |name, shape: &[usize], quant, seed| {
            (name, shape.to_vec(), quant, random(quant, shape, seed))
        };
        let weights = weights_of(&[
            tensor("q", &[512, 40], QuantType::Q4_K, 1),
            tensor("k", &[512, 20], QuantType::Q4_K, 2),
            tensor("v", &[512, 20], QuantType::Q6_K, 3),
            // Both are T4 in fragments.
            tensor("gate", &[512, 35], QuantType::IQ4_XS, 4),
            tensor("up", &[512, 35], QuantType::IQ3_S, 5),
            tensor("experts gate", &[64, 24, 3], QuantType::Q4_0, 6),
            tensor("experts up", &[64, 24, 3], QuantType::Q4_0, 7),
            ("exact in bf16", vec![96, 20], QuantType::F32, exact),
            tensor("norm", &[100], QuantType::F16, 8),
            tensor("table", &[64, 50], QuantType::Q8_0, 9),
            tensor("f16", &[50, 30], QuantType::F16, 10),
        ]);
        let of = |name: &str| weights.find(name).unwrap();
        let named = [
            WeightOperand::stacked(&[of("q"), of("k")], WeightFormat::Fragments),
            WeightOperand::stacked(&[of("q"), of("k"), of("v")], WeightFormat::F16),
            WeightOperand::one(of("v"), WeightFormat::Fragments),
            WeightOperand::one(of("v"), WeightFormat::File),
            WeightOperand::interleaved(&[of("gate"), of("up")]),
            WeightOperand::interleaved(&[of("experts gate"), of("experts up")]),
            WeightOperand::one(of("experts up"), WeightFormat::File),
            WeightOperand::one(of("exact in bf16"), WeightFormat::Bf16),
            WeightOperand::one(of("norm"), WeightFormat::Vector),
            WeightOperand::one(of("table"), WeightFormat::Table),
            WeightOperand::one(of("f16"), WeightFormat::F16),
        ];
        let named: BTreeSet<WeightOperand> = named.into();
        for (tables, piece_bytes) in [(TableMemory::Device, PIECE_BYTES), (TableMemory::Host, 1)] {
            // Matrices of every format, joined and not.
            let moved = match tables {
                TableMemory::Device => [].as_slice(),
                TableMemory::Host => &["k", "v", "gate", "experts up", "exact in bf16", "f16"],
            };
            let host = HostWeights {
                tables,
                matrices: moved.iter().map(|name| of(name)).collect(),
                cpu_share: 0,
            };
            let layout = WeightLayout::new(&weights, &named, &host);
            let kernels = layout.kernels(&weights).into_iter();
            let loaders = kernels.map(|k| (k.clone(), Arc::new(card.load(&k))));
            let loaders: Loaders = loaders.collect();
            let resident = layout
                .upload_by(piece_bytes, &card.device, &weights, &loaders)
                .unwrap();
            let buffers = &resident.buffers;
            let device: Vec<u8> = card.download(&buffers.device, layout.device_bytes);
            let expanded: Vec<u8> = match &buffers.expanded {
                Some(expanded) => card.download(expanded, layout.expanded_bytes),
                None => Vec::new(),
            };
            let host = buffers.host.as_ref().map(HostBuffer::bytes);
            assert_eq!(host.is_some(), tables == TableMemory::Host);
            for (operand, placement) in layout.named() {
                let bytes = match placement.memory {
                    Memory::Device => &device,
                    Memory::Expanded => &expanded,
                    Memory::Host => host.unwrap(),
                };
                let count = weights.matrix(operand.parts[0]).count;
                for index in 0..count {
                    let start = placement.offset + index * placement.matrix_bytes;
                    let found = &bytes[start..start + placement.matrix_bytes];
                    if operand.format == WeightFormat::F16 {
                        check_f16(&weights, operand, found);
                    } else {
                        assert!(found == expected(&weights, operand, index), "{operand:?}");
                    }
                }
                let at = resident.at[operand];
                let start = buffers.address(placement.memory).offset(placement.offset);
                assert_eq!(at.start, start);
                assert_eq!(
                    (at.row_bytes, at.matrix_bytes),
                    (placement.row_bytes, placement.matrix_bytes)
                );
            }
        }
    }
}
