//! Draft models: steps against a published implementation, drafts that change no token, and the same bits however they are
//! launched.

mod harness;

use std::sync::Arc;

use carat_cuda::{CudaBackend, CudaConfig, Fusion, Graphs, Pdl, TableMemory, Tier};
use carat_model::gemma4_assistant::Head;
use carat_testkit::{
    drafting::Drafting,
    pairs::{self, Pair},
};
use libtest_mimic::{Failed, Trial};

/// Error of keys and values in f16, over a whole model.
const F16_ERROR: f64 = 5e-3;
/// Text models of the same kinds are within this of the published logits where products are of int8: where the peer's engine is.
const INT8_ERROR: f64 = 0.11;

/// The same card with different settings.
#[derive(Clone)]
struct Cards {
    plain: Arc<CudaBackend>,
    best: Arc<CudaBackend>,
    portable: Arc<CudaBackend>,
    /// The best kernels, launched and fed in other ways.
    others: [Arc<CudaBackend>; 3],
}

impl Cards {
    fn open() -> Result<Cards, String> {
        let best = |change: fn(&mut CudaConfig)| {
            harness::open(|config| {
                config.tier = Tier::Best;
                change(config);
            })
        };
        Ok(Cards {
            plain: best(|config| config.fusion = Fusion::Off)?,
            best: best(|_| {})?,
            portable: best(|config| config.tier = Tier::Portable)?,
            others: [
                best(|config| config.graphs = Graphs::Off)?,
                best(|config| config.pdl = Pdl::Off)?,
                best(|config| config.tables = TableMemory::Host)?,
            ],
        })
    }
}

type Card = fn(&Cards) -> &CudaBackend;
type Check = Box<dyn Fn(&Cards) -> Result<(), String> + Send>;

fn main() {
    let cards = Cards::open();
    let mut trials = Vec::new();
    let mut add = |name: String, check: Check| {
        let cards = cards.as_ref().ok().cloned();
        let ignored = cards.is_none();
        let trial = Trial::test(name, move || {
            check(&cards.ok_or("no card")?).map_err(Failed::from)
        });
        trials.push(trial.with_ignored_flag(ignored));
    };
    let ways: [(&str, Card, f64); 3] = [
        ("plain", |cards| &cards.plain, F16_ERROR),
        ("best", |cards| &cards.best, INT8_ERROR),
        ("portable", |cards| &cards.portable, INT8_ERROR),
    ];
    for (how, card, bound) in ways {
        for name in pairs::ALL {
            add(
                format!("steps/{name}/{how}"),
                Box::new(move |cards| steps(card(cards), name, bound)),
            );
            add(
                format!("answers/{name}/{how}"),
                Box::new(move |cards| answers(card(cards), name)),
            );
            add(
                format!("rounds/{name}/{how}"),
                Box::new(move |cards| rounds(card(cards), name, bound)),
            );
        }
        add(
            format!("demo/{how}"),
            Box::new(move |cards| demo(card(cards))),
        );
    }
    for name in pairs::ALL {
        add(
            format!("exact/{name}"),
            Box::new(move |cards| exact(cards, name)),
        );
    }
    harness::run(cards.map(drop), trials);
}

fn steps(card: &CudaBackend, name: &'static str, bound: f64) -> Result<(), String> {
    let pair = Pair::load(name);
    for case in &pair.cases {
        for (head, steps) in [
            (Head::Clusters, &case.steps),
            (Head::Dense, &case.dense_steps),
        ] {
            let mut drafting = Drafting::new(card, &pair, head, case.prompt.len() + 8);
            // Later steps follow tokens that rounding may have changed.
            let errors = drafting.errors(case, &steps[..steps.len().min(1)]);
            let largest = errors.hidden.max(errors.logits).max(errors.state);
            if largest > bound {
                return Err(format!("{head:?} after {}: {errors:?}", case.prompt.len()));
            }
        }
    }
    Ok(())
}

/// Drafted and verified answers are those of plain decoding, whatever the length of drafts and however many of their tokens are
/// right. The drafter's own may all be wrong: its target is random, and was rounded otherwise when it was fitted.
fn answers(card: &CudaBackend, name: &'static str) -> Result<(), String> {
    let pair = Pair::load(name);
    for (case, length) in pair.cases.iter().zip([1, 5]) {
        let most = case.greedy.len();
        let tokens = case.prompt.len() + most + length + 1;
        let new = || Drafting::new(card, &pair, Head::Clusters, tokens);
        let plain = new().plain(&case.prompt, most, &pair.stop);
        let (answer, _) = new().speculative(&case.prompt, (most, length), &pair.stop);
        if answer != plain {
            return Err(format!("{answer:?} instead of {plain:?} by {length}"));
        }
        let (answer, rounds) = new().misled(&case.prompt, &plain, length);
        if answer != plain {
            return Err(format!(
                "{answer:?} instead of {plain:?}, misled by {length}"
            ));
        }
        for (i, (draft, accepted)) in rounds.iter().enumerate() {
            let right = (i % (length + 1)).min(draft.len());
            if *accepted != right {
                return Err(format!(
                    "round {i}: {accepted} of {draft:?} accepted, {right} are right"
                ));
            }
        }
    }
    Ok(())
}

/// Drafts and what is accepted of them at every place of the published text, but for near ties.
fn rounds(card: &CudaBackend, name: &'static str, bound: f64) -> Result<(), String> {
    let pair = Pair::load(name);
    for case in &pair.cases {
        let tokens = case.prompt.len() + case.greedy.len() + case.most + 1;
        let replay = Drafting::new(card, &pair, Head::Clusters, tokens).replay(case);
        if !replay.agrees(bound) {
            return Err(format!("after {}: {replay:?}", case.prompt.len()));
        }
    }
    Ok(())
}

/// Rounding may turn a token over where two are nearly as likely, but not one of this backend's own.
fn demo(card: &CudaBackend) -> Result<(), String> {
    let pair = Pair::demo();
    let (mut same, mut passes, mut tokens) = (0, 0, 0);
    for case in &pair.cases {
        let most = case.greedy.len();
        let room = case.prompt.len() + most + case.most + 1;
        let new = || Drafting::new(card, &pair, Head::Dense, room);
        let plain = new().plain(&case.prompt, most, &pair.stop);
        let (answer, rounds) = new().speculative(&case.prompt, (most, case.most), &pair.stop);
        if answer != plain {
            return Err(format!("{answer:?} instead of {plain:?}"));
        }
        same += usize::from(answer == case.greedy && rounds == case.rounds);
        passes += rounds.len();
        tokens += answer.len() - 1;
    }
    let all = pair.cases.len();
    if same + 2 < all || (tokens as f64) < 3.4 * passes as f64 {
        return Err(format!(
            "{same} of {all} as published; {tokens} tokens in {passes} passes"
        ));
    }
    Ok(())
}

/// Captured or not, overlapped or not, with tables here or there: the same bits, the first time and when replayed.
fn exact(cards: &Cards, name: &'static str) -> Result<(), String> {
    let pair = Pair::load(name);
    let case = &pair.cases[0];
    let drafted = |card: &CudaBackend| {
        let mut drafting = Drafting::new(card, &pair, Head::Clusters, case.prompt.len() + 8);
        drafting.feed(&case.prompt, 0, 1);
        let mut draft = || {
            let tokens = drafting.draft(0, case.next, case.prompt.len(), 3);
            let bits: Vec<u32> = drafting
                .draft_logits()
                .iter()
                .map(|x| x.to_bits())
                .collect();
            (tokens, bits)
        };
        [draft(), draft(), draft()]
    };
    let expected = drafted(&cards.best);
    if expected[0] != expected[1] || expected[0] != expected[2] {
        return Err("replayed to other bits".to_owned());
    }
    for (i, other) in cards.others.iter().enumerate() {
        if drafted(other) != expected {
            return Err(format!("way {i}: other bits"));
        }
    }
    Ok(())
}
