//! Twin of `kernels/load/pack.cu`: part of loading, so a job is given addresses and no batch.

use carat_gguf::QuantType;

use crate::kernel::{Specialization, format, panel};
use crate::{
    device::{Address, Grid},
    kernel::{
        panels::{self, PanelFormat},
        params::{Params, params},
    },
};

/// Inputs that a block takes.
const RUN: usize = 1024;
const THREADS: usize = 256;

params! {
    struct PackParams {
        from: Address,
        row_bytes: u64,
        panels: Address,
        strip_bytes: u64,
        rows: u32,
        columns: u32,
    }
}

/// Rows of a matrix, of whole strips but for the last one, to their panels.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Pack {
    /// Has panels.
    pub(crate) quant: QuantType,
    /// Packed rows, as in the file.
    pub(crate) from: Address,
    pub(crate) rows: usize,
    pub(crate) columns: usize,
    pub(crate) panels: Address,
    /// From one strip to the next: more than a strip where matrices lie strip by strip in turn.
    pub(crate) strip_bytes: usize,
}

impl Pack {
    pub(crate) fn specialization(quant: QuantType) -> Specialization {
        let layout = PanelFormat::of(quant).expect("a format that has panels");
        Specialization {
            kernel: "pack",
            entries: &["pack"],
            constants: vec![format(quant), panel(layout)],
            params_bytes: PackParams::BYTES,
        }
    }

    pub(crate) fn grid(&self) -> Grid {
        let blocks = (
            self.rows.div_ceil(panels::STRIP),
            self.columns.div_ceil(RUN),
        );
        Grid::new(blocks, THREADS)
    }

    pub(crate) fn params(&self) -> Vec<u8> {
        PackParams {
            from: self.from,
            row_bytes: self.quant.row_bytes(self.columns) as u64,
            panels: self.panels,
            strip_bytes: self.strip_bytes as u64,
            rows: self.rows as u32,
            columns: self.columns as u32,
        }
        .bytes()
    }
}

#[cfg(test)]
mod tests {
    use carat_gguf::quant::random_blocks;

    use super::*;
    use crate::{
        config::Tier,
        kernel::panels::{STRIP, pack},
        testing::{Card, at},
    };

    const PACKED: [QuantType; 7] = [
        QuantType::Q8_0,
        QuantType::Q5_0,
        QuantType::IQ4_NL,
        QuantType::Q4_0,
        QuantType::Q4_K,
        QuantType::Q5_K,
        QuantType::Q6_K,
    ];

    fn random(quant: QuantType, rows: usize, columns: usize) -> Vec<u8> {
        let mut bytes = vec![0; rows * quant.row_bytes(columns)];
        random_blocks(quant, 3, 0.1, &mut bytes);
        bytes
    }

    #[test]
    #[ignore = "needs a card"]
    fn pack_agrees_with_the_host_byte_for_byte() {
        let card = Card::open(Tier::Best);
        for quant in PACKED {
            let format = PanelFormat::of(quant).unwrap();
            let module = card.load(&Pack::specialization(quant));
            let tail = 1024 + 3 * quant.block_len();
            for (rows, columns) in [(1, 256), (48, 2560), (37, tail), (16, quant.block_len())] {
                let bytes = random(quant, rows, columns);
                let row_bytes = quant.row_bytes(columns);
                let row = |r: usize| &bytes[r * row_bytes..(r + 1) * row_bytes];
                let expected = pack(quant, rows, columns, row);
                let from = card.upload(&bytes);
                let panels = card.upload(&vec![0xa5u8; expected.len()]);
                let job = Pack {
                    quant,
                    from: from.address(),
                    rows,
                    columns,
                    panels: panels.address(),
                    strip_bytes: format.strip_bytes(columns),
                };
                card.run(&module, job.grid(), &job.params());
                let found: Vec<u8> = card.download(&panels, expected.len());
                assert!(found == expected, "{quant} {rows} x {columns}");
            }
        }
    }

    #[test]
    #[ignore = "needs a card"]
    fn pack_leaves_room_for_strips_in_turn() {
        let card = Card::open(Tier::Best);
        let (quant, rows, columns) = (QuantType::Q4_K, 40, 512);
        let strip_bytes = PanelFormat::K4.strip_bytes(columns);
        let bytes = random(quant, rows, columns);
        let row_bytes = quant.row_bytes(columns);
        let row = |r: usize| &bytes[r * row_bytes..(r + 1) * row_bytes];
        let expected = pack(quant, rows, columns, row);
        let from = card.upload(&bytes);
        let panels = card.upload(&vec![0xa5u8; 2 * expected.len()]);
        let module = card.load(&Pack::specialization(quant));
        // The second of two matrices, in two runs of rows.
        for (first, rows) in [(0, STRIP), (STRIP, rows - STRIP)] {
            let job = Pack {
                quant,
                from: at::<u8>(&from, first * row_bytes),
                rows,
                columns,
                panels: at::<u8>(&panels, (2 * (first / STRIP) + 1) * strip_bytes),
                strip_bytes: 2 * strip_bytes,
            };
            card.run(&module, job.grid(), &job.params());
        }
        let found: Vec<u8> = card.download(&panels, 2 * expected.len());
        let strips = found.chunks_exact(2 * strip_bytes);
        for (strips, expected) in strips.zip(expected.chunks_exact(strip_bytes)) {
            assert!(strips[..strip_bytes].iter().all(|b| *b == 0xa5));
            assert!(strips[strip_bytes..] == *expected);
        }
    }

    #[test]
    #[ignore = "needs a card"]
    #[expect(clippy::print_stdout, reason = "what a timing is for")]
    fn pack_timing() {
        let card = Card::open(Tier::Best);
        for quant in PACKED {
            let (rows, columns) = (10240, 2560);
            let bytes = random(quant, rows, columns);
            let format = PanelFormat::of(quant).unwrap();
            let strip_bytes = format.strip_bytes(columns);
            let (from, panels) = (card.upload(&bytes), strip_bytes * rows / STRIP);
            // Past the second cache.
            let count = (256 << 20) / panels;
            let to = card.device.allocate("test", count * panels).unwrap();
            let module = card.load(&Pack::specialization(quant));
            let time = card.time(50, |i| {
                let job = Pack {
                    quant,
                    from: from.address(),
                    rows,
                    columns,
                    panels: at::<u8>(&to, i % count * panels),
                    strip_bytes,
                };
                crate::device::launch(&module, job.grid(), &job.params()).unwrap();
            });
            let rate = bytes.len() as f64 / time.as_secs_f64() / 1e9;
            println!("pack {quant}: {rate:.0} GB/s of file ({time:?})");
        }
    }
}
