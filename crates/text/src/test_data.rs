//! The vocabularies that tests share: Gemma 4's own, the demo model's, and tiny ones made to order.

use std::{io::Cursor, path::Path, sync::LazyLock};

use carat_gguf::{
    Gguf,
    writer::{Field, Writer},
};

use crate::Tokenizer;

/// The published vocabulary: 262,144 tokens and 514,906 merges, without a chat template.
pub(crate) static GEMMA: LazyLock<Tokenizer> = LazyLock::new(|| {
    let compressed = include_bytes!("../tests/data/gemma4-vocab.gguf.xz");
    let mut bytes = Vec::new();
    lzma_rs::xz_decompress(&mut Cursor::new(compressed), &mut bytes).unwrap();
    let gguf = Gguf::from_bytes("gemma4-vocab.gguf", bytes).unwrap();
    Tokenizer::from_metadata(gguf.metadata()).unwrap()
});

/// The demo model that is part of the repository.
pub(crate) static DEMO: LazyLock<Gguf> = LazyLock::new(|| {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../assets/pip-q8_0.gguf");
    Gguf::open(&path).unwrap()
});

pub(crate) static DEMO_TOKENIZER: LazyLock<Tokenizer> =
    LazyLock::new(|| Tokenizer::from_metadata(DEMO.metadata()).unwrap());

/// A vocabulary file made to order; byte tokens and `<bos>` (id 256) are always there.
pub(crate) struct TinyVocab {
    pub(crate) tokens: Vec<String>,
    pub(crate) types: Option<Vec<i32>>,
    pub(crate) merges: Vec<&'static str>,
    pub(crate) model: &'static str,
    pub(crate) ids: Vec<(&'static str, u32)>,
}

impl TinyVocab {
    pub(crate) fn new(tokens: &[&str]) -> TinyVocab {
        let mut all: Vec<_> = (0..256).map(|byte| format!("<0x{byte:02X}>")).collect();
        all.push("<bos>".to_owned());
        all.extend(tokens.iter().map(|&token| token.to_owned()));
        TinyVocab {
            tokens: all,
            types: None,
            merges: Vec::new(),
            model: "gemma4",
            ids: Vec::new(),
        }
    }

    pub(crate) fn gguf(&self) -> Gguf {
        let mut writer = Writer::default();
        writer.field("tokenizer.ggml.model", &Field::Str(self.model));
        let tokens: Vec<_> = self.tokens.iter().map(String::as_str).collect();
        writer.field("tokenizer.ggml.tokens", &Field::Strs(&tokens));
        writer.field("tokenizer.ggml.merges", &Field::Strs(&self.merges));
        if let Some(types) = &self.types {
            writer.field("tokenizer.ggml.token_type", &Field::I32s(types));
        }
        for (key, id) in &self.ids {
            writer.field(key, &Field::U32(*id));
        }
        let mut bytes = Vec::new();
        writer.write_head(&mut bytes).unwrap();
        Gguf::from_bytes("tiny.gguf", bytes).unwrap()
    }

    pub(crate) fn tokenizer(&self) -> Result<Tokenizer, crate::TextError> {
        Tokenizer::from_metadata(self.gguf().metadata())
    }
}
