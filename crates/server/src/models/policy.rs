//! Choice of the model that comes and the one that goes: a pure function of what is there and of the time.
//!
//! Requests for models that are not in memory are served in the order they came. Where there is no room, the least recently used
//! model goes: at once if nobody uses it; else it takes no new requests, and goes when those under way have ended.

use std::time::{Duration, Instant};

use super::{Residency, State};

/// A model, as far as the choice depends on it.
#[derive(Clone, Copy, Debug)]
pub(super) struct Place {
    pub(super) state: State,
    /// Memory it takes while it is loaded.
    pub(super) bytes: u64,
    /// Requests that use it.
    pub(super) users: usize,
    /// Number of the first request that waits for it.
    pub(super) first_waiting: Option<u64>,
    /// End of the latest use.
    pub(super) used: Instant,
    /// Before this it is not closed to new requests: models that take turns would otherwise do nothing but load.
    pub(super) stays_until: Instant,
}

/// Next action.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Act {
    Load(usize),
    Unload(usize),
    /// Until something changes, at most so long.
    Sleep(Option<Duration>),
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Decision {
    pub(super) act: Act,
    /// Loaded models that take no new requests, since others need their room.
    pub(super) closed: Vec<usize>,
}

/// All places are loaded, unloaded or failed: nobody asks while one is on its way.
pub(super) fn decide(places: &[Place], residency: &Residency, now: Instant) -> Decision {
    let mut closed = Vec::new();
    let mut sleep: Option<Duration> = None;
    let mut until = |then: Instant| {
        let wait = then.saturating_duration_since(now);
        sleep = Some(sleep.map_or(wait, |sleep| sleep.min(wait)));
    };
    if let Some(wanted) = first_wanted(places) {
        let held: u64 = loaded(places).map(|n| places[n].bytes).sum();
        let room = residency.memory_bytes.saturating_sub(held);
        let mut missing = places[wanted].bytes.saturating_sub(room);
        if missing == 0 {
            return Decision {
                act: Act::Load(wanted),
                closed,
            };
        }
        let mut victims: Vec<usize> = loaded(places).collect();
        victims.sort_by_key(|n| (places[*n].users > 0, places[*n].used));
        let mut rests = None;
        for n in victims {
            let victim = &places[n];
            if victim.users > 0 && victim.stays_until > now {
                until(victim.stays_until);
            } else {
                // One that rests as well: whoever waits for it has come later.
                closed.push(n);
            }
            if victim.users == 0 {
                rests = rests.or(Some(n));
            }
            missing = missing.saturating_sub(victim.bytes);
            if missing == 0 {
                break;
            }
        }
        if let Some(n) = rests {
            return Decision {
                act: Act::Unload(n),
                closed,
            };
        }
    }
    if let Some(idle) = residency.idle {
        for n in loaded(places) {
            let place = &places[n];
            if place.users > 0 || place.first_waiting.is_some() {
                continue;
            }
            let leaves = place.used + idle;
            if leaves <= now {
                return Decision {
                    act: Act::Unload(n),
                    closed,
                };
            }
            until(leaves);
        }
    }
    Decision {
        act: Act::Sleep(sleep),
        closed,
    }
}

fn loaded(places: &[Place]) -> impl Iterator<Item = usize> {
    (0..places.len()).filter(|n| places[*n].state == State::Loaded)
}

/// The model whose first request has waited longest.
fn first_wanted(places: &[Place]) -> Option<usize> {
    let away = (0..places.len()).filter(|n| places[*n].state != State::Loaded);
    away.filter(|n| places[*n].first_waiting.is_some())
        .min_by_key(|n| places[*n].first_waiting)
}

#[cfg(test)]
mod tests {
    use super::*;

    const SECOND: Duration = Duration::from_secs(1);

    fn place(state: State, now: Instant) -> Place {
        Place {
            state,
            bytes: 60,
            users: 0,
            first_waiting: None,
            used: now,
            stays_until: now,
        }
    }

    fn residency(memory_bytes: u64, idle: Option<Duration>) -> Residency {
        Residency {
            memory_bytes,
            idle,
            retry: SECOND,
        }
    }

    fn wanted(first: u64, now: Instant) -> Place {
        Place {
            first_waiting: Some(first),
            ..place(State::Unloaded, now)
        }
    }

    #[test]
    fn requests_are_served_in_the_order_they_came() {
        let now = Instant::now();
        let places = [wanted(7, now), wanted(3, now)];
        let decision = decide(&places, &residency(100, None), now);
        assert_eq!(decision.act, Act::Load(1));
    }

    #[test]
    fn the_least_recently_used_of_those_that_rest_goes_first() {
        let start = Instant::now();
        let now = start + 9 * SECOND;
        let used = Place {
            used: start,
            users: 1,
            ..place(State::Loaded, now)
        };
        let rests = Place {
            used: start + 7 * SECOND,
            ..place(State::Loaded, now)
        };
        let places = [used, rests, place(State::Loaded, now), wanted(1, now)];
        let decision = decide(&places, &residency(180, None), now);
        assert_eq!(decision.act, Act::Unload(1));
        assert_eq!(decision.closed, [1]);
    }

    #[test]
    fn a_model_in_use_is_closed_and_waited_for() {
        let now = Instant::now();
        let busy = Place {
            users: 2,
            ..place(State::Loaded, now)
        };
        let decision = decide(&[busy, wanted(1, now)], &residency(100, None), now);
        assert_eq!(decision.act, Act::Sleep(None));
        assert_eq!(decision.closed, [0]);
    }

    #[test]
    fn a_model_in_use_stays_open_for_as_long_as_it_was_promised() {
        let now = Instant::now();
        let busy = Place {
            users: 1,
            stays_until: now + 3 * SECOND,
            ..place(State::Loaded, now)
        };
        let decision = decide(&[busy, wanted(1, now)], &residency(100, None), now);
        assert_eq!(decision.act, Act::Sleep(Some(3 * SECOND)));
        assert!(decision.closed.is_empty());
    }

    #[test]
    fn nobody_is_closed_for_a_model_that_fits_beside() {
        let now = Instant::now();
        let busy = Place {
            users: 1,
            ..place(State::Loaded, now)
        };
        let decision = decide(&[busy, wanted(1, now)], &residency(120, None), now);
        assert_eq!(decision.act, Act::Load(1));
        assert!(decision.closed.is_empty());
    }

    #[test]
    fn idle_models_go_when_their_time_is_up() {
        let start = Instant::now();
        let now = start + 4 * SECOND;
        let resting = Place {
            used: start,
            ..place(State::Loaded, now)
        };
        let wait = decide(&[resting], &residency(100, Some(5 * SECOND)), now);
        assert_eq!(wait.act, Act::Sleep(Some(SECOND)));
        let go = decide(&[resting], &residency(100, Some(4 * SECOND)), now);
        assert_eq!(go.act, Act::Unload(0));
        let used = Place {
            users: 1,
            ..resting
        };
        let stay = decide(&[used], &residency(100, Some(4 * SECOND)), now);
        assert_eq!(stay.act, Act::Sleep(None));
    }
}
