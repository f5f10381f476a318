//! The pages of one KV group: who holds them, and in which order they are given away.
//!
//! A page is *free* (its contents mean nothing), *held* by one or more sequences, or *cached*: held by nobody, but
//! kept because the prefix index knows what it contains. Cached pages are given away only when none is free. The pool knows nothing
//! of contents; whoever allocates says which cached pages may go, and hears when one was taken.
//!
//! A page belongs to the lane that used it last. The lane with the most pages gives one first, the longest unused: a lane that has no
//! more than its share of the pool keeps what it has, whatever others compute. Lanes that have long used nothing have no share and
//! give before all others. One lane alone gives by age.

use std::collections::BTreeSet;

use carat_model::kv::PageId;
use rustc_hash::FxHashMap;

use super::request::LaneId;

/// Times that a pool's pages are allocated over, after which a lane that has used none of them has no share.
const IDLE_TURNOVERS: u64 = 16;
/// Lane of a page that is free.
const NOBODY: u32 = u32::MAX;

/// Position among the cached pages that a page takes when nobody holds it any more.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Eviction {
    /// Behind all others of its lane: given away last.
    Last,
    /// Before all others, whosever they are: unlikely to be asked for again, so it must not push out what is likelier.
    First,
}

/// A page for its only holder.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Allocation {
    pub(crate) page: PageId,
    /// It was cached until now: what the index says of it no longer holds.
    pub(crate) evicted: Option<Evicted>,
}

/// A cached page as it was before it was given away.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Evicted {
    pub(crate) eviction: Eviction,
    /// Lane that it belonged to.
    pub(crate) lane: Option<LaneId>,
}

/// Number of pages in each state.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct PageCounts {
    /// Their contents mean nothing.
    pub free: usize,
    /// Held by nobody, but known to the prefix index.
    pub cached: usize,
    /// In use by requests that run.
    pub held: usize,
}

#[derive(Clone, Copy, Debug)]
struct Page {
    holders: u32,
    /// Registered in the prefix index.
    kept: bool,
    /// Of a cached page.
    eviction: Eviction,
    /// Number of the lane that it belongs to, or [`NOBODY`].
    lane: u32,
    /// Neighbours in a ring of cached pages; the page itself if it was passed over.
    colder: u32,
    warmer: u32,
}

impl Page {
    /// A free page, or the place between the two ends of a ring without others.
    fn alone(at: u32) -> Page {
        Page {
            holders: 0,
            kept: false,
            eviction: Eviction::First,
            lane: NOBODY,
            colder: at,
            warmer: at,
        }
    }
}

/// Those whose pages are counted together, as long as they have one.
#[derive(Clone, Copy, Debug)]
struct Lane {
    id: Option<LaneId>,
    /// Pages that belong to it, held and cached.
    pages: usize,
    /// The count of allocations when it last used a page.
    used_at: u64,
    /// That is long ago: it has no share.
    is_idle: bool,
    /// As it stands among the ranks, which may be out of date.
    ranked: Option<Rank>,
    is_stale: bool,
}

/// Position of a lane in the order in which lanes give, the greatest first; the number only tells equals apart.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
struct Rank {
    is_idle: bool,
    pages: usize,
    number: u32,
}

impl Lane {
    fn rank(&self, number: u32) -> Rank {
        Rank {
            is_idle: self.is_idle,
            pages: self.pages,
            number,
        }
    }
}

pub(crate) struct Pool {
    /// Behind the pages stands a place between the two ends of each ring of cached pages, so that its `warmer` is the coldest page and
    /// its `colder` the warmest: first that of the pages which go before all others, then each lane's.
    pages: Vec<Page>,
    count: usize,
    free: Vec<PageId>,
    cached: usize,
    /// Cached ones that go before all others.
    unwanted: usize,
    /// By number; the numbers of those that have pages are known by name.
    lanes: Vec<Lane>,
    /// Those that have pages, but for those that have changed since a lane had to give: most pages are allocated while some are free.
    ranks: BTreeSet<Rank>,
    stale: Vec<u32>,
    numbers: FxHashMap<Option<LaneId>, u32>,
    vacant: Vec<u32>,
    allocations: u64,
}

impl Pool {
    pub(crate) fn new(count: usize) -> Pool {
        let ends = u32::try_from(count).expect("page numbers fit u32");
        Pool {
            pages: vec![Page::alone(ends); count + 1],
            count,
            // Low numbers first: a lightly used engine touches few pages.
            free: (0..ends).rev().map(PageId).collect(),
            cached: 0,
            unwanted: 0,
            lanes: Vec::new(),
            ranks: BTreeSet::new(),
            stale: Vec::new(),
            numbers: FxHashMap::default(),
            vacant: Vec::new(),
            allocations: 0,
        }
    }

    /// All pages.
    pub(crate) fn len(&self) -> usize {
        self.count
    }

    pub(crate) fn counts(&self) -> PageCounts {
        PageCounts {
            free: self.free.len(),
            cached: self.cached,
            held: self.count - self.available(),
        }
    }

    /// Pages that can be allocated.
    pub(crate) fn available(&self) -> usize {
        self.free.len() + self.cached
    }

    /// Pages that can be allocated and that nobody is likely to miss.
    pub(crate) fn unwanted(&self) -> usize {
        self.free.len() + self.unwanted
    }

    /// Makes a cached page the last of its lane to be given away.
    pub(crate) fn touch(&mut self, page: PageId) {
        self.unlink(page);
        self.link(page, Eviction::Last);
    }

    pub(crate) fn is_held(&self, page: PageId) -> bool {
        self.pages[page.0 as usize].holders > 0
    }

    /// A page with one holder, of this lane; `None` if every page is held. Of cached ones, one that `may_go`; the others that come
    /// before it are passed over until they are [put back](Pool::put_back).
    pub(crate) fn allocate(
        &mut self,
        lane: Option<LaneId>,
        may_go: impl Fn(PageId) -> bool,
    ) -> Option<Allocation> {
        let (page, evicted) = if let Some(page) = self.free.pop() {
            (page, None)
        } else {
            let page = self.victim(lane, &may_go)?;
            #[cfg(test)]
            self.audit_victim(page, lane, &may_go);
            self.unlink(page);
            let entry = &mut self.pages[page.0 as usize];
            entry.kept = false;
            let evicted = Evicted {
                eviction: entry.eviction,
                lane: self.lanes[entry.lane as usize].id,
            };
            (page, Some(evicted))
        };
        self.allocations += 1;
        if self.allocations.is_multiple_of(self.count as u64) {
            self.find_idle();
        }
        self.pages[page.0 as usize].holders = 1;
        self.own(page, lane);
        Some(Allocation { page, evicted })
    }

    /// The cached page that is given away next, to this lane.
    fn victim(&mut self, to: Option<LaneId>, may_go: &impl Fn(PageId) -> bool) -> Option<PageId> {
        if let Some(first) = self.coldest(self.count) {
            return Some(first);
        }
        self.rank();
        loop {
            let page = self.coldest(self.ends_of(self.giver(to)?))?;
            if may_go(page) {
                return Some(page);
            }
            debug_assert!(self.lanes.len() > 1, "{page:?} is needed by its own lane");
            self.pass_over(page);
        }
    }

    /// The lane that gives a page next, to this one.
    fn giver(&self, to: Option<LaneId>) -> Option<u32> {
        let gives = |number: &u32| self.coldest(self.ends_of(*number)).is_some();
        // Before it come at most those that hold all they have, no more than there are sequences, and those all of whose pages were
        // passed over.
        let mut ranks = self.ranks.iter().rev();
        let most = ranks.find(|rank| gives(&rank.number))?;
        // Of equals whoever asks: it would have the most.
        let own = self.numbers.get(&to).copied().filter(gives);
        let equal = |number: &u32| {
            let number = *number;
            self.lanes[number as usize].rank(number) == Rank { number, ..*most }
        };
        Some(own.filter(equal).unwrap_or(most.number))
    }

    /// The page of a ring that has been there the longest.
    fn coldest(&self, ends: usize) -> Option<PageId> {
        let page = self.pages[ends].warmer;
        (page as usize != ends).then_some(PageId(page))
    }

    /// Takes a cached page out of its ring: it cannot go yet, and must not be looked at for every allocation until then.
    fn pass_over(&mut self, page: PageId) {
        self.unlink(page);
        let entry = &mut self.pages[page.0 as usize];
        (entry.colder, entry.warmer) = (page.0, page.0);
        self.cached += 1;
    }

    /// A page may go from now on. If it was passed over, it is the next that its lane gives: all others were used after it.
    pub(crate) fn put_back(&mut self, page: PageId) {
        if self.is_passed_over(page) {
            self.unlink(page);
            let ends = self.ends_of(self.pages[page.0 as usize].lane);
            self.insert(page, ends as u32, self.pages[ends].warmer);
        }
    }

    /// Whether a page is cached, but not given away in turn.
    pub(crate) fn is_passed_over(&self, page: PageId) -> bool {
        let entry = &self.pages[page.0 as usize];
        entry.holders == 0 && entry.kept && entry.warmer == page.0
    }

    /// Place between the ends of a lane's ring.
    fn ends_of(&self, number: u32) -> usize {
        self.count + 1 + number as usize
    }

    /// Finds lanes that have used nothing for long. Done once in as many allocations as there are pages, hence lanes at the most.
    fn find_idle(&mut self) {
        let long = IDLE_TURNOVERS * self.count as u64;
        for number in 0..self.lanes.len() as u32 {
            let lane = &self.lanes[number as usize];
            if lane.pages > 0 && !lane.is_idle && self.allocations - lane.used_at > long {
                self.change(number, |lane| lane.is_idle = true);
            }
        }
    }

    /// Changes what a lane's rank depends on.
    fn change(&mut self, number: u32, change: impl FnOnce(&mut Lane)) {
        let lane = &mut self.lanes[number as usize];
        change(lane);
        if !std::mem::replace(&mut lane.is_stale, true) {
            self.stale.push(number);
        }
    }

    /// Ranks lanes by what they have now.
    fn rank(&mut self) {
        for number in self.stale.drain(..) {
            let lane = &mut self.lanes[number as usize];
            lane.is_stale = false;
            let rank = (lane.pages > 0).then(|| lane.rank(number));
            if let Some(before) = std::mem::replace(&mut lane.ranked, rank) {
                self.ranks.remove(&before);
            }
            self.ranks.extend(rank);
        }
    }

    /// Number of a lane, which it has as long as pages belong to it.
    fn number(&mut self, id: Option<LaneId>) -> u32 {
        if let Some(number) = self.numbers.get(&id) {
            return *number;
        }
        let lane = Lane {
            id,
            pages: 0,
            used_at: self.allocations,
            is_idle: false,
            ranked: None,
            is_stale: false,
        };
        let number = if let Some(number) = self.vacant.pop() {
            // The one before may be ranked still.
            let Lane {
                ranked, is_stale, ..
            } = self.lanes[number as usize];
            self.lanes[number as usize] = Lane {
                ranked,
                is_stale,
                ..lane
            };
            number
        } else {
            self.lanes.push(lane);
            let ends = self.pages.len() as u32;
            self.pages.push(Page::alone(ends));
            self.lanes.len() as u32 - 1
        };
        self.numbers.insert(id, number);
        number
    }

    /// A page that is in no ring belongs to this lane from now on.
    fn own(&mut self, page: PageId, lane: Option<LaneId>) {
        let number = self.number(lane);
        if self.pages[page.0 as usize].lane != number {
            self.disown(page);
            self.pages[page.0 as usize].lane = number;
            self.change(number, |lane| lane.pages += 1);
        }
        self.lanes[number as usize].used_at = self.allocations;
        if self.lanes[number as usize].is_idle {
            self.change(number, |lane| lane.is_idle = false);
        }
    }

    /// A page that is in no ring belongs to nobody.
    fn disown(&mut self, page: PageId) {
        let number = std::mem::replace(&mut self.pages[page.0 as usize].lane, NOBODY);
        if number == NOBODY {
            return;
        }
        self.change(number, |lane| lane.pages -= 1);
        let lane = &self.lanes[number as usize];
        if lane.pages == 0 {
            self.numbers.remove(&lane.id);
            self.vacant.push(number);
        }
    }

    /// Marks a held page as known to the index: from now on it is cached, not freed, when nobody holds it.
    pub(crate) fn keep(&mut self, page: PageId) {
        let entry = &mut self.pages[page.0 as usize];
        debug_assert!(
            entry.holders > 0 && !entry.kept,
            "{page:?} is kept once, by its holder"
        );
        entry.kept = true;
    }

    /// One more holder of a held or cached page, of this lane.
    pub(crate) fn hold(&mut self, page: PageId, lane: Option<LaneId>) {
        if !self.is_held(page) {
            debug_assert!(self.pages[page.0 as usize].kept, "{page:?} is free");
            self.unlink(page);
        }
        self.pages[page.0 as usize].holders += 1;
        self.own(page, lane);
    }

    /// One holder fewer.
    pub(crate) fn release(&mut self, page: PageId, eviction: Eviction) {
        let entry = &mut self.pages[page.0 as usize];
        entry.holders = entry
            .holders
            .checked_sub(1)
            .expect("a page is released once by each of its holders");
        match (entry.holders, entry.kept) {
            (0, true) => self.link(page, eviction),
            (0, false) => {
                self.disown(page);
                self.free.push(page);
            }
            _ => {}
        }
    }

    /// Frees a cached page: nobody can find it any more.
    pub(crate) fn forget(&mut self, page: PageId) {
        debug_assert!(!self.is_held(page), "{page:?} is held");
        self.unlink(page);
        self.disown(page);
        self.pages[page.0 as usize].kept = false;
        self.free.push(page);
    }

    fn link(&mut self, page: PageId, eviction: Eviction) {
        let entry = &mut self.pages[page.0 as usize];
        entry.eviction = eviction;
        let lane = entry.lane;
        match eviction {
            Eviction::Last => {
                let ends = self.ends_of(lane);
                self.insert(page, self.pages[ends].colder, ends as u32);
            }
            Eviction::First => {
                let ends = self.count;
                self.unwanted += 1;
                self.insert(page, ends as u32, self.pages[ends].warmer);
            }
        }
    }

    fn insert(&mut self, page: PageId, colder: u32, warmer: u32) {
        let entry = &mut self.pages[page.0 as usize];
        (entry.colder, entry.warmer) = (colder, warmer);
        self.pages[colder as usize].warmer = page.0;
        self.pages[warmer as usize].colder = page.0;
        self.cached += 1;
    }

    fn unlink(&mut self, page: PageId) {
        let Page {
            eviction,
            colder,
            warmer,
            ..
        } = self.pages[page.0 as usize];
        self.unwanted -= usize::from(eviction == Eviction::First);
        self.pages[colder as usize].warmer = warmer;
        self.pages[warmer as usize].colder = colder;
        self.cached -= 1;
    }
}

#[cfg(test)]
mod tests;
