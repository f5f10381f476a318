// The paged KV cache: keys and values of one slot in f16, `[page, kv_head, PAGE_TOKENS, head_dim]` each, so that one head's share
// of a page is contiguous.
#pragma once
#include "lib/batch.cuh"

constexpr u32 PAGE_TOKENS = 32;

// One KV group's page tables: entry `base[run] + position / PAGE_TOKENS` of `pages` holds the page of a position.
// A base may be below the table's start: entries behind the window are not stored.
struct Tables {
  const int* base;
  const u32* pages;

  __device__ __forceinline__ u32 page(u32 run, u32 index) const { return pages[base[run] + int(index)]; }
};

struct Slot {
  u16* keys;
  u16* values;
  Tables tables;
  u32 kv_heads;
  u32 head_dim;

  // First element of one head's page.
  __device__ __forceinline__ u64 page_start(u32 page, u32 head) const {
    return (u64(page) * kv_heads + head) * PAGE_TOKENS * head_dim;
  }

  // First element of one head's cell of a position.
  __device__ __forceinline__ u64 cell(u32 run, u32 position, u32 head) const {
    u32 page = tables.page(run, position / PAGE_TOKENS);
    return page_start(page, head) + position % PAGE_TOKENS * head_dim;
  }
};
