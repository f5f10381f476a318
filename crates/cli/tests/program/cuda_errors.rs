//! Messages of `carat` when CUDA cannot be used: under the emulator, which plays cards and drivers that are at fault.
//!
//!     crates/cuda/emulator/build.sh
//!     EMULATOR_DIR=$PWD/target/emulator cargo test -p carat-cli --test program cuda_errors -- --ignored

use std::{
    fs,
    path::{Path, PathBuf},
};

use crate::start::{Output, end_of, program};

#[expect(clippy::disallowed_methods, reason = "a setting of the test harness")]
pub(crate) fn emulator() -> PathBuf {
    let folder =
        std::env::var_os("EMULATOR_DIR").expect("EMULATOR_DIR names the emulator's folder");
    fs::canonicalize(folder).expect("the folder exists")
}

/// A card whose kernels the emulator compiles: it has no clusters, which those of Hopper use.
pub(crate) const ADA: (&str, &str) = ("EMULATOR_CAPABILITY", "89");

/// Runs `carat` with these libraries, a card that may be at fault and a folder to keep kernels in.
fn carat(libraries: &Path, home: &Path, card: &[(&str, &str)], arguments: &[&str]) -> Output {
    let on_the_card = [arguments, &["--backend", "cuda"]].concat();
    carat_by_default(libraries, home, card, &on_the_card)
}

fn carat_by_default(
    libraries: &Path,
    home: &Path,
    card: &[(&str, &str)],
    arguments: &[&str],
) -> Output {
    let mut command = program(arguments);
    command.env("LD_LIBRARY_PATH", libraries).env("HOME", home);
    end_of(command.envs(card.iter().copied()))
}

/// The one line that it ends with.
fn refusal(output: &Output) -> &str {
    assert_eq!(output.code, Some(1), "{}", output.stderr);
    assert!(!output.stderr.contains("panicked"), "{}", output.stderr);
    let complaint = output
        .stderr
        .trim_end()
        .lines()
        .last()
        .expect("a complaint");
    complaint
        .strip_prefix("carat: ")
        .expect("the program's own")
}

/// Some of the emulator's libraries.
fn only(names: &[&str]) -> tempfile::TempDir {
    let folder = tempfile::tempdir().expect("a folder");
    for name in names {
        fs::copy(emulator().join(name), folder.path().join(name)).expect("copied");
    }
    folder
}

#[test]
#[ignore = "needs the CUDA emulator"]
fn old_drivers_and_cards_are_named_with_what_is_needed() {
    let home = tempfile::tempdir().unwrap();
    let cases = [
        (("EMULATOR_DRIVER", "11040"), ["CUDA 11.4", "12.0 or newer"]),
        (
            ("EMULATOR_CAPABILITY", "75"),
            ["capability 7.5", "8.0 (Ampere"],
        ),
        (
            ("EMULATOR_CAPABILITY", "0"),
            ["no CUDA device 0", "sees no card"],
        ),
        (
            // A sixteenth is left to the driver.
            ("EMULATOR_MEMORY", "6000000"),
            ["5.36 MiB are free", "a context of 2048 tokens needs"],
        ),
    ];
    for (fault, expected) in cases {
        let output = carat(&emulator(), home.path(), &[fault], &["run", "Hello!"]);
        let complaint = refusal(&output);
        for part in expected.iter().chain(&["--backend cpu"]) {
            assert!(complaint.contains(part), "{fault:?}: {complaint}");
        }
    }
}

#[test]
#[ignore = "needs the CUDA emulator"]
fn a_bench_that_does_not_fit_gives_both_numbers_and_a_way_out() {
    let home = tempfile::tempdir().unwrap();
    // With more, weights would lie in host memory.
    let little = ("EMULATOR_MEMORY", "1000000");
    let output = carat(
        &emulator(),
        home.path(),
        &[ADA, little],
        &["bench", "-p", "8", "-n", "2"],
    );
    let complaint = refusal(&output);
    for part in [
        "MiB needed, 0.9 MiB free",
        "smaller quantization",
        "--backend",
    ] {
        assert!(complaint.contains(part), "{complaint}");
    }
}

#[test]
#[ignore = "needs the CUDA emulator"]
fn without_a_compiler_every_way_to_kernels_is_named() {
    let (home, libraries) = (tempfile::tempdir().unwrap(), only(&["libcuda.so.1"]));
    let output = carat(libraries.path(), home.path(), &[], &["run", "Hello!"]);
    let complaint = refusal(&output);
    for part in [
        "libnvrtc.so.13",
        "pip install",
        "--kernels",
        "--backend cpu",
    ] {
        assert!(complaint.contains(part), "{complaint}");
    }
    let missing = "cuBLASLt was not found, so prompts are computed by Carat's own kernels";
    assert_eq!(
        output.stderr.matches(missing).count(),
        1,
        "{}",
        output.stderr
    );
}

/// A person who did not ask for a card gets an answer all the same.
#[test]
#[ignore = "needs the CUDA emulator"]
fn a_card_without_a_compiler_is_not_the_default() {
    let (home, libraries) = (tempfile::tempdir().unwrap(), only(&["libcuda.so.1"]));
    let ask = ["run", "Hello!", "--temp", "0", "-n", "4", "-c", "256"];
    let output = carat_by_default(libraries.path(), home.path(), &[], &ask);
    assert_eq!(output.code, Some(0), "{}", output.stderr);
    assert!(!output.stdout.trim().is_empty());
}

/// Once with all libraries, once without the one that is not needed, and once on a card that fails in between.
#[test]
#[ignore = "needs the CUDA emulator"]
fn answers_do_not_need_the_library_and_end_where_the_card_does() {
    let home = tempfile::tempdir().unwrap();
    let ask = ["run", "Hello!", "--temp", "0", "-n", "4", "-c", "256"];
    let own = only(&["libcuda.so.1", "libnvrtc.so.13"]);
    let whole = carat(&emulator(), home.path(), &[ADA], &ask);
    assert_eq!(whole.code, Some(0), "{}", whole.stderr);
    let without = carat(own.path(), home.path(), &[ADA], &ask);
    assert_eq!(without.stdout, whole.stdout);
    for output in [&whole, &without] {
        assert!(!output.stderr.contains("cuBLASLt"), "{}", output.stderr);
    }
    let lost = ("EMULATOR_FAIL_AFTER_LAUNCHES", "300");
    let output = carat(&emulator(), home.path(), &[ADA, lost], &ask);
    let complaint = refusal(&output);
    for part in [
        "the card stopped working",
        "CUDA_ERROR_LAUNCH_FAILED",
        "--backend cpu",
    ] {
        assert!(complaint.contains(part), "{complaint}");
    }
}
