//! `carat inspect`: what a file holds, what is computed, what a backend makes of it, and the first step that differs.

use carat_testkit::fixtures;

use crate::start::{carat, text};

#[test]
fn inspect_shows_dimensions_tensors_and_plan() {
    let folder = tempfile::tempdir().unwrap();
    let model = fixtures::ALL[4].written(folder.path());
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
fn inspect_prints_a_placement_that_can_be_asked_for() {
    let folder = tempfile::tempdir().unwrap();
    let model = fixtures::ALL[4].written(folder.path());
    let placement = |flags: &[&str]| {
        let printed = carat(&[&["inspect", "--placement", "-m", text(&model)], flags].concat());
        assert_eq!(printed.code, Some(0), "{}", printed.stderr);
        printed.stdout
    };
    let roomy = placement(&["--vram", "8GiB"]);
    assert!(
        roomy.contains("on a card of 8.00 GiB") && roomy.contains("# all weights lie on the card"),
        "{roomy}"
    );
    // A driver takes most of it.
    let tight = placement(&["--vram", "432MiB", "-c", "64", "--tier", "portable"]);
    assert!(tight.contains("\nexperts 0"), "{tight}");
    let file = folder.path().join("placement");
    std::fs::write(&file, &tight).unwrap();
    let again = placement(&["--vram", "8GiB", "-c", "64", "--place", text(&file)]);
    let lines = |text: &str| -> Vec<String> {
        let lines = text.lines().filter(|line| !line.starts_with('#'));
        lines.map(str::to_owned).collect()
    };
    assert_eq!(lines(&again), lines(&tight));

    let refused = carat(&[
        "inspect",
        "--placement",
        "--vram",
        "432MiB",
        "-c",
        "64",
        "--tier",
        "portable",
        "--place",
        "card",
        "-m",
        text(&model),
    ]);
    assert_eq!(refused.code, Some(1));
    assert!(
        refused.stderr.contains("give a smaller -c"),
        "{}",
        refused.stderr
    );

    std::fs::write(&file, "experts 0\nexpert 1\n").unwrap();
    let wrong = carat(&["run", "x", "--place", text(&file)]);
    assert_eq!(wrong.code, Some(2));
    assert!(
        wrong
            .stderr
            .contains("line 2: `expert` is no kind of weights"),
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
