//! Typed getters: what they accept, and what they say about the rest.

use super::*;
use crate::{Header, reader::tests::Raw};

/// One entry of each kind, and arrays of some.
fn sample() -> Metadata {
    let file = Raw::head(0, 10)
        .key("u8", ValueType::U8)
        .bytes(&[200])
        .key("i16", ValueType::I16)
        .bytes(&(-2i16).to_le_bytes())
        .key("u64", ValueType::U64)
        .u64(u64::MAX)
        .key("f32", ValueType::F32)
        .bytes(&0.1f32.to_le_bytes())
        .key("f64", ValueType::F64)
        .bytes(&0.1f64.to_le_bytes())
        .key("bool", ValueType::Bool)
        .bytes(&[1])
        .key("string", ValueType::String)
        .str("text")
        .array("i32s", ValueType::I32, 3)
        .u32(1)
        .u32(2)
        .u32(u32::MAX)
        .array("strings", ValueType::String, 2)
        .str("")
        .str("▁the")
        .array("u8s", ValueType::U8, 2)
        .bytes(&[3, 4]);
    let header = Header::parse(&Arc::new(file.0.into())).unwrap();
    header.metadata
}

fn message<T: fmt::Debug>(result: Result<T, GgufError>) -> String {
    result.expect_err("a wrong key").to_string()
}

#[test]
fn any_integer_type_serves_if_the_number_fits() {
    let m = sample();
    assert_eq!(m.u32("u8").unwrap(), Some(200));
    assert_eq!(m.u64("u64").unwrap(), Some(u64::MAX));
    assert_eq!(m.u32("absent").unwrap(), None);
    assert_eq!(
        message(m.u32("u64")),
        "metadata key `u64`: 18446744073709551615 is out of range for a 32-bit count"
    );
    assert_eq!(
        message(m.u64("i16")),
        "metadata key `i16`: -2 is out of range for a 64-bit count"
    );
}

#[test]
fn other_types_are_named_in_the_error() {
    let m = sample();
    let cases = [
        (
            message(m.u32("bool")),
            "`bool`: expected an integer, found bool",
        ),
        (message(m.f32("u8")), "`u8`: expected a float, found u8"),
        (message(m.bool("u8")), "`u8`: expected a bool, found u8"),
        (message(m.str("f32")), "`f32`: expected a string, found f32"),
        (
            message(m.str("strings")),
            "`strings`: expected a string, found array of string",
        ),
        (
            message(m.array("u64")),
            "`u64`: expected an array, found u64",
        ),
        (
            message(m.u32_array("strings")),
            "`strings`: expected an array of integers, found array of string",
        ),
    ];
    for (found, expected) in cases {
        assert_eq!(found, format!("metadata key {expected}"));
    }
    assert_eq!(
        message(m.require("absent")),
        "metadata key `absent` is missing"
    );
}

#[test]
fn floats_strings_and_bools() {
    let m = sample();
    assert_eq!(m.f32("f32").unwrap(), Some(0.1));
    assert_eq!(m.f32("f64").unwrap(), Some(0.1));
    assert_eq!(m.bool("bool").unwrap(), Some(true));
    assert_eq!(m.str("string").unwrap(), Some("text"));
}

#[test]
fn one_value_or_one_for_each() {
    let m = sample();
    assert_eq!(m.u32_each("u8", 2).unwrap(), Some(vec![200, 200]));
    assert_eq!(m.u32_each("u8s", 2).unwrap(), Some(vec![3, 4]));
    assert_eq!(m.u32_each("absent", 2).unwrap(), None);
    assert_eq!(
        message(m.u32_each("u8s", 3)),
        "metadata key `u8s` has 2 entries; expected one value for all, or 3"
    );
    assert_eq!(
        message(m.u32_each("i32s", 3)),
        "metadata key `i32s`: -1 is out of range for a 32-bit count"
    );
}

#[test]
fn arrays_decode_their_own_elements_only() {
    let m = sample();
    let array = |key| m.array(key).unwrap().unwrap();
    assert_eq!(array("u8s").integers(), Some(vec![3, 4]));
    assert_eq!(array("i32s").integers(), Some(vec![1, 2, -1]));
    assert_eq!(array("i32s").floats(), None);
    assert_eq!(array("i32s").bools(), None);
    let strings: Vec<&str> = array("strings").strings().unwrap().collect();
    assert_eq!(strings, ["", "▁the"]);
}

#[test]
fn values_print_as_the_file_holds_them() {
    let m = sample();
    let printed: Vec<String> = m.iter().map(|(key, v)| format!("{key}={v}")).collect();
    assert_eq!(
        printed.join(" "),
        "u8=200 i16=-2 u64=18446744073709551615 f32=0.1 f64=0.1 bool=true string=\"text\" \
         i32s=i32[3] strings=string[2] u8s=u8[2]"
    );
}

#[test]
fn type_ids_are_those_of_the_format() {
    for (id, kind) in (0..).zip(ValueType::ALL) {
        assert_eq!((kind.id(), ValueType::from_id(id)), (id, Some(kind)));
    }
    assert_eq!(ValueType::from_id(13), None);
}
