// SPDX-License-Identifier: Apache-2.0
// Lists what this library was built with, for the loader to compare with layout.py.

#include "layout.h"

#include <cstddef>

#define H2O_STRUCT(type) {#type, 0, sizeof(type)}
#define H2O_FIELD(type, field) {#type "." #field, offsetof(type, field), sizeof(type::field)}
#define H2O_CONSTANT(name) {#name, name, 0}

extern "C" {

// A struct and its size, a field with its offset and size, or a constant and its value.
struct H2oEntry {
  const char* name;
  int64_t value;
  int64_t size;
};

// The last one has no name.
const H2oEntry* h2o_layout_entries() {
  static const H2oEntry entries[] = {
      H2O_STRUCT(H2oCache),
      H2O_FIELD(H2oCache, base),
      H2O_FIELD(H2oCache, first_rows),
      H2O_FIELD(H2oCache, row_bytes),
      H2O_FIELD(H2oCache, num_kv_heads),
      H2O_FIELD(H2oCache, rows_per_block),
      H2O_FIELD(H2oCache, first_head),
      H2O_FIELD(H2oCache, shared_tenths),
      H2O_FIELD(H2oCache, block_size),
      H2O_FIELD(H2oCache, head_size),
      H2O_FIELD(H2oCache, type),
      H2O_FIELD(H2oCache, has_mass),
      H2O_FIELD(H2oCache, keeps_scores),
      H2O_FIELD(H2oCache, key_factor),
      H2O_FIELD(H2oCache, value_factor),
      H2O_STRUCT(H2oTensors),
      H2O_FIELD(H2oTensors, query),
      H2O_FIELD(H2oTensors, key),
      H2O_FIELD(H2oTensors, value),
      H2O_FIELD(H2oTensors, out),
      H2O_FIELD(H2oTensors, sink_logits),
      H2O_FIELD(H2oTensors, query_stride),
      H2O_FIELD(H2oTensors, key_stride),
      H2O_FIELD(H2oTensors, value_stride),
      H2O_FIELD(H2oTensors, out_stride),
      H2O_FIELD(H2oTensors, sink_stride),
      H2O_FIELD(H2oTensors, num_heads),
      H2O_FIELD(H2oTensors, type),
      H2O_FIELD(H2oTensors, out_type),
      H2O_FIELD(H2oTensors, scale),
      H2O_FIELD(H2oTensors, out_scale),
      H2O_STRUCT(H2oScoring),
      H2O_FIELD(H2oScoring, power),
      H2O_FIELD(H2oScoring, by_age),
      H2O_FIELD(H2oScoring, by_page),
      H2O_FIELD(H2oScoring, merge),
      H2O_STRUCT(H2oTerm),
      H2O_FIELD(H2oTerm, power),
      H2O_FIELD(H2oTerm, by_maximum),
      H2O_FIELD(H2oTerm, reach),
      H2O_FIELD(H2oTerm, skip),
      H2O_FIELD(H2oTerm, sees_later),
      H2O_FIELD(H2oTerm, by_age),
      H2O_FIELD(H2oTerm, weight),
      H2O_STRUCT(H2oBatch),
      H2O_FIELD(H2oBatch, block_table),
      H2O_FIELD(H2oBatch, fields),
      H2O_FIELD(H2oBatch, table_stride),
      H2O_FIELD(H2oBatch, field_stride),
      H2O_FIELD(H2oBatch, request_stride),
      H2O_FIELD(H2oBatch, num_requests),
      H2O_STRUCT(H2oChunk),
      H2O_FIELD(H2oChunk, block_table),
      H2O_FIELD(H2oChunk, window_scores),
      H2O_FIELD(H2oChunk, token_start),
      H2O_FIELD(H2oChunk, num_tokens),
      H2O_FIELD(H2oChunk, resident_start),
      H2O_FIELD(H2oChunk, logical_start),
      H2O_FIELD(H2oChunk, first_scoring_query),
      H2O_FIELD(H2oChunk, first_scored_slot),
      H2O_STRUCT(H2oPacked),
      H2O_FIELD(H2oPacked, block_table),
      H2O_FIELD(H2oPacked, attended_len),
      H2O_FIELD(H2oPacked, num_survivors),
      H2O_FIELD(H2oPacked, recent_start),
      H2O_FIELD(H2oPacked, num_sinks),
      H2O_FIELD(H2oPacked, logical_end),
      H2O_FIELD(H2oPacked, splits),
      H2O_STRUCT(H2oRuntime),
      H2O_FIELD(H2oRuntime, parallel),
      H2O_FIELD(H2oRuntime, barrier),
      H2O_FIELD(H2oRuntime, max_threads),
      H2O_FIELD(H2oRuntime, thread),
      H2O_FIELD(H2oRuntime, num_threads),
      H2O_CONSTANT(kFloat),
      H2O_CONSTANT(kBf16),
      H2O_CONSTANT(kHalf),
      H2O_CONSTANT(kE4m3),
      H2O_CONSTANT(kE5m2),
      H2O_CONSTANT(kHeadMultiple),
      H2O_CONSTANT(kLargestHead),
      H2O_CONSTANT(kToken),
      H2O_CONSTANT(kAttendedLen),
      H2O_CONSTANT(kOverwrites),
      H2O_CONSTANT(kSelects),
      H2O_CONSTANT(kLogicalStart),
      H2O_CONSTANT(kRecentStart),
      H2O_CONSTANT(kNumSinks),
      H2O_CONSTANT(kScores),
      H2O_CONSTANT(kSplit),
      H2O_CONSTANT(kNumDecodeFields),
      {nullptr, 0, 0},
  };
  return entries;
}
}
