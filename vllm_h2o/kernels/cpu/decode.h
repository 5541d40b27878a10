// Arithmetic of one request's new token in one KV head: logits, weighted sums, scores, the victim.
#pragma once

#include <algorithm>

#include "page.h"

namespace h2o {

constexpr int kTile = 64;  // slots whose addresses are kept at once; a multiple of kLanes

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

// The queries of a GQA group, in the form that logits are computed from.
template <class T>
struct Group {
#if defined(__AVX512BF16__)
  static constexpr bool kPairs = std::is_same<T, Bf16>::value;
#else
  static constexpr bool kPairs = false;
#endif
  int size;
  int head_size;
  float* query;  // [G, D], or in pairs [G, round_up(D, 32)] bfloat16
  float* keys;   // [kLanes, D]: K of one group of slots, widened once for all queries

  static int64_t floats(int size, int head_size) {
    return (size + kLanes) * round_up(head_size, 32);
  }

  void set(float* memory, int size_, int head_size_, const char* from) {
    size = size_;
    head_size = head_size_;
    query = memory;
    keys = memory + size * round_up(head_size, 32);
    const T* source = reinterpret_cast<const T*>(from);
    for (int g = 0; g < size; ++g, source += head_size) {
      if constexpr (kPairs) {
        uint16_t* to = pairs(g);
        std::memset(to, 0, round_up(head_size, 32) * 2);
        std::memcpy(to, source, head_size * 2);
      } else {
        for (int d = 0; d < head_size; d += kLanes) put(query + g * head_size + d, load(source + d));
      }
    }
  }

  uint16_t* pairs(int g) const {
    return reinterpret_cast<uint16_t*>(query) + g * round_up(head_size, 32);
  }

  // q K^T for kLanes slots and each query: `to` is [G, stride].
  void dot(const T* const* rows, float* to, int64_t stride) const {
#if defined(__AVX512BF16__)
    if constexpr (kPairs) {
      for (int g = 0; g < size; ++g) put(to + g * stride, dot_pairs(rows, pairs(g)));
      return;
    }
#endif
    const float* wide[kLanes];
    for (int i = 0; i < kLanes; ++i) {
      if constexpr (std::is_same<T, float>::value) {
        wide[i] = rows[i];
      } else {
        wide[i] = keys + i * head_size;
        for (int d = 0; d < head_size; d += kLanes) {
          put(keys + i * head_size + d, load(rows[i] + d));
        }
      }
    }
    for (int g = 0; g < size; ++g) put(to + g * stride, dot_wide(wide, query + g * head_size));
  }

  Floats dot_wide(const float* const* rows, const float* q) const {
    Floats sums[kLanes] = {};
    for (int d = 0; d < head_size; d += kLanes) {
      const Floats x = load(q + d);
#pragma GCC unroll 16
      for (int i = 0; i < kLanes; ++i) sums[i] += load(rows[i] + d) * x;
    }
    return sums_of(sums);
  }

#if defined(__AVX512BF16__)
  Floats dot_pairs(const T* const* rows, const uint16_t* q) const {
    __m512 sums[kLanes] = {};
    int d = 0;
    for (; d + 32 <= head_size; d += 32) {
      const __m512bh x = bit_cast<__m512bh>(_mm512_loadu_si512(q + d));
#pragma GCC unroll 16
      for (int i = 0; i < kLanes; ++i) {
        const __m512bh k = bit_cast<__m512bh>(_mm512_loadu_si512(rows[i] + d));
        sums[i] = _mm512_dpbf16_ps(sums[i], k, x);
      }
    }
    if (d < head_size) {
      const __m512bh x = bit_cast<__m512bh>(_mm512_loadu_si512(q + d));
#pragma GCC unroll 16
      for (int i = 0; i < kLanes; ++i) {
        const __m512bh k = bit_cast<__m512bh>(_mm512_maskz_loadu_epi16(0xffffu, rows[i] + d));
        sums[i] = _mm512_dpbf16_ps(sums[i], k, x);
      }
    }
    Floats lanes[kLanes];
#pragma GCC unroll 16
    for (int i = 0; i < kLanes; ++i) lanes[i] = sums[i];
    return sums_of(lanes);
  }
#endif
};

// out[g, d...] += sum over slots p[g, slot] V[slot, d...], for H queries and W vectors of d.
template <int H, int W, class T>
inline void add_values(const T* const* rows, int count, const float* p, int64_t stride, float* out,
                       int head_size, int d) {
  Floats sums[H][W];
  for (int g = 0; g < H; ++g) {
    for (int w = 0; w < W; ++w) sums[g][w] = load(out + g * head_size + d + w * kLanes);
  }
  for (int i = 0; i < count; ++i) {
    Floats v[W];
#pragma GCC unroll 4
    for (int w = 0; w < W; ++w) v[w] = load(rows[i] + d + w * kLanes);
#pragma GCC unroll 4
    for (int g = 0; g < H; ++g) {
      const Floats weight = all(p[g * stride + i]);
#pragma GCC unroll 4
      for (int w = 0; w < W; ++w) sums[g][w] += weight * v[w];
    }
  }
  for (int g = 0; g < H; ++g) {
    for (int w = 0; w < W; ++w) put(out + g * head_size + d + w * kLanes, sums[g][w]);
  }
}

// The same for a whole group: p is [G, stride], out [G, D].
template <class T>
inline void add_values(const T* const* rows, int count, const float* p, int64_t stride, float* out,
                       int group, int head_size) {
  constexpr int kWide = kLanes == 16 ? 4 : 2;
  for (int d = 0; d < head_size;) {
    const bool wide = d + kWide * kLanes <= head_size;
    for (int g = 0; g < group;) {
      const float* weights = p + g * stride;
      float* to = out + g * head_size;
      const int left = group - g;
      const int heads = left >= 4 ? 4 : left;
      const auto add = [&](auto num_heads) {
        constexpr int kHeads = decltype(num_heads)::value;
        if (wide) {
          add_values<kHeads, kWide>(rows, count, weights, stride, to, head_size, d);
        } else {
          add_values<kHeads, 1>(rows, count, weights, stride, to, head_size, d);
        }
      };
      if (heads == 4) add(std::integral_constant<int, 4>());
      if (heads == 3) add(std::integral_constant<int, 3>());
      if (heads == 2) add(std::integral_constant<int, 2>());
      if (heads == 1) add(std::integral_constant<int, 1>());
      g += heads;
    }
    d += wide ? kWide * kLanes : kLanes;
  }
}

// The lowest score; of equals, the newest position.
struct Lowest {
  float score = kInfinity;
  int32_t position = -1;
  int64_t slot = 0;

  void offer(float score_, int32_t position_, int64_t slot_) {
    if (score_ < score || (score_ == score && position_ > position)) {
      score = score_;
      position = position_;
      slot = slot_;
    }
  }
};

// What of a token's position makes it a candidate.
struct Candidates {
  int32_t from;  // sinks are below
  int32_t to;    // recent ones from here on

  bool has(int32_t position) const { return position >= from && position < to; }
};

// The lowest of a run of slots [first, first + count), by lanes: scores and positions of one page.
inline void offer_run(Lowest& lowest, Candidates candidates, const float* score,
                      const int32_t* position, int count, int64_t first) {
  int i = 0;
  const Ints from = Ints{} + candidates.from, to = Ints{} + candidates.to;
  for (; i + kLanes <= count; i += kLanes) {
    const Ints p = load(position + i);
    const Ints able = (p >= from) & (p < to) & (load(score + i) <= all(lowest.score));
    Ints any = able;
    bool found = false;
#if defined(__AVX512F__)
    found = _mm512_test_epi32_mask(bit_cast<__m512i>(any), bit_cast<__m512i>(any)) != 0;
#else
    for (int j = 0; j < kLanes; ++j) found |= any[j] != 0;
#endif
    if (!found) continue;
    for (int j = i; j < i + kLanes; ++j) {
      if (candidates.has(position[j])) lowest.offer(score[j], position[j], first + j);
    }
  }
  for (; i < count; ++i) {
    if (candidates.has(position[i])) lowest.offer(score[i], position[i], first + i);
  }
}

// The lowest of a run, ranked by means over the queries since a token was stored: up to `end`.
inline void offer_means(Lowest& lowest, Candidates candidates, const float* score,
                        const int32_t* position, int count, int64_t first, int32_t end) {
  for (int i = 0; i < count; ++i) {
    if (!candidates.has(position[i])) continue;
    lowest.offer(score[i] / static_cast<float>(end - position[i]), position[i], first + i);
  }
}

// A whole page, ranked by the sum of its tokens' scores; its first slot stands for it.
inline void offer_page(Lowest& lowest, Candidates candidates, const float* score,
                       const int32_t* position, int block_size, int64_t first) {
  float sum = 0.0f;
  for (int i = 0; i < block_size; ++i) {
    if (!candidates.has(position[i])) return;
    sum += score[i];
  }
  lowest.offer(sum, position[0], first);
}

}  // namespace h2o
