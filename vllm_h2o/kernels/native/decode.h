// SPDX-License-Identifier: Apache-2.0
// Arithmetic of one request's new token in one KV head: weighted sums, scores, the victim.
#pragma once

#include <algorithm>

#include "cache.h"
#include "slots.h"

namespace h2o {

// out[g, d...] += sum over slots p[g, slot] V[slot, d...], for H queries and W vectors of d; lines
// of `next` are prefetched. `rows` and `next`: [count] addresses of V, each [D].
template <int H, int W, class T>
inline void add_values(const T* const* rows, const T* const* next, int count, const float* p,
                       int64_t stride, float* out, int head_size, int d) {
  Floats sums[H][W] = {};  // [H, W * kLanes] of out
  for (int i = 0; i < count; ++i) {
    const T* row = rows[i] + d;
    for (int byte = 0; byte < W * kLanes * static_cast<int>(sizeof(T)); byte += 64) {
      __builtin_prefetch(reinterpret_cast<const char*>(next[i] + d) + byte);
    }
    Floats v[W];  // [W * kLanes] of V
    if constexpr (W == 1) {
      v[0] = load(row);
    } else {
#pragma GCC unroll 4
      for (int w = 0; w < W; w += 2) load_two(row + w * kLanes, v[w], v[w + 1]);
    }
#pragma GCC unroll 4
    for (int g = 0; g < H; ++g) {
      const Floats weight = all(p[g * stride + i]);  // of p [G, stride]
#pragma GCC unroll 4
      for (int w = 0; w < W; ++w) sums[g][w] += weight * v[w];
    }
  }
  for (int g = 0; g < H; ++g) {
    float* to = out + g * head_size + d;  // of out [G, D]
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

// scores [count] += over the group, (weights [G, stride] * factor [G])^power.
inline void add_scores(const float* weights, int64_t stride, const float* factor, int group,
                       int power, float* scores, int count) {
  const bool squares = power == 2;
  int i = 0;
  for (; i + kLanes <= count; i += kLanes) {
    Floats sum = {};
    for (int g = 0; g < group; ++g) {
      const Floats p = load(weights + g * stride + i) * all(factor[g]);
      sum += squares ? p * p : p;
    }
    put(scores + i, load(scores + i) + sum);
  }
  for (; i < count; ++i) {
    float sum = 0.0f;
    for (int g = 0; g < group; ++g) {
      const float p = weights[g * stride + i] * factor[g];
      sum += squares ? p * p : p;
    }
    scores[i] += sum;
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

// Tokens at positions [begin, end): neither sinks nor recent ones.
struct Candidates {
  int32_t begin;
  int32_t end;

  bool has(int32_t position) const { return position >= begin && position < end; }
};

// Offers the candidates in slots [slot, slot + count), which lie in one page: score and position
// are [count]. Lanes are compared together first.
inline void offer_run(Lowest& lowest, Candidates candidates, const float* score,
                      const int32_t* position, int count, int64_t slot) {
  int i = 0;
  const Ints begin = Ints{} + candidates.begin, end = Ints{} + candidates.end;
  for (; i + kLanes <= count; i += kLanes) {
    const Ints p = load(position + i);
    if (!any_of((p >= begin) & (p < end) & (load(score + i) <= all(lowest.score)))) continue;
    for (int j = i; j < i + kLanes; ++j) {
      if (candidates.has(position[j])) lowest.offer(score[j], position[j], slot + j);
    }
  }
  for (; i < count; ++i) {
    if (candidates.has(position[i])) lowest.offer(score[i], position[i], slot + i);
  }
}

// The same with tokens ranked by the mean: the score divided by the number of queries since the
// token was stored. `logical_end`: one past the newest position.
inline void offer_aged(Lowest& lowest, Candidates candidates, const float* score,
                       const int32_t* position, int count, int64_t slot, int32_t logical_end) {
  constexpr int kPiece = 64;
  float mean[kPiece];
  for (int start = 0; start < count; start += kPiece) {
    const int size = std::min(kPiece, count - start);
    for (int i = 0; i < size; ++i) {
      mean[i] = score[start + i] / static_cast<float>(logical_end - position[start + i]);
    }
    offer_run(lowest, candidates, mean, position + start, size, slot + start);
  }
}

}  // namespace h2o
