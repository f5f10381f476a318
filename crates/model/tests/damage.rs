//! Damaged files: each fixture cut short, with bits flipped and with numbers overwritten, thousands of times. Loading may
//! fail or not; it must never panic, and what still loads must still run.

use std::sync::Arc;

use carat_gguf::Gguf;
use carat_model::{
    Model, ModelError, backend::Backend, evaluate, gemma4, reference::Reference, sampling::random,
};
use carat_testkit::fixtures::{self, Fixture};

const MUTATIONS: u64 = 10_000;
/// Running a model costs a thousand times what loading it does.
const RUN_EVERY: u64 = 500;

/// One deterministic change. Most hit the header: data bits cannot make loading fail.
fn damage(bytes: &mut Vec<u8>, header: usize, seed: u64, fixture: u32) {
    let draw = |what: u64, below: usize| (random(seed, what, fixture) % below as u64) as usize;
    let place = if draw(0, 10) == 0 {
        draw(1, bytes.len())
    } else {
        draw(1, header)
    };
    match draw(2, 4) {
        0 => bytes.truncate(place),
        1 => bytes[place] ^= 1 << draw(3, 8),
        2 => {
            let extreme =
                [0u64, 1, u64::MAX, 1 << 31, 1 << 63, 0xffff_ffff][draw(3, 6)].to_le_bytes();
            let end = bytes.len().min(place + extreme.len());
            bytes[place..end].copy_from_slice(&extreme[..end - place]);
        }
        _ => bytes[place] = draw(3, 256) as u8,
    }
}

fn load(name: &str, bytes: Vec<u8>) -> Result<Model, ModelError> {
    Model::load(Arc::new(Gguf::from_bytes(name, bytes)?))
}

/// Two tokens through the scalar interpreter: enough to touch every tensor.
fn run(model: Model) {
    let plan = gemma4::plan(&model);
    let tokens = [0, plan.vocab() as u32 - 1];
    let mut executor = Reference
        .compile(&plan, model.weights, &evaluate::options(2, 2))
        .expect("the reference compiles everything");
    evaluate::logits(executor.as_mut(), &plan, &tokens, 2).expect("runs");
}

fn survive(fixture: &Fixture, number: u32) {
    let whole = fixture.file();
    let header = carat_gguf::Header::parse(&Arc::new(whole.clone().into()))
        .expect("valid")
        .data_start;
    let (mut loaded, mut refused) = (0u64, 0u64);
    for seed in 0..MUTATIONS {
        let mut bytes = whole.clone();
        damage(&mut bytes, header, seed, number);
        match load(fixture.name, bytes) {
            Ok(model) => {
                loaded += 1;
                if loaded % RUN_EVERY == 1 {
                    run(model);
                }
            }
            Err(error) => {
                refused += 1;
                assert!(!error.to_string().is_empty());
            }
        }
    }
    // Both must happen, or the test tests nothing.
    assert!(
        loaded > 100 && refused > 100,
        "{}: {loaded} loaded, {refused} refused",
        fixture.name
    );
}

macro_rules! damaged {
    ($($test:ident: $number:literal,)*) => {
        $(#[test]
        fn $test() {
            survive(&fixtures::ALL[$number], $number);
        })*
    };
}

damaged! {
    damaged_ple_shared_kv_f32: 0,
    damaged_ple_shared_kv_q8_0: 1,
    damaged_e2b_like_q4_0: 2,
    damaged_12b_like_q4_0: 3,
    damaged_moe_like_q8_0: 4,
    damaged_real_heads_q8_0: 5,
    damaged_real_heads_q4_k: 6,
}
