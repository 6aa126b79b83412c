// Eight floats in an array: the vector type of machines without AVX2, and the readable one.
#pragma once

#include <cmath>
#include <cstring>

namespace {

struct Vec {
  static constexpr int W = 8;
  static constexpr int kRegisters = 16;
  static constexpr bool kDot = false;
  struct F {
    float v[8];
  };
  template <class Fn>
  static F each(Fn fn) {
    F r;
    for (int i = 0; i < 8; ++i) r.v[i] = fn(i);
    return r;
  }
  static F zero() { return set1(0.0f); }
  static F set1(float x) {
    return each([&](int) { return x; });
  }
  static F load(const float* p) {
    return each([&](int i) { return p[i]; });
  }
  static void store(float* p, F x) {
    for (int i = 0; i < 8; ++i) p[i] = x.v[i];
  }
  static F fma(F a, F b, F c) {
    return each([&](int i) { return a.v[i] * b.v[i] + c.v[i]; });
  }
  static F add(F a, F b) {
    return each([&](int i) { return a.v[i] + b.v[i]; });
  }
  static F sub(F a, F b) {
    return each([&](int i) { return a.v[i] - b.v[i]; });
  }
  static F mul(F a, F b) {
    return each([&](int i) { return a.v[i] * b.v[i]; });
  }
  static F div(F a, F b) {
    return each([&](int i) { return a.v[i] / b.v[i]; });
  }
  static F max(F a, F b) {
    return each([&](int i) { return a.v[i] > b.v[i] ? a.v[i] : b.v[i]; });
  }
  static F min(F a, F b) {
    return each([&](int i) { return a.v[i] < b.v[i] ? a.v[i] : b.v[i]; });
  }
  static F round(F a) {
    return each([&](int i) { return std::nearbyint(a.v[i]); });
  }
  static F scale2(F a, F n) {  // a * 2^n, n a small whole number
    return each([&](int i) { return a.v[i] * bits(static_cast<uint32_t>(static_cast<int32_t>(n.v[i]) + 127) << 23); });
  }
  static F zero_below(F x, F limit, F value) {  // value, but 0 where x < limit
    return each([&](int i) { return x.v[i] < limit.v[i] ? 0.0f : value.v[i]; });
  }
  static float reduce_add(F x) {
    return ((x.v[0] + x.v[4]) + (x.v[2] + x.v[6])) + ((x.v[1] + x.v[5]) + (x.v[3] + x.v[7]));
  }
  static float reduce_max(F x) {
    float top = x.v[0];
    for (int i = 1; i < 8; ++i) top = x.v[i] > top ? x.v[i] : top;
    return top;
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
    even = each([&](int i) { return bits(static_cast<uint32_t>(p[2 * i]) << 16); });
    odd = each([&](int i) { return bits(static_cast<uint32_t>(p[2 * i + 1]) << 16); });
  }
  static F load_bf16(const uint16_t* p) {
    return each([&](int i) { return bits(static_cast<uint32_t>(p[i]) << 16); });
  }
  static F load_f16(const uint16_t* p) {
    return each([&](int i) { return half(p[i]); });
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
    for (int i = 0; i < 8; ++i) p[i] = to_bf16(x.v[i]);
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
