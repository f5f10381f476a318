//! Tokens that a row may be given, one bit each: what a grammar or a schema allows next.

use std::fmt;

use crate::TokenId;

/// The tokens that may be drawn, as one bit per vocabulary entry. It comes before everything else: to penalties, biases,
/// temperature and truncation a token that is not allowed does not exist.
#[derive(Clone, PartialEq, Eq)]
pub struct TokenMask {
    vocab: usize,
    /// Bit `t % 32` of word `t / 32`; those beyond the vocabulary are 0.
    words: Vec<u32>,
}

impl TokenMask {
    /// A mask that allows no token yet.
    pub fn none(vocab: usize) -> TokenMask {
        TokenMask {
            vocab,
            words: vec![0; vocab.div_ceil(32)],
        }
    }

    /// A mask that allows these tokens; those outside the vocabulary are passed over.
    pub fn of(vocab: usize, tokens: impl IntoIterator<Item = TokenId>) -> TokenMask {
        let mut mask = TokenMask::none(vocab);
        for token in tokens {
            mask.allow(token);
        }
        mask
    }

    /// Entries of the vocabulary it is made for.
    pub fn vocab(&self) -> usize {
        self.vocab
    }

    /// Bit `t % 32` of word `t / 32` is token `t`. Bits beyond the vocabulary are 0.
    pub fn words(&self) -> &[u32] {
        &self.words
    }

    /// Allows a token; one outside the vocabulary stays forbidden.
    pub fn allow(&mut self, token: TokenId) {
        if (token as usize) < self.vocab {
            self.words[token as usize / 32] |= 1 << (token % 32);
        }
    }

    /// Forbids a token.
    pub fn forbid(&mut self, token: TokenId) {
        if let Some(word) = self.words.get_mut(token as usize / 32) {
            *word &= !(1 << (token % 32));
        }
    }

    /// Allows every token.
    pub fn allow_all(&mut self) {
        self.words.fill(u32::MAX);
        let beyond = self.words.len() * 32 - self.vocab;
        if let Some(last) = self.words.last_mut() {
            *last >>= beyond;
        }
    }

    /// Forbids every token.
    pub fn clear(&mut self) {
        self.words.fill(0);
    }

    /// Whether a token may be drawn.
    pub fn allows(&self, token: TokenId) -> bool {
        let word = self.words.get(token as usize / 32).copied().unwrap_or(0);
        word >> (token % 32) & 1 == 1
    }

    /// The lowest token that may be drawn; `None` if none may.
    pub fn lowest(&self) -> Option<TokenId> {
        let place = self.words.iter().position(|word| *word != 0)?;
        Some(place as TokenId * 32 + self.words[place].trailing_zeros())
    }

    /// Tokens that may be drawn.
    pub fn count(&self) -> usize {
        self.words.iter().map(|w| w.count_ones() as usize).sum()
    }
}

impl fmt::Debug for TokenMask {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "TokenMask({} of {})", self.count(), self.vocab)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bits_beyond_the_vocabulary_stay_clear() {
        let mut mask = TokenMask::none(33);
        mask.allow_all();
        assert_eq!(mask.words(), [u32::MAX, 1]);
        mask.allow(33);
        mask.allow(1000);
        assert_eq!(mask.count(), 33);
        assert!(!mask.allows(33) && !mask.allows(1000));
        let mut whole = TokenMask::none(64);
        whole.allow_all();
        assert_eq!(whole.words(), [u32::MAX; 2]);
        assert_eq!(TokenMask::none(0).lowest(), None);
    }

    #[test]
    fn tokens_are_allowed_and_forbidden_one_by_one() {
        let mut mask = TokenMask::of(100, [3, 64, 99]);
        assert!(mask.allows(64) && !mask.allows(63));
        assert_eq!(mask.lowest(), Some(3));
        mask.forbid(3);
        mask.forbid(500);
        assert_eq!((mask.lowest(), mask.count()), (Some(64), 2));
        mask.clear();
        assert_eq!(mask.lowest(), None);
    }
}
