//! Schemas made of other schemas: references, `allOf`, `anyOf` and `oneOf`.

use serde_json::{Map, Value, json};

use super::{is_assertion, value::Writer};
use crate::{GrammarError, formats::literal, path::Path};

/// Longest chain of references that `allOf` follows.
const LONGEST_CHAIN: usize = 128;

impl<'a> Writer<'a> {
    fn target(&self, pointer: &str) -> Option<&'a Value> {
        self.schema.pointer(pointer.strip_prefix('#')?)
    }

    pub(super) fn reference(
        &mut self,
        pointer: &str,
        map: &Map<String, Value>,
        path: &Path<'_>,
        depth: usize,
    ) -> Result<String, GrammarError> {
        let siblings: Vec<_> = map
            .keys()
            .filter(|k| *k != "$ref" && is_assertion(k))
            .collect();
        for keyword in siblings {
            self.ignore(keyword, path);
        }
        let Some(target) = self.target(pointer) else {
            self.ignore(&format!("$ref: {pointer}"), path);
            return Ok(Writer::open());
        };
        if let Some(rule) = self.references.get(pointer) {
            return Ok(rule.clone());
        }
        let name = self.name('d');
        self.references.insert(pointer.to_owned(), name.clone());
        let body = self.value(target, path, depth + 1)?;
        self.lines.push(format!("{name}: {body}"));
        Ok(name)
    }

    /// One schema instead of several that all hold, as far as that can be told.
    pub(super) fn merged(
        &mut self,
        map: &Map<String, Value>,
        path: &Path<'_>,
        depth: usize,
    ) -> Result<Map<String, Value>, GrammarError> {
        self.descend(depth)?;
        let mut merged = map.clone();
        let branches = merged.remove("allOf");
        let branches = branches.as_ref().and_then(Value::as_array);
        for (index, branch) in branches.into_iter().flatten().enumerate() {
            let all_of = path.key("allOf");
            let path = all_of.index(index);
            let mut branch = branch;
            for _ in 0..LONGEST_CHAIN {
                let reference = branch.get("$ref").and_then(Value::as_str);
                let Some(target) = reference.and_then(|r| self.target(r)) else {
                    break;
                };
                branch = target;
            }
            let Value::Object(branch) = branch else {
                continue;
            };
            let branch = if branch.contains_key("allOf") {
                self.merged(branch, &path, depth + 1)?
            } else {
                branch.clone()
            };
            for (keyword, value) in branch {
                self.merge(&mut merged, &keyword, value, &path);
            }
        }
        Ok(merged)
    }

    fn merge(
        &mut self,
        merged: &mut Map<String, Value>,
        keyword: &str,
        value: Value,
        path: &Path<'_>,
    ) {
        match (keyword, merged.get_mut(keyword), value) {
            (_, None, value) => {
                merged.insert(keyword.to_owned(), value);
            }
            (_, Some(present), value) if *present == value => {}
            ("properties", Some(Value::Object(present)), Value::Object(more)) => {
                for (name, schema) in more {
                    match present.get(&name) {
                        Some(other) if *other != schema => self.ignore(&name, &path.key(keyword)),
                        Some(_) => {}
                        None => {
                            present.insert(name, schema);
                        }
                    }
                }
            }
            ("required", Some(Value::Array(present)), Value::Array(more)) => {
                let new: Vec<_> = more.into_iter().filter(|n| !present.contains(n)).collect();
                present.extend(new);
            }
            ("additionalProperties", Some(present), Value::Bool(false)) => {
                *present = Value::Bool(false);
            }
            (keyword, Some(_), _) if is_assertion(keyword) => self.ignore(keyword, path),
            _ => {}
        }
    }

    /// Alternatives; `None` where what stands beside them says more than they do.
    pub(super) fn branches(
        &mut self,
        keyword: &str,
        branches: &[Value],
        map: &Map<String, Value>,
        path: &Path<'_>,
        depth: usize,
    ) -> Result<Option<String>, GrammarError> {
        let kind = map.get("type").and_then(Value::as_str);
        let says_more = map
            .keys()
            .any(|k| k != keyword && k != "type" && is_assertion(k));
        if branches.is_empty() || says_more {
            self.ignore(keyword, path);
            return Ok(None);
        }
        let list = path.key(keyword);
        let mut values = Vec::new();
        let mut kinds = Vec::new();
        for (index, branch) in branches.iter().enumerate() {
            let mut branch = branch.clone();
            if let (Value::Object(map), Some(kind)) = (&mut branch, kind) {
                let own = map.entry("type").or_insert_with(|| json!(kind));
                if own != kind {
                    continue;
                }
            }
            kinds.push(
                branch
                    .get("type")
                    .and_then(Value::as_str)
                    .map(str::to_owned),
            );
            values.push(self.value(&branch, &list.index(index), depth + 1)?);
        }
        if map.get("nullable") == Some(&Value::Bool(true)) {
            values.push(literal("null"));
        }
        if values.is_empty() {
            self.ignore(keyword, path);
            return Ok(None);
        }
        if keyword == "oneOf" && !are_disjoint(&kinds) {
            self.ignore("oneOf (more than one may fit)", path);
        }
        Ok(Some(self.rule(&values.join(" | "))))
    }
}

/// True where no value can be of two of these types.
fn are_disjoint(kinds: &[Option<String>]) -> bool {
    let name = |kind: &Option<String>| match kind.as_deref() {
        Some("integer") => Some("number".to_owned()),
        other => other.map(str::to_owned),
    };
    let mut names: Vec<_> = kinds.iter().map(name).collect();
    let is_known = names.iter().all(Option::is_some);
    names.sort();
    names.dedup();
    is_known && names.len() == kinds.len()
}
