//! Pages of a prompt that a store has beyond memory, and those in memory that a store lacks.

use std::ops::Range;

use carat_model::kv::{KvGroup, PAGE_TOKENS, PageId, PerGroup, first_visible_page};

use super::{
    super::{
        chain::{BlockContents, ChainKey},
        media::Content,
        pages::Eviction,
        prefix::{Block, Link, Parent, Places},
        store::StoredBlock,
    },
    Kv, Table,
};
use crate::config::PrefixReuse;

/// Blocks of a segment.
const MAX_BLOCKS: usize = 32;
/// Bytes of a segment, if it has more than one block: what is read at a time, and held in memory.
const MAX_BYTES: usize = 64 << 20;
/// Ended requests that are remembered until a store has what they left.
const MAX_ENDED: usize = 256;

/// Pages that an ended request has left behind.
pub(crate) struct Ended {
    last: Parent,
    /// Sliding pages that a later prompt may need, in blocks.
    windows: [Range<usize>; 3],
}

/// Pages of a prompt that a store has beyond those in memory.
pub(crate) struct Stored {
    /// All blocks of the prompt up to where it could be continued from.
    pub(crate) blocks: Vec<StoredBlock>,
    /// Blocks by which that is further than without the store.
    pub(crate) more_blocks: usize,
    /// Pages to be read for it: full ones first, in order.
    pub(crate) wanted: Vec<(KvGroup, usize)>,
}

/// Blocks that follow each other whose pages a store lacks.
pub(crate) struct Unsaved {
    pub(crate) group: KvGroup,
    pub(crate) parent: ChainKey,
    pub(crate) blocks: Vec<StoredBlock>,
    pub(crate) places: Vec<Places>,
}

impl Kv {
    /// Remembers from now on what ended requests leave behind.
    pub(crate) fn keep_ended(&mut self) {
        self.keeps_ended = self.reuse == PrefixReuse::Enabled;
    }

    /// Remembers what a table leaves behind that is about to be given back.
    pub(super) fn note_ended(&mut self, table: &Table) {
        if !self.keeps_ended || table.blocks == 0 {
            return;
        }
        let [branch, prompt] = table.landmarks.clone();
        let end = table.first_sliding.min(table.blocks)..table.blocks;
        self.ended.push_back(Ended {
            last: table.last_block,
            windows: [end, prompt, branch],
        });
        if self.ended.len() > MAX_ENDED {
            self.ended.pop_front();
        }
    }

    /// Whether ended requests may have left something that a store lacks.
    pub(crate) fn has_ended(&self) -> bool {
        !self.ended.is_empty()
    }

    /// Pages of a prompt that a store has beyond those in memory; `None` if they are of no use.
    pub(crate) fn beyond(
        &self,
        content: Content<'_>,
        has: &impl Fn(KvGroup, &ChainKey) -> bool,
    ) -> Option<Stored> {
        if self.reuse == PrefixReuse::Disabled {
            return None;
        }
        let most = content.tokens.len().saturating_sub(1) / PAGE_TOKENS;
        let prefix = content.first(most);
        let known: Vec<Block> = self.index.walk(prefix).collect();
        let in_memory = |group: KvGroup, place: usize| {
            known
                .get(place)
                .is_some_and(|b| !b.places.get(group).is_nowhere())
        };
        let mut blocks: Vec<StoredBlock> = Vec::new();
        let mut chain = ChainKey::root(content.salt);
        // The first block from which on all have a sliding page, and the last boundary that can be continued from.
        let (mut unbroken, mut reusable) = (0, 0);
        for place in 0..most {
            let contents = BlockContents::new(&content, place);
            chain = chain.then(&contents);
            if !in_memory(KvGroup::Full, place) && !has(KvGroup::Full, &chain) {
                break;
            }
            if !in_memory(KvGroup::Sliding, place) && !has(KvGroup::Sliding, &chain) {
                unbroken = place + 1;
            }
            blocks.push(StoredBlock { chain, contents });
            let boundary = blocks.len() * PAGE_TOKENS;
            let seen = |window| first_visible_page(boundary, window);
            let is_whole = self.window.is_none_or(|window| unbroken <= seen(window));
            if is_whole && content.span_across(boundary).is_none() {
                reusable = blocks.len();
            }
        }
        // Pages are held for the whole prompt at the most.
        reusable = reusable.min(self.pools.full.len());
        let found = self.find(content).reusable;
        if reusable <= found {
            return None;
        }
        blocks.truncate(reusable);
        let full = (0..reusable).filter(|place| !in_memory(KvGroup::Full, *place));
        let mut wanted: Vec<_> = full.map(|place| (KvGroup::Full, place)).collect();
        if let Some(window) = self.window {
            let first = first_visible_page(reusable * PAGE_TOKENS, window).min(reusable);
            let sliding = (first..reusable).filter(|p| !in_memory(KvGroup::Sliding, *p));
            wanted.extend(sliding.map(|place| (KvGroup::Sliding, place)));
        }
        Some(Stored {
            blocks,
            more_blocks: reusable - found,
            wanted,
        })
    }

    /// Registers pages of a prompt that were read, as cached ones. Full ones come first, in order. Returns the page on the device
    /// that each is to be copied to; `None` for those that are there by now, have no room, or follow one that is missing.
    pub(crate) fn restore(
        &mut self,
        content: Content<'_>,
        wanted: &[(KvGroup, usize)],
    ) -> Vec<Option<PageId>> {
        let blocks = content.tokens.len() / PAGE_TOKENS;
        let mut known: Vec<Block> = self.index.walk(content.first(blocks)).collect();
        // What is there must not be given away for what is added.
        let mut held: Vec<(usize, KvGroup, PageId)> = Vec::new();
        for (place, block) in known.iter().enumerate() {
            for group in KvGroup::ALL {
                if let Some(page) = block.places.get(group).device {
                    self.pools.get_mut(group).hold(page, content.lane);
                    held.push((place, group, page));
                }
            }
        }
        let mut pages = Vec::with_capacity(wanted.len());
        for &(group, place) in wanted {
            let is_next = group == KvGroup::Full && place == known.len();
            let is_missing = known
                .get(place)
                .is_some_and(|b| b.places.get(group).is_nowhere());
            // A block can't be on the device behind one that is not.
            let follows = known
                .get(place.wrapping_sub(1))
                .is_none_or(|before| before.places.full.device.is_some());
            let has_room = self.pools.get(group).available() > 0;
            if !(is_missing || is_next && follows) || !has_room {
                pages.push(None);
                continue;
            }
            if is_next {
                let parent = known.last();
                let parent = parent.map_or(Parent::Root(content.salt), |b| Parent::Block(b.id));
                known.push(self.index.insert(parent, &content, place));
            }
            let page = self.allocate(group, content.lane);
            self.index.put_on_device(known[place].id.slot, group, page);
            known[place].places.get_mut(group).device = Some(page);
            self.pools.get_mut(group).keep(page);
            held.push((place, group, page));
            pages.push(Some(page));
        }
        // The deepest first: it is given away first, and the blocks before it are of use without it.
        held.sort_unstable_by_key(|(place, ..)| std::cmp::Reverse(*place));
        for (_, group, page) in held {
            self.pools.get_mut(group).release(page, Eviction::Last);
        }
        pages
    }

    /// The next blocks that ended requests have left and a store lacks: windows first, without which the rest is of no use.
    pub(crate) fn next_unsaved(
        &mut self,
        has: &impl Fn(KvGroup, &ChainKey) -> bool,
        page_bytes: PerGroup<usize>,
    ) -> Option<Unsaved> {
        while let Some(ended) = self.ended.front() {
            if let Some(links) = self.index.lineage(ended.last) {
                let root = ended.windows.iter().filter(|_| self.window.is_some());
                for window in root {
                    let window = window.start.min(links.len())..window.end.min(links.len());
                    let is_there = |link: &Link| {
                        let group = KvGroup::Sliding;
                        !link.places.sliding.is_nowhere() || has(group, &link.chain)
                    };
                    if !links[window.clone()].iter().all(is_there) {
                        continue;
                    }
                    let group = KvGroup::Sliding;
                    if let Some(run) = run(&links, window, group, has, *page_bytes.get(group)) {
                        return Some(self.unsaved(&links, run, group, ended));
                    }
                }
                let group = KvGroup::Full;
                let all = 0..links.len();
                if let Some(run) = run(&links, all, group, has, *page_bytes.get(group)) {
                    return Some(self.unsaved(&links, run, group, ended));
                }
            }
            self.ended.pop_front();
        }
        None
    }

    fn unsaved(&self, links: &[Link], run: Range<usize>, group: KvGroup, ended: &Ended) -> Unsaved {
        let before = run.start.checked_sub(1);
        let root = || self.index.root_of(ended.last);
        let blocks = links[run.clone()].iter().map(|link| StoredBlock {
            chain: link.chain,
            contents: link.contents.clone(),
        });
        let places = links[run.clone()].iter();
        Unsaved {
            group,
            parent: before.map_or_else(root, |before| links[before].chain),
            blocks: blocks.collect(),
            places: places.map(|link| *link.places.get(group)).collect(),
        }
    }
}

/// The first blocks of a range that follow each other, are somewhere and are not in the store.
fn run(
    links: &[Link],
    range: Range<usize>,
    group: KvGroup,
    has: &impl Fn(KvGroup, &ChainKey) -> bool,
    page_bytes: usize,
) -> Option<Range<usize>> {
    let lacks = |link: &Link| {
        let is_there = !link.places.get(group).is_nowhere();
        is_there && !has(group, &link.chain)
    };
    let first = range.clone().find(|place| lacks(&links[*place]))?;
    let most = (MAX_BYTES / page_bytes.max(1)).clamp(1, MAX_BLOCKS);
    let last = (first..range.end.min(first + most)).take_while(|place| lacks(&links[*place]));
    Some(first..first + last.count())
}
