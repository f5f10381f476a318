//! Sampling, by settings and rows.

use carat_model::{
    TokenId,
    sampling::{Sampling, TokenMask},
};

use crate::{
    run::{
        graph::Graph,
        sample::{
            RowToSample,
            tests::{Bench, words},
        },
    },
    testing::normals,
};

/// Samplings per timed graph.
const REPEATS: u32 = 20;

pub(crate) fn all() {
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
    let truncated = |top_k, top_p| Sampling {
        top_k,
        top_p,
        ..Sampling::default()
    };
    let mask = TokenMask::of(vocab, (0..vocab as TokenId).filter(|t| t % 3 == 0));
    let (whole, masked) = (None, Some(&mask));
    let cases = [
        ("greedy", Sampling::greedy(), whole, None),
        ("greedy, mask", Sampling::greedy(), masked, None),
        (
            "greedy, 5 log-probabilities",
            Sampling::greedy(),
            whole,
            Some(5),
        ),
        ("top-k 64", truncated(64, 1.0), whole, None),
        ("top-k 64, top-p 0.95", Sampling::default(), whole, None),
        ("the same, mask", Sampling::default(), masked, None),
        ("the same, penalties", penalized, whole, None),
        ("top-k 1024, top-p 0.95", truncated(1024, 0.95), whole, None),
        ("top-k 4096, top-p 0.95", truncated(4096, 0.95), whole, None),
        ("top-p 0.9", truncated(0, 0.9), whole, None),
        ("top-p 0.9, mask", truncated(0, 0.9), masked, None),
        ("whole vocabulary", open, whole, None),
    ];
    for rows in [1, 8, 64] {
        // Logits come from a kernel that has just written them, so they lie in L2.
        let logits: Vec<f32> = normals(5, vocab * rows).iter().map(|x| 3.0 * x).collect();
        let buffer = bench.card.upload(&logits);
        for (name, sampling, mask, logprobs) in &cases {
            let wish = RowToSample {
                sampling,
                history: &[5; 64],
                position: 3,
                mask: *mask,
                logprobs: *logprobs,
            };
            let words = words(&vec![wish; rows], vocab, 0).expect("the device takes it");
            let on_device = bench.card.upload(&words.words);
            let samples = bench.card.upload(&vec![0u32; rows]);
            let mut sampler = bench.sampler(
                &on_device,
                buffer.address(),
                samples.address(),
                (vocab, rows),
            );
            let copied = sampler.copy_masks(&bench.card.device, 0, &words.masks);
            copied.expect("copies");
            bench.card.device.wait("copying masks").expect("runs");
            // As in a graph of a whole step: launches do not wait for the host.
            let stream = bench.card.device.captured_stream();
            let graph = Graph::capture(stream, || {
                (0..REPEATS).try_for_each(|_| sampler.run(words.work, rows, || Ok(())))
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
