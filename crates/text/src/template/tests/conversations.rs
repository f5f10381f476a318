//! A conversation as each generation of templates is given it, and the end of a prompt.

use expect_test::expect;

use super::*;
use crate::{Role, ToolResponse};

/// Prints what a template is given.
const SHOW: &str = "{{ messages | tojson }}{# tool_call_id developer #}";

#[test]
fn results_find_their_calls_by_id_or_by_order() {
    let asking = with_calls(
        "",
        vec![
            call("first", json!({})),
            ToolCall {
                id: Some("b".to_owned()),
                ..call("second", Value::Null)
            },
        ],
    );
    let by_id = Message {
        tool_call_id: Some("b".to_owned()),
        ..Message::tool_result("2")
    };
    let stray = Message {
        tool_call_id: Some("?".to_owned()),
        name: Some("own".to_owned()),
        ..Message::tool_result("4")
    };
    let messages = [asking, Message::tool_result("1"), by_id, stray];
    check(
        &template(SHOW),
        &messages,
        &[],
        &RenderOptions::default(),
        &expect![[
            r#"[{"role": "assistant", "content": "", "tool_calls": [{"id": "call_0_0", "type": "function", "function": {"name": "first", "arguments": {}}}, {"id": "b", "type": "function", "function": {"name": "second", "arguments": {}}}]}, {"role": "tool", "content": "1", "tool_call_id": "call_0_0", "name": "first"}, {"role": "tool", "content": "2", "tool_call_id": "b", "name": "second"}, {"role": "tool", "content": "4", "tool_call_id": "?", "name": "own"}]"#
        ]],
    );
}

/// A template of the older kind, cut down to what matters.
const FOLDED: &str = "
{%- for m in messages -%}
  [{{ m.role }}
  {%- for c in m.tool_calls or [] %} call:{{ c.function.name }}{% endfor %}
  {%- for r in m['tool_responses'] or [] %} {{ r.name }}={{ r.response }}{% endfor %} {{ m.content }}]
{%- endfor -%}";

#[test]
fn older_templates_get_results_on_the_message_that_asked() {
    let messages = [
        Message::new(Role::Developer, "rules"),
        Message::user("w?"),
        with_calls("", vec![call("f", json!({})), call("g", json!({}))]),
        Message::tool_result("1"),
        Message::tool_result("2"),
        with_calls("", vec![call("f", json!({}))]),
        Message::tool_result("3"),
        Message::assistant("done"),
        Message::assistant("really"),
        Message::user("ok"),
    ];
    check(
        &template(FOLDED),
        &messages,
        &[],
        &RenderOptions::default(),
        &expect![
            "[system rules][user w?][assistant call:f call:g f=1 g=2 ][assistant call:f f=3 done][assistant really][user ok]"
        ],
    );
}

#[test]
fn a_closed_turn_is_followed_by_the_models() {
    let closing = template("{{ messages[0].content }}<turn|>\n{{ '' }}");
    let mut options = RenderOptions::default();
    let text = |options: &RenderOptions| {
        closing
            .render(&[Message::user("x")], &[], options)
            .unwrap()
            .text()
            .into_owned()
    };
    assert_eq!(text(&options), "x<turn|>\n<|turn>model\n");
    options.add_generation_prompt = false;
    assert_eq!(text(&options), "x<turn|>\n");
}

#[test]
fn a_closed_turn_is_followed_by_an_empty_thought_where_the_template_has_one() {
    let responses = vec![ToolResponse {
        name: Some("f".to_owned()),
        response: json!({"ok": true}).into(),
    }];
    let done = Message {
        tool_responses: responses,
        ..with_calls("Done.", vec![call("f", json!({}))])
    };
    let official = template(GEMMA_31B);
    let mut options = RenderOptions::default();
    let end = |options: &RenderOptions| {
        let messages = [Message::user("x"), done.clone()];
        let rendered = official.render(&messages, &[], options).unwrap();
        let text = rendered.text().into_owned();
        let (_, end) = text.split_once("<tool_call|>").unwrap();
        end.to_owned()
    };
    let closed = "<|tool_response>response:f{ok:true}<tool_response|>Done.<turn|>\n<|turn>model\n";
    assert_eq!(
        end(&options),
        format!("{closed}<|channel>thought\n<channel|>")
    );
    options.thinking = true;
    assert_eq!(end(&options), closed);
}

#[test]
fn a_prompt_without_bos_gets_one() {
    let rendered = template("x")
        .render(&[], &[], &RenderOptions::default())
        .unwrap();
    assert_eq!(GEMMA.encode_rendered(&rendered)[0], GEMMA.vocab().bos());
}
