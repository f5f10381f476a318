//! Twin of `kernels/norm/fused_norm.cu`: norms of large batches, with residual add, into the format that the next product reads.

use carat_model::weights::Weight;

use crate::kernel::{
    Addresses, Kernel, Operand, RowsAt, Specialization,
    activation::{Activation, ActivationAt},
    grid::norm_threads,
};
use crate::{
    device::{Address, Grid},
    kernel::params::{Params, params},
    kernel::weights::WeightOperand,
};

/// Fours of columns that a thread holds, for rows of up to 512 times as many columns.
pub(crate) const HOLDS: [usize; 12] = [1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12];

/// The widest rows that a block's threads hold.
pub(crate) const MAX_COLUMNS: usize = 512 * HOLDS.len();

params! {
    struct FusedNormParams {
        rows: RowsAt,
        x: Address,
        factor: Address,
        weight: Address,
        branch: Address,
        route: Address,
        x_weight: Address,
        branch_weight: Address,
        residual: Address,
        sum: Address,
        sum_activation: ActivationAt,
        following_weight: Address,
        following: Address,
        following_activation: ActivationAt,
        columns: u32,
        eps: f32,
        scale: f32,
        following_eps: f32,
        x_eps: f32,
        branch_eps: f32,
        top_k: u32,
        each_factor: f32,
    }
}

/// Output of a norm: f32, a product's activation, or both.
#[derive(Clone, Copy, Debug)]
pub(crate) struct NormOut {
    pub(crate) weight: Option<Weight>,
    pub(crate) eps: f32,
    pub(crate) values: Option<Operand>,
    pub(crate) activation: Option<Activation>,
}

impl NormOut {
    fn operands(&self) -> impl Iterator<Item = Operand> + use<> {
        let activation = self.activation.iter().flat_map(Activation::operands);
        self.values
            .into_iter()
            .chain(activation.collect::<Vec<_>>())
    }
}

/// `out = norm(x * factor)` over whole rows of at most [`MAX_COLUMNS`].
#[derive(Debug)]
pub(crate) struct FusedNorm {
    pub(crate) x: Operand,
    /// A power of two for each row.
    pub(crate) factor: Option<Operand>,
    pub(crate) columns: usize,
    pub(crate) out: NormOut,
    /// Launched with PDL.
    pub(crate) pdl: bool,
}

/// `sum = (residual + norm(x * factor)) * scale`, and the norm of that for whoever comes next; rows of at most [`MAX_COLUMNS`].
#[derive(Debug)]
pub(crate) struct FusedResidualNorm {
    pub(crate) x: Operand,
    /// A power of two for each row.
    pub(crate) factor: Option<Operand>,
    pub(crate) weight: Option<Weight>,
    pub(crate) eps: f32,
    pub(crate) residual: Operand,
    pub(crate) scale: f32,
    pub(crate) sum: Operand,
    pub(crate) sum_activation: Option<Activation>,
    pub(crate) following: Option<NormOut>,
    /// A second branch: what is normed is then `norm(x * factor) + norm(branch)`.
    pub(crate) branch: Option<BranchNorms>,
    pub(crate) columns: usize,
    /// Launched with PDL.
    pub(crate) pdl: bool,
}

/// Rows of branches that find room at once, with all the registers they like.
const FEW_ROWS: usize = 256;

/// A second branch, and the norms of both.
#[derive(Clone, Copy, Debug)]
pub(crate) struct BranchNorms {
    pub(crate) x_weight: Option<Weight>,
    pub(crate) x_eps: f32,
    pub(crate) branch: Operand,
    /// Routed experts whose outputs the branch is, not yet summed.
    pub(crate) experts: Option<BranchExperts>,
    pub(crate) branch_weight: Option<Weight>,
    pub(crate) branch_eps: f32,
}

/// Outputs of routed experts, `[rows, top_k, columns]`.
#[derive(Clone, Copy, Debug)]
pub(crate) struct BranchExperts {
    pub(crate) route: Operand,
    pub(crate) top_k: usize,
    /// They are f16, and times this what they should be; else f32.
    pub(crate) f16_factor: Option<f32>,
}

pub(crate) fn specialization(hold: usize) -> Specialization {
    Specialization {
        kernel: "fused_norm",
        entries: &[
            "fused_norm",
            "fused_residual_norm",
            "fused_branches_norm",
            "fused_branches_norm_many",
            "fused_branches_norm_f16",
        ],
        constants: vec![("HOLD", hold.to_string())],
        params_bytes: FusedNormParams::BYTES,
    }
}

fn specialization_for(columns: usize) -> Specialization {
    let hold = columns.div_ceil(512);
    assert!(
        columns.is_multiple_of(4) && HOLDS.contains(&hold),
        "{columns} columns"
    );
    specialization(hold)
}

/// A thread for four of the plain norm's, in whole warps.
fn grid(entry: usize, rows: usize, columns: usize, pdl: bool) -> Grid {
    let threads = norm_threads(columns) / 4;
    Grid {
        entry,
        pdl,
        ..Grid::new((rows, 1), threads.next_multiple_of(32))
    }
}

impl Kernel for FusedNorm {
    fn specialization(&self) -> Specialization {
        specialization_for(self.columns)
    }

    fn grid(&self, rows: usize) -> Grid {
        grid(0, rows, self.columns, self.pdl)
    }

    fn params(&self, at: &Addresses, rows: RowsAt) -> Vec<u8> {
        FusedNormParams {
            rows,
            x: at.operand(self.x),
            factor: self.factor.map_or(Address::NULL, |p| at.operand(p)),
            weight: at.vector(self.out.weight),
            branch: Address::NULL,
            route: Address::NULL,
            x_weight: Address::NULL,
            branch_weight: Address::NULL,
            residual: Address::NULL,
            sum: Address::NULL,
            sum_activation: Activation::at(None, at),
            following_weight: Address::NULL,
            following: self.out.values.map_or(Address::NULL, |p| at.operand(p)),
            following_activation: Activation::at(self.out.activation, at),
            columns: self.columns as u32,
            eps: self.out.eps,
            scale: 1.0,
            following_eps: 0.0,
            x_eps: 0.0,
            branch_eps: 0.0,
            top_k: 0,
            each_factor: 1.0,
        }
        .bytes()
    }

    fn weights(&self) -> Vec<WeightOperand> {
        WeightOperand::vectors([self.out.weight])
    }

    fn reads(&self) -> Vec<Operand> {
        [self.x].into_iter().chain(self.factor).collect()
    }

    fn writes(&self) -> Vec<Operand> {
        self.out.operands().collect()
    }
}

impl Kernel for FusedResidualNorm {
    fn specialization(&self) -> Specialization {
        specialization_for(self.columns)
    }

    fn grid(&self, rows: usize) -> Grid {
        let entry = match self.branch {
            None => 1,
            Some(b) if b.experts.is_some_and(|e| e.f16_factor.is_some()) => 4,
            Some(_) if rows <= FEW_ROWS => 2,
            Some(_) => 3,
        };
        grid(entry, rows, self.columns, self.pdl)
    }

    fn params(&self, at: &Addresses, rows: RowsAt) -> Vec<u8> {
        let operand = |p: Option<Operand>| p.map_or(Address::NULL, |p| at.operand(p));
        let experts = self.branch.and_then(|b| b.experts);
        FusedNormParams {
            rows,
            x: at.operand(self.x),
            factor: operand(self.factor),
            weight: at.vector(self.weight),
            branch: operand(self.branch.map(|b| b.branch)),
            route: operand(experts.map(|e| e.route)),
            x_weight: at.vector(self.branch.and_then(|b| b.x_weight)),
            branch_weight: at.vector(self.branch.and_then(|b| b.branch_weight)),
            residual: at.operand(self.residual),
            sum: at.operand(self.sum),
            sum_activation: Activation::at(self.sum_activation, at),
            following_weight: at.vector(self.following.and_then(|n| n.weight)),
            following: operand(self.following.and_then(|n| n.values)),
            following_activation: Activation::at(self.following.and_then(|n| n.activation), at),
            columns: self.columns as u32,
            eps: self.eps,
            scale: self.scale,
            following_eps: self.following.map_or(0.0, |n| n.eps),
            x_eps: self.branch.map_or(0.0, |b| b.x_eps),
            branch_eps: self.branch.map_or(0.0, |b| b.branch_eps),
            top_k: experts.map_or(0, |e| e.top_k as u32),
            each_factor: experts.and_then(|e| e.f16_factor).unwrap_or(1.0),
        }
        .bytes()
    }

    fn weights(&self) -> Vec<WeightOperand> {
        WeightOperand::vectors([
            self.weight,
            self.following.and_then(|n| n.weight),
            self.branch.and_then(|b| b.x_weight),
            self.branch.and_then(|b| b.branch_weight),
        ])
    }

    fn reads(&self) -> Vec<Operand> {
        [self.x, self.residual]
            .into_iter()
            .chain(self.factor)
            .chain(self.branch.map(|b| b.branch))
            .chain(self.branch.and_then(|b| b.experts).map(|e| e.route))
            .collect()
    }

    fn writes(&self) -> Vec<Operand> {
        let activation = self.sum_activation.iter().flat_map(Activation::operands);
        let following = self.following.iter().flat_map(NormOut::operands);
        [self.sum]
            .into_iter()
            .chain(activation)
            .chain(following)
            .collect()
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;
    use crate::{
        kernel::{
            ColumnSlice, ExpertsSum, Function, Pointwise, RmsNorm,
            testing::{ActivationBuffers, Kind, Table},
        },
        testing::{f16_bits, f16_value, normals, relative_error},
    };

    pub(crate) const EPS: f32 = 1e-6;
    const SIZES: [usize; 7] = [32, 96, 512, 544, 1536, 2560, 5376];

    fn reference(x: &[f32], weight: &[f32], eps: f32) -> Vec<f64> {
        let square = |v: &f32| f64::from(*v).powi(2);
        let mean = x.iter().map(square).sum::<f64>() / x.len() as f64;
        let scale = 1.0 / (mean + f64::from(eps)).sqrt();
        let pairs = x.iter().zip(weight);
        pairs
            .map(|(v, w)| f64::from(*v) * scale * f64::from(*w))
            .collect()
    }

    /// A norm, a sum and a scale, one kernel each.
    struct SingleSteps {
        x: Operand,
        a: Operand,
        weight: Option<Weight>,
        by: f32,
        columns: usize,
    }

    impl SingleSteps {
        fn norm(&self, x: Operand, weight: Option<Weight>, out: Operand) -> RmsNorm {
            RmsNorm {
                x,
                weight,
                columns: self.columns,
                group: self.columns,
                eps: EPS,
                out,
            }
        }

        fn run(&self, table: &mut Table, (rows, padded_rows): (usize, usize), sum: Operand) {
            let columns = self.columns;
            let [normed, added] = [(); 2].map(|()| table.poison(padded_rows * columns));
            let second = ColumnSlice {
                operand: normed,
                columns,
                column: 0,
            };
            let add = Pointwise {
                function: Function::Add(second),
                a: self.a,
                columns,
                out: added,
            };
            let scale = Pointwise {
                function: Function::Scale { by: self.by },
                a: added,
                columns,
                out: sum,
            };
            table.run(rows, padded_rows, &self.norm(self.x, self.weight, normed));
            table.run(rows, padded_rows, &add);
            table.run(rows, padded_rows, &scale);
        }
    }

    #[test]
    #[ignore = "needs a card"]
    fn fused_norm_has_the_bits_of_rms_norm_in_every_format() {
        let mut table = Table::new();
        for columns in SIZES {
            let kinds = [
                Kind::F16,
                Kind::F16Tiles,
                Kind::F16Permuted,
                Kind::Q8,
                Kind::Int8HiLo,
            ];
            let kinds = kinds.map(Some);
            for kind in kinds.into_iter().chain([None]) {
                let (rows, padded_rows) = (3, 5);
                let x = normals(1, padded_rows * columns);
                let weight = normals(2, columns);
                let x_at = table.put(&x);
                let w = table.weight(&weight);
                let (plain, values) = (
                    table.poison(padded_rows * columns),
                    table.poison(padded_rows * columns),
                );
                let activation =
                    kind.map(|kind| ActivationBuffers::new(&mut table, kind, padded_rows, columns));
                table.run(
                    rows,
                    padded_rows,
                    &RmsNorm {
                        x: x_at,
                        weight: Some(w),
                        columns,
                        group: columns,
                        eps: EPS,
                        out: plain,
                    },
                );
                table.run(
                    rows,
                    padded_rows,
                    &FusedNorm {
                        x: x_at,
                        factor: None,
                        columns,
                        out: NormOut {
                            weight: Some(w),
                            eps: EPS,
                            values: Some(values),
                            activation: activation.as_ref().map(|f| f.activation),
                        },
                        pdl: false,
                    },
                );
                let plain = table.get::<f32>(plain, padded_rows * columns);
                let values = table.get::<f32>(values, padded_rows * columns);
                assert!(values[rows * columns..].iter().all(|v| v.is_nan()));
                let expected = &plain[..rows * columns];
                assert_eq!(&values[..rows * columns], expected, "{columns} columns");
                let exact: Vec<f32> = x[..rows * columns]
                    .chunks_exact(columns)
                    .flat_map(|row| reference(row, &weight, EPS))
                    .map(|v| v as f32)
                    .collect();
                assert!(relative_error(expected, &exact) < 1e-6);
                if let Some(activation) = activation {
                    activation.check(&table, expected, rows);
                }
                table.clear();
            }
        }
    }

    #[test]
    #[ignore = "needs a card"]
    fn fused_residual_norm_has_the_bits_of_single_steps_in_every_format() {
        let mut table = Table::new();
        for (n, columns) in SIZES.into_iter().enumerate() {
            let (rows, padded_rows) = (3, 4);
            let all = padded_rows * columns;
            let factors = [0.25f32, 1.0, 8.0, 2.0];
            let (x, a) = (normals(1, all), normals(2, all));
            let scaled: Vec<f32> = (0..all).map(|i| x[i] * factors[i / columns]).collect();
            let (w, next_w) = (normals(3, columns), normals(4, columns));
            let (x_at, scaled, a) = (table.put(&x), table.put(&scaled), table.put(&a));
            let factor = table.put(&factors);
            let (w, next_w) = (table.weight(&w), table.weight(&next_w));
            let [plain_sum, plain_next, sum, next] = [(); 4].map(|()| table.poison(all));
            let steps = SingleSteps {
                x: scaled,
                a,
                weight: Some(w),
                by: 0.7,
                columns,
            };
            steps.run(&mut table, (rows, padded_rows), plain_sum);
            let norm = steps.norm(plain_sum, Some(next_w), plain_next);
            table.run(rows, padded_rows, &norm);
            let (sum_kind, next_kind) = match n % 4 {
                0 => (Kind::Q8, Kind::F16),
                3 => (Kind::F16Tiles, Kind::F16Tiles),
                1 => (Kind::F16, Kind::Q8),
                _ => (Kind::Q8, Kind::Int8HiLo),
            };
            let sum_activation = ActivationBuffers::new(&mut table, sum_kind, padded_rows, columns);
            let following_activation =
                ActivationBuffers::new(&mut table, next_kind, padded_rows, columns);
            table.run(
                rows,
                padded_rows,
                &FusedResidualNorm {
                    x: x_at,
                    factor: Some(factor),
                    weight: Some(w),
                    eps: EPS,
                    residual: a,
                    scale: 0.7,
                    sum,
                    sum_activation: Some(sum_activation.activation),
                    following: Some(NormOut {
                        weight: Some(next_w),
                        eps: EPS,
                        values: Some(next),
                        activation: Some(following_activation.activation),
                    }),
                    branch: None,
                    columns,
                    pdl: false,
                },
            );
            for (plain, fused, activation) in [
                (plain_sum, sum, sum_activation),
                (plain_next, next, following_activation),
            ] {
                let expected = table.get::<f32>(plain, all);
                let found = table.get::<f32>(fused, all);
                assert!(found[rows * columns..].iter().all(|v| v.is_nan()));
                assert_eq!(
                    found[..rows * columns],
                    expected[..rows * columns],
                    "{columns}"
                );
                activation.check(&table, &expected[..rows * columns], rows);
            }
            table.clear();
        }
    }

    #[test]
    #[ignore = "needs a card"]
    fn fused_residual_norm_alone_writes_the_sum_alone() {
        let mut table = Table::new();
        let (rows, columns) = (2, 64);
        let (x, a) = (table.put(&normals(1, 128)), table.put(&normals(2, 128)));
        let (plain, sum) = (table.poison(128), table.poison(128));
        let (weight, eps, by) = (None, EPS, 1.0);
        let steps = SingleSteps {
            x,
            a,
            weight,
            by,
            columns,
        };
        steps.run(&mut table, (rows, rows), plain);
        table.run(
            rows,
            rows,
            &FusedResidualNorm {
                x,
                factor: None,
                weight,
                eps,
                residual: a,
                scale: by,
                sum,
                sum_activation: None,
                following: None,
                branch: None,
                columns,
                pdl: false,
            },
        );
        assert_eq!(table.get::<f32>(sum, 128), table.get::<f32>(plain, 128));
    }

    #[test]
    #[ignore = "needs a card"]
    fn branches_are_normed_and_summed_before() {
        let buckets = [3, FEW_ROWS + 1];
        let cases = SIZES
            .into_iter()
            .flat_map(|columns| buckets.map(|bucket| (columns, bucket)));
        for (n, (columns, bucket)) in cases.enumerate() {
            let mut table = Table::new();
            let (rows, all) = (3, bucket * columns);
            let seed = 10 * n as u64;
            let mut put = |i| table.put(&normals(seed + i, all));
            let (x, branch, residual) = (put(1), put(2), put(3));
            let mut weight = |i| table.weight(&normals(seed + i, columns));
            let (x_weight, branch_weight, weight) = (weight(4), weight(5), weight(6));
            let mut poison = || table.poison(all);
            let (a, b, both, expected, found) = (poison(), poison(), poison(), poison(), poison());
            for (x, weight, out) in [(x, x_weight, a), (branch, branch_weight, b)] {
                let norm = RmsNorm {
                    x,
                    weight: Some(weight),
                    columns,
                    group: columns,
                    eps: EPS,
                    out,
                };
                table.run(rows, bucket, &norm);
            }
            let b = ColumnSlice {
                operand: b,
                columns,
                column: 0,
            };
            let sum = Pointwise {
                function: Function::Add(b),
                a,
                columns,
                out: both,
            };
            table.run(rows, bucket, &sum);
            let joined = |x, sum, branch| FusedResidualNorm {
                x,
                factor: None,
                weight: Some(weight),
                eps: EPS,
                residual,
                scale: 0.7,
                sum,
                sum_activation: None,
                following: None,
                branch,
                columns,
                pdl: false,
            };
            table.run(rows, bucket, &joined(both, expected, None));
            let norms = BranchNorms {
                x_weight: Some(x_weight),
                x_eps: EPS,
                branch,
                experts: None,
                branch_weight: Some(branch_weight),
                branch_eps: EPS,
            };
            table.run(rows, bucket, &joined(x, found, Some(norms)));
            let [found, expected] = [found, expected].map(|at| table.get::<f32>(at, all));
            let written = ..rows * columns;
            assert_eq!(found[written], expected[written], "{columns}, {bucket}");
            assert!(found[written].iter().all(|v| v.is_finite()));
        }
    }

    #[test]
    #[ignore = "needs a card"]
    fn experts_of_a_branch_are_summed_as_by_themselves_in_f32_and_f16() {
        const FACTOR: f32 = 16.0;
        let (rows, top_k) = (3, 5);
        for (columns, bucket) in [(96, rows), (2816, rows), (2816, FEW_ROWS + 1)] {
            let mut table = Table::new();
            let all = bucket * columns;
            let each = f16_bits(&normals(1, top_k * all));
            let values: Vec<f32> = each.iter().map(|&v| f16_value(v) * FACTOR).collect();
            let route: Vec<f32> = normals(2, bucket * 2 * top_k);
            let (x, residual) = (table.put(&normals(3, all)), table.put(&normals(4, all)));
            let weight = table.weight(&normals(5, columns));
            let route = table.put(&route);
            let (halves, floats) = (table.put(&each), table.put(&values));
            let [branch, expected, found_f16, found_f32] = [(); 4].map(|()| table.poison(all));
            let sum = ExpertsSum {
                x: floats,
                route,
                columns,
                top_k,
                out: branch,
            };
            table.run(rows, bucket, &sum);
            let experts = |f16_factor| BranchExperts {
                route,
                top_k,
                f16_factor,
            };
            for (branch, experts, sum) in [
                (branch, None, expected),
                (halves, Some(experts(Some(FACTOR))), found_f16),
                (floats, Some(experts(None)), found_f32),
            ] {
                let norm = FusedResidualNorm {
                    x,
                    factor: None,
                    weight: Some(weight),
                    eps: EPS,
                    residual,
                    scale: 0.7,
                    sum,
                    sum_activation: None,
                    following: None,
                    branch: Some(BranchNorms {
                        x_weight: None,
                        x_eps: EPS,
                        branch,
                        experts,
                        branch_weight: Some(weight),
                        branch_eps: EPS,
                    }),
                    columns,
                    pdl: false,
                };
                table.run(rows, bucket, &norm);
            }
            let expected = table.get::<f32>(expected, rows * columns);
            assert!(expected.iter().all(|v| v.is_finite()));
            for (found, format) in [(found_f16, "f16"), (found_f32, "f32")] {
                let found = table.get::<f32>(found, all);
                let (written, beyond) = found.split_at(rows * columns);
                assert!(beyond.iter().all(|v| v.is_nan()), "{columns} {format}");
                assert_eq!(written, expected, "{columns}, {bucket} of {format}");
            }
        }
    }
}
