//! Files put together field by field: what is read from right ones, and what is said about wrong ones.

use super::*;

/// A file under construction; nothing stops it from being wrong.
#[derive(Clone)]
pub(crate) struct Raw(pub(crate) Vec<u8>);

impl Raw {
    pub(crate) fn head(tensors: u64, entries: u64) -> Raw {
        Raw(b"GGUF".to_vec()).u32(3).u64(tensors).u64(entries)
    }

    pub(crate) fn bytes(mut self, bytes: &[u8]) -> Raw {
        self.0.extend(bytes);
        self
    }

    pub(crate) fn u32(self, value: u32) -> Raw {
        self.bytes(&value.to_le_bytes())
    }

    pub(crate) fn u64(self, value: u64) -> Raw {
        self.bytes(&value.to_le_bytes())
    }

    pub(crate) fn str(self, text: &str) -> Raw {
        self.u64(text.len() as u64).bytes(text.as_bytes())
    }

    /// A metadata entry up to its value.
    pub(crate) fn key(self, key: &str, kind: ValueType) -> Raw {
        self.str(key).u32(kind.id())
    }

    /// An array entry up to its elements.
    pub(crate) fn array(self, key: &str, kind: ValueType, count: u64) -> Raw {
        self.key(key, ValueType::Array).u32(kind.id()).u64(count)
    }

    pub(crate) fn tensor(self, name: &str, shape: &[u64], type_id: u32, offset: u64) -> Raw {
        let dimensions = u32::try_from(shape.len()).unwrap();
        let raw = self.str(name).u32(dimensions);
        let raw = shape.iter().fold(raw, |raw, &size| raw.u64(size));
        raw.u32(type_id).u64(offset)
    }

    /// The padding before the data, then `count` bytes of it.
    pub(crate) fn data(mut self, count: usize) -> Raw {
        let padded = self.0.len().next_multiple_of(32);
        self.0.resize(padded + count, 0);
        self
    }

    fn parse(self) -> Result<Header, GgufError> {
        Header::parse(&Arc::new(self.0.into()))
    }

    fn error(self) -> String {
        self.parse().expect_err("the file is wrong").to_string()
    }
}

/// Two F32 vectors of 8, one after the other.
fn two_vectors() -> Raw {
    Raw::head(2, 0)
        .tensor("a", &[8], 0, 0)
        .tensor("b", &[8], 0, 32)
        .data(64)
}

#[test]
fn tensors_are_placed_after_the_padding() {
    let header = two_vectors().parse().unwrap();
    assert_eq!(header.version, 3);
    let [a, b] = &header.tensors[..] else {
        panic!("two tensors")
    };
    assert_eq!((a.start, a.bytes), (header.data_start, 32));
    assert_eq!((b.start, b.bytes), (header.data_start + 32, 32));
    assert!(header.data_start.is_multiple_of(32));
}

#[test]
fn version_2_reads_like_version_3() {
    let mut file = two_vectors();
    file.0[4] = 2;
    assert_eq!(file.parse().unwrap().tensors.len(), 2);
}

#[test]
fn alignment_of_the_file_moves_the_data() {
    let mut file = Raw::head(1, 1)
        .key("general.alignment", ValueType::U32)
        .u32(1024)
        .tensor("a", &[1], 0, 0);
    file.0.resize(1028, 0);
    assert_eq!(file.parse().unwrap().tensors[0].start, 1024);
}

#[test]
fn file_without_tensors_may_end_before_the_padding() {
    assert!(Raw::head(0, 0).parse().unwrap().tensors.is_empty());
}

#[test]
fn unknown_tensor_type_is_kept_for_whoever_asks() {
    let header = Raw::head(1, 0).tensor("a", &[7], 99, 0).data(0);
    let header = header.parse().unwrap();
    assert_eq!(
        (header.tensors[0].quant, header.tensors[0].bytes),
        (Err(99), 0)
    );
}

#[test]
fn wrong_beginnings() {
    let file = |bytes: &[u8]| Raw(bytes.to_vec());
    assert_eq!(
        file(b"PK\x03\x04more").error(),
        "not a GGUF file: its first bytes are [50, 4b, 03, 04], expected \"GGUF\""
    );
    assert_eq!(
        file(b"GG").error(),
        "not a GGUF file: its first bytes are [47, 47], expected \"GGUF\""
    );
    for version in [0, 1, 4, 0x0400_0000] {
        assert_eq!(
            file(b"GGUF").u32(version).error(),
            format!("GGUF version {version} is not supported (2 and 3 are)")
        );
    }
    assert_eq!(
        file(b"GGUF\0\0\0\x03").error(),
        "the file is big-endian; convert it to little-endian"
    );
    assert_eq!(
        file(b"GGUF\x03\0\0\0\x01").error(),
        "the file ends at byte 9 inside the tensor count, which needs 8 bytes at 8; it is truncated or damaged"
    );
}

#[test]
fn impossible_counts() {
    assert_eq!(
        Raw::head(0, u64::MAX).error(),
        "the metadata says 18446744073709551615 entries, more than the 0 bytes left in the file can hold"
    );
    assert_eq!(
        Raw::head(2, 0).tensor("a", &[1], 0, 0).error(),
        "the tensor directory says 2 entries, more than the 33 bytes left in the file can hold"
    );
    assert_eq!(
        Raw::head(0, 1).array("k", ValueType::U64, 1 << 61).error(),
        "metadata key `k` says 2305843009213693952 entries, more than the 0 bytes left in the file can hold"
    );
}

#[test]
fn broken_metadata() {
    let entry = || Raw::head(0, 1);
    let nested = |raw: Raw, depth| (1..depth).fold(raw, |raw, _| raw.u32(9).u64(1));
    let cases = [
        (
            entry().u64(u64::MAX).data(8),
            "the file ends at byte 40 inside a metadata key, which needs 18446744073709551615 bytes at 32; \
             it is truncated or damaged",
        ),
        (
            entry().u64(2).bytes(b"\xff\xfe").data(8),
            "a metadata key is not valid UTF-8",
        ),
        (
            entry().str("key").u32(13).data(8),
            "metadata key `key` has unknown value type 13",
        ),
        (
            entry().key("k", ValueType::U64).bytes(&[0; 7]),
            "the file ends at byte 44 inside metadata key `k`, which needs 8 bytes at 37; \
             it is truncated or damaged",
        ),
        (
            entry().key("k", ValueType::Bool).bytes(&[2]),
            "metadata key `k` holds 2, which is not a bool (0 or 1)",
        ),
        (
            entry().array("k", ValueType::Bool, 2).bytes(&[1, 7]),
            "metadata key `k` holds 7, which is not a bool (0 or 1)",
        ),
        (
            entry().key("k", ValueType::String).u64(1).bytes(b"\xff"),
            "metadata key `k` is not valid UTF-8",
        ),
        (
            entry()
                .array("k", ValueType::String, 1)
                .u64(1)
                .bytes(b"\xff"),
            "metadata key `k` is not valid UTF-8",
        ),
        (
            nested(entry().array("k", ValueType::Array, 1), 9),
            "metadata key `k` is an array of arrays nested more than 4 deep",
        ),
        (
            Raw::head(0, 2)
                .key("k", ValueType::U32)
                .u32(0)
                .key("k", ValueType::U32)
                .u32(0),
            "metadata key `k` appears twice",
        ),
    ];
    for (file, message) in cases {
        assert_eq!(file.error(), message);
    }
}

#[test]
fn arrays_nest_as_deep_as_allowed() {
    let file = Raw::head(0, 1)
        .array("k", ValueType::Array, 2)
        .u32(ValueType::Array.id())
        .u64(1)
        .u32(ValueType::String.id())
        .u64(1)
        .str("inside")
        .u32(ValueType::U8.id())
        .u64(0);
    let metadata = file.parse().unwrap().metadata;
    let array = metadata.array("k").unwrap().unwrap();
    assert_eq!((array.kind(), array.len()), (ValueType::Array, 2));
    assert!(array.strings().is_none() && array.integers().is_none());
}

#[test]
fn bad_alignment() {
    for alignment in [0, 3, 131_072] {
        assert_eq!(
            Raw::head(0, 1)
                .key("general.alignment", ValueType::U32)
                .u32(alignment)
                .error(),
            format!(
                "general.alignment is {alignment}; it must be a power of two between 1 and 65536"
            )
        );
    }
}

#[test]
fn broken_tensor_directory() {
    let one = |shape: &[u64], type_id, offset| {
        Raw::head(1, 0).tensor("t", shape, type_id, offset).data(64)
    };
    let cases = [
        (
            one(&[], 0, 0),
            "tensor `t` has 0 dimensions; 1 to 4 are allowed",
        ),
        (
            one(&[1; 5], 0, 0),
            "tensor `t` has 5 dimensions; 1 to 4 are allowed",
        ),
        (
            one(&[0, 4], 0, 0),
            "tensor `t` has shape [0, 4], which is empty or too large to address",
        ),
        (
            one(&[1 << 32, 1 << 32], 0, 0),
            "tensor `t` has shape [4294967296, 4294967296], which is empty or too large to address",
        ),
        (
            // The element count fits 64 bits, the bytes do not.
            one(&[1 << 62], 0, 0),
            "tensor `t` has shape [4611686018427387904], which is empty or too large to address",
        ),
        (
            one(&[33], 2, 0),
            "tensor `t`: rows of 33 values do not divide into Q4_0 blocks of 32",
        ),
        (
            one(&[8], 0, 33),
            "tensor `t`: offset 33 is not a multiple of the file's alignment 32",
        ),
        (
            one(&[8], 0, 64),
            "tensor `t` lies at bytes 128..160 of its file, which ends at 128; it is truncated or damaged",
        ),
        (
            one(&[8], 0, u64::MAX - 31),
            "tensor `t` lies at bytes 18446744073709551615..18446744073709551615 of its file, which ends at 128; \
             it is truncated or damaged",
        ),
        (
            Raw::head(2, 0)
                .tensor("t", &[8], 0, 0)
                .tensor("t", &[8], 0, 32)
                .data(64),
            "tensor `t` appears twice",
        ),
        (
            Raw::head(2, 0)
                .tensor("a", &[16], 0, 0)
                .tensor("b", &[8], 0, 32)
                .data(64),
            "tensors `a` and `b` overlap in the file",
        ),
    ];
    for (file, message) in cases {
        assert_eq!(file.error(), message);
    }
}

#[test]
fn every_prefix_of_a_file_is_refused() {
    let file = Raw::head(1, 2)
        .array("words", ValueType::String, 2)
        .str("one")
        .str("two")
        .key("n", ValueType::F64)
        .bytes(&1.5f64.to_le_bytes())
        .tensor("a", &[4, 2], 0, 0)
        .data(32);
    assert!(file.clone().parse().is_ok());
    for length in 0..file.0.len() {
        let prefix = Raw(file.0[..length].to_vec());
        assert!(prefix.parse().is_err(), "the first {length} bytes");
    }
}
