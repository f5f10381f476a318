//! Weights as views of a file's tensors.
//!
//! Most models are one file. A drafter reads the embeddings of its target as well, so weights may be views of several.
//!
//! A [`Matrix`] is a view of a tensor: a run of rows (one of q, k, v in a joined tensor), a run of whole blocks of every
//! row (some layers' slices of the per-layer table), or a stack of equal matrices (experts). Views only move the start and
//! the strides, so no byte is copied.

use std::sync::{Arc, OnceLock};

use carat_gguf::{Gguf, QuantType};

/// A matrix or vector of a model.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Weight(u32);

impl Weight {
    pub(crate) fn from_index(index: usize) -> Weight {
        Weight(index as u32)
    }

    /// Among all weights.
    pub fn index(self) -> usize {
        self.0 as usize
    }
}

/// Place and shape of a weight. A vector is a matrix of one row.
#[derive(Clone, Debug, PartialEq)]
pub struct Matrix {
    /// In the file.
    pub name: String,
    /// Format of its values.
    pub quant: QuantType,
    /// Outputs, or entries of a table.
    pub rows: usize,
    /// Values of a row.
    pub columns: usize,
    /// From one row to the next; more than the row's own bytes in a view of some columns.
    pub row_stride: usize,
    /// Matrices in the stack: experts, else 1.
    pub count: usize,
    /// From one matrix of the stack to the next.
    pub matrix_stride: usize,
    /// First byte of the view in its tensor.
    pub(crate) start: usize,
    /// Place of the tensor in its file's directory.
    pub(crate) tensor: usize,
    /// Index of the file it is in.
    pub(crate) file: usize,
}

impl Matrix {
    /// Bytes of one row's values.
    pub fn row_bytes(&self) -> usize {
        self.quant.row_bytes(self.columns)
    }

    /// Bytes that using the whole view reads.
    pub fn bytes(&self) -> usize {
        self.row_bytes() * self.rows * self.count
    }
}

/// The files and every view of them that a plan names.
pub struct Weights {
    /// The model's own first.
    files: Vec<Arc<Gguf>>,
    matrices: Vec<Matrix>,
    /// Of each view, once asked.
    is_exact_bf16: Vec<OnceLock<bool>>,
    /// Bytes of views that are not read from their file.
    copies: Vec<Option<Arc<[u8]>>>,
}

/// F32 matrices are copied as BF16 where they are at most this part of the model's bytes: not where the whole file is F32.
const LARGEST_COPIED_SHARE: f64 = 0.25;

impl Weights {
    pub(crate) fn new(file: Arc<Gguf>, matrices: Vec<Matrix>) -> Weights {
        Weights::of_files(vec![file], matrices)
    }

    pub(crate) fn of_files(files: Vec<Arc<Gguf>>, matrices: Vec<Matrix>) -> Weights {
        Weights {
            is_exact_bf16: vec![OnceLock::new(); matrices.len()],
            copies: vec![None; matrices.len()],
            files,
            matrices,
        }
    }

    /// Every tensor of a file whose format is known, whole, under its own name.
    pub fn of_file(file: Arc<Gguf>) -> Weights {
        let whole = |(index, info): (usize, &carat_gguf::TensorInfo)| {
            let quant = info.quant.ok()?;
            let size = |i: usize| info.shape.get(i).copied().unwrap_or(1);
            let row_stride = quant.row_bytes(size(0));
            Some(Matrix {
                name: info.name.clone(),
                quant,
                rows: size(1),
                columns: size(0),
                row_stride,
                count: size(2) * size(3),
                matrix_stride: size(1) * row_stride,
                start: 0,
                tensor: index,
                file: 0,
            })
        };
        let matrices = file.tensors().enumerate().filter_map(whole).collect();
        Weights::new(file, matrices)
    }

    /// These, and behind them views of some from a row on, in the order asked for.
    pub fn with_rows_from(&self, wanted: &[(Weight, usize)]) -> (Weights, Vec<Weight>) {
        let mut matrices = self.matrices.clone();
        let mut copies = self.copies.clone();
        let mut views = Vec::new();
        for (weight, first) in wanted {
            let mut view = self.matrix(*weight).clone();
            assert!(*first < view.rows, "a view has rows");
            view.start += first * view.row_stride;
            view.rows -= first;
            views.push(Weight::from_index(matrices.len()));
            matrices.push(view);
            copies.push(copies[weight.index()].clone());
        }
        let weights = Weights {
            copies,
            ..Weights::of_files(self.files.clone(), matrices)
        };
        (weights, views)
    }

    /// The same with F32 matrices as BF16 where every value is one: half the bytes to read. A file whose floats are more than a few
    /// among quantized matrices is left as it is. Looks at their values.
    #[must_use]
    pub fn with_floats_narrowed(&self) -> Weights {
        let mut narrowed = Weights {
            copies: self.copies.clone(),
            ..Weights::of_files(self.files.clone(), self.matrices.clone())
        };
        for weight in self.narrowable() {
            if !self.is_exact_bf16(weight) {
                continue;
            }
            let m = &mut narrowed.matrices[weight.index()];
            m.quant = QuantType::BF16;
            m.start = 0;
            m.row_stride = m.row_bytes();
            m.matrix_stride = m.rows * m.row_stride;
            let mut bytes = Vec::with_capacity(m.bytes());
            for row in self.rows(weight) {
                let (values, _) = row.as_chunks();
                bytes.extend(values.iter().flat_map(|[_, _, low, high]| [*low, *high]));
            }
            narrowed.copies[weight.index()] = Some(bytes.into());
        }
        narrowed
    }

    /// The most bytes that [`Weights::with_floats_narrowed`] copies.
    pub fn narrowed_bytes(&self) -> usize {
        let bytes = self.narrowable().map(|w| self.matrix(w).bytes() / 2);
        bytes.sum()
    }

    /// F32 matrices, where they are few.
    fn narrowable(&self) -> impl Iterator<Item = Weight> {
        let is_f32 = |m: &Matrix| m.quant == QuantType::F32 && m.rows > 1;
        let bytes = |wanted: &dyn Fn(&Matrix) -> bool| -> usize {
            let wanted = self.matrices.iter().filter(|m| wanted(m));
            wanted.map(Matrix::bytes).sum()
        };
        let share = bytes(&is_f32) as f64 / bytes(&|_| true) as f64;
        let found = self.iter().filter(move |(_, m)| is_f32(m));
        found
            .map(|(weight, _)| weight)
            .filter(move |_| share <= LARGEST_COPIED_SHARE)
    }

    /// All rows of all matrices of a stack.
    fn rows(&self, weight: Weight) -> impl Iterator<Item = &[u8]> {
        let m = self.matrix(weight);
        (0..m.count).flat_map(move |i| (0..m.rows).map(move |r| self.row(weight, i, r)))
    }

    /// Bytes that using the whole of a weight must read: half of F32 once it is known that all values are BF16.
    pub fn least_bytes(&self, weight: Weight) -> usize {
        let m = self.matrix(weight);
        let is_narrow = self.is_exact_bf16[weight.index()].get() == Some(&true);
        match m.quant {
            QuantType::F32 if is_narrow => m.bytes() / 2,
            _ => m.bytes(),
        }
    }

    /// Whether every value is a BF16: F32 whose lower halves are all zero. Looks at all of them, the first time.
    pub fn is_exact_bf16(&self, weight: Weight) -> bool {
        let lower = |value: &[u8; 4]| u32::from_le_bytes(*value) & 0xffff;
        let quant = self.matrix(weight).quant;
        *self.is_exact_bf16[weight.index()].get_or_init(|| match quant {
            QuantType::BF16 => true,
            QuantType::F32 => self.rows(weight).all(|row| {
                let values = row.as_chunks().0.iter();
                values.fold(0, |any, value| any | lower(value)) == 0
            }),
            _ => false,
        })
    }

    /// By the name it has in the file.
    pub fn find(&self, name: &str) -> Option<Weight> {
        self.matrices
            .iter()
            .position(|m| m.name == name)
            .map(Weight::from_index)
    }

    /// The model's own file.
    pub fn file(&self) -> &Gguf {
        &self.files[0]
    }

    pub(crate) fn shared_file(&self) -> Arc<Gguf> {
        Arc::clone(&self.files[0])
    }

    /// Weights there are.
    pub fn len(&self) -> usize {
        self.matrices.len()
    }

    /// Whether there is none.
    pub fn is_empty(&self) -> bool {
        self.matrices.is_empty()
    }

    /// Every weight, in order.
    pub fn iter(&self) -> impl Iterator<Item = (Weight, &Matrix)> {
        (0..).map(Weight).zip(&self.matrices)
    }

    /// Whether it is in another model's file: the target's, in a drafter's weights.
    pub fn is_borrowed(&self, w: Weight) -> bool {
        self.matrix(w).file != 0
    }

    /// Facts about one.
    pub fn matrix(&self, w: Weight) -> &Matrix {
        &self.matrices[w.index()]
    }

    /// The view's bytes: row `r` of matrix `m` starts at `m * matrix_stride + r * row_stride`.
    pub fn bytes(&self, w: Weight) -> &[u8] {
        let m = self.matrix(w);
        let length = (m.count - 1) * m.matrix_stride + (m.rows - 1) * m.row_stride + m.row_bytes();
        let all = match &self.copies[w.index()] {
            Some(copy) => copy,
            None => self.files[m.file].tensor_bytes(m.tensor),
        };
        &all[m.start..m.start + length]
    }

    /// The bytes of one row of one matrix of the stack.
    pub fn row(&self, w: Weight, index: usize, row: usize) -> &[u8] {
        let m = self.matrix(w);
        let start = index * m.matrix_stride + row * m.row_stride;
        &self.bytes(w)[start..start + m.row_bytes()]
    }

    /// A whole vector as f32.
    pub fn vector(&self, w: Weight) -> Vec<f32> {
        let m = self.matrix(w);
        let mut out = vec![0.0; m.columns];
        m.quant.dequantize(self.row(w, 0, 0), &mut out);
        out
    }
}
