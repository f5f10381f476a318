//! Lookup of NVIDIA's libraries at run time: NVRTC and cuBLASLt.
//!
//! cudarc looks by itself, too, but for older names only, in the loader's path only, and panics when there is none.

use std::{
    fs,
    path::{Path, PathBuf},
};

/// A library to look for.
pub(crate) struct Wanted {
    /// File names, the best version first.
    pub(crate) names: &'static [&'static str],
    /// The folder of its Python wheel under `nvidia/`, beside the one that all of CUDA 13 shares.
    pub(crate) wheel: &'static str,
}

impl Wanted {
    /// The result of `load` for the first file it takes: in the given folders, then by name in the loader's path, then in the
    /// usual folders. `load` gets the folder, if there is one, and the file. The error lists where it was looked for.
    pub(crate) fn find<T>(
        &self,
        given: &[PathBuf],
        load: impl Fn(Option<&Path>, &Path) -> Option<T>,
    ) -> Result<T, Vec<String>> {
        let mut looked = Vec::new();
        let given = given.iter().cloned().map(Some);
        let usual = self.usual_folders().into_iter().map(Some);
        for folder in given.chain([None]).chain(usual) {
            looked.push(match &folder {
                Some(folder) => folder.display().to_string(),
                None => self.names.join(", "),
            });
            for name in self.names {
                let file = match &folder {
                    Some(folder) => folder.join(name),
                    None => PathBuf::from(name),
                };
                if folder.is_some() && !file.exists() {
                    continue;
                }
                if let Some(found) = load(folder.as_deref(), &file) {
                    tracing::debug!(file = %file.display(), "found a library");
                    return Ok(found);
                }
            }
        }
        Err(looked)
    }

    /// Folders that toolkits and Python wheels install to, those that exist.
    fn usual_folders(&self) -> Vec<PathBuf> {
        let mut folders = Vec::new();
        let toolkits = ["/usr/local/cuda", "/opt/cuda"];
        folders.extend(toolkits.map(PathBuf::from));
        folders.extend(children("/usr/local", |name| name.starts_with("cuda-")));
        let mut found: Vec<PathBuf> = folders.iter().map(|f| f.join("lib64")).collect();
        // Wheels: <python>/site-packages/nvidia/<wheel>/lib, in system folders and in environments under /opt.
        let mut prefixes = vec![PathBuf::from("/usr"), PathBuf::from("/usr/local")];
        for environment in children("/opt", |_| true) {
            prefixes.push(environment.join(".venv"));
            prefixes.push(environment.join("venv"));
            prefixes.push(environment);
        }
        for prefix in prefixes {
            for python in children(prefix.join("lib"), |name| name.starts_with("python3")) {
                for packages in ["site-packages", "dist-packages"] {
                    for wheel in ["cu13", self.wheel] {
                        found.push(python.join(packages).join("nvidia").join(wheel).join("lib"));
                    }
                }
            }
        }
        found.retain(|folder| folder.is_dir());
        found
    }
}

fn children(folder: impl AsRef<Path>, wanted: impl Fn(&str) -> bool) -> Vec<PathBuf> {
    let entries = fs::read_dir(folder).into_iter().flatten().flatten();
    let mut paths: Vec<PathBuf> = entries
        .filter(|entry| wanted(&entry.file_name().to_string_lossy()))
        .map(|entry| entry.path())
        .collect();
    // Newest versions first.
    paths.sort_by(|a, b| b.cmp(a));
    paths
}

#[cfg(test)]
mod tests {
    use super::*;

    const WANTED: Wanted = Wanted {
        names: &["libnothing.so.2", "libnothing.so.1"],
        wheel: "nothing",
    };

    #[test]
    fn given_folders_come_first_and_the_best_name_before_the_next() {
        let folder = tempfile::tempdir().unwrap();
        let given = [folder.path().to_owned()];
        for name in WANTED.names {
            fs::write(folder.path().join(name), "").unwrap();
        }
        let found = WANTED
            .find(&given, |_, file| Some(file.to_owned()))
            .unwrap();
        assert_eq!(found, folder.path().join("libnothing.so.2"));
    }

    #[test]
    fn absence_says_where_it_was_looked_for() {
        let folder = tempfile::tempdir().unwrap();
        let looked = WANTED.find(&[folder.path().to_owned()], |_, _| None::<()>);
        let looked = looked.unwrap_err();
        assert_eq!(looked[0], folder.path().display().to_string());
        assert_eq!(looked[1], "libnothing.so.2, libnothing.so.1");
    }
}
