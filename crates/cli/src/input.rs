//! Input: files, `-` for standard input, and text piped in beside a prompt.

use std::{
    fs::File,
    io::{self, Read},
    path::Path,
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicU64, Ordering},
        mpsc::{self, RecvTimeoutError},
    },
    thread,
    time::Duration,
};

use anyhow::{Context, Result, anyhow, bail};
use rustix::fs::FileType;

use crate::{
    misuse::misuse,
    terminal::{Terminal, bytes},
};

/// More text than any context holds.
const MAX_BYTES: u64 = 64 << 20;

/// After so long without a byte the person is told what is waited for.
const SILENCE: Duration = Duration::from_secs(2);

static STDIN_TAKEN: AtomicBool = AtomicBool::new(false);

/// A text file; `-` is standard input.
pub(crate) fn text(path: &Path, terminal: Terminal) -> Result<String> {
    let (bytes, origin) = if path.as_os_str() == "-" {
        (stdin(terminal)?, "stdin".to_owned())
    } else {
        let origin = format!("`{}`", path.display());
        let file = File::open(path).with_context(|| format!("cannot read {origin}"))?;
        (limited(file, &origin)?, origin)
    };
    utf8(bytes, &origin)
}

/// All of standard input, as text.
pub(crate) fn stdin_text(terminal: Terminal) -> Result<String> {
    utf8(stdin(terminal)?, "stdin")
}

/// Text piped in beside a prompt: nothing where stdin is a terminal, a socket or a device, which may never end and hold
/// nothing that was meant.
pub(crate) fn piped_text(terminal: Terminal) -> Result<Option<String>> {
    let Ok(status) = rustix::fs::fstat(io::stdin()) else {
        return Ok(None);
    };
    match FileType::from_raw_mode(status.st_mode) {
        FileType::RegularFile | FileType::Fifo => {}
        _ => return Ok(None),
    }
    let text = stdin_text(terminal)?;
    Ok((!text.trim().is_empty()).then_some(text))
}

fn utf8(bytes: Vec<u8>, origin: &str) -> Result<String> {
    String::from_utf8(bytes)
        .map_err(|e| e.utf8_error())
        .with_context(|| format!("{origin} is not UTF-8 text"))
}

fn stdin(terminal: Terminal) -> Result<Vec<u8>> {
    if STDIN_TAKEN.swap(true, Ordering::Relaxed) {
        misuse!("stdin can be read once; give `-` in one place only");
    }
    let arrived = Arc::new(AtomicU64::new(0));
    let (sender, read) = mpsc::channel();
    let counted = Counted {
        count: Arc::clone(&arrived),
    };
    thread::spawn(move || sender.send(limited(counted, "stdin")));
    let mut told = false;
    loop {
        let before = arrived.load(Ordering::Relaxed);
        match read.recv_timeout(SILENCE) {
            Ok(bytes) => return bytes,
            Err(RecvTimeoutError::Timeout) => {}
            Err(RecvTimeoutError::Disconnected) => return Err(anyhow!("cannot read stdin")),
        }
        if !told && arrived.load(Ordering::Relaxed) == before {
            terminal.note("waiting for the end of stdin (Ctrl-D at a terminal); `run --no-stdin` does not read it");
            told = true;
        }
    }
}

/// Standard input, with a count of what has come.
struct Counted {
    count: Arc<AtomicU64>,
}

impl Read for Counted {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let n = io::stdin().read(buffer)?;
        self.count.fetch_add(n as u64, Ordering::Relaxed);
        Ok(n)
    }
}

fn limited(source: impl Read, origin: &str) -> Result<Vec<u8>> {
    let mut text = Vec::new();
    source
        .take(MAX_BYTES + 1)
        .read_to_end(&mut text)
        .with_context(|| format!("cannot read {origin}"))?;
    if text.len() as u64 > MAX_BYTES {
        bail!(
            "{origin} goes on after {}, the most that is read; give less",
            bytes(MAX_BYTES)
        );
    }
    Ok(text)
}
