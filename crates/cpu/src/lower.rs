//! From a plan to a list of operations over buffers: everything that can be decided before a batch comes.
//!
//! Values become buffers (shared where lifetimes allow), weights of norms become slices of f32, and a value that
//! quantized weights read gets one quantized copy, made right after the value itself and shared by all those readers.

use carat_model::{
    layout::Layout,
    plan::{KvSlot, Plan, RopeId, Rows, Step, Value},
    weights::{Weight, Weights},
};

use crate::{kernel::gemm::activations::GROUP, op::experts::ExpertWeights};

/// A value in its buffer.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Place {
    pub(crate) buffer: usize,
    pub(crate) columns: usize,
    pub(crate) rows: Rows,
}

/// Activations as a product reads them.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum Source {
    Floats(Place),
    /// Into [`Program::codes`].
    Codes(usize),
}

#[derive(Debug)]
pub(crate) enum Op {
    Embed {
        table: Weight,
        scale: f32,
        out: Place,
    },
    Norm {
        x: Place,
        weight: Option<Vec<f32>>,
        group: usize,
        eps: f32,
        out: Place,
        codes: Option<usize>,
    },
    /// Makes the quantized copy of a value, where the value's own operation does not.
    Quantize {
        x: Place,
        codes: usize,
    },
    /// Products of one value with some matrices, each into a value of its own.
    Linear {
        x: Source,
        products: Vec<(Weight, Place)>,
    },
    Rope {
        x: Place,
        rope: RopeId,
        out: Place,
    },
    StoreKv {
        k: Place,
        v: Place,
        slot: KvSlot,
    },
    Attend {
        q: Place,
        slot: KvSlot,
        out: Place,
    },
    GeluMul {
        gate: Place,
        up: Place,
        up_column: usize,
        out: Place,
        codes: Option<usize>,
    },
    Add {
        a: Place,
        b: Place,
        out: Place,
    },
    Scale {
        x: Place,
        by: f32,
        out: Place,
    },
    Narrow {
        x: Place,
        out: Place,
    },
    Route {
        x: Source,
        weight: Weight,
        expert_scale: Option<Vec<f32>>,
        out: Place,
    },
    Experts {
        x: Source,
        route: Place,
        experts: ExpertWeights,
        out: Place,
    },
    Softcap {
        x: Place,
        cap: f32,
        out: Place,
    },
}

impl Op {
    /// The rows this operation works on.
    pub(crate) fn rows(&self) -> Rows {
        match self {
            Op::Embed { out, .. }
            | Op::Norm { out, .. }
            | Op::Rope { out, .. }
            | Op::Attend { out, .. }
            | Op::GeluMul { out, .. }
            | Op::Add { out, .. }
            | Op::Scale { out, .. }
            | Op::Narrow { out, .. }
            | Op::Route { out, .. }
            | Op::Experts { out, .. }
            | Op::Softcap { out, .. } => out.rows,
            Op::Linear { products, .. } => products[0].1.rows,
            Op::Quantize { x, .. } | Op::StoreKv { k: x, .. } => x.rows,
        }
    }
}

/// A buffer of quantized activations.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct CodesShape {
    pub(crate) rows: Rows,
    pub(crate) columns: usize,
}

pub(crate) struct Program {
    pub(crate) ops: Vec<Op>,
    pub(crate) codes: Vec<CodesShape>,
    pub(crate) layout: Layout,
    pub(crate) logits: Place,
    /// The pairs of rows and experts that the widest expert step makes of a row, if there is one.
    pub(crate) experts: Option<(ExpertWeights, usize)>,
}

/// Lowers a plan. With [`Layout::separate`] every value can be looked at afterwards.
#[expect(clippy::too_many_lines, reason = "one arm a kind of step")]
pub(crate) fn lower(plan: &Plan, weights: &Weights, layout: Layout) -> Program {
    let place = |value: Value| Place {
        buffer: layout.buffer(value),
        columns: plan.columns(value),
        rows: plan.rows(value),
    };
    let mut codes = Codes::new(plan, weights);
    let mut ops = Vec::new();
    let mut experts = None;
    for (i, labelled) in plan.steps.iter().enumerate() {
        let source = |codes: &Codes, x: Value, weight: Weight| {
            if weights.matrix(weight).quant.is_float() {
                Source::Floats(place(x))
            } else {
                Source::Codes(codes.of(x))
            }
        };
        ops.push(match labelled.step {
            Step::Embed { table, scale, out } => Op::Embed {
                table,
                scale,
                out: place(out),
            },
            Step::Norm {
                x,
                weight,
                group,
                eps,
                out,
            } => Op::Norm {
                x: place(x),
                weight: weight.map(|w| weights.vector(w)),
                group,
                eps,
                out: place(out),
                codes: None,
            },
            Step::Linear { x, w, out } => Op::Linear {
                x: source(&codes, x, w),
                products: vec![(w, place(out))],
            },
            Step::Rope { x, rope, out } => Op::Rope {
                x: place(x),
                rope,
                out: place(out),
            },
            Step::StoreKv { k, v, slot } => Op::StoreKv {
                k: place(k),
                v: place(v),
                slot,
            },
            Step::Attend { q, slot, out } => Op::Attend {
                q: place(q),
                slot,
                out: place(out),
            },
            Step::GeluMul {
                gate,
                up,
                up_column,
                out,
            } => Op::GeluMul {
                gate: place(gate),
                up: place(up),
                up_column,
                out: place(out),
                codes: None,
            },
            Step::Add { a, b, out } => Op::Add {
                a: place(a),
                b: place(b),
                out: place(out),
            },
            Step::Scale { x, by, out } => Op::Scale {
                x: place(x),
                by,
                out: place(out),
            },
            Step::Narrow { x, out } => Op::Narrow {
                x: place(x),
                out: place(out),
            },
            Step::Route {
                x,
                w,
                expert_scale,
                out,
                ..
            } => Op::Route {
                x: source(&codes, x, w),
                weight: w,
                expert_scale: expert_scale.map(|w| weights.vector(w)),
                out: place(out),
            },
            Step::Experts {
                x,
                route,
                gate,
                up,
                down,
                out,
            } => {
                let all = ExpertWeights { gate, up, down };
                experts.get_or_insert((all, plan.columns(route) / 2));
                Op::Experts {
                    x: source(&codes, x, gate),
                    route: place(route),
                    experts: all,
                    out: place(out),
                }
            }
            Step::Softcap { x, cap, out } => Op::Softcap {
                x: place(x),
                cap,
                out: place(out),
            },
        });
        if let Some(out) = labelled.step.out()
            && let Some(codes) = codes.begin(out, plan)
        {
            ops.push(Op::Quantize {
                x: place(out),
                codes,
            });
        }
        codes.end(i);
    }
    Program {
        ops: merged(ops),
        codes: codes.shapes,
        logits: place(plan.logits),
        experts,
        layout,
    }
}

/// Makes one operation of what goes better together. Products that follow each other and read the same: queries, keys and
/// values; gate and up. The buffer of none of them may be that of what the others read, because all of it is read until the
/// last one. And what is computed row by row with its quantized copy.
fn merged(ops: Vec<Op>) -> Vec<Op> {
    let mut all: Vec<Op> = Vec::with_capacity(ops.len());
    for op in ops {
        match (all.last_mut(), op) {
            (
                Some(Op::Linear { x, products }),
                Op::Linear {
                    x: same,
                    products: more,
                },
            ) if *x == same && products[0].1.rows == more[0].1.rows => products.extend(more),
            (
                Some(Op::Norm { out, codes, .. } | Op::GeluMul { out, codes, .. }),
                Op::Quantize { x, codes: into },
            ) if *out == x => *codes = Some(into),
            (_, op) => all.push(op),
        }
    }
    all
}

/// Hands out buffers of quantized activations, and takes them back after their last reader.
struct Codes {
    shapes: Vec<CodesShape>,
    free: Vec<usize>,
    /// The last step that reads a value's quantized copy.
    last_reader: Vec<Option<usize>>,
    /// Values with a quantized copy now, and its buffer.
    live: Vec<(Value, usize)>,
}

impl Codes {
    fn new(plan: &Plan, weights: &Weights) -> Codes {
        let mut last_reader = vec![None; plan.value_count()];
        for (i, labelled) in plan.steps.iter().enumerate() {
            let (Step::Linear { x, w, .. }
            | Step::Route { x, w, .. }
            | Step::Experts { x, gate: w, .. }) = labelled.step
            else {
                continue;
            };
            if !weights.matrix(w).quant.is_float() {
                debug_assert!(
                    plan.columns(x).is_multiple_of(GROUP),
                    "blocks are 32 or more"
                );
                last_reader[x.index()] = Some(i);
            }
        }
        Codes {
            shapes: Vec::new(),
            free: Vec::new(),
            last_reader,
            live: Vec::new(),
        }
    }

    fn of(&self, value: Value) -> usize {
        let found = self.live.iter().find(|(live, _)| *live == value);
        found.expect("quantized when it was written").1
    }

    /// A buffer for the copy of `value`, if anything will read one.
    fn begin(&mut self, value: Value, plan: &Plan) -> Option<usize> {
        self.last_reader[value.index()]?;
        let shape = CodesShape {
            rows: plan.rows(value),
            columns: plan.columns(value),
        };
        // Of the same width only: the zeros that fill a row's last chunk must stay where they are.
        let same = self.free.iter().position(|&b| self.shapes[b] == shape);
        let buffer = same.map_or_else(
            || {
                self.shapes.push(shape);
                self.shapes.len() - 1
            },
            |i| self.free.swap_remove(i),
        );
        self.live.push((value, buffer));
        Some(buffer)
    }

    fn end(&mut self, step: usize) {
        let (last_reader, free) = (&self.last_reader, &mut self.free);
        self.live.retain(|(value, buffer)| {
            let ended = last_reader[value.index()] == Some(step);
            if ended {
                free.push(*buffer);
            }
            !ended
        });
    }
}
