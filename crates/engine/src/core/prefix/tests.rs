use std::collections::HashMap;

use super::*;

impl PrefixIndex {
    /// Every block with all tokens up to its end; fails if a block's predecessor is gone, or the tables disagree.
    pub(crate) fn audit(&self) -> Vec<(Vec<TokenId>, Block)> {
        let by_id: HashMap<u64, &Key> = self.blocks.iter().map(|(k, b)| (b.id.0, k)).collect();
        assert_eq!(by_id.len(), self.blocks.len(), "a number is used twice");
        let known = |table: usize| assert_eq!(table, self.blocks.len(), "a forgotten page");
        known(self.keys.iter().flatten().count());
        let with_sliding = self.blocks.values().filter(|b| b.sliding.is_some());
        assert_eq!(with_sliding.count(), self.siblings.iter().flatten().count());

        let mut all = Vec::new();
        for (key, block) in &self.blocks {
            assert_eq!(self.keys[block.full.0 as usize].as_ref(), Some(key));
            if let Some(sliding) = block.sliding {
                assert_eq!(self.siblings[sliding.0 as usize], Some(block.full));
            }
            let mut pages = vec![key.tokens];
            let mut parent = key.parent;
            while parent != BlockId::ROOT {
                let before = by_id[&parent.0];
                pages.push(before.tokens);
                parent = before.parent;
            }
            pages.reverse();
            all.push((pages.concat(), *block));
        }
        all
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
    assert_eq!(pages(&index, &[B, A].concat()), []);
}

#[test]
fn an_incomplete_page_is_not_found() {
    let mut index = PrefixIndex::new(1, 0);
    index.insert(BlockId::ROOT, &A, PageId(0), None);
    assert_eq!(pages(&index, &A[..31]), []);
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
    assert!(index.audit().is_empty());
}
