//! Models and answers that tests share.
#![allow(
    dead_code,
    reason = "each test program uses what it needs of what they share"
)]

pub(crate) mod schemas;
pub(crate) mod walk;
pub(crate) mod walks;

use std::{
    io::Cursor,
    path::PathBuf,
    sync::{Arc, LazyLock},
    time::Duration,
};

use carat_engine::Constraint;
use carat_gguf::Gguf;
use carat_grammar::{Answer, Grammars, Settings};
use carat_model::{TokenId, sampling::TokenMask};
use carat_text::{Part, PartsParser, Reply, Specials, Tokenizer, Tool};

/// A vocabulary and its grammars.
pub(crate) struct Model {
    pub(crate) tokenizer: Arc<Tokenizer>,
    pub(crate) grammars: Grammars,
}

impl Model {
    /// What compiles is tested whatever else the machine does meanwhile.
    fn new(gguf: &Gguf) -> Model {
        Model::with_limit(Duration::from_mins(1), gguf)
    }

    pub(crate) fn with_limit(compile_limit: Duration, gguf: &Gguf) -> Model {
        let tokenizer = Arc::new(Tokenizer::from_metadata(gguf.metadata()).unwrap());
        let settings = Settings {
            compile_limit,
            ..Settings::default()
        };
        let grammars = Grammars::with(settings, Arc::clone(&tokenizer)).unwrap();
        Model {
            tokenizer,
            grammars,
        }
    }

    pub(crate) fn mask(&self) -> TokenMask {
        TokenMask::none(self.tokenizer.vocab().len())
    }

    /// The constraint of an answer that has one.
    pub(crate) fn start(&self, answer: &Answer<'_>) -> Box<dyn Constraint> {
        let compiled = self.grammars.compile(answer).unwrap();
        compiled.expect("the answer is constrained").source.start()
    }

    pub(crate) fn encode(&self, text: &str) -> Vec<TokenId> {
        self.tokenizer.encode(text, Specials::Parse)
    }

    /// The first tokens of a text that may come, as text, up to one that may not; the whole text and whether the answer may end
    /// there otherwise.
    pub(crate) fn follow(&self, answer: &Answer<'_>, text: &str) -> Followed {
        let mut constraint = self.start(answer);
        let mut mask = self.mask();
        let mut taken = Vec::new();
        for id in self.encode(text) {
            allowed(constraint.as_mut(), &mut mask);
            if !mask.allows(id) {
                return Followed::Refused(self.show(&taken));
            }
            constraint.accept(id);
            taken.push(id);
        }
        allowed(constraint.as_mut(), &mut mask);
        let stops = self.tokenizer.vocab().stop_tokens();
        if stops.iter().any(|stop| mask.allows(*stop)) {
            Followed::Complete
        } else {
            Followed::Incomplete
        }
    }

    pub(crate) fn is_complete(&self, answer: &Answer<'_>, text: &str) -> bool {
        self.follow(answer, text) == Followed::Complete
    }

    pub(crate) fn is_refused(&self, answer: &Answer<'_>, text: &str) -> bool {
        matches!(self.follow(answer, text), Followed::Refused(_))
    }

    /// Text of ids, marks included.
    pub(crate) fn show(&self, ids: &[TokenId]) -> String {
        let vocab = self.tokenizer.vocab();
        let mut text = String::new();
        let mut decoder = carat_text::TokenDecoder::new(
            Arc::clone(vocab),
            carat_text::decoder::SpecialText::Show,
        );
        for id in ids {
            decoder.push(*id, &mut text);
        }
        decoder.finish(&mut text);
        text
    }

    /// The answer as front ends see it.
    pub(crate) fn parse(&self, ids: &[TokenId], tools: &[Tool]) -> Reply {
        let mut parser = PartsParser::new(Arc::clone(self.tokenizer.vocab()), tools);
        let mut parts: Vec<Part> = Vec::new();
        for id in ids {
            parser.push(*id, &mut parts);
        }
        parser.finish(&mut parts);
        let mut reply = Reply::default();
        reply.extend(parts);
        reply
    }
}

/// Reach of a text as an answer.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Followed {
    /// All of it, and it may end there.
    Complete,
    /// All of it, but it must go on.
    Incomplete,
    /// Only this much.
    Refused(String),
}

/// Allows what may come next, as the engine asks for it.
pub(crate) fn allowed(constraint: &mut dyn Constraint, mask: &mut TokenMask) {
    mask.clear();
    match constraint.forced() {
        Some(token) => mask.allow(token),
        None => constraint.mask(mask),
    }
}

/// The demo model that is part of the repository.
pub(crate) static DEMO: LazyLock<Model> = LazyLock::new(|| Model::new(&demo_gguf()));

pub(crate) fn demo_gguf() -> Gguf {
    Gguf::open(&root().join("../../assets/pip-q8_0.gguf")).unwrap()
}

/// The published vocabulary of 262,144 tokens.
pub(crate) static GEMMA: LazyLock<Model> = LazyLock::new(|| {
    let path = root().join("../text/tests/data/gemma4-vocab.gguf.xz");
    let compressed = std::fs::read(path).unwrap();
    let mut bytes = Vec::new();
    lzma_rs::xz_decompress(&mut Cursor::new(compressed), &mut bytes).unwrap();
    Model::new(&Gguf::from_bytes("gemma4-vocab.gguf", bytes).unwrap())
});

fn root() -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR"))
}

/// Numbers that look random and are the same each time.
pub(crate) struct Random(pub(crate) u64);

impl Random {
    pub(crate) fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    pub(crate) fn below(&mut self, bound: usize) -> usize {
        (self.next() % bound as u64) as usize
    }

    pub(crate) fn one_in(&mut self, n: usize) -> bool {
        self.below(n) == 0
    }

    pub(crate) fn pick<'a, T>(&mut self, from: &'a [T]) -> &'a T {
        &from[self.below(from.len())]
    }
}

/// A tool with these parameters.
pub(crate) fn tool(name: &str, parameters: serde_json::Value) -> Tool {
    Tool::new(name, "", parameters)
}
