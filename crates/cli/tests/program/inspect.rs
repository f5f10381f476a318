//! `carat inspect`: what a file holds, what is computed, what a backend makes of it, and the first step that differs.

use carat_testkit::fixtures;

use crate::start::{carat, text};

#[test]
fn inspect_shows_dimensions_tensors_and_plan() {
    let model = fixtures::ALL[4].path(".gguf");
    let summary = carat(&["inspect", "-m", text(&model)]).stdout;
    assert!(summary.contains("2 of 8, 64 wide"), "{summary}");
    assert!(
        summary.contains("gemma4.attention.sliding_window"),
        "{summary}"
    );
    assert!(
        carat(&["inspect", "--tensors", "-m", text(&model)])
            .stdout
            .contains("blk.0.ffn_gate_up_exps.weight")
    );
    assert!(
        carat(&["inspect", "--plan", "-m", text(&model)])
            .stdout
            .contains("experts")
    );
}

#[test]
fn inspect_lists_what_a_backend_makes_of_the_plan_without_a_card() {
    let program = |flags: &[&str]| carat(&[&["inspect", "--program"], flags].concat());
    let decode = program(&["--backend", "cuda"]).stdout;
    for part in ["on an H200", "L0.attn.q+k+v", "gemv_1", "flash_decode"] {
        assert!(decode.contains(part), "{part}: {decode}");
    }
    let prompt = program(&["--backend", "cuda", "--tier", "portable", "--rows", "2048"]).stdout;
    assert!(prompt.contains("gemm_64") && prompt.contains("flash_prefill"));
    let plain = program(&["--backend", "cuda", "--debug", "no-fusion"]).stdout;
    assert!(plain.contains("linear_plain") && !plain.contains("gemv"));
    let cpu = program(&["--backend", "cpu", "--isa", "scalar"]).stdout;
    assert!(cpu.contains("L0.attn.q") && cpu.contains("gemv"), "{cpu}");
    let wrong = program(&["--rows", "4,9"]);
    assert!(
        wrong.stderr.contains("4 rows with 9 sampled"),
        "{}",
        wrong.stderr
    );
}

#[test]
fn inspect_names_the_first_step_that_differs() {
    let model = fixtures::ALL[1].path(".gguf");
    let same = carat(&[
        "inspect",
        "--diff",
        "reference,cpu",
        "--tolerance",
        "0.5",
        "-m",
        text(&model),
    ]);
    assert!(
        same.stdout.contains("no step differs"),
        "{}{}",
        same.stdout,
        same.stderr
    );
    let strict = carat(&[
        "inspect",
        "--diff",
        "reference,cpu",
        "--tolerance",
        "1e-9",
        "-m",
        text(&model),
    ]);
    assert!(
        strict.stdout.contains("first differ at step"),
        "{}{}",
        strict.stdout,
        strict.stderr
    );
}
