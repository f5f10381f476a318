//! Bounds on conversations and on what rendering them costs: where they hold, and that honest ones stay within.

use super::*;

#[test]
fn endless_templates_are_stopped() {
    let loops = "{% for a in range(99999) %}{% for b in range(99999) %}{% set c = b %}{% endfor %}{% endfor %}";
    let error = error_of(loops);
    assert!(error.contains("may never end"), "{error}");
    let error = error_of("{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}");
    assert!(error.starts_with("the chat template failed"), "{error}");
}

#[test]
fn long_conversations_are_not_taken_for_endless_ones() {
    let pairs = "{% for a in messages %}{% for b in messages %}{% if a.role == 'tool' and b.role != 'tool' %}x{% endif %}
{%- endfor %}{% endfor %}";
    let messages = vec![Message::user("x"); 2_000];
    let rendered = template(pairs).render(&messages, &[], &RenderOptions::default());
    assert_eq!(rendered.unwrap().text(), "");
}

/// Steps of the hungriest template grow with the square of the messages, the limit does not: what must hold is that
/// they meet no earlier than the longest conversation.
#[test]
fn the_longest_conversation_is_within_the_limits() {
    let fraction = 20;
    let longest = vec![Message::user("x"); MAX_MESSAGES];
    let limits = TemplateLimits::for_conversation(&longest, &[]).unwrap();
    let limits = TemplateLimits {
        steps: limits.steps / (fraction * fraction),
        ..limits
    };
    let count = MAX_MESSAGES / fraction as usize;
    for (source, message) in [
        (GEMMA_31B, with_calls("", vec![call("f", json!({}))])),
        (GEMMA_31B, Message::assistant("x")),
        (FALLBACK, Message::assistant("x")),
    ] {
        let messages = vec![message; count];
        let context = context(&messages, &[], Habits::of(source), None);
        let rendered = template(source).run(minijinja::Value::from(Serde(&context)), &limits);
        assert!(rendered.is_ok(), "{}", rendered.unwrap_err());
    }
}

#[test]
fn long_conversations_and_long_messages_are_rendered() {
    let text = "some words <b> \n".repeat(1 << 16);
    let options = RenderOptions::default();
    for source in [GEMMA_31B, GEMMA_31B_INTERLEAVED, FALLBACK] {
        let messages = [
            Message::user(text.as_str()),
            Message::assistant(text.as_str()),
            Message::user("so?"),
        ];
        let rendered = template(source).render(&messages, &[], &options).unwrap();
        assert_eq!(rendered.text().matches(text.trim()).count(), 2);
    }
    let messages: Vec<_> = (0..MAX_MESSAGES)
        .map(|at| match at % 2 {
            0 => Message::user("hello there"),
            _ => Message::assistant("good day"),
        })
        .collect();
    let rendered = template(GEMMA_31B_INTERLEAVED).render(&messages, &[], &options);
    assert_eq!(rendered.unwrap().text().matches("good day").count(), 5_000);
    // Arguments are the dearest text there is.
    let rows = json!({"rows": vec![json!({"a": "bcd", "e": [1]}); 40_000]});
    let messages = [Message::user("x"), with_calls("", vec![call("f", rows)])];
    let rendered = template(GEMMA_31B).render(&messages, &[], &options);
    assert_eq!(rendered.unwrap().text().matches("bcd").count(), 40_000);
}

#[test]
fn limits_grow_in_proportion() {
    let limits = |count: usize| {
        let messages = vec![Message::user("some words"); count];
        TemplateLimits::for_conversation(&messages, &[]).unwrap()
    };
    let (short, long) = (limits(100), limits(10_000));
    assert!(long.steps <= 100 * short.steps && long.steps > short.steps);
    assert!(long.work_bytes <= 100 * short.work_bytes && long.work_bytes > short.work_bytes);
    assert!(long.output_bytes <= 100 * short.output_bytes);
}

#[test]
fn conversations_out_of_range_are_refused() {
    let refused = |messages: &[Message]| {
        let rendered = demo().render(messages, &[], &RenderOptions::default());
        rendered.unwrap_err().to_string()
    };
    let error = refused(&vec![Message::user(""); 10_001]);
    assert!(error.contains("10001 messages"), "{error}");
    let error = refused(&[Message::user("a".repeat((16 << 20) + 1))]);
    assert!(error.contains("16777217 bytes"), "{error}");
}

#[test]
fn prompts_out_of_proportion_are_refused() {
    let error = error_of("{% set n = 2000000 %}{{ 'a' * n }}");
    assert!(error.contains("writes more than"), "{error}");
}
