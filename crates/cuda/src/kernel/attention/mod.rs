//! Attention and what prepares it: head norms, RoPE, the write to KV pages.

pub(crate) mod attend;
pub(crate) mod attend_narrow;
pub(crate) mod attend_wide;
pub(crate) mod norm_rope_store;
pub(crate) mod qkv_wide;
pub(crate) mod rope;
pub(crate) mod store_kv;
