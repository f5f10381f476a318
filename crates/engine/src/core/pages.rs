//! The pages of one KV group: who holds them, and in which order they are given away.
//!
//! A page is *free* (its contents mean nothing), *held* by one or more sequences, or *cached*: held by nobody, but
//! kept because the prefix index knows what it contains. Cached pages are given away only when none is free. The pool knows nothing
//! of contents; whoever allocates says which cached pages may go, and hears when one was taken.
//!
//! A page belongs to the lane that used it last. The lane with the most pages gives one first, the longest unused, whoever asks for one
//! counting as if he had it: a lane that has no more than its share of the pool keeps what it has, whatever others compute. Lanes that have long used nothing have no
//! share; what they left goes before all that, the lane's that used something the longest ago.

use carat_model::kv::PageId;
use rustc_hash::FxHashMap;

use super::request::LaneId;

/// Times that a pool's pages are allocated over, after which a lane that has used none of them has no share.
const IDLE_TURNOVERS: u64 = 16;
/// Lane of a page that is free, or unlikely to be asked for again.
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
    /// Neighbours in a ring of cached pages.
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
    cached: usize,
    /// The count of allocations when it last used a page.
    used_at: u64,
}

pub(crate) struct Pool {
    /// Behind the pages stands a place between the two ends of each ring of cached pages, so that its `warmer` is the coldest page and
    /// its `colder` the warmest: first that of the pages which go before all others, then each lane's.
    pages: Vec<Page>,
    count: usize,
    free: Vec<PageId>,
    cached: usize,
    lanes: Vec<Lane>,
    /// Numbers of the lanes that have pages, and those that nobody has.
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
            lanes: Vec::new(),
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

    /// Makes a cached page the last of its lane to be given away.
    pub(crate) fn touch(&mut self, page: PageId) {
        let eviction = self.pages[page.0 as usize].eviction;
        self.unlink(page);
        self.link(page, eviction);
    }

    pub(crate) fn is_held(&self, page: PageId) -> bool {
        self.pages[page.0 as usize].holders > 0
    }

    /// A page with one holder, of this lane; `None` if every page is held. Of cached ones, one that `may_go`.
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
            let owner = self.lanes.get(entry.lane as usize);
            let evicted = Evicted {
                eviction: entry.eviction,
                lane: owner.and_then(|lane| lane.id),
            };
            (page, Some(evicted))
        };
        self.allocations += 1;
        self.pages[page.0 as usize].holders = 1;
        self.own(page, lane);
        Some(Allocation { page, evicted })
    }

    /// The cached page that is given away next, to this lane.
    fn victim(&self, to: Option<LaneId>, may_go: &impl Fn(PageId) -> bool) -> Option<PageId> {
        let first = self.ring(self.count).find(|page| may_go(*page));
        if first.is_some() {
            return first;
        }
        let mut tried = Vec::new();
        loop {
            let untried = self.numbers.values().filter(|n| !tried.contains(*n));
            let lanes = untried.filter(|n| self.lanes[**n as usize].cached > 0);
            let next = lanes.max_by_key(|n| self.excess(**n, to)).copied()?;
            let page = self.ring(self.ends_of(next)).find(|page| may_go(*page));
            if page.is_some() {
                return page;
            }
            tried.push(next);
        }
    }

    /// The larger, the sooner a lane gives a page to another or to itself.
    fn excess(&self, number: u32, to: Option<LaneId>) -> impl Ord + use<> {
        let lane = &self.lanes[number as usize];
        let pages = lane.pages + usize::from(lane.id == to);
        let idle = self.allocations - lane.used_at;
        let is_idle = idle > IDLE_TURNOVERS * self.count as u64;
        // Of those without a share by age; the number decides between equals, so that it is always the same one.
        (is_idle.then_some(idle), pages, idle, number)
    }

    /// Cached pages of a ring, the coldest first.
    fn ring(&self, ends: usize) -> impl Iterator<Item = PageId> {
        let mut at = ends;
        std::iter::from_fn(move || {
            at = self.pages[at].warmer as usize;
            (at != ends).then_some(PageId(at as u32))
        })
    }

    /// Place between the ends of a lane's ring.
    fn ends_of(&self, number: u32) -> usize {
        self.count + 1 + number as usize
    }

    /// Number of a lane, which it has as long as pages belong to it.
    fn number(&mut self, id: Option<LaneId>) -> u32 {
        if let Some(number) = self.numbers.get(&id) {
            return *number;
        }
        let lane = Lane {
            id,
            pages: 0,
            cached: 0,
            used_at: self.allocations,
        };
        let number = if let Some(number) = self.vacant.pop() {
            self.lanes[number as usize] = lane;
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
            self.lanes[number as usize].pages += 1;
        }
        self.lanes[number as usize].used_at = self.allocations;
    }

    /// A page that is in no ring belongs to nobody.
    fn disown(&mut self, page: PageId) {
        let number = std::mem::replace(&mut self.pages[page.0 as usize].lane, NOBODY);
        let Some(lane) = self.lanes.get_mut(number as usize) else {
            return;
        };
        lane.pages -= 1;
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
        let (colder, warmer) = match eviction {
            Eviction::Last => {
                let number = self.pages[page.0 as usize].lane;
                self.lanes[number as usize].cached += 1;
                let ends = self.ends_of(number);
                (self.pages[ends].colder, ends as u32)
            }
            Eviction::First => {
                self.disown(page);
                (self.count as u32, self.pages[self.count].warmer)
            }
        };
        let entry = &mut self.pages[page.0 as usize];
        (entry.colder, entry.warmer) = (colder, warmer);
        entry.eviction = eviction;
        self.pages[colder as usize].warmer = page.0;
        self.pages[warmer as usize].colder = page.0;
        self.cached += 1;
    }

    fn unlink(&mut self, page: PageId) {
        let Page {
            colder,
            warmer,
            lane,
            ..
        } = self.pages[page.0 as usize];
        self.pages[colder as usize].warmer = warmer;
        self.pages[warmer as usize].colder = colder;
        self.cached -= 1;
        if let Some(lane) = self.lanes.get_mut(lane as usize) {
            lane.cached -= 1;
        }
    }
}

#[cfg(test)]
mod tests;
