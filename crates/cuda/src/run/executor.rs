//! The executor: a loaded model with its weights, KV pages and programs.
//!
//! A batch goes up in one copy, the program runs over fixed buffers, and tokens of sampled rows come back. `submit` and `draw` only
//! queue all that; `collect` waits. Rows that the device does not sample (see [`sample`]) are sampled on the
//! host when the batch is collected, from their logits; or before another batch is submitted, which would write over those.

use std::{ops::Range, rc::Rc, sync::Arc};

use carat_model::{
    TokenId,
    backend::{
        self as model, BackendError, Batch, CompileOptions, DraftRun, Executor, Feed, HostPageId,
        KvGroup, LaunchTime, Outputs, PageMove, RowOutput, RowResult, Ticket,
    },
    kv::PerGroup,
    phase::{Origin, Phase},
    plan::{Plan, Value},
    sampling::Scratch,
    weights::Weights,
};

use crate::{
    compile::{
        batch_layout::{BatchLayout, PageTables},
        call::Call,
        memory::Parts,
        prepare::Prepared,
        rows::RowCounts,
        target::Target,
    },
    config::{self, Checks, CudaConfig},
    device::{
        Address, Buffer, Device, HostBuffer, Module,
        cublaslt::{Library, WORKSPACE_BYTES},
        launch,
    },
    error::CudaError,
    kernel::{
        Addresses, FeedSamplesParams, HostAt, Kernel, PagesAt, SETTING_WORDS, UPDATE_WORDS,
        feed_samples_grid, params::Params as _, update_tables_grid,
    },
    run::{
        addresses::{
            copy_words, kv_addresses, put_words, scratch_addresses, upload_ropes, value_addresses,
        },
        draft_model::{DraftModel, DraftTarget},
        graph::{self, Graph, Graphs},
        groups::RowGroups,
        host_worker::HostWorker,
        in_flight::{DeviceRow, HostDraw, InFlight, Results, Submitted},
        modules::Modules,
        pages::PageMover,
        program::{CublasLtGemms, Program, Programs},
        sample::{self, IN_FLIGHT, RowToSample, Sampler, Work},
        sees_back::SeesBackOnly,
        stream::StreamBuffers,
        tables::KeptTables,
        upload::ResidentWeights,
    },
};

/// Bytes of logits copied back at a time, if a row is not more.
const READ_BYTES: usize = 32 << 20;

pub(crate) struct CudaExecutor {
    plan: Plan,
    options: CompileOptions,
    config: CudaConfig,
    compiled_for: Target,
    modules: Arc<Modules>,
    // In the order they are dropped: whoever names an address before whoever holds it.
    /// First, because it waits for the card while all is there.
    host_worker: Option<HostWorker>,
    drafter: Option<DraftModel>,
    /// `None` if launches are not to be captured.
    graphs: Option<Graphs<RowCounts>>,
    programs: Programs,
    sees_back_only: SeesBackOnly,
    feed_samples: (Arc<Module>, Vec<u8>),
    update_tables: Arc<Module>,
    tables: KeptTables,
    sampler: Sampler,
    pages: PageMover,
    batch_layout: BatchLayout,
    in_flight: [InFlight; IN_FLIGHT],
    read_host: HostBuffer,
    parts: Parts,
    buffers: Buffers,
    /// Keys and values of each slot.
    kv: Vec<PagesAt>,
    /// Hidden states of sampled rows.
    hidden: Address,
    /// The weights as they were given, and as they lie on the device.
    source: Arc<Weights>,
    weights: Rc<ResidentWeights>,
    device: Arc<Device>,
    probed: Vec<Option<Vec<f32>>>,
    words: Vec<u32>,
    batches: u64,
    /// Sampled rows of the batch submitted last.
    last_sampled: usize,
}

/// Loaded code of an executor.
pub(crate) struct Kernels {
    /// Those of all calls, and whatever a drafter will need.
    pub(crate) modules: Arc<Modules>,
    /// In the order of `sample_specializations`.
    pub(crate) sampling: [Arc<Module>; 3],
    pub(crate) feed_samples: Arc<Module>,
    pub(crate) move_pages: Arc<Module>,
    pub(crate) update_tables: Arc<Module>,
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
    _streaming: StreamBuffers,
    batch: Buffer,
}

impl CudaExecutor {
    pub(crate) fn new(
        device: &Arc<Device>,
        plan: &Plan,
        (source, weights, host_worker): (Arc<Weights>, Rc<ResidentWeights>, Option<HostWorker>),
        options: &CompileOptions,
        prepared: Prepared,
        kernels: Kernels,
        config: &CudaConfig,
    ) -> Result<CudaExecutor, CudaError> {
        let Prepared {
            front,
            tail,
            parts,
            streams,
            target,
            kept,
            ..
        } = prepared;
        let batch_layout = BatchLayout::new(options, PageTables::Stay);
        let activations = device.allocate("activations", parts.activation_bytes())?;
        let scratch = device.allocate("scratch", parts.scratch.bytes)?;
        let kv = PerGroup {
            full: device.allocate("kv full", parts.kv.full.bytes)?,
            sliding: device.allocate("kv sliding", parts.kv.sliding.bytes)?,
        };
        let batch = device.allocate("batch", batch_layout.bytes())?;
        let (offset, rows) = batch_layout.constant();
        copy_words(device, &batch, offset, &rows)?;
        let workspace = || device.allocate("cuBLASLt workspace", WORKSPACE_BYTES);
        let workspace = (kernels.library.as_ref().map(|_| workspace())).transpose()?;
        let products = kernels
            .library
            .zip(workspace.as_ref())
            .map(|(library, workspace)| Rc::new(CublasLtGemms::new(library, workspace.address())));
        let (ropes_buffer, ropes) = upload_ropes(device, plan)?;
        let at = Addresses {
            plan: plan.clone(),
            values: value_addresses(plan, &parts, &activations),
            scratch: scratch_addresses(&parts, &scratch),
            weights: weights.at.clone(),
            kv: kv_addresses(plan, &parts, &kv, (&weights.at, &ropes)),
            ropes,
            clusters: Vec::new(),
            batch: batch_layout.at(batch.address()),
            host: host_worker.as_ref().map_or(HostAt::NONE, HostWorker::at),
        };
        let sees_back_only = SeesBackOnly::new(&front, &tail);
        let modules = kernels.modules;
        let module = |kernel: &dyn Kernel| modules.get(&kernel.specialization());
        let groups = RowGroups::new(&at, &kept, &batch_layout, batch.address());
        let bind = |rows, calls: Vec<Call>, stream| {
            Program::bind(calls, module, products.as_ref(), groups.of(rows), stream)
        };
        let streaming = StreamBuffers::new(device, &streams.buffers)?;
        let [front_stream, tail_stream] = streaming.bind(device, streams, &at.weights)?;
        let programs = [(front, front_stream), (tail, tail_stream)];
        let programs = Programs::bind(programs, options.batching, bind);
        let inputs = batch_layout.sampler_inputs(batch.address(), at.values[plan.logits.index()]);
        let sampler = Sampler::new(
            device,
            kernels.sampling,
            plan.vocab(),
            options.max_sampled,
            &inputs,
        )?;
        let feed_samples = feed_samples_params(&at, inputs.samples);
        let slot = || InFlight::new(device, &batch_layout);
        let captures = config.graphs == config::Graphs::On && config.checks == Checks::EachBatch;
        Ok(CudaExecutor {
            in_flight: [slot()?, slot()?],
            read_host: device.allocate_host("logits", read_bytes(plan, options))?,
            words: vec![0; batch_layout.words],
            plan: plan.clone(),
            options: options.clone(),
            config: config.clone(),
            compiled_for: target,
            host_worker,
            drafter: None,
            graphs: captures.then(Graphs::default),
            programs,
            sees_back_only,
            feed_samples: (kernels.feed_samples, feed_samples),
            update_tables: kernels.update_tables,
            tables: KeptTables::new(batch_layout.kept_entries),
            sampler,
            pages: PageMover::new(device, kernels.move_pages, plan, options, &at.kv)?,
            batch_layout,
            parts,
            buffers: Buffers {
                activations,
                _scratch: scratch,
                _kv: kv,
                _ropes: ropes_buffer,
                _workspace: workspace,
                _streaming: streaming,
                batch,
            },
            hidden: at.values[plan.hidden.index()],
            kv: at.kv,
            modules,
            source,
            weights,
            device: Arc::clone(device),
            probed: vec![None; plan.value_count()],
            batches: 0,
            last_sampled: 0,
        })
    }

    /// The weights on the device, for another executor of the same model.
    pub(crate) fn resident_weights(&self) -> Rc<ResidentWeights> {
        Rc::clone(&self.weights)
    }

    /// Some rows of a value as they are on the device now, handed over some at a time.
    fn read_rows(
        &mut self,
        value: Value,
        rows: Range<usize>,
        mut each: impl FnMut(usize, &[f32]),
    ) -> Result<(), CudaError> {
        let columns = self.plan.columns(value);
        let row_bytes = columns * 4;
        let at_once = (self.read_host.bytes().len() / row_bytes).max(1);
        let start = self.parts.value(value);
        let mut values = vec![0.0f32; columns];
        for first in rows.clone().step_by(at_once) {
            let count = at_once.min(rows.end - first);
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

    /// The place of the batch submitted last.
    fn last(&self) -> usize {
        (self.batches as usize + IN_FLIGHT - 1) % IN_FLIGHT
    }

    /// Writes a checked batch and queues its copy to the device, with the tokens that the batch before has drawn there. Returns its
    /// place, its rows and the words in use.
    fn queue_words(
        &mut self,
        batch: &Batch<'_>,
    ) -> Result<(usize, RowCounts, usize), BackendError> {
        let queued = self.try_to_queue_words(batch);
        if queued.is_err() {
            // The device may lack what it was to be brought.
            self.tables.forget();
        }
        queued
    }

    fn try_to_queue_words(
        &mut self,
        batch: &Batch<'_>,
    ) -> Result<(usize, RowCounts, usize), BackendError> {
        let index = self.batches as usize % IN_FLIGHT;
        if let Some(done) = self.in_flight[index].done.take() {
            done.wait()?;
        }
        let tables = Some(&mut self.tables);
        let written = (self.batch_layout).write(&self.plan, batch, tables, &mut self.words);
        let (used, updates) = written?;
        self.pages.wait_before(&self.device, batch)?;
        let inputs = self.put_inputs(index, batch)?;
        (self.batch_layout).write_inputs_at(inputs, &mut self.words);
        let host = &mut self.in_flight[index].words;
        put_words(host, 0, &self.words[..used]);
        (self.device).copy_part(host, 0..used * 4, &self.buffers.batch, 0)?;
        if !updates.is_empty() {
            let count = updates.len() / UPDATE_WORDS;
            let start = self.buffers.batch.address();
            let params = self.batch_layout.update_tables(start, updates.start);
            launch(
                &self.update_tables,
                update_tables_grid(count),
                &params.bytes(),
            )?;
        }
        if batch.feeds.iter().any(|f| matches!(f, Feed::Sampled(_))) {
            let (module, params) = &self.feed_samples;
            launch(module, feed_samples_grid(batch.feeds.len()), params)?;
        }
        let rows = RowCounts {
            all: batch.feeds.len(),
            sampled: batch.sampled_count(),
        };
        Ok((index, rows, used))
    }

    /// Leaves the embeddings of a batch where the device reads them, one after another. Null if there are none.
    fn put_inputs(&mut self, index: usize, batch: &Batch<'_>) -> Result<Address, CudaError> {
        let rows = || {
            batch.feeds.iter().filter_map(|feed| match feed {
                Feed::Embedding { row, .. } => Some(*row),
                Feed::Token(_) | Feed::Sampled(_) => None,
            })
        };
        let bytes: usize = rows().map(size_of_val).sum();
        if bytes == 0 {
            return Ok(Address::NULL);
        }
        let held = &mut self.in_flight[index].inputs;
        let host = match held.take() {
            Some(host) if host.bytes().len() >= bytes => host,
            _ => self
                .device
                .allocate_host("embeddings", bytes.next_power_of_two())?,
        };
        let host = held.insert(host);
        let values = host.bytes_mut().as_chunks_mut().0.iter_mut();
        for (to, value) in values.zip(rows().flatten()) {
            *to = value.to_ne_bytes();
        }
        Ok(host.address())
    }

    /// Queues the settings of the rows that the device draws. Returns the work it is, if any, and who draws which row.
    fn queue_settings(
        &mut self,
        index: usize,
        (draws, positions): (&[model::Draw<'_>], &[usize]),
        used: usize,
    ) -> Result<(Option<Work>, Results), CudaError> {
        // Changes are made to the logits themselves, so those that somebody wants to see are left alone.
        let rows_to_sample: Vec<Option<RowToSample<'_>>> = draws
            .iter()
            .zip(positions)
            .map(|(draw, position)| RowToSample::of(draw, *position))
            .map(|row| row.filter(|_| !self.options.probe))
            .collect();
        let layout = &self.batch_layout;
        let at = layout.settings_at(used);
        let vocab = self.plan.vocab();
        let written = sample::write(&rows_to_sample, vocab, &at, &mut self.words);
        let row = |(row, draw): (usize, &model::Draw<'_>)| match (&written, draw.output) {
            (Some(written), RowOutput::Token) if written.taken[row] => DeviceRow::Token,
            (Some(written), _) if written.taken[row] => DeviceRow::Logprobs,
            _ => DeviceRow::Nothing,
        };
        let rows: Vec<DeviceRow> = draws.iter().enumerate().map(row).collect();
        let each = rows.iter().zip(draws).enumerate();
        let on_host = each
            .filter(|(_, (row, _))| **row == DeviceRow::Nothing)
            .map(|(row, (_, draw))| HostDraw::new(row, draw))
            .collect();
        let results = Results::Drawn { rows, on_host };
        let Some(written) = written else {
            return Ok((None, results));
        };
        (self.sampler).copy_masks(&self.device, index, &written.masks)?;
        self.words[layout.in_flight] = index as u32;
        let settings = draws.len().min(layout.max_drawn) * SETTING_WORDS;
        let settings = layout.in_flight..layout.settings + settings;
        let changes = used..written.end;
        let host = &mut self.in_flight[index].settings;
        let mut start = 0;
        for part in [settings, changes].into_iter().filter(|p| !p.is_empty()) {
            put_words(host, start, &self.words[part.clone()]);
            let bytes = start * 4..(start + part.len()) * 4;
            let to = &self.buffers.batch;
            (self.device).copy_part(host, bytes, to, part.start * 4)?;
            start += part.len();
        }
        Ok((Some(written.work), results))
    }

    /// Queues the work of a batch, captured if there is a graph for its number of rows.
    fn queue_work(&mut self, rows: RowCounts) -> Result<(), CudaError> {
        let (device, programs) = (&self.device, &self.programs);
        let launch = |rows: RowCounts, check: Checks| {
            let mut launches = 0;
            let queued = |label: &str, _: Origin| {
                launches += 1;
                checked(device, check, label)
            };
            launch_all(device, programs, rows, queued)?;
            Ok(launches)
        };
        let rows = graph::bucket(rows, &self.options);
        announce(self.host_worker.as_ref(), programs, rows);
        match &mut self.graphs {
            Some(graphs) => {
                let stream = device.captured_stream();
                graphs.run(stream, rows, || launch(rows, Checks::EachBatch))
            }
            None => launch(rows, self.config.checks).map(drop),
        }
    }

    /// Waits for a batch and makes its results.
    fn finish(&mut self, index: usize) -> Result<Outputs, CudaError> {
        if let Some(done) = self.in_flight[index].done.take() {
            done.wait()?;
        }
        if let Some(worker) = &self.host_worker {
            worker.check()?;
        }
        let batch = self.in_flight[index].batch.take();
        let batch = batch.expect("a ticket is used once, before the next but one is out");
        let (rows, on_host) = match batch.results {
            Results::NotDrawn => return Ok(Outputs::default()),
            Results::Ready(outputs) => return Ok(outputs),
            Results::Drawn { rows, on_host } => (rows, on_host),
        };
        let result = |(row, left): (usize, &DeviceRow)| match left {
            DeviceRow::Nothing => RowResult::default(),
            DeviceRow::Token => self.sampler.result(index, row, false),
            DeviceRow::Logprobs => self.sampler.result(index, row, true),
        };
        let mut outputs = Outputs {
            rows: rows.iter().enumerate().map(result).collect(),
        };
        let mut scratch = Scratch::default();
        for host in &on_host {
            let position = batch.positions[host.row];
            self.read_rows(self.plan.logits, host.row..host.row + 1, |_, logits| {
                outputs.rows[host.row] = host.draw().report(logits, position, &mut scratch);
            })?;
        }
        Ok(outputs)
    }

    /// Samples what the host has to of the batch submitted last: the next one writes over its logits.
    fn settle(&mut self) -> Result<(), CudaError> {
        let index = self.last();
        let Some(batch) = &self.in_flight[index].batch else {
            return Ok(());
        };
        let waits = matches!(&batch.results, Results::Drawn { on_host, .. } if !on_host.is_empty());
        if !waits {
            return Ok(());
        }
        let rows = batch.rows;
        let results = Results::Ready(self.finish(index)?);
        self.in_flight[index].batch = Some(Submitted {
            rows,
            positions: Vec::new(),
            used: 0,
            results,
        });
        Ok(())
    }

    /// Rows of the batch in flight that others may be fed by, and their tokens where the host knows them.
    fn drawn(&self) -> (usize, Option<Vec<TokenId>>) {
        let batch = self.in_flight[self.last()].batch.as_ref();
        match batch.map(|batch| (&batch.results, batch.rows.sampled)) {
            Some((Results::Drawn { .. }, sampled)) => (sampled, None),
            Some((Results::Ready(outputs), sampled)) => {
                let tokens = outputs.rows.iter().map(|row| row.token);
                (sampled, Some(tokens.collect()))
            }
            _ => (0, None),
        }
    }

    fn keep_values(&mut self, rows: RowCounts, launched: RowCounts) -> Result<(), CudaError> {
        let written: Vec<Value> = (self.programs.passes(launched).iter())
            .filter(|pass| pass.group == 0)
            .flat_map(|pass| pass.program.written.clone())
            .collect();
        self.probed.fill(None);
        for value in written {
            let mut kept = Vec::new();
            let count = rows.get(self.plan.rows(value));
            self.read_rows(value, 0..count, |_, row| kept.extend_from_slice(row))?;
            self.probed[value.index()] = Some(kept);
        }
        Ok(())
    }

    /// Queues the forward pass of a checked batch, as one of so many rows.
    fn start(&mut self, batch: &Batch<'_>, launched: RowCounts) -> Result<Ticket, BackendError> {
        let (index, rows, used) = self.queue_words(batch)?;
        self.queue_work(launched)?;
        if self.options.probe {
            self.keep_values(rows, launched)?;
        }
        let in_flight = &mut self.in_flight[index];
        in_flight.done = Some(self.device.event()?);
        in_flight.batch = Some(Submitted {
            rows,
            positions: batch.sampled_rows().map(|row| row.position).collect(),
            used,
            results: Results::NotDrawn,
        });
        self.batches += 1;
        self.last_sampled = rows.sampled;
        Ok(Ticket(self.batches))
    }
}

impl Executor for CudaExecutor {
    fn submit(&mut self, batch: &Batch<'_>) -> Result<Ticket, BackendError> {
        let (sampled, _) = self.drawn();
        batch.check(&self.plan, &self.options, sampled)?;
        let launched = self.sees_back_only.launched(batch, &self.options)?;
        self.settle()?;
        match self.drawn() {
            (_, Some(tokens)) => {
                let feeds = batch.feeds.iter().map(|feed| match *feed {
                    Feed::Sampled(row) => Feed::Token(tokens[row as usize]),
                    known => known,
                });
                let feeds: Vec<Feed<'_>> = feeds.collect();
                let batch = Batch {
                    feeds: &feeds,
                    ..*batch
                };
                self.start(&batch, launched)
            }
            (_, None) => self.start(batch, launched),
        }
    }

    fn draw(&mut self, ticket: &Ticket, draws: &[model::Draw<'_>]) -> Result<(), BackendError> {
        assert_eq!(ticket.0, self.batches, "the batch submitted last is drawn");
        let index = self.last();
        let batch = self.in_flight[index].batch.as_ref();
        let batch = batch.filter(|batch| matches!(batch.results, Results::NotDrawn));
        let batch = batch.expect("a batch is drawn once, before it is collected");
        model::Draw::check(draws, batch.rows.sampled, &self.plan)?;
        let (rows, used, positions) = (batch.rows, batch.used, batch.positions.clone());
        let (work, results) = self.queue_settings(index, (draws, &positions), used)?;
        if let Some(work) = work {
            let rows = graph::bucket(rows, &self.options);
            let queued = || checked(&self.device, self.config.checks, "sample");
            self.sampler.run(work, rows.sampled, queued)?;
        }
        let in_flight = &mut self.in_flight[index];
        in_flight.done = Some(self.device.event()?);
        if let Some(batch) = &mut in_flight.batch {
            batch.results = results;
        }
        Ok(())
    }

    fn lookahead(&self, _ticket: &Ticket) -> bool {
        let batch = self.in_flight[self.last()].batch.as_ref();
        let results = batch.map(|batch| (&batch.results, batch.rows.sampled));
        match results {
            Some((Results::Drawn { on_host, .. }, _)) => on_host.is_empty(),
            Some((Results::NotDrawn, sampled)) => sampled == 0,
            Some((Results::Ready(_), _)) | None => true,
        }
    }

    fn collect(&mut self, ticket: Ticket, out: &mut Outputs) -> Result<(), BackendError> {
        let index = (ticket.0 as usize - 1) % IN_FLIGHT;
        *out = self.finish(index)?;
        Ok(())
    }

    fn move_pages(&mut self, moves: &[PageMove]) -> Result<(), BackendError> {
        PageMove::check(moves, self.options.pages, self.options.host_pages)?;
        if !moves.is_empty() {
            self.pages.run(&self.device, moves)?;
        }
        Ok(())
    }

    fn host_page(&mut self, group: KvGroup, place: HostPageId) -> Result<&mut [u8], BackendError> {
        PageMove::check_place(group, place, self.options.host_pages)?;
        Ok(self.pages.host_page(&self.device, group, place)?)
    }

    fn attach_drafter(
        &mut self,
        plan: &Plan,
        weights: Arc<Weights>,
        max_drafts: usize,
    ) -> Result<(), BackendError> {
        let target = DraftTarget {
            device: &self.device,
            modules: &self.modules,
            config: &self.config,
            plan: &self.plan,
            options: &self.options,
            compiled_for: self.compiled_for,
            kv: &self.kv,
            hidden: self.hidden,
            weights: (&self.source, &self.weights),
        };
        self.drafter = Some(DraftModel::new(&target, plan, &weights, max_drafts)?);
        Ok(())
    }

    fn draft(&mut self, drafts: &[DraftRun<'_>]) -> Result<Vec<Vec<TokenId>>, BackendError> {
        let Some(drafter) = &mut self.drafter else {
            return Err(BackendError::Unsupported {
                what: "no draft model is attached".to_owned(),
            });
        };
        DraftRun::check(drafts, drafter.plan(), &self.options, self.last_sampled)?;
        drafter.run(&self.device, &mut self.pages, drafts)
    }

    fn probed_draft(&self, value: Value) -> Option<&[f32]> {
        self.drafter.as_ref()?.probed(value)
    }

    fn profile(
        &mut self,
        batch: &Batch<'_>,
        draws: &[model::Draw<'_>],
    ) -> Result<Option<Vec<LaunchTime>>, BackendError> {
        batch.check(&self.plan, &self.options, 0)?;
        model::Draw::check(draws, batch.sampled_count(), &self.plan)?;
        let launched = self.sees_back_only.launched(batch, &self.options)?;
        let (index, _, used) = self.queue_words(batch)?;
        let positions: Vec<usize> = batch.sampled_rows().map(|row| row.position).collect();
        let (work, _) = self.queue_settings(index, (draws, &positions), used)?;
        let rows = graph::bucket(launched, &self.options);
        let device = &self.device;
        let mut moments = Vec::new();
        // As one graph, so that times are those of the device, not of launching.
        let graph = Graph::capture(device.captured_stream(), || {
            moments.push((String::new(), SAMPLING, device.captured_moment()?));
            let mut queued = |label: &str, origin| {
                moments.push((label.to_owned(), origin, device.captured_moment()?));
                Ok(())
            };
            launch_all(device, &self.programs, rows, &mut queued)?;
            match work {
                Some(work) => (self.sampler).run(work, rows.sampled, || queued("sample", SAMPLING)),
                None => Ok(()),
            }
        })?;
        announce(self.host_worker.as_ref(), &self.programs, rows);
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

fn feed_samples_params(at: &Addresses, samples: Address) -> Vec<u8> {
    let params = FeedSamplesParams {
        rows: at.batch.all,
        tokens: at.batch.tokens,
        samples,
    };
    params.bytes()
}

/// Tells the host how many requests a forward pass has.
fn announce(worker: Option<&HostWorker>, programs: &Programs, rows: RowCounts) {
    if let Some(worker) = worker {
        let passes = programs.passes(rows);
        let requests = passes.iter().map(|pass| pass.program.requests(pass.rows));
        worker.announce(requests.sum());
    }
}

/// Queues the launches of a forward pass, and calls `queued` with the label and origin of each.
fn launch_all(
    device: &Device,
    programs: &Programs,
    rows: RowCounts,
    mut queued: impl FnMut(&str, Origin) -> Result<(), CudaError>,
) -> Result<(), CudaError> {
    for pass in programs.passes(rows) {
        (pass.program).run(device, pass.group, pass.rows, &mut queued)?;
    }
    Ok(())
}

/// Waits for a launch, if each is to be waited for.
pub(super) fn checked(device: &Device, checks: Checks, label: &str) -> Result<(), CudaError> {
    match checks {
        Checks::EachBatch => Ok(()),
        Checks::EachLaunch => device.wait(&format!("running {label}")),
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
