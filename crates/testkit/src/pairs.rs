//! Tiny targets with their drafters, and what transformers drafts with them; `data/fixtures-mtp/README.md` says how they were
//! made. The demo model's own pair has rounds of its own.

use std::{fs, path::PathBuf, sync::Arc};

use carat_gguf::Gguf;
use carat_model::{Drafter, Model, TokenId};
use serde_json::Value as Json;

/// Names of the pairs.
pub const ALL: [&str; 4] = ["e-series", "e-series-centroids", "12b-like", "moe-like"];

/// One target with its drafter.
pub struct Pair {
    pub name: &'static str,
    pub target: Model,
    pub drafter: Drafter,
    pub cases: Vec<Case>,
    pub stop: Vec<TokenId>,
}

/// One prompt of a pair, and what follows it.
pub struct Case {
    pub prompt: Vec<TokenId>,
    /// The target's own first token.
    pub next: TokenId,
    /// The target's hidden state of the last row of the prompt; empty where nobody has told.
    pub hidden: Vec<f32>,
    /// Consecutive draft steps from there, with the head by clusters where there is one.
    pub steps: Vec<DraftStep>,
    /// The same with the dense head, where that is another.
    pub dense_steps: Vec<DraftStep>,
    pub greedy: Vec<TokenId>,
    /// Drafts of each round, as long as they may be, and how many of them were right.
    pub rounds: Vec<(Vec<TokenId>, usize)>,
    /// The longest drafts of a round.
    pub most: usize,
}

pub struct DraftStep {
    pub token: TokenId,
    pub logits: Vec<f32>,
    pub state: Vec<f32>,
    /// Tokens that have a logit; 0 for all.
    pub candidates: usize,
}

fn path(folder: &str, name: &str) -> PathBuf {
    let inside = PathBuf::from(concat!(env!("CARGO_MANIFEST_DIR"), "/../..")).join(folder);
    // Test binaries may be carried to another machine and run at the root of a copy of the repository.
    let inside = if inside.exists() {
        inside
    } else {
        PathBuf::from(folder)
    };
    inside.join(name)
}

fn open(folder: &str, name: &str) -> Arc<Gguf> {
    Arc::new(Gguf::open(&path(folder, name)).expect("fixtures open"))
}

fn json(folder: &str, name: &str) -> Json {
    let text = fs::read_to_string(path(folder, name)).expect("fixtures have a description");
    serde_json::from_str(&text).expect("valid JSON")
}

fn ids(json: &Json) -> Vec<TokenId> {
    let all = json.as_array().expect("an array of ids").iter();
    all.map(|id| id.as_u64().expect("an id") as TokenId)
        .collect()
}

fn rounds(json: &Json) -> Vec<(Vec<TokenId>, usize)> {
    let rounds = json.as_array().expect("rounds").iter();
    rounds
        .map(|round| {
            let accepted = round["accepted"].as_u64().expect("a count");
            (ids(&round["drafts"]), accepted as usize)
        })
        .collect()
}

const FOLDER: &str = "crates/testkit/data/fixtures-mtp";

impl Pair {
    /// One of [`ALL`].
    pub fn load(name: &'static str) -> Pair {
        let json = json(FOLDER, &format!("{name}.json"));
        let file = |key: &str| open(FOLDER, json[key].as_str().expect("a file name"));
        let bytes = fs::read(path(FOLDER, json["data"].as_str().expect("a file name")));
        let bytes = bytes.expect("fixtures have data");
        let values = bytes.as_chunks().0.iter().map(|b| f32::from_le_bytes(*b));
        let data: Vec<f32> = values.collect();
        let part = |json: &Json| {
            let place = ids(json);
            data[place[0] as usize..][..place[1] as usize].to_vec()
        };
        let steps = |json: &Json| -> Vec<DraftStep> {
            let steps = json["spec"].as_array().into_iter().flatten();
            steps
                .map(|step| DraftStep {
                    token: step["token"].as_u64().expect("an id") as TokenId,
                    logits: part(&step["logits"]),
                    state: part(&step["g_next"]),
                    candidates: step["candidates"].as_u64().unwrap_or(0) as usize,
                })
                .collect()
        };
        let cases = json["cases"].as_array().expect("cases").iter();
        let cases = cases.map(|case| Case {
            prompt: ids(&case["ids"]),
            next: case["next"].as_u64().expect("an id") as TokenId,
            hidden: part(&case["e_p"]),
            steps: steps(&case["steps"]),
            dense_steps: steps(&case["dense_steps"]),
            greedy: ids(&case["greedy_ids"]),
            rounds: rounds(&case["rounds"]),
            most: case["k"].as_u64().expect("a length") as usize,
        });
        let target = Model::load(file("target")).expect("targets load");
        Pair {
            name,
            drafter: Drafter::load(file("drafter"), &target).expect("drafters load"),
            target,
            cases: cases.collect(),
            stop: ids(&json["stop"]),
        }
    }

    /// The demo model with its drafter.
    pub fn demo() -> Pair {
        let json = json("assets", "mtp_golden.json");
        let target = Model::load(open("assets", "pip-q8_0.gguf")).expect("the demo model loads");
        let drafter = open("assets", "pip-drafter-q8_0.gguf");
        let cases = json["cases"].as_array().expect("cases").iter();
        let cases = cases.map(|case| {
            let greedy = ids(&case["greedy_ids"]);
            Case {
                prompt: ids(&case["prompt_ids"]),
                next: greedy[0],
                hidden: Vec::new(),
                steps: Vec::new(),
                dense_steps: Vec::new(),
                greedy,
                rounds: rounds(&case["rounds"]),
                most: json["k"].as_u64().expect("a length") as usize,
            }
        });
        Pair {
            name: "demo",
            drafter: Drafter::load(drafter, &target).expect("its drafter loads"),
            target,
            cases: cases.collect(),
            stop: vec![1, 106, 50],
        }
    }
}
