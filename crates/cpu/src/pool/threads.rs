//! Worker threads that share out the items of one step, and the ways they may write to one matrix.
//!
//! A step is announced by raising an epoch; workers that notice take their seats, claim items one by one, and leave. Each thread has
//! a run of items of its own, which it goes through in order: items beside each other are weights beside each other, and
//! reading ahead pays only if the next item is ours, too. Whoever is done takes what others have left. The caller works
//! as well, then closes the step and waits for those in their seats: a worker that slept through the step or sits on a slow
//! core costs nothing, so the pool behaves when cores are shared with others. Workers spin for a moment between steps and
//! then sleep. What an item is never depends on the number of threads, so neither do results.
//!
//! The methods differ in what an item may write: nothing, scratch memory of its thread, a chunk of a slice, or a
//! tile of a matrix. Each proves that no two items share a byte, so callers stay safe code.
#![expect(
    unsafe_code,
    reason = "sends borrowed closures and disjoint parts of slices to other threads"
)]

use std::{
    any::Any,
    cell::UnsafeCell,
    panic::{AssertUnwindSafe, catch_unwind, resume_unwind},
    sync::{
        Arc, Condvar, Mutex, PoisonError,
        atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering},
    },
    thread::JoinHandle,
};

use super::{
    cores::{allowed_cores, pin_to},
    grid::{Disjoint, Grid, GridItems, OutputTile},
};

/// Pauses before a waiting thread starts to yield: some tens of microseconds, the length of a small step.
const SPINS: u32 = 1_000;
/// Yields before an idle worker parks.
const YIELDS: u32 = 200;
/// The same of a pool whose steps come while a device works: some milliseconds, more than it takes for a token between them.
const PATIENT_YIELDS: u32 = 20_000;

/// In [`Shared::state`]: workers may take part in the step. The epoch stands above.
const OPEN: u64 = 1 << 31;
const EPOCH: u64 = 1 << 32;
/// Of a seat that nobody has taken: no epoch.
const EMPTY: u64 = u64::MAX;
/// In [`Shared::taken`]: an item panicked.
const GIVEN_UP: u64 = EPOCH - 1;

#[repr(align(128))]
struct OwnLine<T>(T);

/// State that all threads see.
struct Shared {
    state: OwnLine<AtomicU64>,
    /// Per worker: the epoch of the step that it is in, or about to look whether it still can be. A line each, so that workers do not
    /// wait for each other when all come at once.
    seats: Box<[OwnLine<AtomicU64>]>,
    /// Per thread: items of its run that are taken, below the epoch this is said of.
    taken: Box<[OwnLine<AtomicU64>]>,
    /// Written by the caller while the step is closed and all seats are left; read by workers in theirs.
    job: UnsafeCell<Job>,
    stop: AtomicBool,
    /// Yields before a worker parks.
    yields: u32,
    parked: AtomicUsize,
    park_lock: Mutex<()>,
    unpark: Condvar,
    panic: Mutex<Option<Box<dyn Any + Send>>>,
}

#[derive(Clone, Copy)]
struct Job {
    /// Lives until the caller of [`Pool::run`] has seen every worker leave.
    work: *const (dyn Fn(usize, usize) + Sync),
    items: usize,
    epoch: u64,
}

// SAFETY: `job` is the only part that is not already shareable. It is written only by the thread that holds `busy`, when
// `state` is closed and nobody takes part, and read only by who does; `state` and `seats` order the two.
unsafe impl Sync for Shared {}
// SAFETY: The raw pointer is used only as above; moving it between threads is what it is for.
unsafe impl Send for Shared {}

impl Shared {
    /// Claims items until none are left: of this worker's own run, then of its neighbours'.
    fn work(&self, job: Job, worker: usize) {
        let threads = self.taken.len();
        for offset in 0..threads {
            let owner = (worker + offset) % threads;
            let run = job.items * owner / threads..job.items * (owner + 1) / threads;
            while let Some(taken) = self.claim(job.epoch, owner, run.len()) {
                // SAFETY: The pointer is valid while the step runs: the caller of `run` waits for every worker in its seat.
                unsafe { (*job.work)(worker, run.start + taken) };
            }
        }
    }

    /// Takes the next item of a run; `None` when there is none left, or the step is given up. The first to come in a step starts
    /// the count, so that nobody has to reset the counts of all threads. Runs that are over are looked at and not written to: in
    /// the end every thread looks at every run.
    fn claim(&self, epoch: u64, owner: usize, items: usize) -> Option<usize> {
        let counter = &self.taken[owner].0;
        let mut now = counter.load(Ordering::Relaxed);
        loop {
            let taken = if now / EPOCH == epoch { now % EPOCH } else { 0 };
            if taken >= items as u64 {
                return None;
            }
            let next = epoch * EPOCH + taken + 1;
            match counter.compare_exchange_weak(now, next, Ordering::Relaxed, Ordering::Relaxed) {
                Ok(_) => return Some(taken as usize),
                Err(other) => now = other,
            }
        }
    }

    /// As [`Shared::work`]; a panic is kept for the caller, and no further items are claimed.
    fn work_guarded(&self, job: Job, worker: usize) {
        if let Err(panic) = catch_unwind(AssertUnwindSafe(|| self.work(job, worker))) {
            for counter in &self.taken {
                counter
                    .0
                    .store(job.epoch * EPOCH + GIVEN_UP, Ordering::Relaxed);
            }
            *self.panic.lock().unwrap_or_else(PoisonError::into_inner) = Some(panic);
        }
    }

    /// The loop of a worker: waits for a step, joins it, works.
    fn serve(&self, worker: usize) {
        let mut seen = 0;
        while let Some(state) = self.wait_for_step(seen) {
            seen = state / EPOCH;
            if state & OPEN == 0 {
                continue;
            }
            let seat = &self.seats[worker].0;
            seat.store(seen, Ordering::SeqCst);
            // The caller closes a step before it looks at the seats, so one of us sees the other.
            if self.state.0.load(Ordering::SeqCst) == state {
                // SAFETY: The step is open, so the caller has yet to see our seat, and does not write `job` until we leave it.
                let job = unsafe { *self.job.get() };
                self.work_guarded(job, worker);
            }
            seat.store(EMPTY, Ordering::Release);
        }
    }

    /// Waits for an epoch other than `seen`; `None` when the pool is dropped.
    fn wait_for_step(&self, seen: u64) -> Option<u64> {
        let news = || {
            let state = self.state.0.load(Ordering::SeqCst);
            (state / EPOCH != seen).then_some(state)
        };
        for spin in 0..SPINS + self.yields {
            if let Some(state) = news() {
                return (!self.stop.load(Ordering::Acquire)).then_some(state);
            }
            pause(spin);
        }
        let mut lock = self
            .park_lock
            .lock()
            .unwrap_or_else(PoisonError::into_inner);
        // Counted before the last look: the caller raises the epoch before it looks at the count.
        self.parked.fetch_add(1, Ordering::SeqCst);
        let state = loop {
            if let Some(state) = news() {
                break state;
            }
            lock = self
                .unpark
                .wait(lock)
                .unwrap_or_else(PoisonError::into_inner);
        };
        self.parked.fetch_sub(1, Ordering::SeqCst);
        (!self.stop.load(Ordering::Acquire)).then_some(state)
    }

    fn unpark_workers(&self) {
        if self.parked.load(Ordering::SeqCst) > 0 {
            drop(
                self.park_lock
                    .lock()
                    .unwrap_or_else(PoisonError::into_inner),
            );
            self.unpark.notify_all();
        }
    }

    /// Closes the step and waits for everyone who takes part in it.
    fn close(&self) {
        let state = self.state.0.fetch_and(!OPEN, Ordering::SeqCst);
        for seat in &self.seats {
            let mut spin = 0;
            while seat.0.load(Ordering::SeqCst) == state / EPOCH {
                pause(spin);
                spin = spin.saturating_add(1);
            }
        }
    }
}

fn pause(spin: u32) {
    if spin < SPINS {
        std::hint::spin_loop();
    } else {
        std::thread::yield_now();
    }
}

/// Closes the step even if the caller's own item panics, because workers borrow from the caller's stack.
struct Closing<'a>(&'a Pool);

impl Drop for Closing<'_> {
    fn drop(&mut self) {
        self.0.shared.close();
        self.0.busy.store(false, Ordering::Release);
    }
}

/// A team of threads, the caller among them.
pub(crate) struct Pool {
    shared: Arc<Shared>,
    workers: Vec<JoinHandle<()>>,
    busy: AtomicBool,
}

impl Pool {
    /// A pool of `threads`, counting the calling thread.
    pub(crate) fn new(threads: usize) -> std::io::Result<Pool> {
        Pool::of(threads, YIELDS)
    }

    /// The same for steps with pauses between them, at whose end the workers are to be awake.
    pub(crate) fn patient(threads: usize) -> std::io::Result<Pool> {
        Pool::of(threads, PATIENT_YIELDS)
    }

    fn of(threads: usize, yields: u32) -> std::io::Result<Pool> {
        fn nothing(_: usize, _: usize) {}
        let lines = |value| {
            (0..threads)
                .map(|_| OwnLine(AtomicU64::new(value)))
                .collect()
        };
        let shared = Arc::new(Shared {
            state: OwnLine(AtomicU64::new(0)),
            seats: lines(EMPTY),
            taken: lines(0),
            job: UnsafeCell::new(Job {
                work: &nothing,
                items: 0,
                epoch: 0,
            }),
            stop: AtomicBool::new(false),
            yields,
            parked: AtomicUsize::new(0),
            park_lock: Mutex::new(()),
            unpark: Condvar::new(),
            panic: Mutex::new(None),
        });
        let mut pool = Pool {
            shared: Arc::clone(&shared),
            workers: Vec::new(),
            busy: AtomicBool::new(false),
        };
        // Pinned only when every core is ours: on a share of them the scheduler knows better which are free. The
        // caller's thread is not ours to pin; it takes the first core, which no worker sits on.
        let cores = allowed_cores();
        let pin = cores.len() == threads;
        for worker in 1..threads {
            let shared = Arc::clone(&shared);
            let core = cores.get(worker).copied().filter(|_| pin);
            let handle = std::thread::Builder::new()
                .name(format!("carat-cpu-{worker}"))
                .spawn(move || {
                    if let Some(core) = core {
                        pin_to(core);
                    }
                    shared.serve(worker);
                })?;
            pool.workers.push(handle);
        }
        Ok(pool)
    }

    pub(crate) fn threads(&self) -> usize {
        self.workers.len() + 1
    }

    /// Calls `work(thread, item)` for every item; no two calls at a time have the same thread number.
    fn run(&self, items: usize, work: &(dyn Fn(usize, usize) + Sync)) {
        if items <= 1 || self.workers.is_empty() {
            (0..items).for_each(|item| work(0, item));
            return;
        }
        let was_busy = self.busy.swap(true, Ordering::Acquire);
        assert!(!was_busy, "a pool runs one step at a time");
        // SAFETY: Only the lifetime changes. `Closing` keeps this call from returning, or unwinding, before every
        // worker that could hold the pointer has left the step.
        let work: &'static (dyn Fn(usize, usize) + Sync) = unsafe { std::mem::transmute(work) };
        let epoch = (self.shared.state.0.load(Ordering::Relaxed) / EPOCH + 1) % EPOCH;
        let job = Job { work, items, epoch };
        // SAFETY: `busy` makes us the only writer, and the previous step was closed with all its workers gone.
        unsafe { *self.shared.job.get() = job };
        let closing = Closing(self);
        self.shared
            .state
            .0
            .store((epoch * EPOCH) | OPEN, Ordering::SeqCst);
        self.shared.unpark_workers();
        self.shared.work(job, 0);
        drop(closing);
        let panic = self
            .shared
            .panic
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .take();
        if let Some(panic) = panic {
            resume_unwind(panic);
        }
    }

    /// Items that write nothing but one entry of `scratch`, of which there is one per thread.
    pub(crate) fn for_each_with<T: Send>(
        &self,
        scratch: &mut [T],
        items: usize,
        f: impl Fn(&mut T, usize) + Sync,
    ) {
        assert!(scratch.len() >= self.threads(), "one scratch per thread");
        let scratch = Disjoint::new(scratch);
        self.run(items, &|thread, item| {
            // SAFETY: `run` never has two calls with one thread number at a time.
            let mine = unsafe { scratch.part(thread..thread + 1) };
            f(&mut mine[0], item);
        });
    }

    /// Consecutive chunks of `data`, the last perhaps short.
    pub(crate) fn for_each_chunk<T: Send>(
        &self,
        data: &mut [T],
        chunk: usize,
        f: impl Fn(usize, &mut [T]) + Sync,
    ) {
        let length = data.len();
        let data = Disjoint::new(data);
        self.run(length.div_ceil(chunk.max(1)), &|_, item| {
            let start = item * chunk;
            // SAFETY: Each item is claimed once, and chunks of different items do not meet.
            let part = unsafe { data.part(start..length.min(start + chunk)) };
            f(item, part);
        });
    }

    /// Consecutive chunks of two slices, side by side: both have as many.
    pub(crate) fn for_each_pair_of_chunks<A: Send, B: Send>(
        &self,
        (first, first_chunk): (&mut [A], usize),
        (second, second_chunk): (&mut [B], usize),
        f: impl Fn(usize, &mut [A], &mut [B]) + Sync,
    ) {
        let lengths = (first.len(), second.len());
        let items = lengths.0.div_ceil(first_chunk.max(1));
        assert_eq!(
            items,
            lengths.1.div_ceil(second_chunk.max(1)),
            "as many chunks in both"
        );
        let (first, second) = (Disjoint::new(first), Disjoint::new(second));
        self.run(items, &|_, item| {
            let starts = (item * first_chunk, item * second_chunk);
            let (ends, next) = (lengths, (starts.0 + first_chunk, starts.1 + second_chunk));
            // SAFETY: Each item is claimed once, and chunks of different items do not meet.
            let first = unsafe { first.part(starts.0..ends.0.min(next.0)) };
            // SAFETY: The same.
            let second = unsafe { second.part(starts.1..ends.1.min(next.1)) };
            f(item, first, second);
        });
    }

    /// Only the chunks named by `chosen`, in rising order; `f` gets the index in `chosen`.
    pub(crate) fn for_each_chosen_chunk<T: Send>(
        &self,
        data: &mut [T],
        chunk: usize,
        chosen: &[usize],
        f: impl Fn(usize, &mut [T]) + Sync,
    ) {
        assert!(
            chosen.is_sorted_by(|a, b| a < b),
            "chunks are chosen once each, in order"
        );
        let last = chosen.last().map_or(0, |last| (last + 1) * chunk);
        assert!(last <= data.len(), "the chosen chunks exist");
        let data = Disjoint::new(data);
        self.run(chosen.len(), &|_, item| {
            let start = chosen[item] * chunk;
            // SAFETY: `chosen` has no repetitions and ends within the slice, both asserted above.
            let part = unsafe { data.part(start..start + chunk) };
            f(item, part);
        });
    }

    /// The tiles of some matrices, row group after row group, in one round; `f` gets the index of the tile's matrix.
    pub(crate) fn for_each_tile<T: Send>(
        &self,
        grids: Vec<Grid<'_>>,
        scratch: &mut [T],
        f: impl Fn(&mut T, usize, OutputTile<'_>) + Sync,
    ) {
        let mut items = 0;
        let grids: Vec<GridItems<'_>> = grids
            .into_iter()
            .map(|grid| {
                let grid = GridItems::new(grid, items);
                items = grid.end;
                grid
            })
            .collect();
        self.for_each_with(scratch, items, |scratch, item| {
            let index = grids.partition_point(|grid| grid.end <= item);
            f(scratch, index, grids[index].tile(item));
        });
    }
}

impl Drop for Pool {
    fn drop(&mut self) {
        self.shared.stop.store(true, Ordering::Release);
        self.shared.state.0.fetch_add(EPOCH, Ordering::SeqCst);
        self.shared.unpark_workers();
        for worker in self.workers.drain(..) {
            // A worker's panics were caught and handed on; its own end is always orderly.
            drop(worker.join());
        }
    }
}
