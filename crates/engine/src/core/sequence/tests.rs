use super::*;
use crate::core::testing::{request, text};

fn sequence(request: Request) -> Sequence {
    let limit = request.prompt.len() + request.max_tokens.unwrap();
    Sequence::new(RequestId(1), request, limit)
}

#[test]
fn the_last_token_asked_for_finishes_by_length() {
    let mut sequence = sequence(request(text(1, 5), 2));
    assert_eq!(sequence.push(7), None);
    assert_eq!(sequence.push(7), Some(FinishReason::Length));
}

#[test]
fn a_stop_token_finishes_even_as_the_last_token() {
    let mut asked = request(text(1, 5), 1);
    asked.stop_tokens = vec![9, 7];
    let stop = Some(FinishReason::Stop { token: 7 });
    assert_eq!(sequence(asked).push(7), stop);
}

#[test]
fn stop_tokens_are_ordinary_when_ignored() {
    let mut asked = request(text(1, 5), 2);
    asked.stop_tokens = vec![7];
    asked.ignore_eos = true;
    assert_eq!(sequence(asked).push(7), None);
}

#[test]
fn only_the_step_that_feeds_the_last_token_samples() {
    let mut sequence = sequence(request(text(1, 5), 2));
    sequence.rows = 4;
    assert_eq!(sequence.run(0..4).sampled, 0);
    sequence.rows = 5;
    assert_eq!(sequence.run(3..8).sampled, 1);
    assert_eq!(sequence.run(3..8).history, text(1, 5));
}
