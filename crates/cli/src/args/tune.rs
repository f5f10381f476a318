//! The arguments of `tune`.

use carat_cuda::Choice;
use clap::Args;

use super::{
    ModelArgs,
    values::{choice, positive},
};

#[derive(Debug, Args)]
pub(crate) struct TuneArgs {
    /// The same as -m
    #[arg(value_name = "MODEL", conflicts_with = "model")]
    pub(crate) file: Option<String>,
    /// Measure, and keep nothing
    #[arg(long)]
    pub(crate) dry_run: bool,
    /// Show the choices in force for this model on this card and where each comes from, and measure nothing
    #[arg(long, conflicts_with_all = ["dry_run", "reset"])]
    pub(crate) show: bool,
    /// Forget what was kept for this model on this card
    #[arg(long, conflicts_with = "dry_run")]
    pub(crate) reset: bool,
    /// Measure these choices alone, and leave the others to the model of the card
    #[arg(long, value_delimiter = ',', value_name = "CHOICES", value_parser = choice)]
    pub(crate) only: Vec<Choice>,
    /// Rounds in which the candidates of a choice take turns
    #[arg(short = 'r', long, default_value_t = 7, value_name = "N", value_parser = clap::value_parser!(u32).range(3..=100))]
    pub(crate) rounds: u32,
    /// Tokens that each sequence generates in a round
    #[arg(short = 'n', long, default_value_t = 32, value_name = "TOKENS", value_parser = positive)]
    pub(crate) generate: usize,
    /// Print one JSON object
    #[arg(long)]
    pub(crate) json: bool,
    #[command(flatten)]
    pub(crate) model: ModelArgs,
}
