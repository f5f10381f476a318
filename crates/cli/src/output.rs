//! Files that appear whole or not at all.

use std::{
    fs::{self, File},
    io::{BufWriter, Write},
    path::{Path, PathBuf},
};

use anyhow::{Context, Result};

/// A file under a temporary name beside its place; [`WholeFile::commit`] gives it its name, dropping it removes it.
pub(crate) struct WholeFile {
    writer: Option<BufWriter<File>>,
    temporary: PathBuf,
    path: PathBuf,
}

impl WholeFile {
    pub(crate) fn create(path: &Path) -> Result<WholeFile> {
        let name = path
            .file_name()
            .with_context(|| format!("`{}` names no file to write", path.display()))?;
        let mut temporary = name.to_owned();
        temporary.push(format!(".{}.partial", std::process::id()));
        let temporary = path.with_file_name(temporary);
        let file = File::create(&temporary).with_context(|| {
            format!(
                "cannot write `{}`; is its folder there and writable?",
                path.display()
            )
        })?;
        Ok(WholeFile {
            writer: Some(BufWriter::with_capacity(1 << 20, file)),
            temporary,
            path: path.to_owned(),
        })
    }

    pub(crate) fn write(&mut self, bytes: &[u8]) -> Result<()> {
        let writer = self.writer.as_mut().expect("open until it is committed");
        writer
            .write_all(bytes)
            .with_context(|| format!("cannot write `{}`", self.path.display()))
    }

    pub(crate) fn commit(mut self) -> Result<()> {
        let written = || format!("cannot finish writing `{}`", self.path.display());
        let writer = self.writer.take().expect("open until it is committed");
        let file = writer
            .into_inner()
            .map_err(std::io::IntoInnerError::into_error)
            .with_context(written)?;
        file.sync_all().with_context(written)?;
        fs::rename(&self.temporary, &self.path).with_context(written)
    }
}

impl Drop for WholeFile {
    fn drop(&mut self) {
        // After a commit there is nothing under this name, and that is fine.
        let _ = fs::remove_file(&self.temporary);
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
        file.commit().unwrap();
        assert_eq!(fs::read(&path).unwrap(), b"whole");
        assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 1);
    }

    #[test]
    fn a_folder_that_is_missing_is_named() {
        let error = WholeFile::create(Path::new("no/such/folder/out"))
            .err()
            .unwrap();
        assert!(format!("{error:#}").contains("no/such/folder/out"));
    }
}
