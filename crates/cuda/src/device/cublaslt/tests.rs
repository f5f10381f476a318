use super::*;
use crate::{
    config::Tier,
    device::Buffer,
    testing::{Card, f16_bits, f16_value, library_dirs, normals, relative_error},
};

pub(crate) const WORKSPACE: usize = 64 << 20;

pub(crate) fn open(card: &Card) -> Library {
    Library::find(&library_dirs(), &card.device).expect("cuBLASLt")
}

/// A product of random matrices and what it should be.
struct Case {
    shape: MatmulShape,
    out: Out,
    alpha: f32,
    weights: Buffer,
    x: Buffer,
    result: Buffer,
    workspace: Buffer,
    expected: Vec<f32>,
}

impl Case {
    fn new(card: &Card, shape: MatmulShape, out: Out, alpha: f32) -> Case {
        let MatmulShape {
            rows,
            outputs,
            columns,
            stride,
        } = shape;
        let weights = f16_bits(&normals(1, outputs * columns));
        let x = f16_bits(&normals(2, rows * columns));
        let mut expected = Vec::new();
        for r in 0..rows {
            for o in 0..outputs {
                let pairs = (0..columns).map(|k| (x[r * columns + k], weights[o * columns + k]));
                let sum: f64 = pairs
                    .map(|(a, b)| f64::from(f16_value(a)) * f64::from(f16_value(b)))
                    .sum();
                expected.push((f64::from(alpha) * sum) as f32);
            }
        }
        let words = rows * stride;
        Case {
            shape,
            out,
            alpha,
            weights: card.upload(&weights),
            x: card.upload(&x),
            result: match out {
                Out::F32 => card.upload(&vec![f32::NAN; words]),
                Out::F16 => card.upload(&vec![0x7e00u16; words]),
            },
            workspace: card.device.allocate("test", WORKSPACE).expect("memory"),
            expected,
        }
    }

    fn operands(&self) -> Operands {
        Operands {
            weights: self.weights.address(),
            x: self.x.address(),
            out: self.result.address(),
            workspace: self.workspace.address(),
        }
    }

    fn gemm(&self, library: &Library) -> Gemm {
        Gemm::new(library, self.shape, self.out, self.alpha, WORKSPACE).expect("an algorithm")
    }

    /// The written part of the result. What is not written is still poisoned.
    fn result(&self, card: &Card) -> Vec<f32> {
        let count = self.shape.rows * self.shape.stride;
        let all: Vec<f32> = match self.out {
            Out::F32 => card.download(&self.result, count),
            Out::F16 => card
                .download(&self.result, count)
                .into_iter()
                .map(f16_value)
                .collect(),
        };
        let rows = all.chunks_exact(self.shape.stride);
        for row in rows.clone() {
            assert!(row[self.shape.outputs..].iter().all(|v| v.is_nan()));
        }
        rows.flat_map(|row| &row[..self.shape.outputs])
            .copied()
            .collect()
    }
}

pub(crate) fn shape(rows: usize, outputs: usize, columns: usize, stride: usize) -> MatmulShape {
    MatmulShape {
        rows,
        outputs,
        columns,
        stride,
    }
}

#[test]
fn a_heuristic_has_the_size_the_library_writes() {
    assert_eq!(size_of::<Heuristic>(), 96);
}

#[test]
#[ignore = "needs a card"]
fn cublaslt_products_are_those_of_f64() {
    let card = Card::open(Tier::Best);
    let library = open(&card);
    for (shape, out, alpha) in [
        (shape(1, 8, 16, 8), Out::F32, 1.0),
        (shape(3, 72, 40, 72), Out::F32, 1.0),
        (shape(17, 136, 264, 200), Out::F32, 0.5),
        (shape(17, 136, 264, 136), Out::F16, 1.0 / 64.0),
        (shape(33, 24, 512, 32), Out::F16, 1.0),
    ] {
        let case = Case::new(&card, shape, out, alpha);
        case.gemm(&library).launch(case.operands()).expect("runs");
        card.device.wait("a product").expect("runs");
        let error = relative_error(&case.result(&card), &case.expected);
        let bound = match out {
            Out::F32 => 1e-6,
            Out::F16 => 4e-4,
        };
        assert!(error < bound, "{shape:?} {out:?}: {error}");
    }
}

#[test]
#[ignore = "needs a card"]
fn cublaslt_products_repeat() {
    let card = Card::open(Tier::Best);
    let library = open(&card);
    let case = Case::new(&card, shape(24, 64, 256, 64), Out::F32, 1.0);
    let operands = case.operands();
    let gemm = case.gemm(&library);
    let run = || {
        gemm.launch(operands).expect("runs");
        case.result(&card)
    };
    let first = run();
    assert!(relative_error(&first, &case.expected) < 1e-6);
    (0..10).for_each(|_| assert_eq!(run(), first));
}

#[test]
#[ignore = "needs a card"]
fn cublaslt_launches_can_be_captured() {
    let card = Card::open(Tier::Best);
    let library = open(&card);
    let case = Case::new(&card, shape(24, 64, 256, 64), Out::F32, 1.0);
    let gemm = case.gemm(&library);
    let graph = card.captured(|| gemm.launch(case.operands()).expect("runs"));
    let expected = case.result(&card);
    let bytes = case.shape.rows * case.shape.stride * 4;
    let zeros = card.device.allocate_host("test", bytes).expect("memory");
    let cleared = card.device.copy_in(&zeros, &case.result, 0, bytes);
    cleared.expect("copies");
    graph.launch().expect("launches");
    card.device.wait("a graph").expect("runs");
    assert_eq!(case.result(&card), expected);
}
