//! From a repository's file list to the files to fetch.
//!
//! The same rules serve a listing from the server and the files of a cached snapshot, so a model that was pulled by
//! quant name is found by quant name offline. Projectors, drafters and calibration files lie beside the models in
//! most repositories; they are chosen only by their file name, or when nothing else is there.

use std::collections::BTreeMap;

use anyhow::{Result, bail, ensure};

use super::{
    model_ref::{Choice, HubRef},
    names::RepoFile,
};

/// Tried in this order when the user names no quant.
const USUAL_QUANTS: [&str; 3] = ["Q4_K_M", "Q4_0", "Q8_0"];

/// An error lists at most this many choices.
const MAX_LISTED: usize = 24;

/// Purpose of a file by its name alone; its metadata decides once it is open.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Role {
    Model,
    /// Image or audio encoder (`mmproj-*`).
    Projector,
    /// Small model for speculative decoding (`mtp-*`, `*-assistant*`).
    Drafter,
    /// Statistics used to make the quants (`imatrix*`).
    Calibration,
}

/// One file, or all parts of a split one.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct FileSet {
    parts: BTreeMap<u32, RepoFile>,
    /// Number of parts that the names announce.
    part_count: u32,
}

impl FileSet {
    /// Groups the GGUF files of a listing; everything else in it is ignored.
    pub(super) fn group(files: impl IntoIterator<Item = RepoFile>) -> Vec<FileSet> {
        let mut sets = BTreeMap::<(String, u32), FileSet>::new();
        for file in files.into_iter().filter(RepoFile::is_gguf) {
            let (stem, part, part_count) =
                split_name(file.as_str()).unwrap_or((file.as_str(), 1, 1));
            let set = sets
                .entry((stem.to_owned(), part_count))
                .or_insert_with(|| FileSet {
                    parts: BTreeMap::new(),
                    part_count,
                });
            set.parts.insert(part, file);
        }
        sets.into_values().collect()
    }

    /// The file to open: the first part there is.
    pub(super) fn first(&self) -> &RepoFile {
        let (_, file) = self
            .parts
            .first_key_value()
            .expect("a set is made for a file");
        file
    }

    pub(super) fn files(&self) -> impl Iterator<Item = &RepoFile> {
        self.parts.values()
    }

    pub(super) fn is_complete(&self) -> bool {
        self.parts.len() == self.part_count as usize
    }

    pub(super) fn role(&self) -> Role {
        let name = self.first().base_name().to_ascii_lowercase();
        if name.contains("mmproj") {
            Role::Projector
        } else if name.contains("imatrix") {
            Role::Calibration
        } else if name.starts_with("mtp-") || name.contains("assistant") {
            Role::Drafter
        } else {
            Role::Model
        }
    }

    /// The path without part numbers and suffix.
    fn stem(&self) -> &str {
        let name = self.first().as_str();
        split_name(name).map_or(&name[..name.len() - ".gguf".len()], |(stem, ..)| stem)
    }
}

/// `stem-00001-of-00003.gguf` taken apart; `None` when the file is whole.
fn split_name(file: &str) -> Option<(&str, u32, u32)> {
    let number = |text: &str| {
        let digits = text.len() == 5 && text.bytes().all(|b| b.is_ascii_digit());
        digits.then(|| text.parse::<u32>().ok()).flatten()
    };
    let (rest, count) = file.strip_suffix(".gguf")?.rsplit_once("-of-")?;
    let (stem, part) = rest.rsplit_once('-')?;
    let (part, count) = (number(part)?, number(count)?);
    (1..=count).contains(&part).then_some((stem, part, count))
}

/// Clarity with which a path names a quant. Larger is clearer.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Match {
    /// Somewhere on the path, like the folder of `BF16/gemma.gguf`.
    Inside,
    /// At the end of the name, where quants are by convention.
    AtEnd,
}

fn match_quant(stem: &str, quant: &str) -> Option<Match> {
    let (stem, quant) = (stem.to_ascii_lowercase(), quant.to_ascii_lowercase());
    let mut best = None;
    for (start, _) in stem.match_indices(&quant) {
        let (before, after) = (&stem[..start], &stem[start + quant.len()..]);
        // An underscore continues a quant name (Q4_K in Q4_K_M) but may precede one (gemma_Q4_0).
        if !(before.is_empty() || before.ends_with(['-', '.', '_', '/'])) {
            continue;
        }
        if after.is_empty() {
            best = Some(Match::AtEnd);
        } else if after.starts_with(['-', '.', '/']) {
            best = best.max(Some(Match::Inside));
        }
    }
    best
}

/// The sets that name `quant` most clearly.
fn of_quant<'a>(sets: &[&'a FileSet], quant: &str) -> Vec<&'a FileSet> {
    let matches = |set: &FileSet| match_quant(set.stem(), quant);
    let best = sets.iter().filter_map(|set| matches(set)).max();
    sets.iter()
        .copied()
        .filter(|set| best.is_some() && matches(set) == best)
        .collect()
}

/// Picks what `model` means among `sets`, or says what there is to pick from.
pub(super) fn choose<'a>(model: &HubRef, sets: &'a [FileSet]) -> Result<&'a FileSet> {
    let models = sets_to_choose_from(sets);
    let found = match &model.choice {
        Choice::File(file) => by_file_name(sets, file),
        Choice::Quant(quant) => of_quant(&models, quant),
        Choice::Usual => USUAL_QUANTS
            .iter()
            .map(|quant| of_quant(&models, quant))
            .find(|found| !found.is_empty())
            .unwrap_or_else(|| models.clone()),
    };
    let repo = &model.repo;
    match (found.as_slice(), &model.choice) {
        ([set], _) => {
            ensure!(
                set.is_complete(),
                "hf:{repo} holds {} of the {} parts of {}; the upload seems unfinished",
                set.parts.len(),
                set.part_count,
                set.first()
            );
            Ok(set)
        }
        _ if sets.is_empty() => {
            bail!("hf:{repo} holds no .gguf file; look for a repository whose name ends in GGUF")
        }
        ([], Choice::File(file)) => bail!(
            "hf:{repo} has no file {file}; it has {}",
            names(sets.iter())
        ),
        ([], choice) => bail!(
            "hf:{repo} has no {}; it has {}",
            match choice {
                Choice::Quant(quant) => quant.as_str(),
                Choice::Usual | Choice::File(_) => "model",
            },
            names(models.into_iter())
        ),
        (several, _) => bail!(
            "{model} could be any of several models; name one as hf:{repo}:FILE, where FILE is {}",
            names(several.iter().copied())
        ),
    }
}

/// Models; where a repository has none, its drafters; then anything.
fn sets_to_choose_from(sets: &[FileSet]) -> Vec<&FileSet> {
    let of = |role| {
        sets.iter()
            .filter(|set| set.role() == role)
            .collect::<Vec<_>>()
    };
    [of(Role::Model), of(Role::Drafter)]
        .into_iter()
        .find(|found| !found.is_empty())
        .unwrap_or_else(|| sets.iter().collect())
}

/// By whole path, else by the last component where that is unambiguous.
fn by_file_name<'a>(sets: &'a [FileSet], file: &RepoFile) -> Vec<&'a FileSet> {
    let having = |wanted: &dyn Fn(&RepoFile) -> bool| {
        sets.iter()
            .filter(|set| set.files().any(wanted))
            .collect::<Vec<_>>()
    };
    let exact = having(&|candidate| candidate == file);
    if exact.is_empty() {
        having(&|candidate| candidate.base_name() == file.as_str())
    } else {
        exact
    }
}

fn names<'a>(sets: impl ExactSizeIterator<Item = &'a FileSet>) -> String {
    let hidden = sets.len().saturating_sub(MAX_LISTED);
    let listed: Vec<_> = sets
        .take(MAX_LISTED)
        .map(|set| set.first().as_str())
        .collect();
    let list = listed.join(", ");
    if hidden == 0 {
        list
    } else {
        format!("{list} and {hidden} more")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sets(files: &[&str]) -> Vec<FileSet> {
        FileSet::group(files.iter().map(|file| file.parse().unwrap()))
    }

    /// The files chosen for `reference`, or the error.
    fn chosen(reference: &str, files: &[&str]) -> Result<Vec<String>, String> {
        let sets = sets(files);
        match choose(&reference.parse().unwrap(), &sets) {
            Ok(set) => Ok(set.files().map(ToString::to_string).collect()),
            Err(error) => Err(error.to_string()),
        }
    }

    const USUAL: [&str; 6] = [
        "README.md",
        "gemma-Q8_0.gguf",
        "gemma-Q4_K_M.gguf",
        "gemma-Q4_K_S.gguf",
        "mmproj-gemma-Q8_0.gguf",
        "mtp-gemma-Q4_K_M.gguf",
    ];

    #[test]
    fn the_usual_quants_are_tried_in_order() {
        assert_eq!(chosen("o/r", &USUAL).unwrap(), ["gemma-Q4_K_M.gguf"]);
        assert_eq!(
            chosen("o/r", &["a-Q8_0.gguf", "a-q4_0.gguf"]).unwrap(),
            ["a-q4_0.gguf"]
        );
        assert_eq!(
            chosen("o/r", &["a-Q8_0.gguf", "a-F16.gguf"]).unwrap(),
            ["a-Q8_0.gguf"]
        );
        assert_eq!(chosen("o/r", &["odd.gguf"]).unwrap(), ["odd.gguf"]);
    }

    #[test]
    fn without_a_usual_quant_the_error_lists_the_choices() {
        let error = chosen("o/r", &["a-Q6_K.gguf", "a-Q5_K_M.gguf", "mmproj-a.gguf"]).unwrap_err();
        assert_eq!(
            error,
            "hf:o/r could be any of several models; name one as hf:o/r:FILE, where FILE is a-Q5_K_M.gguf, a-Q6_K.gguf"
        );
        let error = chosen("o/r:Q2_K", &USUAL).unwrap_err();
        assert_eq!(
            error,
            "hf:o/r has no Q2_K; it has gemma-Q4_K_M.gguf, gemma-Q4_K_S.gguf, gemma-Q8_0.gguf"
        );
        let error = chosen("o/r", &["model.safetensors"]).unwrap_err();
        assert!(error.contains("holds no .gguf file"), "{error}");
    }

    #[test]
    fn quants_match_whole_words_in_any_case() {
        assert_eq!(chosen("o/r:q8_0", &USUAL).unwrap(), ["gemma-Q8_0.gguf"]);
        let files = [
            "a-IQ4_XS.gguf",
            "a-Q4_K_M.gguf",
            "a-UD-Q4_K_XL.gguf",
            "a-Q4_K.gguf",
        ];
        assert_eq!(chosen("o/r:Q4_K", &files).unwrap(), ["a-Q4_K.gguf"]);
        assert_eq!(
            chosen("o/r:q4_k_xl", &files).unwrap(),
            ["a-UD-Q4_K_XL.gguf"]
        );
        assert_eq!(
            chosen("o/r:ud-q4_k_xl", &files).unwrap(),
            ["a-UD-Q4_K_XL.gguf"]
        );
        assert!(chosen("o/r:Q4_XS", &files).is_err());
    }

    #[test]
    fn a_quant_at_the_end_wins_over_one_inside() {
        let files = ["a-Q4_0-imat.gguf", "b/a-Q4_0.gguf"];
        assert_eq!(chosen("o/r:Q4_0", &files).unwrap(), ["b/a-Q4_0.gguf"]);
        assert_eq!(
            chosen("o/r:q4_0", &files[..1]).unwrap(),
            ["a-Q4_0-imat.gguf"]
        );
    }

    #[test]
    fn a_split_file_is_chosen_whole_and_in_order() {
        let files = [
            "BF16/a-BF16-00002-of-00003.gguf",
            "BF16/a-BF16-00001-of-00003.gguf",
            "BF16/a-BF16-00003-of-00003.gguf",
            "a-Q8_0.gguf",
        ];
        let parts = [
            "BF16/a-BF16-00001-of-00003.gguf",
            "BF16/a-BF16-00002-of-00003.gguf",
            "BF16/a-BF16-00003-of-00003.gguf",
        ];
        for reference in [
            "o/r:bf16",
            "o/r:BF16/a-BF16-00001-of-00003.gguf",
            "o/r:a-BF16-00002-of-00003.gguf",
        ] {
            assert_eq!(chosen(reference, &files).unwrap(), parts, "{reference}");
        }
        let error = chosen("o/r:bf16", &files[1..]).unwrap_err();
        assert!(error.contains("holds 2 of the 3 parts"), "{error}");
    }

    #[test]
    fn companions_are_chosen_by_file_name_or_when_alone() {
        assert_eq!(
            chosen("o/r:mmproj-gemma-Q8_0.gguf", &USUAL).unwrap(),
            ["mmproj-gemma-Q8_0.gguf"]
        );
        assert_eq!(
            chosen("o/r", &["x-assistant-Q8_0.gguf", "imatrix.gguf"]).unwrap(),
            ["x-assistant-Q8_0.gguf"]
        );
        let roles: Vec<_> = sets(&["imatrix_a.gguf", "mmproj-F16.gguf", "mtp-a.gguf", "z.gguf"])
            .iter()
            .map(FileSet::role)
            .collect();
        assert_eq!(
            roles,
            [
                Role::Calibration,
                Role::Projector,
                Role::Drafter,
                Role::Model
            ]
        );
    }

    #[test]
    fn an_unknown_file_is_answered_with_the_known_ones() {
        let error = chosen("o/r:b.gguf", &["a.gguf", "mmproj-a.gguf"]).unwrap_err();
        assert_eq!(
            error,
            "hf:o/r has no file b.gguf; it has a.gguf, mmproj-a.gguf"
        );
    }

    #[test]
    fn long_lists_are_cut() {
        let files: Vec<_> = (0..30).map(|i| format!("m{i:02}.gguf")).collect();
        let files: Vec<_> = files.iter().map(String::as_str).collect();
        let error = chosen("o/r", &files).unwrap_err();
        assert!(error.ends_with("m23.gguf and 6 more"), "{error}");
    }
}
