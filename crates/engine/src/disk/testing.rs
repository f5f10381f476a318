//! Files that a test can lose and damage.

use std::{
    collections::BTreeMap,
    io,
    sync::{Arc, Mutex},
    time::SystemTime,
};

use super::folder::{Files, Listed};

#[derive(Default)]
pub(super) struct Disk {
    pub(super) files: BTreeMap<String, (Vec<u8>, Option<SystemTime>)>,
    /// Calls until the machine stops; what is being written then is cut short. `None` if it goes on.
    pub(super) calls_left: Option<usize>,
    /// The next call is a mistake in the program.
    pub(super) panics: bool,
    /// There is no room for more bytes than that.
    pub(super) room: Option<usize>,
}

/// Clones are the same disk.
#[derive(Clone, Default)]
pub(super) struct FakeFiles(Arc<Mutex<Disk>>);

impl FakeFiles {
    pub(super) fn with<T>(&self, change: impl FnOnce(&mut Disk) -> T) -> T {
        change(&mut self.0.lock().unwrap())
    }

    /// Fails if the machine has stopped.
    fn call<T>(&self, act: impl FnOnce(&mut Disk, bool) -> io::Result<T>) -> io::Result<T> {
        assert!(!self.with(|disk| disk.panics), "as this test wants");
        self.with(|disk| {
            let stopped = || io::Error::other("the machine has stopped");
            match &mut disk.calls_left {
                Some(0) => Err(stopped()),
                Some(left) => {
                    *left -= 1;
                    let is_last = *left == 0;
                    act(disk, is_last)
                }
                None => act(disk, false),
            }
        })
    }
}

fn missing() -> io::Error {
    io::ErrorKind::NotFound.into()
}

impl Files for FakeFiles {
    fn list(&mut self) -> io::Result<Vec<Listed>> {
        self.call(|disk, _| {
            let files = disk.files.iter();
            let listed = files.map(|(name, (bytes, used))| Listed {
                name: name.clone(),
                bytes: bytes.len() as u64,
                used: used.unwrap_or(SystemTime::UNIX_EPOCH),
            });
            Ok(listed.collect())
        })
    }

    fn read(&mut self, name: &str, from: u64, bytes: usize) -> io::Result<Vec<u8>> {
        self.call(|disk, _| {
            let (contents, _) = disk.files.get(name).ok_or_else(missing)?;
            let part = contents.get(from as usize..from as usize + bytes);
            let short = io::ErrorKind::UnexpectedEof;
            Ok(part.ok_or(short)?.to_vec())
        })
    }

    fn create(&mut self, name: &str, bytes: &[u8]) -> io::Result<()> {
        self.call(|disk, is_cut| {
            let held: usize = disk.files.values().map(|(bytes, _)| bytes.len()).sum();
            if disk.room.is_some_and(|room| held + bytes.len() > room) {
                return Err(io::ErrorKind::StorageFull.into());
            }
            let kept = if is_cut { bytes.len() / 2 } else { bytes.len() };
            let file = (bytes[..kept].to_vec(), None);
            disk.files.insert(name.to_owned(), file);
            Ok(())
        })
    }

    fn rename(&mut self, from: &str, to: &str) -> io::Result<()> {
        self.call(|disk, _| {
            let file = disk.files.remove(from).ok_or_else(missing)?;
            disk.files.insert(to.to_owned(), file);
            Ok(())
        })
    }

    fn remove(&mut self, name: &str) -> io::Result<()> {
        self.call(|disk, _| disk.files.remove(name).map(drop).ok_or_else(missing))
    }

    fn touch(&mut self, name: &str, when: SystemTime) -> io::Result<()> {
        self.call(|disk, _| {
            disk.files.get_mut(name).ok_or_else(missing)?.1 = Some(when);
            Ok(())
        })
    }
}
