//! A matcher whose masks are computed ahead, by threads beside the one that will ask for them.
//!
//! As soon as a token is taken the mask of the next is asked for, and a forward pass lies between the two: threads of
//! [`MaskThreads`] compute it meanwhile. A matcher is behind a lock that is held while its mask is computed, and that is all there is
//! to it: whoever comes first computes the mask, whoever comes second finds it. Nobody waits for a mask of another answer; who
//! finds his own under way computes one that nobody has begun with.

use std::{
    collections::VecDeque,
    sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError, TryLockError, Weak},
    thread,
    time::Instant,
};

use llguidance::Matcher;
use toktrie::{SimpleVob, TokenId};

use crate::meter::Meter;

/// The most threads: masks take microseconds, and their readers are one thread.
const MAX_THREADS: usize = 4;

/// A matcher and the mask of its next token, if somebody has computed it.
struct State {
    matcher: Matcher,
    mask: Option<Result<SimpleVob, GaveUp>>,
    meter: Arc<Meter>,
}

impl State {
    fn compute(&mut self) {
        if self.mask.is_none() {
            let start = Instant::now();
            let mask = self.matcher.compute_mask_or_eos();
            self.meter.mask.add(start.elapsed());
            self.mask = Some(mask.map_err(|_| GaveUp));
        }
    }
}

/// A matcher ran into a limit or a mistake of its own, and says nothing more.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct GaveUp;

/// Result of a token that was taken.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Taken {
    GoesOn,
    /// It was the last: nothing can be added.
    Last,
}

/// Follows one part of an answer by its grammar.
pub(crate) struct Follower {
    state: Arc<Mutex<State>>,
    /// `None` computes masks when they are asked for.
    threads: Option<Arc<MaskThreads>>,
}

impl Follower {
    pub(crate) fn new(
        matcher: Matcher,
        meter: Arc<Meter>,
        threads: Option<Arc<MaskThreads>>,
    ) -> Follower {
        let state = State {
            matcher,
            mask: None,
            meter,
        };
        Follower {
            state: Arc::new(Mutex::new(state)),
            threads,
        }
    }

    /// One in the same state, which computes masks when they are asked for: drafts are followed step by step.
    pub(crate) fn fork(&self) -> Follower {
        let state = self.state();
        let fork = State {
            matcher: state.matcher.deep_clone(),
            mask: state.mask.clone(),
            meter: Arc::clone(&state.meter),
        };
        Follower {
            state: Arc::new(Mutex::new(fork)),
            threads: None,
        }
    }

    /// Takes the next token.
    pub(crate) fn consume(&self, token: TokenId) -> Result<Taken, GaveUp> {
        let mut state = self.state();
        state.mask = None;
        let matcher = &mut state.matcher;
        if matcher.consume_token(token).is_err() || matcher.is_error() {
            return Err(GaveUp);
        }
        Ok(if matcher.is_stopped() {
            Taken::Last
        } else {
            Taken::GoesOn
        })
    }

    /// Tokens that must come next.
    pub(crate) fn forced(&self) -> Result<Vec<TokenId>, GaveUp> {
        let mut state = self.state();
        let forced = state.matcher.compute_ff_tokens();
        if state.matcher.is_error() {
            return Err(GaveUp);
        }
        Ok(forced)
    }

    /// Has the mask of the next token computed, which will be asked for.
    pub(crate) fn begin_mask(&self) {
        if let Some(threads) = &self.threads {
            threads.push(&self.state);
        }
    }

    /// Shows the mask of the next token. Waits for it where it is under way, and computes it where nobody has begun.
    pub(crate) fn mask(&self, read: impl FnOnce(&SimpleVob)) -> Result<(), GaveUp> {
        let start = Instant::now();
        let mut state = self.state();
        state.compute();
        state.meter.mask_wait.add(start.elapsed());
        match &state.mask {
            Some(Ok(mask)) => {
                read(mask);
                Ok(())
            }
            _ => Err(GaveUp),
        }
    }

    /// The state, when nobody computes with it. Helps with other masks meanwhile.
    fn state(&self) -> MutexGuard<'_, State> {
        if let Some(threads) = &self.threads {
            while let Err(TryLockError::WouldBlock) = self.state.try_lock() {
                if !threads.queue.help() {
                    break;
                }
            }
        }
        lock(&self.state)
    }
}

/// A panic while a lock was held leaves a mask that was not computed, which is then computed again, or a matcher that says so itself.
fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Threads that compute masks. They end when it is dropped.
pub(crate) struct MaskThreads {
    queue: Arc<Queue>,
}

#[derive(Default)]
struct Queue {
    jobs: Mutex<Jobs>,
    work: Condvar,
}

#[derive(Default)]
struct Jobs {
    /// Masks to be computed, the first asked for first. Those of answers that are over lead nowhere.
    waiting: VecDeque<Weak<Mutex<State>>>,
    /// Threads that sleep, and those of them that have been called.
    sleeping: usize,
    called: usize,
    is_over: bool,
}

impl MaskThreads {
    /// As many as are of use on this machine.
    pub(crate) fn of_machine() -> Option<Arc<MaskThreads>> {
        let cores = thread::available_parallelism().map_or(1, std::num::NonZero::get);
        MaskThreads::start(cores.min(MAX_THREADS))
    }

    /// So many, or as many as the system allows; `None` if that is none.
    pub(crate) fn start(count: usize) -> Option<Arc<MaskThreads>> {
        let queue = Arc::<Queue>::default();
        let start = |_: &usize| {
            let its = Arc::clone(&queue);
            let thread = thread::Builder::new().name("carat-mask".to_owned());
            thread.spawn(move || its.serve()).is_ok()
        };
        let started = (0..count).take_while(start).count();
        (started > 0).then(|| Arc::new(MaskThreads { queue }))
    }

    fn push(&self, state: &Arc<Mutex<State>>) {
        let mut jobs = lock(&self.queue.jobs);
        jobs.waiting.push_back(Arc::downgrade(state));
        // Who has been called takes all there is; a call costs as much as a mask.
        if jobs.sleeping > jobs.called {
            jobs.called += 1;
            drop(jobs);
            self.queue.work.notify_one();
        }
    }
}

impl Drop for MaskThreads {
    fn drop(&mut self) {
        lock(&self.queue.jobs).is_over = true;
        self.queue.work.notify_all();
    }
}

impl Queue {
    fn serve(&self) {
        let mut jobs = lock(&self.jobs);
        while !jobs.is_over {
            if let Some(state) = jobs.waiting.pop_front() {
                drop(jobs);
                compute(&state);
                jobs = lock(&self.jobs);
            } else {
                jobs.sleeping += 1;
                let woken = self.work.wait(jobs);
                jobs = woken.unwrap_or_else(PoisonError::into_inner);
                jobs.sleeping -= 1;
                jobs.called = jobs.called.saturating_sub(1);
            }
        }
    }

    /// Computes the mask that has waited longest; `false` if there is none.
    fn help(&self) -> bool {
        let state = lock(&self.jobs).waiting.pop_front();
        state.is_some_and(|state| {
            compute(&state);
            true
        })
    }
}

/// Computes a mask, unless its answer is over or somebody is about it.
fn compute(state: &Weak<Mutex<State>>) {
    if let Some(state) = state.upgrade()
        && let Ok(mut state) = state.try_lock()
    {
        state.compute();
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use carat_model::sampling::TokenMask;

    use super::*;
    use crate::{Answer, Format, Grammars, Settings, testing};

    /// Masks by the thread that asks.
    const ASKED: Settings = Settings {
        masks_ahead: false,
        compile_limit: std::time::Duration::from_mins(1),
    };

    fn follower(threads: Option<Arc<MaskThreads>>) -> Follower {
        let grammars = Grammars::with(ASKED, testing::demo_tokenizer()).unwrap();
        let grammar = grammars.regex("(ab|cd)+ [0-9]{3}").unwrap();
        Follower::new(grammar.start(), Arc::default(), threads)
    }

    fn words(follower: &Follower) -> Vec<u32> {
        let mut words = Vec::new();
        let shown = follower.mask(|mask| words.extend(mask.as_slice()));
        shown.map(|()| words).unwrap()
    }

    fn meter(follower: &Follower) -> Arc<Meter> {
        Arc::clone(&lock(&follower.state).meter)
    }

    /// Waits until one mask has been computed. Looks at the meter alone: who is to compute the mask leaves it to whoever holds the
    /// lock, which a look at the state would be.
    fn wait_for_mask(meter: &Meter) {
        let begun = Instant::now();
        while meter.mask.counts().iter().sum::<u64>() == 0 {
            assert!(begun.elapsed() < Duration::from_mins(1), "nobody computes");
            thread::yield_now();
        }
    }

    #[test]
    fn a_mask_is_there_before_it_is_asked_for() {
        let follower = follower(MaskThreads::start(1));
        let meter = meter(&follower);
        assert!(lock(&follower.state).mask.is_none());
        follower.begin_mask();
        wait_for_mask(&meter);
        assert!(lock(&follower.state).mask.is_some());
        words(&follower);
        assert_eq!(meter.mask.counts().iter().sum::<u64>(), 1, "once");
        assert_eq!(meter.mask_wait.counts().iter().sum::<u64>(), 1);
    }

    #[test]
    fn a_token_takes_the_mask_before_it_away() {
        let (ahead, plain) = (follower(MaskThreads::start(2)), follower(None));
        let vocab = testing::demo_tokenizer();
        for token in vocab.encode("abcd 1", carat_text::Specials::Ignore) {
            ahead.begin_mask();
            assert_eq!(words(&ahead), words(&plain));
            let fork = ahead.fork();
            for one in [&ahead, &plain, &fork] {
                assert_eq!(one.consume(token), Ok(Taken::GoesOn));
            }
            assert_eq!(words(&fork), words(&plain), "after {token}");
        }
    }

    #[test]
    fn nobody_waits_for_the_mask_of_another() {
        let threads = MaskThreads::start(1);
        let (slow, quick) = (follower(threads.clone()), follower(threads));
        // As if its mask were being computed.
        let under_way = lock(&slow.state);
        slow.begin_mask();
        quick.begin_mask();
        words(&quick);
        drop(under_way);
        words(&slow);
    }

    #[test]
    fn who_finds_his_own_under_way_computes_another() {
        // Nobody but the one who waits.
        let threads = Arc::new(MaskThreads {
            queue: Arc::default(),
        });
        let (own, other) = (
            follower(Some(Arc::clone(&threads))),
            follower(Some(threads)),
        );
        let meter = meter(&other);
        let under_way = lock(&own.state);
        other.begin_mask();
        thread::scope(|scope| {
            let waits = scope.spawn(|| words(&own).len());
            wait_for_mask(&meter);
            drop(under_way);
            assert!(waits.join().unwrap() > 0);
        });
    }

    #[test]
    fn answers_that_are_over_leave_nothing_to_compute() {
        let threads = MaskThreads::start(1).unwrap();
        let gone = follower(Some(Arc::clone(&threads)));
        let state = Arc::downgrade(&gone.state);
        gone.begin_mask();
        drop(gone);
        let begun = Instant::now();
        while state.strong_count() > 0 || !lock(&threads.queue.jobs).waiting.is_empty() {
            assert!(begun.elapsed() < Duration::from_mins(1), "it stays");
            thread::yield_now();
        }
    }

    #[test]
    fn many_answers_at_once_have_the_masks_of_answers_alone() {
        let schema =
            serde_json::json!({"type": "array", "items": {"type": "string", "maxLength": 9}});
        let answer = Answer {
            format: Some(Format::JsonSchema {
                schema,
                strict: true,
            }),
            ..Answer::default()
        };
        let tokenizer = testing::demo_tokenizer();
        let vocab = tokenizer.vocab().len();
        let of = |grammars: Grammars| grammars.compile(&answer).unwrap().unwrap().source;
        let ahead = of(Grammars::new(Arc::clone(&tokenizer)).unwrap());
        let plain = of(Grammars::with(ASKED, tokenizer).unwrap());
        let mut pairs: Vec<_> = (0..32).map(|_| (ahead.start(), plain.start())).collect();
        let (mut mask, mut other) = (TokenMask::none(vocab), TokenMask::none(vocab));
        for step in 0..40_usize {
            for (n, (ahead, plain)) in pairs.iter_mut().enumerate() {
                assert_eq!(ahead.forced(), plain.forced());
                mask.clear();
                other.clear();
                ahead.mask(&mut mask);
                plain.mask(&mut other);
                assert_eq!(mask.words(), other.words(), "answer {n}, step {step}");
                let allowed: Vec<_> = (0..vocab as TokenId).filter(|t| mask.allows(*t)).collect();
                let token = allowed[(step * 7919 + n * 104_729) % allowed.len()];
                ahead.accept(token);
                plain.accept(token);
            }
        }
    }
}
