//! A response's account of the prefix cache: how much of its prompt was cached, and where and why that ended.

use std::sync::{Arc, OnceLock};

use carat_engine::Counts;
use carat_text::{TokenId, Tokenizer};
use http::HeaderValue;
use serde_json::{Value, json};
use sha2::{Digest, Sha256};

use crate::metrics::miss_name;

/// Tokens on either side of the place where the known part ends, and characters of them that are told.
const TOKENS_AROUND: usize = 20;
const CHARACTERS_AROUND: usize = 40;

/// Tokens at the beginning of a prompt that routers know it by.
const AFFINITY_TOKENS: usize = 1024;

/// Told once per request, when its first prompt was looked up.
#[derive(Clone, Debug, Default)]
pub(crate) struct CacheNote(Arc<OnceLock<Found>>);

#[derive(Clone, Debug)]
struct Found {
    counts: Counts,
    /// The turn of the conversation that the first unknown token is in, from 0; `None` without turns.
    turn: Option<usize>,
    /// Digest of the prompt's beginning.
    affinity: u64,
    /// The last known tokens, and the first unknown ones.
    before: Vec<TokenId>,
    after: Vec<TokenId>,
}

/// A prompt as it is explained.
#[derive(Debug)]
pub(crate) struct Asked {
    tokens: Vec<TokenId>,
    /// Places of the tokens that begin a turn.
    turns: Vec<usize>,
}

impl Asked {
    pub(crate) fn new(prompt: &[TokenId], turn_start: Option<TokenId>) -> Asked {
        let places = prompt.iter().enumerate();
        let starts = places.filter(|(_, id)| Some(**id) == turn_start);
        Asked {
            tokens: prompt.to_vec(),
            turns: starts.map(|(place, _)| place).collect(),
        }
    }
}

impl CacheNote {
    /// Records the cached part of a prompt. The first prompt of a request counts; `false` for others.
    pub(crate) fn tell(&self, counts: Counts, asked: &Asked) -> bool {
        let Asked { tokens, turns } = asked;
        let before = turns.iter().filter(|start| **start <= counts.known_tokens);
        // What stands before the first turn is counted with it.
        let turn = (!turns.is_empty()).then(|| before.count().saturating_sub(1));
        let (known, unknown) = tokens.split_at(counts.known_tokens.min(tokens.len()));
        let told = self.0.set(Found {
            counts,
            turn,
            affinity: affinity(tokens),
            before: known[known.len().saturating_sub(TOKENS_AROUND)..].to_vec(),
            after: unknown[..unknown.len().min(TOKENS_AROUND)].to_vec(),
        });
        told.is_ok()
    }

    /// Turn of the conversation that the first unknown token is in, from 0; `None` without turns.
    pub(crate) fn turn(&self) -> Option<usize> {
        self.0.get()?.turn
    }

    /// `cached/all; miss=why; at=token; turn=number`, as far as there is something to say.
    pub(crate) fn header(&self) -> Option<HeaderValue> {
        let Found { counts, turn, .. } = self.0.get()?;
        let mut text = format!("{}/{}", counts.cached_tokens, counts.prompt_tokens);
        if let Some(miss) = counts.miss {
            text += &format!("; miss={}; at={}", miss_name(miss), counts.known_tokens);
            if let Some(turn) = turn {
                text += &format!("; turn={turn}");
            }
        }
        HeaderValue::from_str(&text).ok()
    }

    /// A key of the prompt's beginning: a router that keeps requests with the same one together finds prefixes where they are.
    pub(crate) fn affinity_header(&self) -> Option<HeaderValue> {
        let found = self.0.get()?;
        HeaderValue::from_str(&format!("{:016x}", found.affinity)).ok()
    }
}

/// The same for prompts that begin alike, on every machine and after every start.
fn affinity(prompt: &[TokenId]) -> u64 {
    let mut digest = Sha256::new();
    for token in prompt.iter().take(AFFINITY_TOKENS) {
        digest.update(token.to_le_bytes());
    }
    let digest = digest.finalize();
    u64::from_be_bytes(*digest.first_chunk().expect("a digest is longer"))
}

/// The same for those who ask for it in the answer, with the text on both sides of where it ended.
pub(crate) fn explained(counts: &Counts, note: &CacheNote, tokenizer: &Tokenizer) -> Value {
    let elsewhere = counts.cached_in_host + counts.cached_on_disk;
    let mut explained = json!({
        "cached": counts.cached_tokens,
        "prompt": counts.prompt_tokens,
        "miss": counts.miss.map(miss_name),
        "at": counts.miss.map(|_| counts.known_tokens),
        "from": {
            "device": counts.cached_tokens.saturating_sub(elsewhere),
            "host": counts.cached_in_host,
            "disk": counts.cached_on_disk,
        },
    });
    if let Some(found) = note.0.get().filter(|_| counts.miss.is_some()) {
        let before: Vec<char> = tokenizer.decode(&found.before).chars().collect();
        let first = before.len().saturating_sub(CHARACTERS_AROUND);
        let after = tokenizer.decode(&found.after);
        explained["turn"] = found.turn.into();
        explained["before"] = before[first..].iter().collect::<String>().into();
        explained["after"] = after
            .chars()
            .take(CHARACTERS_AROUND)
            .collect::<String>()
            .into();
    }
    explained
}

#[cfg(test)]
mod tests {
    use carat_engine::MissReason;

    use super::*;

    #[test]
    fn the_head_says_how_much_was_cached_and_where_that_ends() {
        let note = CacheNote::default();
        assert_eq!(note.header(), None);
        let mut counts = Counts {
            prompt_tokens: 100,
            cached_tokens: 64,
            known_tokens: 64,
            miss: Some(MissReason::Diverged),
            ..Counts::default()
        };
        note.tell(counts, &Asked::new(&[9, 1, 9, 2, 9], Some(9)));
        assert_eq!(
            note.header().unwrap(),
            "64/100; miss=diverged; at=64; turn=2"
        );
        // A second prompt of the same request changes nothing.
        counts.miss = None;
        note.tell(counts, &Asked::new(&[], None));
        assert_eq!(
            note.header().unwrap(),
            "64/100; miss=diverged; at=64; turn=2"
        );
        let whole = CacheNote::default();
        whole.tell(counts, &Asked::new(&[9], Some(9)));
        assert_eq!(whole.header().unwrap(), "64/100");
    }

    #[test]
    fn prompts_that_begin_alike_have_one_key() {
        let told = |prompt: &[TokenId]| {
            let note = CacheNote::default();
            note.tell(Counts::default(), &Asked::new(prompt, None));
            note.affinity_header().unwrap()
        };
        let long = vec![7; AFFINITY_TOKENS + 1];
        assert_eq!(told(&long), told(&long[1..]));
        assert_ne!(told(&long), told(&long[2..]));
        // Routers and servers of different ages have to agree on it.
        assert_eq!(told(&[1, 2, 3]), "4636993d3e1da4e9");
    }

    #[test]
    fn the_turn_is_the_one_that_the_first_unknown_token_is_in() {
        for (known, turn) in [(0, 0), (2, 0), (3, 1), (4, 1), (9, 2)] {
            let note = CacheNote::default();
            let counts = Counts {
                known_tokens: known,
                miss: Some(MissReason::NoMatch),
                ..Counts::default()
            };
            note.tell(counts, &Asked::new(&[9, 1, 2, 9, 3, 9, 4], Some(9)));
            let text = note.header().unwrap();
            assert!(text.to_str().unwrap().ends_with(&format!("turn={turn}")));
        }
    }
}
