//! The meaning of every step: a scalar interpreter, slow and obvious, that faster backends are compared with.
//!
//! Values and KV are f32, and sums are f64. Keys and values in F16 are kept as f32, so what 16 bits cost in exactness is measured
//! from here; those in Q8_0 are rounded as every backend rounds them (where keys follow from values, those alone), so that kernels are
//! compared over the same ones, and what 8 bits cost is a figure of its own. Each row is computed by itself, so results do not depend on what else is in the
//! batch, on chunking, or on narrowing: those comparisons are exact here.

use std::{
    collections::{HashMap, VecDeque},
    sync::Arc,
};

use crate::{
    TokenId,
    backend::{
        Backend, BackendError, Batch, CompileOptions, DraftRun, Draw, Executor, Feed, Interrupt,
        Memory, Outputs, RowRef, Run, TableRef, Ticket,
    },
    draft::{self, DraftStep},
    kv::{HostPageId, KvGroup, KvType, PAGE_TOKENS, PageId, PageMove, PerGroup, first_visible},
    plan::{KvSlot, Plan, RopeId, Rows, SlotSpec, Step, TiedKeys, Value},
    sampling::Scratch,
    weights::{Weight, Weights},
};

/// Compiles to [`Interpreter`].
pub struct Reference;

impl Backend for Reference {
    fn name(&self) -> &'static str {
        "reference"
    }

    fn drafts(&self) -> bool {
        true
    }

    fn memory(&self) -> Result<Memory, BackendError> {
        // It is for tiny models and cares for exactness alone: it sets no limit of its own.
        Ok(Memory {
            total_bytes: u64::MAX,
            free_bytes: u64::MAX,
        })
    }

    fn compile(
        &self,
        plan: &Plan,
        weights: Arc<Weights>,
        options: &CompileOptions,
    ) -> Result<Box<dyn Executor>, BackendError> {
        let cells = || -> Vec<Vec<f32>> {
            let cells = |slot: &SlotSpec, pages: usize| {
                vec![0.0; pages * PAGE_TOKENS * slot.kv_heads * slot.head_dim]
            };
            let of_slot = |slot: &SlotSpec| cells(slot, *options.pages.get(slot.group));
            let mut sliding = plan.own_slots(KvGroup::Sliding);
            let chunk = sliding.next().map(|slot| cells(slot, options.chunk_pages));
            plan.slots.iter().map(of_slot).chain(chunk).collect()
        };
        Ok(Box::new(Interpreter {
            values: vec![Vec::new(); plan.value_count()],
            keys: cells(),
            cached_values: cells(),
            saved: saved(plan, options.host_pages),
            tied_keys: plan.tied_keys(),
            plan: plan.clone(),
            weights,
            options: options.clone(),
            tables: HashMap::new(),
            interrupt: Interrupt::default(),
            in_flight: VecDeque::new(),
            batches: 0,
            states: Vec::new(),
            drafter: None,
        }))
    }
}

struct Interpreter {
    plan: Plan,
    /// Slots whose keys follow from values.
    tied_keys: Vec<(KvSlot, TiedKeys)>,
    weights: Arc<Weights>,
    options: CompileOptions,
    values: Vec<Vec<f32>>,
    /// Per slot: `[position in pages, kv_heads, head_dim]`.
    keys: Vec<Vec<f32>>,
    cached_values: Vec<Vec<f32>>,
    /// Pages in host memory: keys, then values of each slot of the group in turn.
    saved: PerGroup<Vec<Vec<u8>>>,
    /// Page tables by their names, as they were in the last batch that had them.
    tables: HashMap<u32, PerGroup<Vec<PageId>>>,
    interrupt: Interrupt,
    in_flight: VecDeque<InFlight>,
    batches: u64,
    /// Result of [`Step::State`].
    states: Vec<f32>,
    /// Has the keys and values for as long as it drafts.
    drafter: Option<Box<Interpreter>>,
}

/// A batch that has been submitted and not collected.
struct InFlight {
    ticket: u64,
    /// Of its sampled rows.
    positions: Vec<usize>,
    /// `None` until it is drawn.
    outputs: Option<Outputs>,
}

impl InFlight {
    fn tokens(&self) -> Vec<TokenId> {
        let rows = self.outputs.iter().flat_map(|outputs| &outputs.rows);
        rows.map(|row| row.token).collect()
    }
}

impl Executor for Interpreter {
    fn submit(&mut self, batch: &Batch<'_>) -> Result<Ticket, BackendError> {
        let sampled_before = self.in_flight.back().map_or(Vec::new(), InFlight::tokens);
        batch.check(&self.plan, &self.options, sampled_before.len())?;
        for run in batch.runs {
            self.check_unchanged(run)?;
        }
        let tokens: Vec<TokenId> = batch
            .feeds
            .iter()
            .map(|feed| feed.resolve(&sampled_before))
            .collect();
        self.run_all(batch, &tokens)?;
        let sampled: Vec<RowRef> = batch.sampled_rows().collect();
        for run in batch.runs {
            if let Some(table) = run.table {
                self.tables
                    .insert(table.id, run.pages.map(<[PageId]>::to_vec));
            }
        }
        self.batches += 1;
        self.in_flight.push_back(InFlight {
            ticket: self.batches,
            positions: sampled.iter().map(|row| row.position).collect(),
            outputs: None,
        });
        Ok(Ticket(self.batches))
    }

    /// At once: the logits are there.
    fn draw(&mut self, ticket: &Ticket, draws: &[Draw<'_>]) -> Result<(), BackendError> {
        let batch = self.in_flight.back_mut();
        let batch = batch.filter(|batch| batch.ticket == ticket.0 && batch.outputs.is_none());
        let batch = batch.expect("the batch submitted last is drawn, once");
        Draw::check(draws, batch.positions.len(), &self.plan)?;
        let logits =
            self.values[self.plan.logits.index()].chunks(self.plan.columns(self.plan.logits));
        let mut scratch = Scratch::default();
        let each = draws.iter().zip(&batch.positions).zip(logits);
        let rows =
            each.map(|((draw, position), logits)| draw.report(logits, *position, &mut scratch));
        batch.outputs = Some(Outputs {
            rows: rows.collect(),
        });
        Ok(())
    }

    fn collect(&mut self, ticket: Ticket, out: &mut Outputs) -> Result<(), BackendError> {
        let batch = self.in_flight.pop_front();
        let batch = batch.filter(|batch| batch.ticket == ticket.0);
        let batch = batch.expect("a ticket is used once, in order");
        *out = batch.outputs.unwrap_or_default();
        Ok(())
    }

    fn attach_drafter(
        &mut self,
        plan: &Plan,
        weights: Arc<Weights>,
        _max_drafts: usize,
    ) -> Result<(), BackendError> {
        self.drafter = Some(Box::new(Interpreter {
            values: vec![Vec::new(); plan.value_count()],
            keys: Vec::new(),
            cached_values: Vec::new(),
            saved: PerGroup::default(),
            tied_keys: Vec::new(),
            plan: plan.clone(),
            weights,
            options: self.options.clone(),
            tables: HashMap::new(),
            interrupt: Interrupt::default(),
            in_flight: VecDeque::new(),
            batches: 0,
            states: Vec::new(),
            drafter: None,
        }));
        Ok(())
    }

    fn draft(&mut self, drafts: &[DraftRun<'_>]) -> Result<Vec<Vec<TokenId>>, BackendError> {
        let Some(mut drafter) = self.drafter.take() else {
            return Err(BackendError::Unsupported {
                what: "no draft model is attached".to_owned(),
            });
        };
        let hidden = self.value(self.plan.hidden);
        let sampled = hidden.data.len() / hidden.columns;
        let checked = DraftRun::check(drafts, &drafter.plan, &self.options, sampled);
        let states = drafts.iter().filter(|draft| draft.row < sampled);
        let states: Vec<f32> = states
            .flat_map(|draft| hidden.row(draft.row).to_vec())
            .collect();
        let drafted = checked.map(|()| {
            std::mem::swap(&mut self.keys, &mut drafter.keys);
            std::mem::swap(&mut self.cached_values, &mut drafter.cached_values);
            let drafted = draft::run(drafts, states, |batch, states| {
                drafter.states = states.to_vec();
                let tokens: Vec<TokenId> = batch.feeds.iter().map(|f| f.resolve(&[])).collect();
                drafter
                    .run_all(batch, &tokens)
                    .expect("nobody interrupts a drafter");
                DraftStep {
                    logits: drafter.values[drafter.plan.logits.index()].clone(),
                    states: drafter.values[drafter.plan.hidden.index()].clone(),
                }
            });
            std::mem::swap(&mut self.keys, &mut drafter.keys);
            std::mem::swap(&mut self.cached_values, &mut drafter.cached_values);
            drafted
        });
        self.drafter = Some(drafter);
        drafted
    }

    fn probed_draft(&self, value: Value) -> Option<&[f32]> {
        let drafter = self.drafter.as_ref().filter(|_| self.options.probe)?;
        Some(&drafter.values[value.index()])
    }

    fn interrupt_by(&mut self, interrupt: Interrupt) {
        self.interrupt = interrupt;
    }

    fn move_pages(&mut self, moves: &[PageMove]) -> Result<(), BackendError> {
        PageMove::check(moves, self.options.pages, self.options.host_pages)?;
        for step in moves {
            let (group, page, place) = step.places();
            let mut host = self.saved.get_mut(group)[place.0 as usize].as_mut_slice();
            for (slot, spec) in self.plan.slots.iter().enumerate() {
                if spec.group != group {
                    continue;
                }
                let cells = PAGE_TOKENS * spec.kv_heads * spec.head_dim;
                for device in [&mut self.keys[slot], &mut self.cached_values[slot]] {
                    let device = &mut device[page.0 as usize * cells..][..cells];
                    let (bytes, rest) = host.split_at_mut(size_of_val(device));
                    let each = device.iter_mut().zip(bytes.as_chunks_mut().0);
                    for (value, bytes) in each {
                        match step {
                            PageMove::Save { .. } => *bytes = value.to_le_bytes(),
                            PageMove::Load { .. } => *value = f32::from_le_bytes(*bytes),
                        }
                    }
                    host = rest;
                }
            }
        }
        Ok(())
    }

    fn host_page(&mut self, group: KvGroup, place: HostPageId) -> Result<&mut [u8], BackendError> {
        PageMove::check_place(group, place, self.options.host_pages)?;
        Ok(&mut self.saved.get_mut(group)[place.0 as usize])
    }

    fn probed(&self, value: Value) -> Option<&[f32]> {
        self.options
            .probe
            .then(|| self.values[value.index()].as_slice())
    }
}

/// Pages in host memory, empty.
fn saved(plan: &Plan, pages: PerGroup<usize>) -> PerGroup<Vec<Vec<u8>>> {
    let of = |group: KvGroup| {
        let slots = plan.slots.iter().filter(|spec| spec.group == group);
        let values = slots.map(|spec| 2 * PAGE_TOKENS * spec.kv_heads * spec.head_dim);
        let bytes = values.sum::<usize>() * size_of::<f32>();
        vec![vec![0; bytes]; *pages.get(group)]
    };
    PerGroup {
        full: of(KvGroup::Full),
        sliding: of(KvGroup::Sliding),
    }
}

impl Interpreter {
    /// Every step of a batch, whose rows are fed these tokens.
    fn run_all(&mut self, batch: &Batch<'_>, tokens: &[TokenId]) -> Result<(), BackendError> {
        let all: Vec<RowRef> = batch.all_rows().collect();
        let sampled: Vec<RowRef> = batch.sampled_rows().collect();
        for i in 0..self.plan.steps.len() {
            if self.interrupt.is_raised() {
                return Err(BackendError::Interrupted);
            }
            let step = self.plan.steps[i].step.clone();
            let rows = match self.plan.step_rows(&step) {
                Rows::All => &all,
                Rows::Sampled => &sampled,
            };
            self.run(&step, batch, tokens, rows);
        }
        Ok(())
    }

    fn value(&self, value: Value) -> Matrix<'_> {
        Matrix {
            data: &self.values[value.index()],
            columns: self.plan.columns(value),
        }
    }

    /// Looks whether entries are what they are said to be, which faster executors rely on.
    fn check_unchanged(&self, run: &Run<'_>) -> Result<(), BackendError> {
        let Some(TableRef { id, unchanged }) = run.table else {
            return Ok(());
        };
        let none = PerGroup::default();
        let before = self.tables.get(&id).unwrap_or(&none);
        for group in KvGroup::ALL {
            let (count, now) = (*unchanged.get(group), run.pages.get(group));
            let entries = before.get(group).get(..count).zip(now.get(..count));
            let same = |(before, now): (&[PageId], &[PageId])| {
                let mut pairs = before.iter().zip(now);
                pairs.all(|(before, now)| now == before || *now == PageId::FREED)
            };
            if !entries.is_some_and(same) {
                return Err(BackendError::Unsupported {
                    what: format!(
                        "the first {count} {group:?} entries of page table {id} are said to be unchanged and are not"
                    ),
                });
            }
        }
        Ok(())
    }

    #[expect(
        clippy::too_many_lines,
        reason = "one arm a step kind: the list of meanings"
    )]
    fn run(&mut self, step: &Step, batch: &Batch<'_>, tokens: &[TokenId], rows: &[RowRef]) {
        let value = |v: Value| Matrix {
            data: &self.values[v.index()],
            columns: self.plan.columns(v),
        };
        let each_row = |x: Value, f: &dyn Fn(&[f32], &RowRef) -> Vec<f32>| -> Vec<f32> {
            let x = value(x);
            rows.iter()
                .enumerate()
                .flat_map(|(r, of)| f(x.row(r), of))
                .collect()
        };
        let out = match *step {
            Step::StoreKv { k, v, slot } => return self.store(batch, rows, k, v, slot),
            Step::Embed { table, scale, .. } => rows
                .iter()
                .flat_map(|at| match batch.feeds[at.row] {
                    Feed::Embedding { row, .. } if self.plan.is_input(table) => row.to_vec(),
                    _ => {
                        let row = self.weight_row(table, 0, tokens[at.row] as usize);
                        row.iter().map(|y| y * scale).collect()
                    }
                })
                .collect(),
            Step::State { .. } => self.states.clone(),
            Step::Norm {
                x,
                weight,
                group,
                eps,
                ..
            } => {
                let weight = weight.map(|w| self.weights.vector(w));
                each_row(x, &|row, _| rms_norm(row, weight.as_deref(), group, eps))
            }
            Step::Linear { x, w, .. } => self.linear(value(x), rows.len(), w),
            Step::Rope { x, rope, .. } => each_row(x, &|row, at| self.rope(row, rope, at.position)),
            Step::Attend { q, slot, .. } => each_row(q, &|row, at| {
                self.attend(row, slot, &batch.runs[at.run], at)
            }),
            Step::GeluMul {
                gate,
                up,
                up_column,
                ..
            } => {
                let (gate, up) = (value(gate), value(up));
                (0..rows.len())
                    .flat_map(|r| {
                        let up = &up.row(r)[up_column..];
                        gate.row(r)
                            .iter()
                            .zip(up)
                            .map(|(g, u)| gelu(*g) * u)
                            .collect::<Vec<_>>()
                    })
                    .collect()
            }
            Step::Add { a, b, .. } => {
                let (a, b) = (value(a).data, value(b).data);
                a.iter().zip(b).map(|(a, b)| a + b).collect()
            }
            Step::Scale { x, by, .. } => value(x).data.iter().map(|x| x * by).collect(),
            Step::SelectSampled { x, .. } => {
                let x = value(x);
                rows.iter().flat_map(|at| x.row(at.row).to_vec()).collect()
            }
            Step::Route {
                x,
                w,
                expert_scale,
                top_k,
                ..
            } => {
                let scale = expert_scale.map(|w| self.weights.vector(w));
                let scores = self.linear(value(x), rows.len(), w);
                let experts = self.weights.matrix(w).rows;
                scores
                    .chunks(experts)
                    .flat_map(|s| route(s, scale.as_deref(), top_k))
                    .collect()
            }
            Step::Experts {
                x,
                route,
                gate,
                up,
                down,
                ..
            } => {
                let (x, route) = (value(x), value(route));
                (0..rows.len())
                    .flat_map(|r| self.experts(x.row(r), route.row(r), [gate, up, down]))
                    .collect()
            }
            Step::ClusterLogits {
                x,
                centroids,
                w,
                clusters,
                top,
                ..
            } => {
                let near = self.linear(value(x), rows.len(), centroids);
                let count = self.weights.matrix(centroids).rows;
                let tokens = &self.plan.clusters[clusters.0 as usize];
                near.chunks(count)
                    .enumerate()
                    .flat_map(|(r, near)| {
                        let mut logits = vec![f32::NEG_INFINITY; tokens.len()];
                        for token in crate::draft::nearest(near, tokens, top) {
                            let row = self.weight_row(w, 0, token as usize);
                            logits[token as usize] = dot(&row, value(x).row(r));
                        }
                        logits
                    })
                    .collect()
            }
            Step::Softcap { x, cap, .. } => value(x)
                .data
                .iter()
                .map(|x| cap * (x / cap).tanh())
                .collect(),
        };
        let place = step.out().expect("only StoreKv writes no value");
        self.values[place.index()] = out;
    }

    fn weight_row(&self, w: Weight, index: usize, row: usize) -> Vec<f32> {
        let m = self.weights.matrix(w);
        let mut out = vec![0.0; m.columns];
        m.quant
            .dequantize(self.weights.row(w, index, row), &mut out);
        out
    }

    fn linear(&self, x: Matrix<'_>, rows: usize, w: Weight) -> Vec<f32> {
        let width = self.weights.matrix(w).rows;
        let mut out = vec![0.0; rows * width];
        for o in 0..width {
            let weight = self.weight_row(w, 0, o);
            for r in 0..rows {
                out[r * width + o] = dot(&weight, x.row(r));
            }
        }
        out
    }

    fn rope(&self, row: &[f32], rope: RopeId, position: usize) -> Vec<f32> {
        let rope = self.plan.rope(rope);
        let half = rope.head_dim / 2;
        let mut out = row.to_vec();
        for (head, y) in row.chunks(rope.head_dim).zip(out.chunks_mut(rope.head_dim)) {
            for (j, frequency) in rope.frequencies.iter().enumerate() {
                let turned = (position + rope.shift) as f32;
                let (sin, cos) = f64::from(turned * frequency).sin_cos();
                let (sin, cos) = (sin as f32, cos as f32);
                y[j] = head[j] * cos - head[j + half] * sin;
                y[j + half] = head[j] * sin + head[j + half] * cos;
            }
        }
        out
    }

    fn store(&mut self, batch: &Batch<'_>, rows: &[RowRef], k: Value, v: Value, stored_in: KvSlot) {
        let spec = self.plan.slot(stored_in).clone();
        let kv = *self.options.kv.get(spec.group);
        let width = spec.kv_heads * spec.head_dim;
        for (r, row_ref) in rows.iter().enumerate() {
            let pages = batch.runs[row_ref.run].pages.get(spec.group);
            let (slot, cell) = self.cell(stored_in, spec.group, pages, row_ref.position);
            let at = cell * width;
            for (cache, value) in [(&mut self.keys, k), (&mut self.cached_values, v)] {
                let row = &self.values[value.index()][r * width..(r + 1) * width];
                let cells = &mut cache[slot][at..at + width];
                cells.copy_from_slice(row);
                if kv == KvType::Q8_0 {
                    cells.chunks_mut(spec.head_dim).for_each(KvType::round_q8_0);
                }
            }
            if let Some((_, tied)) = self.tied_keys.iter().find(|(tied, _)| *tied == stored_in) {
                let weight = self.weight_row(tied.weight, 0, 0);
                let values = self.cached_values[slot][at..at + width].iter();
                let weighted: Vec<f32> = values
                    .zip(weight.iter().cycle())
                    .map(|(v, w)| v * w)
                    .collect();
                let keys = self.rope(&weighted, tied.rope, row_ref.position);
                self.keys[slot][at..at + width].copy_from_slice(&keys);
            }
        }
    }

    /// Where a slot has a position: among its own cells, or in those behind all slots', which they have together.
    fn cell(
        &self,
        slot: KvSlot,
        group: KvGroup,
        pages: &[PageId],
        position: usize,
    ) -> (usize, usize) {
        let (page, held) = (
            pages[position / PAGE_TOKENS].0 as usize,
            *self.options.pages.get(group),
        );
        let (slot, page) = match page.checked_sub(held) {
            None => (slot.0 as usize, page),
            Some(chunk_page) => (self.keys.len() - 1, chunk_page),
        };
        (slot, page * PAGE_TOKENS + position % PAGE_TOKENS)
    }

    fn attend(&self, q: &[f32], slot: KvSlot, run: &Run<'_>, row: &RowRef) -> Vec<f32> {
        let spec = self.plan.slot(slot);
        let (head_dim, width) = (spec.head_dim, spec.kv_heads * spec.head_dim);
        let visible = match spec.window {
            Some(window) => first_visible(row.position, window)..run.sliding_end(row.row),
            None => 0..row.position + 1,
        };
        let slot = spec.borrowed.unwrap_or(slot);
        let pages = run.pages.get(spec.group);
        let heads = q.len() / head_dim;
        let cached = |cache: &[Vec<f32>], seen: usize, kv_head: usize| -> Vec<f32> {
            let (slot, cell) = self.cell(slot, spec.group, pages, seen);
            let at = cell * width + kv_head * head_dim;
            cache[slot][at..at + head_dim].to_vec()
        };
        let mut out = vec![0.0; q.len()];
        for (h, (q, out)) in q.chunks(head_dim).zip(out.chunks_mut(head_dim)).enumerate() {
            let kv_head = h / (heads / spec.kv_heads);
            let scores: Vec<f32> = visible
                .clone()
                .map(|seen| dot(q, &cached(&self.keys, seen, kv_head)))
                .collect();
            let weights = softmax(&scores);
            let mut sum = vec![0.0f64; head_dim];
            for (seen, weight) in visible.clone().zip(&weights) {
                let value = cached(&self.cached_values, seen, kv_head);
                for (sum, v) in sum.iter_mut().zip(&value) {
                    *sum += weight * f64::from(*v);
                }
            }
            for (y, sum) in out.iter_mut().zip(&sum) {
                *y = *sum as f32;
            }
        }
        out
    }

    fn experts(&self, x: &[f32], route: &[f32], [gate, up, down]: [Weight; 3]) -> Vec<f32> {
        let (chosen, weights) = route.split_at(route.len() / 2);
        let rows = |w: Weight, expert: f32, x: &[f32]| -> Vec<f32> {
            (0..self.weights.matrix(w).rows)
                .map(|row| dot(&self.weight_row(w, expert as usize, row), x))
                .collect()
        };
        let mut out = vec![0.0f32; self.weights.matrix(down).rows];
        for (&expert, &weight) in chosen.iter().zip(weights) {
            let (g, u) = (rows(gate, expert, x), rows(up, expert, x));
            let inner: Vec<f32> = g.iter().zip(&u).map(|(g, u)| gelu(*g) * u).collect();
            for (y, d) in out.iter_mut().zip(rows(down, expert, &inner)) {
                *y += weight * d;
            }
        }
        out
    }
}

#[derive(Clone, Copy)]
struct Matrix<'a> {
    data: &'a [f32],
    columns: usize,
}

impl<'a> Matrix<'a> {
    fn row(&self, r: usize) -> &'a [f32] {
        &self.data[r * self.columns..(r + 1) * self.columns]
    }
}

/// Index of a position among all cells of a slot.
fn dot(a: &[f32], b: &[f32]) -> f32 {
    a.iter()
        .zip(b)
        .map(|(a, b)| f64::from(*a) * f64::from(*b))
        .sum::<f64>() as f32
}

fn rms_norm(row: &[f32], weight: Option<&[f32]>, group: usize, eps: f32) -> Vec<f32> {
    row.chunks(group)
        .flat_map(|x| {
            let squares: f64 = x.iter().map(|v| f64::from(*v) * f64::from(*v)).sum();
            let scale = 1.0 / (squares as f32 / group as f32 + eps).sqrt();
            let weighted = move |(j, v): (usize, &f32)| v * scale * weight.map_or(1.0, |w| w[j]);
            x.iter().enumerate().map(weighted).collect::<Vec<_>>()
        })
        .collect()
}

/// The tanh form.
fn gelu(z: f32) -> f32 {
    const ROOT: f32 = 0.797_884_6; // sqrt(2 / pi)
    0.5 * z * (1.0 + (ROOT * z * (1.0 + 0.044_715 * z * z)).tanh())
}

fn softmax(scores: &[f32]) -> Vec<f64> {
    let max = scores.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    let mut weights: Vec<f64> = scores.iter().map(|s| f64::from(s - max).exp()).collect();
    let sum: f64 = weights.iter().sum();
    for weight in &mut weights {
        *weight /= sum;
    }
    weights
}

/// The chosen experts, then their weights.
fn route(scores: &[f32], scale: Option<&[f32]>, top_k: usize) -> Vec<f32> {
    /// Keeps the renormalisation finite when the chosen share underflows.
    const MIN_SHARE: f64 = 6.103_515_625e-5;
    let probabilities = softmax(scores);
    let mut order: Vec<usize> = (0..scores.len()).collect();
    order.sort_by(|&a, &b| {
        probabilities[b]
            .total_cmp(&probabilities[a])
            .then(a.cmp(&b))
    });
    order.truncate(top_k);
    let share: f64 = order.iter().map(|&e| probabilities[e]).sum();
    let weights = order.iter().map(|&e| {
        let weight = probabilities[e] / share.max(MIN_SHARE);
        weight as f32 * scale.map_or(1.0, |s| s[e])
    });
    order.iter().map(|&e| e as f32).chain(weights).collect()
}
