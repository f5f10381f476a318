//! No bytes make the reader panic: random ones, and a valid file with something changed.

use carat_gguf::{
    Gguf, QuantType, Value,
    writer::{Field, Writer, write_tensor},
};
use proptest::prelude::*;

/// A file with an entry of most kinds and a few tensors.
fn valid() -> Vec<u8> {
    let mut writer = Writer::default();
    writer.field("general.architecture", &Field::Str("gemma4"));
    writer.field("general.alignment", &Field::U32(32));
    writer.field("layers", &Field::U32(2));
    writer.field("eps", &Field::F32(1e-6));
    writer.field("pattern", &Field::Bools(&[true, false]));
    writer.field("widths", &Field::I32s(&[64, 128]));
    writer.field("scores", &Field::F32s(&[0.0, -1.0]));
    writer.field("tokens", &Field::Strs(&["<pad>", "▁the", ""]));
    let tensors = [
        ("norm", QuantType::F32, &[8][..]),
        ("q", QuantType::Q4_0, &[32, 2]),
        ("experts", QuantType::Q8_0, &[32, 2, 2]),
        ("down", QuantType::Q4_K, &[256, 1]),
    ];
    let sizes = tensors.map(|(name, quant, shape)| writer.tensor(name, shape, quant));
    let mut out = Vec::new();
    writer.write_head(&mut out).unwrap();
    for size in sizes {
        write_tensor(&mut out, &vec![0x11; size]).unwrap();
    }
    out
}

/// Reads a file and, if it is accepted, everything in it.
fn read(bytes: Vec<u8>) -> bool {
    let Ok(gguf) = Gguf::from_bytes("mutated", bytes) else {
        return false;
    };
    for (key, value) in gguf.metadata().iter() {
        assert!(gguf.metadata().get(key).is_some());
        let _ = (value.to_string(), gguf.metadata().u32_each(key, 2));
        if let Value::Array(array) = value {
            assert_eq!(
                array.strings().map_or(array.len(), Iterator::count),
                array.len()
            );
            assert_eq!(
                array.integers().map_or(array.len(), |v| v.len()),
                array.len()
            );
            assert_eq!(array.floats().map_or(array.len(), |v| v.len()), array.len());
            assert_eq!(array.bools().map_or(array.len(), |v| v.len()), array.len());
        }
    }
    for (index, info) in gguf.tensors().enumerate() {
        let bytes = gguf.tensor_bytes(index);
        if let Ok(quant) = info.quant {
            let mut values = vec![0.0; info.shape.iter().product()];
            quant.dequantize(bytes, &mut values);
        }
        assert_eq!(gguf.tensor(&info.name).is_ok(), info.quant.is_ok());
    }
    true
}

#[derive(Clone, Debug)]
enum Change {
    Truncate(prop::sample::Index),
    Flip(prop::sample::Index, u8),
    Overwrite(prop::sample::Index, u8),
    /// Replaces 8 bytes, as wide as the file's counts, lengths and offsets.
    Number(prop::sample::Index, u64),
    Insert(prop::sample::Index, Vec<u8>),
    Remove(prop::sample::Index, usize),
}

impl Change {
    fn apply(&self, bytes: &mut Vec<u8>) {
        if bytes.is_empty() {
            return;
        }
        match self {
            Change::Truncate(at) => bytes.truncate(at.index(bytes.len())),
            Change::Flip(at, bit) => {
                let at = at.index(bytes.len());
                bytes[at] ^= 1 << bit;
            }
            Change::Overwrite(at, value) => {
                let at = at.index(bytes.len());
                bytes[at] = *value;
            }
            Change::Number(at, value) => {
                let at = at.index(bytes.len());
                for (byte, new) in bytes[at..].iter_mut().zip(value.to_le_bytes()) {
                    *byte = new;
                }
            }
            Change::Insert(at, new) => {
                let at = at.index(bytes.len());
                bytes.splice(at..at, new.iter().copied());
            }
            Change::Remove(at, count) => {
                let at = at.index(bytes.len());
                let end = bytes.len().min(at + count);
                bytes.drain(at..end);
            }
        }
    }
}

fn change() -> impl Strategy<Value = Change> {
    let at = any::<prop::sample::Index>;
    let number = prop_oneof![
        any::<u64>(),
        0..64u64,
        (0..64u32).prop_map(|bit| 1 << bit),
        (0..64u64).prop_map(|n| u64::MAX - n),
    ];
    prop_oneof![
        at().prop_map(Change::Truncate),
        (at(), 0..8u8).prop_map(|(at, bit)| Change::Flip(at, bit)),
        (at(), any::<u8>()).prop_map(|(at, value)| Change::Overwrite(at, value)),
        (at(), number).prop_map(|(at, value)| Change::Number(at, value)),
        (at(), prop::collection::vec(any::<u8>(), 1..32)).prop_map(|(at, v)| Change::Insert(at, v)),
        (at(), 1..32usize).prop_map(|(at, count)| Change::Remove(at, count)),
    ]
}

#[test]
fn unchanged_file_is_read() {
    assert!(read(valid()));
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 4096, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn random_bytes_never_panic(bytes in prop::collection::vec(any::<u8>(), 0..512)) {
        read(bytes);
    }

    #[test]
    fn random_bytes_after_a_good_start_never_panic(
        (tensors, entries) in (0..4u64, 0..4u64),
        bytes in prop::collection::vec(prop_oneof![Just(0), 0..16u8, any::<u8>()], 0..512),
    ) {
        let start = [&b"GGUF\x03\0\0\0"[..], &tensors.to_le_bytes(), &entries.to_le_bytes()].concat();
        read([start, bytes].concat());
    }

    #[test]
    fn changed_files_never_panic(changes in prop::collection::vec(change(), 1..6)) {
        let mut bytes = valid();
        for change in &changes {
            change.apply(&mut bytes);
        }
        read(bytes);
    }

    #[test]
    fn changed_numbers_in_the_head_never_panic(at in 8..560usize, value in any::<u64>(), shift in 0..64u32) {
        let mut bytes = valid();
        bytes[at..at + 8].copy_from_slice(&(value >> shift).to_le_bytes());
        read(bytes);
    }
}
