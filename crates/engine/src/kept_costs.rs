//! Measured costs in a file, so that later starts on the same device need not measure again, and choose alike.

use std::{
    fmt::Write as _,
    fs, io,
    path::{Path, PathBuf},
    str::FromStr,
    time::Duration,
};

use crate::core::StepCosts;

/// First line of a file; counts up when what follows means something else.
const HEAD: &str = "carat step costs 1";
/// Last line: what lacks it was cut short.
const END: &str = "end";

/// A place for costs between runs.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct KeptCosts {
    /// Made if it is not there.
    pub folder: PathBuf,
    /// Everything that costs depend on besides the engine's own limits: device, kernels, model, drafter.
    pub holds_for: String,
}

impl KeptCosts {
    /// The file of these facts, with what the engine adds to them.
    fn path(&self, limits: &str) -> PathBuf {
        let mut hasher = blake3::Hasher::new_derive_key("carat step costs");
        for part in [self.holds_for.as_str(), limits] {
            // With its length, so that no two pairs of parts are the same bytes.
            hasher.update(&(part.len() as u64).to_le_bytes());
            hasher.update(part.as_bytes());
        }
        let digest = hasher.finalize().to_hex();
        self.folder.join(format!("costs-{}.txt", &digest[..24]))
    }

    /// Costs that an earlier start has left; `None` if there are none, or a file is no such.
    pub(crate) fn read(&self, limits: &str) -> Option<StepCosts> {
        let path = self.path(limits);
        let text = fs::read_to_string(&path).ok()?;
        let costs = parse(&text);
        if costs.is_none() {
            tracing::warn!(path = %path.display(), "kept costs are damaged; they are measured again");
        }
        costs
    }

    /// Keeps costs. Whoever reads sees all of them or none.
    pub(crate) fn write(&self, limits: &str, costs: &StepCosts) {
        let path = self.path(limits);
        if let Err(problem) = replace(&self.folder, &path, &listed(costs)) {
            // Measured again next time, not wrong.
            tracing::warn!(path = %path.display(), %problem, "measured costs are not kept");
        }
    }
}

fn replace(folder: &Path, path: &Path, text: &str) -> io::Result<()> {
    fs::create_dir_all(folder)?;
    // The process id keeps writers apart.
    let part = path.with_extension(format!("{}.part", std::process::id()));
    fs::write(&part, text)?;
    fs::rename(&part, path)
}

fn listed(costs: &StepCosts) -> String {
    let mut text = format!("{HEAD}\n");
    for (name, table) in [("target", &costs.target), ("drafter", &costs.drafter)] {
        for (rows, time) in table {
            writeln!(text, "{name} {rows} {}", time.as_nanos()).expect("strings take all writes");
        }
    }
    text + END + "\n"
}

fn parse(text: &str) -> Option<StepCosts> {
    let mut lines = text.lines();
    let mut costs = StepCosts {
        target: Vec::new(),
        drafter: Vec::new(),
    };
    if lines.next()? != HEAD || lines.next_back()? != END {
        return None;
    }
    for line in lines {
        let mut words = line.split(' ');
        let table = match words.next()? {
            "target" => &mut costs.target,
            "drafter" => &mut costs.drafter,
            _ => return None,
        };
        let rows = usize::from_str(words.next()?).ok()?;
        let time = Duration::from_nanos(u64::from_str(words.next()?).ok()?);
        let follows = table.last().is_none_or(|(last, _)| *last < rows);
        if !follows || rows == 0 || time.is_zero() || words.next().is_some() {
            return None;
        }
        table.push((rows, time));
    }
    (!costs.target.is_empty()).then_some(costs)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn costs() -> StepCosts {
        let micros = |rows, time| (rows, Duration::from_micros(time));
        StepCosts {
            target: vec![micros(1, 900), micros(8, 1100)],
            drafter: vec![micros(1, 80)],
        }
    }

    #[test]
    fn costs_come_back_for_the_same_facts_alone() {
        let folder = tempfile::tempdir().unwrap();
        let kept = |holds_for: &str| KeptCosts {
            folder: folder.path().join("deeper"),
            holds_for: holds_for.to_owned(),
        };
        let one = kept("a card");
        assert_eq!(one.read("8 rows"), None);
        one.write("8 rows", &costs());
        assert_eq!(one.read("8 rows"), Some(costs()));
        assert_eq!(one.read("9 rows"), None);
        assert_eq!(kept("another card").read("8 rows"), None);
    }

    #[test]
    fn what_is_damaged_is_not_taken() {
        let whole = listed(&costs());
        assert_eq!(parse(&whole), Some(costs()));
        for end in 0..whole.len() - 1 {
            assert_eq!(parse(&whole[..end]), None, "cut at {end}");
        }
        for (from, to) in [
            ("step costs 1", "step costs 2"),
            ("target 8", "target 1"),
            ("target 1 ", "target one "),
            ("drafter", "drifter"),
            ("80000", "0"),
            ("80000", "80000 7"),
        ] {
            assert_eq!(parse(&whole.replacen(from, to, 1)), None, "{to}");
        }
        assert_eq!(parse(&format!("{HEAD}\n{END}\n")), None, "nothing in it");
    }
}
