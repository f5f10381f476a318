//! Conversations across restarts, on a disk that loses and damages what it likes.
//!
//! Sessions of an engine, one after the other, on the same files. A session ends in order or with the machine, between any two calls
//! to the file system; before the next somebody may flip bits, cut files, swap and remove them. Every answer is what the request gives by
//! itself: whatever is read is right, or is computed again.

use std::{
    collections::BTreeMap,
    panic::{AssertUnwindSafe, catch_unwind},
};

use carat_model::{TokenId, kv::PerGroup};

use super::{segment::tests::namespace, store::DiskStore, testing::FakeFiles};
use crate::{
    config::Limits,
    core::{
        Counts, Pipeline, Request, RequestId, Scheduler, Update,
        testing::{FakeExecutor, Lookahead, Random, alone},
    },
};

const HISTORIES: u64 = 300;
const SESSIONS: usize = 4;

#[derive(Debug, Default)]
struct Totals {
    finished: usize,
    restored: usize,
    failed: usize,
    refused: u64,
    stops: usize,
}

struct History {
    random: Random,
    limits: Limits,
    files: FakeFiles,
    documents: Vec<Vec<TokenId>>,
    /// Prompts with their answers.
    turns: Vec<Vec<TokenId>>,
}

impl History {
    fn new(seed: u64) -> History {
        let mut random = Random(seed);
        let (mut config, facts) = random.config();
        config.drafts = None;
        config.max_draft = 0;
        config.staging_pages = random.within(1..=4);
        let documents = (0..3).map(|_| {
            let length = random.within(1..=200);
            random.tokens(length)
        });
        History {
            documents: documents.collect(),
            limits: Limits::new(config, facts).unwrap(),
            files: FakeFiles::default(),
            turns: Vec::new(),
            random,
        }
    }

    fn request(&mut self) -> Request {
        let random = &mut self.random;
        let mut prompt = if !self.turns.is_empty() && random.one_in(2) {
            self.turns[random.within(0..=self.turns.len() - 1)].clone()
        } else {
            self.documents[random.within(0..=2)].clone()
        };
        let more = random.within(1..=20);
        prompt.extend(random.tokens(more));
        prompt.truncate(self.limits.config().context - 1);
        let room = self.limits.config().context - prompt.len();
        Request {
            max_tokens: Some(random.within(1..=30).min(room)),
            cache_salt: random.one_in(5).then_some([3; 16]),
            ignore_eos: true,
            ..Request::new(prompt)
        }
    }

    fn session(&mut self, totals: &mut Totals) {
        let mut executor = FakeExecutor::new(&self.limits);
        if self.random.one_in(2) {
            executor.lookahead = Lookahead::Always;
        }
        let scheduler = Scheduler::new(self.limits.clone());
        let (files, max_bytes) = (self.files.clone(), 1 << self.random.within(12..=20));
        let mut pipeline = Pipeline::new(scheduler, executor)
            .with_store(&self.limits, |page_bytes: PerGroup<usize>| {
                let files = files.clone();
                let store = DiskStore::with_files(files, namespace(1), page_bytes, max_bytes, true);
                Ok::<_, carat_model::backend::BackendError>(Box::new(store.unwrap()))
            })
            .unwrap();
        if self.random.one_in(3) {
            let calls = self.random.within(1..=30);
            files.with(|disk| disk.calls_left = Some(calls));
            totals.stops += 1;
        }
        let mut requests: BTreeMap<RequestId, (Request, Vec<TokenId>, Option<Counts>)> =
            BTreeMap::new();
        for round in 0..self.random.within(1..=4) {
            for _ in 0..self.random.within(1..=3) {
                let request = self.request();
                if self.limits.check(&request).is_err() {
                    continue;
                }
                let id = RequestId(requests.len() as u64 + 1);
                pipeline.submit(id, request.clone()).unwrap();
                requests.insert(id, (request, Vec::new(), None));
            }
            while !pipeline.is_idle() {
                pipeline.step().unwrap();
                let (outputs, updates) = pipeline.results();
                for update in updates {
                    match update {
                        Update::Token { id, row } => {
                            let token = outputs.rows[row].token;
                            requests.get_mut(&id).unwrap().1.push(token);
                        }
                        Update::Finished { id, counts, .. } => {
                            requests.get_mut(&id).unwrap().2 = Some(counts);
                        }
                        _ => {}
                    }
                }
                pipeline.scheduler().audit();
            }
            let patience = self.random.within(0..=10) * round.max(1);
            for _ in 0..patience {
                pipeline.persist().unwrap();
            }
            pipeline.scheduler().audit();
        }
        pipeline.audit_contents(false);
        totals.refused += pipeline.stats().store.unwrap().refused;
        let window = self.limits.model().window;
        for (id, (request, answer, counts)) in requests {
            let limit = self.limits.check(&request).unwrap();
            let (right, _) = alone(&request, limit, window);
            assert_eq!(answer, right, "{id:?}");
            let counts = counts.expect("all requests end");
            assert!(counts.cached_on_disk <= counts.cached_tokens);
            totals.finished += 1;
            totals.restored += counts.cached_on_disk;
            totals.failed +=
                usize::from(counts.miss == Some(crate::core::MissReason::RestoreFailed));
            self.turns.push([request.prompt, answer].concat());
        }
    }

    fn damage(&mut self) {
        let random = &mut self.random;
        self.files.with(|disk| {
            disk.calls_left = None;
            let names: Vec<String> = disk.files.keys().cloned().collect();
            if names.is_empty() {
                return;
            }
            let mut any = || names[random.within(0..=names.len() - 1)].clone();
            let (one, two) = (any(), any());
            let file = &mut disk.files.get_mut(&one).unwrap().0;
            match random.within(0..=5) {
                0 if !file.is_empty() => {
                    let place = random.within(0..=file.len() - 1);
                    file[place] ^= 1 << random.within(0..=7);
                }
                1 => {
                    let length = random.within(0..=file.len());
                    file.truncate(length);
                }
                2 => {
                    let contents = disk.files[&two].clone();
                    disk.files.insert(one, contents);
                }
                3 => {
                    disk.files.remove(&one);
                }
                _ => {}
            }
        });
    }

    fn run(mut self, totals: &mut Totals) {
        for _ in 0..SESSIONS {
            self.session(totals);
            self.damage();
        }
    }
}

#[test]
fn whatever_becomes_of_the_disk_answers_are_right() {
    let mut totals = Totals::default();
    for seed in 0..HISTORIES {
        let history = AssertUnwindSafe(|| History::new(seed).run(&mut totals));
        let outcome = catch_unwind(history);
        assert!(outcome.is_ok(), "seed {seed} failed, see above");
    }
    let is_telling = totals.finished > 1000
        && totals.restored > 2000
        && totals.failed > 5
        && totals.refused > 10
        && totals.stops > 100;
    assert!(is_telling, "{totals:?}");
}
