//! Shows an answer while it is generated, the same way in `run` and `chat`.

use std::{
    io::{self, IsTerminal, Write},
    time::Duration,
};

use anyhow::Result;
use carat_engine::{
    DraftCounts, Usage,
    chat::{ChatEvent, ChatFinish, ChatStream, Token},
};
use carat_text::{Part, Reply};
use rustix::{fd::AsFd, termios::tcgetwinsize};

use crate::{
    interrupt::Interrupt,
    terminal::{Terminal, thousands},
    visible::Visible,
    wrap::Wrap,
};

/// Interval at which Ctrl-C is looked at.
const PATIENCE: Duration = Duration::from_millis(50);

/// Parts of an answer that are shown, and the streams they go to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Show {
    /// The answer on stdout as it comes, thinking on stderr.
    All,
    /// The answer alone.
    Answer,
    /// Nothing; the caller prints the whole.
    Nothing,
}

/// Ends of lines of running text on a terminal. In a pipe or a file they always stay as they are.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum LineBreaks {
    /// As the model ends them; the terminal cuts what is too long.
    Unchanged,
    /// Also between words, before the terminal's edge.
    AtWords,
}

/// A finished answer.
pub(crate) struct Answer {
    pub(crate) reply: Reply,
    pub(crate) tokens: Vec<Token>,
    /// `None` when Ctrl-C cut it short.
    pub(crate) end: Option<(ChatFinish, Usage)>,
}

/// Follows the stream to its end, or until Ctrl-C.
pub(crate) fn follow(
    mut stream: ChatStream,
    show: Show,
    breaks: LineBreaks,
    terminal: Terminal,
    interrupt: &Interrupt,
) -> Result<Answer> {
    let mut answer = Answer {
        reply: Reply::default(),
        tokens: Vec::new(),
        end: None,
    };
    let wrap = |is_terminal: bool| {
        let wraps = is_terminal && breaks == LineBreaks::AtWords;
        wraps.then(Wrap::default)
    };
    let mut screen = Screen {
        show,
        terminal,
        visible: io::stdout().is_terminal().then(Visible::default),
        wrap: wrap(io::stdout().is_terminal()),
        thinking_wrap: wrap(io::stderr().is_terminal()),
        thinking: false,
        open_line: true,
    };
    while answer.end.is_none() && !interrupt.is_set() {
        match stream.wait(PATIENCE) {
            // Nobody asks for what the model says of the prompt here.
            None | Some(Ok(ChatEvent::Started(_) | ChatEvent::PromptToken(_))) => {}
            Some(Err(error)) => {
                screen.end()?;
                return Err(error.into());
            }
            Some(Ok(ChatEvent::Token(token))) => answer.tokens.push(token),
            Some(Ok(ChatEvent::Part(part))) => {
                screen.part(&part)?;
                answer.reply.add(part);
            }
            Some(Ok(ChatEvent::Finished { reason, usage })) => answer.end = Some((reason, usage)),
        }
    }
    screen.end()?;
    Ok(answer)
}

struct Screen {
    show: Show,
    terminal: Terminal,
    /// On a terminal; elsewhere text stays as it is.
    visible: Option<Visible>,
    wrap: Option<Wrap>,
    thinking_wrap: Option<Wrap>,
    thinking: bool,
    /// Whether the answer's last line still wants its end.
    open_line: bool,
}

impl Screen {
    fn part(&mut self, part: &Part) -> io::Result<()> {
        if self.show == Show::Nothing {
            return Ok(());
        }
        match part {
            Part::Thinking(text) if self.show == Show::All => {
                self.thinking = true;
                match &mut self.thinking_wrap {
                    Some(wrap) => {
                        let text = Visible::default().show(text).into_owned();
                        self.terminal
                            .dim_text(&wrap.add(&text, width(io::stderr())))
                    }
                    None => self.terminal.dim_text(text),
                }
            }
            // Calls are shown whole.
            Part::Thinking(_) | Part::CallStarted(_) | Part::CallArguments(_) => Ok(()),
            Part::Content(text) => {
                self.leave_thinking()?;
                let mut shown = self.shown(text);
                if let Some(wrap) = &mut self.wrap {
                    shown = wrap.add(&shown, width(io::stdout()));
                }
                self.open_line = !text.ends_with('\n');
                write(&shown)
            }
            Part::ToolCall(call) => {
                let call = serde_json::json!({ "name": call.name, "arguments": call.arguments });
                self.line(&serde_json::json!({ "tool_call": call }).to_string())
            }
            Part::InvalidCall(call) => self.line(&call.raw),
        }
    }

    /// A line that is no running text.
    fn line(&mut self, text: &str) -> io::Result<()> {
        self.leave_thinking()?;
        let held = self.wrap.as_mut().map(Wrap::finish).unwrap_or_default();
        let shown = self.shown(text);
        write(&format!("{held}{shown}\n"))
    }

    fn shown(&mut self, text: &str) -> String {
        match &mut self.visible {
            Some(visible) => visible.show(text).into_owned(),
            None => text.to_owned(),
        }
    }

    /// Thinking and answer stand apart.
    fn leave_thinking(&mut self) -> io::Result<()> {
        if std::mem::take(&mut self.thinking) {
            let held = self.thinking_wrap.as_mut().map(Wrap::finish);
            self.terminal
                .dim_text(&format!("{}\n", held.unwrap_or_default()))?;
        }
        Ok(())
    }

    fn end(&mut self) -> io::Result<()> {
        self.leave_thinking()?;
        let mut held = self.wrap.as_mut().map(Wrap::finish).unwrap_or_default();
        if self.show != Show::Nothing && self.open_line {
            held.push('\n');
        }
        write(&held)
    }
}

fn write(text: &str) -> io::Result<()> {
    let mut out = io::stdout().lock();
    out.write_all(text.as_bytes())?;
    out.flush()
}

/// Columns of a terminal at this moment; 0 where they are not known.
fn width(terminal: impl AsFd) -> usize {
    tcgetwinsize(terminal).map_or(0, |size| size.ws_col.into())
}

/// Such as `prefill 17 tokens, 2,310 tok/s; decode 96 tokens, 612 tok/s`.
pub(crate) fn summary(usage: &Usage) -> String {
    let rate = |tokens: usize, time: Duration| {
        let rate = tokens as f64 / time.as_secs_f64().max(1e-9);
        if rate < 100.0 {
            format!("{rate:.1} tok/s")
        } else {
            format!("{} tok/s", thousands(rate as u64))
        }
    };
    let counts = &usage.counts;
    let computed = counts.prompt_tokens - counts.cached_tokens;
    let mut text = format!("prefill {computed} tokens");
    if counts.cached_tokens > 0 {
        text += &format!(" ({} reused)", counts.cached_tokens);
    }
    text += &format!(", {}", rate(computed, usage.prefill));
    // The first token comes out of the prefill; the others are decoded.
    let decoded = counts.generated_tokens.saturating_sub(1);
    if decoded > 0 {
        text += &format!("; decode {decoded} tokens, {}", rate(decoded, usage.decode));
    }
    if counts.drafts.drafted > 0 {
        text += &format!("; drafts: {}", drafts(&counts.drafts));
    }
    text
}

/// Such as `3.61 tokens a pass, 87 % of 120 right (by place: 95 90 84 %)`.
pub(crate) fn drafts(counts: &DraftCounts) -> String {
    let percent = |accepted: u64, drafted: u64| 100.0 * accepted as f64 / drafted.max(1) as f64;
    let places = counts.accepted_at.iter().zip(&counts.drafted_at);
    let places = places.take_while(|(_, drafted)| **drafted > 0);
    let places: Vec<String> = places
        .map(|(accepted, drafted)| format!("{:.0}", percent((*accepted).into(), (*drafted).into())))
        .collect();
    format!(
        "{:.2} tokens a pass, {:.0} % of {} right (by place: {} %)",
        counts.tokens_per_pass(),
        percent(counts.accepted, counts.drafted),
        thousands(counts.drafted),
        places.join(" ")
    )
}
