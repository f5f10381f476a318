//! What complete pages contain, so that a prompt finds the pages an earlier one has filled.
//!
//! A *block* is a page's worth of tokens after a given block, hence after a given whole prefix: KV depends on
//! everything before it. Blocks form a tree, kept as one map from (block before, tokens) to the pages that hold the
//! block's KV. The map compares the tokens themselves, and a block's number is never used again, so a prefix that is
//! found is the prefix that was asked for; no hash is trusted, but for the digests that media come with. Those stand in the key of
//! every block that a row of media is in: the tokens beside an image are the same for every image of its size. Each cache salt
//! has a tree of its own.
//!
//! Every block has a page of full-attention KV and lives as long as that page. Its sliding-window page may be evicted
//! before it, because the two groups run out separately.

use carat_model::{
    TokenId,
    kv::{PAGE_TOKENS, PageId},
};
use rustc_hash::FxHashMap;

use super::media::Content;

/// A block's number.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct BlockId(u64);

/// What stands before a block.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum Parent {
    /// Nothing: it is a first block, of those with this salt.
    Root(Option<[u8; 16]>),
    Block(BlockId),
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Block {
    pub(crate) id: BlockId,
    pub(crate) full: PageId,
    pub(crate) sliding: Option<PageId>,
}

/// Media within a block: from which place of the block on, and from which of their own rows.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
struct Piece {
    digest: [u8; 16],
    rows: usize,
    first_place: usize,
    first_row: usize,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash)]
struct Key {
    parent: Parent,
    tokens: [TokenId; PAGE_TOKENS],
    /// Empty, and then without memory of its own, where a block has tokens alone.
    media: Box<[Piece]>,
}

impl Key {
    /// Of the block at a place of some content, counted in blocks.
    fn new(parent: Parent, content: &Content<'_>, place: usize) -> Key {
        let start = place * PAGE_TOKENS;
        let tokens = &content.tokens[start..start + PAGE_TOKENS];
        let within = content
            .media
            .iter()
            .filter(|m| m.places.start < start + PAGE_TOKENS && m.places.end > start);
        let pieces = within.map(|m| Piece {
            digest: m.digest,
            rows: m.places.len(),
            first_place: m.places.start.saturating_sub(start),
            first_row: start.saturating_sub(m.places.start),
        });
        Key {
            parent,
            tokens: tokens.try_into().expect("a block is a page of tokens"),
            media: pieces.collect(),
        }
    }
}

pub(crate) struct PrefixIndex {
    blocks: FxHashMap<Key, Block>,
    /// By full page: the key of the block it holds.
    keys: Vec<Option<Key>>,
    /// By sliding page: the full page of its block.
    siblings: Vec<Option<PageId>>,
    last: BlockId,
}

impl PrefixIndex {
    pub(crate) fn new(full_pages: usize, sliding_pages: usize) -> PrefixIndex {
        PrefixIndex {
            blocks: FxHashMap::default(),
            keys: vec![None; full_pages],
            siblings: vec![None; sliding_pages],
            last: BlockId(0),
        }
    }

    /// The block at a place of `content`, after `parent`.
    pub(crate) fn child(
        &self,
        parent: Parent,
        content: &Content<'_>,
        place: usize,
    ) -> Option<Block> {
        self.blocks.get(&Key::new(parent, content, place)).copied()
    }

    /// The cached blocks that `content` begins with, as far as they go. An incomplete page at the end is not looked for.
    pub(crate) fn walk<'a>(&'a self, content: Content<'a>) -> impl Iterator<Item = Block> + 'a {
        let mut parent = Parent::Root(content.salt);
        (0..content.tokens.len() / PAGE_TOKENS).map_while(move |place| {
            let block = self.child(parent, &content, place)?;
            parent = Parent::Block(block.id);
            Some(block)
        })
    }

    /// Registers a block that [`PrefixIndex::child`] does not find.
    pub(crate) fn insert(
        &mut self,
        parent: Parent,
        content: &Content<'_>,
        place: usize,
        pages: (PageId, Option<PageId>),
    ) -> Block {
        let key = Key::new(parent, content, place);
        let (full, sliding) = pages;
        self.last = BlockId(self.last.0 + 1);
        let block = Block {
            id: self.last,
            full,
            sliding,
        };
        let before = self.blocks.insert(key.clone(), block);
        debug_assert!(before.is_none(), "a block is registered once");
        self.keys[full.0 as usize] = Some(key);
        if let Some(sliding) = sliding {
            self.siblings[sliding.0 as usize] = Some(full);
        }
        block
    }

    /// Gives a block that lost its sliding page a new one.
    pub(crate) fn complete(&mut self, block: Block, sliding: PageId) {
        let known = self.block_of(block.full);
        debug_assert!(known.sliding.is_none(), "the block has a sliding page");
        known.sliding = Some(sliding);
        self.siblings[sliding.0 as usize] = Some(block.full);
    }

    /// The full page was given away: its block is no more. Returns the sliding page that has lost its use with it.
    pub(crate) fn evict_full(&mut self, page: PageId) -> Option<PageId> {
        let key = self.keys[page.0 as usize]
            .take()
            .expect("a kept page holds a block");
        let block = self
            .blocks
            .remove(&key)
            .expect("a block lives as long as its full page");
        if let Some(sliding) = block.sliding {
            self.siblings[sliding.0 as usize] = None;
        }
        block.sliding
    }

    /// The sliding page was given away: its block stays, but a prefix can end there no more.
    pub(crate) fn evict_sliding(&mut self, page: PageId) {
        let full = self.siblings[page.0 as usize]
            .take()
            .expect("a kept page belongs to a block");
        self.block_of(full).sliding = None;
    }

    fn block_of(&mut self, full: PageId) -> &mut Block {
        let key = self.keys[full.0 as usize].as_ref();
        self.blocks
            .get_mut(key.expect("a kept page holds a block"))
            .expect("a block lives as long as its full page")
    }
}

#[cfg(test)]
mod tests;
