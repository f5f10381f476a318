//! The façade as a program outside the workspace finds it.

use std::{path::Path, process::Command};

#[test]
#[ignore = "compiles the library a second time, for some minutes: cargo test -p carat --test outside -- --ignored"]
fn a_crate_elsewhere_streams_two_conversations_and_cancels_one() {
    let here = Path::new(env!("CARGO_MANIFEST_DIR"));
    // The workspace's own folder: with the same profile, what is built there already serves here.
    let built_here = Path::new(env!("CARGO_TARGET_TMPDIR")).join("..");
    let output = Command::new(env!("CARGO"))
        .args(["run", "--quiet", "--offline", "--manifest-path"])
        .arg(here.join("tests/outside/Cargo.toml"))
        .arg("--target-dir")
        .arg(built_here)
        .arg("--")
        .arg(here.join("../../assets/pip-q8_0.gguf"))
        .output()
        .expect("cargo runs");
    let told = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{told}");
    let said = String::from_utf8_lossy(&output.stdout);
    assert!(said.starts_with("Stop "), "{said}");
    assert!(said.contains("1 + 1 = 2"), "{said}");
}
