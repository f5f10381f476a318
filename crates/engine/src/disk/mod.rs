//! A prefix cache on disk: conversations go on where they were, after other work and after a restart.
//!
//! A folder per model and layout of pages ([`Namespace`]), in it files of pages that follow each other ([`segment`]). All of it may be
//! lost or damaged at any time: a page is compared with the very tokens that it is asked for, and with its digest, and whatever does not
//! fit is removed and computed again. Files are written under another name and then renamed, without waiting for the disk: one that a
//! crash has cut short fails its digest.
//!
//! Reading and writing happen on a thread of their own ([`io`]); the engine's thread knows which pages there are
//! ([`DiskStore`]).

mod folder;
mod io;
mod segment;
mod store;

pub use folder::DiskError;
pub use segment::Namespace;
pub(crate) use store::DiskStore;

#[cfg(test)]
mod histories;
#[cfg(test)]
mod testing;
