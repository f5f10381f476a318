//! A bench for single kernels: operands, weights, pages and rows without a model, and calls through the twins.

use std::cell::RefCell;

use carat_gguf::QuantType;
use carat_model::{
    gemma4,
    kv::{KvGroup, KvType, PerGroup},
    plan::SlotSpec,
    weights::Weight,
};
use carat_testkit::tiny::{Tiny, Variant};

use super::{
    Addresses, BatchAt, HostAt, InputsAt, Kernel, MatrixAt, Operand, PagesAt, RowRefsAt, RowsAt,
    RunsAt, TablesAt, TiedAt,
    activation::{Activation, Int8Operands, permuted_index, tile_bytes, tile_index},
};
use crate::{
    config::Tier,
    device::{Address, Buffer, launch},
    kernel::weights::{self, WeightOperand},
    testing::{Card, Plain, f16_bits, f16_value, normals, relative_error},
};

/// Pages of a slot that [`Table::slot`] makes.
const PAGES: usize = 4;
const PAGE_TOKENS: usize = 32;
/// Pages named from this one on lie elsewhere, as chunk pages do.
const CHUNK_PAGES: usize = 2;
const CHUNK_SHIFT: usize = 3;
/// An f16 that is not a number.
pub(crate) const POISON: u16 = 0x7e00;

pub(crate) struct Table {
    card: Card,
    at: RefCell<Addresses>,
    /// Buffers of operands, in order; a shifted operand has none of its own.
    buffers: RefCell<Vec<Option<Buffer>>>,
    /// No operands: weights, frequencies, descriptions of the batch.
    others: Vec<Buffer>,
    names: Vec<Weight>,
    weights: usize,
    index: Address,
    pages: Vec<Buffer>,
    /// Of two bytes.
    page_values: usize,
}

impl Table {
    pub(crate) fn new() -> Table {
        let model = Tiny::new(Variant::E4b, QuantType::Q8_0).model();
        let tables = TablesAt {
            base: Address::NULL,
            pages: Address::NULL,
        };
        let rows = RowsAt {
            count: Address::NULL,
            index: Address::NULL,
        };
        let runs = RunsAt {
            count: Address::NULL,
            first: Address::NULL,
        };
        let at = Addresses {
            plan: gemma4::plan(&model),
            values: vec![],
            scratch: vec![],
            weights: [].into(),
            ropes: vec![Address::NULL],
            clusters: vec![],
            kv: vec![chunk_pages(Address::NULL, Address::NULL)],
            batch: BatchAt {
                tokens: Address::NULL,
                row_refs: RowRefsAt {
                    position: Address::NULL,
                    run: Address::NULL,
                    sliding_end: Address::NULL,
                },
                inputs: InputsAt::NONE,
                all: rows,
                sampled: rows,
                all_runs: runs,
                sampled_runs: runs,
                tables: PerGroup {
                    full: tables,
                    sliding: tables,
                },
            },
            host: HostAt::NONE,
        };
        Table {
            card: Card::open(Tier::Best),
            at: RefCell::new(at),
            buffers: RefCell::default(),
            others: Vec::new(),
            names: model.weights.iter().map(|(w, _)| w).collect(),
            weights: 0,
            index: Address::NULL,
            pages: Vec::new(),
            page_values: 0,
        }
    }

    /// Frees everything.
    pub(crate) fn clear(&mut self) {
        self.at.borrow_mut().scratch.clear();
        self.buffers.borrow_mut().clear();
        self.others.clear();
        self.pages.clear();
        self.weights = 0;
        self.index = Address::NULL;
    }

    fn operand(&self, address: Address, buffer: Option<Buffer>) -> Operand {
        let scratch = &mut self.at.borrow_mut().scratch;
        scratch.push(address);
        self.buffers.borrow_mut().push(buffer);
        Operand::Scratch(scratch.len() - 1)
    }

    pub(crate) fn put<T: Plain>(&mut self, values: &[T]) -> Operand {
        let buffer = self.card.upload(values);
        self.operand(buffer.address(), Some(buffer))
    }

    /// Values that are not numbers.
    pub(crate) fn poison(&mut self, count: usize) -> Operand {
        self.put(&vec![f32::NAN; count])
    }

    /// Many random f16, whose pairs are random floats, too.
    #[allow(dead_code, reason = "called by the timing programs")]
    pub(crate) fn big(&mut self, bytes: usize) -> Operand {
        const PIECE: usize = 4 << 20;
        let device = &self.card.device;
        let buffer = device.allocate("test", bytes).expect("memory");
        let mut host = device.allocate_host("test", PIECE).expect("memory");
        let noise = f16_bits(&normals(9, PIECE / 2));
        for (to, bits) in host.bytes_mut().chunks_exact_mut(2).zip(noise) {
            bits.put(to);
        }
        for start in (0..bytes).step_by(PIECE) {
            let piece = PIECE.min(bytes - start);
            device
                .copy_in(&host, &buffer, start, piece)
                .expect("copies");
        }
        device.wait("filling").expect("copies");
        self.operand(buffer.address(), Some(buffer))
    }

    /// An operand so many bytes behind another.
    #[allow(dead_code, reason = "called by the timing programs")]
    pub(crate) fn shifted(&self, operand: Operand, bytes: usize) -> Operand {
        let address = self.at.borrow().operand(operand).offset(bytes);
        self.operand(address, None)
    }

    pub(crate) fn get<T: Plain>(&self, operand: Operand, count: usize) -> Vec<T> {
        let Operand::Scratch(i) = operand else {
            panic!("not on the table");
        };
        let buffers = self.buffers.borrow();
        let buffer = buffers[i].as_ref().expect("a operand of its own");
        self.card.download(buffer, count)
    }

    fn keep<T: Plain>(&mut self, values: &[T]) -> Address {
        self.others.push(self.card.upload(values));
        self.others.last().expect("just put there").address()
    }

    pub(crate) fn weight(&mut self, values: &[f32]) -> Weight {
        let start = self.keep(values);
        let name = self.names[self.weights];
        self.weights += 1;
        let matrix = MatrixAt {
            start,
            row_bytes: values.len() * 4,
            matrix_bytes: values.len() * 4,
        };
        self.at.borrow_mut().weights.insert(
            WeightOperand::one(name, weights::WeightFormat::Vector),
            matrix,
        );
        name
    }

    /// A matrix that products read in f16.
    pub(crate) fn f16_matrix(&mut self, values: &[f32]) -> WeightOperand {
        let start = self.keep(&f16_bits(values));
        let operand = WeightOperand::one(self.names[self.weights], weights::WeightFormat::F16);
        self.weights += 1;
        let matrix = MatrixAt {
            start,
            row_bytes: values.len() * 2,
            matrix_bytes: values.len() * 2,
        };
        let weights = &mut self.at.borrow_mut().weights;
        weights.insert(operand.clone(), matrix);
        operand
    }

    pub(crate) fn rope(&mut self, frequencies: &[f32]) {
        let address = self.keep(frequencies);
        self.at.borrow_mut().ropes[0] = address;
    }

    /// Rows that alternate between two runs, one of them far on, both across the border of a page; returns their positions.
    /// They stand in the batch in reverse.
    pub(crate) fn operands(&mut self, rows: usize) -> Vec<u32> {
        assert!(rows <= PAGE_TOKENS);
        let positions: Vec<u32> = (0..rows as u32)
            .map(|r| if r % 2 == 0 { 29 + r } else { 3228 + r })
            .collect();
        let runs: Vec<u32> = (0..rows as u32).map(|r| r % 2).collect();
        let reversed = |list: &[u32]| list.iter().rev().copied().collect::<Vec<u32>>();
        let index = reversed(&(0..rows as u32).collect::<Vec<_>>());
        // Run 0 has pages 3 and 1 from entry 0 on, run 1 pages 0 and 2 from entry 100 on.
        self.describe(
            (&reversed(&positions), &reversed(&runs), &index),
            (&[0, 2 - 100], &[3, 1, 0, 2]),
        );
        positions
    }

    /// One run from its start.
    #[allow(dead_code, reason = "called by the timing programs")]
    pub(crate) fn rows_with_pages(&mut self, rows: usize) {
        let positions: Vec<u32> = (0..rows as u32).collect();
        let pages = &positions[..rows.div_ceil(PAGE_TOKENS)];
        self.describe((&positions, &vec![0; rows], &positions), (&[0], pages));
    }

    fn describe(
        &mut self,
        (positions, runs, index): (&[u32], &[u32], &[u32]),
        (base, pages): (&[i32], &[u32]),
    ) {
        let ends: Vec<u32> = positions.iter().map(|position| position + 1).collect();
        let operands = RowRefsAt {
            position: self.keep(positions),
            run: self.keep(runs),
            sliding_end: self.keep(&ends),
        };
        let tables = TablesAt {
            base: self.keep(base),
            pages: self.keep(pages),
        };
        self.index = self.keep(index);
        let batch = &mut self.at.borrow_mut().batch;
        batch.row_refs = operands;
        batch.tables = PerGroup {
            full: tables,
            sliding: tables,
        };
    }

    /// Slot 0 with [`PAGES`] pages, poisoned.
    pub(crate) fn slot(&mut self, kv_heads: usize, head_dim: usize, kv: KvType) {
        self.slot_with_pages(kv_heads, head_dim, kv, PAGES);
    }

    pub(crate) fn slot_with_pages(
        &mut self,
        kv_heads: usize,
        head_dim: usize,
        kv: KvType,
        pages: usize,
    ) {
        self.at.borrow_mut().plan.slots[0] = SlotSpec {
            group: KvGroup::Full,
            kv_heads,
            head_dim,
            window: None,
            borrowed: None,
        };
        self.page_values =
            (pages + CHUNK_SHIFT) * PAGE_TOKENS * kv_heads * kv.head_bytes(head_dim) / 2;
        self.poison_pages();
    }

    fn poison_pages(&mut self) {
        let poison = vec![POISON; self.page_values];
        self.pages = vec![self.card.upload(&poison), self.card.upload(&poison)];
        self.at.borrow_mut().kv[0] = chunk_pages(self.pages[0].address(), self.pages[1].address());
    }

    /// Keys and values as they are; poisoned again after that.
    pub(crate) fn take_pages(&mut self) -> Vec<Vec<u16>> {
        let pages = self.pages.iter();
        let taken = pages
            .map(|p| self.card.download(p, self.page_values))
            .collect();
        self.poison_pages();
        taken
    }

    /// Runs a kernel as a bucket of `padded_rows` rows would, `rows` of which there are.
    pub(crate) fn run(&self, rows: usize, padded_rows: usize, kernel: &dyn Kernel) {
        let count = self.card.upload(&[rows as u32]);
        let rows = RowsAt {
            count: count.address(),
            index: self.index,
        };
        let module = self.card.load(&kernel.specialization());
        let params = kernel.params(&self.at.borrow(), rows);
        self.card.run(&module, kernel.grid(padded_rows), &params);
    }

    /// Number of buffers of so many bytes to rotate through, so that none is still in L2.
    #[allow(dead_code, reason = "called by the timing programs")]
    pub(crate) fn rotations(bytes: usize) -> usize {
        (260usize << 20).div_ceil(bytes)
    }

    /// Prints the time and the rate of a kernel that moves so many bytes, rotating through calls.
    #[allow(dead_code, reason = "called by the timing programs")]
    #[expect(clippy::print_stdout, reason = "the result")]
    pub(crate) fn time<K: Kernel>(&self, name: &str, rows: usize, bytes: usize, calls: &[K]) {
        let count = self.card.upload(&[rows as u32]);
        let at = RowsAt {
            count: count.address(),
            index: self.index,
        };
        let module = self.card.load(&calls[0].specialization());
        let grid = calls[0].grid(rows);
        let params: Vec<Vec<u8>> = calls
            .iter()
            .map(|c| c.params(&self.at.borrow(), at))
            .collect();
        let time = self.card.time_captured(200, |i| {
            launch(&module, grid, &params[i % params.len()]).expect("launches");
        });
        let rate = bytes as f64 / time.as_secs_f64() / 1e12;
        println!(
            "{name:<36} {rows:>5} rows {:>7.1} us {rate:>5.2} TB/s {:>4.0} % of 4.3",
            time.as_secs_f64() * 1e6,
            100.0 * rate / 4.3
        );
    }
}

/// GELU, tanh approximation.
pub(crate) fn gelu(z: f64) -> f64 {
    let u = (2.0 / std::f64::consts::PI).sqrt() * (z + 0.044_715 * z.powi(3));
    0.5 * z * (1.0 + u.tanh())
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Kind {
    F16,
    F16Tiles,
    F16Permuted,
    Q8,
    Int8HiLo,
}

/// Poisoned memory for an activation, and what should be in it.
pub(crate) struct ActivationBuffers {
    pub(crate) activation: Activation,
    padded_rows: usize,
    columns: usize,
}

impl ActivationBuffers {
    pub(crate) fn new(
        table: &mut Table,
        kind: Kind,
        padded_rows: usize,
        columns: usize,
    ) -> ActivationBuffers {
        let mut bytes = |columns: usize| Int8Operands {
            codes: table.put(&vec![0x55i8; padded_rows * columns]),
            scales: table.poison(padded_rows * columns / 32),
            sums: table.poison(padded_rows * columns / 32),
        };
        let activation = match kind {
            Kind::Q8 => Activation::Int8(bytes(columns)),
            Kind::Int8HiLo => Activation::Int8HiLo {
                both: bytes(2 * columns),
                columns,
            },
            Kind::F16 => Activation::F16(table.put(&vec![POISON; padded_rows * columns])),
            Kind::F16Permuted => {
                Activation::F16Permuted(table.put(&vec![POISON; padded_rows * columns]))
            }
            // Columns that are no whole tiles have room for them.
            Kind::F16Tiles => {
                let columns = columns.next_multiple_of(64);
                Activation::F16Tiles(table.put(&vec![POISON; tile_bytes(columns) / 2]))
            }
        };
        ActivationBuffers {
            activation,
            padded_rows,
            columns,
        }
    }

    /// Rows of f16, whichever way they lie; those behind `padded_rows` in tiles are untouched.
    fn f16_rows(&self, table: &Table, operand: Operand) -> Vec<u16> {
        let count = self.padded_rows * self.columns;
        if matches!(self.activation, Activation::F16Permuted(_)) {
            let found: Vec<u16> = table.get(operand, count);
            let of =
                |i: usize| found[permuted_index(i / self.columns, self.columns, i % self.columns)];
            return (0..count).map(of).collect();
        }
        if !matches!(self.activation, Activation::F16Tiles(_)) {
            return table.get(operand, count);
        }
        let columns = self.columns.next_multiple_of(64);
        let mut tiles: Vec<u16> = table.get(operand, tile_bytes(columns) / 2);
        let index = |i: usize| tile_index(i / self.columns, i % self.columns);
        let take = |i: usize| std::mem::replace(&mut tiles[index(i)], POISON);
        let rows = (0..count).map(take).collect();
        assert!(tiles.iter().all(|bits| *bits == POISON));
        rows
    }

    /// The first rows hold exactly these values by definition of the format; the others are untouched.
    pub(crate) fn check(&self, table: &Table, values: &[f32], rows: usize) {
        let (count, padded_rows) = (rows * self.columns, self.padded_rows * self.columns);
        assert_eq!(values.len(), count);
        match self.activation {
            Activation::F16(operand)
            | Activation::F16Tiles(operand)
            | Activation::F16Permuted(operand) => {
                let found = self.f16_rows(table, operand);
                assert_eq!(found[..count], f16_bits(values));
                assert!(found[count..].iter().all(|bits| *bits == POISON));
            }
            Activation::Int8(operands) => check_int8(table, operands, values, padded_rows),
            Activation::Int8HiLo { both, columns } => {
                let with_rest = values.chunks_exact(columns).flat_map(|row| {
                    let rest = row.chunks_exact(32).flat_map(|values| {
                        let (scale, codes) = block_codes(values);
                        let pairs = values.iter().zip(codes);
                        let rest = pairs.map(|(v, code)| f32::from(code).mul_add(-scale, *v));
                        rest.collect::<Vec<f32>>()
                    });
                    row.iter().copied().chain(rest).collect::<Vec<f32>>()
                });
                check_int8(
                    table,
                    both,
                    &with_rest.collect::<Vec<f32>>(),
                    2 * padded_rows,
                );
            }
        }
    }

    /// The first rows hold these values as nearly as the activation can.
    pub(crate) fn check_nearly(&self, table: &Table, values: &[f32], rows: usize) {
        let (count, padded_rows) = (rows * self.columns, self.padded_rows * self.columns);
        match self.activation {
            Activation::F16(operand)
            | Activation::F16Tiles(operand)
            | Activation::F16Permuted(operand) => {
                let found = self.f16_rows(table, operand);
                let decoded: Vec<f32> =
                    found[..count].iter().map(|bits| f16_value(*bits)).collect();
                assert!(relative_error(&decoded, values) < 4e-4);
                assert!(found[count..].iter().all(|bits| *bits == POISON));
            }
            Activation::Int8HiLo { .. } => {
                panic!("no kernel writes this format approximately")
            }
            Activation::Int8(Int8Operands { codes, scales, .. }) => {
                let codes = table.get::<i8>(codes, padded_rows);
                let scales = table.get::<f32>(scales, padded_rows / 32);
                for (i, value) in values.iter().enumerate() {
                    let error = (f32::from(codes[i]) * scales[i / 32] - value).abs();
                    assert!(
                        error <= 0.501 * scales[i / 32],
                        "{error}, {}",
                        scales[i / 32]
                    );
                }
                assert!(codes[count..].iter().all(|code| *code == 0x55));
            }
        }
    }
}

/// The scale of 32 values and their codes, by definition.
fn block_codes(values: &[f32]) -> (f32, Vec<i8>) {
    let largest = values.iter().fold(0f32, |a, b| a.max(b.abs()));
    let scale = largest / 127.0;
    let code = |v: &f32| match scale {
        0.0 => 0,
        _ => (v / scale).round_ties_even().clamp(-127.0, 127.0) as i8,
    };
    (scale, values.iter().map(code).collect())
}

/// Memory for `capacity` codes begins with those of the values; the others are untouched.
fn check_int8(table: &Table, operands: Int8Operands, values: &[f32], capacity: usize) {
    let codes = table.get::<i8>(operands.codes, capacity);
    let scales = table.get::<f32>(operands.scales, capacity / 32);
    let sums = table.get::<f32>(operands.sums, capacity / 32);
    for (block, values) in values.chunks_exact(32).enumerate() {
        let (scale, expected) = block_codes(values);
        assert_eq!(codes[32 * block..32 * block + 32], expected);
        let sum: i32 = expected.iter().map(|c| i32::from(*c)).sum();
        assert_eq!(scales[block].to_bits(), scale.to_bits());
        assert_eq!(sums[block], scale * sum as f32);
    }
    let count = values.len();
    assert!(codes[count..].iter().all(|code| *code == 0x55));
    let rest = scales[count / 32..].iter().chain(&sums[count / 32..]);
    assert!(rest.into_iter().all(|v| v.is_nan()));
}

fn chunk_pages(keys: Address, values: Address) -> PagesAt {
    PagesAt {
        keys,
        values,
        chunk_pages: CHUNK_PAGES as u32,
        chunk_shift: CHUNK_SHIFT as u32,
        tied: TiedAt::NONE,
    }
}
