//! The arguments of `bench`.

use std::path::PathBuf;

use clap::{Args, ValueEnum};

use super::{
    ModelArgs,
    values::{draft_length, positive, probability, temperature, top_p},
};

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum BenchFormat {
    Md,
    Json,
    Csv,
}

#[derive(Debug, Args)]
pub(crate) struct BenchArgs {
    /// Prompt lengths to time; 0 for none
    #[arg(
        short = 'p',
        long,
        value_delimiter = ',',
        default_value = "512",
        value_name = "TOKENS"
    )]
    pub(crate) prompt: Vec<usize>,
    /// Numbers of tokens to generate, one by one; 0 for none
    #[arg(
        short = 'n',
        long,
        value_delimiter = ',',
        default_value = "128",
        value_name = "TOKENS"
    )]
    pub(crate) generate: Vec<usize>,
    /// Tokens already in the context
    #[arg(
        short = 'd',
        long,
        value_delimiter = ',',
        default_value = "0",
        value_name = "TOKENS"
    )]
    pub(crate) depth: Vec<usize>,
    /// Sequences that generate together; speeds are of all of them
    #[arg(
        long,
        value_delimiter = ',',
        default_value = "1",
        value_name = "N",
        value_parser = positive,
    )]
    pub(crate) sequences: Vec<usize>,
    /// Repetitions of each test
    #[arg(short = 'r', long, default_value_t = 5, value_parser = clap::value_parser!(u32).range(1..))]
    pub(crate) repetitions: u32,
    /// Rows of a prompt to run at once (default: what the backend likes, 512 to 2048)
    #[arg(short = 'b', long, value_delimiter = ',', value_name = "ROWS")]
    pub(crate) batch: Vec<usize>,
    /// Form of the results
    #[arg(
        short = 'o',
        long,
        value_enum,
        default_value = "md",
        value_name = "FORMAT"
    )]
    pub(crate) output: BenchFormat,
    /// With -o json: wait for a line on stdin before each repetition and print its time, to take turns with another program
    #[arg(long)]
    pub(crate) paced: bool,
    /// Also show where the time of a prompt's last batch, or of one generated token, goes
    #[arg(long)]
    pub(crate) profile: bool,
    /// Compare answers with drafts and without, in place of the grid: speed, gain and acceptance
    #[arg(long, value_name = "auto|ngram|MODEL", num_args = 0..=1, default_missing_value = "auto", conflicts_with = "profile")]
    pub(crate) draft: Option<String>,
    /// With --draft: tokens of a draft at the most (default: 7)
    #[arg(long, value_name = "K", value_parser = draft_length, requires = "draft")]
    pub(crate) draft_max: Option<usize>,
    /// With --draft: a token of a draft is right with this probability, whatever the model says. For models of random weights
    #[arg(long, value_name = "P", value_parser = probability, requires = "draft", hide = true)]
    pub(crate) draft_accept: Option<f64>,
    /// With --draft: the prompt is a text of 2,048 tokens, and the answer the same with changes, whatever the model says. For models of
    /// random weights
    #[arg(long, requires = "draft", conflicts_with = "draft_accept", hide = true)]
    pub(crate) draft_edit: bool,
    /// Measure answers side by side through the engine, in place of the grid: so many at a time, with the gaps between their tokens
    #[arg(
        long,
        value_delimiter = ',',
        value_name = "N",
        value_parser = positive,
        conflicts_with_all = ["draft", "profile", "paced"],
    )]
    pub(crate) streams: Vec<usize>,
    /// With --streams: a prompt of so many tokens comes while they decode
    #[arg(long, value_name = "TOKENS", value_parser = positive, requires = "streams")]
    pub(crate) beside: Option<usize>,
    /// With --streams: temperature of the streams (default: greedy, or 1 with --top-p)
    #[arg(long, value_name = "T", value_parser = temperature, allow_negative_numbers = true, requires = "streams")]
    pub(crate) temp: Option<f32>,
    /// With --streams: draw among the likeliest tokens that have this share of the probability together
    #[arg(long, value_name = "P", value_parser = top_p, allow_negative_numbers = true, requires = "streams")]
    pub(crate) top_p: Option<f32>,
    /// With --streams: hold the answers to the JSON schema in this file; `-` is stdin
    #[arg(long, value_name = "FILE", requires = "streams")]
    pub(crate) schema: Option<PathBuf>,
    /// With --profile: write every launch to this file, as a trace for Perfetto or chrome://tracing
    #[arg(long, value_name = "FILE", requires = "profile")]
    pub(crate) trace: Option<PathBuf>,
    #[command(flatten)]
    pub(crate) model: ModelArgs,
}
