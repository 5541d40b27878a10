// SPDX-License-Identifier: Apache-2.0
// Vectors of floats in the widest registers that the compiler was told of.
//
// Written with the vector extensions of GCC and Clang, so one source serves SSE2, AVX2, AVX-512 and
// NEON; intrinsics are used only where those extensions cannot name the instruction.
#pragma once

#include <cstdint>
#include <cstring>
#include <limits>
#include <type_traits>

#if defined(__x86_64__)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

namespace h2o {

#if defined(__AVX512F__)
constexpr int kLanes = 16;
#elif defined(__AVX2__)
constexpr int kLanes = 8;
#else
constexpr int kLanes = 4;
#endif

typedef float Floats __attribute__((vector_size(4 * kLanes)));
typedef int32_t Ints __attribute__((vector_size(4 * kLanes)));
typedef uint32_t Words __attribute__((vector_size(4 * kLanes)));
typedef uint16_t Shorts __attribute__((vector_size(2 * kLanes)));
typedef uint8_t Bytes __attribute__((vector_size(kLanes)));

// Element types, which only load() and put() interpret. The last two are of a cache alone: a sign,
// an exponent of 4 or 5 bits, and 3 or 2 bits more. The first of them has no infinity.
struct Bf16 {
  uint16_t bits;
};
struct Half {
  uint16_t bits;
};
struct E4m3 {
  uint8_t bits;
};
struct E5m2 {
  uint8_t bits;
};

constexpr float kInfinity = std::numeric_limits<float>::infinity();

template <class To, class From>
inline To bit_cast(From from) {
  static_assert(sizeof(To) == sizeof(From), "sizes differ");
  To to;
  std::memcpy(&to, &from, sizeof(to));
  return to;
}

inline Floats all(float x) {
#if defined(__AVX512F__)
  return _mm512_set1_ps(x);
#elif defined(__AVX2__)
  return _mm256_set1_ps(x);
#else
  return Floats{x, x, x, x};
#endif
}

inline Floats larger(Floats a, Floats b) {
#if defined(__AVX512F__)
  return _mm512_max_ps(a, b);
#elif defined(__AVX2__)
  return _mm256_max_ps(a, b);
#else
  return a > b ? a : b;
#endif
}

inline Floats load(const float* from) {
  Floats to;
  std::memcpy(&to, from, sizeof(to));
  return to;
}

inline Ints load(const int32_t* from) {
  Ints to;
  std::memcpy(&to, from, sizeof(to));
  return to;
}

inline Shorts load_shorts(const uint16_t* from) {
  Shorts shorts;
  std::memcpy(&shorts, from, sizeof(shorts));
  return shorts;
}

inline Shorts load_bytes(const uint8_t* from) {
  Bytes bytes;
  std::memcpy(&bytes, from, sizeof(bytes));
  return __builtin_convertvector(bytes, Shorts);
}

inline Floats load(const Bf16* from) {
  return bit_cast<Floats>(__builtin_convertvector(load_shorts(&from->bits), Words) << 16);
}

inline Floats from_halves(Shorts halves) {
#if defined(__AVX512F__)
  return _mm512_cvtph_ps(bit_cast<__m256i>(halves));
#elif defined(__F16C__)
  return _mm256_cvtph_ps(bit_cast<__m128i>(halves));
#else
  const Words h = __builtin_convertvector(halves, Words);
  const Words magnitude = (h & 0x7fffu) << 13;
  // A power of two moves the exponent to where float has it, subnormal numbers included.
  const Words scaled = bit_cast<Words>(bit_cast<Floats>(magnitude) * all(0x1p112f));
  const Words special = magnitude | 0x7f800000u;
  const Words is_special = bit_cast<Words>((h & 0x7c00u) == 0x7c00u);
  return bit_cast<Floats>(((h & 0x8000u) << 16) | (is_special & special) | (~is_special & scaled));
#endif
}

inline Floats load(const Half* from) { return from_halves(load_shorts(&from->bits)); }

// The upper half of a half.
inline Floats load(const E5m2* from) { return from_halves(load_bytes(&from->bits) << 8); }

// A half with its exponent 8 too low. Its largest number is 448; what would be 480 is a NaN.
inline Floats load(const E4m3* from) {
  const Shorts bytes = load_bytes(&from->bits);
  const Floats x = from_halves((bytes & 0x80) << 8 | (bytes & 0x7f) << 7) * all(256.0f);
  const Floats nan = all(std::numeric_limits<float>::quiet_NaN());
#if defined(__AVX512F__)
  const __mmask16 is_number =
      _mm512_cmp_ps_mask(_mm512_abs_ps(x), _mm512_set1_ps(480.0f), _CMP_NEQ_UQ);
  return _mm512_mask_mov_ps(nan, is_number, x);
#else
  return (x == all(480.0f)) | (x == all(-480.0f)) ? nan : x;
#endif
}

inline void put(float* to, Floats from) { std::memcpy(to, &from, sizeof(from)); }

// Two vectors' worth of elements, in an order that is cheap: see add_two.
template <class T>
inline void load_two(const T* from, Floats& a, Floats& b) {
  a = load(from);
  b = load(from + kLanes);
}

// Even and odd ones: a bfloat16 is the upper half of a float.
inline void load_two(const Bf16* from, Floats& a, Floats& b) {
  Words pairs;
  std::memcpy(&pairs, from, sizeof(pairs));
  a = bit_cast<Floats>(pairs << 16);
  b = bit_cast<Floats>(pairs & 0xffff0000u);
}

// to[...] += a and b, which are in the order of load_two for elements T.
template <class T>
inline void add_two(float* to, Floats a, Floats b) {
  if constexpr (std::is_same<T, Bf16>::value) {
    Floats low, high;
#if defined(__AVX512F__)
    const __m512i index = _mm512_setr_epi32(0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23);
    low = _mm512_permutex2var_ps(a, index, b);
    high = _mm512_permutex2var_ps(a, _mm512_add_epi32(index, _mm512_set1_epi32(8)), b);
#else
    for (int i = 0; i < kLanes / 2; ++i) {
      low[2 * i] = a[i];
      low[2 * i + 1] = b[i];
      high[2 * i] = a[kLanes / 2 + i];
      high[2 * i + 1] = b[kLanes / 2 + i];
    }
#endif
    a = low;
    b = high;
  }
  put(to, load(to) + a);
  put(to + kLanes, load(to + kLanes) + b);
}

// Round to nearest, ties to even; a NaN stays one.
inline uint16_t to_bf16(float x) {
  const uint32_t bits = bit_cast<uint32_t>(x);
  if ((bits & 0x7fffffffu) > 0x7f800000u) return static_cast<uint16_t>((bits >> 16) | 0x40u);
  return static_cast<uint16_t>((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16);
}

inline uint16_t to_half(float x) {
  const uint32_t bits = bit_cast<uint32_t>(x);
  const uint32_t sign = (bits >> 16) & 0x8000u;
  const uint32_t magnitude = bits & 0x7fffffffu;
  if (magnitude > 0x7f800000u) return static_cast<uint16_t>(sign | 0x7e00u);
  if (magnitude >= 0x477ff000u) return static_cast<uint16_t>(sign | 0x7c00u);
  if (magnitude < 0x38800000u) {
    // Adding 0.5 aligns the last bit of a subnormal half with the last bit of the float.
    const float aligned = bit_cast<float>(magnitude) + 0.5f;
    return static_cast<uint16_t>(sign | (bit_cast<uint32_t>(aligned) - 0x3f000000u));
  }
  const uint32_t rounded = magnitude - 0x38000000u + 0xfffu + ((magnitude >> 13) & 1u);
  return static_cast<uint16_t>(sign | (rounded >> 13));
}

inline void put(Bf16* to, Floats from) {
#if defined(__AVX512BF16__)
  const __m256bh rounded = _mm512_cvtneps_pbh(from);
  std::memcpy(to, &rounded, sizeof(rounded));
#else
  for (int i = 0; i < kLanes; ++i) to[i].bits = to_bf16(from[i]);
#endif
}

inline void put(Half* to, Floats from) {
#if defined(__AVX512F__)
  const __m256i rounded = _mm512_cvtps_ph(from, _MM_FROUND_TO_NEAREST_INT);
  std::memcpy(to, &rounded, sizeof(rounded));
#else
  for (int i = 0; i < kLanes; ++i) to[i].bits = to_half(from[i]);
#endif
}

// Elements as bfloat16, which has room for all of a float8: those themselves, or a copy in `room`.
inline const Bf16* widened(const Bf16* from, Bf16*, int) { return from; }
template <class S>
inline const Bf16* widened(const S* from, Bf16* room, int count) {
  for (int i = 0; i < count; i += kLanes) put(room + i, load(from + i));
  return room;
}

// The nearest of `kBits` bits after the exponent, whose bias is kBias; ties to even. What is larger
// than `largest` becomes that; a NaN is all ones.
template <int kBits, int kBias>
inline uint8_t to_float8(float x, float largest) {
  const uint32_t bits = bit_cast<uint32_t>(x);
  const uint32_t sign = (bits >> 24) & 0x80u;
  if (x != x) return static_cast<uint8_t>(sign | 0x7fu);
  float magnitude = bit_cast<float>(bits & 0x7fffffffu);
  if (magnitude > largest) magnitude = largest;
  constexpr uint32_t kOne = 127u << 23, kDropped = 23 - kBits;
  if (magnitude < bit_cast<float>(kOne + ((1 - kBias) * (1 << 23)))) {
    // The last bit of a subnormal one becomes the last bit of the float.
    const float aligner = bit_cast<float>(kOne + ((24 - kBias - kBits) * (1 << 23)));
    return static_cast<uint8_t>(
        sign | (bit_cast<uint32_t>(magnitude + aligner) - bit_cast<uint32_t>(aligner)));
  }
  const uint32_t shifted = bit_cast<uint32_t>(magnitude) - ((127u - kBias) << 23);
  const uint32_t rounded = shifted + (1u << (kDropped - 1)) - 1u + ((shifted >> kDropped) & 1u);
  return static_cast<uint8_t>(sign | (rounded >> kDropped));
}

inline void put(E4m3* to, Floats from) {
  for (int i = 0; i < kLanes; ++i) to[i].bits = to_float8<3, 7>(from[i], 448.0f);
}

inline void put(E5m2* to, Floats from) {
  for (int i = 0; i < kLanes; ++i) to[i].bits = to_float8<2, 15>(from[i], 57344.0f);
}

inline float sum_of(Floats x) {
#if defined(__AVX512F__)
  return _mm512_reduce_add_ps(x);
#else
  float sum = 0.0f;
  for (int i = 0; i < kLanes; ++i) sum += x[i];
  return sum;
#endif
}

// Whether a lane of a comparison holds.
inline bool any_of(Ints x) {
#if defined(__AVX512F__)
  return _mm512_test_epi32_mask(bit_cast<__m512i>(x), bit_cast<__m512i>(x)) != 0;
#elif defined(__AVX2__)
  return _mm256_movemask_ps(bit_cast<__m256>(x)) != 0;
#else
  bool found = false;
  for (int i = 0; i < kLanes; ++i) found |= x[i] != 0;
  return found;
#endif
}

inline float largest_of(Floats x) {
#if defined(__AVX512F__)
  return _mm512_reduce_max_ps(x);
#else
  float largest = x[0];
  for (int i = 1; i < kLanes; ++i) largest = x[i] > largest ? x[i] : largest;
  return largest;
#endif
}

// e^x for x <= 0, to 1.5 units in the last place; exactly 0 below -87, for -infinity too.
//
// e^x = 2^n e^r with n = round(x / ln 2), |r| <= ln 2 / 2. Adding 1.5 * 2^23 rounds to an integer,
// which is then in the lowest bits and is shifted into the exponent.
inline Floats exp_of(Floats x) {
  const Floats shift = all(12582912.0f);
  const Floats clamped = larger(x, all(-87.0f));
  const Floats shifted = clamped * all(1.44269504088896341f) + shift;
  const Floats n = shifted - shift;
  const Floats r = clamped - n * all(0.693359375f) - n * all(-2.12194440e-4f);
  Floats sum = all(1.9875691500e-4f);
  sum = sum * r + all(1.3981999507e-3f);
  sum = sum * r + all(8.3334519073e-3f);
  sum = sum * r + all(4.1665795894e-2f);
  sum = sum * r + all(1.6666665459e-1f);
  sum = sum * r + all(5.0000001201e-1f);
  sum = sum * (r * r) + r + all(1.0f);
  const Words power = bit_cast<Words>(shifted) << 23;
  const Floats result = bit_cast<Floats>(bit_cast<Words>(sum) + power);
#if defined(__AVX512F__)
  return _mm512_maskz_mov_ps(_mm512_cmp_ps_mask(x, all(-87.0f), _CMP_GE_OQ), result);
#else
  return bit_cast<Floats>(bit_cast<Ints>(result) & (x >= all(-87.0f)));
#endif
}

inline float exp_of(float x) { return exp_of(all(x))[0]; }

// Lane i of the result is the sum of the lanes of x[i].
inline Floats sums_of(const Floats (&x)[kLanes]) {
#if defined(__AVX512F__)
  __m512 four[4];
#pragma GCC unroll 4
  for (int i = 0; i < 4; ++i) {
    const __m512 a = x[4 * i], b = x[4 * i + 1], c = x[4 * i + 2], d = x[4 * i + 3];
    const __m512d ab = _mm512_castps_pd(_mm512_unpacklo_ps(a, b) + _mm512_unpackhi_ps(a, b));
    const __m512d cd = _mm512_castps_pd(_mm512_unpacklo_ps(c, d) + _mm512_unpackhi_ps(c, d));
    four[i] =
        _mm512_castpd_ps(_mm512_unpacklo_pd(ab, cd)) + _mm512_castpd_ps(_mm512_unpackhi_pd(ab, cd));
  }
  const __m512 low =
      _mm512_shuffle_f32x4(four[0], four[1], 0x88) + _mm512_shuffle_f32x4(four[0], four[1], 0xdd);
  const __m512 high =
      _mm512_shuffle_f32x4(four[2], four[3], 0x88) + _mm512_shuffle_f32x4(four[2], four[3], 0xdd);
  return _mm512_shuffle_f32x4(low, high, 0x88) + _mm512_shuffle_f32x4(low, high, 0xdd);
#elif defined(__AVX2__)
  __m256 two[2];
#pragma GCC unroll 2
  for (int i = 0; i < 2; ++i) {
    two[i] = _mm256_hadd_ps(_mm256_hadd_ps(x[4 * i], x[4 * i + 1]),
                            _mm256_hadd_ps(x[4 * i + 2], x[4 * i + 3]));
  }
  return _mm256_permute2f128_ps(two[0], two[1], 0x20) +
         _mm256_permute2f128_ps(two[0], two[1], 0x31);
#else
  Floats sums;
  for (int i = 0; i < kLanes; ++i) sums[i] = sum_of(x[i]);
  return sums;
#endif
}

}  // namespace h2o
