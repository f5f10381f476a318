//! What holds from one batch to the next: page tables are known again.

use carat_model::{
    backend::{Backend, Batch, Draw, Run, TableRef, token_feeds},
    kv::{PageId, PerGroup},
    sampling::Sampling,
};

use super::{Checked, Session, VARIANTS, pages, same, tables};

/// Two sequences take turns; then one has its pages elsewhere, and at last the names change hands.
pub(super) fn known_tables(backend: &dyn Backend) -> Checked {
    for variant in VARIANTS {
        let mut plain = Session::new(backend, variant)?;
        let mut named = Session::new(backend, variant)?;
        let tokens = plain.tokens(3, 70);
        let both = [pages(0), pages(1)];
        let turn = |session: &mut Session,
                    pages: &PerGroup<Vec<PageId>>,
                    rows: std::ops::Range<usize>,
                    table: Option<TableRef>| {
            let feeds = token_feeds(&tokens[rows.clone()]);
            let run = Run {
                rows: 0..feeds.len(),
                position: rows.start,
                pages: tables(pages),
                sampled: 1,
                visible_end: None,
                table,
            };
            let batch = Batch {
                feeds: &feeds,
                runs: &[run],
            };
            let submitted = session.executor.submit(&batch);
            let ticket = submitted.map_err(|error| error.to_string())?;
            let sampling = Sampling::greedy();
            session.draw_and_collect(ticket, &[Draw::logits(&sampling)])?;
            Ok::<_, String>(session.outputs.rows[0].logits.clone())
        };
        let known = |id, entries| {
            let unchanged = PerGroup {
                full: entries,
                sliding: entries,
            };
            Some(TableRef { id, unchanged })
        };
        // Rows, the sequence whose pages they have, and what is known of these.
        let turns = [
            (0..30, 0, known(0, 0)),
            (0..40, 1, known(1, 0)),
            (30..33, 0, known(0, 1)),
            (40..70, 1, known(1, 2)),
            (33..34, 0, known(0, 3)),
            // Another sequence in the name of the first, and the first in another's.
            (0..65, 1, known(0, 0)),
            (34..60, 0, known(1, 0)),
            (65..66, 1, known(0, 3)),
            (60..61, 0, known(1, 3)),
        ];
        for (number, (rows, sequence, table)) in turns.into_iter().enumerate() {
            let pages = &both[sequence];
            let expected = turn(&mut plain, pages, rows.clone(), None)?;
            let found = turn(&mut named, pages, rows, table)?;
            same(&format!("{variant:?}, turn {number}"), &found, &expected)?;
        }
    }
    Ok(())
}
