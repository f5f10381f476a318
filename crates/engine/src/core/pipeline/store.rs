//! Pages on their way to a store and back.
//!
//! Back: when a request comes, its prompt is looked for in the store beyond what memory has. If reading is worth it the request
//! stands aside until the pages are there; they join the cached ones of the device, and the request finds them like any other. To the
//! store: what ended requests leave behind is written a segment at a time, by whoever has nothing else to do.

use std::time::Duration;

use carat_model::{
    backend::{BackendError, Executor, PageMove},
    kv::{HostPageId, KvGroup, PAGE_TOKENS, PageId, PerGroup},
};

use super::{
    super::{
        LaneId, MissReason, Rejected, Request, RequestId,
        kv::Kv,
        media::{Content, Media},
        prefix::Places,
        store::{PageStore, ReadPages, Segment, StoreStats, WantedPage},
    },
    Pipeline, in_doubt,
};
use crate::config::Limits;

/// Longest wait for pages when there is nothing else to do, before looking for commands again.
const PATIENCE: Duration = Duration::from_millis(2);

/// A store, and what is being read from it.
pub(super) struct Tier {
    store: Box<dyn PageStore>,
    /// The first place in host memory that pages pass through, and how many there are.
    staging: PerGroup<(u32, usize)>,
    page_bytes: PerGroup<usize>,
    restoring: Vec<Restoring>,
}

/// A request that stands aside.
struct Restoring {
    read: u64,
    id: RequestId,
    prompt: Vec<carat_model::TokenId>,
    media: Vec<Media>,
    has_sliding: bool,
    salt: Option<[u8; 16]>,
    lane: Option<LaneId>,
    /// In the order of the pages that are read: the group and the place in the prompt, in blocks.
    wanted: Vec<(KvGroup, usize)>,
}

impl Tier {
    pub(super) fn stats(&self) -> StoreStats {
        self.store.stats()
    }
}

impl<E: Executor> Pipeline<E> {
    /// Keeps what it can in a store from now on, and looks for prompts there. The configuration must have places that pages pass
    /// through ([`EngineConfig::staging_pages`](crate::EngineConfig::staging_pages)).
    pub fn with_store<Failed: From<BackendError>>(
        mut self,
        limits: &Limits,
        store: impl FnOnce(PerGroup<usize>) -> Result<Box<dyn PageStore>, Failed>,
    ) -> Result<Pipeline<E>, Failed> {
        let held = limits.config().host_pages;
        let all = limits.compile_options().host_pages;
        let staging = PerGroup {
            full: (held.full as u32, all.full - held.full),
            sliding: (held.sliding as u32, all.sliding - held.sliding),
        };
        let mut page_bytes = PerGroup::default();
        for group in KvGroup::ALL {
            let (first, places) = *staging.get(group);
            if places > 0 {
                let page = self.executor.host_page(group, HostPageId(first))?;
                *page_bytes.get_mut(group) = page.len();
            }
        }
        self.tier = Some(Tier {
            store: store(page_bytes)?,
            staging,
            page_bytes,
            restoring: Vec::new(),
        });
        self.scheduler.keep_ended();
        Ok(self)
    }

    /// Queues a request; see [`Scheduler::submit`](super::super::Scheduler::submit). It stands aside while pages of its prompt are
    /// read.
    pub fn submit(&mut self, id: RequestId, request: Request) -> Result<(), Rejected> {
        let Some(tier) = &mut self.tier else {
            return self.scheduler.submit(id, request);
        };
        let mut miss = None;
        self.scheduler
            .submit_held(id, request, |kv, content| match begin(tier, kv, content) {
                Begun::Nothing => false,
                Begun::NotWorth => {
                    miss = Some(MissReason::NotWorth);
                    false
                }
                Begun::Reading(read, wanted) => {
                    tier.restoring.push(Restoring {
                        read,
                        id,
                        prompt: content.tokens.to_vec(),
                        media: content.media.to_vec(),
                        has_sliding: content.has_sliding,
                        salt: content.salt,
                        lane: content.lane,
                        wanted,
                    });
                    true
                }
            })?;
        if let Some(miss) = miss {
            self.scheduler.explain(id, miss);
        }
        Ok(())
    }

    /// Whether ended requests have left something behind that the store lacks and would take.
    pub fn has_unsaved(&mut self) -> bool {
        let writes = self.tier.as_ref().is_some_and(|tier| tier.store.writes());
        writes && self.scheduler.kv().has_ended()
    }

    /// Whether pages are being read that somebody waits for.
    pub(super) fn is_restoring(&self) -> bool {
        self.tier
            .as_ref()
            .is_some_and(|tier| !tier.restoring.is_empty())
    }

    /// Takes in what has been read.
    pub(super) fn restore(&mut self) -> Result<(), BackendError> {
        while let Some(read) = self.next_read(Duration::ZERO) {
            self.take_in(&read)?;
        }
        Ok(())
    }

    /// Takes in what is read next, where there is nothing else to do.
    pub(super) fn await_restore(&mut self) -> Result<(), BackendError> {
        match self.next_read(PATIENCE) {
            Some(read) => self.take_in(&read),
            None => Ok(()),
        }
    }

    fn next_read(&mut self, patience: Duration) -> Option<ReadPages> {
        let tier = self.tier.as_mut().filter(|t| !t.restoring.is_empty())?;
        tier.store.finished(patience)
    }

    fn take_in(&mut self, read: &ReadPages) -> Result<(), BackendError> {
        let Some(tier) = &mut self.tier else {
            return Ok(());
        };
        let Some(index) = tier.restoring.iter().position(|r| r.read == read.id) else {
            return Ok(());
        };
        let restoring = tier.restoring.swap_remove(index);
        let content = Content {
            tokens: &restoring.prompt,
            media: &restoring.media,
            has_sliding: restoring.has_sliding,
            salt: restoring.salt,
            lane: restoring.lane,
        };
        let right = restoring.wanted.iter().zip(&read.pages);
        let right: Vec<_> = right
            .filter_map(|(wanted, page)| Some((*wanted, page.as_ref()?)))
            .collect();
        let places: Vec<(KvGroup, usize)> = right.iter().map(|(wanted, _)| *wanted).collect();
        let pages = self.scheduler.kv().restore(content, &places);
        let is_whole = right.len() == restoring.wanted.len();
        for call in self.scheduler.kv().take_moves() {
            self.executor.move_pages(&call).map_err(in_doubt)?;
        }
        for group in KvGroup::ALL {
            let (first, places) = *tier.staging.get(group);
            let loads = right.iter().zip(&pages);
            let loads = loads.filter(|(((of, _), _), page)| *of == group && page.is_some());
            let loads: Vec<(&[u8], PageId)> = loads
                .filter_map(|((_, bytes), page)| Some((bytes.bytes(), (*page)?)))
                .collect();
            for some in loads.chunks(places.max(1)) {
                let mut moves = Vec::with_capacity(some.len());
                for ((bytes, to), place) in some.iter().zip(first..) {
                    let from = HostPageId(place);
                    let page = self.executor.host_page(group, from).map_err(in_doubt)?;
                    page.copy_from_slice(bytes);
                    let to = *to;
                    moves.push(PageMove::Load { group, from, to });
                }
                self.executor.move_pages(&moves).map_err(in_doubt)?;
            }
        }
        let full = places.iter().zip(&pages);
        let full = full.filter(|((group, _), page)| *group == KvGroup::Full && page.is_some());
        let restored = full.count() * PAGE_TOKENS;
        self.scheduler
            .release_held(restoring.id, is_whole, restored);
        Ok(())
    }

    /// Hands a segment of what ended requests have left behind to the store. `false` if there is nothing to hand over, or if the store
    /// has enough to do. Nothing may be in flight.
    pub fn persist(&mut self) -> Result<bool, BackendError> {
        let Some(tier) = &mut self.tier else {
            return Ok(false);
        };
        if !tier.store.takes_more() || !self.tickets.is_empty() {
            return Ok(false);
        }
        let store = tier.store.as_ref();
        let has = |group, chain: &_| store.has(group, chain);
        let Some(unsaved) = self.scheduler.kv().next_unsaved(&has, tier.page_bytes) else {
            return Ok(false);
        };
        let group = unsaved.group;
        for call in self.scheduler.kv().take_moves() {
            self.executor.move_pages(&call).map_err(in_doubt)?;
        }
        let (first, places) = *tier.staging.get(group);
        let mut pages = Vec::with_capacity(unsaved.places.len() * tier.page_bytes.get(group));
        for some in unsaved.places.chunks(places.max(1)) {
            let passing: Vec<HostPageId> = some
                .iter()
                .zip(first..)
                .map(|(at, place)| at.host.unwrap_or(HostPageId(place)))
                .collect();
            let copied = some.iter().zip(&passing).filter_map(|(at, to)| {
                let Places { device, host } = *at;
                let from = device.filter(|_| host.is_none())?;
                Some(PageMove::Save {
                    group,
                    from,
                    to: *to,
                })
            });
            let moves: Vec<PageMove> = copied.collect();
            self.executor.move_pages(&moves).map_err(in_doubt)?;
            for place in passing {
                let page = self.executor.host_page(group, place).map_err(in_doubt)?;
                pages.extend_from_slice(page);
            }
        }
        tier.store.write(Segment {
            group,
            parent: unsaved.parent,
            blocks: unsaved.blocks,
            pages,
        });
        Ok(true)
    }

    /// Waits until the store has written something, up to so long.
    pub(crate) fn await_store(&mut self, patience: Duration) {
        if let Some(tier) = &mut self.tier {
            tier.store.wait(patience);
        }
    }

    /// Computing so many tokens of prompts took so long.
    pub(crate) fn observe_prefill(&mut self, tokens: usize, took: Duration) {
        if let Some(tier) = &mut self.tier {
            tier.store.observe(tokens, took);
        }
    }
}

enum Begun {
    Nothing,
    /// Computing is faster.
    NotWorth,
    /// Pages are read: the name of that, and which they are.
    Reading(u64, Vec<(KvGroup, usize)>),
}

/// Looks for a prompt in the store, beyond what memory has.
fn begin(tier: &mut Tier, kv: &Kv, content: Content<'_>) -> Begun {
    let store = tier.store.as_mut();
    let has = |group, chain: &_| store.has(group, chain);
    let Some(stored) = kv.beyond(content, &has) else {
        return Begun::Nothing;
    };
    let bytes = |(group, _): &(KvGroup, usize)| *tier.page_bytes.get(*group) as u64;
    let bytes = stored.wanted.iter().map(bytes).sum();
    if !store.is_worth(stored.more_blocks * PAGE_TOKENS, bytes) {
        return Begun::NotWorth;
    }
    let pages = stored.wanted.iter().map(|&(group, place)| WantedPage {
        group,
        block: stored.blocks[place].clone(),
    });
    let read = store.read(pages.collect());
    Begun::Reading(read, stored.wanted)
}
