//! Twin of `kernels/attend_wide.cu`.

use carat_model::plan::{KvSlot, Rows};

use super::{Addresses, Kernel, Place, PlacesAt, RowsAt, RunsAt, SlotAt, Specialization};
use crate::{
    device::Address,
    launch::Grid,
    params::{Params, params},
};

/// Head sizes that are compiled for. The kernel takes any multiple of 16 up to 512.
const HEAD_DIMS: [usize; 6] = [16, 32, 64, 128, 256, 512];

/// Shared memory that a block may have on every card since Ampere, and on Hopper.
pub(crate) const SHARED_BYTES: [usize; 2] = [99 << 10, 227 << 10];

/// Blocks beyond those that one run needs, so that a batch of some runs need not go round.
const MORE_TILES: usize = 16;

params! {
    struct AttendWideParams {
        rows: RowsAt,
        places: PlacesAt,
        runs: RunsAt,
        slot: SlotAt,
        q: Address,
        out: Address,
        scales: Address,
        sums: Address,
        heads: u32,
        window: u32,
    }
}

/// What is written, in the form its reader wants.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum AttendOut {
    F32(Place),
    F16(Place),
    /// Blocks of 32 columns: codes, scales, and scale times sum of codes.
    Q8 {
        codes: Place,
        scales: Place,
        sums: Place,
    },
}

/// The forms as the kernel's constant `OUT` names them.
const FORMS: [&str; 3] = ["OUT_F32", "OUT_F16", "OUT_Q8"];

impl AttendOut {
    fn form(self) -> &'static str {
        match self {
            AttendOut::F32(_) => FORMS[0],
            AttendOut::F16(_) => FORMS[1],
            AttendOut::Q8 { .. } => FORMS[2],
        }
    }
}

/// How a block is built: the constants of the `.cu` file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Shape {
    head_dim: usize,
    rows: usize,
    keys: usize,
    warps: usize,
    row_steps: usize,
    k_columns: usize,
    v_keys: usize,
    slots: usize,
}

impl Shape {
    /// The block for a head size that fits this much shared memory. Small heads are for tests and old habits: one shape does.
    fn of(head_dim: usize, shared_bytes: usize) -> Shape {
        let large = shared_bytes >= SHARED_BYTES[1];
        let (rows, keys, warps, row_steps, columns, v_keys, slots) = match (head_dim, large) {
            (..=128, _) => (64, 64, 4, 1, 128, 64, 3),
            (..=256, true) => (128, 64, 8, 2, 256, 64, 4),
            (..=256, false) => (64, 64, 8, 2, 128, 32, 3),
            (_, true) => (64, 128, 8, 2, 128, 32, 4),
            (_, false) => (32, 64, 8, 1, 128, 16, 3),
        };
        let fits = |c: &usize| head_dim.is_multiple_of(*c);
        let k_columns = (16..=columns).rev().step_by(16).find(fits);
        Shape {
            head_dim,
            rows,
            keys,
            warps,
            row_steps,
            k_columns: k_columns.expect("heads are multiples of 16"),
            v_keys,
            slots,
        }
    }

    /// Q, the ring of chunks, weights, and a number a row and warp; rows padded by 16 bytes.
    fn shared_bytes(&self) -> usize {
        let chunk = (self.keys * (self.k_columns + 8)).max(self.v_keys * (self.head_dim + 8));
        let column_warps = self.warps / (self.rows / (16 * self.row_steps));
        let a_row = (self.head_dim + 8) + (self.keys + 8) + 2 * column_warps;
        2 * (self.rows * a_row + self.slots * chunk)
    }

    fn specialization(&self, form: &str) -> Specialization {
        let numbers = [
            ("HEAD_DIM", self.head_dim),
            ("ROWS", self.rows),
            ("KEYS", self.keys),
            ("WARPS", self.warps),
            ("ROW_STEPS", self.row_steps),
            ("K_COLUMNS", self.k_columns),
            ("V_KEYS", self.v_keys),
            ("SLOTS", self.slots),
            ("SHARED_BYTES", self.shared_bytes()),
        ];
        let numbers = numbers.map(|(name, value)| (name, value.to_string()));
        Specialization {
            kernel: "attend_wide",
            entries: &["attend_wide"],
            constants: [("OUT", form.to_owned())]
                .into_iter()
                .chain(numbers)
                .collect(),
            params_bytes: AttendWideParams::BYTES,
        }
    }
}

/// All that [`AttendWide::new`] may choose.
pub(super) fn specializations() -> Vec<Specialization> {
    let mut shapes: Vec<Shape> = Vec::new();
    for head_dim in HEAD_DIMS {
        for shared_bytes in SHARED_BYTES {
            let shape = Shape::of(head_dim, shared_bytes);
            if !shapes.contains(&shape) {
                shapes.push(shape);
            }
        }
    }
    let each = |shape: &Shape| FORMS.map(|form| shape.specialization(form));
    shapes.iter().flat_map(each).collect()
}

/// What there is to attend with.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Heads {
    pub(crate) heads: usize,
    pub(crate) kv_heads: usize,
    pub(crate) head_dim: usize,
    pub(crate) window: Option<usize>,
}

#[derive(Debug)]
pub(crate) struct AttendWide {
    /// Whose runs they are.
    rows: Rows,
    /// Halves.
    q: Place,
    slot: KvSlot,
    heads: Heads,
    shape: Shape,
    out: AttendOut,
}

impl AttendWide {
    /// For a card whose blocks may have `shared_bytes`. `None` for what the kernel does not take.
    pub(crate) fn new(
        rows: Rows,
        (q, out): (Place, AttendOut),
        slot: KvSlot,
        heads: Heads,
        shared_bytes: usize,
    ) -> Option<AttendWide> {
        let shape = HEAD_DIMS
            .contains(&heads.head_dim)
            .then(|| Shape::of(heads.head_dim, shared_bytes))?;
        let group = heads.heads / heads.kv_heads;
        let blocks_of_32 = heads.head_dim >= 32 || group.is_multiple_of(2);
        let fits = group <= shape.rows && shape.shared_bytes() <= shared_bytes;
        let writes = !matches!(out, AttendOut::Q8 { .. }) || blocks_of_32;
        (fits && writes).then_some(AttendWide {
            rows,
            q,
            slot,
            heads,
            shape,
            out,
        })
    }
}

impl Kernel for AttendWide {
    fn specialization(&self) -> Specialization {
        self.shape.specialization(self.out.form())
    }

    /// Enough blocks for one run of all rows and some more; where runs are many and short, blocks take several tiles.
    fn grid(&self, rows: usize) -> Grid {
        let tokens = self.shape.rows / (self.heads.heads / self.heads.kv_heads);
        let tiles = rows.min(rows.div_ceil(tokens) + MORE_TILES);
        Grid {
            shared_bytes: self.shape.shared_bytes(),
            ..Grid::new((self.heads.kv_heads, tiles), self.shape.warps * 32)
        }
    }

    fn params(&self, at: &Addresses, rows: RowsAt) -> Vec<u8> {
        let (out, scales, sums) = match self.out {
            AttendOut::F32(out) | AttendOut::F16(out) => {
                (at.place(out), Address::NULL, Address::NULL)
            }
            AttendOut::Q8 {
                codes,
                scales,
                sums,
            } => (at.place(codes), at.place(scales), at.place(sums)),
        };
        AttendWideParams {
            rows,
            places: at.batch.places,
            runs: at.runs(self.rows),
            slot: at.slot(self.slot),
            q: at.place(self.q),
            out,
            scales,
            sums,
            heads: self.heads.heads as u32,
            window: self.heads.window.unwrap_or(0) as u32,
        }
        .bytes()
    }

    fn reads(&self) -> Vec<Place> {
        vec![self.q]
    }

    fn writes(&self) -> Vec<Place> {
        match self.out {
            AttendOut::F32(out) | AttendOut::F16(out) => vec![out],
            AttendOut::Q8 {
                codes,
                scales,
                sums,
            } => vec![codes, scales, sums],
        }
    }
}

#[cfg(test)]
mod tests;
