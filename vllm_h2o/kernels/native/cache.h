// SPDX-License-Identifier: Apache-2.0
// The page layout (see cache.py), and what kernels read and write of a step's tensors.
//
//   row = (block, KV head):  K [N, D] | V [N, D] | score [N] float32 | position [N] int32
//                            [| mass [N] float32] [| score_without_window [N] float32]
#pragma once

#include "layout.h"
#include "simd.h"

namespace h2o {

static_assert(kHeadMultiple % kLanes == 0, "a head is made of whole vectors");

// Zeros of any type, read in the place of a slot that is not attended to.
namespace {
[[maybe_unused]] alignas(64) const char kZeros[4 * kLargestHead] = {};
}  // namespace

// Calls f(T(), S()) with T the type of a step's tensors and S the cache's: the same, or float8.
template <class F>
void with_types(int32_t tensors_type, int32_t cache_type, F f) {
  const auto with = [&](auto t) {
    if (cache_type == tensors_type) f(t, t);
    if (cache_type == kE4m3) f(t, E4m3());
    if (cache_type == kE5m2) f(t, E5m2());
  };
  if (tensors_type == kFloat) with(float());
  if (tensors_type == kBf16) with(Bf16());
  if (tensors_type == kHalf) with(Half());
}

// One KV head's tokens of one request, in elements of S: slot s is in the head's page s / N,
// which is a row of a block of its own, or, where heads share slots, one of rows that follow one
// another.
template <class S>
struct Strip {
  char* base;  // of this head's row of block 0; where heads share slots, of block 0
  int64_t row_bytes;
  int64_t block_bytes;
  const int32_t* block_table;
  int32_t block_size;
  int32_t head_size;
  int32_t first_row;       // of the request's, where heads share slots
  int32_t rows_per_block;  // 0 where they do not
  bool has_mass;
  bool keeps_scores;  // those without the observation window: they move, and nothing else here
  float key_factor;
  float value_factor;

  // `first_rows`: [H + 1] of the request, or null.
  Strip(const H2oCache& cache, const int32_t* blocks, int head, const int32_t* first_rows = nullptr)
      : base(cache.base + (first_rows ? 0 : (cache.first_head + head) * cache.row_bytes)),
        row_bytes(cache.row_bytes),
        block_bytes(cache.row_bytes * cache.rows_per_block),
        block_table(blocks),
        block_size(cache.block_size),
        head_size(cache.head_size),
        first_row(first_rows ? first_rows[head] : 0),
        rows_per_block(first_rows ? cache.rows_per_block : 0),
        has_mass(cache.has_mass != 0),
        keeps_scores(cache.keeps_scores != 0),
        key_factor(cache.key_factor),
        value_factor(cache.value_factor) {}

  char* row(int64_t page) const {
    if (!rows_per_block) return base + block_table[page] * block_bytes;
    const int32_t at = first_row + static_cast<int32_t>(page);
    return base + block_table[at / rows_per_block] * block_bytes + at % rows_per_block * row_bytes;
  }
  // Bytes from a row's K to its V.
  int64_t value_offset() const {
    return static_cast<int64_t>(block_size) * head_size * static_cast<int64_t>(sizeof(S));
  }
  // [N]
  float* scores(int64_t page) const {
    return reinterpret_cast<float*>(row(page) + 2 * value_offset());
  }
  // [N]
  int32_t* positions(int64_t page) const {
    return reinterpret_cast<int32_t*>(row(page) + 2 * value_offset()) + block_size;
  }
  // [N], where there are masses.
  float* masses(int64_t page) const { return scores(page) + 2 * block_size; }
  // A token's, where they are kept.
  float* kept_score(int64_t slot) const {
    return scores(slot / block_size) + (2 + has_mass) * block_size + slot % block_size;
  }
  // [D]
  S* key(int64_t slot) const {
    return reinterpret_cast<S*>(row(slot / block_size)) + slot % block_size * head_size;
  }
  // [D]
  S* value(int64_t slot) const { return key(slot) + static_cast<int64_t>(block_size) * head_size; }

  // T is S where a token moves.
  template <class T>
  void store(int64_t slot, const T* new_key, const T* new_value, float score,
             int64_t position) const {
    put_head(key(slot), new_key, key_factor);
    put_head(value(slot), new_value, value_factor);
    scores(slot / block_size)[slot % block_size] = score;
    positions(slot / block_size)[slot % block_size] = static_cast<int32_t>(position);
    if (has_mass) masses(slot / block_size)[slot % block_size] = 1.0f;
  }

 private:
  // [D]
  template <class T>
  void put_head(S* to, const T* from, float factor) const {
    if constexpr (std::is_same<S, T>::value) {
      std::memcpy(to, from, head_size * sizeof(S));
    } else {
      for (int d = 0; d < head_size; d += kLanes) put(to + d, load(from + d) * all(factor));
    }
  }
};

// One head of one token of a query, key or value, [D].
template <class T>
inline const T* head_of(const char* tensor, int64_t token_stride, int64_t token, int64_t head,
                        int64_t head_size) {
  return reinterpret_cast<const T*>(tensor) + token * token_stride + head * head_size;
}

// The factor of a row's weights: 1 / their sum, in which an attention sink takes its part. Weights
// are e^(logit - row_max). `sink`: its logit, or null.
inline float factor_of(float row_sum, float row_max, const float* sink) {
  if (!sink) return 1.0f / row_sum;
  const float above = row_max - *sink;
  if (above >= 0.0f) return 1.0f / (row_sum + exp_of(-above));
  const float weight = exp_of(above);  // of the largest logit, relative to the sink
  return weight / (row_sum * weight + 1.0f);
}

inline int64_t out_bytes(const H2oTensors& tensors) { return tensors.out_type == kFloat ? 4 : 2; }

// Writes one head of one token's output, x [D] times a factor, in the type of the outputs.
inline void put_out(const H2oTensors& tensors, int64_t token, int64_t head, const float* x,
                    int size, float factor) {
  const int32_t type = tensors.out_type;
  char* to = tensors.out + (token * tensors.out_stride + head * size) * out_bytes(tensors);
  for (int d = 0; d < size; d += kLanes) {
    const Floats scaled = load(x + d) * all(factor * tensors.out_scale);
    if (type == kFloat) put(reinterpret_cast<float*>(to) + d, scaled);
    if (type == kBf16) put(reinterpret_cast<Bf16*>(to) + d, scaled);
    if (type == kHalf) put(reinterpret_cast<Half*>(to) + d, scaled);
  }
}

inline int64_t round_up(int64_t x, int64_t to) { return (x + to - 1) / to * to; }

}  // namespace h2o
