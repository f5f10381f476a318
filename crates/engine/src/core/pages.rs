//! The pages of one KV group: who holds them, and in which order they are given away.
//!
//! A page is *free* (its contents mean nothing), *held* by one or more sequences, or *cached*: held by nobody, but
//! kept because the prefix index knows what it contains. Cached pages are given away only when none is free, the
//! longest unused first. The pool knows nothing of contents; whoever allocates hears when a kept page was taken.

use carat_model::kv::PageId;

/// Position among the cached pages that a page takes when nobody holds it any more.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Eviction {
    /// Behind all others: given away last.
    Last,
    /// Before all others: unlikely to be asked for again, so it must not push out what is likelier.
    First,
}

/// A page for its only holder.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Allocation {
    pub(crate) page: PageId,
    /// It was cached until now, in this place of the order: what the index says of it no longer holds.
    pub(crate) evicted: Option<Eviction>,
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
    /// Neighbours in the ring of cached pages.
    colder: u32,
    warmer: u32,
}

pub(crate) struct Pool {
    /// One more than there are pages: the last stands between the two ends of the ring of cached pages, so that its
    /// `warmer` is the coldest page and its `colder` the warmest.
    pages: Vec<Page>,
    free: Vec<PageId>,
    cached: usize,
}

impl Pool {
    pub(crate) fn new(count: usize) -> Pool {
        let ends = u32::try_from(count).expect("page numbers fit u32");
        let alone = Page {
            holders: 0,
            kept: false,
            eviction: Eviction::First,
            colder: ends,
            warmer: ends,
        };
        Pool {
            pages: vec![alone; count + 1],
            // Low numbers first: a lightly used engine touches few pages.
            free: (0..ends).rev().map(PageId).collect(),
            cached: 0,
        }
    }

    /// All pages.
    pub(crate) fn len(&self) -> usize {
        self.ends()
    }

    fn ends(&self) -> usize {
        self.pages.len() - 1
    }

    pub(crate) fn counts(&self) -> PageCounts {
        PageCounts {
            free: self.free.len(),
            cached: self.cached,
            held: self.ends() - self.available(),
        }
    }

    /// Pages that can be allocated.
    pub(crate) fn available(&self) -> usize {
        self.free.len() + self.cached
    }

    /// Makes a cached page the last to be given away.
    pub(crate) fn touch(&mut self, page: PageId) {
        self.hold(page);
        self.release(page, Eviction::Last);
    }

    pub(crate) fn is_held(&self, page: PageId) -> bool {
        self.pages[page.0 as usize].holders > 0
    }

    /// A page with one holder; `None` if every page is held.
    pub(crate) fn allocate(&mut self) -> Option<Allocation> {
        let (page, evicted) = if let Some(page) = self.free.pop() {
            (page, None)
        } else if self.cached > 0 {
            let coldest = PageId(self.pages[self.ends()].warmer);
            self.unlink(coldest);
            let entry = &mut self.pages[coldest.0 as usize];
            entry.kept = false;
            (coldest, Some(entry.eviction))
        } else {
            return None;
        };
        self.pages[page.0 as usize].holders = 1;
        Some(Allocation { page, evicted })
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

    /// One more holder of a held or cached page.
    pub(crate) fn hold(&mut self, page: PageId) {
        if !self.is_held(page) {
            debug_assert!(self.pages[page.0 as usize].kept, "{page:?} is free");
            self.unlink(page);
        }
        self.pages[page.0 as usize].holders += 1;
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
            (0, false) => self.free.push(page),
            _ => {}
        }
    }

    /// Frees a cached page: nobody can find it any more.
    pub(crate) fn forget(&mut self, page: PageId) {
        debug_assert!(!self.is_held(page), "{page:?} is held");
        self.unlink(page);
        self.pages[page.0 as usize].kept = false;
        self.free.push(page);
    }

    fn link(&mut self, page: PageId, eviction: Eviction) {
        let ends = self.ends();
        let (colder, warmer) = match eviction {
            Eviction::Last => (self.pages[ends].colder, ends as u32),
            Eviction::First => (ends as u32, self.pages[ends].warmer),
        };
        let entry = &mut self.pages[page.0 as usize];
        (entry.colder, entry.warmer) = (colder, warmer);
        entry.eviction = eviction;
        self.pages[colder as usize].warmer = page.0;
        self.pages[warmer as usize].colder = page.0;
        self.cached += 1;
    }

    fn unlink(&mut self, page: PageId) {
        let Page { colder, warmer, .. } = self.pages[page.0 as usize];
        self.pages[colder as usize].warmer = warmer;
        self.pages[warmer as usize].colder = colder;
        self.cached -= 1;
    }
}

#[cfg(test)]
mod tests;
