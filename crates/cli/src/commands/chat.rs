//! `chat`: a conversation, line by line. Each turn reuses the keys and values of the turns before it.

mod command;
mod complete;
mod lines;
mod set;

use std::{path::Path, process::ExitCode};

use anyhow::{Context, Result, bail};
use carat::window::Window;
use carat_engine::{
    Rejected,
    chat::{ChatError, ChatFinish, ChatStream, Conversation},
};
use carat_text::{Message, Role};

use command::{Command, Overwrite};
use lines::Lines;
use set::Setting;

use crate::{
    answer::{self, LineBreaks, Show},
    args::ChatArgs,
    input,
    interrupt::Interrupt,
    output::WholeFile,
    session::{Session, unix_time},
    settings::Settings,
    terminal::{Terminal, say, thousands, warn},
    typeahead::TypeAhead,
    words,
};

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
            match talk.command(command, &mut lines)? {
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
            let total = usage.counts.prompt_tokens + usage.counts.generated_tokens;
            self.terminal.note(format_args!(
                "{}; {}",
                answer::summary(&usage),
                meter(total, self.session.context)
            ));
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

    fn command(&mut self, typed: &str, lines: &mut Lines) -> Result<Next> {
        let command = match Command::read(typed) {
            Ok(command) => command,
            Err(problem) => {
                warn(problem);
                return Ok(Next::Line);
            }
        };
        match command {
            Command::Help => say(command::help())?,
            Command::Exit => return Ok(Next::Leave),
            Command::Regenerate => self.regenerate(lines)?,
            Command::Undo => match self.last_question() {
                Some(at) => {
                    self.conversation.messages.truncate(at);
                    self.terminal.note("the last question is forgotten");
                }
                None => warn("there is no question to undo"),
            },
            Command::Reset => {
                self.conversation
                    .messages
                    .retain(|m| m.role == Role::System);
                self.window.reset();
                self.terminal.note("the conversation starts over");
            }
            Command::ShowSystem => {
                let mut messages = self.conversation.messages.iter();
                let system = messages.find(|m| m.role == Role::System);
                say(system.map_or("no system prompt", |m| m.content.as_str()))?;
            }
            Command::System(text) => {
                self.conversation.messages = vec![Message::system(text)];
                self.window.reset();
                self.terminal
                    .note("system prompt set; the conversation starts over");
            }
            Command::Think(on) => {
                self.conversation.thinking = on;
                let state = if on { "on" } else { "off" };
                self.terminal.note(format_args!("thinking is {state}"));
            }
            Command::ShowSettings => {
                for setting in Setting::ALL {
                    let value = setting.value(&self.session.generation, self.breaks);
                    say(format_args!("{:<18} {value}", setting.name()))?;
                }
            }
            Command::Set(setting, value) => {
                let generation = &mut self.session.generation;
                match setting.change(value, generation, &mut self.breaks) {
                    Ok(()) => self.terminal.note(format_args!(
                        "{} is {}",
                        setting.name(),
                        setting.value(generation, self.breaks)
                    )),
                    Err(problem) => warn(problem),
                }
            }
            Command::Save { path, overwrite } => self.save(&path, overwrite, lines)?,
            Command::Load(path) => self.load(&path),
            Command::Image => warn("images cannot be seen yet; this version reads text alone"),
        }
        Ok(Next::Line)
    }

    /// The place of what was asked last.
    fn last_question(&self) -> Option<usize> {
        let messages = &self.conversation.messages;
        messages.iter().rposition(|m| m.role == Role::User)
    }

    /// Answers the last question again, with noise of its own.
    fn regenerate(&mut self, lines: &mut Lines) -> Result<()> {
        let Some(question) = self.last_question() else {
            warn("there is no question to answer again");
            return Ok(());
        };
        let sampling = &mut self.session.generation.sampling;
        if sampling.temperature == 0.0 {
            self.terminal
                .note("at temperature 0 the answer stays the same; /set temperature 1 varies it");
        }
        // The next seed, so that a session with a given one can be repeated.
        sampling.seed = sampling.seed.wrapping_add(1);
        let before = self.conversation.messages.split_off(question + 1);
        if !self.turn(lines)? {
            self.conversation.messages.truncate(question + 1);
            self.conversation.messages.extend(before);
        }
        Ok(())
    }

    fn save(&self, path: &Path, overwrite: Overwrite, lines: &mut Lines) -> Result<()> {
        let shown = path.display();
        let taken = path.is_file() && overwrite == Overwrite::Ask;
        if taken && !lines.confirm(&format!("`{shown}` is there; overwrite it?"))? {
            warn(format_args!(
                "not saved, as `{shown}` is there; /save! overwrites without asking"
            ));
            return Ok(());
        }
        match self.write(path) {
            Ok(()) => self.terminal.note(format_args!("saved to `{shown}`")),
            Err(error) => warn(format_args!("{error:#}")),
        }
        Ok(())
    }

    fn write(&self, path: &Path) -> Result<()> {
        let mut file = WholeFile::create(path)?;
        file.write(serde_json::to_string_pretty(&self.conversation.messages)?.as_bytes())?;
        file.write(b"\n")?;
        file.commit()?;
        Ok(())
    }

    /// Goes on with a conversation that was saved; one that cannot be read leaves this one as it is.
    fn load(&mut self, path: &Path) {
        match load(path, self.terminal) {
            Ok(messages) => {
                self.terminal.note(format_args!(
                    "going on after {} messages from `{}`",
                    messages.len(),
                    path.display()
                ));
                self.conversation.messages = messages;
                self.window.reset();
            }
            Err(error) => warn(format_args!("{error:#}")),
        }
    }
}

/// Fill of the context, such as `context 512 of 2,048 tokens (25 %)`.
fn meter(tokens: usize, context: usize) -> String {
    format!(
        "context {} of {} tokens ({:.0} %)",
        thousands(tokens as u64),
        thousands(context as u64),
        100.0 * tokens as f64 / context.max(1) as f64
    )
}

fn load(path: &Path, terminal: Terminal) -> Result<Vec<Message>> {
    words::from_json(&input::text(path, terminal)?).with_context(|| {
        format!(
            "`{}` is not a conversation written by /save",
            path.display()
        )
    })
}
