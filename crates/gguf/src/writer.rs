//! Writes GGUF files: for synthetic models and for the tiny ones that tests use.
//!
//! Tensor data is streamed: the directory goes out first, from sizes alone, then each tensor's bytes in order, so a
//! model larger than memory can be written.

use std::io::{self, Write};

use crate::{QuantType, Value, ValueType};

const ALIGNMENT: usize = 32;

/// Collects metadata and the tensor directory, then writes the file's head.
#[derive(Default)]
pub struct Writer {
    entries: Vec<u8>,
    entry_count: u64,
    directory: Vec<u8>,
    tensor_count: u64,
    data_bytes: usize,
}

/// A metadata value to write, in the types that model files use.
#[derive(Clone, Debug)]
pub enum Field<'a> {
    /// A count.
    U32(u32),
    /// A signed number.
    I32(i32),
    /// A setting such as an epsilon.
    F32(f32),
    /// A truth value.
    Bool(bool),
    /// A text.
    Str(&'a str),
    /// An array of counts.
    U32s(&'a [u32]),
    /// An array of signed numbers.
    I32s(&'a [i32]),
    /// An array of floats.
    F32s(&'a [f32]),
    /// An array of truth values.
    Bools(&'a [bool]),
    /// An array of texts, such as a vocabulary.
    Strs(&'a [&'a str]),
}

impl Writer {
    /// Adds a metadata entry. Keys must be distinct: the reader refuses a file that repeats one.
    pub fn field(&mut self, key: &str, value: &Field<'_>) {
        put_str(&mut self.entries, key);
        put_field(&mut self.entries, value);
        self.entry_count += 1;
    }

    /// Repeats an entry of another file, type for type.
    pub fn copy(&mut self, key: &str, value: &Value) {
        put_str(&mut self.entries, key);
        put_type(&mut self.entries, value.kind());
        put_value(&mut self.entries, value);
        self.entry_count += 1;
    }

    /// Announces a tensor, fastest dimension first, whose rows must fill whole blocks.
    /// Returns the bytes its data will take.
    pub fn tensor(&mut self, name: &str, shape: &[usize], quant: QuantType) -> usize {
        put_str(&mut self.directory, name);
        put_u32(&mut self.directory, shape.len());
        for &size in shape {
            put_u64(&mut self.directory, size);
        }
        self.directory.extend(quant.id().to_le_bytes());
        put_u64(&mut self.directory, self.data_bytes);
        self.tensor_count += 1;
        let bytes = quant.row_bytes(shape[0]) * shape[1..].iter().product::<usize>();
        self.data_bytes += bytes.next_multiple_of(ALIGNMENT);
        bytes
    }

    /// Writes everything before the tensor data. The data must follow with [`write_tensor`], in the announced order.
    pub fn write_head(&self, out: &mut dyn Write) -> io::Result<()> {
        out.write_all(b"GGUF")?;
        out.write_all(&3u32.to_le_bytes())?;
        out.write_all(&self.tensor_count.to_le_bytes())?;
        out.write_all(&self.entry_count.to_le_bytes())?;
        out.write_all(&self.entries)?;
        out.write_all(&self.directory)?;
        let head = 4 + 4 + 8 + 8 + self.entries.len() + self.directory.len();
        pad(out, head)
    }
}

/// Writes one tensor's bytes and the padding after them.
pub fn write_tensor(out: &mut dyn Write, bytes: &[u8]) -> io::Result<()> {
    out.write_all(bytes)?;
    pad(out, bytes.len())
}

/// Writes the zeros that must follow `written` bytes of tensor data.
pub fn pad(out: &mut dyn Write, written: usize) -> io::Result<()> {
    let missing = written.next_multiple_of(ALIGNMENT) - written;
    out.write_all(&[0; ALIGNMENT][..missing])
}

fn put_u32(out: &mut Vec<u8>, value: usize) {
    let value = u32::try_from(value).expect("dimension counts are small");
    out.extend(value.to_le_bytes());
}

fn put_u64(out: &mut Vec<u8>, value: usize) {
    out.extend((value as u64).to_le_bytes());
}

fn put_str(out: &mut Vec<u8>, text: &str) {
    put_u64(out, text.len());
    out.extend(text.as_bytes());
}

fn put_type(out: &mut Vec<u8>, kind: ValueType) {
    out.extend(kind.id().to_le_bytes());
}

fn put_field(out: &mut Vec<u8>, field: &Field<'_>) {
    let scalar = |out: &mut Vec<u8>, kind, bytes: &[u8]| {
        put_type(out, kind);
        out.extend(bytes);
    };
    match field {
        Field::U32(v) => scalar(out, ValueType::U32, &v.to_le_bytes()),
        Field::I32(v) => scalar(out, ValueType::I32, &v.to_le_bytes()),
        Field::F32(v) => scalar(out, ValueType::F32, &v.to_le_bytes()),
        Field::Bool(v) => scalar(out, ValueType::Bool, &[u8::from(*v)]),
        Field::Str(v) => {
            put_type(out, ValueType::String);
            put_str(out, v);
        }
        Field::U32s(v) => put_array(out, ValueType::U32, v, |out, x| out.extend(x.to_le_bytes())),
        Field::I32s(v) => put_array(out, ValueType::I32, v, |out, x| out.extend(x.to_le_bytes())),
        Field::F32s(v) => put_array(out, ValueType::F32, v, |out, x| out.extend(x.to_le_bytes())),
        Field::Bools(v) => put_array(out, ValueType::Bool, v, |out, x| out.push(u8::from(*x))),
        Field::Strs(v) => put_array(out, ValueType::String, v, |out, x| put_str(out, x)),
    }
}

/// A value of another file, without its type.
fn put_value(out: &mut Vec<u8>, value: &Value) {
    match value {
        // Widened when read; the low bytes are what the file held.
        Value::Unsigned(v, kind) => out.extend(&v.to_le_bytes()[..kind.min_bytes()]),
        Value::Signed(v, kind) => out.extend(&v.to_le_bytes()[..kind.min_bytes()]),
        #[expect(
            clippy::cast_possible_truncation,
            reason = "the value came from an f32"
        )]
        Value::Float(v, ValueType::F32) => out.extend((*v as f32).to_le_bytes()),
        Value::Float(v, _) => out.extend(v.to_le_bytes()),
        Value::Bool(v) => out.push(u8::from(*v)),
        Value::String(v) => put_str(out, v),
        Value::Array(v) => {
            put_type(out, v.kind());
            put_u64(out, v.len());
            out.extend(v.as_bytes());
        }
    }
}

fn put_array<T>(out: &mut Vec<u8>, kind: ValueType, items: &[T], put: impl Fn(&mut Vec<u8>, &T)) {
    put_type(out, ValueType::Array);
    put_type(out, kind);
    put_u64(out, items.len());
    for item in items {
        put(out, item);
    }
}

#[cfg(test)]
mod tests;
