//! Those who wait, counted by lane: one lane may not take the whole queue, or nobody else would get in.

use std::{
    collections::HashMap,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
};

/// Answers of a lane that may wait, where the operator does not say.
const USUAL_MOST: usize = 64;

/// Answers that wait to be started, by the name of their lane.
#[derive(Default)]
pub(crate) struct Lines {
    waiting: Mutex<HashMap<String, usize>>,
}

/// A place in the line of a lane, for one answer; given back when dropped.
pub(crate) struct Place {
    lines: Arc<Lines>,
    lane: String,
}

/// A line without room.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Full {
    /// Those of the lane that wait.
    pub(crate) waiting: usize,
}

impl Lines {
    /// Places for all answers of a request, or for none, so that no more than `most` of its lane wait.
    pub(crate) fn enter(
        self: &Arc<Lines>,
        lane: &str,
        answers: usize,
        most: usize,
    ) -> Result<Vec<Place>, Full> {
        let mut all = self.lock();
        let waiting = all.get(lane).copied().unwrap_or(0);
        if waiting.saturating_add(answers) > most {
            return Err(Full { waiting });
        }
        all.insert(lane.to_owned(), waiting + answers);
        let place = || Place {
            lines: Arc::clone(self),
            lane: lane.to_owned(),
        };
        Ok(std::iter::repeat_with(place).take(answers).collect())
    }

    fn lock(&self) -> MutexGuard<'_, HashMap<String, usize>> {
        self.waiting.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        let mut all = self.lines.lock();
        if let Some(waiting) = all.get_mut(&self.lane) {
            *waiting -= 1;
            if *waiting == 0 {
                all.remove(&self.lane);
            }
        }
    }
}

/// The most answers of a lane that may wait in a queue of so many, unless the operator says: half, so that a second lane gets in
/// whatever the first does.
pub(crate) fn usual_most(queue: usize) -> usize {
    (queue / 2).clamp(1, USUAL_MOST)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_lane_that_is_full_keeps_nobody_else_out() {
        let lines = Arc::<Lines>::default();
        let mut alice = lines.enter("alice", 3, 4).ok().unwrap();
        assert_eq!(lines.enter("alice", 2, 4).err(), Some(Full { waiting: 3 }));
        let bob = lines.enter("bob", 4, 4);
        assert!(bob.is_ok());
        alice.pop();
        assert!(lines.enter("alice", 2, 4).is_ok());
        drop((alice, bob));
        assert!(lines.lock().is_empty(), "lanes that are gone leave nothing");
    }

    #[test]
    fn half_of_a_queue_is_left_to_others() {
        for (queue, most) in [(0, 1), (1, 1), (16, 8), (120, 60), (10_000, 64)] {
            assert_eq!(usual_most(queue), most);
        }
    }
}
