//! Metadata values and typed getters.
//!
//! Arrays stay in the file's bytes: the reader has walked and checked them once, and iterating decodes on the fly.
//! A vocabulary of 262,144 strings therefore costs no allocation here.

use std::{collections::HashMap, fmt, ops::Range, sync::Arc};

use crate::{GgufError, reader::FileBytes};

/// Type tag of a metadata value, as the file format numbers them.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum ValueType {
    /// 8 bits, no sign.
    U8,
    /// 8 bits, two's complement.
    I8,
    /// 16 bits, no sign.
    U16,
    /// 16 bits, two's complement.
    I16,
    /// 32 bits, no sign.
    U32,
    /// 32 bits, two's complement.
    I32,
    /// IEEE single precision.
    F32,
    /// One byte, 0 or 1.
    Bool,
    /// UTF-8 after a 64-bit length.
    String,
    /// Elements of one type, after that type and a 64-bit count.
    Array,
    /// 64 bits, no sign.
    U64,
    /// 64 bits, two's complement.
    I64,
    /// IEEE double precision.
    F64,
}

impl ValueType {
    const ALL: [ValueType; 13] = [
        ValueType::U8,
        ValueType::I8,
        ValueType::U16,
        ValueType::I16,
        ValueType::U32,
        ValueType::I32,
        ValueType::F32,
        ValueType::Bool,
        ValueType::String,
        ValueType::Array,
        ValueType::U64,
        ValueType::I64,
        ValueType::F64,
    ];

    /// The type a file means by this number; `None` outside the format.
    pub fn from_id(id: u32) -> Option<ValueType> {
        ValueType::ALL.get(usize::try_from(id).ok()?).copied()
    }

    /// Number of the type in files.
    pub fn id(self) -> u32 {
        ValueType::ALL
            .iter()
            .zip(0..)
            .find_map(|(t, id)| (*t == self).then_some(id))
            .expect("ALL lists every type")
    }

    /// Bytes of one element in an array; for strings and arrays the least an element can take.
    pub(crate) fn min_bytes(self) -> usize {
        match self {
            ValueType::U8 | ValueType::I8 | ValueType::Bool => 1,
            ValueType::U16 | ValueType::I16 => 2,
            ValueType::U32 | ValueType::I32 | ValueType::F32 => 4,
            ValueType::U64 | ValueType::I64 | ValueType::F64 | ValueType::String => 8,
            ValueType::Array => 12,
        }
    }
}

impl fmt::Display for ValueType {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&format!("{self:?}").to_lowercase())
    }
}

/// A metadata value. Numbers are widened and keep the type the file gave them.
#[derive(Clone, Debug)]
pub enum Value {
    /// An integer of `U8` to `U64`.
    Unsigned(u64, ValueType),
    /// An integer of `I8` to `I64`.
    Signed(i64, ValueType),
    /// A number of `F32` or `F64`.
    Float(f64, ValueType),
    /// A truth value.
    Bool(bool),
    /// Text, checked to be UTF-8.
    String(String),
    /// Elements that stay in the file until asked for.
    Array(Array),
}

impl Value {
    /// The type the file stores it as.
    pub fn kind(&self) -> ValueType {
        match self {
            Value::Unsigned(_, t) | Value::Signed(_, t) | Value::Float(_, t) => *t,
            Value::Bool(_) => ValueType::Bool,
            Value::String(_) => ValueType::String,
            Value::Array(_) => ValueType::Array,
        }
    }
}

impl fmt::Display for Value {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Value::Unsigned(v, _) => v.fmt(f),
            Value::Signed(v, _) => v.fmt(f),
            // F32 is stored widened; print it as the F32 it was.
            #[expect(
                clippy::cast_possible_truncation,
                reason = "the value came from an f32"
            )]
            Value::Float(v, ValueType::F32) => (*v as f32).fmt(f),
            Value::Float(v, _) => v.fmt(f),
            Value::Bool(v) => v.fmt(f),
            Value::String(v) => write!(f, "{v:?}"),
            Value::Array(v) => write!(f, "{}[{}]", v.kind, v.count),
        }
    }
}

/// The type, for messages: `u32`, `array of string`.
fn describe(value: &Value) -> String {
    match value {
        Value::Array(array) => format!("array of {}", array.kind),
        scalar => scalar.kind().to_string(),
    }
}

/// A checked array whose elements are decoded from the file's bytes as they are asked for.
#[derive(Clone)]
pub struct Array {
    pub(crate) kind: ValueType,
    pub(crate) count: usize,
    pub(crate) file: Arc<FileBytes>,
    /// The elements in the file.
    pub(crate) range: Range<usize>,
}

impl fmt::Debug for Array {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Array({}[{}])", self.kind, self.count)
    }
}

impl Array {
    /// Type of the elements.
    pub fn kind(&self) -> ValueType {
        self.kind
    }

    /// Count of the elements.
    pub fn len(&self) -> usize {
        self.count
    }

    /// True where there are no elements.
    pub fn is_empty(&self) -> bool {
        self.count == 0
    }

    /// The elements as the file holds them.
    pub(crate) fn as_bytes(&self) -> &[u8] {
        &self.file.as_slice()[self.range.clone()]
    }

    fn fixed<const N: usize>(&self) -> impl Iterator<Item = [u8; N]> + '_ {
        self.as_bytes().as_chunks().0.iter().copied()
    }

    /// The elements as integers, or `None` for another element type. Bools do not count as integers.
    pub fn integers(&self) -> Option<Vec<i128>> {
        Some(match self.kind {
            ValueType::U8 => self.fixed().map(|b| u8::from_le_bytes(b).into()).collect(),
            ValueType::I8 => self.fixed().map(|b| i8::from_le_bytes(b).into()).collect(),
            ValueType::U16 => self.fixed().map(|b| u16::from_le_bytes(b).into()).collect(),
            ValueType::I16 => self.fixed().map(|b| i16::from_le_bytes(b).into()).collect(),
            ValueType::U32 => self.fixed().map(|b| u32::from_le_bytes(b).into()).collect(),
            ValueType::I32 => self.fixed().map(|b| i32::from_le_bytes(b).into()).collect(),
            ValueType::U64 => self.fixed().map(|b| u64::from_le_bytes(b).into()).collect(),
            ValueType::I64 => self.fixed().map(|b| i64::from_le_bytes(b).into()).collect(),
            _ => return None,
        })
    }

    /// The elements as truth values, or `None` for another element type.
    pub fn bools(&self) -> Option<Vec<bool>> {
        (self.kind == ValueType::Bool).then(|| self.fixed::<1>().map(|b| b[0] != 0).collect())
    }

    /// The elements as floats, or `None` for another element type. Integers do not count as floats.
    pub fn floats(&self) -> Option<Vec<f64>> {
        Some(match self.kind {
            ValueType::F32 => self.fixed().map(|b| f32::from_le_bytes(b).into()).collect(),
            ValueType::F64 => self.fixed().map(f64::from_le_bytes).collect(),
            _ => return None,
        })
    }

    /// The elements as text, borrowed from the file; `None` for another element type.
    /// The reader has checked that each is valid UTF-8.
    pub fn strings(&self) -> Option<impl Iterator<Item = &str>> {
        if self.kind != ValueType::String {
            return None;
        }
        let mut rest = self.as_bytes();
        Some((0..self.count).map(move |_| {
            let (length, tail) = rest
                .split_first_chunk()
                .expect("the reader walked this array");
            let length =
                usize::try_from(u64::from_le_bytes(*length)).expect("checked by the reader");
            let (text, tail) = tail.split_at(length);
            rest = tail;
            str::from_utf8(text).expect("the reader checked every string")
        }))
    }
}

/// All metadata of a model, in file order.
#[derive(Clone, Debug, Default)]
pub struct Metadata {
    entries: Vec<(String, Value)>,
    index: HashMap<String, usize>,
}

impl Metadata {
    pub(crate) fn insert(&mut self, key: String, value: Value) -> Result<(), GgufError> {
        if self.index.contains_key(&key) {
            return Err(GgufError::DuplicateKey(key));
        }
        self.index.insert(key.clone(), self.entries.len());
        self.entries.push((key, value));
        Ok(())
    }

    /// Every key with its value, in file order.
    pub fn iter(&self) -> impl Iterator<Item = (&str, &Value)> {
        self.entries.iter().map(|(k, v)| (k.as_str(), v))
    }

    /// The value under a key, whatever its type.
    pub fn get(&self, key: &str) -> Option<&Value> {
        Some(&self.entries[*self.index.get(key)?].1)
    }

    /// The value under a key that must be there.
    pub fn require(&self, key: &str) -> Result<&Value, GgufError> {
        self.get(key)
            .ok_or_else(|| GgufError::MissingKey(key.to_owned()))
    }

    fn mismatch(key: &str, expected: &'static str, value: &Value) -> GgufError {
        GgufError::KeyType {
            key: key.to_owned(),
            expected,
            found: describe(value),
        }
    }

    fn integer(key: &str, value: &Value) -> Result<i128, GgufError> {
        match value {
            Value::Unsigned(v, _) => Ok((*v).into()),
            Value::Signed(v, _) => Ok((*v).into()),
            _ => Err(Metadata::mismatch(key, "an integer", value)),
        }
    }

    fn in_range<T: TryFrom<i128>>(
        key: &str,
        value: i128,
        expected: &'static str,
    ) -> Result<T, GgufError> {
        T::try_from(value).map_err(|_| GgufError::KeyRange {
            key: key.to_owned(),
            value: value.to_string(),
            expected,
        })
    }

    /// An integer of any type that fits 32 bits; `None` where the key is missing.
    pub fn u32(&self, key: &str) -> Result<Option<u32>, GgufError> {
        self.get(key)
            .map(|v| Metadata::in_range(key, Metadata::integer(key, v)?, "a 32-bit count"))
            .transpose()
    }

    /// An integer of any type that is not negative; `None` where the key is missing.
    pub fn u64(&self, key: &str) -> Result<Option<u64>, GgufError> {
        self.get(key)
            .map(|v| Metadata::in_range(key, Metadata::integer(key, v)?, "a 64-bit count"))
            .transpose()
    }

    /// A float of either width, rounded to 32 bits; `None` where the key is missing.
    pub fn f32(&self, key: &str) -> Result<Option<f32>, GgufError> {
        self.get(key)
            .map(|v| match v {
                #[expect(clippy::cast_possible_truncation, reason = "settings need no f64")]
                Value::Float(v, _) => Ok(*v as f32),
                _ => Err(Metadata::mismatch(key, "a float", v)),
            })
            .transpose()
    }

    /// A truth value; `None` where the key is missing.
    pub fn bool(&self, key: &str) -> Result<Option<bool>, GgufError> {
        self.get(key)
            .map(|v| match v {
                Value::Bool(v) => Ok(*v),
                _ => Err(Metadata::mismatch(key, "a bool", v)),
            })
            .transpose()
    }

    /// A text; `None` where the key is missing.
    pub fn str(&self, key: &str) -> Result<Option<&str>, GgufError> {
        self.get(key)
            .map(|v| match v {
                Value::String(v) => Ok(v.as_str()),
                _ => Err(Metadata::mismatch(key, "a string", v)),
            })
            .transpose()
    }

    /// An array of any element type; `None` where the key is missing.
    pub fn array(&self, key: &str) -> Result<Option<&Array>, GgufError> {
        self.get(key)
            .map(|v| match v {
                Value::Array(v) => Ok(v),
                _ => Err(Metadata::mismatch(key, "an array", v)),
            })
            .transpose()
    }

    /// An array of integers that all fit u32.
    pub fn u32_array(&self, key: &str) -> Result<Option<Vec<u32>>, GgufError> {
        let Some(array) = self.array(key)? else {
            return Ok(None);
        };
        let integers = array.integers().ok_or_else(|| GgufError::KeyType {
            key: key.to_owned(),
            expected: "an array of integers",
            found: format!("array of {}", array.kind),
        })?;
        integers
            .into_iter()
            .map(|v| Metadata::in_range(key, v, "a 32-bit count"))
            .collect::<Result<_, _>>()
            .map(Some)
    }

    /// One integer for all, or an array with one for each of `count`.
    pub fn u32_each(&self, key: &str, count: usize) -> Result<Option<Vec<u32>>, GgufError> {
        match self.get(key) {
            // Before decoding: a file may hold an array far longer than anyone asks for.
            Some(Value::Array(array)) if array.len() != count => Err(GgufError::KeyLength {
                key: key.to_owned(),
                found: array.len(),
                expected: count,
            }),
            Some(Value::Array(_)) => self.u32_array(key),
            _ => Ok(self.u32(key)?.map(|value| vec![value; count])),
        }
    }
}

#[cfg(test)]
mod tests;
