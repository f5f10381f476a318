//! A small file that claims to be huge costs memory in proportion to what it is, not to what it says.
//!
//! The allocator of this test counts; a count in a file that reached `with_capacity` would show at once.

use carat_gguf::Gguf;
use carat_testkit::allocation::{Counting, peak};

const FILE_BYTES: usize = 1024;
/// What a false claim may allocate: the message about it and whatever was read before.
const MAX_FOR_CLAIMS: usize = 4 * FILE_BYTES;
/// What a file full of the smallest entries may allocate while they are collected. An entry of 14 bytes is two strings, a
/// value and a place in a hash table once read, and growing tables live beside their predecessors.
const MAX_FOR_ENTRIES: usize = 24 * FILE_BYTES;

#[global_allocator]
static ALLOCATOR: Counting = Counting;

fn head(tensors: u64, entries: u64) -> Vec<u8> {
    [
        &b"GGUF\x03\0\0\0"[..],
        &tensors.to_le_bytes(),
        &entries.to_le_bytes(),
    ]
    .concat()
}

fn text(text: &str) -> Vec<u8> {
    [&(text.len() as u64).to_le_bytes(), text.as_bytes()].concat()
}

/// Reads `start`, filled up to a kilobyte with `filler`, and returns what that allocated.
fn read(start: &[u8], filler: &[u8]) -> usize {
    let mut file = start.to_vec();
    while file.len() + filler.len() <= FILE_BYTES {
        file.extend(filler);
    }
    file.resize(FILE_BYTES, 0);
    // The result is part of it.
    let (result, bytes) = peak(|| Gguf::from_bytes("hostile", file));
    drop(result);
    bytes
}

/// Counts and lengths worth trying: at the edges of what 32 and 64 bits and the file itself can hold.
const HUGE: [u64; 8] = [
    u64::MAX,
    u64::MAX / 8 + 1,
    1 << 63,
    1 << 61,
    1 << 40,
    u32::MAX as u64,
    FILE_BYTES as u64 + 1,
    FILE_BYTES as u64 / 2,
];

#[test]
fn huge_claims_allocate_little() {
    let mut worst = (0, String::new());
    let mut try_file = |what: &str, start: &[u8], filler: &[u8]| {
        let allocated = read(start, filler);
        if allocated > worst.0 {
            worst = (allocated, what.to_owned());
        }
    };
    for huge in HUGE {
        let claim = huge.to_le_bytes();
        try_file("metadata count", &head(0, huge), &[0]);
        try_file("tensor count", &head(huge, 0), &[0]);
        try_file("both counts", &head(huge, huge), &[0]);
        try_file("key length", &[&head(0, 1)[..], &claim].concat(), b"k");

        let entry = |kind: u32| [&head(0, 1)[..], &text("k"), &kind.to_le_bytes()].concat();
        try_file("string length", &[&entry(8)[..], &claim].concat(), b"s");
        for element in 0..13u32 {
            let array = [&entry(9)[..], &element.to_le_bytes(), &claim].concat();
            try_file("array count", &array, &[0]);
            try_file("array of ones", &array, &[1, 0, 0, 0]);
        }
        // Arrays within arrays, each as long as claimed.
        let nested = [&9u32.to_le_bytes()[..], &claim].concat();
        try_file("nested arrays", &entry(9), &nested);

        let tensor = [&head(1, 0)[..], &text("t")].concat();
        try_file("dimension count", &[&tensor[..], &claim].concat(), &[1]);
        let shape = [&tensor[..], &4u32.to_le_bytes(), &claim.repeat(4)].concat();
        try_file("dimensions", &shape, &[0]);
        let offset = [
            &tensor[..],
            &1u32.to_le_bytes(),
            &1u64.to_le_bytes(),
            &0u32.to_le_bytes(),
            &(huge & !31).to_le_bytes(),
        ];
        try_file("offset", &offset.concat(), &[0]);
    }
    assert!(
        worst.0 <= MAX_FOR_CLAIMS,
        "{} bytes for {}",
        worst.0,
        worst.1
    );
}

#[test]
fn as_many_entries_as_fit_allocate_little() {
    let entries: Vec<u8> = (0..)
        .map(|n: u8| [&text(&char::from(32 + n).to_string())[..], &[0; 4], &[n]].concat())
        .take(70)
        .flatten()
        .collect();
    let most = read(&[&head(0, 70)[..], &entries].concat(), &[0]);
    assert!(most <= MAX_FOR_ENTRIES, "{most} bytes for 70 entries");

    let tensors: Vec<u8> = (0..)
        .map(|n: u8| [&text(&char::from(32 + n).to_string())[..], &tensor_tail(n)].concat())
        .take(28)
        .flatten()
        .collect();
    let most = read(&[&head(28, 0)[..], &tensors].concat(), &[0]);
    assert!(most <= MAX_FOR_ENTRIES, "{most} bytes for 28 tensors");
}

/// Everything of a tensor after its name: one dimension, a type nobody knows.
fn tensor_tail(n: u8) -> Vec<u8> {
    [
        &1u32.to_le_bytes()[..],
        &u64::from(n + 1).to_le_bytes(),
        &99u32.to_le_bytes(),
        &0u64.to_le_bytes(),
    ]
    .concat()
}
