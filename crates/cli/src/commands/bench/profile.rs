//! `bench --profile`: where the time of a batch goes, phase by phase, each beside what it must move and multiply.

use std::time::Duration;

use anyhow::{Context, Result, bail};
use carat::Loaded;
use carat_model::{
    TokenId,
    backend::{Executor, LaunchTime},
    cost::{self, BatchShape, Cost, Roofline},
    kv::PerGroup,
    phase::Phase,
};
use serde::Serialize;
use serde_json::json;

use super::{Case, feeder::Feeder};
use crate::{
    args::{BenchArgs, BenchFormat},
    misuse::misuse,
    output::WholeFile,
};

/// Times are the median of so many.
const PASSES: usize = 7;

/// One batch, timed launch by launch.
pub(super) struct Profile {
    launches: Vec<LaunchTime>,
    batch: BatchShape,
}

impl Profile {
    /// Of the last batch of a prompt, or of the first token that is generated, one of each sequence.
    pub(super) fn measure(mut feeder: Feeder<'_>, loaded: &Loaded, case: Case) -> Result<Profile> {
        let (rows, start) = if case.prompt > 0 {
            let start = (case.prompt - 1) / case.batch * case.batch;
            (case.prompt - start, start)
        } else {
            (case.sequences, 0)
        };
        let depth = case.depth + start;
        feeder.rewind(depth);
        let vocab = loaded.plan.vocab();
        let tokens: Vec<TokenId> = (0..rows).map(|i| (i * 7919 % vocab) as TokenId).collect();
        let mut passes = Vec::new();
        for _ in 0..PASSES {
            let times = feeder.profile(&tokens)?;
            passes.push(times.context("the backend told its times before, and now it does not")?);
        }
        let median = |(i, launch): (usize, &LaunchTime)| {
            let mut times: Vec<Duration> = passes.iter().map(|pass| pass[i].time).collect();
            times.sort_unstable();
            LaunchTime {
                time: times[PASSES / 2],
                ..launch.clone()
            }
        };
        Ok(Profile {
            launches: passes[0].iter().enumerate().map(median).collect(),
            batch: BatchShape {
                rows,
                sampled: case.sequences,
                sequences: case.sequences,
                depth,
                kv: loaded.kv,
            },
        })
    }

    pub(super) fn report(&self, loaded: &Loaded, roofline: Option<Roofline>) -> Report {
        let (plan, weights) = (&loaded.plan, &loaded.model.weights);
        let costs: Vec<(Phase, Cost)> = (plan.steps.iter())
            .map(|step| {
                let cost = cost::of_step(plan, weights, &step.step, self.batch);
                (plan.origin(step).phase, cost)
            })
            .collect();
        let seconds = |time: Duration| time.as_secs_f64();
        let total: Duration = self.launches.iter().map(|launch| launch.time).sum();
        let of_phase = |phase: Phase| {
            let launches = || {
                self.launches
                    .iter()
                    .filter(|launch| launch.origin.phase == phase)
            };
            let time: Duration = launches().map(|launch| launch.time).sum();
            let of_phase = costs.iter().filter(|(p, _)| *p == phase);
            let cost: Cost = of_phase.map(|(_, cost)| *cost).sum();
            let bound = roofline.filter(|_| cost != Cost::default());
            let bound = bound.map(|roofline| roofline.bound(&cost));
            PhaseReport {
                phase: phase.name(),
                launches: launches().count(),
                microseconds: seconds(time) * 1e6,
                percent_of_time: 100.0 * seconds(time) / seconds(total),
                bytes: cost.bytes(),
                multiply_adds: cost.multiply_adds,
                gigabytes_per_second: cost.bytes() as f64 / seconds(time) / 1e9,
                teraflops: 2.0 * cost.multiply_adds as f64 / seconds(time) / 1e12,
                limited_by: bound.map(|bound| bound.by.name()),
                percent_of_bound: bound.map(|bound| 100.0 * bound.seconds / seconds(time)),
            }
        };
        let profile = Phase::ALL.into_iter().map(of_phase);
        let layers = loaded.model.config.layers.len();
        let in_layers = self
            .launches
            .iter()
            .filter(|l| l.origin.layer.is_some())
            .count();
        Report {
            profile_rows: self.batch.rows,
            profile_depth: self.batch.depth,
            profile_microseconds: seconds(total) * 1e6,
            launches: self.launches.len(),
            launches_per_layer: in_layers as f64 / layers as f64,
            profile: profile.filter(|phase| phase.launches > 0).collect(),
        }
    }

    /// Chrome's trace events: every launch behind the one before it, on a track of the test's own.
    fn trace(&self, track: usize, test: &str) -> Vec<serde_json::Value> {
        let name = json!({"ph": "M", "name": "thread_name", "pid": 1, "tid": track, "args": {"name": test}});
        let mut events = vec![name];
        let mut start = Duration::ZERO;
        for LaunchTime {
            label,
            origin,
            time,
        } in &self.launches
        {
            events.push(json!({
                "ph": "X",
                "name": label,
                "cat": origin.phase.name(),
                "ts": start.as_secs_f64() * 1e6,
                "dur": time.as_secs_f64() * 1e6,
                "pid": 1,
                "tid": track,
            }));
            start += *time;
        }
        events
    }
}

/// Part of a test's report that `--profile` adds.
#[derive(Debug, Serialize)]
pub(super) struct Report {
    profile_rows: usize,
    /// Tokens in the context before these rows.
    profile_depth: usize,
    profile_microseconds: f64,
    launches: usize,
    launches_per_layer: f64,
    profile: Vec<PhaseReport>,
}

#[derive(Debug, Serialize)]
struct PhaseReport {
    phase: &'static str,
    launches: usize,
    microseconds: f64,
    percent_of_time: f64,
    /// Weights, keys and values that must be read at the least.
    bytes: u64,
    multiply_adds: u64,
    gigabytes_per_second: f64,
    teraflops: f64,
    /// `None` if nothing must be read or multiplied, or the machine's rates are unknown.
    limited_by: Option<&'static str>,
    percent_of_bound: Option<f64>,
}

impl Report {
    /// A table under a line of its own.
    pub(super) fn markdown(&self, test: &str) -> String {
        let batch = match self.profile_rows {
            1 => "one token".to_owned(),
            rows => format!("{rows} rows"),
        };
        let mut out = format!(
            "\n{test}: {batch} at depth {}, {:.1} us in {} launches, {:.1} of them per layer\n\n\
             | phase | launches | us | % | MB | GMAC | GB/s | TFLOPS | bound |\n\
             | --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: | ---: |\n",
            self.profile_depth, self.profile_microseconds, self.launches, self.launches_per_layer
        );
        for p in &self.profile {
            let bound = p.percent_of_bound.zip(p.limited_by);
            let bound = bound.map(|(percent, by)| format!("{percent:.0} % of {by}"));
            out += &format!(
                "| {} | {} | {:.1} | {:.1} | {:.2} | {:.3} | {:.0} | {:.1} | {} |\n",
                p.phase,
                p.launches,
                p.microseconds,
                p.percent_of_time,
                p.bytes as f64 / 1e6,
                p.multiply_adds as f64 / 1e9,
                p.gigabytes_per_second,
                p.teraflops,
                bound.unwrap_or_default()
            );
        }
        out
    }
}

/// The profiles of all tests, for the trace if there is to be one.
pub(super) struct Profiles {
    trace: Option<WholeFile>,
    measured: Vec<(String, Profile)>,
}

impl Profiles {
    /// Checks what `--profile` needs, so that its lack is known before anything is measured.
    pub(super) fn start(
        args: &BenchArgs,
        loaded: &Loaded,
        executor: &mut dyn Executor,
    ) -> Result<Option<Profiles>> {
        if !args.profile {
            return Ok(None);
        }
        if args.output == BenchFormat::Csv {
            misuse!("--profile has no csv form; -o md and -o json do");
        }
        if Feeder::new(executor, 1, 1, PerGroup::both(1))
            .profile(&[0])?
            .is_none()
        {
            bail!(
                "the backend `{}` cannot time its launches one by one, so --profile has nothing to show; cpu and cuda can",
                loaded.backend.name()
            );
        }
        let trace = args.trace.as_deref().map(WholeFile::create);
        Ok(Some(Profiles {
            trace: trace.transpose()?,
            measured: Vec::new(),
        }))
    }

    pub(super) fn add(&mut self, test: String, profile: Profile) {
        self.measured.push((test, profile));
    }

    pub(super) fn finish(self) -> Result<()> {
        let Some(mut file) = self.trace else {
            return Ok(());
        };
        let tests = self.measured.iter().enumerate();
        let events = tests.flat_map(|(i, (test, profile))| profile.trace(i + 1, test));
        let trace = json!({"traceEvents": events.collect::<Vec<_>>(), "displayTimeUnit": "ns"});
        file.fill(|to| Ok(serde_json::to_writer(to, &trace)?))?;
        file.commit().map(drop)
    }
}

#[cfg(test)]
mod tests {
    use carat_model::phase::Origin;

    use super::*;

    fn profile() -> Profile {
        let launch = |label: &str, layer, phase, us| LaunchTime {
            label: label.to_owned(),
            origin: Origin { layer, phase },
            time: Duration::from_micros(us),
        };
        Profile {
            launches: vec![
                launch("embed.token", None, Phase::Embed, 2),
                launch("L0.ffn.down", Some(0), Phase::Ffn, 5),
                launch("sample", None, Phase::Sample, 3),
            ],
            batch: BatchShape::decode(0, PerGroup::default()),
        }
    }

    #[test]
    fn a_trace_has_launches_one_behind_the_other() {
        let events = profile().trace(3, "tg1");
        assert_eq!(events[0]["args"]["name"], "tg1");
        let starts: Vec<f64> = (events[1..].iter())
            .map(|event| event["ts"].as_f64().unwrap())
            .collect();
        assert_eq!(starts, [0.0, 2.0, 7.0]);
        let last = &events[3];
        assert_eq!(
            (&last["name"], &last["cat"]),
            (&json!("sample"), &json!("sample"))
        );
        assert_eq!(
            (&last["dur"], &last["tid"], &last["ph"]),
            (&json!(3.0), &json!(3), &json!("X"))
        );
    }

    #[test]
    fn a_trace_appears_when_it_is_whole() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("trace.json");
        let mut profiles = Profiles {
            trace: Some(WholeFile::create(&path).unwrap()),
            measured: Vec::new(),
        };
        profiles.add("tg1".to_owned(), profile());
        assert!(!path.exists());
        profiles.finish().unwrap();
        let text = std::fs::read_to_string(&path).unwrap();
        let trace: serde_json::Value = serde_json::from_str(&text).unwrap();
        assert_eq!(trace["traceEvents"].as_array().unwrap().len(), 4);
    }
}
