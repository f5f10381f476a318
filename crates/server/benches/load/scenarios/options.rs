//! The scenarios, how much of each is run, and the way to run one.

use std::{net::SocketAddr, time::Duration};

use super::{
    batched, fairness, faults, held, join, malformed, masks, overfull, process, queued,
    report::Report, slow, soak, storm, ttft,
};

/// A failure of the test itself: the server could not be started, or a connection not be made.
pub(super) type Failure = Box<dyn std::error::Error + Send + Sync>;

/// Names of the scenarios, the cheap ones first.
pub(crate) const NAMES: [&str; 13] = [
    "faults",
    "overfull",
    "ttft",
    "join",
    "fairness",
    "held",
    "queued",
    "storm",
    "slow",
    "malformed",
    "batched",
    "masks",
    "soak",
];

/// Extent of a scenario, and the server it is run against.
#[derive(Clone, Debug)]
pub(crate) struct Options {
    /// Share of the counts that the bars name; each scenario has its own without it.
    pub(crate) scale: Option<f64>,
    /// Length of those that can go on for as long as one likes.
    pub(crate) seconds: Option<u64>,
    /// A server that runs already, for scenarios that need no settings of their own.
    pub(crate) url: Option<SocketAddr>,
    /// Bars of time and memory count: not beside a test suite on the same cores.
    pub(crate) strict: bool,
}

impl Default for Options {
    fn default() -> Options {
        Options {
            scale: None,
            seconds: None,
            url: None,
            strict: true,
        }
    }
}

impl Options {
    /// So much of `full`, but some.
    pub(super) fn count(&self, full: usize, least: usize) -> usize {
        let scaled = full as f64 * self.scale.unwrap_or(1.0);
        (scaled.round() as usize).max(least)
    }

    /// The arguments that give these options, but for the server's address.
    pub(super) fn as_args(&self) -> Vec<String> {
        let mut args = Vec::new();
        if let Some(scale) = self.scale {
            args.extend(["--scale".to_owned(), scale.to_string()]);
        }
        if let Some(seconds) = self.seconds {
            args.extend(["--seconds".to_owned(), seconds.to_string()]);
        }
        args
    }

    pub(super) fn time(&self, usual: u64) -> Duration {
        Duration::from_secs(self.seconds.unwrap_or(usual))
    }
}

/// Runs a scenario to its end.
pub(crate) fn run(name: &str, options: &Options) -> Report {
    let mut report = Report::new(name, options.strict);
    process::count_panics();
    let panics = process::panics();
    let begun = std::time::Instant::now();
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build();
    let ended = match runtime {
        Ok(runtime) => runtime.block_on(dispatch(name, options, &mut report)),
        Err(error) => Err(error.into()),
    };
    if let Err(error) = ended {
        report.must(false, format_args!("the scenario could be run: {error}"));
    }
    report.must(process::panics() == panics, "nothing panicked");
    report.figure(
        "took",
        format_args!("{:.1} s", begun.elapsed().as_secs_f64()),
    );
    report
}

async fn dispatch(name: &str, options: &Options, report: &mut Report) -> Result<(), Failure> {
    if options.url.is_some() && !matches!(name, "held" | "storm" | "malformed" | "soak") {
        return Err("this scenario needs settings of its own; run it without --url".into());
    }
    match name {
        "batched" => batched::run(options, report).await,
        "fairness" => fairness::run(options, report).await,
        "faults" => faults::run(report).await,
        "held" => held::run(options, report).await,
        "join" => join::run(options, report).await,
        "malformed" => malformed::run(options, report).await,
        "masks" => masks::run(options, report),
        "overfull" => overfull::run(options, report).await,
        "queued" => queued::run(options, report).await,
        "slow" => slow::run(options, report).await,
        "soak" => soak::run(options, report).await,
        "storm" => storm::run(options, report).await,
        "ttft" => ttft::run(options, report).await,
        other => Err(format!("there is no scenario `{other}`").into()),
    }
}
