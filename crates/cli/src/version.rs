//! Text of `carat --version`: the version, the commit it was built from, and the level of instructions that this machine's
//! processor allows. The last is why it is made at run time.

use std::sync::LazyLock;

use carat_cpu::Isa;

use crate::load;

/// The version alone, for what is written once for all machines.
pub(crate) const NUMBER: &str = env!("CARGO_PKG_VERSION");

/// Such as `0.1.0 (commit 0123456789ab, x86_64, amx)`.
pub(crate) fn text() -> &'static str {
    static TEXT: LazyLock<String> = LazyLock::new(|| {
        let commit = option_env!("CARAT_COMMIT").unwrap_or("unknown");
        let architecture = std::env::consts::ARCH;
        let level = load::isa_name(Isa::detect());
        format!("{NUMBER} (commit {commit}, {architecture}, {level})")
    });
    &TEXT
}
