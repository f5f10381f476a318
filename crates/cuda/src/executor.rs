//! A loaded model: its weights, its KV pages, its program.
//!
//! A batch goes up in one copy, the program runs over fixed buffers, logits of sampled rows come back. They are sampled on
//! the host for now, so a submitted batch is finished when `submit` returns.

use std::{mem, sync::Arc};

use carat_model::{
    backend::{BackendError, Batch, CompileOptions, Executor, Outputs, PerGroup, RowPlace, Ticket},
    plan::{Plan, Value},
    reference::sampled_row,
    weights::Weights,
};

use crate::{
    backend::Prepared,
    batch::BatchLayout,
    config::Checks,
    device::{Address, Buffer, Device, HostBuffer, Module},
    error::CudaError,
    kernel::Addresses,
    lower::Call,
    memory::Parts,
    program::{Program, Programs, RowCounts},
    weights::ResidentWeights,
};

/// Bytes of logits that come back at a time, if a row is not more.
const READ_BYTES: usize = 32 << 20;

pub(crate) struct CudaExecutor {
    plan: Plan,
    options: CompileOptions,
    checks: Checks,
    // In the order they are dropped: whoever names an address before whoever holds it.
    programs: Programs,
    batch_layout: BatchLayout,
    batch_host: HostBuffer,
    read_host: HostBuffer,
    parts: Parts,
    buffers: Buffers,
    _weights: ResidentWeights,
    device: Arc<Device>,
    probed: Vec<Option<Vec<f32>>>,
    words: Vec<u32>,
    outputs: Outputs,
    batches: u64,
}

/// Device memory, but for weights.
struct Buffers {
    activations: Buffer,
    _scratch: Buffer,
    _kv: PerGroup<Buffer>,
    _ropes: Buffer,
    batch: Buffer,
}

impl CudaExecutor {
    pub(crate) fn new(
        device: &Arc<Device>,
        plan: &Plan,
        weights: &Weights,
        options: &CompileOptions,
        prepared: Prepared,
        modules: impl Fn(&Call) -> Arc<Module>,
        checks: Checks,
    ) -> Result<CudaExecutor, CudaError> {
        let Prepared {
            front,
            tail,
            weights: weight_layout,
            parts,
            ..
        } = prepared;
        let weights = weight_layout.upload(device, weights)?;
        let batch_layout = BatchLayout::new(options);
        let activations = device.allocate("activations", parts.activation_bytes())?;
        let scratch = device.allocate("scratch", parts.scratch.bytes)?;
        let kv = PerGroup {
            full: device.allocate("kv full", parts.kv.full.bytes)?,
            sliding: device.allocate("kv sliding", parts.kv.sliding.bytes)?,
        };
        let batch = device.allocate("batch", batch_layout.bytes())?;
        let (offset, rows) = batch_layout.constant();
        copy_words(device, &batch, offset, &rows)?;
        let (ropes_buffer, ropes) = upload_ropes(device, plan)?;
        let at = Addresses {
            plan: plan.clone(),
            values: value_addresses(plan, &parts, &activations),
            scratch: (parts.scratch.offsets.iter())
                .map(|&offset| scratch.address().offset(offset))
                .collect(),
            weights: weights.at.clone(),
            ropes,
            kv: kv_addresses(plan, &parts, &kv),
            batch: batch_layout.at(batch.address()),
        };
        let bind = |calls: Vec<Call>| Program::bind(calls, &modules, &at);
        let programs = Programs {
            front: front.map(bind),
            tail: tail.map(bind),
        };
        let read_bytes = read_bytes(plan, options);
        Ok(CudaExecutor {
            batch_host: device.allocate_host("batch", batch_layout.words * 4)?,
            read_host: device.allocate_host("logits", read_bytes)?,
            words: vec![0; batch_layout.words],
            plan: plan.clone(),
            options: options.clone(),
            checks,
            programs,
            batch_layout,
            parts,
            buffers: Buffers {
                activations,
                _scratch: scratch,
                _kv: kv,
                _ropes: ropes_buffer,
                batch,
            },
            _weights: weights,
            device: Arc::clone(device),
            probed: vec![None; plan.value_count()],
            outputs: Outputs::default(),
            batches: 0,
        })
    }

    /// The first rows of a value as they are on the device now, handed over some at a time.
    fn read_rows(
        &mut self,
        value: Value,
        rows: usize,
        mut each: impl FnMut(usize, &[f32]),
    ) -> Result<(), CudaError> {
        let columns = self.plan.columns(value);
        let row_bytes = columns * 4;
        let at_once = (self.read_host.bytes().len() / row_bytes).max(1);
        let start = self.parts.value(value);
        let mut values = vec![0.0f32; columns];
        for first in (0..rows).step_by(at_once) {
            let count = at_once.min(rows - first);
            let offset = start + first * row_bytes;
            self.device.copy_out(
                &self.buffers.activations,
                offset,
                &mut self.read_host,
                count * row_bytes,
            )?;
            let bytes = &self.read_host.bytes()[..count * row_bytes];
            for (r, row) in bytes.chunks_exact(row_bytes).enumerate() {
                for (value, bytes) in values.iter_mut().zip(row.as_chunks().0) {
                    *value = f32::from_ne_bytes(*bytes);
                }
                each(first + r, &values);
            }
        }
        Ok(())
    }

    fn sample(&mut self, batch: &Batch<'_>) -> Result<(), CudaError> {
        let places: Vec<RowPlace> = batch.sampled_rows().collect();
        let mut outputs = mem::take(&mut self.outputs);
        outputs.rows.clear();
        let mut scratch = Vec::new();
        self.read_rows(self.plan.logits, places.len(), |r, logits| {
            let row = sampled_row(batch, &places[r], logits, &mut scratch);
            outputs.rows.push(row);
        })?;
        self.outputs = outputs;
        Ok(())
    }

    fn keep_values(&mut self, rows: RowCounts) -> Result<(), CudaError> {
        let programs = self.programs.of(rows);
        let written: Vec<Value> = programs.iter().flat_map(|p| p.written.clone()).collect();
        self.probed.fill(None);
        for value in written {
            let mut kept = Vec::new();
            let count = rows.get(self.plan.rows(value));
            self.read_rows(value, count, |_, row| kept.extend_from_slice(row))?;
            self.probed[value.index()] = Some(kept);
        }
        Ok(())
    }
}

impl Executor for CudaExecutor {
    fn submit(&mut self, batch: &Batch<'_>) -> Result<Ticket, BackendError> {
        batch.check(&self.plan, &self.options)?;
        let used = self
            .batch_layout
            .write(&self.plan, batch, &mut self.words)?;
        let bytes = self.batch_host.bytes_mut();
        for (to, word) in bytes.chunks_exact_mut(4).zip(&self.words[..used]) {
            to.copy_from_slice(&word.to_ne_bytes());
        }
        self.device
            .copy_in(&self.batch_host, &self.buffers.batch, 0, used * 4)?;
        let rows = RowCounts {
            all: batch.tokens.len(),
            sampled: batch.runs.iter().map(|r| r.sampled).sum(),
        };
        for program in self.programs.of(rows) {
            program.run(&self.device, rows, self.checks)?;
        }
        self.sample(batch)?;
        if self.options.probe {
            self.keep_values(rows)?;
        }
        // Without sampled rows nothing was waited for, and the batch's words must stay until they are read.
        self.device.wait("running a batch")?;
        self.batches += 1;
        Ok(Ticket(self.batches))
    }

    fn collect(&mut self, ticket: Ticket, out: &mut Outputs) -> Result<(), BackendError> {
        assert_eq!(ticket, Ticket(self.batches), "a ticket is used once");
        mem::swap(out, &mut self.outputs);
        Ok(())
    }

    /// Values that only exist within a fused kernel are `None`, too.
    fn probed(&self, value: Value) -> Option<&[f32]> {
        self.probed[value.index()].as_deref()
    }
}

/// Room for what is read back: all logits or some rows of them; when probed, a row of any value.
fn read_bytes(plan: &Plan, options: &CompileOptions) -> usize {
    let row = |value: Value| plan.columns(value) * 4;
    let logits = row(plan.logits);
    let enough = (options.max_sampled * logits).min(READ_BYTES.max(logits));
    let values = plan.steps.iter().filter_map(|s| s.step.out());
    let widest = values.map(row).max().unwrap_or(0);
    enough.max(if options.probe { widest } else { 0 })
}

fn value_addresses(plan: &Plan, parts: &Parts, activations: &Buffer) -> Vec<Address> {
    let mut at = vec![Address::NULL; plan.value_count()];
    let values = plan.steps.iter().filter_map(|s| s.step.out());
    for value in values.filter(|v| parts.stores(*v)) {
        at[value.index()] = activations.address().offset(parts.value(value));
    }
    at
}

/// Keys and values of each slot, in the plan's order.
fn kv_addresses(plan: &Plan, parts: &Parts, kv: &PerGroup<Buffer>) -> Vec<(Address, Address)> {
    let mut next = PerGroup {
        full: 0,
        sliding: 0,
    };
    let slots = plan.slots.iter().map(|slot| {
        let start = kv.get(slot.group).address();
        let offsets = &parts.kv.get(slot.group).offsets;
        let at: &mut usize = next.get_mut(slot.group);
        let place = (start.offset(offsets[*at]), start.offset(offsets[*at + 1]));
        *at += 2;
        place
    });
    slots.collect()
}

fn upload_ropes(device: &Arc<Device>, plan: &Plan) -> Result<(Buffer, Vec<Address>), CudaError> {
    let mut words = Vec::new();
    let mut offsets = Vec::new();
    for rope in &plan.ropes {
        offsets.push(words.len() * 4);
        words.extend(rope.frequencies.iter().map(|f| f.to_bits()));
    }
    let buffer = device.allocate("rope frequencies", words.len() * 4)?;
    copy_words(device, &buffer, 0, &words)?;
    let start = buffer.address();
    let ropes = offsets.into_iter().map(|offset| start.offset(offset));
    Ok((buffer, ropes.collect()))
}

/// Copies something small and waits for it.
fn copy_words(
    device: &Arc<Device>,
    to: &Buffer,
    offset: usize,
    words: &[u32],
) -> Result<(), CudaError> {
    let mut host = device.allocate_host("constants", words.len() * 4)?;
    for (bytes, word) in host.bytes_mut().chunks_exact_mut(4).zip(words) {
        bytes.copy_from_slice(&word.to_ne_bytes());
    }
    device.copy_in(&host, to, offset, words.len() * 4)?;
    device.wait("copying constants")
}
