//! The token table: texts, kinds, and the tokens that mean something to a chat.
//!
//! Special tokens are found by their text, because converters disagree about token types: some files call `<eos>` an
//! ordinary token, and the tool markers are "user-defined" in one file and "control" in the next. All texts live in one
//! string with their ends beside it, and the index from text to id holds ids only, so 262,144 tokens cost a few
//! megabytes and no allocation each.

use std::hash::Hasher;

use carat_gguf::{GgufError, Metadata};
use rustc_hash::FxHasher;

use crate::TextError;

/// Place of a token in the vocabulary.
pub type TokenId = u32;

/// Character for a space inside token texts.
pub(crate) const SPACE_MARK: char = '▁';

const MODEL_KEY: &str = "tokenizer.ggml.model";
const TOKENS_KEY: &str = "tokenizer.ggml.tokens";
const TYPES_KEY: &str = "tokenizer.ggml.token_type";
const BOS_KEY: &str = "tokenizer.ggml.bos_token_id";
const EOS_KEY: &str = "tokenizer.ggml.eos_token_id";
const SUPPRESS_KEY: &str = "tokenizer.ggml.suppress_tokens";

/// Special in every Gemma 4 vocabulary, whatever type a file gives them.
const SPECIAL_TEXTS: [&str; 24] = [
    "<pad>",
    "<eos>",
    "<bos>",
    "<unk>",
    "<mask>",
    "<|tool>",
    "<tool|>",
    "<|tool_call>",
    "<tool_call|>",
    "<|tool_response>",
    "<tool_response|>",
    "<|\"|>",
    "<|think|>",
    "<|channel>",
    "<channel|>",
    "<|turn>",
    "<turn|>",
    "<|image>",
    "<image|>",
    "<|image|>",
    "<|audio>",
    "<audio|>",
    "<|audio|>",
    "<|video|>",
];

/// Generation ends at each of these; files name only the first. Without the last one the model invents tool results.
const STOP_TEXTS: [&str; 3] = ["<eos>", "<turn|>", "<|tool_response>"];

/// Way a token is read and written.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TokenKind {
    /// Its text, with `▁` for spaces.
    Text,
    /// One byte of a character that has no token of its own.
    Byte(u8),
    /// A mark such as `<|turn>`; never made from ordinary text.
    Special,
}

/// The marks that structure a chat; `None` where a vocabulary lacks one.
#[derive(Clone, Copy, Debug, Default)]
pub struct Marks {
    /// `<|turn>`, before the speaker's role.
    pub turn_start: Option<TokenId>,
    /// `<turn|>`, which also ends generation.
    pub turn_end: Option<TokenId>,
    /// `<|channel>`, before the model's thoughts.
    pub channel_start: Option<TokenId>,
    /// `<channel|>`, after them.
    pub channel_end: Option<TokenId>,
    /// `<|tool_call>`, before a call.
    pub call_start: Option<TokenId>,
    /// `<tool_call|>`, after it.
    pub call_end: Option<TokenId>,
    /// `<|"|>`, on both sides of a string in a call.
    pub quote: Option<TokenId>,
}

/// The token table of one model file.
#[derive(Debug)]
pub struct Vocab {
    texts: Texts,
    kinds: Vec<TokenKind>,
    index: TextIndex,
    byte_tokens: [TokenId; 256],
    marks: Marks,
    bos: TokenId,
    stop_tokens: Vec<TokenId>,
    suppressed_tokens: Vec<TokenId>,
}

impl Vocab {
    /// The table of a model file. An error names the key that is missing or damaged.
    pub fn from_metadata(metadata: &Metadata) -> Result<Vocab, TextError> {
        metadata.require(MODEL_KEY)?;
        let model = metadata.str(MODEL_KEY)?.unwrap_or_default();
        if model != "gemma4" {
            return Err(TextError::TokenizerModel {
                found: model.to_owned(),
            });
        }
        let texts = read_texts(metadata)?;
        let index = TextIndex::new(&texts);
        let mut kinds = read_kinds(metadata, texts.len())?;
        let find = |text: &str| index.find(&texts, text);

        for id in SPECIAL_TEXTS.iter().filter_map(|text| find(text)) {
            kinds[id as usize] = TokenKind::Special;
        }
        let mut byte_tokens = [0; 256];
        for (byte, slot) in (0..=255u8).zip(&mut byte_tokens) {
            let text = format!("<0x{byte:02X}>");
            *slot = find(&text).ok_or(TextError::MissingToken { text })?;
            kinds[*slot as usize] = TokenKind::Byte(byte);
        }

        let named = |key: &'static str| -> Result<Option<TokenId>, TextError> {
            match metadata.u32(key)? {
                Some(id) => known_id(key, id, texts.len()).map(Some),
                None => Ok(None),
            }
        };
        let bos =
            named(BOS_KEY)?
                .or_else(|| find("<bos>"))
                .ok_or_else(|| TextError::MissingToken {
                    text: "<bos>".to_owned(),
                })?;
        let mut stop_tokens: Vec<_> = STOP_TEXTS.iter().filter_map(|text| find(text)).collect();
        stop_tokens.extend(named(EOS_KEY)?);
        stop_tokens.sort_unstable();
        stop_tokens.dedup();
        // Named by the file, so special even under a text of the file's own.
        for &id in stop_tokens.iter().chain([&bos]) {
            kinds[id as usize] = TokenKind::Special;
        }
        let suppressed_tokens = metadata
            .u32_array(SUPPRESS_KEY)?
            .unwrap_or_default()
            .into_iter()
            .map(|id| known_id(SUPPRESS_KEY, id, texts.len()))
            .collect::<Result<_, _>>()?;
        let marks = Marks {
            turn_start: find("<|turn>"),
            turn_end: find("<turn|>"),
            channel_start: find("<|channel>"),
            channel_end: find("<channel|>"),
            call_start: find("<|tool_call>"),
            call_end: find("<tool_call|>"),
            quote: find("<|\"|>"),
        };
        Ok(Vocab {
            texts,
            kinds,
            index,
            byte_tokens,
            marks,
            bos,
            stop_tokens,
            suppressed_tokens,
        })
    }

    /// Count of the tokens; never zero.
    #[expect(
        clippy::len_without_is_empty,
        reason = "the byte tokens are always there"
    )]
    pub fn len(&self) -> usize {
        self.kinds.len()
    }

    /// The token's text as the file has it, or `None` past the end of the vocabulary.
    pub fn text(&self, id: TokenId) -> Option<&str> {
        self.texts.get(id)
    }

    /// The token's kind, or `None` past the end of the vocabulary.
    pub fn kind(&self, id: TokenId) -> Option<TokenKind> {
        self.kinds.get(id as usize).copied()
    }

    /// The first token with exactly this text.
    pub fn find(&self, text: &str) -> Option<TokenId> {
        self.index.find(&self.texts, text)
    }

    /// True where each token is the one that [`Vocab::find`] finds by its text.
    pub(crate) fn has_distinct_texts(&self) -> bool {
        self.index.used == self.len()
    }

    /// True for a mark such as `<|turn>`.
    pub fn is_special(&self, id: TokenId) -> bool {
        self.kind(id) == Some(TokenKind::Special)
    }

    /// All special tokens, ascending.
    pub fn special_tokens(&self) -> impl Iterator<Item = TokenId> {
        (0..)
            .zip(&self.kinds)
            .filter_map(|(id, kind)| (*kind == TokenKind::Special).then_some(id))
    }

    /// The bytes a token stands for in a text: those of its characters, or one of an unfinished character. Special tokens stand
    /// for their names; ids outside the vocabulary for nothing.
    pub fn bytes(&self, id: TokenId) -> Vec<u8> {
        match (self.kind(id), self.text(id)) {
            (Some(TokenKind::Byte(byte)), _) => vec![byte],
            (Some(TokenKind::Text), Some(text)) => text.replace(SPACE_MARK, " ").into_bytes(),
            (_, text) => text.unwrap_or_default().as_bytes().to_vec(),
        }
    }

    /// The token of one byte of a character that has none of its own.
    pub fn byte_token(&self, byte: u8) -> TokenId {
        self.byte_tokens[byte as usize]
    }

    /// The marks that structure a chat.
    pub fn marks(&self) -> &Marks {
        &self.marks
    }

    /// Stands before every prompt, also in files that say otherwise.
    pub fn bos(&self) -> TokenId {
        self.bos
    }

    /// Tokens that end generation, ascending.
    pub fn stop_tokens(&self) -> &[TokenId] {
        &self.stop_tokens
    }

    /// True for a token that ends generation.
    pub fn is_stop(&self, id: TokenId) -> bool {
        self.stop_tokens.contains(&id)
    }

    /// Tokens that must never be sampled; most files have none.
    pub fn suppressed_tokens(&self) -> &[TokenId] {
        &self.suppressed_tokens
    }
}

fn known_id(key: &'static str, id: u32, count: usize) -> Result<TokenId, TextError> {
    if (id as usize) < count {
        Ok(id)
    } else {
        Err(TextError::UnknownTokenId { key, id, count })
    }
}

fn read_texts(metadata: &Metadata) -> Result<Texts, TextError> {
    metadata.require(TOKENS_KEY)?;
    let mut texts = Texts::default();
    if let Some(array) = metadata.array(TOKENS_KEY)? {
        let strings = array.strings().ok_or_else(|| GgufError::KeyType {
            key: TOKENS_KEY.to_owned(),
            expected: "an array of strings",
            found: array.kind().to_string(),
        })?;
        texts.ends.reserve(array.len());
        for text in strings {
            texts.push(text)?;
        }
    }
    Ok(texts)
}

/// Kinds as the file's types say; tokens known by text are corrected afterwards.
fn read_kinds(metadata: &Metadata, count: usize) -> Result<Vec<TokenKind>, TextError> {
    const UNKNOWN: u32 = 2;
    const CONTROL: u32 = 3;
    const USER_DEFINED: u32 = 4;
    let Some(types) = metadata.u32_array(TYPES_KEY)? else {
        return Ok(vec![TokenKind::Text; count]);
    };
    if types.len() != count {
        return Err(TextError::VocabularySize {
            key: TYPES_KEY,
            found: types.len(),
            expected: count,
        });
    }
    Ok(types
        .into_iter()
        .map(|t| match t {
            UNKNOWN | CONTROL | USER_DEFINED => TokenKind::Special,
            _ => TokenKind::Text,
        })
        .collect())
}

/// All token texts in one string.
#[derive(Debug, Default)]
struct Texts {
    all: String,
    ends: Vec<u32>,
}

impl Texts {
    fn push(&mut self, text: &str) -> Result<(), TextError> {
        self.all.push_str(text);
        let (tokens, bytes) = (self.ends.len() + 1, self.all.len());
        match (u32::try_from(tokens), u32::try_from(bytes)) {
            (Ok(_), Ok(end)) => self.ends.push(end),
            _ => return Err(TextError::VocabularyTooLarge { tokens, bytes }),
        }
        Ok(())
    }

    fn len(&self) -> usize {
        self.ends.len()
    }

    fn get(&self, id: TokenId) -> Option<&str> {
        let id = id as usize;
        let end = *self.ends.get(id)? as usize;
        let start = id
            .checked_sub(1)
            .map_or(0, |before| self.ends[before] as usize);
        Some(&self.all[start..end])
    }

    /// `get(id) == Some(text)` for a known id, without looking for character borders: loading asks a million times.
    fn is(&self, id: TokenId, text: &str) -> bool {
        let id = id as usize;
        let start = id.checked_sub(1).map_or(0, |before| self.ends[before]);
        self.all.as_bytes()[start as usize..self.ends[id] as usize] == *text.as_bytes()
    }
}

/// From text to id by open addressing. Slots hold ids; the texts they are compared with stay where they are.
#[derive(Debug)]
struct TextIndex {
    slots: Vec<Slot>,
    /// Slots that hold an id: fewer than there are tokens if some share a text.
    used: usize,
}

#[derive(Clone, Copy, Debug)]
struct Slot {
    id: TokenId,
    /// Other bits of the hash than those that chose the slot: tells most other texts apart without reading them.
    tag: u32,
}

impl TextIndex {
    const EMPTY: Slot = Slot {
        id: TokenId::MAX,
        tag: 0,
    };

    fn new(texts: &Texts) -> TextIndex {
        let mut index = TextIndex {
            slots: vec![TextIndex::EMPTY; (texts.len() * 2).next_power_of_two()],
            used: 0,
        };
        for id in 0..texts.len() as TokenId {
            let text = texts.get(id).unwrap_or_default();
            let (place, tag) = index.place(texts, text);
            // The first of two tokens with one text is the one that merges produce.
            if index.slots[place].id == TextIndex::EMPTY.id {
                index.slots[place] = Slot { id, tag };
                index.used += 1;
            }
        }
        index
    }

    /// Slot of the text, or the empty one it would go to, and its tag. Half of the slots are empty, so the search
    /// ends.
    fn place(&self, texts: &Texts, text: &str) -> (usize, u32) {
        let mask = self.slots.len() - 1;
        let mut hasher = FxHasher::default();
        hasher.write(text.as_bytes());
        let hash = hasher.finish();
        let tag = (hash >> 32) as u32;
        let mut place = hash as usize & mask;
        loop {
            let slot = self.slots[place];
            if slot.id == TextIndex::EMPTY.id || (slot.tag == tag && texts.is(slot.id, text)) {
                return (place, tag);
            }
            place = (place + 1) & mask;
        }
    }

    fn find(&self, texts: &Texts, text: &str) -> Option<TokenId> {
        let id = self.slots[self.place(texts, text).0].id;
        (id != TextIndex::EMPTY.id).then_some(id)
    }
}

#[cfg(test)]
mod tests;
