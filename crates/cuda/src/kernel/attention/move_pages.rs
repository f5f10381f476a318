//! Twin of `kernels/attention/move_pages.cu`. No step of a plan: `crate::run::pages` launches it beside the batches.

use crate::{
    device::{Address, Grid},
    kernel::{
        Specialization,
        params::{Field, Params, params},
    },
};

/// Moves per launch.
pub(crate) const MAX_MOVES: usize = 64;
const BLOCKS: usize = 16;
const THREADS: usize = 1024;

params! {
    /// Keys or values of one slot.
    pub(crate) struct PageSegment {
        pages: Address,
        bytes: u64,
        offset: u64,
    }
}

params! {
    pub(crate) struct MovePagesParams {
        segments: Address,
        host: Address,
        page_bytes: u64,
        segment_count: u32,
        move_count: u32,
        is_load: u32,
        padding: u32,
    }
}

impl MovePagesParams {
    /// The bytes that the kernel takes, for at most [`MAX_MOVES`] pages and their places in host memory.
    pub(crate) fn with_moves(&self, moves: &[(u32, u32)]) -> Vec<u8> {
        assert!(moves.len() <= MAX_MOVES, "too many moves for a launch");
        let mut bytes = self.bytes();
        let mut put = |of: fn(&(u32, u32)) -> u32| {
            let given = moves.iter().map(of);
            let all = given.chain(std::iter::repeat(0)).take(MAX_MOVES);
            all.for_each(|word| word.put(&mut bytes));
        };
        put(|(page, _)| *page);
        put(|(_, place)| *place);
        bytes
    }
}

pub(crate) fn specialization() -> Specialization {
    Specialization {
        kernel: "move_pages",
        entries: &["move_pages"],
        constants: vec![("MAX_MOVES", MAX_MOVES.to_string())],
        params_bytes: MovePagesParams::BYTES + MAX_MOVES * 8,
    }
}

pub(crate) fn grid() -> Grid {
    Grid::new((BLOCKS, 1), THREADS)
}
