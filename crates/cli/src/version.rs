//! What `carat --version` says: the version, the commit it was built from, and the level of instructions that this machine's
//! processor allows. The last is why it is made at run time.

use std::sync::LazyLock;

use carat_cpu::Isa;
use clap::ValueEnum;

use crate::{args::IsaName, load};

/// The version alone, for what is written once for all machines.
pub(crate) const NUMBER: &str = env!("CARGO_PKG_VERSION");

/// Such as `0.1.0 (commit 0123456789ab, x86_64, amx)`.
pub(crate) fn text() -> &'static str {
    static TEXT: LazyLock<String> = LazyLock::new(|| {
        let commit = option_env!("CARAT_COMMIT").unwrap_or("unknown");
        let architecture = std::env::consts::ARCH;
        format!("{NUMBER} (commit {commit}, {architecture}, {})", level())
    });
    &TEXT
}

/// The level's name, as `--isa` takes it.
fn level() -> String {
    let best = Isa::detect();
    let names = IsaName::value_variants().iter();
    let name = names
        .filter(|name| load::isa_level(**name) == best)
        .find_map(IsaName::to_possible_value);
    name.map_or_else(String::new, |name| name.get_name().to_owned())
}
