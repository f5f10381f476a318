//! Typed and pasted text reaches the chat, all of it and in its place.

use super::pty::Pty;
use crate::start::{self, PROGRAM, stdout};

const CHAT: [&str; 6] = ["chat", "--no-history", "--backend", "cpu", "--temp", "0"];

/// A terminal without bracketed paste sends the lines as if they were typed, all at once.
#[test]
fn pasted_lines_are_all_answered() {
    let mut chat = Pty::start(&CHAT);
    chat.wait_for("> ");
    chat.type_text("What is 1 + 1?\rWhat is 2 + 2?\rWhat is 3 + 3?\r/exit\r");
    for sum in ["1 + 1 = 2", "2 + 2 = 4", "3 + 3 = 6"] {
        chat.wait_for(sum);
        chat.wait_for("tok/s");
    }
    assert_eq!(chat.end().code(), Some(0), "{}", chat.screen());
}

#[test]
fn what_is_typed_during_an_answer_waits_for_the_prompt() {
    let mut chat = Pty::start(
        &[
            &CHAT[..3],
            &["reference", "--temp", "0", "--ignore-eos", "-n", "24"],
        ]
        .concat(),
    );
    chat.wait_for("> ");
    chat.type_text("Tell me a story.\r");
    chat.wait_for("story.");
    chat.wait_for("e");
    chat.type_text("zxq zxq");
    let answer = chat.wait_for("tok/s");
    assert!(!answer.contains("zxq"), "{answer}");
    chat.wait_for("> ");
    chat.wait_for("zxq zxq");
    // Ctrl-U empties the line, Ctrl-D leaves.
    chat.type_text("\x15\x04");
    assert_eq!(chat.end().code(), Some(0), "{}", chat.screen());
}

#[test]
fn escape_sequences_of_a_model_are_shown_and_not_obeyed() {
    // The grammar leaves the model nothing else to write.
    let ask = [
        "run",
        "-q",
        "--backend",
        "cpu",
        "--temp",
        "0",
        "-n",
        "40",
        "--grammar",
        "root ::= \"\\x1b[31mred\"",
        "Hi",
    ];
    let mut run = Pty::start(&ask);
    run.wait_for("^[[31mred");
    assert_eq!(run.end().code(), Some(0), "{}", run.screen());
    assert!(!run.screen().contains("\x1b[31m"), "{}", run.screen());
    assert_eq!(stdout(&ask), "\x1b[31mred\n");
}

#[test]
fn a_dumb_terminal_gets_plain_text() {
    let mut run = Pty::start_as(start::command("env").args([
        "TERM=dumb",
        PROGRAM,
        "run",
        "--backend",
        "cpu",
        "What is 1 + 1?",
    ]));
    assert_eq!(run.end().code(), Some(0), "{}", run.screen());
    assert!(!run.screen().contains('\x1b'), "{:?}", run.screen());
}
