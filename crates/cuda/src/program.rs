//! Calls bound to loaded kernels and addresses: a flat list of launches.
//!
//! Nothing in a launch changes from batch to batch but how many blocks it has, and that depends on row counts alone. So a
//! run can be captured as it is.

use std::sync::Arc;

use carat_model::plan::Rows;

use crate::{
    config::Checks,
    device::{Device, Module},
    error::CudaError,
    kernel::{Addresses, Kernel},
    launch::launch,
    lower::Call,
};

pub(crate) struct Program {
    steps: Vec<Bound>,
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
    /// `modules` are those of the calls, in order.
    pub(crate) fn bind(calls: Vec<Call>, modules: Vec<Arc<Module>>, at: &Addresses) -> Program {
        let steps = calls.into_iter().zip(modules).map(|(call, module)| {
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
