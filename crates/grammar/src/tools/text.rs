//! Strings in arguments. They stand between quote tokens and have no escapes, so patterns apply to them as they are.

use llguidance::regex_to_lark;
use serde_json::{Map, Value};

use super::{count, value::Writer};
use crate::{GrammarError, path::Path, schema};

/// Any text.
const ANYTHING: &str = "(?s:.*)";

impl Writer<'_> {
    pub(super) fn string(
        &mut self,
        map: &Map<String, Value>,
        path: &Path<'_>,
    ) -> Result<String, GrammarError> {
        let mut expressions = Vec::new();
        if let Some(Value::String(pattern)) = map.get("pattern") {
            match whole_match(pattern).filter(|_| schema::is_regex(pattern)) {
                Some(expression) => expressions.push(regex_to_lark(&expression, "dw")),
                None => self.ignore(&format!("pattern: {pattern}"), path),
            }
        }
        if let Some(Value::String(format)) = map.get("format") {
            match format_expression(format) {
                Some(expression) => expressions.push(expression.to_owned()),
                None => self.ignore(&format!("format: {format}"), path),
            }
        }
        let (least, most) = (
            count(map, "minLength").unwrap_or(0),
            count(map, "maxLength"),
        );
        match most {
            Some(most) if most < least => {
                return Err(GrammarError::Schema {
                    path: path.to_string(),
                    reason: "`maxLength` is less than `minLength`".to_owned(),
                });
            }
            Some(most) => expressions.push(format!("(?s:.{{{least},{most}}})")),
            None if least > 0 => expressions.push(format!("(?s:.{{{least},}})")),
            None => {}
        }
        if expressions.is_empty() {
            return Ok("string".to_owned());
        }
        let terminal = self.name('S');
        let quote = self.quote;
        self.lines
            .push(format!("{terminal}: /{}/", expressions.join("/ & /")));
        Ok(self.rule(&format!("<[{quote}]> {terminal} <[{quote}]>")))
    }
}

/// An expression that matches whole texts in which the pattern is found; `None` where anchors stand in unusual places.
fn whole_match(pattern: &str) -> Option<String> {
    let mut branches = Vec::new();
    for branch in branches_of(pattern) {
        let (start, rest) = match branch.strip_prefix('^') {
            Some(rest) => ("", rest),
            None => (ANYTHING, branch),
        };
        let (rest, end) = match rest.strip_suffix('$') {
            Some(inner) if !ends_in_escape(inner) => (inner, ""),
            _ => (rest, ANYTHING),
        };
        if has_anchor(rest) {
            return None;
        }
        branches.push(format!("{start}(?:{rest}){end}"));
    }
    Some(branches.join("|"))
}

fn ends_in_escape(text: &str) -> bool {
    let backslashes = text.bytes().rev().take_while(|b| *b == b'\\').count();
    backslashes % 2 == 1
}

/// Characters of an expression outside of classes that are not escaped, with their places and the depth of groups.
fn structure(pattern: &str) -> impl Iterator<Item = (usize, char, usize)> {
    let (mut depth, mut escaped, mut class) = (0_usize, false, false);
    pattern
        .char_indices()
        .filter_map(move |(place, character)| {
            if std::mem::take(&mut escaped) {
                return None;
            }
            match character {
                '\\' => escaped = true,
                ']' if class => class = false,
                _ if class => {}
                '[' => class = true,
                '(' => depth += 1,
                ')' => depth = depth.saturating_sub(1),
                other => return Some((place, other, depth)),
            }
            None
        })
}

fn branches_of(pattern: &str) -> Vec<&str> {
    let mut branches = Vec::new();
    let mut start = 0;
    for (place, character, depth) in structure(pattern) {
        if character == '|' && depth == 0 {
            branches.push(&pattern[start..place]);
            start = place + 1;
        }
    }
    branches.push(&pattern[start..]);
    branches
}

fn has_anchor(pattern: &str) -> bool {
    structure(pattern).any(|(_, character, _)| matches!(character, '^' | '$'))
}

/// The texts of a format.
fn format_expression(format: &str) -> Option<&'static str> {
    const DATE: &str = "[0-9]{4}-((0[13578]|1[02])-(0[1-9]|[12][0-9]|3[01])|(0[469]|11)-(0[1-9]|[12][0-9]|30)|02-(0[1-9]|1[0-9]|2[0-8]))";
    const TIME: &str = "([01][0-9]|2[0-3]):[0-5][0-9]:[0-5][0-9](\\.[0-9]{1,9})?(Z|[+-]([01][0-9]|2[0-3]):[0-5][0-9])";
    const DATE_TIME: &str = "[0-9]{4}-((0[13578]|1[02])-(0[1-9]|[12][0-9]|3[01])|(0[469]|11)-(0[1-9]|[12][0-9]|30)|02-(0[1-9]|1[0-9]|2[0-8]))T([01][0-9]|2[0-3]):[0-5][0-9]:[0-5][0-9](\\.[0-9]{1,9})?(Z|[+-]([01][0-9]|2[0-3]):[0-5][0-9])";
    match format {
        "date" => Some(DATE),
        "time" => Some(TIME),
        "date-time" => Some(DATE_TIME),
        "uuid" => Some("[0-9a-fA-F]{8}(-[0-9a-fA-F]{4}){3}-[0-9a-fA-F]{12}"),
        "ipv4" => Some(
            "((25[0-5]|2[0-4][0-9]|1[0-9][0-9]|[1-9]?[0-9])\\.){3}(25[0-5]|2[0-4][0-9]|1[0-9][0-9]|[1-9]?[0-9])",
        ),
        "email" => Some(
            "[A-Za-z0-9_+-]{1,32}(\\.[A-Za-z0-9_+-]{1,31})?@[A-Za-z0-9]([A-Za-z0-9-]{0,30}[A-Za-z0-9])?(\\.[A-Za-z]{2,16}){1,3}",
        ),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn patterns_are_found_anywhere_unless_anchored() {
        assert_eq!(whole_match("^ab$").unwrap(), "(?:ab)");
        assert_eq!(whole_match("ab").unwrap(), "(?s:.*)(?:ab)(?s:.*)");
        assert_eq!(whole_match("^a|b$").unwrap(), "(?:a)(?s:.*)|(?s:.*)(?:b)");
        assert_eq!(whole_match("^(a|b)[$|^]$").unwrap(), "(?:(a|b)[$|^])");
        assert_eq!(whole_match("a\\$").unwrap(), "(?s:.*)(?:a\\$)(?s:.*)");
        assert_eq!(whole_match("(^a)b"), None);
    }
}
