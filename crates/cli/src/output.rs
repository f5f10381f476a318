//! Files that appear whole or not at all.

use std::{
    fs::{self, File},
    io::{self, BufWriter, Write},
    os::fd::AsFd,
    path::{Path, PathBuf},
    sync::{Mutex, PoisonError},
};

use anyhow::{Context, Result, bail};

/// Temporary names of files that are being written, for whoever ends the program without unwinding.
static UNFINISHED: Mutex<Vec<PathBuf>> = Mutex::new(Vec::new());

/// Removes the files that have not got their names.
pub(crate) fn discard_unfinished() {
    for path in UNFINISHED
        .lock()
        .unwrap_or_else(PoisonError::into_inner)
        .drain(..)
    {
        let _ = fs::remove_file(path);
    }
}

/// A file under a temporary name beside its place; [`WholeFile::commit`] gives it its name, dropping it removes it.
/// `-` is standard output. Devices and pipes are written as they are, and what a link points at is replaced, not the link.
pub(crate) struct WholeFile {
    writer: BufWriter<File>,
    /// `None` where the content goes straight to its place.
    temporary: Option<PathBuf>,
    path: PathBuf,
}

impl WholeFile {
    pub(crate) fn create(path: &Path) -> Result<WholeFile> {
        if path.as_os_str() == "-" {
            let stdout = io::stdout().as_fd().try_clone_to_owned();
            let stdout = stdout.context("cannot write to stdout")?;
            return Ok(WholeFile {
                writer: BufWriter::with_capacity(1 << 20, File::from(stdout)),
                temporary: None,
                path: PathBuf::from("stdout"),
            });
        }
        let path = path.canonicalize().unwrap_or_else(|_| path.to_owned());
        if path.is_dir() {
            bail!("`{}` is a folder; name a file in it", path.display());
        }
        let name = path
            .file_name()
            .with_context(|| format!("`{}` names no file to write", path.display()))?;
        let temporary = (!path.exists() || path.is_file()).then(|| {
            let mut temporary = name.to_owned();
            temporary.push(format!(".{}.partial", std::process::id()));
            path.with_file_name(temporary)
        });
        let file = match &temporary {
            Some(temporary) => {
                let mut unfinished = UNFINISHED.lock().unwrap_or_else(PoisonError::into_inner);
                unfinished.push(temporary.clone());
                File::create(temporary)
            }
            None => File::options().write(true).open(&path),
        };
        let file = file.with_context(|| {
            format!(
                "cannot write `{}`; is its folder there and writable?",
                path.display()
            )
        })?;
        Ok(WholeFile {
            writer: BufWriter::with_capacity(1 << 20, file),
            temporary,
            path,
        })
    }

    pub(crate) fn write(&mut self, bytes: &[u8]) -> Result<()> {
        self.fill(|file| file.write_all(bytes))
    }

    /// Lets `content` write a part of the file.
    pub(crate) fn fill(
        &mut self,
        content: impl FnOnce(&mut dyn Write) -> io::Result<()>,
    ) -> Result<()> {
        content(&mut self.writer).with_context(|| format!("cannot write `{}`", self.path.display()))
    }

    /// Gives the file its name, and returns its size.
    pub(crate) fn commit(mut self) -> Result<u64> {
        let finish = |file: &mut WholeFile| -> io::Result<u64> {
            file.writer.flush()?;
            let Some(temporary) = &file.temporary else {
                return Ok(0);
            };
            file.writer.get_ref().sync_all()?;
            fs::rename(temporary, &file.path)?;
            Ok(file.writer.get_ref().metadata()?.len())
        };
        finish(&mut self)
            .with_context(|| format!("cannot finish writing `{}`", self.path.display()))
    }
}

impl Drop for WholeFile {
    fn drop(&mut self) {
        if let Some(temporary) = &self.temporary {
            // After a commit there is nothing under this name, and that is fine.
            let _ = fs::remove_file(temporary);
            let mut unfinished = UNFINISHED.lock().unwrap_or_else(PoisonError::into_inner);
            unfinished.retain(|path| path != temporary);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_file_appears_only_when_committed() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("out");
        let mut file = WholeFile::create(&path).unwrap();
        file.write(b"half").unwrap();
        drop(file);
        assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 0);
        let mut file = WholeFile::create(&path).unwrap();
        file.write(b"whole").unwrap();
        assert_eq!(file.commit().unwrap(), 5);
        assert_eq!(fs::read(&path).unwrap(), b"whole");
        assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 1);
    }

    #[test]
    fn a_link_stays_and_its_target_is_replaced() {
        let folder = tempfile::tempdir().unwrap();
        let (target, link) = (folder.path().join("target"), folder.path().join("link"));
        fs::write(&target, "old").unwrap();
        std::os::unix::fs::symlink(&target, &link).unwrap();
        let mut file = WholeFile::create(&link).unwrap();
        file.write(b"new").unwrap();
        file.commit().unwrap();
        assert!(link.is_symlink());
        assert_eq!(fs::read(&target).unwrap(), b"new");
    }

    #[test]
    fn a_device_is_written_and_stays_one() {
        let mut file = WholeFile::create(Path::new("/dev/null")).unwrap();
        file.write(b"gone").unwrap();
        file.commit().unwrap();
        assert!(!Path::new("/dev/null").is_file());
        let mut full = WholeFile::create(Path::new("/dev/full")).unwrap();
        full.write(b"too much").unwrap();
        assert!(format!("{:#}", full.commit().unwrap_err()).contains("/dev/full"));
    }

    #[test]
    fn a_folder_that_is_missing_is_named() {
        let error = WholeFile::create(Path::new("no/such/folder/out"))
            .err()
            .unwrap();
        assert!(format!("{error:#}").contains("no/such/folder/out"));
        let error = WholeFile::create(Path::new("/")).err().unwrap();
        assert!(format!("{error:#}").contains("is a folder"));
    }
}
