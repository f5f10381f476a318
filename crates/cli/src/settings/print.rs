//! Every setting, with its value and where that comes from: what `--print-config` prints. The text is a settings file itself.

use std::fmt::Write as _;

use anyhow::Result;
use carat_model::sampling::Sampling;
use toml::{Table, Value};

use super::{Settings, file::Layer};

/// Column of the origins, behind most values.
const ORIGIN_COLUMN: usize = 40;

/// Settings that are no table, and what holds where they are not set.
const DEFAULTS: [(&str, &str); 20] = [
    ("model", "the demo model that ships inside the program"),
    ("offline", "false"),
    ("backend", "an NVIDIA card if there is one, else the CPU"),
    ("device", "0"),
    ("vram", "all device memory that is free"),
    ("ram", "all memory of the machine that is free"),
    (
        "place",
        "\"auto\": weights are on the card as far as there is room",
    ),
    ("tier", "\"best\""),
    ("kernels", "none; kernels are compiled when they are needed"),
    ("threads", "all cores that this process may use"),
    ("isa", "the best that the processor has"),
    ("kv_type", "\"f16\""),
    ("invariant", "false"),
    ("repack", "nothing is kept unpacked"),
    ("draft", "\"auto\""),
    ("draft_max", "7"),
    (
        "context",
        "as many tokens as the model knows and memory allows",
    ),
    (
        "max_tokens",
        "-1: until the model stops or the context is full",
    ),
    ("system", "none"),
    ("think", "false"),
];

impl Settings {
    /// The settings as a file, a line each, with the last of the layers that sets it.
    pub(crate) fn with_origins(&self, layers: &[Layer]) -> Result<String> {
        let all = self.table()?;
        let origins = layers
            .iter()
            .map(|layer| Ok((layer.origin.as_str(), layer.settings.table()?)))
            .collect::<Result<Vec<_>>>()?;
        let mut text = String::new();
        let top = |table: &Table| table.clone();
        for (key, default) in DEFAULTS {
            line(&mut text, key, default, &all, &origin(&origins, key, top));
        }
        text += "\n[sampling]\n";
        let sampling = |table: &Table| match table.get("sampling") {
            Some(Value::Table(table)) => table.clone(),
            _ => Table::new(),
        };
        let all = sampling(&all);
        for (key, default) in sampling_defaults() {
            let origin = origin(&origins, key, sampling);
            line(&mut text, key, &default, &all, &origin);
        }
        Ok(text)
    }
}

/// The last layer that has the key.
fn origin(layers: &[(&str, Table)], key: &str, part: impl Fn(&Table) -> Table) -> String {
    let last = layers
        .iter()
        .rfind(|(_, table)| part(table).contains_key(key));
    last.map_or(String::new(), |(origin, _)| (*origin).to_owned())
}

fn line(text: &mut String, key: &str, default: &str, values: &Table, origin: &str) {
    let (setting, origin) = match values.get(key) {
        Some(value) => (format!("{key} = {value}"), origin.to_owned()),
        None => (format!("# {key}"), format!("default: {default}")),
    };
    let _ = writeln!(text, "{setting:<ORIGIN_COLUMN$} # {origin}");
}

fn sampling_defaults() -> Vec<(&'static str, String)> {
    let gemma = Sampling::default();
    let of_model = |value: &dyn std::fmt::Display| format!("the model's own, else {value}");
    vec![
        ("temperature", of_model(&gemma.temperature)),
        ("top_k", of_model(&gemma.top_k)),
        ("top_p", of_model(&gemma.top_p)),
        ("min_p", of_model(&gemma.min_p)),
        ("repeat_penalty", gemma.repeat_penalty.to_string()),
        ("presence_penalty", gemma.presence_penalty.to_string()),
        ("frequency_penalty", gemma.frequency_penalty.to_string()),
        ("penalty_window", gemma.penalty_window.to_string()),
        ("seed", "another each time".to_owned()),
        ("logit_bias", "none".to_owned()),
    ]
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::settings::file::merged;

    /// Names that a table's reader says it knows.
    fn known(text: &str) -> Vec<String> {
        let error = toml::from_str::<Settings>(text).unwrap_err();
        let (_, names) = error.message().split_once("expected one of ").unwrap();
        let names = names.split(", ").map(|name| name.trim_matches('`'));
        names.map(str::to_owned).collect()
    }

    #[test]
    fn no_setting_is_left_out() {
        let mut listed: Vec<String> = DEFAULTS.iter().map(|(key, _)| (*key).to_owned()).collect();
        listed.extend(["sampling".to_owned(), "models".to_owned()]);
        let mut expected = known("none = 1");
        listed.sort();
        expected.sort();
        assert_eq!(listed, expected);
        let listed: Vec<String> = sampling_defaults()
            .iter()
            .map(|(key, _)| (*key).to_owned())
            .collect();
        let mut expected = known("[sampling]\nnone = 1");
        expected.sort();
        let mut sorted = listed;
        sorted.sort();
        assert_eq!(sorted, expected);
    }

    #[test]
    fn each_value_names_its_source_and_the_text_reads_back() {
        let layer = |origin: &str, text: &str| Layer {
            origin: origin.to_owned(),
            settings: toml::from_str(text).unwrap(),
        };
        let layers = [
            layer(
                "a.toml",
                "threads = 2\ncontext = 64\n[sampling]\ntop_p = 0.7",
            ),
            layer("flag", "context = 128\n[sampling]\ntop_k = 5"),
        ];
        let settings = merged(&layers).unwrap();
        let text = settings.with_origins(&layers).unwrap();
        let line = |start: &str| {
            let line = text.lines().find(|line| line.starts_with(start));
            line.unwrap_or_else(|| panic!("{start}: {text}")).to_owned()
        };
        assert!(line("threads = 2 ").ends_with("# a.toml"));
        assert!(line("context = 128 ").ends_with("# flag"));
        assert!(line("top_p = 0.7 ").ends_with("# a.toml"));
        assert!(line("top_k = 5 ").ends_with("# flag"));
        assert!(line("# tier ").contains("default"));
        assert_eq!(toml::from_str::<Settings>(&text).unwrap(), settings);
    }
}
