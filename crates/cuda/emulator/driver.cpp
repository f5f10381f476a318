// Plays the CUDA driver: memory is host memory, and a launch runs its blocks one after another on this processor.
//
// The threads of a block are fibers. They run in an order that changes from block to block, so code that relies on one
// shows. A barrier that not all reach, or a shuffle that a lane stays away from, is reported and ends the process. Every
// allocation ends at a page that may not be touched, so reads and writes behind it are found, too.
//
// Failures of a card can be asked for in the environment:
//   EMULATOR_FAIL_AFTER_LAUNCHES=N   launch N + 1 fails, and from then on everything does, as on a card that fell off the bus
//   EMULATOR_MEMORY=BYTES            a smaller (or larger) card
//   EMULATOR_CAPABILITY=75           an older (or newer) one; 0 is none at all
//   EMULATOR_DRIVER=11040            an older driver
#include <dlfcn.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <map>
#include <mutex>
#include <string>
#include <vector>

#include "runtime.hpp"
#include "temporary.hpp"

namespace {

// ---- Fibers -----------------------------------------------------------------------------------------------------------

extern "C" void emulator_switch(void** save, void* to);
asm(R"(
.text
.globl emulator_switch
.hidden emulator_switch
emulator_switch:
  pushq %rbp
  pushq %rbx
  pushq %r12
  pushq %r13
  pushq %r14
  pushq %r15
  movq %rsp, (%rdi)
  movq %rsi, %rsp
  popq %r15
  popq %r14
  popq %r13
  popq %r12
  popq %rbx
  popq %rbp
  ret
)");

constexpr size_t STACK = 64 << 10;
constexpr unsigned WARP = 32;

enum class State { Ready, AtBlock, AtWarp, Ended };

struct Thread {
  void* stack_pointer = nullptr;
  std::vector<char> stack;
  State state = State::Ended;
  unsigned exchanges = 0;
};

struct Warp {
  unsigned live = 0, arrived = 0;
  uint32_t words[2][WARP][8];
};

Emulation emulation;
std::vector<Thread> threads;
std::vector<Warp> warps;
unsigned live, arrived, current;
void* scheduler;
void (*entry)(const void*);
const void* params;
uint64_t shuffle = 88172645463325252ull;

void give_way(State state) {
  threads[current].state = state;
  const unsigned self = current;
  emulator_switch(&threads[self].stack_pointer, scheduler);
  emulation.thread = {self, 0, 0};
}

void release_block() {
  if (arrived == 0 || arrived < live) return;
  arrived = 0;
  for (auto& thread : threads)
    if (thread.state == State::AtBlock) thread.state = State::Ready;
}

void release_warp(unsigned warp) {
  if (warps[warp].arrived == 0 || warps[warp].arrived < warps[warp].live) return;
  warps[warp].arrived = 0;
  for (unsigned i = warp * WARP; i < (warp + 1) * WARP && i < threads.size(); i++)
    if (threads[i].state == State::AtWarp) threads[i].state = State::Ready;
}

void sync_block() {
  arrived++;
  threads[current].state = State::AtBlock;
  release_block();
  give_way(threads[current].state);
}

unsigned exchange(unsigned word, unsigned from) {
  const unsigned self = current, warp = self / WARP;
  // Two sets of words, used alternately: a lane cannot be two exchanges ahead of another.
  auto& words = warps[warp].words[threads[self].exchanges++ % 2];
  words[self % WARP][0] = word;
  warps[warp].arrived++;
  threads[self].state = State::AtWarp;
  release_warp(warp);
  give_way(threads[self].state);
  return words[from][0];
}

void gather(const unsigned* own, unsigned count, unsigned* out) {
  const unsigned self = current, warp = self / WARP;
  auto& words = warps[warp].words[threads[self].exchanges++ % 2];
  std::memcpy(words[self % WARP], own, count * sizeof *own);
  warps[warp].arrived++;
  threads[self].state = State::AtWarp;
  release_warp(warp);
  give_way(threads[self].state);
  std::memcpy(out, words, sizeof words);
}

void run_thread() {
  entry(params);
  threads[current].state = State::Ended;
  live--;
  warps[current / WARP].live--;
  release_block();
  release_warp(current / WARP);
  give_way(State::Ended);
}

void start_thread(unsigned i) {
  Thread& thread = threads[i];
  thread.stack.resize(STACK);
  auto top = (uintptr_t)(thread.stack.data() + STACK) & ~uintptr_t(15);
  void** frame = (void**)(top - 16);
  *frame = (void*)run_thread;
  frame -= 6;  // the registers that a switch restores
  std::memset(frame, 0, 6 * sizeof(void*));
  thread.stack_pointer = frame;
  thread.state = State::Ready;
  thread.exchanges = 0;
}

void run_block(unsigned size) {
  threads.resize(size);
  warps.assign((size + WARP - 1) / WARP, Warp{});
  live = size;
  arrived = 0;
  for (unsigned i = 0; i < size; i++) {
    start_thread(i);
    warps[i / WARP].live++;
  }
  shuffle ^= shuffle << 13, shuffle ^= shuffle >> 7, shuffle ^= shuffle << 17;
  const unsigned first = unsigned(shuffle % size);
  const bool down = shuffle >> 40 & 1;
  while (live > 0) {
    bool ran = false;
    for (unsigned n = 0; n < size; n++) {
      const unsigned i = down ? (first + size - n) % size : (first + n) % size;
      if (threads[i].state != State::Ready) continue;
      ran = true;
      current = i;
      emulation.thread = {i, 0, 0};
      emulator_switch(&scheduler, threads[i].stack_pointer);
    }
    if (!ran) {
      std::fprintf(stderr, "emulator: threads wait for others that do not come (%u of %u live)\n", live, size);
      std::abort();
    }
  }
}

// ---- Memory, modules --------------------------------------------------------------------------------------------------

std::mutex lock;
std::map<uint64_t, std::pair<char*, size_t>> allocations;
constexpr size_t MAX_SHARED = 227 << 10;
constexpr size_t TOTAL = size_t(8) << 30;
size_t held = 0;
bool has_context = false;

int allocate(uint64_t* address, size_t bytes) {
  const size_t page = size_t(sysconf(_SC_PAGESIZE));
  const size_t used = (bytes + page - 1) / page * page;
  char* start = (char*)mmap(nullptr, used + page, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (start == MAP_FAILED) return 2;
  mprotect(start + used, page, PROT_NONE);
  std::memset(start, 0xff, used);  // not numbers, until written
  char* aligned = start + (used - bytes) / 256 * 256;
  *address = (uint64_t)aligned;
  allocations[*address] = {start, used + page};
  held += used;
  return 0;
}

int release(uint64_t address) {
  auto found = allocations.find(address);
  if (found == allocations.end()) return 1;
  held -= found->second.second - size_t(sysconf(_SC_PAGESIZE));
  munmap(found->second.first, found->second.second);
  allocations.erase(found);
  return 0;
}

long setting(const char* name, long otherwise) {
  const char* text = std::getenv(name);
  return text ? std::atol(text) : otherwise;
}

size_t total() {
  static const size_t bytes = size_t(setting("EMULATOR_MEMORY", long(TOTAL)));
  return bytes;
}

int capability() {
  static const int number = int(setting("EMULATOR_CAPABILITY", 90));
  return number;
}

constexpr int LAUNCH_FAILED = 719;
bool lost = false;

// The first answer of every call that reaches a card.
int health() { return lost ? LAUNCH_FAILED : 0; }

void count_launch() {
  static long left = setting("EMULATOR_FAIL_AFTER_LAUNCHES", -1);
  if (left == 0) lost = true;
  if (left > 0) left--;
}

struct Module {
  void* library;
};

struct Function {
  void (*call)(const void*);
  size_t params_bytes;
};

struct Launch {
  Function* function;
  unsigned x, y, z, threads, shared;
  std::vector<char> params;
};

// The actions of a graph, in order.
using Graph = std::vector<std::function<int()>>;

// While this is set, queued actions are kept for later.
Graph* capture = nullptr;

int queue(std::function<int()> work) {
  if (!capture) return work();
  capture->push_back(std::move(work));
  return 0;
}

int run(const Launch& launch) {
  count_launch();
  if (lost) return LAUNCH_FAILED;
  emulation.block_size = {launch.threads, 1, 1};
  emulation.grid_size = {launch.x, launch.y, launch.z};
  emulation.sync_block = sync_block;
  emulation.exchange = exchange;
  emulation.gather = gather;
  // A page that may not be touched follows, as behind every allocation.
  uint64_t dynamic = 0;
  if (launch.shared && allocate(&dynamic, launch.shared)) return 2;
  emulation.dynamic_shared = (void*)dynamic;
  entry = launch.function->call;
  params = launch.params.data();
  for (unsigned block_y = 0; block_y < launch.y; block_y++)
    for (unsigned block_x = 0; block_x < launch.x; block_x++) {
      emulation.block = {block_x, block_y, 0};
      if (launch.shared) std::memset((void*)dynamic, 0xff, launch.shared);
      run_block(launch.threads);
    }
  if (launch.shared) release(dynamic);
  return 0;
}

}  // namespace

extern "C" {

int cuInit(unsigned) { return 0; }
int cuDriverGetVersion(int* version) { return *version = int(setting("EMULATOR_DRIVER", 13000)), 0; }
int cuDeviceGetCount(int* count) { return *count = capability() > 0, 0; }
int cuDeviceGet(int* device, int) { return *device = 0, 0; }
int cuDeviceGetName(char* name, int length, int) { return std::snprintf(name, size_t(length), "emulated card"), 0; }
int cuDeviceGetPCIBusId(char* id, int length, int) { return std::snprintf(id, size_t(length), "0000:01:00.0"), 0; }
int cuDeviceGetAttribute(int* value, int attribute, int) {
  switch (attribute) {
    case 75: return *value = capability() / 10, 0;  // compute capability, major
    case 76: return *value = capability() % 10, 0;  // and minor
    case 16: return *value = 4, 0;               // multiprocessors: few, so that small shapes are spread unevenly, too
    case 97: return *value = int(MAX_SHARED), 0;  // shared memory a block may ask for
    default: return *value = 0, 0;               // what we never ask for
  }
}
int cuDevicePrimaryCtxRetain(void** context, int) { return has_context = true, *context = &emulation, 0; }
// For management.cpp.
void emulated_use(size_t* used, size_t* total) { *used = held + (has_context ? 300u << 20 : 0), *total = ::total(); }
int cuDevicePrimaryCtxRelease_v2(int) { return 0; }
int cuCtxSetCurrent(void*) { return 0; }
int cuCtxGetCurrent(void** context) { return *context = &emulation, 0; }
int cuCtxSetLimit(int, size_t) { return 0; }
int cuCtxSynchronize() { return health(); }
int cuStreamCreate(void** stream, unsigned) { return *stream = &emulation, 0; }
int cuStreamDestroy_v2(void*) { return 0; }
int cuStreamSynchronize(void*) { return health(); }
int cuStreamWaitEvent(void*, void*, unsigned) { return 0; }
int cuEventCreate(void** event, unsigned) { return *event = &emulation, 0; }
int cuEventRecord(void*, void*) { return health(); }
int cuEventElapsedTime_v2(float* ms, void*, void*) { return *ms = 1, 0; }
int cuEventElapsedTime(float* ms, void*, void*) { return *ms = 1, 0; }
int cuEventRecordWithFlags(void*, void*, unsigned) { return health(); }
int cuEventSynchronize(void*) { return health(); }
int cuEventDestroy_v2(void*) { return 0; }
int cuGetErrorName(int status, const char** text) {
  return *text = status == LAUNCH_FAILED ? "CUDA_ERROR_LAUNCH_FAILED" : "CUDA_ERROR_UNKNOWN", 0;
}
int cuGetErrorString(int status, const char** text) {
  return *text = status == LAUNCH_FAILED ? "unspecified launch failure" : "an emulated error", 0;
}

int cuMemGetInfo_v2(size_t* free, size_t* total) {
  if (lost) return LAUNCH_FAILED;
  *total = ::total();
  *free = ::total() - held;
  return 0;
}

int cuMemAlloc_v2(uint64_t* address, size_t bytes) {
  std::lock_guard<std::mutex> guard(lock);
  if (lost) return LAUNCH_FAILED;
  if (bytes > total() - held) return 2;
  return allocate(address, bytes);
}
int cuMemFree_v2(uint64_t address) {
  std::lock_guard<std::mutex> guard(lock);
  if (lost) return LAUNCH_FAILED;
  return release(address);
}

int cuMemHostAlloc(void** start, size_t bytes, unsigned) {
  *start = std::aligned_alloc(4096, (bytes + 4095) / 4096 * 4096);
  return *start ? 0 : 2;
}
int cuMemFreeHost(void* start) { return std::free(start), 0; }
int cuMemcpyHtoDAsync_v2(uint64_t to, const void* from, size_t bytes, void*) {
  if (lost) return LAUNCH_FAILED;
  return std::memcpy((void*)to, from, bytes), 0;
}
int cuMemcpyDtoDAsync_v2(uint64_t to, uint64_t from, size_t bytes, void*) {
  if (lost) return LAUNCH_FAILED;
  return std::memcpy((void*)to, (const void*)from, bytes), 0;
}
int cuMemcpyDtoHAsync_v2(void* to, uint64_t from, size_t bytes, void*) {
  if (lost) return LAUNCH_FAILED;
  return std::memcpy(to, (const void*)from, bytes), 0;
}
// Part of a graph where one is captured, as launches are.
int cuMemcpyAsync(uint64_t to, uint64_t from, size_t bytes, void*) {
  return queue([=] {
    if (lost) return LAUNCH_FAILED;
    return std::memcpy((void*)to, (const void*)from, bytes), 0;
  });
}
int cuMemsetD8Async(uint64_t to, unsigned char value, size_t bytes, void*) {
  return std::memset((void*)to, value, bytes), 0;
}

int cuModuleLoadData(Module** module, const void* image) {
  uint64_t length;
  std::memcpy(&length, image, sizeof length);
  std::string path = temporary("emulated-module");
  const int file = mkstemp(path.data());
  if (file < 0 || write(file, (const char*)image + sizeof length, length) != ssize_t(length)) return 200;
  close(file);
  void* library = dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL);
  unlink(path.c_str());
  if (!library) {
    std::fprintf(stderr, "emulator: %s\n", dlerror());
    return 200;
  }
  *(Emulation**)dlsym(library, "emulation") = &emulation;
  *module = new Module{library};
  return 0;
}

int cuModuleGetFunction(Function** function, Module* module, const char* name) {
  void* call = dlsym(module->library, ("emulated_" + std::string(name)).c_str());
  if (!call) return 500;
  void* bytes = dlsym(module->library, ("emulated_bytes_" + std::string(name)).c_str());
  *function = new Function{(void (*)(const void*))call, ((size_t(*)())bytes)()};
  return 0;
}

int cuFuncGetAttribute(int* value, int, Function*) { return *value = 0, 0; }
int cuFuncSetAttribute(Function*, int, int) { return 0; }

int cuModuleUnload(Module* module) {
  dlclose(module->library);
  delete module;
  return 0;
}

int cuLaunchKernel(Function* function, unsigned x, unsigned y, unsigned z, unsigned threads_x, unsigned threads_y,
                   unsigned threads_z, unsigned shared, void*, void** arguments, void**) {
  if (x == 0 || y == 0 || z == 0 || y > 65535 || threads_x == 0 || threads_x > 1024 || threads_y * threads_z != 1 || shared > MAX_SHARED)
    return 1;
  std::lock_guard<std::mutex> guard(lock);
  const char* bytes = (const char*)arguments[0];
  Launch launch{function, x, y, z, threads_x, shared, {bytes, bytes + function->params_bytes}};
  return queue([launch] { return run(launch); });
}

// For libraries that queue work of their own.
int emulatorQueue(int (*work)(const void*), const void* data, size_t bytes) {
  std::lock_guard<std::mutex> guard(lock);
  const std::vector<char> kept((const char*)data, (const char*)data + bytes);
  return queue([work, kept] { return work(kept.data()); });
}

struct LaunchConfig {
  unsigned x, y, z, threads_x, threads_y, threads_z, shared;
  void* stream;
  void* attributes;
  unsigned attribute_count;
};
int cuLaunchKernelEx(const LaunchConfig* c, Function* function, void** arguments, void** extra) {
  return cuLaunchKernel(function, c->x, c->y, c->z, c->threads_x, c->threads_y, c->threads_z, c->shared, c->stream, arguments,
                        extra);
}

int cuStreamBeginCapture_v2(void*, int) {
  std::lock_guard<std::mutex> guard(lock);
  if (capture) return 1;
  capture = new Graph;
  return 0;
}
int cuStreamEndCapture(void*, Graph** graph) {
  std::lock_guard<std::mutex> guard(lock);
  if (!capture) return 1;
  *graph = capture;
  capture = nullptr;
  return 0;
}
int cuGraphInstantiateWithFlags(Graph** executable, const Graph* graph, unsigned long long) {
  *executable = new Graph(*graph);
  return 0;
}
int cuGraphLaunch(const Graph* executable, void*) {
  std::lock_guard<std::mutex> guard(lock);
  for (const auto& work : *executable)
    if (const int failed = work()) return failed;
  return 0;
}
int cuGraphExecDestroy(Graph* executable) { return delete executable, 0; }
int cuGraphDestroy(Graph* graph) { return delete graph, 0; }
}
