//! Masks by counting characters, where all characters of a class are alike.
//!
//! Inside a string most states of the lexer take any plain character to the same next state, as often as the length allows. There a
//! token of plain characters fits or not by their number alone, and a prepared mask says which do. A few first characters may be
//! exceptions, as those that known names of properties begin with: their tokens are walked byte by byte, and so are tokens with other
//! characters and very long ones. Where characters are not alike llguidance's own slices have to do: those know strings without a
//! bound or with one that is far away, and walk the whole vocabulary in the others.

use std::sync::Arc;

use llguidance::{
    derivre::StateID,
    earley::{BiasComputer, ParserRecognizer, SlicedBiasComputer},
};
use toktrie::{Recognizer, SimpleVob, TokTrie, TokenId, TrieNode};

/// Longest token that is counted, in characters.
const LONGEST: usize = 16;
/// A bound beyond so many characters is far away: slices do as well, and looking at characters of several bytes makes states of the
/// lexer, of which an answer has only so many.
const FAR: usize = 32;
/// The most first characters that are exceptions.
const MAX_EXCEPTIONS: usize = 24;

/// Characters that a lexer may not tell apart.
#[derive(Clone, Copy)]
struct Class {
    ascii: fn(u8) -> bool,
    /// All others belong to it, or none.
    others: bool,
}

/// Larger ones first: they leave less to walk.
const CLASSES: [Class; 3] = [
    // Strings of tool calls.
    Class {
        ascii: |_| true,
        others: true,
    },
    // Strings of JSON.
    Class {
        ascii: |byte| !byte.is_ascii_control() && byte != b'"' && byte != b'\\',
        others: true,
    },
    // Names, addresses, hosts, keys of tool calls.
    Class {
        ascii: |byte| byte.is_ascii_alphanumeric(),
        others: false,
    },
];

impl Class {
    /// Characters of a token, if all are of the class.
    fn count(self, token: &[u8]) -> Option<usize> {
        let text = str::from_utf8(token).ok()?;
        let is_in = |c: char| {
            u8::try_from(c)
                .ok()
                .filter(u8::is_ascii)
                .map_or(self.others, self.ascii)
        };
        text.chars().all(is_in).then(|| text.chars().count())
    }
}

/// A class, and the tokens of a vocabulary sorted by it.
struct Sorted {
    class: Class,
    /// Tokens of at most one character of the class more than the place says.
    up_to: Vec<SimpleVob>,
    /// Tokens that are counted, by their first byte where that is ASCII.
    by_first: Vec<Vec<TokenId>>,
    /// Tokens that are not counted.
    rest: TokTrie,
}

impl Sorted {
    fn new(class: Class, trie: &TokTrie) -> Sorted {
        let mut by_count = vec![trie.alloc_token_set(); LONGEST];
        let mut by_first = vec![Vec::new(); 128];
        let mut rest = trie.alloc_token_set();
        for token in 0..trie.vocab_size() as TokenId {
            let bytes = trie.token(token);
            // A token without text is none that a grammar allows.
            let Some(&first) = bytes.first() else {
                continue;
            };
            match class.count(bytes) {
                Some(count) if count <= LONGEST => {
                    by_count[count - 1].allow_token(token);
                    if let Some(tokens) = by_first.get_mut(usize::from(first)) {
                        tokens.push(token);
                    }
                }
                _ => rest.allow_token(token),
            }
        }
        for count in 1..LONGEST {
            let (fewer, more) = by_count.split_at_mut(count);
            more[0].or(&fewer[count - 1]);
        }
        Sorted {
            class,
            up_to: by_count,
            by_first,
            rest: trie.filter(&rest),
        }
    }
}

/// Computes masks, by counting where that is possible.
pub(crate) struct CountedMasks {
    classes: Vec<Sorted>,
    otherwise: Arc<SlicedBiasComputer>,
}

impl CountedMasks {
    pub(crate) fn new(trie: &TokTrie, otherwise: Arc<SlicedBiasComputer>) -> CountedMasks {
        CountedMasks {
            classes: CLASSES.map(|class| Sorted::new(class, trie)).into(),
            otherwise,
        }
    }
}

impl BiasComputer for CountedMasks {
    fn compute_bias(&self, recognizer: &mut ParserRecognizer<'_>, start: &[u8]) -> SimpleVob {
        let state = recognizer.lexer_state();
        if start.is_empty() && recognizer.lexer_mut().subsume_possible(state) {
            for sorted in &self.classes {
                let Some(Counted { most, exceptions }) = count(sorted.class, recognizer) else {
                    continue;
                };
                let mut mask = self.trie().alloc_token_set();
                mask.or(&sorted.up_to[most - 1]);
                for first in exceptions {
                    for token in &sorted.by_first[usize::from(first)] {
                        mask.disallow_token(*token);
                    }
                    walk_from(first, self.trie(), recognizer, &mut mask);
                }
                sorted.rest.add_bias(recognizer, &mut mask, &[]);
                return mask;
            }
        }
        self.otherwise.compute_bias(recognizer, start)
    }

    fn trie(&self) -> &TokTrie {
        self.otherwise.trie()
    }
}

/// Allows the tokens that begin with this byte and fit.
fn walk_from(
    first: u8,
    trie: &TokTrie,
    recognizer: &mut ParserRecognizer<'_>,
    mask: &mut SimpleVob,
) {
    #[expect(
        clippy::trivially_copy_pass_by_ref,
        reason = "a trie knows its nodes by their addresses"
    )]
    fn walk(
        node: &TrieNode,
        trie: &TokTrie,
        recognizer: &mut ParserRecognizer<'_>,
        mask: &mut SimpleVob,
    ) {
        if recognizer.try_push_byte(node.byte()) {
            if let Some(token) = node.token_id() {
                mask.allow_token(token);
            }
            for child in trie.node_children(node) {
                walk(child, trie, recognizer, mask);
            }
            recognizer.pop_bytes(1);
        }
    }
    recognizer.trie_started("exception");
    // Tokens of the same bytes are nodes side by side.
    for node in trie.node_children(trie.root()) {
        if node.byte() == first {
            walk(node, trie, recognizer, mask);
        }
    }
    recognizer.trie_finished();
}

/// Room for characters of a class.
struct Counted {
    /// The most that may come, up to the longest that are counted.
    most: usize,
    /// First characters that this does not hold for.
    exceptions: Vec<u8>,
}

/// Room for characters of the class, whichever they are. `None` if it depends on which, or if none may come.
fn count(class: Class, recognizer: &mut ParserRecognizer<'_>) -> Option<Counted> {
    let mut state = recognizer.lexer_state();
    let (typical, exceptions) = first_characters(class, state, recognizer)?;
    if class.others && exceptions.is_empty() && is_far(typical, recognizer) {
        return None;
    }
    for count in 0..LONGEST {
        let but: &[u8] = if count == 0 { &exceptions } else { &[] };
        let next = after_any(class, but, state, typical, recognizer)?;
        let most = if next.is_dead() {
            count
        } else if next.has_lowest_match() {
            // A string that has its full length ends by itself.
            count + 1
        } else if next == state && but.is_empty() {
            break;
        } else {
            state = next;
            continue;
        };
        let is_room = most > 0 && is_most(class, most, typical, recognizer);
        return is_room.then_some(Counted { most, exceptions });
    }
    Some(Counted {
        most: LONGEST,
        exceptions,
    })
}

/// Whether a character may come more often than tokens have any, but not for ever.
fn is_far(typical: u8, recognizer: &mut ParserRecognizer<'_>) -> bool {
    let mut state = recognizer.lexer_state();
    for _ in 0..FAR {
        let next = step(state, typical, recognizer);
        if next.is_dead() || next.has_lowest_match() || next == state {
            return false;
        }
        state = next;
    }
    true
}

fn step(state: StateID, byte: u8, recognizer: &mut ParserRecognizer<'_>) -> StateID {
    let lexer = recognizer.lexer_mut();
    lexer.transition_start_state(state, Some(byte), &None)
}

/// A character that leads where most of the class do, and those of ASCII that lead elsewhere. `None` if they are many.
fn first_characters(
    class: Class,
    state: StateID,
    recognizer: &mut ParserRecognizer<'_>,
) -> Option<(u8, Vec<u8>)> {
    let bytes = (0..0x80).filter(|byte| (class.ascii)(*byte));
    let steps: Vec<(u8, StateID)> = bytes
        .map(|byte| (byte, step(state, byte, recognizer)))
        .collect();
    // One of them is common, or there are too many others.
    let others = |goal: StateID| steps.iter().filter(move |(_, next)| *next != goal);
    let candidates = steps.iter().take(MAX_EXCEPTIONS + 1);
    let (typical, goal) = candidates
        .filter(|(_, next)| !next.is_dead())
        .find(|(_, next)| others(*next).count() <= MAX_EXCEPTIONS)?;
    let exceptions = others(*goal).map(|(byte, _)| *byte).collect();
    Some((*typical, exceptions))
}

/// The lexer's state after any character of the class but these; a dead one if it goes on with none. `None` if it depends on which.
fn after_any(
    class: Class,
    but: &[u8],
    state: StateID,
    typical: u8,
    recognizer: &mut ParserRecognizer<'_>,
) -> Option<StateID> {
    let goal = step(state, typical, recognizer);
    let mut ascii = (0..0x80).filter(|byte| (class.ascii)(*byte) && !but.contains(byte));
    if !ascii.all(|byte| step(state, byte, recognizer) == goal) {
        return None;
    }
    // Of UTF-8's longer characters, by first bytes: those a second byte may have, and how many come after that.
    let longer = [
        (0xc2..=0xdf, 0x80..=0xbf, 0),
        (0xe0..=0xe0, 0xa0..=0xbf, 1),
        (0xe1..=0xec, 0x80..=0xbf, 1),
        (0xed..=0xed, 0x80..=0x9f, 1),
        (0xee..=0xef, 0x80..=0xbf, 1),
        (0xf0..=0xf0, 0x90..=0xbf, 2),
        (0xf1..=0xf3, 0x80..=0xbf, 2),
        (0xf4..=0xf4, 0x80..=0x8f, 2),
    ];
    // What other first bytes have led to already.
    let mut seen = Vec::new();
    for (firsts, seconds, more) in longer.into_iter().filter(|_| class.others) {
        for first in firsts {
            let begun = step(state, first, recognizer);
            let path = (begun, seconds.clone(), more);
            if goal.is_dead() && begun.is_dead() || seen.contains(&path) {
                continue;
            }
            seen.push(path);
            let mut reached = vec![begun];
            let last = std::iter::repeat_n(0x80..=0xbf, more);
            for bytes in std::iter::once(seconds.clone()).chain(last) {
                if reached.iter().any(StateID::has_lowest_match) {
                    return None;
                }
                let pairs = reached
                    .iter()
                    .flat_map(|from| bytes.clone().map(|byte| (*from, byte)));
                reached = pairs
                    .map(|(from, byte)| step(from, byte, recognizer))
                    .collect();
                reached.sort_unstable_by_key(StateID::as_u32);
                reached.dedup();
            }
            if reached != [goal] || goal.is_dead() {
                return None;
            }
        }
    }
    Some(goal)
}

/// True if so many characters of the class may come and then none: neither within the string nor after it, where it ends without
/// a mark.
fn is_most(class: Class, count: usize, typical: u8, recognizer: &mut ParserRecognizer<'_>) -> bool {
    recognizer.trie_started("most");
    let pushed = (0..count)
        .take_while(|_| recognizer.try_push_byte(typical))
        .count();
    let begins = |byte: &u8| match byte {
        0..0x80 => (class.ascii)(*byte),
        _ => class.others && (0xc2..=0xf4).contains(byte),
    };
    let mut firsts = (0..=u8::MAX).filter(begins);
    let goes_on = pushed < count || firsts.any(|byte| recognizer.byte_allowed(byte));
    recognizer.pop_bytes(pushed);
    recognizer.trie_finished();
    !goes_on
}

#[cfg(test)]
mod tests {
    use std::{io::Cursor, path::PathBuf};

    use carat_gguf::Gguf;
    use carat_text::Tokenizer;
    use llguidance::{ParserFactory, TokenParser, api::TopLevelGrammar};
    use serde_json::json;
    use toktrie::{InferenceCapabilities, TokEnv, TokenizerEnv};

    use super::*;
    use crate::{testing, vocabulary::Vocabulary};

    /// Strings of every kind: without a bound, with bounds that are near, far and below what one token has, of few characters, and
    /// some whose characters are not alike.
    fn grammars() -> Vec<TopLevelGrammar> {
        let schemas = [
            json!({"type": "string"}),
            json!({"type": "string", "maxLength": 1}),
            json!({"type": "string", "maxLength": 7}),
            json!({"type": "string", "maxLength": 200}),
            json!({"type": "string", "minLength": 5, "maxLength": 8}),
            json!({"type": "string", "format": "email"}),
            json!({"type": "string", "format": "hostname"}),
            json!({"type": "string", "pattern": "^[a-z]{2,9}[0-9]?$"}),
            json!({"enum": ["one", "two", "twenty"]}),
            json!({"type": "object", "properties": {"name": {"type": "integer"}}, "additionalProperties": {"type": "null"}}),
            json!({"type": "object", "properties": {"a": {}, "b": {}, "an": {}}, "additionalProperties": {"type": "null"}}),
        ];
        let expressions = [
            "(?s:.{0,6})",
            "(?s:.{2,40})",
            "(?s:.*)",
            "(?s:.*)x.{3}",
            "[a-zA-Z_][a-zA-Z0-9_]{0,9}:",
            "(b[0-9]|[a-zA-Z]{1,5}),",
            "[a-zA-Z0-9]{3,12}",
            "a{0,20}",
            "[^b]{0,5}",
            "[^b]*",
            "[^\u{e9}]{0,5}",
            "[\u{e4}-\u{fc}a]{1,6}!",
            "\\P{Lu}{0,4}",
        ];
        let mut all: Vec<_> = schemas
            .into_iter()
            .map(TopLevelGrammar::from_json_schema)
            .collect();
        all.extend(expressions.map(TopLevelGrammar::from_regex));
        // What follows a text of its own class begins like it.
        let twice = "start: A B\nA: /[a-zA-Z0-9]{1,4}/\nB: /[a-zA-Z0-9]{2}!/".to_owned();
        all.push(TopLevelGrammar::from_lark(twice));
        all
    }

    fn is_counted(class: Class, parser: &mut TokenParser) -> bool {
        let counted = parser
            .parser
            .with_recognizer(|recognizer| count(class, recognizer));
        counted.is_some()
    }

    /// Follows all grammars by tokens at random, and compares each mask with that of slices.
    fn compare(tokenizer: Arc<Tokenizer>, walks: usize) {
        let vocabulary = Arc::new(Vocabulary::new(tokenizer).unwrap());
        let env: TokEnv = Arc::<Vocabulary>::clone(&vocabulary);
        let slices = SlicedBiasComputer::general_slices();
        let capabilities = InferenceCapabilities::default();
        let mut factory = ParserFactory::new(&env, capabilities, &slices).unwrap();
        factory.quiet();
        let masks = Arc::new(CountedMasks::new(vocabulary.tok_trie(), factory.slicer()));
        let (mut seed, mut by_class) = (1_u64, [0; CLASSES.len()]);
        for (which, grammar) in grammars().into_iter().enumerate() {
            for _ in 0..walks {
                let mut plain = factory.create_parser(grammar.clone()).unwrap();
                let mut quick = factory.create_parser(grammar.clone()).unwrap();
                quick.bias_computer = Arc::<CountedMasks>::clone(&masks);
                plain.start_without_prompt();
                quick.start_without_prompt();
                for _ in 0..12 {
                    if plain.check_stop().unwrap() {
                        break;
                    }
                    let (wanted, got) = (plain.compute_mask(), quick.compute_mask());
                    let (wanted, got) = (wanted.unwrap(), got.unwrap());
                    let text = String::from_utf8_lossy(plain.final_bytes()).into_owned();
                    assert_eq!(wanted, got, "grammar {which} after {text:?}");
                    for (class, count) in CLASSES.iter().zip(&mut by_class) {
                        *count += usize::from(is_counted(*class, &mut quick));
                    }
                    let allowed: Vec<u32> = wanted.iter().collect();
                    seed = seed.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
                    let token = allowed[(seed >> 33) as usize % allowed.len()];
                    plain.consume_token(token).unwrap();
                    quick.consume_token(token).unwrap();
                }
            }
        }
        assert!(by_class.iter().all(|count| *count > 10), "{by_class:?}");
    }

    #[test]
    fn masks_are_those_of_slices() {
        compare(testing::demo_tokenizer(), 3);
    }

    #[test]
    #[ignore = "takes minutes without optimization: cargo test --release -p carat-grammar --lib -- --ignored"]
    fn masks_of_the_published_vocabulary_are_those_of_slices() {
        let path = PathBuf::from(env!("CARGO_MANIFEST_DIR"))
            .join("../text/tests/data/gemma4-vocab.gguf.xz");
        let compressed = std::fs::read(path).unwrap();
        let mut bytes = Vec::new();
        lzma_rs::xz_decompress(&mut Cursor::new(compressed), &mut bytes).unwrap();
        let gguf = Gguf::from_bytes("gemma4-vocab.gguf", bytes).unwrap();
        let tokenizer = Tokenizer::from_metadata(gguf.metadata()).unwrap();
        compare(Arc::new(tokenizer), 10);
    }
}
