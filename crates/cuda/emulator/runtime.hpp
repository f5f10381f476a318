// Services that an emulated kernel needs of its driver. The driver fills it in; the kernel's library has a pointer to it.
#pragma once

struct Emulation {
  struct Index {
    unsigned x, y, z;
  };
  Index thread, block, block_size, grid_size;
  // Waits for all threads of the block that have not ended.
  void (*sync_block)();
  // Leaves a word for the other lanes of the warp, waits for them, and takes the word of lane `from`.
  unsigned (*exchange)(unsigned word, unsigned from);
  // Leaves up to 8 words, waits for the other lanes, and takes everybody's: 8 words per lane in `out`.
  void (*gather)(const unsigned* words, unsigned count, unsigned* out);
  void* dynamic_shared;
};
