//! The server with the demo model, request by request: one program, since each takes a minute to build.

mod connections;
mod exact;
mod messages;
mod models;
mod ollama;
mod openai;
mod page;
mod responses;
mod safety;
mod support;
