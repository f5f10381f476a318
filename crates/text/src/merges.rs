//! The table behind byte-pair encoding: pairs of neighbouring texts that become one token, and their order.
//!
//! A merge is kept under its result, as the place where the result is split in two: the text of the result says the rest.
//! That takes a quarter of the memory of a table by pairs, and reading half a million merges needs no lookup each,
//! because files list them by result.
//!
//! A second, smaller table lists the pairs of characters that stand side by side inside some merged token. Between two
//! characters that form no such pair no merge can ever reach across, so text may be cut there without changing the
//! result. Cuts fall before most spaces, around digits and newlines: words, found without knowing what a word is, and
//! exact for whatever vocabulary the file brings.

use carat_gguf::{GgufError, Metadata};
use rustc_hash::FxHashSet;

use crate::{TextError, TokenId, Vocab, vocab::SPACE_MARK};

const MERGES_KEY: &str = "tokenizer.ggml.merges";

/// Product of two texts; the lowest rank goes first.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Merge {
    pub(crate) rank: u32,
    pub(crate) product: TokenId,
}

#[derive(Debug)]
pub(crate) struct Merges {
    /// The splits of token `id` are those from `starts[id]` to `starts[id + 1]`.
    starts: Vec<u32>,
    splits: Vec<Split>,
    longest_product_bytes: usize,
    joined: JoinedCharacters,
}

#[derive(Clone, Copy, Debug, Default)]
struct Split {
    left_bytes: u32,
    rank: u32,
}

impl Merges {
    /// Reads the merge list; each entry is `left right`, its place is its rank.
    pub(crate) fn from_metadata(metadata: &Metadata, vocab: &Vocab) -> Result<Merges, TextError> {
        metadata.require(MERGES_KEY)?;
        let mut found: Vec<(TokenId, Split)> = Vec::new();
        let mut joined = JoinedCharacters::new();
        let mut longest_product_bytes = 0;
        if let Some(array) = metadata.array(MERGES_KEY)? {
            let strings = array.strings().ok_or_else(|| GgufError::KeyType {
                key: MERGES_KEY.to_owned(),
                expected: "an array of strings",
                found: array.kind().to_string(),
            })?;
            found.reserve(array.len());
            let mut product: TokenId = 0;
            for (rank, text) in strings.enumerate() {
                let damaged = |reason| TextError::Merge {
                    rank,
                    text: text.to_owned(),
                    reason,
                };
                let (left, right) = split(text)
                    .ok_or_else(|| damaged("there is no space between its two parts"))?;
                // Nearly always the result of the merge before, or the token after that.
                let is_product = |id: &TokenId| {
                    let rest = vocab.text(*id).and_then(|text| text.strip_prefix(left));
                    rest == Some(right) && vocab.has_distinct_texts()
                };
                product = [product, product.wrapping_add(1)]
                    .into_iter()
                    .find(is_product)
                    .or_else(|| vocab.find(&format!("{left}{right}")))
                    .ok_or_else(|| damaged("its result is not a token"))?;
                // Ordinary text must never turn into a mark, whatever the file lists.
                if vocab.is_special(product) {
                    continue;
                }
                let rank = u32::try_from(rank)
                    .map_err(|_| damaged("there are more merges than 32 bits count"))?;
                let left_bytes = left.len() as u32;
                if found.last().is_none_or(|(last, _)| *last != product) {
                    let text = vocab.text(product).unwrap_or_default();
                    longest_product_bytes = longest_product_bytes.max(text.len());
                    joined.add(text);
                }
                found.push((product, Split { left_bytes, rank }));
            }
        }
        let (starts, splits) = by_product(&found, vocab.len());
        Ok(Merges {
            starts,
            splits,
            longest_product_bytes,
            joined,
        })
    }

    /// Merge of the two parts of `text` that meet after `left_bytes`.
    pub(crate) fn get(&self, vocab: &Vocab, text: &str, left_bytes: usize) -> Option<Merge> {
        if text.len() > self.longest_product_bytes {
            return None;
        }
        let product = vocab.find(text)?;
        let of_product =
            self.starts[product as usize] as usize..self.starts[product as usize + 1] as usize;
        let split = self.splits[of_product]
            .iter()
            .find(|split| split.left_bytes as usize == left_bytes)?;
        Some(Merge {
            rank: split.rank,
            product,
        })
    }

    /// True where some merged token has these two characters side by side.
    pub(crate) fn may_join(&self, left: char, right: char) -> bool {
        self.joined.contains(left, right)
    }
}

/// Sorts splits by product, keeping their order, and says where each product's begin.
fn by_product(found: &[(TokenId, Split)], products: usize) -> (Vec<u32>, Vec<Split>) {
    let mut starts = vec![0; products + 1];
    for (product, _) in found {
        starts[*product as usize + 1] += 1;
    }
    for id in 0..products {
        starts[id + 1] += starts[id];
    }
    let mut next = starts.clone();
    let mut splits = vec![Split::default(); found.len()];
    for (product, split) in found {
        let place = &mut next[*product as usize];
        splits[*place as usize] = *split;
        *place += 1;
    }
    (starts, splits)
}

/// The parts of `left right`. The gap is the first space after the first byte: a left part may itself be a space.
fn split(merge: &str) -> Option<(&str, &str)> {
    let gap = 1 + merge.bytes().skip(1).position(|byte| byte == b' ')?;
    Some((&merge[..gap], &merge[gap + 1..]))
}

/// A set of character pairs; those of ASCII and `▁`, asked for most, are a bitmap.
#[derive(Debug)]
struct JoinedCharacters {
    /// Bit `right` of entry `left`.
    ascii: [u128; 128],
    others: FxHashSet<(char, char)>,
}

impl JoinedCharacters {
    fn new() -> JoinedCharacters {
        JoinedCharacters {
            ascii: [0; 128],
            others: FxHashSet::default(),
        }
    }

    fn add(&mut self, text: &str) {
        for (left, right) in text.chars().zip(text.chars().skip(1)) {
            match (ascii(left), ascii(right)) {
                (Some(left), Some(right)) => self.ascii[left] |= 1 << right,
                _ => {
                    self.others.insert((left, right));
                }
            }
        }
    }

    fn contains(&self, left: char, right: char) -> bool {
        match (ascii(left), ascii(right)) {
            (Some(left), Some(right)) => self.ascii[left] >> right & 1 == 1,
            _ => self.others.contains(&(left, right)),
        }
    }
}

/// A place in the bitmap. `▁` has that of the space, which neither tokens nor marked text contain.
fn ascii(character: char) -> Option<usize> {
    match character {
        SPACE_MARK => Some(' ' as usize),
        ' ' => None,
        other => other.is_ascii().then_some(other as usize),
    }
}
