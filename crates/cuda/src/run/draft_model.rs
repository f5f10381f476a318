//! A drafter beside its target: buffers and weights of its own, KV pages, hidden states and token embeddings of the target.
//!
//! The steps of a draft run one after another without the host: tokens and states go from step to step in device memory, and
//! all tokens come back in one copy. Launches depend on the bucket of rows and the number of steps alone, and are captured.
//!
//! Rows are described to kernels at the position that they turn as, which is the one behind all that is cached; the end of what they
//! see is written beside it. Batches are small, so that a draft does not depend on its company.

use std::sync::Arc;

use carat_model::{
    TokenId,
    backend::{BackendError, Batch, CompileOptions, DraftRun},
    draft,
    kv::KvGroup,
    plan::{Plan, Step, Value},
    weights::{Weight, Weights},
};

use super::{
    addresses::{copy_words, put_words, scratch_addresses, upload_ropes, value_addresses},
    executor::checked,
    graph::{GraphKey, Graphs},
    modules::Modules,
    pages::PageMover,
    program::Program,
    upload::ResidentWeights,
};
use crate::{
    compile::{
        batch_layout::{BatchLayout, PageTables, WORD},
        call::Call,
        drafter::{
            DRAFTED_BYTES, MAX_STEPS, drafter_options, most_together, prepare_drafter, state_bytes,
        },
        memory::Parts,
        prepare::Prepared,
        rows::{RowCounts, SMALL_ROWS},
        target::{Target, turning_pairs},
    },
    config::{self, Checks, CudaConfig},
    device::{Address, Buffer, Device, HostBuffer, Module, launch},
    error::CudaError,
    kernel::{
        Addresses, BatchAt, DRAFT_BEST_BYTES, DraftNextParams, HostAt, Kernel, MatrixAt, PagesAt,
        SelectSampledParams, TableFormat, WeightFormat, WeightOperand, draft_next_grid,
        draft_next_specialization, params::Params as _, select_sampled_grid,
        select_sampled_specialization,
    },
};

/// The target of a drafter, as far as it is read.
pub(crate) struct DraftTarget<'a> {
    pub(crate) device: &'a Arc<Device>,
    pub(crate) modules: &'a Modules,
    pub(crate) config: &'a CudaConfig,
    pub(crate) plan: &'a Plan,
    pub(crate) options: &'a CompileOptions,
    pub(crate) compiled_for: Target,
    /// Keys and values of each slot.
    pub(crate) kv: &'a [PagesAt],
    /// Hidden states of sampled rows.
    pub(crate) hidden: Address,
    pub(crate) weights: (&'a Weights, &'a ResidentWeights),
}

pub(crate) struct DraftModel {
    plan: Plan,
    checks: Checks,
    most: usize,
    // In the order they are dropped: whoever names an address before whoever holds it.
    /// `None` if launches are not to be captured.
    graphs: Option<Graphs<Steps>>,
    program: Program,
    /// Takes the target's states of the rows that drafts start from.
    start: (Arc<Module>, SelectSampledParams),
    /// Ends a step.
    next: (Arc<Module>, DraftNextParams),
    layout: BatchLayout,
    words: Vec<u32>,
    words_host: HostBuffer,
    drafted_host: HostBuffer,
    parts: Parts,
    buffers: Buffers,
    _weights: ResidentWeights,
    /// By value, where they are kept.
    probed: Option<Vec<Option<Vec<f32>>>>,
}

/// Device memory, but for weights.
struct Buffers {
    activations: Buffer,
    states: Buffer,
    scratch: Buffer,
    _ropes: Buffer,
    clusters: Vec<Buffer>,
    batch: Buffer,
    /// `[steps, rows]`.
    drafted: Buffer,
    best: Buffer,
    arrived: Buffer,
}

/// Steps of some drafts that are queued together.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
struct Steps {
    rows: usize,
    count: usize,
    /// From the target's states; else from those that the steps before have left.
    is_start: bool,
}

impl GraphKey for Steps {
    fn stays(self) -> bool {
        false
    }
}

impl DraftModel {
    pub(crate) fn new(
        target: &DraftTarget<'_>,
        plan: &Plan,
        weights: &Weights,
        max_drafts: usize,
    ) -> Result<DraftModel, BackendError> {
        let DraftTarget {
            device, modules, ..
        } = *target;
        let plan = plan.with_products_gathered();
        let state = check(&plan, target)?;
        let table = borrowed_table(&plan, weights, target.weights);
        let compiled_for = Target {
            borrowed_turning_pairs: turning_pairs(target.plan),
            borrowed_table: table.as_ref().map(|(_, format, _)| *format),
            ..target.compiled_for
        };
        let prepared = prepare_drafter(
            &plan,
            weights,
            (target.options, max_drafts),
            target.config.tables,
            compiled_for,
        )?;
        let resident = load(device, modules, weights, &prepared)?;
        let ends = [select_sampled_specialization(), draft_next_specialization()];
        modules.load(ends.clone())?;
        let parts = prepared.parts;
        let layout = BatchLayout::new(
            &drafter_options(target.options, max_drafts),
            PageTables::ComeWhole,
        );
        let width = plan.columns(state);
        let (ropes_at, ropes) = upload_ropes(device, &plan)?;
        let buffers = Buffers {
            activations: device.allocate("drafter", parts.activation_bytes())?,
            states: device.allocate("drafter", state_bytes(width))?,
            scratch: device.allocate("drafter", parts.scratch.bytes)?,
            _ropes: ropes_at,
            clusters: upload_clusters(device, &plan, weights)?,
            batch: device.allocate("drafter", layout.bytes())?,
            drafted: device.allocate("drafter", DRAFTED_BYTES)?,
            best: device.allocate("drafter", SMALL_ROWS * DRAFT_BEST_BYTES)?,
            arrived: device.allocate("drafter", SMALL_ROWS * WORD)?,
        };
        let (offset, rows) = layout.constant();
        copy_words(device, &buffers.batch, offset, &rows)?;
        let mut values = value_addresses(&plan, &parts, &buffers.activations);
        values[state.index()] = buffers.states.address();
        let mut named = resident.at.clone();
        named.extend(table.map(|(operand, _, at)| (operand, at)));
        let borrowed = plan.slots.iter().filter_map(|slot| slot.borrowed);
        let at = Addresses {
            values,
            scratch: scratch_addresses(&parts, &buffers.scratch),
            weights: named,
            ropes,
            clusters: buffers.clusters.iter().map(Buffer::address).collect(),
            kv: borrowed.map(|slot| target.kv[slot.0 as usize]).collect(),
            batch: layout.at(buffers.batch.address()),
            host: HostAt::NONE,
            plan: plan.clone(),
        };
        let program = Program::bind(
            prepared.front.small,
            |kernel| modules.get(&kernel.specialization()),
            None,
            std::slice::from_ref(&at),
            None,
        );
        let (start, next) = ends_of_steps(&at, (target.hidden, state), &buffers);
        let config = target.config;
        let captures = config.graphs == config::Graphs::On && config.checks == Checks::EachBatch;
        let [start_module, next_module] = ends.map(|s| modules.get(&s));
        Ok(DraftModel {
            checks: config.checks,
            most: most_together(max_drafts),
            graphs: captures.then(Graphs::default),
            program,
            start: (start_module, start),
            next: (next_module, next),
            words: vec![0; layout.words],
            words_host: device.allocate_host("drafter", layout.words * WORD)?,
            drafted_host: device.allocate_host("drafter", DRAFTED_BYTES)?,
            layout,
            parts,
            buffers,
            _weights: resident,
            probed: target.options.probe.then(|| vec![None; plan.value_count()]),
            plan,
        })
    }

    pub(crate) fn plan(&self) -> &Plan {
        &self.plan
    }

    /// A value of the last step, if values are kept.
    pub(crate) fn probed(&self, value: Value) -> Option<&[f32]> {
        self.probed.as_ref()?[value.index()].as_deref()
    }

    /// Drafts that have been checked, from sampled rows of the target's last batch.
    pub(crate) fn run(
        &mut self,
        device: &Arc<Device>,
        pages: &mut PageMover,
        drafts: &[DraftRun<'_>],
    ) -> Result<Vec<Vec<TokenId>>, BackendError> {
        let mut drafted = Vec::with_capacity(drafts.len());
        for together in drafts.chunks(self.most) {
            self.queue_words(device, pages, together)?;
            let longest = together.iter().map(|draft| draft.length).max();
            let longest = longest.unwrap_or(0);
            let mut tokens = vec![Vec::with_capacity(longest); together.len()];
            for first in (0..longest).step_by(MAX_STEPS) {
                let steps = Steps {
                    rows: together.len().next_power_of_two().min(self.most),
                    count: MAX_STEPS.min(longest - first),
                    is_start: first == 0,
                };
                self.queue_steps(device, steps)?;
                self.collect(device, steps.count, &mut tokens)?;
            }
            for (tokens, draft) in tokens.iter_mut().zip(together) {
                tokens.truncate(draft.length);
            }
            self.keep_values(device, together.len())?;
            drafted.append(&mut tokens);
        }
        Ok(drafted)
    }

    /// Queues the description of some drafts: it holds for all of their steps.
    fn queue_words(
        &mut self,
        device: &Arc<Device>,
        pages: &mut PageMover,
        drafts: &[DraftRun<'_>],
    ) -> Result<(), BackendError> {
        let (feeds, runs) = draft::rows(drafts.iter().map(|draft| (draft, draft.token)));
        let batch = Batch {
            feeds: &feeds,
            runs: &runs,
        };
        let (used, _) = (self.layout).write(&self.plan, &batch, None, &mut self.words)?;
        let shift = self.plan.ropes.iter().map(|rope| rope.shift).max();
        for (row, draft) in drafts.iter().enumerate() {
            self.words[self.layout.positions + row] += shift.unwrap_or(0) as u32;
            // Every row is sampled, so the list of those is free to say what a row starts from.
            self.words[self.layout.sampled + row] = draft.row as u32;
        }
        pages.wait_before(device, &batch)?;
        // The drafts before these have been waited for.
        put_words(&mut self.words_host, 0, &self.words[..used]);
        device.copy_part(&self.words_host, 0..used * WORD, &self.buffers.batch, 0)?;
        Ok(())
    }

    /// Queues some steps, captured if there is a graph for them.
    fn queue_steps(&mut self, device: &Arc<Device>, steps: Steps) -> Result<(), CudaError> {
        let (program, start, next) = (&self.program, &self.start, &self.next);
        let drafted = self.buffers.drafted.address();
        let launch_all = |checks: Checks| {
            device.bind()?;
            let mut launches = 0;
            let rows = RowCounts {
                all: steps.rows,
                sampled: 0,
            };
            if steps.is_start {
                let (module, params) = start;
                let grid = select_sampled_grid(steps.rows, params.columns as usize);
                launch(module, grid, &params.bytes())?;
                checked(device, checks, "draft.start")?;
                launches += 1;
            }
            for step in 0..steps.count {
                program.run(device, 0, rows, |label, _| {
                    launches += 1;
                    checked(device, checks, label)
                })?;
                let (module, params) = next;
                let params = DraftNextParams {
                    drafted: drafted.offset(step * SMALL_ROWS * WORD),
                    ..*params
                };
                launch(module, draft_next_grid(steps.rows), &params.bytes())?;
                checked(device, checks, "draft.next")?;
                launches += 1;
            }
            Ok(launches)
        };
        match &mut self.graphs {
            Some(graphs) => {
                let stream = device.captured_stream();
                graphs.run(stream, steps, || launch_all(Checks::EachBatch))
            }
            None => launch_all(self.checks).map(drop),
        }
    }

    /// Waits for some steps and appends the tokens of each draft.
    fn collect(
        &mut self,
        device: &Arc<Device>,
        steps: usize,
        tokens: &mut [Vec<TokenId>],
    ) -> Result<(), CudaError> {
        let bytes = steps * SMALL_ROWS * WORD;
        device.copy_out(&self.buffers.drafted, 0, &mut self.drafted_host, bytes)?;
        let words = self.drafted_host.bytes()[..bytes].as_chunks().0;
        for step in words.chunks(SMALL_ROWS) {
            for (tokens, word) in tokens.iter_mut().zip(step) {
                tokens.push(u32::from_ne_bytes(*word));
            }
        }
        Ok(())
    }

    /// Keeps the values of the last step, if they are to be kept.
    fn keep_values(&mut self, device: &Arc<Device>, rows: usize) -> Result<(), CudaError> {
        let Some(probed) = &mut self.probed else {
            return Ok(());
        };
        for value in &self.program.written {
            let bytes = rows * self.plan.columns(*value) * size_of::<f32>();
            let mut host = device.allocate_host("drafter", bytes)?;
            let offset = self.parts.value(*value);
            device.copy_out(&self.buffers.activations, offset, &mut host, bytes)?;
            let values = host.bytes()[..bytes].as_chunks().0;
            probed[value.index()] = Some(values.iter().map(|x| f32::from_ne_bytes(*x)).collect());
        }
        Ok(())
    }
}

/// Loads kernels and weights, if there is memory for all.
fn load(
    device: &Arc<Device>,
    modules: &Modules,
    weights: &Weights,
    prepared: &Prepared,
) -> Result<ResidentWeights, BackendError> {
    let (free_bytes, _) = device.memory()?;
    let needed_bytes = prepared.memory.device_bytes();
    tracing::info!(
        needed_bytes,
        free_bytes,
        "memory plan of the drafter\n{}",
        prepared.memory
    );
    if needed_bytes > free_bytes {
        return Err(BackendError::OutOfMemory {
            needed_bytes,
            free_bytes,
        });
    }
    let kernels = prepared.calls().filter_map(Call::kernel);
    let loaders = prepared.weights.kernels(weights);
    modules.load(kernels.map(Kernel::specialization).chain(loaders.clone()))?;
    let loaders = loaders.into_iter().map(|s| (s.clone(), modules.get(&s)));
    Ok(prepared
        .weights
        .upload(device, weights, &loaders.collect())?)
}

/// What must hold of a drafter's plan beside its target's. Returns the state that it goes on from.
fn check(plan: &Plan, target: &DraftTarget<'_>) -> Result<Value, BackendError> {
    let unsupported = |what: String| Err(BackendError::Unsupported { what });
    let states = plan.steps.iter().filter_map(|s| match s.step {
        Step::State { out } => Some(out),
        _ => None,
    });
    let states: Vec<Value> = states.collect();
    let width = target.plan.columns(target.plan.hidden);
    let goes_on =
        |state: &Value| (plan.columns(*state), plan.columns(plan.hidden)) == (width, width);
    let [state] = states[..] else {
        return unsupported(format!(
            "a draft model goes on from one state, this one from {}",
            states.len()
        ));
    };
    if !goes_on(&state) {
        return unsupported(format!(
            "the draft model's states are {} wide, the model's {width}",
            plan.columns(state)
        ));
    }
    let shift = plan.ropes.first().map_or(0, |rope| rope.shift);
    if plan.ropes.iter().any(|rope| rope.shift != shift) {
        return unsupported("a draft model whose layers turn as different positions".to_owned());
    }
    for (i, slot) in plan.slots.iter().enumerate() {
        let read = slot
            .borrowed
            .and_then(|of| target.plan.slots.get(of.0 as usize));
        let shape = |group: KvGroup, heads: usize, dim: usize| (group, heads, dim);
        let same = read.is_some_and(|read| {
            shape(read.group, read.kv_heads, read.head_dim)
                == shape(slot.group, slot.kv_heads, slot.head_dim)
        });
        if !same {
            return unsupported(format!(
                "layer {i} of the draft model reads keys and values that the model does not have"
            ));
        }
    }
    Ok(state)
}

/// The target's table of token embeddings where it lies on the device, and how.
fn borrowed_table(
    plan: &Plan,
    weights: &Weights,
    (source, resident): (&Weights, &ResidentWeights),
) -> Option<(WeightOperand, TableFormat, MatrixAt)> {
    let table = plan.steps.iter().find_map(|s| match s.step {
        Step::Embed { table, .. } if weights.is_borrowed(table) => Some(table),
        _ => None,
    })?;
    let view = |weights: &Weights, w: Weight| {
        let m = weights.matrix(w);
        let shape = (m.quant, m.rows, m.columns, m.count, m.row_stride);
        (weights.bytes(w).as_ptr(), shape)
    };
    let found = |format: WeightFormat| {
        let is_it = |operand: &WeightOperand| match operand.parts[..] {
            [part] => operand.format == format && view(source, part) == view(weights, table),
            _ => false,
        };
        let (_, at) = resident.at.iter().find(|(operand, _)| is_it(operand))?;
        Some((WeightOperand::one(table, format), *at))
    };
    let of = |(operand, at), format| (operand, format, at);
    let fragments = found(WeightFormat::Fragments).map(|it| of(it, TableFormat::Fragments));
    fragments.or_else(|| found(WeightFormat::Table).map(|it| of(it, TableFormat::Rows)))
}

/// The launches before the first step and behind each.
fn ends_of_steps(
    at: &Addresses,
    (hidden, state): (Address, Value),
    buffers: &Buffers,
) -> (SelectSampledParams, DraftNextParams) {
    let plan = &at.plan;
    let BatchAt {
        sampled,
        all,
        tokens,
        ..
    } = at.batch;
    let width = plan.columns(state) as u32;
    let states = at.values[state.index()];
    let start = SelectSampledParams {
        rows: sampled,
        x: hidden,
        out: states,
        columns: width,
    };
    let next = DraftNextParams {
        rows: all,
        logits: at.values[plan.logits.index()],
        left: at.values[plan.hidden.index()],
        states,
        tokens,
        drafted: buffers.drafted.address(),
        best: buffers.best.address(),
        arrived: buffers.arrived.address(),
        vocab: plan.columns(plan.logits) as u32,
        width,
    };
    (start, next)
}

/// The cluster of each token, per table.
fn upload_clusters(
    device: &Arc<Device>,
    plan: &Plan,
    weights: &Weights,
) -> Result<Vec<Buffer>, CudaError> {
    let mut buffers = Vec::new();
    for (i, tokens) in plan.clusters.iter().enumerate() {
        let count = plan.steps.iter().find_map(|s| match s.step {
            Step::ClusterLogits {
                clusters,
                centroids,
                ..
            } if clusters.0 as usize == i => Some(weights.matrix(centroids).rows),
            _ => None,
        });
        let size = tokens.len() / count.unwrap_or(1);
        let mut words = vec![0; tokens.len()];
        for (place, token) in tokens.iter().enumerate() {
            words[*token as usize] = (place / size) as u32;
        }
        let buffer = device.allocate("drafter", words.len() * WORD)?;
        copy_words(device, &buffer, 0, &words)?;
        buffers.push(buffer);
    }
    Ok(buffers)
}
