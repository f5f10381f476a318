//! Structured output as a person asks for it: formats by flags, and tool calls that fit their tools.

use std::{fs, path::Path};

use serde_json::{Value, json};

use crate::start::{self, carat, stdout};

/// The output of a run, at a temperature that makes nonsense of whatever is free.
fn run(flags: &[&str], seed: u32) -> String {
    let seed = seed.to_string();
    let common = ["run", "Hello.", "--temp", "2", "-n", "300", "--seed", &seed];
    stdout(&[&common, flags].concat())
}

fn refusal(flags: &[&str], code: i32) -> String {
    let output = carat(&[&["run", "Hello."], flags].concat());
    assert_eq!(output.code, Some(code), "{flags:?}: {}", output.stderr);
    output.stderr
}

fn file(folder: &Path, name: &str, text: &str) -> String {
    let path = folder.join(name);
    fs::write(&path, text).expect("a temporary file");
    path.into_os_string().into_string().expect("text")
}

#[test]
fn answers_fit_the_schema() {
    let folder = tempfile::tempdir().unwrap();
    let schema = json!({
        "type": "object",
        "properties": {"color": {"enum": ["red", "green"]}, "count": {"type": "integer", "minimum": 1, "maximum": 9}},
        "required": ["color", "count"],
        "additionalProperties": false,
    });
    let text = schema.to_string();
    let path = file(folder.path(), "schema.json", &text);
    for (flags, seed) in [
        (vec!["--schema", &path], 1),
        (vec!["-j", &text], 2),
        (vec!["-j", &text, "--raw"], 3),
        (vec!["-j", &text, "--think", "--hide-thinking"], 4),
    ] {
        let answer = run(&flags, seed);
        if seed == 4 && answer.trim().is_empty() {
            // The thought took all tokens.
            continue;
        }
        let value: Value = serde_json::from_str(answer.trim()).expect("JSON");
        assert!(["red", "green"].contains(&value["color"].as_str().unwrap_or_default()));
        assert!(
            (1..=9).contains(&value["count"].as_i64().unwrap_or(0)),
            "{answer}"
        );
    }
}

#[test]
fn answers_follow_the_grammar() {
    let folder = tempfile::tempdir().unwrap();
    let grammar = "root ::= (\"ha\" | \"ho\"){2,3} \"!\"";
    let path = file(folder.path(), "laugh.gbnf", grammar);
    for flags in [["--grammar", grammar], ["--grammar-file", &path]] {
        let answer = run(&flags, 5);
        let laugh = answer.trim().strip_suffix('!').expect("its end");
        assert!([4, 6].contains(&laugh.len()), "{answer}");
        assert!(
            laugh.replace("ha", "").replace("ho", "").is_empty(),
            "{answer}"
        );
    }
}

#[test]
fn mistakes_are_named() {
    let folder = tempfile::tempdir().unwrap();
    let wrong = file(folder.path(), "wrong.json", "{\"type\": \"strin\"}");
    for (flags, words, code) in [
        (vec!["-j", "{"], vec!["schema", "JSON"], 2),
        (
            vec!["-j", "{\"type\": \"strin\"}"],
            vec!["schema", "strin"],
            2,
        ),
        (vec!["--schema", &wrong], vec!["schema", "strin"], 1),
        (vec!["--schema", "/nowhere.json"], vec!["nowhere.json"], 1),
        (vec!["--grammar", "root ::= ["], vec!["line 1"], 2),
        (
            vec!["--grammar", "a", "-j", "{}"],
            vec!["cannot be used with"],
            2,
        ),
        (
            vec!["-j", "{}", "--ignore-eos"],
            vec!["cannot be used with"],
            2,
        ),
    ] {
        let complaint = refusal(&flags, code);
        for word in words {
            assert!(complaint.contains(word), "{flags:?}: {complaint}");
        }
    }
    let note = carat(&[
        "run",
        "Hi",
        "-n",
        "5",
        "-j",
        "{\"type\": \"string\", \"not\": {}}",
    ]);
    let note = note.stderr;
    assert!(note.contains("`not` at `#` is not enforced"), "{note}");
}

#[test]
fn calls_fit_their_tools() {
    let folder = tempfile::tempdir().unwrap();
    let tools = json!([{
        "name": "get_weather",
        "description": "Current weather in a city",
        "parameters": {
            "type": "object",
            "properties": {
                "city": {"type": "string", "enum": ["Oslo", "Rome"]},
                "days": {"type": "integer", "minimum": 3, "maximum": 4},
            },
            "required": ["city", "days"],
        },
    }]);
    let path = file(folder.path(), "tools.json", &tools.to_string());
    let call = |flags: &[&str]| -> Value {
        let question = "What is the weather in Paris?";
        let common = ["run", question, "--tools", &path, "--json", "--temp", "0"];
        let answer = start::json(&carat(&[&common, flags].concat()));
        assert_eq!(answer["finish_reason"], "tool_calls", "{answer}");
        answer["tool_calls"][0]["arguments"].clone()
    };
    let fitting = call(&[]);
    let city = fitting["city"].as_str().unwrap_or_default();
    assert!(["Oslo", "Rome"].contains(&city), "{fitting}");
    assert!(
        (3..=4).contains(&fitting["days"].as_i64().unwrap_or(0)),
        "{fitting}"
    );
    let free = call(&["--no-tool-grammar"]);
    assert_eq!(free["city"], "Paris", "what the model would say");
}
