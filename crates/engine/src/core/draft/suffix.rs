//! Prompt lookup: where the end of a sequence stood before, and what followed it there.

use carat_model::TokenId;
use rustc_hash::FxHashMap;

/// Tokens that must be the same before anything is proposed.
const GRAM: usize = 3;
/// Earlier places that are compared, the latest first.
const MAX_CANDIDATES: usize = 8;
/// Tokens that are compared at each.
const MAX_COMPARED: usize = 32;

/// Earlier places of every few tokens in a row.
#[derive(Default)]
pub(crate) struct SuffixIndex {
    /// Position behind the latest occurrence of these tokens.
    latest: FxHashMap<[TokenId; GRAM], u32>,
    /// Per position behind some tokens: where the same ended before that; 0 for nowhere.
    before: Vec<u32>,
}

/// A place that a sequence's end repeats.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Match {
    /// Position of the tokens that followed there.
    pub(crate) start: usize,
    /// Tokens that are the same, as far as was compared.
    pub(crate) length: usize,
}

impl SuffixIndex {
    /// Takes in the tokens that have come since the last time.
    pub(crate) fn extend(&mut self, tokens: &[TokenId]) {
        while self.before.len() <= tokens.len() {
            let end = self.before.len();
            let gram = tokens[..end].last_chunk::<GRAM>();
            let earlier = gram.and_then(|gram| self.latest.insert(*gram, end as u32));
            self.before.push(earlier.unwrap_or(0));
        }
    }

    /// The earlier place whose tokens agree with the end of `tokens` the longest, the latest of several. All of `tokens` have
    /// been taken in.
    pub(crate) fn find(&self, tokens: &[TokenId]) -> Option<Match> {
        let mut best: Option<Match> = None;
        let mut place = *self.before.get(tokens.len())? as usize;
        for _ in 0..MAX_CANDIDATES {
            if place == 0 {
                break;
            }
            let ends = tokens[..place].iter().rev().zip(tokens.iter().rev());
            let same = ends.take(MAX_COMPARED).take_while(|(a, b)| a == b);
            let length = same.count();
            if best.is_none_or(|best| length > best.length) {
                best = Some(Match {
                    start: place,
                    length,
                });
            }
            place = self.before[place] as usize;
        }
        best
    }
}

impl Match {
    /// The tokens that followed, as if they went on in the same way where they reach the end.
    pub(crate) fn draft(&self, tokens: &[TokenId], length: usize) -> Vec<TokenId> {
        let mut draft: Vec<TokenId> = Vec::with_capacity(length);
        for i in self.start..self.start + length {
            let token = tokens.get(i).or_else(|| draft.get(i - tokens.len()));
            draft.extend(token.copied());
        }
        draft
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn index(tokens: &[TokenId]) -> SuffixIndex {
        let mut index = SuffixIndex::default();
        index.extend(tokens);
        index
    }

    #[test]
    fn the_longest_match_wins_and_the_latest_of_equals() {
        let tokens = [9, 1, 2, 3, 4, 8, 1, 2, 3, 5, 9, 1, 2, 3];
        let found = index(&tokens).find(&tokens);
        assert_eq!(
            found,
            Some(Match {
                start: 4,
                length: 4
            })
        );
        let tokens = [7, 1, 2, 3, 4, 8, 1, 2, 3, 5, 9, 1, 2, 3];
        let found = index(&tokens).find(&tokens);
        assert_eq!(
            found,
            Some(Match {
                start: 9,
                length: 3
            })
        );
    }

    #[test]
    fn two_tokens_are_no_match() {
        let tokens = [1, 2, 5, 6, 1, 2];
        assert_eq!(index(&tokens).find(&tokens), None);
        assert_eq!(index(&[1, 2]).find(&[1, 2]), None);
        assert_eq!(SuffixIndex::default().find(&[]), None);
    }

    #[test]
    fn a_draft_goes_on_past_the_end_as_it_began() {
        let tokens = [5, 1, 2, 3, 1, 2, 3];
        let found = index(&tokens).find(&tokens).unwrap();
        assert_eq!(found.draft(&tokens, 8), [1, 2, 3, 1, 2, 3, 1, 2]);
    }

    #[test]
    fn taking_in_tokens_one_by_one_is_the_same_as_all_at_once() {
        let tokens: Vec<TokenId> = (0..200).map(|i| i * i % 7).collect();
        let mut growing = SuffixIndex::default();
        for end in 0..=tokens.len() {
            growing.extend(&tokens[..end]);
            let whole = index(&tokens[..end]);
            assert_eq!(growing.find(&tokens[..end]), whole.find(&tokens[..end]));
        }
    }
}
