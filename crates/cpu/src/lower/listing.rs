//! The lowered program as text: what runs for a batch of some rows, on which kernel, over how many bytes of weights.

use carat_gguf::QuantType;
use carat_model::{
    backend::Batching,
    layout::Layout,
    plan::{Plan, Rows},
    weights::{Weight, Weights},
};

use super::{Fusion, Op, lower, program::VectorId};
use carat_cpu_kernels::{
    gemm::{
        choice::{WeightFormat, choose},
        row_class::{RowClass, RowClasses},
    },
    isa::Isa,
};

/// Rows of a batch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BatchRows {
    /// Tokens fed in.
    pub all: usize,
    /// Those of them that get logits.
    pub sampled: usize,
}

impl BatchRows {
    fn of(self, rows: Rows) -> usize {
        match rows {
            Rows::All => self.all,
            Rows::Sampled => self.sampled,
        }
    }
}

/// One operation of a lowered program.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ProgramOp {
    /// Label of the plan's step that it is, or of those that it covers: `L3.attn.q+k+v`.
    pub label: String,
    /// The kernels it calls, joined by `+`.
    pub kernel: String,
    pub rows: usize,
    /// Bytes of weights that it reads, at most.
    pub weight_bytes: u64,
}

/// The operations that run for a batch: those with rows. Looks at no weight's values; a product whose kernel depends on them
/// (F32 weights that may be BF16 values) names both, joined by `|`.
pub(crate) fn list(
    plan: &Plan,
    weights: &Weights,
    fusion: Fusion,
    isa: Isa,
    batch: BatchRows,
) -> Vec<ProgramOp> {
    let plan = &plan.with_products_gathered();
    let program = lower(plan, weights, Layout::shared(plan), fusion);
    let vector_bytes =
        |id: Option<VectorId>| id.map_or(0, |id| weights.matrix(program.vectors[id.0]).bytes());
    let listed = program.ops.iter().map(|lowered| {
        let rows = batch.of(lowered.op.rows());
        let class = RowClasses::new(isa, Batching::Fast).of(rows);
        let product = |weight: Weight, rows: usize| {
            let matrix = weights.matrix(weight);
            product_kernel((matrix.quant, matrix.columns), class, rows, isa)
        };
        let copy = match class {
            RowClass::Small => "quantize",
            RowClass::Large => "to_bf16",
        };
        let with_copy = |name: &str, quantized: Option<usize>| match quantized {
            Some(_) => format!("{name}+{copy}"),
            None => name.to_owned(),
        };
        let (kernel, bytes) = match &lowered.op {
            Op::Embed { table, .. } => {
                let bytes = rows * weights.matrix(*table).row_bytes();
                ("dequantize".to_owned(), bytes)
            }
            Op::Norm {
                weight, quantized, ..
            } => (with_copy("norm", *quantized), vector_bytes(*weight)),
            Op::Quantize { .. } => (copy.to_owned(), 0),
            Op::Linear { products, .. } => {
                let mut names: Vec<String> =
                    products.iter().map(|(w, _)| product(*w, rows)).collect();
                names.dedup();
                let bytes = products.iter().map(|(w, _)| weights.matrix(*w).bytes());
                (names.join("+"), bytes.sum())
            }
            Op::Rope { .. } => ("rotate".to_owned(), 0),
            Op::StoreKv { .. } => ("store_kv".to_owned(), 0),
            Op::Attend { .. } => ("attention".to_owned(), 0),
            Op::GeluMul { quantized, .. } => (with_copy("gelu_mul", *quantized), 0),
            Op::Add { .. } => ("add".to_owned(), 0),
            Op::Scale { .. } => ("scale".to_owned(), 0),
            Op::SelectSampled { .. } => ("select_sampled".to_owned(), 0),
            Op::Route {
                weight,
                expert_scale,
                ..
            } => {
                let bytes = weights.matrix(*weight).bytes() + vector_bytes(*expert_scale);
                (format!("{}+route", product(*weight, rows)), bytes)
            }
            Op::Experts { route, experts, .. } => {
                // As many experts as there are choices, if all are different.
                let most = rows * route.columns / 2;
                let all = [experts.gate, experts.up, experts.down];
                let bytes = all.map(|weight| {
                    let matrix = weights.matrix(weight);
                    matrix.bytes() / matrix.count * most.min(matrix.count)
                });
                // An expert may have one of the rows, or all.
                let (least, most) = (product(experts.gate, 1), product(experts.gate, rows));
                let products = if least == most {
                    least
                } else {
                    format!("{least}..{most}")
                };
                (format!("experts+{products}"), bytes.iter().sum())
            }
            Op::State { .. } => ("copy".to_owned(), 0),
            Op::ClusterLogits {
                weight,
                centroids,
                top,
                ..
            } => {
                let (head, near) = (weights.matrix(*weight), weights.matrix(*centroids));
                let tokens = rows * head.rows / near.rows * top;
                let bytes = near.bytes() + tokens.min(head.rows) * head.row_bytes();
                (format!("{}+gemv", product(*centroids, rows)), bytes)
            }
            Op::Softcap { .. } => ("softcap".to_owned(), 0),
        };
        ProgramOp {
            label: lowered.label(plan),
            kernel,
            rows,
            weight_bytes: bytes as u64,
        }
    });
    listed.filter(|op| op.rows > 0).collect()
}

/// The name of the kernel for rows that meet one matrix, without looking at its values.
fn product_kernel(
    (quant, columns): (QuantType, usize),
    class: RowClass,
    rows: usize,
    isa: Isa,
) -> String {
    let name = |is_exact_bf16: bool| {
        let format = WeightFormat {
            quant,
            is_exact_bf16,
            columns,
        };
        choose(format, class, rows, isa).name()
    };
    match quant {
        QuantType::F32 if name(true) != name(false) => format!("{}|{}", name(true), name(false)),
        _ => name(quant == QuantType::BF16).to_owned(),
    }
}

#[cfg(test)]
mod tests {
    use carat_model::{gemma4, plan::Step};
    use carat_testkit::tiny::{Tiny, Variant};

    use super::*;

    fn listed(variant: Variant, fusion: Fusion, isa: Isa, batch: BatchRows) -> Vec<ProgramOp> {
        let model = Tiny::new(variant, QuantType::Q4_0).model();
        list(&gemma4::plan(&model), &model.weights, fusion, isa, batch)
    }

    fn one_sampled(all: usize) -> BatchRows {
        BatchRows { all, sampled: 1 }
    }

    #[test]
    fn every_step_is_covered_once_with_and_without_fusion() {
        for variant in Variant::ALL {
            let model = Tiny::new(variant, QuantType::Q4_0).model();
            let plan = gemma4::plan(&model);
            for fusion in [Fusion::On, Fusion::Off] {
                let program = lower(&plan, &model.weights, Layout::shared(&plan), fusion);
                let steps = program.ops.iter().filter(|lowered| {
                    fusion == Fusion::On || !matches!(lowered.op, Op::Quantize { .. })
                });
                let mut covered: Vec<usize> = steps.flat_map(|op| op.steps.clone()).collect();
                covered.dedup();
                let all: Vec<usize> = (0..plan.steps.len()).collect();
                assert_eq!(covered, all, "{variant:?} {fusion:?}");
            }
        }
    }

    #[test]
    fn without_fusion_copies_and_products_stand_alone() {
        let kernels = |fusion| -> Vec<String> {
            let ops = listed(Variant::Dense12b, fusion, Isa::Scalar, one_sampled(4));
            ops.into_iter().map(|op| op.kernel).collect()
        };
        let (on, off) = (kernels(Fusion::On), kernels(Fusion::Off));
        assert!(on.iter().any(|kernel| kernel == "norm+quantize"));
        assert!(off.iter().all(|kernel| !kernel.contains('+')), "{off:?}");
        assert!(off.iter().any(|kernel| kernel == "quantize"));
        assert!(off.len() > on.len());
    }

    #[test]
    fn rows_and_instructions_decide_the_kernel() {
        for (isa, rows, name) in [
            (Isa::Scalar, 1, "gemv_transposed"),
            (Isa::Scalar, 8, "gemv_transposed"),
            (Isa::Avx2, 40, "packed_int8"),
            (Isa::Amx, 32, "amx_int8"),
            (Isa::Amx, 33, "amx_bf16"),
        ] {
            let ops = listed(Variant::Dense12b, Fusion::On, isa, one_sampled(rows));
            let named = ops.iter().find(|op| op.kernel == name);
            assert_eq!(
                named.map(|op| op.rows),
                Some(rows),
                "{isa:?} {rows}: {ops:?}"
            );
        }
    }

    #[test]
    fn an_expert_may_have_one_row_or_all() {
        for (isa, rows, name) in [
            (Isa::Scalar, 1, "experts+gemv_transposed"),
            (Isa::Scalar, 9, "experts+gemv_transposed..packed_int8"),
            (Isa::Amx, 33, "experts+amx_bf16"),
        ] {
            let ops = listed(Variant::Moe26b, Fusion::On, isa, one_sampled(rows));
            assert!(ops.iter().any(|op| op.kernel == name), "{name}: {ops:?}");
        }
    }

    #[test]
    fn a_batch_that_samples_nothing_runs_no_operation_on_sampled_rows() {
        let count = |sampled| {
            let batch = BatchRows { all: 4, sampled };
            listed(Variant::E2b, Fusion::On, Isa::Scalar, batch).len()
        };
        assert!(count(0) < count(1));
    }

    #[test]
    fn weight_bytes_of_one_row_are_those_of_the_plans_matrices() {
        let model = Tiny::new(Variant::Dense12b, QuantType::Q4_0).model();
        let plan = gemma4::plan(&model);
        let ops = list(
            &plan,
            &model.weights,
            Fusion::Off,
            Isa::Scalar,
            one_sampled(1),
        );
        let linear = plan.steps.iter().filter_map(|labelled| {
            let Step::Linear { w, .. } = labelled.step else {
                return None;
            };
            Some(model.weights.matrix(w).bytes() as u64)
        });
        let expected: u64 = linear.sum();
        let products = ops.iter().filter(|op| op.kernel == "gemv_transposed");
        assert_eq!(products.map(|op| op.weight_bytes).sum::<u64>(), expected);
    }
}
