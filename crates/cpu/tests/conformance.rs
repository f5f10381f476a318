//! Every step, format and shape of the test kit on every level of instructions, against the reference; products of large
//! batches once more with repacked weights; and what an executor promises beyond steps.

use std::sync::Arc;

use carat_cpu::{CpuBackend, CpuConfig, Isa};
use carat_testkit::{cases, contract};
use libtest_mimic::{Arguments, Trial};

fn main() {
    let cases = cases::all().into_iter().chain(cases::eight_bit_kv());
    let trials = cases.map(Arc::new).flat_map(|case| {
        let keeps = case.name.starts_with("linear/") && case.name.ends_with("/rows33");
        let levels = Isa::ALL.map(|isa| (isa, 0, ""));
        let repacked = keeps.then_some((Isa::Amx, 1 << 30, ", repacked"));
        levels
            .into_iter()
            .chain(repacked)
            .map(move |(isa, repack_bytes, note)| {
                let case = Arc::clone(&case);
                let name = format!("{}/{isa:?}{note}", case.name);
                let trial = Trial::test(name, move || {
                    let backend = CpuBackend::new(&CpuConfig {
                        threads: Some(2),
                        isa: Some(isa),
                        repack_bytes,
                        ..CpuConfig::default()
                    });
                    case.check(&backend).map_err(Into::into)
                });
                trial.with_ignored_flag(!isa.available())
            })
    });
    let promises = contract::ALL.into_iter().flat_map(|promise| {
        [1, 3].map(|threads| {
            Trial::test(format!("{}/threads{threads}", promise.name), move || {
                let backend = CpuBackend::new(&CpuConfig {
                    threads: Some(threads),
                    ..CpuConfig::default()
                });
                promise.check(&backend).map_err(Into::into)
            })
        })
    });
    let trials = trials.chain(promises).collect();
    libtest_mimic::run(&Arguments::from_args(), trials).exit();
}
