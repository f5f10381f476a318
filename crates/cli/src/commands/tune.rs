//! `tune`: measures the few choices that depend on the card at hand, one after the other, and keeps what is faster than the choices that
//! were measured on an H200.
//!
//! Candidates of a choice are compiled side by side over the same weights and take turns, so that a clock that changes changes all of
//! them. What won is in force while the next choice is measured.

mod page;
mod verdict;

use std::sync::Arc;

use anyhow::{Context as _, Result, bail};
use carat::Loaded;
use carat_cpu::CpuBackend;
use carat_cuda::{
    Alternative, Alternatives, Choice, ChoiceInForce, CudaBackend, CudaConfig, KeptChoices, Tuning,
    Workload,
};
use carat_model::{
    backend::{Backend as _, BackendError, Executor},
    reference::Reference,
};

use self::{
    page::{Candidate, Report, Section, listed},
    verdict::{Figure, judge},
};
use super::bench::{Case, Repeated, WARM_UPS, compile_options};
use crate::{
    args::{BackendName, TuneArgs},
    load::{self, beside_card, cuda_config},
    misuse::misuse,
    settings::Settings,
    terminal::{Terminal, bytes, say, warn},
};

pub(super) use page::in_force;

pub(crate) fn run(args: &TuneArgs, settings: &Settings, terminal: Terminal) -> Result<()> {
    let card = open_card(args, settings)?;
    // Computes nothing: models are compiled for the card below, with one choice or another.
    let loaded = load::open_model_on(Box::new(Reference), settings, terminal)?;
    let model = load::describe(&loaded);
    let weights = &loaded.model.weights;
    let name = card.facts().name;
    if args.reset {
        let file = card.forget_choices(weights)?;
        return say(format_args!(
            "nothing is kept any more for {model} on the {name}, in {}",
            file.display()
        ));
    }
    let choices = card.choices(&loaded.plan, weights);
    if args.show {
        let state = card.tuning(&loaded.plan, weights).unwrap_or_default();
        say(format_args!("{model} on the {name}: {state}"))?;
        return say(in_force(&choices).trim_end());
    }
    let choices = wanted(args, choices)?;
    let cases = |choice: Choice| cases(choice, args, &card, &loaded);
    let all: Vec<Case> = choices.iter().flat_map(|c| cases(c.choice)).collect();
    let options = compile_options(&loaded, &all);
    let mut session = Session {
        card: &card,
        loaded: &loaded,
        tuning: Tuning::new(&card, &loaded.plan, weights, &options),
        rounds: args.rounds,
        taken: Alternatives::default(),
    };
    if !args.json {
        say(format_args!("{model} on the {name}"))?;
    }
    let mut sections = Vec::new();
    for choice in choices {
        terminal.note(format_args!("measuring {}", choice.choice));
        let section = session.measure(choice, &cases(choice.choice))?;
        if !args.json {
            say(format_args!("\n{}", page::markdown(&section).trim_end()))?;
        }
        sections.push(section);
    }
    let taken = session.taken;
    let kept_in = if args.dry_run {
        None
    } else {
        let kept = card.keep_choices((weights, &model), taken);
        Some(kept.context("what was measured cannot be kept; --dry-run measures without")?)
    };
    let file = kept_in.map(|file| file.display().to_string());
    if args.json {
        return say(serde_json::to_string_pretty(&Report {
            model,
            card: name,
            choices: sections,
            taken,
            kept_in: file,
        })?);
    }
    say("")?;
    let result = match listed(taken).as_str() {
        "" => {
            "nothing is faster by more than its spread, so the model of the card decides".to_owned()
        }
        faster => format!("faster than the model of the card: {faster}"),
    };
    match file {
        Some(file) => say(format_args!("{result}; kept in {file}")),
        None => say(format_args!("{result}; nothing is kept (--dry-run)")),
    }
}

/// The card, without what is kept for it unless that is to be shown.
fn open_card(args: &TuneArgs, settings: &Settings) -> Result<CudaBackend> {
    if matches!(
        settings.backend,
        Some(BackendName::Cpu | BackendName::Reference)
    ) {
        misuse!(
            "`tune` measures choices of the kernels of NVIDIA cards, and no other --backend has such; leave --backend out"
        );
    }
    let config = CudaConfig {
        kept_choices: if args.show {
            KeptChoices::Used
        } else {
            KeptChoices::Ignored
        },
        ..cuda_config(settings)?
    };
    let nothing = "there is nothing to tune without an NVIDIA card that computes";
    let card = CudaBackend::new(config).context(nothing)?;
    card.ready().context(nothing)?;
    if let Some(reason) = card.degraded_reason() {
        warn(reason);
    }
    Ok(card.with_host(Arc::new(CpuBackend::new(&beside_card(settings)))))
}

/// Choices to measure.
fn wanted(args: &TuneArgs, open: Vec<ChoiceInForce>) -> Result<Vec<ChoiceInForce>> {
    if open.is_empty() {
        bail!("plain kernels have nothing to choose; leave --debug no-fusion out");
    }
    let is_open = |choice: &&Choice| open.iter().any(|c| c.choice == **choice);
    if let Some(closed) = args.only.iter().find(|choice| !is_open(choice)) {
        let names: Vec<&str> = open.iter().map(|c| c.choice.name()).collect();
        bail!(
            "`{closed}` makes no difference to the kernels of this card; {} do",
            names.join(", ")
        );
    }
    let is_wanted = |c: &ChoiceInForce| args.only.is_empty() || args.only.contains(&c.choice);
    Ok(open.into_iter().filter(is_wanted).collect())
}

/// The tests of a choice, as far as the model's context goes.
fn cases(choice: Choice, args: &TuneArgs, card: &CudaBackend, loaded: &Loaded) -> Vec<Case> {
    let of_workload = |workload: &Workload| {
        let (prompt, generate, sequences) = match *workload {
            Workload::Decode(sequences) => (0, args.generate, sequences),
            Workload::Prompt(tokens) => (tokens, 0, 1),
        };
        Case {
            prompt,
            generate,
            depth: 0,
            batch: card.chunk_rows(loaded.batching),
            sequences,
        }
    };
    let cases = choice.workloads().iter().map(of_workload);
    let fits = |case: &Case| case.length() <= loaded.model.config.context;
    cases.filter(fits).collect()
}

/// A card, a model, and what was taken so far.
struct Session<'a> {
    card: &'a CudaBackend,
    loaded: &'a Loaded,
    tuning: Tuning<'a>,
    rounds: u32,
    taken: Alternatives,
}

impl Session<'_> {
    /// Measures the values of a choice, and takes the one that wins.
    fn measure(&mut self, choice: ChoiceInForce, cases: &[Case]) -> Result<Section> {
        let others = choice.choice.alternatives().iter().copied();
        let others = others.filter(|value| *value != choice.by_model);
        let mut candidates: Vec<Candidate> = Vec::new();
        let mut executors: Vec<(usize, Box<dyn Executor>)> = Vec::new();
        for value in std::iter::once(choice.by_model).chain(others) {
            let compiled = self.compile(value, &candidates)?;
            let note = match compiled {
                Ok(executor) => {
                    executors.push((candidates.len(), executor));
                    candidates
                        .is_empty()
                        .then(|| "model of the card".to_owned())
                }
                Err(reason) if candidates.is_empty() => bail!("{reason}"),
                Err(reason) => Some(reason),
            };
            candidates.push(Candidate {
                value,
                tokens_per_second: Vec::new(),
                gain: None,
                taken: false,
                note,
            });
        }
        // Of each executor, by test and by round.
        let mut seconds: Vec<Vec<Vec<f64>>> = vec![Vec::new(); executors.len()];
        // With nothing beside it, the usual value needs no measuring.
        if executors.len() > 1 {
            for &case in cases {
                let timed = self.take_turns(&mut executors, case)?;
                for (seconds, timed) in seconds.iter_mut().zip(timed) {
                    seconds.push(timed);
                }
            }
        }
        let mut best: Option<(f64, usize)> = None;
        for ((at, _), of_value) in executors.iter().zip(&seconds) {
            let speeds = of_value.iter().zip(cases).map(|(rounds, case)| {
                let tokens = case.timed_tokens() as f64;
                Figure::of(&rounds.iter().map(|s| tokens / s).collect::<Vec<_>>())
            });
            candidates[*at].tokens_per_second = speeds.collect();
            if *at == 0 || of_value.is_empty() {
                continue;
            }
            let verdict = judge(of_value, &seconds[0]);
            candidates[*at].gain = Some(verdict.gain);
            candidates[*at].note = (verdict.prevented_by())
                .map(|batch| format!("not taken: {} is slower", cases[batch].name()));
            let gain = verdict.gain.median;
            if verdict.wins() && best.is_none_or(|(most, _)| gain > most) {
                best = Some((gain, *at));
            }
        }
        if let Some((_, at)) = best {
            candidates[at].taken = true;
            self.taken = self.taken.with(candidates[at].value);
        }
        Ok(Section {
            choice: choice.choice,
            subject: choice.choice.subject(),
            tests: cases.iter().map(Case::name).collect(),
            candidates,
        })
    }

    /// The model with a value beside what was taken before, or why it is not measured.
    fn compile(
        &mut self,
        value: Alternative,
        before: &[Candidate],
    ) -> Result<Result<Box<dyn Executor>, String>> {
        if !self.card.can_choose(value) {
            return Ok(Err(
                "not measured: it takes NVRTC to compile its kernels".to_owned()
            ));
        }
        let values = self.taken.with(value);
        for candidate in before {
            let other = self.taken.with(candidate.value);
            if self.tuning.are_same(values, other)? {
                return Ok(Err(format!("the same launches as {}", candidate.value)));
            }
        }
        match self.tuning.executor(values) {
            Ok(executor) => Ok(Ok(executor)),
            Err(BackendError::OutOfMemory {
                needed_bytes,
                free_bytes,
            }) => Ok(Err(format!(
                "not measured: it takes {} of device memory beside the others, and {} are free",
                bytes(needed_bytes),
                bytes(free_bytes)
            ))),
            Err(problem) => {
                let what = format!("cannot prepare the model with {} {value}", value.choice());
                Err(problem).context(what)
            }
        }
    }

    /// Seconds of each executor, by round. Each begins a round in turn.
    fn take_turns(
        &self,
        executors: &mut [(usize, Box<dyn Executor>)],
        case: Case,
    ) -> Result<Vec<Vec<f64>>> {
        let executors = executors.iter_mut();
        let tests = executors.map(|(_, e)| Repeated::new(e.as_mut(), self.loaded, case));
        let mut tests = tests.collect::<Result<Vec<_>>>()?;
        let mut seconds = vec![Vec::new(); tests.len()];
        for round in 0..WARM_UPS + self.rounds {
            for turn in 0..tests.len() {
                let at = (turn + round as usize) % tests.len();
                let taken = tests[at].once()?;
                if round >= WARM_UPS {
                    seconds[at].push(taken);
                }
            }
        }
        Ok(seconds)
    }
}
