// SPDX-License-Identifier: Apache-2.0
// A victim is merged into the key nearest to it: which that is, and what it becomes. Twin of
// merge.py.
#pragma once

#include <algorithm>

#include "simd.h"

namespace h2o {

// The key with the largest cosine; of equals, the lowest slot.
struct Nearest {
  float square = 0.0f;  // of the product with the victim, by that of its own length
  int64_t slot = -1;

  void offer(float square_, int64_t slot_) {
    if (square_ > square || (square_ == square && slot_ < slot)) {
      square = square_;
      slot = slot_;
    }
  }
};

// The square of x's length, [D].
template <class T>
inline float square_of(const T* x, int size) {
  Floats sum = {};
  for (int d = 0; d < size; d += kLanes) sum += load(x + d) * load(x + d);
  return sum_of(sum);
}

// Offers the keys of slots [slot, slot + count). `rows`: addresses of K, each [D], readable up to
// the next multiple of kLanes; `dots`: [count], their products with the victim.
template <class T>
inline void offer_keys(Nearest& nearest, const T* const* rows, const float* dots, int count,
                       int64_t slot, int head_size) {
  for (int i = 0; i < count; i += kLanes) {
    Floats sums[kLanes] = {};  // [slots, partial sums over D], in any order
    int d = 0;
    for (; d + 2 * kLanes <= head_size; d += 2 * kLanes) {
#pragma GCC unroll 16
      for (int j = 0; j < kLanes; ++j) {
        Floats a, b;
        load_two(rows[i + j] + d, a, b);
        sums[j] += a * a + b * b;
      }
    }
    for (; d < head_size; d += kLanes) {
      for (int j = 0; j < kLanes; ++j) sums[j] += load(rows[i + j] + d) * load(rows[i + j] + d);
    }
    const Floats dot = larger(load(dots + i), Floats{});
    const Floats square = dot * dot / larger(sums_of(sums), all(1e-30f));
    if (!any_of(square >= all(nearest.square))) continue;
    for (int j = 0; j < std::min(kLanes, count - i); ++j) nearest.offer(square[j], slot + i + j);
  }
}

// A victim's share of the mean; 0 where neither weighs anything.
inline float share_of(float own, float other) { return other / std::max(own + other, 1e-38f); }

// held [D] becomes the mean of it and the victim's, of which that has a share; rounded once.
template <class T>
inline void average(T* held, const T* victim, float share, int size) {
  for (int d = 0; d < size; d += kLanes) {
    const Floats own = load(held + d);
    put(held + d, own + all(share) * (load(victim + d) - own));
  }
}

}  // namespace h2o
