//! Tokens and merges of Gemma 4's kind, without anyone's text: special tokens, byte tokens, characters, made-up words.
//!
//! Words grow by joining two earlier ones, so that each has the merges that lead to it and every merge makes a token.

use std::collections::HashSet;

use carat_gguf::{
    quant::SplitMix64,
    writer::{Field, Writer},
};

const NORMAL: i32 = 1;
const CONTROL: i32 = 3;
const USER_DEFINED: i32 = 4;
const BYTE: i32 = 6;

/// Special tokens of the published vocabulary: id, type, text.
const SPECIALS: [(usize, i32, &str); 24] = [
    (0, CONTROL, "<pad>"),
    (1, CONTROL, "<eos>"),
    (2, CONTROL, "<bos>"),
    (3, CONTROL, "<unk>"),
    (4, CONTROL, "<mask>"),
    (46, CONTROL, "<|tool>"),
    (47, CONTROL, "<tool|>"),
    (48, USER_DEFINED, "<|tool_call>"),
    (49, USER_DEFINED, "<tool_call|>"),
    (50, USER_DEFINED, "<|tool_response>"),
    (51, USER_DEFINED, "<tool_response|>"),
    (52, USER_DEFINED, "<|\"|>"),
    (98, CONTROL, "<|think|>"),
    (100, USER_DEFINED, "<|channel>"),
    (101, USER_DEFINED, "<channel|>"),
    (105, CONTROL, "<|turn>"),
    (106, CONTROL, "<turn|>"),
    (255999, CONTROL, "<|image>"),
    (256000, CONTROL, "<|audio>"),
    (258880, CONTROL, "<|image|>"),
    (258881, CONTROL, "<|audio|>"),
    (258882, CONTROL, "<image|>"),
    (258883, CONTROL, "<audio|>"),
    (258884, CONTROL, "<|video|>"),
];

/// Ids of newline runs and byte tokens in the published vocabulary.
const FIRST_NEWLINES: usize = 107;
const LONGEST_NEWLINES: usize = 31;
const FIRST_BYTE: usize = 238;

const SPACE: &str = "\u{2581}";
const LONGEST_WORD: usize = 12;
const ENDINGS: usize = 500;

/// Tokens, their types, and merges by rank.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Vocabulary {
    /// As text, by id.
    pub tokens: Vec<String>,
    /// As GGUF numbers them, by id.
    pub types: Vec<i32>,
    /// `left right`.
    pub merges: Vec<String>,
}

impl Vocabulary {
    /// Tokens in the published vocabulary.
    pub const PUBLISHED: usize = 262144;

    /// As many tokens as published, with those the program knows by id or text at their published places.
    pub fn published() -> Vocabulary {
        let mut draft = Draft::default();
        for (id, kind, text) in SPECIALS {
            draft.put(id, kind, text);
        }
        draft.runs("\n", LONGEST_NEWLINES, FIRST_NEWLINES);
        for byte in 0..=255u8 {
            draft.put(
                FIRST_BYTE + usize::from(byte),
                BYTE,
                &format!("<0x{byte:02X}>"),
            );
        }
        // Ids that nothing claimed, before the first ordinary token.
        for id in 0..FIRST_BYTE + 256 {
            if draft.is_free(id) {
                draft.put(id, NORMAL, &format!("<unused{id}>"));
            }
        }
        draft.characters(&[
            ('!', '~'),
            ('¡', 'ÿ'),
            ('Ά', 'ώ'),
            ('А', 'я'),
            ('ぁ', 'ヿ'),
            ('一', '龥'),
        ]);
        draft.words(Vocabulary::PUBLISHED);
        draft.finish()
    }

    /// A small vocabulary with everything a tokenizer looks for, ids packed.
    pub fn packed(size: usize) -> Vocabulary {
        let mut draft = Draft::default();
        for (id, (_, kind, text)) in SPECIALS.into_iter().enumerate() {
            draft.put(id, kind, text);
        }
        draft.runs("\n", 2, SPECIALS.len());
        for byte in 0..=255u8 {
            draft.add(BYTE, &format!("<0x{byte:02X}>"));
        }
        draft.characters(&[('!', '~')]);
        assert!(
            draft.used < size,
            "special tokens, bytes and letters take {} of {size} tokens",
            draft.used
        );
        draft.words(size);
        draft.finish()
    }

    /// The tokenizer's metadata.
    pub fn write_metadata(&self, writer: &mut Writer) {
        fn borrowed(list: &[String]) -> Vec<&str> {
            list.iter().map(String::as_str).collect()
        }
        let mut put = |key: &str, field: Field<'_>| {
            writer.field(&format!("tokenizer.ggml.{key}"), &field);
        };
        put("model", Field::Str("gemma4"));
        put("tokens", Field::Strs(&borrowed(&self.tokens)));
        put("scores", Field::F32s(&vec![-1000.0; self.tokens.len()]));
        put("token_type", Field::I32s(&self.types));
        put("merges", Field::Strs(&borrowed(&self.merges)));
        for (key, id) in [
            ("padding", 0),
            ("eos", 1),
            ("bos", 2),
            ("unknown", 3),
            ("mask", 4),
        ] {
            put(&format!("{key}_token_id"), Field::U32(id));
        }
        put("add_bos_token", Field::Bool(true));
        put("add_space_prefix", Field::Bool(false));
    }
}

/// A vocabulary whose ids are not all taken yet.
#[derive(Default)]
struct Draft {
    tokens: Vec<Option<(String, i32)>>,
    /// Tokens so far.
    used: usize,
    /// Lowest id that may be free.
    next: usize,
    merges: Vec<String>,
}

impl Draft {
    fn is_free(&self, id: usize) -> bool {
        self.tokens.get(id).is_none_or(Option::is_none)
    }

    fn put(&mut self, id: usize, kind: i32, text: &str) {
        if id >= self.tokens.len() {
            self.tokens.resize(id + 1, None);
        }
        self.tokens[id] = Some((text.to_owned(), kind));
        self.used += 1;
    }

    fn add(&mut self, kind: i32, text: &str) {
        while !self.is_free(self.next) {
            self.next += 1;
        }
        self.put(self.next, kind, text);
    }

    fn merge(&mut self, left: &str, right: &str) {
        self.merges.push(format!("{left} {right}"));
    }

    /// The text once, twice, and so on, at ids that follow each other, with every way to split each.
    fn runs(&mut self, text: &str, longest: usize, first: usize) {
        for count in 1..=longest {
            self.put(first + count - 1, NORMAL, &text.repeat(count));
            for left in 1..count {
                self.merge(&text.repeat(left), &text.repeat(count - left));
            }
        }
    }

    fn characters(&mut self, ranges: &[(char, char)]) {
        self.add(NORMAL, SPACE);
        for c in ranges.iter().flat_map(|&(first, last)| first..=last) {
            self.add(NORMAL, &c.to_string());
        }
    }

    /// Lower-case words, each alone and after a space, until there are `size` tokens.
    fn words(&mut self, size: usize) {
        let mut rng = SplitMix64::new(262144);
        let mut words: Vec<String> = ('a'..='z').map(String::from).collect();
        let mut seen: HashSet<String> = words.iter().cloned().collect();
        for letter in &words {
            if self.used < size {
                self.add(NORMAL, &format!("{SPACE}{letter}"));
                self.merge(SPACE, letter);
            }
        }
        while self.used < size {
            // Endings are early words, which are short.
            let left = &words[rng.below(words.len())];
            let right = &words[rng.below(words.len().min(ENDINGS))];
            if left.len() + right.len() > LONGEST_WORD {
                continue;
            }
            let word = format!("{left}{right}");
            if seen.contains(&word) {
                continue;
            }
            self.add(NORMAL, &word);
            self.merge(left, right);
            if self.used < size {
                self.add(NORMAL, &format!("{SPACE}{word}"));
                self.merge(&format!("{SPACE}{left}"), right);
                self.merge(SPACE, &word);
            }
            seen.insert(word.clone());
            words.push(word);
        }
    }

    fn finish(self) -> Vocabulary {
        let mut vocabulary = Vocabulary {
            merges: self.merges,
            ..Vocabulary::default()
        };
        for token in self.tokens {
            let (text, kind) = token.expect("words fill all free ids");
            vocabulary.tokens.push(text);
            vocabulary.types.push(kind);
        }
        vocabulary
    }
}

#[cfg(test)]
mod tests {
    use std::collections::HashMap;

    use super::*;

    /// Tokens are distinct, merges are distinct, and both parts and the product of each merge are tokens.
    fn check(vocabulary: &Vocabulary) -> HashMap<&str, usize> {
        let ids: HashMap<&str, usize> = vocabulary
            .tokens
            .iter()
            .enumerate()
            .map(|(id, text)| (text.as_str(), id))
            .collect();
        assert_eq!(ids.len(), vocabulary.tokens.len());
        assert_eq!(vocabulary.types.len(), vocabulary.tokens.len());
        let merges: HashSet<&String> = vocabulary.merges.iter().collect();
        assert_eq!(merges.len(), vocabulary.merges.len());
        for merge in &vocabulary.merges {
            let (left, right) = merge.split_once(' ').unwrap();
            for text in [left, right, &format!("{left}{right}")] {
                assert!(ids.contains_key(text), "{text:?} of {merge:?}");
            }
        }
        ids
    }

    #[test]
    fn published_vocabulary_is_consistent_and_of_real_size() {
        let vocabulary = Vocabulary::published();
        let ids = check(&vocabulary);
        assert_eq!(vocabulary.tokens.len(), Vocabulary::PUBLISHED);
        assert!(vocabulary.merges.len() > 300_000);
        for (id, kind, text) in SPECIALS {
            assert_eq!((ids[text], vocabulary.types[id]), (id, kind));
        }
        assert_eq!(ids["<0x00>"], 238);
        assert_eq!(ids["<0xFF>"], 493);
        assert_eq!(ids["\n"], 107);
        assert_eq!(ids[&*"\n".repeat(31)], 137);
        let count = |kind| vocabulary.types.iter().filter(|t| **t == kind).count();
        assert_eq!(
            (count(CONTROL), count(USER_DEFINED), count(BYTE)),
            (17, 7, 256)
        );
    }

    #[test]
    fn packed_vocabulary_is_consistent_and_as_small_as_asked() {
        for size in [400, 448, 512] {
            let vocabulary = Vocabulary::packed(size);
            let ids = check(&vocabulary);
            assert_eq!(ids.len(), size);
            assert!(SPECIALS.iter().all(|(_, _, text)| ids.contains_key(text)));
        }
    }
}
