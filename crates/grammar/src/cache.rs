//! The grammars used last, by their text.

use std::sync::{Mutex, PoisonError};

/// Most grammars kept. Looking through so few keys takes less than cloning one grammar.
const MOST: usize = 256;

/// Values by text; the one not used for longest gives way.
pub(crate) struct Cache<V> {
    /// Used last is last.
    entries: Mutex<Vec<(String, V)>>,
}

impl<V: Clone> Cache<V> {
    pub(crate) fn new() -> Cache<V> {
        Cache {
            entries: Mutex::default(),
        }
    }

    pub(crate) fn get(&self, text: &str) -> Option<V> {
        let mut entries = self.entries.lock().unwrap_or_else(PoisonError::into_inner);
        let place = entries.iter().position(|(key, _)| key == text)?;
        entries[place..].rotate_left(1);
        entries.last().map(|(_, value)| value.clone())
    }

    pub(crate) fn put(&self, text: String, value: V) {
        let mut entries = self.entries.lock().unwrap_or_else(PoisonError::into_inner);
        entries.retain(|(key, _)| *key != text);
        if entries.len() == MOST {
            entries.remove(0);
        }
        entries.push((text, value));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_one_not_used_for_longest_gives_way() {
        let cache = Cache::new();
        for n in 0..MOST {
            cache.put(n.to_string(), n);
        }
        assert_eq!(cache.get("0"), Some(0));
        cache.put("new".to_owned(), 1000);
        assert_eq!(cache.get("1"), None);
        assert_eq!((cache.get("0"), cache.get("new")), (Some(0), Some(1000)));
        cache.put("0".to_owned(), 7);
        assert_eq!(cache.get("0"), Some(7));
        assert_eq!(cache.get("2"), Some(2), "replacing pushes nobody out");
    }
}
