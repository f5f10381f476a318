//! Index of the pages on disk, and the choice of those to go when there are too many.

use std::{
    collections::{BTreeMap, VecDeque},
    path::Path,
    sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel},
    thread::{self, JoinHandle},
    time::Duration,
};

use carat_model::kv::{KvGroup, PerGroup};
use rustc_hash::FxHashMap;

use super::{
    folder::{DiskError, Files, Folder},
    io::{Done, FileRead, Job, is_unfinished, run},
    segment::{self, Kind, MAX_HEADER, Namespace, PREAMBLE},
};
use crate::core::{ChainKey, PageStore, ReadPages, Segment, StoreStats, WantedPage};

/// Bytes that wait to be written; no more is taken while there are so many.
const MAX_WAITING: usize = 256 << 20;
/// Bytes per second that a disk is taken to read before anybody has measured it.
const ASSUMED_READ_RATE: f64 = 1e9;
/// Reading must be so much faster than computing: it keeps others waiting for pages.
const MARGIN: f64 = 1.2;

struct FileInfo {
    name: String,
    group: KvGroup,
    blocks: Vec<ChainKey>,
    bytes: u64,
    /// Counts up with every use, of any file.
    used: u64,
}

/// A [`PageStore`] in a folder.
pub(crate) struct DiskStore {
    jobs: Option<Sender<Job>>,
    done: Receiver<Done>,
    /// Pages that have been read and not asked for.
    read: VecDeque<ReadPages>,
    thread: Option<JoinHandle<()>>,
    files: BTreeMap<u64, FileInfo>,
    /// By block: the file that has its page, and where.
    pages: PerGroup<FxHashMap<ChainKey, (u64, usize)>>,
    /// Reads under way: name, and pages.
    outstanding: VecDeque<(u64, usize)>,
    writes: bool,
    waiting: usize,
    uses: u64,
    last_id: u64,
    /// Tokens of prompts per second, once some were computed, and bytes per second.
    prefill_rate: Option<f64>,
    read_rate: f64,
    stats: StoreStats,
}

impl DiskStore {
    /// Opens the part of a folder that belongs to a namespace, and makes it if there is none. Looks at the headers of what is there.
    pub(crate) fn open(
        folder: &Path,
        namespace: Namespace,
        page_bytes: PerGroup<usize>,
        max_bytes: u64,
    ) -> Result<DiskStore, DiskError> {
        let own = Folder::open(folder, &namespace.name())?;
        let writes = own.is_writable();
        if writes {
            own.shrink_others(folder, max_bytes);
        } else {
            tracing::warn!(
                folder = %folder.display(),
                "another process writes this prefix cache: it is only read here"
            );
        }
        DiskStore::with_files(own, namespace, page_bytes, max_bytes, writes).map_err(|error| {
            DiskError::Io {
                path: folder.to_owned(),
                error,
            }
        })
    }

    pub(super) fn with_files(
        mut files: impl Files + 'static,
        namespace: Namespace,
        page_bytes: PerGroup<usize>,
        max_bytes: u64,
        writes: bool,
    ) -> std::io::Result<DiskStore> {
        let kind = Kind {
            namespace,
            page_bytes,
        };
        let mut listed = files.list()?;
        listed.sort_by(|a, b| (a.used, &a.name).cmp(&(b.used, &b.name)));
        let (jobs, inbox) = channel();
        let (outbox, done) = channel();
        let mut store = DiskStore {
            jobs: Some(jobs),
            done,
            read: VecDeque::new(),
            thread: None,
            files: BTreeMap::new(),
            pages: PerGroup::default(),
            outstanding: VecDeque::new(),
            writes,
            waiting: 0,
            uses: 0,
            last_id: 0,
            prefill_rate: None,
            read_rate: ASSUMED_READ_RATE,
            stats: StoreStats {
                max_bytes,
                ..StoreStats::default()
            },
        };
        for file in listed {
            match header_of(&mut files, &kind, &file.name, file.bytes) {
                Some(header) => {
                    let blocks = header.blocks.iter().map(|block| block.chain).collect();
                    store.add(file.name, header.group, blocks, file.bytes);
                }
                None if writes => {
                    // What a crash has left, or somebody has damaged. It may be gone already.
                    let _ = files.remove(&file.name);
                    store.stats.refused += u64::from(!is_unfinished(&file.name));
                }
                None => {}
            }
        }
        store.thread = Some(
            thread::Builder::new()
                .name("carat-disk".to_owned())
                .spawn(move || run(files, &kind, inbox, &outbox))?,
        );
        store.make_room(0);
        Ok(store)
    }

    fn add(&mut self, name: String, group: KvGroup, blocks: Vec<ChainKey>, bytes: u64) -> u64 {
        self.last_id += 1;
        self.uses += 1;
        let file = self.last_id;
        for (place, chain) in blocks.iter().enumerate() {
            self.pages
                .get_mut(group)
                .entry(*chain)
                .or_insert((file, place));
        }
        self.stats.bytes += bytes;
        self.files.insert(
            file,
            FileInfo {
                name,
                group,
                blocks,
                bytes,
                used: self.uses,
            },
        );
        file
    }

    /// Forgets a file, and has it removed.
    fn remove(&mut self, file: u64) {
        let Some(info) = self.files.remove(&file) else {
            return;
        };
        let pages = self.pages.get_mut(info.group);
        for chain in &info.blocks {
            if pages.get(chain).is_some_and(|(of, _)| *of == file) {
                pages.remove(chain);
            }
        }
        self.stats.bytes -= info.bytes;
        if self.writes {
            self.send(Job::Remove(info.name));
        }
    }

    /// Removes what was used longest ago until so many bytes more fit.
    fn make_room(&mut self, bytes: u64) {
        while self.writes && self.stats.bytes + bytes > self.stats.max_bytes {
            let oldest = self.files.iter().min_by_key(|(_, info)| info.used);
            let Some((&file, _)) = oldest else { return };
            self.remove(file);
        }
    }

    fn send(&self, job: Job) {
        let jobs = self.jobs.as_ref().expect("sent until it is dropped");
        // A thread that is gone has panicked: nothing is found any more, which is all that depends on it.
        let _ = jobs.send(job);
    }

    fn take(&mut self, done: Done) -> Option<ReadPages> {
        match done {
            Done::Written { file, bytes, error } => {
                self.waiting -= bytes;
                if let Some(error) = error {
                    if self.writes {
                        tracing::warn!(%error, "the prefix cache on disk takes no more");
                    }
                    self.remove(file);
                    self.writes = false;
                }
                None
            }
            Done::Read {
                id,
                pages,
                refused,
                bytes,
                took,
            } => {
                self.outstanding.pop_front();
                self.stats.refused += refused.len() as u64;
                for file in refused {
                    self.remove(file);
                }
                self.stats.pages_read += pages.iter().flatten().count() as u64;
                if bytes > 1 << 20 {
                    let rate = bytes as f64 / took.as_secs_f64().max(1e-6);
                    self.read_rate += (rate - self.read_rate) / 4.0;
                }
                Some(ReadPages { id, pages })
            }
        }
    }
}

/// The header of a file that was found, if it can be believed.
fn header_of(
    files: &mut impl Files,
    kind: &Kind,
    name: &str,
    bytes: u64,
) -> Option<segment::Header> {
    if is_unfinished(name) {
        return None;
    }
    let preamble = files.read(name, 0, PREAMBLE).ok()?;
    let length = segment::header_length(&preamble).ok()?;
    let header = files.read(name, 0, length.min(MAX_HEADER)).ok()?;
    let header = segment::decode(&header, kind).ok()?;
    (header.file_bytes() == bytes).then_some(header)
}

impl PageStore for DiskStore {
    fn has(&self, group: KvGroup, chain: &ChainKey) -> bool {
        self.pages.get(group).contains_key(chain)
    }

    fn is_worth(&self, tokens: usize, bytes: u64) -> bool {
        let read = MARGIN * bytes as f64 / self.read_rate;
        self.prefill_rate
            .is_none_or(|rate| tokens as f64 / rate > read)
    }

    fn observe(&mut self, tokens: usize, took: Duration) {
        let rate = tokens as f64 / took.as_secs_f64().max(1e-6);
        let before = *self.prefill_rate.get_or_insert(rate);
        self.prefill_rate = Some(before + (rate - before) / 4.0);
    }

    fn read(&mut self, wanted: Vec<WantedPage>) -> u64 {
        self.last_id += 1;
        let id = self.last_id;
        let pages = wanted.len();
        let mut files: Vec<FileRead> = Vec::new();
        for (asked, WantedPage { group, block }) in wanted.into_iter().enumerate() {
            let Some(&(file, place)) = self.pages.get(group).get(&block.chain) else {
                continue;
            };
            let known = files.iter().position(|read| read.file == file);
            let index = known.unwrap_or_else(|| {
                files.push(FileRead {
                    file,
                    name: self.files[&file].name.clone(),
                    group,
                    wanted: Vec::new(),
                });
                files.len() - 1
            });
            files[index].wanted.push((place, asked, block));
        }
        // What comes first in a prompt is of use without the rest, so it counts as used last.
        for read in files.iter().rev() {
            self.uses += 1;
            let info = self.files.get_mut(&read.file);
            info.expect("it was found").used = self.uses;
        }
        self.outstanding.push_back((id, pages));
        self.send(Job::Read { id, pages, files });
        id
    }

    fn finished(&mut self, patience: Duration) -> Option<ReadPages> {
        if let Some(read) = self.read.pop_front() {
            return Some(read);
        }
        loop {
            // With no patience it takes what is there.
            match self.done.recv_timeout(patience) {
                Ok(done) => {
                    if let Some(read) = self.take(done) {
                        return Some(read);
                    }
                }
                Err(RecvTimeoutError::Timeout) => return None,
                Err(RecvTimeoutError::Disconnected) => {
                    // The thread is gone. Nobody waits for it: what was to be read is missing, and computed.
                    self.writes = false;
                    self.pages = PerGroup::default();
                    let (id, pages) = self.outstanding.pop_front()?;
                    let pages = vec![None; pages];
                    return Some(ReadPages { id, pages });
                }
            }
        }
    }

    fn writes(&self) -> bool {
        self.writes
    }

    fn takes_more(&mut self) -> bool {
        while let Ok(done) = self.done.try_recv() {
            let read = self.take(done);
            self.read.extend(read);
        }
        self.writes && self.waiting < MAX_WAITING
    }

    fn wait(&mut self, patience: Duration) {
        if let Ok(done) = self.done.recv_timeout(patience) {
            let read = self.take(done);
            self.read.extend(read);
        }
    }

    fn write(&mut self, segment: Segment) {
        let bytes = segment::file_bytes(&segment);
        if bytes > self.stats.max_bytes {
            let max_bytes = self.stats.max_bytes;
            tracing::warn!(
                bytes,
                max_bytes,
                "the prefix cache on disk is too small for a part"
            );
            self.writes = false;
            return;
        }
        self.make_room(bytes);
        let blocks = segment.blocks.iter().map(|block| block.chain).collect();
        let name = segment::file_name(&segment);
        self.stats.pages_written += segment.blocks.len() as u64;
        let file = self.add(name.clone(), segment.group, blocks, bytes);
        self.waiting += segment.pages.len();
        self.send(Job::Write {
            file,
            name,
            segment,
        });
    }

    fn stats(&self) -> StoreStats {
        self.stats
    }
}

impl Drop for DiskStore {
    fn drop(&mut self) {
        // The thread sees the end of its jobs when all of them are done.
        self.jobs = None;
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

#[cfg(test)]
mod tests;
