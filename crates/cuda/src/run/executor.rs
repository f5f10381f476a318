//! The executor: a loaded model with its weights, KV pages and programs.
//!
//! A batch goes up in one copy, the program runs over fixed buffers, and tokens of sampled rows come back. `submit` only queues
//! all that; `collect` waits. Rows that the device does not sample (see [`sample`](crate::run::sample)) are sampled on the host
//! from copied logits, and then `submit` waits already. A lookahead batch reads its tokens where sampling the batch before it
//! writes them, without a copy.

use std::{mem, rc::Rc, sync::Arc};

use carat_model::{
    TokenId,
    backend::{
        BackendError, Batch, CompileOptions, Executor, LaunchTime, Outputs, RowPlace, RowResult,
        Ticket,
    },
    kv::PerGroup,
    phase::{Origin, Phase},
    plan::{Plan, Value},
    reference::sampled_row,
    sampling::Scratch,
};

use crate::{
    compile::{
        batch_layout::BatchLayout, call::Call, memory::Parts, prepare::Prepared, rows::RowCounts,
    },
    config::{self, Checks, CudaConfig},
    device::{
        Address, Buffer, Device, Event, HostBuffer, Module,
        cublaslt::{Library, WORKSPACE_BYTES},
    },
    error::CudaError,
    kernel::{Addresses, Draw, Kernel},
    run::{
        graph::{self, Graph, Graphs},
        program::{CublasLtGemms, Program, Programs},
        sample::{IN_FLIGHT, Sampler},
        upload::ResidentWeights,
    },
};

/// Bytes of logits copied back at a time, if a row is not more.
const READ_BYTES: usize = 32 << 20;

pub(crate) struct CudaExecutor {
    plan: Plan,
    options: CompileOptions,
    checks: Checks,
    // In the order they are dropped: whoever names an address before whoever holds it.
    /// `None` if launches are not to be captured.
    graphs: Option<Graphs>,
    programs: Programs,
    sampler: Sampler,
    batch_layout: BatchLayout,
    in_flight: [InFlight; IN_FLIGHT],
    read_host: HostBuffer,
    parts: Parts,
    buffers: Buffers,
    _weights: ResidentWeights,
    device: Arc<Device>,
    probed: Vec<Option<Vec<f32>>>,
    words: Vec<u32>,
    batches: u64,
}

/// A slot in flight. Batches take slots in turn, so that one can be queued while another runs.
struct InFlight {
    words: HostBuffer,
    /// Behind all work of the batch that had this slot last.
    done: Option<Event>,
    results: Results,
}

/// Results of a submitted batch, for `collect`.
enum Results {
    /// Collected already.
    None,
    /// So many tokens, once the device is done.
    Tokens(usize),
    Ready(Outputs),
}

/// Origin of a batch's tokens.
#[derive(Clone, Copy)]
enum Tokens {
    Given,
    /// Lookahead: sampling the batch before writes them where this one reads them.
    Sampled,
}

/// A batch that is being queued.
struct Queued {
    /// Index of its slot in flight.
    slot: usize,
    rows: RowCounts,
    /// The kind of sampling on the device; `None` leaves it to the host.
    draw: Option<Draw>,
}

/// Loaded code of an executor.
pub(crate) struct Kernels<'a> {
    /// The loaded kernel of a call.
    pub(crate) of: &'a dyn Fn(&dyn Kernel) -> Arc<Module>,
    pub(crate) sampling: Arc<Module>,
    /// cuBLASLt, if products are left to it.
    pub(crate) library: Option<Library>,
}

/// Device memory, but for weights.
struct Buffers {
    activations: Buffer,
    _scratch: Buffer,
    _kv: PerGroup<Buffer>,
    _ropes: Buffer,
    _workspace: Option<Buffer>,
    batch: Buffer,
}

impl CudaExecutor {
    pub(crate) fn new(
        device: &Arc<Device>,
        plan: &Plan,
        weights: ResidentWeights,
        options: &CompileOptions,
        prepared: Prepared,
        kernels: Kernels<'_>,
        config: &CudaConfig,
    ) -> Result<CudaExecutor, CudaError> {
        let Prepared {
            front, tail, parts, ..
        } = prepared;
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
        let mut workspace = None;
        if kernels.library.is_some() {
            workspace = Some(device.allocate("cuBLASLt workspace", WORKSPACE_BYTES)?);
        }
        let products = kernels
            .library
            .zip(workspace.as_ref())
            .map(|(library, workspace)| Rc::new(CublasLtGemms::new(library, workspace.address())));
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
        let bind = |calls: Vec<Call>| Program::bind(calls, kernels.of, products.as_ref(), &at);
        let programs = Programs {
            front: front.map(bind),
            tail: tail.map(bind),
        };
        let logits = at.values[plan.logits.index()];
        let inputs = batch_layout.sampler_inputs(batch.address(), logits);
        let sampler = Sampler::new(
            device,
            kernels.sampling,
            plan.vocab(),
            options.max_sampled,
            &inputs,
        )?;
        let slot = || -> Result<InFlight, CudaError> {
            Ok(InFlight {
                words: device.allocate_host("batch", batch_layout.words * 4)?,
                done: None,
                results: Results::None,
            })
        };
        let captures = config.graphs == config::Graphs::On && config.checks == Checks::EachBatch;
        let read_bytes = read_bytes(plan, options);
        Ok(CudaExecutor {
            in_flight: [slot()?, slot()?],
            read_host: device.allocate_host("logits", read_bytes)?,
            words: vec![0; batch_layout.words],
            plan: plan.clone(),
            options: options.clone(),
            checks: config.checks,
            graphs: captures.then(Graphs::default),
            programs,
            sampler,
            batch_layout,
            parts,
            buffers: Buffers {
                activations,
                _scratch: scratch,
                _kv: kv,
                _ropes: ropes_buffer,
                _workspace: workspace,
                batch,
            },
            _weights: weights,
            device: Arc::clone(device),
            probed: vec![None; plan.value_count()],
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

    /// Writes a checked batch and queues its copy to the device, with its tokens or without.
    fn queue_words(&mut self, batch: &Batch<'_>, tokens: Tokens) -> Result<Queued, BackendError> {
        let slot = self.batches as usize % IN_FLIGHT;
        if let Some(done) = self.in_flight[slot].done.take() {
            done.wait()?;
        }
        let mut used = (self.batch_layout).write(&self.plan, batch, &mut self.words)?;
        // Penalties and biases change the logits in place, so logits that are probed are sampled on the host.
        let drawn = if self.options.probe {
            None
        } else {
            let wanted = (&self.plan, batch);
            (self.batch_layout).write_sampling(wanted, slot, used, &mut self.words)
        };
        let draw = drawn.map(|(draw, end)| {
            used = end;
            draw
        });
        let host = &mut self.in_flight[slot].words;
        for (to, word) in host
            .bytes_mut()
            .chunks_exact_mut(4)
            .zip(&self.words[..used])
        {
            to.copy_from_slice(&word.to_ne_bytes());
        }
        let first = match tokens {
            Tokens::Given => 0,
            Tokens::Sampled => self.batch_layout.behind_tokens(),
        };
        let part = first * 4..used * 4;
        (self.device).copy_part(host, part, &self.buffers.batch, first * 4)?;
        let rows = RowCounts {
            all: batch.tokens.len(),
            sampled: batch.runs.iter().map(|r| r.sampled).sum(),
        };
        Ok(Queued { slot, rows, draw })
    }

    /// Queues the work of a batch, captured if there is a graph for its number of rows.
    fn queue_work(&mut self, queued: &Queued) -> Result<(), CudaError> {
        let Queued { rows, draw, .. } = *queued;
        let (device, programs, sampler) = (&self.device, &self.programs, &self.sampler);
        let launch = |rows: RowCounts, check: Checks| {
            let mut launches = 0;
            let queued = |label: &str, _: Origin| {
                launches += 1;
                match check {
                    Checks::EachBatch => Ok(()),
                    Checks::EachLaunch => device.wait(&format!("running {label}")),
                }
            };
            launch_all(device, (programs, sampler), rows, draw, queued)?;
            Ok(launches)
        };
        let rows = graph::bucket(rows, &self.options);
        match &mut self.graphs {
            Some(graphs) => {
                let key = graph::Key { rows, draw };
                let stream = device.captured_stream();
                graphs.run(stream, key, || launch(rows, Checks::EachBatch))
            }
            None => launch(rows, self.checks).map(drop),
        }
    }

    /// Samples a batch on the host.
    fn sample(&mut self, batch: &Batch<'_>) -> Result<Outputs, CudaError> {
        let rows: Vec<RowPlace> = batch.sampled_rows().collect();
        let mut outputs = Outputs::default();
        let mut scratch = Scratch::default();
        self.read_rows(self.plan.logits, rows.len(), |r, logits| {
            let row = sampled_row(batch, &rows[r], logits, &mut scratch);
            outputs.rows.push(row);
        })?;
        Ok(outputs)
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

    /// Queues all of a checked batch. Waits only if the host has to sample it.
    fn start(&mut self, batch: &Batch<'_>, tokens: Tokens) -> Result<Ticket, BackendError> {
        let queued = self.queue_words(batch, tokens)?;
        self.queue_work(&queued)?;
        let results = match queued.draw {
            Some(_) => Results::Tokens(queued.rows.sampled),
            None => Results::Ready(self.sample(batch)?),
        };
        if self.options.probe {
            self.keep_values(queued.rows)?;
        }
        let slot = &mut self.in_flight[queued.slot];
        slot.results = results;
        slot.done = Some(self.device.event()?);
        self.batches += 1;
        Ok(Ticket(self.batches))
    }
}

impl Executor for CudaExecutor {
    fn submit(&mut self, batch: &Batch<'_>) -> Result<Ticket, BackendError> {
        batch.check(&self.plan, &self.options)?;
        self.start(batch, Tokens::Given)
    }

    fn chains(&self) -> bool {
        true
    }

    fn submit_chained(&mut self, batch: &Batch<'_>) -> Result<Ticket, BackendError> {
        batch.check(&self.plan, &self.options)?;
        let before = (self.batches as usize + IN_FLIGHT - 1) % IN_FLIGHT;
        match &self.in_flight[before].results {
            Results::None => panic!("no batch is in flight"),
            Results::Tokens(count) => {
                assert_eq!(*count, batch.tokens.len(), "a row for each sampled row");
                self.start(batch, Tokens::Sampled)
            }
            // The host has sampled it, so the tokens are known.
            Results::Ready(outputs) => {
                let tokens: Vec<TokenId> = outputs.rows.iter().map(|row| row.token).collect();
                let batch = Batch {
                    tokens: &tokens,
                    ..*batch
                };
                self.start(&batch, Tokens::Given)
            }
        }
    }

    fn collect(&mut self, ticket: Ticket, out: &mut Outputs) -> Result<(), BackendError> {
        let index = (ticket.0 as usize - 1) % IN_FLIGHT;
        let slot = &mut self.in_flight[index];
        // Also where results are there already: a batch without any may have failed, too.
        if let Some(done) = slot.done.take() {
            done.wait()?;
        }
        match mem::replace(&mut slot.results, Results::None) {
            Results::None => panic!("a ticket is used once, before the next but one is out"),
            Results::Ready(outputs) => *out = outputs,
            Results::Tokens(count) => {
                let row = |token| RowResult {
                    token,
                    ..RowResult::default()
                };
                out.rows.clear();
                out.rows.extend(self.sampler.tokens(index, count).map(row));
            }
        }
        Ok(())
    }

    fn profile(&mut self, batch: &Batch<'_>) -> Result<Option<Vec<LaunchTime>>, BackendError> {
        batch.check(&self.plan, &self.options)?;
        let Queued { rows, draw, .. } = self.queue_words(batch, Tokens::Given)?;
        let rows = graph::bucket(rows, &self.options);
        let device = &self.device;
        let mut moments = Vec::new();
        // As one graph, so that times are those of the device, not of launching.
        let graph = Graph::capture(device.captured_stream(), || {
            moments.push((String::new(), SAMPLING, device.captured_moment()?));
            let work = (&self.programs, &self.sampler);
            launch_all(device, work, rows, draw, |label, origin| {
                moments.push((label.to_owned(), origin, device.captured_moment()?));
                Ok(())
            })
        })?;
        graph.launch()?;
        device.wait("profiling a batch")?;
        let mut times = Vec::new();
        for pair in moments.windows(2) {
            let [(.., start), (label, origin, end)] = pair else {
                unreachable!("windows of two");
            };
            times.push(LaunchTime {
                label: label.clone(),
                origin: *origin,
                time: start.until(end)?,
            });
        }
        Ok(Some(times))
    }

    /// Values that only exist within a fused kernel are `None`, too.
    fn probed(&self, value: Value) -> Option<&[f32]> {
        self.probed[value.index()].as_deref()
    }
}

/// Origin of the sampler's launches.
const SAMPLING: Origin = Origin {
    layer: None,
    phase: Phase::Sample,
};

/// Queues a batch's launches, and calls `queued` with the label and origin of each.
fn launch_all(
    device: &Device,
    (programs, sampler): (&Programs, &Sampler),
    rows: RowCounts,
    draw: Option<Draw>,
    mut queued: impl FnMut(&str, Origin) -> Result<(), CudaError>,
) -> Result<(), CudaError> {
    for program in programs.of(rows) {
        program.run(device, rows, &mut queued)?;
    }
    match draw {
        Some(draw) => sampler.run(draw, rows.sampled, || queued("sample", SAMPLING)),
        None => Ok(()),
    }
}

/// Bytes of the buffer for reading back: all logits or some rows of them; when probed, a row of any value.
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
        let both = (start.offset(offsets[*at]), start.offset(offsets[*at + 1]));
        *at += 2;
        both
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
