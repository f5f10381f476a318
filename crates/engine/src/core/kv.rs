//! KV pages as sequences use them: both pools and the prefix index, kept in step.
//!
//! A sequence owns a [`Table`]: it begins with the blocks that were found cached, grows ahead of each chunk, and after
//! the chunk hands its completed pages to the index and its sliding pages behind the window back. Rules that make this
//! safe:
//!
//! - Only complete pages are shared, and nobody writes a complete page. A sequence writes only pages it holds alone.
//! - When a sequence completes a block that the index has already, it swaps its own pages for the known ones. So
//!   whoever holds a block also holds every block before it, and a block is never evicted before those that follow it, whosever
//!   they are.
//! - A prefix can be continued only where all its full pages are cached *and* the sliding pages its next row sees, and not
//!   in the middle of rows that see each other both ways.
//! - A page that is given away is copied to host memory first if there is room for it, and copied back by whoever finds it there.
//! - A page belongs to what was computed last of what was handed out. Batches run in order, so pages may be given back while one
//!   that reads or writes them is under way: whoever gets them next comes after it.

mod stored;

use std::{collections::VecDeque, ops::Range};

use carat_model::{
    backend::{PageMove, TableRef},
    kv::{
        HostPageId, KvGroup, PAGE_TOKENS, PageId, PerGroup, first_visible_page, pages_of,
        window_pages,
    },
};

use super::{
    media::Content,
    moves::Moves,
    pages::{Allocation, Evicted, Eviction, PageCounts, Pool},
    prefix::{Block, Parent, Places, PrefixIndex, Slot},
    request::LaneId,
};
use crate::config::{Limits, PrefixReuse};

/// Reason no more of a prompt was found in the cache.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum MissReason {
    /// Reuse is switched off.
    Disabled,
    /// No complete page stands before the last token, which is always computed: its logits are needed.
    TooShort,
    /// No cached prompt begins like this one, as far back as is remembered.
    NoMatch,
    /// The cached prompts that begin like this one then go on otherwise.
    Diverged,
    /// More of the prompt was known, but its pages were given away, and no tier has kept them.
    Evicted,
    /// More of the prompt is known to the full-attention layers, but the sliding-window layers have lost the window
    /// there.
    SlidingEvicted,
    /// The known part ends within an image, which is computed as a whole.
    MediaCut,
    /// Log-probabilities of the prompt are asked for, which takes every row of it.
    Logprobs,
    /// More of the prompt is on disk, but computing it is faster than reading it.
    NotWorth,
    /// More of the prompt was on disk, but could not be read, or was not what it should have been.
    RestoreFailed,
}

/// Cached part of some tokens.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Found {
    /// Blocks to continue from.
    pub(crate) reusable: usize,
    /// Blocks the full group has; beyond `reusable` the sliding group lacks the window.
    pub(crate) matched: usize,
    /// Reusable blocks whose full page nobody holds yet, or that have none: taking them makes as many fewer available.
    pub(crate) unheld: usize,
    /// Reusable blocks that are in host memory alone.
    pub(crate) in_host: usize,
    pub(crate) miss: Option<MissReason>,
}

impl Found {
    /// Nothing, because nobody looked.
    pub(crate) fn nothing(miss: MissReason) -> Found {
        Found {
            reusable: 0,
            matched: 0,
            unheld: 0,
            in_host: 0,
            miss: Some(miss),
        }
    }
}

/// The pages of one sequence.
pub(crate) struct Table {
    /// By absolute place. Sliding pages behind the window read [`PageId::FREED`]; without sliding layers there are
    /// none.
    pub(crate) pages: PerGroup<Vec<PageId>>,
    /// Positions whose KV the pages hold.
    pub(crate) computed: usize,
    /// The first sliding page that is still held.
    first_sliding: usize,
    /// Of those from it on, pages that hold nothing for a later step.
    chunk_pages: usize,
    /// Complete pages known to the index, and the last of them.
    blocks: usize,
    last_block: Parent,
    /// Sliding pages worth keeping warm when the window has passed them: where a later prompt is likely to branch off.
    landmarks: [Range<usize>; 2],
    /// Lane that its pages count for.
    lane: Option<LaneId>,
    /// The name that executors know it by; `None` of a sequence that is not running.
    id: Option<u32>,
    /// Entries that the executor had before the step planned last, and will have if it takes that step.
    known: PerGroup<usize>,
    offered: PerGroup<usize>,
}

impl Table {
    /// Of a sequence that is not running.
    pub(crate) fn empty() -> Table {
        Table {
            pages: PerGroup::default(),
            computed: 0,
            first_sliding: 0,
            chunk_pages: 0,
            blocks: 0,
            last_block: Parent::Root(None),
            landmarks: [0..0, 0..0],
            lane: None,
            id: None,
            known: PerGroup::default(),
            offered: PerGroup::default(),
        }
    }

    /// It is part of a step that is planned now; the one before was taken.
    pub(crate) fn offer(&mut self) {
        self.known = self.offered;
        self.offered = PerGroup {
            full: self.pages.full.len(),
            sliding: self.pages.sliding.len(),
        };
    }

    /// The step planned last was not taken.
    fn withdraw(&mut self) {
        self.offered = self.known;
    }

    /// An entry is another page now.
    fn changed(&mut self, place: usize) {
        for entries in [&mut self.known, &mut self.offered] {
            *entries = entries.map(|entries| entries.min(place));
        }
    }

    /// As executors are told of it.
    pub(crate) fn table_ref(&self) -> Option<TableRef> {
        let unchanged = self.known;
        self.id.map(|id| TableRef { id, unchanged })
    }

    /// Sliding pages that it holds.
    pub(crate) fn held_sliding(&self) -> usize {
        self.pages.sliding.len() - self.first_sliding - self.chunk_pages
    }

    /// Positions in the sliding pages it would hold, if they were so many.
    pub(crate) fn sliding_room(&self, pages: usize) -> usize {
        (self.first_sliding + self.chunk_pages + pages) * PAGE_TOKENS
    }

    /// Whether a later prompt is likely to want a sliding page when the window has passed it.
    fn is_landmark(&self, place: usize) -> bool {
        self.landmarks.iter().any(|pages| pages.contains(&place))
    }
}

/// Where new rows of a sequence go whose sliding pages no later step sees.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Between {
    /// To pages like all others: a prompt that branches off among them finds them as long as nobody needs their place.
    Held,
    /// To chunk pages, but for landmarks.
    Passing,
    /// To chunk pages, all of them.
    AllPassing,
}

pub(crate) struct Kv {
    pools: PerGroup<Pool>,
    /// Pages that all sliding layers have at the same place, behind those of the pool: so many, and those that the step planned last
    /// has. What is in them is over with the step, so all are free again for the next, even while it is under way.
    chunk_pages: usize,
    used_chunk_pages: usize,
    /// Places in host memory: held while they are read, otherwise free or cached.
    host: PerGroup<Pool>,
    /// Copies that are due before the next batch.
    moves: Moves,
    index: PrefixIndex,
    window: Option<usize>,
    reuse: PrefixReuse,
    /// Pages of ended requests that a store may lack, the oldest first.
    ended: VecDeque<stored::Ended>,
    keeps_ended: bool,
    /// Names of tables that nobody has, and how many there are in all.
    free_ids: Vec<u32>,
    ids: u32,
}

impl Kv {
    pub(crate) fn new(limits: &Limits) -> Kv {
        let (pages, host_pages) = (limits.config().pages, limits.config().host_pages);
        Kv {
            pools: pages.map(Pool::new),
            chunk_pages: limits.config().chunk_pages,
            used_chunk_pages: 0,
            host: host_pages.map(Pool::new),
            moves: Moves::default(),
            index: PrefixIndex::new(pages, host_pages),
            window: limits.model().window,
            reuse: limits.config().prefix_reuse,
            ended: VecDeque::new(),
            keeps_ended: false,
            free_ids: Vec::new(),
            ids: 0,
        }
    }

    pub(crate) fn counts(&self) -> PerGroup<PageCounts> {
        PerGroup {
            full: self.pools.full.counts(),
            sliding: self.pools.sliding.counts(),
        }
    }

    /// Places in host memory by state.
    pub(crate) fn host_counts(&self) -> PerGroup<PageCounts> {
        PerGroup {
            full: self.host.full.counts(),
            sliding: self.host.sliding.counts(),
        }
    }

    /// Copies to be made before the next batch, a call of the executor each.
    pub(crate) fn take_moves(&mut self) -> Vec<Vec<PageMove>> {
        self.moves.take()
    }

    /// Full pages that can be allocated. Sliding pages need no such question: the scheduler reserves them.
    pub(crate) fn available(&self) -> usize {
        self.pools.full.available()
    }

    /// The longest cached prefix of `content` that a sequence can continue from.
    pub(crate) fn find(&self, content: Content<'_>) -> Found {
        if self.reuse == PrefixReuse::Disabled {
            return Found::nothing(MissReason::Disabled);
        }
        let mut found = Found {
            reusable: 0,
            matched: 0,
            unheld: 0,
            in_host: 0,
            miss: None,
        };
        let most = content.tokens.len().saturating_sub(1) / PAGE_TOKENS;
        let prefix = content.first(most);
        let mut last = Parent::Root(content.salt);
        // Of the blocks walked, those from here on all have a sliding page.
        let mut unbroken = 0;
        let (mut unheld, mut in_host) = (0, 0);
        for block in self.index.walk(prefix) {
            found.matched += 1;
            last = Parent::Block(block.id);
            let page = block.places.full.device;
            unheld += usize::from(page.is_none_or(|page| !self.pools.full.is_held(page)));
            in_host += usize::from(page.is_none());
            if block.places.sliding.is_nowhere() {
                unbroken = found.matched;
            }
            let window_cached = self.window.is_none_or(|window| {
                let first = first_visible_page(found.matched * PAGE_TOKENS, window);
                unbroken <= first
            });
            let boundary = found.matched * PAGE_TOKENS;
            if window_cached && content.span_across(boundary).is_none() {
                found.reusable = found.matched;
                (found.unheld, found.in_host) = (unheld, in_host);
            }
        }
        found.miss = if most == 0 {
            Some(MissReason::TooShort)
        } else if found.reusable < found.matched {
            let boundary = found.matched * PAGE_TOKENS;
            match content.span_across(boundary) {
                Some(_) => Some(MissReason::MediaCut),
                None => Some(MissReason::SlidingEvicted),
            }
        } else if found.matched == most {
            None
        } else if self.index.was_known(last, &content, found.matched) {
            Some(MissReason::Evicted)
        } else if found.matched == 0 {
            Some(MissReason::NoMatch)
        } else {
            Some(MissReason::Diverged)
        };
        found
    }

    /// A table that begins with what was found of `content`, the first `prompt` tokens of which are the request's own.
    pub(crate) fn claim(&mut self, content: Content<'_>, found: Found, prompt: usize) -> Table {
        let mut table = Table::empty();
        table.id = self.free_ids.pop().or_else(|| {
            self.ids += 1;
            Some(self.ids - 1)
        });
        table.last_block = Parent::Root(content.salt);
        table.lane = content.lane;
        table.blocks = found.reusable;
        table.computed = found.reusable * PAGE_TOKENS;
        if let Some(window) = self.window {
            table.first_sliding = first_visible_page(table.computed, window).min(found.reusable);
            table.landmarks = landmarks(found.matched, prompt, window);
        }
        let prefix = content.first(found.reusable);
        let blocks: Vec<Block> = self.index.walk(prefix).collect();
        if let Some(last) = blocks.last() {
            table.last_block = Parent::Block(last.id);
        }
        // Nothing of it may be given away to make room for the rest of it.
        let held = self.hold(&table, &blocks);
        for (place, block) in blocks.iter().enumerate() {
            let page = self.on_device(block, KvGroup::Full, table.lane);
            table.pages.full.push(page);
            if self.window.is_some() {
                let page = if place >= table.first_sliding {
                    self.on_device(block, KvGroup::Sliding, table.lane)
                } else {
                    PageId::FREED
                };
                table.pages.sliding.push(page);
            }
        }
        // The deepest first, as on the device.
        for (group, page) in held.into_iter().rev() {
            self.host.get_mut(group).release(page, Eviction::Last);
        }
        table
    }

    /// Holds the pages of blocks that a table is to begin with. Returns the places in host memory that are held with them, for those
    /// that are not on the device.
    fn hold(&mut self, table: &Table, blocks: &[Block]) -> Vec<(KvGroup, PageId)> {
        let mut held = Vec::new();
        for (place, block) in blocks.iter().enumerate() {
            for group in KvGroup::ALL {
                let is_wanted = match group {
                    KvGroup::Full => true,
                    KvGroup::Sliding => self.window.is_some() && place >= table.first_sliding,
                };
                let places = block.places.get(group);
                if let Some(page) = places.device.filter(|_| is_wanted) {
                    self.pools.get_mut(group).hold(page, table.lane);
                } else if let Some(host) = places.host.filter(|_| is_wanted) {
                    let page = PageId(host.0);
                    self.host.get_mut(group).hold(page, table.lane);
                    held.push((group, page));
                }
            }
        }
        held
    }

    /// The page of a block that was found and is held, which it is copied to if it is in host memory alone.
    fn on_device(&mut self, block: &Block, group: KvGroup, lane: Option<LaneId>) -> PageId {
        let places = *block.places.get(group);
        if let Some(page) = places.device {
            return page;
        }
        let page = self.allocate(group, lane);
        self.index.put_on_device(block.id.slot, group, page);
        self.pools.get_mut(group).keep(page);
        let from = places.host.expect("it was found somewhere");
        self.moves.push(PageMove::Load {
            group,
            from,
            to: page,
        });
        page
    }

    /// Positions that a table has full pages for, those that are available included.
    pub(crate) fn room(&self, table: &Table) -> usize {
        (table.pages.full.len() + self.available()) * PAGE_TOKENS
    }

    /// Whether all of these tables can have so many positions, with the full pages that are available now.
    pub(crate) fn can_grow<'a>(&self, tables: impl Iterator<Item = (&'a Table, usize)>) -> bool {
        let more = |(table, positions): (&Table, usize)| {
            pages_of(positions).saturating_sub(table.pages.full.len())
        };
        tables.map(more).sum::<usize>() <= self.available()
    }

    /// A step is planned from now on.
    pub(crate) fn begin_step(&mut self) {
        self.used_chunk_pages = 0;
    }

    /// The way for a sequence to have `positions` in all, if it may hold so many sliding pages more; `None` if it cannot have as many
    /// at once.
    pub(crate) fn between(&self, table: &Table, positions: usize, more: usize) -> Option<Between> {
        let Some(window) = self.window else {
            return Some(Between::Held);
        };
        let now = table.pages.sliding.len();
        let new = pages_of(positions).saturating_sub(now);
        let passed = now..first_visible_page(positions, window).max(now);
        if passed.is_empty() || passed.len() > self.chunk_pages - self.used_chunk_pages {
            return (new <= more).then_some(Between::Held);
        }
        // At the most, wherever the window begins in a page: it may yet be for fewer positions.
        let last = new.min(window_pages(window));
        // With room for as much again, so that a step ahead is not cut short.
        if new + last <= more && new <= self.pools.sliding.unwanted() {
            return Some(Between::Held);
        }
        let landmarks = passed.filter(|place| table.is_landmark(*place)).count();
        match more {
            more if last + landmarks <= more => Some(Between::Passing),
            more if last <= more => Some(Between::AllPassing),
            _ => None,
        }
    }

    /// Allocates pages for `positions` in all, which must fit.
    pub(crate) fn grow(&mut self, table: &mut Table, positions: usize, between: Between) {
        let pages = pages_of(positions);
        while table.pages.full.len() < pages {
            let page = self.allocate(KvGroup::Full, table.lane);
            table.pages.full.push(page);
        }
        if self.window.is_some() {
            let passed = self
                .window
                .map_or(0, |window| first_visible_page(positions, window));
            while table.pages.sliding.len() < pages {
                let place = table.pages.sliding.len();
                let passes = place < passed
                    && match between {
                        Between::Held => false,
                        Between::Passing => !table.is_landmark(place),
                        Between::AllPassing => true,
                    };
                let page = if passes {
                    table.chunk_pages += 1;
                    self.chunk_page()
                } else {
                    self.allocate(KvGroup::Sliding, table.lane)
                };
                table.pages.sliding.push(page);
            }
        }
    }

    /// A page that the step being planned has for itself.
    fn chunk_page(&mut self) -> PageId {
        debug_assert!(
            self.used_chunk_pages < self.chunk_pages,
            "rows were limited"
        );
        let page = self.pools.sliding.len() + self.used_chunk_pages;
        self.used_chunk_pages += 1;
        PageId(page as u32)
    }

    fn is_chunk_page(&self, page: PageId) -> bool {
        page.0 as usize >= self.pools.sliding.len()
    }

    /// Gives back a sliding page of a table.
    fn release_sliding(&mut self, table: &mut Table, page: PageId, eviction: Eviction) {
        if self.is_chunk_page(page) {
            table.chunk_pages -= 1;
        } else {
            self.pools.sliding.release(page, eviction);
        }
    }

    /// Takes a table back to what it was before a step that was not taken: gives back the pages behind `positions`, which nothing
    /// has been computed into.
    pub(crate) fn shrink(&mut self, table: &mut Table, positions: usize) {
        let pages = pages_of(positions);
        table.withdraw();
        table.changed(pages);
        while table.pages.full.len() > pages {
            let page = table.pages.full.pop().expect("there are more");
            self.pools.full.release(page, Eviction::First);
        }
        while table.pages.sliding.len() > pages {
            let page = table.pages.sliding.pop().expect("there are more");
            self.release_sliding(table, page, Eviction::First);
        }
    }

    /// A page for one holder. There is one: rows are limited to the full pages that fit, and sliding pages are reserved at admission.
    fn allocate(&mut self, group: KvGroup, lane: Option<LaneId>) -> PageId {
        let index = &self.index;
        let may_go = |page| index.may_leave_device(group, page);
        let allocation = self.pools.get_mut(group).allocate(lane, may_go);
        let Allocation { page, evicted } = allocation.expect("rows were limited to those that fit");
        if let Some(evicted) = evicted {
            let block = self.index.take_from_device(group, page);
            if let Some(before) = self.index.before(block.id.slot) {
                self.put_back(before);
            }
            self.save(&block, group, page, evicted);
            self.forget_if_lost(block.id.slot);
        }
        page
    }

    /// Has the page of a block copied to host memory before somebody else writes to it. Sliding pages that no prefix is likely to
    /// end behind are not worth it.
    fn save(&mut self, block: &Block, group: KvGroup, from: PageId, evicted: Evicted) {
        let pool = self.host.get_mut(group);
        if let Some(host) = block.places.get(group).host {
            if !pool.is_held(PageId(host.0)) {
                pool.touch(PageId(host.0));
            }
            return;
        }
        if evicted.eviction == Eviction::First {
            return;
        }
        let index = &self.index;
        let may_go = |page: PageId| index.may_leave_host(group, HostPageId(page.0));
        let Some(Allocation { page, evicted }) = pool.allocate(evicted.lane, may_go) else {
            return;
        };
        pool.keep(page);
        pool.release(page, Eviction::Last);
        let to = HostPageId(page.0);
        if evicted.is_some() {
            let lost = self.index.take_from_host(group, to);
            self.forget_if_lost(lost.id.slot);
        }
        self.index.put_in_host(block.id.slot, group, to);
        self.moves.push(PageMove::Save { group, from, to });
    }

    /// Forgets a block if its KV of full attention is nowhere any more. Whoever held its sliding page would hold the full page too.
    fn forget_if_lost(&mut self, slot: Slot) {
        let places = self.index.places(slot);
        if !places.full.is_nowhere() {
            return;
        }
        let group = KvGroup::Sliding;
        if let Some(page) = places.sliding.device {
            self.index.take_from_device(group, page);
            self.pools.sliding.forget(page);
        }
        if let Some(host) = places.sliding.host {
            self.index.take_from_host(group, host);
            self.host.sliding.forget(PageId(host.0));
        }
        let before = self.index.before(slot);
        self.index.remove(slot);
        if let Some(before) = before {
            self.put_back(before);
        }
    }

    /// Has the pages of a block given away in turn again, if they were passed over for blocks that follow it and need not be any more.
    fn put_back(&mut self, slot: Slot) {
        let group = KvGroup::Full;
        let Places { device, host } = self.index.places(slot).full;
        if let Some(page) = device.filter(|page| self.index.may_leave_device(group, *page)) {
            self.pools.full.put_back(page);
        }
        if let Some(host) = host.filter(|host| self.index.may_leave_host(group, *host)) {
            self.host.full.put_back(PageId(host.0));
        }
    }

    /// The next `rows` positions of `content` have been computed into the table's pages. Rows that were computed beyond them, of
    /// a draft that was wrong, are forgotten: what is computed next is written over them.
    pub(crate) fn commit(&mut self, table: &mut Table, content: Content<'_>, rows: usize) {
        table.computed += rows;
        if self.reuse == PrefixReuse::Enabled {
            while (table.blocks + 1) * PAGE_TOKENS <= table.computed {
                self.register(table, &content);
            }
        }
        self.release_behind_window(table);
    }

    /// Makes the table's next complete page known, or swaps it for the one that is.
    fn register(&mut self, table: &mut Table, content: &Content<'_>) {
        let place = table.blocks;
        let known = self.index.child(table.last_block, content, place);
        let block = match known {
            Some(block) => block,
            None => self.index.insert(table.last_block, content, place),
        };
        for group in KvGroup::ALL {
            // The page was completed just now, so at least its last row was still visible: it is held, or it passes with the step.
            let Some(own) = table.pages.get_mut(group).get_mut(place) else {
                continue;
            };
            if group == KvGroup::Sliding && self.is_chunk_page(*own) {
                continue;
            }
            let pool = self.pools.get_mut(group);
            if let Some(known) = block.places.get(group).device {
                if swap(pool, own, known, table.lane) {
                    table.changed(place);
                }
            } else {
                pool.keep(*own);
                self.index.put_on_device(block.id.slot, group, *own);
            }
        }
        self.put_back(block.id.slot);
        table.last_block = Parent::Block(block.id);
        table.blocks += 1;
    }

    /// Gives back sliding pages that steps under way are the last to see: what is planned next is computed after them, and may be
    /// written there. Those that the index does not know yet wait for their step, so that it will.
    pub(crate) fn release_behind_steps(&mut self, table: &mut Table, fed: usize) {
        let known = match self.reuse {
            PrefixReuse::Enabled => table.blocks,
            PrefixReuse::Disabled => usize::MAX,
        };
        self.release_behind(table, fed, known);
    }

    fn release_behind_window(&mut self, table: &mut Table) {
        let computed = table.computed;
        self.release_behind(table, computed, usize::MAX);
    }

    /// Gives back sliding pages that no row at a position or behind it sees, out of the first `most`.
    fn release_behind(&mut self, table: &mut Table, position: usize, most: usize) {
        let Some(window) = self.window else { return };
        let first = first_visible_page(position, window);
        let first = first.min(table.pages.sliding.len()).min(most);
        for place in table.first_sliding..first {
            let page = std::mem::replace(&mut table.pages.sliding[place], PageId::FREED);
            let eviction = if table.is_landmark(place) {
                Eviction::Last
            } else {
                Eviction::First
            };
            self.release_sliding(table, page, eviction);
        }
        table.first_sliding = table.first_sliding.max(first);
    }

    /// Gives back every page. What the index knows stays cached.
    pub(crate) fn release(&mut self, table: &mut Table) {
        self.note_ended(table);
        let mut table = std::mem::replace(table, Table::empty());
        let pages = std::mem::take(&mut table.pages);
        self.free_ids.extend(table.id);
        // The deepest first: it is evicted first, and the blocks before it are of use without it.
        for page in pages.full.into_iter().rev() {
            self.pools.full.release(page, Eviction::Last);
        }
        for page in pages.sliding.into_iter().skip(table.first_sliding).rev() {
            self.release_sliding(&mut table, page, Eviction::Last);
        }
    }
}

/// Takes the known page instead of the own one. `false` if they are the same.
fn swap(pool: &mut Pool, own: &mut PageId, known: PageId, lane: Option<LaneId>) -> bool {
    if *own == known {
        return false;
    }
    pool.hold(known, lane);
    // Nobody knows it, so it becomes free wherever it would stand.
    pool.release(*own, Eviction::First);
    *own = known;
    true
}

/// Positions where a later prompt is likely to branch off from this one, as the sliding pages it would need there.
///
/// One place is where this prompt branched off itself. The other is its end: the next turn of a chat repeats it, but
/// then has the answer without its thoughts. The end of a prompt is itself often rewritten in the next turn, by a few
/// tokens, so a page before it counts as well.
fn landmarks(matched: usize, prompt: usize, window: usize) -> [Range<usize>; 2] {
    let visible_from = |blocks: usize| first_visible_page(blocks * PAGE_TOKENS, window);
    let repeated = (prompt.saturating_sub(1) / PAGE_TOKENS).saturating_sub(1);
    [
        visible_from(matched)..matched,
        visible_from(repeated)..prompt / PAGE_TOKENS,
    ]
}

#[cfg(test)]
mod tests;
