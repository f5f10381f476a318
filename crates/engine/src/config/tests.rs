use carat_gguf::QuantType;
use carat_model::gemma4;
use carat_testkit::tiny::{Tiny, Variant};

use super::*;
use crate::core::testing::{VOCAB, facts, request, roomy, text};

fn limits(window: Option<usize>) -> Limits {
    let (config, facts) = roomy(window);
    Limits::new(config, facts).unwrap()
}

#[test]
fn a_short_context_needs_no_more_sliding_pages_than_full_ones() {
    let pages = minimum_pages(100, facts(Some(1024)));
    assert_eq!((pages.full, pages.sliding), (4, 4));
    assert_eq!(minimum_pages(100, facts(None)).sliding, 0);
}

#[test]
fn comfortable_pages_hold_windows_twice_and_a_batch() {
    let config = EngineConfig::comfortable(4096, 4, 512, facts(Some(1024)));
    // 33 pages a window, 2 before the end of a prompt, a partial one for each sequence; 16 pages of rows.
    assert_eq!(config.pages.sliding, 2 * 4 * 33 + 2 + 4);
    assert_eq!((config.pages.full, config.chunk_pages), (4 * 128, 16));
    let facts = ModelFacts {
        layers_take_turns: false,
        ..facts(Some(1024))
    };
    let config = EngineConfig::comfortable(4096, 4, 512, facts);
    assert_eq!(config.pages.sliding, 2 * 4 * 33 + 16 + 4);
    assert_eq!(config.chunk_pages, 0);
}

#[test]
fn a_configuration_without_room_for_one_window_is_refused() {
    let (mut config, facts) = roomy(Some(64));
    config.pages.sliding = 2;
    let error = Limits::new(config, facts).unwrap_err();
    assert_eq!(
        error.to_string(),
        "2 pages of the Sliding group; one request alone needs 3"
    );
}

#[test]
fn fewer_rows_than_sequences_are_refused() {
    let (mut config, facts) = roomy(None);
    config.max_rows = 3;
    assert!(matches!(
        Limits::new(config, facts),
        Err(ConfigError::TooFewRows { .. })
    ));
}

#[test]
fn a_request_over_the_context_is_rejected_with_the_numbers() {
    let error = limits(None).check(&request(text(1, 200), 57)).unwrap_err();
    assert_eq!(
        error.to_string(),
        "a prompt of 200 tokens and 57 to generate exceed the context of 256; \
         shorten the prompt, ask for fewer, or give a larger context"
    );
    assert_eq!(limits(None).check(&request(text(1, 200), 56)), Ok(256));
}

#[test]
fn without_a_number_of_tokens_a_request_may_fill_the_context() {
    let open = Request::new(text(1, 10));
    assert_eq!(limits(None).check(&open), Ok(256));
    let long = Request::new(text(1, 256));
    assert!(limits(None).check(&long).is_err());
}

#[test]
fn unusable_requests_are_rejected() {
    let limits = limits(None);
    let rejected = |r: Request| limits.check(&r).unwrap_err();
    assert_eq!(rejected(request([], 1)), Rejected::EmptyPrompt);
    assert_eq!(rejected(request([1], 0)), Rejected::NothingToGenerate);
    assert_eq!(
        rejected(request([VOCAB as u32], 1)),
        Rejected::OutsideVocabulary {
            token: VOCAB as u32,
            vocab: VOCAB
        }
    );
    let mut hot = request([1], 1);
    hot.sampling.temperature = -1.0;
    assert!(matches!(rejected(hot), Rejected::BadSampling(_)));
}

#[test]
fn more_than_is_reported_or_looked_at_is_rejected_with_value_and_limit() {
    let limits = limits(None);
    let check = |change: &dyn Fn(&mut Request)| {
        let mut asked = request([1], 1);
        change(&mut asked);
        limits
            .check(&asked)
            .map_err(|rejected| rejected.to_string())
    };
    let rejected = |change: &dyn Fn(&mut Request)| check(change).unwrap_err();
    let logprobs =
        "log-probabilities of 21 tokens in each place; at most 20 are reported, ask for fewer";
    assert_eq!(rejected(&|r| r.logprobs = Some(21)), logprobs);
    assert_eq!(rejected(&|r| r.prompt_logprobs = Some(21)), logprobs);
    assert!(check(&|r| (r.logprobs, r.prompt_logprobs) = (Some(20), Some(20))).is_ok());

    let numbers = |count| move |r: &mut Request| r.sampling.logit_bias = vec![(1, -100.0); count];
    let forbidding =
        |count| move |r: &mut Request| r.sampling.logit_bias = vec![(1, f32::NEG_INFINITY); count];
    assert_eq!(
        rejected(&numbers(1025)),
        "biases of 1025 tokens; at most 1024 are taken, give fewer or a constraint"
    );
    assert!(check(&numbers(1024)).is_ok());
    assert!(check(&forbidding(VOCAB)).is_ok());
    assert!(check(&forbidding(VOCAB + 1)).is_err());
    assert_eq!(
        rejected(&|r| r.sampling.logit_bias = vec![(2, 0.0), (3, 100.5)]),
        "the bias of token 3 is 100.5; it must be within -100 and 100, or -inf to forbid the token"
    );

    assert_eq!(
        rejected(&|r| r.sampling.penalty_window = 65_537),
        "a penalty window of 65537 tokens; at most 65536 are looked at, give a smaller window"
    );
    assert!(check(&|r| r.sampling.penalty_window = 65_536).is_ok());
    assert_eq!(
        rejected(&|r| r.stop_tokens = vec![1; 257]),
        "257 stop tokens; at most 256 are looked for, give fewer"
    );
    assert!(check(&|r| r.stop_tokens = vec![1; 256]).is_ok());
}

#[test]
fn chunks_get_shorter_as_attention_takes_over() {
    let (mut config, mut facts) = roomy(None);
    // What the 12B model comes to.
    facts.even_depth = Some(105_000);
    config.max_rows = 2048;
    let rows = |depth| {
        let limits = Limits::new(config.clone(), facts).unwrap();
        limits.chunk_rows(depth)
    };
    assert_eq!(
        [0, 32_768, 95_000, 262_144].map(rows),
        [2048, 1536, 1024, 512]
    );
    for depth in (0..300_000).step_by(1000) {
        let time = rows(depth) as f64 * (105_000 + depth) as f64 / (2048.0 * 105_000.0);
        assert!((0.75..=1.25).contains(&time), "{time} at {depth}");
    }
    assert_eq!(rows(10_000_000), 256, "the fewest");
    config.max_rows = 100;
    let small = Limits::new(config, facts).unwrap();
    assert_eq!(small.chunk_rows(1 << 30), 100);
}

#[test]
fn attention_costs_as_much_as_the_rest_at_the_even_depth() {
    let model = Tiny::new(Variant::E2b, QuantType::F32).model();
    let plan = gemma4::plan(&model);
    let even = ModelFacts::with_costs(&plan, &model.weights).even_depth;
    let even = even.expect("it attends to everything");
    let cost = |depth| {
        let row = BatchShape {
            rows: 1,
            sampled: 0,
            sequences: 1,
            depth,
            kv: PerGroup::default(),
        };
        cost::of(&plan, &model.weights, row).multiply_adds as f64
    };
    let (window, far) = (1 << 16, 1 << 17);
    let per_position = (cost(far) - cost(window)) / f64::from(far as u32 - window as u32);
    let rest = cost(window) - per_position * f64::from(window as u32);
    let ratio = per_position * even as f64 / rest;
    assert!((0.9..=1.1).contains(&ratio), "{ratio} at {even}");
}
