// The table of kernels of one instruction set, and the plain structs they work on.
//
// Every translation unit isa_*.cpp compiles the same templates (kernels_impl.h) for one instruction set and hands out
// one such table; isa.cpp chooses among them at run time. Nothing here may contain code: inline functions shared
// between units compiled with different flags would be merged by the linker.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>

namespace kvray {

enum class DType : int { F32 = 0, BF16 = 1, F16 = 2 };

constexpr int kPanel = 16;       // output columns of one packed panel
constexpr int kTile = 256;       // KV positions of one attention tile; fixes the order of every sum
constexpr int kHalfPanel = 8;    // gate and up alternate in runs of this many columns
constexpr int kMaxDim = 1024;    // of a head
constexpr int kWidePanels = 4;   // panels that a thread may hold widened to fp32
constexpr int kQueryFloats = 6144;  // numbers of the query rows (queries x group) that share one pass over a KV tile
constexpr int kSplitRows = 24;      // a span with no more query rows is split by tile, so that all threads share it

enum class Epilogue : int {
  Store,    // y = acc + bias
  Add,      // y += acc + bias
  SiluMul,  // y = silu(gate) * up, panels hold 8 gate and 8 up columns; y has half as many columns, as activations
};

// y[M, N] from activations a[M, K] and packed weights. Panels are [K / kstep][16][kstep]; kstep is 2 for bf16, else 1.
struct Gemm {
  const void* a;
  int64_t lda;  // activations between rows
  const void* b;
  int64_t groups;  // K / kstep, rounded up; activations beyond K are zero
  int64_t n;       // columns that exist; the last panel may be padded
  const float* bias;  // [panels * 16] in packed order, or null
  void* y;            // float, or activations for SiluMul
  int64_t ldy;
  Epilogue epilogue;
};

// Rows [row, row + count) are positions [start, start + count) of one sequence.
struct Span {
  int64_t row;
  int64_t count;
  int64_t start;
  const int32_t* table;
};

// One piece of attention work: query rows [q0, q0 + qn) of a span and one KV head over tiles [tile0, tile1).
// tiles > 1: the piece is one tile of a span whose tiles are computed apart; its partial result goes to slot `split`,
// and whoever finishes the last of `tiles` (counter `join`) adds them up in tile order, from slot `first`.
struct Unit {
  int32_t span, head, q0, qn, tile0, tile1;
  int32_t split, first, tiles, join;
};

struct Attention {
  const float* qkv;  // [T, (heads + 2 * kv_heads) * dim]
  int64_t ld;
  int heads, kv_heads, dim;
  const float* q_norm;  // [dim] or null: RMS norm of every head before the rotation
  const float* k_norm;
  float eps;
  const float* rope;  // [T, rotary]: cosines of rotary / 2 frequencies, then sines; null: already rotated
  int rotary;
  void* kv;              // this layer of block 0
  int64_t block_stride;  // elements between blocks
  int64_t v_offset;      // elements from K to V
  int block_size;
  float scale;
  int64_t window;  // positions a query sees, itself included
  float softcap;   // 0: none
  bool write_own;  // a unit writes the new KV of its span and tiles itself; else it is already in the blocks
  const Span* spans;
  void* out;  // activations [T, heads * dim]
  int64_t ldo;
  float* partials;  // slots of partial_floats each
  int64_t partial_floats;
  std::atomic<int32_t>* joins;
};

// What one thread needs while it attends; sized by attention_scratch().
struct Scratch {
  void* q;        // activations [rows, dim]
  float* scores;  // [rows, kTile]
  void* weights;  // activations [rows, kTile]
  float* tile;    // [rows, dim] of the current tile
  float* sum;     // [rows, dim] of all tiles so far
  float* wide;    // [2, kTile, dim]: a tile's keys and values as fp32
  float* top;     // [rows] and [rows]: maximum and total so far, then those of the tile
};

struct Kernels {
  const char* name;
  int width;  // floats of a vector; block size and head dim must be multiples of it
  int (*kstep)(DType);
  int (*act_bytes)(DType);  // bytes of one activation for weights of this type
  void (*to_float)(DType, const void* from, float* to, int64_t n);
  void (*to_act)(DType, const float* from, void* to, int64_t n);
  void (*rms_norm)(DType, const float* x, const float* weight, float eps, int64_t n, void* act);
  // scratch: gemm_scratch(K) floats of this thread's own.
  void (*gemm)(DType, const Gemm&, int64_t row0, int64_t row1, int64_t panel0, int64_t panel1, float* scratch);
  void (*write_kv)(DType, const Attention&, const Span&, int64_t first, int64_t last, int head);
  // next: the unit that this thread takes afterwards, or null; its keys are fetched early.
  void (*attend)(DType, const Attention&, const Unit&, const Unit* next, const Scratch&);
  uint64_t (*read)(const void* from, int64_t bytes);  // touches every cache line
};

const Kernels* scalar_kernels();
const Kernels* avx2_kernels();
const Kernels* avx512_kernels();
const Kernels* avx512bf16_kernels();

}  // namespace kvray
