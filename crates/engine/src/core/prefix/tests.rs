use std::sync::Arc;

use rustc_hash::FxHashSet;

use super::*;
use crate::core::{Media, MediaAttention};

impl PrefixIndex {
    /// The tables agree, and no block's predecessor is gone.
    pub(crate) fn audit(&self) -> impl Iterator<Item = Block> {
        let ids: FxHashSet<BlockId> = self.blocks.values().map(|b| b.id).collect();
        assert_eq!(ids.len(), self.blocks.len(), "a number is used twice");
        let pages = self.keys.iter().flatten().count();
        assert_eq!(pages, self.blocks.len(), "a page without a block");
        let with_sliding = self.blocks.values().filter(|b| b.sliding.is_some());
        assert_eq!(with_sliding.count(), self.siblings.iter().flatten().count());
        for (key, block) in &self.blocks {
            assert_eq!(self.keys[block.full.0 as usize].as_ref(), Some(key));
            if let Parent::Block(parent) = key.parent {
                assert!(ids.contains(&parent), "an orphan");
            }
            if let Some(sliding) = block.sliding {
                assert_eq!(self.siblings[sliding.0 as usize], Some(block.full));
            }
        }
        self.blocks.values().copied()
    }

    /// Every block with its key and all tokens up to its end.
    pub(crate) fn prefixes(&self) -> impl Iterator<Item = (Vec<TokenId>, Block)> {
        let keys: FxHashMap<BlockId, &Key> = self.blocks.iter().map(|(k, b)| (b.id, k)).collect();
        self.blocks.values().map(move |block| {
            let mut pages = Vec::new();
            let mut at = Parent::Block(block.id);
            while let Parent::Block(id) = at {
                pages.push(keys[&id].tokens);
                at = keys[&id].parent;
            }
            pages.reverse();
            (pages.concat(), *block)
        })
    }
}

const A: [TokenId; PAGE_TOKENS] = [1; PAGE_TOKENS];
const B: [TokenId; PAGE_TOKENS] = [2; PAGE_TOKENS];

fn content(tokens: &[TokenId]) -> Content<'_> {
    Content {
        tokens,
        media: &[],
        has_sliding: true,
        salt: None,
    }
}

fn pages(index: &PrefixIndex, tokens: &[TokenId]) -> Vec<u32> {
    index.walk(content(tokens)).map(|b| b.full.0).collect()
}

const ROOT: Parent = Parent::Root(None);

/// Registers a block of one page's tokens.
fn insert(
    index: &mut PrefixIndex,
    parent: Parent,
    tokens: &[TokenId],
    page: u32,
    sliding: Option<u32>,
) -> Block {
    let pages = (PageId(page), sliding.map(PageId));
    index.insert(parent, &content(tokens), 0, pages)
}

fn after(block: Block) -> Parent {
    Parent::Block(block.id)
}

#[test]
fn a_walk_goes_as_far_as_the_tokens_are_known() {
    let mut index = PrefixIndex::new(4, 0);
    let a = insert(&mut index, ROOT, &A, 3, None);
    insert(&mut index, after(a), &B, 1, None);
    assert_eq!(pages(&index, &[A, B, A].concat()), [3, 1]);
    assert_eq!(pages(&index, &[A, A].concat()), [3]);
    assert!(pages(&index, &[B, A].concat()).is_empty());
}

#[test]
fn an_incomplete_page_is_not_found() {
    let mut index = PrefixIndex::new(1, 0);
    insert(&mut index, ROOT, &A, 0, None);
    assert!(pages(&index, &A[..31]).is_empty());
}

#[test]
fn the_same_tokens_after_another_prefix_are_another_block() {
    let mut index = PrefixIndex::new(4, 0);
    let a = insert(&mut index, ROOT, &A, 0, None);
    let b = insert(&mut index, ROOT, &B, 1, None);
    insert(&mut index, after(a), &A, 2, None);
    insert(&mut index, after(b), &A, 3, None);
    assert_eq!(pages(&index, &[A, A].concat()), [0, 2]);
    assert_eq!(pages(&index, &[B, A].concat()), [1, 3]);
}

#[test]
fn what_followed_an_evicted_block_does_not_follow_its_successor() {
    let mut index = PrefixIndex::new(2, 0);
    let a = insert(&mut index, ROOT, &A, 0, None);
    insert(&mut index, after(a), &B, 1, None);
    index.evict_full(PageId(0));
    insert(&mut index, ROOT, &A, 0, None);
    assert_eq!(pages(&index, &[A, B].concat()), [0]);
}

#[test]
fn a_sliding_page_is_lost_alone_or_with_its_block() {
    let mut index = PrefixIndex::new(1, 2);
    let a = insert(&mut index, ROOT, &A, 0, Some(1));
    index.evict_sliding(PageId(1));
    let found = index.child(ROOT, &content(&A), 0).unwrap();
    assert_eq!(found.sliding, None);
    index.complete(a, PageId(0));
    assert_eq!(index.evict_full(PageId(0)), Some(PageId(0)));
    assert_eq!(index.audit().count(), 0);
}

#[test]
fn each_salt_has_blocks_of_its_own() {
    let mut index = PrefixIndex::new(4, 0);
    let salted = |salt: Option<[u8; 16]>| Content {
        salt,
        ..content(&A)
    };
    let salts = [None, Some([0; 16]), Some([7; 16])];
    for (page, salt) in (0..).zip(&salts[..2]) {
        let parent = Parent::Root(*salt);
        index.insert(parent, &salted(*salt), 0, (PageId(page), None));
    }
    let found = salts.map(|salt| index.walk(salted(salt)).next().map(|b| b.full.0));
    assert_eq!(found, [Some(0), Some(1), None]);
    assert_eq!(index.audit().count(), 2);
}

#[test]
fn the_same_tokens_beside_other_media_are_another_block() {
    let image = |start: usize, seed: u8| Media {
        places: start..start + 40,
        rows: Arc::new([]),
        digest: [seed; 16],
        attention: MediaAttention::BothWays,
    };
    let tokens = [A, A, A].concat();
    let with = |media: &[Media]| -> usize {
        let mut index = PrefixIndex::new(4, 0);
        let known = [image(20, 1)];
        let known = Content {
            media: &known,
            ..content(&tokens)
        };
        let mut parent = ROOT;
        for place in 0..3 {
            let pages = (PageId(place as u32), None);
            parent = after(index.insert(parent, &known, place, pages));
        }
        let asked = Content {
            media,
            ..content(&tokens)
        };
        index.walk(asked).count()
    };
    assert_eq!(with(&[image(20, 1)]), 3);
    assert_eq!(with(&[image(20, 2)]), 0, "another image of the same size");
    assert_eq!(with(&[image(21, 1)]), 0, "the same image further on");
    assert_eq!(with(&[]), 0, "the tokens alone");
}
