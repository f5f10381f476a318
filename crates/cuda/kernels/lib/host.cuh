// Memory that the card shares with the host, for steps that the host computes (src/run/host_worker.rs has the other side).
//
// Requests are numbered. The card writes what is asked for, then the number; the host computes, writes its answer, then the
// number. At most two requests are open at a time, so odd and even ones have a place each for what they are about.
#pragma once
#include "lib/num.cuh"
#include "lib/ptx.cuh"

struct HostRequest {
  u32 rows;
  u32 network;
  u32 stage;
  u32 reserved;
};

struct HostWords {
  u32 asked;  // the last request
  u32 reserved[3];
  HostRequest requests[2];
  u32 padding[20];
  u32 answered;  // the last request that is done, in a cache line of its own
};
