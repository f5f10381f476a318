//! Cost of rows on a device: short batches, timed once before the first request.
//!
//! Nobody has pages yet, so whatever these batches write is written over before anybody reads it.

use std::time::{Duration, Instant};

use carat_model::{
    TokenId,
    backend::{BackendError, Batch, DraftRun, Draw, Executor, Feed, Outputs, Run},
    kv::{PageId, PerGroup, pages_of},
    sampling::Sampling,
};

use crate::{config::Limits, core::StepCosts};

/// Rows of the batches that are timed, what matters most first.
const ROWS: [usize; 11] = [1, 2, 4, 8, 16, 32, 3, 6, 5, 7, 64];
/// Of these, those that are timed however long they take: without them there is nothing to go by.
const LEAST: usize = 3;
/// Each is run so often at the most; the shortest time counts.
const REPETITIONS: usize = 8;
/// Time for all of them, of which each gets an equal share; those whose turn has not come by then lie on the line between, or
/// beyond in proportion. Whoever starts waits for it.
const BUDGET: Duration = Duration::from_millis(50);
/// The same where the costs are kept for later starts. Devices that capture what they run need it: they are slow at first.
const BUDGET_OF_KEPT: Duration = Duration::from_secs(1);
/// From the token of a row that is timed to the next one's: a prime, so that there are as many as the vocabulary has.
const TOKENS_APART: usize = 7919;
/// Steps of the drafts that are timed, so that what a draft costs beside its steps is shared as it will be.
const DRAFT_STEPS: usize = 3;

/// The costs that lengths of drafts follow from; `None` where they are given, or nobody drafts, or the device does not do it.
pub(crate) fn costs_for_drafts(executor: &mut dyn Executor, limits: &Limits) -> Option<StepCosts> {
    let config = limits.config();
    let drafts = config.drafts.as_ref().filter(|_| config.max_draft > 0)?;
    if drafts.costs.is_some() {
        return None;
    }
    // Pages are left out: there may be more or fewer at each start.
    let of_limits = format!(
        "{} sequences, {} rows, {} sampled, {:?}, {:?}, draft model: {}",
        config.max_sequences,
        config.max_rows,
        limits.max_sampled(),
        config.kv,
        config.batching,
        drafts.model
    );
    let kept = drafts.kept_costs.as_ref();
    if let Some(costs) = kept.and_then(|kept| kept.read(&of_limits)) {
        return Some(costs);
    }
    let budget = kept.map_or(BUDGET, |_| BUDGET_OF_KEPT);
    match measure(executor, limits, drafts.model, budget) {
        Ok(costs) => {
            if let Some(kept) = kept {
                kept.write(&of_limits, &costs);
            }
            Some(costs)
        }
        Err(error) => {
            tracing::warn!(%error, "the cost of rows could not be measured; it is assumed");
            None
        }
    }
}

fn measure(
    executor: &mut dyn Executor,
    limits: &Limits,
    has_model: bool,
    budget: Duration,
) -> Result<StepCosts, BackendError> {
    let options = limits.compile_options();
    let fitting = options.max_rows.min(options.max_sampled);
    let context = limits.config().context;
    let fitting = fitting.min(context);
    let held = limits.config().pages;
    let has_pages = |rows: usize| {
        let pages = pages_of(rows);
        pages <= held.full && (limits.model().window.is_none() || pages <= held.sliding)
    };
    let rows: Vec<usize> = ROWS
        .into_iter()
        .filter(|rows| *rows <= fitting && has_pages(*rows))
        .collect();
    let most_pages = pages_of(rows.iter().copied().max().unwrap_or(0));
    let table: Vec<PageId> = (0..most_pages as u32).map(PageId).collect();
    let mut costs = StepCosts {
        target: Vec::new(),
        drafter: Vec::new(),
    };
    // Not timed: weights may come from the file, and code may be captured, the first time.
    if let Some(&rows) = rows.first() {
        time_rows(executor, limits, has_model, &table, rows)?;
    }
    let begun = Instant::now();
    let share = budget / rows.len().max(1) as u32;
    let mut spent = vec![Duration::ZERO; rows.len()];
    // All of them again and again, rather than each many times: what slows a machine down comes and goes.
    for turn in 0..REPETITIONS * rows.len() {
        let which = turn % rows.len();
        if turn >= LEAST && begun.elapsed() > budget {
            break;
        }
        if spent[which] > share {
            continue;
        }
        let (rows, started) = (rows[which], Instant::now());
        let (target, drafter) = time_rows(executor, limits, has_model, &table, rows)?;
        take(&mut costs.target, rows, target);
        if let Some(time) = drafter {
            take(&mut costs.drafter, rows, time);
        }
        spent[which] += started.elapsed();
    }
    costs.target.sort_unstable();
    costs.drafter.sort_unstable();
    Ok(costs)
}

/// Times of a batch of so many rows, and of a step of drafts behind it where so many are ever made.
fn time_rows(
    executor: &mut dyn Executor,
    limits: &Limits,
    has_model: bool,
    table: &[PageId],
    rows: usize,
) -> Result<(Duration, Option<Duration>), BackendError> {
    let table = &table[..pages_of(rows)];
    let pages = PerGroup {
        full: table,
        sliding: table,
    };
    let target = time_batch(executor, rows, pages, limits.model().vocab)?;
    let drafts = has_model && rows <= limits.config().max_sequences;
    let drafter = drafts.then(|| time_drafts(executor, rows, pages));
    Ok((target, drafter.transpose()?))
}

/// Keeps the shortest time of so many rows.
fn take(table: &mut Vec<(usize, Duration)>, rows: usize, time: Duration) {
    match table.iter_mut().find(|(known, _)| *known == rows) {
        Some((_, shortest)) => *shortest = time.min(*shortest),
        None => table.push((rows, time)),
    }
}

/// A batch whose rows are all sampled, as those of a draft are. Its tokens differ: the same ones would be routed to the same
/// experts, and cost less than text does.
fn time_batch(
    executor: &mut dyn Executor,
    rows: usize,
    pages: PerGroup<&[PageId]>,
    vocab: usize,
) -> Result<Duration, BackendError> {
    let token = |row: usize| (row * TOKENS_APART % vocab) as TokenId;
    let feeds: Vec<Feed<'_>> = (0..rows).map(|row| Feed::Token(token(row))).collect();
    let started = Instant::now();
    let run = Run {
        rows: 0..rows,
        position: 0,
        pages,
        sampled: rows,
        table: None,
        visible_end: None,
    };
    let batch = Batch {
        feeds: &feeds,
        runs: &[run],
    };
    let sampling = Sampling::greedy();
    let draw = Draw {
        sampling: &sampling,
        history: &[],
        mask: None,
        output: carat_model::backend::RowOutput::Token,
    };
    let ticket = executor.submit(&batch)?;
    let drawn = executor.draw(&ticket, &vec![draw; rows]);
    executor.collect(ticket, &mut Outputs::default())?;
    drawn?;
    Ok(started.elapsed())
}

/// A step of drafts behind each row of the batch before, on average.
fn time_drafts(
    executor: &mut dyn Executor,
    rows: usize,
    pages: PerGroup<&[PageId]>,
) -> Result<Duration, BackendError> {
    let draft = |row: usize| DraftRun {
        row,
        token: 0,
        position: row + 1,
        pages,
        length: DRAFT_STEPS,
    };
    let drafts: Vec<DraftRun<'_>> = (0..rows).map(draft).collect();
    let started = Instant::now();
    executor.draft(&drafts)?;
    Ok(started.elapsed() / DRAFT_STEPS as u32)
}
