// Plays cuBLASLt: plain loops for the one product that src/device/cublaslt.rs asks for, f16 in, f16 or f32 out.
#include <dlfcn.h>
#include <immintrin.h>

#include <cstddef>
#include <cstdint>

namespace {

enum { SUCCESS = 0, INVALID = 7, UNSUPPORTED = 15 };
enum { F32 = 0, F16 = 2, COMPUTE_F32 = 68, TRANSPOSE_A = 3 };

struct Desc {
  bool transposed_a = false;
};
struct Layout {
  int type;
  uint64_t rows, columns;
  int64_t stride;
};
struct Preference {
  size_t workspace = 0;
};
// As many bytes as the real ones have.
struct Algorithm {
  uint64_t data[8];
};
struct Heuristic {
  Algorithm algorithm;
  size_t workspace;
  int status;
  float waves;
  int reserved[4];
};

bool fits(const Desc* desc, const Layout* a, const Layout* b, const Layout* d) {
  return desc->transposed_a && a->type == F16 && b->type == F16 && (d->type == F16 || d->type == F32) &&
         a->rows == b->rows && a->columns == d->rows && b->columns == d->columns && uint64_t(a->stride) >= a->rows &&
         uint64_t(b->stride) >= b->rows && uint64_t(d->stride) >= d->rows;
}

// Operands of a product, until the stream reaches it.
struct Product {
  Layout a, b, d;
  float alpha;
  const uint16_t *weights, *x;
  void *out, *workspace;
  size_t workspace_bytes;
};

int multiply(const void* data) {
  const Product& p = *(const Product*)data;
  // All of it may be written.
  for (size_t i = 0; i < p.workspace_bytes; i += 4096) ((char*)p.workspace)[i] = 0;
  for (uint64_t column = 0; column < p.d.columns; column++)
    for (uint64_t row = 0; row < p.d.rows; row++) {
      const uint16_t *w = p.weights + row * uint64_t(p.a.stride), *x = p.x + column * uint64_t(p.b.stride);
      float sum = 0;
      for (uint64_t k = 0; k < p.a.rows; k++) sum += _cvtsh_ss(w[k]) * _cvtsh_ss(x[k]);
      sum *= p.alpha;
      const uint64_t at = column * uint64_t(p.d.stride) + row;
      if (p.d.type == F32)
        ((float*)p.out)[at] = sum;
      else
        ((uint16_t*)p.out)[at] = _cvtss_sh(sum, 0);
    }
  return SUCCESS;
}

// The emulated driver's: now, or when the graph that is being captured is launched.
using Queue = int (*)(int (*)(const void*), const void*, size_t);

Queue driver_queue() {
  void* driver = dlopen("libcuda.so.1", RTLD_NOW | RTLD_NOLOAD);
  return driver ? (Queue)dlsym(driver, "emulatorQueue") : nullptr;
}

}  // namespace

extern "C" {

const char* cublasLtGetStatusString(int status) { return status ? "the emulator does not know this product" : "success"; }
int cublasLtCreate(void** handle) { return *handle = new char, SUCCESS; }
int cublasLtDestroy(void* handle) { return delete (char*)handle, SUCCESS; }

int cublasLtMatmulDescCreate(Desc** desc, int compute, int scale) {
  if (compute != COMPUTE_F32 || scale != F32) return INVALID;
  return *desc = new Desc, SUCCESS;
}
int cublasLtMatmulDescSetAttribute(Desc* desc, int attribute, const void* value, size_t bytes) {
  if (attribute != TRANSPOSE_A || bytes != 4) return INVALID;
  return desc->transposed_a = *(const int*)value == 1, SUCCESS;
}
int cublasLtMatmulDescDestroy(Desc* desc) { return delete desc, SUCCESS; }

int cublasLtMatrixLayoutCreate(Layout** layout, int type, uint64_t rows, uint64_t columns, int64_t stride) {
  return *layout = new Layout{type, rows, columns, stride}, SUCCESS;
}
int cublasLtMatrixLayoutDestroy(Layout* layout) { return delete layout, SUCCESS; }

int cublasLtMatmulPreferenceCreate(Preference** preference) { return *preference = new Preference, SUCCESS; }
int cublasLtMatmulPreferenceSetAttribute(Preference* preference, int attribute, const void* value, size_t bytes) {
  if (attribute == 1 && bytes == sizeof(size_t)) return preference->workspace = *(const size_t*)value, SUCCESS;
  return attribute == 3 && bytes == 4 ? SUCCESS : INVALID;
}
int cublasLtMatmulPreferenceDestroy(Preference* preference) { return delete preference, SUCCESS; }

int cublasLtMatmulAlgoGetHeuristic(void*, Desc* desc, Layout* a, Layout* b, Layout*, Layout* d, Preference* preference,
                                   int count, Heuristic* found, int* returned) {
  *returned = 0;
  if (!fits(desc, a, b, d)) return UNSUPPORTED;
  for (; *returned < count && *returned < 2; ++*returned) found[*returned] = {{{1}}, preference->workspace, SUCCESS, 1, {}};
  return SUCCESS;
}

int cublasLtMatmul(void*, Desc* desc, const float* alpha, const uint16_t* a, Layout* a_layout, const uint16_t* b,
                   Layout* b_layout, const float* beta, const void*, Layout*, void* d, Layout* d_layout,
                   const Algorithm* algorithm, void* workspace, size_t workspace_bytes, void*) {
  if (!fits(desc, a_layout, b_layout, d_layout) || *beta != 0 || algorithm->data[0] != 1) return INVALID;
  static const Queue queue = driver_queue();
  const Product product{*a_layout, *b_layout, *d_layout, *alpha, a, b, d, workspace, workspace_bytes};
  return queue ? queue(multiply, &product, sizeof product) : INVALID;
}
}
