//! Random walks: at each step any token that is allowed, with a liking for those that end things.

use carat_engine::Constraint;
use carat_model::{TokenId, sampling::TokenMask};

use super::{Model, Random, allowed};

/// How a walk went.
pub(crate) enum Walk {
    /// To the end, with these tokens.
    Finished(Vec<TokenId>),
    /// Longer than was asked for.
    Long,
    /// To a place without a way on.
    Stuck(Vec<TokenId>),
}

/// Walks until the answer ends, through `most` tokens at most.
pub(crate) fn walk(
    model: &Model,
    constraint: &mut dyn Constraint,
    random: &mut Random,
    most: usize,
) -> Walk {
    let vocab = model.tokenizer.vocab();
    let mut mask = model.mask();
    let mut taken = Vec::new();
    let closing: Vec<TokenId> = [
        "\"",
        "}",
        "]",
        "\"}",
        "\"]",
        "}}",
        ",",
        "0",
        "<|\"|>",
        "<channel|>",
    ]
    .iter()
    .filter_map(|text| vocab.find(text))
    .collect();
    while taken.len() < most {
        allowed(constraint, &mut mask);
        let Some(token) = choose(&mask, &closing, vocab.stop_tokens(), random, taken.len()) else {
            return Walk::Stuck(taken);
        };
        if vocab.is_stop(token) {
            return Walk::Finished(taken);
        }
        constraint.accept(token);
        taken.push(token);
    }
    Walk::Long
}

fn choose(
    mask: &TokenMask,
    closing: &[TokenId],
    stops: &[TokenId],
    random: &mut Random,
    length: usize,
) -> Option<TokenId> {
    let stop = stops.iter().copied().find(|stop| mask.allows(*stop));
    if let Some(stop) = stop
        && (length > 60 || random.one_in(3))
    {
        return Some(stop);
    }
    let bias = if length > 60 { 1 } else { 3 };
    if random.one_in(bias) {
        let start = random.below(closing.len());
        let order = closing[start..].iter().chain(&closing[..start]);
        if let Some(token) = order.copied().find(|token| mask.allows(*token)) {
            return Some(token);
        }
    }
    any(mask, random)
}

/// Any token of the mask. Those with little text come as often as those with much: a word of the mask is drawn first.
fn any(mask: &TokenMask, random: &mut Random) -> Option<TokenId> {
    let words = mask.words();
    let start = random.below(words.len());
    let place = (0..words.len())
        .map(|step| (start + step) % words.len())
        .find(|place| words[*place] != 0)?;
    let mut word = words[place];
    for _ in 0..random.below(word.count_ones() as usize) {
        word &= word - 1;
    }
    Some(place as TokenId * 32 + word.trailing_zeros())
}
