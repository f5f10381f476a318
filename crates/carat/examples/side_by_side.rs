//! Two conversations at once, one on a thread and one as a stream, the latter cancelled after some words:
//! `cargo run --release -p carat --example side_by_side -- MODEL.gguf`

use std::{
    future::poll_fn,
    io::Write,
    pin::{Pin, pin},
    sync::Arc,
    task::{Context, Poll, Wake, Waker},
    thread::{self, Thread},
};

use carat::{Model, Part};
use futures_core::Stream;

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let path = std::env::args().nth(1).ok_or("give a model file")?;
    let model = Model::load(path)?;
    let other = model.clone();
    let waiting = thread::spawn(move || other.chat().send("Tell me a joke.")?.finish());

    let mut chat = model.chat();
    let mut answer = chat.send("Tell me a long story.")?;
    let mut out = std::io::stdout();
    let mut words = 0;
    block_on(async {
        while let Some(part) = poll_fn(|task| Pin::new(&mut answer).poll_next(task)).await {
            if let Part::Content(text) = part? {
                write!(out, "{text}")?;
                words += 1;
                if words == 20 {
                    answer.cancel();
                }
            }
        }
        Ok::<(), Box<dyn std::error::Error>>(())
    })?;
    let (reason, usage) = answer.end().ok_or("the story has no end")?;
    writeln!(
        out,
        "\n({reason:?} after {} tokens)",
        usage.counts.generated_tokens
    )?;
    let joke = waiting.join().map_err(|_| "the other thread panicked")??;
    writeln!(out, "{}", joke.reply.content)?;
    Ok(())
}

/// Any runtime will do; this is the smallest.
fn block_on<T>(future: impl Future<Output = T>) -> T {
    struct Unpark(Thread);
    impl Wake for Unpark {
        fn wake(self: Arc<Self>) {
            self.0.unpark();
        }
    }
    let waker = Waker::from(Arc::new(Unpark(thread::current())));
    let mut future = pin!(future);
    loop {
        match future.as_mut().poll(&mut Context::from_waker(&waker)) {
            Poll::Ready(value) => return value,
            Poll::Pending => thread::park(),
        }
    }
}
