// Which slots of a strip are attended to, and where their K and V lie.
#pragma once

#include <algorithm>

#include "cache.h"

namespace h2o {

// Slots whose addresses are kept at once, and by how far lines are fetched ahead: with 64 a step on
// memory that no cache holds takes 5 % more.
constexpr int kTile = 128;

// The slots of one strip that a part of the work looks at: [from, to) without the hole.
struct Range {
  int64_t from;
  int64_t to;
  int64_t hole_from;
  int64_t hole_to;

  bool visible(int64_t slot) const {
    return slot < to && !(slot >= hole_from && slot < hole_to);
  }
  bool all_visible(int64_t slot, int count) const {
    return slot + count <= to && (slot + count <= hole_from || slot >= hole_to);
  }
};

// Calls f(page, offset, count) for the visible slots, a run within one page at a time.
template <class F>
void for_each_run(const Range& range, int block_size, F f) {
  int64_t slot = range.from;
  while (slot < range.to) {
    if (slot >= range.hole_from && slot < range.hole_to) {
      slot = range.hole_to;
      continue;
    }
    const int64_t page = slot / block_size;
    int64_t end = std::min<int64_t>(range.to, (page + 1) * block_size);
    if (slot < range.hole_from) end = std::min(end, range.hole_from);
    f(page, static_cast<int>(slot % block_size), static_cast<int>(end - slot));
    slot = end;
  }
}

// Addresses of K (or of V) of kTile slots. A slot that is not attended to reads `instead`, which is
// finite: what it holds itself may be anything, and 0 * NaN is NaN.
template <class T>
struct Tile {
  const T* rows[kTile];

  void fill(const Strip<T>& strip, const Range& range, int64_t slot, int64_t offset,
            const T* instead) {
    int i = 0;
    while (i < kTile && slot + i < range.to) {
      const int64_t page = (slot + i) / strip.block_size;
      const int64_t end = std::min<int64_t>((page + 1) * strip.block_size, range.to);
      const int count = static_cast<int>(std::min<int64_t>(end - slot, kTile));
      const T* row = reinterpret_cast<const T*>(strip.row(page) + offset) +
                     (slot + i) % strip.block_size * strip.head_size;
      for (; i < count; ++i, row += strip.head_size) rows[i] = row;
    }
    for (; i < kTile; ++i) rows[i] = instead;
    if (range.all_visible(slot, kTile)) return;
    for (int j = 0; j < kTile; ++j) {
      if (!range.visible(slot + j)) rows[j] = instead;
    }
  }

  void prefetch(int first, int count, int head_size) const {
    for (int i = first; i < first + count; ++i) {
      const char* row = reinterpret_cast<const char*>(rows[i]);
      for (size_t byte = 0; byte < head_size * sizeof(T); byte += 64) {
        __builtin_prefetch(row + byte);
      }
    }
  }
};

}  // namespace h2o
