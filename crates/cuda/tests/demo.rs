//! The trained demo model: greedy answers equal the reference's up to the first step that was a near tie.

mod harness;

use std::{fs, path::PathBuf, sync::Arc};

use carat_cuda::{CudaBackend, Tier};
use carat_gguf::Gguf;
use carat_model::{
    Model, TokenId,
    backend::{Backend, Outputs, token_feeds},
    evaluate::{self, Evaluation},
    gemma4,
};
use libtest_mimic::{Failed, Trial};
use serde_json::Value;

/// The difference of the two best logits below which another order of adding may choose the other token.
const NEAR_TIE: f64 = 0.05;

fn main() {
    let best = harness::open(|config| config.tier = Tier::Best);
    let portable = harness::open(|config| config.tier = Tier::Portable);
    let golden: Value = serde_json::from_str(&fs::read_to_string(asset("golden.json")).unwrap())
        .expect("the reference answers are JSON");
    let mut trials = Vec::new();
    for (tier, card) in [("best", &best), ("portable", &portable)] {
        for case in golden["cases"].as_array().expect("a list of cases") {
            let (card, case) = (card.as_ref().ok().cloned(), case.clone());
            let name = format!("demo/{tier}/{}", case["name"].as_str().unwrap_or("?"));
            let ignored = card.is_none();
            let trial = Trial::test(name, move || {
                answers(&*card.ok_or("no card")?, &case).map_err(Failed::from)
            });
            trials.push(trial.with_ignored_flag(ignored));
        }
    }
    harness::run(best.and(portable).map(drop), trials);
}

/// Beside the sources, or where the test runs if it was carried to another machine.
fn asset(name: &str) -> PathBuf {
    let built = PathBuf::from(concat!(env!("CARGO_MANIFEST_DIR"), "/../../assets")).join(name);
    if built.exists() {
        return built;
    }
    PathBuf::from("assets").join(name)
}

fn answers(card: &CudaBackend, case: &Value) -> Result<(), String> {
    let ids = |name: &str| -> Vec<TokenId> {
        let list = case[name].as_array().expect("a list of ids");
        list.iter()
            .filter_map(Value::as_u64)
            .map(|id| id as TokenId)
            .collect()
    };
    let (prompt, expected) = (ids("prompt_ids"), ids("greedy_ids"));
    let margins = case["margins"].as_array().expect("a margin a step");
    let sure = margins
        .iter()
        .position(|m| m.as_f64().is_some_and(|m| m < NEAR_TIE));
    let sure = sure.unwrap_or(expected.len());

    let file = Gguf::open(&asset("pip-q8_0.gguf")).map_err(|e| e.to_string())?;
    let model = Model::load(Arc::new(file)).map_err(|e| e.to_string())?;
    let plan = gemma4::plan(&model);
    let options = evaluate::options(prompt.len() + expected.len(), prompt.len());
    let weights = Arc::clone(&model.weights);
    let compiled = card.compile(&plan, weights, &options);
    let mut executor = compiled.map_err(|e| e.to_string())?;
    let mut outputs = Outputs::default();
    let mut evaluation = Evaluation::new(executor.as_mut(), &plan, options.pages);
    let (mut tokens, mut fed, mut found) = (prompt, 0, Vec::new());
    while found.len() < sure {
        let feeds = token_feeds(&tokens[fed..]);
        let ran = evaluation.feed(&feeds, fed..tokens.len(), None, &mut outputs);
        ran.map_err(|e| e.to_string())?;
        fed = tokens.len();
        let next = outputs.rows.last().ok_or("no row was sampled")?.token;
        found.push(next);
        tokens.push(next);
    }
    if found == expected[..sure] {
        return Ok(());
    }
    Err(format!("{found:?} instead of {:?}", &expected[..sure]))
}
