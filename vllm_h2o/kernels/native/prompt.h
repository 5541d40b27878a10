// SPDX-License-Identifier: Apache-2.0
// Two stages read prompts, attention and the terms of a ranking. They share K arranged for
// products, tiles of queries, their weights (weigh), and the sums of columns that go to the scores
// (add_columns).
//
// K of a chunk's request is arranged once for each KV head. Then tiles of queries are computed: the
// logits of one tile's rows are held in full, [64, n] float32, which a second-level cache has room
// for, so every product is computed once, and sums of columns, which need each row's final sum, are
// exact. Memory is O(n), never O(n^2). Which thread takes which tile depends on their number alone,
// so the sums do, too.
#pragma once

#include <algorithm>

#include "arrange.h"
#include "cache.h"
#include "multiply.h"
#include "team.h"

namespace h2o {

// Rows of a tile: queries times heads.
constexpr int kMaxRows = 64;

// Rows of queries that see about the same slots: for some heads of a group, some queries each.
struct QueryTile {
  int chunk;
  int head;         // KV head
  int group_begin;  // first query head, within the group
  int num_heads;
  int64_t query_begin;  // within the chunk
};

// A thread's memory for the rows of one tile, which are (head, query).
template <class Element>
struct TileRows {
  float* logits;        // [rows, stride], then weights e^(logit - row_max)
  Element* weights;     // the same as products take them: bfloat16 [rows, stride], or the logits
  Element* query;       // [rows, depth]
  float* out;           // [rows, D]
  float* row_max;       // [rows, kLanes]
  float* factor;        // [rows]: 1 / sum of the weights, and of an attention sink's
  float* contribution;  // [rows]: the factor of a query that scores, 0 of another
};

// Kept from call to call, the same for both stages.
struct PromptMemory {
  Scratch offsets, arranged, column_sums, rows;
};

// This library's own: a process may open several.
namespace {
PromptMemory& prompt_memory() {
  static thread_local PromptMemory memory;
  return memory;
}
}  // namespace

// Chunks that are computed together, with T the type of the step's tensors, S the cache's, and
// products of Multiplier.
template <class T, class S, class Multiplier>
struct Prompt {
  using Type = T;
  using Held = S;
  using Product = Multiplier;
  using Element = typename Multiplier::Element;
  using Rows = TileRows<Element>;
  static constexpr bool kPaired = Multiplier::kPaired;

  const H2oCache& cache;
  const H2oChunk* chunks;
  int num_chunks;
  const H2oTensors& tensors;
  int power;          // of the weights that are added to columns; 0: none are
  bool sees_later;    // whether a query also sees slots after its own
  int group;          // G
  int64_t depth;      // D, rounded up to what products take
  int tile_heads;     // at most
  int tile_queries;   // of each head
  int64_t tile_rows;  // tile_heads * tile_queries

  int64_t* offsets = nullptr;    // [chunks + 1]: of each chunk's slots, all its heads' together
  Element* keys = nullptr;       // [slots / kKeyBlock, depth, kKeyBlock], or in pairs
  Element* values = nullptr;     // [slots, D], or in pairs; only of stages that read V
  float* column_sums = nullptr;  // [threads, slots]
  int64_t stride = 0;            // of a row of logits
  int64_t thread_bytes = 0;
  char* rows_memory = nullptr;

  Prompt(const H2oCache& cache_, const H2oChunk* chunks_, int num_chunks_,
         const H2oTensors& tensors_, int power_, bool sees_later_)
      : cache(cache_),
        chunks(chunks_),
        num_chunks(num_chunks_),
        tensors(tensors_),
        power(power_),
        sees_later(sees_later_),
        group(tensors.num_heads / cache.num_kv_heads),
        depth(kPaired ? round_up(cache.head_size, kDepth) : cache.head_size) {
    const int subsets = (group + 3) / 4;
    tile_heads = (group + subsets - 1) / subsets;
    tile_queries = kMaxRows / kRows / tile_heads * kRows;
    tile_rows = tile_heads * tile_queries;
  }

  // A stage arranges blocks of slots, computes tiles of queries and adds to the scores of blocks.
  template <class Stage>
  void run(const Stage& stage) {
    const int num_threads = max_threads();
    lay_out(num_threads, Stage::kReadsValues);
    auto body = [&](Team team) {
      for_each_block(team, [&](int c, int h, int64_t start) { stage.arrange(c, h, start); });
      if (power) {
        float* sums = column_sums + team.thread * num_slots();
        std::fill(sums, sums + num_slots(), 0.0f);
      }
      team.barrier();
      {
        [[maybe_unused]] typename Multiplier::Tiles tiles;
        for_each_tile(team, [&](const QueryTile& tile) { stage.compute(team.thread, tile); });
      }
      if (!power) return;
      team.barrier();
      for_each_block(
          team, [&](int c, int h, int64_t start) { stage.add_to_scores(team.size, c, h, start); });
    };
    parallel(num_threads, body);
  }

  void lay_out(int num_threads, bool with_values) {
    PromptMemory& memory = prompt_memory();
    offsets = memory.offsets.get<int64_t>(num_chunks + 1);
    offsets[0] = 0;
    int64_t longest = 0;
    for (int c = 0; c < num_chunks; ++c) {
      const int64_t length = round_up(chunks[c].attended_len(), kKeyBlock);
      offsets[c + 1] = offsets[c] + length * cache.num_kv_heads;
      longest = std::max(longest, length);
    }
    const int64_t size = depth + (with_values ? cache.head_size : 0);
    keys = memory.arranged.get<Element>(num_slots() * size);
    values = keys + num_slots() * depth;
    column_sums = memory.column_sums.get<float>(power ? num_slots() * num_threads : 0);
    stride = longest + kLanes;  // no power of two: rows would share cache sets
    const int64_t row_bytes =
        stride * (4 + (kPaired ? 2 : 0)) + (2 * cache.head_size + depth + 64) * 4;
    thread_bytes = round_up(tile_rows * row_bytes, 64);
    rows_memory = memory.rows.get<char>(num_threads * thread_bytes);
  }

  Strip<S> strip(int chunk, int head) const { return {cache, chunks[chunk].block_table, head}; }

  // Slots of all strips, and where a strip's begin among them.
  int64_t num_slots() const { return offsets[num_chunks]; }
  int64_t offset(int chunk, int head) const {
    return offsets[chunk] + head * ((offsets[chunk + 1] - offsets[chunk]) / cache.num_kv_heads);
  }

  // A thread's sums of one tile's columns.
  float* sums_of_tile(int thread, const QueryTile& tile) const {
    return column_sums + thread * num_slots() + offset(tile.chunk, tile.head);
  }

  // f(chunk, head, first of kKeyBlock slots), two blocks in a row for each thread.
  template <class F>
  void for_each_block(Team team, F f) const {
    int64_t n = 0;
    for (int c = 0; c < num_chunks; ++c) {
      for (int h = 0; h < cache.num_kv_heads; ++h) {
        for (int64_t start = 0; start < chunks[c].attended_len(); start += kKeyBlock, ++n) {
          if (n / 2 % team.size == team.thread) f(c, h, start);
        }
      }
    }
  }

  // Tiles in order of their work, to and fro over the threads.
  template <class F>
  void for_each_tile(Team team, F f) const {
    int64_t n = 0;
    for (int c = 0; c < num_chunks; ++c) {
      const int64_t last = (chunks[c].num_tokens - 1) / tile_queries * tile_queries;
      for (int64_t query = last; query >= 0; query -= tile_queries) {
        for (int h = 0; h < cache.num_kv_heads; ++h) {
          for (int g = 0; g < group; g += tile_heads, ++n) {
            const int64_t round = n / team.size, place = n % team.size;
            const int64_t thread = round % 2 ? team.size - 1 - place : place;
            const int num_heads = std::min(tile_heads, group - g);
            if (thread == team.thread) f(QueryTile{c, h, g, num_heads, query});
          }
        }
      }
    }
  }

  // f(row, query head within the group, query within the chunk) for each row of a tile.
  template <class F>
  void for_each_row(const QueryTile& tile, F f) const {
    for (int g = 0; g < tile.num_heads; ++g) {
      for (int i = 0; i < tile_queries; ++i) {
        f(g * tile_queries + i, tile.group_begin + g, tile.query_begin + i);
      }
    }
  }

  Rows rows_of(int thread) const {
    char* memory = rows_memory + thread * thread_bytes;
    Rows x;
    x.logits = reinterpret_cast<float*>(memory);
    x.out = x.logits + tile_rows * stride;
    x.row_max = x.out + tile_rows * cache.head_size;
    x.factor = x.row_max + tile_rows * kLanes;
    x.contribution = x.factor + tile_rows;
    x.query = reinterpret_cast<Element*>(x.contribution + tile_rows);
    x.weights = reinterpret_cast<Element*>(x.logits);
    if constexpr (kPaired) x.weights = x.query + tile_rows * depth;
    return x;
  }

  // rows = at(slot) for slots [start, start + kKeyBlock) of a chunk: addresses, each of [D]. After
  // the chunk's last slot come zeros.
  template <class At>
  void addresses(int chunk, int64_t start, const S** rows, At at) const {
    const S* zeros = reinterpret_cast<const S*>(kZeros);
    const int64_t count = std::min<int64_t>(kKeyBlock, chunks[chunk].attended_len() - start);
    for (int64_t i = 0; i < kKeyBlock; ++i) rows[i] = i < count ? at(start + i) : zeros;
  }

  void arrange_keys(int chunk, int head, int64_t start) const {
    const Strip<S> held = strip(chunk, head);
    const S* rows[kKeyBlock];
    addresses(chunk, start, rows, [&](int64_t slot) { return held.key(slot); });
    Element* to = keys + (offset(chunk, head) + start) * depth;
    h2o::arrange_keys(rows, cache.head_size, depth, to);
  }

  // query [rows, depth]; zeros after the chunk's last query.
  void read_queries(const Rows& x, const QueryTile& tile) const {
    const int size = cache.head_size;
    const H2oChunk& chunk = chunks[tile.chunk];
    for_each_row(tile, [&](int64_t r, int g, int64_t query) {
      Element* to = x.query + r * depth;
      if (query >= chunk.num_tokens || depth != size) std::memset(to, 0, depth * sizeof(Element));
      if (query >= chunk.num_tokens) return;
      const T* from = head_of<T>(tensors.query, tensors.query_stride, chunk.token_start + query,
                                 tile.head * group + g, size);
      if constexpr (kPaired) {
        std::memcpy(to, from, size * sizeof(T));
      } else {
        for (int d = 0; d < size; d += kLanes) put(to + d, load(from + d));
      }
    });
  }

  // Slots that a query of a chunk sees, or the chunk's last where there are fewer queries.
  int64_t num_visible(const H2oChunk& chunk, int64_t query) const {
    if (sees_later) return chunk.attended_len();
    return std::min(chunk.resident_start + query + 1, chunk.attended_len());
  }

  // weights [rows, width] = e^(logit - row_max) of a tile, for products with V, for the scores, or
  // for both, and factor. Returns the width: all slots that a query sees are before it.
  template <bool kMultiplied>
  int64_t weigh(const Rows& x, const QueryTile& tile) const {
    const int64_t last = num_visible(chunks[tile.chunk], tile.query_begin + tile_queries - 1);
    const int64_t width = round_up(last, kKeyBlock);
    read_queries(x, tile);
    multiply_keys(x, tile, width);
    const int64_t num_rows = tile.num_heads * tile_queries;
    for (int64_t r = 0; r < num_rows; ++r) exponentiate<kMultiplied>(x, tile, r, width);
    return width;
  }

  // logits [rows, width] = q [rows, depth] K^T [depth, width], and row_max.
  void multiply_keys(const Rows& x, const QueryTile& tile, int64_t width) const {
    const int64_t num_rows = tile.num_heads * tile_queries;
    const Element* key = keys + offset(tile.chunk, tile.head) * depth;
    std::fill(x.row_max, x.row_max + num_rows * kLanes, -kInfinity);
    for (int64_t slot = 0; slot < width; slot += kKeyBlock) {
      const Element* block = key + slot * depth;  // [depth, kKeyBlock]
      Multiplier::multiply(num_rows, kKeyBlock,
                           {depth, x.query, depth, block, kKeyBlock, x.logits + slot, stride});
      hide_unseen(x, tile, slot);
      for (int64_t r = 0; r < num_rows; ++r) {
        Floats maxima = load(x.row_max + r * kLanes);
        for (int i = 0; i < kKeyBlock; i += kLanes) {
          maxima = larger(maxima, load(x.logits + r * stride + slot + i));
        }
        put(x.row_max + r * kLanes, maxima);
      }
    }
  }

  // Hides what a tile's queries do not see among slots [slot, slot + kKeyBlock).
  void hide_unseen(const Rows& x, const QueryTile& tile, int64_t slot) const {
    const H2oChunk& chunk = chunks[tile.chunk];
    if (slot + kKeyBlock <= num_visible(chunk, tile.query_begin)) return;
    for_each_row(tile, [&](int64_t r, int, int64_t query) {
      float* logits = x.logits + r * stride + slot;  // [kKeyBlock]
      const int64_t start = std::max<int64_t>(num_visible(chunk, query) - slot, 0);
      for (int64_t i = start; i < kKeyBlock; ++i) logits[i] = -kInfinity;
    });
  }

  // The logit of a row's attention sink, or null.
  const float* sink(const QueryTile& tile, int64_t r) const {
    if (!tensors.sink_logits) return nullptr;
    const H2oChunk& chunk = chunks[tile.chunk];
    const int64_t head = tile.head * group + tile.group_begin + r / tile_queries;
    const int64_t query = std::min(tile.query_begin + r % tile_queries, chunk.num_tokens - 1);
    return tensors.sink_logits + (chunk.token_start + query) * tensors.sink_stride + head;
  }

  // One row's logits [width] become weights.
  template <bool kMultiplied>
  void exponentiate(const Rows& x, const QueryTile& tile, int64_t r, int64_t width) const {
    float* logits = x.logits + r * stride;
    Element* weights = x.weights + r * stride;
    const bool keeps_floats = !(kMultiplied && kPaired) || power;
    const Floats scale = all(tensors.scale);
    const float row_max = largest_of(load(x.row_max + r * kLanes)) * tensors.scale;
    const Floats shift = all(row_max);
    Floats sum = {};
    for (int64_t i = 0; i < width; i += kLanes) {
      const Floats p = exp_of(load(logits + i) * scale - shift);
      sum += p;
      if (keeps_floats) put(logits + i, p);
      if constexpr (kMultiplied && kPaired) put(weights + i, p);
    }
    x.factor[r] = factor_of(sum_of(sum), row_max, sink(tile, r));
  }

  // Sets what each row's weights are multiplied by for the scores; whether any query scores.
  bool set_contributions(const Rows& x, const QueryTile& tile) const {
    const H2oChunk& chunk = chunks[tile.chunk];
    bool any = false;
    for_each_row(tile, [&](int64_t r, int, int64_t query) {
      const bool scores = query >= chunk.first_scoring_query && query < chunk.num_tokens;
      x.contribution[r] = scores ? x.factor[r] : 0.0f;
      any |= scores;
    });
    return any;
  }

  // sums [width] += over the rows, (weights [rows, width] * contribution [rows])^power; or they
  // become the largest of those.
  template <bool kByMaximum>
  void add_columns(const Rows& x, const QueryTile& tile, float* sums, int64_t width) const {
    const int64_t num_rows = tile.num_heads * tile_queries;
    const bool squares = power == 2;
    constexpr int kVectors = kKeyBlock / kLanes;
    for (int64_t i = 0; i < width; i += kKeyBlock) {
      Floats columns[kVectors] = {};  // [kKeyBlock]
      for (int64_t r = 0; r < num_rows; ++r) {
        const Floats factor = all(x.contribution[r]);
#pragma GCC unroll 8
        for (int v = 0; v < kVectors; ++v) {
          const Floats p = load(x.logits + r * stride + i + v * kLanes) * factor;
          if constexpr (kByMaximum) {
            columns[v] = larger(columns[v], squares ? p * p : p);
          } else {
            columns[v] += squares ? p * p : p;
          }
        }
      }
      for (int v = 0; v < kVectors; ++v) {
        float* to = sums + i + v * kLanes;
        put(to, kByMaximum ? larger(load(to), columns[v]) : load(to) + columns[v]);
      }
    }
  }

  // One slot's sum over the threads, or the largest.
  float column_sum(int num_threads, int chunk, int head, int64_t slot, bool by_maximum) const {
    const float* sums = column_sums + offset(chunk, head) + slot;
    float sum = 0.0f;
    for (int i = 0; i < num_threads; ++i) {
      const float other = sums[i * num_slots()];
      sum = by_maximum ? std::max(sum, other) : sum + other;
    }
    return sum;
  }
};

}  // namespace h2o
