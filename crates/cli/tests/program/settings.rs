//! The settings file at its usual place, its sections, and what `--print-config` says of each setting.

use std::{
    fs,
    io::{BufRead, BufReader},
    path::Path,
};

use crate::start::{Output, asset, end_of, program, spawn};

/// Runs `carat` with this folder for settings.
fn carat_at(place: &Path, arguments: &[&str]) -> Output {
    end_of(program(arguments).env("XDG_CONFIG_HOME", place))
}

fn stdout(output: Output) -> String {
    assert_eq!(output.code, Some(0), "{}", output.stderr);
    output.stdout
}

/// A folder with settings, and a model beside them.
fn place(settings: &str) -> tempfile::TempDir {
    let folder = tempfile::tempdir().unwrap();
    let carat = folder.path().join("carat");
    fs::create_dir_all(carat.join("models")).unwrap();
    fs::copy(asset("pip-q8_0.gguf"), carat.join("models/pip.gguf")).unwrap();
    fs::write(carat.join("config.toml"), settings).unwrap();
    folder
}

#[test]
fn the_usual_place_is_read_and_its_paths_start_there() {
    let place = place(
        "max_tokens = 3\nmodel = 'models/pip.gguf'\n[models.p]\nmodel = 'models/pip.gguf'\nmax_tokens = 2\n",
    );
    for (model, expected) in [(&[][..], 3), (&["-m", "p"], 2)] {
        let arguments = [&["run", "Hello!", "--json", "-q"][..], model].concat();
        let answer = stdout(carat_at(place.path(), &arguments));
        let answer: serde_json::Value = serde_json::from_str(&answer).unwrap();
        assert_eq!(answer["usage"]["completion_tokens"], expected);
    }
    let elsewhere = tempfile::tempdir().unwrap();
    let named = elsewhere.path().join("other.toml");
    fs::write(&named, "max_tokens = 1\n").unwrap();
    let flags = ["--config", named.to_str().unwrap()];
    let answer = carat_at(
        place.path(),
        &[&flags[..], &["run", "Hello!", "--json"]].concat(),
    );
    assert!(stdout(answer).contains("\"completion_tokens\":1"));
}

/// One by the section of its name, one by a section that names its file, one without.
#[test]
fn a_server_of_several_models_reads_the_section_of_each() {
    let place = place(
        "context = 300\n[models.a]\ncontext = 400\n[models.b]\nmodel = 'models/pip.gguf'\ncontext = 500\n",
    );
    let demo = asset("pip-q8_0.gguf");
    let [a, c] = ["a", "c"].map(|name| format!("{name}={}", demo.display()));
    let serve = [
        "serve",
        "--port",
        "0",
        "--backend",
        "cpu",
        "-m",
        &a,
        "-m",
        "b",
        "-m",
        &c,
    ];
    let mut child = spawn(program(&serve).env("XDG_CONFIG_HOME", place.path()));
    let mut told = String::new();
    let mut stderr = BufReader::new(child.stderr.take().expect("piped"));
    while !told.contains("ready after") {
        let length = stderr.read_line(&mut told).expect("text");
        assert!(length > 0, "{told}");
    }
    child.kill().expect("it runs");
    child.wait().expect("it ends");
    for (name, context) in [("a", 400), ("b", 500), ("c", 300)] {
        let line = told
            .lines()
            .find(|line| line.starts_with(&format!("`{name}`: ")));
        let line = line.unwrap_or_else(|| panic!("{name}: {told}"));
        assert!(
            line.ends_with(&format!(" {context} tokens of context")),
            "{line}"
        );
    }

    let place = self::place("[models.a]\n[models.b]\nbackend = 'reference'\n");
    let b = format!("b={}", demo.display());
    let output = carat_at(place.path(), &["serve", "--port", "0", "-m", &a, "-m", &b]);
    assert_eq!(output.code, Some(1), "{}", output.stderr);
    assert!(
        output.stderr.contains("`b` name another device"),
        "{}",
        output.stderr
    );
}

#[test]
fn every_setting_is_printed_with_its_source() {
    let place = place("threads = 1\n[models.p]\nmodel = 'models/pip.gguf'\ncontext = 512\n");
    let printed = stdout(carat_at(
        place.path(),
        &["--print-config", "run", "x", "-m", "p", "--top-k", "5"],
    ));
    let line = |start: &str| {
        let line = printed.lines().find(|line| line.starts_with(start));
        line.unwrap_or_else(|| panic!("{start}: {printed}"))
            .to_owned()
    };
    assert!(line("threads = 1 ").ends_with("config.toml"));
    assert!(line("context = 512 ").contains("section `p` of "));
    assert!(line("model = ").contains("models/pip.gguf"));
    assert!(line("model = ").contains("section `p` of "));
    assert!(line("top_k = 5 ").ends_with("# flag"));
    assert!(line("# vram ").contains("default: "));
}

#[test]
fn a_wrong_file_at_the_usual_place_is_named() {
    let place = place("thread = 1\n");
    let output = carat_at(place.path(), &["run", "x"]);
    let told = output.stderr;
    assert_eq!(output.code, Some(1), "{told}");
    assert!(
        told.contains("carat/config.toml") && told.contains("line 1"),
        "{told}"
    );
    assert!(
        told.contains("`threads`") && !told.contains(".md"),
        "{told}"
    );
    assert!(
        !told.contains("usize") && !told.contains("BTreeMap"),
        "{told}"
    );
}
