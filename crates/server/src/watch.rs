//! Single requests as those who watch the server see them: which are under way, and what went wrong lately. No text of anybody.

use std::{
    collections::{BTreeMap, VecDeque},
    sync::{
        Arc, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicUsize, Ordering},
    },
    time::Instant,
};

use carat_engine::{Cancel, Counts};

use crate::ids;

/// Faults that are remembered.
const FAULTS: usize = 20;
/// Misses of the prefix cache that are remembered.
const MISSES: usize = 50;

/// Requests under way, the latest faults, and the latest misses of the prefix cache.
#[derive(Default)]
pub(crate) struct Watch {
    requests: Mutex<Requests>,
    faults: Mutex<VecDeque<Fault>>,
    misses: Mutex<VecDeque<Miss>>,
}

#[derive(Default)]
struct Requests {
    last: u64,
    /// By number, which is the order they came in.
    open: BTreeMap<u64, Entry>,
}

/// A request as it is shown.
#[derive(Clone)]
pub(crate) struct Entry {
    /// As its client and the log name it.
    pub(crate) request_id: String,
    /// Lane whose turn it takes.
    pub(crate) lane: Option<String>,
    /// Name of the key it came with.
    pub(crate) key: Option<String>,
    pub(crate) route: &'static str,
    pub(crate) arrived: Instant,
    pub(crate) prompt_tokens: usize,
    /// Of all its answers, so far.
    pub(crate) generated: Arc<AtomicUsize>,
    pub(crate) cancels: Vec<Cancel>,
}

impl Entry {
    pub(crate) fn generated(&self) -> usize {
        self.generated.load(Ordering::Relaxed)
    }
}

/// Something that went wrong on this side.
#[derive(Clone, Debug)]
pub(crate) struct Fault {
    /// Seconds since 1970.
    pub(crate) time: u64,
    pub(crate) message: String,
}

/// A prompt of which not all that could be was cached.
#[derive(Clone, Debug)]
pub(crate) struct Miss {
    /// Seconds since 1970.
    pub(crate) time: u64,
    /// Of its request.
    pub(crate) request_id: String,
    pub(crate) key: Option<String>,
    /// Of its prompt: what was found, and why not more.
    pub(crate) counts: Counts,
    /// Turn of the conversation that the first unknown token is in, if there are turns.
    pub(crate) turn: Option<usize>,
}

/// Takes a request off the list when dropped.
pub(crate) struct Listed {
    watch: Arc<Watch>,
    number: u64,
}

impl Watch {
    /// Shows a request until the result is dropped.
    pub(crate) fn list(self: &Arc<Watch>, entry: Entry) -> Listed {
        let mut requests = locked(&self.requests);
        requests.last += 1;
        let number = requests.last;
        requests.open.insert(number, entry);
        Listed {
            watch: Arc::clone(self),
            number,
        }
    }

    /// Requests under way with their numbers, oldest first.
    pub(crate) fn requests(&self) -> Vec<(u64, Entry)> {
        let requests = locked(&self.requests);
        let each = requests.open.iter();
        each.map(|(number, entry)| (*number, entry.clone()))
            .collect()
    }

    pub(crate) fn fault(&self, message: &str) {
        let fault = Fault {
            time: ids::unix_time(),
            message: message.chars().take(300).collect(),
        };
        remember(&self.faults, fault, FAULTS);
    }

    /// Oldest first.
    pub(crate) fn faults(&self) -> Vec<Fault> {
        locked(&self.faults).iter().cloned().collect()
    }

    /// Oldest first.
    pub(crate) fn misses(&self) -> Vec<Miss> {
        locked(&self.misses).iter().cloned().collect()
    }
}

impl Listed {
    /// It came to nothing after it had begun.
    pub(crate) fn fault(&self, message: &str) {
        self.watch.fault(message);
    }

    /// Its prompt was looked up, and not all that could be was cached.
    pub(crate) fn miss(&self, counts: Counts, turn: Option<usize>) {
        let requests = locked(&self.watch.requests);
        let Some(entry) = requests.open.get(&self.number) else {
            return;
        };
        let miss = Miss {
            time: ids::unix_time(),
            request_id: entry.request_id.clone(),
            key: entry.key.clone(),
            counts,
            turn,
        };
        remember(&self.watch.misses, miss, MISSES);
    }
}

/// Adds to what is remembered, and forgets the oldest of too many.
fn remember<T>(list: &Mutex<VecDeque<T>>, new: T, most: usize) {
    let mut list = locked(list);
    list.push_back(new);
    if list.len() > most {
        list.pop_front();
    }
}

impl Drop for Listed {
    fn drop(&mut self) {
        locked(&self.watch.requests).open.remove(&self.number);
    }
}

fn locked<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
