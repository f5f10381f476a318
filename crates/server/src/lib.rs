//! HTTP for Carat: the dialects that clients speak, over one model or several that take turns in memory.
//!
//! - [`App`]: what all requests share; [`handle`] answers one, in process or from a connection
//! - [`serve`]: accepts connections until told to stop
//! - `models`: models by name, loaded when they are asked for within a budget of memory
//! - `routes`: the table, and a file per dialect; wire types never leave their route
//! - `ask`, `answer`: what every request comes to, and the one stream of events that all dialects encode; `mailbox`: those events on their way
//! - `stream`, `body`: pieces of a response as they come; `attend`: signs of life while a model is loaded; `error`: failures as each dialect says them
//! - `guard`: who may ask; `lanes`: how many of one client may wait; `accept`: connections and their limits; `memory`: what was freed goes back; `metrics`: what is counted; `watch`: what runs now
//! - `web/` beside `src/`: the chat page and the dashboard, embedded by `routes::web`
#![warn(missing_docs)]

mod accept;
mod answer;
mod app;
mod ask;
mod attend;
mod body;
mod cache;
mod config;
mod elements;
mod error;
mod guard;
mod http;
mod ids;
mod lanes;
mod mailbox;
mod memory;
mod metrics;
mod models;
mod routes;
mod stream;
#[cfg(test)]
mod testing;
mod watch;

pub use accept::{listen, runtime, serve};
pub use app::{App, Model, ModelInfo};
pub use body::Body;
pub use config::{Config, Key, Lanes};
pub use http::handle;
pub use models::{Load, Offer, Residency};
