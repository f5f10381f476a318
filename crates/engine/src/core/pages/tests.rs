use super::*;

impl Pool {
    /// Every page is in exactly one state, and has as many holders as it should.
    pub(crate) fn audit(&self, holders: &[u32]) {
        assert_eq!(holders.len(), self.ends());
        let mut seen = vec![false; self.ends()];
        let mut see = |page: usize| {
            assert!(!seen[page], "page {page} is free or cached twice");
            seen[page] = true;
        };
        for &page in &self.free {
            see(page.0 as usize);
            let entry = self.pages[page.0 as usize];
            assert!(
                !entry.kept && entry.holders == 0,
                "{page:?} is free and used"
            );
        }
        let mut at = self.pages[self.ends()].warmer;
        let mut cached = 0;
        while at as usize != self.ends() {
            see(at as usize);
            let entry = self.pages[at as usize];
            assert!(
                entry.kept && entry.holders == 0,
                "page {at} is cached and used"
            );
            assert_eq!(self.pages[entry.warmer as usize].colder, at);
            at = entry.warmer;
            cached += 1;
        }
        assert_eq!(cached, self.cached);
        for (page, expected) in holders.iter().enumerate() {
            assert_eq!(
                self.pages[page].holders, *expected,
                "holders of page {page}"
            );
            assert_eq!(seen[page], *expected == 0, "page {page} leaks");
        }
    }

    pub(crate) fn is_kept(&self, page: PageId) -> bool {
        self.pages[page.0 as usize].kept
    }
}

/// Three pages, allocated, kept and released in order.
fn three_cached() -> Pool {
    let mut pool = Pool::new(3);
    for _ in 0..3 {
        let page = pool.allocate().unwrap().page;
        pool.keep(page);
    }
    for page in 0..3 {
        pool.release(PageId(page), Eviction::Last);
    }
    pool
}

fn evicted(page: u32) -> Allocation {
    Allocation {
        page: PageId(page),
        evicted: Some(Eviction::Last),
    }
}

#[test]
fn pages_without_known_contents_are_free_again_when_released() {
    let mut pool = Pool::new(2);
    let page = pool.allocate().unwrap().page;
    pool.release(page, Eviction::Last);
    let counts = PageCounts {
        free: 2,
        cached: 0,
        held: 0,
    };
    assert_eq!(pool.counts(), counts);
}

#[test]
fn free_pages_are_given_away_before_cached_ones() {
    let mut pool = Pool::new(2);
    let page = pool.allocate().unwrap().page;
    pool.keep(page);
    pool.release(page, Eviction::Last);
    assert_eq!(pool.allocate().unwrap().evicted, None);
    assert_eq!(pool.allocate().unwrap().evicted, Some(Eviction::Last));
}

#[test]
fn the_longest_unused_page_is_evicted_first() {
    let mut pool = three_cached();
    pool.hold(PageId(0));
    pool.release(PageId(0), Eviction::Last);
    assert_eq!(pool.allocate(), Some(evicted(1)));
    assert_eq!(pool.allocate(), Some(evicted(2)));
    assert_eq!(pool.allocate(), Some(evicted(0)));
    assert_eq!(pool.allocate(), None);
}

#[test]
fn cold_pages_are_evicted_before_all_others() {
    let mut pool = three_cached();
    pool.hold(PageId(2));
    pool.release(PageId(2), Eviction::First);
    let cold = Allocation {
        evicted: Some(Eviction::First),
        ..evicted(2)
    };
    assert_eq!(pool.allocate(), Some(cold));
    assert_eq!(pool.allocate(), Some(evicted(0)));
}

#[test]
fn a_page_is_held_until_its_last_holder_lets_go() {
    let mut pool = three_cached();
    pool.hold(PageId(1));
    pool.hold(PageId(1));
    pool.release(PageId(1), Eviction::Last);
    pool.audit(&[0, 1, 0]);
    assert_eq!(pool.available(), 2);
    pool.release(PageId(1), Eviction::Last);
    pool.audit(&[0, 0, 0]);
}

#[test]
#[should_panic(expected = "released once")]
fn releasing_twice_is_a_bug() {
    let mut pool = Pool::new(1);
    let page = pool.allocate().unwrap().page;
    pool.release(page, Eviction::Last);
    pool.release(page, Eviction::Last);
}
