// The paged KV cache of one slot, in the format KV_TYPE names, or in f16. One head's share of a page is contiguous:
//   KV_F16    keys and values are f16, `[page, kv_head, PAGE_TOKENS, head_dim]` each.
//   KV_Q8_0   keys and values are `[page, kv_head]` each of a Q8Page: int8 codes of all its positions, then their scales.
// Where keys follow from values, pages hold values alone. `keys` is then a place that all slots of the group have together, for keys
// that keys_from_values.cu makes just before they are read, in f16: KEY_TYPE tells kernels that read them.
#pragma once
#include "lib/batch.cuh"
#include "lib/kv_q8_0.cuh"

#define KV_F16 0
#define KV_Q8_0 1
#ifndef KV_TYPE
#define KV_TYPE KV_F16
#endif
#ifndef KEY_TYPE
#define KEY_TYPE KV_TYPE
#endif

// One KV group's page tables: entry `base[run] + position / PAGE_TOKENS` of `pages` names the page of a position.
// A base may be below the table's start: entries behind the window are not stored.
struct Tables {
  const int* base;
  const u32* pages;
};

#if KV_TYPE == KV_Q8_0
typedef u8 KvUnit;
#else
typedef u16 KvUnit;
#endif
#if KEY_TYPE == KV_Q8_0
typedef u8 KeyUnit;
#else
typedef u16 KeyUnit;
#endif

struct Slot {
  KeyUnit* keys;
  KvUnit* values;
  Tables tables;
  u32 kv_heads;
  u32 head_dim;
  // Pages that all slots of the group have together are named from here on, and lie so many pages further than their names say.
  u32 chunk_pages;
  u32 chunk_shift;
  // A key is the value times this, turned by those; null where pages have keys.
  const float* key_weight;
  const float* key_frequencies;

  // The page that an entry names, counted from this slot's first.
  __device__ __forceinline__ u32 named(u32 entry) const { return entry < chunk_pages ? entry : entry + chunk_shift; }

  // The page with the `index`th positions of a run.
  __device__ __forceinline__ u32 page(u32 run, u32 index) const { return named(tables.pages[tables.base[run] + int(index)]); }

  // First unit of one head's page.
  __device__ __forceinline__ u64 page_start(u32 page, u32 head) const {
#if KV_TYPE == KV_Q8_0
    return (u64(page) * kv_heads + head) * Q8Page::bytes(kv_blocks(head_dim));
#else
    return f16_page_start(page, head);
#endif
  }
  // The same of keys.
  __device__ __forceinline__ u64 key_page_start(u32 page, u32 head) const {
    return KEY_TYPE == KV_TYPE ? page_start(page, head) : f16_page_start(page, head);
  }
  __device__ __forceinline__ u64 f16_page_start(u32 page, u32 head) const {
    return (u64(page) * kv_heads + head) * PAGE_TOKENS * head_dim;
  }

#if KV_TYPE == KV_Q8_0
  // One head's page of a position, of `keys` or `values`.
  __device__ __forceinline__ Q8Page page_of(u8* of, u32 run, u32 position, u32 head) const {
    return {of + page_start(page(run, position / PAGE_TOKENS), head), kv_blocks(head_dim)};
  }
#else
  // First element of one head's cell of a position.
  __device__ __forceinline__ u64 cell(u32 run, u32 position, u32 head) const {
    return page_start(page(run, position / PAGE_TOKENS), head) + position % PAGE_TOKENS * head_dim;
  }
#endif
};
