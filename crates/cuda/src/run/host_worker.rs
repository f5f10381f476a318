//! The host's side of networks that it shares with the card: a thread that waits for requests, computes and answers.
//!
//! Requests come in the order of the launches, so nobody has to tell the thread what they are; it is told how many will come, and
//! sleeps when it has answered them all. It answers whatever happens: the card waits for it. If a step fails, it answers the rest
//! without computing, and the batch is an error.
#![expect(unsafe_code, reason = "memory that the card writes and reads")]

use std::{
    panic::{AssertUnwindSafe, catch_unwind},
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicU64, Ordering},
    },
    thread::JoinHandle,
    time::Duration,
};

use carat_model::{
    host_steps::{HostNetwork, HostSteps},
    weights::Weights,
};

use crate::{
    compile::host_networks::SharedMemory,
    device::{Device, SharedBuffer},
    error::CudaError,
    kernel::{HostAt, HostStage},
};

/// Offsets of words, as `lib/host.cuh` has them.
const ASKED: usize = 0;
const REQUESTS: usize = 16;
const REQUEST_BYTES: usize = 16;
const ANSWERED: usize = 128;

/// Pauses before the thread starts to yield, then yields before it naps: the card may be busy with a prompt.
const SPINS: u32 = 2_000;
const YIELDS: u32 = 10_000;
const NAP: Duration = Duration::from_micros(50);

/// The thread, and the memory it shares with the card.
pub(crate) struct HostWorker {
    shared: Arc<Shared>,
    thread: Option<JoinHandle<()>>,
    device: Arc<Device>,
}

struct Shared {
    memory: SharedBuffer,
    at: SharedMemory,
    sizes: Vec<Sizes>,
    /// Requests that will have come when all launches are over.
    announced: AtomicU64,
    stop: AtomicBool,
    failed: AtomicBool,
}

/// A network, with the widths of its matrices.
struct Sizes {
    network: HostNetwork,
    columns: usize,
    inner: usize,
    outputs: usize,
}

impl HostWorker {
    pub(crate) fn new(
        device: &Arc<Device>,
        weights: &Weights,
        (networks, at): (&[HostNetwork], SharedMemory),
        steps: Box<dyn HostSteps>,
    ) -> Result<HostWorker, CudaError> {
        let memory = device.allocate_host("networks of the host", at.bytes)?;
        let sizes = networks.iter().map(|network| Sizes {
            network: *network,
            columns: weights.matrix(network.gate).columns,
            inner: weights.matrix(network.gate).rows,
            outputs: weights.matrix(network.down).rows,
        });
        let shared = Arc::new(Shared {
            memory: SharedBuffer::new(memory),
            at,
            sizes: sizes.collect(),
            announced: AtomicU64::new(0),
            stop: AtomicBool::new(false),
            failed: AtomicBool::new(false),
        });
        let served = Arc::clone(&shared);
        let thread = std::thread::Builder::new()
            .name("carat-host".to_owned())
            .spawn(move || served.serve(steps))
            .map_err(|problem| CudaError::HostThread { problem })?;
        Ok(HostWorker {
            shared,
            thread: Some(thread),
            device: Arc::clone(device),
        })
    }

    /// Addresses of the memory that kernels pass parts through.
    pub(crate) fn at(&self) -> HostAt {
        let SharedMemory {
            inputs,
            routes,
            outputs,
            ..
        } = self.shared.at;
        let start = self.shared.memory.address();
        HostAt {
            words: start,
            inputs: inputs.map(|offset| start.offset(offset)),
            routes: routes.map(|offset| start.offset(offset)),
            outputs: outputs.map(|offset| start.offset(offset)),
        }
    }

    /// To be called before so many requests are launched.
    pub(crate) fn announce(&self, requests: usize) {
        if requests == 0 {
            return;
        }
        (self.shared.announced).fetch_add(requests as u64, Ordering::Release);
        if let Some(thread) = &self.thread {
            thread.thread().unpark();
        }
    }

    /// An error if a step has failed: what was computed since then is nothing.
    pub(crate) fn check(&self) -> Result<(), CudaError> {
        if self.shared.failed.load(Ordering::Acquire) {
            return Err(CudaError::HostSteps);
        }
        Ok(())
    }
}

impl Drop for HostWorker {
    fn drop(&mut self) {
        // The card may wait for answers. Where it fails, none is waited for.
        let _ = self.device.wait("ending the host's steps");
        self.shared.stop.store(true, Ordering::Release);
        if let Some(thread) = self.thread.take() {
            thread.thread().unpark();
            // It has caught what could have ended it.
            let _ = thread.join();
        }
    }
}

impl Shared {
    fn serve(&self, mut steps: Box<dyn HostSteps>) {
        let mut inner = Vec::new();
        let mut answered = 0u64;
        loop {
            while answered == self.announced.load(Ordering::Acquire) {
                if self.stop.load(Ordering::Acquire) {
                    return;
                }
                std::thread::park();
            }
            let number = answered as u32;
            let mut waits = 0;
            while self.memory.word(ASKED).load(Ordering::Acquire) == number {
                if self.stop.load(Ordering::Acquire) {
                    return;
                }
                pause(&mut waits);
            }
            let next = number.wrapping_add(1);
            if !self.failed.load(Ordering::Relaxed) {
                let answer = || self.answer(steps.as_mut(), next, &mut inner);
                if catch_unwind(AssertUnwindSafe(answer)).is_err() {
                    self.failed.store(true, Ordering::Release);
                }
            }
            self.memory.word(ANSWERED).store(next, Ordering::Release);
            answered += 1;
        }
    }

    /// Computes one request.
    fn answer(&self, steps: &mut dyn HostSteps, number: u32, inner: &mut Vec<f32>) {
        let request = REQUESTS + REQUEST_BYTES * (number as usize % 2);
        let word = |i: usize| self.memory.word(request + 4 * i).load(Ordering::Relaxed) as usize;
        let (rows, index, stage) = (word(0), word(1), word(2));
        let stage = HostStage::of(stage as u32).expect("kernels name stages");
        let Sizes {
            network,
            columns,
            inner: width,
            outputs,
        } = &self.sizes[index];
        let (each, from) = (network.each(), network.gated_from);
        let SharedMemory {
            inputs,
            routes,
            outputs: outs,
            ..
        } = self.at;
        let of = usize::from(stage == HostStage::Down);
        let route_floats = network.top_k.map_or(0, |top_k| 2 * top_k);
        // SAFETY: the card has written these before it asked, and does not again before it is answered.
        let route = unsafe { self.memory.floats(routes[of], rows * route_floats) };
        let pairs = rows * each;
        let own = width - from;
        // SAFETY: the card reads these when it is answered, and nobody else writes them.
        let gated = || unsafe { self.memory.floats_mut(outs[0], pairs * own) };
        // SAFETY: our own answer before, which nobody writes until we do.
        let answered = || unsafe { self.memory.floats(outs[0], pairs * own) };
        // SAFETY: the same.
        let out = || unsafe {
            self.memory
                .floats_mut(outs[1], rows * (outputs - network.down_from))
        };
        // SAFETY: as the route.
        let input = |floats: usize| unsafe { self.memory.floats(inputs[of], floats) };
        inner.resize(pairs * width, 0.0);
        match stage {
            HostStage::Gated => steps.gated(index, input(rows * columns), route, gated()),
            HostStage::Whole => {
                steps.gated(index, input(rows * columns), route, inner);
                steps.down(index, inner, route, out());
            }
            HostStage::Down => {
                let mut theirs = input(pairs * from).chunks_exact(from.max(1));
                let mut ours = answered().chunks_exact(own.max(1));
                for row in inner.chunks_exact_mut(*width) {
                    let (first, second) = row.split_at_mut(from);
                    first.copy_from_slice(theirs.next().unwrap_or_default());
                    second.copy_from_slice(ours.next().unwrap_or_default());
                }
                steps.down(index, inner, route, out());
            }
        }
    }
}

fn pause(waits: &mut u32) {
    *waits = waits.saturating_add(1);
    match *waits {
        ..SPINS => std::hint::spin_loop(),
        SPINS..YIELDS => std::thread::yield_now(),
        _ => std::thread::park_timeout(NAP),
    }
}
