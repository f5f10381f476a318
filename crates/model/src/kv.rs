//! Keys and values as pages: groups of layers that page together, the types values are kept in, and the page arithmetic
//! that engine and devices share.
//!
//! Nothing here owns memory: the engine hands out page ids, an executor has the bytes behind them.

use std::fmt;

use half::f16;

use crate::backend::BackendError;

/// Layers page their KV in two groups: full-attention layers keep everything, sliding-window layers the window.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct PerGroup<T> {
    /// Of full-attention layers.
    pub full: T,
    /// Of sliding-window layers.
    pub sliding: T,
}

/// Layers that page together.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum KvGroup {
    /// Full-attention layers.
    Full,
    /// Sliding-window layers.
    Sliding,
}

impl KvGroup {
    /// Both of them.
    pub const ALL: [KvGroup; 2] = [KvGroup::Full, KvGroup::Sliding];
}

impl<T> PerGroup<T> {
    /// A group's own.
    pub fn get(&self, group: KvGroup) -> &T {
        match group {
            KvGroup::Full => &self.full,
            KvGroup::Sliding => &self.sliding,
        }
    }

    /// A group's own, to be changed.
    pub fn get_mut(&mut self, group: KvGroup) -> &mut T {
        match group {
            KvGroup::Full => &mut self.full,
            KvGroup::Sliding => &mut self.sliding,
        }
    }

    /// One value for both.
    pub fn both(value: T) -> PerGroup<T>
    where
        T: Clone,
    {
        PerGroup {
            full: value.clone(),
            sliding: value,
        }
    }

    /// The same of both.
    pub fn map<U>(self, mut f: impl FnMut(T) -> U) -> PerGroup<U> {
        PerGroup {
            full: f(self.full),
            sliding: f(self.sliding),
        }
    }
}

/// A page of one KV group: `PAGE_TOKENS` positions in every slot of that group.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct PageId(pub u32);

impl PageId {
    /// Stands where a sliding-window page was freed behind the window. Executors never read through it.
    pub const FREED: PageId = PageId(u32::MAX);
}

/// A place for a page in host memory, per group as page ids are.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct HostPageId(pub u32);

/// The copy of a page to host memory or back. The page it is taken from stays as it is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PageMove {
    /// From the device.
    Save {
        /// Group of layers that the pages belong to.
        group: KvGroup,
        /// On the device.
        from: PageId,
        /// In host memory.
        to: HostPageId,
    },
    /// To the device.
    Load {
        /// Group of layers that the pages belong to.
        group: KvGroup,
        /// In host memory.
        from: HostPageId,
        /// On the device.
        to: PageId,
    },
}

impl PageMove {
    /// A place in host memory that is not there.
    pub fn check_place(
        group: KvGroup,
        place: HostPageId,
        host_pages: PerGroup<usize>,
    ) -> Result<(), BackendError> {
        let held = *host_pages.get(group);
        if place.0 as usize >= held {
            return Err(BackendError::Unsupported {
                what: format!("place {} of {held} {group:?} ones in host memory", place.0),
            });
        }
        Ok(())
    }

    /// The group, the page on the device and the place in host memory.
    pub fn places(&self) -> (KvGroup, PageId, HostPageId) {
        match *self {
            PageMove::Save { group, from, to } => (group, from, to),
            PageMove::Load { group, from, to } => (group, to, from),
        }
    }

    /// Everything an executor relies on in some moves that belong together.
    pub fn check(
        moves: &[PageMove],
        pages: PerGroup<usize>,
        host_pages: PerGroup<usize>,
    ) -> Result<(), BackendError> {
        let mut device: Vec<(KvGroup, u32)> = Vec::with_capacity(moves.len());
        let mut host: Vec<(KvGroup, u32)> = Vec::with_capacity(moves.len());
        for (group, page, place) in moves.iter().map(PageMove::places) {
            if page.0 as usize >= *pages.get(group) || place.0 as usize >= *host_pages.get(group) {
                return Err(BackendError::Unsupported {
                    what: format!(
                        "{group:?} page {} and place {} in host memory are not both among the {} and {} held",
                        page.0,
                        place.0,
                        pages.get(group),
                        host_pages.get(group)
                    ),
                });
            }
            device.push((group, page.0));
            host.push((group, place.0));
        }
        let twice = |places: &mut Vec<(KvGroup, u32)>| {
            places.sort_unstable();
            places.windows(2).any(|pair| pair[0] == pair[1])
        };
        if twice(&mut device) || twice(&mut host) {
            return Err(BackendError::Unsupported {
                what: "two moves of one page".to_owned(),
            });
        }
        Ok(())
    }
}

/// Positions a KV page holds.
pub const PAGE_TOKENS: usize = 32;

/// Pages that `positions` fill from a page's start.
pub fn pages_of(positions: usize) -> usize {
    positions.div_ceil(PAGE_TOKENS)
}

/// First position that the row at `position` sees within `window` positions, itself included.
pub fn first_visible(position: usize, window: usize) -> usize {
    (position + 1).saturating_sub(window)
}

/// First page that the row at `position` sees in a sliding-window layer.
pub fn first_visible_page(position: usize, window: usize) -> usize {
    first_visible(position, window) / PAGE_TOKENS
}

/// The most pages that `window` neighbouring positions touch, wherever they start.
pub fn window_pages(window: usize) -> usize {
    (window + PAGE_TOKENS - 2) / PAGE_TOKENS + 1
}

/// Format that a device keeps keys and values in. The reference keeps f32 instead of F16, and rounds to Q8_0.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum KvType {
    /// Two bytes per value.
    #[default]
    F16,
    /// In groups of [`KvType::GROUP`] values of a head: a signed byte per value, and one F16 that they are multiples of.
    Q8_0,
}

impl KvType {
    /// Values of a head that share a scale in Q8_0.
    pub const GROUP: usize = 32;

    /// Bytes of the keys, or of the values, that one head has at one position.
    pub fn head_bytes(self, head_dim: usize) -> usize {
        match self {
            KvType::F16 => head_dim * size_of::<u16>(),
            KvType::Q8_0 => head_dim.div_ceil(KvType::GROUP) * (KvType::GROUP + size_of::<u16>()),
        }
    }

    /// Rounds the values of a head to what Q8_0 keeps of them: the nearest multiples (ties to even) of a scale, which is a 127th of
    /// the largest magnitude in a group, as F16. Every backend rounds so, to the bit.
    pub fn round_q8_0(head: &mut [f32]) {
        for group in head.chunks_mut(KvType::GROUP) {
            let largest = group.iter().fold(0.0f32, |largest, x| largest.max(x.abs()));
            let scale = f16::from_f32(largest / 127.0).to_f32();
            let inverse = if scale > 0.0 { 1.0 / scale } else { 0.0 };
            for x in group {
                // Numbers so small that their scale has few bits may come to more than 127 of it.
                let code = (*x * inverse).round_ties_even().clamp(-127.0, 127.0);
                *x = code * scale;
            }
        }
    }
}

impl fmt::Display for KvType {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            KvType::F16 => "F16",
            KvType::Q8_0 => "Q8_0",
        })
    }
}

impl From<KvType> for PerGroup<KvType> {
    fn from(kv: KvType) -> PerGroup<KvType> {
        PerGroup::both(kv)
    }
}

/// One name if both groups agree.
impl fmt::Display for PerGroup<KvType> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let PerGroup { full, sliding } = self;
        if full == sliding {
            full.fmt(f)
        } else {
            write!(f, "full={full},sliding={sliding}")
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn window_pages_cover_the_window_wherever_it_starts() {
        for window in 1..200 {
            let touched = |start: usize| pages_of(start + window) - start / PAGE_TOKENS;
            let most = (0..PAGE_TOKENS).map(touched).max().unwrap();
            assert_eq!(window_pages(window), most, "window {window}");
        }
    }

    #[test]
    fn q8_0_keeps_multiples_of_a_127th_of_each_groups_largest() {
        let mut head: Vec<f32> = (0..64).map(|i| (i % 32) as f32 - 16.0).collect();
        head[33] = 254.0;
        KvType::round_q8_0(&mut head);
        // In steps of 2, a half of which goes to the even neighbour.
        assert_eq!(head[33], 254.0);
        assert_eq!(head[34..38], [-14.0, -12.0, -12.0, -12.0]);
        let step = f16::from_f32(16.0 / 127.0).to_f32();
        assert_eq!(head[0], -127.0 * step);
        assert!(head[..32].iter().all(|x| (x / step).fract() == 0.0));
        let mut zero = [0.0, -0.0];
        KvType::round_q8_0(&mut zero);
        assert_eq!(zero, [0.0, 0.0]);
    }

    #[test]
    fn the_window_includes_the_row_itself() {
        // With a window of 32 the row at 63 sees 32..=63.
        assert_eq!(first_visible_page(63, 32), 1);
        assert_eq!(first_visible_page(62, 32), 0);
        assert_eq!(first_visible_page(5, 32), 0);
    }
}
