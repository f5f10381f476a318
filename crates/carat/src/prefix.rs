//! Stores of prefixes of prompts beyond the pages of the device.

use std::{path::PathBuf, time::UNIX_EPOCH};

use carat_cpu::{CpuBackend, CpuConfig};
use carat_engine::{DiskConfig, EngineConfig, Namespace};
use carat_model::{
    backend::Backend,
    kv::{PerGroup, pages_of, window_pages},
    layout,
    plan::Listing,
};

use crate::Loaded;

/// Counts up when pages of the same model and settings are laid out or computed otherwise.
const PAGE_VERSION: &[u8] = b"1";
/// Of each tensor, so many bytes at its start, in its middle and at its end tell it from others.
const SAMPLE: usize = 4096;
/// Tokens that a conversation in host memory is taken to have, when that is divided between full and sliding pages.
const CONVERSATION: usize = 8192;
/// Windows that are kept of each: at the end of its last prompt, and of its last answer.
const WINDOWS: usize = 2;

/// Part of the machine's free memory that prefixes get where nobody says how much, and the most.
const RAM_DIVISOR: u64 = 10;
const MOST_RAM_BYTES: u64 = 8 << 30;

/// Tiers of the prefix cache behind the device; none by default.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct PrefixCache {
    /// Bytes of host memory for pages that the device gives away. Of no use where the device is the processor, whose pages are
    /// there anyway.
    pub ram_bytes: u64,
    /// A folder that prefixes outlive the process in. Prompts and answers lie there in clear.
    pub disk: Option<PrefixDisk>,
}

/// A folder, and how much it may hold.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PrefixDisk {
    /// Made if it is not there.
    pub folder: PathBuf,
    /// For all models together.
    pub max_bytes: u64,
}

impl PrefixCache {
    /// Host memory for prefixes where nobody says how much: a tenth of what is free, at most 8 GiB, where a card computes. None on
    /// a processor, whose pages are there anyway.
    pub fn usual_ram_bytes(loaded: &Loaded) -> u64 {
        if loaded.backend.name() != "cuda" {
            return 0;
        }
        let machine = CpuBackend::new(&CpuConfig {
            repack_bytes: 0,
            ..CpuConfig::default()
        });
        machine
            .memory()
            .map_or(0, |memory| usual_share(memory.free_bytes))
    }

    /// Tells an engine of it.
    pub(crate) fn configure(&self, loaded: &Loaded, config: &mut EngineConfig) {
        config.host_pages = self.host_pages(loaded);
        if let Some(disk) = &self.disk {
            config.keep_on_disk(DiskConfig {
                folder: disk.folder.clone(),
                namespace: namespace(loaded),
                max_bytes: disk.max_bytes,
            });
        }
    }

    /// Pages in host memory, as many of both groups as conversations need of them.
    fn host_pages(&self, loaded: &Loaded) -> PerGroup<usize> {
        let bytes = layout::page_bytes(&loaded.plan, loaded.kv);
        let windows = loaded
            .plan
            .window()
            .map_or(0, |w| WINDOWS * window_pages(w));
        let windows = if bytes.sliding > 0 { windows } else { 0 };
        let one = pages_of(CONVERSATION) * bytes.full + windows * bytes.sliding;
        let fits = |pages: usize| {
            let share = u128::from(self.ram_bytes) * pages as u128 / one.max(1) as u128;
            usize::try_from(share).unwrap_or(usize::MAX)
        };
        PerGroup {
            full: fits(pages_of(CONVERSATION)),
            sliding: fits(windows),
        }
    }
}

fn usual_share(free_bytes: u64) -> u64 {
    (free_bytes / RAM_DIVISOR).min(MOST_RAM_BYTES)
}

/// All that keys and values depend on besides tokens. The file is told by its size, its time, and a look at each tensor.
fn namespace(loaded: &Loaded) -> Namespace {
    let file = &loaded.file;
    let modified = std::fs::metadata(file.path()).and_then(|m| m.modified());
    let modified = modified
        .ok()
        .and_then(|t| t.duration_since(UNIX_EPOCH).ok());
    let facts = format!(
        "{} bytes, changed {modified:?}, {} keys and values in {} on {}\n{}",
        file.file_bytes(),
        loaded.plan.slots.len(),
        loaded.kv,
        loaded.backend.name(),
        Listing(&loaded.plan, &loaded.model.weights),
    );
    let mut parts: Vec<&[u8]> = vec![PAGE_VERSION, facts.as_bytes()];
    for index in 0..file.tensors().len() {
        let bytes = file.tensor_bytes(index);
        let middle = bytes.len() / 2;
        for start in [0, middle, bytes.len().saturating_sub(SAMPLE)] {
            parts.push(&bytes[start..bytes.len().min(start + SAMPLE)]);
        }
    }
    Namespace::new(parts)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn prefixes_get_a_tenth_of_free_memory_and_no_more_than_8_gib() {
        let gib = 1 << 30;
        for (free, share) in [
            (0, 0),
            (10 * gib, gib),
            (80 * gib, 8 * gib),
            (500 * gib, 8 * gib),
        ] {
            assert_eq!(usual_share(free), share);
        }
    }
}
