// Which slots of a strip are attended to, and where their K and V lie.
#pragma once

#include <algorithm>

#include "cache.h"

namespace h2o {

// Slots whose addresses are kept at once. Lines are fetched ahead by as many: with 64, a step on
// memory that no cache holds takes 5 % longer.
constexpr int kTile = 128;

// A strip's slots [begin, end), without the free ones [free_begin, free_end).
struct Range {
  int64_t begin;
  int64_t end;
  int64_t free_begin;
  int64_t free_end;

  bool visible(int64_t slot) const {
    return slot < end && !(slot >= free_begin && slot < free_end);
  }
  bool all_visible(int64_t slot, int count) const {
    return slot + count <= end && (slot + count <= free_begin || slot >= free_end);
  }
};

// Calls f(page, offset, count) for the visible slots, a run within one page at a time.
template <class F>
void for_each_run(const Range& range, int block_size, F f) {
  int64_t slot = range.begin;
  while (slot < range.end) {
    if (slot >= range.free_begin && slot < range.free_end) {
      slot = range.free_end;
      continue;
    }
    const int64_t page = slot / block_size;
    int64_t end = std::min<int64_t>(range.end, (page + 1) * block_size);
    if (slot < range.free_begin) end = std::min(end, range.free_begin);
    f(page, static_cast<int>(slot % block_size), static_cast<int>(end - slot));
    slot = end;
  }
}

// Addresses of K (or of V) of kTile slots. For a slot that is not attended to, zeros are read: the
// slot itself may hold anything, and 0 * NaN is NaN.
template <class S>
struct Tile {
  const S* rows[kTile];  // each [D]

  // Of slots [slot, slot + kTile) in a range; `offset` is 0 for K, value_offset() for V.
  void fill(const Strip<S>& strip, const Range& range, int64_t slot, int64_t offset) {
    const S* instead = reinterpret_cast<const S*>(kZeros);
    int i = 0;
    while (i < kTile && slot + i < range.end) {
      const int64_t page = (slot + i) / strip.block_size;
      const int64_t end = std::min<int64_t>((page + 1) * strip.block_size, range.end);
      const int count = static_cast<int>(std::min<int64_t>(end - slot, kTile));
      const S* row = reinterpret_cast<const S*>(strip.row(page) + offset) +
                     (slot + i) % strip.block_size * strip.head_size;
      for (; i < count; ++i, row += strip.head_size) rows[i] = row;
    }
    for (; i < kTile; ++i) rows[i] = instead;
    if (range.all_visible(slot, kTile)) return;
    for (int j = 0; j < kTile; ++j) {
      if (!range.visible(slot + j)) rows[j] = instead;
    }
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
