//! `bench`: prefill and decode speed over the grid people know, each figure with its spread and its bound.
//!
//! Times cover the forward pass and the last token's logits; token choice is greedy and tokenizing is outside. Token ids are
//! drawn from the whole vocabulary, so that embedding rows do not stay in a cache.

mod draft;
mod feeder;
mod pace;
mod profile;
mod repeated;
mod scripted;
mod streams;

use anyhow::{Result, bail};
use carat::Loaded;
use carat_model::{
    backend::{CompileOptions, Executor},
    cost::{self, BatchShape, Cost, Roofline},
    kv::{KvGroup, PerGroup, pages_of, window_pages},
};
use serde::Serialize;

use crate::{
    args::{BenchArgs, BenchFormat},
    load::{self, cpu_backend},
    roofline,
    settings::Settings,
    terminal::{Terminal, bytes, say},
};
use feeder::Feeder;
use pace::Pace;
use profile::{Profile, Profiles};
pub(super) use repeated::{Repeated, WARM_UPS};

/// One cell of the grid.
#[derive(Clone, Copy, Debug)]
pub(super) struct Case {
    pub(super) prompt: usize,
    pub(super) generate: usize,
    pub(super) depth: usize,
    pub(super) batch: usize,
    /// Sequences that generate together; 1 where a prompt is timed.
    pub(super) sequences: usize,
}

impl Case {
    pub(super) fn name(&self) -> String {
        let test = if self.prompt > 0 {
            format!("pp{}", self.prompt)
        } else {
            format!("tg{}", self.generate)
        };
        let test = if self.sequences > 1 {
            format!("{test} x{}", self.sequences)
        } else {
            test
        };
        if self.depth > 0 {
            format!("{test} @ d{}", self.depth)
        } else {
            test
        }
    }

    /// Of one sequence.
    fn tokens(&self) -> usize {
        self.prompt + self.generate
    }

    /// Most tokens that a sequence will have.
    pub(super) fn length(&self) -> usize {
        self.depth.saturating_add(self.tokens())
    }

    /// Of all sequences, those that are timed.
    pub(super) fn timed_tokens(&self) -> usize {
        self.tokens() * self.sequences
    }

    /// Pages that each sequence holds: all of full layers, of sliding ones a window before each chunk. Behind a depth the window
    /// must outlive the test, which begins there again and again.
    fn pages(&self, window: Option<usize>) -> PerGroup<usize> {
        let full = pages_of(self.length());
        let again = if self.depth > 0 { self.tokens() } else { 0 };
        let sliding = window.map_or(full, |window| window_pages(window + self.batch.max(again)));
        PerGroup {
            full,
            sliding: sliding.min(full),
        }
    }
}

#[derive(Debug, Serialize)]
struct Report {
    model: String,
    model_file: String,
    model_bytes: u64,
    parameters: u64,
    backend: String,
    threads: usize,
    kv_type: String,
    test: String,
    n_prompt: usize,
    n_gen: usize,
    n_depth: usize,
    n_batch: usize,
    n_sequences: usize,
    /// Of all samples; with several sequences, tokens of all of them.
    tokens_per_second_median: f64,
    tokens_per_second_min: f64,
    tokens_per_second_max: f64,
    samples_tokens_per_second: Vec<f64>,
    samples_seconds: Vec<f64>,
    /// Choices that were measured on the card, in words; none on the CPU.
    #[serde(skip_serializing_if = "Option::is_none")]
    tuning: Option<String>,
    /// None for the reference, which is not meant to be fast, and where there is too little memory to measure rates.
    bound: Option<Bound>,
    /// With `--profile`: where the time goes.
    #[serde(flatten, skip_serializing_if = "Option::is_none")]
    profile: Option<profile::Report>,
}

/// Time of the test if memory or arithmetic alone limited it, at the rates measured in this run.
#[derive(Debug, Serialize)]
struct Bound {
    /// The larger of the two times below decides.
    limited_by: &'static str,
    tokens_per_second: f64,
    percent: f64,
    bytes: u64,
    multiply_adds: u64,
    measured_read_bytes_per_second: f64,
    measured_multiply_adds_per_second: f64,
}

pub(crate) fn run(args: &BenchArgs, settings: &Settings, terminal: Terminal) -> Result<()> {
    if args.draft.is_some() {
        return draft::run(args, settings, terminal);
    }
    if !args.streams.is_empty() {
        return streams::run(args, settings, terminal);
    }
    let pace = Pace::new(args)?;
    let loaded = load::open_model(settings, terminal)?;
    let batches = match args.batch.as_slice() {
        [] => &[loaded.backend.chunk_rows(loaded.batching)],
        given => given,
    };
    let cases = grid(args, batches);
    let longest = cases.iter().map(Case::length).max().unwrap_or(0);
    if longest == 0 {
        bail!("nothing to measure: give -p or -n a number above 0");
    }
    let context = loaded.model.config.context;
    if longest > context {
        bail!(
            "{longest} tokens (depth and test together) are more than the model's context of {context}"
        );
    }
    let mut executor = load::compile(&loaded, &compile_options(&loaded, &cases))?;
    let tuning = (loaded.backend).tuning(&loaded.plan, &loaded.model.weights);
    if let Some(tuning) = &tuning {
        terminal.note(format_args!("choices for this card: {tuning}"));
    }
    let mut profiles = Profiles::start(args, &loaded, executor.as_mut())?;
    let machine = machine(&loaded, settings, terminal)?;
    let mut reports = Vec::new();
    for case in cases {
        let (seconds, feeder) = measure(executor.as_mut(), &loaded, case, args.repetitions, pace)?;
        let mut report = report(&loaded, case, seconds, &machine);
        report.tuning.clone_from(&tuning);
        if let Some(profiles) = &mut profiles {
            let measured = Profile::measure(feeder, &loaded, case)?;
            report.profile = Some(measured.report(&loaded, machine.roofline));
            profiles.add(case.name(), measured);
        }
        if args.output == BenchFormat::Json {
            say(serde_json::to_string(&report)?)?;
        } else {
            terminal.note(format_args!(
                "{:<16} {:.2} tok/s",
                report.test, report.tokens_per_second_median
            ));
        }
        reports.push(report);
    }
    if let Some(peak) = loaded.backend.peak_bytes() {
        terminal.note(format_args!("device memory at its peak: {}", bytes(peak)));
    }
    match args.output {
        BenchFormat::Json => (),
        BenchFormat::Md => say(markdown(&reports).trim_end())?,
        BenchFormat::Csv => say(csv(&reports).trim_end())?,
    }
    profiles.map_or(Ok(()), Profiles::finish)
}

/// Limits that all of some cases keep.
pub(super) fn compile_options(loaded: &Loaded, cases: &[Case]) -> CompileOptions {
    let most = |of: &dyn Fn(&Case) -> usize| cases.iter().map(of).max().unwrap_or(0);
    let sequences = most(&|case| case.sequences);
    let rows = most(&|case| case.batch).clamp(1, most(&Case::length).max(1));
    let window = loaded.plan.window();
    let pages = |group: KvGroup| {
        most(&|case| {
            let each = case.pages(window);
            case.sequences.saturating_mul(*each.get(group))
        })
    };
    CompileOptions {
        pages: PerGroup {
            full: pages(KvGroup::Full),
            sliding: pages(KvGroup::Sliding),
        },
        chunk_pages: 0,
        host_pages: PerGroup::default(),
        kv: loaded.kv,
        max_rows: rows.max(sequences),
        max_sampled: sequences,
        probe: false,
        batching: loaded.batching,
    }
}

/// All prompts and generations at every depth; the batch only matters to prompts, sequences only to generations.
fn grid(args: &BenchArgs, batches: &[usize]) -> Vec<Case> {
    let mut cases = Vec::new();
    for &depth in &args.depth {
        for &batch in batches {
            let prompts = args.prompt.iter().filter(|p| **p > 0);
            cases.extend(prompts.map(|&prompt| Case {
                prompt,
                generate: 0,
                depth,
                batch: batch.max(1),
                sequences: 1,
            }));
        }
        let batch = batches.first().copied().unwrap_or(1).max(1);
        for &sequences in &args.sequences {
            let counts = args.generate.iter().filter(|n| **n > 0);
            cases.extend(counts.map(|&generate| Case {
                prompt: 0,
                generate,
                depth,
                batch,
                sequences,
            }));
        }
    }
    cases
}

/// Seconds of each repetition, after some that do not count, and the sequence as it is then.
fn measure<'a>(
    executor: &'a mut dyn Executor,
    loaded: &Loaded,
    case: Case,
    repetitions: u32,
    pace: Pace,
) -> Result<(Vec<f64>, Feeder<'a>)> {
    let mut test = Repeated::new(executor, loaded, case)?;
    let mut seconds = Vec::new();
    for repetition in 0..WARM_UPS + repetitions {
        let pace = if repetition < WARM_UPS {
            Pace::Free
        } else {
            pace
        };
        let Some(turn) = pace.turn(loaded, &case.name())? else {
            break;
        };
        let elapsed = test.once()?;
        turn.end(&case.name(), elapsed)?;
        if repetition >= WARM_UPS {
            seconds.push(elapsed);
        }
    }
    if seconds.is_empty() {
        bail!("standard input ended before {} had its turn", case.name());
    }
    Ok((seconds, test.feeder))
}

/// Least cost of the whole test: every chunk reads the weights once.
fn min_cost(loaded: &Loaded, case: Case) -> Cost {
    let mut total = Cost::default();
    let step = if case.prompt > 0 { case.batch } else { 1 };
    for start in (0..case.tokens()).step_by(step) {
        let rows = step.min(case.tokens() - start) * case.sequences;
        let last = start + rows == case.tokens();
        let sampled = match case.prompt {
            0 => case.sequences,
            _ => usize::from(last),
        };
        let batch = BatchShape {
            rows,
            sampled,
            sequences: case.sequences,
            depth: case.depth + start,
            kv: loaded.kv,
        };
        total += cost::of(&loaded.plan, &loaded.model.weights, batch);
    }
    total
}

/// Threads that run the test, and the machine's peak rates.
struct Machine {
    threads: usize,
    roofline: Option<Roofline>,
}

fn machine(loaded: &Loaded, settings: &Settings, terminal: Terminal) -> Result<Machine> {
    let threads = match loaded.backend.name() {
        "cpu" => cpu_backend(settings)?.threads(),
        _ => 1,
    };
    terminal.note("measuring what this machine can read and multiply");
    Ok(Machine {
        threads,
        roofline: roofline::measured(loaded.backend.as_ref(), terminal)?,
    })
}

fn report(loaded: &Loaded, case: Case, seconds: Vec<f64>, machine: &Machine) -> Report {
    let tokens = (case.tokens() * case.sequences) as f64;
    let samples: Vec<f64> = seconds.iter().map(|s| tokens / s).collect();
    let mut sorted = samples.clone();
    sorted.sort_by(f64::total_cmp);
    let median = f64::midpoint(sorted[(sorted.len() - 1) / 2], sorted[sorted.len() / 2]);
    Report {
        model: loaded.model.config.name.clone(),
        model_file: loaded.file.path().display().to_string(),
        model_bytes: loaded.file.file_bytes() as u64,
        parameters: loaded.model.parameter_count(),
        backend: loaded.backend.name().to_owned(),
        threads: machine.threads,
        kv_type: loaded.kv.to_string(),
        test: case.name(),
        n_prompt: case.prompt,
        n_gen: case.generate,
        n_depth: case.depth,
        n_batch: case.batch,
        n_sequences: case.sequences,
        tokens_per_second_median: median,
        tokens_per_second_min: sorted[0],
        tokens_per_second_max: sorted[sorted.len() - 1],
        samples_tokens_per_second: samples,
        samples_seconds: seconds,
        tuning: None,
        bound: machine
            .roofline
            .map(|roofline| bound(&min_cost(loaded, case), tokens, median, roofline)),
        profile: None,
    }
}

fn bound(cost: &Cost, tokens: f64, median: f64, roofline: Roofline) -> Bound {
    let bound = roofline.bound(cost);
    let most = tokens / bound.seconds;
    Bound {
        limited_by: bound.by.name(),
        tokens_per_second: most,
        percent: 100.0 * median / most,
        bytes: cost.bytes(),
        multiply_adds: cost.multiply_adds,
        measured_read_bytes_per_second: roofline.read_bytes_per_second,
        measured_multiply_adds_per_second: roofline.multiply_adds_per_second,
    }
}

impl Report {
    fn bound_text(&self) -> String {
        let text = |b: &Bound| format!("{:.0} % of {}", b.percent, b.limited_by);
        self.bound.as_ref().map(text).unwrap_or_default()
    }
}

fn markdown(reports: &[Report]) -> String {
    let mut out = String::from(
        "| model | size | params | backend | threads | batch | test | t/s | spread | bound |\n\
         | --- | ---: | ---: | --- | ---: | ---: | ---: | ---: | ---: | ---: |\n",
    );
    for r in reports {
        let spread = (r.tokens_per_second_max - r.tokens_per_second_min) / 2.0;
        out += &format!(
            "| {} | {} | {:.2} M | {} | {} | {} | {} | {:.2} | ± {spread:.2} | {} |\n",
            r.model,
            bytes(r.model_bytes),
            r.parameters as f64 / 1e6,
            r.backend,
            r.threads,
            r.n_batch,
            r.test,
            r.tokens_per_second_median,
            r.bound_text()
        );
    }
    for r in reports {
        if let Some(profile) = &r.profile {
            out += &profile.markdown(&r.test);
        }
    }
    out
}

fn csv(reports: &[Report]) -> String {
    let mut out = String::from(
        "model,model_bytes,parameters,backend,threads,test,n_prompt,n_gen,n_depth,n_batch,n_sequences,\
         tokens_per_second_median,tokens_per_second_min,tokens_per_second_max,bound\n",
    );
    for r in reports {
        out += &format!(
            "\"{}\",{},{},{},{},{},{},{},{},{},{},{},{},{},{}\n",
            r.model.replace('"', "\"\""),
            r.model_bytes,
            r.parameters,
            r.backend,
            r.threads,
            r.test,
            r.n_prompt,
            r.n_gen,
            r.n_depth,
            r.n_batch,
            r.n_sequences,
            r.tokens_per_second_median,
            r.tokens_per_second_min,
            r.tokens_per_second_max,
            r.bound_text()
        );
    }
    out
}

#[cfg(test)]
mod tests {
    use std::collections::HashSet;

    use carat_model::kv::{PAGE_TOKENS, first_visible_page};

    use super::*;

    /// What each of a case's batches writes or sees in sliding layers, as pages of the sequence.
    fn seen(case: &Case, window: usize) -> Vec<std::ops::Range<usize>> {
        let batches = |from: usize, to: usize, step: usize| {
            (from..to).step_by(step).map(move |first| {
                let end = to.min(first + step);
                first_visible_page(first, window)..pages_of(end)
            })
        };
        let step = if case.prompt > 0 { case.batch } else { 1 };
        batches(0, case.depth, case.batch)
            .chain(batches(case.depth, case.length(), step))
            .collect()
    }

    #[test]
    fn pages_used_in_turns_hold_all_that_a_batch_sees() {
        let lengths = [0, 1, PAGE_TOKENS, 100, 1000];
        for (depth, tokens, batch, window) in lengths.into_iter().flat_map(|depth| {
            [1, 17, 300].into_iter().flat_map(move |tokens| {
                [(1, 7), (64, 32), (100, 512), (512, 130)].map(|(b, w)| (depth, tokens, b, w))
            })
        }) {
            for (prompt, generate) in [(tokens, 0), (0, tokens)] {
                let case = Case {
                    prompt,
                    generate,
                    depth,
                    batch,
                    sequences: 1,
                };
                let held = case.pages(Some(window)).sliding;
                for pages in seen(&case, window) {
                    let turns: HashSet<usize> = pages.clone().map(|page| page % held).collect();
                    assert_eq!(turns.len(), pages.len(), "{case:?}, window {window}");
                }
                // Each repetition begins at the depth, whose window the one before may not have written over.
                let first = first_visible_page(depth, window);
                let turns = |range: std::ops::Range<usize>| -> HashSet<usize> {
                    range.map(|page| page % held).collect()
                };
                let kept = turns(first..depth / PAGE_TOKENS);
                let written = turns(depth.div_ceil(PAGE_TOKENS)..pages_of(case.length()));
                assert!(
                    depth == 0 || kept.is_disjoint(&written),
                    "{case:?}, {window}"
                );
            }
        }
    }
}
