//! Formats other than JSON, as grammars in llguidance's dialect of Lark.

mod gbnf;

use llguidance::regex_to_lark;

use crate::GrammarError;

/// Longest grammar or expression, as text.
const LONGEST_BYTES: usize = 256 << 10;
/// Most repetitions of one thing. They are unrolled before anything else.
const MAX_TIMES: usize = 10_000;
/// Deepest nesting of brackets.
const DEEPEST: usize = 64;

/// The grammar of a regular expression.
pub(crate) fn regex(regex: &str) -> Result<String, GrammarError> {
    check("regular expression", regex)?;
    check_repetitions("regular expression", regex)?;
    if regex.is_empty() {
        return Ok("start: \"\"".to_owned());
    }
    Ok(format!("start: /{}/", regex_to_lark(unanchored(regex), "")))
}

/// An expression without anchors around the whole of it, which say what holds anyway.
fn unanchored(regex: &str) -> &str {
    let inner = regex.strip_prefix('^').unwrap_or(regex);
    let inner = match inner.strip_suffix('$') {
        Some(rest) if !ends_in_escape(rest) => rest,
        _ => inner,
    };
    if inner.is_empty() || inner.contains('|') && !is_group(inner) {
        // The anchors may belong to one branch alone.
        return regex;
    }
    inner
}

fn ends_in_escape(text: &str) -> bool {
    let backslashes = text.bytes().rev().take_while(|b| *b == b'\\').count();
    backslashes % 2 == 1
}

/// True where one pair of brackets encloses all of the expression.
fn is_group(regex: &str) -> bool {
    let (mut depth, mut escaped) = (0, false);
    for (place, byte) in regex.bytes().enumerate() {
        match byte {
            _ if escaped => escaped = false,
            b'\\' => escaped = true,
            b'(' => depth += 1,
            b')' => depth -= 1,
            _ => {}
        }
        if depth == 0 {
            return place + 1 == regex.len();
        }
    }
    false
}

/// The grammar of one of several texts.
pub(crate) fn choice(choices: &[String]) -> Result<String, GrammarError> {
    if choices.is_empty() {
        return Err(GrammarError::Grammar {
            what: "choice",
            reason: "there is nothing to choose from".to_owned(),
        });
    }
    check_length("choice", choices.iter().map(String::len).sum())?;
    let literals: Vec<_> = choices.iter().map(|choice| literal(choice)).collect();
    Ok(format!("start: {}", literals.join(" | ")))
}

/// A grammar that is in Lark already.
pub(crate) fn lark(grammar: &str) -> Result<String, GrammarError> {
    check("grammar", grammar)?;
    check_repetitions("grammar", grammar)?;
    Ok(grammar.to_owned())
}

/// The grammar of a grammar in GBNF.
pub(crate) fn gbnf(grammar: &str) -> Result<String, GrammarError> {
    check("grammar", grammar)?;
    gbnf::to_lark(grammar).map_err(|reason| GrammarError::Grammar {
        what: "grammar",
        reason,
    })
}

/// A text in a grammar, quoted.
pub(crate) fn literal(text: &str) -> String {
    // Lark's strings are JSON's, but for the delete character, which they have only escaped.
    let quoted = serde_json::Value::from(text).to_string();
    quoted.replace('\u{7f}', "\\u007f")
}

/// Something that comes a number of times, as an expression. `one` is a name or in brackets.
pub(crate) fn repeated(one: &str, least: usize, most: Option<usize>) -> String {
    match (least, most) {
        (_, Some(0)) => literal(""),
        (0, None) => format!("{one}*"),
        (1, None) => format!("{one}+"),
        (0, Some(1)) => format!("{one}?"),
        (least, None) => format!("{one}{{{least},}}"),
        (least, Some(most)) => format!("{one}{{{least},{most}}}"),
    }
}

fn check_repetitions(what: &'static str, text: &str) -> Result<(), GrammarError> {
    if repeats_too_often(text) {
        return Err(GrammarError::Grammar {
            what,
            reason: format!("it repeats something more than {MAX_TIMES} times"),
        });
    }
    Ok(())
}

/// True for an expression with something like `{5,1000000}`.
pub(crate) fn repeats_too_often(regex: &str) -> bool {
    let is_part = |c: char| c.is_ascii_digit() || matches!(c, ',' | ' ');
    let is_large = |number: &str| number.parse().map_or(true, |n: usize| n > MAX_TIMES);
    let ends = regex.split('{').skip(1);
    ends.filter_map(|rest| rest.split_once('}'))
        .any(|(times, _)| {
            let mut numbers = times.split(',').map(str::trim).filter(|n| !n.is_empty());
            times.chars().all(is_part) && numbers.any(is_large)
        })
}

fn check_length(what: &'static str, bytes: usize) -> Result<(), GrammarError> {
    if bytes > LONGEST_BYTES {
        let most = LONGEST_BYTES;
        return Err(GrammarError::TooLong { what, bytes, most });
    }
    Ok(())
}

/// Checks length and nesting. Parsers go down one level of brackets by calling themselves. Brackets in quotes count too: whoever
/// needs more of them can close some.
fn check(what: &'static str, text: &str) -> Result<(), GrammarError> {
    check_length(what, text.len())?;
    let (mut depth, mut escaped) = (0_usize, false);
    for byte in text.bytes() {
        match byte {
            _ if escaped => escaped = false,
            b'\\' => escaped = true,
            b'(' | b'[' | b'{' => depth += 1,
            b')' | b']' | b'}' => depth = depth.saturating_sub(1),
            _ => {}
        }
        if depth > DEEPEST {
            let most = DEEPEST;
            return Err(GrammarError::TooDeep { what, most });
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn anchors_around_everything_go_and_others_stay() {
        for (regex, inner) in [
            ("^abc$", "abc"),
            ("^(a|b)$", "(a|b)"),
            ("^a|b$", "^a|b$"),
            ("a\\$", "a\\$"),
            ("a\\\\$", "a\\\\"),
            ("abc", "abc"),
        ] {
            assert_eq!(unanchored(regex), inner);
        }
    }

    #[test]
    fn brackets_are_counted_up_to_a_limit() {
        assert!(check("grammar", &"()".repeat(1000)).is_ok());
        assert!(check("grammar", &"\\(".repeat(1000)).is_ok());
        let deep = check("grammar", &"(".repeat(DEEPEST + 1));
        assert!(matches!(deep, Err(GrammarError::TooDeep { .. })));
        let long = check("grammar", &"a".repeat(LONGEST_BYTES + 1));
        assert!(matches!(long, Err(GrammarError::TooLong { .. })));
    }

    #[test]
    fn repetitions_have_a_measure() {
        for fine in [
            "a{3}",
            "a{,10000}",
            "\\x{10FFFF}",
            "{\"minimum\": 100000}",
            "a{5",
            "{,}",
        ] {
            assert!(!repeats_too_often(fine), "{fine}");
        }
        for endless in [
            "a{10001}",
            "(a{2}){5, 99999999999999999999999}",
            "x{3}a{1000000,}",
        ] {
            assert!(repeats_too_often(endless), "{endless}");
        }
    }

    #[test]
    fn literals_are_quoted_for_lark() {
        assert_eq!(literal("a\"\\\n\u{7f}"), r#""a\"\\\n\u007f""#);
    }
}
