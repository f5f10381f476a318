//! Which two neighbouring tokens become one, and in which order: the table behind byte-pair encoding.
//!
//! A second, smaller table lists the pairs of characters that stand side by side inside some merged token. Between two
//! characters that form no such pair no merge can ever reach across, so text may be cut there without changing the
//! result. Cuts fall before most spaces, around digits and newlines: words, found without knowing what a word is, and
//! exact for whatever vocabulary the file brings.

use carat_gguf::{GgufError, Metadata};
use rustc_hash::{FxHashMap, FxHashSet};

use crate::{TextError, TokenId, Vocab, vocab::SPACE_MARK};

const MERGES_KEY: &str = "tokenizer.ggml.merges";

/// What a pair of tokens becomes; the lowest rank goes first.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Merge {
    pub(crate) rank: u32,
    pub(crate) product: TokenId,
}

#[derive(Debug)]
pub(crate) struct Merges {
    by_pair: FxHashMap<(TokenId, TokenId), Merge>,
    joined: JoinedCharacters,
}

impl Merges {
    /// Reads the merge list; each entry is `left right`, its place is its rank.
    pub(crate) fn from_metadata(metadata: &Metadata, vocab: &Vocab) -> Result<Merges, TextError> {
        metadata.require(MERGES_KEY)?;
        let mut merges = Merges {
            by_pair: FxHashMap::default(),
            joined: JoinedCharacters::new(),
        };
        let Some(array) = metadata.array(MERGES_KEY)? else {
            return Ok(merges);
        };
        let strings = array.strings().ok_or_else(|| GgufError::KeyType {
            key: MERGES_KEY.to_owned(),
            expected: "an array of strings",
            found: array.kind().to_string(),
        })?;
        merges.by_pair.reserve(array.len());
        let mut is_product = vec![false; vocab.len()];
        let mut product: TokenId = 0;
        for (rank, text) in strings.enumerate() {
            let damaged = |reason| TextError::Merge {
                rank,
                text: text.to_owned(),
                reason,
            };
            let (left_text, right_text) =
                split(text).ok_or_else(|| damaged("there is no space between its two parts"))?;
            let (Some(left), Some(right)) = (vocab.find(left_text), vocab.find(right_text)) else {
                return Err(damaged("one of its parts is not a token"));
            };
            // Files list merges by result, so this one's is nearly always the last one's or the token after it.
            let is_result = |id: &TokenId| {
                let rest = vocab
                    .text(*id)
                    .and_then(|text| text.strip_prefix(left_text));
                rest == Some(right_text)
            };
            product = [product, product.wrapping_add(1)]
                .into_iter()
                .find(is_result)
                .or_else(|| vocab.find(&format!("{left_text}{right_text}")))
                .ok_or_else(|| damaged("its result is not a token"))?;
            // Ordinary text must never turn into a mark, whatever the file lists.
            if [left, right, product]
                .iter()
                .any(|id| vocab.is_special(*id))
            {
                continue;
            }
            let rank = u32::try_from(rank)
                .map_err(|_| damaged("there are more merges than 32 bits count"))?;
            merges
                .by_pair
                .entry((left, right))
                .or_insert(Merge { rank, product });
            if !std::mem::replace(&mut is_product[product as usize], true) {
                merges.joined.add(vocab.text(product).unwrap_or_default());
            }
        }
        Ok(merges)
    }

    pub(crate) fn get(&self, left: TokenId, right: TokenId) -> Option<Merge> {
        self.by_pair.get(&(left, right)).copied()
    }

    /// Whether some merged token has these two characters side by side.
    pub(crate) fn may_join(&self, left: char, right: char) -> bool {
        self.joined.contains(left, right)
    }
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
