//! Deadlines of requests, the nearest first.

use std::{cmp::Reverse, collections::BinaryHeap, time::Instant};

use crate::core::RequestId;

/// So many are kept without a look at which of them still matter.
const FEW: usize = 64;

/// Purpose of a deadline.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Limit {
    /// To be started.
    Queue,
    /// To end.
    Request,
}

/// Most requests end long before theirs: what is kept of those is at most as much as of the others.
#[derive(Debug, Default)]
pub(crate) struct Deadlines {
    nearest: BinaryHeap<Reverse<(Instant, RequestId, Limit)>>,
    /// Those that were left when ended requests were last forgotten.
    left: usize,
}

impl Deadlines {
    pub(crate) fn push(&mut self, when: Instant, id: RequestId, limit: Limit) {
        self.nearest.push(Reverse((when, id, limit)));
    }

    /// Takes the next one that has passed.
    pub(crate) fn pop(&mut self, now: Instant) -> Option<(RequestId, Limit)> {
        let Reverse((when, id, limit)) = *self.nearest.peek()?;
        if when > now {
            return None;
        }
        self.nearest.pop();
        Some((id, limit))
    }

    /// Forgets those of requests that have ended, once there are twice as many as were left the last time.
    pub(crate) fn forget(&mut self, is_unfinished: impl Fn(RequestId) -> bool) {
        if self.nearest.len() < 2 * self.left.max(FEW) {
            return;
        }
        self.nearest
            .retain(|Reverse((_, id, _))| is_unfinished(*id));
        self.left = self.nearest.len();
        self.nearest.shrink_to(2 * self.left.max(FEW));
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    #[test]
    fn they_pass_in_order_of_time() {
        let start = Instant::now();
        let mut deadlines = Deadlines::default();
        for (after, id, limit) in [
            (5, 1, Limit::Request),
            (1, 1, Limit::Queue),
            (3, 2, Limit::Request),
        ] {
            deadlines.push(start + Duration::from_secs(after), RequestId(id), limit);
        }
        assert_eq!(deadlines.pop(start), None);
        let late = start + Duration::from_secs(3);
        assert_eq!(deadlines.pop(late), Some((RequestId(1), Limit::Queue)));
        assert_eq!(deadlines.pop(late), Some((RequestId(2), Limit::Request)));
        assert_eq!(deadlines.pop(late), None);
    }

    #[test]
    fn requests_that_have_ended_leave_nothing() {
        let far = Instant::now() + Duration::from_hours(1);
        let mut deadlines = Deadlines::default();
        // Each hundredth stays, the others end at once.
        let stays = |id: RequestId| id.0.is_multiple_of(100);
        for id in 0..100_000 {
            deadlines.push(far, RequestId(id), Limit::Request);
            deadlines.forget(|other| stays(other) || other.0 == id);
            let most = 2 * FEW.max(id as usize / 100 + 2);
            assert!(deadlines.nearest.len() <= most, "after {id}");
        }
        assert!(
            deadlines.nearest.capacity() <= 4 * 1000,
            "nor do they take room"
        );
        let left = deadlines
            .nearest
            .iter()
            .filter(|Reverse((_, id, _))| stays(*id));
        assert_eq!(left.count(), 1000, "those that stay keep theirs");
    }
}
