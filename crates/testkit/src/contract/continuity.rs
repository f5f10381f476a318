//! Promises from one batch to the next: a batch that was interrupted leaves nothing behind, and page tables are known again.

use carat_model::{
    backend::{Backend, BackendError, Batch, Draw, Interrupt, Run, TableRef, token_feeds},
    kv::{PageId, PerGroup},
    sampling::Sampling,
};

use super::{Checked, Session, VARIANTS, Variant, near, pages, same, tables};

/// The wish is there before the batch, so that it is heard by whoever listens at all.
pub(super) fn interrupted(backend: &dyn Backend) -> Checked {
    let mut session = Session::new(backend, Variant::E2b)?;
    let interrupt = Interrupt::default();
    session.executor.interrupt_by(interrupt.clone());
    let tokens = session.tokens(1, 50);
    let feeds = token_feeds(&tokens);
    let pages = pages(0);
    let expected = session.feed(&pages, 0, &feeds, 1, None)?;
    session.feed(&pages, 0, &feeds[..41], 0, None)?;
    let others = token_feeds(&tokens[..9]);
    let run = Run {
        rows: 0..9,
        position: 41,
        pages: tables(&pages),
        sampled: 1,
        visible_end: None,
        table: None,
    };
    let batch = Batch {
        feeds: &others,
        runs: &[run],
    };
    interrupt.raise();
    match session.executor.submit(&batch) {
        Err(BackendError::Interrupted) => {}
        Err(error) => return Err(error.to_string()),
        // It queues, and would not have been waited for.
        Ok(ticket) => session.draw_and_collect(ticket, &[])?,
    }
    interrupt.ignore(true);
    session.feed(&pages, 41, &others, 1, None)?;
    interrupt.ignore(false);
    interrupt.clear();
    let found = session.feed(&pages, 41, &feeds[41..], 1, None)?;
    near("after an interrupted batch", &found[0], &expected[0])
}

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
