//! The program at a terminal: a pseudo-terminal whose other end the test holds.

use std::{
    fs::File,
    io::{Read, Write},
    os::{fd::OwnedFd, unix::fs::OpenOptionsExt},
    process::{Child, Command, ExitStatus},
    sync::mpsc::{self, Receiver, RecvTimeoutError},
    thread,
    time::{Duration, Instant},
};

use rustix::{
    fs::OFlags,
    process::{Pid, Signal, kill_process},
    pty::{OpenptFlags, grantpt, openpt, ptsname, unlockpt},
    termios::{Termios, Winsize, tcgetattr, tcsetwinsize},
};

use crate::start::{self, PROGRAM};

/// Longer than any answer of the demo model takes on a busy machine.
const PATIENCE: Duration = Duration::from_mins(2);

pub(crate) struct Pty {
    child: Child,
    keyboard: File,
    screen: Receiver<Vec<u8>>,
    seen: Vec<u8>,
    /// Position in `seen` from which the next thing is looked for.
    read: usize,
    terminal: File,
    /// Modes of the terminal before the program was started.
    found: Termios,
}

impl Pty {
    pub(crate) fn start(arguments: &[&str]) -> Pty {
        // Whoever runs the tests may ignore these, as jobs in the background do.
        let program = ["--default-signal=INT,HUP,TERM", PROGRAM];
        Pty::start_as(start::command("env").args(program).args(arguments))
    }

    /// Runs any command on the terminal.
    pub(crate) fn start_as(command: &mut Command) -> Pty {
        let master = openpt(OpenptFlags::RDWR | OpenptFlags::NOCTTY).expect("a pseudo-terminal");
        grantpt(&master).expect("granted");
        unlockpt(&master).expect("unlocked");
        let name = ptsname(&master, Vec::new()).expect("its name");
        let terminal = File::options()
            .read(true)
            .write(true)
            .custom_flags(OFlags::NOCTTY.bits().cast_signed())
            .open(name.to_str().expect("an ASCII path"))
            .expect("the other end");
        let found = tcgetattr(&terminal).expect("it is a terminal");
        let end = || OwnedFd::from(terminal.try_clone().expect("another handle"));
        let child = command
            .env("TERM", "xterm")
            .stdin(end())
            .stdout(end())
            .stderr(end())
            .spawn()
            .expect("the program starts");
        let keyboard = File::from(master);
        let mut output = keyboard.try_clone().expect("another handle");
        let (sender, screen) = mpsc::channel();
        thread::spawn(move || {
            let mut bytes = [0; 4096];
            while let Ok(n) = output.read(&mut bytes) {
                if n == 0 || sender.send(bytes[..n].to_vec()).is_err() {
                    return;
                }
            }
        });
        Pty {
            child,
            keyboard,
            screen,
            seen: Vec::new(),
            read: 0,
            terminal,
            found,
        }
    }

    /// Gives the terminal this many columns, from now on.
    pub(crate) fn resize(&self, columns: u16) {
        let size = Winsize {
            ws_row: 24,
            ws_col: columns,
            ws_xpixel: 0,
            ws_ypixel: 0,
        };
        tcsetwinsize(&self.terminal, size).expect("it is a terminal");
    }

    pub(crate) fn type_text(&mut self, text: &str) {
        self.keyboard.write_all(text.as_bytes()).expect("typed");
    }

    /// Waits until the screen shows a text after what was waited for last; returns what came before it.
    pub(crate) fn wait_for(&mut self, text: &str) -> String {
        let until = Instant::now() + PATIENCE;
        loop {
            let new = &self.seen[self.read..];
            if let Some(at) = new.windows(text.len()).position(|w| w == text.as_bytes()) {
                let before = String::from_utf8_lossy(&new[..at]).into_owned();
                self.read += at + text.len();
                return before;
            }
            let left = until.saturating_duration_since(Instant::now());
            match self.screen.recv_timeout(left) {
                Ok(bytes) => self.seen.extend(bytes),
                Err(RecvTimeoutError::Timeout | RecvTimeoutError::Disconnected) => {
                    panic!("`{text}` never came; the screen:\n{}", self.screen())
                }
            }
        }
    }

    /// All that was shown so far, as far as it was waited for.
    pub(crate) fn screen(&self) -> String {
        String::from_utf8_lossy(&self.seen).into_owned()
    }

    pub(crate) fn signal(&self, signal: Signal) {
        let pid = Pid::from_child(&self.child);
        kill_process(pid, signal).expect("the program is there");
    }

    pub(crate) fn found(&self) -> &Termios {
        &self.found
    }

    pub(crate) fn modes(&self) -> Termios {
        tcgetattr(&self.terminal).expect("it is a terminal")
    }

    /// Waits for the end of the program.
    pub(crate) fn end(&mut self) -> ExitStatus {
        let (sender, ended) = mpsc::channel();
        let pid = Pid::from_child(&self.child);
        let watchdog = thread::spawn(move || {
            let result = ended.recv_timeout(PATIENCE);
            if let Err(RecvTimeoutError::Timeout) = result {
                let _ = kill_process(pid, Signal::KILL);
            }
        });
        let status = self.child.wait().expect("it ends");
        drop::<mpsc::Sender<()>>(sender);
        watchdog.join().expect("no panic");
        while let Ok(bytes) = self.screen.recv_timeout(Duration::from_millis(100)) {
            self.seen.extend(bytes);
        }
        status
    }
}

impl Drop for Pty {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}
