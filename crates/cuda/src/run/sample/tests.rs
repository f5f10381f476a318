use carat_model::sampling::{self, random};

use super::*;
use crate::{
    config::Tier,
    device::Address,
    kernel::{RowsAt, sample_specializations},
    testing::{Card, at, normals},
};

/// A batch's words, with room for as many rows.
pub(crate) struct Given<'a> {
    pub(crate) words: Vec<u32>,
    pub(crate) work: Work,
    pub(crate) masks: Vec<&'a TokenMask>,
}

const COUNT_AT: usize = 0;
const IN_FLIGHT_AT: usize = 1;
const SETTINGS_AT: usize = 4;

/// `None` unless the device takes every row.
pub(crate) fn words<'a>(
    rows_to_sample: &[RowToSample<'a>],
    vocab: usize,
    in_flight: u32,
) -> Option<Given<'a>> {
    let at = SettingsAt {
        settings: SETTINGS_AT,
        max_rows: rows_to_sample.len(),
        changes: SETTINGS_AT + rows_to_sample.len() * SETTING_WORDS,
    };
    let mut words = vec![0; at.changes + CHANGE_WORDS];
    let rows: Vec<Option<RowToSample<'_>>> = rows_to_sample.iter().copied().map(Some).collect();
    let written = write(&rows, vocab, &at, &mut words)?;
    words.truncate(written.end);
    words[COUNT_AT] = rows_to_sample.len() as u32;
    words[IN_FLIGHT_AT] = in_flight;
    let all = written.taken.iter().all(|taken| *taken);
    all.then_some(Given {
        words,
        work: written.work,
        masks: written.masks,
    })
}

pub(crate) struct Bench {
    pub(crate) card: Card,
    pub(crate) modules: [Arc<Module>; 3],
}

impl Bench {
    pub(crate) fn open() -> Bench {
        let card = Card::open(Tier::Best);
        let modules = sample_specializations().map(|s| Arc::new(card.load(&s)));
        Bench { card, modules }
    }

    fn is_emulated(&self) -> bool {
        self.card.device.name.contains("emulated")
    }

    pub(crate) fn sampler(
        &self,
        words: &Buffer,
        logits: Address,
        samples: Address,
        (vocab, rows): (usize, usize),
    ) -> Sampler {
        let inputs = SamplerInputs {
            rows: RowsAt {
                count: at::<u32>(words, COUNT_AT),
                index: Address::NULL,
            },
            logits,
            settings: at::<u32>(words, SETTINGS_AT),
            words: words.address(),
            in_flight: at::<u32>(words, IN_FLIGHT_AT),
            samples,
        };
        let modules = self.modules.clone();
        Sampler::new(&self.card.device, modules, vocab, rows, &inputs).expect("memory")
    }

    /// The device's results, twice: nothing may be left of the first time.
    fn results(&self, logits: &[f32], rows_to_sample: &[RowToSample<'_>]) -> Vec<RowResult> {
        let (rows, vocab) = (rows_to_sample.len(), logits.len() / rows_to_sample.len());
        let run = |in_flight: usize| -> Vec<RowResult> {
            let words =
                words(rows_to_sample, vocab, in_flight as u32).expect("the device takes it");
            let (on_device, buffer) = (self.card.upload(&words.words), self.card.upload(logits));
            let samples = self.card.upload(&vec![7u32; rows + 3]);
            let mut sampler = self.sampler(
                &on_device,
                buffer.address(),
                samples.address(),
                (vocab, rows + 3),
            );
            let copied = sampler.copy_masks(&self.card.device, in_flight, &words.masks);
            copied.expect("copies");
            // As in a graph of a larger bucket: rows that are not there do no harm.
            sampler
                .run(words.work, rows + 3, || Ok(()))
                .expect("launches");
            self.card.device.wait("sampling").expect("runs");
            let each = rows_to_sample.iter().enumerate();
            let results: Vec<RowResult> = each
                .map(|(row, wish)| sampler.result(in_flight, row, wish.logprobs.is_some()))
                .collect();
            let tokens: Vec<TokenId> = results.iter().map(|result| result.token).collect();
            let samples = self.card.download::<u32>(&samples, rows + 3);
            assert_eq!(samples, [tokens.as_slice(), &[7; 3]].concat());
            results
        };
        let found = run(0);
        let again = run(1);
        // As text: what is not a number is the same as itself.
        assert_eq!(format!("{found:?}"), format!("{again:?}"));
        found
    }
}

fn reference(logits: &[f32], wish: &RowToSample<'_>) -> TokenId {
    let RowToSample {
        sampling,
        history,
        position,
        mask,
        ..
    } = *wish;
    let scratch = &mut sampling::Scratch::default();
    sampling::sample(logits, sampling, history, mask, position, scratch)
}

/// The score that the draw compares, for a token whose logit nothing changes.
fn score(logits: &[f32], wish: &RowToSample<'_>, token: TokenId) -> f64 {
    let largest = logits.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    let bits = (random(wish.sampling.seed, wish.position as u64, token) >> 40) as f64;
    let uniform = (bits + 0.5) / f64::from(1u32 << 24);
    f64::from((logits[token as usize] - largest) / wish.sampling.temperature) - (-uniform.ln()).ln()
}

/// Relative error of the reference's sum of all weights, which are 32-bit floats added one after another.
fn sum_error(logits: &[f32], temperature: f32) -> f32 {
    let mut sorted: Vec<f32> = logits.iter().copied().filter(|l| !l.is_nan()).collect();
    sorted.sort_unstable_by(|a, b| b.total_cmp(a));
    let weights = || sorted.iter().map(|l| ((l - sorted[0]) / temperature).exp());
    let (sum, exact) = (
        weights().sum::<f32>(),
        weights().map(f64::from).sum::<f64>(),
    );
    (f64::from(sum) / exact - 1.0).abs() as f32
}

/// Another library's logarithm or exponential may differ in its last bit. So two scores that close may change order, and
/// so may the token at which the sum of probabilities is reached.
fn is_near_tie(logits: &[f32], wish: &RowToSample<'_>, found: TokenId, expected: TokenId) -> bool {
    let (a, b) = (score(logits, wish, found), score(logits, wish, expected));
    (a - b).abs() <= 1e-6 * a.abs().max(1.0) || is_another_sum(logits, wish, found, 1e-6)
}

/// Whether the reference draws this token with a top-p that is off by up to `error`.
fn is_another_sum(logits: &[f32], wish: &RowToSample<'_>, found: TokenId, error: f32) -> bool {
    const STEPS: i32 = 16;
    (-STEPS..=STEPS).any(|step| {
        let sampling = Sampling {
            top_p: wish.sampling.top_p * (1.0 + error * step as f32 / STEPS as f32),
            ..wish.sampling.clone()
        };
        let other = RowToSample {
            sampling: &sampling,
            ..*wish
        };
        reference(logits, &other) == found
    })
}

fn check(bench: &Bench, logits: &[f32], rows_to_sample: &[RowToSample<'_>]) {
    let vocab = logits.len() / rows_to_sample.len();
    let found = bench.results(logits, rows_to_sample);
    for (r, (row, wish)) in logits.chunks(vocab).zip(rows_to_sample).enumerate() {
        let (token, expected) = (found[r].token, reference(row, wish));
        let near = || !bench.is_emulated() && is_near_tie(row, wish, token, expected);
        let another_sum = || {
            let error = 1e-6 + 2.0 * sum_error(row, wish.sampling.temperature);
            kind(wish.sampling) == Draw::Truncated && is_another_sum(row, wish, token, error)
        };
        assert!(
            token == expected || near() || another_sum(),
            "row {r} of {vocab} logits: {token} where the reference has {expected}: {:?}",
            wish.sampling
        );
        let Some(top) = wish.logprobs else {
            continue;
        };
        let (logprob, likeliest) = sampling::logprobs(row, token, top);
        let same = |found: f32, expected: f32| {
            let exact = found.to_bits() == expected.to_bits();
            let near = 4e-6 * (1.0 + expected.abs());
            exact || found.is_nan() && expected.is_nan() || (found - expected).abs() <= near
        };
        let all = found[r].top.iter().zip(&likeliest);
        let is_right = same(found[r].logprob.unwrap(), logprob)
            && found[r].top.len() == likeliest.len()
            && { all }.all(|(found, expected)| found.0 == expected.0 && same(found.1, expected.1));
        assert!(
            is_right,
            "row {r} of {vocab} logits: {:?} where the reference has {logprob}, {likeliest:?}",
            found[r]
        );
    }
}

fn check_all(bench: &Bench, logits: &[f32], settings: &[Sampling], history: &[TokenId]) {
    check_masked(bench, logits, settings, history, None);
}

/// Every other row wants log-probabilities.
fn check_masked(
    bench: &Bench,
    logits: &[f32],
    settings: &[Sampling],
    history: &[TokenId],
    mask: Option<&TokenMask>,
) {
    let wish = |(position, sampling)| RowToSample {
        sampling,
        history,
        position,
        mask,
        logprobs: (position % 2 == 1).then_some(position % (MAX_LOGPROBS + 1)),
    };
    let rows_to_sample: Vec<RowToSample<'_>> = settings.iter().enumerate().map(wish).collect();
    check(bench, logits, &rows_to_sample);
}

/// Settings of every kind that the device takes.
fn some_sampling(seed: u64, vocab: usize) -> Sampling {
    let pick = |what: u64, of: u64| random(seed, what, 0) % of;
    let part = |what: u64| pick(what, 1000) as f32 / 1000.0;
    let top_k = [0, 0, 1, 7, 40, 64, 1024, 1500][pick(1, 8) as usize];
    let bias = |i: u64| {
        (
            pick(10 + i, vocab as u64) as TokenId,
            8.0 * part(20 + i) - 4.0,
        )
    };
    Sampling {
        temperature: [0.0, 0.3, 0.7, 1.0, 1.0, 2.5][pick(2, 6) as usize],
        top_k,
        top_p: if pick(3, 3) == 0 {
            1.0
        } else {
            0.05 + 0.95 * part(4)
        },
        min_p: if pick(5, 2) == 0 { 0.0 } else { 0.2 * part(6) },
        repeat_penalty: if pick(7, 3) == 0 { 1.1 } else { 1.0 },
        presence_penalty: if pick(8, 3) == 0 { 0.6 } else { 0.0 },
        frequency_penalty: if pick(9, 3) == 0 { 0.25 } else { 0.0 },
        penalty_window: 1 + pick(30, 100) as usize,
        logit_bias: (0..pick(31, 4)).map(bias).collect(),
        seed,
    }
}

#[test]
#[ignore = "needs a card"]
fn sample_random_rows_as_the_reference_does() {
    let bench = Bench::open();
    let (batches, large) = if bench.is_emulated() {
        (4, 8192)
    } else {
        (100, 262_144)
    };
    // Odd sizes, fewer logits than the best k, and the vocabulary of a real model.
    let sizes = [
        (5usize, 3, batches),
        (1000, 16, batches),
        (4097, 17, batches),
        (large, 8, batches / 4),
    ];
    for (vocab, rows, batches) in sizes {
        for batch in 0..batches as u64 {
            let logits: Vec<f32> = normals(batch + 1, vocab * rows)
                .iter()
                .map(|x| 4.0 * x)
                .collect();
            let sampling = |r| some_sampling(batch * 1000 + r, vocab);
            let settings: Vec<Sampling> = (0..rows as u64).map(sampling).collect();
            let history: Vec<TokenId> = (0..200)
                .map(|i| (random(batch, i, 1) % vocab as u64) as TokenId)
                .collect();
            // None, a few, half of them, and all but one of eight.
            let mask = (batch % 4 != 0).then(|| {
                let (of, allowed) =
                    [(1, 1), (vocab as u64 / 3, 1), (2, 1), (8, 7)][(batch % 4) as usize];
                let all = 0..vocab as TokenId;
                let mut mask =
                    TokenMask::of(vocab, all.filter(|t| random(batch, 77, *t) % of < allowed));
                mask.allow(vocab as TokenId - 1);
                mask
            });
            check_masked(&bench, &logits, &settings, &history, mask.as_ref());
        }
    }
}

fn kinds() -> Vec<Sampling> {
    let open = Sampling {
        top_k: 0,
        top_p: 1.0,
        ..Sampling::default()
    };
    vec![
        Sampling::greedy(),
        Sampling::default(),
        open.clone(),
        Sampling {
            top_k: 1,
            ..open.clone()
        },
        Sampling {
            top_k: 1000,
            ..open.clone()
        },
        Sampling {
            min_p: 0.9,
            ..open.clone()
        },
        Sampling {
            min_p: 1.0,
            top_k: 5,
            ..open.clone()
        },
        Sampling {
            top_p: 0.5,
            ..open.clone()
        },
        Sampling {
            top_k: 2500,
            top_p: 0.9,
            ..open.clone()
        },
        Sampling {
            temperature: 1e-40,
            top_p: 0.5,
            ..open.clone()
        },
        Sampling {
            temperature: 1e-40,
            ..open
        },
        Sampling {
            temperature: 1e-40,
            ..Sampling::default()
        },
    ]
}

#[test]
#[ignore = "needs a card"]
fn sample_ties_and_what_is_not_a_number() {
    let bench = Bench::open();
    let vocab = 3000;
    let random_rows = |seed| normals(seed, vocab);
    let rows: Vec<Vec<f32>> = vec![
        vec![0.25; vocab],
        vec![f32::NEG_INFINITY; vocab],
        vec![f32::NAN; vocab],
        // Few different numbers: ties at every border.
        random_rows(1).iter().map(|x| x.round()).collect(),
        // Both zeros are one number.
        (0..vocab)
            .map(|i| if i % 3 == 0 { -0.0 } else { 0.0 })
            .collect(),
        (0..vocab)
            .map(|i| if i < 7 { f32::NAN } else { f32::NEG_INFINITY })
            .collect(),
        (0..vocab)
            .map(|i| {
                if i % 5 == 0 {
                    f32::NAN
                } else {
                    i as f32 * 1e-3
                }
            })
            .collect(),
        (0..vocab)
            .map(|i| if i == 2999 { 1.0 } else { f32::NEG_INFINITY })
            .collect(),
        // All of the best in a few chunks, in both orders.
        (0..vocab).map(|i| -(i as f32)).collect(),
        (0..vocab).map(|i| i as f32 * 0.01).collect(),
    ];
    let mask = TokenMask::of(vocab, (0..vocab as TokenId).filter(|t| t % 7 == 3));
    for row in rows {
        let settings = kinds();
        let logits = row.repeat(settings.len());
        check_all(&bench, &logits, &settings, &[]);
        check_masked(&bench, &logits, &settings, &[], Some(&mask));
    }
}

#[test]
#[ignore = "needs a card"]
fn sample_truncated_where_many_tokens_crowd() {
    let bench = Bench::open();
    let vocab = 5000;
    let open = Sampling {
        top_k: 0,
        top_p: 0.6,
        ..Sampling::default()
    };
    // More in one bucket than are sorted: split again, or, where all are one number, found bit by bit.
    let rows: [Vec<f32>; 3] = [
        normals(1, vocab),
        vec![1.5; vocab],
        normals(2, vocab)
            .iter()
            .map(|x| (x * 4.0).round())
            .collect(),
    ];
    let settings = [
        Sampling {
            temperature: 100.0,
            ..open.clone()
        },
        Sampling {
            temperature: 1000.0,
            top_k: 4000,
            ..open.clone()
        },
        Sampling {
            temperature: 30.0,
            top_k: 3000,
            top_p: 1.0,
            ..open.clone()
        },
        Sampling {
            temperature: 0.01,
            top_k: 4999,
            ..open
        },
    ];
    for row in rows {
        check_all(&bench, &row.repeat(settings.len()), &settings, &[]);
    }
}

#[test]
#[ignore = "needs a card"]
fn sample_forbidden_and_favoured_tokens() {
    let bench = Bench::open();
    let vocab = 2500;
    let mut row = normals(3, vocab);
    row[77] = 50.0;
    row[78] = -50.0;
    let forbid = |token| (token, f32::NEG_INFINITY);
    let biases: [Vec<(TokenId, f32)>; 4] = [
        vec![forbid(77)],
        // One token twice, in an order that shows, and one outside the vocabulary.
        vec![(78, 1e8), (78, 3.0), (78, -1e8), (9999, 1.0)],
        (0..vocab as TokenId)
            .filter(|t| *t != 2100)
            .map(forbid)
            .collect(),
        (0..vocab as TokenId).map(forbid).collect(),
    ];
    for bias in biases {
        let with_bias = |s: Sampling| Sampling {
            logit_bias: bias.clone(),
            repeat_penalty: 1.3,
            ..s
        };
        // As many as there is room for all biases of.
        let kinds = kinds();
        let some = [0, 1, 2, 3, 7, 8].map(|kind: usize| kinds[kind].clone());
        let settings = some.map(with_bias);
        let history = [77, 77, 1, 78, 9999, 2499];
        check_all(&bench, &row.repeat(settings.len()), &settings, &history);
    }
}

#[test]
fn rows_of_every_sampling_are_taken_while_there_is_room() {
    let work = |sampling: &Sampling| {
        let wish = RowToSample {
            sampling,
            ..plain(sampling)
        };
        words(&[wish], 100, 0).map(|w| w.work.draw)
    };
    let base = Sampling::default();
    let greedy = Sampling {
        top_k: 5000,
        ..Sampling::greedy()
    };
    assert_eq!(work(&greedy), Some(Draw::Greedy));
    assert_eq!(work(&base), Some(Draw::Best));
    let top_k = |top_k, top_p| Sampling {
        top_k,
        top_p,
        ..base.clone()
    };
    assert_eq!(work(&top_k(0, 1.0)), Some(Draw::All));
    assert_eq!(work(&top_k(0, 0.9)), Some(Draw::Truncated));
    assert_eq!(work(&top_k(1025, 1.0)), Some(Draw::Truncated));
    let bias = Sampling {
        logit_bias: vec![(1, 1.0); 20_000],
        ..base
    };
    assert_eq!(work(&bias), None);
}

fn plain(sampling: &Sampling) -> RowToSample<'_> {
    RowToSample {
        sampling,
        history: &[],
        position: 9,
        mask: None,
        logprobs: None,
    }
}

#[test]
fn a_row_that_does_not_fit_leaves_the_others_on_the_device() {
    let (open, crowded) = (
        Sampling::default(),
        Sampling {
            logit_bias: vec![(1, 1.0); CHANGE_WORDS / CHANGE - 2],
            ..Sampling::default()
        },
    );
    let few = Sampling {
        logit_bias: vec![(1, 1.0); 3],
        ..Sampling::default()
    };
    let mask = TokenMask::of(100, [5]);
    let masked = RowToSample {
        mask: Some(&mask),
        ..plain(&open)
    };
    let each = [
        Some(plain(&crowded)),
        Some(masked),
        Some(plain(&few)),
        None,
        Some(masked),
        Some(masked),
    ];
    let at = SettingsAt {
        settings: 0,
        max_rows: 5,
        changes: 5 * SETTING_WORDS,
    };
    let mut words = vec![0; at.changes + CHANGE_WORDS];
    let written = write(&each, 100, &at, &mut words).unwrap();
    assert_eq!(written.taken, [true, true, false, false, true, false]);
    assert_eq!(written.masks.len(), 2);
    assert_eq!(written.end, at.changes + CHANGE_WORDS - 2 * CHANGE);
    let masks: Vec<u32> = (0..5).map(|r| words[(r + 1) * SETTING_WORDS - 2]).collect();
    assert_eq!(masks, [NONE, 0, NONE, NONE, 1]);
}

#[test]
fn whole_logits_and_many_log_probabilities_are_the_hosts() {
    let sampling = Sampling::default();
    let taken = |output| {
        let draw = model::Draw {
            output,
            ..model::Draw::logits(&sampling)
        };
        RowToSample::of(&draw, 3).map(|row| row.logprobs)
    };
    assert_eq!(taken(RowOutput::Token), Some(None));
    assert_eq!(taken(RowOutput::Logprobs { top: 20 }), Some(Some(20)));
    assert_eq!(taken(RowOutput::Logprobs { top: 21 }), None);
    assert_eq!(taken(RowOutput::Logits), None);
}

#[test]
fn changes_are_sorted_by_token_and_in_order() {
    let sampling = Sampling {
        presence_penalty: 1.0,
        frequency_penalty: 0.5,
        penalty_window: 4,
        logit_bias: vec![(9, 2.0), (3, 1.0), (9, 3.0), (100, 1.0)],
        ..Sampling::default()
    };
    let wish = RowToSample {
        history: &[7, 9, 3, 9, 9],
        ..plain(&sampling)
    };
    let found: Vec<(u32, u32, f32)> = changes(&wish, 100)
        .iter()
        .map(|c| (c.token, c.seen, c.by))
        .collect();
    let expected = [
        (3, 1, 1.5),
        (3, 0, 1.0),
        (9, 1, 2.5),
        (9, 0, 2.0),
        (9, 0, 3.0),
    ];
    assert_eq!(found, expected);
}
