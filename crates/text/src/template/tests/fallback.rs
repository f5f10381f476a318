//! The template that stands in where a file has none.

use expect_test::expect;

use super::*;
use crate::Role;

#[test]
fn the_built_in_template_writes_turns() {
    let fallback = template(FALLBACK);
    let messages = [Message::user(" Hi there\n")];
    let mut options = RenderOptions::default();
    check(
        &fallback,
        &messages,
        &[],
        &options,
        &expect![[r#"
        <bos><|turn>user
        Hi there<turn|>
        <|turn>model
    "#]],
    );
    options.thinking = true;
    let messages = [
        Message::new(Role::Developer, "Be brief."),
        Message::user("Hi"),
    ];
    check(
        &fallback,
        &messages,
        &[],
        &options,
        &expect![[r#"
        <bos><|turn>system
        <|think|>
        Be brief.<turn|>
        <|turn>user
        Hi<turn|>
        <|turn>model
    "#]],
    );
    options.add_generation_prompt = false;
    options.thinking = false;
    let messages = [
        Message::user("a"),
        Message::assistant("<|channel>thought\nhm\n<channel|>b<|channel>thought\ncut off"),
        Message::user("c"),
    ];
    check(
        &fallback,
        &messages,
        &[],
        &options,
        &expect![[r#"
        <bos><|turn>user
        a<turn|>
        <|turn>model
        b<turn|>
        <|turn>user
        c<turn|>
    "#]],
    );
}

#[test]
fn the_built_in_template_writes_tools_calls_and_results() {
    let fallback = template(FALLBACK);
    let mut asking = with_calls(
        "Let me see.",
        vec![
            call(
                "get_weather",
                json!({"days": 2, "city": "Paris", "Exact": [1.5, null, {"a": false}]}),
            ),
            call("now", json!("{}")),
        ],
    );
    asking.thinking = "need tools".to_owned();
    let mut messages = vec![
        Message::user("w?"),
        asking,
        Message::tool_result("{\"temp\": 15}"),
        Message::tool_result("noon"),
    ];
    let options = RenderOptions::default();
    check(
        &fallback,
        &messages,
        &[weather_tool()],
        &options,
        &expect![[r#"
        <bos><|turn>system
        <|tool>declaration:get_weather{description:<|"|>Weather in a city<|"|>,parameters:{properties:{city:{description:<|"|>Name<|"|>,type:<|"|>STRING<|"|>},days:{nullable:true,type:<|"|>INTEGER<|"|>},spots:{items:{properties:{x:{type:<|"|>NUMBER<|"|>}},type:<|"|>OBJECT<|"|>},type:<|"|>ARRAY<|"|>},unit:{enum:[<|"|>C<|"|>,<|"|>F<|"|>],type:<|"|>STRING<|"|>}},required:[<|"|>city<|"|>],type:<|"|>OBJECT<|"|>}}<tool|><turn|>
        <|turn>user
        w?<turn|>
        <|turn>model
        <|channel>thought
        need tools
        <channel|><|tool_call>call:get_weather{city:<|"|>Paris<|"|>,days:2,Exact:[1.5,null,{a:false}]}<tool_call|><|tool_call>call:now{}<tool_call|><|tool_response>response:get_weather{value:<|"|>{"temp": 15}<|"|>}<tool_response|><|tool_response>response:now{value:<|"|>noon<|"|>}<tool_response|>Let me see.<turn|>
        <|turn>model
    "#]],
    );
    messages[1].content.clear();
    messages.push(Message::assistant("Sunny."));
    messages.push(Message::user("thanks"));
    check(
        &fallback,
        &messages,
        &[],
        &options,
        &expect![[r#"
        <bos><|turn>user
        w?<turn|>
        <|turn>model
        <|tool_call>call:get_weather{city:<|"|>Paris<|"|>,days:2,Exact:[1.5,null,{a:false}]}<tool_call|><|tool_call>call:now{}<tool_call|><|tool_response>response:get_weather{value:<|"|>{"temp": 15}<|"|>}<tool_response|><|tool_response>response:now{value:<|"|>noon<|"|>}<tool_response|>Sunny.<turn|>
        <|turn>user
        thanks<turn|>
        <|turn>model
    "#]],
    );
    messages.truncate(2);
    let mut beside = messages.clone();
    beside[1].content = "Done.".to_owned();
    beside[1].tool_responses = [json!({"t": [15]}), json!("noon")]
        .map(|response| crate::ToolResponse {
            name: Some("f".to_owned()),
            response: response.into(),
        })
        .into();
    let text = fallback.render(&beside, &[], &options).unwrap();
    let end = "call:now{}<tool_call|><|tool_response>response:f{t:[15]}<tool_response|>\
               <|tool_response>response:f{value:<|\"|>noon<|\"|>}<tool_response|>Done.<turn|>\n<|turn>model\n";
    assert!(text.text().ends_with(end), "{}", text.text());
    let text = fallback.render(&messages, &[], &options).unwrap();
    assert!(
        text.text()
            .ends_with("call:now{}<tool_call|><|tool_response>"),
        "{}",
        text.text()
    );
}
