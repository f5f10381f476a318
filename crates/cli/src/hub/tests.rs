//! The client against a hub on the loopback interface: pulls, resumptions, refusals and hostile answers.

mod pull;
mod refusal;
mod resume;
mod server;

use std::{
    fs,
    net::TcpListener,
    ops::ControlFlow,
    path::{Path, PathBuf},
    sync::{
        Arc, Condvar, Mutex,
        atomic::{AtomicUsize, Ordering},
    },
    time::Duration,
};

use super::*;
use server::{Reply, Repository, Request, Server, sha256};

const COMMIT: &str = "aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa";

fn quiet(_: Progress<'_>) -> ControlFlow<()> {
    ControlFlow::Continue(())
}

/// Content that is not the same anywhere, several chunks long.
fn content(seed: u8) -> Vec<u8> {
    let mut state = u32::from(seed) + 1;
    std::iter::repeat_with(|| {
        state = state.wrapping_mul(1664525).wrapping_add(1013904223);
        (state >> 24) as u8
    })
    .take(2_500_000)
    .collect()
}

struct Setup {
    root: tempfile::TempDir,
    base: String,
    attempts: u32,
    token: Option<String>,
    network: Network,
}

impl Setup {
    fn new(base: &str) -> Setup {
        Setup {
            root: tempfile::tempdir().unwrap(),
            base: base.to_owned(),
            attempts: 4,
            token: None,
            network: Network::Allowed,
        }
    }

    fn hub(&self) -> Hub {
        let environment = Environment {
            hub_cache: Some(self.root.path().to_owned()),
            token: self.token.clone(),
            ..Environment::default()
        };
        let config = HubConfig {
            endpoint: Endpoint::new(&self.base).unwrap(),
            network: self.network,
            retry: Retry {
                attempts: self.attempts,
                first_wait: Duration::ZERO,
            },
        };
        Hub::new(&environment, config).unwrap()
    }

    fn pull(&self, model: &str) -> Result<Pulled> {
        self.hub().pull(&model.parse().unwrap(), &mut quiet)
    }

    fn pull_error(&self, model: &str) -> String {
        format!("{:#}", self.pull(model).unwrap_err())
    }

    fn repo(&self) -> PathBuf {
        self.root.path().join("models--o--r")
    }

    fn incomplete(&self, body: &[u8]) -> PathBuf {
        self.repo()
            .join(format!("blobs/{}.incomplete", sha256(body)))
    }

    /// Names in the blob folder.
    fn blobs(&self) -> Vec<String> {
        names_in(&self.repo().join("blobs"))
    }
}

fn names_in(folder: &Path) -> Vec<String> {
    let Ok(entries) = fs::read_dir(folder) else {
        return Vec::new();
    };
    let mut names: Vec<_> = entries
        .map(|entry| entry.unwrap().file_name().into_string().unwrap())
        .collect();
    names.sort();
    names
}

/// A repository `o/r` whose content breaks off `cuts` times after `cut_at` bytes.
fn breaking(body: &[u8], cuts: usize, cut_at: usize) -> impl Fn(&Request) -> Reply + use<> {
    let repository = Repository::new(&[("g.gguf", body)]);
    let left = AtomicUsize::new(cuts);
    move |request| {
        let mut reply = repository.answer(request);
        let cut = request.path.starts_with("/cdn")
            && left
                .fetch_update(Ordering::SeqCst, Ordering::SeqCst, |left| {
                    left.checked_sub(1)
                })
                .is_ok();
        reply.cut_at = cut.then_some(cut_at);
        reply
    }
}
