//! `run`: one prompt, one answer.

use std::{
    io::{self, IsTerminal},
    process::ExitCode,
};

use anyhow::{Context, Result, bail};
use carat::window::Window;
use carat_engine::chat::{ChatFinish, Conversation};
use carat_text::Message;
use serde_json::json;

use crate::{
    answer::{self, Answer, LineBreaks, Show},
    args::{OverflowName, RunArgs},
    input,
    interrupt::{INTERRUPTED, Interrupt},
    session::{Session, unix_time},
    settings::Settings,
    terminal::{Terminal, say},
    words,
};

pub(crate) fn run(args: &RunArgs, settings: &Settings, terminal: Terminal) -> Result<ExitCode> {
    let input = Input::read(args, terminal)?;
    let mut session = Session::start(&args.generate, settings, terminal)?;
    session.generation.logprobs = args.logprobs;
    let interrupt = Interrupt::install()?;
    let messages = match input {
        Input::Text(prompt) if args.raw => Err(prompt),
        Input::Text(prompt) => {
            let system = settings
                .system
                .iter()
                .map(|text| Message::system(text.as_str()));
            Ok(system.chain([Message::user(prompt)]).collect())
        }
        Input::Messages(messages) => Ok(messages),
    };
    let stream = match messages {
        Ok(messages) => {
            let mut conversation = conversation(&session, messages);
            if args.overflow == OverflowName::DropOldest {
                let most = session.generation.max_tokens;
                let fitted = Window::default().fit(&session.chat, &conversation, most)?;
                if fitted.newly_left_out > 0 {
                    terminal.note(format_args!(
                        "the conversation is longer than the context of {} tokens: its {} oldest turns are left out",
                        session.context, fitted.newly_left_out
                    ));
                }
                conversation = fitted.conversation;
            }
            let generation = session.generation_of(&conversation, terminal)?;
            session.chat.answer(&conversation, &generation)
        }
        Err(text) => {
            let generation = session.generation_of_text(terminal)?;
            session.chat.complete(&text, &generation)
        }
    }?;
    let show = match (args.json, args.generate.hide_thinking) {
        (true, _) => Show::Nothing,
        (_, true) => Show::Answer,
        _ => Show::All,
    };
    let answer = answer::follow(
        stream,
        show,
        // An answer to one prompt is often copied, whole.
        LineBreaks::Unchanged,
        terminal,
        &interrupt,
    )?;
    if args.json {
        say(report(&session, &answer))?;
    }
    for call in &answer.reply.invalid_calls {
        terminal.note(format_args!(
            "the model wrote a tool call that cannot be read: {}",
            call.error
        ));
    }
    let Some((reason, usage)) = &answer.end else {
        terminal.note(format_args!("stopped after {} tokens", answer.tokens.len()));
        return Ok(ExitCode::from(INTERRUPTED));
    };
    terminal.note(answer::summary(usage));
    let total = usage.counts.prompt_tokens + usage.counts.generated_tokens;
    if *reason == ChatFinish::Length && total >= session.context {
        terminal.note(format_args!(
            "the context of {} tokens is full{}",
            session.context,
            session.more_context("; give ")
        ));
    }
    Ok(ExitCode::SUCCESS)
}

fn conversation(session: &Session, messages: Vec<Message>) -> Conversation {
    Conversation {
        messages,
        tools: session.tools.clone(),
        thinking: session.thinking,
        unix_time: unix_time(),
        continues: false,
    }
}

enum Input {
    Text(String),
    Messages(Vec<Message>),
}

impl Input {
    /// The prompt from the argument, a file, or stdin; or a whole conversation.
    fn read(args: &RunArgs, terminal: Terminal) -> Result<Input> {
        if let Some(path) = &args.messages {
            let text = input::text(path, terminal)?;
            let messages: Vec<Message> = words::from_json(&text).with_context(|| {
                format!(
                    "`{}` is not a list of messages with `role` and `content`",
                    path.display()
                )
            })?;
            if messages.is_empty() {
                bail!("`{}` holds no messages", path.display());
            }
            return Ok(Input::Messages(messages));
        }
        let (text, origin) = match (&args.prompt, &args.file) {
            (Some(prompt), _) if prompt != "-" => {
                let piped = if args.no_stdin {
                    None
                } else {
                    input::piped_text(terminal)?
                };
                let text = match piped {
                    Some(piped) => format!("{prompt}\n\n{piped}"),
                    None => prompt.clone(),
                };
                (text, "the prompt".to_owned())
            }
            (_, Some(path)) => (
                input::text(path, terminal)?,
                format!("`{}`", path.display()),
            ),
            (prompt, None) => {
                if prompt.is_none() && (args.no_stdin || io::stdin().is_terminal()) {
                    bail!("no prompt: give one as an argument, with -f FILE, or piped into stdin");
                }
                (input::stdin_text(terminal)?, "stdin".to_owned())
            }
        };
        if text.trim().is_empty() && !args.raw {
            bail!("{origin} is empty; there is nothing to answer");
        }
        Ok(Input::Text(text))
    }
}

fn report(session: &Session, answer: &Answer) -> serde_json::Value {
    let reason = answer
        .end
        .as_ref()
        .map_or("cancelled", |(reason, _)| match reason {
            ChatFinish::Stop => "stop",
            ChatFinish::Length => "length",
            ChatFinish::ToolCalls => "tool_calls",
            ChatFinish::Cancelled => "cancelled",
            ChatFinish::Deadline => "deadline",
        });
    let tokenizer = session.chat.tokenizer();
    let logprobs = session.generation.logprobs.map(|_| {
        let named = |id: u32, logprob: f32| json!({ "token": tokenizer.decode(&[id]), "id": id, "logprob": logprob });
        let each = answer.tokens.iter().map(|t| {
            let mut entry = named(t.id, t.logprob.unwrap_or(f32::NEG_INFINITY));
            entry["top"] = t.top.iter().map(|(id, logprob)| named(*id, *logprob)).collect();
            entry
        });
        each.collect::<Vec<_>>()
    });
    let usage = answer.end.as_ref().map(|(_, usage)| {
        json!({
            "prompt_tokens": usage.counts.prompt_tokens,
            "cached_tokens": usage.counts.cached_tokens,
            "completion_tokens": usage.counts.generated_tokens,
            "drafted_tokens": usage.counts.drafts.drafted,
            "accepted_tokens": usage.counts.drafts.accepted,
            "passes": usage.counts.drafts.passes,
            "prefill_seconds": usage.prefill.as_secs_f64(),
            "decode_seconds": usage.decode.as_secs_f64(),
        })
    });
    json!({
        "model": session.model_name,
        "content": answer.reply.content,
        "thinking": answer.reply.thinking,
        "tool_calls": answer.reply.tool_calls.iter()
            .map(|call| json!({ "name": call.name, "arguments": call.arguments })).collect::<Vec<_>>(),
        "invalid_calls": answer.reply.invalid_calls.iter()
            .map(|call| json!({ "text": call.raw, "error": call.error.to_string() })).collect::<Vec<_>>(),
        "finish_reason": reason,
        "seed": session.generation.sampling.seed,
        "token_ids": answer.tokens.iter().map(|t| t.id).collect::<Vec<_>>(),
        "logprobs": logprobs,
        "usage": usage,
    })
}
