use rustc_hash::FxHashSet;

use super::*;

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
            assert!(
                key.parent == BlockId::ROOT || ids.contains(&key.parent),
                "an orphan"
            );
            if let Some(sliding) = block.sliding {
                assert_eq!(self.siblings[sliding.0 as usize], Some(block.full));
            }
        }
        self.blocks.values().copied()
    }

    /// Every block with all tokens up to its end.
    pub(crate) fn prefixes(&self) -> impl Iterator<Item = (Vec<TokenId>, Block)> {
        let keys: FxHashMap<BlockId, &Key> = self.blocks.iter().map(|(k, b)| (b.id, k)).collect();
        self.blocks.values().map(move |block| {
            let mut pages = Vec::new();
            let mut at = block.id;
            while at != BlockId::ROOT {
                pages.push(keys[&at].tokens);
                at = keys[&at].parent;
            }
            pages.reverse();
            (pages.concat(), *block)
        })
    }
}

const A: [TokenId; PAGE_TOKENS] = [1; PAGE_TOKENS];
const B: [TokenId; PAGE_TOKENS] = [2; PAGE_TOKENS];

fn pages(index: &PrefixIndex, tokens: &[TokenId]) -> Vec<u32> {
    index.walk(tokens).map(|b| b.full.0).collect()
}

#[test]
fn a_walk_goes_as_far_as_the_tokens_are_known() {
    let mut index = PrefixIndex::new(4, 0);
    let a = index.insert(BlockId::ROOT, &A, PageId(3), None);
    index.insert(a.id, &B, PageId(1), None);
    assert_eq!(pages(&index, &[A, B, A].concat()), [3, 1]);
    assert_eq!(pages(&index, &[A, A].concat()), [3]);
    assert!(pages(&index, &[B, A].concat()).is_empty());
}

#[test]
fn an_incomplete_page_is_not_found() {
    let mut index = PrefixIndex::new(1, 0);
    index.insert(BlockId::ROOT, &A, PageId(0), None);
    assert!(pages(&index, &A[..31]).is_empty());
}

#[test]
fn the_same_tokens_after_another_prefix_are_another_block() {
    let mut index = PrefixIndex::new(4, 0);
    let a = index.insert(BlockId::ROOT, &A, PageId(0), None);
    let b = index.insert(BlockId::ROOT, &B, PageId(1), None);
    index.insert(a.id, &A, PageId(2), None);
    index.insert(b.id, &A, PageId(3), None);
    assert_eq!(pages(&index, &[A, A].concat()), [0, 2]);
    assert_eq!(pages(&index, &[B, A].concat()), [1, 3]);
}

#[test]
fn what_followed_an_evicted_block_does_not_follow_its_successor() {
    let mut index = PrefixIndex::new(2, 0);
    let a = index.insert(BlockId::ROOT, &A, PageId(0), None);
    index.insert(a.id, &B, PageId(1), None);
    index.evict_full(PageId(0));
    index.insert(BlockId::ROOT, &A, PageId(0), None);
    assert_eq!(pages(&index, &[A, B].concat()), [0]);
}

#[test]
fn a_sliding_page_is_lost_alone_or_with_its_block() {
    let mut index = PrefixIndex::new(1, 2);
    let a = index.insert(BlockId::ROOT, &A, PageId(0), Some(PageId(1)));
    index.evict_sliding(PageId(1));
    assert_eq!(index.child(BlockId::ROOT, &A).unwrap().sliding, None);
    index.complete(a, PageId(0));
    assert_eq!(index.evict_full(PageId(0)), Some(PageId(0)));
    assert_eq!(index.audit().count(), 0);
}
