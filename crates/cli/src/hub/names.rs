//! Names that become paths or addresses, checked where they enter.
//!
//! Repositories are typed by the user; files, tags and commits come from a server that may be hostile. Once one of
//! these types exists, its text is safe to join to a folder of the cache.

use std::{fmt, str::FromStr};

use anyhow::{Error, Result, bail, ensure};

/// `owner/name` of a model repository.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct RepoId {
    owner: String,
    name: String,
}

impl RepoId {
    /// `models--owner--name`, its folder in the cache.
    pub(super) fn folder_name(&self) -> String {
        format!("models--{}--{}", self.owner, self.name)
    }

    /// The inverse of [`folder_name`](Self::folder_name); `None` for datasets, spaces and strangers.
    pub(super) fn from_folder_name(folder: &str) -> Option<RepoId> {
        let (owner, name) = folder.strip_prefix("models--")?.split_once("--")?;
        format!("{owner}/{name}").parse().ok()
    }
}

impl FromStr for RepoId {
    type Err = Error;

    fn from_str(text: &str) -> Result<RepoId> {
        // The hub's own rules. Without `--` inside a half, folder names stay unambiguous.
        let valid = |half: &str| {
            (1..=96).contains(&half.len())
                && half
                    .bytes()
                    .all(|b| b.is_ascii_alphanumeric() || b"-_.".contains(&b))
                && !half.starts_with(['-', '.'])
                && !half.ends_with(['-', '.'])
                && !half.contains("--")
                && !half.contains("..")
        };
        match text.split_once('/') {
            Some((owner, name)) if valid(owner) && valid(name) => Ok(RepoId {
                owner: owner.to_owned(),
                name: name.to_owned(),
            }),
            _ => bail!("`{text}` is not the name of a hub repository; it reads owner/name"),
        }
    }
}

impl fmt::Display for RepoId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}/{}", self.owner, self.name)
    }
}

/// A file's path inside its repository: relative, and never pointing out of it.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct RepoFile(String);

impl RepoFile {
    pub(crate) fn as_str(&self) -> &str {
        &self.0
    }

    /// The last component.
    pub(super) fn base_name(&self) -> &str {
        self.0.rsplit('/').next().unwrap_or(&self.0)
    }

    pub(super) fn is_gguf(&self) -> bool {
        has_gguf_suffix(&self.0)
    }
}

pub(super) fn has_gguf_suffix(name: &str) -> bool {
    name.len() > 5 && name.to_ascii_lowercase().ends_with(".gguf")
}

impl FromStr for RepoFile {
    type Err = Error;

    fn from_str(text: &str) -> Result<RepoFile> {
        let plain = |part: &str| !matches!(part, "" | "." | "..") && part.len() <= 255;
        let safe = text.split('/').all(plain)
            && !text.contains(|c: char| c == '\\' || c == ':' || c.is_control());
        ensure!(
            safe,
            "the file name {text:?} is unsafe: it could leave the model's folder"
        );
        Ok(RepoFile(text.to_owned()))
    }
}

impl fmt::Display for RepoFile {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

/// Identity of a file's content, which names its blob: SHA-256 for large files, git's SHA-1 for small ones.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Etag(String);

impl Etag {
    /// Takes the header as sent: `"abc"` or `W/"abc"`.
    pub(super) fn from_header(header: &str) -> Result<Etag> {
        let text = header.trim();
        let text = text.strip_prefix("W/").unwrap_or(text).trim_matches('"');
        let safe = (1..=128).contains(&text.len())
            && text
                .bytes()
                .all(|b| b.is_ascii_alphanumeric() || b == b'-' || b == b'_');
        ensure!(safe, "the server sent an unusable ETag {header:?}");
        Ok(Etag(text.to_owned()))
    }

    pub(super) fn as_str(&self) -> &str {
        &self.0
    }

    /// The SHA-256 of the content in lower case, when the tag is one.
    pub(super) fn sha256(&self) -> Option<String> {
        let is_digest = self.0.len() == 64 && self.0.bytes().all(|b| b.is_ascii_hexdigit());
        is_digest.then(|| self.0.to_ascii_lowercase())
    }
}

/// A revision of a repository: a git commit.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Commit(String);

impl Commit {
    pub(crate) fn as_str(&self) -> &str {
        &self.0
    }
}

impl FromStr for Commit {
    type Err = Error;

    fn from_str(text: &str) -> Result<Commit> {
        let safe = (40..=64).contains(&text.len())
            && text.bytes().all(|b| matches!(b, b'0'..=b'9' | b'a'..=b'f'));
        ensure!(safe, "{text:?} is not a commit");
        Ok(Commit(text.to_owned()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn repository_names_survive_the_trip_through_a_folder_name() {
        let repo: RepoId = "google/gemma-4-E4B-it_GGUF.v1".parse().unwrap();
        let folder = repo.folder_name();
        assert_eq!(folder, "models--google--gemma-4-E4B-it_GGUF.v1");
        assert_eq!(RepoId::from_folder_name(&folder), Some(repo));
        assert_eq!(RepoId::from_folder_name("datasets--a--b"), None);
        assert_eq!(RepoId::from_folder_name("models--gpt2"), None);
    }

    #[test]
    fn bad_repository_names_are_refused() {
        for bad in [
            "gemma", "a/b/c", "../b", "a/..", "a/", "/b", "a--b/c", "a/b?x", "a/b c", ".a/b",
            "a/b-",
        ] {
            assert!(bad.parse::<RepoId>().is_err(), "{bad}");
        }
    }

    #[test]
    fn file_names_that_leave_the_folder_are_refused() {
        for bad in [
            "",
            "/etc/passwd",
            "../x.gguf",
            "a/../x.gguf",
            "a//x.gguf",
            "a\\x.gguf",
            "C:x.gguf",
            "./x.gguf",
            "x.gguf/",
            "x\0.gguf",
        ] {
            assert!(bad.parse::<RepoFile>().is_err(), "{bad:?}");
        }
        for good in [
            "x.gguf",
            "BF16/x-00001-of-00002.gguf",
            "..x.gguf",
            "ü x.gguf",
        ] {
            assert!(good.parse::<RepoFile>().is_ok(), "{good:?}");
        }
    }

    #[test]
    fn tags_are_unquoted_and_never_paths() {
        assert_eq!(Etag::from_header("W/\"abc\"").unwrap().as_str(), "abc");
        assert_eq!(Etag::from_header("\"abc\"").unwrap().sha256(), None);
        let digest = "A".repeat(64);
        assert_eq!(
            Etag::from_header(&digest).unwrap().sha256(),
            Some("a".repeat(64))
        );
        for bad in ["\"../../x\"", "\"\"", "a/b", ".", "a.incomplete"] {
            assert!(Etag::from_header(bad).is_err(), "{bad}");
        }
        assert!("../../../etc".parse::<Commit>().is_err());
        assert!("main".parse::<Commit>().is_err());
    }
}
