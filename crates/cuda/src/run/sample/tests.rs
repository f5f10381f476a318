use carat_model::sampling::{self, random};

use super::*;
use crate::{
    config::Tier,
    device::Address,
    kernel::{RowsAt, sample_specialization},
    run::graph::Graph,
    testing::{Card, at, normals},
};

/// A batch's words, with room for as many rows.
struct Words {
    words: Vec<u32>,
    draw: Draw,
}

const COUNT_AT: usize = 0;
const IN_FLIGHT_AT: usize = 1;
const SETTINGS_AT: usize = 4;

/// Samplings per timed graph.
const REPEATS: u32 = 20;

fn words(rows_to_sample: &[RowToSample<'_>], vocab: usize, in_flight: u32) -> Option<Words> {
    let at = SettingsAt {
        settings: SETTINGS_AT,
        most_rows: rows_to_sample.len(),
        changes: SETTINGS_AT + rows_to_sample.len() * SETTING_WORDS,
    };
    let mut words = vec![0; at.changes + CHANGE_WORDS];
    let (draw, end) = write(rows_to_sample, vocab, &at, &mut words)?;
    words.truncate(end);
    words[COUNT_AT] = rows_to_sample.len() as u32;
    words[IN_FLIGHT_AT] = in_flight;
    Some(Words { words, draw })
}

struct Bench {
    card: Card,
    module: Arc<Module>,
}

impl Bench {
    fn open() -> Bench {
        let card = Card::open(Tier::Best);
        let module = Arc::new(card.load(&sample_specialization()));
        Bench { card, module }
    }

    fn is_emulated(&self) -> bool {
        self.card.device.name.contains("emulated")
    }

    fn sampler(
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
        let module = Arc::clone(&self.module);
        Sampler::new(&self.card.device, module, vocab, rows, &inputs).expect("memory")
    }

    /// The device's tokens, twice: nothing may be left of the first time.
    fn tokens(&self, logits: &[f32], rows_to_sample: &[RowToSample<'_>]) -> Vec<TokenId> {
        let (rows, vocab) = (rows_to_sample.len(), logits.len() / rows_to_sample.len());
        let run = |in_flight: usize| -> Vec<TokenId> {
            let words =
                words(rows_to_sample, vocab, in_flight as u32).expect("the device takes it");
            let (on_device, buffer) = (self.card.upload(&words.words), self.card.upload(logits));
            let samples = self.card.upload(&vec![7u32; rows + 3]);
            let sampler = self.sampler(
                &on_device,
                buffer.address(),
                samples.address(),
                (vocab, rows + 3),
            );
            // As in a graph of a larger bucket: rows that are not there do no harm.
            sampler
                .run(words.draw, rows + 3, || Ok(()))
                .expect("launches");
            self.card.device.wait("sampling").expect("runs");
            let tokens: Vec<TokenId> = sampler.tokens(in_flight, rows).collect();
            let samples = self.card.download::<u32>(&samples, rows + 3);
            assert_eq!(samples, [tokens.as_slice(), &[7; 3]].concat());
            tokens
        };
        let found = run(0);
        assert_eq!(found, run(1));
        found
    }
}

fn reference(logits: &[f32], wish: &RowToSample<'_>) -> TokenId {
    let RowToSample {
        sampling,
        history,
        position,
    } = *wish;
    let scratch = &mut sampling::Scratch::default();
    sampling::sample(logits, sampling, history, None, position, scratch)
}

/// The score that the draw compares, for a token whose logit nothing changes.
fn score(logits: &[f32], wish: &RowToSample<'_>, token: TokenId) -> f64 {
    let largest = logits.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    let bits = (random(wish.sampling.seed, wish.position as u64, token) >> 40) as f64;
    let uniform = (bits + 0.5) / f64::from(1u32 << 24);
    f64::from((logits[token as usize] - largest) / wish.sampling.temperature) - (-uniform.ln()).ln()
}

/// Another library's logarithm or exponential may differ in its last bit. So two scores that close may change order, and
/// so may the token at which the sum of probabilities is reached.
fn is_near_tie(logits: &[f32], wish: &RowToSample<'_>, found: TokenId, expected: TokenId) -> bool {
    let (a, b) = (score(logits, wish, found), score(logits, wish, expected));
    let other_sum = |factor: f32| {
        let sampling = Sampling {
            top_p: wish.sampling.top_p * factor,
            ..wish.sampling.clone()
        };
        let other = RowToSample {
            sampling: &sampling,
            ..*wish
        };
        reference(logits, &other) == found
    };
    (a - b).abs() <= 1e-6 * a.abs().max(1.0) || other_sum(1.0 - 1e-6) || other_sum(1.0 + 1e-6)
}

fn check(bench: &Bench, logits: &[f32], rows_to_sample: &[RowToSample<'_>]) {
    let vocab = logits.len() / rows_to_sample.len();
    let found = bench.tokens(logits, rows_to_sample);
    for (r, (row, wish)) in logits.chunks(vocab).zip(rows_to_sample).enumerate() {
        let expected = reference(row, wish);
        let near = || !bench.is_emulated() && is_near_tie(row, wish, found[r], expected);
        assert!(
            found[r] == expected || near(),
            "row {r} of {vocab} logits: {} where the reference has {expected}: {:?}",
            found[r],
            wish.sampling
        );
    }
}

fn check_all(bench: &Bench, logits: &[f32], settings: &[Sampling], history: &[TokenId]) {
    let wish = |(position, sampling)| RowToSample {
        sampling,
        history,
        position,
    };
    let rows_to_sample: Vec<RowToSample<'_>> = settings.iter().enumerate().map(wish).collect();
    check(bench, logits, &rows_to_sample);
}

/// Settings of every kind that the device takes.
fn some_sampling(seed: u64, vocab: usize) -> Sampling {
    let pick = |what: u64, of: u64| random(seed, what, 0) % of;
    let part = |what: u64| pick(what, 1000) as f32 / 1000.0;
    let top_k = [0, 1, 2, 7, 40, 64, 64, 1024][pick(1, 8) as usize];
    let bias = |i: u64| {
        (
            pick(10 + i, vocab as u64) as TokenId,
            8.0 * part(20 + i) - 4.0,
        )
    };
    Sampling {
        temperature: [0.0, 0.3, 0.7, 1.0, 1.0, 2.5][pick(2, 6) as usize],
        top_k,
        top_p: if top_k == 0 || pick(3, 3) == 0 {
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
            check_all(&bench, &logits, &settings, &history);
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
    for row in rows {
        let settings = kinds();
        let logits = row.repeat(settings.len());
        check_all(&bench, &logits, &settings, &[]);
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
        let settings: Vec<Sampling> = kinds().into_iter().take(4).map(with_bias).collect();
        let history = [77, 77, 1, 78, 9999, 2499];
        check_all(&bench, &row.repeat(settings.len()), &settings, &history);
    }
}

#[test]
fn what_the_device_does_not_take_is_left_to_the_host() {
    let taken = |sampling: &Sampling, history: &[TokenId]| {
        let wish = RowToSample {
            sampling,
            history,
            position: 9,
        };
        words(&[wish], 100, 0).map(|w| w.draw)
    };
    let base = Sampling::default();
    let greedy = Sampling {
        top_k: 5000,
        ..Sampling::greedy()
    };
    assert_eq!(taken(&greedy, &[]), Some(Draw::Greedy));
    assert_eq!(taken(&base, &[]), Some(Draw::Best));
    let top_k = |top_k, top_p| Sampling {
        top_k,
        top_p,
        ..base.clone()
    };
    assert_eq!(taken(&top_k(0, 1.0), &[]), Some(Draw::All));
    assert_eq!(taken(&top_k(0, 0.9), &[]), None);
    assert_eq!(taken(&top_k(1025, 1.0), &[]), None);
    let bias = Sampling {
        logit_bias: vec![(1, 1.0); 20_000],
        ..base
    };
    assert_eq!(taken(&bias, &[]), None);
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
        sampling: &sampling,
        history: &[7, 9, 3, 9, 9],
        position: 5,
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

#[test]
#[ignore = "needs a card"]
#[expect(clippy::print_stdout, reason = "a table of times")]
fn sample_timing() {
    let bench = Bench::open();
    let vocab = 262_144;
    let open = Sampling {
        top_k: 0,
        top_p: 1.0,
        ..Sampling::default()
    };
    let penalized = Sampling {
        repeat_penalty: 1.1,
        ..Sampling::default()
    };
    let cases = [
        ("greedy", Sampling::greedy()),
        (
            "top-k 64",
            Sampling {
                top_p: 1.0,
                ..Sampling::default()
            },
        ),
        ("top-k 64, top-p 0.95", Sampling::default()),
        ("the same, penalties", penalized),
        (
            "top-k 1024, top-p 0.95",
            Sampling {
                top_k: 1024,
                ..Sampling::default()
            },
        ),
        ("whole vocabulary", open),
    ];
    for rows in [1, 8] {
        // Logits come from a kernel that has just written them, so they lie in L2.
        let logits: Vec<f32> = normals(5, vocab * rows).iter().map(|x| 3.0 * x).collect();
        let buffer = bench.card.upload(&logits);
        for (name, sampling) in &cases {
            let wish = RowToSample {
                sampling,
                history: &[5; 64],
                position: 3,
            };
            let words = words(&vec![wish; rows], vocab, 0).expect("the device takes it");
            let on_device = bench.card.upload(&words.words);
            let samples = bench.card.upload(&vec![0u32; rows]);
            let sampler = bench.sampler(
                &on_device,
                buffer.address(),
                samples.address(),
                (vocab, rows),
            );
            // As in a graph of a whole step: launches do not wait for the host.
            let stream = bench.card.device.captured_stream();
            let graph = Graph::capture(stream, || {
                (0..REPEATS).try_for_each(|_| sampler.run(words.draw, rows, || Ok(())))
            });
            let graph = graph.expect("captures");
            let launch = |_| graph.launch().expect("launches");
            let time = bench.card.time(50, launch) / REPEATS;
            println!(
                "sample {rows} rows, {name}: {:.2} us",
                time.as_secs_f64() * 1e6
            );
        }
    }
}
