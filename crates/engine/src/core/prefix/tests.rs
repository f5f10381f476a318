use std::sync::Arc;

use carat_model::TokenId;

use super::*;
use crate::core::{Media, MediaAttention};

impl PrefixIndex {
    /// The tables agree. A block that has a page on the device follows one that has.
    pub(crate) fn audit(&self) -> impl Iterator<Item = Block> {
        let nodes = || self.nodes.iter().flatten();
        let ids: FxHashMap<BlockId, Block> = nodes().map(|n| (n.block.id, n.block)).collect();
        assert_eq!(ids.len(), self.slots.len(), "a number is used twice");
        assert_eq!(self.nodes.len(), self.slots.len() + self.free.len());
        for node in nodes() {
            let block = node.block;
            assert_eq!(self.slots.get(&node.key), Some(&block.id.slot));
            assert!(!block.places.full.is_nowhere(), "a block that is nowhere");
            if let Parent::Block(parent) = node.key.parent
                && block.places.full.device.is_some()
            {
                let parent = ids.get(&parent).expect("an orphan");
                assert!(parent.places.full.device.is_some(), "a gap on the device");
            }
            let followers = || nodes().filter(|n| n.key.parent == Parent::Block(block.id));
            let on_device = followers().filter(|n| n.block.places.full.device.is_some());
            assert_eq!(node.followers, followers().count());
            assert_eq!(node.followers_on_device, on_device.count());
        }
        for group in KvGroup::ALL {
            let places = |pick: fn(&Places) -> bool| {
                let picked = nodes().filter(|n| pick(n.block.places.get(group)));
                picked.count()
            };
            let on_device = self.on_device.get(group);
            let in_host = self.in_host.get(group);
            let taken = |pages: &[Option<Slot>]| pages.iter().flatten().count();
            assert_eq!(places(|p| p.device.is_some()), taken(on_device));
            assert_eq!(places(|p| p.host.is_some()), taken(in_host));
            for node in nodes() {
                let (slot, places) = (Some(node.block.id.slot), node.block.places.get(group));
                assert!(
                    places
                        .device
                        .is_none_or(|p| on_device[p.0 as usize] == slot)
                );
                assert!(places.host.is_none_or(|p| in_host[p.0 as usize] == slot));
            }
        }
        ids.into_values()
    }

    /// Every block with its key and all tokens up to its end.
    pub(crate) fn prefixes(&self) -> impl Iterator<Item = (Vec<TokenId>, Block)> {
        let nodes = || self.nodes.iter().flatten();
        let keys: FxHashMap<BlockId, &Key> = nodes().map(|n| (n.block.id, &n.key)).collect();
        nodes().filter_map(move |node| {
            let mut pages = Vec::new();
            let mut at = Parent::Block(node.block.id);
            while let Parent::Block(id) = at {
                // What followed a block that host memory has lost is found by nobody.
                let key = keys.get(&id)?;
                pages.push(key.contents.tokens);
                at = key.parent;
            }
            pages.reverse();
            Some((pages.concat(), node.block))
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
        lane: None,
    }
}

fn pages(index: &PrefixIndex, tokens: &[TokenId]) -> Vec<u32> {
    index.walk(content(tokens)).map(page_of).collect()
}

fn page_of(block: Block) -> u32 {
    block.places.full.device.expect("it is on the device").0
}

fn index(full: usize, sliding: usize) -> PrefixIndex {
    PrefixIndex::new(PerGroup { full, sliding }, PerGroup::default())
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
    let block = index.insert(parent, &content(tokens), 0);
    index.put_on_device(block.id.slot, KvGroup::Full, PageId(page));
    if let Some(page) = sliding {
        index.put_on_device(block.id.slot, KvGroup::Sliding, PageId(page));
    }
    block
}

fn after(block: Block) -> Parent {
    Parent::Block(block.id)
}

#[test]
fn a_walk_goes_as_far_as_the_tokens_are_known() {
    let mut index = index(4, 0);
    let a = insert(&mut index, ROOT, &A, 3, None);
    insert(&mut index, after(a), &B, 1, None);
    assert_eq!(pages(&index, &[A, B, A].concat()), [3, 1]);
    assert_eq!(pages(&index, &[A, A].concat()), [3]);
    assert!(pages(&index, &[B, A].concat()).is_empty());
}

#[test]
fn an_incomplete_page_is_not_found() {
    let mut index = index(1, 0);
    insert(&mut index, ROOT, &A, 0, None);
    assert!(pages(&index, &A[..31]).is_empty());
}

#[test]
fn the_same_tokens_after_another_prefix_are_another_block() {
    let mut index = index(4, 0);
    let a = insert(&mut index, ROOT, &A, 0, None);
    let b = insert(&mut index, ROOT, &B, 1, None);
    insert(&mut index, after(a), &A, 2, None);
    insert(&mut index, after(b), &A, 3, None);
    assert_eq!(pages(&index, &[A, A].concat()), [0, 2]);
    assert_eq!(pages(&index, &[B, A].concat()), [1, 3]);
}

#[test]
fn what_followed_an_evicted_block_does_not_follow_its_successor() {
    let mut index = index(2, 0);
    let a = insert(&mut index, ROOT, &A, 0, None);
    insert(&mut index, after(a), &B, 1, None);
    let gone = index.take_from_device(KvGroup::Full, PageId(0));
    index.remove(gone.id.slot);
    insert(&mut index, ROOT, &A, 0, None);
    assert_eq!(pages(&index, &[A, B].concat()), [0]);
}

#[test]
fn a_sliding_page_is_lost_alone_or_with_its_block() {
    let mut index = index(1, 2);
    let a = insert(&mut index, ROOT, &A, 0, Some(1));
    let without = index.take_from_device(KvGroup::Sliding, PageId(1));
    assert_eq!(without.places.sliding, Places::default());
    assert_eq!(index.child(ROOT, &content(&A), 0), Some(without));
    index.put_on_device(a.id.slot, KvGroup::Sliding, PageId(0));
    index.take_from_device(KvGroup::Sliding, PageId(0));
    let lost = index.take_from_device(KvGroup::Full, PageId(0));
    assert!(lost.places.full.is_nowhere());
    index.remove(lost.id.slot);
    assert_eq!(index.audit().count(), 0);
}

#[test]
fn a_block_that_host_memory_has_is_found_without_a_page() {
    let host_pages = PerGroup {
        full: 1,
        sliding: 0,
    };
    let mut index = PrefixIndex::new(
        PerGroup {
            full: 1,
            ..PerGroup::default()
        },
        host_pages,
    );
    let a = insert(&mut index, ROOT, &A, 0, None);
    index.put_in_host(a.id.slot, KvGroup::Full, HostPageId(0));
    index.take_from_device(KvGroup::Full, PageId(0));
    let found = index.child(ROOT, &content(&A), 0).unwrap();
    assert_eq!(found.places.full.host, Some(HostPageId(0)));
    assert_eq!(index.audit().count(), 1);
}

#[test]
fn each_salt_has_blocks_of_its_own() {
    let mut index = index(4, 0);
    let salted = |salt: Option<[u8; 16]>| Content {
        salt,
        ..content(&A)
    };
    let salts = [None, Some([0; 16]), Some([7; 16])];
    for (page, salt) in (0..).zip(&salts[..2]) {
        let parent = Parent::Root(*salt);
        let block = index.insert(parent, &salted(*salt), 0);
        index.put_on_device(block.id.slot, KvGroup::Full, PageId(page));
    }
    let found = salts.map(|salt| index.walk(salted(salt)).next().map(page_of));
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
        let mut index = index(4, 0);
        let known = [image(20, 1)];
        let known = Content {
            media: &known,
            ..content(&tokens)
        };
        let mut parent = ROOT;
        for place in 0..3 {
            let block = index.insert(parent, &known, place);
            index.put_on_device(block.id.slot, KvGroup::Full, PageId(place as u32));
            parent = after(block);
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
