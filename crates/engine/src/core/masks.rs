//! Token masks that are used again: each is 32 KiB for a vocabulary of 262,144.

use carat_model::sampling::TokenMask;

/// The masks of one step, in the order of its draws.
pub(crate) struct MaskPool {
    vocab: usize,
    masks: Vec<TokenMask>,
    used: usize,
}

impl MaskPool {
    pub(crate) fn new(vocab: usize) -> MaskPool {
        MaskPool {
            vocab,
            masks: Vec::new(),
            used: 0,
        }
    }

    /// Another step begins.
    pub(crate) fn clear(&mut self) {
        self.used = 0;
    }

    /// The next mask, which allows nothing.
    pub(crate) fn next(&mut self) -> &mut TokenMask {
        if self.used == self.masks.len() {
            self.masks.push(TokenMask::none(self.vocab));
        }
        let mask = &mut self.masks[self.used];
        mask.clear();
        self.used += 1;
        mask
    }

    /// The last so many are not wanted.
    pub(crate) fn give_back(&mut self, count: usize) {
        self.used -= count;
    }

    pub(crate) fn iter(&self) -> impl Iterator<Item = &TokenMask> {
        self.masks[..self.used].iter()
    }
}
