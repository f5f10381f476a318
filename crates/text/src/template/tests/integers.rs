//! Integers beyond 64 bits, from a conversation to the prompt.

use super::*;

#[test]
fn large_integers_are_integers_to_a_template() {
    let source = "{% set a = messages[0].tool_calls[0].function.arguments %}\
                  {{ a.n }} {{ a.n is number }} {{ a.n is string }} {{ a | tojson }} {{ a.n - 1 }}|{{ a.m }} {{ a.m is string }}|{{ a.s }}";
    // The character that marks would have been taken first stands in the text.
    let text = format!(
        r#"{{"n": -12345678901234567890123, "s": "\ue00012345678901234567890", "m": {}}}"#,
        "7".repeat(60)
    );
    let large = with_calls("", vec![call("f", text.into())]);
    let rendered = template(source).render(&[large], &[], &RenderOptions::default());
    let n = "-12345678901234567890123";
    let m = "7".repeat(60);
    let s = "\u{e000}12345678901234567890";
    assert_eq!(
        rendered.unwrap().text(),
        format!(
            r#"{n} True False {{"n": {n}, "s": "{s}", "m": "{m}"}} -12345678901234567890124|{m} False|{s}"#
        )
    );
}
