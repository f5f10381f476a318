use proptest::prelude::*;

use super::*;
use crate::{Specials, test_data::GEMMA};

fn decoder(specials: SpecialText) -> TokenDecoder {
    TokenDecoder::new(Arc::clone(GEMMA.vocab()), specials)
}

/// Text after each token, and at the end.
fn steps(ids: &[TokenId]) -> Vec<String> {
    let mut decoder = decoder(SpecialText::Hide);
    let mut steps = Vec::new();
    for &id in ids {
        let mut text = String::new();
        decoder.push(id, &mut text);
        steps.push(text);
    }
    let mut text = String::new();
    decoder.finish(&mut text);
    steps.push(text);
    steps
}

fn bytes(bytes: &[u8]) -> Vec<TokenId> {
    bytes
        .iter()
        .map(|byte| GEMMA.vocab().byte_token(*byte))
        .collect()
}

#[test]
fn a_character_comes_out_with_its_last_byte() {
    assert_eq!(
        steps(&bytes("é🙂".as_bytes())),
        ["", "é", "", "", "", "🙂", ""]
    );
}

#[test]
fn broken_bytes_are_replaced_at_once() {
    assert_eq!(
        steps(&bytes(b"\xff\x80a")),
        ["\u{fffd}", "\u{fffd}", "a", ""]
    );
    assert_eq!(steps(&bytes(b"\xe2\x82a")), ["", "", "\u{fffd}a", ""]);
    assert_eq!(
        steps(&bytes(b"\xe2\xe2\x82\xac")),
        ["", "\u{fffd}", "", "€", ""]
    );
    assert_eq!(steps(&bytes(b"\xf0\x9f")), ["", "", "\u{fffd}"]);
}

#[test]
fn ordinary_text_ends_an_unfinished_character() {
    let mut ids = bytes(b"\xe2");
    ids.push(818);
    assert_eq!(steps(&ids), ["", "\u{fffd}The", ""]);
}

#[test]
fn special_tokens_show_only_where_wanted() {
    let ids = GEMMA.encode("<bos>a b<turn|>", Specials::Parse);
    assert_eq!(GEMMA.decode(&ids), "a b");
    let mut text = String::new();
    let mut shown = decoder(SpecialText::Show);
    for id in ids {
        shown.push(id, &mut text);
    }
    assert_eq!(text, "<bos>a b<turn|>");
}

/// The text before the stop string, and whether there was one.
fn stop(stops: &[&str], pieces: &[&str]) -> (String, bool) {
    let mut matcher = StopStrings::new(stops);
    let mut out = String::new();
    for piece in pieces {
        matcher.push(piece, &mut out);
    }
    matcher.finish(&mut out);
    (out, matcher.stopped())
}

#[test]
fn stop_strings_end_the_text_before_them() {
    assert_eq!(
        stop(&["END"], &["one E", "N", "D two"]),
        ("one ".to_owned(), true)
    );
    assert_eq!(
        stop(&["END"], &["one EN", "d"]),
        ("one ENd".to_owned(), false)
    );
    assert_eq!(
        stop(&["\n\n", "."], &["a\n", "b. c"]),
        ("a\nb".to_owned(), true)
    );
    assert_eq!(
        stop(&["aab"], &["a", "a", "a", "b"]),
        ("a".to_owned(), true)
    );
    assert_eq!(
        stop(&["é!"], &["caf\u{e9}", "s \u{e9}", "!x"]),
        ("cafés ".to_owned(), true)
    );
    assert_eq!(stop(&["abcd", "b"], &["abc"]), ("a".to_owned(), true));
    assert_eq!(stop(&[""], &["text"]), ("text".to_owned(), false));
    assert_eq!(stop(&[], &["text"]), ("text".to_owned(), false));
}

#[test]
fn only_a_possible_beginning_is_held_back() {
    let mut matcher = StopStrings::new(["User:"]);
    let mut out = String::new();
    matcher.push("Hello Us", &mut out);
    assert_eq!(out, "Hello ");
    matcher.push("ers", &mut out);
    assert_eq!(out, "Hello Users");
    matcher.push("\nUser: hi", &mut out);
    assert_eq!(out, "Hello Users\n");
    assert!(matcher.stopped());
    matcher.push("more", &mut out);
    matcher.finish(&mut out);
    assert_eq!(out, "Hello Users\n");
}

proptest! {
    #[test]
    fn streamed_bytes_read_like_all_at_once(raw in proptest::collection::vec(prop_oneof![any::<u8>(), 0xc0..=0xf8u8, 0x80..=0xbfu8, 0x61..=0x63u8], 0..24)) {
        prop_assert_eq!(steps(&bytes(&raw)).concat(), String::from_utf8_lossy(&raw));
    }

    #[test]
    fn any_ids_decode(ids in proptest::collection::vec(prop_oneof![0..600u32, any::<u32>()], 0..24)) {
        GEMMA.decode(&ids);
    }

    #[test]
    fn stop_strings_do_not_depend_on_how_text_is_cut(
        text in "[abé]{0,20}",
        stops in proptest::collection::vec("[abé]{1,4}", 0..3),
        cut in 1..6usize,
    ) {
        let stops: Vec<_> = stops.iter().map(String::as_str).collect();
        let characters: Vec<_> = text.chars().collect();
        let pieces: Vec<String> = characters.chunks(cut).map(|piece| piece.iter().collect()).collect();
        let pieces: Vec<_> = pieces.iter().map(String::as_str).collect();
        let (whole, stopped) = stop(&stops, &[&text]);
        prop_assert_eq!(stop(&stops, &pieces), (whole.clone(), stopped));
        prop_assert_eq!(stopped, stops.iter().any(|stop| text.contains(stop)));
        prop_assert!(text.starts_with(&whole));
        if !stopped {
            prop_assert_eq!(whole, text);
        }
    }
}

#[test]
fn a_stop_string_does_not_reach_across_a_break() {
    let mut stops = StopStrings::new(["Hello!"]);
    let mut out = String::new();
    stops.push("Hello", &mut out);
    assert_eq!(out, "");
    stops.finish(&mut out);
    stops.push("!", &mut out);
    assert_eq!((out.as_str(), stops.stopped()), ("Hello!", false));
}

#[test]
fn the_stop_string_that_came_is_known() {
    let mut stops = StopStrings::new(["zz", "lo w", "o w"]);
    let mut out = String::new();
    stops.push("hello", &mut out);
    assert_eq!(stops.found(), None);
    stops.push(" world", &mut out);
    assert_eq!((out.as_str(), stops.found()), ("hel", Some("lo w")));
}
