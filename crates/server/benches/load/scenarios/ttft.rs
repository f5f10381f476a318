//! Time that HTTP adds to the first token, over the library that it is built on.

use carat_engine::chat::{ChatEvent, Conversation, Generation};
use carat_server::Config;
use carat_text::Message;
use tokio::time::Instant;

use super::{
    client::{Connection, request},
    options::{Failure, Options},
    report::{Report, Times},
    server::Server,
    synthetic::Pace,
    wire::chat,
};

const OVERHEAD_MILLIS: f64 = 1.0;

pub(super) async fn run(options: &Options, report: &mut Report) -> Result<(), Failure> {
    let count = options.count(1000, 50);
    // A device that takes no time leaves what is around it.
    let server = Server::synthetic(4, 512, Pace::default(), Config::default(), |_| {})?;
    let conversation = Conversation {
        messages: vec![Message::user("a")],
        ..Conversation::default()
    };
    let generation = Generation {
        max_tokens: Some(2),
        ignore_eos: true,
        ..Generation::default()
    };
    let asked = request(
        "POST",
        "/v1/chat/completions",
        &chat("a", 2, true).to_string(),
    );
    let mut connection = Connection::open(server.address).await?;
    let (mut library, mut http) = (Times::default(), Times::default());
    // In turns, so that whatever else runs here is beside both.
    for _ in 0..count {
        let sent = Instant::now();
        let stream = server.chat.answer(&conversation, &generation)?;
        let mut first = None;
        for event in stream {
            if let ChatEvent::Part(_) = event? {
                first.get_or_insert_with(|| sent.elapsed());
            }
        }
        library.add(first.ok_or("an answer without text")?);
        let sent = Instant::now();
        connection.send(&asked).await?;
        let head = connection.head().await?.ok_or("no response")?;
        connection.piece().await?.ok_or("no first piece")?;
        http.add(sent.elapsed());
        if head.status != 200 {
            return Err(format!("status {}", head.status).into());
        }
        connection.body().await?;
    }
    report.figure("the library's first token", &library);
    report.figure("over HTTP", &http);
    report.at_most(
        "HTTP adds at the median",
        http.percentile(0.5) - library.percentile(0.5),
        OVERHEAD_MILLIS,
        "ms",
    );
    Ok(())
}
