//! Calls bound to loaded kernels and addresses: a flat list of launches.
//!
//! Nothing in a launch changes from batch to batch but how many blocks it has, and that depends on row counts alone. So a
//! run can be captured as it is.

use std::{
    cell::{Cell, RefCell},
    collections::{HashMap, hash_map::Entry},
    rc::Rc,
    sync::Arc,
};

use carat_model::{
    phase::Origin,
    plan::{Rows, Value},
};

use crate::{
    compile::lower::{Call, Class, Launch, LibraryProduct, NARROW_ROWS},
    device::{
        Address, Device, Grid, Module,
        cublaslt::{Gemm, Library, Operands, Out, Shape},
        launch,
    },
    error::CudaError,
    kernel::{Addresses, Kernel, Place},
};

/// What the library may use beside its operands.
pub(crate) const WORKSPACE_BYTES: usize = 64 << 20;

/// How many rows a batch has.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
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

/// Rows that buffers have room for when a batch has so many: launches are made for buckets of rows.
pub(crate) fn room(rows: usize) -> usize {
    match rows {
        _ if Class::of(rows) == Class::Narrow => NARROW_ROWS,
        ..=64 => rows.next_multiple_of(16),
        65..=512 => rows.next_multiple_of(64),
        _ => rows.next_multiple_of(256),
    }
}

/// All numbers of rows that wide launches are made for, up to the bucket of so many rows.
pub(crate) fn buckets(max_rows: usize) -> impl Iterator<Item = usize> {
    let rows = NARROW_ROWS + 1..=max_rows;
    rows.filter(move |&rows| room(rows) == rows || rows == max_rows)
        .map(room)
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

pub(crate) struct Program {
    steps: Vec<Bound>,
    /// Values that some call writes as they are: what exists only inside a kernel, or must still be scaled, is not among them.
    pub(crate) written: Vec<Value>,
}

struct Bound {
    label: String,
    origin: Origin,
    rows: Rows,
    action: Action,
}

enum Action {
    Kernel {
        kernel: Box<dyn Kernel>,
        module: Arc<Module>,
        params: Vec<u8>,
        /// Of the rows it was last launched with.
        grid: Cell<Option<(usize, Grid)>>,
    },
    Library {
        product: LibraryProduct,
        operands: Operands,
        products: Rc<LibraryProducts>,
    },
}

/// The library's products, each made when it is first needed.
pub(crate) struct LibraryProducts {
    library: Library,
    workspace: Address,
    made: RefCell<HashMap<(Shape, Out, u32), Gemm>>,
}

impl LibraryProducts {
    pub(crate) fn new(library: Library, workspace: Address) -> LibraryProducts {
        LibraryProducts {
            library,
            workspace,
            made: RefCell::default(),
        }
    }

    fn run(
        &self,
        product: &LibraryProduct,
        rows: usize,
        operands: Operands,
    ) -> Result<(), CudaError> {
        let shape = Shape {
            rows,
            outputs: product.outputs,
            columns: product.columns,
            stride: product.stride,
        };
        let mut made = self.made.borrow_mut();
        let (kind, alpha) = (product.kind, product.alpha);
        let gemm = match made.entry((shape, kind, alpha.to_bits())) {
            Entry::Occupied(known) => known.into_mut(),
            Entry::Vacant(place) => {
                let gemm = Gemm::new(&self.library, shape, kind, alpha, WORKSPACE_BYTES)?;
                place.insert(gemm)
            }
        };
        gemm.launch(operands)
    }
}

impl Program {
    pub(crate) fn bind(
        calls: Vec<Call>,
        module: impl Fn(&dyn Kernel) -> Arc<Module>,
        products: Option<&Rc<LibraryProducts>>,
        at: &Addresses,
    ) -> Program {
        let written = written_values(&calls);
        let steps = calls.into_iter().map(|call| {
            let action = match call.launch {
                Launch::Kernel(kernel) => {
                    let params = kernel.params(at, at.rows(call.rows));
                    assert_eq!(
                        params.len(),
                        kernel.specialization().params_bytes,
                        "{} passes another struct than it was compiled with",
                        call.label
                    );
                    Action::Kernel {
                        module: module(kernel.as_ref()),
                        kernel,
                        params,
                        grid: Cell::new(None),
                    }
                }
                Launch::Library(product) => {
                    let products = products.expect("opened before products were lowered for it");
                    Action::Library {
                        operands: Operands {
                            weights: at.matrix(&product.w).start,
                            x: at.place(product.x),
                            out: at.place(product.out),
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
                action,
            }
        });
        Program {
            steps: steps.collect(),
            written,
        }
    }

    /// Queues every launch, and calls `queued` with the label and origin of each; those that have no rows are left out.
    pub(crate) fn run(
        &self,
        device: &Device,
        rows: RowCounts,
        mut queued: impl FnMut(&str, Origin) -> Result<(), CudaError>,
    ) -> Result<(), CudaError> {
        device.bind()?;
        for step in &self.steps {
            let rows = rows.get(step.rows);
            if rows == 0 {
                continue;
            }
            // What a row comes to must not depend on how many others there are, beyond the bucket.
            let rows = match Class::of(rows) {
                Class::Narrow => rows,
                Class::Wide => room(rows),
            };
            step.action.run(rows)?;
            queued(&step.label, step.origin)?;
        }
        Ok(())
    }
}

impl Action {
    fn run(&self, rows: usize) -> Result<(), CudaError> {
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
                launch(module, of_rows, params)
            }
            Action::Library {
                product,
                operands,
                products,
            } => products.run(product, rows, *operands),
        }
    }
}

fn written_values(calls: &[Call]) -> Vec<Value> {
    let finished = |call: &&Call| !matches!(&call.launch, Launch::Library(p) if p.scaled);
    let places = calls.iter().filter(finished).flat_map(Call::writes);
    let values = places.filter_map(|place| match place {
        Place::Value(v) => Some(v),
        Place::Scratch(_) => None,
    });
    values.collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rooms_hold_their_rows_and_grow() {
        let rooms: Vec<usize> = [1, 8, 9, 16, 17, 64, 65, 512, 513, 2048].map(room).into();
        assert_eq!(rooms, [8, 8, 16, 16, 32, 64, 128, 512, 768, 2048]);
        for rows in 1..3000 {
            let held = room(rows);
            assert!(held >= rows && room(held) == held && room(rows + 1) >= held);
        }
    }

    #[test]
    fn buckets_are_the_rooms_of_wide_batches() {
        for max_rows in [1, 8, 9, 40, 64, 300, 2048, 2050] {
            let mut expected: Vec<usize> = (NARROW_ROWS + 1..=max_rows).map(room).collect();
            expected.dedup();
            let found: Vec<usize> = buckets(max_rows).collect();
            assert_eq!(found, expected, "up to {max_rows} rows");
        }
    }

    #[test]
    fn front_and_tail_have_a_class_each() {
        let empty = || Program {
            steps: Vec::new(),
            written: Vec::new(),
        };
        let both = || ByClass {
            narrow: empty(),
            wide: empty(),
        };
        let programs = Programs {
            front: both(),
            tail: both(),
        };
        let rows = RowCounts { all: 9, sampled: 8 };
        let [front, tail] = programs.of(rows);
        assert!(std::ptr::eq(front, &raw const programs.front.wide));
        assert!(std::ptr::eq(tail, &raw const programs.tail.narrow));
    }
}
