//! Twin of `kernels/load/pack.cu`: rows of the file to fragments. Part of loading, so a job is given addresses and no batch.

use carat_gguf::QuantType;

use crate::kernel::{
    Specialization,
    fragment::{fragment_constants, table_constants},
    specialization::format_constant,
};
use crate::{
    device::{Address, Grid},
    kernel::{
        fragment::{self, FragmentFormat},
        params::{Params, params},
    },
};

/// Inputs per block.
const RUN: usize = 1024;
const THREADS: usize = 256;

params! {
    struct PackParams {
        from: Address,
        row_bytes: u64,
        fragments: Address,
        m_tile_bytes: u64,
        rows: u32,
        columns: u32,
    }
}

/// Rows of a matrix, of whole M-tiles but for the last one, to their fragments.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Pack {
    /// Has fragments.
    pub(crate) quant: QuantType,
    /// Packed rows, as in the file.
    pub(crate) from: Address,
    pub(crate) rows: usize,
    pub(crate) columns: usize,
    pub(crate) fragments: Address,
    /// From one M-tile to the next: more than an M-tile where matrices are interleaved.
    pub(crate) m_tile_bytes: usize,
}

impl Pack {
    pub(crate) fn specialization(quant: QuantType) -> Specialization {
        let format = FragmentFormat::of(quant).expect("a format that has fragments");
        let mut constants = vec![format_constant(quant)];
        constants.extend(fragment_constants(format));
        constants.extend(table_constants(quant));
        Specialization {
            kernel: "pack",
            entries: &["pack"],
            constants,
            params_bytes: PackParams::BYTES,
        }
    }

    pub(crate) fn grid(&self) -> Grid {
        let blocks = (
            self.rows.div_ceil(fragment::M_TILE),
            self.columns.div_ceil(RUN),
        );
        Grid::new(blocks, THREADS)
    }

    pub(crate) fn params(&self) -> Vec<u8> {
        PackParams {
            from: self.from,
            row_bytes: self.quant.row_bytes(self.columns) as u64,
            fragments: self.fragments,
            m_tile_bytes: self.m_tile_bytes as u64,
            rows: self.rows as u32,
            columns: self.columns as u32,
        }
        .bytes()
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use carat_gguf::quant::random_blocks;

    use super::*;
    use crate::{
        config::Tier,
        kernel::fragment::{M_TILE, pack},
        testing::{Card, at},
    };

    /// Every format that has fragments.
    pub(crate) fn packed() -> impl Iterator<Item = QuantType> {
        QuantType::all().filter(|quant| FragmentFormat::of(*quant).is_some())
    }

    pub(crate) fn random(quant: QuantType, rows: usize, columns: usize) -> Vec<u8> {
        let mut bytes = vec![0; rows * quant.row_bytes(columns)];
        random_blocks(quant, 3, 0.1, &mut bytes);
        bytes
    }

    #[test]
    #[ignore = "needs a card"]
    fn pack_agrees_with_the_host_byte_for_byte() {
        let card = Card::open(Tier::Best);
        for quant in packed() {
            let format = FragmentFormat::of(quant).unwrap();
            let module = card.load(&Pack::specialization(quant));
            let tail = 1024 + 3 * quant.block_len();
            for (rows, columns) in [(1, 256), (48, 2560), (37, tail), (16, quant.block_len())] {
                let bytes = random(quant, rows, columns);
                let row_bytes = quant.row_bytes(columns);
                let row = |r: usize| &bytes[r * row_bytes..(r + 1) * row_bytes];
                let expected = pack(quant, rows, columns, row);
                let from = card.upload(&bytes);
                let fragments = card.upload(&vec![0xa5u8; expected.len()]);
                let job = Pack {
                    quant,
                    from: from.address(),
                    rows,
                    columns,
                    fragments: fragments.address(),
                    m_tile_bytes: format.m_tile_bytes(columns),
                };
                card.run(&module, job.grid(), &job.params());
                let found: Vec<u8> = card.download(&fragments, expected.len());
                assert!(found == expected, "{quant} {rows} x {columns}");
            }
        }
    }

    #[test]
    #[ignore = "needs a card"]
    fn pack_leaves_room_for_interleaved_m_tiles() {
        let card = Card::open(Tier::Best);
        let (quant, rows, columns) = (QuantType::Q4_K, 40, 512);
        let m_tile_bytes = FragmentFormat::K4.m_tile_bytes(columns);
        let bytes = random(quant, rows, columns);
        let row_bytes = quant.row_bytes(columns);
        let row = |r: usize| &bytes[r * row_bytes..(r + 1) * row_bytes];
        let expected = pack(quant, rows, columns, row);
        let from = card.upload(&bytes);
        let fragments = card.upload(&vec![0xa5u8; 2 * expected.len()]);
        let module = card.load(&Pack::specialization(quant));
        // The second of two matrices, in two runs of rows.
        for (first, rows) in [(0, M_TILE), (M_TILE, rows - M_TILE)] {
            let job = Pack {
                quant,
                from: at::<u8>(&from, first * row_bytes),
                rows,
                columns,
                fragments: at::<u8>(&fragments, (2 * (first / M_TILE) + 1) * m_tile_bytes),
                m_tile_bytes: 2 * m_tile_bytes,
            };
            card.run(&module, job.grid(), &job.params());
        }
        let found: Vec<u8> = card.download(&fragments, 2 * expected.len());
        let m_tiles = found.chunks_exact(2 * m_tile_bytes);
        for (m_tiles, expected) in m_tiles.zip(expected.chunks_exact(m_tile_bytes)) {
            assert!(m_tiles[..m_tile_bytes].iter().all(|b| *b == 0xa5));
            assert!(m_tiles[m_tile_bytes..] == *expected);
        }
    }
}
