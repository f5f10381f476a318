//! The program as a person runs it: what it answers, and what it says when something is wrong.

mod about;
mod bench;
mod changing_files;
mod chat;
mod check;
mod context;
mod cuda_errors;
mod flags;
mod hub;
mod inspect;
mod memory;
mod run;
mod settings;
mod start;
mod streams;
mod structured;
mod terminal;
mod tune;
