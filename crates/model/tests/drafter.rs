//! Draft models on the reference interpreter against a published implementation, and what keeps a drafter from its target.

use std::sync::Arc;

use carat_gguf::{
    Gguf,
    writer::{Field, Writer, write_tensor},
};
use carat_model::{Drafter, ModelError, gemma4_assistant::Head, reference::Reference};
use carat_testkit::{
    drafting::Drafting,
    pairs::{self, Pair},
};

#[test]
fn states_logits_and_next_states_agree_with_transformers() {
    for pair in pairs::ALL.map(Pair::load) {
        for case in &pair.cases {
            for (head, steps) in [
                (Head::Clusters, &case.steps),
                (Head::Dense, &case.dense_steps),
            ] {
                let mut drafting = Drafting::new(&Reference, &pair, head, case.prompt.len() + 8);
                let errors = drafting.errors(case, steps);
                let largest = errors.hidden.max(errors.logits).max(errors.state);
                let what = format!("{} after {}: {errors:?}", pair.name, case.prompt.len());
                assert!(largest <= 1e-4 && errors.other_tokens == 0, "{what}");
            }
        }
    }
}

#[test]
fn drafts_and_what_is_accepted_of_them_agree_with_transformers() {
    for pair in pairs::ALL.map(Pair::load) {
        for case in &pair.cases {
            let most = case.greedy.len();
            let tokens = case.prompt.len() + most + case.most + 1;
            let mut drafting = Drafting::new(&Reference, &pair, Head::Clusters, tokens);
            let (answer, rounds) =
                drafting.speculative(&case.prompt, (most, case.most), &pair.stop);
            assert_eq!(answer, case.greedy, "{}", pair.name);
            assert_eq!(rounds, case.rounds, "{}", pair.name);
        }
    }
}

#[test]
fn a_drafter_of_another_model_is_refused_in_a_sentence() {
    let (one, other) = (Pair::load("12b-like"), Pair::load("e-series"));
    let refused = |file: &Gguf, target: &Pair, what: &str| {
        let file = Gguf::open(file.path()).expect("it opened before");
        let error = Drafter::load(Arc::new(file), &target.target).err();
        let error = error.expect("it is another's");
        assert!(error.to_string().contains(what), "{error}");
        error
    };
    // The same widths, but other numbers of KV heads.
    let error = refused(one.drafter.weights.file(), &other, "KV heads");
    assert!(matches!(error, ModelError::Mismatch { .. }), "{error}");
    // The demo model is wider.
    let demo = Pair::demo();
    refused(
        one.drafter.weights.file(),
        &demo,
        "the width of the model's stream",
    );
    // A model is no drafter, and a drafter no model.
    refused(one.target.weights.file(), &one, "gemma4-assistant");
    let file = Gguf::open(one.drafter.weights.file().path()).expect("it opened before");
    let error = carat_model::Model::load(Arc::new(file)).err();
    assert!(error.expect("no model").to_string().contains("--draft"));
}

#[test]
fn the_demo_pair_answers_and_drafts_as_published() {
    let pair = Pair::demo();
    for case in &pair.cases {
        let most = case.greedy.len();
        let tokens = case.prompt.len() + most + case.most + 1;
        let mut drafting = Drafting::new(&Reference, &pair, Head::Dense, tokens);
        let (answer, rounds) = drafting.speculative(&case.prompt, (most, case.most), &pair.stop);
        assert_eq!(answer, case.greedy);
        assert_eq!(rounds, case.rounds);
    }
}

/// The file under the names that older converters wrote.
fn in_the_older_dialect(file: &Gguf) -> Gguf {
    let mut writer = Writer::default();
    for (key, value) in file.metadata().iter() {
        let renamed = key.replace("gemma4-assistant.", "gemma4_assistant.");
        match renamed.as_str() {
            "general.architecture" => {
                writer.field("general.architecture", &Field::Str("gemma4_assistant"));
            }
            "gemma4_assistant.nextn_predict_layers" => {}
            "gemma4_assistant.embedding_length_out" => {
                writer.copy("gemma4_assistant.n_embd_backbone", value);
            }
            other => writer.copy(other, value),
        }
    }
    for tensor in file.tensors() {
        let name = tensor.name.replace("nextn.", "mtp.");
        writer.tensor(
            &name,
            &tensor.shape,
            tensor.quant.expect("no table of integers"),
        );
    }
    let mut bytes = Vec::new();
    writer
        .write_head(&mut bytes)
        .expect("memory takes all writes");
    for index in 0..file.tensors().len() {
        write_tensor(&mut bytes, file.tensor_bytes(index)).expect("memory takes all writes");
    }
    Gguf::from_bytes("older", bytes).expect("a file of the same contents")
}

#[test]
fn files_of_the_older_dialect_are_the_same_drafter() {
    let mut pair = Pair::load("12b-like");
    let older = in_the_older_dialect(pair.drafter.weights.file());
    pair.drafter = Drafter::load(Arc::new(older), &pair.target).expect("the older dialect loads");
    let case = &pair.cases[0];
    let mut drafting = Drafting::new(&Reference, &pair, Head::Dense, case.prompt.len() + 8);
    let errors = drafting.errors(case, &case.steps);
    assert!(errors.logits.max(errors.state) <= 1e-4, "{errors:?}");
}
