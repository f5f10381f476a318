//! Start of a repetition: at once, or when another program says so.
//!
//! Speeds of two programs compare only where they take turns, since a machine's clock and its other work change within
//! seconds. With `--paced` a loaded and warm `bench` says that it waits, runs one repetition for each line of standard input,
//! and tells its time. The memory read rate is measured anew before each, so that a percentage of it has the same clock.

use std::io::BufRead;

use anyhow::Result;
use carat::Loaded;
use carat_model::cost::Roofline;
use serde_json::json;

use crate::{
    args::{BenchArgs, BenchFormat},
    misuse::misuse,
    terminal::say,
};

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Pace {
    Free,
    Told,
}

impl Pace {
    pub(super) fn new(args: &BenchArgs) -> Result<Pace> {
        if args.paced && args.output != BenchFormat::Json {
            misuse!("--paced is for a program that reads its output: it needs -o json");
        }
        Ok(if args.paced { Pace::Told } else { Pace::Free })
    }

    /// Waits until a repetition may begin. None when there are to be no more.
    pub(super) fn turn(self, loaded: &Loaded, test: &str) -> Result<Option<Turn>> {
        if self == Pace::Free {
            return Ok(Some(Turn::Free));
        }
        say(json!({ "waiting": test }))?;
        let mut line = String::new();
        if std::io::stdin().lock().read_line(&mut line)? == 0 {
            return Ok(None);
        }
        Ok(Some(Turn::Told(loaded.backend.roofline()?)))
    }
}

/// Leave to run one repetition.
pub(super) enum Turn {
    Free,
    Told(Option<Roofline>),
}

impl Turn {
    pub(super) fn end(self, test: &str, seconds: f64) -> Result<()> {
        match self {
            Turn::Free => Ok(()),
            Turn::Told(roofline) => say(json!({
                "turn": test,
                "seconds": seconds,
                "measured_read_bytes_per_second": roofline.map(|roofline| roofline.read_bytes_per_second),
            })),
        }
    }
}
