//! Carat as a library: two conversations at once through one engine.
//!
//!     cargo run --release -p carat-engine --example generate [MODEL.gguf]

use std::{error::Error, path::Path, sync::Arc};

use carat_cpu::{CpuBackend, CpuConfig};
use carat_engine::{
    EngineConfig, EngineHandle, ModelFacts,
    chat::{Chat, ChatEvent, Conversation, Generation},
};
use carat_gguf::Gguf;
use carat_model::{Model, gemma4};
use carat_text::{ChatTemplate, Message, Part, Tokenizer};

fn main() -> Result<(), Box<dyn Error>> {
    let demo = concat!(env!("CARGO_MANIFEST_DIR"), "/../../assets/pip-q8_0.gguf");
    let path = std::env::args().nth(1).unwrap_or_else(|| demo.to_owned());

    // From a file to a plan: what will be computed.
    let file = Arc::new(Gguf::open(Path::new(&path))?);
    let tokenizer = Tokenizer::from_metadata(file.metadata())?;
    let template = ChatTemplate::from_metadata(file.metadata(), tokenizer.vocab())?;
    let model = Model::load(file)?;
    let plan = gemma4::plan(&model);

    // An engine with room for two conversations of 1024 tokens, batches of 256 rows.
    let config = EngineConfig::comfortable(1024, 2, 256, ModelFacts::from(&plan));
    let backend = Box::new(CpuBackend::new(&CpuConfig::default()));
    let engine = EngineHandle::start(config, backend, plan, model.weights)?;
    let chat = Chat::new(engine, Arc::new(tokenizer), Arc::new(template));

    // Both are submitted before either is read; the engine runs them side by side.
    let questions = [
        "What is the capital of Japan?",
        "Spell the word garden backwards.",
    ];
    let streams: Vec<_> = questions
        .iter()
        .map(|question| {
            let conversation = Conversation {
                messages: vec![Message::user(*question)],
                ..Conversation::default()
            };
            chat.answer(&conversation, &Generation::default())
        })
        .collect::<Result<_, _>>()?;
    for (question, stream) in questions.iter().zip(streams) {
        let mut answer = String::new();
        for event in stream {
            match event? {
                ChatEvent::Part(Part::Content(text)) => answer += &text,
                ChatEvent::Finished { usage, .. } => {
                    answer += &format!("   ({} tokens)", usage.counts.generated_tokens);
                }
                ChatEvent::Started(_)
                | ChatEvent::Part(_)
                | ChatEvent::Token(_)
                | ChatEvent::PromptToken(_) => {}
            }
        }
        #[expect(clippy::print_stdout, reason = "an example shows its result")]
        {
            println!("{question}\n{answer}\n");
        }
    }
    Ok(())
}
