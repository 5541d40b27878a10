// Arithmetic of one request's new token in one KV head: weighted sums, scores, the victim.
#pragma once

#include <algorithm>

#include "cache.h"
#include "slots.h"

namespace h2o {

// out[g, d...] += sum over slots p[g, slot] V[slot, d...], for H queries and W vectors of d; lines
// of `next` are prefetched.
template <int H, int W, class T>
inline void add_values(const T* const* rows, const T* const* next, int count, const float* p,
                       int64_t stride, float* out, int head_size, int d) {
  Floats sums[H][W] = {};
  for (int i = 0; i < count; ++i) {
    const T* row = rows[i] + d;
    for (int byte = 0; byte < W * kLanes * static_cast<int>(sizeof(T)); byte += 64) {
      __builtin_prefetch(reinterpret_cast<const char*>(next[i] + d) + byte);
    }
    Floats v[W];
    if constexpr (W == 1) {
      v[0] = load(row);
    } else {
#pragma GCC unroll 4
      for (int w = 0; w < W; w += 2) load_two(row + w * kLanes, v[w], v[w + 1]);
    }
#pragma GCC unroll 4
    for (int g = 0; g < H; ++g) {
      const Floats weight = all(p[g * stride + i]);
#pragma GCC unroll 4
      for (int w = 0; w < W; ++w) sums[g][w] += weight * v[w];
    }
  }
  for (int g = 0; g < H; ++g) {
    float* to = out + g * head_size + d;
    if constexpr (W == 1) {
      put(to, load(to) + sums[g][0]);
    } else {
      for (int w = 0; w < W; w += 2) {
        add_two<T>(to + w * kLanes, sums[g][w], sums[g][w + 1]);
      }
    }
  }
}

// The same for a whole group: p is [G, stride], out [G, D].
template <class T>
inline void add_values(const T* const* rows, const T* const* next, int count, const float* p,
                       int64_t stride, float* out, int group, int head_size) {
  constexpr int kWide = kLanes == 16 ? 4 : 2;
  for (int d = 0; d < head_size;) {
    const bool wide = d + kWide * kLanes <= head_size;
    for (int g = 0; g < group;) {
      const float* weights = p + g * stride;
      float* to = out + g * head_size;
      const int heads = std::min(group - g, 4);
      const auto add = [&](auto num_heads) {
        constexpr int kHeads = decltype(num_heads)::value;
        if (wide) {
          add_values<kHeads, kWide>(rows, next, count, weights, stride, to, head_size, d);
        } else {
          add_values<kHeads, 1>(rows, next, count, weights, stride, to, head_size, d);
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

// Tokens ranked by the mean: the score divided by the queries since the token was stored.
inline void offer_aged(Lowest& lowest, Candidates candidates, const float* score,
                       const int32_t* position, int count, int64_t first, int64_t end) {
  constexpr int kPiece = 64;
  float mean[kPiece];
  for (int from = 0; from < count; from += kPiece) {
    const int size = std::min(kPiece, count - from);
    for (int i = 0; i < size; ++i) {
      mean[i] = score[from + i] / static_cast<float>(end - position[from + i]);
    }
    offer_run(lowest, candidates, mean, position + from, size, first + from);
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
