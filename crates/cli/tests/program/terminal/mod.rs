//! The program at a terminal: signals, and what is typed, pasted and shown.

mod conversation;
mod pty;
mod signals;
mod typing;
