//! A file per scenario, and what they share: a client, a server with a stand-in or the demo model, a report.

mod batched;
mod broken;
mod client;
mod fairness;
mod faults;
mod held;
mod host;
mod join;
mod malformed;
mod masks;
mod options;
mod overfull;
mod process;
mod queued;
mod random;
mod report;
mod server;
mod slow;
mod soak;
mod storm;
mod synthetic;
mod ttft;
mod wire;

pub(crate) use host::{HOST, host};
pub(crate) use options::{NAMES, Options, run};
