//! First step at which two backends differ: one text through both, every value kept, compared in the plan's order.
//!
//! Two right answers can differ by much at a router: a near tie between experts goes either way. A row whose experts differ
//! that little, and those behind it, which attend to it, are left out from there on; experts that differ more are a difference.

use std::{
    sync::{Arc, mpsc},
    thread,
    time::Duration,
};

use anyhow::{Context, Result};
use carat::Loaded;
use carat_model::{
    TokenId,
    backend::{Backend, BackendError, CompileOptions, Executor, Interrupt},
    evaluate,
    plan::{Labelled, Plan, Step},
};

/// Experts of a row, of all that are used, that a near tie may decide: one of so many, and one at the least.
const TIED_SHARE: usize = 4;

/// Comparison of two backends.
pub(crate) struct Compared {
    /// First step whose values differ by more than the tolerance.
    pub(crate) first: Option<Difference>,
    /// Steps that were compared: all before this one.
    pub(crate) end: usize,
    /// Relative error of the last value compared: of the logits, where all steps were.
    pub(crate) last_error: f64,
    /// Rows compared to the end; fewer than there are tokens where experts were a near tie.
    pub(crate) rows: usize,
}

/// A step whose values differ.
pub(crate) struct Difference {
    pub(crate) index: usize,
    pub(crate) label: String,
    /// Relative error; of a router, the largest share of other experts in a row.
    pub(crate) error: f64,
}

/// Runs `tokens` as one batch through both backends and compares what they compute. The first, if a limit is given, stops
/// computing soon after it; it must be one that computes step by step, as the reference does. What it has by then is compared.
pub(crate) fn compare(
    loaded: &Loaded,
    backends: &[Box<dyn Backend>; 2],
    tokens: &[TokenId],
    tolerance: f64,
    limit: Option<Duration>,
) -> Result<Compared> {
    let options = CompileOptions {
        kv: loaded.kv,
        probe: true,
        batching: loaded.batching,
        ..evaluate::options(tokens.len(), tokens.len())
    };
    let limits = [limit, None];
    let mut executors = Vec::new();
    for (backend, limit) in backends.iter().zip(limits) {
        let weights = Arc::clone(&loaded.model.weights);
        let mut executor = backend
            .compile(&loaded.plan, weights, &options)
            .with_context(|| format!("cannot prepare the model on `{}`", backend.name()))?;
        run(executor.as_mut(), &loaded.plan, tokens, limit)?;
        executors.push(executor);
    }
    let mut compared = Compared {
        first: None,
        end: 0,
        last_error: 0.0,
        rows: tokens.len(),
    };
    for (index, Labelled { label, step, .. }) in loaded.plan.steps.iter().enumerate() {
        let Some(out) = step.out() else { continue };
        let (Some(a), Some(b)) = (executors[0].probed(out), executors[1].probed(out)) else {
            // It exists only inside a kernel that does several steps; the next value that is kept shows a difference too.
            continue;
        };
        if a.is_empty() || compared.rows == 0 {
            // Out of time, or of rows: nothing behind this can be compared.
            return Ok(compared);
        }
        let columns = loaded.plan.columns(out);
        let cells = compared.rows * columns;
        let (a, b) = (&a[..cells], &b[..cells]);
        let (error, most) = match step {
            Step::Route { .. } => {
                let routes = Routes::compare(a, b, columns);
                compared.rows = routes.same_rows;
                (routes.most_differing, near_tie(columns / 2))
            }
            _ => (relative_l2(a, b), tolerance),
        };
        compared.end = index + 1;
        if !matches!(step, Step::Route { .. }) {
            compared.last_error = error;
        }
        if compared.first.is_none() && (error > most || error.is_nan()) {
            compared.first = Some(Difference {
                index,
                label: label.clone(),
                error,
            });
        }
    }
    Ok(compared)
}

/// One batch; a limit that passes ends it without an error.
fn run(
    executor: &mut dyn Executor,
    plan: &Plan,
    tokens: &[TokenId],
    limit: Option<Duration>,
) -> Result<()> {
    let Some(limit) = limit else {
        evaluate::for_each_position(executor, plan, tokens, tokens.len(), |_, _| {})?;
        return Ok(());
    };
    let interrupt = Interrupt::default();
    executor.interrupt_by(interrupt.clone());
    let (done, waiting) = mpsc::channel::<()>();
    let alarm = thread::spawn(move || {
        if waiting.recv_timeout(limit) == Err(mpsc::RecvTimeoutError::Timeout) {
            interrupt.raise();
        }
    });
    let ran = evaluate::for_each_position(executor, plan, tokens, tokens.len(), |_, _| {});
    drop(done);
    let _ = alarm.join();
    match ran {
        Err(BackendError::Interrupted) | Ok(()) => Ok(()),
        Err(problem) => Err(problem.into()),
    }
}

/// Share of a row's experts that may differ in a near tie.
fn near_tie(used: usize) -> f64 {
    (used / TIED_SHARE).max(1) as f64 / used as f64
}

/// Experts chosen by two backends.
struct Routes {
    /// Rows before the first that has other experts.
    same_rows: usize,
    /// Largest share of a row's experts that the other has not.
    most_differing: f64,
}

impl Routes {
    /// Rows hold the experts, then their weights.
    fn compare(a: &[f32], b: &[f32], columns: usize) -> Routes {
        let used = columns / 2;
        let rows = a.chunks(columns).zip(b.chunks(columns));
        let differing = rows.map(|(a, b)| {
            let (a, b) = (&a[..used], &b[..used]);
            a.iter().filter(|expert| !b.contains(expert)).count()
        });
        let differing: Vec<usize> = differing.collect();
        let same_rows = differing.iter().position(|count| *count > 0);
        let most = differing.iter().copied().max().unwrap_or(0);
        Routes {
            same_rows: same_rows.unwrap_or(differing.len()),
            most_differing: most as f64 / used as f64,
        }
    }
}

fn relative_l2(a: &[f32], b: &[f32]) -> f64 {
    let difference: f64 = a.iter().zip(b).map(|(a, b)| f64::from(a - b).powi(2)).sum();
    let norm: f64 = a.iter().map(|a| f64::from(*a).powi(2)).sum();
    if difference == 0.0 {
        0.0
    } else {
        (difference / norm).sqrt()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Two experts of a row, and their weights.
    fn row(experts: [f32; 2]) -> [f32; 4] {
        [experts[0], experts[1], 0.6, 0.4]
    }

    #[test]
    fn experts_in_another_order_are_the_same() {
        let routes = Routes::compare(&row([3.0, 5.0]), &row([5.0, 3.0]), 4);
        assert_eq!((routes.same_rows, routes.most_differing), (1, 0.0));
    }

    #[test]
    fn rows_end_where_a_tie_was_decided_otherwise() {
        let a = [row([3.0, 5.0]), row([1.0, 2.0]), row([4.0, 0.0])].concat();
        let b = [row([3.0, 5.0]), row([1.0, 7.0]), row([4.0, 0.0])].concat();
        let routes = Routes::compare(&a, &b, 4);
        assert_eq!(routes.same_rows, 1);
        assert!(routes.most_differing <= near_tie(2));
        let other = Routes::compare(&row([1.0, 2.0]), &row([6.0, 7.0]), 4);
        assert!(other.most_differing > near_tie(2));
    }

    #[test]
    fn an_error_of_nothing_is_nothing() {
        assert!(relative_l2(&[0.0; 4], &[0.0; 4]).abs() < f64::EPSILON);
        assert!((relative_l2(&[3.0, 4.0], &[3.0, 9.0]) - 1.0).abs() < 1e-9);
    }
}
