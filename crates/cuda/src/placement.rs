//! Where weights lie: as memory allows, all on the card, or as a file says. The file has a line for each kind of matrices, and the layers
//! whose matrices of that kind lie in host memory; what it does not name lies on the card:
//!
//! ```text
//! # 26B-A4B on a card of 12 GiB
//! tables
//! experts 3,7,11,15-29
//! cpu 60
//! ```
//!
//! The last line says how many of a hundred rows of experts and feed-forward matrices in host memory the CPU multiplies when a few
//! rows are decoded; the card reads the others through the bus. Without it, that follows from measured rates.

use std::{collections::BTreeSet, fmt, str::FromStr};

/// Where weights lie.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum Placement {
    /// On the card as far as there is room, the rest in host memory: what a token reads the smallest share of leaves first.
    #[default]
    Auto,
    /// All on the card, or nowhere.
    Card,
    /// As it is written.
    Given(HostParts),
}

/// A kind of matrices, in the order in which they leave a card that is too small.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum WeightKind {
    /// Of a mixture.
    Experts,
    /// Dense feed-forward matrices.
    FeedForward,
    /// q, k, v and o.
    Attention,
    /// Those of per-layer embeddings.
    PerLayer,
    /// The output matrix.
    Output,
}

impl WeightKind {
    /// All of them, in order.
    pub const ALL: [WeightKind; 5] = [
        WeightKind::Experts,
        WeightKind::FeedForward,
        WeightKind::Attention,
        WeightKind::PerLayer,
        WeightKind::Output,
    ];

    /// As a file has it.
    pub fn name(self) -> &'static str {
        match self {
            WeightKind::Experts => "experts",
            WeightKind::FeedForward => "feed-forward",
            WeightKind::Attention => "attention",
            WeightKind::PerLayer => "per-layer",
            WeightKind::Output => "output",
        }
    }
}

/// What lies in host memory. Written as a file has it.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct HostParts {
    /// Tables that are only looked up.
    pub tables: bool,
    /// Kinds of matrices, and of which layers.
    pub matrices: Vec<(WeightKind, Layers)>,
    /// Of a hundred rows of feed-forward matrices and experts among them, those that the CPU multiplies in small batches; `None` is as
    /// measured rates have it.
    pub cpu: Option<u8>,
}

/// Layers that a line names.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Layers {
    /// Every one, and what belongs to none.
    All,
    /// These.
    Some(BTreeSet<usize>),
}

impl Layers {
    pub(crate) fn have(&self, layer: Option<usize>) -> bool {
        match self {
            Layers::All => true,
            Layers::Some(layers) => layer.is_some_and(|layer| layers.contains(&layer)),
        }
    }
}

/// A line that says nothing of a placement.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("line {line}: {problem}")]
pub struct PlacementError {
    /// From 1.
    pub line: usize,
    /// In words.
    pub problem: String,
}

/// No model has so many layers.
const MAX_LAYERS: usize = 1000;

impl FromStr for HostParts {
    type Err = PlacementError;

    fn from_str(text: &str) -> Result<HostParts, PlacementError> {
        let mut parts = HostParts::default();
        for (i, line) in text.lines().enumerate() {
            let line = line.split('#').next().unwrap_or_default().trim();
            let (name, layers) = match line.split_once(char::is_whitespace) {
                Some((name, layers)) => (name, layers.trim()),
                None => (line, ""),
            };
            let wrong = |problem: String| PlacementError {
                line: i + 1,
                problem,
            };
            let kind = WeightKind::ALL.into_iter().find(|k| k.name() == name);
            match (name, kind) {
                ("", _) => (),
                ("tables", _) if layers.is_empty() => parts.tables = true,
                ("tables", _) => {
                    return Err(wrong(
                        "tables are of all layers together; the line is `tables`".to_owned(),
                    ));
                }
                ("cpu", _) => match layers.parse::<u8>() {
                    Ok(share) if share <= 100 => parts.cpu = Some(share),
                    _ => {
                        return Err(wrong(format!(
                            "`{layers}` is no share of rows; it is 0 to 100, as in `cpu 60`"
                        )));
                    }
                },
                (_, Some(kind)) => {
                    let layers = read_layers(layers).map_err(wrong)?;
                    parts.matrices.push((kind, layers));
                }
                _ => {
                    let known = WeightKind::ALL.map(WeightKind::name).join(", ");
                    return Err(wrong(format!(
                        "`{name}` is no kind of weights; tables, {known} are, and `cpu` for the CPU's share"
                    )));
                }
            }
        }
        Ok(parts)
    }
}

/// Layers such as `3,7,11-29`.
fn read_layers(text: &str) -> Result<Layers, String> {
    if text.is_empty() {
        return Ok(Layers::All);
    }
    let number = |text: &str| {
        let number = text.trim().parse::<usize>().ok();
        number.filter(|n| *n < MAX_LAYERS).ok_or_else(|| {
            format!("`{text}` is no layer; they are counted from 0, as in 3,7,11-29")
        })
    };
    let mut layers = BTreeSet::new();
    for part in text.split(',') {
        let (first, last) = part.split_once('-').unwrap_or((part, part));
        let (first, last) = (number(first)?, number(last)?);
        if last < first {
            return Err(format!("`{}` ends before it begins", part.trim()));
        }
        layers.extend(first..=last);
    }
    Ok(Layers::Some(layers))
}

impl fmt::Display for HostParts {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.tables {
            writeln!(f, "tables")?;
        }
        for (kind, layers) in &self.matrices {
            match layers {
                Layers::All => writeln!(f, "{}", kind.name())?,
                Layers::Some(layers) => writeln!(f, "{} {}", kind.name(), ranges(layers))?,
            }
        }
        if let Some(share) = self.cpu {
            writeln!(f, "cpu {share}")?;
        }
        Ok(())
    }
}

/// Numbers as in `3,7,11-29`.
fn ranges(numbers: &BTreeSet<usize>) -> String {
    let mut ranges: Vec<(usize, usize)> = Vec::new();
    for &number in numbers {
        match ranges.last_mut() {
            Some((_, last)) if *last + 1 == number => *last = number,
            _ => ranges.push((number, number)),
        }
    }
    let ranges = ranges.into_iter().map(|(first, last)| match last - first {
        0 => first.to_string(),
        1 => format!("{first},{last}"),
        _ => format!("{first}-{last}"),
    });
    ranges.collect::<Vec<_>>().join(",")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_placement_is_read_as_it_is_written() {
        let text = "# of a mixture\n\n tables # a few kilobytes per token\nexperts 3,7, 11-13\ncpu 60\nper-layer\n";
        let parts: HostParts = text.parse().unwrap();
        assert_eq!(
            parts.to_string(),
            "tables\nexperts 3,7,11-13\nper-layer\ncpu 60\n"
        );
        assert_eq!(parts.to_string().parse(), Ok(parts));
        assert_eq!("".parse(), Ok(HostParts::default()));
    }

    #[test]
    fn what_is_wrong_with_a_line_is_said_with_its_number() {
        let problem = |text: &str| text.parse::<HostParts>().unwrap_err().to_string();
        assert_eq!(
            problem("tables\nexpert 3"),
            "line 2: `expert` is no kind of weights; tables, experts, feed-forward, attention, per-layer, output are, and `cpu` for the CPU's share"
        );
        assert_eq!(
            problem("cpu 101"),
            "line 1: `101` is no share of rows; it is 0 to 100, as in `cpu 60`"
        );
        assert_eq!(
            problem("experts 3,x"),
            "line 1: `x` is no layer; they are counted from 0, as in 3,7,11-29"
        );
        assert_eq!(
            problem("experts 7-3"),
            "line 1: `7-3` ends before it begins"
        );
        assert_eq!(
            problem("experts 0-4000000000"),
            "line 1: `4000000000` is no layer; they are counted from 0, as in 3,7,11-29"
        );
        assert_eq!(
            problem("tables 3"),
            "line 1: tables are of all layers together; the line is `tables`"
        );
    }
}
