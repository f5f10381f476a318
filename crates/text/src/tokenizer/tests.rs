use proptest::prelude::*;

use super::*;
use crate::test_data::{DEMO_TOKENIZER, GEMMA, TinyVocab};

fn ordinary(text: &str) -> Vec<TokenId> {
    GEMMA.encode(text, Specials::Ignore)
}

fn parsed(text: &str) -> Vec<TokenId> {
    GEMMA.encode(text, Specials::Parse)
}

/// Byte-pair encoding as it is defined, without cuts, memory or a queue.
fn slow_encode(tokenizer: &Tokenizer, text: &str) -> Vec<TokenId> {
    let merge = |pair: &[String]| {
        tokenizer
            .merges
            .get(tokenizer.vocab(), &pair.concat(), pair[0].len())
    };
    let mut symbols: Vec<_> = text.chars().map(|c| mark_space(c).to_string()).collect();
    loop {
        let candidates = symbols.windows(2).enumerate();
        let best = candidates
            .filter_map(|(at, pair)| Some((at, merge(pair)?.rank)))
            .min_by_key(|(_, rank)| *rank);
        let Some((at, _)) = best else { break };
        let right = symbols.remove(at + 1);
        symbols[at].push_str(&right);
    }
    let mut ids = Vec::new();
    for symbol in symbols {
        match tokenizer.vocab().find(&symbol) {
            Some(id) if symbol.chars().count() > 1 => ids.push(id),
            _ => tokenizer.character(&symbol, &mut ids),
        }
    }
    ids
}

#[test]
fn published_vectors_come_out_exactly() {
    let input = include_str!("../../tests/data/gemma4-vocab.inp");
    let output = include_str!("../../tests/data/gemma4-vocab.out");
    let cases: Vec<_> = input.split("\n__ggml_vocab_test__\n").collect();
    assert_eq!(cases.len(), 46);
    for (text, line) in cases.iter().zip(output.lines()) {
        let expected: Vec<TokenId> = line
            .split_whitespace()
            .map(|id| id.parse().unwrap())
            .collect();
        assert_eq!(ordinary(text), expected, "{text:?}");
    }
}

#[test]
fn chat_marks_are_single_tokens_where_specials_are_parsed() {
    assert_eq!(
        parsed("<bos><|turn>user\nHi there<turn|>\n<|turn>model\n<|channel>thought\n<channel|>"),
        [
            2, 105, 2364, 107, 10979, 993, 106, 107, 105, 4368, 107, 100, 45518, 107, 101
        ]
    );
    assert_eq!(
        parsed("<bos><|turn>system\n<|think|>\nBe brief.<turn|>\n"),
        [2, 105, 9731, 107, 98, 107, 3912, 8652, 236761, 106, 107]
    );
    assert_eq!(
        parsed("<|tool_call>call:get_weather{city:<|\"|>Paris<|\"|>,days:2}<tool_call|>"),
        [
            48, 6639, 236787, 828, 236779, 19323, 236782, 13319, 236787, 52, 50429, 52, 236764,
            14356, 236787, 236778, 236783, 49
        ]
    );
}

#[test]
fn plain_text_follows_the_merge_list_alone() {
    assert_eq!(
        ordinary("The capital of France is"),
        [818, 5279, 529, 7001, 563]
    );
    assert_eq!(ordinary(" "), [236743]);
    assert_eq!(ordinary("\r\n"), [251, 107]);
    assert_eq!(ordinary("x\u{a0}y"), [236781, 432, 398, 236762]);
    assert_eq!(ordinary(""), [0; 0]);
    assert_eq!(ordinary(&"\n".repeat(31)), [137]);
    assert_eq!(ordinary(&"\n".repeat(32)), [137, 107]);
    assert_eq!(ordinary(&"\n".repeat(40)), [137, 115]);
}

/// The one token that has a space after something else, so that words are not always apart.
#[test]
fn a_token_across_a_space_is_found() {
    let id = GEMMA.vocab().find(">▁</").unwrap();
    assert!(ordinary("<td>1</td> </tr>").contains(&id));
    for text in ["> </", "a> </b", "a> b", ">  </", "<b> <i>"] {
        assert_eq!(ordinary(text), slow_encode(&GEMMA, text), "{text:?}");
    }
}

#[test]
fn ordinary_tokens_that_look_special_are_not_matched_as_such() {
    for text in ["<unused12>", "[multimodal]", "<table>", "</s>", "<b>"] {
        assert_eq!(parsed(text), ordinary(text), "{text:?}");
    }
    assert_ne!(parsed("</s>"), [212]);
}

#[test]
fn users_cannot_write_special_tokens() {
    for id in GEMMA.vocab().special_tokens() {
        let text = GEMMA.vocab().text(id).unwrap();
        assert_eq!(parsed(text), [id]);
        let ids = ordinary(&format!("{text}{text} {text}"));
        assert!(
            !ids.iter().any(|id| GEMMA.vocab().is_special(*id)),
            "{text:?}"
        );
    }
}

#[test]
fn merges_into_special_tokens_are_ignored() {
    let mut tiny = TinyVocab::new(&["<", "eos>", "<eos>", "s", "mine", "mi", "ne"]);
    tiny.merges = vec!["< eos>", "mi ne"];
    let mut types = vec![1; tiny.tokens.len()];
    types[tiny.tokens.iter().position(|t| t == "mine").unwrap()] = 4;
    types[tiny.tokens.iter().position(|t| t == "s").unwrap()] = 3;
    tiny.types = Some(types);
    let tokenizer = tiny.tokenizer().unwrap();
    for text in ["<eos>", "mine", "s"] {
        let ids = tokenizer.encode(text, Specials::Ignore);
        assert!(
            !ids.iter().any(|id| tokenizer.vocab().is_special(*id)),
            "{text:?}"
        );
        assert_eq!(tokenizer.decode(&ids), text);
    }
}

#[test]
fn the_first_of_two_tokens_with_one_text_is_used() {
    let mut tiny = TinyVocab::new(&["a", "b", "ab", "c", "abc", "ab"]);
    tiny.merges = vec!["ab c", "a b"];
    let tokenizer = tiny.tokenizer().unwrap();
    assert_eq!(tokenizer.encode("ab", Specials::Ignore), [259]);
    assert_eq!(tokenizer.encode("abc", Specials::Ignore), [261]);
}

#[test]
fn the_longest_special_text_wins() {
    let mut tiny = TinyVocab::new(&["<x>", "<x>y", "z"]);
    let mut types = vec![1; tiny.tokens.len()];
    types[257] = 4;
    types[258] = 4;
    tiny.types = Some(types);
    let tokenizer = tiny.tokenizer().unwrap();
    assert_eq!(
        tokenizer.encode("<x>yz<x>z", Specials::Parse),
        [258, 259, 257, 259]
    );
}

#[test]
fn prompts_begin_with_one_bos() {
    assert_eq!(GEMMA.encode_prompt("The", Specials::Ignore), [2, 818]);
    assert_eq!(GEMMA.encode_prompt("<bos>The", Specials::Parse), [2, 818]);
    assert_eq!(GEMMA.encode_prompt("", Specials::Ignore), [2]);
    assert_ne!(GEMMA.encode_prompt("<bos>The", Specials::Ignore), [2, 818]);
}

#[test]
fn decoding_hides_special_tokens_and_survives_any_id() {
    assert_eq!(GEMMA.decode(&[2, 105, 818, 5279, 106]), "The capital");
    assert_eq!(GEMMA.decode(&[u32::MAX, 818, 262_144]), "The");
}

/// A megabyte with nowhere to cut it. Quadratic merging would take hours; the bound is far above what it takes.
#[test]
fn long_text_without_spaces_is_not_quadratic() {
    for text in [
        "a".repeat(1 << 20),
        "abcdefgh".repeat(1 << 17),
        "\n".repeat(1 << 20),
    ] {
        let ids = ordinary(&text);
        assert_eq!(GEMMA.decode(&ids), text);
    }
}

fn any_text() -> impl Strategy<Value = String> {
    // Spaces are written as ▁, so a ▁ of the text's own comes back as a space.
    let pieces = prop_oneof![
        3 => "[a-zA-Z ]{0,12}",
        2 => "[<>/|a-z \n]{0,8}",
        1 => "\\PC{0,6}",
        1 => "[ \t\r\n]{0,6}",
        1 => "[0-9.,]{0,6}",
        1 => proptest::sample::select(vec!["<|turn>", "<bos>", "> </", "don't", "日本語", "🙂👍🏽", "\u{e000}", "\u{0}"])
            .prop_map(str::to_owned),
    ];
    proptest::collection::vec(pieces, 0..12)
        .prop_map(|pieces| pieces.concat().replace(SPACE_MARK, ""))
}

proptest! {
    #[test]
    fn text_comes_back_from_its_tokens(text in any_text()) {
        for tokenizer in [&*GEMMA, &*DEMO_TOKENIZER] {
            let ids = tokenizer.encode(&text, Specials::Ignore);
            prop_assert_eq!(tokenizer.decode(&ids), text.clone());
            prop_assert!(!ids.iter().any(|id| tokenizer.vocab().is_special(*id)));
        }
    }

    #[test]
    fn cuts_and_memory_change_nothing(text in any_text()) {
        for tokenizer in [&*GEMMA, &*DEMO_TOKENIZER] {
            prop_assert_eq!(tokenizer.encode(&text, Specials::Ignore), slow_encode(tokenizer, &text));
        }
    }
}
