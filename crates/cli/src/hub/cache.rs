//! The model cache on disk, in the layout every Hugging Face tool shares:
//!
//! ```text
//! <cache>/models--owner--name/blobs/<etag>                 content
//!                             blobs/<etag>.incomplete      a transfer that can be resumed
//!                             snapshots/<commit>/<file>    -> ../../blobs/<etag>
//!                             refs/main                    the commit last pulled
//! <cache>/.locks/models--owner--name/<etag>.lock           held while a blob is written
//! ```
//!
//! A name appears under `snapshots` or `refs` by renaming, after what it points to is whole: another process sees
//! the old state or the new one. Nothing here talks to the network.

use std::{
    cmp::Reverse,
    fs::{self, File, TryLockError},
    io,
    os::unix::fs::symlink,
    path::{Path, PathBuf},
    time::SystemTime,
};

use anyhow::{Context, Result};

use super::names::{Commit, Etag, RepoFile, RepoId};

/// The only branch pulled.
pub(super) const BRANCH: &str = "main";

/// Deepest folder searched in a snapshot; repositories keep split models one level down.
const MAX_DEPTH: usize = 4;

/// The cache folder as a whole.
pub(super) struct Cache {
    root: PathBuf,
}

/// One repository's part of the cache.
pub(super) struct RepoCache {
    folder: PathBuf,
    locks: PathBuf,
}

/// Held while a blob is written; released when dropped, or by the system when the process dies.
pub(super) struct BlobLock {
    _file: File,
}

impl Cache {
    pub(super) fn new(root: PathBuf) -> Cache {
        Cache { root }
    }

    pub(super) fn repo(&self, repo: &RepoId) -> RepoCache {
        let name = repo.folder_name();
        RepoCache {
            folder: self.root.join(&name),
            locks: self.root.join(".locks").join(name),
        }
    }

    /// All repositories there are, by name. No cache folder means none.
    pub(super) fn repos(&self) -> Result<Vec<RepoId>> {
        let mut repos: Vec<_> = entries(&self.root)?
            .iter()
            .filter_map(|entry| RepoId::from_folder_name(entry.file_name().to_str()?))
            .collect();
        repos.sort();
        Ok(repos)
    }
}

impl RepoCache {
    pub(super) fn blobs(&self) -> PathBuf {
        self.folder.join("blobs")
    }

    pub(super) fn blob(&self, etag: &Etag) -> PathBuf {
        self.blobs().join(etag.as_str())
    }

    pub(super) fn incomplete(&self, etag: &Etag) -> PathBuf {
        self.blobs().join(format!("{}.incomplete", etag.as_str()))
    }

    pub(super) fn snapshot(&self, commit: &Commit) -> PathBuf {
        self.folder.join("snapshots").join(commit.as_str())
    }

    /// Creates the folders a download writes to.
    pub(super) fn prepare(&self) -> Result<()> {
        for folder in [&self.blobs(), &self.locks] {
            fs::create_dir_all(folder).with_context(|| {
                format!(
                    "cannot create {}; set HF_HUB_CACHE to a folder you can write to",
                    folder.display()
                )
            })?;
        }
        Ok(())
    }

    /// The right to write a blob, or `None` while another process has it.
    pub(super) fn try_lock(&self, etag: &Etag) -> Result<Option<BlobLock>> {
        let path = self.locks.join(format!("{}.lock", etag.as_str()));
        let lock = || -> io::Result<_> {
            let file = File::options()
                .create(true)
                .truncate(false)
                .write(true)
                .open(&path)?;
            match file.try_lock() {
                Ok(()) => Ok(Some(BlobLock { _file: file })),
                Err(TryLockError::WouldBlock) => Ok(None),
                Err(TryLockError::Error(error)) => Err(error),
            }
        };
        lock().with_context(|| format!("cannot lock {}", path.display()))
    }

    /// Makes `file` of `commit` show the blob `etag`, which must be there.
    pub(super) fn link(&self, commit: &Commit, file: &RepoFile, etag: &Etag) -> Result<PathBuf> {
        let path = self.snapshot(commit).join(file.as_str());
        let up = "../".repeat(file.as_str().matches('/').count() + 2);
        let target = PathBuf::from(format!("{up}blobs/{}", etag.as_str()));
        replace(&path, |temporary| symlink(&target, temporary))?;
        Ok(path)
    }

    /// Takes a name out of a revision, and its content if no other name shows it. Returns the bytes that are free again.
    pub(super) fn remove(&self, commit: &Commit, file: &RepoFile) -> Result<u64> {
        let snapshot = self.snapshot(commit);
        let path = snapshot.join(file.as_str());
        let cannot = |path: &Path| format!("cannot remove {}", path.display());
        let entry = path.symlink_metadata().with_context(|| cannot(&path))?;
        // Other tools copy where links are not to be had.
        let shown = entry.is_symlink().then(|| path.canonicalize().ok());
        fs::remove_file(&path).with_context(|| cannot(&path))?;
        for folder in path.ancestors().skip(1) {
            // Only an empty one goes.
            if !folder.starts_with(&snapshot) || fs::remove_dir(folder).is_err() {
                break;
            }
        }
        let Some(blob) = shown else {
            return Ok(entry.len());
        };
        let blobs = self.blobs().canonicalize().ok();
        let Some(blob) = blob.filter(|blob| blob.parent() == blobs.as_deref()) else {
            return Ok(0);
        };
        for other in self.revisions()? {
            for file in self.files(&other)? {
                let shown = self.snapshot(&other).join(file.as_str()).canonicalize();
                if shown.is_ok_and(|shown| shown == blob) {
                    return Ok(0);
                }
            }
        }
        let bytes = blob.metadata().map_or(0, |meta| meta.len());
        fs::remove_file(&blob).with_context(|| cannot(&blob))?;
        Ok(bytes)
    }

    /// Remembers `commit` as what the branch points to.
    pub(super) fn set_current(&self, commit: &Commit) -> Result<()> {
        replace(&self.folder.join("refs").join(BRANCH), |temporary| {
            fs::write(temporary, commit.as_str())
        })
    }

    pub(super) fn current(&self) -> Option<Commit> {
        let text = fs::read_to_string(self.folder.join("refs").join(BRANCH)).ok()?;
        text.trim().parse().ok()
    }

    /// Revisions with a folder: the one last pulled, then the others from new to old.
    pub(super) fn revisions(&self) -> Result<Vec<Commit>> {
        let current = self.current();
        let mut found: Vec<_> = entries(&self.folder.join("snapshots"))?
            .iter()
            .filter_map(|entry| {
                let commit: Commit = entry.file_name().to_str()?.parse().ok()?;
                let changed = entry
                    .metadata()
                    .ok()?
                    .modified()
                    .unwrap_or(SystemTime::UNIX_EPOCH);
                Some((current.as_ref() == Some(&commit), changed, commit))
            })
            .collect();
        found.sort_by_key(|(is_current, changed, _)| Reverse((*is_current, *changed)));
        Ok(found.into_iter().map(|(_, _, commit)| commit).collect())
    }

    /// Files of a revision whose content is there.
    pub(super) fn files(&self, commit: &Commit) -> Result<Vec<RepoFile>> {
        let mut files = Vec::new();
        let mut folders = vec![(self.snapshot(commit), String::new(), 0)];
        while let Some((folder, prefix, depth)) = folders.pop() {
            for entry in entries(&folder)? {
                let Some(name) = entry
                    .file_name()
                    .to_str()
                    .map(|name| format!("{prefix}{name}"))
                else {
                    continue;
                };
                if entry.file_type().is_ok_and(|kind| kind.is_dir()) {
                    if depth < MAX_DEPTH {
                        folders.push((entry.path(), name + "/", depth + 1));
                    }
                } else if entry.path().is_file() {
                    // Follows the link: a blob that was deleted by hand is not there.
                    files.extend(name.parse::<RepoFile>());
                }
            }
        }
        files.sort();
        Ok(files)
    }
}

/// The entries of a folder; none when the folder is missing.
fn entries(folder: &Path) -> Result<Vec<fs::DirEntry>> {
    match fs::read_dir(folder) {
        Ok(entries) => Ok(entries.flatten().collect()),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(Vec::new()),
        Err(error) => Err(error).with_context(|| format!("cannot read {}", folder.display())),
    }
}

/// Creates or replaces `path` in one step: `make` builds it under a name no other process uses.
fn replace(path: &Path, make: impl FnOnce(&Path) -> io::Result<()>) -> Result<()> {
    // A thread makes one at a time, so process and thread tell all writers apart.
    let temporary = path.with_file_name(format!(
        ".new-{}-{:?}",
        std::process::id(),
        std::thread::current().id()
    ));
    let folder = path.parent().expect("paths in the cache have a folder");
    fs::create_dir_all(folder)
        .and_then(|()| make(&temporary))
        .and_then(|()| fs::rename(&temporary, path))
        .inspect_err(|_| {
            // Best effort: the error that matters is the one already at hand.
            let _ = fs::remove_file(&temporary);
        })
        .with_context(|| format!("cannot write {}", path.display()))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn commit(digit: char) -> Commit {
        digit.to_string().repeat(40).parse().unwrap()
    }

    fn tag(text: &str) -> Etag {
        Etag::from_header(text).unwrap()
    }

    fn repo_cache(root: &Path) -> RepoCache {
        let cache = Cache::new(root.to_owned()).repo(&"o/r".parse().unwrap());
        cache.prepare().unwrap();
        cache
    }

    #[test]
    fn links_are_relative_and_reach_the_blob_from_any_depth() {
        let root = tempfile::tempdir().unwrap();
        let cache = repo_cache(root.path());
        fs::write(cache.blob(&tag("abc")), "content").unwrap();
        for (name, target) in [
            ("a.gguf", "../../blobs/abc"),
            ("BF16/a.gguf", "../../../blobs/abc"),
        ] {
            let file = name.parse().unwrap();
            let path = cache.link(&commit('1'), &file, &tag("abc")).unwrap();
            assert_eq!(fs::read_link(&path).unwrap(), PathBuf::from(target));
            assert_eq!(fs::read_to_string(&path).unwrap(), "content");
            // A second process that links the same file replaces it.
            cache.link(&commit('1'), &file, &tag("abc")).unwrap();
        }
        let files = cache.files(&commit('1')).unwrap();
        assert_eq!(
            files,
            ["BF16/a.gguf".parse().unwrap(), "a.gguf".parse().unwrap()]
        );
    }

    #[test]
    fn a_link_without_its_blob_is_not_a_file() {
        let root = tempfile::tempdir().unwrap();
        let cache = repo_cache(root.path());
        cache
            .link(&commit('1'), &"a.gguf".parse().unwrap(), &tag("abc"))
            .unwrap();
        assert!(cache.files(&commit('1')).unwrap().is_empty());
    }

    #[test]
    fn the_revision_last_pulled_comes_first() {
        let root = tempfile::tempdir().unwrap();
        let cache = repo_cache(root.path());
        assert_eq!(cache.current(), None);
        assert!(cache.revisions().unwrap().is_empty());
        for digit in ['1', '2', '3'] {
            fs::create_dir_all(cache.snapshot(&commit(digit))).unwrap();
        }
        fs::create_dir_all(cache.folder.join("snapshots/stranger")).unwrap();
        cache.set_current(&commit('2')).unwrap();
        let revisions = cache.revisions().unwrap();
        assert_eq!(revisions.len(), 3);
        assert_eq!(revisions[0], commit('2'));
    }

    #[test]
    fn a_blob_is_written_by_one_holder_of_its_lock() {
        let root = tempfile::tempdir().unwrap();
        let (one, other) = (repo_cache(root.path()), repo_cache(root.path()));
        let held = one.try_lock(&tag("abc")).unwrap().unwrap();
        assert!(other.try_lock(&tag("abc")).unwrap().is_none());
        assert!(other.try_lock(&tag("def")).unwrap().is_some());
        drop(held);
        assert!(other.try_lock(&tag("abc")).unwrap().is_some());
    }

    #[test]
    fn failed_writes_leave_nothing_behind() {
        let root = tempfile::tempdir().unwrap();
        let path = root.path().join("refs/main");
        let result = replace(&path, |temporary| {
            fs::write(temporary, "half")?;
            Err(io::ErrorKind::StorageFull.into())
        });
        assert!(result.is_err());
        assert_eq!(fs::read_dir(root.path().join("refs")).unwrap().count(), 0);
    }
}
