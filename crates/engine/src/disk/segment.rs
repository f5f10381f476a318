//! Files of pages: a header that says what they hold, with digests, then the pages.
//!
//! ```text
//! magic 8 | length of the header 4 | namespace 32 | group 1 | bytes of a page 8 | parent 32 | blocks 4
//! per block: tokens 32 x 4 | media 4 | per piece: digest 16, rows 8, place 8, row 8 | digest of the page 32
//! digest of all that 32
//! pages
//! ```

use carat_model::{
    TokenId,
    kv::{KvGroup, PAGE_TOKENS, PerGroup},
};

use crate::core::{BlockContents, ChainKey, Piece, Segment, StoredBlock};

const MAGIC: &[u8; 8] = b"CARATKV1";
/// Bytes up to and with the length of the header.
pub(super) const PREAMBLE: usize = 12;
/// The longest header that is believed: 32 blocks with an image in every place stay below.
pub(super) const MAX_HEADER: usize = 1 << 20;
const DIGEST: usize = 32;

/// Digest of what pages depend on apart from tokens: the file, the plan, the type of keys and values, the backend, the layout.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Namespace([u8; 32]);

impl Namespace {
    /// Of everything that two engines must have in common to read each other's pages.
    pub fn new<'a>(parts: impl IntoIterator<Item = &'a [u8]>) -> Namespace {
        let mut hasher = blake3::Hasher::new_derive_key("carat prefix namespace");
        for part in parts {
            // With its length, so that no two lists of parts are the same bytes.
            hasher.update(&(part.len() as u64).to_le_bytes());
            hasher.update(part);
        }
        Namespace(hasher.finalize().into())
    }

    /// As the name of a folder.
    pub(super) fn name(&self) -> String {
        hex(&self.0[..16])
    }
}

pub(super) fn hex(bytes: &[u8]) -> String {
    let digit = |half: u8| char::from(b"0123456789abcdef"[usize::from(half)]);
    let digits = bytes.iter().flat_map(|b| [digit(b >> 4), digit(b & 15)]);
    digits.collect()
}

/// Of a file's first part.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Header {
    pub(super) group: KvGroup,
    pub(super) page_bytes: usize,
    pub(super) blocks: Vec<StoredBlock>,
    /// Of each page.
    pub(super) digests: Vec<[u8; DIGEST]>,
    /// Bytes before the first page.
    pub(super) length: usize,
}

impl Header {
    /// Bytes of the whole file.
    pub(super) fn file_bytes(&self) -> u64 {
        (self.length + self.blocks.len() * self.page_bytes) as u64
    }
}

/// Reason a file is not believed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub(super) enum Refused {
    #[error("it is no file of pages, or is cut short")]
    Malformed,
    #[error("its header does not fit its digest")]
    Damaged,
    #[error("it is another model's, or of another layout")]
    Foreign,
}

/// A name for a segment: the same for the same pages.
pub(super) fn file_name(segment: &Segment) -> String {
    let last = segment.blocks.last().map(|block| block.chain.0);
    let group = match segment.group {
        KvGroup::Full => 'f',
        KvGroup::Sliding => 's',
    };
    let key = hex(&last.unwrap_or_default()[..16]);
    format!("{key}-{:02}.{group}", segment.blocks.len())
}

/// Bytes of the file that a segment makes.
pub(super) fn file_bytes(segment: &Segment) -> u64 {
    const FIXED: usize = PREAMBLE + DIGEST + 1 + 8 + DIGEST + 4 + DIGEST;
    const PER_BLOCK: usize = PAGE_TOKENS * 4 + 4 + DIGEST;
    const PER_PIECE: usize = 16 + 3 * 8;
    let pieces = segment.blocks.iter().map(|b| b.contents.media.len());
    let header = FIXED + segment.blocks.len() * PER_BLOCK + pieces.sum::<usize>() * PER_PIECE;
    (header + segment.pages.len()) as u64
}

/// A whole file.
pub(super) fn encode(namespace: &Namespace, segment: &Segment) -> Vec<u8> {
    let page_bytes = segment.pages.len() / segment.blocks.len();
    let mut out = Vec::with_capacity(segment.pages.len() + 8192);
    out.extend_from_slice(MAGIC);
    out.extend_from_slice(&[0; 4]);
    out.extend_from_slice(&namespace.0);
    out.push(match segment.group {
        KvGroup::Full => 0,
        KvGroup::Sliding => 1,
    });
    out.extend_from_slice(&(page_bytes as u64).to_le_bytes());
    out.extend_from_slice(&segment.parent.0);
    out.extend_from_slice(&(segment.blocks.len() as u32).to_le_bytes());
    for (block, page) in segment.blocks.iter().zip(segment.pages.chunks(page_bytes)) {
        for token in &block.contents.tokens {
            out.extend_from_slice(&token.to_le_bytes());
        }
        out.extend_from_slice(&(block.contents.media.len() as u32).to_le_bytes());
        for piece in &block.contents.media {
            out.extend_from_slice(&piece.digest);
            for number in [piece.rows, piece.first_place, piece.first_row] {
                out.extend_from_slice(&(number as u64).to_le_bytes());
            }
        }
        out.extend_from_slice(blake3::hash(page).as_bytes());
    }
    let length = (out.len() + DIGEST) as u32;
    out[8..PREAMBLE].copy_from_slice(&length.to_le_bytes());
    let digest = blake3::hash(&out);
    out.extend_from_slice(digest.as_bytes());
    out.extend_from_slice(&segment.pages);
    out
}

/// Length of the header, from the first [`PREAMBLE`] bytes.
pub(super) fn header_length(preamble: &[u8]) -> Result<usize, Refused> {
    let mut reader = Reader(preamble);
    if reader.take(MAGIC.len())? != MAGIC {
        return Err(Refused::Malformed);
    }
    let length = reader.u32()? as usize;
    if !(PREAMBLE + DIGEST..=MAX_HEADER).contains(&length) {
        return Err(Refused::Malformed);
    }
    Ok(length)
}

/// Facts a file must agree with to be believed.
#[derive(Clone, Copy, Debug)]
pub(super) struct Kind {
    pub(super) namespace: Namespace,
    pub(super) page_bytes: PerGroup<usize>,
}

/// A header, from as many bytes as it has. Numbers that are not ours are refused before anything is worked out from them.
pub(super) fn decode(bytes: &[u8], kind: &Kind) -> Result<Header, Refused> {
    let length = header_length(bytes)?;
    let (body, digest) = bytes
        .get(..length)
        .and_then(|bytes| bytes.split_at_checked(length - DIGEST))
        .ok_or(Refused::Malformed)?;
    if blake3::hash(body).as_bytes() != digest {
        return Err(Refused::Damaged);
    }
    let mut reader = Reader(&body[PREAMBLE..]);
    if reader.take(DIGEST)? != kind.namespace.0 {
        return Err(Refused::Foreign);
    }
    let group = match reader.take(1)?[0] {
        0 => KvGroup::Full,
        1 => KvGroup::Sliding,
        _ => return Err(Refused::Malformed),
    };
    let page_bytes = reader.usize()?;
    if page_bytes != *kind.page_bytes.get(group) {
        return Err(Refused::Foreign);
    }
    let mut chain = ChainKey(reader.array()?);
    let count = reader.u32()? as usize;
    let (mut blocks, mut digests) = (Vec::new(), Vec::new());
    for _ in 0..count {
        let mut tokens: [TokenId; PAGE_TOKENS] = [0; PAGE_TOKENS];
        for token in &mut tokens {
            *token = reader.u32()?;
        }
        let mut media = Vec::new();
        for _ in 0..reader.u32()? {
            media.push(Piece {
                digest: reader.array()?,
                rows: reader.usize()?,
                first_place: reader.usize()?,
                first_row: reader.usize()?,
            });
        }
        digests.push(reader.array()?);
        let contents = BlockContents {
            tokens,
            media: media.into(),
        };
        chain = chain.then(&contents);
        blocks.push(StoredBlock { chain, contents });
    }
    if !reader.0.is_empty() || blocks.is_empty() {
        return Err(Refused::Malformed);
    }
    Ok(Header {
        group,
        page_bytes,
        blocks,
        digests,
        length,
    })
}

struct Reader<'a>(&'a [u8]);

impl<'a> Reader<'a> {
    fn take(&mut self, bytes: usize) -> Result<&'a [u8], Refused> {
        let (taken, rest) = self.0.split_at_checked(bytes).ok_or(Refused::Malformed)?;
        self.0 = rest;
        Ok(taken)
    }

    fn array<const N: usize>(&mut self) -> Result<[u8; N], Refused> {
        let bytes = self.take(N)?;
        Ok(bytes.try_into().expect("as many bytes were taken"))
    }

    fn u32(&mut self) -> Result<u32, Refused> {
        Ok(u32::from_le_bytes(self.array()?))
    }

    fn usize(&mut self) -> Result<usize, Refused> {
        let number = u64::from_le_bytes(self.array()?);
        usize::try_from(number).map_err(|_| Refused::Malformed)
    }
}

#[cfg(test)]
pub(super) mod tests;
