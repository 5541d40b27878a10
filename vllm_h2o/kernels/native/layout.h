// SPDX-License-Identifier: Apache-2.0
// The structs that Python hands over and the constants that it knows. layout.py has the same; the
// loader compares the two with the help of layout.cpp, so a field must be changed in all three.
#pragma once

#include <cstdint>

// Element types of the cache, of a step's tensors and of outputs. Only a cache has the last two.
enum H2oType : int32_t { kFloat = 0, kBf16 = 1, kHalf = 2, kE4m3 = 3, kE5m2 = 4 };

// Head sizes are multiples of the one and at most the other.
constexpr int kHeadMultiple = 16;
constexpr int kLargestHead = 1024;

// Rows of H2oBatch::fields, named as batch.py names them.
enum H2oDecodeField : int32_t {
  kToken,
  kAttendedLen,
  kOverwrites,
  kSelects,
  kLogicalStart,
  kRecentStart,
  kNumSinks,
  kScores,
  kSplit,
  kNumDecodeFields
};

extern "C" {

// One layer's pages.
struct H2oCache {
  char* base;
  int32_t* first_rows;  // [num_blocks, H + 1], or null: no request's heads share slots
  int64_t row_bytes;
  int32_t num_kv_heads;
  int32_t rows_per_block;
  int32_t first_head;     // of a block's rows
  int32_t shared_tenths;  // of slots that heads share: by how many of the best tokens each has
  int32_t block_size;
  int32_t head_size;
  int32_t type;
  int32_t has_mass;
  int32_t keeps_scores;
  float key_factor;  // of K as it is stored: 1 / scale; one but for float8
  float value_factor;
};

// A step's tensors; strides are in elements, from token to token.
struct H2oTensors {
  const char* query;         // [T, Hq, D]
  const char* key;           // [T, H, D]
  const char* value;         // [T, H, D]
  char* out;                 // [T, Hq, D]
  const float* sink_logits;  // [Hq], of terms also [T, Hq]; or null: no attention sinks
  int64_t query_stride;
  int64_t key_stride;
  int64_t value_stride;
  int64_t out_stride;
  int64_t sink_stride;  // 0: [Hq]
  int32_t num_heads;
  int32_t type;  // of query, key and value
  int32_t out_type;
  float scale;      // of the products with K as it is stored
  float out_scale;  // of the sums of V as it is stored
};

// How the queries of decode steps score, and how tokens are ranked.
struct H2oScoring {
  int32_t power;
  int32_t by_age;
  int32_t by_page;
  float merge;
};

// A term of the ranking that is added when a chunk of the prompt is stored: policy/ranking.py.
struct H2oTerm {
  int32_t power;
  int32_t by_maximum;
  int32_t reach;
  int32_t skip;
  int32_t sees_later;
  int32_t by_age;
  float weight;
};

// B requests with one new token each.
struct H2oBatch {
  const int32_t* block_table;  // [B, P]
  const int64_t* fields;       // [kNumDecodeFields, B]
  int64_t table_stride;        // from request to request
  int64_t field_stride;        // from row to row
  int64_t request_stride;      // within a row
  int32_t num_requests;

  int64_t field(H2oDecodeField row, int request) const {
    return fields[row * field_stride + request * request_stride];
  }
  const int32_t* blocks(int request) const { return block_table + request * table_stride; }
};

// T tokens of one prompt.
struct H2oChunk {
  const int32_t* block_table;
  float* window_scores;  // [H, attended_len], takes a term's values; null: pages do
  int64_t token_start;   // row of the first token in the step's tensors
  int64_t num_tokens;
  int64_t resident_start;
  int64_t logical_start;
  int64_t first_scoring_query;
  int64_t first_scored_slot;

  int64_t attended_len() const { return resident_start + num_tokens; }
  int64_t logical_end() const { return logical_start + num_tokens; }
};

// A request whose survivors are packed.
struct H2oPacked {
  const int32_t* block_table;
  int64_t attended_len;
  int64_t num_survivors;
  int64_t recent_start;
  int64_t num_sinks;
  int64_t logical_end;
  int64_t splits;
};

// Compilers call these for `#pragma omp parallel` and `#pragma omp barrier`. All null: one thread.
struct H2oRuntime {
  void (*parallel)(void (*body)(void*), void* data, unsigned num_threads, unsigned flags);
  void (*barrier)();
  int (*max_threads)();
  int (*thread)();
  int (*num_threads)();
};
}
