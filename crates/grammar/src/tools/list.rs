//! Lists in arguments.

use serde_json::{Map, Value};

use super::{count, value::Writer};
use crate::{GrammarError, formats::repeated, path::Path};

impl Writer<'_> {
    pub(super) fn list(
        &mut self,
        map: &Map<String, Value>,
        path: &Path<'_>,
        depth: usize,
    ) -> Result<String, GrammarError> {
        let least = count(map, "minItems").unwrap_or(0);
        let most = count(map, "maxItems");
        if most.is_some_and(|most| most < least) {
            return Err(GrammarError::Schema {
                path: format!("{}{path}", self.tool),
                reason: "`maxItems` is less than `minItems`".to_owned(),
            });
        }
        // Before 2020, `items` was a list too.
        let (firsts, rest) = match (map.get("prefixItems"), map.get("items")) {
            (Some(Value::Array(firsts)), rest) => (firsts.as_slice(), rest),
            (_, Some(Value::Array(firsts))) => (firsts.as_slice(), map.get("additionalItems")),
            (_, rest) => (&[][..], rest),
        };
        let place = path.key(if map.contains_key("prefixItems") {
            "prefixItems"
        } else {
            "items"
        });
        let mut values = Vec::new();
        for (index, first) in firsts.iter().enumerate().take(most.unwrap_or(usize::MAX)) {
            values.push(self.value(first, &place.index(index), depth + 1)?);
        }
        let rest = match rest {
            Some(Value::Bool(false)) => None,
            Some(schema) => Some(self.value(schema, &path.key("items"), depth + 1)?),
            None => Some(Writer::open()),
        };
        let body = items(&values, rest.as_deref(), least, most);
        Ok(self.rule(&format!("\"[\" {body} \"]\"")))
    }
}

/// The items of a list, with commas: the first ones each of its own kind, then any number of one kind.
fn items(firsts: &[String], rest: Option<&str>, least: usize, most: Option<usize>) -> String {
    let room = most.map(|most| most.saturating_sub(firsts.len()));
    let needed = least.saturating_sub(firsts.len());
    let mut body = match rest.filter(|_| room != Some(0)) {
        // A comma stands before each but the very first of the list.
        Some(rest) if firsts.is_empty() => {
            let more = format!("(\",\" {rest})");
            let more = repeated(&more, needed.saturating_sub(1), room.map(|room| room - 1));
            let all = format!("{rest} {more}");
            return if needed == 0 {
                format!("({all})?")
            } else {
                all
            };
        }
        Some(rest) => repeated(&format!("(\",\" {rest})"), needed, room),
        None => String::new(),
    };
    for (index, first) in firsts.iter().enumerate().rev() {
        let comma = if index == 0 { "" } else { "\",\" " };
        body = format!("{comma}{first} {body}");
        if least <= index {
            body = format!("({body})?");
        }
    }
    body
}
