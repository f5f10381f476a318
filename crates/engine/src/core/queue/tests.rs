use super::*;
use crate::{
    Limits,
    core::{
        Request,
        testing::{request, roomy, text},
    },
};

impl Queue {
    /// Nobody waits for somebody who is gone, lanes are in order, and none is empty.
    pub(crate) fn audit(&self, is_there: impl Fn(RequestId) -> bool) {
        assert!(self.aside.iter().all(|(sibling, _)| is_there(*sibling)));
        assert!(self.preempted.iter().is_sorted_by_key(|s| s.id));
        for (n, lane) in self.lanes.iter().enumerate() {
            assert!(!lane.waiting.is_empty(), "an empty lane");
            assert!(lane.waiting.iter().is_sorted_by_key(|w| w.arrival));
            assert!(lane.waiting.iter().all(|w| w.sequence.lane == lane.id));
            assert!(lane.waiting.iter().all(|w| w.passed_by <= MAX_PASSING));
            let mut others = self.lanes.iter().skip(n + 1);
            assert!(others.all(|other| other.id != lane.id), "two of a lane");
        }
    }
}

fn waiting(id: u64, lane: Option<u64>) -> Sequence {
    let (config, facts) = roomy(None);
    let limits = Limits::new(config, facts).unwrap();
    let asked = Request {
        lane: lane.map(LaneId),
        ..request(text(id, 10), 10)
    };
    Sequence::new(RequestId(id), asked, 20, &limits)
}

/// Takes all out, each at the same cost.
fn order(queue: &mut Queue, cost: usize) -> Vec<u64> {
    let mut order = Vec::new();
    while let Some(head) = queue.head(|_| cost) {
        order.push(queue.take(head, head, cost).id.0);
        queue.audit(|_| true);
    }
    order
}

#[test]
fn a_sibling_takes_the_place_that_it_came_for() {
    let mut queue = Queue::default();
    queue.push(waiting(2, None), Some(RequestId(1)));
    queue.push(waiting(3, None), None);
    queue.push(waiting(4, None), Some(RequestId(9)));
    assert!(queue.release(RequestId(1)));
    assert!(!queue.release(RequestId(1)));
    assert_eq!(order(&mut queue, 10), [2, 3]);
    assert_eq!(queue.len(), 1);
}

#[test]
fn who_lost_its_pages_comes_first_in_the_order_of_submission() {
    let mut queue = Queue::default();
    queue.push(waiting(7, None), None);
    for id in [5, 3, 6] {
        queue.put_back(waiting(id, Some(1)));
    }
    assert_eq!(order(&mut queue, 10), [3, 5, 6, 7]);
}

#[test]
fn a_turn_is_worth_a_quantum_whatever_one_request_costs() {
    // Two requests per turn, or one in several turns.
    for (cost, expected) in [(256, [11, 12, 1, 2, 13, 3]), (5000, [11, 1, 12, 2, 13, 3])] {
        let mut queue = Queue::default();
        for id in 1..=3 {
            queue.push(waiting(id, None), None);
        }
        for id in 11..=13 {
            queue.push(waiting(id, Some(4)), None);
        }
        assert_eq!(order(&mut queue, cost), expected, "at {cost} tokens");
    }
}

#[test]
fn whoever_is_started_out_of_turn_pays_for_it_later() {
    let mut queue = Queue::default();
    for id in 1..=3 {
        queue.push(waiting(id, None), None);
        queue.push(waiting(10 + id, Some(4)), None);
    }
    let head = queue.head(|_| 512).unwrap();
    assert_eq!(queue.get(head).id.0, 11);
    let other = queue.behind(head).next().unwrap();
    assert_eq!(queue.take(other, head, 512).id.0, 1);
    // The lane of 1 has had its turn.
    assert_eq!(order(&mut queue, 512), [11, 12, 2, 13, 3]);
}
