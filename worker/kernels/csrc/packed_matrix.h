// A weight matrix [N, K] in the order in which the kernels read it: panels of 16 outputs, [K / kstep][16][kstep].
#pragma once

#include <cstdint>
#include <vector>

#include "buffer.h"
#include "kernels.h"
#include "thread_pool.h"

namespace kvray {

int64_t dtype_bytes(DType dtype);

struct PackedMatrix {
  DType dtype = DType::F32;
  int64_t n = 0, k = 0;  // outputs and inputs
  int64_t panels = 0, groups = 0;
  int kstep = 1;
  bool gated = false;  // rows are gate [N / 2] then up [N / 2]; packed as runs of 8 gates, 8 ups
  void* data = nullptr;
  std::vector<float> bias;  // packed order; empty: none

  PackedMatrix() = default;
  PackedMatrix(DType type, int64_t outputs, int64_t inputs, bool gate_up);

  int64_t bytes() const { return panels * kPanel * groups * kstep * dtype_bytes(dtype); }

  // Packs rows of `from` (converted when the types differ) into `to`, which the caller owns and keeps.
  void pack(ThreadPool& pool, const void* from, DType type, void* to);
  void set_bias(const void* from, DType type);

  // A call of the kernel on `rows` activations.
  Gemm call(const void* a, int64_t lda, void* y, int64_t ldy, Epilogue epilogue) const;

 private:
  int64_t source_row(int64_t panel, int64_t column) const;  // -1: padding
};

}  // namespace kvray
