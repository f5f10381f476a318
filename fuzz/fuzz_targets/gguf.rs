//! Any bytes as a GGUF file: reading must not panic, and what is accepted must be usable to the last byte.
#![no_main]

use carat_gguf::{Gguf, Value, writer::Writer};
use libfuzzer_sys::fuzz_target;

fuzz_target!(|bytes: &[u8]| {
    let Ok(gguf) = Gguf::from_bytes("fuzz", bytes.to_vec()) else {
        return;
    };
    let mut copy = Writer::default();
    for (key, value) in gguf.metadata().iter() {
        let _ = (value.to_string(), gguf.metadata().u32_each(key, 4));
        copy.copy(key, value);
        if let Value::Array(array) = value {
            let _ = (array.integers(), array.floats(), array.bools());
            if let Some(strings) = array.strings() {
                assert_eq!(strings.count(), array.len());
            }
        }
    }
    for (index, info) in gguf.tensors().enumerate() {
        let bytes = gguf.tensor_bytes(index);
        if let Ok(quant) = info.quant {
            let mut values = vec![0.0; info.shape.iter().product()];
            quant.dequantize(bytes, &mut values);
        }
    }
    let mut head = Vec::new();
    copy.write_head(&mut head).expect("memory takes all writes");
    let again = Gguf::from_bytes("copy", head).expect("a copy of good metadata is good");
    assert_eq!(again.metadata().iter().count(), gguf.metadata().iter().count());
});
