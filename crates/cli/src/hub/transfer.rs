//! Moves one file's content into the cache: resumable, verified, and by one process at a time.
//!
//! Bytes go straight to `<etag>.incomplete`, which becomes the blob by renaming once size and SHA-256 are right. An
//! interrupted transfer keeps what it has for the next one. A transfer that cannot succeed, because the disk is full
//! or the content is wrong, leaves nothing.

use std::{
    fmt::{self, Write as _},
    fs::{self, File},
    io::{self, Read, Seek, SeekFrom, Write},
    path::{Path, PathBuf},
};

use anyhow::{Context, Error, Result, anyhow, bail, ensure};
use indicatif::DecimalBytes;
use sha2::{Digest, Sha256};
use ureq::{
    Body,
    http::{Response, StatusCode, header},
};

use super::{
    cache::RepoCache,
    client::{Client, Description, Source},
    progress::{Progress, Watch, pause, pause_briefly, report},
};

/// Bytes moved between two reports.
const CHUNK_BYTES: usize = 1 << 20;

/// One file to bring into the cache.
pub(super) struct Transfer<'a> {
    pub(super) client: &'a Client,
    pub(super) cache: &'a RepoCache,
    pub(super) source: Source<'a>,
    pub(super) wanted: &'a Description,
}

/// Reason content stopped arriving.
enum Interruption {
    /// The connection broke; what arrived is good.
    Cut(io::Error),
    /// Nothing another attempt would change.
    Fatal(Error),
}

impl Transfer<'_> {
    /// Whether the content is in the cache already.
    pub(super) fn is_done(&self) -> bool {
        let blob = fs::metadata(self.cache.blob(&self.wanted.etag));
        blob.is_ok_and(|blob| blob.is_file() && blob.len() == self.wanted.size_bytes)
    }

    /// Bytes still to fetch.
    pub(super) fn missing_bytes(&self) -> u64 {
        if self.is_done() {
            return 0;
        }
        let partial = fs::metadata(self.cache.incomplete(&self.wanted.etag));
        let kept = partial.map_or(0, |partial| partial.len());
        self.wanted.size_bytes.saturating_sub(kept)
    }

    /// Fetches what is missing. Returns the bytes received.
    pub(super) fn run(&self, watch: &mut Watch<'_>) -> Result<u64> {
        let waiting = Progress::Waiting { file: self.name() };
        let _lock = loop {
            if let Some(lock) = self.cache.try_lock(&self.wanted.etag)? {
                break lock;
            }
            pause_briefly(waiting, watch)?;
        };
        if self.is_done() {
            return Ok(0); // by the process that held the lock
        }
        let mut partial = self.open_partial(watch)?;
        let received = self.fill(&mut partial, watch)?;
        self.finish(partial)?;
        Ok(received)
    }

    fn name(&self) -> &str {
        self.source.file.as_str()
    }

    fn open_partial(&self, watch: &mut Watch<'_>) -> Result<Partial> {
        let path = self.cache.incomplete(&self.wanted.etag);
        let total = self.wanted.size_bytes;
        let mut partial =
            Partial::open(&path).with_context(|| format!("cannot write {}", path.display()))?;
        let kept = partial.kept_bytes;
        if kept > total {
            partial
                .restart()
                .with_context(|| format!("cannot write {}", path.display()))?;
            return Ok(partial);
        }
        let mut buffer = vec![0; CHUNK_BYTES];
        while partial.len < kept {
            report(
                watch,
                Progress::Checking {
                    file: self.name(),
                    done: partial.len,
                    total: kept,
                },
            )?;
            partial.take_kept(&mut buffer).with_context(|| {
                format!("cannot read {}; delete it to start over", path.display())
            })?;
        }
        Ok(partial)
    }

    /// Receives until the size is right, over as many connections as it takes. Returns the bytes received.
    fn fill(&self, partial: &mut Partial, watch: &mut Watch<'_>) -> Result<u64> {
        let total = self.wanted.size_bytes;
        let retry = self.client.retry();
        let (mut received, mut furthest, mut attempt) = (0, partial.len, 0);
        while partial.len < total {
            let response = self.client.open(self.source, partial.len, watch)?;
            let cut = match self.receive(response, partial, &mut received, watch) {
                Ok(()) => continue,
                Err(Interruption::Fatal(error)) => return Err(error),
                Err(Interruption::Cut(error)) => error,
            };
            // Only attempts that gain nothing count against the limit: a long transfer may break many times.
            if partial.len > furthest {
                (furthest, attempt) = (partial.len, 0);
            }
            attempt += 1;
            if attempt >= retry.attempts {
                bail!(
                    "the download of {} broke off at {} of {} ({cut}); the same command resumes it",
                    self.name(),
                    DecimalBytes(partial.len),
                    DecimalBytes(total)
                );
            }
            let wait = retry.wait(attempt - 1);
            let reason = format!("the connection broke off ({cut})");
            pause(
                wait,
                Progress::Retrying {
                    reason: &reason,
                    wait,
                },
                watch,
            )?;
        }
        Ok(received)
    }

    /// Takes one answer's content. `Ok` means the connection gave all it promised.
    fn receive(
        &self,
        response: Response<Body>,
        partial: &mut Partial,
        received: &mut u64,
        watch: &mut Watch<'_>,
    ) -> Result<(), Interruption> {
        let total = self.wanted.size_bytes;
        if !continues_at(&response, partial.len) {
            partial
                .restart()
                .map_err(|error| Interruption::Fatal(self.disk_error(partial, &error)))?;
            if response.status() != StatusCode::OK {
                let what = format!("the server answered {} to a range", response.status());
                return Err(Interruption::Cut(io::Error::other(what)));
            }
        }
        let mut body = response.into_body().into_reader();
        let mut buffer = vec![0; CHUNK_BYTES];
        loop {
            let progress = Progress::Receiving {
                file: self.name(),
                done: partial.len,
                total,
            };
            report(watch, progress).map_err(Interruption::Fatal)?;
            let count = match body.read(&mut buffer) {
                Ok(0) if partial.len < total => {
                    return Err(Interruption::Cut(io::ErrorKind::UnexpectedEof.into()));
                }
                Ok(0) => return Ok(()),
                Ok(count) => count,
                Err(error) if error.kind() == io::ErrorKind::Interrupted => continue,
                Err(error) => return Err(Interruption::Cut(error)),
            };
            if count as u64 > total - partial.len {
                partial.remove();
                return Err(Interruption::Fatal(anyhow!(
                    "the server sent more of {} than the {} it announced; the download was removed",
                    self.name(),
                    DecimalBytes(total)
                )));
            }
            partial
                .append(&buffer[..count])
                .map_err(|error| Interruption::Fatal(self.disk_error(partial, &error)))?;
            *received += count as u64;
        }
    }

    /// Verifies the content and gives it its name.
    fn finish(&self, mut partial: Partial) -> Result<()> {
        // Some file systems report a full disk only now.
        partial
            .file
            .sync_all()
            .map_err(|error| self.disk_error(&partial, &error))?;
        if let Some(expected) = self.wanted.etag.sha256() {
            let found = partial.digest();
            if found != expected {
                partial.remove();
                bail!(
                    "the content of {} is damaged: its SHA-256 is {found} where the hub announced {expected}; the \
                     download was removed, run the same command to fetch it again",
                    self.name()
                );
            }
        }
        let blob = self.cache.blob(&self.wanted.etag);
        fs::rename(&partial.path, &blob).with_context(|| format!("cannot write {}", blob.display()))
    }

    /// A write failed: removes what there is and says what is needed.
    fn disk_error(&self, partial: &Partial, error: &io::Error) -> Error {
        partial.remove();
        let what = match error.kind() {
            io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded => {
                "the disk is full".to_owned()
            }
            _ => format!("cannot write {} ({error})", partial.path.display()),
        };
        let folder = self.cache.blobs();
        anyhow!(
            "{what}: {} needs {}; the partial download was removed, {}",
            self.name(),
            Space::on_disk_of(&folder, self.wanted.size_bytes),
            way_out(&folder)
        )
    }
}

/// Whether an answer goes on at byte `at`, rather than starting over.
fn continues_at(response: &Response<Body>, at: u64) -> bool {
    match response.status() {
        StatusCode::OK => at == 0,
        StatusCode::PARTIAL_CONTENT => {
            let range = response.headers().get(header::CONTENT_RANGE);
            range
                .and_then(|range| range.to_str().ok()?.strip_prefix("bytes ")?.split_once('-'))
                .is_some_and(|(start, _)| start.parse() == Ok(at))
        }
        _ => false,
    }
}

/// Refuses a download that cannot fit, before it starts.
pub(super) fn ensure_space(folder: &Path, needed: u64) -> Result<()> {
    let space = Space::on_disk_of(folder, needed);
    ensure!(
        space.free.is_none_or(|free| needed <= free),
        "not enough disk space: the download needs {space}; {}",
        way_out(folder)
    );
    Ok(())
}

struct Space {
    needed: u64,
    /// `None` where the file system does not tell.
    free: Option<u64>,
}

impl Space {
    fn on_disk_of(folder: &Path, needed: u64) -> Space {
        let disk = rustix::fs::statvfs(folder)
            .ok()
            .filter(|disk| disk.f_blocks > 0);
        Space {
            needed,
            free: disk.map(|disk| disk.f_bavail.saturating_mul(disk.f_frsize)),
        }
    }
}

impl fmt::Display for Space {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        DecimalBytes(self.needed).fmt(f)?;
        match self.free {
            Some(free) => write!(f, " and {} are free", DecimalBytes(free)),
            None => Ok(()),
        }
    }
}

fn way_out(folder: &Path) -> String {
    format!(
        "free some space on the disk of {} (its *.incomplete files are unfinished downloads) or set HF_HUB_CACHE to a \
         folder on a larger one, then run the same command again",
        folder.display()
    )
}

/// The content so far, on disk and as a running hash.
struct Partial {
    path: PathBuf,
    file: File,
    hash: Sha256,
    /// Bytes hashed, which is also where the file stands.
    len: u64,
    /// Bytes an earlier transfer left.
    kept_bytes: u64,
}

impl Partial {
    fn open(path: &Path) -> io::Result<Partial> {
        let file = File::options()
            .create(true)
            .truncate(false)
            .read(true)
            .write(true)
            .open(path)?;
        let kept_bytes = file.metadata()?.len();
        Ok(Partial {
            path: path.to_owned(),
            file,
            hash: Sha256::new(),
            len: 0,
            kept_bytes,
        })
    }

    /// Hashes the next piece of what an earlier transfer left.
    fn take_kept(&mut self, buffer: &mut [u8]) -> io::Result<()> {
        let count = self.file.read(buffer)?;
        if count == 0 {
            return Err(io::ErrorKind::UnexpectedEof.into());
        }
        self.hash.update(&buffer[..count]);
        self.len += count as u64;
        Ok(())
    }

    fn append(&mut self, bytes: &[u8]) -> io::Result<()> {
        self.file.write_all(bytes)?;
        self.hash.update(bytes);
        self.len += bytes.len() as u64;
        Ok(())
    }

    fn restart(&mut self) -> io::Result<()> {
        self.file.set_len(0)?;
        self.file.seek(SeekFrom::Start(0))?;
        self.hash.reset();
        self.len = 0;
        Ok(())
    }

    fn digest(&mut self) -> String {
        hex(&self.hash.finalize_reset())
    }

    fn remove(&self) {
        // Cut first: while the file is open, its name alone frees no space.
        let _ = self.file.set_len(0);
        // Best effort: the caller reports why the content is of no use, and a later transfer starts over anyway.
        let _ = fs::remove_file(&self.path);
    }
}

pub(super) fn hex(bytes: &[u8]) -> String {
    bytes.iter().fold(String::new(), |mut text, byte| {
        write!(text, "{byte:02x}").expect("writing to a string cannot fail");
        text
    })
}
