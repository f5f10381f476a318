//! GBNF, the grammars of llama.cpp, to Lark.
//!
//! GBNF speaks of characters; llguidance reads lexemes first and rules of lexemes then, each lexeme as long as it can be. So
//! whatever needs no recursion becomes one terminal, as large as possible: there the two agree, and masks are quick.

mod read;

use std::collections::HashMap;

use self::read::{Node, Times, read};
use super::{literal, repeated};

/// The grammar in Lark, or what is wrong with it.
pub(super) fn to_lark(text: &str) -> Result<String, String> {
    let rules = read(text)?;
    let index: HashMap<&str, usize> = rules
        .iter()
        .enumerate()
        .map(|(place, (name, _))| (name.as_str(), place))
        .collect();
    let root = *index.get("root").ok_or("it has no rule named `root`")?;
    for (name, body) in &rules {
        let mut unknown = None;
        body.each_reference(&mut |wanted| {
            if !index.contains_key(wanted) {
                unknown = Some(wanted.to_owned());
            }
        });
        if let Some(unknown) = unknown {
            return Err(format!(
                "the rule `{name}` needs `{unknown}`, which is not there"
            ));
        }
    }
    let mut writer = Writer {
        is_regular: regular(&rules, &index),
        index,
        lines: Vec::new(),
        hoisted: 0,
    };
    writer.lines.push(format!("start: {}", writer.name(root)));
    for (place, (_, body)) in rules.iter().enumerate() {
        let written = if writer.is_regular[place] {
            writer.plain(body)
        } else {
            writer.rule(body)
        };
        let name = writer.name(place);
        writer.lines.push(format!("{name}: {written}"));
    }
    Ok(writer.lines.join("\n"))
}

/// For each rule, whether it is a regular expression: it does not come back to itself.
fn regular(rules: &[(String, Node)], index: &HashMap<&str, usize>) -> Vec<bool> {
    let mut users = vec![Vec::new(); rules.len()];
    let mut needs = vec![0_usize; rules.len()];
    for (place, (_, body)) in rules.iter().enumerate() {
        body.each_reference(&mut |name| {
            users[index[name]].push(place);
            needs[place] += 1;
        });
    }
    let mut ready: Vec<_> = (0..rules.len())
        .filter(|place| needs[*place] == 0)
        .collect();
    let mut regular = vec![false; rules.len()];
    while let Some(place) = ready.pop() {
        regular[place] = true;
        for &user in &users[place] {
            needs[user] -= 1;
            if needs[user] == 0 {
                ready.push(user);
            }
        }
    }
    regular
}

struct Writer<'a> {
    index: HashMap<&'a str, usize>,
    is_regular: Vec<bool>,
    lines: Vec<String>,
    /// Terminals made of parts of rules.
    hoisted: usize,
}

impl Writer<'_> {
    /// Lark tells terminals from rules by their case.
    fn name(&self, place: usize) -> String {
        let letter = if self.is_regular[place] { 'T' } else { 'r' };
        format!("{letter}{place}")
    }

    fn is_plain(&self, node: &Node) -> bool {
        let mut plain = true;
        node.each_reference(&mut |name| plain &= self.is_regular[self.index[name]]);
        plain
    }

    /// An expression of terminals, or of rules and terminals where it needs rules.
    fn plain(&self, node: &Node) -> String {
        match node {
            Node::Literal(text) => literal(text),
            Node::Class(class) => format!("/{class}/"),
            Node::Reference(name) => self.name(self.index[name.as_str()]),
            Node::Sequence(nodes) if nodes.is_empty() => literal(""),
            Node::Sequence(nodes) => {
                let parts: Vec<_> = nodes.iter().map(|node| self.plain(node)).collect();
                format!("({})", parts.join(" "))
            }
            Node::Choice(nodes) => {
                let parts: Vec<_> = nodes.iter().map(|node| self.plain(node)).collect();
                format!("({})", parts.join(" | "))
            }
            Node::Repeat(node, Times { least, most }) => {
                repeated(&one(node, self.plain(node)), *least, *most)
            }
        }
    }

    /// An expression of rules, whose plain parts become terminals of their own.
    fn rule(&mut self, node: &Node) -> String {
        if self.is_plain(node) {
            return self.hoist(std::slice::from_ref(node));
        }
        match node {
            Node::Sequence(nodes) => {
                let runs = nodes.chunk_by(|a, b| self.is_plain(a) && self.is_plain(b));
                let runs: Vec<_> = runs.collect();
                let mut parts = Vec::new();
                for run in runs {
                    parts.push(match run {
                        [node] if !self.is_plain(node) => self.rule(node),
                        run => self.hoist(run),
                    });
                }
                format!("({})", parts.join(" "))
            }
            Node::Choice(nodes) => {
                let parts: Vec<_> = nodes.iter().map(|node| self.rule(node)).collect();
                format!("({})", parts.join(" | "))
            }
            Node::Repeat(node, Times { least, most }) => {
                repeated(&one(node, self.rule(node)), *least, *most)
            }
            other => self.plain(other),
        }
    }

    /// One terminal for nodes that follow each other.
    fn hoist(&mut self, nodes: &[Node]) -> String {
        match nodes {
            [node @ (Node::Literal(_) | Node::Class(_) | Node::Reference(_))] => self.plain(node),
            [Node::Sequence(nodes)] if nodes.is_empty() => literal(""),
            nodes => {
                let parts: Vec<_> = nodes.iter().map(|node| self.plain(node)).collect();
                let name = format!("H{}", self.hoisted);
                self.hoisted += 1;
                self.lines.push(format!("{name}: {}", parts.join(" ")));
                name
            }
        }
    }
}

/// The expression of a node, in brackets where an operator cannot follow it.
fn one(node: &Node, written: String) -> String {
    if matches!(node, Node::Repeat(..)) {
        format!("({written})")
    } else {
        written
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_needs_no_recursion_is_one_terminal() {
        let lark = to_lark("root ::= [a-z]* \"a\" ws\nws ::= [ \\t]*").unwrap();
        assert_eq!(
            lark,
            "start: T0\nT0: (/[\\x{61}-\\x{7a}]/* \"a\" T1)\nT1: /[\\x{20}\\x{9}]/*"
        );
    }

    #[test]
    fn recursion_is_kept_and_plain_runs_are_joined() {
        let lark = to_lark("root ::= \"(\" \" \"? root? \")\" | \"x\"").unwrap();
        assert_eq!(
            lark,
            "start: r0\nH0: \"(\" \" \"?\nr0: ((H0 r0? \")\") | \"x\")"
        );
    }

    #[test]
    fn what_is_missing_is_named() {
        assert!(to_lark("a ::= \"x\"").unwrap_err().contains("`root`"));
        let error = to_lark("root ::= thing").unwrap_err();
        assert!(error.contains("`thing`"), "{error}");
    }
}
