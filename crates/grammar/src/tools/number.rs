//! Numbers in arguments.

use serde_json::{Map, Value, json};

use super::value::Writer;
use crate::{GrammarError, path::Path, schema};

/// Largest whole number that every reader of JSON keeps exact, and bound of numbers that have none.
const LARGEST: f64 = ((1_u64 << 53) - 1) as f64;
/// Bound of integers that have none. Ids of 19 digits are common; 64 bits hold this and twice the largest bound.
const LARGEST_INTEGER: f64 = 9.2e18;
/// Smallest step between numbers that is enforced.
const SMALLEST_STEP: f64 = 1e-6;

impl Writer<'_> {
    pub(super) fn number(
        &mut self,
        map: &Map<String, Value>,
        kind: &str,
        path: &Path<'_>,
    ) -> Result<String, GrammarError> {
        const BOUNDS: [&str; 5] = [
            "minimum",
            "exclusiveMinimum",
            "maximum",
            "exclusiveMaximum",
            "multipleOf",
        ];
        let mut number = Map::new();
        for keyword in BOUNDS {
            let Some(bound) = map.get(keyword) else {
                continue;
            };
            let is_usable = match (keyword, bound.as_f64()) {
                ("multipleOf", Some(step)) => (SMALLEST_STEP..=LARGEST).contains(&step),
                (_, Some(bound)) => bound.abs() <= LARGEST,
                // In old drafts `exclusiveMinimum` was a switch.
                (keyword, None) => keyword.starts_with("exclusive") && bound.is_boolean(),
            };
            if is_usable {
                number.insert(keyword.to_owned(), bound.clone());
            } else {
                self.ignore(keyword, path);
            }
        }
        if number.is_empty() {
            let terminal = if kind == "integer" {
                "INTEGER"
            } else {
                "NUMBER"
            };
            return Ok(terminal.to_owned());
        }
        let bound = |keyword: &str| number.get(keyword).and_then(Value::as_f64);
        let (low, high) = (
            bound("minimum").or(bound("exclusiveMinimum")),
            bound("maximum").or(bound("exclusiveMaximum")),
        );
        if let (Some(low), Some(high)) = (low, high)
            && low > high
        {
            return Err(GrammarError::Schema {
                path: format!("{}{path}", self.tool),
                reason: format!("no number is at least {low} and at most {high}"),
            });
        }
        // Digits without end are no number to whoever reads the call.
        let open = if kind == "integer" && bound("multipleOf").is_none() {
            LARGEST_INTEGER
        } else {
            LARGEST
        };
        if low.is_none() {
            let least = high.unwrap_or(0.0).min(0.0) * 2.0 - open;
            number.insert("minimum".to_owned(), json!(least));
        }
        if high.is_none() {
            let most = low.unwrap_or(0.0).max(0.0) * 2.0 + open;
            number.insert("maximum".to_owned(), json!(most));
        }
        number.insert("type".to_owned(), json!(kind));
        let number = schema::with_separators(&Value::Object(number));
        Ok(self.rule(&format!("%json {number}")))
    }
}
