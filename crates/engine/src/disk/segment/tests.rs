use super::*;

pub(in crate::disk) fn namespace(n: u8) -> Namespace {
    Namespace::new([[n].as_slice()])
}

const PAGE: usize = 10;

fn kind(n: u8, bytes: usize) -> Kind {
    Kind {
        namespace: namespace(n),
        page_bytes: PerGroup {
            full: bytes,
            sliding: bytes,
        },
    }
}

/// Blocks that follow each other, the first with a piece of an image, and their pages.
pub(in crate::disk) fn segment(seed: u32, blocks: usize, page_bytes: usize) -> Segment {
    let parent = ChainKey::root(None);
    let mut chain = parent;
    let blocks = (0..blocks).map(|n| {
        let piece = Piece {
            digest: [n as u8; 16],
            rows: 40,
            first_place: 3,
            first_row: 0,
        };
        let contents = BlockContents {
            tokens: std::array::from_fn(|i| seed + (n * PAGE_TOKENS + i) as u32),
            media: if n == 0 {
                Box::new([piece])
            } else {
                Box::new([])
            },
        };
        chain = chain.then(&contents);
        StoredBlock { chain, contents }
    });
    let blocks: Vec<StoredBlock> = blocks.collect();
    let byte = |i: usize| (i as u32).wrapping_mul(2_654_435_761).wrapping_add(seed) as u8;
    Segment {
        group: KvGroup::Full,
        parent,
        pages: (0..blocks.len() * page_bytes).map(byte).collect(),
        blocks,
    }
}

#[test]
fn a_file_says_what_was_written() {
    let segment = segment(5, 3, PAGE);
    let file = encode(&namespace(1), &segment);
    assert_eq!(file.len() as u64, file_bytes(&segment));
    let header = decode(&file, &kind(1, PAGE)).unwrap();
    assert_eq!((header.group, header.page_bytes), (KvGroup::Full, PAGE));
    assert_eq!(header.blocks, segment.blocks);
    assert_eq!(header.file_bytes(), file.len() as u64);
    assert_eq!(file[header.length..], segment.pages);
}

#[test]
fn a_header_with_any_byte_changed_is_refused() {
    let file = encode(&namespace(1), &segment(5, 2, PAGE));
    let length = header_length(&file).unwrap();
    for place in 0..length {
        for bit in 0..8 {
            let mut damaged = file.clone();
            damaged[place] ^= 1 << bit;
            assert!(decode(&damaged, &kind(1, PAGE)).is_err(), "byte {place}");
        }
    }
}

#[test]
fn a_header_that_is_cut_short_is_refused() {
    let file = encode(&namespace(1), &segment(5, 2, PAGE));
    let length = header_length(&file).unwrap();
    for bytes in 0..length {
        assert!(decode(&file[..bytes], &kind(1, PAGE)).is_err());
    }
}

#[test]
fn another_models_file_is_refused() {
    let file = encode(&namespace(1), &segment(5, 2, PAGE));
    assert_eq!(decode(&file, &kind(2, PAGE)), Err(Refused::Foreign));
}

#[test]
fn a_header_that_claims_too_much_is_refused() {
    // Its digest is right, so nothing but the numbers themselves tells.
    let mut file = encode(&namespace(1), &segment(5, 1, PAGE));
    let length = header_length(&file).unwrap();
    let count = PREAMBLE + DIGEST + 1 + 8 + DIGEST;
    file[count..count + 4].copy_from_slice(&u32::MAX.to_le_bytes());
    let digest = *blake3::hash(&file[..length - DIGEST]).as_bytes();
    file[length - DIGEST..length].copy_from_slice(&digest);
    assert_eq!(decode(&file, &kind(1, PAGE)), Err(Refused::Malformed));
}

#[test]
fn pages_of_another_size_are_refused_before_anything_is_read() {
    let mut file = encode(&namespace(1), &segment(5, 1, PAGE));
    assert_eq!(decode(&file, &kind(1, PAGE + 1)), Err(Refused::Foreign));
    // One that would take all memory, with a digest that is right.
    let length = header_length(&file).unwrap();
    let size = PREAMBLE + DIGEST + 1;
    file[size..size + 8].copy_from_slice(&u64::MAX.to_le_bytes());
    let digest = *blake3::hash(&file[..length - DIGEST]).as_bytes();
    file[length - DIGEST..length].copy_from_slice(&digest);
    assert_eq!(decode(&file, &kind(1, PAGE)), Err(Refused::Foreign));
}
