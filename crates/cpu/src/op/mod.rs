//! Operations over whole values, shared out over the threads.

pub(crate) mod attention;
pub(crate) mod experts;
pub(crate) mod kv;
pub(crate) mod linear;
pub(crate) mod quantize;
pub(crate) mod repack;
pub(crate) mod rope;
pub(crate) mod workers;
