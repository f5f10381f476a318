//! The arguments as typed. `settings.rs` says what they mean.
#![expect(
    clippy::struct_excessive_bools,
    reason = "flags are bools; settings.rs turns them into meaning"
)]

use std::{net::IpAddr, path::PathBuf};

use clap::{Args, Parser, Subcommand, ValueEnum, ValueHint};
use clap_complete::Shell;

mod bench;
mod kv_types;
#[cfg(test)]
mod reference;
mod tune;
mod values;

pub(crate) use bench::{BenchArgs, BenchFormat};
pub(crate) use kv_types::KvTypes;
pub(crate) use tune::TuneArgs;
pub(crate) use values::{MaxTokens, Seed, max_tokens, seed, top_k};
use values::{
    backend_pair, batch_rows, bias, draft_length, min_p, parallel, positive, rows, seconds, size,
    size_or_none, stop, temperature, threads, tolerance, top_p,
};

use crate::{
    synth::{Mix, Preset},
    version,
};

/// Runs Gemma 4 models. Without -m, a small demo model that ships with the source answers.
#[derive(Debug, Parser)]
#[command(name = "carat", version = version::text(), max_term_width = 100)]
#[command(next_help_heading = "Everywhere")]
pub(crate) struct Arguments {
    #[command(subcommand)]
    pub(crate) command: Command,
    /// Read settings from this TOML file instead of carat/config.toml in the folder for settings; flags win over it
    #[arg(long, global = true, value_name = "FILE")]
    pub(crate) config: Option<PathBuf>,
    /// Print every setting that the file and the flags come to, with where it comes from, and stop
    #[arg(long, global = true)]
    pub(crate) print_config: bool,
    /// Use only models that are already on this machine
    #[arg(long, global = true)]
    pub(crate) offline: bool,
    /// Show no notes or progress on stderr, only errors
    #[arg(short, long, global = true)]
    pub(crate) quiet: bool,
}

#[derive(Debug, Subcommand)]
pub(crate) enum Command {
    /// Answer one prompt and stop
    Run(RunArgs),
    /// Talk with the model, line by line
    Chat(ChatArgs),
    /// Answer over HTTP, in the dialects of OpenAI, Anthropic and Ollama
    Serve(ServeArgs),
    /// Show what a model file holds and how it will be run
    Inspect(InspectArgs),
    /// Turn text into token ids
    Tokenize(TokenizeArgs),
    /// Show what this machine is, what the models on it would do, and what would help
    Doctor(DoctorArgs),
    /// Check that this machine computes a model as the reference does
    Check(CheckArgs),
    /// Measure prefill and decode speed
    Bench(BenchArgs),
    /// Measure the choices that depend on the NVIDIA card at hand, and keep what is fastest
    Tune(TuneArgs),
    /// Compare a model's numbers: logits or perplexity
    #[command(subcommand)]
    Eval(EvalCommand),
    /// Write a random model of real shape, for speed work
    Synth(SynthArgs),
    /// Fetch a model from Hugging Face into its usual cache
    Pull(PullArgs),
    /// List the models in the Hugging Face cache
    List,
    /// Take a model out of the Hugging Face cache
    Rm(RmArgs),
    /// The kernels of the CUDA backend
    #[command(subcommand)]
    Kernels(KernelsCommand),
    /// Print what a shell needs to complete commands and flags
    Completions(CompletionsArgs),
    /// Print the manual page
    Man(ManArgs),
}

#[derive(Debug, Args)]
pub(crate) struct CompletionsArgs {
    /// The shell to complete in
    #[arg(value_enum)]
    pub(crate) shell: Shell,
}

#[derive(Debug, Args)]
pub(crate) struct ManArgs {
    /// The command to print the page of, such as `run` or `eval logits` (default: the program)
    #[arg(conflicts_with = "out")]
    pub(crate) command: Vec<String>,
    /// Write the pages of all commands into this folder
    #[arg(long, value_name = "DIR")]
    pub(crate) out: Option<PathBuf>,
}

#[derive(Debug, Subcommand)]
pub(crate) enum KernelsCommand {
    /// Compile all kernels ahead, for machines that have a driver and nothing else
    Build(KernelsBuildArgs),
}

#[derive(Debug, Args)]
pub(crate) struct KernelsBuildArgs {
    /// Architectures to compile for
    #[arg(long, value_delimiter = ',', default_value = "sm_80,sm_89,sm_90a")]
    pub(crate) arch: Vec<String>,
    /// Compile only kernels whose name holds this, such as `gemm_medium_sm90.q4`
    #[arg(long, value_name = "NAME")]
    pub(crate) only: Option<String>,
    /// The folder to write to
    #[arg(long, value_name = "DIR")]
    pub(crate) out: PathBuf,
    /// Folder to look for NVRTC in, before the usual places
    #[arg(long, value_name = "DIR")]
    pub(crate) library_dir: Vec<PathBuf>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum, serde::Serialize, serde::Deserialize)]
#[serde(rename_all = "lowercase")]
pub(crate) enum BackendName {
    /// SIMD kernels on this machine's cores
    Cpu,
    /// An NVIDIA card
    Cuda,
    /// The scalar definition: slow and exact
    Reference,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum, serde::Serialize, serde::Deserialize)]
#[serde(rename_all = "lowercase")]
pub(crate) enum TierName {
    /// The best the card can run
    Best,
    /// Kernels that every card since Ampere runs
    Portable,
}

/// Levels of instructions, the best last.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum, serde::Serialize, serde::Deserialize)]
#[serde(rename_all = "lowercase")]
pub(crate) enum IsaName {
    /// No vector instructions beyond the target's own
    Scalar,
    /// NEON with dot products
    Neon,
    /// The same and I8MM
    I8mm,
    /// AVX2, FMA and F16C
    Avx2,
    /// The same and AVX-VNNI
    #[value(name = "avxvnni")]
    AvxVnni,
    /// AVX-512 with VNNI
    Avx512,
    /// The same and AMX
    Amx,
}

/// Features that can be switched off, or checked more often, to find a fault.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum DebugSwitch {
    /// Every step by a plain kernel or operation of its own
    NoFusion,
    /// CUDA: launches one by one, without captured graphs
    NoGraphs,
    /// CUDA: no programmatic dependent launch
    NoPdl,
    /// CUDA: wait after every launch, so that a fault names its step; slow
    CheckLaunches,
}

#[derive(Clone, Debug, Args)]
#[command(next_help_heading = "Model and device")]
pub(crate) struct ModelArgs {
    /// A GGUF file, hf:OWNER/REPO[:FILE or QUANT] from the Hugging Face cache or hub, or a short name such as gemma4:e4b; `serve` takes
    /// several, as NAME=MODEL
    #[arg(short, long, value_name = "MODEL", value_hint = ValueHint::FilePath)]
    pub(crate) model: Vec<String>,
    /// Device that computes (default: an NVIDIA card if there is one, else the CPU)
    #[arg(long, value_enum)]
    pub(crate) backend: Option<BackendName>,
    /// Number of the NVIDIA card, in the driver's order
    #[arg(long, value_name = "N")]
    pub(crate) device: Option<usize>,
    /// Device memory to use at the most, such as 12GiB (default: all that is free)
    #[arg(long, value_name = "SIZE", value_parser = size)]
    pub(crate) vram: Option<String>,
    /// Memory of this machine to use at the most where the CPU computes, the model's file included, such as 16GiB (default: all that
    /// is free)
    #[arg(id = "max-ram", long = "ram", value_name = "SIZE", value_parser = size)]
    pub(crate) ram: Option<String>,
    /// Where weights lie: auto (on the card as far as there is room), card (all of them, or it is refused), or a file that names
    /// what lies in host memory, as `carat inspect --placement` prints one (default: auto)
    #[arg(long, value_name = "auto|card|FILE", value_hint = ValueHint::FilePath)]
    pub(crate) place: Option<String>,
    /// Measure again how fast card and CPU read host memory, where weights lie there (it is measured once, and kept beside the compiled kernels)
    #[arg(long)]
    pub(crate) replan: bool,
    /// Set of our kernels that an NVIDIA card gets
    #[arg(long, value_enum)]
    pub(crate) tier: Option<TierName>,
    /// Kernels that `carat kernels build` compiled ahead
    #[arg(long, value_name = "DIR")]
    pub(crate) kernels: Option<PathBuf>,
    /// Threads to compute with (default: all cores this process may use)
    #[arg(short, long, value_name = "N", value_parser = threads)]
    pub(crate) threads: Option<usize>,
    /// 0 computes on the CPU; any other number changes nothing, as layers are not split between card and CPU
    #[arg(long, hide = true, value_name = "N", allow_negative_numbers = true)]
    pub(crate) n_gpu_layers: Option<String>,
    /// The best instructions the CPU may use (default: all it has)
    #[arg(long, value_enum)]
    pub(crate) isa: Option<IsaName>,
    /// Number format of the keys and values of the context: f16, q8_0 (about half the memory, at some cost in exactness), or by kind
    /// of layer as in full=q8_0,sliding=f16 (default: f16)
    #[arg(long, value_name = "TYPE")]
    pub(crate) kv_type: Option<KvTypes>,
    /// The same tokens alone and in any company, however many requests run side by side (prompts are read slower on CPUs with AMX,
    /// much slower on cards)
    #[arg(long)]
    pub(crate) invariant: bool,
    /// Memory for weights that stay unpacked after their first use, such as 4GiB: short prompts are read faster (CPUs with AMX
    /// only; default: none)
    #[arg(long, value_name = "SIZE", value_parser = size)]
    pub(crate) repack: Option<String>,
    /// Switch parts of a backend off, to find where a fault comes from
    #[arg(long, value_enum, value_delimiter = ',', value_name = "LIST")]
    pub(crate) debug: Vec<DebugSwitch>,
}

#[derive(Clone, Debug, Args)]
#[command(next_help_heading = "Answers")]
pub(crate) struct GenerateArgs {
    /// Tokens of context to keep (default: as many as the model knows and memory allows)
    #[arg(short, long, visible_alias = "ctx-size", value_name = "TOKENS", value_parser = positive)]
    pub(crate) context: Option<usize>,
    /// Most tokens to generate; -1, the default, goes on until the model stops or the context is full
    #[arg(
        short = 'n',
        long,
        visible_alias = "n-predict",
        value_name = "TOKENS",
        value_parser = max_tokens,
        allow_negative_numbers = true
    )]
    pub(crate) max_tokens: Option<MaxTokens>,
    /// System prompt
    #[arg(long, visible_alias = "sys", value_name = "TEXT")]
    pub(crate) system: Option<String>,
    /// Let the model think before it answers
    #[arg(long, overrides_with = "no_think")]
    pub(crate) think: bool,
    /// Answer at once (the default)
    #[arg(long, overrides_with = "think")]
    pub(crate) no_think: bool,
    /// Do not show what the model thinks
    #[arg(long)]
    pub(crate) hide_thinking: bool,
    /// Offer the tools described in this JSON file: an array of {name, description, parameters}
    #[arg(long, value_name = "FILE")]
    pub(crate) tools: Option<PathBuf>,
    /// Use this Jinja chat template instead of the model's
    #[arg(long, value_name = "FILE")]
    pub(crate) chat_template: Option<PathBuf>,
    /// Stop where this text would appear; may be given several times
    #[arg(long, value_name = "TEXT", value_parser = stop)]
    pub(crate) stop: Vec<String>,
    /// Do not stop at the model's end tokens
    #[arg(long, conflicts_with = "format")]
    pub(crate) ignore_eos: bool,
    #[command(flatten)]
    pub(crate) format: FormatArgs,
    #[command(flatten)]
    pub(crate) draft: DraftArgs,
    #[command(flatten)]
    pub(crate) sampling: SamplingArgs,
    #[command(flatten)]
    pub(crate) model: ModelArgs,
}

/// Drafts: tokens that are proposed and verified, several at a time. The answer is the same with and without.
#[derive(Clone, Debug, Default, Args)]
#[command(next_help_heading = "Drafts")]
pub(crate) struct DraftArgs {
    /// Source of tokens to be verified several at a time: auto (the drafter beside the model, if there is one, and what the text
    /// repeats), ngram (what the text repeats), off, or a drafter's GGUF file or hf:OWNER/REPO[:FILE or QUANT] (default: auto)
    #[arg(long, value_name = "auto|ngram|off|MODEL")]
    pub(crate) draft: Option<String>,
    /// Tokens of a draft at the most; how many of them are worth it is found out (default: 7)
    #[arg(long, value_name = "K", value_parser = draft_length)]
    pub(crate) draft_max: Option<usize>,
}

/// Formats of answers.
#[derive(Clone, Debug, Default, Args)]
#[command(next_help_heading = "Format of answers")]
pub(crate) struct FormatArgs {
    /// Answer in JSON that fits the schema in this file
    #[arg(
        long,
        visible_alias = "json-schema-file",
        value_name = "FILE",
        group = "format"
    )]
    pub(crate) schema: Option<PathBuf>,
    /// Answer in JSON that fits this schema; {} is any JSON
    #[arg(short = 'j', long, value_name = "SCHEMA", group = "format")]
    pub(crate) json_schema: Option<String>,
    /// Answer in a language of one's own, given as a GBNF grammar
    #[arg(long, value_name = "GBNF", group = "format")]
    pub(crate) grammar: Option<String>,
    /// The same, from a file
    #[arg(long, value_name = "FILE", group = "format")]
    pub(crate) grammar_file: Option<PathBuf>,
    /// Let tool calls come out as the model writes them, whether they fit the tools' schemas or not
    #[arg(long, requires = "tools")]
    pub(crate) no_tool_grammar: bool,
}

impl FormatArgs {
    /// Whether answers are held to a schema or a grammar.
    pub(crate) fn is_given(&self) -> bool {
        self.schema.is_some()
            || self.json_schema.is_some()
            || self.grammar.is_some()
            || self.grammar_file.is_some()
    }
}

#[derive(Clone, Debug, Default, Args)]
#[command(next_help_heading = "Sampling (defaults are the model's own)")]
pub(crate) struct SamplingArgs {
    /// 0 takes the likeliest token each time
    #[arg(
        long,
        visible_alias = "temp",
        value_name = "T",
        value_parser = temperature,
        allow_negative_numbers = true
    )]
    pub(crate) temperature: Option<f32>,
    /// Keep the K likeliest tokens; 0 and -1 keep all
    #[arg(long, value_name = "K", value_parser = top_k, allow_negative_numbers = true)]
    pub(crate) top_k: Option<usize>,
    /// Keep the likeliest tokens that together reach this probability
    #[arg(long, value_name = "P", value_parser = top_p, allow_negative_numbers = true)]
    pub(crate) top_p: Option<f32>,
    /// Keep tokens at least P times as likely as the likeliest
    #[arg(long, value_name = "P", value_parser = min_p, allow_negative_numbers = true)]
    pub(crate) min_p: Option<f32>,
    /// Make tokens seen recently less likely; 1 does nothing
    #[arg(long, value_name = "F", allow_negative_numbers = true)]
    pub(crate) repeat_penalty: Option<f32>,
    /// Subtract from the logits of tokens seen recently
    #[arg(long, value_name = "F", allow_negative_numbers = true)]
    pub(crate) presence_penalty: Option<f32>,
    /// Subtract from the logits of tokens seen recently, once an occurrence
    #[arg(long, value_name = "F", allow_negative_numbers = true)]
    pub(crate) frequency_penalty: Option<f32>,
    /// Number of latest tokens that the penalties look at
    #[arg(long, visible_alias = "repeat-last-n", value_name = "N")]
    pub(crate) penalty_window: Option<usize>,
    /// Add BIAS to a token's logit, as ID=BIAS; may be given several times
    #[arg(long, value_name = "ID=BIAS", value_parser = bias, allow_hyphen_values = true)]
    pub(crate) logit_bias: Vec<(u32, f32)>,
    /// Same seed, same text; -1, the default, takes another each time
    #[arg(short, long, value_name = "N", value_parser = seed, allow_negative_numbers = true)]
    pub(crate) seed: Option<Seed>,
}

/// Treatment of a conversation that is too long.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum OverflowName {
    /// End with an error that names both lengths
    Refuse,
    /// Leave out its oldest turns
    DropOldest,
}

#[derive(Debug, Args)]
pub(crate) struct RunArgs {
    /// The prompt; what is piped in is added to it. `-`, or nothing with input piped in, reads it from stdin
    pub(crate) prompt: Option<String>,
    /// Do not read what is piped in beside the prompt
    #[arg(long)]
    pub(crate) no_stdin: bool,
    /// Read the prompt from a file; `-` is stdin, here and for every file that is read
    #[arg(short, long, value_name = "FILE", conflicts_with = "prompt")]
    pub(crate) file: Option<PathBuf>,
    /// Answer a conversation: a JSON array of messages with `role` and `content`
    #[arg(long, value_name = "FILE", conflicts_with_all = ["prompt", "file", "raw", "system"])]
    pub(crate) messages: Option<PathBuf>,
    /// Treatment of a conversation that is longer than the context
    #[arg(
        long,
        value_enum,
        default_value = "refuse",
        value_name = "WHAT",
        requires = "messages"
    )]
    pub(crate) overflow: OverflowName,
    /// Continue the prompt as plain text, without a chat template
    #[arg(long, conflicts_with_all = ["system", "think", "tools", "chat_template"])]
    pub(crate) raw: bool,
    /// Print one JSON object with the text, tool calls and usage when done, instead of streaming text
    #[arg(long)]
    pub(crate) json: bool,
    /// With --json: log-probabilities of each token and of its N likeliest alternatives
    #[arg(long, value_name = "N", requires = "json")]
    pub(crate) logprobs: Option<usize>,
    #[command(flatten)]
    pub(crate) generate: GenerateArgs,
}

#[derive(Debug, Args)]
pub(crate) struct ChatArgs {
    /// Continue a conversation written by /save
    #[arg(long, value_name = "FILE", conflicts_with = "system")]
    pub(crate) load: Option<PathBuf>,
    /// Keep no history of typed lines between sessions
    #[arg(long)]
    pub(crate) no_history: bool,
    #[command(flatten)]
    pub(crate) generate: GenerateArgs,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum LaneBy {
    /// The key a request comes with
    Key,
    /// The user that a request names, else its key
    User,
}

/// Stores of prefixes beyond the device.
#[derive(Clone, Debug, Args)]
pub(crate) struct PrefixArgs {
    /// Memory of the machine for prompts that a GPU has no more room for, such as 4GiB; 0 for none (default: with one model on a GPU,
    /// a tenth of what is free, at most 8GiB)
    #[arg(long = "prefix-ram", value_name = "SIZE", value_parser = size_or_none)]
    pub(crate) ram: Option<String>,
    /// A folder that conversations are kept in, so that they go on at once after other work or a restart; their text lies there in
    /// clear
    #[arg(long = "prefix-disk", value_name = "FOLDER")]
    pub(crate) disk: Option<PathBuf>,
    /// The most that the folder may hold
    #[arg(
        long = "prefix-disk-size",
        value_name = "SIZE",
        default_value = "16GiB",
        value_parser = size
    )]
    pub(crate) disk_size: String,
}

#[derive(Clone, Debug, Args)]
pub(crate) struct ServeArgs {
    /// Address to listen on; others than this machine's own want a key
    #[arg(long, value_name = "ADDRESS", default_value = "127.0.0.1")]
    pub(crate) host: IpAddr,
    /// Port to listen on; 0 takes a free one
    #[arg(long, value_name = "PORT", default_value_t = 8080)]
    pub(crate) port: u16,
    /// The name clients know the model by (default: the file's own)
    #[arg(long, visible_alias = "alias", value_name = "NAME")]
    pub(crate) name: Option<String>,
    /// Memory for all loaded models together, such as 24GiB: models are then loaded when they are asked for (default with several -m:
    /// what is free at the start)
    #[arg(long, value_name = "SIZE", value_parser = size)]
    pub(crate) models_memory: Option<String>,
    /// Time without a request after which a model is unloaded (default: when its room is needed)
    #[arg(long, value_name = "SECONDS", value_parser = seconds)]
    pub(crate) idle_unload: Option<u64>,
    /// Tokens of context for each request (default: as many as the model knows and memory allows)
    #[arg(short, long, visible_alias = "ctx-size", value_name = "TOKENS", value_parser = positive)]
    pub(crate) context: Option<usize>,
    /// Requests to compute side by side; others wait
    #[arg(long, visible_alias = "np", value_name = "N", default_value_t = 8, value_parser = parallel)]
    pub(crate) parallel: usize,
    /// Requests that may wait; more are turned away with 429 (default: 15 for each that runs)
    #[arg(long, value_name = "N")]
    pub(crate) queue: Option<usize>,
    /// A key that clients must send, as KEY or NAME=KEY; may be given several times
    #[arg(long, value_name = "KEY")]
    pub(crate) api_key: Vec<String>,
    /// A file of such keys, one per line
    #[arg(long, value_name = "FILE")]
    pub(crate) api_key_file: Option<PathBuf>,
    /// Listen on a public address without a key
    #[arg(long)]
    pub(crate) no_auth: bool,
    /// A further name by which clients reach this server; may be given several times
    #[arg(long, value_name = "NAME")]
    pub(crate) allow_host: Vec<String>,
    /// Pages of this origin may ask; may be given several times
    #[arg(long, value_name = "ORIGIN")]
    pub(crate) cors_origin: Vec<String>,
    /// Parties that take turns where requests wait: those with a key of their own, or the users that requests name
    #[arg(long, value_enum, default_value = "key", value_name = "WHO")]
    pub(crate) lane_by: LaneBy,
    /// Answers of one such party that may wait; more are turned away with 429 (default, where there are several: half of --queue, at most
    /// 64)
    #[arg(long, value_name = "N", value_parser = positive)]
    pub(crate) lane_queue: Option<usize>,
    /// Let those with different keys continue from each other's prompts
    #[arg(long)]
    pub(crate) share_prefix: bool,
    #[command(flatten)]
    pub(crate) prefix: PrefixArgs,
    /// Longest time for a request to wait; then it is turned away with 503
    #[arg(long, value_name = "SECONDS", default_value_t = 120, value_parser = seconds)]
    pub(crate) queue_timeout: u64,
    /// Longest time for a request, such as 300; what it has by then is its answer
    #[arg(long, value_name = "SECONDS", value_parser = seconds)]
    pub(crate) request_timeout: Option<u64>,
    /// Rows of prompts to compute beside answers under way: fewer make tokens come more evenly, more make prompts faster
    #[arg(long, value_name = "ROWS", default_value_t = 512, value_parser = rows)]
    pub(crate) prefill_rows: usize,
    /// Refuse requests that name another model
    #[arg(long)]
    pub(crate) strict_model: bool,
    /// Let tool calls be written freely instead of holding them to their schemas
    #[arg(long)]
    pub(crate) no_tool_grammar: bool,
    /// Prefix of the names of metrics
    #[arg(long, value_name = "TEXT", default_value = "carat:")]
    pub(crate) metrics_prefix: String,
    /// Show /metrics without a key
    #[arg(long)]
    pub(crate) metrics_public: bool,
    /// Largest request, such as 32MiB
    #[arg(long, value_name = "SIZE", default_value = "32MiB", value_parser = size)]
    pub(crate) max_body: String,
    /// Silence after which a stream sends a sign of life
    #[arg(long, value_name = "SECONDS", default_value_t = 10, value_parser = seconds)]
    pub(crate) sse_ping: u64,
    /// Time that requests under way may take when the server is told to stop
    #[arg(long, value_name = "SECONDS", default_value_t = 30)]
    pub(crate) drain: u64,
    /// Use this Jinja chat template instead of the model's
    #[arg(long, value_name = "FILE")]
    pub(crate) chat_template: Option<PathBuf>,
    #[command(flatten)]
    pub(crate) draft: DraftArgs,
    #[command(flatten)]
    pub(crate) sampling: SamplingArgs,
    #[command(flatten)]
    pub(crate) model: ModelArgs,
}

#[derive(Debug, Args)]
pub(crate) struct InspectArgs {
    /// The same as -m
    #[arg(value_name = "MODEL", conflicts_with = "model")]
    pub(crate) file: Option<String>,
    /// List every tensor
    #[arg(long)]
    pub(crate) tensors: bool,
    /// List the plan: every step of the forward pass
    #[arg(long)]
    pub(crate) plan: bool,
    /// List what the backend makes of the plan: every launch or operation with its kernel, grid, bytes and label. CUDA's
    /// needs no card
    #[arg(long, conflicts_with = "diff")]
    pub(crate) program: bool,
    /// With --program: rows of the batch, and how many of them are sampled (where not given, all of up to 64, one of
    /// more)
    #[arg(long, requires = "program", default_value = "1", value_name = "ROWS[,SAMPLED]", value_parser = batch_rows)]
    pub(crate) rows: (usize, usize),
    /// Print where weights, keys and values would lie on an NVIDIA card with as much memory as --vram says: a file for --place. No
    /// card is needed
    #[arg(long, conflicts_with_all = ["diff", "program", "plan", "tensors"])]
    pub(crate) placement: bool,
    /// With --placement: tokens of context to keep (default: as many as the model knows and memory allows)
    #[arg(short, long, requires = "placement", value_name = "TOKENS", value_parser = positive)]
    pub(crate) context: Option<usize>,
    /// Print long metadata values in full
    #[arg(long)]
    pub(crate) full: bool,
    /// Run two backends, such as reference,cpu, and name the first step at which they disagree
    #[arg(long, value_name = "A,B", value_parser = backend_pair)]
    pub(crate) diff: Option<[BackendName; 2]>,
    /// With --diff: the text to run
    #[arg(
        long,
        requires = "diff",
        default_value = "The quick brown fox jumps over the lazy dog."
    )]
    pub(crate) text: String,
    /// With --diff: relative error from which a step counts as different
    #[arg(long, requires = "diff", default_value_t = 0.1, value_parser = tolerance)]
    pub(crate) tolerance: f64,
    #[command(flatten)]
    pub(crate) model: ModelArgs,
}

#[derive(Debug, Args)]
pub(crate) struct DoctorArgs {
    /// Print one JSON object
    #[arg(long)]
    pub(crate) json: bool,
    #[command(flatten)]
    pub(crate) model: ModelArgs,
}

#[derive(Debug, Args)]
pub(crate) struct CheckArgs {
    /// The same as -m
    #[arg(value_name = "MODEL", conflicts_with = "model")]
    pub(crate) file: Option<String>,
    #[command(flatten)]
    pub(crate) model: ModelArgs,
}

#[derive(Debug, Args)]
pub(crate) struct TokenizeArgs {
    /// The text; `-` or nothing reads it from stdin
    pub(crate) text: Option<String>,
    /// A GGUF file, a short name such as gemma4:e4b, or hf:OWNER/REPO[:FILE or QUANT]
    #[arg(short, long, value_name = "MODEL", value_hint = ValueHint::FilePath)]
    pub(crate) model: Option<String>,
    /// Print ids only, separated by spaces
    #[arg(long)]
    pub(crate) ids: bool,
    /// Read texts of special tokens, such as `<turn|>`, as those tokens
    #[arg(long)]
    pub(crate) special: bool,
    /// Put no `<bos>` in front
    #[arg(long)]
    pub(crate) no_bos: bool,
    /// The reverse: read ids (separated by spaces or commas) and print their text
    #[arg(long, conflicts_with_all = ["ids", "special", "no_bos"])]
    pub(crate) decode: bool,
}

#[derive(Debug, Subcommand)]
pub(crate) enum EvalCommand {
    /// Write the logits of every position as little-endian f32, [positions, vocab]
    Logits(LogitsArgs),
    /// Perplexity of a text
    Perplexity(PerplexityArgs),
}

#[derive(Debug, Args)]
pub(crate) struct LogitsArgs {
    /// JSON: an array of token ids, or an object with them under `tokens`
    #[arg(long, value_name = "FILE")]
    pub(crate) tokens: PathBuf,
    /// File to write
    #[arg(long, value_name = "FILE")]
    pub(crate) out: PathBuf,
    /// Rows to run at once
    #[arg(long, default_value_t = 128, value_name = "ROWS", value_parser = positive)]
    pub(crate) chunk: usize,
    #[command(flatten)]
    pub(crate) model: ModelArgs,
}

#[derive(Debug, Args)]
pub(crate) struct PerplexityArgs {
    /// The text
    #[arg(short, long, value_name = "FILE")]
    pub(crate) file: PathBuf,
    /// Tokens a window holds, `<bos>` included; longer texts run as several windows
    #[arg(short, long, value_name = "TOKENS", value_parser = positive)]
    pub(crate) context: Option<usize>,
    /// Read texts of special tokens, such as `<eos>` between documents, as ordinary text
    #[arg(long)]
    pub(crate) plain: bool,
    /// Stop after this many tokens, `<bos>` included
    #[arg(long, value_name = "TOKENS", value_parser = positive)]
    pub(crate) limit: Option<usize>,
    /// Rows to run at once
    #[arg(long, default_value_t = 128, value_name = "ROWS", value_parser = positive)]
    pub(crate) chunk: usize,
    #[command(flatten)]
    pub(crate) model: ModelArgs,
}

#[derive(Debug, Args)]
pub(crate) struct SynthArgs {
    /// Model whose shape it has
    #[arg(value_enum)]
    pub(crate) preset: Preset,
    /// Mix of formats
    #[arg(value_enum)]
    pub(crate) quant: Mix,
    /// The file to write
    pub(crate) out: PathBuf,
    /// Take the vocabulary of this GGUF file instead of a synthetic one
    #[arg(long, value_name = "FILE")]
    pub(crate) vocab: Option<PathBuf>,
    /// Same seed, same file
    #[arg(long, default_value_t = 1)]
    pub(crate) seed: u64,
}

#[derive(Debug, Args)]
pub(crate) struct PullArgs {
    /// hf:OWNER/REPO[:FILE or QUANT], the hf: may be left out; or a short name such as gemma4:e4b
    pub(crate) model: String,
}

#[derive(Debug, Args)]
pub(crate) struct RmArgs {
    /// The model, as `list` shows it, or its short name
    pub(crate) model: String,
}
