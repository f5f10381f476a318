//! `run`, `chat` and `eval`: the demo model's answers, and sentences about wrong input.

use std::{fs, io::Read, process::Stdio};

use carat_testkit::{close, fixtures};
use serde_json::Value;

use crate::start::{
    self, PROGRAM, asset, carat, carat_with, file, json, program, refusal, spawn, text,
};

/// Every reference conversation: same prompt, and the same tokens up to the first step that was a near tie.
#[test]
fn the_demo_model_answers_as_the_reference_does() {
    const NEAR_TIE: f64 = 0.05;
    let golden: Value =
        serde_json::from_str(&fs::read_to_string(asset("golden.json")).unwrap()).unwrap();
    let folder = tempfile::tempdir().unwrap();
    for case in golden["cases"].as_array().unwrap() {
        let name = case["name"].as_str().unwrap();
        let expected: Vec<u64> = ids(&case["greedy_ids"]);
        let limit = expected.len().to_string();
        let mut arguments = vec!["run", "--temp", "0", "--json", "-n", &limit];
        let messages = file(&folder, "messages.json", case["messages"].to_string());
        let tools = file(&folder, "tools.json", case["tools"].to_string());
        if case["messages"].is_array() {
            arguments.extend(["--messages", text(&messages)]);
        } else {
            arguments.extend(["--raw", case["prompt_text"].as_str().unwrap()]);
        }
        if case["enable_thinking"] == true {
            arguments.push("--think");
        }
        if case["tools"].is_array() {
            arguments.extend(["--tools", text(&tools)]);
        }
        let answer = json(&carat(&arguments));
        assert_eq!(
            answer["usage"]["prompt_tokens"],
            ids(&case["prompt_ids"]).len(),
            "{name}"
        );
        let margins = case["margins"].as_array().unwrap();
        let sure = margins
            .iter()
            .position(|m| m.as_f64().unwrap() < NEAR_TIE)
            .unwrap_or(expected.len());
        // The token that ends an answer is not part of it.
        let found = ids(&answer["token_ids"]);
        let compared = sure.min(expected.len() - 1);
        assert_eq!(
            found[..compared.min(found.len())],
            expected[..compared],
            "{name}"
        );
    }
}

fn ids(value: &Value) -> Vec<u64> {
    value
        .as_array()
        .unwrap()
        .iter()
        .map(|id| id.as_u64().unwrap())
        .collect()
}

#[test]
fn perplexity_of_held_out_text_agrees_with_the_reference() {
    let golden: Value =
        serde_json::from_str(&fs::read_to_string(asset("golden.json")).unwrap()).unwrap();
    for (name, expected) in golden["perplexity"].as_object().unwrap() {
        let output = carat(&[
            "eval",
            "perplexity",
            "-f",
            text(&asset(name)),
            "--limit",
            "1024",
        ]);
        assert_eq!(output.code, Some(0), "{}", output.stderr);
        let found: f64 = output
            .stdout
            .split_whitespace()
            .nth(1)
            .unwrap()
            .parse()
            .unwrap();
        let expected = expected["perplexity"].as_f64().unwrap();
        assert!(
            (found / expected - 1.0).abs() < 0.005,
            "{name}: {found}, {expected} expected"
        );
    }
}

#[test]
fn thinking_is_told_apart_from_the_answer() {
    let output = carat(&["run", "What is 347 + 285?", "--think", "--temp", "0"]);
    assert_eq!(output.stdout, "347 + 285 = 632.\n");
    assert!(
        output.stderr.contains("7 + 5 = 12, write 2, carry 1."),
        "{}",
        output.stderr
    );
    let hidden = carat(&[
        "run",
        "What is 347 + 285?",
        "--think",
        "--hide-thinking",
        "--temp",
        "0",
    ]);
    assert_eq!(hidden.stdout, output.stdout);
    assert!(!hidden.stderr.contains("carry"), "{}", hidden.stderr);
}

const WEATHER: &str = r#"[{"name": "get_weather", "description": "Get the weather in a city", "parameters":
    {"type": "object", "properties": {"city": {"type": "string", "description": "The name of the city"}},
     "required": ["city"]}}]"#;

#[test]
fn a_tool_call_comes_out_as_json() {
    let folder = tempfile::tempdir().unwrap();
    let tools = file(&folder, "tools.json", WEATHER);
    let output = carat(&[
        "run",
        "What is the weather in Paris?",
        "--tools",
        text(&tools),
        "--temp",
        "0",
    ]);
    let call: Value = serde_json::from_str(output.stdout.trim()).expect("one line of JSON");
    assert_eq!(call["tool_call"]["name"], "get_weather");
    assert_eq!(call["tool_call"]["arguments"]["city"], "Paris");
}

#[test]
fn chat_asks_for_tool_results_and_goes_on() {
    let folder = tempfile::tempdir().unwrap();
    let tools = file(&folder, "tools.json", WEATHER);
    let lines = b"What is the weather in Paris?\nsunny, 21 degrees\n";
    let output = carat_with(lines, &["chat", "--tools", text(&tools), "--temp", "0"]);
    assert_eq!(output.code, Some(0), "{}", output.stderr);
    let (call, answer) = output
        .stdout
        .split_once('\n')
        .expect("a call, then an answer");
    assert!(call.contains("get_weather"), "{call}");
    assert!(
        answer.contains("Paris") || answer.contains("sunny"),
        "{answer}"
    );
}

#[test]
fn chat_remembers_and_reuses_what_it_computed() {
    let long = format!(
        "My name is Rosa.{}",
        " I like red apples and green pears.".repeat(6)
    );
    let lines = format!("{long}\nWhat is my name?\n/save {{}}\n");
    let folder = tempfile::tempdir().unwrap();
    let saved = folder.path().join("talk.json");
    let output = carat_with(
        lines.replace("{}", text(&saved)).as_bytes(),
        &["chat", "--temp", "0"],
    );
    assert_eq!(output.code, Some(0), "{}", output.stderr);
    assert!(output.stdout.contains("Rosa"), "{}", output.stdout);
    assert!(output.stderr.contains("reused"), "{}", output.stderr);
    let messages: Value = serde_json::from_str(&fs::read_to_string(saved).unwrap()).unwrap();
    let roles: Vec<_> = messages
        .as_array()
        .unwrap()
        .iter()
        .map(|m| m["role"].as_str().unwrap())
        .collect();
    assert_eq!(roles, ["user", "assistant", "user", "assistant"]);
}

#[test]
fn chat_commands_work_and_unknown_ones_are_named() {
    let lines = b"/help\n/system Answer briefly.\n/system\n/think on\n/reset\n/nonsense\n/exit\nnever read\n";
    let output = carat_with(lines, &["chat"]);
    assert_eq!(output.code, Some(0));
    assert!(output.stdout.contains("/save FILE") && output.stdout.contains("Answer briefly."));
    assert!(
        output.stderr.contains("thinking is on")
            && output.stderr.contains("`/nonsense` is no command")
    );
    assert!(!output.stdout.contains("never"));
}

#[test]
fn the_same_seed_gives_the_same_text() {
    let story = |seed: &str| carat(&["run", "Tell me a story.", "-n", "40", "-s", seed]).stdout;
    assert_eq!(story("7"), story("7"));
    assert_ne!(story("7"), story("8"));
}

#[test]
fn stop_strings_end_the_answer_before_themselves() {
    let output = carat(&["run", "Count from 5 to 15.", "--temp", "0", "--stop", ", 9"]);
    assert_eq!(output.stdout, "5, 6, 7, 8\n");
}

#[test]
fn logprobs_come_with_their_alternatives() {
    let answer = json(&carat(&[
        "run",
        "Hello!",
        "--temp",
        "0",
        "--json",
        "--logprobs",
        "3",
        "-n",
        "4",
    ]));
    let first = &answer["logprobs"][0];
    assert_eq!(first["top"].as_array().unwrap().len(), 3);
    assert_eq!(first["id"], first["top"][0]["id"]);
    assert!(first["logprob"].as_f64().unwrap() <= 0.0);
}

#[test]
fn prompts_come_from_arguments_files_and_stdin() {
    let folder = tempfile::tempdir().unwrap();
    let path = file(&folder, "prompt.txt", "What is 123 + 456?");
    let answers = [
        carat(&["run", "What is 123 + 456?", "--temp", "0"]),
        carat(&["run", "-f", text(&path), "--temp", "0"]),
        carat_with(b"What is 123 + 456?", &["run", "-", "--temp", "0"]),
        carat_with(b"What is 123 + 456?", &["run", "--temp", "0"]),
    ];
    for answer in answers {
        assert_eq!(answer.stdout, "123 + 456 = 579.\n", "{}", answer.stderr);
    }
}

#[test]
fn logits_are_written_for_every_backend_and_chunk() {
    let fixture = &fixtures::ALL[2];
    let folder = tempfile::tempdir().unwrap();
    let out = folder.path().join("logits.f32");
    let model = fixture.written(folder.path());
    let tokens = fixture.path(".json");
    for (backend, chunk, bound) in [
        ("reference", "64", 1e-4),
        ("reference", "7", 1e-4),
        ("cpu", "16", 0.04),
    ] {
        let output = carat(&[
            "eval",
            "logits",
            "-m",
            text(&model),
            "--tokens",
            text(&tokens),
            "--out",
            text(&out),
            "--backend",
            backend,
            "--chunk",
            chunk,
        ]);
        assert_eq!(output.code, Some(0), "{}", output.stderr);
        let bytes = fs::read(&out).unwrap();
        let logits: Vec<f32> = bytes
            .as_chunks()
            .0
            .iter()
            .map(|b| f32::from_le_bytes(*b))
            .collect();
        let error = close::relative_l2(&logits, &fixture.logits());
        assert!(error <= bound, "{backend} in chunks of {chunk}: {error}");
    }
}

#[test]
fn what_a_backend_cannot_switch_off_is_refused_by_name() {
    let answer = |flags: &[&str]| {
        let asked = ["run", "Hello", "-n", "4", "--temp", "0", "-q"];
        carat(&[&asked, flags].concat())
    };
    let plain = answer(&["--backend", "cpu", "--debug", "no-fusion"]);
    assert_eq!(plain.stdout, answer(&["--backend", "cpu"]).stdout);
    let refused = answer(&["--backend", "cpu", "--debug", "no-pdl"]).stderr;
    assert!(
        refused.contains("`--debug no-pdl` concerns CUDA"),
        "{refused}"
    );
}

#[test]
fn tokens_go_there_and_back() {
    let ids = carat(&["tokenize", "--ids", "Hello <turn|> world"]).stdout;
    assert!(ids.starts_with("2 "), "{ids}");
    // A person's text is never a control token unless asked for.
    assert!(!ids.split_whitespace().any(|id| id == "106"), "{ids}");
    assert!(
        carat(&["tokenize", "--ids", "--special", "Hello <turn|>"])
            .stdout
            .trim()
            .ends_with(" 106")
    );
    let back = carat(&["tokenize", "--decode", ids.trim()]).stdout;
    assert!(back.trim_end().ends_with("Hello <turn|> world"), "{back}");
}

#[test]
fn settings_come_from_a_file_and_are_printed() {
    let folder = tempfile::tempdir().unwrap();
    let settings = file(
        &folder,
        "carat.toml",
        "max_tokens = 3\n[sampling]\ntemperature = 0.0\n",
    );
    let printed = carat(&[
        "--config",
        text(&settings),
        "--print-config",
        "run",
        "x",
        "--top-k",
        "5",
    ])
    .stdout;
    assert!(
        printed.contains("max_tokens = 3") && printed.contains("top_k = 5"),
        "{printed}"
    );
    let answer = json(&carat(&[
        "--config",
        text(&settings),
        "run",
        "Hello!",
        "--json",
    ]));
    assert_eq!(answer["usage"]["completion_tokens"], 3);
    let unknown = file(&folder, "wrong.toml", "thread = 3");
    assert!(refusal(&["--config", text(&unknown), "run", "x"]).contains("unknown field `thread`"));
}

#[test]
fn a_file_that_is_no_model_is_named_with_what_is_wrong() {
    let folder = tempfile::tempdir().unwrap();
    let prose = file(&folder, "prose.gguf", "Call me Ishmael.");
    assert!(refusal(&["run", "x", "-m", text(&prose)]).contains("not a GGUF file"));
    let empty = file(&folder, "empty.gguf", "");
    assert!(refusal(&["run", "x", "-m", text(&empty)]).contains("not a GGUF file"));
    let whole = fixtures::ALL[0].file();
    let cut = file(&folder, "cut.gguf", &whole[..whole.len() / 2]);
    assert!(refusal(&["run", "x", "-m", text(&cut)]).contains("truncated or damaged"));
    assert!(refusal(&["run", "x", "-m", text(folder.path())]).contains("is a folder"));
    assert!(refusal(&["run", "x", "-m", "no/such/model.gguf"]).contains("no/such/model.gguf"));
    assert!(refusal(&["--offline", "run", "x", "-m", "hf:owner/repo"]).contains("--offline"));
}

#[test]
fn another_architecture_and_foreign_formats_are_named() {
    let folder = tempfile::tempdir().unwrap();
    let whole = fs::read(fixtures::ALL[1].path(".gguf")).unwrap();
    let edit = |from: &[u8], to: &[u8]| {
        let mut bytes = whole.clone();
        let at = bytes
            .windows(from.len())
            .position(|w| w == from)
            .expect("the file has it");
        bytes[at..at + to.len()].copy_from_slice(to);
        bytes
    };
    let other = file(&folder, "other.gguf", edit(b"gemma4", b"llama4"));
    assert!(refusal(&["run", "x", "-m", text(&other)]).contains("architecture is `llama4`"));
    let missing = file(
        &folder,
        "missing.gguf",
        edit(b"output_norm.weight", b"output_nork.weight"),
    );
    assert!(
        refusal(&["run", "x", "-m", text(&missing)]).contains("`output_norm.weight` is missing")
    );
    // Name, two dimensions, then the format: Q8_K is one that no file should hold.
    let name = b"blk.0.attn_q.weight";
    let at = whole.windows(name.len()).position(|w| w == name).unwrap() + name.len() + 4 + 16;
    let mut foreign = whole.clone();
    foreign[at] = 15;
    let foreign = file(&folder, "foreign.gguf", foreign);
    let complaint = refusal(&["run", "x", "-m", text(&foreign)]);
    assert!(
        complaint.contains("Q8_K") && complaint.contains("Q4_K"),
        "{complaint}"
    );
}

#[test]
fn a_prompt_longer_than_the_context_is_refused_with_both_lengths() {
    let long = "word ".repeat(3000);
    let output = carat_with(long.as_bytes(), &["run", "-"]);
    assert_eq!(output.code, Some(1));
    assert!(
        output.stderr.contains("2048") && output.stderr.contains("prompt of"),
        "{}",
        output.stderr
    );
    assert!(refusal(&["run", "x", "-c", "4096"]).contains("2048"));
}

#[test]
fn bad_input_is_one_sentence() {
    let output = carat_with([b'h', b'i', 0xff, 0xfe], &["run", "-"]);
    assert_eq!(output.code, Some(1));
    assert!(
        output.stderr.contains("stdin is not UTF-8"),
        "{}",
        output.stderr
    );
    assert!(refusal(&["run", ""]).contains("nothing to answer"));
    let foreign = if cfg!(target_arch = "x86_64") {
        "neon"
    } else {
        "avx2"
    };
    assert!(refusal(&["run", "x", "--backend", "cpu", "--isa", foreign]).contains("--isa"));
    assert!(refusal(&["run", "x", "--tools", "no/such/tools.json"]).contains("no/such/tools.json"));
    assert!(
        refusal(&["tokenize", "--decode", "99999999"]).contains("outside the vocabulary of 4096")
    );
    assert!(refusal(&["bench", "-p", "0", "-n", "0"]).contains("nothing to measure"));
    assert!(
        refusal(&["bench", "-p", "8", "-d", "18446744073709551615"]).contains("context of 2048")
    );
    assert!(refusal(&["run", "x", "--logit-bias", "99999=1"]).contains("vocabulary of 4096"));
}

#[test]
fn outputs_appear_whole_or_not_at_all() {
    let folder = tempfile::tempdir().unwrap();
    let tokens = file(&folder, "tokens.json", "[2, 5, 9]");
    let out = folder.path().join("no/such/folder/out.f32");
    let complaint = refusal(&[
        "eval",
        "logits",
        "--tokens",
        text(&tokens),
        "--out",
        text(&out),
    ]);
    assert!(complaint.contains("no/such/folder"), "{complaint}");
    let outside = file(&folder, "outside.json", r#"{"tokens": [2, 5000]}"#);
    let out = folder.path().join("out.f32");
    let complaint = refusal(&[
        "eval",
        "logits",
        "--tokens",
        text(&outside),
        "--out",
        text(&out),
    ]);
    assert!(complaint.contains("token 5000"), "{complaint}");
    assert!(!out.exists());
    let synth = folder.path().join("no/such/folder/model.gguf");
    assert!(refusal(&["synth", "e2b", "q4_0", text(&synth)]).contains("no/such/folder"));
    let left: Vec<_> = fs::read_dir(folder.path())
        .unwrap()
        .map(|e| e.unwrap().file_name())
        .collect();
    assert_eq!(left.len(), 2, "{left:?}");
}

#[test]
fn a_template_that_fails_names_its_line() {
    let folder = tempfile::tempdir().unwrap();
    let template = file(
        &folder,
        "chat.jinja",
        "{{ bos_token }}\n{{ messages[0].content.no_such_thing() }}\n",
    );
    let complaint = refusal(&["run", "x", "--chat-template", text(&template)]);
    assert!(complaint.contains("line 2"), "{complaint}");
}

#[test]
fn ctrl_c_stops_an_answer_and_keeps_what_was_written() {
    // Whoever runs the tests may ignore interrupts, as jobs in the background do.
    let mut child = spawn(
        start::command("env")
            .args(["--default-signal=INT", PROGRAM])
            .args(["run", "Tell me a story.", "--ignore-eos", "-n", "1900"])
            .stdin(Stdio::null()),
    );
    let mut first = [0; 8];
    child
        .stdout
        .as_mut()
        .unwrap()
        .read_exact(&mut first)
        .unwrap();
    let stopped = start::command("kill")
        .args(["-INT", &child.id().to_string()])
        .status()
        .unwrap();
    assert!(stopped.success());
    let output = child.wait_with_output().unwrap();
    let stderr = String::from_utf8(output.stderr).unwrap();
    assert_eq!(output.status.code(), Some(130), "{stderr}");
    assert!(stderr.contains("stopped after"), "{stderr}");
    assert!(output.stdout.ends_with(b"\n"));
}

#[test]
fn a_terminal_that_is_full_or_gone_takes_no_answer_with_it() {
    let full = fs::File::options().write(true).open("/dev/full").unwrap();
    let output = program(&["run", "What is 123 + 456?", "--temp", "0"])
        .stderr(full)
        .output()
        .unwrap();
    assert_eq!(output.stdout, b"123 + 456 = 579.\n");
}

#[test]
fn ignoring_the_end_shows_all_that_is_generated() {
    let answer = json(&carat(&[
        "run",
        "Hello!",
        "--temp",
        "0",
        "--ignore-eos",
        "-n",
        "40",
        "--json",
    ]));
    assert_eq!(answer["usage"]["completion_tokens"], 40);
    let content = answer["content"].as_str().unwrap();
    assert!(
        content.len() > "Hello! How can I help you today?".len(),
        "{content}"
    );
}

#[test]
fn an_answer_cut_by_a_stop_string_repeats_exactly() {
    let run = || {
        json(&carat(&[
            "run",
            "Count from 5 to 15.",
            "--temp",
            "0",
            "--stop",
            "9",
            "--json",
        ]))["token_ids"]
            .clone()
    };
    let first = run();
    assert!((0..3).all(|_| run() == first));
}

#[test]
fn a_reader_that_goes_away_is_no_failure() {
    let mut child = spawn(&mut program(&["inspect", "--plan"]));
    drop(child.stdout.take());
    let output = child.wait_with_output().unwrap();
    assert_eq!(
        output.status.code(),
        Some(0),
        "{}",
        String::from_utf8_lossy(&output.stderr)
    );
}
