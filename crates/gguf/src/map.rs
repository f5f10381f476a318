//! A memory-mapped model: one GGUF file, or all parts of a split one, as a single directory of tensors.

mod guard;

use std::{
    collections::HashMap,
    fs::{self, File},
    path::{Path, PathBuf},
    sync::Arc,
    time::SystemTime,
};

use self::guard::Guard;
use crate::{GgufError, Header, Metadata, QuantType, TensorInfo, reader::integer_bytes};

/// A file's bytes, mapped or in memory.
pub struct FileBytes(Source);

enum Source {
    Mapped(Mapped),
    Owned(Vec<u8>),
    Static(&'static [u8]),
}

/// A mapped file, and what tells whether it is still what was mapped.
struct Mapped {
    // Dropped in this order: a guard must not outlive its mapping.
    guard: Guard,
    map: memmap2::Mmap,
    file: File,
    stamp: Stamp,
    path: PathBuf,
}

/// Changes whenever somebody writes to a file.
#[derive(Clone, Copy, PartialEq, Eq)]
struct Stamp {
    bytes: u64,
    modified: Option<SystemTime>,
}

impl Stamp {
    fn of(metadata: &fs::Metadata) -> Stamp {
        Stamp {
            bytes: metadata.len(),
            modified: metadata.modified().ok(),
        }
    }
}

impl FileBytes {
    /// Maps a file, privately and read-only. What is no file is an error at once; an empty file has no bytes.
    pub fn open(path: &Path) -> Result<FileBytes, GgufError> {
        let io = |source| GgufError::Io {
            path: path.to_owned(),
            source,
        };
        // Opening a pipe would wait for somebody to write to it.
        if let Some(kind) = kind_of_other(&fs::metadata(path).map_err(io)?) {
            return Err(GgufError::NotAFile {
                path: path.to_owned(),
                kind,
            });
        }
        let file = File::open(path).map_err(io)?;
        let stamp = Stamp::of(&file.metadata().map_err(io)?);
        if stamp.bytes == 0 {
            // An empty file cannot be mapped; let the reader say what is wrong with it.
            return Ok(FileBytes(Source::Owned(Vec::new())));
        }
        #[expect(unsafe_code, reason = "mapping a file is unsafe by nature")]
        // SAFETY: The mapping is private and read-only, and nothing in this process writes to the file. Where another process
        // shortens it, the guard puts zeros in the place of what is gone.
        let map = unsafe { memmap2::MmapOptions::new().map(&file) }.map_err(io)?;
        Ok(FileBytes(Source::Mapped(Mapped {
            guard: Guard::over(&map),
            map,
            file,
            stamp,
            path: path.to_owned(),
        })))
    }

    /// All bytes, from the start of the file.
    pub fn as_slice(&self) -> &[u8] {
        match &self.0 {
            Source::Mapped(mapped) => &mapped.map,
            Source::Owned(bytes) => bytes,
            Source::Static(bytes) => bytes,
        }
    }

    fn header(self: &Arc<FileBytes>) -> Result<Header, GgufError> {
        let header = Header::parse(self);
        // What is wrong with a file that is being replaced is that it is being replaced.
        self.check_read()?;
        header
    }

    /// An error if bytes that were read had gone from the file.
    fn check_read(&self) -> Result<(), GgufError> {
        match &self.0 {
            Source::Mapped(mapped) if mapped.guard.is_lost() => Err(mapped.changed()),
            _ => Ok(()),
        }
    }

    /// An error if the file was written to since it was opened.
    fn check_unchanged(&self) -> Result<(), GgufError> {
        self.check_read()?;
        match &self.0 {
            Source::Mapped(mapped)
                if mapped.file.metadata().ok().as_ref().map(Stamp::of) != Some(mapped.stamp) =>
            {
                Err(mapped.changed())
            }
            _ => Ok(()),
        }
    }
}

impl Mapped {
    fn changed(&self) -> GgufError {
        GgufError::Changed {
            path: self.path.clone(),
        }
    }
}

/// Words for what is no plain file.
fn kind_of_other(metadata: &fs::Metadata) -> Option<&'static str> {
    let kind = metadata.file_type();
    if kind.is_file() {
        return None;
    }
    if kind.is_dir() {
        return Some("a folder");
    }
    #[cfg(unix)]
    {
        use std::os::unix::fs::FileTypeExt;
        if kind.is_fifo() {
            return Some("a pipe");
        }
        if kind.is_socket() {
            return Some("a socket");
        }
        if kind.is_char_device() || kind.is_block_device() {
            return Some("a device");
        }
    }
    Some("no plain file")
}

impl From<Vec<u8>> for FileBytes {
    fn from(bytes: Vec<u8>) -> FileBytes {
        FileBytes(Source::Owned(bytes))
    }
}

impl From<&'static [u8]> for FileBytes {
    fn from(bytes: &'static [u8]) -> FileBytes {
        FileBytes(Source::Static(bytes))
    }
}

/// An open model file.
pub struct Gguf {
    path: PathBuf,
    metadata: Metadata,
    parts: Vec<Arc<FileBytes>>,
    tensors: Vec<(TensorInfo, usize)>,
    by_name: HashMap<String, usize>,
}

/// One tensor's description and bytes.
#[derive(Clone, Copy)]
pub struct Tensor<'a> {
    /// Entry of the directory.
    pub info: &'a TensorInfo,
    /// Place in the directory, for [`Gguf::tensor_bytes`].
    pub index: usize,
    /// Format of the bytes.
    pub quant: QuantType,
    /// All blocks, row after row.
    pub bytes: &'a [u8],
}

impl Gguf {
    /// Opens a model; a path that ends in `-00001-of-000NN.gguf` brings its other parts.
    pub fn open(path: &Path) -> Result<Gguf, GgufError> {
        let first = Arc::new(FileBytes::open(path)?);
        let header = first.header()?;
        let part_count = header.metadata.u64("split.count")?.unwrap_or(1).max(1);
        let part = header.metadata.u64("split.no")?.unwrap_or(0);
        if part != 0 {
            return Err(GgufError::SplitPart {
                path: path.to_owned(),
                found: part.saturating_add(1),
                count: part_count,
            });
        }
        let expected = header.metadata.u64("split.tensors.count")?;
        let mut gguf = Gguf::from_header(path, header, first);
        for part in 2..=part_count {
            let sibling = sibling(path, part, part_count)?;
            let bytes = Arc::new(FileBytes::open(&sibling)?);
            let header = bytes.header()?;
            let found = header.metadata.u64("split.no")?.unwrap_or(0);
            if found != part - 1 {
                return Err(GgufError::SplitOrder {
                    path: sibling,
                    found: found.saturating_add(1),
                    count: part_count,
                });
            }
            gguf.parts.push(bytes);
            gguf.add_tensors(header.tensors)?;
        }
        match expected {
            Some(n) if part_count > 1 && n != gguf.tensors.len() as u64 => {
                Err(GgufError::SplitTensors {
                    found: gguf.tensors.len(),
                    expected: n,
                })
            }
            _ => Ok(gguf),
        }
    }

    /// A model from bytes in memory, under a name for messages.
    pub fn from_bytes(name: &str, bytes: impl Into<FileBytes>) -> Result<Gguf, GgufError> {
        let bytes = Arc::new(bytes.into());
        let header = bytes.header()?;
        Ok(Gguf::from_header(Path::new(name), header, bytes))
    }

    fn from_header(path: &Path, header: Header, bytes: Arc<FileBytes>) -> Gguf {
        let mut gguf = Gguf {
            path: path.to_owned(),
            metadata: header.metadata,
            parts: vec![bytes],
            tensors: Vec::new(),
            by_name: HashMap::new(),
        };
        gguf.add_tensors(header.tensors)
            .expect("names are distinct within a header");
        gguf
    }

    fn add_tensors(&mut self, tensors: Vec<TensorInfo>) -> Result<(), GgufError> {
        let part = self.parts.len() - 1;
        for info in tensors {
            if let Some(twin) = self.by_name.insert(info.name.clone(), self.tensors.len()) {
                return Err(GgufError::DuplicateTensor(
                    self.tensors[twin].0.name.clone(),
                ));
            }
            self.tensors.push((info, part));
        }
        Ok(())
    }

    /// Path or name the model was opened by; part 1 of a split one.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Metadata of the model; of part 1 where it is split.
    pub fn metadata(&self) -> &Metadata {
        &self.metadata
    }

    /// Bytes of all parts together.
    pub fn file_bytes(&self) -> usize {
        self.parts.iter().map(|p| p.as_slice().len()).sum()
    }

    /// An error if the file was written to, or shortened, since it was opened: what was computed with its bytes is worthless.
    pub fn check_unchanged(&self) -> Result<(), GgufError> {
        self.parts.iter().try_for_each(|p| p.check_unchanged())
    }

    /// An error if bytes were read that had gone from the file. Says nothing about bytes that were read before they changed:
    /// for those who have copied all they need.
    pub fn check_read(&self) -> Result<(), GgufError> {
        self.parts.iter().try_for_each(|p| p.check_read())
    }

    /// The directory, in file order.
    pub fn tensors(&self) -> impl ExactSizeIterator<Item = &TensorInfo> {
        self.tensors.iter().map(|(info, _)| info)
    }

    /// The bytes of the tensor at a place of the directory; empty where its format is unknown.
    pub fn tensor_bytes(&self, index: usize) -> &[u8] {
        let (info, part) = &self.tensors[index];
        &self.parts[*part].as_slice()[info.start..info.start + info.bytes]
    }

    /// A tensor by name, `None` if the file has none of that name, an error if its format is unknown.
    pub fn tensor(&self, name: &str) -> Result<Option<Tensor<'_>>, GgufError> {
        let Some(&index) = self.by_name.get(name) else {
            return Ok(None);
        };
        let info = &self.tensors[index].0;
        let quant = info.quant.map_err(|id| GgufError::TensorType {
            name: name.to_owned(),
            id,
        })?;
        Ok(Some(Tensor {
            info,
            index,
            quant,
            bytes: self.tensor_bytes(index),
        }))
    }
}

impl Gguf {
    /// The entries of a table of integers (I32 or I64), `None` if the file has none of that name, an error if it is no such table.
    pub fn integers(&self, name: &str) -> Result<Option<Vec<i64>>, GgufError> {
        let Some(&index) = self.by_name.get(name) else {
            return Ok(None);
        };
        let bytes = self.tensor_bytes(index);
        let type_id = match self.tensors[index].0.quant {
            Ok(quant) => quant.id(),
            Err(id) => id,
        };
        match integer_bytes(type_id) {
            Some(4) => {
                let entries = bytes.as_chunks().0.iter();
                let entries = entries.map(|entry| i64::from(i32::from_le_bytes(*entry)));
                Ok(Some(entries.collect()))
            }
            Some(_) => {
                let entries = bytes.as_chunks().0.iter();
                let entries = entries.map(|entry| i64::from_le_bytes(*entry));
                Ok(Some(entries.collect()))
            }
            None => Err(GgufError::NotIntegers {
                name: name.to_owned(),
            }),
        }
    }
}

/// The path of part `part` (from 1) beside part 1.
fn sibling(first: &Path, part: u64, count: u64) -> Result<PathBuf, GgufError> {
    let suffix = format!("-00001-of-{count:05}.gguf");
    first
        .file_name()
        .and_then(|name| name.to_str()?.strip_suffix(&suffix))
        .map(|stem| first.with_file_name(format!("{stem}-{part:05}-of-{count:05}.gguf")))
        .ok_or_else(|| GgufError::SplitName {
            path: first.to_owned(),
            count,
        })
}

#[cfg(test)]
mod tests;
