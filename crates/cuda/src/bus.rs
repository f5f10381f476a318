//! The rate of the bus to host memory: measured once on a machine, and kept beside the compiled kernels.

use std::{collections::BTreeMap, fs, path::Path};

/// File of the rates, by card.
const FILE: &str = "bus.json";

type Rates = BTreeMap<String, f64>;

/// The rate of a card, in bytes per second: the one that is kept, unless it is to be measured again, else a new one, which is kept.
/// Whatever goes wrong costs a figure in a line for a person.
pub(crate) fn rate(
    folder: &Path,
    card: &str,
    again: bool,
    measure: impl FnOnce() -> Option<f64>,
) -> Option<f64> {
    let file = folder.join(FILE);
    let kept = fs::read_to_string(&file).ok();
    let kept = kept.and_then(|text| serde_json::from_str::<Rates>(&text).ok());
    let mut rates = kept.unwrap_or_default();
    let believable = |rate: &f64| rate.is_finite() && *rate > 0.0;
    if let Some(rate) = rates.get(card).copied().filter(believable)
        && !again
    {
        return Some(rate);
    }
    let measured = measure().filter(believable)?;
    rates.insert(card.to_owned(), measured);
    if let Ok(text) = serde_json::to_string_pretty(&rates) {
        // As a whole or not at all, whoever else writes it.
        let new = folder.join(format!("{FILE}.{}", std::process::id()));
        let _ = fs::create_dir_all(folder);
        let written = fs::write(&new, text).and_then(|()| fs::rename(&new, &file));
        if written.is_err() {
            let _ = fs::remove_file(&new);
        }
    }
    Some(measured)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_rate_is_measured_once_for_each_card_and_again_if_asked() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("kernels");
        let rate =
            |card: &str, again: bool, measured: Option<f64>| rate(&path, card, again, || measured);
        assert_eq!(rate("a", false, None), None);
        assert_eq!(rate("a", false, Some(5e10)), Some(5e10));
        assert_eq!(rate("a", false, Some(1e9)), Some(5e10));
        assert_eq!(rate("b", false, Some(2e10)), Some(2e10));
        assert_eq!(rate("a", true, Some(4e10)), Some(4e10));
        assert_eq!(rate("b", false, None), Some(2e10));
        assert_eq!(fs::read_dir(&path).unwrap().count(), 1);
        // Whatever is in the file.
        for text in ["", "{", "[1]", r#"{"a": -1.0}"#, r#"{"a": "x"}"#] {
            fs::write(path.join(FILE), text).unwrap();
            assert_eq!(rate("a", false, Some(3e10)), Some(3e10), "{text}");
        }
        // A folder that cannot be.
        let file = path.join(FILE);
        assert_eq!(super::rate(&file, "a", false, || Some(1e10)), Some(1e10));
    }
}
