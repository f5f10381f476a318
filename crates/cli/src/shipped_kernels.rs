//! CUDA kernels that packages bring along, compiled: in `share/carat/kernels` beside the program's `bin`. With them a first run
//! compiles nothing, and needs no NVRTC.

use std::path::{Path, PathBuf};

/// Their folder, where there is one.
pub(crate) fn folder() -> Option<PathBuf> {
    // Beside the program itself, not beside a link to it.
    let program = std::env::current_exe().ok()?.canonicalize().ok()?;
    beside(&program)
}

fn beside(program: &Path) -> Option<PathBuf> {
    let folder = program.parent()?.parent()?.join("share/carat/kernels");
    folder.is_dir().then_some(folder)
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;

    #[test]
    fn kernels_are_found_beside_the_programs_folder_alone() {
        let root = tempfile::tempdir().unwrap();
        let program = root.path().join("bin/carat");
        assert_eq!(beside(&program), None);
        let folder = root.path().join("share/carat/kernels");
        fs::create_dir_all(&folder).unwrap();
        assert_eq!(beside(&program), Some(folder));
        assert_eq!(beside(&root.path().join("carat")), None);
        assert_eq!(beside(Path::new("/")), None);
    }
}
