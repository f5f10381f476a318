use carat_model::{TokenId, kv::KvGroup};

use super::*;
use crate::core::testing::{FakeExecutor, digests, image, request, roomy, text, with_pages};
use crate::{Limits, core::testing::Bench};

impl Kv {
    /// Pools, index and the tables of all running sequences agree. To be called between steps.
    pub(crate) fn audit<'a>(&self, tables: impl Iterator<Item = &'a Table> + Clone) {
        for group in KvGroup::ALL {
            let pool = self.pools.get(group);
            let counts = pool.counts();
            let mut holders = vec![0; counts.free + counts.cached + counts.held];
            let is_of_chunk = |page: PageId| {
                let named = pool.len()..pool.len() + self.chunk_pages;
                group == KvGroup::Sliding && named.contains(&(page.0 as usize))
            };
            for table in tables.clone() {
                for page in table.pages.get(group) {
                    if *page != PageId::FREED && !is_of_chunk(*page) {
                        holders[page.0 as usize] += 1;
                    }
                }
            }
            pool.audit(&holders);
            for table in tables.clone() {
                for (place, &page) in table.pages.get(group).iter().enumerate() {
                    if page == PageId::FREED {
                        assert!(group == KvGroup::Sliding && place < table.first_sliding);
                    } else if is_of_chunk(page) {
                        assert!(place >= table.first_sliding && place >= table.blocks);
                    } else if place < table.blocks {
                        assert!(pool.is_kept(page), "a complete page is known");
                    } else {
                        assert!(!pool.is_kept(page), "{page:?} is known but incomplete");
                        assert_eq!(holders[page.0 as usize], 1, "{page:?} is written by two");
                    }
                }
            }
        }
        for table in tables {
            self.audit_table(table);
        }
        for group in KvGroup::ALL {
            let pool = self.host.get(group);
            let counts = pool.counts();
            pool.audit(&vec![0; counts.free + counts.cached]);
        }
        for block in self.index.audit() {
            for group in KvGroup::ALL {
                let places = block.places.get(group);
                let on_device = |page: PageId| self.pools.get(group).is_kept(page);
                let in_host = |page: HostPageId| self.host.get(group).is_kept(PageId(page.0));
                assert!(places.device.is_none_or(on_device) && places.host.is_none_or(in_host));
            }
            let Places { device, host } = block.places.full;
            let passed_over = device.filter(|page| self.pools.full.is_passed_over(*page));
            let needed = |page| !self.index.may_leave_device(KvGroup::Full, page);
            assert!(passed_over.is_none_or(needed), "it may go on the device");
            let passed_over = host.filter(|h| self.host.full.is_passed_over(PageId(h.0)));
            let needed = |host| !self.index.may_leave_host(KvGroup::Full, host);
            assert!(passed_over.is_none_or(needed), "it may go in host memory");
            let is_held = |group: KvGroup| {
                let page = block.places.get(group).device;
                page.is_some_and(|page| self.pools.get(group).is_held(page))
            };
            assert!(
                !is_held(KvGroup::Sliding) || is_held(KvGroup::Full),
                "who holds a sliding page holds the full page of its block"
            );
        }
    }

    fn audit_table(&self, table: &Table) {
        assert!(table.pages.full.len() >= pages_of(table.computed));
        if self.reuse == PrefixReuse::Enabled {
            assert_eq!(table.blocks, table.computed / PAGE_TOKENS);
        }
        if let Some(window) = self.window {
            assert_eq!(table.pages.sliding.len(), table.pages.full.len());
            let first = first_visible_page(table.computed, window);
            assert!(table.first_sliding >= first.min(table.pages.sliding.len()));
        }
    }

    /// Every page that could be found contains what the index says.
    pub(crate) fn audit_contents(&self, executor: &FakeExecutor, has_media: bool) {
        for (tokens, block) in self.index.prefixes() {
            let digests = digests(&tokens, &[], self.window);
            let start = tokens.len() - PAGE_TOKENS;
            let contents = KvGroup::ALL.iter().flat_map(|&group| {
                let places = block.places.get(group);
                let page = |page: PageId| executor.pages.get(group)[page.0 as usize];
                let host = |page: HostPageId| executor.saved(group, page);
                [places.device.map(page), places.host.map(host)]
            });
            for contents in contents.flatten() {
                for (slot, entry) in contents.iter().enumerate() {
                    let entry = entry.expect("a known page is complete");
                    let at = start + slot;
                    assert_eq!((entry.position, entry.token), (at, tokens[at]));
                    if !has_media {
                        assert_eq!(entry.digest, digests[at]);
                    }
                }
            }
        }
    }
}

fn kv(window: Option<usize>, full: usize, sliding: usize) -> Kv {
    let (config, facts) = with_pages(roomy(window), full, sliding);
    Kv::new(&Limits::new(config, facts).unwrap())
}

fn content(tokens: &[TokenId]) -> Content<'_> {
    Content {
        tokens,
        media: &[],
        has_sliding: true,
        salt: None,
        lane: None,
    }
}

/// Computes `tokens` in chunks and returns the table.
fn compute(kv: &mut Kv, tokens: &[TokenId], chunk: usize) -> Table {
    let found = kv.find(content(tokens));
    let mut table = kv.claim(content(tokens), found, tokens.len());
    while table.computed < tokens.len() {
        let rows = chunk.min(tokens.len() - table.computed);
        let positions = table.computed + rows;
        kv.grow(&mut table, positions, Between::Held);
        kv.commit(&mut table, content(tokens), rows);
        kv.audit(std::iter::once(&table));
    }
    table
}

fn compute_and_release(kv: &mut Kv, tokens: &[TokenId]) {
    let mut table = compute(kv, tokens, 16);
    kv.release(&mut table);
}

fn found(kv: &Kv, tokens: &[TokenId]) -> (usize, Option<MissReason>) {
    let found = kv.find(content(tokens));
    (found.reusable * PAGE_TOKENS, found.miss)
}

#[test]
fn sliding_pages_are_freed_behind_the_window() {
    let mut kv = kv(Some(40), 8, 8);
    let table = compute(&mut kv, &text(1, 104), 8);
    // The next row, at 104, sees 65 and later.
    let freed = table
        .pages
        .sliding
        .iter()
        .take_while(|p| **p == PageId::FREED);
    assert_eq!(freed.count(), 2);
    assert_eq!(table.pages.sliding.len(), 4);
    assert_eq!(kv.counts().sliding.held, 2);
    assert_eq!(kv.counts().full.held, 4);
}

#[test]
fn the_page_that_the_window_still_touches_is_not_freed() {
    let mut kv = kv(Some(33), 8, 8);
    // The row at 63 sees 31 and later, so the last position of page 0; the row at 64 no longer does.
    let table = compute(&mut kv, &text(1, 63), 1);
    assert_ne!(table.pages.sliding[0], PageId::FREED);
    let mut kv = super::tests::kv(Some(33), 8, 8);
    let table = compute(&mut kv, &text(1, 64), 1);
    assert_eq!(table.pages.sliding[0], PageId::FREED);
}

#[test]
fn without_sliding_layers_there_are_no_sliding_pages() {
    let mut kv = kv(None, 8, 0);
    let table = compute(&mut kv, &text(1, 100), 50);
    assert!(table.pages.sliding.is_empty());
}

#[test]
fn a_repeated_prompt_is_found_up_to_the_page_before_its_last_token() {
    let mut kv = kv(Some(64), 8, 8);
    compute_and_release(&mut kv, &text(1, 96));
    assert_eq!(found(&kv, &text(1, 96)), (64, None));
    assert_eq!(found(&kv, &text(1, 97)), (96, None));
}

#[test]
fn a_miss_says_why() {
    let mut kv = kv(Some(64), 8, 8);
    compute_and_release(&mut kv, &text(1, 96));
    assert_eq!(found(&kv, &text(1, 32)), (0, Some(MissReason::TooShort)));
    assert_eq!(found(&kv, &text(2, 90)), (0, Some(MissReason::NoMatch)));
    let branch = [text(1, 70), text(2, 70)].concat();
    assert_eq!(found(&kv, &branch), (64, Some(MissReason::Diverged)));
}

#[test]
fn a_prefix_without_its_window_is_found_where_the_window_is_whole() {
    let mut kv = kv(Some(33), 12, 6);
    // Four pages of a prompt, the last one's window included, then enough of another to evict a sliding page.
    compute_and_release(&mut kv, &text(1, 129));
    assert_eq!(found(&kv, &text(1, 129)), (128, None));
    let block = kv.index.walk(content(&text(1, 128))).nth(3).unwrap();
    let page = block.places.sliding.device.unwrap();
    kv.index.take_from_device(KvGroup::Sliding, page);
    kv.pools.sliding.forget(page);
    // The row at 128 would see page 3; the row at 96 sees page 2, which is there.
    let miss = Some(MissReason::SlidingEvicted);
    assert_eq!(found(&kv, &text(1, 129)), (96, miss));
}

#[test]
fn the_deepest_block_is_evicted_first() {
    let mut kv = kv(None, 4, 0);
    compute_and_release(&mut kv, &text(1, 128));
    compute_and_release(&mut kv, &text(2, 40));
    assert_eq!(found(&kv, &text(1, 128)), (64, Some(MissReason::Evicted)));
    // Nobody has asked for this beyond the same two pages.
    let branch = [text(1, 64), text(3, 64)].concat();
    assert_eq!(found(&kv, &branch), (64, Some(MissReason::Diverged)));
    compute_and_release(&mut kv, &text(4, 128));
    assert_eq!(found(&kv, &text(1, 128)), (0, Some(MissReason::Evicted)));
    assert_eq!(found(&kv, &text(5, 128)), (0, Some(MissReason::NoMatch)));
    // What is lost is not known to others.
    let first = text(1, 128);
    let salted = Content {
        salt: Some([1; 16]),
        ..content(&first)
    };
    assert_eq!(kv.find(salted).miss, Some(MissReason::NoMatch));
}

#[test]
fn a_full_page_takes_its_sliding_page_along_when_evicted() {
    let mut kv = kv(Some(200), 4, 8);
    compute_and_release(&mut kv, &text(1, 128));
    assert_eq!(kv.counts().sliding.cached, 4);
    compute_and_release(&mut kv, &text(2, 64));
    assert_eq!(kv.counts().full.cached, 4);
    assert_eq!(kv.counts().sliding.cached, 4);
    kv.audit(std::iter::empty());
}

#[test]
fn sequences_that_compute_the_same_tokens_end_up_with_the_same_pages() {
    let mut kv = kv(Some(200), 8, 8);
    let tokens = text(1, 70);
    let none = kv.find(content(&tokens));
    let mut tables = [(); 2].map(|()| kv.claim(content(&tokens), none, tokens.len()));
    for table in &mut tables {
        kv.grow(table, 70, Between::Held);
    }
    assert_eq!(kv.counts().full.held, 6);
    for table in &mut tables {
        kv.commit(table, content(&tokens), 70);
    }
    assert_eq!(tables[0].pages.full[..2], tables[1].pages.full[..2]);
    assert_eq!(tables[0].pages.sliding[..2], tables[1].pages.sliding[..2]);
    assert_ne!(tables[0].pages.full[2], tables[1].pages.full[2]);
    assert_eq!(kv.counts().full.held, 4);
    kv.audit(tables.iter());
}

#[test]
fn a_long_prompt_does_not_push_out_the_window_of_another_conversation() {
    // Room for two windows and a bit; the long prompt passes through many sliding pages.
    let mut kv = kv(Some(32), 40, 6);
    compute_and_release(&mut kv, &text(1, 70));
    compute_and_release(&mut kv, &text(2, 700));
    assert_eq!(found(&kv, &text(1, 70)), (64, None));
    assert_eq!(found(&kv, &text(2, 700)).0, 672);
}

#[test]
fn a_chat_finds_the_end_of_its_last_prompt_though_the_answer_was_long() {
    let mut bench = Bench::new(with_pages(roomy(Some(40)), 40, 8));
    bench.finish(request(text(1, 100), 150));
    // The next turn repeats the prompt, not the answer.
    let next = [text(1, 100), text(2, 30)].concat();
    let counts = bench.finish(request(next, 1));
    assert_eq!(counts.cached_tokens, 96);
    assert_eq!(counts.miss, Some(MissReason::Diverged));
}

#[test]
fn a_shared_beginning_is_kept_once_it_has_proved_to_be_shared() {
    let mut bench = Bench::new(with_pages(roomy(Some(32)), 60, 5));
    let prompt = |n: u64| request([text(1, 96), text(n, 120)].concat(), 1);
    assert_eq!(bench.finish(prompt(2)).cached_tokens, 0);
    // The first prompt went on past the branch without knowing of it; the second one remembers.
    assert_eq!(
        bench.finish(prompt(3)).miss,
        Some(MissReason::SlidingEvicted)
    );
    assert_eq!(bench.finish(prompt(4)).cached_tokens, 96);
}

#[test]
fn what_is_known_up_to_the_middle_of_an_image_is_reused_up_to_the_page_before_it() {
    let mut bench = Bench::new(roomy(Some(64)));
    let prompt = |n: u64, places: std::ops::Range<usize>| {
        let mut asked = request([text(1, 100), text(n, 30)].concat(), 1);
        asked.media = vec![image(places, 5)];
        asked
    };
    assert_eq!(bench.finish(prompt(2, 70..110)).cached_tokens, 0);
    // Three pages are the same; the third ends within the image.
    let again = bench.finish(prompt(2, 70..110));
    assert_eq!(again.cached_tokens, 128);
    let mut branched = prompt(3, 70..100);
    branched.media[0] = image(70..100, 6);
    let counts = bench.finish(branched);
    assert_eq!(counts.cached_tokens, 64);
    let mut same_image = request([text(1, 110), text(4, 5)].concat(), 1);
    same_image.prompt.splice(100..110, text(2, 10));
    same_image.media = vec![image(70..110, 5)];
    let counts = bench.finish(same_image);
    assert_eq!(counts.miss, Some(MissReason::MediaCut));
    assert_eq!(counts.cached_tokens, 64);
}

#[test]
fn another_image_of_the_same_size_is_not_found() {
    let mut bench = Bench::new(roomy(Some(64)));
    let prompt = |seed: u64| {
        let mut asked = request(text(1, 100), 3);
        asked.media = vec![image(10..40, seed)];
        asked
    };
    assert_eq!(bench.finish(prompt(1)).cached_tokens, 0);
    assert_eq!(bench.finish(prompt(2)).cached_tokens, 0);
    assert_eq!(bench.finish(prompt(1)).cached_tokens, 96);
    assert_eq!(bench.finish(prompt(2)).cached_tokens, 96);
}

#[test]
fn requests_of_another_salt_find_nothing() {
    let mut bench = Bench::new(roomy(Some(64)));
    let prompt = |salt: u8| {
        let mut asked = request(text(1, 100), 3);
        asked.cache_salt = Some([salt; 16]);
        asked
    };
    assert_eq!(bench.finish(prompt(1)).cached_tokens, 0);
    assert_eq!(bench.finish(prompt(2)).cached_tokens, 0);
    assert_eq!(bench.finish(prompt(2)).cached_tokens, 96);
    assert_eq!(bench.finish(request(text(1, 100), 3)).cached_tokens, 0);
    assert_eq!(bench.finish(prompt(3)).cached_tokens, 0);
}

fn with_host(full: usize, sliding: usize) -> (crate::EngineConfig, crate::ModelFacts) {
    let (mut config, facts) = with_pages(roomy(Some(40)), 8, 8);
    config.host_pages = PerGroup { full, sliding };
    (config, facts)
}

#[test]
fn what_the_device_gave_away_comes_back_from_host_memory() {
    let mut bench = Bench::new(with_host(20, 10));
    bench.finish(request(text(1, 200), 1));
    // Somebody else needs every page.
    bench.finish(request(text(2, 255), 1));
    let counts = bench.finish(request(text(1, 200), 1));
    assert_eq!((counts.cached_tokens, counts.cached_in_host), (192, 192));
    // Its window alone is on the device, of what can be found.
    assert_eq!(counts.miss, None);
    let again = bench.finish(request(text(1, 200), 1));
    assert_eq!((again.cached_tokens, again.cached_in_host), (192, 0));
}

#[test]
fn host_memory_keeps_what_was_used_last() {
    let mut bench = Bench::new(with_host(6, 10));
    for n in 1..=3 {
        bench.finish(request(text(n, 200), 1));
        bench.finish(request(text(10 + n, 255), 1));
    }
    let counts = bench.finish(request(text(1, 200), 1));
    assert_eq!(
        (counts.cached_tokens, counts.miss),
        (0, Some(MissReason::Evicted))
    );
}

#[test]
fn without_its_window_a_prefix_in_host_memory_is_of_no_use() {
    let (mut config, facts) = with_host(20, 0);
    config.pages.sliding = 5;
    let mut bench = Bench::new((config, facts));
    bench.finish(request(text(1, 200), 1));
    bench.finish(request(text(2, 255), 1));
    let counts = bench.finish(request(text(1, 200), 1));
    assert_eq!(counts.miss, Some(MissReason::SlidingEvicted));
    assert_eq!(counts.cached_tokens, 0);
}

#[test]
fn rows_of_a_wrong_draft_neither_register_pages_nor_free_any() {
    let mut kv = kv(Some(33), 8, 8);
    let tokens = text(1, 120);
    let found = kv.find(content(&tokens[..60]));
    let mut table = kv.claim(content(&tokens[..60]), found, 60);
    kv.grow(&mut table, 60, Between::Held);
    kv.commit(&mut table, content(&tokens[..60]), 60);
    // Ten rows ahead, one of which counts: the row at 61 still sees page 0.
    kv.grow(&mut table, 70, Between::Held);
    kv.commit(&mut table, content(&tokens[..61]), 1);
    assert_eq!((table.computed, table.pages.full.len()), (61, 3));
    assert_ne!(table.pages.sliding[0], PageId::FREED);
    assert_eq!(found_blocks(&kv, &tokens), 1);
    kv.audit(std::iter::once(&table));
}

fn found_blocks(kv: &Kv, tokens: &[TokenId]) -> usize {
    kv.index.walk(content(tokens)).count()
}

/// Of a lane's own prompts.
fn of_lane(tokens: &[TokenId], lane: u64) -> Content<'_> {
    Content {
        lane: Some(LaneId(lane)),
        ..content(tokens)
    }
}

fn compute_for(kv: &mut Kv, tokens: &[TokenId], lane: u64) {
    let whose = of_lane(tokens, lane);
    let found = kv.find(whose);
    let mut table = kv.claim(whose, found, tokens.len());
    let rows = tokens.len() - table.computed;
    kv.grow(&mut table, tokens.len(), Between::Held);
    kv.commit(&mut table, whose, rows);
    kv.audit(std::iter::once(&table));
    kv.release(&mut table);
    kv.audit(std::iter::empty());
}

#[test]
fn a_flood_of_one_lane_leaves_the_cache_of_another() {
    let mut kv = kv(Some(40), 16, 24);
    let conversation = text(1, 200);
    compute_for(&mut kv, &conversation, 1);
    for n in 0..40 {
        compute_for(&mut kv, &text(100 + n, 160), 2);
        let found = kv.find(of_lane(&conversation, 1));
        assert_eq!(found.reusable, 6, "after {n} of another: {found:?}");
    }
    // Alone, the lane may have everything.
    let mut alone = self::kv(Some(40), 16, 24);
    compute_for(&mut alone, &conversation, 1);
    for n in 0..40 {
        compute_for(&mut alone, &text(100 + n, 160), 1);
    }
    assert_eq!(alone.find(of_lane(&conversation, 1)).reusable, 0);
}

#[test]
fn a_beginning_that_others_continue_outlives_what_follows_it() {
    let mut kv = kv(None, 12, 0);
    let common = text(1, 128);
    // One lane continues it; the other has used it last, so that it counts for that one.
    let continued = [common.clone(), text(2, 96)].concat();
    compute_for(&mut kv, &continued, 1);
    compute_for(&mut kv, &[common, text(3, 33)].concat(), 2);
    // The second gives first: what it alone has, and not what the first one's pages follow.
    compute_for(&mut kv, &text(4, 150), 2);
    assert_eq!(kv.find(of_lane(&continued, 1)).matched, 6);
}

#[test]
fn a_beginning_in_host_memory_outlives_what_follows_it() {
    let (mut config, facts) = with_pages(roomy(None), 8, 0);
    config.host_pages.full = 10;
    let mut kv = Kv::new(&Limits::new(config, facts).unwrap());
    let common = text(1, 96);
    let continued = [common.clone(), text(2, 65)].concat();
    compute_for(&mut kv, &continued, 1);
    compute_for(&mut kv, &[common, text(3, 33)].concat(), 2);
    // A third needs every page of the device, and then the second floods host memory, which has its pages of the beginning.
    compute_for(&mut kv, &text(4, 255), 3);
    for n in 0..10 {
        compute_for(&mut kv, &text(100 + n, 255), 2);
        let found = kv.find(of_lane(&continued, 1));
        assert_eq!((found.matched, found.in_host), (5, 5), "after {n}");
    }
}
