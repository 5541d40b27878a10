// The page layout (see cache.py) and the requests of a step (see batch.py), for all kernels.
//
//   row = (block, KV head):  K [N, D] | V [N, D] | score [N] float32 | position [N] int32
#pragma once

#include <cstdint>

#include "simd.h"

extern "C" {

enum H2oType : int32_t { kFloat = 0, kBf16 = 1, kHalf = 2 };

// One layer's pages.
struct H2oCache {
  char* base;
  int64_t row_bytes;
  int32_t num_kv_heads;
  int32_t block_size;
  int32_t head_size;
  int32_t type;
};

// A step's tensors; strides are in elements, from token to token.
struct H2oTokens {
  const char* query;
  const char* key;
  const char* value;
  char* out;
  const float* first;  // [T, H], or null: zero
  int64_t query_stride;
  int64_t key_stride;
  int64_t value_stride;
  int64_t out_stride;
  int32_t num_heads;
  int32_t out_type;
  float scale;
};

struct H2oScoring {
  int32_t power;
  int32_t skip_recent;
  int32_t by_page;
  int32_t by_age;
};
}

namespace h2o {

// What one KV head holds of one request.
template <class T>
struct Strip {
  char* base;  // of this head's row of block 0
  int64_t block_bytes;
  const int32_t* table;
  int32_t block_size;
  int32_t head_size;

  Strip(const H2oCache& page, const int32_t* table_, int head)
      : base(page.base + head * page.row_bytes),
        block_bytes(page.row_bytes * page.num_kv_heads),
        table(table_),
        block_size(page.block_size),
        head_size(page.head_size) {}

  char* row(int64_t page) const { return base + table[page] * block_bytes; }
  int64_t value_offset() const {
    return static_cast<int64_t>(block_size) * head_size * static_cast<int64_t>(sizeof(T));
  }
  float* scores(int64_t page) const {
    return reinterpret_cast<float*>(row(page) + 2 * value_offset());
  }
  int32_t* positions(int64_t page) const {
    return reinterpret_cast<int32_t*>(row(page) + 2 * value_offset()) + block_size;
  }
  T* key(int64_t slot) const {
    return reinterpret_cast<T*>(row(slot / block_size)) + slot % block_size * head_size;
  }
  T* value(int64_t slot) const { return key(slot) + static_cast<int64_t>(block_size) * head_size; }

  void store(int64_t slot, const T* key_, const T* value_, float score, int64_t position) const {
    std::memcpy(key(slot), key_, head_size * sizeof(T));
    std::memcpy(value(slot), value_, head_size * sizeof(T));
    scores(slot / block_size)[slot % block_size] = score;
    positions(slot / block_size)[slot % block_size] = static_cast<int32_t>(position);
  }
};

// Writes [0, size) of x, times a factor, in the type of the step's outputs.
inline void put_out(char* to, int32_t type, const float* x, int size, float factor) {
  for (int d = 0; d < size; d += kLanes) {
    const Floats scaled = load(x + d) * all(factor);
    if (type == kFloat) put(reinterpret_cast<float*>(to) + d, scaled);
    if (type == kBf16) put(reinterpret_cast<Bf16*>(to) + d, scaled);
    if (type == kHalf) put(reinterpret_cast<Half*>(to) + d, scaled);
  }
}

inline int64_t out_bytes(const H2oTokens& tokens) { return tokens.out_type == kFloat ? 4 : 2; }

inline int64_t round_up(int64_t x, int64_t to) { return (x + to - 1) / to * to; }

}  // namespace h2o
