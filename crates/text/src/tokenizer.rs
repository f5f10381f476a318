//! Text to token ids: byte-pair encoding over characters, with bytes for those the vocabulary does not know.
//!
//! There is no word splitter and no normalisation: spaces become `▁`, and the merge list alone decides. For speed the
//! text is cut where no merge can reach across (see `merges.rs`) and repeated pieces are copied from where they
//! were encoded before; neither changes the result. One piece of n characters costs O(n log n).

use std::{cmp::Reverse, collections::BinaryHeap, hash::Hasher, ops::Range, sync::Arc};

use carat_gguf::Metadata;
use rustc_hash::{FxHashSet, FxHasher};

use crate::{
    Rendered, TextError, TokenDecoder, TokenId, Vocab,
    decoder::SpecialText,
    merges::{Merge, Merges},
    template,
    vocab::{SPACE_MARK, TokenKind},
};

/// Treatment of the texts of special tokens, such as `<|turn>`, in text to encode.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Specials {
    /// They become those tokens: for text the program or the operator wrote.
    Parse,
    /// They are encoded like any other text and no special token can come out: for text of users.
    Ignore,
}

/// Encodes and decodes with one model's vocabulary.
#[derive(Debug)]
pub struct Tokenizer {
    vocab: Arc<Vocab>,
    merges: Merges,
    special_texts: SpecialTexts,
    /// Those of the form `<…>`, the only ones a rendered conversation can keep apart from text of users.
    bracketed_texts: SpecialTexts,
}

impl Tokenizer {
    /// The tokenizer of a model file. An error names the key that is missing or damaged.
    pub fn from_metadata(metadata: &Metadata) -> Result<Tokenizer, TextError> {
        let vocab = Vocab::from_metadata(metadata)?;
        Ok(Tokenizer {
            merges: Merges::from_metadata(metadata, &vocab)?,
            special_texts: SpecialTexts::new(&vocab, |_| true),
            bracketed_texts: SpecialTexts::new(&vocab, template::is_bracketed),
            vocab: Arc::new(vocab),
        })
    }

    /// The token table, shared.
    pub fn vocab(&self) -> &Arc<Vocab> {
        &self.vocab
    }

    /// Encodes without a begin token; see [`Tokenizer::encode_prompt`].
    pub fn encode(&self, text: &str, specials: Specials) -> Vec<TokenId> {
        let mut encoder = Encoder::new(self, text.len());
        match specials {
            Specials::Ignore => encoder.ordinary(text),
            Specials::Parse => {
                for piece in self.special_texts.split(&self.vocab, text) {
                    match piece {
                        Piece::Special(id) => encoder.ids.push(id),
                        Piece::Ordinary(text) => encoder.ordinary(text),
                    }
                }
            }
        }
        encoder.ids
    }

    /// Encodes a prompt of its own: begins with `<bos>`, once, also where the text already does.
    pub fn encode_prompt(&self, text: &str, specials: Specials) -> Vec<TokenId> {
        self.begin(self.encode(text, specials))
    }

    /// Encodes a rendered conversation: the template's marks become special tokens, look-alikes in messages do not.
    pub fn encode_rendered(&self, rendered: &Rendered) -> Vec<TokenId> {
        let pieces: Vec<_> = self
            .bracketed_texts
            .split(&self.vocab, rendered.guarded())
            .map(|piece| match piece {
                Piece::Special(id) => Err(id),
                Piece::Ordinary(text) => Ok(rendered.restore(text)),
            })
            .collect();
        let mut encoder = Encoder::new(self, rendered.guarded().len());
        for piece in &pieces {
            match piece {
                Err(id) => encoder.ids.push(*id),
                Ok(text) => encoder.ordinary(text),
            }
        }
        self.begin(encoder.ids)
    }

    /// The text of the ids, without special tokens. Bytes that are not UTF-8 become U+FFFD, unknown ids nothing.
    pub fn decode(&self, ids: &[TokenId]) -> String {
        let mut decoder = TokenDecoder::new(Arc::clone(&self.vocab), SpecialText::Hide);
        let mut text = String::new();
        for &id in ids {
            decoder.push(id, &mut text);
        }
        decoder.finish(&mut text);
        text
    }

    fn begin(&self, mut ids: Vec<TokenId>) -> Vec<TokenId> {
        if ids.first() != Some(&self.vocab.bos()) {
            ids.insert(0, self.vocab.bos());
        }
        ids
    }
}

/// A part of a text to encode.
enum Piece<'a> {
    Special(TokenId),
    Ordinary(&'a str),
}

/// Finds special tokens in text by the bytes they start with and the lengths they have.
#[derive(Debug)]
struct SpecialTexts {
    ids: FxHashSet<TokenId>,
    starts: [bool; 256],
    /// In bytes, longest first.
    lengths: Vec<usize>,
}

impl SpecialTexts {
    fn new(vocab: &Vocab, wanted: impl Fn(&str) -> bool) -> SpecialTexts {
        let mut texts = SpecialTexts {
            ids: FxHashSet::default(),
            starts: [false; 256],
            lengths: Vec::new(),
        };
        for id in vocab.special_tokens() {
            let text = vocab.text(id).unwrap_or_default();
            if let Some(&start) = text.as_bytes().first()
                && wanted(text)
            {
                texts.ids.insert(id);
                texts.starts[start as usize] = true;
                texts.lengths.push(text.len());
            }
        }
        texts
            .lengths
            .sort_unstable_by_key(|length| Reverse(*length));
        texts.lengths.dedup();
        texts
    }

    /// The pieces of `text` in order; where several special texts start at one place the longest wins.
    fn split<'a>(&self, vocab: &Vocab, text: &'a str) -> impl Iterator<Item = Piece<'a>> {
        let mut rest = text;
        let mut pending = None;
        std::iter::from_fn(move || {
            if let Some(id) = pending.take() {
                return Some(Piece::Special(id));
            }
            if rest.is_empty() {
                return None;
            }
            let found = (0..rest.len()).find_map(|at| Some((at, self.at(vocab, rest, at)?)));
            let Some((at, (id, length))) = found else {
                return Some(Piece::Ordinary(std::mem::take(&mut rest)));
            };
            let before = &rest[..at];
            rest = &rest[at + length..];
            if before.is_empty() {
                return Some(Piece::Special(id));
            }
            pending = Some(id);
            Some(Piece::Ordinary(before))
        })
    }

    /// The special token whose text stands at byte `at`, and its length.
    fn at(&self, vocab: &Vocab, text: &str, at: usize) -> Option<(TokenId, usize)> {
        if !self.starts[text.as_bytes()[at] as usize] {
            return None;
        }
        self.lengths.iter().find_map(|&length| {
            let id = vocab.find(text.get(at..at + length)?)?;
            self.ids.contains(&id).then_some((id, length))
        })
    }
}

/// One encoding under way: the ids so far, and memory to work in.
struct Encoder<'a> {
    tokenizer: &'a Tokenizer,
    ids: Vec<TokenId>,
    seen: Vec<Seen<'a>>,
    /// The piece being merged, with `▁` for spaces.
    marked: String,
    symbols: Vec<Symbol>,
    queue: BinaryHeap<Reverse<Candidate>>,
}

/// A piece and the place of its ids in the output.
#[derive(Clone, Default)]
struct Seen<'a> {
    text: &'a str,
    ids: Range<usize>,
}

/// A stretch of the piece that merging has reached so far, linked to its neighbours.
struct Symbol {
    /// In bytes of the marked piece.
    start: u32,
    end: u32,
    previous: u32,
    next: u32,
    /// Token it was merged into; a single character has not been looked up yet.
    token: Option<TokenId>,
    /// With the next symbol; `None` also once this symbol has become part of another.
    merge: Option<Merge>,
}

/// A merge to try, best first: by rank, then from the left.
#[derive(PartialEq, Eq, PartialOrd, Ord)]
struct Candidate {
    rank: u32,
    left: u32,
}

/// In `previous` and `next`: there is none.
const NONE: u32 = u32::MAX;

/// No piece is longer, so that its symbols can be counted in 32 bits. Text must go on for a gigabyte without a place to
/// cut it before this changes a result.
const LONGEST_PIECE_BYTES: usize = 1 << 30;

impl<'a> Encoder<'a> {
    /// `bytes` is the length of the text to come, to size the memory by.
    fn new(tokenizer: &'a Tokenizer, bytes: usize) -> Encoder<'a> {
        // Each piece has one slot it may be remembered in, so text made to collide costs time but never quadratically.
        let slots = (bytes / 4).next_power_of_two().clamp(16, 1 << 14);
        Encoder {
            tokenizer,
            ids: Vec::with_capacity(bytes / 3),
            seen: vec![Seen::default(); slots],
            marked: String::new(),
            symbols: Vec::new(),
            queue: BinaryHeap::new(),
        }
    }

    /// Encodes text in which nothing is special.
    fn ordinary(&mut self, text: &'a str) {
        let mut start = 0;
        let mut before = None;
        for (at, character) in text.char_indices() {
            let character = mark_space(character);
            if let Some(before) = before
                && (!self.tokenizer.merges.may_join(before, character)
                    || at - start > LONGEST_PIECE_BYTES)
            {
                self.piece(&text[start..at]);
                start = at;
            }
            before = Some(character);
        }
        if start < text.len() {
            self.piece(&text[start..]);
        }
    }

    fn piece(&mut self, text: &'a str) {
        let mut hasher = FxHasher::default();
        hasher.write(text.as_bytes());
        let slot = hasher.finish() as usize & (self.seen.len() - 1);
        if self.seen[slot].text == text {
            self.ids.extend_from_within(self.seen[slot].ids.clone());
            return;
        }
        let start = self.ids.len();
        self.merge(text);
        self.seen[slot] = Seen {
            text,
            ids: start..self.ids.len(),
        };
    }

    /// Byte-pair encoding proper: one symbol per character, then the best merge again and again.
    fn merge(&mut self, text: &str) {
        self.marked.clear();
        self.symbols.clear();
        for character in text.chars() {
            let at = self.symbols.len() as u32;
            let start = self.marked.len() as u32;
            self.marked.push(mark_space(character));
            self.symbols.push(Symbol {
                start,
                end: self.marked.len() as u32,
                previous: at.wrapping_sub(1),
                next: at + 1,
                token: None,
                merge: None,
            });
        }
        if let Some(last) = self.symbols.last_mut() {
            last.next = NONE;
        }
        for left in 0..self.symbols.len() as u32 {
            self.propose(left);
        }
        while let Some(Reverse(Candidate { rank, left })) = self.queue.pop() {
            let symbol = &self.symbols[left as usize];
            // A rank stands for one pair of texts, so a candidate is stale exactly if the rank here is another.
            let Some(merge) = symbol.merge.filter(|merge| merge.rank == rank) else {
                continue;
            };
            let (previous, next) = (symbol.previous, symbol.next);
            let right = &mut self.symbols[next as usize];
            right.merge = None;
            let (end, next) = (right.end, right.next);
            let symbol = &mut self.symbols[left as usize];
            (symbol.end, symbol.next, symbol.token) = (end, next, Some(merge.product));
            if let Some(next) = self.symbols.get_mut(next as usize) {
                next.previous = left;
            }
            self.propose(left);
            if previous != NONE {
                self.propose(previous);
            }
        }
        self.emit();
    }

    /// Looks up what a symbol and its right neighbour become.
    fn propose(&mut self, left: u32) {
        let symbol = &self.symbols[left as usize];
        let merge = self.symbols.get(symbol.next as usize).and_then(|next| {
            let both = &self.marked[symbol.start as usize..next.end as usize];
            let left_bytes = (symbol.end - symbol.start) as usize;
            self.tokenizer
                .merges
                .get(&self.tokenizer.vocab, both, left_bytes)
        });
        self.symbols[left as usize].merge = merge;
        if let Some(Merge { rank, .. }) = merge {
            self.queue.push(Reverse(Candidate { rank, left }));
        }
    }

    fn emit(&mut self) {
        let mut at = 0;
        // The first symbol only ever grows, so the chain starts there; it ends at `NONE`, which is out of range.
        while let Some(symbol) = self.symbols.get(at as usize) {
            if let Some(id) = symbol.token {
                self.ids.push(id);
            } else {
                let character = &self.marked[symbol.start as usize..symbol.end as usize];
                self.tokenizer.character(character, &mut self.ids);
            }
            at = symbol.next;
        }
    }
}

impl Tokenizer {
    /// A character that is part of no merge: its token, or its bytes.
    fn character(&self, character: &str, ids: &mut Vec<TokenId>) {
        match self.vocab.find(character) {
            Some(id) if self.vocab.kind(id) == Some(TokenKind::Text) => ids.push(id),
            _ => ids.extend(character.bytes().map(|byte| self.vocab.byte_token(byte))),
        }
    }
}

fn mark_space(character: char) -> char {
    if character == ' ' {
        SPACE_MARK
    } else {
        character
    }
}

#[cfg(test)]
mod tests;
