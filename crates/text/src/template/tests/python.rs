//! Python as templates know it, and what is said of a template that fails.

use expect_test::expect;
use proptest::prelude::*;

use super::*;

#[test]
fn keys_are_ordered_and_white_space_is_stripped_as_python_does() {
    let source = "{% for k, v in messages[0].tool_calls[0].function.arguments | dictsort %}{{ k }} {% endfor %}\
                  {{ messages[0].content | trim }}|{{ messages[0].content.strip() }}|{{ messages[0].content.lstrip() }}";
    let keys = |keys: &[&str]| -> Value {
        let map: serde_json::Map<_, _> = keys.iter().map(|k| ((*k).to_owned(), json!(1))).collect();
        Value::Object(map)
    };
    let shown = |order: &[&str]| {
        let message = with_calls("\u{1c}a\u{1f}", vec![call("f", keys(order))]);
        let rendered = template(source).render(&[message], &[], &RenderOptions::default());
        rendered.unwrap().text().into_owned()
    };
    assert_eq!(shown(&["É", "ß", "z", "Я", "ж"]), "z ß É ж Я a|a|a\u{1f}");
    assert_eq!(shown(&["a<b", "aZ", "a0"]), "a0 a<b aZ a|a|a\u{1f}");
}

#[test]
fn python_values_and_functions_are_there() {
    let source = "{{ none }} {{ true }} {{ 2.0 }} {{ 1e22 }} {{ -1.5e-7 }} {{ 0.0 }} {{ fromjson('[1, 2]')[1] }}
{%- set d = {'a': ['<', none]} %} {{ d | tojson }} {{ d.get('b', 'no') }} {{ ' x '.strip() }} {{ 'a,b'.split(',')[1] }}
{%- if true %}

    {# a comment on its own line #}
    kept
    {% endif %}
{{ strftime_now('%d %B %Y') }} {{ d | tojson(indent=1, ensure_ascii=false) }}";
    let options = RenderOptions {
        unix_time: Some(0),
        ..RenderOptions::default()
    };
    check(
        &template(source),
        &[],
        &[],
        &options,
        &expect![[r#"
        None True 2.0 1e+22 -1.5e-07 0.0 2 {"a": ["<", null]} no x b
            kept
        01 January 1970 {
         "a": [
          "<",
          null
         ]
        }"#]],
    );
}

#[test]
fn failing_templates_name_the_line() {
    for (source, expected) in [
        (
            "a\n{% if %}",
            expect!["the chat template cannot be read, line 2: unexpected end of block"],
        ),
        (
            "\n\n{{ raise_exception('Roles must alternate') }}",
            expect!["the chat template refuses this conversation, line 3: Roles must alternate"],
        ),
        (
            "{% macro m() %}\n{{ raise_exception('no') }}{% endmacro %}{{ m() }}",
            expect!["the chat template refuses this conversation, line 2: no"],
        ),
        (
            "\n{{ messages.nope.deeper }}",
            expect!["the chat template failed, line 2: `messages.nope` is undefined"],
        ),
        (
            "{{ strftime_now('%Y') }}",
            expect![
                "the chat template failed, line 1: the template asks for the date, but none was given"
            ],
        ),
        (
            "{{ 'x' | nofilter }}",
            expect!["the chat template failed, line 1: filter nofilter is unknown"],
        ),
        (
            "{{ fromjson('{') }}",
            expect!["the chat template failed, line 1: fromjson: not valid JSON"],
        ),
    ] {
        expected.assert_eq(&error_of(source));
    }
}

proptest! {
    #[test]
    fn no_template_text_panics(source in "(\\{\\{|\\{%|%\\}|\\}\\}|for|in|if|messages|endfor|\\||[a-z('\\[ ]){0,20}") {
        if let Ok(template) = ChatTemplate::new(&source, GEMMA.vocab()) {
            let _ = template.render(&[Message::user("x")], &[], &RenderOptions::default());
        }
    }
}
