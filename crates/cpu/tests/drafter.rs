//! Draft models on this backend: as near to the published steps as its text models are to theirs, and drafts that change no token.

use carat_cpu::{CpuBackend, CpuConfig, Isa};
use carat_model::gemma4_assistant::Head;
use carat_testkit::{
    drafting::Drafting,
    pairs::{self, Pair},
};

fn backend(isa: Option<Isa>) -> CpuBackend {
    CpuBackend::new(&CpuConfig {
        threads: Some(2),
        isa,
        ..CpuConfig::default()
    })
}

/// Text models of the same kinds are within this of the published logits, which is where the peer's engine is.
const ERROR: f64 = 0.11;

#[test]
fn steps_are_as_near_to_the_published_ones_as_those_of_text_models() {
    for pair in pairs::ALL.map(Pair::load) {
        for case in &pair.cases {
            for (head, steps) in [
                (Head::Clusters, &case.steps),
                (Head::Dense, &case.dense_steps),
            ] {
                let tokens = case.prompt.len() + 8;
                let mut drafting = Drafting::new(&backend(None), &pair, head, tokens);
                // Later steps follow tokens that rounding may have changed.
                let errors = drafting.errors(case, &steps[..steps.len().min(1)]);
                let largest = errors.hidden.max(errors.logits).max(errors.state);
                let what = format!("{} after {}: {errors:?}", pair.name, case.prompt.len());
                assert!(largest <= ERROR, "{what}");
            }
        }
    }
}

#[test]
fn drafts_change_no_token_whatever_their_length() {
    for pair in pairs::ALL.map(Pair::load) {
        for (case, length) in pair.cases.iter().zip([1, 5]) {
            let most = case.greedy.len();
            let tokens = case.prompt.len() + most + length + 1;
            // One class of batches for prompts as well, whatever the machine.
            let backend = backend(Some(Isa::Scalar));
            let new = || Drafting::new(&backend, &pair, Head::Clusters, tokens);
            let plain = new().plain(&case.prompt, most, &pair.stop);
            let (answer, _) = new().speculative(&case.prompt, (most, length), &pair.stop);
            assert_eq!(answer, plain, "{} by {length}", pair.name);
            let (answer, rounds) = new().misled(&case.prompt, &plain, length);
            assert_eq!(answer, plain, "{} misled by {length}", pair.name);
            for (i, (draft, accepted)) in rounds.iter().enumerate() {
                let right = (i % (length + 1)).min(draft.len());
                assert_eq!(*accepted, right, "{}: round {i} of {length}", pair.name);
            }
        }
    }
}

/// Drafts and what is accepted of them, at every place of the published text.
#[test]
fn recorded_rounds_are_played_as_published() {
    for pair in pairs::ALL.map(Pair::load) {
        for case in &pair.cases {
            let tokens = case.prompt.len() + case.greedy.len() + case.most + 1;
            let mut drafting = Drafting::new(&backend(None), &pair, Head::Clusters, tokens);
            let replay = drafting.replay(case);
            let what = format!("{} after {}: {replay:?}", pair.name, case.prompt.len());
            assert!(replay.agrees(ERROR), "{what}");
        }
    }
}

/// Eight-bit activations may turn a token over where two are nearly as likely, but not one of this backend's own.
#[test]
fn the_demo_pair_drafts_as_published() {
    let pair = Pair::demo();
    let (mut same, mut passes, mut tokens) = (0, 0, 0);
    for case in &pair.cases {
        let most = case.greedy.len();
        let room = case.prompt.len() + most + case.most + 1;
        let backend = backend(Some(Isa::Scalar));
        let new = || Drafting::new(&backend, &pair, Head::Dense, room);
        let plain = new().plain(&case.prompt, most, &pair.stop);
        let (answer, rounds) = new().speculative(&case.prompt, (most, case.most), &pair.stop);
        assert_eq!(answer, plain);
        same += usize::from(answer == case.greedy && rounds == case.rounds);
        passes += rounds.len();
        tokens += answer.len() - 1;
    }
    assert!(
        same + 2 >= pair.cases.len(),
        "{same} of {} alike",
        pair.cases.len()
    );
    assert!(
        tokens as f64 / passes as f64 >= 3.4,
        "{tokens} tokens in {passes} passes"
    );
}
