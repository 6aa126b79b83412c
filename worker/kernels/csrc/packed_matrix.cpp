#include "packed_matrix.h"

#include <cstring>

#include "isa.h"

namespace kvray {
namespace {

uint16_t to_bf16(float f) {
  uint32_t x;
  std::memcpy(&x, &f, 4);
  if ((x & 0x7FFFFFFFu) > 0x7F800000u) return static_cast<uint16_t>((x >> 16) | 0x40u);
  return static_cast<uint16_t>((x + 0x7FFFu + ((x >> 16) & 1u)) >> 16);
}

uint16_t to_half(float f) {
  uint32_t x;
  std::memcpy(&x, &f, 4);
  const uint32_t sign = (x >> 16) & 0x8000u, mag = x & 0x7FFFFFFFu;
  if (mag > 0x7F800000u) return static_cast<uint16_t>(sign | 0x7E00u);
  if (mag >= 0x477FF000u) return static_cast<uint16_t>(sign | 0x7C00u);
  if (mag < 0x38800000u) {
    float shifted;
    std::memcpy(&shifted, &mag, 4);
    shifted += 0.5f;
    uint32_t bits;
    std::memcpy(&bits, &shifted, 4);
    return static_cast<uint16_t>(sign | (bits - 0x3F000000u));
  }
  return static_cast<uint16_t>(sign | ((mag - 0x38000000u + 0xFFFu + ((mag >> 13) & 1u)) >> 13));
}

}  // namespace

int64_t dtype_bytes(DType dtype) { return dtype == DType::F32 ? 4 : 2; }

PackedMatrix::PackedMatrix(DType type, int64_t outputs, int64_t inputs, bool gate_up)
    : dtype(type), n(outputs), k(inputs), panels((outputs + kPanel - 1) / kPanel), gated(gate_up) {
  kstep = scalar_kernels()->kstep(type);
  groups = (inputs + kstep - 1) / kstep;
}

int64_t PackedMatrix::source_row(int64_t panel, int64_t column) const {
  if (gated) {
    const int64_t within = column % kHalfPanel, row = panel * kHalfPanel + within;
    if (row >= n / 2) return -1;
    return column < kHalfPanel ? row : n / 2 + row;
  }
  const int64_t row = panel * kPanel + column;
  return row < n ? row : -1;
}

void PackedMatrix::pack(ThreadPool& pool, const void* from, DType type, void* to) {
  data = to;
  Counter counter;
  pool.run([&](int) {
    std::vector<float> wide(static_cast<size_t>(k));
    int64_t first, last;
    while (counter.take(panels, 1, first, last)) {
      for (int64_t column = 0; column < kPanel; ++column) {
        const int64_t row = source_row(first, column), stride = kPanel * kstep;
        const int64_t at = first * groups * stride + column * kstep;
        const auto* source = static_cast<const char*>(from) + (row < 0 ? 0 : row) * k * dtype_bytes(type);
        const auto place = [&](int64_t i) { return at + i / kstep * stride + i % kstep; };
        if (dtype == DType::F32) {
          auto* out = static_cast<float*>(to);
          if (row >= 0) scalar_kernels()->to_float(type, source, wide.data(), k);
          for (int64_t i = 0; i < groups * kstep; ++i) out[place(i)] = row < 0 || i >= k ? 0.0f : wide[i];
        } else {
          auto* out = static_cast<uint16_t*>(to);
          const auto* same = reinterpret_cast<const uint16_t*>(source);
          if (row >= 0 && type != dtype) scalar_kernels()->to_float(type, source, wide.data(), k);
          for (int64_t i = 0; i < groups * kstep; ++i) {
            uint16_t value = 0;
            if (row >= 0 && i < k) {
              value = type == dtype ? same[i] : dtype == DType::BF16 ? to_bf16(wide[i]) : to_half(wide[i]);
            }
            out[place(i)] = value;
          }
        }
      }
    }
  });
}

void PackedMatrix::set_bias(const void* from, DType type) {
  std::vector<float> wide(static_cast<size_t>(n));
  scalar_kernels()->to_float(type, from, wide.data(), n);
  bias.assign(static_cast<size_t>(panels * kPanel), 0.0f);
  for (int64_t panel = 0; panel < panels; ++panel) {
    for (int64_t column = 0; column < kPanel; ++column) {
      const int64_t row = source_row(panel, column);
      if (row >= 0) bias[panel * kPanel + column] = wide[row];
    }
  }
}

Gemm PackedMatrix::call(const void* a, int64_t lda, void* y, int64_t ldy, Epilogue epilogue) const {
  return Gemm{a, lda, data, groups, n, bias.empty() ? nullptr : bias.data(), y, ldy, epilogue};
}

}  // namespace kvray
