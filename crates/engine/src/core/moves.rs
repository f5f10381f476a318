//! Copies of pages that are due before the next batch.

use carat_model::{
    backend::PageMove,
    kv::{HostPageId, KvGroup, PageId},
};
use rustc_hash::FxHashSet;

/// Moves in order, cut into calls that name no page and no place in host memory twice.
#[derive(Debug, Default)]
pub(crate) struct Moves {
    calls: Vec<Vec<PageMove>>,
    /// Of the last call.
    pages: FxHashSet<(KvGroup, PageId)>,
    places: FxHashSet<(KvGroup, HostPageId)>,
}

impl Moves {
    pub(crate) fn push(&mut self, step: PageMove) {
        let (group, page, place) = step.places();
        let is_named = self.pages.contains(&(group, page)) || self.places.contains(&(group, place));
        if self.calls.is_empty() || is_named {
            self.calls.push(Vec::new());
            self.pages.clear();
            self.places.clear();
        }
        self.pages.insert((group, page));
        self.places.insert((group, place));
        self.calls.last_mut().expect("pushed above").push(step);
    }

    /// All of them, for one call of the executor each.
    pub(crate) fn take(&mut self) -> Vec<Vec<PageMove>> {
        self.pages.clear();
        self.places.clear();
        std::mem::take(&mut self.calls)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn save(from: u32, to: u32) -> PageMove {
        let (from, to) = (PageId(from), HostPageId(to));
        let group = KvGroup::Full;
        PageMove::Save { group, from, to }
    }

    fn load(from: u32, to: u32) -> PageMove {
        let (from, to) = (HostPageId(from), PageId(to));
        let group = KvGroup::Full;
        PageMove::Load { group, from, to }
    }

    #[test]
    fn a_page_or_place_that_is_named_again_begins_a_call() {
        let mut moves = Moves::default();
        let all = [save(1, 1), load(2, 3), load(0, 1), save(4, 2), save(5, 2)];
        for step in all {
            moves.push(step);
        }
        let calls = moves.take();
        assert_eq!(
            calls,
            [all[..2].to_vec(), all[2..4].to_vec(), all[4..].to_vec()]
        );
        assert!(moves.take().is_empty());
        moves.push(save(5, 2));
        assert_eq!(moves.take().len(), 1);
    }
}
