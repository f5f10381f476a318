//! The chat at a terminal: lines that break at words, Tab, and questions before something is lost.

use std::fs;

use super::pty::Pty;
use crate::start::{self, PROGRAM, stdout};

const CHAT: [&str; 6] = ["chat", "--no-history", "--backend", "cpu", "--temp", "0"];
const STORY: &str = "Tell me a story about a fox.";

/// The words that the model writes, whatever the terminal.
fn story(tokens: &str) -> Vec<String> {
    let ask = ["run", "-q", "--backend", "cpu", "--temp", "0"];
    let text = stdout(&[&ask[..], &["-n", tokens, STORY]].concat());
    text.split_whitespace().map(str::to_owned).collect()
}

/// Asks for the story, and returns the lines of the answer.
fn ask(chat: &mut Pty) -> Vec<String> {
    chat.type_text(STORY);
    // The editor shows every key; the last one stands at the end.
    chat.wait_for("fox.");
    chat.type_text("\r");
    chat.wait_for("\n");
    let answer = chat.wait_for("prefill ");
    let plain = answer.replace("\x1b[2m", "").replace("\x1b[?2004l", "");
    plain.lines().map(|line| line.trim().to_owned()).collect()
}

fn words(lines: &[String]) -> Vec<String> {
    let words = lines.iter().flat_map(|line| line.split_whitespace());
    words.map(str::to_owned).collect()
}

#[test]
fn lines_break_between_words() {
    let mut chat = Pty::start(&[&CHAT[..], &["-n", "80"]].concat());
    chat.resize(32);
    chat.wait_for("> ");
    let lines = ask(&mut chat);
    assert_eq!(words(&lines), story("80"));
    assert!(lines.iter().all(|line| line.len() <= 32), "{lines:?}");
    // No line has room for the next one's first word.
    let mut full = 0;
    for pair in lines.windows(2) {
        if let Some(next) = pair[1].split(' ').next().filter(|next| !next.is_empty()) {
            full += usize::from(pair[0].len() + 1 + next.len() > 32);
        }
    }
    assert!(full > 3, "{lines:?}");
    // Nothing but text: the terminal keeps what scrolls away.
    assert!(!chat.screen().contains("\x1b[?1049h"));
}

#[test]
fn lines_follow_the_width_of_the_terminal() {
    let slow = [&CHAT[..3], &["reference", "--temp", "0", "-n", "60"]].concat();
    let mut chat = Pty::start(&slow);
    chat.resize(30);
    chat.wait_for("> ");
    chat.type_text(STORY);
    chat.wait_for("fox.");
    chat.type_text("\r");
    chat.wait_for("\n");
    // The second line has begun.
    chat.wait_for("\n");
    chat.resize(70);
    let rest = chat.wait_for("prefill ");
    let longest = rest.lines().map(|line| line.trim().len()).max();
    assert!(longest.is_some_and(|n| n > 35 && n <= 70), "{rest}");
}

#[test]
fn a_pipe_gets_the_lines_of_the_model() {
    let script = format!("printf '{STORY}\\n' | \"$0\" \"$@\" -n 80 | cat");
    let mut chat = Pty::start_as(
        start::command("sh")
            .args(["-c", &script, PROGRAM])
            .args(CHAT),
    );
    chat.resize(32);
    assert_eq!(chat.end().code(), Some(0), "{}", chat.screen());
    let longest = chat.screen().lines().map(str::len).max();
    assert!(longest.is_some_and(|n| n > 60), "{}", chat.screen());
}

#[test]
fn tab_completes_commands_settings_and_files() {
    let folder = tempfile::tempdir().unwrap();
    let saved = folder.path().join("a talk.json");
    fs::write(
        &saved,
        r#"[{"role": "user", "content": "My name is Rosa."}]"#,
    )
    .unwrap();
    let mut chat = Pty::start(&CHAT);
    chat.wait_for("> ");
    chat.type_text("/he\t\r");
    chat.wait_for("/regenerate");
    chat.type_text("/set tempe\t0.5\r");
    chat.wait_for("temperature is 0.5");
    chat.type_text(&format!("/load {}/a\t\r", folder.path().display()));
    chat.wait_for("going on after 1 messages");
    // Elsewhere it is text.
    chat.type_text("one\ttwo\r");
    chat.wait_for("tok/s");
    chat.type_text(&format!("/save! {}\r", saved.display()));
    chat.wait_for("saved to");
    chat.type_text("/exit\r");
    assert_eq!(chat.end().code(), Some(0), "{}", chat.screen());
    let saved = fs::read_to_string(saved).unwrap();
    assert!(saved.contains(r"one\ttwo"), "{saved}");
}

#[test]
fn a_file_is_overwritten_when_the_person_says_so() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("talk.json");
    fs::write(&file, "mine").unwrap();
    let save = format!("/save {}\r", file.display());
    let mut chat = Pty::start(&[&CHAT[..], &["--system", "Be brief."]].concat());
    chat.wait_for("> ");
    for no in ["n\r", "\r", "\x04"] {
        chat.type_text(&save);
        chat.wait_for("overwrite it?");
        chat.type_text(no);
        chat.wait_for("not saved");
        assert_eq!(fs::read_to_string(&file).unwrap(), "mine");
    }
    chat.type_text(&save);
    chat.wait_for("overwrite it?");
    chat.type_text("y\r");
    chat.wait_for("saved to");
    assert!(fs::read_to_string(&file).unwrap().contains("Be brief."));
    chat.type_text("/exit\r");
    assert_eq!(chat.end().code(), Some(0), "{}", chat.screen());
}
