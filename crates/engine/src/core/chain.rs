//! Name of a page outside of this process: a digest of everything before it and in it.

use carat_model::{TokenId, kv::PAGE_TOKENS};

use super::media::Content;

/// Digest of all tokens and media up to the end of a block, and of whose they are.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct ChainKey(pub [u8; 32]);

impl ChainKey {
    /// Of nothing yet.
    pub fn root(salt: Option<[u8; 16]>) -> ChainKey {
        let mut hasher = blake3::Hasher::new_derive_key("carat prefix root");
        // A salt of zeros is not the same as none.
        hasher.update(&[u8::from(salt.is_some())]);
        hasher.update(&salt.unwrap_or_default());
        ChainKey(hasher.finalize().into())
    }

    /// With another block behind it.
    #[must_use]
    pub fn then(&self, block: &BlockContents) -> ChainKey {
        let mut hasher = blake3::Hasher::new_derive_key("carat prefix block");
        hasher.update(&self.0);
        for token in &block.tokens {
            hasher.update(&token.to_le_bytes());
        }
        for piece in &block.media {
            hasher.update(&piece.digest);
            for number in [piece.rows, piece.first_place, piece.first_row] {
                hasher.update(&(number as u64).to_le_bytes());
            }
        }
        ChainKey(hasher.finalize().into())
    }
}

/// Media within a block: from which place of the block on, and from which of their own rows.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Piece {
    /// [`Media::digest`](super::Media::digest).
    pub digest: [u8; 16],
    /// Rows of the whole image or sound.
    pub rows: usize,
    /// In the block.
    pub first_place: usize,
    /// Of its rows, the one that stands there.
    pub first_row: usize,
}

/// Contents of a block: everything its KV depends on.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct BlockContents {
    /// All of its tokens.
    pub tokens: [TokenId; PAGE_TOKENS],
    /// Empty, and then without memory of its own, where a block has tokens alone.
    pub media: Box<[Piece]>,
}

impl BlockContents {
    /// Of the block at a place of some content, counted in blocks.
    pub(crate) fn new(content: &Content<'_>, place: usize) -> BlockContents {
        let start = place * PAGE_TOKENS;
        let tokens = &content.tokens[start..start + PAGE_TOKENS];
        let within = content
            .media
            .iter()
            .filter(|m| m.places.start < start + PAGE_TOKENS && m.places.end > start);
        let pieces = within.map(|m| Piece {
            digest: m.digest,
            rows: m.places.len(),
            first_place: m.places.start.saturating_sub(start),
            first_row: start.saturating_sub(m.places.start),
        });
        BlockContents {
            tokens: tokens.try_into().expect("a block is a page of tokens"),
            media: pieces.collect(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn keys_differ_with_everything_that_keys_and_values_depend_on() {
        let plain = BlockContents {
            tokens: [7; PAGE_TOKENS],
            media: Box::new([]),
        };
        let mut other = plain.clone();
        other.tokens[31] = 8;
        let piece = |digest: u8, first_place, first_row| BlockContents {
            media: Box::new([Piece {
                digest: [digest; 16],
                rows: 40,
                first_place,
                first_row,
            }]),
            ..plain.clone()
        };
        let root = ChainKey::root(None);
        let keys = [
            root,
            ChainKey::root(Some([0; 16])),
            ChainKey::root(Some([1; 16])),
            root.then(&plain),
            root.then(&other),
            root.then(&plain).then(&plain),
            ChainKey::root(Some([1; 16])).then(&plain),
            root.then(&piece(1, 0, 0)),
            root.then(&piece(2, 0, 0)),
            root.then(&piece(1, 1, 0)),
            root.then(&piece(1, 0, 1)),
        ];
        let mut sorted = keys.to_vec();
        sorted.sort();
        sorted.dedup();
        assert_eq!(sorted.len(), keys.len());
    }
}
