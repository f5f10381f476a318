//! A program: calls bound to loaded kernels and addresses, a flat list of launches.
//!
//! Nothing in a launch changes from batch to batch but how many blocks it has, and that depends on row counts alone. So a
//! run can be captured in a graph as it is.
//!
//! A program with offloaded weights has a [`WeightStream`] that brings them to the card beside its launches.
//!
//! Where a row's bits must not depend on its company, every batch goes through the programs of small batches, [`SMALL_ROWS`] rows
//! at a time: a launch is then bound to the addresses of each such group of rows.

use std::{
    cell::{Cell, RefCell},
    collections::{HashMap, hash_map::Entry},
    rc::Rc,
    sync::Arc,
};

use carat_model::{
    backend::Batching,
    phase::Origin,
    plan::{Rows, Value},
};

use crate::{
    compile::{
        call::{Buckets, Call, CublasLtGemm, Launch},
        rows::{ByClass, RowClass, RowCounts, SMALL_ROWS, padded_rows, small_groups},
    },
    device::{
        Address, Device, Grid, Module,
        cublaslt::{Gemm, Library, MatmulShape, Operands, Out, WORKSPACE_BYTES},
        launch,
    },
    error::CudaError,
    kernel::{Addresses, Kernel, Operand},
    run::stream::WeightStream,
};

/// The whole plan: the program of all rows, then that of the sampled ones.
pub(crate) struct Programs {
    front: ByClass<Program>,
    tail: ByClass<Program>,
    batching: Batching,
}

/// A program with the rows that it runs over.
pub(crate) struct Pass<'a> {
    pub(crate) program: &'a Program,
    /// Group of rows whose addresses its launches have.
    pub(crate) group: usize,
    pub(crate) rows: RowCounts,
}

impl Programs {
    /// Binds the calls of both parts; those of large batches have the stream of the part.
    pub(crate) fn bind(
        [front, tail]: [(ByClass<Vec<Call>>, Option<WeightStream>); 2],
        batching: Batching,
        bind: impl Fn(Rows, Vec<Call>, Option<WeightStream>) -> Program,
    ) -> Programs {
        let of = |rows, (calls, stream): (ByClass<Vec<Call>>, _)| ByClass {
            small: bind(rows, calls.small, None),
            medium: bind(rows, calls.medium, None),
            large: bind(rows, calls.large, stream),
        };
        Programs {
            front: of(Rows::All, front),
            tail: of(Rows::Sampled, tail),
            batching,
        }
    }

    /// Everything that a batch of so many rows runs, in order.
    pub(crate) fn passes(&self, rows: RowCounts) -> Vec<Pass<'_>> {
        let parts = [(&self.front, rows.all), (&self.tail, rows.sampled)];
        match self.batching {
            Batching::Fast => parts
                .map(|(programs, count)| Pass {
                    program: programs.get(RowClass::of(count)),
                    group: 0,
                    rows,
                })
                .into(),
            Batching::Invariant => parts
                .into_iter()
                .flat_map(|(programs, count)| {
                    (0..small_groups(count)).map(move |group| {
                        let count = SMALL_ROWS.min(count - group * SMALL_ROWS);
                        Pass {
                            program: &programs.small,
                            group,
                            rows: RowCounts {
                                all: count,
                                sampled: count,
                            },
                        }
                    })
                })
                .collect(),
        }
    }
}

pub(crate) struct Program {
    steps: Vec<Bound>,
    /// Those of them that ask the host for a step.
    asking: Vec<usize>,
    /// Weights that come from host memory while it runs.
    stream: Option<WeightStream>,
    /// Values that some call writes as the plan defines them: those that exist only inside a kernel, or must still be scaled, are
    /// not among them.
    pub(crate) written: Vec<Value>,
}

struct Bound {
    label: String,
    origin: Origin,
    rows: Rows,
    buckets: Buckets,
    action: Action,
}

enum Action {
    Kernel {
        kernel: Box<dyn Kernel>,
        module: Arc<Module>,
        /// Per group of rows.
        params: Vec<Vec<u8>>,
        /// The rows it was last launched with, and their grid.
        grid: Cell<Option<(usize, Grid)>>,
    },
    CublasLt {
        product: CublasLtGemm,
        operands: Operands,
        products: Rc<CublasLtGemms>,
    },
}

/// Products of cuBLASLt, each set up when it is first needed.
pub(crate) struct CublasLtGemms {
    library: Library,
    workspace: Address,
    ready: RefCell<HashMap<(MatmulShape, Out, u32), Gemm>>,
}

impl CublasLtGemms {
    pub(crate) fn new(library: Library, workspace: Address) -> CublasLtGemms {
        CublasLtGemms {
            library,
            workspace,
            ready: RefCell::default(),
        }
    }

    fn run(
        &self,
        product: &CublasLtGemm,
        rows: usize,
        operands: Operands,
    ) -> Result<(), CudaError> {
        let shape = MatmulShape {
            rows,
            outputs: product.outputs,
            columns: product.columns,
            stride: product.stride,
        };
        let mut ready = self.ready.borrow_mut();
        let (kind, alpha) = (product.kind, product.alpha);
        let gemm = match ready.entry((shape, kind, alpha.to_bits())) {
            Entry::Occupied(known) => known.into_mut(),
            Entry::Vacant(vacant) => {
                let gemm = Gemm::new(&self.library, shape, kind, alpha, WORKSPACE_BYTES)?;
                vacant.insert(gemm)
            }
        };
        gemm.launch(operands)
    }
}

impl Program {
    /// Binds calls to the addresses of each group of rows; those of all rows come first.
    pub(crate) fn bind(
        calls: Vec<Call>,
        module: impl Fn(&dyn Kernel) -> Arc<Module>,
        products: Option<&Rc<CublasLtGemms>>,
        groups: &[Addresses],
        stream: Option<WeightStream>,
    ) -> Program {
        let written = written_values(&calls);
        let asks = |call: &Call| call.kernel().is_some_and(Kernel::asks_host);
        let asking = (0..calls.len()).filter(|i| asks(&calls[*i])).collect();
        let mut redirected = stream.as_ref().map(|_| groups.to_vec());
        let steps = calls.into_iter().enumerate().map(|(index, call)| {
            if let (Some(stream), Some(groups)) = (&stream, &mut redirected) {
                for at in groups {
                    stream.redirect(index, &mut at.weights);
                }
            }
            let groups = redirected.as_deref().unwrap_or(groups);
            let at = &groups[0];
            let action = match call.launch {
                Launch::Kernel(kernel) => {
                    let params = |at: &Addresses| {
                        let params = kernel.params(at, at.rows(call.rows));
                        assert_eq!(
                            params.len(),
                            kernel.specialization().params_bytes,
                            "{} passes another struct than it was compiled with",
                            call.label
                        );
                        params
                    };
                    let params = groups.iter().map(params).collect();
                    Action::Kernel {
                        module: module(kernel.as_ref()),
                        kernel,
                        params,
                        grid: Cell::new(None),
                    }
                }
                Launch::CublasLt(product) => {
                    let products = products.expect("opened before products were lowered for it");
                    Action::CublasLt {
                        operands: Operands {
                            weights: at.matrix(&product.w).start,
                            x: at.operand(product.x),
                            out: at.operand(product.out),
                            workspace: products.workspace,
                        },
                        products: Rc::clone(products),
                        product,
                    }
                }
            };
            Bound {
                label: call.label,
                origin: call.origin,
                rows: call.rows,
                buckets: call.buckets,
                action,
            }
        });
        Program {
            steps: steps.collect(),
            asking,
            stream,
            written,
        }
    }

    /// Requests to the host among the launches for so many rows.
    pub(crate) fn requests(&self, rows: RowCounts) -> usize {
        let launched = |step: &&usize| self.steps[**step].launched(rows).is_some();
        self.asking.iter().filter(launched).count()
    }

    /// Queues every launch for a group of rows, and calls `queued` with the label and origin of each; those that have no rows are left
    /// out.
    pub(crate) fn run(
        &self,
        device: &Device,
        group: usize,
        rows: RowCounts,
        mut queued: impl FnMut(&str, Origin) -> Result<(), CudaError>,
    ) -> Result<(), CudaError> {
        device.bind()?;
        let Some(stream) = &self.stream else {
            let mut steps = self.steps.iter();
            return steps.try_for_each(|step| step.run(group, rows, &mut queued));
        };
        stream.start(device)?;
        for (index, step) in self.steps.iter().enumerate() {
            // Also for a step that is left out: what it would have read has its turn in the buffers.
            stream.before(device, index)?;
            step.run(group, rows, &mut queued)?;
            stream.after(device, index)?;
        }
        Ok(())
    }
}

impl Bound {
    /// Queues the launch, unless it has no rows or another takes its place in the bucket.
    fn run(
        &self,
        group: usize,
        rows: RowCounts,
        queued: &mut impl FnMut(&str, Origin) -> Result<(), CudaError>,
    ) -> Result<(), CudaError> {
        let Some(rows) = self.launched(rows) else {
            return Ok(());
        };
        self.action.run(group, rows)?;
        queued(&self.label, self.origin)
    }

    /// The rows it is launched for, if it is.
    fn launched(&self, rows: RowCounts) -> Option<usize> {
        let rows = rows.get(self.rows);
        // A row's result must not depend on how many others there are, beyond the bucket.
        let rows = match (rows, RowClass::of(rows)) {
            (0, _) => return None,
            (_, RowClass::Small) => rows,
            (_, RowClass::Medium | RowClass::Large) => padded_rows(rows),
        };
        self.buckets.hold(rows).then_some(rows)
    }
}

impl Action {
    fn run(&self, group: usize, rows: usize) -> Result<(), CudaError> {
        match self {
            Action::Kernel {
                kernel,
                module,
                params,
                grid,
            } => {
                let of_rows = match grid.get() {
                    Some((known, of_rows)) if known == rows => of_rows,
                    _ => kernel.grid(rows),
                };
                grid.set(Some((rows, of_rows)));
                launch(module, of_rows, &params[group])
            }
            Action::CublasLt {
                product,
                operands,
                products,
            } => products.run(product, rows, *operands),
        }
    }
}

fn written_values(calls: &[Call]) -> Vec<Value> {
    let finished = |call: &&Call| !call.is_scaled();
    let operands = calls.iter().filter(finished).flat_map(Call::writes);
    let values = operands.filter_map(|operand| match operand {
        Operand::Value(v) => Some(v),
        Operand::Scratch(_) => None,
    });
    values.collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn programs(batching: Batching) -> Programs {
        let empty = || Program {
            steps: Vec::new(),
            asking: Vec::new(),
            stream: None,
            written: Vec::new(),
        };
        let by_class = || ByClass {
            small: empty(),
            medium: empty(),
            large: empty(),
        };
        Programs {
            front: by_class(),
            tail: by_class(),
            batching,
        }
    }

    const fn rows(all: usize, sampled: usize) -> RowCounts {
        RowCounts { all, sampled }
    }

    #[test]
    fn front_and_tail_have_a_class_each() {
        let programs = programs(Batching::Fast);
        let runs = |rows, front: &Program, tail: &Program| {
            let passes = programs.passes(rows);
            let found: Vec<&Program> = passes.iter().map(|pass| pass.program).collect();
            assert!(std::ptr::eq(found[0], front) && std::ptr::eq(found[1], tail));
            assert!(
                passes
                    .iter()
                    .all(|pass| pass.rows == rows && pass.group == 0)
            );
        };
        runs(rows(9, 8), &programs.front.medium, &programs.tail.small);
        runs(rows(65, 64), &programs.front.large, &programs.tail.medium);
    }

    #[test]
    fn invariant_batches_go_through_the_small_programs_in_groups() {
        let programs = programs(Batching::Invariant);
        let passes = programs.passes(rows(20, 9));
        let found: Vec<_> = (passes.iter())
            .map(|pass| {
                let is_front = std::ptr::eq(pass.program, &raw const programs.front.small);
                let is_tail = std::ptr::eq(pass.program, &raw const programs.tail.small);
                assert!(is_front != is_tail);
                (is_front, pass.group, pass.rows.all, pass.rows.sampled)
            })
            .collect();
        let expected = [
            (true, 0, 8, 8),
            (true, 1, 8, 8),
            (true, 2, 4, 4),
            (false, 0, 8, 8),
            (false, 1, 1, 1),
        ];
        assert_eq!(found, expected);
        assert_eq!(programs.passes(rows(3, 0)).len(), 1);
    }
}
