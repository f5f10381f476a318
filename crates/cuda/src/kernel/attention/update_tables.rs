//! Twin of `kernels/attention/update_tables.cu`. No step of a plan: it is launched before the program of a batch whose page tables
//! have changed since the batches before it.

use crate::{
    device::{Address, Grid},
    kernel::{
        Specialization,
        params::{Params, params},
    },
};

const THREADS: usize = 128;

/// Words of an update: its place in the tables, that of its pages in the batch, and their number.
pub(crate) const UPDATE_WORDS: usize = 3;

params! {
    pub(crate) struct UpdateTablesParams {
        words: Address,
        updates: Address,
        tables: Address,
    }
}

pub(crate) fn specialization() -> Specialization {
    Specialization {
        kernel: "update_tables",
        entries: &["update_tables"],
        constants: vec![],
        params_bytes: UpdateTablesParams::BYTES,
    }
}

pub(crate) fn grid(updates: usize) -> Grid {
    Grid::new((updates, 1), THREADS)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{config::Tier, testing::Card};

    #[test]
    #[ignore = "needs a card"]
    fn update_tables_writes_what_is_named_and_nothing_else() {
        let card = Card::open(Tier::Best);
        let module = card.load(&specialization());
        // Pages one after another, then the updates that take them, out of order and with gaps between.
        let pages: Vec<u32> = (0..600).map(|i| 5000 + i).collect();
        let updates = [[700, 0, 200], [3, 200, 1], [10, 201, 399]];
        let words: Vec<u32> = pages.iter().copied().chain(updates.concat()).collect();
        let mut tables = vec![7u32; 1000];
        let (words_at, tables_at) = (card.upload(&words), card.upload(&tables));
        let params = UpdateTablesParams {
            words: words_at.address(),
            updates: words_at.address().offset(pages.len() * 4),
            tables: tables_at.address(),
        };
        card.run(&module, grid(updates.len()), &params.bytes());
        for [at, from, count] in updates.map(|update| update.map(|word| word as usize)) {
            tables[at..at + count].copy_from_slice(&pages[from..from + count]);
        }
        assert_eq!(card.download::<u32>(&tables_at, tables.len()), tables);
    }
}
