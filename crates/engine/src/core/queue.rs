//! Waiting requests, and the order in which they are served.
//!
//! Lanes are served by deficit round robin: in its turn a lane may spend a quantum of tokens and what it has left over from the
//! turns before. Within a lane requests are served in the order they came. Those who have run already and lost their pages come
//! before all lanes. A request that waits for a sibling stands aside until that has its first token, then takes the place in its
//! lane that it came for.
//!
//! If there is no room for the one whose turn it is, others may pass it, but only so many ([`MAX_PASSING`]): small requests do
//! not wait for a large one, and a large one does not wait for ever. Nobody passes one that lost its pages.

use std::collections::VecDeque;

use super::{
    request::{LaneId, RequestId},
    sequence::Sequence,
};

/// Tokens that a lane may spend in a turn.
const QUANTUM: i64 = 512;
/// Requests that may be started before the one whose turn it is.
const MAX_PASSING: usize = 32;

struct Waiting {
    sequence: Sequence,
    /// Counts up in the order of submission.
    arrival: u64,
    /// Requests that have been started before it in its turn.
    passed_by: usize,
}

struct Lane {
    id: Option<LaneId>,
    /// Never empty.
    waiting: VecDeque<Waiting>,
    /// Tokens that it may still spend; less than 0 where a request was started out of turn.
    deficit: i64,
    /// Of the first who waits, once somebody has asked.
    cost: Option<i64>,
}

impl Lane {
    /// Tokens that the first who waits costs beyond what may be spent.
    fn missing(&self) -> i64 {
        self.cost.unwrap_or(0) - self.deficit
    }
}

/// Index of a sequence that waits.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum QueueIndex {
    /// First of those that lost their pages.
    Preempted,
    /// Of a lane, counted from the one whose turn it is, and within it.
    Lane(usize, usize),
}

/// Sequences that are not running.
#[derive(Default)]
pub(crate) struct Queue {
    preempted: VecDeque<Sequence>,
    /// Those with somebody waiting; the turn is the first one's.
    lanes: VecDeque<Lane>,
    /// Requests that wait for a sibling.
    aside: Vec<(RequestId, Waiting)>,
    arrivals: u64,
}

impl Queue {
    pub(crate) fn is_empty(&self) -> bool {
        self.len() == 0
    }

    pub(crate) fn len(&self) -> usize {
        let lanes = self.lanes.iter().map(|lane| lane.waiting.len());
        self.preempted.len() + self.aside.len() + lanes.sum::<usize>()
    }

    pub(crate) fn iter(&self) -> impl Iterator<Item = &Sequence> {
        let waiting = self.lanes.iter().flat_map(|lane| &lane.waiting);
        let aside = self.aside.iter().map(|(_, waiting)| waiting);
        let new = waiting.chain(aside).map(|waiting| &waiting.sequence);
        self.preempted.iter().chain(new)
    }

    pub(crate) fn iter_mut(&mut self) -> impl Iterator<Item = &mut Sequence> {
        let waiting = self.lanes.iter_mut().flat_map(|lane| &mut lane.waiting);
        let aside = self.aside.iter_mut().map(|(_, waiting)| waiting);
        let new = waiting.chain(aside).map(|waiting| &mut waiting.sequence);
        self.preempted.iter_mut().chain(new)
    }

    /// A new request; `sibling` is one that it waits for.
    pub(crate) fn push(&mut self, sequence: Sequence, sibling: Option<RequestId>) {
        self.arrivals += 1;
        let waiting = Waiting {
            sequence,
            arrival: self.arrivals,
            passed_by: 0,
        };
        match sibling {
            Some(sibling) => self.aside.push((sibling, waiting)),
            None => self.enter(waiting),
        }
    }

    /// One that was running and lost its pages.
    pub(crate) fn put_back(&mut self, sequence: Sequence) {
        let older = |other: &Sequence| other.id < sequence.id;
        let place = self.preempted.partition_point(older);
        self.preempted.insert(place, sequence);
    }

    /// Nobody waits for this request any longer. Says whether somebody did.
    pub(crate) fn release(&mut self, sibling: RequestId) -> bool {
        let mut any = false;
        while let Some(place) = self.aside.iter().position(|(id, _)| *id == sibling) {
            let (_, waiting) = self.aside.remove(place);
            self.enter(waiting);
            any = true;
        }
        any
    }

    fn enter(&mut self, waiting: Waiting) {
        let id = waiting.sequence.lane;
        if let Some(lane) = self.lanes.iter_mut().find(|lane| lane.id == id) {
            let earlier = |other: &Waiting| other.arrival < waiting.arrival;
            let place = lane.waiting.partition_point(earlier);
            if place == 0 {
                lane.cost = None;
            }
            lane.waiting.insert(place, waiting);
        } else {
            self.lanes.push_back(Lane {
                id,
                waiting: VecDeque::from([waiting]),
                deficit: 0,
                cost: None,
            });
        }
    }

    /// Whoever is next, by what each would cost in tokens.
    pub(crate) fn head(&mut self, cost: impl Fn(&Sequence) -> usize) -> Option<QueueIndex> {
        if !self.preempted.is_empty() {
            return Some(QueueIndex::Preempted);
        }
        if self.lanes.len() > 1 {
            for lane in &mut self.lanes {
                let first = &lane.waiting[0].sequence;
                lane.cost.get_or_insert_with(|| as_deficit(cost(first)));
            }
            self.take_turns();
        }
        (!self.lanes.is_empty()).then_some(QueueIndex::Lane(0, 0))
    }

    /// Gives turns until the lane whose turn it is can pay for its first.
    fn take_turns(&mut self) {
        let missing = self.lanes.iter().map(Lane::missing).min().unwrap_or(0);
        // Rounds in which everybody saves up.
        let idle = (missing.max(0) as u64).div_ceil(QUANTUM as u64) as i64 - 1;
        for lane in &mut self.lanes {
            lane.deficit += idle.max(0) * QUANTUM;
        }
        while self.lanes[0].missing() > 0 {
            self.lanes.rotate_left(1);
            self.lanes[0].deficit += QUANTUM;
        }
    }

    /// Those behind the one whose turn it is, if they may pass it: the first of each lane, then the second of each.
    pub(crate) fn behind(&self, head: QueueIndex) -> impl Iterator<Item = QueueIndex> {
        let may_pass = match head {
            QueueIndex::Preempted => false,
            QueueIndex::Lane(lane, index) => {
                self.lanes[lane].waiting[index].passed_by < MAX_PASSING
            }
        };
        let lanes = || self.lanes.iter().enumerate();
        let deepest = lanes().map(|(_, lane)| lane.waiting.len()).max();
        let behind = (0..deepest.filter(|_| may_pass).unwrap_or(0)).flat_map(move |index| {
            let deep = lanes().filter(move |(_, lane)| index < lane.waiting.len());
            deep.map(move |(lane, _)| QueueIndex::Lane(lane, index))
        });
        behind.filter(move |at| *at != head)
    }

    pub(crate) fn get(&self, at: QueueIndex) -> &Sequence {
        match at {
            QueueIndex::Preempted => &self.preempted[0],
            QueueIndex::Lane(lane, index) => &self.lanes[lane].waiting[index].sequence,
        }
    }

    /// Takes out whoever waits there, at the expense of its lane. `head` is whose turn it is.
    pub(crate) fn take(&mut self, at: QueueIndex, head: QueueIndex, cost: usize) -> Sequence {
        if at != head
            && let QueueIndex::Lane(lane, first) = head
        {
            self.lanes[lane].waiting[first].passed_by += 1;
        }
        let (lane, index) = match at {
            QueueIndex::Preempted => return self.preempted.pop_front().expect("it was looked at"),
            QueueIndex::Lane(lane, index) => (lane, index),
        };
        // One lane alone has nobody to be fair to.
        let shares = self.lanes.len() > 1;
        let from = &mut self.lanes[lane];
        if shares {
            from.deficit -= as_deficit(cost);
        }
        if index == 0 {
            from.cost = None;
        }
        let taken = from.waiting.remove(index).expect("it was looked at");
        self.drop_empty_lanes();
        taken.sequence
    }

    /// Keeps those that `stays` says so of.
    pub(crate) fn retain(&mut self, mut stays: impl FnMut(&Sequence) -> bool) {
        self.preempted.retain(&mut stays);
        self.aside.retain(|(_, waiting)| stays(&waiting.sequence));
        for lane in &mut self.lanes {
            let first = lane.waiting[0].arrival;
            lane.waiting.retain(|waiting| stays(&waiting.sequence));
            if lane.waiting.front().is_none_or(|w| w.arrival != first) {
                lane.cost = None;
            }
        }
        self.drop_empty_lanes();
    }

    fn drop_empty_lanes(&mut self) {
        let turn = self.lanes.front().and_then(|lane| lane.id);
        let had_turn = !self.lanes.is_empty();
        self.lanes.retain(|lane| !lane.waiting.is_empty());
        if let Some(lane) = self.lanes.front_mut()
            && had_turn
            && lane.id != turn
        {
            lane.deficit += QUANTUM;
        }
    }
}

/// Costs stay far below what a deficit can count.
fn as_deficit(tokens: usize) -> i64 {
    i64::try_from(tokens).unwrap_or(i64::MAX / 4)
}

#[cfg(test)]
mod tests;
