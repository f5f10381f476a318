//! A server on a free port of loopback, on threads of its own: with the synthetic executor or with the demo model.

use std::{net::SocketAddr, path::Path, sync::Arc};

use carat_cpu::{CpuBackend, CpuConfig};
use carat_engine::{EngineConfig, EngineHandle, ModelFacts, chat::Chat};
use carat_gguf::Gguf;
use carat_model::{backend::Executor, gemma4, sampling::Sampling};
use carat_server::{App, Config, Model, ModelInfo};
use carat_text::{ChatTemplate, Specials, Tokenizer};
use tokio::{runtime::Runtime, sync::oneshot};

use super::{
    options::Failure,
    synthetic::{Controls, Pace, Synthetic},
};

const DEMO: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../../assets/pip-q8_0.gguf");

/// Ends when dropped, connections and all.
pub(super) struct Server {
    pub(super) address: SocketAddr,
    pub(super) chat: Chat,
    pub(super) controls: Arc<Controls>,
    runtime: Option<Runtime>,
    stop: Option<oneshot::Sender<()>>,
}

impl Server {
    /// With an executor that takes as long as `pace` says, and so many slots of so much context.
    pub(super) fn synthetic(
        slots: usize,
        context: usize,
        pace: Pace,
        config: Config,
        change: impl FnOnce(&mut EngineConfig),
    ) -> Result<Server, Failure> {
        let file = Gguf::open(Path::new(DEMO))?;
        let tokenizer = Tokenizer::from_metadata(file.metadata())?;
        let word = *tokenizer
            .encode(" the", Specials::Ignore)
            .first()
            .ok_or("the demo's vocabulary has no word")?;
        let facts = ModelFacts {
            vocab: carat_model::Model::load(Arc::new(Gguf::open(Path::new(DEMO))?))
                .map(|model| gemma4::plan(&model).vocab())?,
            width: None,
            window: None,
            layers_take_turns: false,
            even_depth: None,
        };
        let mut engine = EngineConfig::comfortable(context, slots, slots.max(1024), facts);
        change(&mut engine);
        let controls = Arc::<Controls>::default();
        let its_controls = Arc::clone(&controls);
        let engine = EngineHandle::start_with(engine, facts, move |_| {
            let executor = Synthetic::new(word, pace, its_controls);
            Ok(Box::new(executor) as Box<dyn Executor>)
        })?;
        start(&file, tokenizer, engine, controls, config)
    }

    /// With the demo model on the CPU.
    pub(super) fn demo(
        slots: usize,
        threads: usize,
        change: impl FnOnce(&mut EngineConfig),
    ) -> Result<Server, Failure> {
        let file = Arc::new(Gguf::open(Path::new(DEMO))?);
        let tokenizer = Tokenizer::from_metadata(file.metadata())?;
        let model = carat_model::Model::load(Arc::clone(&file))?;
        let plan = gemma4::plan(&model);
        let mut engine = EngineConfig::comfortable(1024, slots, 512, ModelFacts::from(&plan));
        change(&mut engine);
        let backend = CpuBackend::new(&CpuConfig {
            threads: Some(threads),
            ..CpuConfig::default()
        });
        let weights = Arc::clone(&model.weights);
        let engine = EngineHandle::start(engine, Box::new(backend), plan, weights)?;
        start(&file, tokenizer, engine, Arc::default(), Config::default())
    }
}

fn start(
    file: &Gguf,
    tokenizer: Tokenizer,
    engine: EngineHandle,
    controls: Arc<Controls>,
    config: Config,
) -> Result<Server, Failure> {
    let template = ChatTemplate::from_metadata(file.metadata(), tokenizer.vocab())?;
    let context = engine.limits().config().context;
    let chat = Chat::new(engine, Arc::new(tokenizer), Arc::new(template));
    let runtime = carat_server::runtime(2)?;
    let listener = {
        let _inside = runtime.enter();
        carat_server::listen(SocketAddr::from(([127, 0, 0, 1], 0)))?
    };
    let address = listener.local_addr()?;
    let app = App::new(config);
    app.ready(Model {
        chat: chat.clone(),
        sampling: Sampling::default(),
        info: ModelInfo {
            name: "pip".to_owned(),
            context,
            trained_context: context,
            fingerprint: "fp_load".to_owned(),
            ..ModelInfo::default()
        },
    });
    let (stop, stopped) = oneshot::channel::<()>();
    runtime.spawn(carat_server::serve(app, listener, async {
        let _ = stopped.await;
    }));
    Ok(Server {
        address,
        chat,
        controls,
        runtime: Some(runtime),
        stop: Some(stop),
    })
}

impl Drop for Server {
    fn drop(&mut self) {
        drop(self.stop.take());
        if let Some(runtime) = self.runtime.take() {
            // Whatever still runs is not waited for.
            runtime.shutdown_background();
        }
    }
}
