//! Places of a prompt that are fed embeddings: images and sounds.

use std::{ops::Range, sync::Arc};

use carat_model::{TokenId, kv::PAGE_TOKENS};

use super::request::LaneId;

/// An image or a sound in a prompt: rows that an encoder made take the place of token embeddings.
#[derive(Clone, Debug, PartialEq)]
pub struct Media {
    /// Places in the prompt. The tokens there give the rows' per-layer inputs, and are what penalties see.
    pub places: Range<usize>,
    /// `[places, width of the model]`, not scaled.
    pub rows: Arc<[f32]>,
    /// Of whatever the rows were made from, the encoder's settings included. A prompt continues from cached KV only where digests
    /// are the same.
    pub digest: [u8; 16],
    /// Whether its rows see each other.
    pub attention: MediaAttention,
}

/// Attention among the rows of one image or sound in sliding-window layers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum MediaAttention {
    /// Each sees those before it.
    Causal,
    /// Each sees all, within the window behind. They are computed in one batch, all or none of them.
    BothWays,
}

/// Source of a sequence's KV: its tokens, what stands in place of some of them, and whose it is.
#[derive(Clone, Copy)]
pub(crate) struct Content<'a> {
    pub(crate) tokens: &'a [TokenId],
    /// In order, without overlaps.
    pub(crate) media: &'a [Media],
    /// Whether rows of media can see ahead in this model.
    pub(crate) has_sliding: bool,
    pub(crate) salt: Option<[u8; 16]>,
    /// Lane that its pages count for; no part of what they hold.
    pub(crate) lane: Option<LaneId>,
}

impl<'a> Content<'a> {
    /// So many blocks of it, from its start.
    pub(crate) fn first(self, blocks: usize) -> Content<'a> {
        Content {
            tokens: &self.tokens[..blocks * PAGE_TOKENS],
            ..self
        }
    }

    /// The span around a boundary between two positions that may not be cut there.
    pub(crate) fn span_across(&self, boundary: usize) -> Option<Range<usize>> {
        let mut uncut = self.media.iter().filter(|m| self.is_uncut(m));
        let cut = uncut.find(|m| m.places.start < boundary && boundary < m.places.end);
        cut.map(|m| m.places.clone())
    }

    /// Whether the rows of media are computed all at once.
    pub(crate) fn is_uncut(&self, media: &Media) -> bool {
        self.has_sliding && media.attention == MediaAttention::BothWays
    }

    /// The longest rows that are computed all at once; 1 without media.
    pub(crate) fn longest_span(&self) -> usize {
        let uncut = self.media.iter().filter(|m| self.is_uncut(m));
        uncut.map(|m| m.places.len()).max().unwrap_or(1)
    }

    /// The media that a position is part of.
    pub(crate) fn media_at(&self, position: usize) -> Option<&'a Media> {
        self.media.iter().find(|m| m.places.contains(&position))
    }
}
