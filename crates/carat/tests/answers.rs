//! Answers of the demo model through the façade.

use std::{
    path::PathBuf,
    pin::Pin,
    sync::{Arc, OnceLock},
    task::{Context, Poll, Wake, Waker},
    thread::{self, Thread},
};

use carat::{ChatFinish, Device, Error, LoadOptions, Message, Model, Overflow, Part, Sampling};
use futures_core::Stream;

fn demo() -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../../assets/pip-q8_0.gguf")
}

fn model() -> Model {
    static MODEL: OnceLock<Model> = OnceLock::new();
    let load = || {
        let options = LoadOptions {
            device: Device::Cpu(carat_cpu::CpuConfig::default()),
            ..LoadOptions::default()
        };
        options.load(demo()).expect("the demo model loads")
    };
    MODEL.get_or_init(load).clone()
}

/// Takes the likeliest token each time.
fn greedy(model: &Model) -> carat::Generation {
    carat::Generation {
        sampling: Sampling {
            temperature: 0.0,
            ..model.generation().sampling
        },
        ..model.generation()
    }
}

#[test]
fn a_conversation_goes_on_from_what_was_said() {
    let model = model();
    let mut chat = model.chat().generation(greedy(&model));
    let first = chat.send("What is 1 + 1?").unwrap().finish().unwrap();
    assert_eq!(first.reply.content, "1 + 1 = 2.");
    assert_eq!(first.reason, ChatFinish::Stop);
    let mut cached = 0;
    for _ in 0..6 {
        let next = chat.send("What is 2 + 2?").unwrap().finish().unwrap();
        assert_eq!(next.reply.content, "2 + 2 = 4.");
        cached = next.usage.counts.cached_tokens;
    }
    // Keys and values are kept by the page, and a page is longer than a short turn.
    assert!(cached > 0);
    assert_eq!(chat.messages().len(), 14);
}

#[test]
fn an_answer_that_must_go_on_has_text_to_the_end() {
    let model = model();
    let question = "Tell me a story about a fox.";
    let generation = |ignore_eos, max_tokens| carat::Generation {
        ignore_eos,
        max_tokens: Some(max_tokens),
        ..greedy(&model)
    };
    let mut chat = model.chat().generation(generation(false, 400));
    let ended = chat.send(question).unwrap().finish().unwrap();
    assert_eq!(ended.reason, ChatFinish::Stop, "it would end by itself");
    let tokens = ended.usage.counts.generated_tokens + 40;
    let mut chat = model.chat().generation(generation(true, tokens));
    let (mut answer, mut pieces) = (chat.send(question).unwrap(), 0);
    for part in answer.by_ref() {
        pieces += usize::from(matches!(part.unwrap(), Part::Content(_)));
    }
    let end = answer.finish().unwrap();
    assert_eq!(end.reason, ChatFinish::Length);
    assert_eq!(end.usage.counts.generated_tokens, tokens);
    assert!(end.reply.content.starts_with(&ended.reply.content));
    assert!(
        pieces > tokens * 9 / 10,
        "{pieces} pieces of {tokens} tokens"
    );
}

#[test]
fn a_cancelled_answer_keeps_its_usage_and_its_text() {
    let model = model();
    let mut generation = greedy(&model);
    generation.ignore_eos = true;
    let mut chat = model.chat().generation(generation);
    let mut answer = chat.send("Tell me a long story.").unwrap();
    let elsewhere = answer.canceller();
    let first = answer.next().unwrap().unwrap();
    elsewhere.cancel();
    let end = answer.finish().unwrap();
    assert_eq!(end.reason, ChatFinish::Cancelled);
    assert!(end.usage.counts.generated_tokens > 0 && end.usage.counts.prompt_tokens > 0);
    let Part::Content(first) = first else {
        panic!("{first:?}")
    };
    assert!(end.reply.content.starts_with(&first));
    assert_eq!(chat.messages()[1].content, end.reply.content);
}

#[test]
fn an_answer_is_a_stream_too() {
    struct Unpark(Thread);
    impl Wake for Unpark {
        fn wake(self: Arc<Self>) {
            self.0.unpark();
        }
    }
    let waker = Waker::from(Arc::new(Unpark(thread::current())));
    let mut task = Context::from_waker(&waker);
    let model = model();
    let mut chat = model.chat().generation(greedy(&model));
    let mut answer = chat.send("What is 3 + 3?").unwrap();
    let mut text = String::new();
    loop {
        match Pin::new(&mut answer).poll_next(&mut task) {
            Poll::Pending => thread::park(),
            Poll::Ready(Some(part)) => {
                if let Part::Content(piece) = part.unwrap() {
                    text += &piece;
                }
            }
            Poll::Ready(None) => break,
        }
    }
    assert_eq!(text, "3 + 3 = 6.");
    assert!(answer.end().is_some());
}

#[test]
fn seeds_differ_unless_one_is_given() {
    let model = model();
    assert_ne!(
        model.generation().sampling.seed,
        model.generation().sampling.seed
    );
    let say = |seed| {
        let mut chat = model.chat().seed(seed).max_tokens(12);
        let answer = chat.send("Tell me a story.").unwrap();
        answer.finish().unwrap().reply.content
    };
    assert_eq!(say(7), say(7));
}

#[test]
fn a_long_conversation_is_an_error_or_is_cut_by_choice() {
    let options = LoadOptions {
        device: Device::Cpu(carat_cpu::CpuConfig::default()),
        context: Some(256),
        ..LoadOptions::default()
    };
    let model = options.load(demo()).unwrap();
    let long = |overflow| {
        let mut chat = model.chat().generation(greedy(&model)).overflow(overflow);
        for n in 0..40 {
            chat.push(Message::user(format!("What is {n} + 1?")));
            chat.push(Message::assistant(format!("{n} + 1 = {}.", n + 1)));
        }
        let said = chat.messages().len();
        let answer = chat.send("What is 50 + 1?").and_then(carat::Answer::finish);
        (answer, chat.messages().len() - said)
    };
    let (refused, added) = long(Overflow::Refuse);
    assert!(matches!(refused, Err(Error::Rejected(_))), "{refused:?}");
    assert_eq!(added, 0);
    let (answer, added) = long(Overflow::DropOldest);
    assert_eq!(answer.unwrap().reply.content, "50 + 1 = 51.");
    assert_eq!(added, 2);
}

#[test]
fn what_is_no_model_is_an_error_of_its_kind() {
    let absent = Model::load("no/such/file.gguf").err().unwrap();
    assert!(matches!(absent, Error::File(_)), "{absent}");
    let options = LoadOptions {
        context: Some(1 << 20),
        device: Device::Reference,
        ..LoadOptions::default()
    };
    let long = options.load(demo()).err().unwrap();
    assert!(matches!(long, Error::ContextTooLong { .. }), "{long}");
}
