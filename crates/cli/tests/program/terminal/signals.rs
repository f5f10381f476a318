//! Signals end the program at once, wherever it is, and the terminal stays usable.

use rustix::{
    process::Signal,
    termios::{LocalModes, Termios},
};

use super::pty::Pty;
use crate::start::{self, PROGRAM};

const ENDINGS: [(Signal, i32); 2] = [(Signal::TERM, 143), (Signal::HUP, 129)];

fn assert_restored(found: &Termios, left: &Termios) {
    assert_eq!(found.local_modes, left.local_modes);
    assert_eq!(found.input_modes, left.input_modes);
    assert_eq!(found.output_modes, left.output_modes);
    assert!(
        left.local_modes
            .contains(LocalModes::ICANON | LocalModes::ECHO)
    );
}

#[test]
fn a_chat_that_waits_for_a_line_ends_at_once() {
    for (signal, code) in ENDINGS {
        let mut chat = Pty::start(&["chat", "--no-history", "--backend", "cpu"]);
        chat.wait_for("> ");
        chat.type_text("half a que");
        chat.wait_for("que");
        assert!(!chat.modes().local_modes.contains(LocalModes::ICANON));
        chat.signal(signal);
        assert_eq!(chat.end().code(), Some(code), "{}", chat.screen());
        assert_restored(chat.found(), &chat.modes());
        // Pasting is plain again.
        assert!(chat.screen().contains("\x1b[?2004l"));
    }
}

#[test]
fn a_chat_in_the_middle_of_an_answer_ends_at_once() {
    for (signal, code) in ENDINGS {
        let mut chat = Pty::start(&[
            "chat",
            "--no-history",
            "--backend",
            "reference",
            "--ignore-eos",
        ]);
        chat.wait_for("> ");
        chat.type_text("Tell me a story.\r");
        chat.wait_for("story.");
        // The answer's first words.
        chat.wait_for("e");
        chat.signal(signal);
        assert_eq!(chat.end().code(), Some(code), "{}", chat.screen());
        assert_restored(chat.found(), &chat.modes());
    }
}

#[test]
fn an_answer_ends_at_once() {
    for (signal, code) in ENDINGS {
        let mut run = Pty::start(&[
            "run",
            "-q",
            "--backend",
            "reference",
            "--ignore-eos",
            "Tell me a story.",
        ]);
        run.wait_for("e");
        run.signal(signal);
        assert_eq!(run.end().code(), Some(code), "{}", run.screen());
        assert_restored(run.found(), &run.modes());
    }
}

#[test]
fn what_was_ignored_from_the_start_stays_so() {
    let mut run = Pty::start_as(start::command("sh").args([
        "-c",
        "trap '' HUP; exec \"$0\" run -q -n 40 --backend cpu --ignore-eos 'Tell me a story.'",
        PROGRAM,
    ]));
    run.wait_for("e");
    run.signal(Signal::HUP);
    assert_eq!(run.end().code(), Some(0), "{}", run.screen());
}
