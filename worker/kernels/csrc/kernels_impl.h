// The kernels, written once over a vector type Vec (vec_*.h) that the including file has chosen.
//
// The rule behind all of it: an output element is one chain of multiply-adds in ascending K (or KV position), whatever
// the number of rows, the tile it falls into or the thread; attention adds up inside fixed tiles of kTile positions and
// merges tiles in ascending order. So a row's bits do not depend on its neighbours.
//
// Everything is in an unnamed namespace and uses no standard containers: these units are compiled with different flags.
#pragma once

#include "kernels.h"

namespace {

using kvray::Attention;
using kvray::DType;
using kvray::Epilogue;
using kvray::Gemm;
using kvray::Kernels;
using kvray::kHalfPanel;
using kvray::kPanel;
using kvray::kTile;
using kvray::Scratch;
using kvray::Span;
using kvray::Unit;
using F = Vec::F;

#define KVRAY_INLINE inline __attribute__((always_inline))
#define KVRAY_UNROLL _Pragma("GCC unroll 16")
#define KVRAY_TWICE _Pragma("GCC unroll 2")

constexpr float kLowest = -__builtin_inff();
constexpr int kPanelVectors = kPanel / Vec::W;

KVRAY_INLINE int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }
KVRAY_INLINE int64_t most(int64_t a, int64_t b) { return a > b ? a : b; }
KVRAY_INLINE int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

// e^x with the polynomial of Cephes' expf; 0 below -87.3, finite above 88.3; NaN stays NaN.
KVRAY_INLINE F vexp(F x) {
  const F low = Vec::set1(-87.3f);
  F c = Vec::max(low, Vec::min(Vec::set1(88.3f), x));
  const F n = Vec::round(Vec::mul(c, Vec::set1(1.44269504088896341f)));
  c = Vec::fma(n, Vec::set1(-0.693359375f), c);
  c = Vec::fma(n, Vec::set1(2.12194440e-4f), c);
  F p = Vec::set1(1.9875691500e-4f);
  p = Vec::fma(p, c, Vec::set1(1.3981999507e-3f));
  p = Vec::fma(p, c, Vec::set1(8.3334519073e-3f));
  p = Vec::fma(p, c, Vec::set1(4.1665795894e-2f));
  p = Vec::fma(p, c, Vec::set1(1.6666665459e-1f));
  p = Vec::fma(p, c, Vec::set1(5.0000001201e-1f));
  p = Vec::add(Vec::fma(p, Vec::mul(c, c), c), Vec::set1(1.0f));
  return Vec::zero_below(x, low, Vec::scale2(p, n));
}

KVRAY_INLINE float exp_one(float x) {
  float out[Vec::W];
  Vec::store(out, vexp(Vec::set1(x)));
  return out[0];
}

KVRAY_INLINE F vsilu(F x) {
  const F one = Vec::set1(1.0f);
  return Vec::div(x, Vec::add(one, vexp(Vec::sub(Vec::zero(), x))));
}

KVRAY_INLINE F vtanh(F x) {  // 1 - 2 / (e^2x + 1)
  const F one = Vec::set1(1.0f);
  const F e = vexp(Vec::add(x, x));
  return Vec::sub(one, Vec::div(Vec::set1(2.0f), Vec::add(e, one)));
}

// ---- How weights, KV and activations of one dtype meet ------------------------------------------------------------
// step() adds kStep values of K to MR x NV accumulators: a[m * lda + k] times the vectors at b[v] + at.

struct F32 {
  using Stored = float;
  using Act = float;
  static constexpr int kStep = 1;
  static constexpr int kMaxRows = 6;     // rows that share one pass over the vectors
  static constexpr bool kWiden = false;  // many rows: worth widening the weights to fp32 once
  static KVRAY_INLINE float narrow(float x) { return x; }
  static KVRAY_INLINE float act(float x) { return x; }
  static KVRAY_INLINE void store_act(float* p, F x) { Vec::store(p, x); }
  static KVRAY_INLINE F widen(const float* p) { return Vec::load(p); }
  template <int MR, int NV>
  static KVRAY_INLINE void step(const float* a, int64_t lda, const float* const (&b)[NV], int64_t at, F (&acc)[MR][NV]) {
    F w[NV];
    KVRAY_UNROLL for (int v = 0; v < NV; ++v) w[v] = Vec::load(b[v] + at);
    KVRAY_UNROLL for (int m = 0; m < MR; ++m) {
      const F x = Vec::set1(a[m * lda]);
      KVRAY_UNROLL for (int v = 0; v < NV; ++v) acc[m][v] = Vec::fma(x, w[v], acc[m][v]);
    }
  }
};

struct F16 {
  using Stored = uint16_t;
  using Act = float;
  static constexpr int kStep = 1;
  static constexpr int kMaxRows = 6;
  static constexpr bool kWiden = true;
  static KVRAY_INLINE uint16_t narrow(float x) { return Vec::to_half(x); }
  static KVRAY_INLINE float act(float x) { return x; }
  static KVRAY_INLINE void store_act(float* p, F x) { Vec::store(p, x); }
  static KVRAY_INLINE F widen(const uint16_t* p) { return Vec::load_f16(p); }
  template <int MR, int NV>
  static KVRAY_INLINE void step(const float* a, int64_t lda, const uint16_t* const (&b)[NV], int64_t at,
                                F (&acc)[MR][NV]) {
    F w[NV];
    KVRAY_UNROLL for (int v = 0; v < NV; ++v) w[v] = Vec::load_f16(b[v] + at);
    KVRAY_UNROLL for (int m = 0; m < MR; ++m) {
      const F x = Vec::set1(a[m * lda]);
      KVRAY_UNROLL for (int v = 0; v < NV; ++v) acc[m][v] = Vec::fma(x, w[v], acc[m][v]);
    }
  }
};

// bf16 weights widened to fp32 on the way; activations stay fp32.
struct BF16 {
  using Stored = uint16_t;
  using Act = float;
  static constexpr int kStep = 2;
  static constexpr int kMaxRows = Vec::kRegisters > 16 ? 6 : 4;  // both halves of a pair need registers too
  static constexpr bool kWiden = true;
  static KVRAY_INLINE uint16_t narrow(float x) { return Vec::to_bf16(x); }
  static KVRAY_INLINE float act(float x) { return x; }
  static KVRAY_INLINE void store_act(float* p, F x) { Vec::store(p, x); }
  static KVRAY_INLINE F widen(const uint16_t* p) { return Vec::load_bf16(p); }
  template <int MR, int NV>
  static KVRAY_INLINE void step(const float* a, int64_t lda, const uint16_t* const (&b)[NV], int64_t at,
                                F (&acc)[MR][NV]) {
    if constexpr (MR * NV + 2 * NV + 1 > Vec::kRegisters) {
      // One vector after the other, with two temporaries instead of 2 * NV; hiding `a` keeps the compiler from holding
      // all its values in registers that it does not have.
      KVRAY_UNROLL for (int v = 0; v < NV; ++v) {
        const float* x = a;
        asm("" : "+r"(x));
        F even, odd;
        Vec::bf16_pairs(b[v] + at, even, odd);
        KVRAY_UNROLL for (int m = 0; m < MR; ++m) acc[m][v] = Vec::fma(Vec::set1(x[m * lda]), even, acc[m][v]);
        KVRAY_UNROLL for (int m = 0; m < MR; ++m) acc[m][v] = Vec::fma(Vec::set1(x[m * lda + 1]), odd, acc[m][v]);
      }
      return;
    }
    F even[NV], odd[NV];
    KVRAY_UNROLL for (int v = 0; v < NV; ++v) Vec::bf16_pairs(b[v] + at, even[v], odd[v]);
    KVRAY_UNROLL for (int m = 0; m < MR; ++m) {
      const F x = Vec::set1(a[m * lda]);
      KVRAY_UNROLL for (int v = 0; v < NV; ++v) acc[m][v] = Vec::fma(x, even[v], acc[m][v]);
    }
    KVRAY_UNROLL for (int m = 0; m < MR; ++m) {
      const F x = Vec::set1(a[m * lda + 1]);
      KVRAY_UNROLL for (int v = 0; v < NV; ++v) acc[m][v] = Vec::fma(x, odd[v], acc[m][v]);
    }
  }
};

#ifdef KVRAY_BF16
// bf16 weights and activations, two K at a time in one instruction.
struct BF16Dot {
  using Stored = uint16_t;
  using Act = uint16_t;
  static constexpr int kStep = 2;
  static constexpr int kMaxRows = 6;
  static constexpr bool kWiden = false;
  static KVRAY_INLINE uint16_t narrow(float x) { return Vec::to_bf16(x); }
  static KVRAY_INLINE uint16_t act(float x) { return Vec::to_bf16(x); }
  static KVRAY_INLINE void store_act(uint16_t* p, F x) { Vec::store_bf16(p, x); }
  static KVRAY_INLINE F widen(const uint16_t* p) { return Vec::load_bf16(p); }
  template <int MR, int NV>
  static KVRAY_INLINE void step(const uint16_t* a, int64_t lda, const uint16_t* const (&b)[NV], int64_t at,
                                F (&acc)[MR][NV]) {
    __m512i w[NV];
    KVRAY_UNROLL for (int v = 0; v < NV; ++v) w[v] = Vec::load_raw(b[v] + at);
    KVRAY_UNROLL for (int m = 0; m < MR; ++m) {
      KVRAY_UNROLL for (int v = 0; v < NV; ++v) acc[m][v] = Vec::dot(acc[m][v], a + m * lda, w[v]);
    }
  }
};
using BF16Policy = BF16Dot;
#else
using BF16Policy = BF16;
#endif

constexpr int64_t kStreamingRows = 8;  // attention over no more query rows waits for memory, not for arithmetic
constexpr int64_t kManyRows = 33;  // from here on weights are widened first, where P::kWiden says so

// Vectors computed at a time for MR rows: enough chains to hide latency, few enough to stay in registers.
template <class P, int MR>
constexpr int vectors() {
  return MR <= 3 || Vec::kRegisters > 16 ? 4 : 2;
}

struct NoFeed {
  KVRAY_INLINE void step() {}
};

// `feed` asks for memory that is wanted later, a little in every step: in bursts it would stall the arithmetic.
template <class P, int MR, int NV, class Feed>
KVRAY_INLINE void micro(const typename P::Act* a, int64_t lda, const typename P::Stored* const (&b)[NV], int64_t group,
                        int64_t groups, F (&acc)[MR][NV], Feed& feed) {
  KVRAY_TWICE for (int64_t g = 0; g < groups; ++g) {
    feed.step();
    P::template step<MR, NV>(a + g * P::kStep, lda, b, g * group, acc);
  }
}

// As micro, for weights that stream from memory: asks for the lines a few kilobytes ahead.
template <class P, int MR, int NV>
KVRAY_INLINE void micro_stream(const typename P::Act* a, int64_t lda, const typename P::Stored* const (&b)[NV],
                               int64_t group, int64_t groups, F (&acc)[MR][NV]) {
  constexpr int64_t kAhead = 2048 / sizeof(typename P::Stored);
  constexpr int kLine = 64 / (Vec::W * P::kStep * static_cast<int>(sizeof(typename P::Stored)));
  for (int64_t g = 0; g < groups; ++g) {
    KVRAY_UNROLL for (int v = 0; v < NV; v += (kLine > 0 ? kLine : 1)) Vec::prefetch(b[v] + g * group + kAhead);
    P::template step<MR, NV>(a + g * P::kStep, lda, b, g * group, acc);
  }
}

// Weights that are wanted next, asked for a few lines at a time, evenly over the work before them.
struct Later {
  const char* at;
  const char* end;
  int64_t lines;  // each time
  KVRAY_INLINE void some() {
    for (int64_t i = 0; i < lines && at < end; ++i, at += 64) Vec::prefetch_far(at);
  }
};
constexpr int64_t kBetween = 32;  // K between two calls of Later::some

// As micro, where several passes go over the same weights: those that follow are fetched meanwhile, or memory would idle.
template <class P, int MR, int NV>
KVRAY_INLINE void micro_passes(const typename P::Act* a, int64_t lda, const typename P::Stored* const (&b)[NV],
                             int64_t group, int64_t groups, F (&acc)[MR][NV], Later& later) {
  constexpr int64_t kChunk = kBetween / P::kStep;
  int64_t g = 0;
  for (; g + kChunk <= groups; g += kChunk) {
    later.some();
    KVRAY_TWICE for (int64_t i = g; i < g + kChunk; ++i) P::template step<MR, NV>(a + i * P::kStep, lda, b, i * group, acc);
  }
  for (; g < groups; ++g) P::template step<MR, NV>(a + g * P::kStep, lda, b, g * group, acc);
}

// Calls fn with the row count, at most Most, as a constant.
template <int Most, class Fn>
KVRAY_INLINE void with_rows(int64_t rows, Fn fn) {
  if constexpr (Most > 1) {
    if (rows < Most) return with_rows<Most - 1>(rows, fn);
  }
  fn.template run<Most>();
}

// Splits [0, rows) into the fewest pieces of at most `most_rows`, as even as possible.
struct RowTiles {
  int64_t rows, tiles, at = 0, tile = 0;
  RowTiles(int64_t n, int64_t most_rows) : rows(n), tiles(ceil_div(n, most_rows)) {}
  bool next(int64_t& first, int64_t& count) {
    if (tile == tiles) return false;
    first = at;
    at = rows * ++tile / tiles;
    count = at - first;
    return true;
  }
};

// ---- GEMM ---------------------------------------------------------------------------------------------------------

template <class P>
struct GemmRows {
  const Gemm& g;
  int64_t row, panel0, panel1;
  int64_t base;  // the panel at g.b
  Later* later;  // null: these rows are the only ones, and the panels stream from memory

  template <int MR>
  KVRAY_INLINE void run() {
    constexpr int NV = vectors<P, MR>() > kPanelVectors ? vectors<P, MR>() : kPanelVectors;
    constexpr int NP = NV / kPanelVectors;
    const auto* a = static_cast<const typename P::Act*>(g.a) + row * g.lda;
    const auto* weights = static_cast<const typename P::Stored*>(g.b);
    const int64_t panel_size = g.groups * P::kStep * kPanel;
    for (int64_t p = panel0; p < panel1; p += NP) {
      const typename P::Stored* b[NV];
      KVRAY_UNROLL for (int v = 0; v < NV; ++v) {
        b[v] = weights + (least(p + v / kPanelVectors, panel1 - 1) - base) * panel_size + (v % kPanelVectors) * Vec::W * P::kStep;
      }
      F acc[MR][NV];
      KVRAY_UNROLL for (int m = 0; m < MR; ++m) {
        KVRAY_UNROLL for (int v = 0; v < NV; ++v) acc[m][v] = Vec::zero();
      }
      if (later != nullptr) {
        fetch_outputs<MR, NP>(p);
        micro_passes<P, MR, NV>(a, g.lda, b, P::kStep * kPanel, g.groups, acc, *later);
      } else {
        micro_stream<P, MR, NV>(a, g.lda, b, P::kStep * kPanel, g.groups, acc);
      }
      finish<MR, NV>(p, acc);
    }
  }

  // The lines that the rows' results will go to: many rows' outputs are not in the nearest cache any more.
  template <int MR, int NP>
  KVRAY_INLINE void fetch_outputs(int64_t p) {
    const bool gated = g.epilogue == Epilogue::SiluMul;
    const int64_t size = gated ? sizeof(typename P::Act) : sizeof(float), columns = gated ? kHalfPanel : kPanel;
    const char* y = static_cast<const char*>(g.y) + (row * g.ldy + p * columns) * size;
    KVRAY_UNROLL for (int m = 0; m < MR; ++m) {
      for (int64_t at = 0; at < NP * columns * size; at += 64) Vec::prefetch(y + m * g.ldy * size + at);
    }
  }

  template <int MR, int NV>
  KVRAY_INLINE void finish(int64_t p, F (&acc)[MR][NV]) {
    if (g.bias != nullptr) {
      KVRAY_UNROLL for (int v = 0; v < NV; ++v) {
        const int64_t panel = least(p + v / kPanelVectors, panel1 - 1);
        const F bias = Vec::load(g.bias + panel * kPanel + (v % kPanelVectors) * Vec::W);
        KVRAY_UNROLL for (int m = 0; m < MR; ++m) acc[m][v] = Vec::add(acc[m][v], bias);
      }
    }
    if (g.epilogue == Epilogue::SiluMul) return silu<MR, NV>(p, acc);
    KVRAY_UNROLL for (int v = 0; v < NV; ++v) {
      const int64_t panel = p + v / kPanelVectors, column = panel * kPanel + (v % kPanelVectors) * Vec::W;
      if (panel >= panel1) break;
      KVRAY_UNROLL for (int m = 0; m < MR; ++m) {
        float* y = static_cast<float*>(g.y) + (row + m) * g.ldy + column;
        if (column + Vec::W <= g.n) {
          Vec::store(y, g.epilogue == Epilogue::Add ? Vec::add(Vec::load(y), acc[m][v]) : acc[m][v]);
        } else {
          float tail[Vec::W];
          Vec::store(tail, acc[m][v]);
          for (int64_t i = 0; column + i < g.n; ++i) y[i] = g.epilogue == Epilogue::Add ? y[i] + tail[i] : tail[i];
        }
      }
    }
  }

  template <int MR, int NV>
  KVRAY_INLINE void silu(int64_t p, F (&acc)[MR][NV]) {
    constexpr int NP = NV / kPanelVectors;
    KVRAY_UNROLL for (int i = 0; i < NP; ++i) {
      if (p + i >= panel1) break;
      KVRAY_UNROLL for (int m = 0; m < MR; ++m) {
        auto* y = static_cast<typename P::Act*>(g.y) + (row + m) * g.ldy + (p + i) * kHalfPanel;
        if (kPanelVectors == 2) {
          P::store_act(y, Vec::mul(vsilu(acc[m][i * kPanelVectors]), acc[m][i * kPanelVectors + kPanelVectors - 1]));
        } else {
          float pair[kPanel], out[Vec::W];
          Vec::store(pair, acc[m][i]);
          float up[Vec::W] = {};
          for (int j = 0; j < kHalfPanel; ++j) up[j] = pair[kHalfPanel + j];
          Vec::store(out, Vec::mul(vsilu(acc[m][i]), Vec::load(up)));
          typename P::Act narrow[Vec::W];
          P::store_act(narrow, Vec::load(out));
          for (int j = 0; j < kHalfPanel; ++j) y[j] = narrow[j];
        }
      }
    }
  }
};

template <class P>
void gemm_panels(const Gemm& g, int64_t row0, int64_t row1, int64_t panel0, int64_t panel1, int64_t base, Later* later) {
  RowTiles tiles(row1 - row0, P::kMaxRows);
  int64_t first, count;
  while (tiles.next(first, count)) {
    with_rows<P::kMaxRows>(count, GemmRows<P>{g, row0 + first, panel0, panel1, base, later});
  }
}

// A panel as fp32 [K][16], the same numbers in the same order.
template <class P>
void widen_panel(const Gemm& g, int64_t panel, float* to) {
  const auto* from = static_cast<const typename P::Stored*>(g.b) + panel * g.groups * P::kStep * kPanel;
  for (int64_t i = 0; i < g.groups; ++i) {
    KVRAY_UNROLL for (int v = 0; v < kPanelVectors; ++v) {
      const auto* at = from + (i * kPanel + v * Vec::W) * P::kStep;
      float* out = to + i * P::kStep * kPanel + v * Vec::W;
      if (P::kStep == 2) {
        F even, odd;
        Vec::bf16_pairs(reinterpret_cast<const uint16_t*>(at), even, odd);
        Vec::store(out, even);
        Vec::store(out + kPanel, odd);
      } else {
        Vec::store(out, P::widen(at));
      }
    }
  }
}

template <class P>
KVRAY_INLINE int64_t panel_bytes(const Gemm& g) {
  return g.groups * P::kStep * kPanel * static_cast<int64_t>(sizeof(typename P::Stored));
}

// The `panels` panels from `panel` on; behind a matrix lies the next one, and fetching beyond the last does no harm.
template <class P>
KVRAY_INLINE Later fetch_later(const Gemm& g, int64_t rows, int64_t panel, int64_t panels) {
  const int64_t bytes = panel_bytes<P>(g);
  const char* from = static_cast<const char*>(g.b) + panel * bytes;
  constexpr int64_t kAtOnce = vectors<P, P::kMaxRows>() / kPanelVectors;  // panels that a tile of rows takes together
  const int64_t times = ceil_div(rows, P::kMaxRows) * ceil_div(panels, kAtOnce) * most(1, g.groups * P::kStep / kBetween);
  return Later{from, from + panels * bytes, ceil_div(panels * bytes, 64 * times)};
}

template <class P>
void gemm_rows(const Gemm& g, int64_t row0, int64_t row1, int64_t panel0, int64_t panel1, float* scratch) {
  constexpr int64_t kPanels = 4 / kPanelVectors;  // panels that stay in cache while the rows pass over them
  const int64_t rows = row1 - row0;
  for (int64_t p = panel0; p < panel1; p += kPanels) {
    const int64_t end = least(p + kPanels, panel1);
    Later later = fetch_later<P>(g, rows, end, kPanels);
    if constexpr (P::kWiden) {
      if (rows >= kManyRows) {
        Gemm wide = g;
        wide.b = scratch;
        wide.groups = g.groups * P::kStep;
        for (int64_t i = p; i < end; ++i) widen_panel<P>(g, i, scratch + (i - p) * wide.groups * kPanel);
        gemm_panels<F32>(wide, row0, row1, p, end, p, &later);
        continue;
      }
    }
    gemm_panels<P>(g, row0, row1, p, end, 0, rows > P::kMaxRows ? &later : nullptr);
  }
}

// ---- Rows ---------------------------------------------------------------------------------------------------------

KVRAY_INLINE float inverse_rms(const float* x, float eps, int64_t n) {
  F sum = Vec::zero();
  int64_t i = 0;
  for (; i + Vec::W <= n; i += Vec::W) sum = Vec::fma(Vec::load(x + i), Vec::load(x + i), sum);
  float total = Vec::reduce_add(sum);
  for (; i < n; ++i) total += x[i] * x[i];
  return 1.0f / __builtin_sqrtf(total / static_cast<float>(n) + eps);
}

template <class P>
void rms_norm_row(const float* x, const float* weight, float eps, int64_t n, void* act) {
  const float inverse = inverse_rms(x, eps, n);
  auto* y = static_cast<typename P::Act*>(act);
  int64_t i = 0;
  for (; i + Vec::W <= n; i += Vec::W) {
    P::store_act(y + i, Vec::mul(Vec::mul(Vec::load(x + i), Vec::set1(inverse)), Vec::load(weight + i)));
  }
  for (; i < n; ++i) y[i] = P::act(x[i] * inverse * weight[i]);
}

template <class P>
void to_act_row(const float* from, void* to, int64_t n) {
  auto* y = static_cast<typename P::Act*>(to);
  for (int64_t i = 0; i < n; ++i) y[i] = P::act(from[i]);
}

// ---- Attention ----------------------------------------------------------------------------------------------------
// A block of one layer and KV head is K [dim / kstep][block_size][kstep], then V [block_size / kstep][dim][kstep]: for
// the products with both, a block is a packed panel like those of the weights.

template <class P>
struct Paged {
  const Attention& a;

  int64_t head_size() const { return static_cast<int64_t>(a.block_size) * a.dim; }
  typename P::Stored* keys(const Span& s, int64_t block, int head) const {
    return static_cast<typename P::Stored*>(a.kv) + static_cast<int64_t>(s.table[block]) * a.block_stride +
           head * head_size();
  }
  typename P::Stored* values(const Span& s, int64_t block, int head) const { return keys(s, block, head) + a.v_offset; }

  // One head of one row: normalised and rotated, fp32.
  void prepare(int64_t row, int column, const float* norm, float* out) const {
    const float* x = a.qkv + row * a.ld + static_cast<int64_t>(column) * a.dim;
    const float inverse = norm == nullptr ? 1.0f : inverse_rms(x, a.eps, a.dim);
    for (int d = 0; d < a.dim; ++d) out[d] = norm == nullptr ? x[d] : x[d] * inverse * norm[d];
    if (a.rope == nullptr) return;
    const int half = a.rotary / 2;
    const float* cosine = a.rope + row * a.rotary;
    const float* sine = cosine + half;
    for (int d = 0; d < half; ++d) {
      const float first = out[d], second = out[d + half];
      out[d] = first * cosine[d] - second * sine[d];
      out[d + half] = second * cosine[d] + first * sine[d];
    }
  }

  void write(const Span& s, int64_t i, int head) const {
    const int64_t position = s.start + i, block = position / a.block_size, slot = position % a.block_size;
    float key[kvray::kMaxDim];
    prepare(s.row + i, a.heads + head, a.k_norm, key);
    const float* value = a.qkv + (s.row + i) * a.ld + static_cast<int64_t>(a.heads + a.kv_heads + head) * a.dim;
    auto* k = keys(s, block, head) + slot * P::kStep;
    for (int d = 0; d < a.dim; ++d) {
      k[static_cast<int64_t>(d / P::kStep) * a.block_size * P::kStep + d % P::kStep] = P::narrow(key[d]);
    }
    auto* v = values(s, block, head) + (slot / P::kStep) * a.dim * P::kStep + slot % P::kStep;
    // A product takes both slots of a pair: the second must hold a number, though its weight is 0.
    const bool alone = P::kStep == 2 && slot % 2 == 0 && i == s.count - 1;
    for (int d = 0; d < a.dim; ++d) {
      v[static_cast<int64_t>(d) * P::kStep] = P::narrow(value[d]);
      if (alone) v[static_cast<int64_t>(d) * P::kStep + P::kStep - 1] = P::narrow(0.0f);
    }
  }
};

template <class P>
struct Attend {
  const Attention& a;
  const Unit& u;
  const Unit* const next;
  const Scratch& w;
  const Span& s;
  const Paged<P> paged;
  const int group;
  const int64_t rows;
  typename P::Act* const q;
  typename P::Act* const weights;
  float *const top, *const total, *const tile_top, *const tile_total;
  // The tile at hand: positions [base, base + kTile), of which [first block, end) are computed.
  int64_t base = 0, end = 0, block0 = 0, block1 = 0;
  const bool streaming;  // few rows: the time goes into reading the blocks

  Attend(const Attention& at, const Unit& un, const Unit* following, const Scratch& sc)
      : a(at),
        u(un),
        next(following),
        w(sc),
        s(at.spans[un.span]),
        paged{at},
        group(at.heads / at.kv_heads),
        rows(static_cast<int64_t>(un.qn) * (at.heads / at.kv_heads)),
        q(static_cast<typename P::Act*>(sc.q)),
        weights(static_cast<typename P::Act*>(sc.weights)),
        top(sc.top),
        total(sc.top + rows),
        tile_top(sc.top + 2 * rows),
        tile_total(sc.top + 3 * rows),
        streaming(following != nullptr && rows <= kStreamingRows) {}

  void run() {
    if (a.write_own) write_own();
    pack_queries();
    reset();
    bool seen = false;
    for (int64_t t = u.tile0; t < u.tile1; ++t) {
      seen = tile(t);
      if (seen) merge(tile_top, tile_total, w.tile);
    }
    if (u.tiles == 1) return write_out();
    save(seen);
    if (a.joins[u.join].fetch_add(1, std::memory_order_acq_rel) == u.tiles - 1) join();
  }

  void write_own() const {
    const int64_t from = most(0, u.tile0 * static_cast<int64_t>(kTile) - s.start);
    const int64_t to = least(s.count, u.tile1 * static_cast<int64_t>(kTile) - s.start);
    for (int64_t i = from; i < to; ++i) paged.write(s, i, u.head);
  }

  void pack_queries() const {
    float head[kvray::kMaxDim];
    for (int64_t i = 0; i < u.qn; ++i) {
      for (int g = 0; g < group; ++g) {
        paged.prepare(s.row + u.q0 + i, u.head * group + g, a.q_norm, head);
        to_act_row<P>(head, q + (i * group + g) * a.dim, a.dim);
      }
    }
  }

  void reset() const {
    for (int64_t r = 0; r < rows; ++r) top[r] = kLowest, total[r] = 0.0f;
    for (int64_t i = 0; i < rows * a.dim; ++i) w.sum[i] = 0.0f;
  }

  // Maximum, total and weighted values of one tile alone; false when no row sees any of it.
  bool tile(int64_t t) {
    const int64_t low = s.start + u.q0, high = low + u.qn - 1;
    base = t * kTile;
    end = least(base + kTile, high + 1);
    const int64_t first = most(base, low - a.window + 1);
    if (first >= end) return false;
    block0 = first / a.block_size;
    block1 = (end - 1) / a.block_size + 1;
    if constexpr (P::kWiden) {
      if (rows > kStreamingRows) {
        widen();
        products<F32>();
        return true;
      }
    }
    products<P>();
    return true;
  }

  // Q is how the products read the tile: as it is stored, or widened to fp32.
  template <class Q>
  void products() {
    RowTiles tiles(rows, Q::kMaxRows);
    int64_t row, count;
    while (tiles.next(row, count)) with_rows<Q::kMaxRows>(count, Scores<Q>{*this, row});
    softmax();
    RowTiles again(rows, Q::kMaxRows);
    while (again.next(row, count)) with_rows<Q::kMaxRows>(count, Values<Q>{*this, row});
  }

  // The tile's keys [block][dim][block_size] and values [slot][dim] as fp32: the same numbers, widened once for all rows.
  void widen() const {
    const int64_t size = a.block_size;
    for (int64_t block = block0; block < block1; ++block) {
      const typename P::Stored* k = paged.keys(s, block, u.head);
      const typename P::Stored* v = paged.values(s, block, u.head);
      float* keys = wide_keys(block);
      float* values = wide_values(block);
      for (int64_t d = 0; d < a.dim; d += P::kStep) widen_row(k + d * size, keys + d * size, size);
      const int64_t slots = least(size, end - block * size);
      for (int64_t i = 0; i < slots; i += P::kStep) widen_row(v + i * a.dim, values + i * a.dim, a.dim);
    }
  }

  // kStep interleaved rows of n numbers, as kStep rows one after the other.
  KVRAY_INLINE void widen_row(const typename P::Stored* from, float* to, int64_t n) const {
    for (int64_t i = 0; i < n; i += Vec::W) {
      if constexpr (P::kStep == 2) {
        F even, odd;
        Vec::bf16_pairs(from + 2 * i, even, odd);
        Vec::store(to + i, even);
        Vec::store(to + n + i, odd);
      } else {
        Vec::store(to + i, P::widen(from + i));
      }
    }
  }

  template <class Q>
  static constexpr bool is_wide() {
    return sizeof(typename Q::Stored) != sizeof(typename P::Stored);
  }
  float* wide_keys(int64_t block) const { return w.wide + (block * a.block_size - base) * a.dim; }
  float* wide_values(int64_t block) const { return wide_keys(block) + static_cast<int64_t>(kTile) * a.dim; }

  template <class Q>
  KVRAY_INLINE const typename Q::Stored* keys_of(int64_t block) const {
    if constexpr (is_wide<Q>()) {
      return wide_keys(block);
    } else {
      return paged.keys(s, block, u.head);
    }
  }
  // Walks over the keys or values of one tile, some lines at every step.
  struct Feed {
    const Attend& t;
    const Span& span;
    const int head;
    const bool keys;
    int64_t block, last, left = 0, lines;
    const typename P::Stored* at = nullptr;

    // steps: how often step() will be called; blocks: from `first` on, as far as the sequence goes.
    Feed(const Attend& attend, const Span& of, int kv_head, bool of_keys, int64_t first, int64_t blocks, int64_t steps)
        : t(attend), span(of), head(kv_head), keys(of_keys), block(first) {
      last = least(first + blocks, (of.start + of.count - 1) / t.a.block_size + 1);
      lines = ceil_div(most(0, last - first) * per_block(), most(1, steps));
    }
    static constexpr int64_t kLine = 64 / sizeof(typename P::Stored);
    int64_t per_block() const { return ceil_div(t.paged.head_size(), kLine); }

    KVRAY_INLINE void step() {
      for (int64_t i = 0; i < lines; ++i) {
        if (left == 0) {
          if (block >= last) return;
          at = keys ? t.paged.keys(span, block, head) : t.paged.values(span, block, head);
          left = per_block();
          ++block;
        }
        Vec::prefetch_far(at);
        at += kLine;
        --left;
      }
    }
  };

  // The scores of a tile's rows; meanwhile its values arrive.
  template <class Q>
  struct Scores {
    Attend& t;
    int64_t row;
    template <int MR>
    KVRAY_INLINE void run() {
      if (t.streaming && row == 0) {
        const int64_t steps = ceil_div((t.block1 - t.block0) * (t.a.block_size / Vec::W), vectors<Q, MR>()) * t.a.dim / Q::kStep;
        Feed feed(t, t.s, t.u.head, false, t.block0, t.block1 - t.block0, steps);
        go<MR>(feed);
      } else {
        NoFeed none;
        go<MR>(none);
      }
    }

    template <int MR, class AnyFeed>
    KVRAY_INLINE void go(AnyFeed& feed) {
      constexpr int NV = vectors<Q, MR>();
      const Attention& a = t.a;
      const int per_block = a.block_size / Vec::W;
      const int64_t count = (t.block1 - t.block0) * per_block;
      for (int64_t v0 = 0; v0 < count; v0 += NV) {
        const typename Q::Stored* b[NV];
        KVRAY_UNROLL for (int v = 0; v < NV; ++v) {
          const int64_t at = least(v0 + v, count - 1);
          b[v] = t.template keys_of<Q>(t.block0 + at / per_block) + (at % per_block) * Vec::W * Q::kStep;
        }
        F acc[MR][NV];
        KVRAY_UNROLL for (int m = 0; m < MR; ++m) {
          KVRAY_UNROLL for (int v = 0; v < NV; ++v) acc[m][v] = Vec::zero();
        }
        micro<Q, MR, NV>(t.q + row * a.dim, a.dim, b, static_cast<int64_t>(Q::kStep) * a.block_size, a.dim / Q::kStep,
                         acc, feed);
        float* out = t.w.scores + row * kTile + t.block0 * a.block_size - t.base + v0 * Vec::W;
        KVRAY_UNROLL for (int v = 0; v < NV; ++v) {
          if (v0 + v >= count) break;
          KVRAY_UNROLL for (int m = 0; m < MR; ++m) Vec::store(out + m * kTile + v * Vec::W, acc[m][v]);
        }
      }
    }
  };

  void softmax() {
    const int64_t from = block0 * a.block_size - base, to = block1 * a.block_size - base;
    for (int64_t r = 0; r < rows; ++r) {
      float* x = w.scores + r * kTile;
      const int64_t position = s.start + u.q0 + r / group;
      const int64_t low = most(position - a.window + 1 - base, from), high = least(position + 1 - base, to);
      const F scale = Vec::set1(a.softcap == 0.0f ? a.scale : a.softcap);
      if (a.softcap != 0.0f) {
        const F inner = Vec::set1(a.scale / a.softcap);
        for (int64_t c = from; c < to; c += Vec::W) Vec::store(x + c, vtanh(Vec::mul(Vec::load(x + c), inner)));
      }
      for (int64_t c = from; c < least(low, to); ++c) x[c] = kLowest;
      for (int64_t c = most(high, from); c < to; ++c) x[c] = kLowest;
      F best = Vec::set1(kLowest);
      for (int64_t c = from; c < to; c += Vec::W) best = Vec::max(best, Vec::load(x + c));
      const float top_score = Vec::reduce_max(best);
      tile_top[r] = top_score == kLowest ? kLowest : top_score * (a.softcap == 0.0f ? a.scale : a.softcap);
      const F shift = Vec::set1(tile_top[r] == kLowest ? 0.0f : -tile_top[r]);
      F sum = Vec::zero();
      for (int64_t c = from; c < to; c += Vec::W) {
        const F weight = vexp(Vec::fma(Vec::load(x + c), scale, shift));
        sum = Vec::add(sum, weight);
        P::store_act(weights + r * kTile + c, weight);
      }
      tile_total[r] = Vec::reduce_add(sum);
    }
  }

  // The weighted values; meanwhile the keys of the tile that comes next arrive.
  template <class Q>
  struct Values {
    Attend& t;
    int64_t row;
    template <int MR>
    KVRAY_INLINE void run() {
      if (t.streaming && row == 0) {
        const int64_t chunks = ceil_div(t.a.dim / Vec::W, vectors<Q, MR>());
        const int64_t tile_blocks = kTile / t.a.block_size;
        Feed feed(t, t.a.spans[t.next->span], t.next->head, true, t.next->tile0 * tile_blocks, tile_blocks,
                  chunks * ceil_div(t.end - t.block0 * t.a.block_size, Q::kStep));
        go<MR>(feed);
      } else {
        NoFeed none;
        go<MR>(none);
      }
    }

    template <int MR, class AnyFeed>
    KVRAY_INLINE void go(AnyFeed& feed) {
      constexpr int NV = vectors<Q, MR>();
      const Attention& a = t.a;
      const int64_t count = a.dim / Vec::W;
      for (int64_t v0 = 0; v0 < count; v0 += NV) {
        F acc[MR][NV];
        KVRAY_UNROLL for (int m = 0; m < MR; ++m) {
          KVRAY_UNROLL for (int v = 0; v < NV; ++v) acc[m][v] = Vec::zero();
        }
        if constexpr (is_wide<Q>()) {  // they lie one after the other: one product over all of them
          const int64_t from = t.block0 * a.block_size - t.base;
          add<MR, NV>(t.wide_values(t.block0), from, t.end - t.base - from, v0, acc, feed);
        } else {
          for (int64_t block = t.block0; block < t.block1; ++block) {
            const int64_t slots = least(a.block_size, t.end - block * a.block_size);
            add<MR, NV>(t.paged.values(t.s, block, t.u.head), block * a.block_size - t.base, slots, v0, acc, feed);
          }
        }
        KVRAY_UNROLL for (int v = 0; v < NV; ++v) {
          if (v0 + v >= count) break;
          KVRAY_UNROLL for (int m = 0; m < MR; ++m) {
            Vec::store(t.w.tile + (row + m) * a.dim + (v0 + v) * Vec::W, acc[m][v]);
          }
        }
      }
    }

    // `slots` values from `values` on, with the weights of positions from `from` on in the tile.
    template <int MR, int NV, class AnyFeed>
    KVRAY_INLINE void add(const typename Q::Stored* values, int64_t from, int64_t slots, int64_t v0, F (&acc)[MR][NV],
                          AnyFeed& feed) {
      const int64_t dim = t.a.dim;
      const typename Q::Stored* b[NV];
      KVRAY_UNROLL for (int v = 0; v < NV; ++v) b[v] = values + least(v0 + v, dim / Vec::W - 1) * Vec::W * Q::kStep;
      micro<Q, MR, NV>(t.weights + row * kTile + from, kTile, b, static_cast<int64_t>(Q::kStep) * dim,
                       ceil_div(slots, Q::kStep), acc, feed);
    }
  };

  // Adds a tile's result to the sum: the one step that joins tiles, so the order of tiles alone decides the bits.
  void merge(const float* other_top, const float* other_total, const float* other) const {
    for (int64_t r = 0; r < rows; ++r) {
      if (other_top[r] == kLowest) continue;
      const float best = other_top[r] > top[r] ? other_top[r] : top[r];
      const float keep = exp_one(top[r] - best), take = exp_one(other_top[r] - best);
      top[r] = best;
      total[r] = total[r] * keep + other_total[r] * take;
      const F k = Vec::set1(keep), t = Vec::set1(take);
      for (int64_t d = 0; d < a.dim; d += Vec::W) {
        float* at = w.sum + r * a.dim + d;
        Vec::store(at, Vec::fma(Vec::load(other + r * a.dim + d), t, Vec::mul(Vec::load(at), k)));
      }
    }
  }

  float* slot(int64_t index) const { return a.partials + index * a.partial_floats; }

  // The tile's own result, not the merged one: joining then does the same arithmetic as tiles in sequence.
  void save(bool seen) const {
    float* to = slot(u.split);
    for (int64_t r = 0; r < rows; ++r) {
      to[r] = seen ? tile_top[r] : kLowest;
      to[rows + r] = tile_total[r];
    }
    for (int64_t i = 0; seen && i < rows * a.dim; ++i) to[2 * rows + i] = w.tile[i];
  }

  void join() const {
    a.joins[u.join].store(0, std::memory_order_relaxed);  // ready for the next layer
    reset();
    for (int64_t t = 0; t < u.tiles; ++t) {
      const float* from = slot(u.first + t);
      merge(from, from + rows, from + 2 * rows);
    }
    write_out();
  }

  void write_out() const {
    for (int64_t r = 0; r < rows; ++r) {
      auto* to = static_cast<typename P::Act*>(a.out) + (s.row + u.q0 + r / group) * a.ldo +
                 static_cast<int64_t>(u.head * group + r % group) * a.dim;
      const F divisor = Vec::set1(total[r]);
      for (int64_t d = 0; d < a.dim; d += Vec::W) {
        P::store_act(to + d, Vec::div(Vec::load(w.sum + r * a.dim + d), divisor));
      }
    }
  }
};

// ---- The table ----------------------------------------------------------------------------------------------------

#define KVRAY_DISPATCH(dtype, call)          \
  switch (dtype) {                           \
    case DType::F32: {                       \
      using P = F32;                         \
      call;                                  \
      break;                                 \
    }                                        \
    case DType::F16: {                       \
      using P = F16;                         \
      call;                                  \
      break;                                 \
    }                                        \
    case DType::BF16: {                      \
      using P = BF16Policy;                  \
      call;                                  \
      break;                                 \
    }                                        \
  }

int kstep(DType dtype) {
  int step = 1;
  KVRAY_DISPATCH(dtype, step = P::kStep)
  return step;
}

int act_bytes(DType dtype) {
  int bytes = 4;
  KVRAY_DISPATCH(dtype, bytes = static_cast<int>(sizeof(P::Act)))
  return bytes;
}

void to_float(DType dtype, const void* from, float* to, int64_t n) {
  KVRAY_DISPATCH(dtype, {
    const auto* x = static_cast<const P::Stored*>(from);
    int64_t i = 0;
    for (; i + Vec::W <= n; i += Vec::W) Vec::store(to + i, P::widen(x + i));
    if (i < n) {
      P::Stored padded[Vec::W] = {};
      float wide[Vec::W];
      for (int64_t j = i; j < n; ++j) padded[j - i] = x[j];
      Vec::store(wide, P::widen(padded));
      for (int64_t j = i; j < n; ++j) to[j] = wide[j - i];
    }
  })
}

void to_act(DType dtype, const float* from, void* to, int64_t n) { KVRAY_DISPATCH(dtype, to_act_row<P>(from, to, n)) }

void rms_norm(DType dtype, const float* x, const float* weight, float eps, int64_t n, void* act) {
  KVRAY_DISPATCH(dtype, rms_norm_row<P>(x, weight, eps, n, act))
}

void gemm(DType dtype, const Gemm& g, int64_t row0, int64_t row1, int64_t panel0, int64_t panel1, float* scratch) {
  KVRAY_DISPATCH(dtype, gemm_rows<P>(g, row0, row1, panel0, panel1, scratch))
}

void write_kv(DType dtype, const Attention& a, const Span& s, int64_t first, int64_t last, int head) {
  KVRAY_DISPATCH(dtype, for (int64_t i = first; i < last; ++i) Paged<P>{a}.write(s, i, head))
}

void attend(DType dtype, const Attention& a, const Unit& u, const Unit* next, const Scratch& w) {
  KVRAY_DISPATCH(dtype, Attend<P>(a, u, next, w).run())
}

uint64_t read_lines(const void* from, int64_t bytes) {
  const auto* p = static_cast<const float*>(from);
  F sum[8];
  for (auto& x : sum) x = Vec::zero();
  const int64_t floats = bytes / 4 / (8 * Vec::W) * (8 * Vec::W);
  for (int64_t i = 0; i < floats; i += 8 * Vec::W) {
    if (i % 128 == 0) {
      Vec::prefetch(p + i + 1024);
      Vec::prefetch(p + i + 1040);
      Vec::prefetch(p + i + 1056);
      Vec::prefetch(p + i + 1072);
    }
    KVRAY_UNROLL for (int j = 0; j < 8; ++j) sum[j] = Vec::add(sum[j], Vec::load(p + i + j * Vec::W));
  }
  F all = Vec::zero();
  for (auto& x : sum) all = Vec::add(all, x);
  return static_cast<uint64_t>(Vec::reduce_add(all) != 0.0f);
}

const Kernels kTable = {KVRAY_NAME, Vec::W, kstep, act_bytes, to_float, to_act, rms_norm, gemm, write_kv, attend, read_lines};

}  // namespace
