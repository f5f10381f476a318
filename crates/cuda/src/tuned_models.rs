//! Choices that were measured on a card, kept beside the compiled kernels: a file of JSON, by card and by shape of the model.
//!
//! A card is its name and size, with the driver, the tier and the kernels that times depend on as well: with another of these the model of
//! the card decides again, and so it does for models of other shapes or formats. Files of one shape and mix of formats are one model,
//! whatever they were trained to say. What is no such file is left aside, with a sentence for a person.

use std::{
    collections::{BTreeMap, BTreeSet},
    fmt::Write as _,
    fs, io,
    path::{Path, PathBuf},
};

use carat_model::weights::Weights;
use sha2::{Digest, Sha256};

use crate::choices::{Alternatives, Choice};

/// The file's name.
const FILE: &str = "choices.json";
/// Key of a model's name for people, beside those of choices.
const MODEL: &str = "model";

/// By card, by a model's digest: the model's name, and the values that won.
type Cards = BTreeMap<String, BTreeMap<String, Entry>>;
type Entry = BTreeMap<String, String>;

/// The card that choices hold for.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct CardIdentity {
    /// Name and size.
    pub(crate) card: String,
    /// Driver, tier and kernels.
    pub(crate) build: String,
}

impl CardIdentity {
    fn key(&self) -> String {
        format!("{}; {}", self.card, self.build)
    }

    /// Whether a key is of the same card with another driver, tier or build.
    fn is_card_of(&self, key: &str) -> bool {
        key != self.key()
            && key
                .strip_prefix(&self.card)
                .is_some_and(|rest| rest.starts_with("; "))
    }
}

/// What is kept for one card.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct TunedModels {
    by_digest: BTreeMap<String, Alternatives>,
    /// Models that were tuned with another driver, tier or build.
    elsewhere: BTreeSet<String>,
}

/// What is kept for one model.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Kept {
    Nothing,
    /// Something that holds for another driver, tier or build alone.
    Elsewhere,
    Choices(Alternatives),
}

impl TunedModels {
    /// Reads what a folder has, and says what is wrong with it.
    pub(crate) fn read(folder: &Path, card: &CardIdentity) -> (TunedModels, Option<String>) {
        let path = folder.join(FILE);
        let found = cards(&path).and_then(|cards| TunedModels::of(&cards, card));
        match found {
            Ok(models) => (models, None),
            Err(problem) => (
                TunedModels::default(),
                Some(format!(
                    "choices kept in `{}` are left aside ({problem}), so the model of the card decides; `carat tune` writes a new file",
                    path.display()
                )),
            ),
        }
    }

    fn of(cards: &Cards, card: &CardIdentity) -> Result<TunedModels, String> {
        let mut models = TunedModels::default();
        for (key, kept) in cards {
            if card.is_card_of(key) {
                models.elsewhere.extend(kept.keys().cloned());
            } else if *key == card.key() {
                for (digest, entry) in kept {
                    models.by_digest.insert(digest.clone(), values(entry)?);
                }
            }
        }
        Ok(models)
    }

    /// What is kept for a model.
    pub(crate) fn of_model(&self, weights: &Weights) -> Kept {
        // Most often there is nothing at all to look for.
        if self.by_digest.is_empty() && self.elsewhere.is_empty() {
            return Kept::Nothing;
        }
        let digest = digest(weights);
        match self.by_digest.get(&digest) {
            Some(&values) => Kept::Choices(values),
            None if self.elsewhere.contains(&digest) => Kept::Elsewhere,
            None => Kept::Nothing,
        }
    }
}

/// Keeps what was measured for a model, in place of what was kept. Returns the file.
pub(crate) fn keep(
    folder: &Path,
    card: &CardIdentity,
    (weights, name): (&Weights, &str),
    values: Alternatives,
) -> Result<PathBuf, (PathBuf, io::Error)> {
    let mut entry = Entry::from([(MODEL.to_owned(), name.to_owned())]);
    entry.extend((values.iter()).map(|v| (v.choice().name().to_owned(), v.to_string())));
    change(folder, card, |cards| {
        let models = cards.entry(card.key()).or_default();
        models.insert(digest(weights), entry);
    })
}

/// Forgets what is kept for a model on a card, with whatever driver and build; a file that is no such goes altogether. Returns the file.
pub(crate) fn forget(
    folder: &Path,
    card: &CardIdentity,
    weights: &Weights,
) -> Result<PathBuf, (PathBuf, io::Error)> {
    let digest = digest(weights);
    change(folder, card, |cards| {
        for (key, models) in cards.iter_mut() {
            if *key == card.key() || card.is_card_of(key) {
                models.remove(&digest);
            }
        }
        cards.retain(|_, models| !models.is_empty());
    })
}

/// Writes the file anew, as a whole or not at all, whoever else writes it.
fn change(
    folder: &Path,
    card: &CardIdentity,
    change: impl FnOnce(&mut Cards),
) -> Result<PathBuf, (PathBuf, io::Error)> {
    let path = folder.join(FILE);
    let mut kept = cards(&path).unwrap_or_default();
    // For the sake of what cannot be read, what is written now would be left aside as well.
    if let Some(models) = kept.get_mut(&card.key()) {
        models.retain(|_, entry| values(entry).is_ok());
    }
    change(&mut kept);
    let text = serde_json::to_string_pretty(&kept).expect("maps of strings are JSON");
    fs::create_dir_all(folder).map_err(|problem| (folder.to_owned(), problem))?;
    // The process id keeps writers apart.
    let part = folder.join(format!("{FILE}.{}.part", std::process::id()));
    let written = fs::write(&part, text + "\n").and_then(|()| fs::rename(&part, &path));
    match written {
        Ok(()) => Ok(path),
        Err(problem) => {
            let _ = fs::remove_file(&part);
            Err((path, problem))
        }
    }
}

/// All that a file has; nothing where there is none.
fn cards(path: &Path) -> Result<Cards, String> {
    match fs::read_to_string(path) {
        Ok(text) => serde_json::from_str(&text).map_err(|problem| problem.to_string()),
        Err(problem) if problem.kind() == io::ErrorKind::NotFound => Ok(Cards::new()),
        Err(problem) => Err(problem.to_string()),
    }
}

/// The values of an entry.
fn values(entry: &Entry) -> Result<Alternatives, String> {
    let mut values = Alternatives::default();
    for (name, text) in entry.iter().filter(|(name, _)| *name != MODEL) {
        let choice = Choice::named(name).ok_or_else(|| format!("`{name}` is no choice"))?;
        let value = choice.parse(text);
        values = values.with(value.ok_or_else(|| format!("`{text}` is no value of `{name}`"))?);
    }
    Ok(values)
}

/// Digest of the shapes and formats of all matrices that a plan names.
fn digest(weights: &Weights) -> String {
    let mut digest = Sha256::new();
    for (_, matrix) in weights.iter() {
        let shape = [matrix.rows, matrix.columns, matrix.count];
        for number in shape {
            digest.update((number as u64).to_le_bytes());
        }
        digest.update(matrix.quant.name());
        digest.update([0]);
    }
    let mut hex = String::new();
    for byte in &digest.finalize()[..8] {
        write!(hex, "{byte:02x}").expect("strings take all writes");
    }
    hex
}

#[cfg(test)]
mod tests {
    use carat_gguf::QuantType;
    use carat_testkit::tiny::{Tiny, Variant};

    use super::*;
    use crate::{choices::Alternative, kernel::GemmTile};

    fn card(build: &str) -> CardIdentity {
        CardIdentity {
            card: "A card, capability 8.9, 60 multiprocessors".to_owned(),
            build: build.to_owned(),
        }
    }

    fn some() -> Alternatives {
        Alternatives::default()
            .with(Alternative::PreparedFrom(5))
            .with(Alternative::GemmTile(GemmTile::OneOf64))
            .with(Alternative::SmallPdl(false))
            .with(Alternative::PackedFrom(5_000_000))
    }

    fn kept(folder: &Path, card: &CardIdentity, weights: &Weights) -> Kept {
        let (models, problem) = TunedModels::read(folder, card);
        assert_eq!(problem, None);
        models.of_model(weights)
    }

    #[test]
    fn choices_come_back_for_their_card_and_shape_of_model_alone() {
        let folder = tempfile::tempdir().unwrap();
        let folder = folder.path().join("kernels");
        let model = |quant| Tiny::new(Variant::E2b, quant).model();
        let (one, other) = (model(QuantType::Q8_0), model(QuantType::Q4_0));
        let here = card("driver 13.0");
        assert_eq!(kept(&folder, &here, &one.weights), Kept::Nothing);
        keep(&folder, &here, (&one.weights, "one"), some()).unwrap();
        assert_eq!(kept(&folder, &here, &one.weights), Kept::Choices(some()));
        assert_eq!(kept(&folder, &here, &other.weights), Kept::Nothing);
        // Weights of their own, the same shape.
        let again = model(QuantType::Q8_0);
        assert_eq!(kept(&folder, &here, &again.weights), Kept::Choices(some()));
        // Another driver or build of the same card, another card.
        let updated = card("driver 13.1");
        assert_eq!(kept(&folder, &updated, &one.weights), Kept::Elsewhere);
        let larger = CardIdentity {
            card: card("").card + " and more",
            ..here.clone()
        };
        assert_eq!(kept(&folder, &larger, &one.weights), Kept::Nothing);
        // Nothing won is something that is known.
        keep(
            &folder,
            &updated,
            (&one.weights, "one"),
            Alternatives::default(),
        )
        .unwrap();
        let nothing_won = Kept::Choices(Alternatives::default());
        assert_eq!(kept(&folder, &updated, &one.weights), nothing_won);
        assert_eq!(kept(&folder, &here, &one.weights), Kept::Choices(some()));
        keep(&folder, &here, (&other.weights, "other"), some()).unwrap();
        assert_eq!(fs::read_dir(&folder).unwrap().count(), 1, "no part is left");
        forget(&folder, &here, &one.weights).unwrap();
        assert_eq!(kept(&folder, &here, &one.weights), Kept::Nothing);
        assert_eq!(kept(&folder, &updated, &one.weights), Kept::Nothing);
        assert_eq!(kept(&folder, &here, &other.weights), Kept::Choices(some()));
    }

    #[test]
    fn what_is_no_such_file_is_left_aside_with_its_name_and_written_anew() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join(FILE);
        let model = Tiny::new(Variant::E2b, QuantType::Q8_0).model();
        let here = card("driver 13.0");
        keep(folder.path(), &here, (&model.weights, "one"), some()).unwrap();
        let whole = fs::read_to_string(&path).unwrap();
        let mut broken: Vec<String> = (0..whole.trim_end().len())
            .step_by(7)
            .map(|end| whole[..end].to_owned())
            .collect();
        for (from, to) in [
            ("prepared-from", "prepared-form"),
            ("\"5\"", "\"6\""),
            ("\"off\"", "\"no\""),
            ("\"off\"", "1"),
        ] {
            assert!(whole.contains(from), "{from}");
            broken.push(whole.replacen(from, to, 1));
        }
        broken.push("[]".to_owned());
        for text in broken {
            fs::write(&path, &text).unwrap();
            let (models, problem) = TunedModels::read(folder.path(), &here);
            assert_eq!(models, TunedModels::default(), "{text}");
            let problem = problem.expect("something is wrong");
            assert!(problem.contains(&path.display().to_string()), "{problem}");
            assert!(
                problem.contains("`carat tune` writes a new file"),
                "{problem}"
            );
            keep(folder.path(), &here, (&model.weights, "one"), some()).unwrap();
            let found = kept(folder.path(), &here, &model.weights);
            assert_eq!(found, Kept::Choices(some()), "{text}");
        }
        // Another model's entry is no reason to leave this one's aside.
        let other = Tiny::new(Variant::E4b, QuantType::Q8_0).model();
        keep(
            folder.path(),
            &here,
            (&other.weights, "other"),
            Alternatives::default(),
        )
        .unwrap();
        let both = fs::read_to_string(&path).unwrap();
        fs::write(&path, both.replace("\"5\"", "\"6\"")).unwrap();
        keep(folder.path(), &here, (&other.weights, "other"), some()).unwrap();
        assert_eq!(
            kept(folder.path(), &here, &other.weights),
            Kept::Choices(some())
        );
        // Where it cannot be written, that is said.
        let file = folder.path().join("file");
        fs::write(&file, "").unwrap();
        assert!(keep(&file, &here, (&model.weights, "one"), some()).is_err());
    }

    #[test]
    fn entries_of_other_builds_may_have_choices_that_are_not_known_here() {
        let folder = tempfile::tempdir().unwrap();
        let model = Tiny::new(Variant::E2b, QuantType::Q8_0).model();
        let (old, here) = (card("an older build"), card("this build"));
        keep(folder.path(), &old, (&model.weights, "one"), some()).unwrap();
        let path = folder.path().join(FILE);
        let text = fs::read_to_string(&path).unwrap();
        fs::write(&path, text.replace("gemm-tile", "something-else")).unwrap();
        assert_eq!(kept(folder.path(), &here, &model.weights), Kept::Elsewhere);
    }
}
