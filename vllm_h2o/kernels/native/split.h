// How a decode step's work is split: all slots of all requests and KV heads in a row, cut into
// splits of equal length, one for each thread. A strip may lie in several.
#pragma once

#include <algorithm>

#include "decode.h"

namespace h2o {

// Slots [begin, end) of a strip, which lie in one split, and what is computed of them.
struct Part {
  int request = -1;
  int head = 0;
  int64_t begin = 0;
  int64_t end = 0;
  int64_t strip_len = 0;  // slots of the whole strip
  Lowest lowest;
  float* weights = nullptr;      // [G, stride]: e^(logit - row_max)
  float* row_max = nullptr;      // [G]
  float* row_sum = nullptr;      // [G], of the weights
  float* factor = nullptr;       // [G]: weights times factor are probabilities
  float* partial_out = nullptr;  // [G, D]: sum of weights times V

  bool whole() const { return begin == 0 && end == strip_len; }
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

// What lies between two cuts. Only strips at its ends can lie in other splits, too: their parts
// are kept until those are computed.
struct Split {
  Cut begin;
  Cut end;
  Part kept[2];
  int num_kept = 0;
};

// The slots of a batch, and where to cut them.
struct Work {
  const H2oBatch& batch;
  int num_kv_heads;
  int64_t unit;           // slots: cuts within a strip lie at multiples of it
  int64_t num_slots = 0;  // of all requests, in one KV head
  int64_t max_strip_len = 0;

  Work(const H2oBatch& batch_, int num_kv_heads_, int64_t unit_)
      : batch(batch_), num_kv_heads(num_kv_heads_), unit(unit_) {
    for (int b = 0; b < batch.num_requests; ++b) {
      num_slots += batch.field(kAttendedLen, b);
      max_strip_len = std::max(max_strip_len, batch.field(kAttendedLen, b));
    }
  }

  // The cut before split i: at a strip's edge if one is near.
  Cut cut(int i, int num_kv_splits) const {
    const int64_t total = num_slots * num_kv_heads;
    int64_t left = i == num_kv_splits ? total : total * i / num_kv_splits;
    const int64_t near = std::max<int64_t>(unit, total / num_kv_splits / 32);
    for (int b = 0; b < batch.num_requests; ++b) {
      const int64_t length = batch.field(kAttendedLen, b);
      if (left >= length * num_kv_heads) {
        left -= length * num_kv_heads;
        continue;
      }
      const int head = static_cast<int>(left / length);
      const int64_t slot = (left % length + unit / 2) / unit * unit;
      if (slot < near) return {b, head, 0};
      if (slot + near <= length) return {b, head, slot};
      return head + 1 < num_kv_heads ? Cut{b, head + 1, 0} : Cut{b + 1, 0, 0};
    }
    return {batch.num_requests, 0, 0};
  }
};

}  // namespace h2o
