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
pub(crate) struct Operand {
    pub(crate) buffer: usize,
    pub(crate) columns: usize,
    pub(crate) rows: Rows,
}

/// Activations as a product reads them.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum ProductInput {
    F32(Operand),
    /// Into [`Program::quantized`].
    Quantized(usize),
}

#[derive(Debug)]
pub(crate) enum Op {
    Embed {
        table: Weight,
        scale: f32,
        out: Operand,
    },
    Norm {
        x: Operand,
        weight: Option<Vec<f32>>,
        group: usize,
        eps: f32,
        out: Operand,
        quantized: Option<usize>,
    },
    /// Makes the quantized copy of a value, where the value's own operation does not.
    Quantize {
        x: Operand,
        quantized: usize,
    },
    /// Products of one value with some matrices, each into a value of its own.
    Linear {
        x: ProductInput,
        products: Vec<(Weight, Operand)>,
    },
    Rope {
        x: Operand,
        rope: RopeId,
        out: Operand,
    },
    StoreKv {
        k: Operand,
        v: Operand,
        slot: KvSlot,
    },
    Attend {
        q: Operand,
        slot: KvSlot,
        out: Operand,
    },
    GeluMul {
        gate: Operand,
        up: Operand,
        up_column: usize,
        out: Operand,
        quantized: Option<usize>,
    },
    Add {
        a: Operand,
        b: Operand,
        out: Operand,
    },
    Scale {
        x: Operand,
        by: f32,
        out: Operand,
    },
    SelectSampled {
        x: Operand,
        out: Operand,
    },
    Route {
        x: ProductInput,
        weight: Weight,
        expert_scale: Option<Vec<f32>>,
        out: Operand,
    },
    Experts {
        x: ProductInput,
        route: Operand,
        experts: ExpertWeights,
        out: Operand,
    },
    Softcap {
        x: Operand,
        cap: f32,
        out: Operand,
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
            | Op::SelectSampled { out, .. }
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
pub(crate) struct QuantizedShape {
    pub(crate) rows: Rows,
    pub(crate) columns: usize,
}

pub(crate) struct Program {
    pub(crate) ops: Vec<Op>,
    pub(crate) quantized: Vec<QuantizedShape>,
    pub(crate) layout: Layout,
    pub(crate) logits: Operand,
    /// The pairs of rows and experts that the widest expert step makes of a row, if there is one.
    pub(crate) experts: Option<(ExpertWeights, usize)>,
}

/// Lowers a plan. With [`Layout::separate`] every value can be looked at afterwards.
#[expect(clippy::too_many_lines, reason = "one arm per kind of step")]
pub(crate) fn lower(plan: &Plan, weights: &Weights, layout: Layout) -> Program {
    let operand = |value: Value| Operand {
        buffer: layout.buffer(value),
        columns: plan.columns(value),
        rows: plan.rows(value),
    };
    let mut quantized = QuantizedCopies::new(plan, weights);
    let mut ops = Vec::new();
    let mut experts = None;
    for (i, labelled) in plan.steps.iter().enumerate() {
        let input = |quantized: &QuantizedCopies, x: Value, weight: Weight| {
            if weights.matrix(weight).quant.is_float() {
                ProductInput::F32(operand(x))
            } else {
                ProductInput::Quantized(quantized.of(x))
            }
        };
        ops.push(match labelled.step {
            Step::Embed { table, scale, out } => Op::Embed {
                table,
                scale,
                out: operand(out),
            },
            Step::Norm {
                x,
                weight,
                group,
                eps,
                out,
            } => Op::Norm {
                x: operand(x),
                weight: weight.map(|w| weights.vector(w)),
                group,
                eps,
                out: operand(out),
                quantized: None,
            },
            Step::Linear { x, w, out } => Op::Linear {
                x: input(&quantized, x, w),
                products: vec![(w, operand(out))],
            },
            Step::Rope { x, rope, out } => Op::Rope {
                x: operand(x),
                rope,
                out: operand(out),
            },
            Step::StoreKv { k, v, slot } => Op::StoreKv {
                k: operand(k),
                v: operand(v),
                slot,
            },
            Step::Attend { q, slot, out } => Op::Attend {
                q: operand(q),
                slot,
                out: operand(out),
            },
            Step::GeluMul {
                gate,
                up,
                up_column,
                out,
            } => Op::GeluMul {
                gate: operand(gate),
                up: operand(up),
                up_column,
                out: operand(out),
                quantized: None,
            },
            Step::Add { a, b, out } => Op::Add {
                a: operand(a),
                b: operand(b),
                out: operand(out),
            },
            Step::Scale { x, by, out } => Op::Scale {
                x: operand(x),
                by,
                out: operand(out),
            },
            Step::Narrow { x, out } => Op::SelectSampled {
                x: operand(x),
                out: operand(out),
            },
            Step::Route {
                x,
                w,
                expert_scale,
                out,
                ..
            } => Op::Route {
                x: input(&quantized, x, w),
                weight: w,
                expert_scale: expert_scale.map(|w| weights.vector(w)),
                out: operand(out),
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
                    x: input(&quantized, x, gate),
                    route: operand(route),
                    experts: all,
                    out: operand(out),
                }
            }
            Step::Softcap { x, cap, out } => Op::Softcap {
                x: operand(x),
                cap,
                out: operand(out),
            },
        });
        if let Some(out) = labelled.step.out()
            && let Some(quantized) = quantized.begin(out, plan)
        {
            ops.push(Op::Quantize {
                x: operand(out),
                quantized,
            });
        }
        quantized.end(i);
    }
    Program {
        ops: coalesce(ops),
        quantized: quantized.shapes,
        logits: operand(plan.logits),
        experts,
        layout,
    }
}

/// Makes one operation of what goes better together. Products that follow each other and read the same: queries, keys and
/// values; gate and up. The buffer of none of them may be that of what the others read, because all of it is read until the
/// last one. And what is computed row by row with its quantized copy.
fn coalesce(ops: Vec<Op>) -> Vec<Op> {
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
                Some(Op::Norm { out, quantized, .. } | Op::GeluMul { out, quantized, .. }),
                Op::Quantize { x, quantized: into },
            ) if *out == x => *quantized = Some(into),
            (_, op) => all.push(op),
        }
    }
    all
}

/// Hands out buffers of quantized activations, and takes them back after their last reader.
struct QuantizedCopies {
    shapes: Vec<QuantizedShape>,
    free: Vec<usize>,
    /// The last step that reads a value's quantized copy.
    last_reader: Vec<Option<usize>>,
    /// Values with a quantized copy now, and its buffer.
    live: Vec<(Value, usize)>,
}

impl QuantizedCopies {
    fn new(plan: &Plan, weights: &Weights) -> QuantizedCopies {
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
        QuantizedCopies {
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
        let shape = QuantizedShape {
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
