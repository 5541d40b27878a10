// SPDX-License-Identifier: Apache-2.0
// Products with rows that a 4-bit copy of them does not leave out: see kernels/coarse.py, which has
// the layout of the copy too.
#include <atomic>
#include <cmath>

#include "rows.h"

namespace h2o {
namespace {

constexpr int64_t kGroup = 64;  // columns with one scale
constexpr int64_t kOctets = kGroup / 8;
constexpr int64_t kBlock = 16;  // rows side by side
constexpr int64_t kHalves = kBlock / kLanes;
constexpr int64_t kAhead = 2;  // used rows that are fetched ahead
constexpr int kTokens = 4;     // whose sums fit into registers

struct Copy {
  const uint8_t* codes;  // [blocks, octets, 16, 4]
  const Bf16* scales;    // [blocks, groups, 16]
  const float* cuts;     // [blocks * 16]
};

// A step's tokens; columns of the first three are padded to whole groups.
struct Tokens {
  int8_t* bytes;    // [tokens, groups * 64]: multiples of a group's step
  float* steps;     // [tokens, groups]
  int32_t* totals;  // [tokens, groups]: 8 times the sum of a group's bytes
  float* norms;     // [tokens]
  float* spread;    // [tokens, width], in the order of load_two
  int64_t num_groups;
};

// Rounds one token.
template <class T>
void round_token(const T* x, int64_t width, const Tokens& to, int64_t t) {
  double square = 0.0;
  float* spread = to.spread + t * width;
  int64_t c = 0;
  for (; c + 2 * kLanes <= width; c += 2 * kLanes) {
    Floats a, b;
    load_two(x + c, a, b);
    put(spread + c, a);
    put(spread + c + kLanes, b);
  }
  for (; c < width; ++c) spread[c] = to_float(x[c]);
  for (int64_t g = 0; g < to.num_groups; ++g) {
    int8_t* bytes = to.bytes + (t * to.num_groups + g) * kGroup;
    const int64_t size = std::min(kGroup, width - g * kGroup);
    float values[kGroup] = {}, largest = 0.0f;
    for (int64_t k = 0; k < size; ++k) values[k] = to_float(x[g * kGroup + k]);
    for (int64_t k = 0; k < size; ++k) {
      largest = std::max(largest, std::fabs(values[k]));
      square += static_cast<double>(values[k]) * values[k];
    }
    const float step = largest / 127.0f;
    int32_t total = 0;
    for (int64_t k = 0; k < kGroup; ++k) {
      const float units = step > 0.0f ? std::nearbyint(values[k] / step) : 0.0f;
      bytes[k] = std::fabs(units) <= 127.0f ? static_cast<int8_t>(units) : 0;  // a NaN is not
      total += bytes[k];
    }
    to.steps[t * to.num_groups + g] = step;
    to.totals[t * to.num_groups + g] = 8 * total;
  }
  to.norms[t] = static_cast<float>(std::sqrt(square));
}

// sums[t][row] += codes of one group [8, 16, 4], from the first of kLanes rows on, times bytes
// [64].
template <int kCount>
inline void add_group(const uint8_t* codes, const int8_t* bytes, int64_t stride, Ints* sums) {
#if defined(__AVX512BW__)
  // Two products of a byte with 4 bits, eight times: at most 30,480.
  __m512i low[kCount] = {}, high[kCount] = {};
  for (int64_t c = 0; c < kOctets; ++c) {
    const __m512i both = _mm512_loadu_si512(codes + c * 4 * kBlock);
    const __m512i a = _mm512_and_si512(both, _mm512_set1_epi8(15));
    const __m512i b = _mm512_and_si512(_mm512_srli_epi16(both, 4), _mm512_set1_epi8(15));
    for (int t = 0; t < kCount; ++t) {
      int32_t x[2];
      std::memcpy(x, bytes + t * stride + 8 * c, sizeof(x));
      low[t] = _mm512_add_epi16(low[t], _mm512_maddubs_epi16(a, _mm512_set1_epi32(x[0])));
      high[t] = _mm512_add_epi16(high[t], _mm512_maddubs_epi16(b, _mm512_set1_epi32(x[1])));
    }
  }
  for (int t = 0; t < kCount; ++t) {
    const __m512i ones = _mm512_set1_epi16(1);
    sums[t] += bit_cast<Ints>(_mm512_madd_epi16(low[t], ones));
    sums[t] += bit_cast<Ints>(_mm512_madd_epi16(high[t], ones));
  }
#elif defined(__AVX2__)
  __m256i low[kCount] = {}, high[kCount] = {};
  for (int64_t c = 0; c < kOctets; ++c) {
    __m256i both;
    std::memcpy(&both, codes + c * 4 * kBlock, sizeof(both));
    const __m256i a = _mm256_and_si256(both, _mm256_set1_epi8(15));
    const __m256i b = _mm256_and_si256(_mm256_srli_epi16(both, 4), _mm256_set1_epi8(15));
    for (int t = 0; t < kCount; ++t) {
      int32_t x[2];
      std::memcpy(x, bytes + t * stride + 8 * c, sizeof(x));
      low[t] = _mm256_add_epi16(low[t], _mm256_maddubs_epi16(a, _mm256_set1_epi32(x[0])));
      high[t] = _mm256_add_epi16(high[t], _mm256_maddubs_epi16(b, _mm256_set1_epi32(x[1])));
    }
  }
  for (int t = 0; t < kCount; ++t) {
    const __m256i ones = _mm256_set1_epi16(1);
    sums[t] += bit_cast<Ints>(_mm256_madd_epi16(low[t], ones));
    sums[t] += bit_cast<Ints>(_mm256_madd_epi16(high[t], ones));
  }
#else
  for (int64_t c = 0; c < kOctets; ++c) {
    for (int t = 0; t < kCount; ++t) {
      const int8_t* x = bytes + t * stride + 8 * c;
      for (int row = 0; row < kLanes; ++row) {
        const uint8_t* four = codes + c * 4 * kBlock + 4 * row;
        int32_t sum = 0;
        for (int k = 0; k < 4; ++k) sum += (four[k] & 15) * x[k] + (four[k] >> 4) * x[4 + k];
        sums[t][row] += sum;
      }
    }
  }
#endif
}

// out[t][row] = the estimates of a block's rows, without a bias.
template <int kCount>
inline void estimate(const Copy& copy, const Tokens& x, int64_t block, int64_t first,
                     float (*out)[kBlock]) {
  const uint8_t* codes = copy.codes + block * x.num_groups * kGroup * kBlock / 2;
  const Bf16* scales = copy.scales + block * x.num_groups * kBlock;
  Floats sums[kCount][kHalves] = {};
  for (int64_t g = 0; g < x.num_groups; ++g) {
    for (int64_t h = 0; h < kHalves; ++h) {
      Ints whole[kCount] = {};
      add_group<kCount>(codes + g * kGroup * kBlock / 2 + h * 4 * kLanes,
                        x.bytes + (first * x.num_groups + g) * kGroup, x.num_groups * kGroup,
                        whole);
      const Floats scale = load(scales + g * kBlock + h * kLanes);
      for (int t = 0; t < kCount; ++t) {
        const int64_t at = (first + t) * x.num_groups + g;
        const Floats units = __builtin_convertvector(whole[t] - x.totals[at], Floats);
        sums[t][h] += scale * all(x.steps[at]) * units;
      }
    }
  }
  for (int t = 0; t < kCount; ++t) {
    for (int64_t h = 0; h < kHalves; ++h) put(out[t] + h * kLanes, sums[t][h]);
  }
}

// A row times a token, whose columns are in the order of load_two.
template <class T>
inline float product(const T* row, const float* x, int64_t width) {
  Floats sums[4] = {};
  int64_t c = 0;
  for (; c + 4 * kLanes <= width; c += 4 * kLanes) {
    for (int k = 0; k < 4; k += 2) {
      Floats a, b;
      load_two(row + c + k * kLanes, a, b);
      sums[k] += a * load(x + c + k * kLanes);
      sums[k + 1] += b * load(x + c + (k + 1) * kLanes);
    }
  }
  float sum = sum_of((sums[0] + sums[1]) + (sums[2] + sums[3]));
  for (; c + 2 * kLanes <= width; c += 2 * kLanes) {
    Floats a, b;
    load_two(row + c, a, b);
    sum += sum_of(a * load(x + c) + b * load(x + c + kLanes));
  }
  for (; c < width; ++c) sum += to_float(row[c]) * x[c];
  return sum;
}

template <class T>
inline void put_one(T* to, float x) {
  if constexpr (std::is_same<T, float>::value) *to = x;
  if constexpr (std::is_same<T, Bf16>::value) to->bits = to_bf16(x);
  if constexpr (std::is_same<T, Half>::value) to->bits = to_half(x);
}

// keeps[row] has bit t where token t keeps the row. The rows are those of one block.
template <class T>
inline void keep_rows(const Copy& copy, const Tokens& x, const T* bias, int64_t block,
                      int64_t num_tokens, int64_t num_rows, uint32_t* keeps) {
  const int64_t first = block * kBlock, count = std::min(kBlock, num_rows - first);
  float biases[kBlock] = {}, products[kTokens][kBlock];
  for (int64_t r = 0; bias && r < count; ++r) biases[r] = to_float(bias[first + r]);
  std::fill_n(keeps, kBlock, 0u);
  for (int64_t t = 0; t < num_tokens; t += kTokens) {
    const int64_t left = std::min<int64_t>(kTokens, num_tokens - t);
    if (left == 4) estimate<4>(copy, x, block, t, products);
    if (left == 3) estimate<3>(copy, x, block, t, products);
    if (left == 2) estimate<2>(copy, x, block, t, products);
    if (left == 1) estimate<1>(copy, x, block, t, products);
    for (int64_t k = 0; k < left; ++k) {
      for (int64_t r = 0; r < count; ++r) {
        const bool out = products[k][r] + biases[r] <= -copy.cuts[first + r] * x.norms[t + k];
        keeps[r] |= static_cast<uint32_t>(!out) << (t + k);
      }
    }
  }
}

template <class T>
int64_t up(const T* x, int64_t x_stride, const T* rows, const T* bias, const Copy& copy, T* out,
           int64_t num_tokens, int64_t num_rows, int64_t width) {
  static thread_local Scratch bytes, steps, totals, norms, spread, lists, bits;
  const int64_t num_groups = (width + kGroup - 1) / kGroup;
  const int64_t num_blocks = (num_rows + kBlock - 1) / kBlock;
  const Tokens tokens{bytes.get<int8_t>(num_tokens * num_groups * kGroup),
                      steps.get<float>(num_tokens * num_groups),
                      totals.get<int32_t>(num_tokens * num_groups),
                      norms.get<float>(num_tokens),
                      spread.get<float>(num_tokens * width),
                      num_groups};
  for (int64_t t = 0; t < num_tokens; ++t) round_token(x + t * x_stride, width, tokens, t);
  auto* used = lists.get<int32_t>(num_blocks * kBlock);
  auto* keeps = bits.get<uint32_t>(num_blocks * kBlock);
  std::atomic<int64_t> num_used{0};
  auto body = [&](const Team& team) {
    int64_t begin, end;
    share(num_blocks * kBlock, kBlock, team, begin, end);
    int64_t count = 0;
    int32_t* own = used + begin;
    for (int64_t first = begin; first < end; first += kBlock) {
      keep_rows(copy, tokens, bias, first / kBlock, num_tokens, num_rows, keeps + first);
      for (int64_t i = first; i < first + kBlock; ++i) {
        if (keeps[i]) own[count++] = static_cast<int32_t>(i);
      }
    }
    end = std::min(end, num_rows);
    for (int64_t t = 0; t < num_tokens && begin < end; ++t) {
      std::memset(static_cast<void*>(out + t * num_rows + begin), 0, (end - begin) * sizeof(T));
    }
    for (int64_t u = 0; u < count; ++u) {
      if (u + kAhead < count) fetch(rows + own[u + kAhead] * width, width);
      const int64_t i = own[u];
      for (int64_t t = 0; t < num_tokens; ++t) {
        if (!(keeps[i] >> t & 1u)) continue;
        const float sum = product(rows + i * width, tokens.spread + t * width, width);
        put_one(out + t * num_rows + i, sum + (bias ? to_float(bias[i]) : 0.0f));
      }
    }
    num_used += count;
  };
  parallel(threads_for(num_rows, 128), body);
  return num_used;
}

}  // namespace
}  // namespace h2o

extern "C" {

// Rows that are read. At most 32 tokens.
int64_t h2o_up(int32_t type, const void* x, int64_t x_stride, const void* rows, const void* bias,
               const uint8_t* codes, const void* scales, const float* cuts, void* out,
               int64_t num_tokens, int64_t num_rows, int64_t width) {
  int64_t used = 0;
  const h2o::Copy copy{codes, static_cast<const h2o::Bf16*>(scales), cuts};
  h2o::with_type(type, [&](auto t) {
    using T = const decltype(t);
    used = h2o::up(static_cast<T*>(x), x_stride, static_cast<T*>(rows), static_cast<T*>(bias), copy,
                   static_cast<decltype(t)*>(out), num_tokens, num_rows, width);
  });
  return used;
}
}
