//! Commands of the chat, from a pipe.

use std::fs;

use serde_json::Value;

use crate::start::carat_with;

/// The output of a chat for these lines: stdout and stderr.
fn chat(lines: &str, arguments: &[&str]) -> (String, String) {
    let arguments = [&["chat", "--backend", "cpu"], arguments].concat();
    let output = carat_with(lines, &arguments);
    assert_eq!(output.code, Some(0), "{}", output.stderr);
    (output.stdout, output.stderr)
}

/// The messages that `lines` leave behind, as role and text.
fn messages(lines: &str, arguments: &[&str]) -> Vec<(String, String)> {
    let folder = tempfile::tempdir().unwrap();
    let saved = folder.path().join("talk.json");
    chat(&format!("{lines}/save {}\n", saved.display()), arguments);
    let messages: Value = serde_json::from_str(&fs::read_to_string(saved).unwrap()).unwrap();
    let text = |message: &Value, key: &str| message[key].as_str().unwrap().to_owned();
    let messages = messages.as_array().unwrap().iter();
    messages
        .map(|m| (text(m, "role"), text(m, "content")))
        .collect()
}

fn said(role: &str, text: &str) -> (String, String) {
    (role.to_owned(), text.to_owned())
}

#[test]
fn undo_forgets_a_question_and_its_answer() {
    let left = messages(
        "What is 1 + 1?\nWhat is 2 + 2?\n/undo\n",
        &["--temp", "0", "--system", "Be brief."],
    );
    assert_eq!(left.len(), 3, "{left:?}");
    assert_eq!(
        left[..2],
        [said("system", "Be brief."), said("user", "What is 1 + 1?")]
    );
    let left = messages("What is 1 + 1?\n/undo\n", &["--temp", "0"]);
    assert_eq!(left, []);
    let (_, told) = chat("/undo\n/regenerate\n", &[]);
    assert!(told.contains("no question to undo"), "{told}");
    assert!(told.contains("no question to answer again"), "{told}");
}

#[test]
fn regenerate_answers_once_more_and_differently() {
    let story = ["-n", "24", "--seed", "7", "--temp", "1"];
    let once = messages("Tell me a story.\n", &story);
    let again = messages("Tell me a story.\n/regenerate\n", &story);
    assert_eq!((once.len(), again.len()), (2, 2));
    assert_eq!(once[0], again[0]);
    assert_ne!(once[1].1, again[1].1);
    // A session with a seed can be repeated.
    assert_eq!(again, messages("Tell me a story.\n/regenerate\n", &story));
    let (_, told) = chat("Hi\n/regenerate\n", &["--temp", "0", "-n", "4"]);
    assert!(told.contains("stays the same"), "{told}");
}

#[test]
fn set_changes_the_answers_to_come() {
    let (shown, told) = chat(
        "/set max-tokens 3\n/set temp 0\n/set top_p 7\n/set soup 1\nTell me a story.\n/set\n",
        &["--temp", "1"],
    );
    assert!(told.contains("max-tokens is 3"), "{told}");
    assert!(told.contains("temperature is 0\n"), "{told}");
    assert!(told.contains("top-p is 7; it must be"), "{told}");
    assert!(told.contains("`soup` is no setting"), "{told}");
    assert!(told.contains("decode 2 tokens"), "{told}");
    let setting = |name: &str| {
        let line = shown.lines().find(|line| line.starts_with(name));
        line.and_then(|line| line.split_whitespace().nth(1))
    };
    assert_eq!(setting("temperature"), Some("0"));
    assert_eq!(setting("max-tokens"), Some("3"));
    assert_eq!(setting("top-p"), Some("0.95"));
}

#[test]
fn load_goes_on_with_what_was_saved() {
    let folder = tempfile::tempdir().unwrap();
    let saved = folder.path().join("talk.json");
    chat(
        &format!("My name is Rosa.\n/save {}\n", saved.display()),
        &["--temp", "0"],
    );
    let lines = format!("/load {}\nWhat is my name?\n", saved.display());
    let (answer, told) = chat(&lines, &["--temp", "0"]);
    assert!(answer.contains("Rosa"), "{answer}{told}");
    // What is no conversation leaves this one as it is.
    fs::write(&saved, "soup").unwrap();
    let lines = format!("My name is Rosa.\n{lines}");
    let (answer, told) = chat(&lines, &["--temp", "0"]);
    assert!(told.contains("is not a conversation"), "{told}");
    assert!(answer.contains("Rosa"), "{answer}");
}

#[test]
fn nobody_to_ask_means_no() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("talk.json");
    fs::write(&file, "mine").unwrap();
    let (_, told) = chat(&format!("/save {}\n", file.display()), &[]);
    assert!(told.contains("not saved"), "{told}");
    assert_eq!(fs::read_to_string(&file).unwrap(), "mine");
    let (_, told) = chat(&format!("/save! {}\n", file.display()), &[]);
    assert!(told.contains("saved to"), "{told}");
    assert_ne!(fs::read_to_string(&file).unwrap(), "mine");
}

#[test]
fn the_meter_counts_the_whole_conversation() {
    let (_, told) = chat(
        "What is 1 + 1?\nWhat is 2 + 2?\n",
        &["--temp", "0", "-c", "1000"],
    );
    let meters: Vec<u32> = told
        .lines()
        .filter_map(|line| {
            let (_, meter) = line.split_once("; context ")?;
            meter.split_once(" of 1,000 tokens (")?.0.parse().ok()
        })
        .collect();
    let [first, second] = meters[..] else {
        panic!("{told}")
    };
    assert!(first > 10 && second > first + 10, "{told}");
}

#[test]
fn images_are_answered_by_name() {
    let (_, told) = chat("/image cat.png\n", &[]);
    assert!(told.contains("reads text alone"), "{told}");
}
