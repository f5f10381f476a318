//! The program at a terminal: signals, and what is typed, pasted and shown.

mod pty;
mod signals;
mod typing;
