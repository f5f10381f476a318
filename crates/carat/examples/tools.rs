//! A model that calls a function of this program: `cargo run --release -p carat --example tools -- MODEL.gguf`

use std::io::Write;

use carat::{Message, Model, Tool};

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let path = std::env::args().nth(1).ok_or("give a model file")?;
    let weather = Tool::new(
        "get_weather",
        "Weather in a city",
        serde_json::json!({
            "type": "object",
            "properties": {"city": {"type": "string", "description": "Name of the city"}},
            "required": ["city"],
        }),
    );
    let model = Model::load(path)?;
    let mut chat = model.chat().tools(vec![weather]);
    let mut reply = chat.send("What is the weather in Paris?")?.finish()?.reply;
    while !reply.tool_calls.is_empty() {
        for call in &reply.tool_calls {
            let city = call.arguments["city"].as_str().unwrap_or("an unknown city");
            // Results answer the calls in their order.
            chat.push(Message::tool_result(format!("It is sunny in {city}.")));
        }
        reply = chat.answer()?.finish()?.reply;
    }
    writeln!(std::io::stdout(), "{}", reply.content)?;
    Ok(())
}
