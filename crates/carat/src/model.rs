//! From a file to a model that answers.

use std::{path::Path, sync::Arc};

use carat_engine::chat::{Chat as EngineChat, Generation};
use carat_gguf::Gguf;
use carat_model::{
    kv::{KvType, PerGroup},
    sampling::Sampling,
};
use carat_text::{ChatTemplate, Tokenizer};

use crate::{
    Chat, Error, Loaded, context,
    device::{Device, open_device},
    file_sampling, fresh_seed,
};

/// A model that is loaded and running. Clones share it; it stops when the last of them and of their chats is gone.
#[derive(Clone)]
pub struct Model {
    chat: EngineChat,
    sampling: Sampling,
    context: usize,
    name: Arc<str>,
}

/// Options of loading a model; `default()` suits the machine.
#[derive(Clone, Debug)]
pub struct LoadOptions {
    /// Device that computes.
    pub device: Device,
    /// Tokens of context per conversation; `None` takes as many as the model knows and memory allows.
    pub context: Option<usize>,
    /// Answers to compute side by side; others wait.
    pub parallel: usize,
    /// Number format of keys and values, per group of layers.
    pub kv: PerGroup<KvType>,
    /// A Jinja chat template instead of the file's own.
    pub chat_template: Option<String>,
}

impl Default for LoadOptions {
    fn default() -> LoadOptions {
        LoadOptions {
            device: Device::default(),
            context: None,
            parallel: 4,
            kv: PerGroup::default(),
            chat_template: None,
        }
    }
}

impl LoadOptions {
    /// Opens a GGUF file; of a split model, its first part.
    pub fn load(&self, path: impl AsRef<Path>) -> Result<Model, Error> {
        self.load_file(Arc::new(Gguf::open(path.as_ref())?))
    }

    /// The same for a file that is open already.
    pub fn load_file(&self, file: Arc<Gguf>) -> Result<Model, Error> {
        let tokenizer = Arc::new(Tokenizer::from_metadata(file.metadata())?);
        let template = match &self.chat_template {
            Some(source) => ChatTemplate::new(source, tokenizer.vocab())?,
            None => ChatTemplate::from_metadata(file.metadata(), tokenizer.vocab())?,
        };
        let sampling = file_sampling(file.metadata(), 0)?;
        let loaded = Loaded::new(file, open_device(&self.device)?.backend, self.kv)?;
        let parallel = self.parallel.max(1);
        let context = context::choose(&loaded, parallel, self.context)?.tokens;
        Model::start(loaded, parallel, context, tokenizer, template, sampling)
    }
}

impl Model {
    /// Loads a GGUF file as it suits the machine.
    pub fn load(path: impl AsRef<Path>) -> Result<Model, Error> {
        LoadOptions::default().load(path)
    }

    fn start(
        loaded: Loaded,
        parallel: usize,
        context: usize,
        tokenizer: Arc<Tokenizer>,
        template: ChatTemplate,
        sampling: Sampling,
    ) -> Result<Model, Error> {
        let config = loaded.engine_config(parallel, context);
        let name = loaded.model.config.name.as_str().into();
        let engine = loaded.start(config)?;
        Ok(Model {
            chat: EngineChat::new(engine, tokenizer, Arc::new(template)),
            sampling,
            context,
            name,
        })
    }

    /// A new conversation. Many can go on side by side.
    pub fn chat(&self) -> Chat {
        Chat::new(self.clone())
    }

    /// As the file says, with a seed that nobody had before.
    pub fn generation(&self) -> Generation {
        Generation {
            sampling: Sampling {
                seed: fresh_seed(),
                ..self.sampling.clone()
            },
            ..Generation::default()
        }
    }

    /// Name of the model, as its file gives it.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Tokens of context per conversation.
    pub fn context(&self) -> usize {
        self.context
    }

    /// Text to tokens and back.
    pub fn tokenizer(&self) -> &Arc<Tokenizer> {
        self.chat.tokenizer()
    }

    /// The layer below: prompts, requests and events.
    pub fn engine(&self) -> &EngineChat {
        &self.chat
    }
}
