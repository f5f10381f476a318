//! Figures of a scenario, and which bars it missed.

use std::{
    fmt::{self, Display},
    time::Duration,
};

/// Lines for a person, in order.
pub(crate) struct Report {
    lines: Vec<String>,
    missed: Vec<String>,
    strict: bool,
}

impl Report {
    pub(super) fn new(name: &str, strict: bool) -> Report {
        Report {
            lines: vec![format!("== {name}")],
            missed: Vec::new(),
            strict,
        }
    }

    /// Conditions that must hold and do not.
    pub(crate) fn missed(&self) -> &[String] {
        &self.missed
    }

    pub(super) fn figure(&mut self, what: impl Display, value: impl Display) {
        self.lines.push(format!("   {what}: {value}"));
    }

    /// Records a condition that holds on the busiest machine.
    pub(super) fn must(&mut self, holds: bool, what: impl Display) {
        let word = if holds { "ok" } else { "MISSED" };
        let line = format!("   {what}: {word}");
        if !holds {
            self.missed.push(what.to_string());
        }
        self.lines.push(line);
    }

    /// A time or an amount that is not to be exceeded where nothing else runs.
    pub(super) fn at_most(&mut self, what: impl Display, value: f64, most: f64, unit: &str) {
        self.judge(&what, value, "at most", most, unit, value <= most);
    }

    /// One that is to be reached where nothing else runs.
    pub(super) fn at_least(&mut self, what: impl Display, value: f64, least: f64, unit: &str) {
        self.judge(&what, value, "at least", least, unit, value >= least);
    }

    fn judge(
        &mut self,
        what: &dyn Display,
        value: f64,
        word: &str,
        bar: f64,
        unit: &str,
        holds: bool,
    ) {
        let verdict = match (holds, self.strict) {
            (true, _) => "ok",
            (false, true) => "MISSED",
            (false, false) => "over the bar, which does not count here",
        };
        let line = format!("{what}: {value:.2} {unit}, {word} {bar:.2}");
        self.lines.push(format!("   {line}: {verdict}"));
        if !holds && self.strict {
            self.missed.push(line);
        }
    }
}

impl Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for line in &self.lines {
            writeln!(f, "{line}")?;
        }
        Ok(())
    }
}

/// Times of one kind, for their percentiles.
#[derive(Clone, Debug, Default)]
pub(super) struct Times(Vec<u32>);

impl Times {
    pub(super) fn add(&mut self, time: Duration) {
        let micros = u32::try_from(time.as_micros()).unwrap_or(u32::MAX);
        self.0.push(micros);
    }

    pub(super) fn append(&mut self, other: Times) {
        self.0.extend(other.0);
    }

    /// Those for which `keep` says so of their place.
    pub(super) fn kept(&self, keep: impl Fn(usize) -> bool) -> Times {
        let kept = self.0.iter().enumerate().filter(|(place, _)| keep(*place));
        Times(kept.map(|(_, micros)| *micros).collect())
    }

    pub(super) fn len(&self) -> usize {
        self.0.len()
    }

    /// In milliseconds; 0 if there are no times.
    pub(super) fn percentile(&self, share: f64) -> f64 {
        let mut sorted = self.0.clone();
        sorted.sort_unstable();
        let place = ((sorted.len() as f64 - 1.0).max(0.0) * share).round() as usize;
        sorted
            .get(place)
            .map_or(0.0, |micros| f64::from(*micros) / 1e3)
    }
}

impl Display for Times {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "p50 {:.2}, p99 {:.2}, max {:.2} ms of {}",
            self.percentile(0.5),
            self.percentile(0.99),
            self.percentile(1.0),
            self.len()
        )
    }
}
