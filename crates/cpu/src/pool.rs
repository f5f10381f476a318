//! Worker threads that share out the items of one step, and the ways they may write to one matrix.
//!
//! A step is announced by raising an epoch; workers that notice join, claim items one by one from a counter, and leave.
//! The caller works too, then closes the step and waits for those who joined: a worker that slept through the step
//! costs nothing, so the pool behaves when cores are shared with others. Workers spin for a moment between steps and then
//! sleep. What an item is never depends on the number of threads, so neither do results.
//!
//! The methods differ in what an item may write: nothing, a slot of scratch memory a thread, a chunk of a slice, or a
//! cell of a matrix. Each proves that no two items share a byte, so callers stay safe code.
#![expect(
    unsafe_code,
    reason = "sends borrowed closures and disjoint parts of slices to other threads"
)]

use std::{
    any::Any,
    cell::UnsafeCell,
    marker::PhantomData,
    ops::Range,
    panic::{AssertUnwindSafe, catch_unwind, resume_unwind},
    sync::{
        Arc, Condvar, Mutex, PoisonError,
        atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering},
    },
    thread::JoinHandle,
};

/// Pauses before a waiting thread starts to yield: some tens of microseconds, the length of a small step.
const SPINS: u32 = 1_000;
/// Yields before an idle worker sleeps.
const YIELDS: u32 = 200;

/// In [`Shared::state`]: the step takes joiners. Joined workers are counted below, the epoch stands above.
const OPEN: u64 = 1 << 31;
const EPOCH: u64 = 1 << 32;

#[repr(align(128))]
struct OwnLine<T>(T);

/// What all threads see.
struct Shared {
    state: OwnLine<AtomicU64>,
    next: OwnLine<AtomicUsize>,
    /// Written by the caller while the step is closed and nobody is joined; read by joined workers.
    job: UnsafeCell<Job>,
    stop: AtomicBool,
    sleepers: AtomicUsize,
    bed: Mutex<()>,
    alarm: Condvar,
    panic: Mutex<Option<Box<dyn Any + Send>>>,
}

#[derive(Clone, Copy)]
struct Job {
    /// Lives until the caller of [`Pool::run`] has seen every joined worker leave.
    work: *const (dyn Fn(usize, usize) + Sync),
    items: usize,
}

// SAFETY: `job` is the only part that is not already shareable. It is written only by the thread that holds `busy`, when
// `state` is closed with no one joined, and read only between joining and leaving; `state` orders the two.
unsafe impl Sync for Shared {}
// SAFETY: The raw pointer is used only as above; moving it between threads is what it is for.
unsafe impl Send for Shared {}

impl Shared {
    /// Claims items until none are left.
    fn work(&self, job: Job, worker: usize) {
        loop {
            let item = self.next.0.fetch_add(1, Ordering::Relaxed);
            if item >= job.items {
                return;
            }
            // SAFETY: The pointer is valid while the step runs: the caller of `run` waits for every joined worker.
            unsafe { (*job.work)(worker, item) };
        }
    }

    /// As [`Shared::work`]; a panic is kept for the caller, and no further items are claimed.
    fn work_guarded(&self, job: Job, worker: usize) {
        if let Err(panic) = catch_unwind(AssertUnwindSafe(|| self.work(job, worker))) {
            self.next.0.store(job.items, Ordering::Relaxed);
            *self.panic.lock().unwrap_or_else(PoisonError::into_inner) = Some(panic);
        }
    }

    /// A worker's life.
    fn serve(&self, worker: usize) {
        let mut seen = 0;
        while let Some(state) = self.wait_for_step(seen) {
            seen = state / EPOCH;
            if state & OPEN == 0 {
                continue;
            }
            let mut state = state;
            // Join unless the step closes or another begins meanwhile; others joining only moves the count.
            while state / EPOCH == seen && state & OPEN != 0 {
                match self.state.0.compare_exchange_weak(
                    state,
                    state + 1,
                    Ordering::AcqRel,
                    Ordering::Acquire,
                ) {
                    Ok(_) => {
                        // SAFETY: We are joined, so the caller does not write `job` until we leave.
                        let job = unsafe { *self.job.get() };
                        self.work_guarded(job, worker);
                        self.state.0.fetch_sub(1, Ordering::Release);
                        break;
                    }
                    Err(now) => state = now,
                }
            }
        }
    }

    /// Waits for an epoch other than `seen`; `None` when the pool is dropped.
    fn wait_for_step(&self, seen: u64) -> Option<u64> {
        let news = || {
            let state = self.state.0.load(Ordering::SeqCst);
            (state / EPOCH != seen).then_some(state)
        };
        for turn in 0..SPINS + YIELDS {
            if let Some(state) = news() {
                return (!self.stop.load(Ordering::Acquire)).then_some(state);
            }
            pause(turn);
        }
        let mut bed = self.bed.lock().unwrap_or_else(PoisonError::into_inner);
        // Counted before the last look: the caller raises the epoch before it looks at the count.
        self.sleepers.fetch_add(1, Ordering::SeqCst);
        let state = loop {
            if let Some(state) = news() {
                break state;
            }
            bed = self.alarm.wait(bed).unwrap_or_else(PoisonError::into_inner);
        };
        self.sleepers.fetch_sub(1, Ordering::SeqCst);
        (!self.stop.load(Ordering::Acquire)).then_some(state)
    }

    fn wake_sleepers(&self) {
        if self.sleepers.load(Ordering::SeqCst) > 0 {
            drop(self.bed.lock().unwrap_or_else(PoisonError::into_inner));
            self.alarm.notify_all();
        }
    }

    /// Workers inside the step.
    fn joined(&self) -> u64 {
        self.state.0.load(Ordering::Acquire) & (OPEN - 1)
    }

    /// Closes the step and waits for everyone who joined it.
    fn close(&self) {
        self.state.0.fetch_and(!OPEN, Ordering::AcqRel);
        let mut turn = 0;
        while self.joined() > 0 {
            pause(turn);
            turn = turn.saturating_add(1);
        }
    }
}

fn pause(turn: u32) {
    if turn < SPINS {
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
        fn nothing(_: usize, _: usize) {}
        let shared = Arc::new(Shared {
            state: OwnLine(AtomicU64::new(0)),
            next: OwnLine(AtomicUsize::new(0)),
            job: UnsafeCell::new(Job {
                work: &nothing,
                items: 0,
            }),
            stop: AtomicBool::new(false),
            sleepers: AtomicUsize::new(0),
            bed: Mutex::new(()),
            alarm: Condvar::new(),
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
        let job = Job { work, items };
        // SAFETY: `busy` makes us the only writer, and the previous step was closed with all its workers gone.
        unsafe { *self.shared.job.get() = job };
        self.shared.next.0.store(0, Ordering::Relaxed);
        let closing = Closing(self);
        let epoch = self.shared.state.0.load(Ordering::Relaxed) / EPOCH;
        let open = ((epoch + 1) * EPOCH) | OPEN;
        self.shared.state.0.store(open, Ordering::SeqCst);
        self.shared.wake_sleepers();
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

    /// Items that write nothing but one slot of `scratch`, of which there is one a thread.
    pub(crate) fn for_each_with<T: Send>(
        &self,
        scratch: &mut [T],
        items: usize,
        f: impl Fn(&mut T, usize) + Sync,
    ) {
        assert!(scratch.len() >= self.threads(), "a scratch a thread");
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

    /// Only the chunks named by `chosen`, in rising order; `f` gets the place in `chosen`.
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

    /// The cells of a matrix, rows of cells after one another.
    pub(crate) fn for_each_cell<T: Send>(
        &self,
        grid: Grid<'_>,
        scratch: &mut [T],
        f: impl Fn(&mut T, Cell<'_>) + Sync,
    ) {
        let Grid {
            data,
            columns,
            row_bounds,
            cell_columns,
        } = grid;
        assert!(
            row_bounds.is_sorted() && row_bounds.last().is_none_or(|&r| r * columns <= data.len()),
            "rows of cells lie in order within the matrix"
        );
        let across = columns.div_ceil(cell_columns.max(1));
        let down = row_bounds.len().saturating_sub(1);
        let data = Disjoint::new(data);
        self.for_each_with(scratch, across * down, |scratch, item| {
            let (band, tile) = (item / across, item % across);
            let start = tile * cell_columns;
            let cell = Cell {
                band,
                rows: row_bounds[band]..row_bounds[band + 1],
                columns: start..columns.min(start + cell_columns),
                matrix: &data,
                stride: columns,
            };
            f(scratch, cell);
        });
    }
}

impl Drop for Pool {
    fn drop(&mut self) {
        self.shared.stop.store(true, Ordering::Release);
        self.shared.state.0.fetch_add(EPOCH, Ordering::SeqCst);
        self.shared.wake_sleepers();
        for worker in self.workers.drain(..) {
            // A worker's panics were caught and handed on; its own end is always orderly.
            drop(worker.join());
        }
    }
}

/// A matrix cut into cells that may be written at the same time.
pub(crate) struct Grid<'a> {
    /// `[rows, columns]`.
    pub(crate) data: &'a mut [f32],
    pub(crate) columns: usize,
    /// Band `i` has the rows from entry `i` to entry `i + 1`.
    pub(crate) row_bounds: &'a [usize],
    /// Width of a cell; the last in a band may be narrower.
    pub(crate) cell_columns: usize,
}

/// One rectangle of a matrix, ours alone.
pub(crate) struct Cell<'a> {
    pub(crate) band: usize,
    pub(crate) rows: Range<usize>,
    pub(crate) columns: Range<usize>,
    matrix: &'a Disjoint<'a, f32>,
    stride: usize,
}

impl Cell<'_> {
    /// This cell's part of a row; `row` counts from the top of the matrix.
    pub(crate) fn row_mut(&mut self, row: usize) -> &mut [f32] {
        assert!(self.rows.contains(&row), "row {row} is of another cell");
        let start = row * self.stride;
        // SAFETY: Cells of one grid do not overlap, each is made once, and `&mut self` keeps its rows apart in time.
        unsafe {
            self.matrix
                .part(start + self.columns.start..start + self.columns.end)
        }
    }

    /// All of this cell.
    pub(crate) fn block_mut(&mut self) -> Block<'_> {
        let first = self.rows.start * self.stride + self.columns.start;
        let end = (self.rows.end * self.stride).min(self.matrix.length);
        assert!(
            first <= end && self.columns.end <= self.stride,
            "a cell lies within its matrix"
        );
        Block {
            start: self.matrix.start.wrapping_add(first),
            stride: self.stride,
            rows: self.rows.len(),
            columns: self.columns.len(),
            memory: PhantomData,
        }
    }
}

/// A rectangle of floats, ours alone, for kernels that write rows of a stride at once.
pub(crate) struct Block<'a> {
    start: *mut f32,
    stride: usize,
    rows: usize,
    columns: usize,
    memory: PhantomData<&'a mut [f32]>,
}

impl<'a> Block<'a> {
    /// All of a matrix of `columns`.
    pub(crate) fn new(matrix: &'a mut [f32], columns: usize) -> Block<'a> {
        Block {
            start: matrix.as_mut_ptr(),
            stride: columns,
            rows: matrix.len() / columns,
            columns,
            memory: PhantomData,
        }
    }

    /// A rectangle within this one.
    #[inline(always)]
    pub(crate) fn part(&mut self, rows: Range<usize>, columns: Range<usize>) -> Block<'_> {
        assert!(
            rows.start <= rows.end
                && rows.end <= self.rows
                && columns.start <= columns.end
                && columns.end <= self.columns,
            "{rows:?} by {columns:?} of {} by {}",
            self.rows,
            self.columns
        );
        Block {
            start: self
                .start
                .wrapping_add(rows.start * self.stride + columns.start),
            stride: self.stride,
            rows: rows.len(),
            columns: columns.len(),
            memory: PhantomData,
        }
    }

    pub(crate) fn row_mut(&mut self, row: usize) -> &mut [f32] {
        assert!(row < self.rows, "row {row} of {}", self.rows);
        // SAFETY: Whoever made the first block owned all of this row, every part lies within it, and `&mut self` keeps
        // rows apart in time.
        unsafe { std::slice::from_raw_parts_mut(self.start.add(row * self.stride), self.columns) }
    }

    /// The first element. Row `i` begins `i` strides later.
    #[cfg(target_arch = "x86_64")]
    pub(crate) fn start(&mut self) -> *mut f32 {
        self.start
    }

    #[cfg(target_arch = "x86_64")]
    pub(crate) fn stride(&self) -> usize {
        self.stride
    }

    pub(crate) fn rows(&self) -> usize {
        self.rows
    }

    pub(crate) fn columns(&self) -> usize {
        self.columns
    }
}

/// A slice that several threads write, each its own parts.
struct Disjoint<'a, T> {
    start: *mut T,
    length: usize,
    slice: PhantomData<&'a mut [T]>,
}

// SAFETY: Sharing it shares nothing but the right to make parts, and `part` demands that they do not overlap.
unsafe impl<T: Send> Sync for Disjoint<'_, T> {}

impl<'a, T> Disjoint<'a, T> {
    fn new(slice: &'a mut [T]) -> Disjoint<'a, T> {
        Disjoint {
            start: slice.as_mut_ptr(),
            length: slice.len(),
            slice: PhantomData,
        }
    }

    /// # Safety
    /// No two parts alive at the same time may overlap.
    #[expect(
        clippy::mut_from_ref,
        reason = "the caller keeps parts disjoint; that is this type's purpose"
    )]
    unsafe fn part(&self, range: Range<usize>) -> &mut [T] {
        assert!(
            range.start <= range.end && range.end <= self.length,
            "part {range:?} of {}",
            self.length
        );
        // SAFETY: The range lies within the slice borrowed at `new`; exclusive use is the caller's promise.
        unsafe { std::slice::from_raw_parts_mut(self.start.add(range.start), range.len()) }
    }
}

/// The cores this process may run on, or none where that cannot be told.
#[cfg(target_os = "linux")]
fn allowed_cores() -> Vec<usize> {
    // SAFETY: An all-zero `cpu_set_t` is an empty set.
    let mut set: libc::cpu_set_t = unsafe { std::mem::zeroed() };
    // SAFETY: The call fills the set, whose size it is given.
    let failed = unsafe { libc::sched_getaffinity(0, size_of::<libc::cpu_set_t>(), &raw mut set) };
    if failed != 0 {
        return Vec::new();
    }
    (0..libc::CPU_SETSIZE as usize)
        // SAFETY: `core` is below CPU_SETSIZE.
        .filter(|&core| unsafe { libc::CPU_ISSET(core, &set) })
        .collect()
}

#[cfg(target_os = "linux")]
fn pin_to(core: usize) {
    // SAFETY: An all-zero `cpu_set_t` is an empty set.
    let mut set: libc::cpu_set_t = unsafe { std::mem::zeroed() };
    // SAFETY: `core` came from `allowed_cores`, so it is below CPU_SETSIZE.
    unsafe { libc::CPU_SET(core, &mut set) };
    // SAFETY: The set is initialised and its size is given; 0 means this thread. Failure leaves the thread free to
    // move, which is only slower.
    let failed =
        unsafe { libc::sched_setaffinity(0, size_of::<libc::cpu_set_t>(), &raw const set) };
    if failed != 0 {
        tracing::debug!(core, "could not pin a worker");
    }
}

#[cfg(not(target_os = "linux"))]
fn allowed_cores() -> Vec<usize> {
    Vec::new()
}

#[cfg(not(target_os = "linux"))]
fn pin_to(_: usize) {}

#[cfg(test)]
mod tests {
    use super::*;

    fn pool() -> Pool {
        Pool::new(4).unwrap()
    }

    #[test]
    fn every_item_runs_once() {
        let pool = pool();
        for items in [0, 1, 2, 3, 100, 1000] {
            let counts: Vec<AtomicUsize> = (0..items).map(|_| AtomicUsize::new(0)).collect();
            pool.for_each_with(&mut [(); 4], items, |(), item| {
                counts[item].fetch_add(1, Ordering::Relaxed);
            });
            assert!(counts.iter().all(|c| c.load(Ordering::Relaxed) == 1));
        }
    }

    #[test]
    fn many_small_steps_in_a_row_lose_nothing() {
        let pool = pool();
        let mut data = vec![0u64; 64];
        for _ in 0..20_000 {
            pool.for_each_chunk(&mut data, 8, |_, chunk| {
                for x in chunk {
                    *x += 1;
                }
            });
        }
        assert!(data.iter().all(|&x| x == 20_000));
    }

    #[test]
    fn sleeping_workers_wake() {
        let pool = pool();
        for _ in 0..5 {
            // Long enough for workers to fall asleep: the caller computes alone.
            let busy = (0..20_000_000u64).fold(0u64, |a, b| std::hint::black_box(a ^ b));
            std::hint::black_box(busy);
            let mut data = vec![0u32; 1000];
            pool.for_each_chunk(&mut data, 10, |item, chunk| chunk.fill(item as u32));
            assert!(data.iter().enumerate().all(|(i, &x)| x as usize == i / 10));
        }
    }

    #[test]
    fn a_panic_reaches_the_caller_and_the_pool_lives_on() {
        let pool = pool();
        for bad in [0, 7, 99] {
            let result = catch_unwind(AssertUnwindSafe(|| {
                pool.for_each_with(&mut [(); 4], 100, |(), item| assert_ne!(item, bad));
            }));
            assert!(result.is_err());
        }
        let mut data = vec![0; 100];
        pool.for_each_chunk(&mut data, 1, |item, chunk| chunk[0] = item);
        assert!(data.iter().enumerate().all(|(i, &x)| x == i));
    }

    #[test]
    fn cells_cover_a_matrix_exactly() {
        let pool = pool();
        let (rows, columns) = (11, 37);
        let mut data = vec![0.0; rows * columns];
        let grid = Grid {
            data: &mut data,
            columns,
            row_bounds: &[0, 3, 3, 11],
            cell_columns: 8,
        };
        pool.for_each_cell(grid, &mut [(); 4], |(), mut cell| {
            for row in cell.rows.clone() {
                let band = cell.band as f32;
                cell.row_mut(row).iter_mut().for_each(|x| *x += 1.0 + band);
            }
        });
        for (i, x) in data.iter().enumerate() {
            let band = if i / columns < 3 { 0.0 } else { 2.0 };
            assert_eq!(*x, 1.0 + band);
        }
    }

    #[test]
    fn chosen_chunks_are_the_only_ones_written() {
        let pool = pool();
        let mut data = vec![9usize; 50];
        pool.for_each_chosen_chunk(&mut data, 5, &[1, 4, 9], |place, chunk| chunk.fill(place));
        for (i, &x) in data.iter().enumerate() {
            assert_eq!(
                x,
                match i / 5 {
                    1 => 0,
                    4 => 1,
                    9 => 2,
                    _ => 9,
                }
            );
        }
    }

    #[test]
    fn more_threads_than_cores_still_finish() {
        let pool = Pool::new(16).unwrap();
        let mut data = vec![0u32; 512];
        for _ in 0..200 {
            pool.for_each_chunk(&mut data, 3, |_, chunk| {
                for x in chunk {
                    *x += 1;
                }
            });
        }
        assert!(data.iter().all(|&x| x == 200));
    }
}
