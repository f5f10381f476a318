//! A response's account of the prefix cache: how much of its prompt was cached, and where and why that ended.

use std::sync::{Arc, OnceLock};

use carat_engine::Counts;
use carat_text::TokenId;
use http::HeaderValue;
use serde_json::{Value, json};

use crate::metrics::miss_name;

/// Told once per request, when its first prompt was looked up.
#[derive(Clone, Debug, Default)]
pub(crate) struct CacheNote(Arc<OnceLock<Found>>);

#[derive(Clone, Copy, Debug)]
struct Found {
    counts: Counts,
    /// The turn of the conversation that the first unknown token is in, from 0; `None` without turns.
    turn: Option<usize>,
}

impl CacheNote {
    /// Records the cached part of a prompt, whose turns begin at these tokens. The first prompt of a request counts.
    pub(crate) fn tell(&self, counts: Counts, turns: &[usize]) {
        let before = turns.iter().filter(|start| **start <= counts.known_tokens);
        // What stands before the first turn is counted with it.
        let turn = (!turns.is_empty()).then(|| before.count().saturating_sub(1));
        let _ = self.0.set(Found { counts, turn });
    }

    /// `cached/all; miss=why; at=token; turn=number`, as far as there is something to say.
    pub(crate) fn header(&self) -> Option<HeaderValue> {
        let Found { counts, turn } = self.0.get()?;
        let mut text = format!("{}/{}", counts.cached_tokens, counts.prompt_tokens);
        if let Some(miss) = counts.miss {
            text += &format!("; miss={}; at={}", miss_name(miss), counts.known_tokens);
            if let Some(turn) = turn {
                text += &format!("; turn={turn}");
            }
        }
        HeaderValue::from_str(&text).ok()
    }
}

/// Places of the tokens that begin a turn.
pub(crate) fn turns(prompt: &[TokenId], turn_start: Option<TokenId>) -> Vec<usize> {
    let places = prompt.iter().enumerate();
    let starts = places.filter(|(_, id)| Some(**id) == turn_start);
    starts.map(|(place, _)| place).collect()
}

/// The same for those who ask for it in the answer.
pub(crate) fn explained(counts: &Counts) -> Value {
    let elsewhere = counts.cached_in_host + counts.cached_on_disk;
    json!({
        "cached": counts.cached_tokens,
        "prompt": counts.prompt_tokens,
        "miss": counts.miss.map(miss_name),
        "at": counts.miss.map(|_| counts.known_tokens),
        "from": {
            "device": counts.cached_tokens.saturating_sub(elsewhere),
            "host": counts.cached_in_host,
            "disk": counts.cached_on_disk,
        },
    })
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
        note.tell(counts, &turns(&[9, 1, 9, 2, 9], Some(9)));
        assert_eq!(
            note.header().unwrap(),
            "64/100; miss=diverged; at=64; turn=2"
        );
        // A second prompt of the same request changes nothing.
        counts.miss = None;
        note.tell(counts, &[]);
        assert_eq!(
            note.header().unwrap(),
            "64/100; miss=diverged; at=64; turn=2"
        );
        let whole = CacheNote::default();
        whole.tell(counts, &[0]);
        assert_eq!(whole.header().unwrap(), "64/100");
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
            note.tell(counts, &[0, 3, 5]);
            let text = note.header().unwrap();
            assert!(text.to_str().unwrap().ends_with(&format!("turn={turn}")));
        }
    }
}
