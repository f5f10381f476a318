//! What can be wrong with a GGUF file, each with the value that is wrong.

use std::path::PathBuf;

#[derive(Debug, thiserror::Error)]
pub enum GgufError {
    #[error("cannot read `{}`", path.display())]
    Io {
        path: PathBuf,
        source: std::io::Error,
    },
    #[error("not a GGUF file: its first bytes are {found:02x?}, expected \"GGUF\"")]
    NotGguf { found: Vec<u8> },
    #[error("GGUF version {0} is not supported (2 and 3 are)")]
    Version(u32),
    #[error("the file is big-endian; convert it to little-endian")]
    BigEndian,
    #[error(
        "the file ends at byte {end} inside {what}, which needs {needed} bytes at {offset}; it is truncated or damaged"
    )]
    Truncated {
        what: String,
        offset: usize,
        needed: u64,
        end: usize,
    },
    #[error("{what} says {count} entries, more than the {left} bytes left in the file can hold")]
    Count {
        what: String,
        count: u64,
        left: usize,
    },
    #[error("{what} is not valid UTF-8")]
    Utf8 { what: String },
    #[error("metadata key `{key}` has unknown value type {found}")]
    ValueType { key: String, found: u32 },
    #[error("metadata key `{key}` holds {found}, which is not a bool (0 or 1)")]
    Bool { key: String, found: u8 },
    #[error("metadata key `{key}` is an array of arrays nested more than {max} deep")]
    Nesting { key: String, max: usize },
    #[error("metadata key `{0}` appears twice")]
    DuplicateKey(String),
    #[error("metadata key `{0}` is missing")]
    MissingKey(String),
    #[error("metadata key `{key}`: expected {expected}, found {found}")]
    KeyType {
        key: String,
        expected: &'static str,
        /// A type of the file format, such as `u32` or `array of string`.
        found: String,
    },
    #[error("metadata key `{key}`: {value} is out of range for {expected}")]
    KeyRange {
        key: String,
        value: String,
        expected: &'static str,
    },
    #[error("metadata key `{key}` has {found} entries; expected one value for all, or {expected}")]
    KeyLength {
        key: String,
        found: usize,
        expected: usize,
    },
    #[error("general.alignment is {0}; it must be a power of two between 1 and 65536")]
    Alignment(u64),
    #[error("tensor `{0}` appears twice")]
    DuplicateTensor(String),
    #[error("tensor `{name}` has {found} dimensions; 1 to 4 are allowed")]
    Dimensions { name: String, found: u32 },
    #[error("tensor `{name}` has shape {shape:?}, which is empty or too large to address")]
    Shape { name: String, shape: Vec<u64> },
    #[error(
        "tensor `{name}` has type {id}{}, which is not supported; use a file quantized to one of {}",
        crate::quant::foreign_name(*id).map(|n| format!(" ({n})")).unwrap_or_default(),
        crate::quant::QuantType::names()
    )]
    TensorType { name: String, id: u32 },
    #[error(
        "tensor `{name}`: rows of {columns} values do not divide into {quant} blocks of {block}"
    )]
    RowLength {
        name: String,
        columns: usize,
        quant: &'static str,
        block: usize,
    },
    #[error(
        "tensor `{name}`: offset {offset} is not a multiple of the file's alignment {alignment}"
    )]
    TensorAlignment {
        name: String,
        offset: u64,
        alignment: usize,
    },
    #[error(
        "tensor `{name}` lies at bytes {start}..{end} of its file, which ends at {file_bytes}; it is truncated or damaged"
    )]
    TensorBounds {
        name: String,
        start: u64,
        end: u64,
        file_bytes: usize,
    },
    #[error("tensors `{first}` and `{second}` overlap in the file")]
    TensorOverlap { first: String, second: String },
    #[error("`{}` is part {found} of {count}; open part 1 and keep all parts beside it", path.display())]
    SplitPart {
        path: PathBuf,
        found: u64,
        count: u64,
    },
    #[error("`{}` says it is part {found} of {count}; the parts are mixed up", path.display())]
    SplitOrder {
        path: PathBuf,
        found: u64,
        count: u64,
    },
    #[error("the file name `{}` does not end in -00001-of-{count:05}.gguf, so its other parts cannot be found", path.display())]
    SplitName { path: PathBuf, count: u64 },
    #[error("the parts hold {found} tensors, split.tensors.count says {expected}")]
    SplitTensors { found: usize, expected: u64 },
}
