//! Questions to the hub: a repository's files, a file's description, a file's content.
//!
//! Answers are checked before they are believed, and refusals are put in the user's terms.

use anyhow::{Context, Result, anyhow};
use serde::Deserialize;
use ureq::{
    Body,
    http::{Method, Response, StatusCode, header},
};

use super::{
    cache::BRANCH,
    endpoint::Endpoint,
    names::{Commit, Etag, RepoFile, RepoId, has_gguf_suffix},
    progress::Watch,
    request::{LINKED_ETAG, Query, Retry, Sender, text},
};

const MAX_LISTING_BYTES: u64 = 32 << 20;

const LINKED_SIZE: &str = "x-linked-size";
const ERROR_CODE: &str = "x-error-code";

pub(super) struct Client {
    sender: Sender,
}

/// Origin of a file's content.
#[derive(Clone, Copy)]
pub(super) struct Source<'a> {
    pub(super) repo: &'a RepoId,
    pub(super) commit: &'a Commit,
    pub(super) file: &'a RepoFile,
}

/// A repository at one commit.
pub(super) struct Listing {
    pub(super) commit: Commit,
    /// Its GGUF files.
    pub(super) files: Vec<RepoFile>,
}

/// Identity and size of a file's content.
#[derive(Clone, Debug)]
pub(super) struct Description {
    pub(super) etag: Etag,
    pub(super) size_bytes: u64,
}

impl Client {
    pub(super) fn new(endpoint: Endpoint, token: Option<&str>, retry: Retry) -> Result<Client> {
        Ok(Client {
            sender: Sender::new(endpoint, token, retry)?,
        })
    }

    pub(super) fn retry(&self) -> Retry {
        self.sender.retry()
    }

    /// The branch's newest commit and the GGUF files in it.
    pub(super) fn list(&self, repo: &RepoId, watch: &mut Watch<'_>) -> Result<Listing> {
        #[derive(Deserialize)]
        struct Model {
            sha: String,
            #[serde(default)]
            siblings: Vec<Sibling>,
        }
        #[derive(Deserialize)]
        struct Sibling {
            rfilename: String,
        }

        let endpoint = self.sender.endpoint();
        let query = Query {
            repo,
            method: Method::GET,
            address: endpoint.join(&["api/models", &repo.to_string(), "revision", BRANCH]),
            from: 0,
        };
        let mut response = self.sender.send(&query, watch)?;
        if !response.status().is_success() {
            return Err(self.refusal(repo, None, &response));
        }
        let body = response.body_mut().with_config().limit(MAX_LISTING_BYTES);
        let model: Model = body.read_json().with_context(|| {
            format!("{endpoint} sent a file list of hf:{repo} that cannot be read")
        })?;
        let files = model
            .siblings
            .into_iter()
            .filter(|sibling| has_gguf_suffix(&sibling.rfilename))
            .map(|sibling| sibling.rfilename.parse())
            .collect::<Result<_>>()
            .with_context(|| format!("refusing the file list {endpoint} sent for hf:{repo}"))?;
        let commit = model
            .sha
            .parse()
            .with_context(|| format!("refusing the revision {endpoint} sent for hf:{repo}"))?;
        Ok(Listing { commit, files })
    }

    pub(super) fn describe(
        &self,
        source: Source<'_>,
        watch: &mut Watch<'_>,
    ) -> Result<Description> {
        let Source { repo, file, .. } = source;
        let response = self
            .sender
            .send(&self.file_query(Method::HEAD, source), watch)?;
        let headers = response.headers();
        let status = response.status();
        let linked = status.is_redirection() && headers.contains_key(LINKED_ETAG);
        if !linked && !status.is_success() {
            return Err(self.refusal(repo, Some(file), &response));
        }
        let (etag, size) = if linked {
            (LINKED_ETAG, LINKED_SIZE)
        } else {
            (header::ETAG.as_str(), header::CONTENT_LENGTH.as_str())
        };
        let missing = |what: &str| {
            format!(
                "{} does not tell the {what} of {file} in hf:{repo}",
                self.sender.endpoint()
            )
        };
        Ok(Description {
            etag: Etag::from_header(text(headers, etag).with_context(|| missing("ETag"))?)?,
            size_bytes: text(headers, size)
                .and_then(|size| size.parse().ok())
                .with_context(|| missing("size"))?,
        })
    }

    /// Opens a file's content at byte `from`. The answer is 206 from there, 200 from the start, or 416.
    pub(super) fn open(
        &self,
        source: Source<'_>,
        from: u64,
        watch: &mut Watch<'_>,
    ) -> Result<Response<Body>> {
        let query = Query {
            from,
            ..self.file_query(Method::GET, source)
        };
        let response = self.sender.send(&query, watch)?;
        match response.status() {
            StatusCode::OK | StatusCode::PARTIAL_CONTENT | StatusCode::RANGE_NOT_SATISFIABLE => {
                Ok(response)
            }
            _ => Err(self.refusal(source.repo, Some(source.file), &response)),
        }
    }

    fn file_query<'a>(&self, method: Method, source: Source<'a>) -> Query<'a> {
        let Source { repo, commit, file } = source;
        let parts = [&repo.to_string(), "resolve", commit.as_str(), file.as_str()];
        Query {
            repo,
            method,
            address: self.sender.endpoint().join(&parts),
            from: 0,
        }
    }

    /// The error for an answer that refuses, in the user's terms.
    fn refusal(
        &self,
        repo: &RepoId,
        file: Option<&RepoFile>,
        response: &Response<Body>,
    ) -> anyhow::Error {
        let status = response.status();
        let endpoint = self.sender.endpoint();
        let page = format!("{endpoint}/{repo}");
        let code = text(response.headers(), ERROR_CODE);
        let subject = file.map_or_else(|| format!("hf:{repo}"), |file| format!("hf:{repo}:{file}"));
        match (status.as_u16(), code, self.sender.has_token()) {
            (401 | 403, Some("GatedRepo"), _) | (403, _, _) => anyhow!(
                "hf:{repo} is gated ({status}): accept its licence at {page}, then set HF_TOKEN to a token of that account that may read gated \
                 models"
            ),
            (401, _, false) => anyhow!(
                "{endpoint} refused access to hf:{repo} ({status}): it does not exist, or is gated or private; check the name, \
                 accept the licence at {page} and set HF_TOKEN"
            ),
            (401, _, true) => anyhow!(
                "{endpoint} refused access to hf:{repo} ({status}): check the name, whether HF_TOKEN is still valid, and whether \
                 its account accepted the licence at {page}"
            ),
            (404, _, _) => anyhow!(
                "{subject} was not found on {endpoint} ({status}); check the name at {page}"
            ),
            _ => anyhow!("{endpoint} answered {status} for {subject}"),
        }
    }
}
