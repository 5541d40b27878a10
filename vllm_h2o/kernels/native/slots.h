// SPDX-License-Identifier: Apache-2.0
// The slots of a strip, page by page, and where their K and V lie.
#pragma once

#include <algorithm>

#include "cache.h"

namespace h2o {

// Slots whose addresses are kept at once. Lines are fetched ahead by as many: with 64, a step on
// memory that no cache holds takes 5 % longer.
constexpr int kTile = 128;

// Calls f(page, offset, count) for slots [slot, end), a run within one page at a time.
template <class F>
void for_each_run(int64_t slot, int64_t end, int block_size, F f) {
  while (slot < end) {
    const int64_t page = slot / block_size;
    const int64_t run_end = std::min<int64_t>(end, (page + 1) * block_size);
    f(page, static_cast<int>(slot % block_size), static_cast<int>(run_end - slot));
    slot = run_end;
  }
}

// Addresses of K (or of V) of kTile slots; zeros follow the last slot, which may hold anything:
// 0 * NaN is NaN.
template <class S>
struct Tile {
  const S* rows[kTile];  // each [D]

  // Slots [slot, slot + kTile) before `end`; `offset` is 0 for K, value_offset() for V.
  void fill(const Strip<S>& strip, int64_t slot, int64_t end, int64_t offset) {
    const S* instead = reinterpret_cast<const S*>(kZeros);
    int i = 0;
    while (i < kTile && slot + i < end) {
      const int64_t page = (slot + i) / strip.block_size;
      const int64_t run_end = std::min<int64_t>((page + 1) * strip.block_size, end);
      const int count = static_cast<int>(std::min<int64_t>(run_end - slot, kTile));
      const S* row = reinterpret_cast<const S*>(strip.row(page) + offset) +
                     (slot + i) % strip.block_size * strip.head_size;
      for (; i < count; ++i, row += strip.head_size) rows[i] = row;
    }
    for (; i < kTile; ++i) rows[i] = instead;
  }

  void prefetch(int start, int count, int head_size) const {
    for (int i = start; i < start + count; ++i) {
      const char* row = reinterpret_cast<const char*>(rows[i]);
      for (size_t byte = 0; byte < head_size * sizeof(S); byte += 64) {
        __builtin_prefetch(row + byte);
      }
    }
  }
};

}  // namespace h2o
