// SPDX-License-Identifier: Apache-2.0
// Products of small matrices, C = A B, for the tiles of a prompt: float32, bfloat16, or AMX.
//
// A is [rows, depth], C is [rows, columns] float32; rows are a multiple of kRows, columns of
// kColumns. There are three ways of multiplying:
//
//   Wide         A, B [depth, columns] float32
//   Pairs, Amx   A, B [depth / 2, columns, 2] bfloat16, depth a multiple of kDepth
#pragma once

#include "simd.h"

namespace h2o {

constexpr int kRows = 16;
constexpr int kColumns = 16;
constexpr int kDepth = 32;

template <class Element>
struct Product {
  int64_t depth;
  const Element* a;  // [rows, depth] of [rows, a_stride]
  int64_t a_stride;
  const Element* b;  // [depth, columns] of [depth, b_stride], or in pairs [depth / 2, b_stride, 2]
  int64_t b_stride;
  float* c;  // [rows, columns] of [rows, c_stride]
  int64_t c_stride;
};

// Calls f(row, column) for blocks of M rows and N columns of C.
template <int M, int N, class F>
inline void for_each_block(int64_t rows, int64_t columns, F f) {
  for (int64_t column = 0; column < columns; column += N) {
    for (int64_t row = 0; row < rows; row += M) f(row, column);
  }
}

struct Wide {
  using Element = float;
  static constexpr bool kPaired = false;

  // M rows and N vectors of C are held in registers. Inlined into a larger function, the loop would
  // have fewer of them.
  template <int M, int N>
  __attribute__((noinline)) static void block(const Product<float>& x, int64_t row,
                                              int64_t column) {
    const float* a = x.a + row * x.a_stride;  // [M, depth]
    const float* b = x.b + column;            // [depth, N * kLanes]
    Floats sums[M][N] = {};                   // [M, N * kLanes]
    for (int64_t k = 0; k < x.depth; ++k, b += x.b_stride) {
      Floats right[N];  // row k of B
#pragma GCC unroll 4
      for (int n = 0; n < N; ++n) right[n] = load(b + n * kLanes);
#pragma GCC unroll 8
      for (int m = 0; m < M; ++m) {
        const Floats left = all(a[m * x.a_stride + k]);
#pragma GCC unroll 4
        for (int n = 0; n < N; ++n) sums[m][n] += left * right[n];
      }
    }
#pragma GCC unroll 8
    for (int m = 0; m < M; ++m) {
#pragma GCC unroll 4
      for (int n = 0; n < N; ++n) {
        put(x.c + (row + m) * x.c_stride + column + n * kLanes, sums[m][n]);
      }
    }
  }

  static void multiply(int64_t rows, int64_t columns, const Product<float>& x) {
    constexpr int kM = kLanes == 16 ? 8 : 4;
    const int64_t pairs = columns / (2 * kLanes) * (2 * kLanes);
    for_each_block<kM, 2 * kLanes>(
        rows, pairs, [&](int64_t row, int64_t column) { block<kM, 2>(x, row, column); });
    for (int64_t column = pairs; column < columns; column += kLanes) {
      for (int64_t row = 0; row < rows; row += kM) block<kM, 1>(x, row, column);
    }
  }

  struct Tiles {};
};

#if defined(__AVX512BF16__)
struct Pairs {
  using Element = Bf16;
  static constexpr bool kPaired = true;

  template <int M, int N>
  __attribute__((noinline)) static void block(const Product<Bf16>& x, int64_t row, int64_t column) {
    const Bf16* a = x.a + row * x.a_stride;  // [M, depth]
    const Bf16* b = x.b + column * 2;        // [depth / 2, N * kLanes, 2]
    __m512 sums[M][N] = {};                  // [M, N * kLanes]
    for (int64_t k = 0; k < x.depth; k += 2, b += 2 * x.b_stride) {
      __m512bh right[N];  // rows k and k + 1 of B, in pairs
#pragma GCC unroll 4
      for (int n = 0; n < N; ++n) right[n] = bit_cast<__m512bh>(_mm512_loadu_si512(b + n * 32));
#pragma GCC unroll 8
      for (int m = 0; m < M; ++m) {
        int32_t two;
        std::memcpy(&two, a + m * x.a_stride + k, sizeof(two));
        const __m512bh left = bit_cast<__m512bh>(_mm512_set1_epi32(two));
#pragma GCC unroll 4
        for (int n = 0; n < N; ++n) sums[m][n] = _mm512_dpbf16_ps(sums[m][n], left, right[n]);
      }
    }
#pragma GCC unroll 8
    for (int m = 0; m < M; ++m) {
#pragma GCC unroll 4
      for (int n = 0; n < N; ++n) {
        put(x.c + (row + m) * x.c_stride + column + n * kLanes, sums[m][n]);
      }
    }
  }

  static void multiply(int64_t rows, int64_t columns, const Product<Bf16>& x) {
    const int64_t pairs = columns / 32 * 32;
    for_each_block<8, 32>(rows, pairs,
                          [&](int64_t row, int64_t column) { block<8, 2>(x, row, column); });
    if (pairs == columns) return;
    for (int64_t row = 0; row < rows; row += 8) block<8, 1>(x, row, pairs);
  }

  struct Tiles {};
};
#endif

#if defined(__AMX_BF16__)
struct Amx {
  using Element = Bf16;
  static constexpr bool kPaired = true;

  // Sets the tile registers' shapes while it lives: all have 16 rows of 64 bytes.
  struct Tiles {
    Tiles() {
      alignas(64) struct {
        uint8_t palette = 1, start_row = 0, reserved[14] = {};
        uint16_t row_bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
        uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
      } shapes;
      _tile_loadconfig(&shapes);
    }
    ~Tiles() { _tile_release(); }
    Tiles(const Tiles&) = delete;
    Tiles& operator=(const Tiles&) = delete;
  };

  // Tiles 0 to 3 are C, two by two, each [16, 16]; 4 and 5 are rows of A, each [16, 32]; 6 and 7
  // are columns of B, each [16, 16, 2].
  template <int M, int N>
  static void block(const Product<Bf16>& x, int64_t row, int64_t column) {
    const Bf16* a = x.a + row * x.a_stride;  // [16 * M, depth]
    const Bf16* b = x.b + column * 2;        // [depth / 2, 16 * N, 2]
    const int64_t a_bytes = x.a_stride * 2, b_bytes = x.b_stride * 4, c_bytes = x.c_stride * 4;
    _tile_zero(0);
    if (N > 1) _tile_zero(1);
    if (M > 1) _tile_zero(2);
    if (M > 1 && N > 1) _tile_zero(3);
    for (int64_t k = 0; k < x.depth; k += kDepth, a += kDepth, b += kDepth * x.b_stride) {
      _tile_loadd(4, a, a_bytes);
      _tile_loadd(6, b, b_bytes);
      _tile_dpbf16ps(0, 4, 6);
      if (N > 1) {
        _tile_loadd(7, b + 32, b_bytes);
        _tile_dpbf16ps(1, 4, 7);
      }
      if (M > 1) {
        _tile_loadd(5, a + 16 * x.a_stride, a_bytes);
        _tile_dpbf16ps(2, 5, 6);
        if (N > 1) _tile_dpbf16ps(3, 5, 7);
      }
    }
    float* c = x.c + row * x.c_stride + column;
    _tile_stored(0, c, c_bytes);
    if (N > 1) _tile_stored(1, c + 16, c_bytes);
    if (M > 1) _tile_stored(2, c + 16 * x.c_stride, c_bytes);
    if (M > 1 && N > 1) _tile_stored(3, c + 16 * x.c_stride + 16, c_bytes);
  }

  static void multiply(int64_t rows, int64_t columns, const Product<Bf16>& x) {
    for_each_block<32, 32>(rows, columns, [&](int64_t row, int64_t column) {
      const bool two_rows = row + 32 <= rows, two_columns = column + 32 <= columns;
      if (two_rows && two_columns) block<2, 2>(x, row, column);
      if (two_rows && !two_columns) block<2, 1>(x, row, column);
      if (!two_rows && two_columns) block<1, 2>(x, row, column);
      if (!two_rows && !two_columns) block<1, 1>(x, row, column);
    });
  }
};
#endif

}  // namespace h2o
