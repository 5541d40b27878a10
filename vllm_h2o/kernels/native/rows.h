// SPDX-License-Identifier: Apache-2.0
// What the kernels of neurons.cpp and coarse.cpp have in common.
#pragma once

#include <algorithm>

#include "layout.h"
#include "simd.h"
#include "team.h"

namespace h2o {
namespace {

constexpr int64_t kMaxTokens = 32;

template <class T>
inline float to_float(T x) {
  if constexpr (std::is_same<T, float>::value) {
    return x;
  } else if constexpr (std::is_same<T, Bf16>::value) {
    return bit_cast<float>(static_cast<uint32_t>(x.bits) << 16);
  } else {
    return from_halves(Shorts{} + x.bits)[0];
  }
}

template <class T>
inline bool is_zero(T x) {
  if constexpr (std::is_same<T, float>::value) {
    return x == 0.0f;
  } else {
    return (x.bits & 0x7fffu) == 0;
  }
}

inline void share(int64_t count, int64_t unit, const Team& team, int64_t& begin, int64_t& end) {
  const int64_t units = (count + unit - 1) / unit;
  begin = std::min(units * team.thread / team.size * unit, count);
  end = std::min(units * (team.thread + 1) / team.size * unit, count);
}

inline int threads_for(int64_t count, int64_t least) {
  return static_cast<int>(std::clamp<int64_t>(count / least, 1, max_threads()));
}

template <class T>
inline void fetch(const T* from, int64_t count) {
  for (int64_t c = 0; c < count; c += 64 / static_cast<int64_t>(sizeof(T))) {
    __builtin_prefetch(from + c);
  }
}

template <class F>
void with_type(int32_t type, F f) {
  if (type == kFloat) f(float());
  if (type == kBf16) f(Bf16());
  if (type == kHalf) f(Half());
}

}  // namespace
}  // namespace h2o
