//! Sixteen by sixteen sums at once: the vocabulary of processors that multiply whole tiles.
//!
//! [`PlainTiles`] is the meaning, and the twin that the instructions are tested against.
//!
//! BF16 tiles were tried too: they hold every code exactly and give the integers as f32 already, which saves vectors a third
//! of their work. But they are twice as long, and the two came out alike.

use super::{LANES, Line};

/// One side of a product: sixteen rows of up to 32 signed bytes.
///
/// On the left, a row lies after the other. On the right, a line holds four neighbouring bytes of all sixteen rows.
pub(crate) type Tile = [Line; 8];

/// The sum for left row `i` and right row `j` at `[i][j]`.
#[derive(Clone, Copy)]
#[repr(C, align(64))]
pub(crate) struct Square(pub(crate) [[i32; LANES]; LANES]);

impl Square {
    pub(crate) const ZERO: Square = Square([[0; LANES]; LANES]);
}

/// Left tiles that may be held at a time.
pub(crate) const HELD: usize = 4;

/// A thread's tile registers.
pub(crate) trait Tiles {
    /// Takes the registers, for groups of 32 or 16 values.
    fn take(group: usize) -> Self;
    /// Keeps a left tile in one of [`HELD`] places.
    fn hold(&mut self, place: usize, left: &Tile);
    /// The products of a held tile with a right one.
    fn multiply(&mut self, place: usize, right: &Tile, out: &mut Square);
}

pub(crate) struct PlainTiles {
    group: usize,
    held: [Tile; HELD],
}

impl Tiles for PlainTiles {
    fn take(group: usize) -> PlainTiles {
        PlainTiles {
            group,
            held: [[Line([0; 64]); 8]; HELD],
        }
    }

    fn hold(&mut self, place: usize, left: &Tile) {
        self.held[place] = *left;
    }

    fn multiply(&mut self, place: usize, right: &Tile, out: &mut Square) {
        let left = &self.held[place];
        for (i, sums) in out.0.iter_mut().enumerate() {
            for (j, sum) in sums.iter_mut().enumerate() {
                *sum = (0..self.group)
                    .map(|k| {
                        let left = byte(left, i * self.group + k);
                        left * byte(right, k / 4 * 4 * LANES + 4 * j + k % 4)
                    })
                    .sum();
            }
        }
    }
}

/// The byte at a place of a tile's lines laid end to end.
fn byte(tile: &Tile, place: usize) -> i32 {
    i32::from(tile[place / 64].0[place % 64].cast_signed())
}
