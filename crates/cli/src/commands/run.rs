//! `run`: one prompt, one answer.

use std::{
    fs,
    io::{self, IsTerminal, Read},
    process::ExitCode,
};

use anyhow::{Context, Result, bail};
use carat_engine::chat::{ChatFinish, Conversation};
use carat_text::Message;
use serde_json::json;

use crate::{
    answer::{self, Answer, Show},
    args::RunArgs,
    interrupt::{INTERRUPTED, Interrupt},
    session::{Session, unix_time},
    settings::Settings,
    terminal::{Terminal, say},
};

pub(crate) fn run(args: &RunArgs, settings: &Settings, terminal: Terminal) -> Result<ExitCode> {
    let input = Input::read(args)?;
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
            let conversation = conversation(&session, messages);
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
    let answer = answer::follow(stream, show, terminal, &interrupt)?;
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
    if *reason == ChatFinish::Length && session.generation.max_tokens.is_none() {
        terminal.note(format_args!(
            "the context of {} tokens is full; -c gives more",
            session.context
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
    fn read(args: &RunArgs) -> Result<Input> {
        if let Some(path) = &args.messages {
            let text = fs::read_to_string(path)
                .with_context(|| format!("cannot read `{}`", path.display()))?;
            let messages: Vec<Message> = serde_json::from_str(&text).with_context(|| {
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
                (prompt.clone().into_bytes(), "the prompt".to_owned())
            }
            (_, Some(path)) => {
                let text =
                    fs::read(path).with_context(|| format!("cannot read `{}`", path.display()))?;
                (text, format!("`{}`", path.display()))
            }
            (prompt, None) => {
                if prompt.is_none() && io::stdin().is_terminal() {
                    bail!("no prompt: give one as an argument, with -f FILE, or piped into stdin");
                }
                let mut text = Vec::new();
                io::stdin()
                    .read_to_end(&mut text)
                    .context("cannot read stdin")?;
                (text, "stdin".to_owned())
            }
        };
        let text = String::from_utf8(text)
            .map_err(|e| e.utf8_error())
            .with_context(|| format!("{origin} is not UTF-8 text"))?;
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
