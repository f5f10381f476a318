//! The notation of GBNF: `name ::= "text" [class] other-name ( … | … )* {2,3}`, one rule per line or group of lines.

use std::{iter::Peekable, str::CharIndices};

use crate::formats::MAX_TIMES;

/// An expression.
#[derive(Debug, PartialEq)]
pub(super) enum Node {
    Literal(String),
    /// One character, as a regular expression.
    Class(String),
    Reference(String),
    Sequence(Vec<Node>),
    Choice(Vec<Node>),
    Repeat(Box<Node>, Times),
}

impl Node {
    /// Visits the names of all rules it needs.
    pub(super) fn each_reference(&self, visit: &mut impl FnMut(&str)) {
        match self {
            Node::Reference(name) => visit(name),
            Node::Sequence(nodes) | Node::Choice(nodes) => {
                for node in nodes {
                    node.each_reference(visit);
                }
            }
            Node::Repeat(node, _) => node.each_reference(visit),
            Node::Literal(_) | Node::Class(_) => {}
        }
    }
}

/// Repetitions, at least and at most.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Times {
    pub(super) least: usize,
    pub(super) most: Option<usize>,
}

/// All rules, in order.
pub(super) fn read(text: &str) -> Result<Vec<(String, Node)>, String> {
    let mut reader = Reader {
        text,
        rest: text.char_indices().peekable(),
    };
    let mut rules: Vec<(String, Node)> = Vec::new();
    let mut names = std::collections::HashSet::new();
    reader.skip(Lines::Cross);
    while reader.peek().is_some() {
        let name = reader.name().ok_or_else(|| reader.expected("a rule"))?;
        reader.skip(Lines::Cross);
        for character in "::=".chars() {
            if !reader.take(character) {
                return Err(reader.expected("`::=`"));
            }
        }
        reader.skip(Lines::Cross);
        let body = reader.choice(Lines::Stay)?;
        if !matches!(reader.peek(), None | Some('\n' | '\r')) {
            return Err(reader.expected("the end of the rule"));
        }
        if !names.insert(name.clone()) {
            return Err(format!("the rule `{name}` is there twice"));
        }
        rules.push((name, body));
        reader.skip(Lines::Cross);
    }
    Ok(rules)
}

/// Reach of white space.
#[derive(Clone, Copy, PartialEq)]
enum Lines {
    Cross,
    Stay,
}

struct Reader<'a> {
    text: &'a str,
    rest: Peekable<CharIndices<'a>>,
}

impl Reader<'_> {
    fn peek(&mut self) -> Option<char> {
        self.rest.peek().map(|(_, character)| *character)
    }

    fn next(&mut self) -> Option<char> {
        self.rest.next().map(|(_, character)| character)
    }

    fn take(&mut self, character: char) -> bool {
        self.rest.next_if(|(_, next)| *next == character).is_some()
    }

    fn expected(&mut self, what: &str) -> String {
        let at = self.rest.peek().map_or(self.text.len(), |(at, _)| *at);
        let line = self.text[..at].matches('\n').count() + 1;
        let found: String = self.text[at..].chars().take(20).collect();
        let found = found.lines().next().unwrap_or_default();
        format!("line {line}: expected {what}, found `{found}`")
    }

    /// Passes over white space and comments.
    fn skip(&mut self, lines: Lines) {
        loop {
            match self.peek() {
                Some(' ' | '\t') => {}
                Some('\n' | '\r') if lines == Lines::Cross => {}
                Some('#') => {
                    while self.peek().is_some_and(|c| c != '\n') {
                        self.next();
                    }
                    continue;
                }
                _ => return,
            }
            self.next();
        }
    }

    fn name(&mut self) -> Option<String> {
        let mut name = String::new();
        while let Some((_, character)) = self
            .rest
            .next_if(|(_, c)| c.is_ascii_alphanumeric() || matches!(c, '-' | '_'))
        {
            name.push(character);
        }
        (!name.is_empty()).then_some(name)
    }

    /// Passes over the end of a line if the next one goes on with a `|`.
    fn takes_bar(&mut self, lines: Lines) -> bool {
        self.skip(lines);
        let mut ahead = self.rest.clone();
        if lines == Lines::Stay {
            while ahead.next_if(|(_, c)| c.is_whitespace()).is_some() {}
        }
        if ahead.next().is_some_and(|(_, c)| c == '|') {
            self.rest = ahead;
            return true;
        }
        false
    }

    fn choice(&mut self, lines: Lines) -> Result<Node, String> {
        let mut branches = vec![self.sequence(lines)?];
        while self.takes_bar(lines) {
            self.skip(Lines::Cross);
            branches.push(self.sequence(lines)?);
        }
        Ok(one_or(branches, Node::Choice))
    }

    fn sequence(&mut self, lines: Lines) -> Result<Node, String> {
        let mut nodes = Vec::new();
        loop {
            self.skip(lines);
            let node = match self.peek() {
                Some('"') => self.literal()?,
                Some('[') => self.class()?,
                Some('.') => {
                    self.next();
                    Node::Class("(?s:.)".to_owned())
                }
                Some('(') => {
                    self.next();
                    self.skip(Lines::Cross);
                    let inner = self.choice(Lines::Cross)?;
                    if !self.take(')') {
                        return Err(self.expected("`)`"));
                    }
                    inner
                }
                Some('<' | '!') => {
                    return Err(self.expected("text or rules (tokens cannot be named)"));
                }
                Some(c) if c.is_ascii_alphanumeric() => {
                    if lines == Lines::Cross && self.starts_rule() {
                        return Err(self.expected("`)`"));
                    }
                    let name = self.name().ok_or_else(|| self.expected("a name"))?;
                    Node::Reference(name)
                }
                _ => return Ok(one_or(nodes, Node::Sequence)),
            };
            nodes.push(self.repeated(node)?);
        }
    }

    /// True where a name and `::=` come next: a bracket was left open.
    fn starts_rule(&mut self) -> bool {
        let at = self.rest.peek().map_or(self.text.len(), |(at, _)| *at);
        let rest = self.text[at..]
            .trim_start_matches(|c: char| c.is_ascii_alphanumeric() || matches!(c, '-' | '_'));
        rest.trim_start().starts_with("::=")
    }

    fn repeated(&mut self, mut node: Node) -> Result<Node, String> {
        loop {
            let (least, most) = match self.peek() {
                Some('*') => (0, None),
                Some('+') => (1, None),
                Some('?') => (0, Some(1)),
                Some('{') => self.times()?,
                _ => return Ok(node),
            };
            self.next();
            if most.is_some_and(|most| most < least) {
                return Err(self.expected("a maximum that is no less than the minimum"));
            }
            node = Node::Repeat(Box::new(node), Times { least, most });
        }
    }

    /// `{2}`, `{2,}`, `{,3}` or `{2,3}`, up to the closing bracket.
    fn times(&mut self) -> Result<(usize, Option<usize>), String> {
        self.next();
        self.skip(Lines::Stay);
        let least = self.number()?;
        self.skip(Lines::Stay);
        let (least, most) = if self.take(',') {
            self.skip(Lines::Stay);
            let most = self.number()?;
            self.skip(Lines::Stay);
            (least.unwrap_or(0), most)
        } else {
            let least = least.ok_or_else(|| self.expected("a number"))?;
            (least, Some(least))
        };
        if self.peek() != Some('}') {
            return Err(self.expected("`}`"));
        }
        Ok((least, most))
    }

    fn number(&mut self) -> Result<Option<usize>, String> {
        let mut digits = String::new();
        while let Some((_, digit)) = self.rest.next_if(|(_, c)| c.is_ascii_digit()) {
            digits.push(digit);
        }
        if digits.is_empty() {
            return Ok(None);
        }
        let number = digits.parse().ok().filter(|n| *n <= MAX_TIMES);
        let number = number.ok_or_else(|| format!("{digits} repetitions are too many"))?;
        Ok(Some(number))
    }

    fn literal(&mut self) -> Result<Node, String> {
        self.next();
        let mut text = String::new();
        loop {
            match self.peek() {
                Some('"') => {
                    self.next();
                    return Ok(Node::Literal(text));
                }
                Some(_) => text.push(self.character()?),
                None => return Err(self.expected("`\"`")),
            }
        }
    }

    fn class(&mut self) -> Result<Node, String> {
        self.next();
        let mut class = String::from("[");
        if self.take('^') {
            class.push('^');
        }
        let empty = class.len();
        loop {
            match self.peek() {
                Some(']') if class.len() > empty => {
                    self.next();
                    class.push(']');
                    return Ok(Node::Class(class));
                }
                Some(']') => return Err(self.expected("a character")),
                Some(_) => {
                    let first = self.character()?;
                    class.push_str(&escaped(first));
                    let is_range = {
                        let mut ahead = self.rest.clone();
                        ahead.next().is_some_and(|(_, c)| c == '-')
                            && ahead.next().is_some_and(|(_, c)| c != ']')
                    };
                    if is_range {
                        self.next();
                        let last = self.character()?;
                        if last < first {
                            return Err(format!("`{first}-{last}` is no range"));
                        }
                        class.push('-');
                        class.push_str(&escaped(last));
                    }
                }
                None => return Err(self.expected("`]`")),
            }
        }
    }

    /// One character, perhaps written as an escape.
    fn character(&mut self) -> Result<char, String> {
        let character = self.next().ok_or_else(|| self.expected("a character"))?;
        if character != '\\' {
            return Ok(character);
        }
        let digits = match self.next() {
            Some('n') => return Ok('\n'),
            Some('r') => return Ok('\r'),
            Some('t') => return Ok('\t'),
            Some(c @ ('\\' | '"' | '[' | ']' | '-' | '^')) => return Ok(c),
            Some('x') => 2,
            Some('u') => 4,
            Some('U') => 8,
            _ => return Err(self.expected("a known escape before this")),
        };
        let mut code = 0;
        for _ in 0..digits {
            let digit = self.peek().and_then(|c| c.to_digit(16));
            let digit = digit.ok_or_else(|| self.expected("a hexadecimal digit"))?;
            self.next();
            code = code << 4 | digit;
        }
        char::from_u32(code).ok_or_else(|| format!("U+{code:X} is no character"))
    }
}

/// A character in a class of a regular expression.
fn escaped(character: char) -> String {
    format!("\\x{{{:x}}}", u32::from(character))
}

fn one_or(mut nodes: Vec<Node>, many: impl Fn(Vec<Node>) -> Node) -> Node {
    match nodes.pop() {
        Some(node) if nodes.is_empty() => node,
        Some(node) => {
            nodes.push(node);
            many(nodes)
        }
        None => many(nodes),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rules_may_go_over_lines_where_it_is_clear() {
        let text = "root ::=\n  \"a\" (\n \"b\" | # comment\n [c] )* # end\n  | other\n\nother ::= \"\\x41\\n\"\n";
        let rules = read(text).unwrap();
        assert_eq!(rules.len(), 2);
        let Node::Choice(branches) = &rules[0].1 else {
            panic!("two branches")
        };
        assert_eq!(branches[1], Node::Reference("other".to_owned()));
        assert_eq!(rules[1].1, Node::Literal("A\n".to_owned()));
    }

    #[test]
    fn mistakes_are_reported_with_their_line() {
        for (text, wanted) in [
            ("root ::= \"a", "`\"`"),
            ("root ::= (\"a\"\nb ::= \"c\"", "`)`"),
            ("root = \"a\"", "`::=`"),
            ("root ::= [z-a]", "no range"),
            ("root ::= \"a\"{5,2}", "maximum"),
            ("root ::= \"a\"{1000000000000}", "too many"),
            ("root ::= <[12]>", "tokens"),
            ("root ::= \"\\q\"", "escape"),
            ("root ::= \"a\"\nroot ::= \"b\"", "twice"),
            ("root ::= \"a\" )", "end of the rule"),
        ] {
            let error = read(text).unwrap_err();
            assert!(error.contains(wanted), "{text}: {error}");
        }
        assert!(
            read("root ::= \"a\"\n\nb ::= ]")
                .unwrap_err()
                .contains("line 3")
        );
    }
}
