//! Meaning of the sampling parameters: the definition every backend is checked against.
//!
//! Order: the mask, penalties and bias on the logits, temperature, then top-k, top-p and min-p on the tempered distribution,
//! then one draw (the order of the published generation code; at temperature 1 others agree). The draw adds Gumbel noise to
//! each surviving logit and takes the maximum. The noise is a pure function of (seed, position, token), so a draw depends
//! neither on the batch around it nor on the device.
//!
//! A masked token has no logit at all: it takes no place among the top-k and no share of a sum. A logit that is NaN is never
//! drawn either. Where every token that may be drawn is NaN or negative infinity, the lowest of those at negative infinity is
//! taken, and if there is none of them, the lowest that may be drawn. A mask without a token is refused before a draw.

mod mask;

use crate::TokenId;

pub use mask::TokenMask;

/// Parameters of a draw; [`sample`] says what they mean.
#[derive(Clone, Debug, PartialEq)]
pub struct Sampling {
    /// 0 takes the likeliest token; no other truncation then matters.
    pub temperature: f32,
    /// Keep this many of the likeliest tokens; 0 keeps all.
    pub top_k: usize,
    /// Keep the fewest likeliest tokens whose probabilities reach this sum; 1 keeps all.
    pub top_p: f32,
    /// Keep tokens at least this times as likely as the likeliest; 0 keeps all.
    pub min_p: f32,
    /// Divides positive and multiplies negative logits of tokens seen recently; 1 does nothing.
    pub repeat_penalty: f32,
    /// Subtracted once from the logits of tokens seen recently.
    pub presence_penalty: f32,
    /// Subtracted from the logits of tokens seen recently, once an occurrence.
    pub frequency_penalty: f32,
    /// Latest tokens that the penalties look at.
    pub penalty_window: usize,
    /// Added to single logits; negative infinity forbids a token.
    pub logit_bias: Vec<(TokenId, f32)>,
    /// Of the noise: the same seed, position and logits give the same token.
    pub seed: u64,
}

impl Default for Sampling {
    /// Gemma 4's own generation settings.
    fn default() -> Sampling {
        Sampling {
            temperature: 1.0,
            top_k: 64,
            top_p: 0.95,
            min_p: 0.0,
            repeat_penalty: 1.0,
            presence_penalty: 0.0,
            frequency_penalty: 0.0,
            penalty_window: 64,
            logit_bias: Vec::new(),
            seed: 0,
        }
    }
}

impl Sampling {
    /// The likeliest token, always.
    pub fn greedy() -> Sampling {
        Sampling {
            temperature: 0.0,
            ..Sampling::default()
        }
    }

    /// The first parameter outside its range, as a sentence; `None` if all are usable.
    pub fn complaint(&self) -> Option<String> {
        let bad = |name: &str, value: f32, range: &str| {
            Some(format!("{name} is {value}; it must be {range}"))
        };
        if !(self.temperature >= 0.0 && self.temperature.is_finite()) {
            return bad("temperature", self.temperature, "0 or more");
        }
        if !(self.top_p > 0.0 && self.top_p <= 1.0) {
            return bad("top-p", self.top_p, "above 0 and at most 1");
        }
        if !(0.0..=1.0).contains(&self.min_p) {
            return bad("min-p", self.min_p, "between 0 and 1");
        }
        if !(self.repeat_penalty > 0.0 && self.repeat_penalty.is_finite()) {
            return bad("repeat penalty", self.repeat_penalty, "above 0");
        }
        if !self.presence_penalty.is_finite() {
            return bad("presence penalty", self.presence_penalty, "a number");
        }
        if !self.frequency_penalty.is_finite() {
            return bad("frequency penalty", self.frequency_penalty, "a number");
        }
        let odd = self
            .logit_bias
            .iter()
            .find(|(_, b)| b.is_nan() || *b == f32::INFINITY);
        odd.map(|(token, bias)| {
            format!("the bias of token {token} is {bias}; it must be a number or -inf")
        })
    }

    /// Whether tokens seen recently are treated differently.
    pub fn penalizes(&self) -> bool {
        self.repeat_penalty != 1.0 || self.presence_penalty != 0.0 || self.frequency_penalty != 0.0
    }

    fn changes_logits(&self) -> bool {
        self.penalizes() || !self.logit_bias.is_empty()
    }
}

/// Memory that [`sample`] uses again.
#[derive(Default)]
pub struct Scratch {
    adjusted: Vec<f32>,
    kept: Vec<(TokenId, f32)>,
}

/// Chooses the token that follows `history` among those that `mask` allows, given the logits of the row at `position`.
pub fn sample(
    logits: &[f32],
    sampling: &Sampling,
    history: &[TokenId],
    mask: Option<&TokenMask>,
    position: usize,
    scratch: &mut Scratch,
) -> TokenId {
    let Scratch { adjusted, kept } = scratch;
    // A vocabulary is a megabyte: it is copied only where it changes.
    let logits = if mask.is_some() || sampling.changes_logits() {
        adjusted.clear();
        adjusted.extend_from_slice(logits);
        if let Some(mask) = mask {
            cover(adjusted, mask);
        }
        adjust(adjusted, sampling, history);
        adjusted
    } else {
        logits
    };
    let lowest = mask.and_then(TokenMask::lowest).unwrap_or(0);
    let likeliest = || largest(logits).unwrap_or(lowest);
    if sampling.temperature == 0.0 {
        return likeliest();
    }
    survivors(logits, sampling, kept);
    let noisy = kept
        .iter()
        .map(|&(token, logit)| (token, logit + gumbel(sampling.seed, position, token)));
    best(noisy).unwrap_or_else(likeliest)
}

/// Takes away the logits that `mask` forbids, and those it does not know of.
fn cover(logits: &mut [f32], mask: &TokenMask) {
    let words = mask.words().iter().copied().chain(std::iter::repeat(0));
    for (logits, word) in logits.chunks_mut(32).zip(words) {
        for (bit, logit) in logits.iter_mut().enumerate() {
            if word >> bit & 1 == 0 {
                *logit = f32::NAN;
            }
        }
    }
}

/// The index of the largest logit, the lowest on ties; 0 if all are NaN.
pub fn arg_max(logits: &[f32]) -> TokenId {
    largest(logits).unwrap_or(0)
}

/// The index of the largest logit, the lowest on ties; `None` if all are NaN.
fn largest(logits: &[f32]) -> Option<TokenId> {
    let larger = |a: f32, b: f32| if b > a { b } else { a };
    // Sixteen at a time: the compiler makes vectors of them. No comparison with a NaN holds, so none is chosen.
    let (sixteens, rest) = logits.as_chunks::<16>();
    let mut lanes = [f32::NEG_INFINITY; 16];
    for sixteen in sixteens {
        for (lane, x) in lanes.iter_mut().zip(sixteen) {
            *lane = larger(*lane, *x);
        }
    }
    let all = lanes.iter().chain(rest).copied();
    let largest = all.fold(f32::NEG_INFINITY, larger);
    let place = logits.iter().position(|x| *x == largest)?;
    Some(place as TokenId)
}

fn best(scored: impl Iterator<Item = (TokenId, f32)>) -> Option<TokenId> {
    scored
        .filter(|(_, score)| !score.is_nan())
        .reduce(|a, b| {
            if b.1 > a.1 || (b.1 == a.1 && b.0 < a.0) {
                b
            } else {
                a
            }
        })
        .map(|(token, _)| token)
}

fn adjust(logits: &mut [f32], sampling: &Sampling, history: &[TokenId]) {
    let recent = &history[history.len().saturating_sub(sampling.penalty_window)..];
    let mut counts: Vec<TokenId> = recent.to_vec();
    counts.sort_unstable();
    for same in counts.chunk_by(|a, b| a == b) {
        let Some(logit) = logits.get_mut(same[0] as usize) else {
            continue;
        };
        *logit = if *logit > 0.0 {
            *logit / sampling.repeat_penalty
        } else {
            *logit * sampling.repeat_penalty
        };
        *logit -= sampling.presence_penalty + sampling.frequency_penalty * same.len() as f32;
    }
    for &(token, bias) in &sampling.logit_bias {
        if let Some(logit) = logits.get_mut(token as usize) {
            *logit += bias;
        }
    }
}

/// Fills `kept` with the tempered logits that top-k, top-p and min-p leave, best first.
fn survivors(logits: &[f32], sampling: &Sampling, kept: &mut Vec<(TokenId, f32)>) {
    kept.clear();
    // Relative to the largest, so that a temperature near 0 leaves that one at 0 instead of overflowing.
    let largest = logits.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    let threshold = top_k_threshold(logits, sampling.top_k);
    kept.extend(
        (0..)
            .zip(logits.iter().copied())
            .filter(|(_, l)| *l >= threshold && *l > f32::NEG_INFINITY),
    );
    // Before the temperature, which may round different logits to the same: equal logits alone are ties, and the lowest ids
    // win a place.
    let descending = |a: f32, b: f32| b.partial_cmp(&a).expect("no threshold is reached by a NaN");
    kept.sort_unstable_by(|a, b| descending(a.1, b.1).then(a.0.cmp(&b.0)));
    if sampling.top_k > 0 {
        kept.truncate(sampling.top_k);
    }
    for (_, logit) in kept.iter_mut() {
        *logit = (*logit - largest) / sampling.temperature;
    }
    let Some(&(_, top)) = kept.first() else {
        return;
    };
    if sampling.top_p < 1.0 {
        let sum: f32 = kept.iter().map(|(_, l)| (l - top).exp()).sum();
        let mut seen = 0.0;
        let enough = kept.iter().position(|(_, l)| {
            seen += (l - top).exp();
            seen >= sampling.top_p * sum
        });
        kept.truncate(enough.map_or(kept.len(), |last| last + 1));
    }
    if sampling.min_p > 0.0 {
        let floor = top + sampling.min_p.ln();
        let enough = kept.partition_point(|(_, l)| *l >= floor);
        kept.truncate(enough.max(1));
    }
}

/// A value that at least `top_k` logits reach, and few more than that.
///
/// A vocabulary has 262,144 entries; sorting them all for each token would cost more than the model's own head.
fn top_k_threshold(logits: &[f32], top_k: usize) -> f32 {
    if top_k == 0 || top_k >= logits.len() {
        return f32::NEG_INFINITY;
    }
    // The k-th best of the maxima of k or more disjoint chunks is reached by k logits.
    let chunk = (logits.len() / (8 * top_k)).max(1);
    let mut maxima: Vec<f32> = logits
        .chunks(chunk)
        .map(|c| c.iter().copied().fold(f32::NEG_INFINITY, f32::max))
        .collect();
    if maxima.len() <= top_k {
        return f32::NEG_INFINITY;
    }
    let (_, kth, _) = maxima.select_nth_unstable_by(top_k - 1, |a, b| b.total_cmp(a));
    *kth
}

/// Standard Gumbel noise for one token of one draw.
fn gumbel(seed: u64, position: usize, token: TokenId) -> f32 {
    // 24 bits, centred in their interval, so that neither 0 nor 1 can occur.
    let bits = (random(seed, position as u64, token) >> 40) as f64;
    let uniform = (bits + 0.5) / f64::from(1u32 << 24);
    -(-uniform.ln()).ln() as f32
}

/// A counter-based generator: 64 well-mixed bits from (seed, position, token), by three rounds of a splitmix64 finaliser.
pub fn random(seed: u64, position: u64, token: TokenId) -> u64 {
    let mix = |mut z: u64| {
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    };
    let golden = 0x9e37_79b9_7f4a_7c15_u64;
    let a = mix(seed.wrapping_add(golden));
    let b = mix(a ^ position.wrapping_mul(golden).wrapping_add(golden));
    mix(b ^ u64::from(token).wrapping_mul(golden).wrapping_add(golden))
}

/// Log-probabilities of `token` and of the `top` likeliest tokens, under the logits as they are.
pub fn logprobs(logits: &[f32], token: TokenId, top: usize) -> (f32, Vec<(TokenId, f32)>) {
    let max = logits.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    let sum: f64 = logits.iter().map(|l| f64::from((l - max).exp())).sum();
    let norm = max + sum.ln() as f32;
    let mut best: Vec<(TokenId, f32)> = Vec::new();
    if top > 0 {
        let threshold = top_k_threshold(logits, top);
        best.extend(
            (0..)
                .zip(logits.iter().copied())
                .filter(|(_, l)| *l >= threshold),
        );
        best.sort_unstable_by(|a, b| b.1.total_cmp(&a.1).then(a.0.cmp(&b.0)));
        best.truncate(top);
        for (_, logprob) in &mut best {
            *logprob -= norm;
        }
    }
    (logits[token as usize] - norm, best)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn draw(logits: &[f32], sampling: &Sampling, position: usize) -> TokenId {
        masked(logits, sampling, None, position)
    }

    fn masked(
        logits: &[f32],
        sampling: &Sampling,
        mask: Option<&TokenMask>,
        position: usize,
    ) -> TokenId {
        let scratch = &mut Scratch::default();
        sample(logits, sampling, &[], mask, position, scratch)
    }

    fn kept(logits: &[f32], sampling: &Sampling) -> Vec<TokenId> {
        let mut kept = Vec::new();
        survivors(logits, sampling, &mut kept);
        kept.into_iter().map(|(token, _)| token).collect()
    }

    fn open() -> Sampling {
        Sampling {
            top_k: 0,
            top_p: 1.0,
            ..Sampling::default()
        }
    }

    #[test]
    fn greedy_takes_the_lowest_id_on_ties() {
        assert_eq!(draw(&[1.0, 3.0, 3.0, f32::NAN], &Sampling::greedy(), 0), 1);
    }

    #[test]
    fn a_temperature_near_zero_is_greedy() {
        for temperature in [1e-5, 1e-38, 1e-40] {
            let s = Sampling {
                temperature,
                ..open()
            };
            assert!(
                (0..50).all(|p| draw(&[1.0, 3.0, -2.0, 2.9], &s, p) == 1),
                "{temperature}"
            );
        }
    }

    #[test]
    fn draws_follow_the_distribution() {
        let logits = [0.0f32, 1.0, 2.0, -1.0];
        let sum: f32 = logits.iter().map(|l| l.exp()).sum();
        let mut counts = [0u32; 4];
        let draws = 40_000;
        for position in 0..draws {
            counts[draw(&logits, &open(), position) as usize] += 1;
        }
        for (count, logit) in counts.iter().zip(logits) {
            let expected = logit.exp() / sum;
            let found = *count as f32 / draws as f32;
            assert!((found - expected).abs() < 0.01, "{found} of {expected}");
        }
    }

    #[test]
    fn a_draw_depends_on_seed_and_position_alone() {
        let logits: Vec<f32> = (0..100).map(|i| (i as f32 * 0.7).sin()).collect();
        let s = Sampling { seed: 9, ..open() };
        let first: Vec<_> = (0..50).map(|p| draw(&logits, &s, p)).collect();
        let again: Vec<_> = (0..50).map(|p| draw(&logits, &s, p)).collect();
        let other: Vec<_> = (0..50)
            .map(|p| draw(&logits, &Sampling { seed: 10, ..open() }, p))
            .collect();
        assert_eq!(first, again);
        assert_ne!(first, other);
    }

    #[test]
    fn top_k_keeps_the_best_and_prefers_low_ids_on_ties() {
        let s = Sampling { top_k: 2, ..open() };
        assert_eq!(kept(&[5.0, 1.0, 5.0, 5.0], &s), [0, 2]);
    }

    #[test]
    fn ties_are_equal_logits_not_what_a_temperature_rounds_to_the_same() {
        // 3 and the next number differ by less than what is left of them beside 2^24.
        let logits = [3.0, f32::from_bits(3f32.to_bits() + 1), 16_777_216.0];
        let s = Sampling { top_k: 2, ..open() };
        assert_eq!(kept(&logits, &s), [2, 1]);
    }

    #[test]
    fn top_k_equals_a_full_sort_on_a_large_vocabulary() {
        let logits: Vec<f32> = (0..50_000)
            .map(|i| (random(1, 2, i) >> 40) as f32)
            .collect();
        let mut order: Vec<TokenId> = (0..50_000).collect();
        order.sort_by(|&a, &b| {
            logits[b as usize]
                .total_cmp(&logits[a as usize])
                .then(a.cmp(&b))
        });
        for top_k in [1, 7, 64, 1000] {
            let s = Sampling { top_k, ..open() };
            assert_eq!(kept(&logits, &s), order[..top_k]);
        }
    }

    #[test]
    fn top_p_keeps_the_fewest_that_reach_the_sum() {
        // Probabilities 0.5, 0.25, 0.25.
        let logits = [2f32.ln(), 0.0, 0.0];
        assert_eq!(
            kept(
                &logits,
                &Sampling {
                    top_p: 0.5,
                    ..open()
                }
            ),
            [0]
        );
        assert_eq!(
            kept(
                &logits,
                &Sampling {
                    top_p: 0.6,
                    ..open()
                }
            ),
            [0, 1]
        );
    }

    #[test]
    fn min_p_is_relative_to_the_best() {
        let logits = [0.0, 0.3f32.ln(), 0.1f32.ln()];
        assert_eq!(
            kept(
                &logits,
                &Sampling {
                    min_p: 0.2,
                    ..open()
                }
            ),
            [0, 1]
        );
        assert_eq!(
            kept(
                &logits,
                &Sampling {
                    min_p: 1.0,
                    ..open()
                }
            ),
            [0]
        );
    }

    #[test]
    fn penalties_look_at_the_recent_window_only() {
        let s = Sampling {
            presence_penalty: 1.0,
            frequency_penalty: 0.5,
            repeat_penalty: 2.0,
            penalty_window: 3,
            ..Sampling::greedy()
        };
        let mut logits = vec![4.0, -1.0, 4.0];
        adjust(&mut logits, &s, &[2, 0, 0, 1]);
        assert_eq!(logits, [4.0 / 2.0 - 1.0 - 0.5 * 2.0, -2.0 - 1.0 - 0.5, 4.0]);
    }

    #[test]
    fn a_forbidden_token_is_never_drawn() {
        let s = Sampling {
            logit_bias: vec![(1, f32::NEG_INFINITY)],
            ..open()
        };
        assert!((0..200).all(|p| draw(&[0.0, 50.0, 0.0], &s, p) != 1));
        let greedy = Sampling {
            temperature: 0.0,
            ..s
        };
        assert_eq!(draw(&[0.0, 50.0, 0.0], &greedy, 0), 0);
    }

    #[test]
    fn a_mask_comes_before_top_k() {
        // The three likeliest are forbidden; the two best of the others take their places.
        let logits = [9.0, 8.0, 1.0, 7.0, 0.5, -30.0];
        let mask = TokenMask::of(6, [2, 4, 5]);
        let s = Sampling { top_k: 2, ..open() };
        let drawn: Vec<_> = (0..400)
            .map(|p| masked(&logits, &s, Some(&mask), p))
            .collect();
        assert!(drawn.contains(&2) && drawn.contains(&4) && !drawn.contains(&5));
        assert!(drawn.iter().all(|t| mask.allows(*t)));
    }

    #[test]
    fn a_mask_comes_before_top_p_and_min_p() {
        let logits = [50.0, 0.0, 0.0, 0.0];
        let mask = TokenMask::of(4, [1, 2, 3]);
        for s in [
            Sampling {
                top_p: 0.99,
                ..open()
            },
            Sampling {
                min_p: 0.5,
                ..open()
            },
        ] {
            let drawn: Vec<_> = (0..200)
                .map(|p| masked(&logits, &s, Some(&mask), p))
                .collect();
            // Each has a third, not the nothing that is left beside the likeliest.
            assert!([1, 2, 3].iter().all(|t| drawn.contains(t)));
        }
    }

    #[test]
    fn a_mask_that_allows_everything_changes_no_draw() {
        let logits: Vec<f32> = (0..77).map(|i| (i as f32 * 0.7).sin()).collect();
        let mut mask = TokenMask::none(77);
        mask.allow_all();
        for s in [Sampling::default(), Sampling::greedy(), open()] {
            for p in 0..50 {
                assert_eq!(masked(&logits, &s, Some(&mask), p), draw(&logits, &s, p));
            }
        }
    }

    #[test]
    fn the_only_token_that_is_allowed_is_drawn_whatever_its_logit() {
        for logit in [-100.0, f32::NEG_INFINITY, f32::NAN] {
            let logits = [5.0, f32::NEG_INFINITY, logit, f32::NAN];
            let mask = TokenMask::of(4, [2]);
            for s in [Sampling::default(), Sampling::greedy(), open()] {
                assert_eq!(masked(&logits, &s, Some(&mask), 3), 2, "{logit} by {s:?}");
            }
        }
    }

    #[test]
    fn without_a_number_the_lowest_that_may_be_drawn_is_taken() {
        let (nan, nothing) = (f32::NAN, f32::NEG_INFINITY);
        for s in [Sampling::default(), Sampling::greedy(), open()] {
            let allowed = TokenMask::of(5, [1, 2, 4]);
            assert_eq!(masked(&[0.0, nan, nan, 0.0, nan], &s, Some(&allowed), 0), 1);
            // Negative infinity is a number, NaN is none.
            let logits = [0.0, nan, nothing, 0.0, nothing];
            assert_eq!(masked(&logits, &s, Some(&allowed), 0), 2);
            assert_eq!(draw(&[nan, nan], &s, 0), 0);
            assert_eq!(draw(&[nan, nothing], &s, 0), 1);
        }
    }

    #[test]
    fn a_bias_cannot_bring_a_masked_token_back() {
        let s = Sampling {
            logit_bias: vec![(0, 1000.0), (1, f32::NEG_INFINITY)],
            ..Sampling::greedy()
        };
        let mask = TokenMask::of(3, [1, 2]);
        assert_eq!(masked(&[0.0, 5.0, -5.0], &s, Some(&mask), 0), 2);
    }

    #[test]
    fn logits_beyond_the_mask_are_forbidden() {
        let mask = TokenMask::of(2, [0, 1]);
        let logits: Vec<f32> = (0..70).map(|i| i as f32).collect();
        assert_eq!(masked(&logits, &Sampling::greedy(), Some(&mask), 0), 1);
    }

    #[test]
    fn logprobs_sum_to_one() {
        let logits = [1.0, 2.0, 3.0];
        let (chosen, top) = logprobs(&logits, 1, 3);
        assert_eq!(top[1], (1, chosen));
        let sum: f32 = top.iter().map(|(_, l)| l.exp()).sum();
        assert!((sum - 1.0).abs() < 1e-6);
    }

    #[test]
    fn parameters_out_of_range_are_named() {
        let s = Sampling {
            top_p: 0.0,
            ..open()
        };
        assert!(s.complaint().unwrap().contains("top-p is 0"));
        assert_eq!(Sampling::default().complaint(), None);
    }
}
