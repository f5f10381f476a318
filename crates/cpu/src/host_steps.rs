//! Networks that a device leaves to the host: products of a few rows with some rows of each matrix, as the file has them.

use carat_model::{
    backend::{BackendError, Batching},
    host_steps::{HostBackend, HostNetwork, HostSteps},
    weights::{Weight, Weights},
};

use crate::{
    backend::CpuBackend,
    op::{
        experts::Permutation,
        linear::{self, Input, Product},
        quantize,
        repack::Repacked,
        workers::Workers,
    },
    pool::Pool,
    roofline,
};
use carat_cpu_kernels::gemm::{
    activations::{ActivationRows, Activations},
    row_class::RowClasses,
};

impl HostBackend for CpuBackend {
    fn identity(&self) -> String {
        format!("{:?}, {} threads", self.isa(), self.host_threads())
    }

    fn read_rate(&self) -> Option<f64> {
        roofline::read_rate(self.kernels(), self.host_threads()).ok()
    }

    fn host_steps(
        &self,
        weights: &Weights,
        networks: &[HostNetwork],
        max_rows: usize,
    ) -> Result<Box<dyn HostSteps>, BackendError> {
        let pool = Pool::patient(self.host_threads())
            .map_err(|error| BackendError::Device(Box::new(error)))?;
        let classes = RowClasses::new(self.isa(), Batching::Invariant);
        let workers = Workers::new(pool, self.kernels(), classes, Repacked::new(0));
        Ok(Box::new(CpuHostSteps::new(
            workers, weights, networks, max_rows,
        )))
    }
}

struct CpuHostSteps {
    workers: Workers,
    weights: Weights,
    networks: Vec<Network>,
    permutation: Permutation,
    /// What is multiplied: a copy that may be written to, and that quantized.
    input: Vec<f32>,
    /// By columns.
    quantized: Vec<(usize, Activations)>,
    max_pairs: usize,
    /// Products, in the order of the permutation.
    outs: [Vec<f32>; 2],
}

/// The host's views of a network.
struct Network {
    shape: HostNetwork,
    columns: usize,
    inner: usize,
    /// Gate and up.
    gated: Option<[Weight; 2]>,
    down: Option<Weight>,
}

impl CpuHostSteps {
    fn new(
        workers: Workers,
        weights: &Weights,
        networks: &[HostNetwork],
        max_rows: usize,
    ) -> CpuHostSteps {
        let mut wanted = Vec::new();
        let mut view = |weight: Weight, first: usize| {
            let has_rows = first < weights.matrix(weight).rows;
            has_rows.then(|| {
                wanted.push((weight, first));
                wanted.len() - 1
            })
        };
        let places: Vec<_> = networks
            .iter()
            .map(|n| {
                let gated = [n.gate, n.up].map(|w| view(w, n.gated_from));
                (gated, view(n.down, n.down_from))
            })
            .collect();
        let (views, of) = weights.with_rows_from(&wanted);
        let networks = networks.iter().zip(places);
        let networks = networks.map(|(shape, (gated, down))| Network {
            shape: *shape,
            columns: weights.matrix(shape.gate).columns,
            inner: weights.matrix(shape.gate).rows,
            gated: match gated {
                [Some(gate), Some(up)] => Some([of[gate], of[up]]),
                _ => None,
            },
            down: down.map(|place| of[place]),
        });
        let networks: Vec<Network> = networks.collect();
        let each = networks.iter().map(|n| n.shape.each()).max();
        CpuHostSteps {
            workers,
            weights: views,
            max_pairs: max_rows * each.unwrap_or(1),
            networks,
            permutation: Permutation::default(),
            input: Vec::new(),
            quantized: Vec::new(),
            outs: [Vec::new(), Vec::new()],
        }
    }

    /// Products of the rows of `input` with some matrices of a network, left in `outs` in the order of the permutation. Rows are
    /// gathered by it, or are its pairs already.
    fn multiply(&mut self, matrices: &[Weight], input: &[f32], of_pairs: bool) {
        let permutation = &self.permutation;
        let matrix = self.weights.matrix(matrices[0]);
        let (columns, pairs) = (matrix.columns, permutation.order.len());
        let class = self.workers.classes.of(pairs);
        self.input.clear();
        self.input.extend_from_slice(input);
        let is_float = |w: &Weight| self.weights.matrix(*w).quant.is_float();
        let known = self.quantized.iter().position(|(c, _)| *c == columns);
        let quantized = known.unwrap_or_else(|| {
            let rows = ActivationRows {
                int8: self.max_pairs,
                bf16: 0,
            };
            let new = Activations::new(rows, columns);
            self.quantized.push((columns, new));
            self.quantized.len() - 1
        });
        let quantized = &mut self.quantized[quantized].1;
        if !matrices.iter().all(is_float) {
            let values = (&mut self.input[..], columns);
            quantize::each_row(&self.workers, class, values, quantized, |_, _| {});
        }
        let gather = if of_pairs {
            &permutation.order
        } else {
            &permutation.rows
        };
        let product = |weight: &Weight| Product {
            class,
            weights: &self.weights,
            weight: *weight,
            input: if is_float(weight) {
                Input::F32 {
                    data: &self.input,
                    columns,
                }
            } else {
                Input::Quantized(quantized)
            },
            gather: Some(gather),
            row_bounds: &permutation.row_bounds,
            groups: &permutation.groups,
        };
        let products: Vec<Product<'_>> = matrices.iter().map(product).collect();
        let outs = self.outs.iter_mut().zip(matrices);
        let mut outs: Vec<&mut [f32]> = outs
            .map(|(out, weight)| {
                out.resize(pairs * self.weights.matrix(*weight).rows, 0.0);
                out.as_mut_slice()
            })
            .collect();
        linear::run(&products, &mut self.workers, &mut outs);
    }
}

impl Permutation {
    /// Pairs of a network's rows: by expert, or in order.
    fn of_network(&mut self, shape: &HostNetwork, rows: usize, route: &[f32]) {
        match shape.top_k {
            Some(top_k) => self.sort(&route[..rows * 2 * top_k], top_k),
            None => self.one_group(rows),
        }
    }
}

impl HostSteps for CpuHostSteps {
    fn gated(&mut self, network: usize, x: &[f32], route: &[f32], out: &mut [f32]) {
        let n = &self.networks[network];
        let Some(matrices) = n.gated else {
            return;
        };
        let width = n.inner - n.shape.gated_from;
        self.permutation
            .of_network(&n.shape, x.len() / n.columns, route);
        self.multiply(&matrices, x, false);
        let kernels = self.workers.kernels;
        let ([gate, up], inverse) = (&self.outs, &self.permutation.inverse);
        self.workers.each_row(out, width, |pair, out| {
            let from = inverse[pair] * width..(inverse[pair] + 1) * width;
            kernels.gelu_mul(&gate[from.clone()], &up[from], out);
        });
    }

    fn down(&mut self, network: usize, inner: &[f32], route: &[f32], out: &mut [f32]) {
        let n = &self.networks[network];
        let Some(matrix) = n.down else {
            return;
        };
        let (top_k, each) = (n.shape.top_k, n.shape.each());
        let rows = inner.len() / n.inner / each;
        self.permutation.of_network(&n.shape, rows, route);
        self.multiply(&[matrix], inner, true);
        let width = self.weights.matrix(matrix).rows;
        let Some(top_k) = top_k else {
            out.copy_from_slice(&self.outs[0]);
            return;
        };
        let kernels = self.workers.kernels;
        let (down, inverse) = (&self.outs[0], &self.permutation.inverse);
        self.workers.each_row(out, width, |row, out| {
            out.fill(0.0);
            let weights = &route[row * 2 * top_k + top_k..][..top_k];
            for (choice, weight) in weights.iter().enumerate() {
                let pair = inverse[row * top_k + choice];
                kernels.add_weighted(&down[pair * width..][..width], *weight, out);
            }
        });
    }
}

#[cfg(test)]
mod tests {
    use carat_gguf::QuantType;
    use carat_model::Model;
    use carat_testkit::{
        numbers::{Random, bits, relative_error},
        tiny::{Tiny, Variant},
    };

    use super::*;
    use crate::backend::CpuConfig;

    const ROWS: usize = 3;
    const TOP_K: usize = 2;

    fn steps(model: &Model, networks: &[HostNetwork], threads: usize) -> Box<dyn HostSteps> {
        let backend = CpuBackend::new(&CpuConfig {
            threads: Some(threads),
            ..CpuConfig::default()
        });
        let steps = backend.host_steps(&model.weights, networks, 8);
        steps.expect("threads can be started")
    }

    /// The first layer's dense network, or its experts.
    fn whole(model: &Model) -> HostNetwork {
        let layer = &model.layers[0];
        let (gate, up, down, top_k) = match &layer.moe {
            Some(moe) => (moe.gate, moe.up, moe.down, Some(TOP_K)),
            None => (layer.ffn.gate, layer.ffn.up, layer.ffn.down, None),
        };
        HostNetwork {
            gate,
            up,
            down,
            top_k,
            gated_from: 0,
            down_from: 0,
        }
    }

    struct Case {
        network: HostNetwork,
        x: Vec<f32>,
        route: Vec<f32>,
        columns: usize,
        inner: usize,
        outputs: usize,
    }

    impl Case {
        fn new(model: &Model) -> Case {
            let network = whole(model);
            let gate = model.weights.matrix(network.gate);
            let mut random = Random::new(7);
            Case {
                network,
                columns: gate.columns,
                inner: gate.rows,
                outputs: model.weights.matrix(network.down).rows,
                x: random.normals(ROWS * gate.columns),
                // Rows share an expert, and one has it as its second.
                route: match network.top_k {
                    Some(_) => vec![3.0, 1.0, 0.7, 0.3, 0.0, 3.0, 0.6, 0.4, 1.0, 2.0, 0.5, 0.5],
                    None => Vec::new(),
                },
            }
        }

        /// What a network gives from some rows of its matrices on, between them and in the end.
        fn run(
            &self,
            steps: &mut dyn HostSteps,
            (gated_from, down_from): (usize, usize),
            inner: Option<&[f32]>,
        ) -> (Vec<f32>, Vec<f32>) {
            let pairs = ROWS * self.network.each();
            let mut gated = vec![f32::NAN; pairs * (self.inner - gated_from)];
            steps.gated(0, &self.x, &self.route, &mut gated);
            let mut out = vec![f32::NAN; ROWS * (self.outputs - down_from)];
            steps.down(0, inner.unwrap_or(&gated), &self.route, &mut out);
            (gated, out)
        }

        /// The same as it is defined.
        fn expected(&self, model: &Model) -> Vec<f64> {
            let weights = &model.weights;
            let product = |w: Weight, matrix: usize, x: &[f32]| -> Vec<f64> {
                let m = weights.matrix(w);
                let mut row = vec![0.0; m.columns];
                (0..m.rows)
                    .map(|r| {
                        m.quant.dequantize(weights.row(w, matrix, r), &mut row);
                        let terms = row.iter().zip(x);
                        terms.map(|(a, b)| f64::from(*a) * f64::from(*b)).sum()
                    })
                    .collect()
            };
            let gelu = |v: f64| {
                let cubic = v + 0.044_715 * v * v * v;
                0.5 * v * (1.0 + ((2.0 / std::f64::consts::PI).sqrt() * cubic).tanh())
            };
            let HostNetwork { gate, up, down, .. } = self.network;
            let one = |matrix: usize, x: &[f32]| {
                let (gate, up) = (product(gate, matrix, x), product(up, matrix, x));
                let inner = gate.iter().zip(&up).map(|(g, u)| (gelu(*g) * u) as f32);
                product(down, matrix, &inner.collect::<Vec<f32>>())
            };
            let rows = self.x.chunks_exact(self.columns).enumerate();
            let outs = rows.flat_map(|(r, x)| match self.network.top_k {
                None => one(0, x),
                Some(top_k) => {
                    let route = &self.route[r * 2 * top_k..][..2 * top_k];
                    let mut sum = vec![0.0; self.outputs];
                    for k in 0..top_k {
                        let out = one(route[k] as usize, x);
                        let weight = f64::from(route[top_k + k]);
                        for (sum, value) in sum.iter_mut().zip(out) {
                            *sum += weight * value;
                        }
                    }
                    sum
                }
            });
            outs.collect()
        }
    }

    /// Columns of a matrix from one on.
    fn columns_from(matrix: &[f32], columns: usize, first: usize) -> Vec<f32> {
        let rows = matrix.chunks_exact(columns);
        rows.flat_map(|row| row[first..].to_vec()).collect()
    }

    #[test]
    fn networks_give_what_they_are_defined_to() {
        for variant in [Variant::Dense12b, Variant::Moe26b] {
            for (quant, bound) in [(QuantType::F32, 1e-5), (QuantType::Q4_0, 2e-2)] {
                let model = Tiny::new(variant, quant).model();
                let case = Case::new(&model);
                let mut steps = steps(&model, &[case.network], 2);
                let (_, found) = case.run(steps.as_mut(), (0, 0), None);
                let error = relative_error(&found, &case.expected(&model));
                assert!(error < bound, "{variant:?} {quant:?}: {error:.1e}");
            }
        }
    }

    #[test]
    fn parts_have_the_bits_of_the_whole_on_any_number_of_threads() {
        for variant in [Variant::Dense12b, Variant::Moe26b] {
            for quant in [QuantType::Q4_0, QuantType::Q6_K, QuantType::F16] {
                let model = Tiny::new(variant, quant).model();
                let case = Case::new(&model);
                let mut all = steps(&model, &[case.network], 1);
                let (gated, out) = case.run(all.as_mut(), (0, 0), None);
                for (gated_from, down_from) in [(32, 32), (0, 64), (case.inner, 32)] {
                    let part = HostNetwork {
                        gated_from,
                        down_from,
                        ..case.network
                    };
                    let mut some = steps(&model, &[part], 2);
                    let from = (gated_from, down_from);
                    let (own, found) = case.run(some.as_mut(), from, Some(&gated));
                    let what = format!("{variant:?} {quant:?} {from:?}");
                    let expected = columns_from(&gated, case.inner, gated_from);
                    assert_eq!(bits(&own), bits(&expected), "{what}");
                    let expected = columns_from(&out, case.outputs, down_from);
                    assert_eq!(bits(&found), bits(&expected), "{what}");
                }
            }
        }
    }
}
