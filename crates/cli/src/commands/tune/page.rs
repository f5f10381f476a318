//! What was measured, as people read it, and as programs do.

use carat_cuda::{Alternative, Alternatives, Choice, ChoiceInForce};
use serde::Serialize;

use super::verdict::Figure;

/// One value of a choice, measured or not.
#[derive(Clone, Debug, Serialize)]
pub(super) struct Candidate {
    #[serde(serialize_with = "text")]
    pub(super) value: Alternative,
    /// Of each test; none where it was not measured.
    pub(super) tokens_per_second: Vec<Figure>,
    /// Beside what the model of the card says, as a share of its speed.
    pub(super) gain: Option<Figure>,
    pub(super) taken: bool,
    /// Reason that it was not measured, or what else there is to say.
    pub(super) note: Option<String>,
}

/// A choice, and what was measured of it.
#[derive(Clone, Debug, Serialize)]
pub(super) struct Section {
    #[serde(serialize_with = "text")]
    pub(super) choice: Choice,
    pub(super) subject: &'static str,
    pub(super) tests: Vec<String>,
    /// The model's of the card first.
    pub(super) candidates: Vec<Candidate>,
}

/// All of a run.
#[derive(Debug, Serialize)]
pub(super) struct Report {
    pub(super) model: String,
    pub(super) card: String,
    pub(super) choices: Vec<Section>,
    /// Values that won, by choice; the model of the card has the others.
    #[serde(serialize_with = "by_choice")]
    pub(super) taken: Alternatives,
    /// The file that they are kept in.
    pub(super) kept_in: Option<String>,
}

fn text<T: ToString, S: serde::Serializer>(value: &T, serializer: S) -> Result<S::Ok, S::Error> {
    serializer.serialize_str(&value.to_string())
}

fn by_choice<S: serde::Serializer>(values: &Alternatives, to: S) -> Result<S::Ok, S::Error> {
    to.collect_map((values.iter()).map(|v| (v.choice().name(), v.to_string())))
}

/// Such as `prepared-from 5, gemv-stages 2`.
pub(super) fn listed(values: Alternatives) -> String {
    let each = values.iter().map(|v| format!("{} {v}", v.choice()));
    each.collect::<Vec<_>>().join(", ")
}

/// The table of a choice.
pub(super) fn markdown(section: &Section) -> String {
    let mut out = format!("{}: {}\n\n| value |", section.choice, section.subject);
    for test in &section.tests {
        out += &format!(" {test} t/s |");
    }
    out += " gain | |\n| ---: |";
    out += &" ---: |".repeat(section.tests.len() + 1);
    out += " --- |\n";
    for candidate in &section.candidates {
        out += &format!("| {} |", candidate.value);
        for i in 0..section.tests.len() {
            match candidate.tokens_per_second.get(i) {
                Some(speed) => out += &format!(" {:.2} ± {:.2} |", speed.median, speed.spread),
                None => out += " |",
            }
        }
        let percent =
            |gain: Figure| format!("{:+.1} % ± {:.1}", 100.0 * gain.median, 100.0 * gain.spread);
        let gain = candidate.gain.map(percent).unwrap_or_default();
        let note = candidate.note.as_deref().unwrap_or_default();
        let note = if candidate.taken { "taken" } else { note };
        out += &format!(" {gain} | {note} |\n");
    }
    out
}

/// Choices in force, and where each comes from.
pub(in crate::commands) fn in_force(choices: &[ChoiceInForce]) -> String {
    let mut out = String::new();
    for c in choices {
        let beside = if c.value == c.by_model {
            String::new()
        } else {
            format!(", where the model of the card has {}", c.by_model)
        };
        out += &format!(
            "  {:<13} {:<5} {}{beside}: {}\n",
            c.choice,
            c.value,
            c.origin,
            c.choice.subject()
        );
    }
    out
}

#[cfg(test)]
mod tests {
    use carat_cuda::ChoiceOrigin;
    use expect_test::expect;

    use super::*;

    fn figure(median: f64) -> Figure {
        Figure {
            median,
            spread: median.abs() / 100.0,
        }
    }

    #[test]
    fn a_table_has_a_line_for_each_value_whether_it_was_measured_or_not() {
        let measured = |rows, speed: f64, gain| Candidate {
            value: Alternative::PreparedFrom(rows),
            tokens_per_second: vec![figure(speed), figure(2.0 * speed)],
            gain,
            taken: false,
            note: None,
        };
        let section = Section {
            choice: Choice::PreparedFrom,
            subject: Choice::PreparedFrom.subject(),
            tests: vec!["tg32 x2".to_owned(), "tg32 x4".to_owned()],
            candidates: vec![
                Candidate {
                    note: Some("model of the card".to_owned()),
                    ..measured(3, 800.0, None)
                },
                Candidate {
                    taken: true,
                    ..measured(2, 820.0, Some(figure(0.025)))
                },
                Candidate {
                    tokens_per_second: Vec::new(),
                    note: Some("the same launches as 3".to_owned()),
                    ..measured(5, 0.0, None)
                },
            ],
        };
        expect![[r"
            prepared-from: rows from which on a launch of its own prepares inputs

            | value | tg32 x2 t/s | tg32 x4 t/s | gain | |
            | ---: | ---: | ---: | ---: | --- |
            | 3 | 800.00 ± 8.00 | 1600.00 ± 16.00 |  | model of the card |
            | 2 | 820.00 ± 8.20 | 1640.00 ± 16.40 | +2.5 % ± 0.0 | taken |
            | 5 | | |  | the same launches as 3 |
        "]]
        .assert_eq(&markdown(&section));
        let json = serde_json::to_value(&section).unwrap();
        assert_eq!(json["choice"], "prepared-from");
        assert_eq!(json["candidates"][1]["value"], "2");
    }

    #[test]
    fn choices_in_force_are_listed_with_their_origin() {
        let made = |value: Alternative, by_model, origin| ChoiceInForce {
            choice: value.choice(),
            value,
            by_model,
            origin,
        };
        let tuned = Alternative::PreparedFrom(5);
        let usual = Alternative::GemvStages(3);
        let choices = [
            made(tuned, Alternative::PreparedFrom(3), ChoiceOrigin::Tuned),
            made(usual, usual, ChoiceOrigin::ModelOfCard),
        ];
        expect![[r"
            in force:
              prepared-from 5     tuned, where the model of the card has 3: rows from which on a launch of its own prepares inputs
              gemv-stages   3     model of the card: stages of a warp's ring, up to 8 rows
        "]]
        .assert_eq(&format!("in force:\n{}", in_force(&choices)));
    }
}
