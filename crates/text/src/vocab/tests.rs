use super::*;
use crate::test_data::{DEMO_TOKENIZER, GEMMA, TinyVocab};

#[test]
fn gemma_tokens_are_where_the_specification_has_them() {
    let vocab = GEMMA.vocab();
    assert_eq!(vocab.len(), 262_144);
    assert_eq!(vocab.bos(), 2);
    assert_eq!(vocab.stop_tokens(), [1, 50, 106]);
    assert_eq!(vocab.suppressed_tokens(), [0; 0]);
    assert_eq!(vocab.byte_token(0), 238);
    assert_eq!(vocab.byte_token(255), 493);
    assert_eq!(vocab.text(818), Some("The"));
    assert_eq!(vocab.find("▁capital"), Some(5279));
    assert_eq!(vocab.find("no such token"), None);
    assert_eq!(vocab.special_tokens().count(), 24);
    let marks = vocab.marks();
    assert_eq!((marks.turn_start, marks.turn_end), (Some(105), Some(106)));
    assert_eq!(
        (marks.channel_start, marks.channel_end),
        (Some(100), Some(101))
    );
    assert_eq!(
        (marks.call_start, marks.call_end, marks.quote),
        (Some(48), Some(49), Some(52))
    );
}

#[test]
fn every_token_is_found_by_its_text() {
    let vocab = GEMMA.vocab();
    for id in 0..vocab.len() as TokenId {
        assert_eq!(vocab.find(vocab.text(id).unwrap()), Some(id));
    }
}

#[test]
fn ids_past_the_end_are_nothing() {
    let vocab = DEMO_TOKENIZER.vocab();
    for id in [vocab.len() as TokenId, TokenId::MAX] {
        assert_eq!(vocab.text(id), None);
        assert_eq!(vocab.kind(id), None);
        assert!(!vocab.is_special(id) && !vocab.is_stop(id));
    }
}

#[test]
fn special_tokens_are_known_by_text_whatever_their_type() {
    let mut tiny = TinyVocab::new(&["<eos>", "<turn|>", "<b>", "mine", "<|tool_response>"]);
    let mut types = vec![1; tiny.tokens.len()];
    types[257 + 3] = 4;
    tiny.types = Some(types);
    let tokenizer = tiny.tokenizer().unwrap();
    let vocab = tokenizer.vocab();
    assert_eq!(vocab.stop_tokens(), [257, 258, 261]);
    let kinds: Vec<_> = (256..262).map(|id| vocab.is_special(id)).collect();
    assert_eq!(kinds, [true, true, true, false, true, true]);
    assert_eq!(vocab.kind(65), Some(TokenKind::Byte(65)));
}

#[test]
fn the_end_token_a_file_names_is_a_stop_token() {
    let mut tiny = TinyVocab::new(&["<eos>", "<done>"]);
    tiny.ids = vec![("tokenizer.ggml.eos_token_id", 258)];
    assert_eq!(tiny.tokenizer().unwrap().vocab().stop_tokens(), [257, 258]);
}

fn error_of(tiny: &TinyVocab) -> String {
    tiny.tokenizer().unwrap_err().to_string()
}

#[test]
fn broken_vocabularies_are_refused_with_what_is_wrong() {
    let mut tiny = TinyVocab::new(&[]);
    tiny.model = "llama";
    assert!(
        error_of(&tiny).starts_with("the file's tokenizer is `llama`; only `gemma4` is supported")
    );

    let mut tiny = TinyVocab::new(&["a"]);
    tiny.types = Some(vec![1; 3]);
    assert_eq!(
        error_of(&tiny),
        "metadata key `tokenizer.ggml.token_type` has 3 entries, but the vocabulary has 258 tokens; the file is damaged"
    );

    let mut tiny = TinyVocab::new(&[]);
    tiny.ids = vec![("tokenizer.ggml.eos_token_id", 9999)];
    assert_eq!(
        error_of(&tiny),
        "metadata key `tokenizer.ggml.eos_token_id` names token 9999, but the vocabulary has 257 tokens"
    );

    let mut tiny = TinyVocab::new(&[]);
    tiny.tokens.retain(|token| token != "<0x41>");
    assert!(error_of(&tiny).starts_with("the vocabulary has no token `<0x41>`"));

    let mut tiny = TinyVocab::new(&[]);
    tiny.tokens.retain(|token| token != "<bos>");
    assert!(error_of(&tiny).starts_with("the vocabulary has no token `<bos>`"));
}

#[test]
fn a_missing_key_is_named() {
    let mut bytes = Vec::new();
    carat_gguf::writer::Writer::default()
        .write_head(&mut bytes)
        .unwrap();
    let gguf = carat_gguf::Gguf::from_bytes("empty.gguf", bytes).unwrap();
    let error = Vocab::from_metadata(gguf.metadata()).unwrap_err();
    assert_eq!(
        error.to_string(),
        "metadata key `tokenizer.ggml.model` is missing"
    );
}

#[test]
fn broken_merges_are_refused_with_their_place() {
    for (merge, reason) in [
        ("ab", "there is no space between its two parts"),
        ("", "there is no space between its two parts"),
        (" ", "there is no space between its two parts"),
        ("a x", "its result is not a token"),
        ("b a", "its result is not a token"),
    ] {
        let mut tiny = TinyVocab::new(&["a", "b", "ab"]);
        tiny.merges = vec!["a b", merge];
        let expected = format!("merge 1 is `{merge}`: {reason}; the file is damaged");
        assert_eq!(error_of(&tiny), expected);
    }
}
