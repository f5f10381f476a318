//! Memory of what the prefix cache has lost, so that a miss can be told from a prompt that was never there.

use std::collections::VecDeque;

use rustc_hash::FxHashSet;

use super::chain::ChainKey;

/// Blocks remembered: the last two million tokens, in 1.5 MB at the most.
const MOST: usize = 1 << 16;

/// Digests of the blocks that went last, cut to 64 bits: two that are alike would make an explanation wrong, and no answer.
#[derive(Default)]
pub(crate) struct Forgotten {
    digests: FxHashSet<u64>,
    /// The oldest first.
    order: VecDeque<u64>,
}

impl Forgotten {
    pub(crate) fn insert(&mut self, chain: ChainKey) {
        let digest = short(chain);
        if !self.digests.insert(digest) {
            return;
        }
        self.order.push_back(digest);
        if self.order.len() > MOST
            && let Some(oldest) = self.order.pop_front()
        {
            self.digests.remove(&oldest);
        }
    }

    pub(crate) fn contains(&self, chain: ChainKey) -> bool {
        self.digests.contains(&short(chain))
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
    fn the_oldest_go_first_and_nothing_is_counted_twice() {
        let mut forgotten = Forgotten::default();
        for number in 0..MOST {
            forgotten.insert(chain(number));
            forgotten.insert(chain(number));
        }
        assert!(forgotten.contains(chain(0)) && forgotten.contains(chain(MOST - 1)));
        forgotten.insert(chain(MOST));
        assert!(!forgotten.contains(chain(0)) && forgotten.contains(chain(1)));
        assert_eq!(forgotten.digests.len(), MOST);
    }
}
