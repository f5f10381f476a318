//! Pages beyond the memory of device and host: what is asked of whoever keeps them.

use std::{ops::Range, sync::Arc, time::Duration};

use carat_model::kv::KvGroup;

use super::chain::{BlockContents, ChainKey};

/// A block as a store knows it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct StoredBlock {
    /// Of everything up to its end.
    pub chain: ChainKey,
    /// Contents of the block, by which a page is compared before it is believed.
    pub contents: BlockContents,
}

/// Pages of one group of blocks that follow each other.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Segment {
    /// Group of layers that the pages belong to.
    pub group: KvGroup,
    /// Of everything before the first block.
    pub parent: ChainKey,
    /// In order; at least one.
    pub blocks: Vec<StoredBlock>,
    /// As many pages, one behind the other.
    pub pages: Vec<u8>,
}

/// A page that is to be read.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct WantedPage {
    /// Group of layers that the page belongs to.
    pub group: KvGroup,
    /// The block that it holds.
    pub block: StoredBlock,
}

/// A page, in what was read with it.
#[derive(Clone, Debug)]
pub struct PageBytes {
    /// All that was read at a time.
    pub buffer: Arc<Vec<u8>>,
    /// The page's part.
    pub range: Range<usize>,
}

impl PageBytes {
    pub(crate) fn bytes(&self) -> &[u8] {
        &self.buffer[self.range.clone()]
    }
}

/// Result of a [`PageStore::read`].
#[derive(Clone, Debug)]
pub struct ReadPages {
    /// As it was named.
    pub id: u64,
    /// For each page that was wanted; `None` if it is gone or was not what it should be.
    pub pages: Vec<Option<PageBytes>>,
}

/// Keeps pages across evictions, and across restarts. Nothing it returns is trusted beyond what it has checked itself: a page is
/// the one that was written for these very tokens, or it is missing.
pub trait PageStore {
    /// Whether it has the page of a block, as far as it knows.
    fn has(&self, group: KvGroup, chain: &ChainKey) -> bool;

    /// Whether reading so many bytes is faster than computing so many tokens.
    fn is_worth(&self, tokens: usize, bytes: u64) -> bool;

    /// Computing so many tokens of prompts took so long.
    fn observe(&mut self, tokens: usize, took: Duration);

    /// Begins to read pages. Returns the name of what is read.
    fn read(&mut self, wanted: Vec<WantedPage>) -> u64;

    /// Pages that have been read, the oldest first. Waits for them up to so long.
    fn finished(&mut self, patience: Duration) -> Option<ReadPages>;

    /// Whether segments are taken at all.
    fn writes(&self) -> bool;

    /// Whether a segment can be taken now, without waiting.
    fn takes_more(&mut self) -> bool;

    /// Waits until a segment has been written, up to so long.
    fn wait(&mut self, patience: Duration);

    /// Keeps a segment. It counts as kept at once.
    fn write(&mut self, segment: Segment);

    /// Size of its contents, and counts of its work.
    fn stats(&self) -> StoreStats;
}

/// Contents and work of a store.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct StoreStats {
    /// Bytes that it holds.
    pub bytes: u64,
    /// The most that it may hold.
    pub max_bytes: u64,
    /// Pages that were read and found right.
    pub pages_read: u64,
    /// Pages that were written.
    pub pages_written: u64,
    /// Files that were refused: damaged, cut short or another's.
    pub refused: u64,
}
