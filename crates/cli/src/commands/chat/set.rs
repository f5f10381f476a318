//! `/set`: settings of the answers to come, by the names of the flags.

use carat::fresh_seed;
use carat_engine::chat::Generation;

use crate::{
    answer::LineBreaks,
    args::{MaxTokens, Seed, max_tokens, seed, top_k},
};

/// A setting that can be changed between answers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Setting {
    Temperature,
    TopK,
    TopP,
    MinP,
    RepeatPenalty,
    PresencePenalty,
    FrequencyPenalty,
    PenaltyWindow,
    Seed,
    MaxTokens,
    Wrap,
}

impl Setting {
    pub(super) const ALL: [Setting; 11] = [
        Setting::Temperature,
        Setting::TopK,
        Setting::TopP,
        Setting::MinP,
        Setting::RepeatPenalty,
        Setting::PresencePenalty,
        Setting::FrequencyPenalty,
        Setting::PenaltyWindow,
        Setting::Seed,
        Setting::MaxTokens,
        Setting::Wrap,
    ];

    pub(super) fn name(self) -> &'static str {
        match self {
            Setting::Temperature => "temperature",
            Setting::TopK => "top-k",
            Setting::TopP => "top-p",
            Setting::MinP => "min-p",
            Setting::RepeatPenalty => "repeat-penalty",
            Setting::PresencePenalty => "presence-penalty",
            Setting::FrequencyPenalty => "frequency-penalty",
            Setting::PenaltyWindow => "penalty-window",
            Setting::Seed => "seed",
            Setting::MaxTokens => "max-tokens",
            Setting::Wrap => "wrap",
        }
    }

    /// The setting of a name, with `_` for `-` and `temp` as the flag has it; an error lists the names.
    pub(super) fn named(name: &str) -> Result<Setting, String> {
        let wanted = match name.replace('_', "-") {
            short if short == "temp" => "temperature".to_owned(),
            other => other,
        };
        let found = Setting::ALL.into_iter().find(|s| s.name() == wanted);
        found.ok_or_else(|| {
            let names: Vec<&str> = Setting::ALL.iter().map(|s| s.name()).collect();
            format!("`{name}` is no setting; there are {}", names.join(", "))
        })
    }

    /// Changes it, or says what is wrong with the value and leaves everything as it is.
    pub(super) fn change(
        self,
        value: &str,
        generation: &mut Generation,
        breaks: &mut LineBreaks,
    ) -> Result<(), String> {
        let mut changed = generation.clone();
        let sampling = &mut changed.sampling;
        let number = || {
            value
                .parse::<f32>()
                .map_err(|_| "a number is expected".to_owned())
        };
        let changed_value = match self {
            Setting::Temperature => number().map(|x| sampling.temperature = x),
            Setting::TopK => top_k(value).map(|x| sampling.top_k = x),
            Setting::TopP => number().map(|x| sampling.top_p = x),
            Setting::MinP => number().map(|x| sampling.min_p = x),
            Setting::RepeatPenalty => number().map(|x| sampling.repeat_penalty = x),
            Setting::PresencePenalty => number().map(|x| sampling.presence_penalty = x),
            Setting::FrequencyPenalty => number().map(|x| sampling.frequency_penalty = x),
            Setting::PenaltyWindow => value
                .parse()
                .map(|x| sampling.penalty_window = x)
                .map_err(|_| "a number of tokens is expected".to_owned()),
            Setting::Seed => {
                seed(value).map(|Seed(x)| sampling.seed = x.unwrap_or_else(fresh_seed))
            }
            Setting::MaxTokens => max_tokens(value).map(|MaxTokens(x)| changed.max_tokens = x),
            Setting::Wrap => match value {
                "on" => Ok(LineBreaks::AtWords),
                "off" => Ok(LineBreaks::Unchanged),
                _ => Err("on or off is expected".to_owned()),
            }
            .map(|x| *breaks = x),
        };
        changed_value.map_err(|problem| format!("`{value}` for {}: {problem}", self.name()))?;
        if let Some(complaint) = changed.sampling.complaint() {
            return Err(complaint);
        }
        *generation = changed;
        Ok(())
    }

    /// Its value, as it is typed.
    pub(super) fn value(self, generation: &Generation, breaks: LineBreaks) -> String {
        let sampling = &generation.sampling;
        match self {
            Setting::Temperature => sampling.temperature.to_string(),
            Setting::TopK => sampling.top_k.to_string(),
            Setting::TopP => sampling.top_p.to_string(),
            Setting::MinP => sampling.min_p.to_string(),
            Setting::RepeatPenalty => sampling.repeat_penalty.to_string(),
            Setting::PresencePenalty => sampling.presence_penalty.to_string(),
            Setting::FrequencyPenalty => sampling.frequency_penalty.to_string(),
            Setting::PenaltyWindow => sampling.penalty_window.to_string(),
            Setting::Seed => sampling.seed.to_string(),
            Setting::MaxTokens => generation
                .max_tokens
                .map_or_else(|| "-1".to_owned(), |n| n.to_string()),
            Setting::Wrap => match breaks {
                LineBreaks::AtWords => "on".to_owned(),
                LineBreaks::Unchanged => "off".to_owned(),
            },
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_shown_can_be_typed_again() {
        let mut generation = Generation::default();
        let mut breaks = LineBreaks::AtWords;
        for setting in Setting::ALL {
            let shown = setting.value(&generation, breaks);
            let result = setting.change(&shown, &mut generation, &mut breaks);
            assert_eq!(result, Ok(()), "{}", setting.name());
            assert_eq!(setting.value(&generation, breaks), shown);
            assert_eq!(Setting::named(setting.name()), Ok(setting));
        }
    }

    #[test]
    fn a_value_changes_its_setting_and_no_other() {
        let mut generation = Generation::default();
        let mut breaks = LineBreaks::AtWords;
        for (setting, value) in [
            (Setting::Temperature, "0.25"),
            (Setting::TopK, "7"),
            (Setting::TopP, "0.5"),
            (Setting::MinP, "0.125"),
            (Setting::RepeatPenalty, "1.5"),
            (Setting::PresencePenalty, "0.75"),
            (Setting::FrequencyPenalty, "-0.5"),
            (Setting::PenaltyWindow, "9"),
            (Setting::Seed, "11"),
            (Setting::MaxTokens, "13"),
            (Setting::Wrap, "off"),
        ] {
            let values = |generation: &Generation, breaks| {
                Setting::ALL.map(|setting| setting.value(generation, breaks))
            };
            let before = values(&generation, breaks);
            setting.change(value, &mut generation, &mut breaks).unwrap();
            let after = values(&generation, breaks);
            assert_eq!(setting.value(&generation, breaks), value);
            let differing = before.iter().zip(&after).filter(|(a, b)| a != b).count();
            assert_eq!(differing, 1, "{}", setting.name());
        }
    }

    #[test]
    fn a_wrong_value_is_named_and_changes_nothing() {
        let mut generation = Generation::default();
        let mut breaks = LineBreaks::AtWords;
        for (setting, value, word) in [
            (Setting::Temperature, "hot", "`hot`"),
            (Setting::Temperature, "-1", "0 or more"),
            (Setting::TopP, "1.5", "at most 1"),
            (Setting::MaxTokens, "0", "-1 for no limit"),
            (Setting::Wrap, "soup", "on or off"),
        ] {
            let told = setting.change(value, &mut generation, &mut breaks);
            assert!(told.clone().is_err_and(|t| t.contains(word)), "{told:?}");
        }
        assert_eq!(generation.sampling, Generation::default().sampling);
    }
}
