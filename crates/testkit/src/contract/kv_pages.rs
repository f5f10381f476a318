//! Promises about KV pages: rows that are taken back are written over, pages go to host memory and come back, layers share those of a
//! chunk.

use carat_model::{
    backend::{Backend, token_feeds},
    evaluate::Pages,
    kv::{HostPageId, KvGroup, KvType, PageId, PageMove, PerGroup},
};

use super::{Checked, Session, VARIANTS, far, near, pages, same};

pub(super) fn rollback(backend: &dyn Backend) -> Checked {
    for variant in VARIANTS {
        let mut session = Session::new(backend, variant)?;
        let tokens = session.tokens(1, 70);
        let wrong = session.tokens(2, 4);
        let pages = pages(1);
        let feeds = token_feeds(&tokens);
        session.feed(&pages, 0, &feeds[..62], 0, None)?;
        let plain = session.feed(&pages, 62, &feeds[62..66], 4, None)?;
        // The third and fourth are drafts that were not accepted; the page ends among them.
        let drafted = [&feeds[62..64], &token_feeds(&wrong)[..2]].concat();
        let verified = session.feed(&pages, 62, &drafted, 4, None)?;
        for row in 0..2 {
            near("before the wrong draft", &verified[row], &plain[row])?;
        }
        let again = session.feed(&pages, 64, &feeds[64..66], 2, None)?;
        for row in 0..2 {
            near("after going back", &again[row], &plain[2 + row])?;
        }
    }
    Ok(())
}

pub(super) fn saved(backend: &dyn Backend) -> Checked {
    let of_both_types = VARIANTS.map(|variant| [(variant, KvType::F16), (variant, KvType::Q8_0)]);
    for (variant, kv) in of_both_types.into_iter().flatten() {
        let mut session = Session::with_kv(backend, variant, kv)?;
        let (tokens, other) = (session.tokens(1, 71), session.tokens(2, 90));
        let (feeds, others) = (token_feeds(&tokens), token_feeds(&other));
        let (table, elsewhere) = (pages(2), pages(3));
        session.feed(&table, 0, &feeds[..70], 0, None)?;
        let save = |group, table: &[PageId]| {
            let to = [4, 0, 2].map(HostPageId);
            let each = table.iter().zip(to);
            each.map(|(&from, to)| PageMove::Save { group, from, to })
                .collect::<Vec<_>>()
        };
        let load = |group, table: &[PageId]| {
            let from = [5, 1, 3].map(HostPageId);
            let each = table.iter().zip(from);
            each.map(|(&to, from)| PageMove::Load { group, from, to })
                .collect::<Vec<_>>()
        };
        let moves = |step: &dyn Fn(KvGroup, &[PageId]) -> Vec<PageMove>,
                     table: &PerGroup<Vec<PageId>>| {
            KvGroup::ALL
                .iter()
                .flat_map(|group| step(*group, table.get(*group)))
                .collect::<Vec<_>>()
        };
        session
            .executor
            .move_pages(&moves(&save, &table))
            .map_err(|error| error.to_string())?;
        // They are bytes, wherever they are kept meanwhile.
        for group in KvGroup::ALL {
            for (from, to) in [(4, 5), (0, 1), (2, 3)] {
                let place = |place| HostPageId(place);
                let page = session.executor.host_page(group, place(from));
                let page = page.map_err(|error| error.to_string())?;
                let bytes = page.to_vec();
                page.fill(0);
                let page = session.executor.host_page(group, place(to));
                let page = page.map_err(|error| error.to_string())?;
                page.copy_from_slice(&bytes);
            }
        }
        let expected = session.feed(&table, 70, &feeds[70..], 1, None)?;
        // Somebody else writes the pages, and those it comes back to.
        session.feed(&table, 0, &others, 0, None)?;
        session.feed(&elsewhere, 0, &others, 0, None)?;
        session
            .executor
            .move_pages(&moves(&load, &elsewhere))
            .map_err(|error| error.to_string())?;
        let found = session.feed(&elsewhere, 70, &feeds[70..], 1, None)?;
        near("after loading", &found[0], &expected[0])?;
        let lost = session.feed(&table, 70, &feeds[70..], 1, None)?;
        far("without loading", &lost[0], &expected[0])?;
    }
    Ok(())
}

pub(super) fn of_chunks(backend: &dyn Backend) -> Checked {
    for (variant, kv) in VARIANTS
        .into_iter()
        .zip([KvType::F16, KvType::Q8_0].into_iter().cycle())
    {
        let logits = |passing: &[(usize, PageId)]| -> Result<Vec<Vec<f32>>, String> {
            let mut session = Session::with_kv(backend, variant, kv)?;
            let tokens = session.tokens(7, 164);
            let feeds = token_feeds(&tokens);
            let pages = Pages::new(&session.plan, session.options.pages);
            let mut pages = pages.tables().map(<[PageId]>::to_vec);
            session.feed(&pages, 0, &feeds[..32], 0, None)?;
            for (place, page) in passing {
                pages.sliding[*place] = *page;
            }
            let mut all = session.feed(&pages, 32, &feeds[32..160], 8, None)?;
            // What follows sees pages from the fourth on.
            pages.sliding[..3].fill(PageId::FREED);
            all.extend(session.feed(&pages, 160, &feeds[160..], 4, None)?);
            Ok(all)
        };
        let expected = logits(&[])?;
        let found = logits(&[(1, PageId(15)), (2, PageId(13))])?;
        same("a chunk partly in chunk pages", &found, &expected)?;
        // What is read later has become another layer's.
        let lost = logits(&[(3, PageId(14))])?;
        same("the rows of a chunk", &&lost[..8], &&expected[..8])?;
        if lost[8..] == expected[8..] {
            return Err(format!("{variant:?}: each layer has its own chunk pages"));
        }
    }
    Ok(())
}
