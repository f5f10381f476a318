//! One question, one answer, as it is generated: `cargo run --release -p carat --example ask -- MODEL.gguf "Why is the sky blue?"`

use std::io::Write;

use carat::{Model, Part};

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let mut arguments = std::env::args().skip(1);
    let (Some(path), Some(question)) = (arguments.next(), arguments.next()) else {
        return Err("give a model file and a question".into());
    };
    let model = Model::load(path)?;
    let mut chat = model.chat();
    let mut answer = chat.send(question)?;
    let mut out = std::io::stdout();
    for part in answer.by_ref() {
        if let Part::Content(text) = part? {
            write!(out, "{text}")?;
            out.flush()?;
        }
    }
    writeln!(out)?;
    if let Some((_, usage)) = answer.end() {
        writeln!(out, "{} tokens", usage.counts.generated_tokens)?;
    }
    Ok(())
}
