//! The thread that loads and unloads.

use std::{
    panic::{AssertUnwindSafe, catch_unwind},
    sync::{Arc, MutexGuard, PoisonError},
    time::{Duration, Instant},
};

use super::{
    Counts, Residency, Served, Shared, Slots, State, Told, Waiter, hold, load_failed,
    policy::{self, Act, Place},
};
use crate::memory;

/// A model in use stays for as long as it took to load, so that at most half of the time goes into loading, but no longer than this
/// where others wait.
const LONGEST_STAY: Duration = Duration::from_secs(10);

/// Until the server ends.
pub(super) fn run(shared: &Arc<Shared>, residency: &Residency) {
    let mut slots = shared.lock();
    while !slots.ended {
        let decision = policy::decide(&places(&mut slots), residency, Instant::now());
        for (n, slot) in slots.list.iter_mut().enumerate() {
            slot.closed = decision.closed.contains(&n);
        }
        // Those that wait for a model that was closed and is open again.
        let reopened: Vec<usize> = (0..slots.list.len())
            .filter(|n| {
                let slot = &slots.list[*n];
                slot.served.is_some() && !slot.closed && slot.waiting() > 0
            })
            .collect();
        if !reopened.is_empty() {
            let told: Vec<_> = reopened
                .into_iter()
                .flat_map(|n| admit(shared, &mut slots, n))
                .collect();
            drop(slots);
            tell(told);
            slots = shared.lock();
            continue;
        }
        slots = match decision.act {
            Act::Load(n) => load(shared, slots, residency, n),
            Act::Unload(n) => unload(shared, slots, n),
            Act::Sleep(None) => shared
                .wake
                .wait(slots)
                .unwrap_or_else(PoisonError::into_inner),
            Act::Sleep(Some(most)) => {
                let woken = shared.wake.wait_timeout(slots, most);
                woken.unwrap_or_else(PoisonError::into_inner).0
            }
        };
    }
    for slot in &mut slots.list {
        slot.waiters.clear();
    }
}

/// Passes over requests whose clients have left.
fn places(slots: &mut Slots) -> Vec<Place> {
    let each = slots.list.iter_mut();
    each.map(|slot| {
        slot.waiters.retain(|waiter| !waiter.told.is_closed());
        Place {
            state: slot.state,
            bytes: slot.offer.memory_bytes,
            users: slot.users,
            first_waiting: slot.waiters.first().map(|waiter| waiter.number),
            used: slot.used,
            stays_until: slot.stays_until,
        }
    })
    .collect()
}

type Answered = (Waiter, Told);

/// Gives a loaded model to all that wait for it. They count as users from now on, before they hear of it.
fn admit(shared: &Arc<Shared>, slots: &mut Slots, n: usize) -> Vec<Answered> {
    let slot = &mut slots.list[n];
    let waiters = std::mem::take(&mut slot.waiters);
    let Some(served) = &slot.served else {
        return Vec::new();
    };
    slot.users += waiters.len();
    let each = waiters.into_iter();
    each.map(|waiter| {
        let held = hold(shared, Arc::clone(served), n, Counts::AsUse);
        (waiter, Ok(held))
    })
    .collect()
}

/// Without the lock: what nobody takes any more is dropped, and dropping a use takes it.
fn tell(told: Vec<Answered>) {
    for (waiter, answer) in told {
        drop(waiter.told.send(answer));
    }
}

fn load<'a>(
    shared: &'a Arc<Shared>,
    mut slots: MutexGuard<'a, Slots>,
    residency: &Residency,
    n: usize,
) -> MutexGuard<'a, Slots> {
    let slot = &mut slots.list[n];
    slot.state = State::Loading;
    let load = Arc::clone(&slot.offer.load);
    let name = slot.offer.info.name.clone();
    drop(slots);
    tracing::info!(model = name, "loading");
    let begun = Instant::now();
    let loaded = catch_unwind(AssertUnwindSafe(|| load()))
        .unwrap_or_else(|_| Err("the loader ran into a mistake; its log says more".to_owned()));
    let took = begun.elapsed();
    let mut slots = shared.lock();
    let now = Instant::now();
    let slot = &mut slots.list[n];
    slot.counts.load_time += took;
    let told = match loaded {
        Ok(model) => {
            tracing::info!(model = name, millis = took.as_millis() as u64, "loaded");
            slot.offer.info.loaded = model.info.loaded;
            slot.counts.loads += 1;
            slot.served = Some(Served::new(model));
            slot.state = State::Loaded;
            slot.failure = None;
            slot.used = now;
            slot.stays_until = now + took.min(LONGEST_STAY);
            admit(shared, &mut slots, n)
        }
        Err(reason) => {
            tracing::warn!(model = name, reason, "could not be loaded");
            slot.counts.failures += 1;
            slot.state = State::Failed;
            let error = load_failed(&name, &reason, residency.retry);
            slot.failure = Some((reason, now + residency.retry));
            let waiters = std::mem::take(&mut slot.waiters).into_iter();
            waiters.map(|waiter| (waiter, Err(error.clone()))).collect()
        }
    };
    drop(slots);
    tell(told);
    shared.lock()
}

/// Nobody uses it: the reference in the slot is the last one, and its memory is free when it is dropped.
fn unload<'a>(
    shared: &'a Arc<Shared>,
    mut slots: MutexGuard<'a, Slots>,
    n: usize,
) -> MutexGuard<'a, Slots> {
    let slot = &mut slots.list[n];
    let name = slot.offer.info.name.clone();
    slot.state = State::Unloading;
    slot.counts.unloads += 1;
    slot.past = slot.snapshot().totals;
    let served = slot.served.take();
    drop(slots);
    drop(served);
    memory::give_back();
    tracing::info!(model = name, "unloaded");
    let mut slots = shared.lock();
    slots.list[n].state = State::Unloaded;
    slots
}
