use std::collections::VecDeque;

use super::*;
use crate::core::testing::Random;

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
        let mut see_cached = |page: PageId| {
            see(page);
            let entry = self.pages[page.0 as usize];
            assert!(
                entry.kept && entry.holders == 0,
                "{page:?} is cached and used"
            );
            assert_eq!(self.pages[entry.warmer as usize].colder, page.0);
            cached += 1;
            entry
        };
        for page in self.ring(self.count) {
            assert_eq!(see_cached(page).eviction, Eviction::First);
        }
        for number in self.numbers.values() {
            for page in self.ring(self.ends_of(*number)) {
                let entry = see_cached(page);
                assert_eq!((entry.eviction, entry.lane), (Eviction::Last, *number));
            }
        }
        let all = (0..self.count as u32).map(PageId);
        for page in all.filter(|page| self.is_passed_over(*page)) {
            assert_eq!(see_cached(page).eviction, Eviction::Last);
        }
        assert_eq!(cached, self.cached);
        for (id, number) in &self.numbers {
            let lane = &self.lanes[*number as usize];
            let pages = self.pages[..self.count].iter();
            let pages = pages.filter(|page| page.lane == *number).count();
            assert_eq!((lane.id, lane.pages), (*id, pages), "lane {number}");
            assert!(pages > 0, "a lane without pages");
            assert!(lane.is_stale || lane.ranked == Some(lane.rank(*number)));
        }
        assert_eq!(self.numbers.len() + self.vacant.len(), self.lanes.len());
        let ranked: BTreeSet<Rank> = self.lanes.iter().filter_map(|lane| lane.ranked).collect();
        assert_eq!(ranked, self.ranks);
        for number in &self.vacant {
            let lane = &self.lanes[*number as usize];
            assert!(lane.is_stale || lane.ranked.is_none(), "nobody is ranked");
        }
        for (page, expected) in holders.iter().enumerate() {
            assert_eq!(
                self.pages[page].holders, *expected,
                "holders of page {page}"
            );
            assert_eq!(seen[page], *expected == 0, "page {page} leaks");
        }
    }

    /// Cached pages of a ring, the coldest first.
    fn ring(&self, ends: usize) -> impl Iterator<Item = PageId> {
        let mut at = ends;
        std::iter::from_fn(move || {
            at = self.pages[at].warmer as usize;
            (at != ends).then_some(PageId(at as u32))
        })
    }

    /// A page that is about to be given away is nobody's who is to keep it.
    pub(super) fn audit_victim(
        &self,
        page: PageId,
        to: Option<LaneId>,
        may_go: &impl Fn(PageId) -> bool,
    ) {
        assert!(may_go(page), "{page:?} is needed");
        // What is unlikely to be asked for goes first, then what is long unused, then who would have the most.
        let claim = |page: PageId| {
            let entry = self.pages[page.0 as usize];
            let lane = &self.lanes[entry.lane as usize];
            let pages = lane.pages + usize::from(lane.id == to);
            let is_last = entry.eviction == Eviction::Last;
            is_last.then_some((!lane.is_idle, usize::MAX - pages))
        };
        for other in (0..self.count as u32).map(PageId) {
            let entry = self.pages[other.0 as usize];
            if entry.kept && entry.holders == 0 && may_go(other) {
                assert!(claim(page) <= claim(other), "{page:?} before {other:?}");
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
    // It is noticed by the end of the next turnover.
    let given = fill(&mut pool, BOB, 4);
    assert!(given.starts_with(&[BOB]), "{given:?}");
    let given = [given, fill(&mut pool, BOB, 4)].concat();
    assert_eq!(given.iter().filter(|lane| **lane == ALICE).count(), 2);
    pool.audit(&[0; 4]);
}

#[test]
fn an_idle_lane_that_comes_back_has_a_share_again() {
    let mut pool = Pool::new(4);
    fill(&mut pool, ALICE, 2);
    for _ in 0..IDLE_TURNOVERS * 4 {
        fill(&mut pool, BOB, 1);
    }
    let page = pool.ring(pool.ends_of(pool.numbers[&ALICE])).next();
    pool.hold(page.unwrap(), ALICE);
    pool.release(page.unwrap(), Eviction::Last);
    for _ in 0..IDLE_TURNOVERS * 4 {
        assert_eq!(fill(&mut pool, BOB, 1), [BOB]);
    }
}

#[test]
fn a_page_that_is_needed_stays_whosever_turn_it_is() {
    let mut pool = Pool::new(4);
    fill(&mut pool, ALICE, 3);
    fill(&mut pool, BOB, 1);
    let only = |page| move |other: PageId| other == PageId(page);
    assert_eq!(pool.allocate(BOB, only(1)).map(|a| a.page), Some(PageId(1)));
    assert!(pool.is_passed_over(PageId(0)));
    assert_eq!(
        pool.allocate(ALICE, only(3)).map(|a| a.page),
        Some(PageId(3))
    );
    assert!(pool.is_passed_over(PageId(2)));
    assert_eq!(pool.allocate(BOB, |_| false), None);
    pool.audit(&[0, 1, 0, 1]);
    // Those that were passed over come in turn again, the one used last later.
    pool.put_back(PageId(2));
    pool.put_back(PageId(0));
    assert_eq!(pool.take(BOB).map(|a| a.page), Some(PageId(0)));
    assert_eq!(pool.take(BOB).map(|a| a.page), Some(PageId(2)));
}

/// Twin of a pool with one lane: all cached pages in one list, by age.
#[derive(Default)]
struct ByAge {
    free: Vec<PageId>,
    cached: VecDeque<(PageId, Eviction)>,
}

impl ByAge {
    fn allocate(&mut self) -> Option<(PageId, Option<Eviction>)> {
        if let Some(page) = self.free.pop() {
            return Some((page, None));
        }
        let (page, eviction) = self.cached.pop_front()?;
        Some((page, Some(eviction)))
    }

    fn cache(&mut self, page: PageId, eviction: Eviction) {
        match eviction {
            Eviction::Last => self.cached.push_back((page, eviction)),
            Eviction::First => self.cached.push_front((page, eviction)),
        }
    }

    fn remove(&mut self, page: PageId) {
        self.cached.retain(|(cached, _)| *cached != page);
    }
}

#[test]
fn one_lane_alone_gives_pages_away_by_age() {
    let mut evicted = 0;
    for seed in 0..300 {
        let mut random = Random(seed);
        let count = random.within(1..=24);
        let lane = random.one_in(2).then_some(LaneId(seed));
        let mut pool = Pool::new(count);
        let mut twin = ByAge {
            free: pool.free.clone(),
            ..ByAge::default()
        };
        let mut holders = vec![0; count];
        for _ in 0..600 {
            let page = PageId(random.within(0..=count - 1) as u32);
            let at = page.0 as usize;
            let is_cached = pool.is_kept(page) && !pool.is_held(page);
            match random.within(0..=5) {
                0..=1 => {
                    let given = pool.take(lane);
                    let expected = twin.allocate();
                    let order = |a: Allocation| (a.page, a.evicted.map(|e| e.eviction));
                    assert_eq!(given.map(order), expected, "seed {seed}");
                    if let Some(Allocation { page, evicted: was }) = given {
                        holders[page.0 as usize] = 1;
                        evicted += usize::from(was.is_some());
                        if !random.one_in(4) {
                            pool.keep(page);
                        }
                    }
                }
                2 if is_cached && random.one_in(8) => {
                    pool.forget(page);
                    twin.remove(page);
                    twin.free.push(page);
                }
                2 if is_cached && random.one_in(2) => {
                    pool.touch(page);
                    twin.remove(page);
                    twin.cache(page, Eviction::Last);
                }
                2 if is_cached || holders[at] > 0 => {
                    pool.hold(page, lane);
                    twin.remove(page);
                    holders[at] += 1;
                }
                3..=5 if holders[at] > 0 => {
                    let eviction = match random.within(0..=2) {
                        0 => Eviction::First,
                        _ => Eviction::Last,
                    };
                    pool.release(page, eviction);
                    holders[at] -= 1;
                    match (holders[at], pool.is_kept(page)) {
                        (0, true) => twin.cache(page, eviction),
                        (0, false) => twin.free.push(page),
                        _ => {}
                    }
                }
                _ => {}
            }
            pool.audit(&holders);
        }
    }
    assert!(evicted > 10_000, "{evicted}");
}
