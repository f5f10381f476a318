//! The writer against the reader: all that goes in comes back.

use super::*;
use crate::{Gguf, quant::random_blocks, reader::tests::Raw};

#[test]
fn fields_come_back_as_written() {
    let mut writer = Writer::default();
    writer.field("u32", &Field::U32(7));
    writer.field("i32", &Field::I32(-7));
    writer.field("f32", &Field::F32(0.1));
    writer.field("bool", &Field::Bool(true));
    writer.field("str", &Field::Str("▁text"));
    writer.field("u32s", &Field::U32s(&[1, 2]));
    writer.field("i32s", &Field::I32s(&[-1, 2]));
    writer.field("f32s", &Field::F32s(&[0.5]));
    writer.field("bools", &Field::Bools(&[true, false]));
    writer.field("strs", &Field::Strs(&["a", "", "b"]));
    let mut out = Vec::new();
    writer.write_head(&mut out).unwrap();
    assert!(out.len().is_multiple_of(ALIGNMENT));

    let gguf = Gguf::from_bytes("m", out).unwrap();
    let m = gguf.metadata();
    let printed: Vec<String> = m.iter().map(|(key, v)| format!("{key}={v}")).collect();
    assert_eq!(
        printed.join(" "),
        "u32=7 i32=-7 f32=0.1 bool=true str=\"▁text\" u32s=u32[2] i32s=i32[2] f32s=f32[1] bools=bool[2] strs=string[3]"
    );
    let array = |key| m.array(key).unwrap().unwrap();
    assert_eq!(array("u32s").integers(), Some(vec![1, 2]));
    assert_eq!(array("i32s").integers(), Some(vec![-1, 2]));
    assert_eq!(array("f32s").floats(), Some(vec![0.5]));
    assert_eq!(array("bools").bools(), Some(vec![true, false]));
    let strings: Vec<&str> = array("strs").strings().unwrap().collect();
    assert_eq!(strings, ["a", "", "b"]);
}

#[test]
fn tensors_of_every_format_come_back_as_written() {
    let mut writer = Writer::default();
    let blocks: Vec<Vec<u8>> = QuantType::all()
        .map(|quant| {
            // Three rows of one block: most end between two multiples of the alignment.
            let bytes = writer.tensor(quant.name(), &[quant.block_len(), 3], quant);
            let mut blocks = vec![0; bytes];
            random_blocks(quant, 1, 1.0, &mut blocks);
            blocks
        })
        .collect();
    let mut out = Vec::new();
    writer.write_head(&mut out).unwrap();
    for blocks in &blocks {
        write_tensor(&mut out, blocks).unwrap();
    }
    let gguf = Gguf::from_bytes("m", out).unwrap();
    for (quant, blocks) in QuantType::all().zip(&blocks) {
        let tensor = gguf.tensor(quant.name()).unwrap().unwrap();
        assert_eq!(tensor.quant, quant);
        assert_eq!(tensor.info.shape, [quant.block_len(), 3]);
        assert_eq!(tensor.bytes, blocks, "{quant}");
    }
}

#[test]
fn copied_entries_are_the_same_bytes() {
    let original = Raw::head(0, 13)
        .key("u8", ValueType::U8)
        .bytes(&[255])
        .key("i8", ValueType::I8)
        .bytes(&[255])
        .key("u16", ValueType::U16)
        .bytes(&[254, 255])
        .key("i16", ValueType::I16)
        .bytes(&[254, 255])
        .key("u32", ValueType::U32)
        .u32(u32::MAX)
        .key("i32", ValueType::I32)
        .u32(u32::MAX)
        .key("f32", ValueType::F32)
        .bytes(&0.1f32.to_le_bytes())
        .key("bool", ValueType::Bool)
        .bytes(&[1])
        .key("string", ValueType::String)
        .str("▁")
        .array("nested", ValueType::Array, 1)
        .u32(ValueType::String.id())
        .u64(2)
        .str("one")
        .str("two")
        .key("u64", ValueType::U64)
        .u64(u64::MAX)
        .key("i64", ValueType::I64)
        .u64(u64::MAX)
        .key("f64", ValueType::F64)
        .bytes(&0.1f64.to_le_bytes())
        .data(0);
    let gguf = Gguf::from_bytes("m", original.0.clone()).unwrap();
    let mut writer = Writer::default();
    for (key, value) in gguf.metadata().iter() {
        writer.copy(key, value);
    }
    let mut copy = Vec::new();
    writer.write_head(&mut copy).unwrap();
    assert_eq!(copy, original.0);
}
