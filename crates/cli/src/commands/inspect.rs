//! `inspect`: what a file holds, how it will be run, and where two backends part.

use std::{collections::BTreeMap, fmt::Write as _, process::ExitCode};

use anyhow::{Context as _, Result};
use carat::Loaded;
use carat_cpu::BatchRows;
use carat_cuda::{PlannedCard, Tier};
use carat_engine::{Limits, ModelFacts};
use carat_gguf::{Value, ValueType};
use carat_model::{
    TokenId,
    config::LayerKind,
    cost::{self, BatchShape},
    kv::KvGroup,
    layout,
    plan::Listing,
};
use carat_text::{Specials, Tokenizer};

use super::tune::in_force;
use crate::{
    args::{BackendName, InspectArgs},
    load::{self, backend, cpu_backend, cuda_config},
    misuse::misuse,
    parity::{self, Difference},
    session::fitting_context,
    settings::Settings,
    terminal::{Terminal, bytes, say, thousands},
};

pub(crate) fn run(args: &InspectArgs, settings: &Settings, terminal: Terminal) -> Result<ExitCode> {
    if args.placement {
        placement(args, settings, terminal)?;
        return Ok(ExitCode::SUCCESS);
    }
    // A look at a file needs no card, whichever backend's program it is.
    let on_cores = Settings {
        backend: settings.backend.or(Some(BackendName::Cpu)),
        ..settings.clone()
    };
    let opened_with = if args.program {
        Settings {
            backend: Some(BackendName::Reference),
            debug: Vec::new(),
            ..on_cores.clone()
        }
    } else {
        on_cores.clone()
    };
    let loaded = load::open_model(&opened_with, terminal)?;
    if let Some(pair) = args.diff {
        return diff(&loaded, pair, args, settings);
    }
    if args.tensors {
        tensors(&loaded)?;
    }
    if args.plan {
        say(Listing(&loaded.plan, &loaded.model.weights))?;
    }
    if args.program {
        program(&loaded, args.rows, &on_cores)?;
    }
    if args.tensors || args.plan || args.program {
        return Ok(ExitCode::SUCCESS);
    }
    say(summary(&loaded)?)?;
    say("metadata")?;
    for (key, value) in loaded.file.metadata().iter() {
        say(format_args!(
            "  {key:<44} {}",
            metadata_text(value, args.full)
        ))?;
    }
    Ok(ExitCode::SUCCESS)
}

/// The facts a person asks first.
fn summary(loaded: &Loaded) -> Result<String> {
    let c = &loaded.model.config;
    let mut s = String::new();
    let (full, sliding): (Vec<_>, Vec<_>) =
        c.layers.iter().partition(|l| l.kind == LayerKind::Full);
    writeln!(s, "{}", load::describe(loaded))?;
    writeln!(
        s,
        "  parameters   {}",
        thousands(loaded.model.parameter_count())
    )?;
    write!(
        s,
        "  layers       {}: {} sliding (window {})",
        c.layers.len(),
        sliding.len(),
        c.window
    )?;
    write!(s, ", {} full", full.len())?;
    match c.layers.len() - c.kv_layers {
        0 => writeln!(s)?,
        shared => writeln!(s, ", the last {shared} share keys and values")?,
    }
    writeln!(s, "  width        {}", c.dim)?;
    if let Some(width) = c.ple {
        writeln!(s, "  per-layer    embeddings of {width}")?;
    }
    if let Some(e) = c.experts {
        writeln!(
            s,
            "  experts      {} of {}, {} wide",
            e.used, e.count, e.ffn
        )?;
    }
    for (name, layers) in [("sliding", &sliding), ("full", &full)] {
        if let Some(l) = layers.first() {
            writeln!(
                s,
                "  {:<12} {} query heads, {} KV heads of {}",
                name, l.heads, l.kv_heads, l.head_dim
            )?;
        }
    }
    writeln!(s, "  vocabulary   {}", thousands(c.vocab as u64))?;
    writeln!(s, "  context      {}", thousands(c.context as u64))?;
    let page = layout::page_bytes(&loaded.plan, loaded.kv);
    let per_token = |group: KvGroup| *page.get(group) as u64 / carat_model::kv::PAGE_TOKENS as u64;
    writeln!(
        s,
        "  KV           {} a token in full layers, {} a token in sliding ones ({})",
        bytes(per_token(KvGroup::Full)),
        bytes(per_token(KvGroup::Sliding)),
        loaded.kv
    )?;
    let decode = BatchShape::decode(0, loaded.kv);
    let prefill = BatchShape {
        rows: 512,
        ..decode
    };
    let of = |shape| cost::of(&loaded.plan, &loaded.model.weights, shape);
    writeln!(
        s,
        "  a token      reads {}, multiplies {:.3} G; in a prompt of 512, {:.3} G",
        bytes(of(decode).bytes()),
        of(decode).multiply_adds as f64 / 1e9,
        of(prefill).multiply_adds as f64 / 512.0 / 1e9
    )?;
    writeln!(s, "  formats")?;
    let mut formats: BTreeMap<String, (usize, u64)> = BTreeMap::new();
    for tensor in loaded.file.tensors() {
        let name = tensor
            .quant
            .map_or_else(|id| format!("type {id}"), |q| q.to_string());
        let entry = formats.entry(name).or_default();
        *entry = (entry.0 + 1, entry.1 + tensor.bytes as u64);
    }
    for (name, (count, size)) in formats {
        writeln!(s, "    {name:<8} {count:>5} tensors {:>12}", bytes(size))?;
    }
    let template = match loaded.file.metadata().str("tokenizer.chat_template")? {
        Some(text) => format!("in the file, {} lines", text.lines().count()),
        None => "none in the file: Carat's own is used".to_owned(),
    };
    writeln!(s, "  template     {template}")?;
    writeln!(s, "  plan         {} steps", loaded.plan.steps.len())?;
    Ok(s)
}

/// Launches that a backend makes of the plan for a batch of some rows.
/// Where everything would lie on a card, as a file for `--place`.
fn placement(args: &InspectArgs, settings: &Settings, terminal: Terminal) -> Result<()> {
    let config = cuda_config(settings)?;
    let total = if let Some(bytes) = settings.vram_bytes()? {
        bytes
    } else {
        let card = backend(BackendName::Cuda, settings).context(
            "--vram SIZE says how much memory the card has, where there is none to be asked",
        )?;
        card.memory()?.total_bytes
    };
    let kernels = match config.tier {
        Tier::Best => "an H200's kernels",
        Tier::Portable => "portable kernels",
    };
    let card = PlannedCard::new(config, total);
    let loaded = load::open_model_on(Box::new(card.clone()), settings, terminal)?;
    let chosen = fitting_context(&loaded, 1, args.context)?;
    let limits = Limits::new(
        loaded.engine_config(1, chosen.tokens),
        ModelFacts::from(&loaded.plan),
    )?;
    let memory = card.memory_plan(
        &loaded.plan,
        &loaded.model.weights,
        &limits.compile_options(),
    )?;
    say(format_args!(
        "# {} on a card of {} with {kernels}, context {} tokens",
        load::describe(&loaded),
        bytes(total),
        thousands(chosen.tokens as u64)
    ))?;
    for line in memory.to_string().lines() {
        say(format_args!("# {line}"))?;
    }
    let parts = memory.placement.to_string();
    if parts.is_empty() {
        return say("# all weights lie on the card");
    }
    say("# in host memory:")?;
    say(parts.trim_end())
}

fn program(loaded: &Loaded, (rows, sampled): (usize, usize), settings: &Settings) -> Result<()> {
    let (plan, weights) = (&loaded.plan, &loaded.model.weights);
    match settings.backend {
        Some(BackendName::Cuda) => {
            let config = cuda_config(settings)?;
            let target = ((config.tier, config.fusion), config.alternatives);
            let card = match config.tier {
                Tier::Best => "an H200 with cuBLASLt",
                Tier::Portable => "a card of 132 multiprocessors, portable kernels",
            };
            say(format_args!("{rows} rows, {sampled} sampled, on {card}"))?;
            let launches = carat_cuda::program(plan, weights, target, (rows, sampled))?;
            for l in &launches {
                say(format_args!(
                    "{:<28} {:>5} {:<34} {:<24} {:>12}  {}",
                    l.label,
                    l.rows,
                    l.kernel,
                    l.grid,
                    bytes(l.weight_bytes as u64),
                    l.operands
                ))?;
            }
            say(format_args!("{} launches", launches.len()))?;
            let choices = carat_cuda::program_choices(plan, weights, target);
            if choices.is_empty() {
                return Ok(());
            }
            say(
                "choices that depend on the card (`carat tune --show` has those of the card at hand)",
            )?;
            say(in_force(&choices).trim_end())
        }
        Some(BackendName::Reference) => {
            misuse!("the reference runs the plan as it is; --plan lists it")
        }
        Some(BackendName::Cpu) | None => {
            let cpu = cpu_backend(settings)?;
            let isa = cpu.isa();
            say(format_args!(
                "{rows} rows, {sampled} sampled, on the CPU ({isa:?})"
            ))?;
            let batch = BatchRows { all: rows, sampled };
            let operations = cpu.program(plan, weights, batch);
            for o in &operations {
                say(format_args!(
                    "{:<40} {:>5} {:<34} {:>12}",
                    o.label,
                    o.rows,
                    o.kernel,
                    bytes(o.weight_bytes)
                ))?;
            }
            say(format_args!("{} operations", operations.len()))
        }
    }
}

fn tensors(loaded: &Loaded) -> Result<()> {
    for t in loaded.file.tensors() {
        let quant = t
            .quant
            .map_or_else(|id| format!("type {id}"), |q| q.to_string());
        say(format_args!(
            "{:<44} {quant:<8} {:>12} {:?}",
            t.name,
            bytes(t.bytes as u64),
            t.shape
        ))?;
    }
    Ok(())
}

fn metadata_text(value: &Value, full: bool) -> String {
    const SHOWN: usize = 8;
    let text = match value {
        Value::Array(array) => {
            let shown = if full { array.len() } else { SHOWN };
            let items: Vec<String> = if let Some(strings) = array.strings() {
                strings.take(shown).map(|s| format!("{s:?}")).collect()
            } else if array.kind() == ValueType::Bool {
                array
                    .bools()
                    .unwrap_or_default()
                    .iter()
                    .take(shown)
                    .map(bool::to_string)
                    .collect()
            } else if let Some(integers) = array.integers() {
                integers.iter().take(shown).map(i128::to_string).collect()
            } else {
                let floats = array.floats().unwrap_or_default();
                floats.iter().take(shown).map(f64::to_string).collect()
            };
            let more = if array.len() > items.len() {
                ", …"
            } else {
                ""
            };
            return format!(
                "{}[{}] {}{more}",
                array.kind(),
                array.len(),
                items.join(", ")
            );
        }
        other => other.to_string(),
    };
    if full || text.chars().count() <= 100 {
        return text;
    }
    let start: String = text.chars().take(97).collect();
    format!("{start}…")
}

/// A difference is a failure, for scripts to act on.
fn diff(
    loaded: &Loaded,
    names: [BackendName; 2],
    args: &InspectArgs,
    settings: &Settings,
) -> Result<ExitCode> {
    let tokenizer = Tokenizer::from_metadata(loaded.file.metadata())?;
    let mut tokens: Vec<TokenId> = vec![tokenizer.vocab().bos()];
    tokens.extend(tokenizer.encode(&args.text, Specials::Ignore));
    tokens.truncate(loaded.model.config.context);
    let backends = [backend(names[0], settings)?, backend(names[1], settings)?];
    let compared = parity::compare(loaded, &backends, &tokens, args.tolerance, None)?;
    let [a, b] = names.map(|n| format!("{n:?}").to_lowercase());
    let count = tokens.len();
    match &compared.first {
        None => say(format_args!(
            "{a} and {b} agree on {count} tokens: no step differs by more than {}",
            args.tolerance
        ))?,
        Some(Difference {
            index,
            label,
            error,
        }) => say(format_args!(
            "{a} and {b} first differ at step {index}, {label}: relative error {error:.2e} over {count} tokens"
        ))?,
    }
    if compared.rows < count {
        say(format_args!(
            "experts were a near tie in token {}, so it and those behind it were left out",
            compared.rows
        ))?;
    }
    if compared.end == loaded.plan.steps.len() {
        say(format_args!(
            "relative error of the logits: {:.2e}",
            compared.last_error
        ))?;
    }
    Ok(match compared.first {
        None => ExitCode::SUCCESS,
        Some(_) => ExitCode::FAILURE,
    })
}
