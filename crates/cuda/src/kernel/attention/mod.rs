//! Attention and what prepares it: head norms, RoPE, the write to KV pages.

pub(crate) mod attend;
pub(crate) mod flash_decode;
pub(crate) mod flash_prefill;
#[cfg(test)]
pub(crate) mod host_pages;
pub(crate) mod keys_from_values;
pub(crate) mod kv_norm_rope_store;
pub(crate) mod move_pages;
pub(crate) mod qkv_norm_rope;
pub(crate) mod rope;
pub(crate) mod store_kv;
pub(crate) mod update_tables;
