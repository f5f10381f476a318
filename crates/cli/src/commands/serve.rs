//! `serve`: answers over HTTP until told to stop.

mod several;

use std::{
    collections::HashMap,
    fs,
    future::Future,
    net::SocketAddr,
    process::ExitCode,
    sync::Arc,
    time::{Duration, Instant},
};

use anyhow::{Context, Result, bail};
use carat::{Loaded, PrefixCache, PrefixDisk};
use carat_engine::{EngineConfig, chat::Chat};
use carat_server::{App, Config, Key, Lanes, Model, ModelInfo};
use carat_text::Tokenizer;
use sha2::{Digest, Sha256};
use tokio::signal::unix::SignalKind;

use crate::{
    args::{LaneBy, PrefixArgs, ServeArgs},
    draft,
    interrupt::INTERRUPTED,
    load,
    misuse::{Misuse, misuse},
    session::{self, unix_time},
    settings::{Settings, Sources, memory_size},
    terminal::{Terminal, bytes, warn},
};

/// Exit code that supervisors take for "start it again": the engine has failed.
const ENGINE_FAILED: u8 = 70;
/// Clients hear of the failure before the process ends.
const LAST_WORDS: Duration = Duration::from_secs(1);
const HEARTBEAT: Duration = Duration::from_millis(100);
/// From so many cores up, one is left to the connections.
const CORES_TO_SPARE: usize = 8;

pub(crate) fn run(
    args: &ServeArgs,
    settings: &Settings,
    sources: &Sources<'_>,
    terminal: Terminal,
) -> Result<ExitCode> {
    let started = Instant::now();
    let config = config(args)?;
    let runtime = carat_server::runtime(io_threads())
        .context("cannot start the threads that serve connections")?;
    let address = SocketAddr::new(args.host, args.port);
    let listener = runtime
        .block_on(async { carat_server::listen(address) })
        .with_context(|| {
            format!(
                "cannot listen on {address}; --port PORT takes another port, --port 0 a free one"
            )
        })?;
    let address = listener
        .local_addr()
        .context("the listener has no address")?;
    let app = App::new(config);
    let serving = runtime.spawn(carat_server::serve(
        Arc::clone(&app),
        listener,
        stop(&runtime)?,
    ));
    let mut settings = settings.clone();
    leave_a_core(&mut settings);
    let several = several::models(args, &settings, sources)?;
    let what = several.as_ref().map_or("model", |_| "models");
    terminal.note(format_args!(
        "listening on http://{address}, loading the {what}"
    ));
    let ready = match several {
        None => load(args, &settings, terminal).map(|model| {
            let name = model.info.name.clone();
            app.ready(model);
            format!("`{name}`")
        }),
        Some(models) => several::offer(&app, models, args, terminal),
    };
    match ready {
        Ok(ready) => terminal.note(format_args!(
            "ready after {:.2} s: {ready} at http://{address}/v1",
            started.elapsed().as_secs_f64()
        )),
        Err(error) => {
            app.failed(format!("{error:#}"));
            return Err(error);
        }
    }
    let grammars = Arc::clone(&app);
    runtime.spawn(grammars.prepare_grammars_when_idle());
    let code = runtime.block_on(async {
        tokio::select! {
            ended = serving => {
                if ended.is_err() {
                    warn("the server's own thread failed");
                    return ExitCode::from(ENGINE_FAILED);
                }
                ExitCode::SUCCESS
            }
            reason = failure(&app) => {
                warn(format_args!("{reason}; ending with code {ENGINE_FAILED}"));
                tokio::time::sleep(LAST_WORDS).await;
                ExitCode::from(ENGINE_FAILED)
            }
        }
    });
    // Whatever still runs is not waited for: clients that were to be waited for have been.
    runtime.shutdown_background();
    Ok(code)
}

/// Ends when the engine has failed.
async fn failure(app: &App) -> String {
    loop {
        if let Some(error) = app.failure() {
            return format!("{:#}", anyhow::Error::new(error));
        }
        tokio::time::sleep(HEARTBEAT).await;
    }
}

/// Ends with the first Ctrl-C or SIGTERM. A second one ends the program at once.
fn stop(runtime: &tokio::runtime::Runtime) -> Result<impl Future<Output = ()> + use<>> {
    let _inside = runtime.enter();
    let listen = |kind| tokio::signal::unix::signal(kind).context("cannot listen for signals");
    let mut terminate = listen(SignalKind::terminate())?;
    let mut interrupt = listen(SignalKind::interrupt())?;
    let (first, told) = tokio::sync::oneshot::channel();
    runtime.spawn(async move {
        let mut first = Some(first);
        loop {
            tokio::select! {
                _ = terminate.recv() => {}
                _ = interrupt.recv() => {}
            }
            match first.take() {
                // Nobody listens where the server has ended by itself.
                Some(first) => drop(first.send(())),
                None => {
                    #[expect(
                        clippy::exit,
                        clippy::disallowed_methods,
                        reason = "the person insists"
                    )]
                    std::process::exit(INTERRUPTED.into());
                }
            }
        }
    });
    Ok(async move {
        // The sender lives as long as the runtime.
        let _ = told.await;
    })
}

fn io_threads() -> usize {
    cores().div_ceil(4).clamp(1, 8)
}

fn cores() -> usize {
    std::thread::available_parallelism().map_or(1, std::num::NonZero::get)
}

/// On machines with many, connections get a core that no computing thread is bound to.
fn leave_a_core(settings: &mut Settings) {
    if settings.threads.is_none() && cores() >= CORES_TO_SPARE {
        settings.threads = Some(cores() - 1);
    }
}

fn config(args: &ServeArgs) -> Result<Config> {
    let mut keys = Vec::new();
    for text in &args.api_key {
        keys.push(
            Key::parse(text)
                .map_err(|problem| Misuse::error(format_args!("--api-key: {problem}")))?,
        );
    }
    if let Some(path) = &args.api_key_file {
        let text = fs::read_to_string(path)
            .with_context(|| format!("cannot read the keys in `{}`", path.display()))?;
        for (n, line) in text.lines().enumerate() {
            let line = line.trim();
            if line.is_empty() || line.starts_with('#') {
                continue;
            }
            let key = Key::parse(line).map_err(|problem| {
                anyhow::anyhow!("line {} of `{}`: {problem}", n + 1, path.display())
            })?;
            keys.push(key);
        }
        if keys.is_empty() {
            bail!("`{}` holds no keys", path.display());
        }
    }
    if !args.host.is_loopback() && keys.is_empty() && !args.no_auth {
        misuse!(
            "{} can be reached from other machines: give --api-key KEY, or --no-auth if everybody there may ask",
            args.host
        );
    }
    let max_body = memory_size(&args.max_body).context("--max-body")?;
    Ok(Config {
        keys,
        bound: Some(args.host),
        allowed_hosts: args.allow_host.clone(),
        cors_origins: args.cors_origin.clone(),
        lanes: match args.lane_by {
            LaneBy::Key => Lanes::Key,
            LaneBy::User => Lanes::User,
        },
        lane_queue: args.lane_queue,
        share_prefixes: args.share_prefix,
        queue_timeout: Some(Duration::from_secs(args.queue_timeout)),
        request_timeout: args.request_timeout.map(Duration::from_secs),
        strict_model: args.strict_model,
        tool_grammar: !args.no_tool_grammar,
        metrics_prefix: args.metrics_prefix.clone(),
        metrics_public: args.metrics_public,
        max_body: usize::try_from(max_body).unwrap_or(usize::MAX),
        ping: Duration::from_secs(args.sse_ping),
        drain: Duration::from_secs(args.drain),
        ..Config::default()
    })
}

fn load(args: &ServeArgs, settings: &Settings, terminal: Terminal) -> Result<Model> {
    let mut loaded = open(args, settings, terminal)?;
    // Models that come and go would take as much memory at each load, and lock it.
    if args.prefix.ram.is_none() {
        loaded.prefix.ram_bytes = PrefixCache::usual_ram_bytes(&loaded);
    }
    if loaded.prefix.ram_bytes > 0 {
        let size = bytes(loaded.prefix.ram_bytes);
        terminal.note(format_args!(
            "{size} of memory for prompts that leave the card"
        ));
    }
    start(args, settings, loaded, args.name.clone(), terminal)
}

/// A model that is ready to start, with all that it will use.
fn open(args: &ServeArgs, settings: &Settings, terminal: Terminal) -> Result<Loaded> {
    let mut loaded = draft::open_model(settings, terminal)?;
    loaded.prefix = prefix_cache(&args.prefix)?;
    Ok(loaded)
}

/// A model that answers, from one that is open.
fn start(
    args: &ServeArgs,
    settings: &Settings,
    loaded: Loaded,
    name: Option<String>,
    terminal: Terminal,
) -> Result<Model> {
    let metadata = loaded.file.metadata();
    let sampling = settings.sampling.resolve(metadata, carat::fresh_seed())?;
    let tokenizer =
        Tokenizer::from_metadata(metadata).context("cannot use the file's tokenizer")?;
    let template = session::template(
        args.chat_template.as_deref(),
        metadata,
        &tokenizer,
        terminal,
    )?;
    let context = session::choose_context(&loaded, args.parallel, settings.context, terminal)?;
    let config = engine_config(args, &loaded, context);
    let info = describe(name, &loaded, context);
    terminal.note(format_args!(
        "{} requests side by side, up to {} tokens each, {} on {}",
        args.parallel,
        context,
        bytes(info.bytes),
        info.backend
    ));
    load::warm_up(&loaded, terminal);
    let engine = loaded.start(config).context("cannot start the model")?;
    Ok(Model {
        chat: Chat::new(engine, Arc::new(tokenizer), Arc::new(template)),
        sampling,
        info,
    })
}

fn engine_config(args: &ServeArgs, loaded: &Loaded, context: usize) -> EngineConfig {
    let mut config = loaded.engine_config(args.parallel, context);
    config.prefill_rows = args.prefill_rows;
    if let Some(queue) = args.queue {
        config.max_unfinished = args.parallel.saturating_add(queue);
    }
    config
}

fn prefix_cache(args: &PrefixArgs) -> Result<PrefixCache> {
    let ram = match args.ram.as_deref() {
        None | Some("0") => Ok(0),
        Some(size) => memory_size(size),
    };
    let disk = args.disk.as_ref().map(|folder| {
        let max_bytes = memory_size(&args.disk_size).context("--prefix-disk-size")?;
        Ok::<_, anyhow::Error>(PrefixDisk {
            folder: folder.clone(),
            max_bytes,
        })
    });
    Ok(PrefixCache {
        ram_bytes: ram.context("--prefix-ram")?,
        disk: disk.transpose()?,
    })
}

fn describe(name: Option<String>, loaded: &Loaded, context: usize) -> ModelInfo {
    let name = name.unwrap_or_else(|| {
        let stem = loaded.file.path().file_stem();
        stem.map_or_else(
            || loaded.model.config.name.clone(),
            |stem| stem.to_string_lossy().into_owned(),
        )
    });
    let mut by_type: HashMap<String, u64> = HashMap::new();
    for tensor in loaded.file.tensors() {
        if let Ok(quant) = tensor.quant {
            *by_type.entry(quant.to_string()).or_default() += tensor.bytes as u64;
        }
    }
    let most = by_type.into_iter().max_by_key(|(_, bytes)| *bytes);
    let quantization = most.map_or_else(String::new, |(name, _)| name);
    let metadata = loaded.file.metadata();
    let template = metadata.str("tokenizer.chat_template").ok().flatten();
    let backend = loaded.backend.name().to_owned();
    let bytes = loaded.file.file_bytes() as u64;
    ModelInfo {
        fingerprint: fingerprint(&[
            &name,
            &bytes.to_string(),
            &quantization,
            &backend,
            &loaded.kv.to_string(),
            env!("CARGO_PKG_VERSION"),
        ]),
        name,
        context,
        trained_context: loaded.model.config.context,
        parameters: loaded.model.parameter_count(),
        bytes,
        quantization,
        backend,
        template: template.map(str::to_owned),
        loaded: unix_time().and_then(|t| u64::try_from(t).ok()).unwrap_or(0),
    }
}

fn fingerprint(parts: &[&str]) -> String {
    let digest = Sha256::digest(parts.join("\n").as_bytes());
    let [a, b, c, d, e, ..] = digest[..] else {
        unreachable!("a digest has 32 bytes");
    };
    format!("fp_{a:02x}{b:02x}{c:02x}{d:02x}{e:02x}")
}
