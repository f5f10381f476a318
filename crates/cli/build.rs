//! Hands the commit that is built to `src/version.rs`. A source tree without its history has none.

use std::{fs, path::Path, process::Command};

/// Digits of a commit's hash: enough to stay unique for long, and few enough to read out.
const DIGITS: usize = 12;

fn main() {
    println!("cargo::rerun-if-changed=build.rs");
    let package = Path::new(env!("CARGO_MANIFEST_DIR"));
    if let Some(commit) = commit(package) {
        println!("cargo::rustc-env=CARAT_COMMIT={commit}");
    }
}

fn commit(package: &Path) -> Option<String> {
    // The history of another project, which has this one somewhere in its folders, says nothing about it.
    let top = git(package, &["rev-parse", "--show-toplevel"])?;
    let workspace = fs::canonicalize(package.join("../..")).ok()?;
    if fs::canonicalize(top).ok()? != workspace {
        return None;
    }
    // Grows with every commit, and with whatever else moves HEAD.
    let log = git(package, &["rev-parse", "--git-path", "logs/HEAD"])?;
    println!("cargo::rerun-if-changed={}", package.join(log).display());
    git(
        package,
        &["rev-parse", &format!("--short={DIGITS}"), "HEAD"],
    )
}

/// A line that git prints; nothing where it fails or is not there.
fn git(folder: &Path, arguments: &[&str]) -> Option<String> {
    let output = Command::new("git")
        .current_dir(folder)
        .args(arguments)
        .output()
        .ok()?;
    let line = String::from_utf8(output.stdout).ok()?;
    output.status.success().then(|| line.trim().to_owned())
}
