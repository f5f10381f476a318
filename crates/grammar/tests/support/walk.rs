//! Random walks: at each step any token that is allowed, with a liking for those that end things.

use carat_engine::Constraint;
use carat_model::{TokenId, sampling::TokenMask};

use super::{Model, Random, allowed};

/// End of a walk.
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
    let mut mask = model.mask();
    let mut taken = Vec::new();
    while taken.len() < most {
        allowed(constraint, &mut mask);
        if mask.lowest().is_none() {
            return Walk::Stuck(taken);
        }
        let Some(token) = step(model, &mask, random, taken.len()) else {
            return Walk::Finished(taken);
        };
        constraint.accept(token);
        taken.push(token);
    }
    Walk::Long
}

/// A token of the mask; `None` for one that ends the answer, or if there is none.
pub(crate) fn step(
    model: &Model,
    mask: &TokenMask,
    random: &mut Random,
    length: usize,
) -> Option<TokenId> {
    let vocab = model.tokenizer.vocab();
    let find = |texts: &[&str]| texts.iter().filter_map(|text| vocab.find(text)).collect();
    let closing = Closing {
        marks: find(&["<|\"|>", "<channel|>", "<tool_call|>"]),
        texts: find(&["\"", "}", "]", "\"}", "\"]", "}}", ",", ":", "\":"]),
    };
    let token = choose(mask, &closing, vocab.stop_tokens(), random, length)?;
    (!vocab.is_stop(token)).then_some(token)
}

/// Tokens that end things: marks, which end nothing but what they are for, and text that may be part of a longer one.
struct Closing {
    marks: Vec<TokenId>,
    texts: Vec<TokenId>,
}

fn choose(
    mask: &TokenMask,
    closing: &Closing,
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
        let start = random.below(closing.texts.len());
        let texts = closing.texts[start..].iter().chain(&closing.texts[..start]);
        let mut order = closing.marks.iter().chain(texts).copied();
        if let Some(token) = order.find(|token| mask.allows(*token)) {
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
