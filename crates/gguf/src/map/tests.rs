//! Opening: single files, files in parts, and what is wrong with either.

use std::fs;

use super::*;
use crate::{
    reader::tests::Raw,
    value::ValueType,
    writer::{Field, Writer, write_tensor},
};

/// A file with one F32 vector a name, all of its values `fill`.
fn file(fields: &[(&str, u32)], names: &[&str], fill: f32) -> Vec<u8> {
    let mut writer = Writer::default();
    for &(key, value) in fields {
        writer.field(key, &Field::U32(value));
    }
    for name in names {
        writer.tensor(name, &[4], QuantType::F32);
    }
    let mut out = Vec::new();
    writer.write_head(&mut out).unwrap();
    for _ in names {
        write_tensor(&mut out, &fill.to_le_bytes().repeat(4)).unwrap();
    }
    out
}

fn part(number: u32, count: u32, names: &[&str], tensors: u32) -> Vec<u8> {
    let fields = [
        ("split.no", number),
        ("split.count", count),
        ("split.tensors.count", tensors),
    ];
    file(&fields, names, 1.0 + number as f32)
}

fn message(result: Result<Gguf, GgufError>, folder: &Path) -> String {
    let Err(error) = result else {
        panic!("the file is wrong")
    };
    let folder = format!("{}{}", folder.display(), std::path::MAIN_SEPARATOR);
    error.to_string().replace(&folder, "")
}

#[test]
fn parts_are_one_directory() {
    let folder = tempfile::tempdir().unwrap();
    let path = |n: u32| folder.path().join(format!("m-{n:05}-of-00003.gguf"));
    for (n, names) in [(1, &["a", "b"][..]), (2, &["c"]), (3, &["d"])] {
        fs::write(path(n), part(n - 1, 3, names, 4)).unwrap();
    }
    let gguf = Gguf::open(&path(1)).unwrap();
    let names: Vec<&str> = gguf.tensors().map(|t| t.name.as_str()).collect();
    assert_eq!(names, ["a", "b", "c", "d"]);
    assert_eq!(
        gguf.tensor("d").unwrap().unwrap().bytes,
        3f32.to_le_bytes().repeat(4)
    );
    assert_eq!(gguf.path(), path(1));
    let sizes = (1..=3).map(|n| fs::metadata(path(n)).unwrap().len());
    assert_eq!(gguf.file_bytes() as u64, sizes.sum::<u64>());

    assert_eq!(
        message(Gguf::open(&path(2)), folder.path()),
        "`m-00002-of-00003.gguf` is part 2 of 3; open part 1 and keep all parts beside it"
    );
    fs::write(path(3), part(2, 3, &["d", "e"], 4)).unwrap();
    assert_eq!(
        message(Gguf::open(&path(1)), folder.path()),
        "the parts hold 5 tensors, split.tensors.count says 4"
    );
    fs::write(path(3), part(2, 3, &["b"], 4)).unwrap();
    assert_eq!(
        message(Gguf::open(&path(1)), folder.path()),
        "tensor `b` appears twice"
    );
    fs::write(path(3), part(1, 3, &["d"], 4)).unwrap();
    assert_eq!(
        message(Gguf::open(&path(1)), folder.path()),
        "`m-00003-of-00003.gguf` says it is part 2 of 3; the parts are mixed up"
    );
    fs::remove_file(path(3)).unwrap();
    assert!(
        message(Gguf::open(&path(1)), folder.path())
            .starts_with("cannot read `m-00003-of-00003.gguf`")
    );
}

#[test]
fn renamed_part_cannot_find_the_others() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("model.gguf");
    // As many parts as a number can say: the first missing one ends the search.
    fs::write(&path, part(0, u32::MAX, &["a"], 1)).unwrap();
    assert_eq!(
        message(Gguf::open(&path), folder.path()),
        "the file name `model.gguf` does not end in -00001-of-4294967295.gguf, so its other parts cannot be found"
    );
}

#[test]
fn what_is_no_file_at_all() {
    let folder = tempfile::tempdir().unwrap();
    assert!(
        message(Gguf::open(&folder.path().join("absent")), folder.path())
            .starts_with("cannot read `absent`")
    );
    assert!(matches!(
        Gguf::open(folder.path()),
        Err(GgufError::NotAFile { .. })
    ));
    let empty = folder.path().join("empty");
    fs::write(&empty, "").unwrap();
    assert_eq!(
        message(Gguf::open(&empty), folder.path()),
        "not a GGUF file: its first bytes are [], expected \"GGUF\""
    );
}

#[test]
fn tensors_of_unknown_type_fail_when_asked_for() {
    let bytes = Raw::head(2, 0)
        .tensor("new", &[7], 15, 0)
        .tensor("known", &[8], 0, 0)
        .data(32);
    let gguf = Gguf::from_bytes("m", bytes.0).unwrap();
    assert_eq!(gguf.tensor("known").unwrap().unwrap().bytes.len(), 32);
    assert!(gguf.tensor("absent").unwrap().is_none());
    let error = gguf.tensor("new").err().expect("unknown").to_string();
    assert_eq!(
        error,
        "tensor `new` has type 15 (Q8_K), which is not supported; use a file quantized to one of \
         F32 F16 BF16 Q4_0 Q4_1 Q5_0 Q5_1 Q8_0 Q2_K Q3_K Q4_K Q5_K Q6_K IQ4_NL IQ4_XS MXFP4 \
         NVFP4 IQ2_XXS IQ2_XS IQ2_S IQ3_XXS IQ3_S IQ1_S IQ1_M TQ1_0 TQ2_0 Q1_0"
    );
    assert!(gguf.tensor_bytes(0).is_empty());
}

#[test]
fn split_fields_must_be_numbers() {
    let bytes = Raw::head(0, 1)
        .key("split.count", ValueType::String)
        .str("2");
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("m.gguf");
    fs::write(&path, bytes.0).unwrap();
    assert_eq!(
        message(Gguf::open(&path), folder.path()),
        "metadata key `split.count`: expected an integer, found string"
    );
}

#[test]
fn a_file_that_is_cut_short_reads_as_zeros_and_says_so() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("model.gguf");
    let names: Vec<String> = (0..2000).map(|n| format!("t{n}")).collect();
    let names: Vec<&str> = names.iter().map(String::as_str).collect();
    fs::write(&path, file(&[], &names, 1.0)).unwrap();
    let gguf = Gguf::open(&path).unwrap();
    let last = gguf.tensor("t1999").unwrap().unwrap().bytes;
    assert_eq!(last, 1f32.to_le_bytes().repeat(4));
    assert!(gguf.check_unchanged().is_ok());

    let file = fs::File::options().write(true).open(&path).unwrap();
    file.set_len(100).unwrap();
    // Nobody has met what is gone yet.
    assert!(gguf.check_read().is_ok());
    assert_eq!(last, [0; 16]);
    let error = gguf.check_read().unwrap_err().to_string();
    assert!(error.contains("model.gguf` was changed"), "{error}");
    assert!(gguf.check_unchanged().is_err());
}

#[test]
fn a_file_that_is_written_to_is_another_one() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("model.gguf");
    fs::write(&path, file(&[], &["a"], 1.0)).unwrap();
    let gguf = Gguf::open(&path).unwrap();
    assert!(gguf.check_unchanged().is_ok());
    let file = fs::File::options().write(true).open(&path).unwrap();
    let later = std::time::SystemTime::now() + std::time::Duration::from_secs(5);
    file.set_modified(later).unwrap();
    assert!(gguf.check_unchanged().is_err());
    assert!(gguf.check_read().is_ok());
}

#[test]
fn what_is_no_file_is_named_without_waiting() {
    let folder = tempfile::tempdir().unwrap();
    let pipe = folder.path().join("pipe");
    let made = std::process::Command::new("mkfifo").arg(&pipe).status();
    assert!(made.unwrap().success());
    for (path, kind) in [
        (pipe.as_path(), "a pipe"),
        (Path::new("/dev/null"), "a device"),
        (folder.path(), "a folder"),
    ] {
        let error = Gguf::open(path).err().unwrap().to_string();
        assert!(error.contains(kind), "{error}");
    }
}
