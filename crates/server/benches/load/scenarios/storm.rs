//! Clients that connect in crowds and hang up whenever they like: nothing of them stays.

use std::{net::SocketAddr, time::Duration};

use carat_server::Config;

use super::{
    client::{Connection, contains, idle_after, metric, request},
    host::Hosted,
    options::{Failure, Options},
    random::Random,
    report::{Report, Times},
    server::Server,
    synthetic::Pace,
    wire::chat,
};

/// A client that hangs up does so within this.
const LONGEST_STAY: usize = 400;
const TOKENS: usize = 30;
const PATIENCE: Duration = Duration::from_secs(30);
const IDLE_MILLIS: f64 = 500.0;
/// After which an idle server has tidied up.
const REST: Duration = Duration::from_secs(6);
/// Growth of memory in percent, once caches are full, to the last storm.
const GROWTH: f64 = 5.0;

fn clients(options: &Options) -> usize {
    options.count(1000, 20)
}

pub(super) fn server(options: &Options) -> Result<Server, Failure> {
    let pace = Pace {
        step: Duration::from_millis(10),
        ..Pace::default()
    };
    Server::synthetic(256, 512, pace, Config::default(), |engine| {
        engine.max_unfinished = 2 * clients(options);
    })
}

pub(super) async fn run(options: &Options, report: &mut Report) -> Result<(), Failure> {
    let clients = clients(options);
    let rounds = options.count(20, 3);
    let server = Hosted::new("storm", options)?;
    let address = server.address;
    let mut random = Random(1);
    let (mut idle, mut whole, mut left) = (Times::default(), 0, 0);
    let mut resident = Vec::new();
    for round in 0..rounds {
        let crowd: Vec<_> = (0..clients)
            .map(|n| {
                let stay =
                    (n % 2 == 0).then(|| Duration::from_millis(random.below(LONGEST_STAY) as u64));
                // Prompts differ, so that pages are computed, kept and thrown out.
                let content = format!("Hello! {}", random.below(1000));
                tokio::spawn(client(address, content, stay))
            })
            .collect();
        for member in crowd {
            match member.await? {
                Ok(true) => whole += 1,
                Ok(false) => left += 1,
                Err(error) => report.must(false, format_args!("a patient client: {error}")),
            }
        }
        match idle_after(address, PATIENCE).await? {
            Some(time) => idle.add(time),
            None => report.must(false, "the engine comes to rest after a storm"),
        }
        if round + 1 == rounds.div_ceil(4) || round + 1 == rounds {
            tokio::time::sleep(REST).await;
            resident.extend(server.resident_kib());
        }
    }
    report.figure("storms, clients each", format_args!("{rounds}, {clients}"));
    report.figure("answered, hung up", format_args!("{whole}, {left}"));
    report.must(
        whole == rounds * clients.div_euclid(2),
        "all who stayed were answered",
    );
    let held = metric(address, "kv_pages", "state=\"held\"").await?;
    report.must(held == 0.0, format_args!("pages still held: {held}"));
    let open = metric(address, "http_streams_open", "").await?;
    report.must(open == 0.0, format_args!("streams still open: {open}"));
    report.at_most(
        "idle after a storm at the latest",
        idle.percentile(1.0),
        IDLE_MILLIS,
        "ms",
    );
    if let [warm, .., last] = resident[..] {
        let growth = (last / warm - 1.0) * 100.0;
        report.figure(
            "memory at the end",
            format_args!("{:.1} MiB", last / 1024.0),
        );
        report.at_most(
            "memory over that after a quarter of them",
            growth,
            GROWTH,
            "%",
        );
    }
    report.must(server.end()?, "nothing in the server panicked");
    Ok(())
}

/// Whether the answer came to its end; who has a time to stay hangs up after it.
async fn client(
    address: SocketAddr,
    content: String,
    stay: Option<Duration>,
) -> Result<bool, Failure> {
    let body = chat(&content, TOKENS, true).to_string();
    let talk = async {
        let mut connection = Connection::open(address).await?;
        let asked = request("POST", "/v1/chat/completions", &body);
        connection.send(&asked).await?;
        let head = connection.head().await?.ok_or("no response")?;
        let answer = connection.body().await?;
        if head.status != 200 || !contains(&answer, "data: [DONE]") {
            return Err::<(), Failure>(format!("status {} or no end", head.status).into());
        }
        Ok(())
    };
    match stay {
        None => talk.await.map(|()| true),
        Some(stay) => {
            // Whatever has come by then is not looked at.
            let _ = tokio::time::timeout(stay, talk).await;
            Ok(false)
        }
    }
}
