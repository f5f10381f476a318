//! The thread that reads and writes files.

use std::{
    io,
    sync::{
        Arc,
        mpsc::{Receiver, Sender},
    },
    time::{Duration, Instant, SystemTime},
};

use carat_model::kv::KvGroup;

use super::{
    folder::Files,
    segment::{self, Kind, Namespace, PREAMBLE},
};
use crate::core::{PageBytes, Segment, StoredBlock};

/// Behind the name of a file that is not whole yet.
const UNFINISHED: &str = "-new";

/// Whether a file was being written when its writer stopped.
pub(super) fn is_unfinished(name: &str) -> bool {
    name.ends_with(UNFINISHED)
}

/// Work for the thread, done in order.
pub(super) enum Job {
    Write {
        file: u64,
        name: String,
        segment: Segment,
    },
    Read {
        id: u64,
        pages: usize,
        files: Vec<FileRead>,
    },
    Remove(String),
}

/// Pages of one file.
pub(super) struct FileRead {
    pub(super) file: u64,
    pub(super) name: String,
    pub(super) group: KvGroup,
    /// Each with its place in the file, and in what was asked for.
    pub(super) wanted: Vec<(usize, usize, StoredBlock)>,
}

pub(super) enum Done {
    Written {
        file: u64,
        bytes: usize,
        error: Option<io::Error>,
    },
    Read {
        id: u64,
        pages: Vec<Option<PageBytes>>,
        /// Files that could not be read, or are not what they should be.
        refused: Vec<u64>,
        bytes: u64,
        took: Duration,
    },
}

/// The thread's whole life.
pub(super) fn run(mut files: impl Files, kind: &Kind, jobs: Receiver<Job>, done: &Sender<Done>) {
    for job in jobs {
        let result = match job {
            Job::Write {
                file,
                name,
                segment,
            } => {
                let bytes = segment.pages.len();
                let error = write(&mut files, &kind.namespace, &name, &segment).err();
                Done::Written { file, bytes, error }
            }
            Job::Read {
                id,
                pages: count,
                files: wanted,
            } => {
                let begun = Instant::now();
                let (mut pages, mut refused, mut bytes) = (vec![None; count], Vec::new(), 0);
                for (index, one) in wanted.iter().enumerate() {
                    match read(&mut files, kind, one) {
                        Ok(read) => {
                            for (place, page) in read {
                                bytes += page.range.len() as u64;
                                pages[place] = Some(page);
                            }
                            // What comes first in a prompt is of use without the rest, so it is removed last.
                            let earlier = Duration::from_micros(index as u64);
                            let when = SystemTime::now() - earlier;
                            // A file that cannot be touched is removed too early: no more than that.
                            let _ = files.touch(&one.name, when);
                        }
                        Err(reason) => {
                            tracing::warn!(file = one.name, reason, "cached prefix refused");
                            refused.push(one.file);
                        }
                    }
                }
                Done::Read {
                    id,
                    pages,
                    refused,
                    bytes,
                    took: begun.elapsed(),
                }
            }
            Job::Remove(name) => {
                // It may be gone already.
                let _ = files.remove(&name);
                continue;
            }
        };
        if done.send(result).is_err() {
            return;
        }
    }
}

fn write(
    files: &mut impl Files,
    namespace: &Namespace,
    name: &str,
    segment: &Segment,
) -> io::Result<()> {
    let unfinished = format!("{name}{UNFINISHED}");
    let written = files
        .create(&unfinished, &segment::encode(namespace, segment))
        .and_then(|()| files.rename(&unfinished, name));
    if written.is_err() {
        let _ = files.remove(&unfinished);
    }
    written
}

/// Pages of a file with their places in what was asked for, all of them right.
fn read(
    files: &mut impl Files,
    kind: &Kind,
    wanted: &FileRead,
) -> Result<Vec<(usize, PageBytes)>, String> {
    let name = &wanted.name;
    let io = |error: io::Error| error.to_string();
    let preamble = files.read(name, 0, PREAMBLE).map_err(io)?;
    let length = segment::header_length(&preamble).map_err(|e| e.to_string())?;
    let header = files.read(name, 0, length).map_err(io)?;
    let header = segment::decode(&header, kind).map_err(|e| e.to_string())?;
    for (place, _, block) in &wanted.wanted {
        if header.group != wanted.group || header.blocks.get(*place) != Some(block) {
            return Err("it holds other pages than its name says".to_owned());
        }
    }
    let places = || wanted.wanted.iter().map(|(place, ..)| *place);
    let (first, last) = (places().min().unwrap_or(0), places().max().unwrap_or(0));
    let bytes = header.page_bytes;
    let start = (header.length + first * bytes) as u64;
    let buffer = files
        .read(name, start, (last + 1 - first) * bytes)
        .map_err(io)?;
    let buffer = Arc::new(buffer);
    let mut pages = Vec::with_capacity(wanted.wanted.len());
    for (place, asked, _) in &wanted.wanted {
        let range = (place - first) * bytes..(place - first + 1) * bytes;
        if *blake3::hash(&buffer[range.clone()]).as_bytes() != header.digests[*place] {
            return Err("a page does not fit its digest".to_owned());
        }
        let buffer = Arc::clone(&buffer);
        pages.push((*asked, PageBytes { buffer, range }));
    }
    Ok(pages)
}
