//! Models from the Hugging Face hub, kept in the cache all its tools share.
//!
//! [`Hub::resolve`] turns what the user typed into a path to open and needs no network for what is already there;
//! [`Hub::pull`] asks the hub for the newest revision. Parts, from the user inward: `model_ref` (what `-m` accepts), `short_names`,
//! `environment` (where the cache is), `choose` (which files of a repository), `cache` (the layout on disk),
//! `endpoint`, `request` and `client` (the hub), `transfer` (one file's content), `progress` (reports to the caller).
//! Uploads, datasets and branches other than `main` are left to the official tools.

mod cache;
mod choose;
mod client;
mod endpoint;
mod environment;
mod model_ref;
mod names;
mod progress;
mod request;
mod short_names;
#[cfg(test)]
mod tests;
mod transfer;

use std::{collections::HashSet, path::PathBuf};

use anyhow::{Result, bail, ensure};

use self::{
    cache::{Cache, RepoCache},
    choose::{FileSet, choose},
    client::{Client, Source},
    model_ref::Choice,
    transfer::{Transfer, ensure_space},
};
pub(crate) use self::{
    choose::Role,
    endpoint::{Endpoint, PUBLIC_HUB},
    environment::Environment,
    model_ref::{HubRef, ModelRef},
    names::{Commit, RepoFile, RepoId},
    progress::{Progress, Watch},
    request::Retry,
};

/// Permission to ask the hub.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Network {
    Allowed,
    /// Only the cache is used.
    Forbidden,
}

/// Address of the hub, and the manner of asking it.
#[derive(Clone, Debug)]
pub(crate) struct HubConfig {
    pub(crate) endpoint: Endpoint,
    pub(crate) network: Network,
    pub(crate) retry: Retry,
}

impl Default for HubConfig {
    fn default() -> HubConfig {
        HubConfig {
            endpoint: Endpoint::new(PUBLIC_HUB).expect("the public address is valid"),
            network: Network::Allowed,
            retry: Retry::default(),
        }
    }
}

/// The hub and the cache before it.
pub(crate) struct Hub {
    client: Client,
    cache: Cache,
    network: Network,
}

/// A model brought up to date by [`Hub::pull`].
#[derive(Debug)]
pub(crate) struct Pulled {
    /// The file to open: of a split model, the first part.
    pub(crate) path: PathBuf,
    pub(crate) commit: Commit,
    /// Zero when the cache was up to date.
    pub(crate) received_bytes: u64,
}

/// Files that [`Hub::remove`] took out of the cache.
#[derive(Debug, Default)]
pub(crate) struct Removed {
    pub(crate) names: Vec<String>,
    /// Bytes of content that is gone.
    pub(crate) freed_bytes: u64,
}

/// A model in the cache, whole.
#[derive(Debug)]
pub(crate) struct CachedModel {
    pub(crate) repo: RepoId,
    /// Of a split model, the first part.
    pub(crate) file: RepoFile,
    pub(crate) path: PathBuf,
    pub(crate) commit: Commit,
    pub(crate) role: Role,
    pub(crate) part_count: usize,
    /// Of all parts.
    pub(crate) size_bytes: u64,
}

impl Hub {
    pub(crate) fn new(environment: &Environment, config: HubConfig) -> Result<Hub> {
        let token = environment.hub_token()?;
        Ok(Hub {
            client: Client::new(config.endpoint, token.as_deref(), config.retry)?,
            cache: Cache::new(environment.cache_folder()?),
            network: config.network,
        })
    }

    /// The path to open for `model`, downloaded first if it is not there.
    pub(crate) fn resolve(&self, model: &ModelRef, watch: &mut Watch<'_>) -> Result<PathBuf> {
        if let Some(path) = self.find_cached(model)? {
            return Ok(path);
        }
        match model {
            ModelRef::Hub(model) => Ok(self.pull(model, watch)?.path),
            ModelRef::Path(path) => {
                let text = path.to_string_lossy();
                let hint = if text.parse::<HubRef>().is_ok() {
                    format!("; for the model of that name on the hub, write hf:{text}")
                } else {
                    String::new()
                };
                bail!("there is no file {text}{hint}")
            }
        }
    }

    /// The path to open for `model` if no download is needed.
    pub(crate) fn find_cached(&self, model: &ModelRef) -> Result<Option<PathBuf>> {
        let model = match model {
            ModelRef::Path(path) => return Ok(path.exists().then(|| path.clone())),
            ModelRef::Hub(model) => model,
        };
        let cache = self.cache.repo(&model.repo);
        for commit in cache.revisions()? {
            let sets = whole_sets(&cache, &commit)?;
            // Nothing, or too much to choose from: an older revision or the hub may know better.
            if let Ok(set) = choose(model, &sets) {
                return Ok(Some(cache.snapshot(&commit).join(set.first().as_str())));
            }
        }
        Ok(None)
    }

    /// Brings `model` to the newest revision on the hub; content that is already there is not fetched again.
    pub(crate) fn pull(&self, model: &HubRef, watch: &mut Watch<'_>) -> Result<Pulled> {
        ensure!(
            self.network == Network::Allowed,
            "{model} is not in the cache, and the network was ruled out by --offline or HF_HUB_OFFLINE"
        );
        let repo = &model.repo;
        let listing = self.client.list(repo, watch)?;
        let commit = &listing.commit;
        let sets = FileSet::group(listing.files);
        let set = choose(model, &sets)?;

        let mut described = Vec::new();
        for file in set.files() {
            let source = Source { repo, commit, file };
            described.push((source, self.client.describe(source, watch)?));
        }
        let cache = self.cache.repo(repo);
        cache.prepare()?;
        let transfers: Vec<_> = described
            .iter()
            .map(|(source, wanted)| Transfer {
                client: &self.client,
                cache: &cache,
                source: *source,
                wanted,
            })
            .collect();
        let missing_bytes = transfers
            .iter()
            .map(Transfer::missing_bytes)
            .fold(0, u64::saturating_add);
        ensure_space(&cache.blobs(), missing_bytes)?;

        let mut received_bytes = 0;
        for transfer in &transfers {
            if !transfer.is_done() {
                received_bytes += transfer.run(watch)?;
            }
        }
        // Names come last: no snapshot shows a part whose siblings are still on their way.
        for transfer in &transfers {
            cache.link(commit, transfer.source.file, &transfer.wanted.etag)?;
        }
        cache.set_current(commit)?;
        Ok(Pulled {
            path: cache.snapshot(commit).join(set.first().as_str()),
            commit: listing.commit,
            received_bytes,
        })
    }

    /// Takes a model out of the cache, in every revision, with the content that nothing else shows.
    pub(crate) fn remove(&self, model: &HubRef) -> Result<Removed> {
        let cache = self.cache.repo(&model.repo);
        let mut removed = Removed::default();
        for commit in cache.revisions()? {
            let sets = whole_sets(&cache, &commit)?;
            let has_choice = !sets.is_empty();
            let set = match choose(model, &sets) {
                Ok(set) => set,
                // Several to choose from, and none that is usual.
                Err(problem) if has_choice && matches!(model.choice, Choice::Usual) => {
                    return Err(problem);
                }
                Err(_) => continue,
            };
            for file in set.files() {
                removed.freed_bytes += cache.remove(&commit, file)?;
                let name = file.to_string();
                if !removed.names.contains(&name) {
                    removed.names.push(name);
                }
            }
        }
        ensure!(
            !removed.names.is_empty(),
            "{model} is not in the cache; `carat list` shows what is"
        );
        Ok(removed)
    }

    /// The models in the cache, of one repository or of all. Of a file in several revisions, the latest.
    pub(crate) fn cached(&self, repo: Option<&RepoId>) -> Result<Vec<CachedModel>> {
        let repos = match repo {
            Some(repo) => vec![repo.clone()],
            None => self.cache.repos()?,
        };
        let mut models = Vec::new();
        for repo in repos {
            let cache = self.cache.repo(&repo);
            let mut seen = HashSet::new();
            for commit in cache.revisions()? {
                for set in whole_sets(&cache, &commit)? {
                    if seen.insert(set.first().to_string()) {
                        models.push(describe_cached(&repo, &cache, &commit, &set));
                    }
                }
            }
        }
        Ok(models)
    }
}

/// The models of a revision that have all their parts.
fn whole_sets(cache: &RepoCache, commit: &Commit) -> Result<Vec<FileSet>> {
    let mut sets = FileSet::group(cache.files(commit)?);
    sets.retain(FileSet::is_complete);
    Ok(sets)
}

fn describe_cached(
    repo: &RepoId,
    cache: &RepoCache,
    commit: &Commit,
    set: &FileSet,
) -> CachedModel {
    let folder = cache.snapshot(commit);
    let size = |file: &RepoFile| {
        folder
            .join(file.as_str())
            .metadata()
            .map_or(0, |meta| meta.len())
    };
    CachedModel {
        repo: repo.clone(),
        file: set.first().clone(),
        path: folder.join(set.first().as_str()),
        commit: commit.clone(),
        role: set.role(),
        part_count: set.files().count(),
        size_bytes: set.files().map(size).sum(),
    }
}
