//! The tokens of a model as grammars see them: bytes, marks, and those that no answer may contain.
//!
//! Special tokens carry a marker byte that no text has, so a grammar reaches them by id alone and text that only looks like one
//! stays text. Tokens that a vocabulary keeps in reserve have no bytes at all: nothing can ask for them.

use std::sync::Arc;

use carat_model::sampling::TokenMask;
use carat_text::{Specials, TokenId, Tokenizer, Vocab, vocab::TokenKind};
use toktrie::{TokRxInfo, TokTrie, TokenizerEnv};

use crate::GrammarError;

/// Character for a space inside token texts. Text that has it for its own sake must be spelt in byte tokens.
const SPACE_MARK: char = '▁';

/// Everything about a model's tokens that an answer is constrained by.
pub(crate) struct Vocabulary {
    tokenizer: Arc<Tokenizer>,
    trie: TokTrie,
    /// Tokens of plain text: all but special and reserved ones.
    text: TokenMask,
    stops: Vec<TokenId>,
    /// `<|tool_response>`: ends an answer, but only after a call.
    result_start: Option<TokenId>,
    /// Tokens between the mark that opens a thought and the thought.
    thought_header: Vec<TokenId>,
    newline: Vec<TokenId>,
}

impl Vocabulary {
    pub(crate) fn new(tokenizer: Arc<Tokenizer>) -> Result<Vocabulary, GrammarError> {
        let vocab = Arc::clone(tokenizer.vocab());
        let stops = vocab.stop_tokens().to_vec();
        let Some(&eos) = stops.first() else {
            return Err(GrammarError::MissingToken { text: "<eos>" });
        };
        let ids = 0..vocab.len() as TokenId;
        let words: Vec<_> = ids.clone().map(|id| bytes(&vocab, id)).collect();
        let info = TokRxInfo::new(vocab.len() as u32, eos);
        let trie = TokTrie::from(&info, &words).with_eos_tokens(&stops);
        let is_text = |id: &TokenId| !vocab.is_special(*id) && !words[*id as usize].is_empty();
        Ok(Vocabulary {
            trie,
            text: TokenMask::of(vocab.len(), ids.filter(is_text)),
            stops,
            result_start: vocab.find("<|tool_response>"),
            thought_header: tokenizer.encode("thought\n", Specials::Ignore),
            newline: tokenizer.encode("\n", Specials::Ignore),
            tokenizer,
        })
    }

    pub(crate) fn vocab(&self) -> &Vocab {
        self.tokenizer.vocab()
    }

    /// Tokens between the mark that opens a thought and the thought.
    pub(crate) fn thought_header(&self) -> &[TokenId] {
        &self.thought_header
    }

    /// Tokens that end a thought which would go on otherwise.
    pub(crate) fn thought_end(&self) -> impl Iterator<Item = TokenId> {
        let mark = self.vocab().marks().channel_end;
        self.newline.iter().copied().chain(mark)
    }

    /// Allows every token of plain text.
    pub(crate) fn allow_text(&self, mask: &mut TokenMask) {
        if mask.vocab() == self.text.vocab() && mask.lowest().is_none() {
            mask.clone_from(&self.text);
        } else {
            allow_words(self.text.words(), mask);
        }
    }

    /// Allows the tokens that end an answer.
    pub(crate) fn allow_stops(&self, after_call: bool, mask: &mut TokenMask) {
        let stops = self.stops.iter().copied();
        for stop in stops.filter(|stop| after_call || Some(*stop) != self.result_start) {
            mask.allow(stop);
        }
    }

    /// Forbids the end that asks for the results of calls.
    pub(crate) fn forbid_result(&self, mask: &mut TokenMask) {
        if let Some(result) = self.result_start {
            mask.forbid(result);
        }
    }

    /// The token that ends an answer to which nothing can be added.
    pub(crate) fn stop(&self, after_call: bool) -> Option<TokenId> {
        let result = self.result_start.filter(|_| after_call);
        let turn_end = self.vocab().marks().turn_end;
        let known = |stop: &TokenId| self.stops.contains(stop);
        let candidates = [result, turn_end, self.stops.first().copied()];
        candidates.into_iter().flatten().find(known)
    }

    pub(crate) fn is_stop(&self, token: TokenId) -> bool {
        self.stops.contains(&token)
    }
}

/// Allows the tokens whose bits are set: bit `t % 32` of word `t / 32` is token `t`. Takes few steps where few tokens or almost all
/// are allowed.
pub(crate) fn allow_words(words: &[u32], mask: &mut TokenMask) {
    let set: u32 = words.iter().map(|word| word.count_ones()).sum();
    if set as usize > mask.vocab() / 2 && mask.lowest().is_none() {
        mask.allow_all();
        each_bit(words.iter().map(|word| !word), |token| mask.forbid(token));
        for token in words.len() * 32..mask.vocab() {
            mask.forbid(token as TokenId);
        }
    } else {
        each_bit(words.iter().copied(), |token| mask.allow(token));
    }
}

fn each_bit(words: impl Iterator<Item = u32>, mut take: impl FnMut(TokenId)) {
    for (place, mut word) in words.enumerate() {
        while word != 0 {
            take(place as TokenId * 32 + word.trailing_zeros());
            word &= word - 1;
        }
    }
}

/// Bytes of a token as text, after a marker for a special one; none for one that is kept in reserve.
fn bytes(vocab: &Vocab, id: TokenId) -> Vec<u8> {
    let text = vocab.text(id).unwrap_or_default();
    match vocab.kind(id) {
        // Not part of any text in UTF-8, so it can serve as the marker.
        Some(TokenKind::Byte(TokTrie::SPECIAL_TOKEN_MARKER)) => Vec::new(),
        Some(TokenKind::Byte(byte)) => vec![byte],
        Some(TokenKind::Special) => {
            let mut bytes = vec![TokTrie::SPECIAL_TOKEN_MARKER];
            bytes.extend_from_slice(text.as_bytes());
            bytes
        }
        _ if is_reserved(text) => Vec::new(),
        _ => text.replace(SPACE_MARK, " ").into_bytes(),
    }
}

/// True for a token that has no meaning yet, like `<unused7>`: models fall into loops of these.
fn is_reserved(text: &str) -> bool {
    let number = text
        .strip_prefix("<unused")
        .and_then(|rest| rest.strip_suffix('>'));
    text == "[multimodal]"
        || number.is_some_and(|n| !n.is_empty() && n.bytes().all(|b| b.is_ascii_digit()))
}

impl TokenizerEnv for Vocabulary {
    fn tok_trie(&self) -> &TokTrie {
        &self.trie
    }

    fn tokenize_bytes(&self, bytes: &[u8]) -> Vec<TokenId> {
        let mut ids = Vec::new();
        let spell = |bytes: &[u8], ids: &mut Vec<TokenId>| {
            ids.extend(bytes.iter().map(|byte| self.vocab().byte_token(*byte)));
        };
        for chunk in bytes.utf8_chunks() {
            let mut pieces = chunk.valid().split(SPACE_MARK);
            if let Some(first) = pieces.next() {
                ids.extend(self.tokenizer.encode(first, Specials::Ignore));
            }
            for piece in pieces {
                spell(SPACE_MARK.to_string().as_bytes(), &mut ids);
                ids.extend(self.tokenizer.encode(piece, Specials::Ignore));
            }
            spell(chunk.invalid(), &mut ids);
        }
        ids
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing;

    #[test]
    fn words_are_copied_whether_few_or_many_are_set() {
        for vocab in [1, 31, 64, 100, 200] {
            for words in [
                vec![0, 0, 0],
                vec![0x8000_0001, 4, 8],
                vec![u32::MAX; 3],
                vec![u32::MAX, 7, 0],
                vec![u32::MAX; 9],
            ] {
                let mut mask = TokenMask::none(vocab);
                allow_words(&words, &mut mask);
                for token in 0..400 {
                    let word = words.get(token / 32).copied().unwrap_or(0);
                    let wanted = token < vocab && word >> (token % 32) & 1 == 1;
                    assert_eq!(mask.allows(token as TokenId), wanted, "{vocab} {token}");
                }
            }
        }
        let mut mask = TokenMask::of(64, [3]);
        allow_words(&[u32::MAX - 8, u32::MAX], &mut mask);
        assert_eq!(mask.count(), 64, "what was allowed stays so");
    }

    #[test]
    fn every_text_is_spelt_in_tokens_of_the_same_bytes() {
        let vocabulary = Vocabulary::new(testing::demo_tokenizer()).unwrap();
        for text in [
            "Hello, world",
            "a▁b ▁",
            "  \n\t",
            "日本語 naïve 🦀",
            "<|turn>",
        ] {
            let ids = vocabulary.tokenize_bytes(text.as_bytes());
            assert!(ids.iter().all(|id| !vocabulary.vocab().is_special(*id)));
            assert_eq!(vocabulary.trie.decode_raw(&ids), text.as_bytes(), "{text}");
        }
        let broken = b"ok \xe2\x96 \xfe";
        let ids = vocabulary.tokenize_bytes(broken);
        assert_eq!(vocabulary.trie.decode_raw(&ids), broken);
    }

    #[test]
    fn text_has_no_special_and_no_reserved_tokens() {
        assert!(is_reserved("<unused49>") && is_reserved("[multimodal]"));
        assert!(!is_reserved("<unused>") && !is_reserved("<unusedx>") && !is_reserved("<table>"));
        let vocabulary = Vocabulary::new(testing::demo_tokenizer()).unwrap();
        let vocab = vocabulary.vocab();
        for id in vocab.special_tokens() {
            assert!(!vocabulary.text.allows(id));
        }
        assert!(vocabulary.text.allows(vocab.byte_token(b'a')));
        assert!(!vocabulary.text.allows(vocab.byte_token(0xff)));
    }
}
