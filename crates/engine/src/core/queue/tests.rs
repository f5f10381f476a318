use super::*;

impl Queue {
    /// Nobody waits for somebody who is gone, lanes are in order, and none is empty.
    pub(crate) fn audit(&self, is_there: impl Fn(RequestId) -> bool) {
        assert!(self.aside.iter().all(|(sibling, _)| is_there(*sibling)));
        assert!(self.preempted.iter().is_sorted_by_key(|s| s.id));
        for (n, lane) in self.lanes.iter().enumerate() {
            assert!(!lane.waiting.is_empty(), "an empty lane");
            assert!(lane.waiting.iter().is_sorted_by_key(|w| w.arrival));
            assert!(lane.waiting.iter().all(|w| w.sequence.lane == lane.id));
            assert!(lane.waiting.iter().all(|w| w.passed_by <= MOST_PASSING));
            let mut others = self.lanes.iter().skip(n + 1);
            assert!(others.all(|other| other.id != lane.id), "two of a lane");
        }
    }
}
