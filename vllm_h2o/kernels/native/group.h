// SPDX-License-Identifier: Apache-2.0
// The queries of a GQA group and their products with K.
#pragma once

#include <algorithm>

#include "slots.h"

namespace h2o {

// The queries of a GQA group, in the form that logits are computed from.
template <class T>
struct Group {
  static constexpr int kSlots = kLanes;
#if defined(__AVX512BF16__) && !defined(__AMX_BF16__)
  static constexpr bool kPairs = std::is_same<T, Bf16>::value;
#else
  static constexpr bool kPairs = false;
#endif
  int size;
  int head_size;
  float* query;  // [G, D], or in pairs [G, round_up(D, 32)] bfloat16
  float* keys;   // [kLanes, D]: K of some slots, widened once for all queries

  struct Tiles {
    explicit Tiles(int) {}
  };

  static int64_t floats(int size, int head_size) {
    return (size + kLanes) * round_up(head_size, 32);
  }

  // `source`: [G, D].
  void set(float* memory, int size_, int head_size_, const T* source) {
    size = size_;
    head_size = head_size_;
    query = memory;
    keys = memory + size * round_up(head_size, 32);
    for (int g = 0; g < size; ++g, source += head_size) {
      if constexpr (kPairs) {
        uint16_t* to = pairs(g);
        std::memset(to, 0, round_up(head_size, 32) * 2);
        std::memcpy(to, source, head_size * 2);
      } else {
        float* to = query + g * head_size;
        for (int d = 0; d < head_size; d += kLanes) put(to + d, load(source + d));
      }
    }
  }

  void spread(int, float*, int64_t) const {}

  // [round_up(D, 32)] bfloat16
  uint16_t* pairs(int g) const {
    return reinterpret_cast<uint16_t*>(query) + g * round_up(head_size, 32);
  }

  // Logits [G, kSlots] of [G, stride] = q [G, D] K^T [D, kSlots], for slots of a tile from `start`
  // on. `rows`: [kTile] addresses of K, each [D]. `together`: all are attended to.
  template <class S>
  void dot(const S* const* rows, int start, [[maybe_unused]] bool together, float* to,
           int64_t stride) const {
    rows += start;
#if defined(__AVX512BF16__) && !defined(__AMX_BF16__)
    if constexpr (kPairs && !std::is_same<S, T>::value) {
      const T* wide[kLanes];
      T* copy = reinterpret_cast<T*>(keys);
      for (int i = 0; i < kLanes; ++i, copy += head_size) {
        wide[i] = widened(rows[i], copy, head_size);
      }
      dot(wide, 0, true, to, stride);
      return;
    } else if constexpr (kPairs) {
      // K of slots in different pages is not contiguous.
      together = together && rows[kLanes - 1] - rows[0] == (kLanes - 1) * head_size;
      for (int g = 0; g < size; ++g) {
        Floats dots;
        if (together && head_size == 64) {
          dots = dot_pairs<64>(rows[0], pairs(g));
        } else if (together && head_size == 128) {
          dots = dot_pairs<128>(rows[0], pairs(g));
        } else {
          dots = dot_pairs(rows, pairs(g));
        }
        put(to + g * stride, dots);
      }
      return;
    }
#endif
    const float* wide[kLanes];  // addresses of K, each [D]
    const int depth = head_size;
    for (int i = 0; i < kLanes; ++i) {
      if constexpr (std::is_same<S, float>::value) {
        wide[i] = rows[i];
      } else {
        float* copy = keys + i * depth;
        for (int d = 0; d < depth; d += kLanes) put(copy + d, load(rows[i] + d));
        wide[i] = copy;
      }
    }
    for (int g = 0; g < size; ++g) put(to + g * stride, dot_wide(wide, query + g * head_size));
  }

  // [kLanes]: K of kLanes slots times q [D].
  Floats dot_wide(const float* const* rows, const float* q) const {
    Floats sums[kLanes] = {};  // [slots, partial sums over D]
    for (int d = 0; d < head_size; d += kLanes) {
      const Floats x = load(q + d);
#pragma GCC unroll 16
      for (int i = 0; i < kLanes; ++i) sums[i] += load(rows[i] + d) * x;
    }
    return sums_of(sums);
  }

#if defined(__AVX512BF16__) && !defined(__AMX_BF16__)
  // Contiguous slots: rows is [kLanes, D].
  template <int D>
  static Floats dot_pairs(const T* rows, const uint16_t* q) {
    Floats sums[kLanes] = {};
#pragma GCC unroll 4
    for (int d = 0; d < D; d += 32) {
      const __m512bh x = (__m512bh)_mm512_loadu_si512(q + d);
#pragma GCC unroll 16
      for (int i = 0; i < kLanes; ++i) {
        const __m512bh k = (__m512bh)_mm512_loadu_si512(rows + i * D + d);
        sums[i] = _mm512_dpbf16_ps(sums[i], k, x);
      }
    }
    return sums_of(sums);
  }

  // Slots anywhere: rows is [kLanes] addresses of [D].
  Floats dot_pairs(const T* const* rows, const uint16_t* q) const {
    __m512 sums[kLanes] = {};
    int d = 0;
    for (; d + 32 <= head_size; d += 32) {
      const __m512bh x = (__m512bh)(_mm512_loadu_si512(q + d));
#pragma GCC unroll 16
      for (int i = 0; i < kLanes; ++i) {
        const __m512bh k = (__m512bh)(_mm512_loadu_si512(rows[i] + d));
        sums[i] = _mm512_dpbf16_ps(sums[i], k, x);
      }
    }
    if (d < head_size) {
      const __m512bh x = (__m512bh)(_mm512_loadu_si512(q + d));
#pragma GCC unroll 16
      for (int i = 0; i < kLanes; ++i) {
        const __m512bh k = (__m512bh)(_mm512_maskz_loadu_epi16(0xffffu, rows[i] + d));
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

#if defined(__AMX_BF16__)
// The same with tiles: K of 16 slots, as it lies, times the queries of up to 16 heads.
template <>
struct Group<Bf16> {
  static constexpr int kRows = 16;
  static constexpr int kSlots = 2 * kRows;

  int size;
  int head_size;
  int columns;  // heads that are multiplied together
  Bf16* query;  // [subsets, D / 2, columns, 2]
  Bf16* keys;   // [kSlots, D]: of slots that are not contiguous
  float* dots;  // [subsets, kTile, columns]

  static int subsets(int size) { return (size + kRows - 1) / kRows; }
  static int columns_of(int size) { return (size + subsets(size) - 1) / subsets(size); }
  static int64_t floats(int size, int head_size) {
    const int columns = subsets(size) * columns_of(size);
    return (columns + kSlots) * head_size / 2 + kTile * columns + 64;
  }

  // `source`: [G, D].
  void set(float* memory, int size_, int head_size_, const Bf16* source) {
    size = size_;
    head_size = head_size_;
    columns = columns_of(size);
    dots = memory;
    query = reinterpret_cast<Bf16*>(dots + kTile * columns * subsets(size) + 64);
    keys = query + subsets(size) * columns * head_size;
    for (int g = 0; g < subsets(size) * columns; ++g) {
      Bf16* to = query + g / columns * columns * head_size + g % columns * 2;
      for (int d = 0; d < head_size; d += 2, to += 2 * columns) {
        to[0] = g < size ? source[g * head_size + d] : Bf16{0};
        to[1] = g < size ? source[g * head_size + d + 1] : Bf16{0};
      }
    }
  }

  // Sets the tile registers' shapes while it lives. 0 and 1 are products, [16, columns]; 2 and 3
  // are K, [16, 32], and 4 is queries, [16, columns, 2]; 5, 6 and 7 are the same for D = 16.
  struct Tiles {
    explicit Tiles(int size) {
      const auto bytes = static_cast<uint16_t>(4 * columns_of(size));
      alignas(64) struct {
        uint8_t palette = 1, start_row = 0, reserved[14] = {};
        uint16_t row_bytes[16] = {};
        uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16, 8};
      } shapes;
      const uint16_t row_bytes[8] = {bytes, bytes, 64, 64, bytes, 32, 32, bytes};
      std::copy(row_bytes, row_bytes + 8, shapes.row_bytes);
      _tile_loadconfig(&shapes);
    }
    ~Tiles() { _tile_release(); }
    Tiles(const Tiles&) = delete;
    Tiles& operator=(const Tiles&) = delete;
  };

  // K [kSlots, D] q^T [D, columns] for slots of a tile from `start` on, kept until spread(). Two
  // products are computed at once, for each alone would wait for its own last sum.
  template <class S>
  void dot(const S* const* rows, int start, bool together, float*, int64_t) const {
    const Bf16* low = contiguous(rows + start, together, keys);  // [kRows, D]
    const Bf16* high = contiguous(rows + start + kRows, together, keys + kRows * head_size);
    for (int s = 0; s < subsets(size); ++s) {
      const Bf16* q = query + s * columns * head_size;  // [D / 2, columns, 2]
      _tile_zero(0);
      _tile_zero(1);
      int d = 0;
      for (; d + 32 <= head_size; d += 32, q += 32 * columns) {
        _tile_loadd(4, q, columns * 4);
        _tile_loadd(2, low + d, head_size * 2);
        _tile_dpbf16ps(0, 2, 4);
        _tile_loadd(3, high + d, head_size * 2);
        _tile_dpbf16ps(1, 3, 4);
      }
      if (d < head_size) {
        _tile_loadd(7, q, columns * 4);
        _tile_loadd(5, low + d, head_size * 2);
        _tile_dpbf16ps(0, 5, 7);
        _tile_loadd(6, high + d, head_size * 2);
        _tile_dpbf16ps(1, 6, 7);
      }
      float* to = dots + (s * kTile + start) * columns;  // [kSlots, columns]
      _tile_stored(0, to, columns * 4);
      _tile_stored(1, to + kRows * columns, columns * 4);
    }
  }

  // K of kRows slots, [kRows, D]; where pages differ, some are not attended to, or elements are
  // smaller, a copy.
  template <class S>
  const Bf16* contiguous(const S* const* rows, bool together, Bf16* copy) const {
    if constexpr (std::is_same<S, Bf16>::value) {
      if (together && rows[kRows - 1] - rows[0] == (kRows - 1) * head_size) return rows[0];
      for (int j = 0; j < kRows; ++j) std::memcpy(copy + j * head_size, rows[j], head_size * 2);
    } else {
      for (int j = 0; j < kRows; ++j) widened(rows[j], copy + j * head_size, head_size);
    }
    return copy;
  }

  // Transposes the products of `count` slots from [slots, columns] to [G, count] of [G, stride].
  void spread(int count, float* to, int64_t stride) const {
    const __m512i steps =
        _mm512_mullo_epi32(_mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15),
                           _mm512_set1_epi32(columns));
    for (int g = 0; g < size; ++g) {
      const float* from = dots + g / columns * kTile * columns;
      const __m512i index = _mm512_add_epi32(steps, _mm512_set1_epi32(g % columns));
      for (int i = 0; i < count; i += kRows, from += kRows * columns) {
        put(to + g * stride + i, columns <= 4 ? pick(from, index) : gather(from, index));
      }
    }
  }

  // Numbers at 16 places among 64. Indices are those of products; what follows them is not used.
  static Floats pick(const float* from, __m512i index) {
    const __m512 low = _mm512_permutex2var_ps(load(from), index, load(from + 16));
    const __m512 high = _mm512_permutex2var_ps(load(from + 32), index, load(from + 48));
    return _mm512_mask_blend_ps(_mm512_cmplt_epi32_mask(index, _mm512_set1_epi32(32)), high, low);
  }
  static Floats gather(const float* from, __m512i index) {
    return _mm512_i32gather_ps(index, from, 4);
  }
};
#endif

}  // namespace h2o
