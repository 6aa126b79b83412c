// Eight floats in a vector of the compiler's own (GCC and Clang), for machines without AVX2 and other architectures.
#pragma once

#include <cstring>

namespace {

struct Vec {
  static constexpr int W = 8;
  static constexpr int kRegisters = 16;
  using F = float __attribute__((vector_size(32)));
  using I = int32_t __attribute__((vector_size(32)));
  static F zero() { return F{}; }
  static F set1(float x) { return F{} + x; }
  static F load(const float* p) { return read<F>(p); }
  static void store(float* p, F x) { std::memcpy(p, &x, sizeof x); }
  static F fma(F a, F b, F c) { return a * b + c; }
  static F add(F a, F b) { return a + b; }
  static F sub(F a, F b) { return a - b; }
  static F mul(F a, F b) { return a * b; }
  static F div(F a, F b) { return a / b; }
  static F max(F a, F b) { return a > b ? a : b; }
  static F min(F a, F b) { return a < b ? a : b; }
  static F round(F a) { return (a + 12582912.0f) - 12582912.0f; }  // 1.5 * 2^23: leaves whole numbers, below 2^22
  static F scale2(F a, F n) { return a * (F)((__builtin_convertvector(n, I) + 127) << 23); }  // a * 2^n
  static F zero_below(F x, F limit, F value) { return (F)(~(x < limit) & (I)value); }  // value, but 0 where x < limit
  static float reduce_add(F x) { return ((x[0] + x[4]) + (x[2] + x[6])) + ((x[1] + x[5]) + (x[3] + x[7])); }
  static float reduce_max(F x) {
    float top = x[0];
    for (int i = 1; i < 8; ++i) top = x[i] > top ? x[i] : top;
    return top;
  }
  template <class T>
  static T read(const void* p) {
    T x;
    std::memcpy(&x, p, sizeof x);
    return x;
  }
  static float bits(uint32_t x) {
    float f;
    std::memcpy(&f, &x, 4);
    return f;
  }
  static uint32_t bits(float f) {
    uint32_t x;
    std::memcpy(&x, &f, 4);
    return x;
  }
  static void bf16_pairs(const uint16_t* p, F& even, F& odd) {  // 8 pairs
    const I raw = read<I>(p);
    even = (F)(raw << 16);
    odd = (F)(raw & static_cast<int32_t>(0xFFFF0000u));
  }
  static F load_bf16(const uint16_t* p) {
    I wide;
    for (int i = 0; i < 8; ++i) wide[i] = static_cast<int32_t>(static_cast<uint32_t>(p[i]) << 16);
    return (F)wide;
  }
  static F load_f16(const uint16_t* p) {
    F wide;
    for (int i = 0; i < 8; ++i) wide[i] = half(p[i]);
    return wide;
  }
  static float half(uint16_t h) {
    const uint32_t sign = static_cast<uint32_t>(h & 0x8000) << 16, rest = h & 0x7FFF;
    if (rest >= 0x7C00) return bits(sign | 0x7F800000u | ((rest & 0x3FF) << 13));
    if (rest >= 0x400) return bits(sign | ((rest << 13) + 0x38000000u));
    const float small = static_cast<float>(rest) * 5.9604644775390625e-8f;  // 2^-24
    return sign ? -small : small;
  }
  static uint16_t to_half(float f) {
    const uint32_t x = bits(f), sign = (x >> 16) & 0x8000u, mag = x & 0x7FFFFFFFu;
    if (mag > 0x7F800000u) return static_cast<uint16_t>(sign | 0x7E00u);
    if (mag >= 0x477FF000u) return static_cast<uint16_t>(sign | 0x7C00u);
    if (mag < 0x38800000u) {  // subnormal: the float addition rounds to nearest even
      const float shifted = bits(mag) + 0.5f;
      return static_cast<uint16_t>(sign | (bits(shifted) - 0x3F000000u));
    }
    return static_cast<uint16_t>(sign | ((mag - 0x38000000u + 0xFFFu + ((mag >> 13) & 1u)) >> 13));
  }
  static void store_bf16(uint16_t* p, F x) {
    for (int i = 0; i < 8; ++i) p[i] = to_bf16(x[i]);
  }
  static uint16_t to_bf16(float f) {
    const uint32_t x = bits(f);
    if ((x & 0x7FFFFFFFu) > 0x7F800000u) return static_cast<uint16_t>((x >> 16) | 0x40u);
    return static_cast<uint16_t>((x + 0x7FFFu + ((x >> 16) & 1u)) >> 16);
  }
  // Always inlined: GCC takes a function that only prefetches for one without effect and drops the calls.
  static inline __attribute__((always_inline)) void prefetch(const void*) {}
  static inline __attribute__((always_inline)) void prefetch_far(const void*) {}
};

}  // namespace
