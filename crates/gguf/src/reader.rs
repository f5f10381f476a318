//! Bytes to [`Header`]: metadata and tensor directory of one file.
//!
//! The bytes are untrusted. Each count is compared with what the rest of the file could hold before anything is
//! allocated or skipped, sums and products are checked, and tensors must lie inside the file, aligned and apart.

use std::{collections::HashSet, fmt, sync::Arc};

pub use crate::map::FileBytes;
use crate::{
    GgufError, QuantType,
    value::{Array, Metadata, Value, ValueType},
};

/// The least bytes a metadata entry takes: key length, type, one value byte.
const MIN_ENTRY_BYTES: usize = 8 + 4 + 1;
/// The least bytes a tensor description takes: name length, dimension count, one size, type, offset.
const MIN_TENSOR_BYTES: usize = 8 + 4 + 8 + 4 + 8;
const MAX_DIMENSIONS: u32 = 4;
const MAX_ARRAY_NESTING: usize = 4;
const DEFAULT_ALIGNMENT: u64 = 32;

/// One file's header, checked against the file's size.
#[derive(Clone, Debug)]
pub struct Header {
    /// Version of the file format, 2 or 3.
    pub version: u32,
    /// Keys and values before the tensor directory.
    pub metadata: Metadata,
    /// The tensor directory, in file order.
    pub tensors: Vec<TensorInfo>,
    /// File offset of the tensor data.
    pub data_start: usize,
}

/// Entry of the tensor directory: a tensor's name, shape, format and place in the file.
#[derive(Clone, Debug)]
pub struct TensorInfo {
    /// Name, unique in the model: `blk.0.attn_q.weight`.
    pub name: String,
    /// Fastest dimension first, as in the file: `[columns, rows, …]`.
    pub shape: Vec<usize>,
    /// The format, or the file's type id where it is none of ours: an error only if somebody needs the tensor.
    pub quant: Result<QuantType, u32>,
    /// First byte in the file.
    pub start: usize,
    /// Bytes of data; 0 where the format is unknown, unless it is that of integers.
    pub bytes: usize,
}

impl Header {
    /// Reads and checks everything before the tensor data. Arrays of the metadata keep a share of `bytes`.
    pub fn parse(bytes: &Arc<FileBytes>) -> Result<Header, GgufError> {
        let mut r = Cursor { bytes, at: 0 };
        let magic = r
            .take(4, "the magic number")
            .map_err(|_| GgufError::NotGguf {
                found: bytes.as_slice().to_vec(),
            })?;
        if magic != b"GGUF" {
            return Err(GgufError::NotGguf {
                found: magic.to_vec(),
            });
        }
        let version = r.u32("the version")?;
        match version {
            2 | 3 => {}
            _ if matches!(version.swap_bytes(), 1..=3) => return Err(GgufError::BigEndian),
            _ => return Err(GgufError::Version(version)),
        }
        let tensor_count = r.u64("the tensor count")?;
        let entry_count = r.u64("the metadata count")?;
        let entry_count = r.fits(entry_count, MIN_ENTRY_BYTES, "the metadata")?;
        let mut metadata = Metadata::default();
        for _ in 0..entry_count {
            let key = r.string("a metadata key")?.to_owned();
            let value = r.value(Key(&key))?;
            metadata.insert(key, value)?;
        }
        let tensor_count = r.fits(tensor_count, MIN_TENSOR_BYTES, "the tensor directory")?;
        let directory: Vec<Entry> = (0..tensor_count)
            .map(|_| Entry::read(&mut r))
            .collect::<Result<_, _>>()?;

        let alignment = metadata
            .u64("general.alignment")?
            .unwrap_or(DEFAULT_ALIGNMENT);
        if !alignment.is_power_of_two() || alignment > 65536 {
            return Err(GgufError::Alignment(alignment));
        }
        let alignment = usize::try_from(alignment).expect("at most 65536");
        // A file without tensors may end before the padding.
        let data_start = r.at.next_multiple_of(alignment);
        let tensors = directory
            .into_iter()
            .map(|entry| entry.locate(data_start, alignment, bytes.as_slice().len()))
            .collect::<Result<Vec<_>, _>>()?;
        check_distinct(&tensors)?;
        check_apart(&tensors)?;
        Ok(Header {
            version,
            metadata,
            tensors,
            data_start,
        })
    }
}

/// A line of the tensor directory, before it is placed in the file.
struct Entry {
    name: String,
    shape: Vec<u64>,
    type_id: u32,
    offset: u64,
}

impl Entry {
    fn read(r: &mut Cursor<'_>) -> Result<Entry, GgufError> {
        let name = r.string("a tensor name")?.to_owned();
        let dimensions = r.u32("a tensor's dimension count")?;
        if dimensions == 0 || dimensions > MAX_DIMENSIONS {
            return Err(GgufError::Dimensions {
                name,
                found: dimensions,
            });
        }
        let shape = (0..dimensions)
            .map(|_| r.u64("a tensor's shape"))
            .collect::<Result<_, _>>()?;
        Ok(Entry {
            name,
            shape,
            type_id: r.u32("a tensor's type")?,
            offset: r.u64("a tensor's offset")?,
        })
    }

    fn locate(
        self,
        data_start: usize,
        alignment: usize,
        file_bytes: usize,
    ) -> Result<TensorInfo, GgufError> {
        let Entry {
            name,
            shape: sizes,
            type_id,
            offset,
        } = self;
        let elements = sizes
            .iter()
            .try_fold(1usize, |n, &size| {
                n.checked_mul(usize::try_from(size).ok()?)
            })
            .filter(|&n| n > 0);
        // Every size divides a product that fits usize, so each fits as well.
        let shape: Option<Vec<usize>> = sizes.iter().map(|&s| usize::try_from(s).ok()).collect();
        let (Some(elements), Some(shape)) = (elements, shape) else {
            return Err(GgufError::Shape { name, shape: sizes });
        };
        if offset % alignment as u64 != 0 {
            return Err(GgufError::TensorAlignment {
                name,
                offset,
                alignment,
            });
        }
        let quant = QuantType::from_id(type_id).ok_or(type_id);
        let bytes = match quant {
            Ok(q) if !shape[0].is_multiple_of(q.block_len()) => {
                return Err(GgufError::RowLength {
                    name,
                    columns: shape[0],
                    quant: q.name(),
                    block: q.block_len(),
                });
            }
            Ok(q) => (elements / q.block_len()).checked_mul(q.block_bytes()),
            Err(id) => elements.checked_mul(integer_bytes(id).unwrap_or(0)),
        };
        let Some(bytes) = bytes else {
            return Err(GgufError::Shape { name, shape: sizes });
        };
        let start = (data_start as u64).saturating_add(offset);
        let end = start.saturating_add(bytes as u64);
        if end > file_bytes as u64 {
            return Err(GgufError::TensorBounds {
                name,
                start,
                end,
                file_bytes,
            });
        }
        Ok(TensorInfo {
            name,
            shape,
            quant,
            start: usize::try_from(start).expect("inside the file"),
            bytes,
        })
    }
}

/// Bytes of an integer in tensors of ggml's I32 and I64, which are tables and no weights.
pub(crate) fn integer_bytes(type_id: u32) -> Option<usize> {
    match type_id {
        26 => Some(size_of::<i32>()),
        27 => Some(size_of::<i64>()),
        _ => None,
    }
}

fn check_distinct(tensors: &[TensorInfo]) -> Result<(), GgufError> {
    let mut seen = HashSet::with_capacity(tensors.len());
    match tensors.iter().find(|t| !seen.insert(t.name.as_str())) {
        Some(t) => Err(GgufError::DuplicateTensor(t.name.clone())),
        None => Ok(()),
    }
}

fn check_apart(tensors: &[TensorInfo]) -> Result<(), GgufError> {
    let mut by_place: Vec<&TensorInfo> = tensors.iter().filter(|t| t.bytes > 0).collect();
    by_place.sort_by_key(|t| t.start);
    match by_place
        .windows(2)
        .find(|pair| pair[0].start + pair[0].bytes > pair[1].start)
    {
        Some(pair) => Err(GgufError::TensorOverlap {
            first: pair[0].name.clone(),
            second: pair[1].name.clone(),
        }),
        None => Ok(()),
    }
}

/// The metadata entry being read, named in errors.
#[derive(Clone, Copy)]
struct Key<'a>(&'a str);

impl fmt::Display for Key<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "metadata key `{}`", self.0)
    }
}

/// A place in the file. The `what` of each method names the thing read, for errors.
struct Cursor<'a> {
    bytes: &'a Arc<FileBytes>,
    at: usize,
}

impl<'a> Cursor<'a> {
    fn left(&self) -> usize {
        self.bytes.as_slice().len() - self.at
    }

    fn take(&mut self, count: u64, what: impl fmt::Display) -> Result<&'a [u8], GgufError> {
        match usize::try_from(count) {
            Ok(n) if n <= self.left() => {
                let taken = &self.bytes.as_slice()[self.at..self.at + n];
                self.at += n;
                Ok(taken)
            }
            _ => Err(GgufError::Truncated {
                what: what.to_string(),
                offset: self.at,
                needed: count,
                end: self.bytes.as_slice().len(),
            }),
        }
    }

    fn array<const N: usize>(&mut self, what: impl fmt::Display) -> Result<[u8; N], GgufError> {
        let taken = self.take(N as u64, what)?;
        Ok(taken.try_into().expect("take returns what was asked"))
    }

    fn u32(&mut self, what: impl fmt::Display) -> Result<u32, GgufError> {
        self.array(what).map(u32::from_le_bytes)
    }

    fn u64(&mut self, what: impl fmt::Display) -> Result<u64, GgufError> {
        self.array(what).map(u64::from_le_bytes)
    }

    /// `count` as usize if that many entries of at least `min_bytes` could still follow.
    fn fits(
        &self,
        count: u64,
        min_bytes: usize,
        what: impl fmt::Display,
    ) -> Result<usize, GgufError> {
        usize::try_from(count)
            .ok()
            .filter(|n| n.checked_mul(min_bytes).is_some_and(|b| b <= self.left()))
            .ok_or_else(|| GgufError::Count {
                what: what.to_string(),
                count,
                left: self.left(),
            })
    }

    fn string(&mut self, what: impl fmt::Display + Copy) -> Result<&'a str, GgufError> {
        let length = self.u64(what)?;
        str::from_utf8(self.take(length, what)?).map_err(|_| GgufError::Utf8 {
            what: what.to_string(),
        })
    }

    fn value_type(&mut self, key: Key<'_>) -> Result<ValueType, GgufError> {
        let id = self.u32(key)?;
        ValueType::from_id(id).ok_or_else(|| GgufError::ValueType {
            key: key.0.to_owned(),
            found: id,
        })
    }

    fn value(&mut self, key: Key<'_>) -> Result<Value, GgufError> {
        let kind = self.value_type(key)?;
        Ok(match kind {
            ValueType::U8 => Value::Unsigned(u8::from_le_bytes(self.array(key)?).into(), kind),
            ValueType::U16 => Value::Unsigned(u16::from_le_bytes(self.array(key)?).into(), kind),
            ValueType::U32 => Value::Unsigned(u32::from_le_bytes(self.array(key)?).into(), kind),
            ValueType::U64 => Value::Unsigned(u64::from_le_bytes(self.array(key)?), kind),
            ValueType::I8 => Value::Signed(i8::from_le_bytes(self.array(key)?).into(), kind),
            ValueType::I16 => Value::Signed(i16::from_le_bytes(self.array(key)?).into(), kind),
            ValueType::I32 => Value::Signed(i32::from_le_bytes(self.array(key)?).into(), kind),
            ValueType::I64 => Value::Signed(i64::from_le_bytes(self.array(key)?), kind),
            ValueType::F32 => Value::Float(f32::from_le_bytes(self.array(key)?).into(), kind),
            ValueType::F64 => Value::Float(f64::from_le_bytes(self.array(key)?), kind),
            ValueType::Bool => Value::Bool(self.bool(key)?),
            ValueType::String => Value::String(self.string(key)?.to_owned()),
            ValueType::Array => self.array_value(key)?,
        })
    }

    fn bool(&mut self, key: Key<'_>) -> Result<bool, GgufError> {
        match self.array::<1>(key)? {
            [0] => Ok(false),
            [1] => Ok(true),
            [found] => Err(GgufError::Bool {
                key: key.0.to_owned(),
                found,
            }),
        }
    }

    fn array_value(&mut self, key: Key<'_>) -> Result<Value, GgufError> {
        let kind = self.value_type(key)?;
        let count = self.u64(key)?;
        let count = self.fits(count, kind.min_bytes(), key)?;
        let start = self.at;
        self.skip_elements(key, kind, count, 1)?;
        Ok(Value::Array(Array {
            kind,
            count,
            file: Arc::clone(self.bytes),
            range: start..self.at,
        }))
    }

    /// Walks an array, checking what a later reader of it will rely on.
    fn skip_elements(
        &mut self,
        key: Key<'_>,
        kind: ValueType,
        count: usize,
        depth: usize,
    ) -> Result<(), GgufError> {
        match kind {
            ValueType::String => (0..count).try_for_each(|_| self.string(key).map(drop)),
            ValueType::Bool => (0..count).try_for_each(|_| self.bool(key).map(drop)),
            ValueType::Array if depth == MAX_ARRAY_NESTING => Err(GgufError::Nesting {
                key: key.0.to_owned(),
                max: MAX_ARRAY_NESTING,
            }),
            ValueType::Array => (0..count).try_for_each(|_| {
                let kind = self.value_type(key)?;
                let count = self.u64(key)?;
                let count = self.fits(count, kind.min_bytes(), key)?;
                self.skip_elements(key, kind, count, depth + 1)
            }),
            _ => self.take((count * kind.min_bytes()) as u64, key).map(drop),
        }
    }
}

#[cfg(test)]
pub(crate) mod tests;
