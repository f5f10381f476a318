//! Memory of what the prefix cache has lost, so that a miss can be told from a prompt that was never there.

use rustc_hash::FxHashSet;

use super::chain::ChainKey;

/// Blocks of a generation: as many as fit a table of 32,768 places, 0.3 MB.
const GENERATION: usize = 28_672;

/// Digests of the blocks that went last, cut to 64 bits: two that are alike would make an explanation wrong, and no answer. The last 0.9 to
/// 1.8 million tokens.
#[derive(Default)]
pub(crate) struct Forgotten {
    young: FxHashSet<u64>,
    old: FxHashSet<u64>,
}

impl Forgotten {
    pub(crate) fn insert(&mut self, chain: ChainKey) {
        let digest = short(chain);
        if self.young.contains(&digest) {
            return;
        }
        if self.young.len() == GENERATION {
            self.old = std::mem::take(&mut self.young);
        }
        if self.young.is_empty() {
            // At once, so that a server has its size soon, not after days.
            self.young.reserve(GENERATION);
        }
        self.young.insert(digest);
    }

    pub(crate) fn contains(&self, chain: ChainKey) -> bool {
        let digest = short(chain);
        self.young.contains(&digest) || self.old.contains(&digest)
    }
}

fn short(chain: ChainKey) -> u64 {
    let bytes = chain.0.first_chunk().expect("a digest is longer");
    u64::from_le_bytes(*bytes)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn chain(number: usize) -> ChainKey {
        let mut bytes = [0; 32];
        bytes[..8].copy_from_slice(&number.to_le_bytes());
        ChainKey(bytes)
    }

    #[test]
    fn a_generation_at_least_is_remembered_and_two_at_the_most() {
        let mut forgotten = Forgotten::default();
        let count = 5 * GENERATION / 2;
        for number in 0..count {
            forgotten.insert(chain(number));
            forgotten.insert(chain(number));
            assert!(forgotten.contains(chain(number.saturating_sub(GENERATION))));
        }
        assert!(!forgotten.contains(chain(0)));
        assert!(!forgotten.contains(chain(count)));
        let sizes = [&forgotten.young, &forgotten.old].map(FxHashSet::len);
        assert_eq!(sizes, [GENERATION / 2, GENERATION]);
        assert!(forgotten.young.capacity() < 32_768);
    }
}
