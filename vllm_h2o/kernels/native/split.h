// SPDX-License-Identifier: Apache-2.0
// How a decode step's work is split: all slots of all requests and KV heads in a row, cut into
// splits of equal length, one for each thread. A strip may lie in several.
#pragma once

#include <algorithm>

#include "decode.h"
#include "merge.h"

namespace h2o {

// Slots [begin, end) of a strip, which lie in one split, and what is computed of them.
struct Part {
  int request = -1;
  int head = 0;
  int64_t begin = 0;
  int64_t end = 0;
  int64_t strip_len = 0;  // slots of the whole strip
  Lowest lowest;
  Nearest nearest;
  float* weights = nullptr;      // [G, stride]: mass e^(logit - row_max)
  float* extra = nullptr;        // [stride], with masses: products with the victim, then the masses
  float* row_max = nullptr;      // [G]
  float* row_sum = nullptr;      // [G], of the weights
  float* factor = nullptr;       // [G]: weights times factor are probabilities
  float* partial_out = nullptr;  // [G, D]: sum of weights times V
  float* victim = nullptr;       // [2, D], with masses: a copy of its K and V, in their type
  float victim_mass = 0.0f;
  float victim_weight = 0.0f;  // in the mean with the key that takes it in

  bool whole() const { return begin == 0 && end == strip_len; }
  bool has(int64_t slot) const { return slot >= begin && slot < end; }
  bool same_strip(const Part& other) const {
    return request == other.request && head == other.head;
  }
};

// Where one split ends and the next one begins.
struct Cut {
  int request;
  int head;
  int64_t slot;
};

// The slots between two cuts. Only strips at its ends can lie in other splits, too: their parts
// are kept until those are computed.
struct Split {
  Cut begin;
  Cut end;
  Part kept[2];
  int num_kept = 0;
};

// The slots of a batch, and where to cut them.
struct Work {
  const H2oCache& cache;
  const H2oBatch& batch;
  int64_t num_slots = 0;  // of all requests and KV heads
  int64_t max_strip_len = 0;

  Work(const H2oCache& cache_, const H2oBatch& batch_) : cache(cache_), batch(batch_) {
    for (int b = 0; b < batch.num_requests; ++b) {
      num_slots += slots_of(b);
      const int num_lengths = first_rows(b) ? cache.num_kv_heads : 1;
      for (int h = 0; h < num_lengths; ++h) {
        max_strip_len = std::max(max_strip_len, strip_len(b, h));
      }
    }
  }

  // Counts the slots of all KV heads of a request.
  int64_t slots_of(int request) const {
    const int32_t* rows = first_rows(request);
    if (!rows) return batch.field(kAttendedLen, request) * cache.num_kv_heads;
    return static_cast<int64_t>(rows[cache.num_kv_heads] - rows[0]) * cache.block_size;
  }

  // [H + 1] of a request whose heads share slots; else null.
  const int32_t* first_rows(int request) const {
    if (!batch.field(kSplit, request)) return nullptr;
    const int64_t first_block_id = batch.blocks(request)[0];
    return cache.first_rows + first_block_id * (cache.num_kv_heads + 1);
  }

  int64_t strip_len(int request, int head) const {
    const int32_t* rows = first_rows(request);
    if (!rows) return batch.field(kAttendedLen, request);
    return static_cast<int64_t>(rows[head + 1] - rows[head]) * cache.block_size;
  }

  // The cut before split i: at a strip's edge if one is near, or at a multiple of kTile.
  Cut cut(int i, int num_kv_splits) const {
    const int num_kv_heads = cache.num_kv_heads;
    int64_t left = i == num_kv_splits ? num_slots : num_slots * i / num_kv_splits;
    const int64_t near = std::max<int64_t>(kTile, num_slots / num_kv_splits / 32);
    for (int b = 0; b < batch.num_requests; ++b) {
      const int64_t in_request = slots_of(b);
      if (left >= in_request) {
        left -= in_request;
        continue;
      }
      int head = 0;
      for (; left >= strip_len(b, head); ++head) left -= strip_len(b, head);
      const int64_t length = strip_len(b, head);
      const int64_t slot = (left + kTile / 2) / kTile * kTile;
      if (slot < near) return {b, head, 0};
      if (slot + near <= length) return {b, head, slot};
      return head + 1 < num_kv_heads ? Cut{b, head + 1, 0} : Cut{b + 1, 0, 0};
    }
    return {batch.num_requests, 0, 0};
  }
};

}  // namespace h2o
