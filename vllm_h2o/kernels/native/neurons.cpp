// SPDX-License-Identifier: Apache-2.0
// The MLP of a ReLU model, by neurons: rows of weights that a step does not use are not read.
// Definition: kernels/neurons.py.
#include <algorithm>

#include "rows.h"

namespace h2o {
namespace {

constexpr int64_t kTile = 512;   // columns whose sums stay in the first cache
constexpr int64_t kLeast = 128;  // columns of a thread, at least
constexpr int64_t kAhead = 4;    // used rows that are fetched ahead

// sums[c] += a[k] * rows[k][c] for kRows rows.
template <int kRows, class T>
inline void add_rows(float* sums, const T* const* rows, const float* factors, int64_t count) {
  int64_t c = 0;
  for (; c + 2 * kLanes <= count; c += 2 * kLanes) {
    Floats low = all(0.0f), high = all(0.0f);
    for (int k = 0; k < kRows; ++k) {
      Floats a, b;
      load_two(rows[k] + c, a, b);
      low += a * all(factors[k]);
      high += b * all(factors[k]);
    }
    add_two<T>(sums + c, low, high);
  }
  for (; c < count; ++c) {
    for (int k = 0; k < kRows; ++k) sums[c] += factors[k] * to_float(rows[k][c]);
  }
}

// out[t] = bias + the sum over i of x[t, i] * rows[i], over those i where any x[t, i] is not zero.
template <class T>
int64_t down(const T* x, int64_t x_stride, const T* rows, const T* bias, T* out, int64_t num_tokens,
             int64_t num_neurons, int64_t width) {
  static thread_local Scratch lists, values;
  auto* used = lists.get<int32_t>(num_neurons);
  auto* factors = values.get<float>(num_neurons * num_tokens);  // [used, token]
  int64_t count = 0;
  for (int64_t i = 0; i < num_neurons; ++i) {
    bool any = false;
    for (int64_t t = 0; t < num_tokens; ++t) any |= !is_zero(x[t * x_stride + i]);
    if (!any) continue;
    for (int64_t t = 0; t < num_tokens; ++t) {
      factors[count * num_tokens + t] = to_float(x[t * x_stride + i]);
    }
    used[count++] = static_cast<int32_t>(i);
  }
  auto body = [&](const Team& team) {
    alignas(64) float sums[kMaxTokens * kTile];
    int64_t begin, end;
    share(width, 2 * kLanes, team, begin, end);
    const int64_t tile = num_tokens == 1 ? 4 * kTile : std::max<int64_t>(kTile, 2 * kLanes);
    for (int64_t c = begin; c < end; c += tile) {
      const int64_t size = std::min(tile, end - c);
      for (int64_t t = 0; t < num_tokens; ++t) {
        for (int64_t j = 0; j < size; ++j) sums[t * size + j] = bias ? to_float(bias[c + j]) : 0.0f;
      }
      int64_t u = 0;
      if (num_tokens == 1) {
        for (; u + 4 <= count; u += 4) {
          const T* four[4];
          for (int k = 0; k < 4; ++k) four[k] = rows + used[u + k] * width + c;
          for (int64_t k = u + 4; k < std::min(u + 8, count); ++k) {
            fetch(rows + used[k] * width + c, std::min<int64_t>(size, 256));
          }
          add_rows<4>(sums, four, factors + u, size);
        }
      }
      for (; u < count; ++u) {
        if (u + kAhead < count) fetch(rows + used[u + kAhead] * width + c, size);
        const T* row = rows + used[u] * width + c;
        for (int64_t t = 0; t < num_tokens; ++t) {
          const float* factor = factors + u * num_tokens + t;
          if (*factor != 0.0f) add_rows<1>(sums + t * size, &row, factor, size);
        }
      }
      for (int64_t t = 0; t < num_tokens; ++t) {
        T* to = out + t * width + c;
        int64_t j = 0;
        for (; j + kLanes <= size; j += kLanes) put(to + j, load(sums + t * size + j));
        for (; j < size; ++j) {
          alignas(64) T last[kLanes];
          put(last, all(sums[t * size + j]));
          to[j] = last[0];
        }
      }
    }
  };
  parallel(threads_for(width, kLeast), body);
  return count;
}

}  // namespace
}  // namespace h2o

extern "C" {

// Rows that are read. At most 32 tokens.
int64_t h2o_down(int32_t type, const void* x, int64_t x_stride, const void* rows, const void* bias,
                 void* out, int64_t num_tokens, int64_t num_neurons, int64_t width) {
  int64_t used = 0;
  h2o::with_type(type, [&](auto t) {
    using T = const decltype(t);
    used = h2o::down(static_cast<T*>(x), x_stride, static_cast<T*>(rows), static_cast<T*>(bias),
                     static_cast<decltype(t)*>(out), num_tokens, num_neurons, width);
  });
  return used;
}
}
