//! `chat`: a conversation, line by line. Each turn reuses the keys and values of the turns before it.

mod lines;

use std::{path::Path, process::ExitCode};

use anyhow::{Context, Result, bail};
use carat::window::Window;
use carat_engine::{
    Rejected,
    chat::{ChatError, ChatFinish, ChatStream, Conversation},
};
use carat_text::{Message, Role};

use lines::Lines;

use crate::{
    answer::{self, LineBreaks, Show},
    args::ChatArgs,
    input,
    interrupt::Interrupt,
    output::WholeFile,
    session::{Session, unix_time},
    settings::Settings,
    terminal::{Terminal, say, warn},
    typeahead::TypeAhead,
    words,
};

const HELP: &str = "\
/help            this list
/reset           forget the conversation, keep the system prompt
/system [TEXT]   set the system prompt and start over; without TEXT, show it
/think on|off    let the model think before it answers
/save FILE       write the conversation as JSON; `carat chat --load FILE` goes on with it
/exit            leave; Ctrl-D does too
Ctrl-C stops an answer. A line that ends in \\ goes on in the next one.";

pub(crate) fn run(args: &ChatArgs, settings: &Settings, terminal: Terminal) -> Result<ExitCode> {
    let loaded = args
        .load
        .as_deref()
        .map(|path| load(path, terminal))
        .transpose()?;
    // Before anything changes the terminal, as this is how it is left.
    let interrupt = Interrupt::install()?;
    interrupt.end_at_once();
    let _held = terminal.edits_lines().then(TypeAhead::hold);
    let session = Session::start(&args.generate, settings, terminal)?;
    let mut talk = Talk {
        conversation: Conversation {
            messages: settings
                .system
                .iter()
                .map(|text| Message::system(text.as_str()))
                .collect(),
            tools: session.tools.clone(),
            thinking: session.thinking,
            unix_time: unix_time(),
            continues: false,
        },
        show: if args.generate.hide_thinking {
            Show::Answer
        } else {
            Show::All
        },
        // What is held to a format is for programs, which want it as it is.
        breaks: if terminal.is_dumb() || args.generate.format.is_given() {
            LineBreaks::Unchanged
        } else {
            LineBreaks::AtWords
        },
        session,
        terminal,
        interrupt,
        window: Window::default(),
        told_of_window: false,
    };
    if let Some(messages) = loaded {
        talk.conversation.messages = messages;
    }
    let mut lines = Lines::open(args.no_history)?;
    terminal.note(format_args!(
        "{}; /help lists the commands",
        talk.session.model_name
    ));
    while let Some(line) = lines.next("> ")? {
        let line = line.trim();
        if line.is_empty() {
            continue;
        }
        if let Some(command) = line.strip_prefix('/') {
            match talk.command(command)? {
                Next::Line => continue,
                Next::Leave => break,
            }
        }
        let before = talk.conversation.messages.len();
        talk.conversation.messages.push(Message::user(line));
        if !talk.turn(&mut lines)? {
            // As if it had not been said, so that a shorter question can follow.
            talk.conversation.messages.truncate(before);
        }
    }
    lines.close();
    Ok(ExitCode::SUCCESS)
}

enum Next {
    Line,
    Leave,
}

struct Talk {
    session: Session,
    conversation: Conversation,
    show: Show,
    breaks: LineBreaks,
    terminal: Terminal,
    interrupt: Interrupt,
    window: Window,
    /// Set once it is said that turns leave.
    told_of_window: bool,
}

impl Talk {
    /// Answers; where the model calls tools, asks for their results and lets it go on. `false` if that was refused.
    fn turn(&mut self, lines: &mut Lines) -> Result<bool> {
        loop {
            self.interrupt.clear();
            let stream = match self.ask() {
                Ok(stream) => stream,
                Err(error) => {
                    warn(format_args!("{error:#}"));
                    return Ok(false);
                }
            };
            let answer = answer::follow(
                stream,
                self.show,
                self.breaks,
                self.terminal,
                &self.interrupt,
            )?;
            self.conversation
                .messages
                .push(Message::from(answer.reply.clone()));
            for call in &answer.reply.invalid_calls {
                warn(format_args!(
                    "the model wrote a tool call that cannot be read: {}",
                    call.error
                ));
            }
            let Some((reason, usage)) = answer.end else {
                self.terminal.note("stopped");
                return Ok(true);
            };
            self.terminal.note(answer::summary(&usage));
            let total = usage.counts.prompt_tokens + usage.counts.generated_tokens;
            if reason == ChatFinish::Length && total >= self.session.context {
                warn(format_args!(
                    "the answer was cut off where the context of {} tokens is full; the oldest turns leave next",
                    self.session.context
                ));
            }
            if reason != ChatFinish::ToolCalls || !self.tool_results(lines)? {
                return Ok(true);
            }
        }
    }

    /// Sends as much of the conversation as fits.
    fn ask(&mut self) -> Result<ChatStream> {
        let session = &self.session;
        let most = session.generation.max_tokens;
        let fitted = self.window.fit(&session.chat, &self.conversation, most);
        let fitted = match fitted {
            // In words that say what would help.
            Err(ChatError::Rejected(Rejected::OverContext { prompt, .. })) => bail!(
                "this turn alone takes {prompt} tokens, and the context is {}; shorten it{}",
                session.context,
                session.more_context(" or start with ")
            ),
            fitted => fitted?,
        };
        if fitted.newly_left_out > 0 && !self.told_of_window {
            self.told_of_window = true;
            self.terminal.note(format_args!(
                "the context of {} tokens is full: the oldest turns are left out from here on",
                session.context
            ));
        }
        let generation = session.generation_of(&fitted.conversation, self.terminal)?;
        Ok(session.chat.answer(&fitted.conversation, &generation)?)
    }

    /// Asks for the result of each call; `false` if the person has none to give.
    fn tool_results(&mut self, lines: &mut Lines) -> Result<bool> {
        let calls = self
            .conversation
            .messages
            .last()
            .map(|m| m.tool_calls.clone())
            .unwrap_or_default();
        for call in calls {
            let Some(result) = lines.next(&format!("result of {}> ", call.name))? else {
                return Ok(false);
            };
            let mut message = Message::tool_result(result.trim());
            message.name = Some(call.name);
            message.tool_call_id = call.id;
            self.conversation.messages.push(message);
        }
        Ok(true)
    }

    fn command(&mut self, command: &str) -> Result<Next> {
        let (name, rest) = command
            .split_once(char::is_whitespace)
            .unwrap_or((command, ""));
        let rest = rest.trim();
        match (name, rest) {
            ("help" | "?", _) => say(HELP)?,
            ("exit" | "quit" | "bye", _) => return Ok(Next::Leave),
            ("reset" | "clear", _) => {
                self.conversation
                    .messages
                    .retain(|m| m.role == Role::System);
                self.window.reset();
                self.terminal.note("the conversation starts over");
            }
            ("system", "") => {
                let system = self
                    .conversation
                    .messages
                    .iter()
                    .find(|m| m.role == Role::System);
                say(system.map_or("no system prompt", |m| m.content.as_str()))?;
            }
            ("system", text) => {
                self.conversation.messages = vec![Message::system(text)];
                self.window.reset();
                self.terminal
                    .note("system prompt set; the conversation starts over");
            }
            ("think", "on" | "off") => {
                self.conversation.thinking = rest == "on";
                self.terminal.note(format_args!("thinking is {rest}"));
            }
            ("think", _) => warn("/think takes on or off"),
            ("save", "") => warn("/save needs a file name"),
            ("save", path) => match self.save(Path::new(path)) {
                Ok(()) => self.terminal.note(format_args!("saved to `{path}`")),
                Err(error) => warn(format_args!("{error:#}")),
            },
            _ => warn(format_args!("`/{command}` is no command; /help lists them")),
        }
        Ok(Next::Line)
    }

    fn save(&self, path: &Path) -> Result<()> {
        let mut file = WholeFile::create(path)?;
        file.write(serde_json::to_string_pretty(&self.conversation.messages)?.as_bytes())?;
        file.write(b"\n")?;
        file.commit()?;
        Ok(())
    }
}

fn load(path: &Path, terminal: Terminal) -> Result<Vec<Message>> {
    words::from_json(&input::text(path, terminal)?).with_context(|| {
        format!(
            "`{}` is not a conversation written by /save",
            path.display()
        )
    })
}
