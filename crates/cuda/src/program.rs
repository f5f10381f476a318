//! Calls bound to loaded kernels and addresses: a flat list of launches.
//!
//! Nothing in a launch changes from batch to batch but how many blocks it has, and that depends on row counts alone. So a
//! run can be captured as it is.

use std::sync::Arc;

use carat_model::plan::{Rows, Value};

use crate::{
    config::Checks,
    device::{Device, Module},
    error::CudaError,
    kernel::{Addresses, Kernel, Place},
    launch::launch,
    lower::{Call, Class},
};

#[derive(Default)]
pub(crate) struct Program {
    steps: Vec<Bound>,
    /// Values that some call writes: what exists only inside a kernel is not among them.
    pub(crate) written: Vec<Value>,
}

/// One for few rows, one for many.
#[derive(Clone, Debug, Default)]
pub(crate) struct ByClass<T> {
    pub(crate) narrow: T,
    pub(crate) wide: T,
}

impl<T> ByClass<T> {
    pub(crate) fn get(&self, class: Class) -> &T {
        match class {
            Class::Narrow => &self.narrow,
            Class::Wide => &self.wide,
        }
    }

    pub(crate) fn map<U>(self, mut f: impl FnMut(T) -> U) -> ByClass<U> {
        ByClass {
            narrow: f(self.narrow),
            wide: f(self.wide),
        }
    }
}

/// The whole plan: what runs for all rows, then what runs for those that are sampled.
pub(crate) struct Programs {
    pub(crate) front: ByClass<Program>,
    pub(crate) tail: ByClass<Program>,
}

impl Programs {
    /// The two that a batch of so many rows runs, in order.
    pub(crate) fn of(&self, rows: RowCounts) -> [&Program; 2] {
        [
            self.front.get(Class::of(rows.all)),
            self.tail.get(Class::of(rows.sampled)),
        ]
    }
}

struct Bound {
    label: String,
    rows: Rows,
    kernel: Box<dyn Kernel>,
    module: Arc<Module>,
    params: Vec<u8>,
}

/// How many rows a batch has.
#[derive(Clone, Copy, Debug)]
pub(crate) struct RowCounts {
    pub(crate) all: usize,
    pub(crate) sampled: usize,
}

impl RowCounts {
    pub(crate) fn get(self, rows: Rows) -> usize {
        match rows {
            Rows::All => self.all,
            Rows::Sampled => self.sampled,
        }
    }
}

impl Program {
    pub(crate) fn bind(
        calls: Vec<Call>,
        module: impl Fn(&Call) -> Arc<Module>,
        at: &Addresses,
    ) -> Program {
        let written = written_values(&calls);
        let steps = calls.into_iter().map(|call| {
            let module = module(&call);
            let params = call.kernel.params(at, at.rows(call.rows));
            assert_eq!(
                params.len(),
                call.kernel.specialization().params_bytes,
                "{} passes another struct than it was compiled with",
                call.label
            );
            Bound {
                label: call.label,
                rows: call.rows,
                kernel: call.kernel,
                module,
                params,
            }
        });
        Program {
            steps: steps.collect(),
            written,
        }
    }

    pub(crate) fn launches(&self) -> usize {
        self.steps.len()
    }

    /// Queues every launch; those that have no rows are left out.
    pub(crate) fn run(
        &self,
        device: &Device,
        rows: RowCounts,
        checks: Checks,
    ) -> Result<(), CudaError> {
        device.bind()?;
        for step in &self.steps {
            let rows = rows.get(step.rows);
            if rows == 0 {
                continue;
            }
            launch(&step.module, step.kernel.grid(rows), &step.params)?;
            if checks == Checks::EachLaunch {
                device.wait(&format!("running {}", step.label))?;
            }
        }
        Ok(())
    }
}

fn written_values(calls: &[Call]) -> Vec<Value> {
    let places = calls.iter().flat_map(|c| c.kernel.writes());
    let values = places.filter_map(|place| match place {
        Place::Value(v) => Some(v),
        Place::Scratch(_) => None,
    });
    values.collect()
}
