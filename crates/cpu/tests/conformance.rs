//! Every step, format and shape of the test kit on every level of instructions, against the reference.

use std::sync::Arc;

use carat_cpu::{CpuBackend, CpuConfig, Isa};
use carat_testkit::cases;
use libtest_mimic::{Arguments, Trial};

fn main() {
    let cases = cases::all().into_iter().chain(cases::eight_bit_kv());
    let trials = cases.map(Arc::new).flat_map(|case| {
        Isa::ALL.into_iter().map(move |isa| {
            let case = Arc::clone(&case);
            let name = format!("{}/{isa:?}", case.name);
            let trial = Trial::test(name, move || {
                let backend = CpuBackend::new(&CpuConfig {
                    threads: Some(2),
                    isa: Some(isa),
                });
                case.check(&backend).map_err(Into::into)
            });
            trial.with_ignored_flag(!isa.available())
        })
    });
    libtest_mimic::run(&Arguments::from_args(), trials.collect()).exit();
}
