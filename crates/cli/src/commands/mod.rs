//! One file a command.

pub(crate) mod bench;
pub(crate) mod chat;
pub(crate) mod check;
pub(crate) mod completions;
pub(crate) mod doctor;
pub(crate) mod eval;
pub(crate) mod inspect;
pub(crate) mod kernels;
pub(crate) mod list;
pub(crate) mod man;
pub(crate) mod pull;
pub(crate) mod rm;
pub(crate) mod run;
pub(crate) mod serve;
pub(crate) mod synth;
pub(crate) mod tokenize;
pub(crate) mod tune;
