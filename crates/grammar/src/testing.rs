//! The models that tests share.

use std::{
    path::Path,
    sync::{Arc, LazyLock},
};

use carat_gguf::Gguf;
use carat_text::Tokenizer;

static DEMO: LazyLock<Arc<Tokenizer>> = LazyLock::new(|| {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../assets/pip-q8_0.gguf");
    let gguf = Gguf::open(&path).unwrap();
    Arc::new(Tokenizer::from_metadata(gguf.metadata()).unwrap())
});

/// The tokens of the demo model that is part of the repository.
pub(crate) fn demo_tokenizer() -> Arc<Tokenizer> {
    Arc::clone(&DEMO)
}
