use super::*;

impl Pool {
    /// Every page is in exactly one state, has as many holders as it should, and counts for one lane or none.
    pub(crate) fn audit(&self, holders: &[u32]) {
        assert_eq!(holders.len(), self.count);
        let mut seen = vec![false; self.count];
        let mut see = |page: PageId| {
            let page = page.0 as usize;
            assert!(!seen[page], "page {page} is free or cached twice");
            seen[page] = true;
        };
        for &page in &self.free {
            see(page);
            let entry = self.pages[page.0 as usize];
            assert!(
                !entry.kept && entry.holders == 0 && entry.lane == NOBODY,
                "{page:?} is free and used"
            );
        }
        let mut cached = 0;
        let firsts = std::iter::once((self.count, NOBODY));
        let numbers = self.numbers.values();
        for (ends, lane) in firsts.chain(numbers.map(|n| (self.ends_of(*n), *n))) {
            let mut of_lane = 0;
            for page in self.ring(ends) {
                see(page);
                let entry = self.pages[page.0 as usize];
                assert!(
                    entry.kept && entry.holders == 0,
                    "{page:?} is cached and used"
                );
                assert_eq!(entry.lane, lane, "{page:?} is in the ring of another");
                assert_eq!(self.pages[entry.warmer as usize].colder, page.0);
                of_lane += 1;
            }
            let counted = self.lanes.get(lane as usize);
            assert!(counted.is_none_or(|lane| lane.cached == of_lane));
            cached += of_lane;
        }
        assert_eq!(cached, self.cached);
        for (id, number) in &self.numbers {
            let lane = &self.lanes[*number as usize];
            let pages = self.pages[..self.count].iter();
            let pages = pages.filter(|page| page.lane == *number).count();
            assert_eq!((lane.id, lane.pages), (*id, pages), "lane {number}");
            assert!(pages > 0, "a lane without pages");
        }
        assert_eq!(self.numbers.len() + self.vacant.len(), self.lanes.len());
        for (page, expected) in holders.iter().enumerate() {
            assert_eq!(
                self.pages[page].holders, *expected,
                "holders of page {page}"
            );
            assert_eq!(seen[page], *expected == 0, "page {page} leaks");
        }
    }

    /// A page that is about to be given away is nobody's who is to keep it.
    pub(super) fn audit_victim(
        &self,
        page: PageId,
        to: Option<LaneId>,
        may_go: &impl Fn(PageId) -> bool,
    ) {
        assert!(may_go(page), "{page:?} is needed");
        let owner = |page: PageId| self.lanes.get(self.pages[page.0 as usize].lane as usize);
        // What is unlikely to be asked for goes first, then what is long unused, then who would have the most.
        let claim = |lane: &Lane| {
            let idle = self.allocations - lane.used_at;
            let is_used = idle <= IDLE_TURNOVERS * self.count as u64;
            let pages = lane.pages + usize::from(lane.id == to);
            (is_used, usize::MAX - if is_used { pages } else { 0 })
        };
        let given = owner(page).map(claim);
        for other in (0..self.count as u32).map(PageId) {
            let entry = self.pages[other.0 as usize];
            if entry.kept && entry.holders == 0 && may_go(other) {
                let kept = owner(other).map(claim);
                assert!(given <= kept, "{page:?} goes before {other:?}");
            }
        }
    }

    /// Allocates for a lane; any cached page may go.
    fn take(&mut self, lane: Option<LaneId>) -> Option<Allocation> {
        self.allocate(lane, |_| true)
    }

    pub(crate) fn is_kept(&self, page: PageId) -> bool {
        self.pages[page.0 as usize].kept
    }
}

/// Three pages, allocated, kept and released in order.
fn three_cached() -> Pool {
    let mut pool = Pool::new(3);
    for _ in 0..3 {
        let page = pool.take(None).unwrap().page;
        pool.keep(page);
    }
    for page in 0..3 {
        pool.release(PageId(page), Eviction::Last);
    }
    pool
}

/// A page that went in this order, of no lane.
fn gone(eviction: Eviction) -> Evicted {
    let lane = None;
    Evicted { eviction, lane }
}

fn evicted(page: u32) -> Allocation {
    Allocation {
        page: PageId(page),
        evicted: Some(gone(Eviction::Last)),
    }
}

#[test]
fn pages_without_known_contents_are_free_again_when_released() {
    let mut pool = Pool::new(2);
    let page = pool.take(None).unwrap().page;
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
    let page = pool.take(None).unwrap().page;
    pool.keep(page);
    pool.release(page, Eviction::Last);
    assert_eq!(pool.take(None).unwrap().evicted, None);
    assert_eq!(pool.take(None).unwrap().evicted, Some(gone(Eviction::Last)));
}

#[test]
fn the_longest_unused_page_is_evicted_first() {
    let mut pool = three_cached();
    pool.hold(PageId(0), None);
    pool.release(PageId(0), Eviction::Last);
    assert_eq!(pool.take(None), Some(evicted(1)));
    assert_eq!(pool.take(None), Some(evicted(2)));
    assert_eq!(pool.take(None), Some(evicted(0)));
    assert_eq!(pool.take(None), None);
}

#[test]
fn cold_pages_are_evicted_before_all_others() {
    let mut pool = three_cached();
    pool.hold(PageId(2), None);
    pool.release(PageId(2), Eviction::First);
    let cold = Allocation {
        evicted: Some(gone(Eviction::First)),
        ..evicted(2)
    };
    assert_eq!(pool.take(None), Some(cold));
    assert_eq!(pool.take(None), Some(evicted(0)));
}

#[test]
fn a_page_is_held_until_its_last_holder_lets_go() {
    let mut pool = three_cached();
    pool.hold(PageId(1), None);
    pool.hold(PageId(1), None);
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
    let page = pool.take(None).unwrap().page;
    pool.release(page, Eviction::Last);
    pool.release(page, Eviction::Last);
}

const ALICE: Option<LaneId> = Some(LaneId(1));
const BOB: Option<LaneId> = Some(LaneId(2));

/// Computes pages for a lane and leaves them cached. Returns whose were given away for it.
fn fill(pool: &mut Pool, lane: Option<LaneId>, pages: usize) -> Vec<Option<LaneId>> {
    let allocations: Vec<_> = (0..pages).map(|_| pool.take(lane).unwrap()).collect();
    for Allocation { page, .. } in &allocations {
        pool.keep(*page);
        pool.release(*page, Eviction::Last);
    }
    let evicted = allocations.iter().filter_map(|a| a.evicted);
    evicted.map(|evicted| evicted.lane).collect()
}

#[test]
fn the_lane_with_the_most_pages_gives_them_up() {
    let mut pool = Pool::new(10);
    assert_eq!(fill(&mut pool, ALICE, 4), []);
    assert_eq!(fill(&mut pool, BOB, 6), []);
    // However much one computes, the other keeps what is no more than a half.
    for _ in 0..5 {
        assert_eq!(fill(&mut pool, BOB, 3), [BOB; 3]);
    }
    // And who has more gives way until both have as much.
    assert_eq!(fill(&mut pool, ALICE, 1), [BOB]);
    assert_eq!(fill(&mut pool, ALICE, 2).len(), 2);
    let pages = |lane| pool.lanes[pool.numbers[&lane] as usize].pages;
    assert_eq!((pages(ALICE), pages(BOB)), (5, 5));
    pool.audit(&[0; 10]);
}

#[test]
fn pages_that_are_held_count_for_their_lane() {
    let mut pool = Pool::new(10);
    fill(&mut pool, ALICE, 4);
    let held: Vec<_> = (0..4).map(|_| pool.take(BOB).unwrap().page).collect();
    fill(&mut pool, BOB, 2);
    assert_eq!(fill(&mut pool, BOB, 2), [BOB; 2]);
    for page in held {
        pool.release(page, Eviction::Last);
    }
}

#[test]
fn a_page_belongs_to_the_lane_that_used_it_last() {
    let mut pool = Pool::new(4);
    fill(&mut pool, ALICE, 4);
    for page in 0..3 {
        pool.hold(PageId(page), BOB);
        pool.release(PageId(page), Eviction::Last);
    }
    assert_eq!(fill(&mut pool, ALICE, 1), [BOB]);
    pool.audit(&[0; 4]);
}

#[test]
fn what_a_lane_has_left_behind_long_ago_goes_first() {
    let mut pool = Pool::new(4);
    fill(&mut pool, ALICE, 2);
    for turn in 0..IDLE_TURNOVERS * 4 {
        fill(&mut pool, BOB, 1);
        assert!(pool.numbers.contains_key(&ALICE), "{turn}");
    }
    assert_eq!(fill(&mut pool, BOB, 2), [BOB, ALICE]);
    assert_eq!(fill(&mut pool, BOB, 1), [ALICE]);
    pool.audit(&[0; 4]);
}

#[test]
fn a_page_that_is_needed_stays_whosever_turn_it_is() {
    let mut pool = Pool::new(4);
    fill(&mut pool, ALICE, 3);
    fill(&mut pool, BOB, 1);
    let only = |page| move |other: PageId| other == PageId(page);
    assert_eq!(pool.allocate(BOB, only(1)).map(|a| a.page), Some(PageId(1)));
    assert_eq!(
        pool.allocate(ALICE, only(3)).map(|a| a.page),
        Some(PageId(3))
    );
    assert_eq!(pool.allocate(BOB, |_| false), None);
}
