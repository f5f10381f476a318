//! The folder that files of pages are in: ours alone, and one writer at a time.

use std::{
    fs::{self, DirBuilder, File, FileTimes, OpenOptions, TryLockError},
    io::{self, Read, Seek, SeekFrom, Write},
    path::{Path, PathBuf},
    time::SystemTime,
};

#[cfg(unix)]
use std::os::unix::fs::{DirBuilderExt, MetadataExt, OpenOptionsExt};

/// Reason a folder cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum DiskError {
    /// It belongs to somebody else, who could read what is said here or change it.
    #[error("{} belongs to another user: prompts would lie there in clear; give a folder of your own", .0.display())]
    NotOurs(PathBuf),
    /// It cannot be made, read or written.
    #[error("{}: {error}", path.display())]
    Io {
        /// The folder, or a file in it.
        path: PathBuf,
        /// As the system says.
        error: io::Error,
    },
}

/// A file that was found.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Listed {
    pub(super) name: String,
    pub(super) bytes: u64,
    pub(super) used: SystemTime,
}

/// Operations on files. A trait, so that a test can lose and damage them at any moment.
pub(super) trait Files: Send {
    fn list(&mut self) -> io::Result<Vec<Listed>>;
    /// So many bytes from there on.
    fn read(&mut self, name: &str, from: u64, bytes: usize) -> io::Result<Vec<u8>>;
    /// A whole file, which nobody finds under a name that counts before it is renamed.
    fn create(&mut self, name: &str, bytes: &[u8]) -> io::Result<()>;
    fn rename(&mut self, from: &str, to: &str) -> io::Result<()>;
    fn remove(&mut self, name: &str) -> io::Result<()>;
    /// Notes that a file was used then.
    fn touch(&mut self, name: &str, when: SystemTime) -> io::Result<()>;
}

/// A folder of the file system.
pub(super) struct Folder {
    path: PathBuf,
    /// `None` if another process writes: then this one reads only.
    lock: Option<File>,
}

const LOCK: &str = "lock";

impl Folder {
    /// Makes the folder of a namespace in `parent` if there is none, and locks it.
    pub(super) fn open(parent: &Path, name: &str) -> Result<Folder, DiskError> {
        let path = parent.join(name);
        let failed = |error| DiskError::Io {
            path: path.clone(),
            error,
        };
        make(parent).map_err(failed)?;
        make(&path).map_err(failed)?;
        let lock = private(OpenOptions::new().write(true).create(true).truncate(false))
            .open(path.join(LOCK))
            .map_err(failed)?;
        #[cfg(unix)]
        {
            let own = lock.metadata().map_err(failed)?.uid();
            for folder in [parent, &path] {
                if fs::metadata(folder).map_err(failed)?.uid() != own {
                    return Err(DiskError::NotOurs(folder.to_owned()));
                }
            }
        }
        let lock = match lock.try_lock() {
            Ok(()) => Some(lock),
            Err(TryLockError::WouldBlock) => None,
            Err(TryLockError::Error(error)) => return Err(failed(error)),
        };
        Ok(Folder { path, lock })
    }

    /// Whether nobody else writes here.
    pub(super) fn is_writable(&self) -> bool {
        self.lock.is_some()
    }

    /// Makes room below a limit on all namespaces together, by removing those of other models that nobody has open, those used
    /// longest ago first.
    pub(super) fn shrink_others(&self, parent: &Path, max_bytes: u64) {
        let folders = fs::read_dir(parent).into_iter().flatten().flatten();
        let others = folders
            .map(|entry| entry.path())
            .filter(|path| *path != self.path);
        let mut sized: Vec<(SystemTime, u64, PathBuf)> = others
            .filter(|path| path.join(LOCK).is_file())
            .map(|path| {
                let files = fs::read_dir(&path).into_iter().flatten().flatten();
                let metadata: Vec<_> = files.filter_map(|file| file.metadata().ok()).collect();
                let used = metadata.iter().filter_map(|m| m.modified().ok()).max();
                let bytes = metadata.iter().map(fs::Metadata::len).sum();
                (used.unwrap_or(SystemTime::UNIX_EPOCH), bytes, path)
            })
            .collect();
        sized.sort();
        let mut total: u64 = sized.iter().map(|(_, bytes, _)| bytes).sum();
        for (_, bytes, path) in sized {
            if total <= max_bytes / 2 {
                return;
            }
            let lock = File::open(path.join(LOCK));
            if lock.is_ok_and(|lock| lock.try_lock().is_ok()) && fs::remove_dir_all(&path).is_ok() {
                tracing::info!(folder = %path.display(), bytes, "removed another model's prefix cache");
                total -= bytes;
            }
        }
    }

    fn at(&self, name: &str) -> PathBuf {
        self.path.join(name)
    }
}

fn make(path: &Path) -> io::Result<()> {
    let mut builder = DirBuilder::new();
    builder.recursive(true);
    #[cfg(unix)]
    builder.mode(0o700);
    builder.create(path)
}

/// Nobody else may read it.
fn private(options: &mut OpenOptions) -> &mut OpenOptions {
    #[cfg(unix)]
    options.mode(0o600);
    options
}

impl Files for Folder {
    fn list(&mut self) -> io::Result<Vec<Listed>> {
        let mut listed = Vec::new();
        for entry in fs::read_dir(&self.path)? {
            let entry = entry?;
            let (Ok(name), Ok(metadata)) = (entry.file_name().into_string(), entry.metadata())
            else {
                continue;
            };
            if metadata.is_file() && name != LOCK {
                listed.push(Listed {
                    name,
                    bytes: metadata.len(),
                    used: metadata.modified()?,
                });
            }
        }
        Ok(listed)
    }

    fn read(&mut self, name: &str, from: u64, bytes: usize) -> io::Result<Vec<u8>> {
        let mut file = File::open(self.at(name))?;
        file.seek(SeekFrom::Start(from))?;
        let mut out = vec![0; bytes];
        file.read_exact(&mut out)?;
        Ok(out)
    }

    fn create(&mut self, name: &str, bytes: &[u8]) -> io::Result<()> {
        let mut options = OpenOptions::new();
        let options = private(options.write(true).create(true).truncate(true));
        options.open(self.at(name))?.write_all(bytes)
    }

    fn rename(&mut self, from: &str, to: &str) -> io::Result<()> {
        fs::rename(self.at(from), self.at(to))
    }

    fn remove(&mut self, name: &str) -> io::Result<()> {
        fs::remove_file(self.at(name))
    }

    fn touch(&mut self, name: &str, when: SystemTime) -> io::Result<()> {
        let file = OpenOptions::new().write(true).open(self.at(name))?;
        file.set_times(FileTimes::new().set_modified(when))
    }
}
