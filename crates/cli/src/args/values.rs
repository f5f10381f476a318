//! Values of flags: what is read from the text, and what is said of a text that is none.
//!
//! Whatever is wrong on the command line alone is found here and ends with exit code 2. What depends on the model or the machine
//! is found later.

use carat_cuda::Choice;
use carat_model::sampling::Sampling;
use clap::ValueEnum;

use super::BackendName;
use crate::settings::memory_size;

/// The most tokens to generate; `None` goes on until the end.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct MaxTokens(pub(crate) Option<usize>);

/// The seed of the noise; `None` is another each time.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Seed(pub(crate) Option<u64>);

const WHOLE: &str = "a whole number is expected";

pub(crate) fn max_tokens(text: &str) -> Result<MaxTokens, String> {
    match text.parse::<i64>() {
        Ok(-1) => Ok(MaxTokens(None)),
        Ok(n) if n > 0 => usize::try_from(n)
            .map(|n| MaxTokens(Some(n)))
            .map_err(|_| WHOLE.to_owned()),
        _ => Err("give a number of tokens above 0, or -1 for no limit".to_owned()),
    }
}

pub(crate) fn seed(text: &str) -> Result<Seed, String> {
    match text {
        "-1" => Ok(Seed(None)),
        _ => match text.parse() {
            Ok(n) => Ok(Seed(Some(n))),
            Err(_) => Err(format!(
                "give a whole number from 0 to {}, or -1 for another each time",
                u64::MAX
            )),
        },
    }
}

pub(crate) fn top_k(text: &str) -> Result<usize, String> {
    match text {
        "-1" => Ok(0),
        _ => text
            .parse()
            .map_err(|_| "give a number of tokens, or 0 or -1 for all".to_owned()),
    }
}

/// A sampling parameter on its own, with the words for one out of its range.
fn sampled(text: &str, with: impl FnOnce(&mut Sampling) -> &mut f32) -> Result<f32, String> {
    let value = text
        .parse()
        .map_err(|_| "a number is expected".to_owned())?;
    let mut sampling = Sampling::default();
    *with(&mut sampling) = value;
    match sampling.complaint() {
        Some(complaint) => Err(complaint),
        None => Ok(value),
    }
}

pub(super) fn temperature(text: &str) -> Result<f32, String> {
    sampled(text, |s| &mut s.temperature)
}

pub(super) fn top_p(text: &str) -> Result<f32, String> {
    sampled(text, |s| &mut s.top_p)
}

pub(super) fn min_p(text: &str) -> Result<f32, String> {
    sampled(text, |s| &mut s.min_p)
}

/// `ID=BIAS`, where the bias may be `-inf`.
pub(super) fn bias(text: &str) -> Result<(u32, f32), String> {
    text.split_once('=')
        .and_then(|(id, bias)| Some((id.trim().parse().ok()?, bias.trim().parse().ok()?)))
        .ok_or_else(|| "ID=BIAS is expected, such as 106=-inf".to_owned())
}

/// A size of memory, kept as it was written.
pub(super) fn size(text: &str) -> Result<String, String> {
    match memory_size(text) {
        Ok(_) => Ok(text.to_owned()),
        Err(error) => Err(error.to_string()),
    }
}

/// A size, or 0 for none.
pub(super) fn size_or_none(text: &str) -> Result<String, String> {
    match text.trim() {
        "0" => Ok("0".to_owned()),
        _ => size(text),
    }
}

pub(super) fn stop(text: &str) -> Result<String, String> {
    if text.is_empty() {
        return Err("an empty text would stop every answer before it begins".to_owned());
    }
    Ok(text.to_owned())
}

pub(super) fn threads(text: &str) -> Result<usize, String> {
    match text.parse() {
        Ok(0) => Err("0 threads cannot compute; give at least 1, or leave -t out".to_owned()),
        Ok(n) if n > 4096 => Err(format!(
            "{n} threads are more than any machine has; give at most 4096"
        )),
        Ok(n) => Ok(n),
        Err(_) => Err(WHOLE.to_owned()),
    }
}

pub(super) fn backend_pair(text: &str) -> Result<[BackendName; 2], String> {
    let name = |name: &str| BackendName::from_str(name.trim(), true);
    match text.split_once(',') {
        Some((a, b)) => Ok([name(a)?, name(b)?]),
        None => {
            Err("two names with a comma between are expected, such as reference,cpu".to_owned())
        }
    }
}

/// Rows of a batch and how many of them are sampled.
pub(super) fn batch_rows(text: &str) -> Result<(usize, usize), String> {
    // Decoding samples every row; a prompt's last chunk one.
    const MAX_DECODED: usize = 64;
    let (rows, sampled) = match text.split_once(',') {
        Some((rows, sampled)) => {
            let sampled = sampled.trim().parse::<usize>();
            (rows, Some(sampled.map_err(|_| WHOLE.to_owned())?))
        }
        None => (text, None),
    };
    let rows = positive(rows.trim())?;
    let sampled = sampled.unwrap_or(if rows <= MAX_DECODED { rows } else { 1 });
    if rows > 1 << 20 || sampled > rows {
        return Err(format!(
            "a batch of {rows} rows with {sampled} sampled cannot be; give up to {} rows and no more sampled ones, such as \
             2048,1",
            1 << 20
        ));
    }
    Ok((rows, sampled))
}

pub(super) fn tolerance(text: &str) -> Result<f64, String> {
    match text.parse::<f64>() {
        Ok(x) if x > 0.0 => Ok(x),
        Ok(_) => Err("it must be above 0".to_owned()),
        Err(_) => Err("a number is expected".to_owned()),
    }
}

pub(super) fn positive(text: &str) -> Result<usize, String> {
    match text.parse() {
        Ok(0) => Err("it must be above 0".to_owned()),
        Ok(n) => Ok(n),
        Err(_) => Err(WHOLE.to_owned()),
    }
}

/// A choice that depends on the card, by its name.
pub(super) fn choice(text: &str) -> Result<Choice, String> {
    let names = Choice::ALL.map(Choice::name).join(", ");
    Choice::named(text).ok_or_else(|| format!("it is no choice; {names} are"))
}

pub(super) fn parallel(text: &str) -> Result<usize, String> {
    let most = 1024;
    match text.parse() {
        Ok(n) if (1..=most).contains(&n) => Ok(n),
        _ => Err(format!("give a number from 1 to {most}")),
    }
}

pub(super) fn seconds(text: &str) -> Result<u64, String> {
    match text.parse() {
        Ok(n) if n > 0 => Ok(n),
        _ => Err("give a number of seconds, at least 1".to_owned()),
    }
}

pub(super) fn rows(text: &str) -> Result<usize, String> {
    match text.parse() {
        Ok(n) if n > 0 => Ok(n),
        _ => Err("give a number of rows, at least 1".to_owned()),
    }
}

pub(super) fn draft_length(text: &str) -> Result<usize, String> {
    let most = 63;
    match text.parse() {
        Ok(n) if n <= most => Ok(n),
        _ => Err(format!("give a number up to {most}; 0 makes no drafts")),
    }
}

pub(super) fn probability(text: &str) -> Result<f64, String> {
    match text.parse() {
        Ok(p) if (0.0..=1.0).contains(&p) => Ok(p),
        _ => Err("give a probability from 0 to 1".to_owned()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_bias_may_forbid() {
        assert_eq!(bias("106=-inf").unwrap(), (106, f32::NEG_INFINITY));
        assert!(bias("106").is_err());
    }

    #[test]
    fn minus_one_is_no_limit_and_no_seed() {
        assert_eq!(max_tokens("-1"), Ok(MaxTokens(None)));
        assert_eq!(max_tokens("7"), Ok(MaxTokens(Some(7))));
        assert!(max_tokens("0").is_err() && max_tokens("-2").is_err());
        assert_eq!(seed("-1"), Ok(Seed(None)));
        assert_eq!(seed("18446744073709551615"), Ok(Seed(Some(u64::MAX))));
        assert_eq!((top_k("-1"), top_k("40")), (Ok(0), Ok(40)));
    }
}
