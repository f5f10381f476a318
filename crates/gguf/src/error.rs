//! Faults of a GGUF file, each with the value that is wrong.

use std::path::PathBuf;

/// Reason a model cannot be read. Every message names the offending value; most mean that the file is damaged and has
/// to be downloaded or converted again.
#[derive(Debug, thiserror::Error)]
pub enum GgufError {
    /// The operating system refused to open or map a file.
    #[error("cannot read `{}`", path.display())]
    Io {
        /// File that was to be opened.
        path: PathBuf,
        /// Answer of the operating system.
        source: std::io::Error,
    },
    /// The path leads to something that holds no model.
    #[error("`{}` is {kind}; a model is a GGUF file", path.display())]
    NotAFile {
        /// Path that was to be opened.
        path: PathBuf,
        /// Kind of thing that is there.
        kind: &'static str,
    },
    /// The file is not the one that was opened any more.
    #[error(
        "`{}` was changed while it was in use; what was computed with it is worthless, start again with a file that stays as it is",
        path.display()
    )]
    Changed {
        /// File of the model, or the part of it that changed.
        path: PathBuf,
    },
    /// The file is of another format.
    #[error("not a GGUF file: its first bytes are {found:02x?}, expected \"GGUF\"")]
    NotGguf {
        /// Up to four bytes from the start of the file.
        found: Vec<u8>,
    },
    /// A version of the format that this reader does not know.
    #[error("GGUF version {0} is not supported (2 and 3 are)")]
    Version(u32),
    /// A supported version, with its bytes in the other order.
    #[error("the file is big-endian; convert it to little-endian")]
    BigEndian,
    /// The file ends inside something.
    #[error(
        "the file ends at byte {end} inside {what}, which needs {needed} bytes at {offset}; it is truncated or damaged"
    )]
    Truncated {
        /// Field or value that was being read.
        what: String,
        /// Byte of the file at which it begins.
        offset: usize,
        /// Bytes it claims to take.
        needed: u64,
        /// Bytes of the file.
        end: usize,
    },
    /// A count that the rest of the file cannot hold, found before anything is allocated for it.
    #[error("{what} says {count} entries, more than the {left} bytes left in the file can hold")]
    Count {
        /// List that was being read.
        what: String,
        /// Entries it claims to have.
        count: u64,
        /// Bytes between its count and the end of the file.
        left: usize,
    },
    /// A name or text that is not UTF-8.
    #[error("{what} is not valid UTF-8")]
    Utf8 {
        /// Field or value that was being read.
        what: String,
    },
    /// A type tag outside the format.
    #[error("metadata key `{key}` has unknown value type {found}")]
    ValueType {
        /// Metadata key, as in the file.
        key: String,
        /// Tag in the file.
        found: u32,
    },
    /// A bool that is neither 0 nor 1.
    #[error("metadata key `{key}` holds {found}, which is not a bool (0 or 1)")]
    Bool {
        /// Metadata key, as in the file.
        key: String,
        /// Byte in the file.
        found: u8,
    },
    /// Arrays within arrays, past the depth the reader follows.
    #[error("metadata key `{key}` is an array of arrays nested more than {max} deep")]
    Nesting {
        /// Metadata key, as in the file.
        key: String,
        /// Deepest nesting that is read.
        max: usize,
    },
    /// Two metadata entries under one key.
    #[error("metadata key `{0}` appears twice")]
    DuplicateKey(String),
    /// A key that the caller cannot do without.
    #[error("metadata key `{0}` is missing")]
    MissingKey(String),
    /// A value of another type than the caller needs.
    #[error("metadata key `{key}`: expected {expected}, found {found}")]
    KeyType {
        /// Metadata key, as in the file.
        key: String,
        /// Type the caller asked for, with its article: `an integer`.
        expected: &'static str,
        /// Type of the file format, such as `u32` or `array of string`.
        found: String,
    },
    /// An integer that does not fit the caller's type.
    #[error("metadata key `{key}`: {value} is out of range for {expected}")]
    KeyRange {
        /// Metadata key, as in the file.
        key: String,
        /// Number in the file.
        value: String,
        /// Range the caller asked for, with its article: `a 32-bit count`.
        expected: &'static str,
    },
    /// An array with neither one value for all nor one for each.
    #[error("metadata key `{key}` has {found} entries; expected one value for all, or {expected}")]
    KeyLength {
        /// Metadata key, as in the file.
        key: String,
        /// Entries in the file.
        found: usize,
        /// Entries that one for each would be.
        expected: usize,
    },
    /// An alignment that no tensor could be placed by.
    #[error("general.alignment is {0}; it must be a power of two between 1 and 65536")]
    Alignment(u64),
    /// Two tensors under one name, in one file or in two parts of a split one.
    #[error("tensor `{0}` appears twice")]
    DuplicateTensor(String),
    /// A tensor with no dimension, or with more than the format has.
    #[error("tensor `{name}` has {found} dimensions; 1 to 4 are allowed")]
    Dimensions {
        /// Tensor name, as in the file.
        name: String,
        /// Dimensions it claims to have.
        found: u32,
    },
    /// A dimension of 0, or a product past what this machine can address.
    #[error("tensor `{name}` has shape {shape:?}, which is empty or too large to address")]
    Shape {
        /// Tensor name, as in the file.
        name: String,
        /// Sizes as in the file, fastest dimension first.
        shape: Vec<u64>,
    },
    /// A tensor that somebody needs, in a format that Carat does not read.
    #[error(
        "tensor `{name}` has type {id}{}, which is not supported; use a file quantized to one of {}",
        crate::quant::foreign_name(*id).map(|n| format!(" ({n})")).unwrap_or_default(),
        crate::quant::QuantType::names()
    )]
    TensorType {
        /// Tensor name, as in the file.
        name: String,
        /// ggml's number of the format.
        id: u32,
    },
    /// A table of integers that is none.
    #[error("tensor `{name}` is expected to be a table of integers, I32 or I64")]
    NotIntegers {
        /// Tensor name, as in the file.
        name: String,
    },
    /// Rows that end inside a block.
    #[error(
        "tensor `{name}`: rows of {columns} values do not divide into {quant} blocks of {block}"
    )]
    RowLength {
        /// Tensor name, as in the file.
        name: String,
        /// Values per row.
        columns: usize,
        /// Name of the block format.
        quant: &'static str,
        /// Values per block.
        block: usize,
    },
    /// A tensor off the file's alignment.
    #[error(
        "tensor `{name}`: offset {offset} is not a multiple of the file's alignment {alignment}"
    )]
    TensorAlignment {
        /// Tensor name, as in the file.
        name: String,
        /// Bytes from the start of the tensor data.
        offset: u64,
        /// Bytes that every offset must be a multiple of.
        alignment: usize,
    },
    /// A tensor that reaches past the end of its file.
    #[error(
        "tensor `{name}` lies at bytes {start}..{end} of its file, which ends at {file_bytes}; it is truncated or damaged"
    )]
    TensorBounds {
        /// Tensor name, as in the file.
        name: String,
        /// First byte of its data in the file.
        start: u64,
        /// Byte after its data.
        end: u64,
        /// Bytes of the file.
        file_bytes: usize,
    },
    /// Two tensors that share bytes.
    #[error("tensors `{first}` and `{second}` overlap in the file")]
    TensorOverlap {
        /// Name of the tensor that begins first.
        first: String,
        /// Name of the tensor that begins inside it.
        second: String,
    },
    /// A later part of a split model, opened in place of the first.
    #[error("`{}` is part {found} of {count}; open part 1 and keep all parts beside it", path.display())]
    SplitPart {
        /// File that was opened.
        path: PathBuf,
        /// Part it says it is, from 1.
        found: u64,
        /// Parts of the model.
        count: u64,
    },
    /// A part whose name and contents disagree.
    #[error("`{}` says it is part {found} of {count}; the parts are mixed up", path.display())]
    SplitOrder {
        /// File whose name says another part.
        path: PathBuf,
        /// Part it says it is, from 1.
        found: u64,
        /// Parts of the model.
        count: u64,
    },
    /// A first part whose name does not lead to the others.
    #[error("the file name `{}` does not end in -00001-of-{count:05}.gguf, so its other parts cannot be found", path.display())]
    SplitName {
        /// File that was opened.
        path: PathBuf,
        /// Parts of the model.
        count: u64,
    },
    /// Parts that do not add up to the model they come from.
    #[error("the parts hold {found} tensors, split.tensors.count says {expected}")]
    SplitTensors {
        /// Tensors in all parts together.
        found: usize,
        /// Tensors that the first part announces.
        expected: u64,
    },
}
