// SPDX-License-Identifier: Apache-2.0
// K and V of some slots, arranged as the products of a prompt take them: float32, or bfloat16 in
// pairs. `rows`: [kKeyBlock] addresses, each [D].
#pragma once

#include <algorithm>

#include "multiply.h"

namespace h2o {

// Slots that are arranged together.
constexpr int kKeyBlock = 32;

// K [kKeyBlock, D] becomes [D, kKeyBlock].
template <class S>
void arrange_keys(const S* const* rows, int size, int64_t, float* to) {
  for (int i = 0; i < kKeyBlock; ++i) {
    for (int d = 0; d < size; d += kLanes) {
      const Floats k = load(rows[i] + d);
      for (int j = 0; j < kLanes; ++j) to[(d + j) * kKeyBlock + i] = k[j];
    }
  }
}

// K [kKeyBlock, D] becomes [depth / 2, kKeyBlock, 2], with zeros after D.
template <class S>
void arrange_keys(const S* const* rows, int size, int64_t depth, Bf16* to) {
  for (int start = 0; start < depth; start += kDepth) {
    Bf16 room[kKeyBlock][kDepth];
    const Bf16* wide[kKeyBlock];
    const int count = std::min(kDepth, size - start);
    for (int i = 0; i < kKeyBlock; ++i) wide[i] = widened(rows[i] + start, room[i], count);
    for (int d = 0; d < kDepth; d += 2) {
      uint32_t pairs[kKeyBlock] = {};
      for (int i = 0; i < kKeyBlock && d < count; ++i) std::memcpy(pairs + i, wide[i] + d, 4);
      std::memcpy(to + (start + d) * kKeyBlock, pairs, sizeof(pairs));
    }
  }
}

// V [kKeyBlock, D] keeps its order.
template <class S>
void arrange_values(const S* const* rows, int size, float* to) {
  for (int i = 0; i < kKeyBlock; ++i) {
    for (int d = 0; d < size; d += kLanes) put(to + i * size + d, load(rows[i] + d));
  }
}

// V [kKeyBlock, D] becomes [kKeyBlock / 2, D, 2].
template <class S>
void arrange_values(const S* const* rows, int size, Bf16* to) {
  for (int i = 0; i < kKeyBlock; i += 2) {
    for (int d = 0; d < size; d += kLanes) {
      // All that a float has of a bfloat16 is in its upper half.
      const Words low = bit_cast<Words>(load(rows[i] + d)) >> 16;
      const Words pairs = low | (bit_cast<Words>(load(rows[i + 1] + d)) & 0xffff0000u);
      std::memcpy(to + i * size + 2 * d, &pairs, sizeof(pairs));
    }
  }
}

}  // namespace h2o
