//! Pause before trying again what did not pay: each time in vain twice as long.

/// Steps until a source that does not pay is tried again.
const FIRST: usize = 64;
/// The longest it is left alone.
const LONGEST: usize = 1024;
/// Rounds of a trial.
const TRIAL_ROUNDS: usize = 4;

/// Counts steps, of a source that may not pay.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Pause {
    state: State,
    next: usize,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum State {
    Pays,
    Waits { steps: usize },
    Tries { rounds: usize },
}

impl Pause {
    pub(crate) fn new() -> Pause {
        Pause {
            state: State::Pays,
            next: FIRST,
        }
    }

    /// It pays.
    pub(crate) fn end(&mut self) {
        *self = Pause::new();
    }

    /// It does not pay, and another step passes. Says whether it is to be tried all the same.
    pub(crate) fn step(&mut self) -> bool {
        self.state = match self.state {
            State::Pays => State::Waits { steps: FIRST },
            State::Waits { steps: 0 } => State::Tries {
                rounds: TRIAL_ROUNDS,
            },
            State::Waits { steps } => State::Waits { steps: steps - 1 },
            State::Tries { rounds: 0 } => {
                self.next = (2 * self.next).min(LONGEST);
                State::Waits { steps: self.next }
            }
            State::Tries { rounds } => State::Tries { rounds },
        };
        matches!(self.state, State::Tries { .. })
    }

    /// A draft of it was verified.
    pub(crate) fn round(&mut self) {
        if let State::Tries { rounds } = &mut self.state {
            *rounds = rounds.saturating_sub(1);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn trials_become_rarer_until_one_pays() {
        let mut pause = Pause::new();
        let mut trials = Vec::new();
        for step in 0..3000 {
            if pause.step() {
                pause.round();
                trials.push(step);
            }
        }
        let starts: Vec<usize> = trials.chunks(TRIAL_ROUNDS).map(|trial| trial[0]).collect();
        let apart: Vec<usize> = starts.windows(2).map(|pair| pair[1] - pair[0]).collect();
        assert_eq!(starts[0], FIRST + 1);
        assert!(apart.windows(2).all(|pair| pair[1] > pair[0]), "{apart:?}");
        assert!(trials.len() < 3000 / 50, "{} trials", trials.len());
        pause.end();
        let next = (0..2 * FIRST).find(|_| pause.step());
        assert_eq!(next, Some(FIRST + 1));
    }
}
