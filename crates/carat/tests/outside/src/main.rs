//! Streams two conversations side by side, cancels one and reads its usage.

use carat::{ChatFinish, Device, LoadOptions, Part};

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let path = std::env::args().nth(1).ok_or("no model")?;
    let options = LoadOptions {
        device: Device::Cpu(Default::default()),
        parallel: 2,
        ..LoadOptions::default()
    };
    let model = options.load(path)?;

    let (mut first, mut second) = (model.chat().seed(1), model.chat().seed(1));
    let mut sum = first.send("What is 1 + 1?")?;
    let mut story = second.send("Tell me a long story.")?;
    let mut pieces = 0;
    // Piece by piece, in turns.
    loop {
        let (a, b) = (sum.next().transpose()?, story.next().transpose()?);
        pieces += usize::from(matches!(b, Some(Part::Content(_))));
        if pieces == 3 {
            story.cancel();
        }
        if a.is_none() && b.is_none() {
            break;
        }
    }
    let (reason, usage) = story.end().ok_or("the story has no end")?;
    if reason != ChatFinish::Cancelled || usage.counts.generated_tokens == 0 {
        return Err(format!("cancelled: {reason:?}, {usage:?}").into());
    }
    if usage.counts.prompt_tokens == 0 {
        return Err("the prompt is not counted".into());
    }
    let (reason, _) = sum.end().ok_or("the sum has no end")?;
    drop((sum, story));
    println!("{reason:?} {}", first.messages()[1].content);
    Ok(())
}
