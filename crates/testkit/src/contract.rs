//! Promises of an executor beyond the steps of a plan: how batches are fed, drawn, collected and moved.
//!
//! Each check runs tiny models on a backend and compares with the same backend fed in the plainest way, or with the reference
//! where only that says what is right.

mod continuity;
mod drafts;
mod kv_pages;

use std::sync::Arc;

use carat_gguf::{QuantType, quant::SplitMix64};
use carat_model::{
    Model, TokenId,
    backend::{
        Backend, BackendError, Batch, Batching, CompileOptions, Draw, Executor, Feed, Outputs,
        RowOutput, Run, Ticket, token_feeds,
    },
    evaluate::Pages,
    gemma4,
    kv::{HostPageId, KvGroup, KvType, PAGE_TOKENS, PageId, PageMove, PerGroup},
    plan::Plan,
    reference::Reference,
    sampling::{Sampling, Scratch, TokenMask},
};

use crate::{
    close,
    tiny::{Tiny, Variant},
};

/// A promise, and the check that it is kept.
#[derive(Clone, Copy)]
pub struct Promise {
    /// The promise.
    pub name: &'static str,
    check: fn(&dyn Backend) -> Checked,
}

type Checked = Result<(), String>;

impl Promise {
    /// Says how the backend breaks it, if it does.
    pub fn check(&self, backend: &dyn Backend) -> Checked {
        (self.check)(backend)
    }
}

/// Every promise there is.
pub const ALL: [Promise; 12] = [
    promise(
        "rows_are_fed_what_the_batch_in_flight_samples",
        fed_by_samples,
    ),
    promise("draws_are_those_of_the_reference_under_masks", masked_draws),
    promise(
        "rows_of_a_draft_are_forgotten_by_going_back",
        kv_pages::rollback,
    ),
    promise(
        "drafts_depend_on_their_own_text_alone",
        drafts::own_text_alone,
    ),
    promise("pages_come_back_as_they_were_saved", kv_pages::saved),
    promise("layers_take_turns_at_chunk_pages", kv_pages::of_chunks),
    promise("an_embedding_takes_the_place_of_a_token", embeddings),
    promise("images_see_themselves_in_sliding_layers", spans),
    promise("a_batch_that_is_not_drawn_has_no_results", undrawn),
    promise(
        "an_interrupted_batch_counts_for_nothing",
        continuity::interrupted,
    ),
    promise(
        "page_tables_are_known_from_batch_to_batch",
        continuity::known_tables,
    ),
    promise(
        "what_cannot_be_run_is_refused_and_changes_nothing",
        refusals,
    ),
];

const fn promise(name: &'static str, check: fn(&dyn Backend) -> Checked) -> Promise {
    Promise { name, check }
}

const VARIANTS: [Variant; 3] = [Variant::E2b, Variant::Dense12b, Variant::Moe26b];
/// More than a page, so that windows reach across a page's border.
const WINDOW: usize = 40;

/// A compiled model with a few sequences' worth of pages.
struct Session {
    model: Model,
    plan: Plan,
    options: CompileOptions,
    executor: Box<dyn Executor>,
    outputs: Outputs,
}

/// Pages of the `index`th sequence of four.
fn pages(index: u32) -> PerGroup<Vec<PageId>> {
    let place = |page: u32| page * 4 + index;
    PerGroup {
        full: (0..3).map(|p| PageId(place(p))).collect(),
        sliding: (0..3).map(|p| PageId(12 - place(p))).collect(),
    }
}

impl Session {
    fn new(backend: &dyn Backend, variant: Variant) -> Result<Session, String> {
        Session::with_kv(backend, variant, KvType::default())
    }

    fn with_kv(backend: &dyn Backend, variant: Variant, kv: KvType) -> Result<Session, String> {
        let mut tiny = Tiny::new(variant, QuantType::F32);
        tiny.dimensions.window = WINDOW;
        let model = tiny.model();
        let plan = gemma4::plan(&model);
        let options = CompileOptions {
            pages: PerGroup {
                full: 12,
                sliding: 13,
            },
            chunk_pages: 3,
            host_pages: PerGroup {
                full: 6,
                sliding: 7,
            },
            kv: kv.into(),
            max_rows: 128,
            max_sampled: 8,
            probe: false,
            batching: Batching::Fast,
        };
        let executor = backend
            .compile(&plan, Arc::clone(&model.weights), &options)
            .map_err(|error| error.to_string())?;
        Ok(Session {
            model,
            plan,
            options,
            executor,
            outputs: Outputs::default(),
        })
    }

    fn tokens(&self, seed: u64, count: usize) -> Vec<TokenId> {
        let mut random = SplitMix64::new(seed);
        let token = |_| random.below(self.plan.vocab()) as TokenId;
        (0..count).map(token).collect()
    }

    /// Runs one sequence's next rows; returns the logits of the last `sampled`.
    fn feed(
        &mut self,
        pages: &PerGroup<Vec<PageId>>,
        position: usize,
        feeds: &[Feed<'_>],
        sampled: usize,
        visible_end: Option<&[u32]>,
    ) -> Result<Vec<Vec<f32>>, String> {
        let run = Run {
            rows: 0..feeds.len(),
            position,
            pages: tables(pages),
            sampled,
            visible_end,
            table: None,
        };
        let batch = Batch {
            feeds,
            runs: &[run],
        };
        let sampling = Sampling::greedy();
        let ticket = self
            .executor
            .submit(&batch)
            .map_err(|error| error.to_string())?;
        let draws = vec![Draw::logits(&sampling); sampled];
        self.draw_and_collect(ticket, &draws)?;
        Ok(self.outputs.rows.iter().map(|r| r.logits.clone()).collect())
    }

    fn draw_and_collect(&mut self, ticket: Ticket, draws: &[Draw<'_>]) -> Checked {
        if !draws.is_empty() {
            self.executor
                .draw(&ticket, draws)
                .map_err(|error| error.to_string())?;
        }
        let collected = self.executor.collect(ticket, &mut self.outputs);
        collected.map_err(|error| error.to_string())
    }

    fn drawn(&self) -> Vec<TokenId> {
        self.outputs.rows.iter().map(|row| row.token).collect()
    }
}

fn tables(pages: &PerGroup<Vec<PageId>>) -> PerGroup<&[PageId]> {
    PerGroup {
        full: &pages.full,
        sliding: &pages.sliding,
    }
}

fn same<T: PartialEq + std::fmt::Debug>(what: &str, found: &T, expected: &T) -> Checked {
    if found == expected {
        Ok(())
    } else {
        Err(format!("{what}: {found:?}, expected {expected:?}"))
    }
}

/// Neighbours may change the order of sums, and the class of kernels that a batch is for; nothing else.
fn near(what: &str, found: &[f32], expected: &[f32]) -> Checked {
    let error = close::relative_l2(found, expected);
    if error <= 5e-3 {
        Ok(())
    } else {
        Err(format!("{what}: relative error {error:.1e}"))
    }
}

fn far(what: &str, found: &[f32], expected: &[f32]) -> Checked {
    let error = close::relative_l2(found, expected);
    if error >= 1e-2 {
        Ok(())
    } else {
        Err(format!("{what}: no difference but {error:.1e}"))
    }
}

/// Three sequences: two decode, in the other order than before, while the third's prompt comes in, and a fourth has left.
fn fed_by_samples(backend: &dyn Backend) -> Checked {
    for variant in VARIANTS {
        let mut answers = Vec::new();
        for ahead in [true, false] {
            let mut session = Session::new(backend, variant)?;
            let prompts: Vec<Vec<TokenId>> =
                (0..4).map(|n| session.tokens(n, 5 + n as usize)).collect();
            let pages: Vec<_> = (0..4).map(pages).collect();
            let sampling = Sampling {
                seed: 3,
                ..Sampling::default()
            };
            let draw = |history| Draw {
                sampling: &sampling,
                history,
                mask: None,
                output: RowOutput::Token,
            };
            let run = |rows, sequence: usize, position, sampled| Run {
                rows,
                position,
                pages: tables(&pages[sequence]),
                sampled,
                visible_end: None,
                table: None,
            };
            let first: Vec<TokenId> = prompts[..3].concat();
            let batch = Batch {
                feeds: &token_feeds(&first),
                runs: &[
                    run(0..5, 0, 0, 1),
                    run(5..11, 1, 0, 1),
                    run(11..18, 2, 0, 1),
                ],
            };
            let before = session
                .executor
                .submit(&batch)
                .map_err(|error| error.to_string())?;
            let draws = [0, 1, 2].map(|n| draw(&prompts[n]));
            session
                .executor
                .draw(&before, &draws)
                .map_err(|error| error.to_string())?;
            let mut before = Some(before);
            // The second has left; the third comes before the first, around the fourth's prompt.
            let mut feeds = vec![Feed::Sampled(2)];
            feeds.extend(token_feeds(&prompts[3]));
            feeds.push(Feed::Sampled(0));
            if !ahead {
                let ticket = before.take().expect("put there above");
                let collected = session.executor.collect(ticket, &mut session.outputs);
                collected.map_err(|error| error.to_string())?;
                let tokens = session.drawn();
                for feed in &mut feeds {
                    *feed = Feed::Token(feed.resolve(&tokens));
                }
            }
            let last = feeds.len() - 1;
            let batch = Batch {
                feeds: &feeds,
                runs: &[
                    run(0..1, 2, 7, 1),
                    run(1..last, 3, 0, 1),
                    run(last..last + 1, 0, 5, 1),
                ],
            };
            let after = session
                .executor
                .submit(&batch)
                .map_err(|error| error.to_string())?;
            if let Some(before) = before {
                let collected = session.executor.collect(before, &mut session.outputs);
                collected.map_err(|error| error.to_string())?;
            }
            let tokens = session.drawn();
            let histories = [
                [&prompts[2][..], &tokens[2..3]].concat(),
                prompts[3].clone(),
                [&prompts[0][..], &tokens[..1]].concat(),
            ];
            let draws = histories.each_ref().map(|history| draw(history));
            session.draw_and_collect(after, &draws)?;
            answers.push((tokens, session.drawn()));
        }
        same(&format!("{variant:?} fed ahead"), &answers[0], &answers[1])?;
    }
    Ok(())
}

fn masked_draws(backend: &dyn Backend) -> Checked {
    let mut session = Session::new(backend, Variant::Dense12b)?;
    let columns = session.plan.columns(session.plan.logits);
    let settings = [
        Sampling::greedy(),
        Sampling::default(),
        Sampling {
            top_k: 3,
            top_p: 1.0,
            ..Sampling::default()
        },
        Sampling {
            top_k: 0,
            top_p: 1.0,
            ..Sampling::default()
        },
        Sampling {
            top_k: 0,
            top_p: 0.7,
            ..Sampling::default()
        },
        Sampling {
            repeat_penalty: 3.0,
            logit_bias: vec![(7, 40.0), (8, f32::NEG_INFINITY)],
            ..Sampling::greedy()
        },
        Sampling {
            top_k: 0,
            min_p: 0.3,
            ..Sampling::default()
        },
    ];
    let mut random = SplitMix64::new(9);
    for round in 0..12 {
        let tokens = session.tokens(round, settings.len());
        let pages = pages(0);
        let feeds = token_feeds(&tokens);
        let logits = session.feed(&pages, 0, &feeds, settings.len(), None)?;
        // None, one, a few, half of the tokens, and all but the likeliest.
        let masks: Vec<Option<TokenMask>> = (0..settings.len())
            .map(|r| {
                let some = |share: usize, random: &mut SplitMix64| {
                    let all = 0..columns as TokenId;
                    let mut mask = TokenMask::of(columns, all.filter(|_| random.below(share) == 0));
                    mask.allow(8);
                    mask
                };
                match (round as usize + r) % 5 {
                    0 => None,
                    1 => Some(TokenMask::of(columns, [random.below(columns) as TokenId])),
                    2 => Some(some(columns / 8, &mut random)),
                    3 => Some(some(2, &mut random)),
                    _ => {
                        let mut mask = TokenMask::none(columns);
                        mask.allow_all();
                        mask.forbid(carat_model::sampling::arg_max(&logits[r]));
                        Some(mask)
                    }
                }
            })
            .collect();
        let run = Run {
            rows: 0..feeds.len(),
            position: 0,
            pages: tables(&pages),
            sampled: settings.len(),
            visible_end: None,
            table: None,
        };
        let batch = Batch {
            feeds: &feeds,
            runs: &[run],
        };
        let each = settings.iter().zip(&masks).enumerate();
        let draws: Vec<Draw<'_>> = each
            .map(|(r, (sampling, mask))| Draw {
                sampling,
                history: &tokens[..=r],
                mask: mask.as_ref(),
                // A row that wants more must not change what the others get.
                output: if round % 2 == 0 && r == 3 {
                    RowOutput::Logprobs { top: 2 }
                } else {
                    RowOutput::Token
                },
            })
            .collect();
        let ticket = session
            .executor
            .submit(&batch)
            .map_err(|error| error.to_string())?;
        session.draw_and_collect(ticket, &draws)?;
        let mut scratch = Scratch::default();
        for (r, draw) in draws.iter().enumerate() {
            let expected = draw.report(&logits[r], r, &mut scratch).token;
            let what = format!("round {round}, row {r} by {draw:?}");
            same(&what, &session.outputs.rows[r].token, &expected)?;
            let wants = matches!(draw.output, RowOutput::Logprobs { .. });
            same(&what, &session.outputs.rows[r].logprob.is_some(), &wants)?;
        }
    }
    Ok(())
}

fn embeddings(backend: &dyn Backend) -> Checked {
    for variant in VARIANTS {
        let mut session = Session::new(backend, variant)?;
        let tokens = session.tokens(4, 12);
        let feeds = token_feeds(&tokens);
        let pages = pages(0);
        let plain = session.feed(&pages, 0, &feeds, 8, None)?;
        let (weights, table) = (Arc::clone(&session.model.weights), session.model.embedding);
        let width = session
            .plan
            .input_width()
            .expect("a model takes embeddings");
        let scale = (width as f32).sqrt();
        let row_of = |token: TokenId| {
            let mut row = vec![0.0; width];
            let matrix = weights.matrix(table);
            let bytes = weights.row(table, 0, token as usize);
            matrix.quant.dequantize(bytes, &mut row);
            row.iter().map(|x| x * scale).collect::<Vec<f32>>()
        };
        let rows: Vec<Vec<f32>> = tokens.iter().map(|token| row_of(*token)).collect();
        let embedded = |token: &dyn Fn(usize) -> TokenId| -> Vec<Feed<'_>> {
            let feed = |(place, row)| match place {
                3..7 | 10 => Feed::Embedding {
                    row,
                    token: token(place),
                },
                _ => feeds[place],
            };
            rows.iter()
                .map(Vec::as_slice)
                .enumerate()
                .map(feed)
                .collect()
        };
        let found = session.feed(&pages, 0, &embedded(&|place| tokens[place]), 8, None)?;
        let joined = found.concat();
        near("its own embedding", &joined, &plain.concat())?;
        let padded = session.feed(&pages, 0, &embedded(&|_| 0), 8, None)?;
        // Only per-layer tables look at the token beside it.
        if variant == Variant::E2b {
            far(
                "per-layer inputs of another token",
                &padded.concat(),
                &joined,
            )?;
        } else {
            near("another token beside it", &padded.concat(), &joined)?;
        }
    }
    Ok(())
}

fn spans(backend: &dyn Backend) -> Checked {
    for variant in [Variant::Dense12b, Variant::Moe26b] {
        let logits = |backend: &dyn Backend, seed, both_ways| -> Result<Vec<f32>, String> {
            let mut session = Session::new(backend, variant)?;
            let tokens = session.tokens(6, 90);
            let pages = Pages::new(&session.plan, session.options.pages);
            let pages = pages.tables().map(<[PageId]>::to_vec);
            let width = session
                .plan
                .input_width()
                .expect("a model takes embeddings");
            let mut random = SplitMix64::new(seed);
            let image: Vec<f32> = (0..60 * width).map(|_| random.gauss()).collect();
            // Longer than the window, and across a page's border.
            let span = 10..70;
            let mut feeds = token_feeds(&tokens);
            for (place, row) in span.clone().zip(image.chunks(width)) {
                feeds[place] = Feed::Embedding { row, token: 0 };
            }
            let end = |place: usize| if span.contains(&place) { 70 } else { place + 1 };
            let ends: Vec<u32> = (5..80).map(|place| end(place) as u32).collect();
            session.feed(&pages, 0, &feeds[..5], 0, None)?;
            let ends = Some(&ends[..]).filter(|_| both_ways);
            let mut all = session.feed(&pages, 5, &feeds[5..80], 8, ends)?;
            all.extend(session.feed(&pages, 80, &feeds[80..84], 4, None)?);
            Ok(all.concat())
        };
        // A near tie of the router may go either way in one image, and then shows in all that see it; not in each of three.
        let mut images = Vec::new();
        for seed in [8, 9, 12] {
            let expected = logits(&Reference, seed, true)?;
            images.push(near("an image", &logits(backend, seed, true)?, &expected));
            let causal = logits(backend, seed, false)?;
            far("an image that is causal", &causal, &expected)?;
        }
        let with_experts = variant == Variant::Moe26b;
        if !(with_experts && images.iter().any(Result::is_ok)) {
            images.into_iter().collect::<Checked>()?;
        }
    }
    Ok(())
}

fn undrawn(backend: &dyn Backend) -> Checked {
    let mut session = Session::new(backend, Variant::E2b)?;
    let tokens = session.tokens(1, 9);
    let feeds = token_feeds(&tokens);
    let pages = pages(0);
    let expected = session.feed(&pages, 0, &feeds, 1, None)?;
    for given_up in 1..3 {
        let run = Run {
            rows: 0..6,
            position: 0,
            pages: tables(&pages),
            sampled: 2,
            visible_end: None,
            table: None,
        };
        let batch = Batch {
            feeds: &feeds[..6],
            runs: &[run],
        };
        for _ in 0..given_up {
            let ticket = session
                .executor
                .submit(&batch)
                .map_err(|error| error.to_string())?;
            session.draw_and_collect(ticket, &[])?;
            same("rows of a batch given up", &session.outputs.rows.len(), &0)?;
        }
        let found = session.feed(&pages, 6, &feeds[6..], 1, None)?;
        near("after a batch given up", &found[0], &expected[0])?;
    }
    Ok(())
}

fn refusals(backend: &dyn Backend) -> Checked {
    let mut session = Session::new(backend, Variant::Dense12b)?;
    let tokens = session.tokens(1, 9);
    let feeds = token_feeds(&tokens);
    let pages = pages(0);
    let expected = session.feed(&pages, 0, &feeds, 1, None)?;
    let refused = |what: &str, result: Result<(), BackendError>| match result {
        Err(BackendError::Unsupported { .. }) => Ok(()),
        other => Err(format!("{what}: {other:?}")),
    };
    let narrow = [0.0; 3];
    let beyond = session.plan.vocab() as TokenId;
    let odd = [
        ("a token outside the vocabulary", Feed::Token(beyond)),
        ("a sample of no batch in flight", Feed::Sampled(0)),
        (
            "an embedding of another width",
            Feed::Embedding {
                row: &narrow,
                token: 0,
            },
        ),
    ];
    let run = |visible_end, sampled| Run {
        rows: 0..2,
        position: 7,
        pages: tables(&pages),
        sampled,
        visible_end,
        table: None,
    };
    for (what, feed) in odd {
        let batch = Batch {
            feeds: &[feeds[7], feed],
            runs: &[run(None, 1)],
        };
        refused(what, session.executor.submit(&batch).map(drop))?;
    }
    let odd_ends = [
        ("a row that sees beyond its run", [8, 10]),
        ("a row that does not see itself", [7, 9]),
    ];
    for (what, ends) in &odd_ends {
        let batch = Batch {
            feeds: &feeds[7..],
            runs: &[run(Some(ends.as_slice()), 1)],
        };
        refused(what, session.executor.submit(&batch).map(drop))?;
    }
    let moves = [PageMove::Save {
        group: KvGroup::Full,
        from: PageId(0),
        to: HostPageId(6),
    }];
    let moved = session.executor.move_pages(&moves);
    refused("a place in host memory that is not there", moved)?;
    let page = session.executor.host_page(KvGroup::Full, HostPageId(6));
    refused("the bytes of a place that is not there", page.map(drop))?;
    let batch = Batch {
        feeds: &feeds[7..],
        runs: &[run(None, 1)],
    };
    let sampling = Sampling::greedy();
    let columns = session.plan.columns(session.plan.logits);
    let masks = [
        ("a mask without a token", TokenMask::none(columns)),
        ("a mask of another vocabulary", TokenMask::of(7, [1])),
    ];
    for (what, mask) in &masks {
        let draw = Draw {
            mask: Some(mask),
            ..Draw::logits(&sampling)
        };
        let ticket = session
            .executor
            .submit(&batch)
            .map_err(|error| error.to_string())?;
        refused(what, session.executor.draw(&ticket, &[draw]))?;
        refused("no draw", session.executor.draw(&ticket, &[]))?;
        session.draw_and_collect(ticket, &[])?;
    }
    let found = session.feed(&pages, 7, &feeds[7..], 1, None)?;
    near("after refusals", &found[0], &expected[0])?;
    // Entries behind the window are not looked at, whatever they are.
    let mut freed = pages.clone();
    freed.full[0] = PageId::FREED;
    let run = Run {
        rows: 0..1,
        position: PAGE_TOKENS,
        pages: tables(&freed),
        sampled: 1,
        visible_end: None,
        table: None,
    };
    let batch = Batch {
        feeds: &feeds[..1],
        runs: &[run],
    };
    let submitted = session.executor.submit(&batch).map(drop);
    refused("a freed page of a full-attention layer", submitted)
}

#[cfg(test)]
mod tests {
    use carat_model::backend::TableRef;

    use super::*;

    #[test]
    fn the_reference_keeps_every_promise() {
        for promise in ALL {
            assert_eq!(promise.check(&Reference), Ok(()), "{}", promise.name);
        }
    }

    #[test]
    fn the_reference_refuses_tables_that_are_not_what_is_known_of_them() {
        let mut session = Session::new(&Reference, Variant::E2b).unwrap();
        let feeds = token_feeds(&[1, 2]);
        let mut submit = |pages: &PerGroup<Vec<PageId>>, unchanged: usize| {
            let unchanged = PerGroup {
                full: unchanged,
                sliding: unchanged,
            };
            let run = Run {
                rows: 0..2,
                position: 0,
                pages: tables(pages),
                sampled: 0,
                visible_end: None,
                table: Some(TableRef { id: 4, unchanged }),
            };
            let batch = Batch {
                feeds: &feeds,
                runs: &[run],
            };
            session.executor.submit(&batch).map(drop)
        };
        let (own, others) = (pages(0), pages(1));
        assert!(submit(&own, 1).is_err(), "nothing was known");
        submit(&own, 0).unwrap();
        assert!(submit(&others, 1).is_err(), "another page");
        submit(&own, 3).unwrap();
        let mut freed = own.clone();
        freed.sliding[2] = PageId::FREED;
        submit(&freed, 3).unwrap();
        assert!(submit(&own, 4).is_err(), "more than there are");
    }
}
