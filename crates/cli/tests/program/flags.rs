//! Flags and values that are wrong, and flags of other programs; words of every message.

use carat_testkit::fixtures;

use crate::start::carat;

#[test]
fn wrong_flags_and_values_exit_with_2() {
    for (arguments, word) in [
        (&["run", "--no-such-flag", "x"][..], "--no-such-flag"),
        (&["run", "x", "--top-p", "1.5"], "top-p is 1.5"),
        (&["run", "x", "--temp", "-1"], "temperature is -1"),
        (&["run", "x", "--temp", "hot"], "a number"),
        (&["run", "x", "--logit-bias", "soup"], "ID=BIAS"),
        (&["run", "x", "-t", "0"], "0 threads"),
        (&["run", "x", "-t", "99999"], "at most 4096"),
        (&["run", "x", "-n", "0"], "-1 for no limit"),
        (&["run", "x", "-c", "0"], "above 0"),
        (&["run", "x", "-s", "-2"], "-1 for another"),
        (&["run", "x", "--stop", ""], "before it begins"),
        (&["run", "x", "--vram", "plenty"], "12GiB"),
        (&["run", "x", "--repack", "plenty"], "12GiB"),
        (&["run", "x", "--place", "nowhere"], "auto, card or a file"),
        (&["inspect", "-c", "4096"], "--placement"),
        (&["serve", "--max-body", "plenty"], "12GiB"),
        (&["serve", "--models-memory", "plenty"], "12GiB"),
        (&["serve", "--idle-unload", "0"], "at least 1"),
        (&["bench", "--sequences", "0"], "above 0"),
        (&["nonsense"], "nonsense"),
        (&["man", "nonsense"], "no command `nonsense`"),
        (&["bench", "--paced"], "-o json"),
        (&["serve", "--api-key", "x", "--port", "0"], "--api-key"),
        (&["serve", "--host", "0.0.0.0", "--port", "0"], "--no-auth"),
        (
            &["run", "x", "--backend", "cpu", "--debug", "no-pdl"],
            "concerns CUDA",
        ),
    ] {
        let output = carat(arguments);
        assert_eq!(output.code, Some(2), "{arguments:?}: {}", output.stderr);
        assert!(
            output.stderr.contains(word),
            "{arguments:?}: {}",
            output.stderr
        );
    }
}

#[test]
fn several_models_are_for_serve_and_need_names_of_their_own() {
    let demo = concat!(env!("CARGO_MANIFEST_DIR"), "/../../assets/pip-q8_0.gguf");
    let named = |name: &str| format!("{name}={demo}");
    let (a, b) = (named("a"), named("b"));
    for (arguments, word, code) in [
        (
            &["run", "x", "-m", "a.gguf", "-m", "b.gguf"][..],
            "only `serve`",
            2,
        ),
        (
            &["serve", "-m", &a, "-m", &a],
            "two models are called `a`",
            2,
        ),
        (
            &["serve", "-m", &a, "-m", &b, "--name", "c"],
            "-m NAME=FILE",
            2,
        ),
        (
            &["serve", "-m", &a, "-m", &b, "--draft", "d.gguf"],
            "--draft auto",
            1,
        ),
        (&["serve", "-m", &a, "-m", "b=none.gguf"], "none.gguf", 1),
    ] {
        let serves = if arguments[0] == "serve" {
            &["--port", "0", "--backend", "cpu"][..]
        } else {
            &[]
        };
        let output = carat(&[arguments, serves].concat());
        let told = output.stderr;
        assert_eq!(output.code, Some(code), "{arguments:?}: {told}");
        assert!(told.contains(word), "{arguments:?}: {told}");
    }
}

#[test]
fn flags_people_know_are_understood_or_answered() {
    for known in [
        &["-ngl", "99"][..],
        &["-ngl", "0"],
        &["--ctx-size", "512"],
        &["-s", "-1"],
        &["--top-k", "-1"],
        &["--grammar", "root ::= \"yes\""],
    ] {
        let output = carat(&[&["run", "-q", "-n", "2"][..], known, &["Hi"]].concat());
        assert_eq!(output.code, Some(0), "{known:?}: {}", output.stderr);
    }
    for (flag, word) in [
        (&["--mmproj", "x.gguf"][..], "text"),
        (&["-mm", "x.gguf"], "text"),
        (&["-fa", "on"], "attention"),
        (&["-ctk", "q8_0"], "--kv-type"),
        (&["--no-mmap"], "mapped"),
    ] {
        let output = carat(&[&["run", "Hi"][..], flag].concat());
        assert_eq!(output.code, Some(2), "{flag:?}: {}", output.stderr);
        assert!(output.stderr.contains(word), "{flag:?}: {}", output.stderr);
    }
}

#[test]
fn a_difference_between_backends_is_a_failure() {
    let model = fixtures::ALL[1].path(".gguf");
    let model = model.to_str().expect("text");
    let diff = |tolerance: &str| {
        carat(&[
            "inspect",
            "--diff",
            "reference,cpu",
            "--tolerance",
            tolerance,
            "-m",
            model,
        ])
    };
    assert_eq!(diff("0.5").code, Some(0));
    assert_eq!(diff("1e-9").code, Some(1));
}

/// Words that are types of this program or of its language.
fn names_a_type(message: &str) -> Option<&str> {
    let words = message.split(|c: char| !c.is_alphanumeric() && c != '_');
    let types = [
        "usize",
        "isize",
        "u8",
        "u16",
        "u32",
        "u64",
        "i8",
        "i16",
        "i32",
        "i64",
        "f32",
        "f64",
        "struct",
        "enum",
        "untagged",
        "Option",
        "Vec",
        "String",
        "PathBuf",
        "Message",
        "Tool",
        "ToolCall",
        "ToolForm",
        "ToolCallForm",
        "TokenFile",
        "Settings",
        "SamplingSettings",
        "BackendName",
        "KvTypes",
        "TierName",
        "IsaName",
        "ParseIntError",
        "ParseFloatError",
    ];
    words.into_iter().find(|word| types.contains(word))
}

/// Every value that a reader meets, in the place of every other.
#[test]
fn no_message_names_a_type() {
    let folder = tempfile::tempdir().expect("a folder");
    let path = folder.path().join("input");
    let name = path.to_str().expect("text");
    let values = [
        "3",
        "-3",
        "1.5",
        "true",
        "\"x\"",
        "[]",
        "[[1]]",
        "{}",
        "{\"a\": 1}",
        "null",
    ];
    let mut inputs: Vec<(Vec<&str>, String)> = Vec::new();
    let keys = [
        "model",
        "backend",
        "device",
        "vram",
        "ram",
        "place",
        "tier",
        "kernels",
        "threads",
        "isa",
        "kv_type",
        "repack",
        "context",
        "max_tokens",
        "system",
        "think",
        "offline",
        "sampling",
        "sampling.temperature",
        "sampling.top_k",
        "sampling.seed",
        "sampling.logit_bias",
    ];
    for value in values.iter().filter(|v| **v != "null" && !v.contains(':')) {
        for key in keys {
            inputs.push((
                vec!["run", "--config", name, "--print-config", "x"],
                format!("{key} = {value}"),
            ));
        }
    }
    for value in values {
        let messages = ["run", "--messages", name];
        inputs.push((messages.to_vec(), value.to_owned()));
        inputs.push((messages.to_vec(), format!("[{value}]")));
        // The number at the end makes each of them wrong.
        inputs.push((messages.to_vec(), format!("[{{\"role\": {value}}}, 1]")));
        for key in [
            "content",
            "reasoning",
            "tool_calls",
            "tool_responses",
            "tool_call_id",
            "name",
        ] {
            let message = format!("[{{\"role\": \"user\", \"{key}\": {value}}}, 1]");
            inputs.push((messages.to_vec(), message));
        }
        let tools = ["run", "x", "--tools", name];
        inputs.push((tools.to_vec(), value.to_owned()));
        inputs.push((tools.to_vec(), format!("[{value}]")));
        for key in ["name", "description", "parameters", "function"] {
            inputs.push((tools.to_vec(), format!("[{{\"{key}\": {value}}}]")));
        }
        for key in ["required", "properties", "type", "items"] {
            inputs.push((
                tools.to_vec(),
                format!("[{{\"name\": \"f\", \"parameters\": {{\"{key}\": {value}}}}}, 1]"),
            ));
        }
        inputs.push((vec!["run", "x", "--schema", name], format!("{value} x")));
        let tokens = ["eval", "logits", "--out", "/dev/null", "--tokens", name];
        inputs.push((tokens.to_vec(), format!("[{value}]")));
        inputs.push((tokens.to_vec(), format!("{{\"tokens\": {value}}}")));
    }
    let mut failures = 0;
    for (arguments, input) in inputs {
        std::fs::write(&path, &input).expect("written");
        let output = carat(&[&arguments[..], &["-q"]].concat());
        let told = output.stderr;
        assert!(!told.contains("panicked"), "{input}: {told}");
        failures += usize::from(output.code != Some(0));
        if let Some(word) = names_a_type(&told.replace(name, "")) {
            panic!("`{word}` in what is said of {input} ({arguments:?}): {told}");
        }
    }
    assert!(failures > 150, "{failures}");
}
