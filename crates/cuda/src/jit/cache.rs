//! Compiled kernels on disk, by content: a folder of files named by a hash of text and options.
//!
//! A file carries the digest of its image, so one that was cut short or damaged is noticed and compiled again. Writers put a
//! whole file in place by renaming, so readers never see half of one.

use std::{
    fmt::Write,
    fs, io,
    path::{Path, PathBuf},
};

use sha2::{Digest, Sha256};

/// Changes when the file's layout does.
const MAGIC: &[u8; 8] = b"caratk1\n";
const DIGEST: usize = 32;
const HEAD: usize = MAGIC.len() + DIGEST + 8;

/// A compiled kernel, and the version of the compiler.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Entry {
    pub(crate) image: Vec<u8>,
    /// Of NVRTC: major, minor.
    pub(crate) version: (i32, i32),
}

/// File name of the kernel of this text and these options. `name` and `arch` are for people.
pub(crate) fn file_name(name: &str, arch: &str, source: &str, options: &[String]) -> String {
    let mut digest = Sha256::new();
    digest.update((source.len() as u64).to_le_bytes());
    digest.update(source);
    for option in options {
        digest.update((option.len() as u64).to_le_bytes());
        digest.update(option);
    }
    let mut file = format!("{name}-{arch}-");
    for byte in &digest.finalize()[..12] {
        write!(file, "{byte:02x}").expect("strings take all writes");
    }
    file + ".cubin"
}

/// The entry, if it is there and whole.
pub(crate) fn read(folder: &Path, file: &str) -> Option<Entry> {
    let bytes = fs::read(folder.join(file)).ok()?;
    let whole = decode(&bytes);
    if whole.is_none() {
        tracing::warn!(folder = %folder.display(), file, "a compiled kernel is damaged");
    }
    whole
}

pub(crate) fn write(folder: &Path, file: &str, entry: &Entry) -> Result<(), (PathBuf, io::Error)> {
    fs::create_dir_all(folder).map_err(|e| (folder.to_owned(), e))?;
    let path = folder.join(file);
    // The process id keeps writers apart; a name that is left behind is overwritten by the next.
    let part = folder.join(format!(".{file}.{}.part", std::process::id()));
    fs::write(&part, encode(entry))
        .and_then(|()| fs::rename(&part, &path))
        .map_err(|e| (path, e))
}

fn encode(entry: &Entry) -> Vec<u8> {
    let mut bytes = Vec::with_capacity(HEAD + entry.image.len());
    bytes.extend_from_slice(MAGIC);
    bytes.extend_from_slice(&Sha256::digest(&entry.image));
    bytes.extend_from_slice(&entry.version.0.to_le_bytes());
    bytes.extend_from_slice(&entry.version.1.to_le_bytes());
    bytes.extend_from_slice(&entry.image);
    bytes
}

fn decode(bytes: &[u8]) -> Option<Entry> {
    let (head, image) = bytes.split_at_checked(HEAD)?;
    let (magic, head) = head.split_at(MAGIC.len());
    let (digest, version) = head.split_at(DIGEST);
    if magic != MAGIC || digest != Sha256::digest(image).as_slice() {
        return None;
    }
    let number = |at: usize| {
        let bytes = version[at..at + 4].try_into().expect("four bytes");
        i32::from_le_bytes(bytes)
    };
    Some(Entry {
        image: image.to_vec(),
        version: (number(0), number(4)),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn entry() -> Entry {
        Entry {
            image: (0..200).collect(),
            version: (13, 1),
        }
    }

    #[test]
    fn what_is_written_is_read() {
        let folder = tempfile::tempdir().unwrap();
        let folder = folder.path().join("new");
        write(&folder, "a.cubin", &entry()).unwrap();
        assert_eq!(read(&folder, "a.cubin"), Some(entry()));
        assert_eq!(read(&folder, "b.cubin"), None);
        assert_eq!(fs::read_dir(&folder).unwrap().count(), 1, "no part is left");
    }

    #[test]
    fn damage_is_noticed_wherever_it_is() {
        let whole = encode(&entry());
        assert_eq!(decode(&whole), Some(entry()));
        for length in 0..whole.len() {
            assert_eq!(decode(&whole[..length]), None, "cut to {length}");
        }
        for at in (0..MAGIC.len() + DIGEST).chain(HEAD..whole.len()) {
            let mut damaged = whole.clone();
            damaged[at] ^= 4;
            assert_eq!(decode(&damaged), None, "byte {at}");
        }
    }

    #[test]
    fn names_depend_on_text_and_options() {
        let name = |source: &str, options: &[&str]| {
            let options: Vec<String> = options.iter().map(|o| (*o).to_owned()).collect();
            file_name("norm", "sm_80", source, &options)
        };
        assert!(name("a", &[]).starts_with("norm-sm_80-"));
        assert_ne!(name("a", &[]), name("b", &[]));
        assert_ne!(name("a", &["-Dx"]), name("a", &["-Dy"]));
        assert_ne!(name("a", &["bc"]), name("ab", &["c"]));
    }
}
