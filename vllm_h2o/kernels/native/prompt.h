// Chunks of prompts: store, attend causally, score.
//
//   P = softmax(q K^T * scale + causal); out = P V
//   score[j] += sum over queries and the group P[., j]^power
//
// arXiv 2306.14048, section 2.1. K and V of a chunk's request are brought, once for each KV head,
// into the order that products want them in. Then tiles of queries are worked on: the logits of one
// tile's rows are held in full, [64, n] float32, which a second level cache has room for, so every
// product is computed once and column sums, which need each row's final sum, are exact. Memory is
// O(n), never O(n^2). Which thread takes which tile depends on their number alone, so sums do, too.
//
// The same without the mask, the values and the output asks a chunk's queries again: reference.replay.

#pragma once

#include <algorithm>
#include <type_traits>

#include "multiply.h"
#include "cache.h"
#include "team.h"

extern "C" {

// T tokens of one prompt; fields as in batch.py.
struct H2oChunk {
  const int32_t* table;
  int64_t token;
  int64_t num_tokens;
  int64_t start;
  int64_t position;
  int64_t scores_from;
};
}

namespace h2o {
namespace {

constexpr int kBlock = 32;     // slots that are brought in order together
constexpr int kMaxRows = 64;   // of a tile: queries times heads
constexpr int64_t kMaxSlots = 1 << 15;  // of the chunks that are worked on together, unless it is one

// Rows of queries that see about the same slots: for some heads of a group, some queries each.
struct QueryTile {
  int chunk;
  int head;   // KV head
  int group;  // first query head, within the group
  int heads;
  int64_t query;  // first, within the chunk
};

template <class T, class By>
class Prefill {
  using Element = typename By::Element;

 public:
  Prefill(const H2oCache& page, const H2oChunk* chunks, int num_chunks, const H2oTokens& tokens,
          const H2oScoring& scoring, bool replay, float weight)
      : page_(page),
        chunks_(chunks),
        num_chunks_(num_chunks),
        tokens_(tokens),
        scoring_(scoring),
        replay_(replay),
        weight_(weight),
        group_(tokens.num_heads / page.num_kv_heads),
        depth_(By::kPaired ? round_up(page.head_size, kDepth) : page.head_size) {
    const int subsets = (group_ + 3) / 4;
    heads_ = (group_ + subsets - 1) / subsets;
    queries_ = kMaxRows / kRows / heads_ * kRows;
    rows_ = heads_ * queries_;
  }

  void run() {
    static thread_local Scratch offsets_memory, packed_memory, sums_memory, rows_memory;
    const int num_threads = max_threads();
    offsets_ = offsets_memory.get<int64_t>(num_chunks_ + 1);
    offsets_[0] = 0;
    int64_t longest = 0;
    for (int c = 0; c < num_chunks_; ++c) {
      const int64_t length = round_up(end(chunks_[c]), kBlock);
      offsets_[c + 1] = offsets_[c] + length * page_.num_kv_heads;
      longest = std::max(longest, length);
    }
    const int64_t slots = offsets_[num_chunks_];
    keys_ = packed_memory.get<Element>(slots * (depth_ + page_.head_size));
    values_ = keys_ + slots * depth_;
    received_ = sums_memory.get<float>(scoring_.power ? slots * num_threads : 0);
    stride_ = longest + kLanes;  // no power of two: rows would share cache sets
    thread_bytes_ = round_up(
        rows_ * (stride_ * (4 + (By::kPaired ? 2 : 0)) + (2 * page_.head_size + depth_ + 64) * 4),
        64);
    memory_ = rows_memory.get<char>(num_threads * thread_bytes_);
    auto body = [this](Team team) { work(team); };
    parallel(num_threads, body);
  }

 private:
  static int64_t end(const H2oChunk& chunk) { return chunk.start + chunk.num_tokens; }
  Strip<T> strip(int chunk, int head) const { return {page_, chunks_[chunk].table, head}; }
  // Where a strip's slots begin among those of all strips.
  int64_t offset(int chunk, int head) const {
    return offsets_[chunk] +
           head * ((offsets_[chunk + 1] - offsets_[chunk]) / page_.num_kv_heads);
  }

  void work(Team team) {
    each_block(team, [this](int c, int h, int64_t from) { prepare(c, h, from); });
    if (scoring_.power) {
      float* sums = received_ + team.thread * offsets_[num_chunks_];
      std::fill(sums, sums + offsets_[num_chunks_], 0.0f);
    }
    team.barrier();
    {
      [[maybe_unused]] typename By::Tiles tiles;
      each_tile(team, [this, team](const QueryTile& tile) { attend(team.thread, tile); });
    }
    if (!scoring_.power) return;
    team.barrier();
    each_block(team, [this, team](int c, int h, int64_t from) { score(team.size, c, h, from); });
  }

  template <class F>
  void each_block(Team team, F f) const {
    int64_t n = 0;
    for (int c = 0; c < num_chunks_; ++c) {
      for (int h = 0; h < page_.num_kv_heads; ++h) {
        for (int64_t from = 0; from < end(chunks_[c]); from += kBlock, ++n) {
          if (n / 2 % team.size == team.thread) f(c, h, from);
        }
      }
    }
  }

  // Tiles in order of their work, to and fro over the threads.
  template <class F>
  void each_tile(Team team, F f) const {
    int64_t n = 0;
    for (int c = 0; c < num_chunks_; ++c) {
      const int64_t last = (chunks_[c].num_tokens - 1) / queries_ * queries_;
      for (int64_t query = last; query >= 0; query -= queries_) {
        for (int h = 0; h < page_.num_kv_heads; ++h) {
          for (int g = 0; g < group_; g += heads_, ++n) {
            const int64_t turn = n / team.size, place = n % team.size;
            const int64_t thread = turn % 2 ? team.size - 1 - place : place;
            if (thread == team.thread) f(QueryTile{c, h, g, std::min(heads_, group_ - g), query});
          }
        }
      }
    }
  }

  // Stores the chunk's tokens among slots [from, from + kBlock), and brings all of them in order.
  void prepare(int c, int h, int64_t from) const {
    const H2oChunk& chunk = chunks_[c];
    const Strip<T> held = strip(c, h);
    const int size = page_.head_size;
    const int count = static_cast<int>(std::min<int64_t>(kBlock, end(chunk) - from));
    alignas(64) static const T nothing[1024] = {};  // native.py: LARGEST_HEAD
    const T *keys[kBlock], *values[kBlock];
    for (int i = 0; i < count; ++i) {
      const int64_t slot = from + i;
      if (slot >= chunk.start && !replay_) {
        const int64_t token = chunk.token + slot - chunk.start;
        const float first = tokens_.first ? tokens_.first[token * page_.num_kv_heads + h] : 0.0f;
        held.store(slot,
                   reinterpret_cast<const T*>(tokens_.key) + token * tokens_.key_stride + h * size,
                   reinterpret_cast<const T*>(tokens_.value) + token * tokens_.value_stride +
                       h * size,
                   first, chunk.position + slot - chunk.start);
      }
      keys[i] = held.key(slot);
      values[i] = held.value(slot);
    }
    for (int i = count; i < kBlock; ++i) keys[i] = values[i] = nothing;
    order(keys, values, keys_ + (offset(c, h) + from) * depth_,
          values_ + (offset(c, h) + from) * size);
  }

  void order(const T* const* keys, const T* const* values, Element* key, Element* value) const {
    const int size = page_.head_size;
    if constexpr (By::kPaired) {
      for (int d = 0; d < depth_; d += 2) {
        uint32_t pairs[kBlock] = {};
        for (int i = 0; i < kBlock && d < size; ++i) std::memcpy(pairs + i, keys[i] + d, 4);
        std::memcpy(key + d * kBlock, pairs, sizeof(pairs));
      }
      for (int i = 0; i < kBlock; i += 2) {
        const Bf16 *low = values[i], *high = values[i + 1];
        for (int d = 0; d < size; ++d) {
          const uint32_t pair = low[d].bits | static_cast<uint32_t>(high[d].bits) << 16;
          std::memcpy(value + i * size + 2 * d, &pair, 4);
        }
      }
    } else {
      for (int i = 0; i < kBlock; ++i) {
        for (int d = 0; d < size; d += kLanes) {
          const Floats k = load(keys[i] + d);
          for (int j = 0; j < kLanes; ++j) key[(d + j) * kBlock + i] = k[j];
          put(value + i * size + d, load(values[i] + d));
        }
      }
    }
  }

  // What a thread has for one tile.
  struct Rows {
    float* logits;     // [rows, stride], then weights e^(logit - highest)
    Element* weights;  // the same as products want them: bfloat16 [rows, stride], or the logits
    Element* query;    // [rows, depth]
    float* out;        // [rows, D]
    float* highest;    // [rows, kLanes]
    float* factor;     // [rows]: 1 / sum of the weights
    float* given;      // [rows]: factor of what goes to the scores, or 0
  };

  Rows rows(int thread) const {
    char* memory = memory_ + thread * thread_bytes_;
    Rows x;
    x.logits = reinterpret_cast<float*>(memory);
    x.out = x.logits + rows_ * stride_;
    x.highest = x.out + rows_ * page_.head_size;
    x.factor = x.highest + rows_ * kLanes;
    x.given = x.factor + rows_;
    x.query = reinterpret_cast<Element*>(x.given + rows_);
    x.weights = reinterpret_cast<Element*>(x.logits);
    if constexpr (By::kPaired) x.weights = x.query + rows_ * depth_;
    return x;
  }

  void attend(int thread, const QueryTile& tile) const {
    const H2oChunk& chunk = chunks_[tile.chunk];
    if (replay_ && tile.query + queries_ <= chunk.scores_from) return;
    const Rows x = rows(thread);
    const int64_t num_rows = tile.heads * queries_;
    const int64_t seen =
        replay_ ? end(chunk) : chunk.start + std::min(tile.query + queries_, chunk.num_tokens);
    const int64_t width = round_up(seen, kBlock);
    const int64_t at = offset(tile.chunk, tile.head);
    read_queries(x, tile);
    std::fill(x.highest, x.highest + num_rows * kLanes, -kInfinity);
    for (int64_t slot = 0; slot < width; slot += kBlock) {
      By::multiply(num_rows, kBlock,
                   Product<Element>{depth_, x.query, depth_, keys_ + (at + slot) * depth_, kBlock,
                                    x.logits + slot, stride_});
      if (slot + kBlock > (replay_ ? seen : chunk.start + tile.query)) hide(x, tile, slot);
      for (int64_t r = 0; r < num_rows; ++r) {
        Floats most = load(x.highest + r * kLanes);
        for (int i = 0; i < kBlock; i += kLanes) {
          most = larger(most, load(x.logits + r * stride_ + slot + i));
        }
        put(x.highest + r * kLanes, most);
      }
    }
    for (int64_t r = 0; r < num_rows; ++r) soften(x, r, width);
    if (scoring_.power) give(x, tile, received_ + thread * offsets_[num_chunks_] + at, width);
    if (replay_) return;
    By::multiply(num_rows, page_.head_size,
                 Product<Element>{width, x.weights, stride_, values_ + at * page_.head_size,
                                  page_.head_size, x.out, page_.head_size});
    write(x, tile);
  }

  // Rows of the tile: (head, query). f(row, head, query within the chunk).
  template <class F>
  void each_row(const QueryTile& tile, F f) const {
    for (int g = 0; g < tile.heads; ++g) {
      for (int i = 0; i < queries_; ++i) f(g * queries_ + i, tile.group + g, tile.query + i);
    }
  }

  void read_queries(const Rows& x, const QueryTile& tile) const {
    const int size = page_.head_size;
    const H2oChunk& chunk = chunks_[tile.chunk];
    each_row(tile, [&](int64_t r, int g, int64_t query) {
      Element* to = x.query + r * depth_;
      if (query >= chunk.num_tokens || depth_ != size) std::memset(to, 0, depth_ * sizeof(Element));
      if (query >= chunk.num_tokens) return;
      const T* from = reinterpret_cast<const T*>(tokens_.query) +
                      (chunk.token + query) * tokens_.query_stride +
                      (tile.head * group_ + g) * size;
      if constexpr (By::kPaired) {
        std::memcpy(to, from, size * sizeof(T));
      } else {
        for (int d = 0; d < size; d += kLanes) put(to + d, load(from + d));
      }
    });
  }

  // Slots behind a query's own, or behind all, among [slot, slot + kBlock).
  void hide(const Rows& x, const QueryTile& tile, int64_t slot) const {
    const int64_t start = chunks_[tile.chunk].start, all = end(chunks_[tile.chunk]);
    each_row(tile, [&](int64_t r, int, int64_t query) {
      float* logits = x.logits + r * stride_ + slot;
      const int64_t first = std::max<int64_t>((replay_ ? all : start + query + 1) - slot, 0);
      for (int64_t i = first; i < kBlock; ++i) logits[i] = -kInfinity;
    });
  }

  void soften(const Rows& x, int64_t r, int64_t width) const {
    float* logits = x.logits + r * stride_;
    const Floats scale = all(tokens_.scale);
    const Floats shift = all(largest_of(load(x.highest + r * kLanes)) * tokens_.scale);
    Floats sum = {};
    for (int64_t i = 0; i < width; i += kLanes) {
      const Floats p = exp_of(load(logits + i) * scale - shift);
      sum += p;
      if (!By::kPaired || scoring_.power) put(logits + i, p);
      if constexpr (By::kPaired) put(x.weights + r * stride_ + i, p);
    }
    x.factor[r] = 1.0f / sum_of(sum);
  }

  // Adds to the sums of columns [0, width) what the tile's queries give.
  void give(const Rows& x, const QueryTile& tile, float* sums, int64_t width) const {
    const H2oChunk& chunk = chunks_[tile.chunk];
    const int64_t num_rows = tile.heads * queries_;
    bool any = false;
    each_row(tile, [&](int64_t r, int, int64_t query) {
      const bool gives = query >= chunk.scores_from && query < chunk.num_tokens;
      x.given[r] = gives ? x.factor[r] : 0.0f;
      any |= gives;
    });
    if (!any) return;
    if (scoring_.skip_recent && !replay_) return give_to_old(x, tile, sums);
    const bool squares = scoring_.power == 2;
    constexpr int kVectors = kBlock / kLanes;
    for (int64_t i = 0; i < width; i += kBlock) {
      Floats columns[kVectors] = {};
      for (int64_t r = 0; r < num_rows; ++r) {
        const Floats factor = all(x.given[r]);
#pragma GCC unroll 8
        for (int v = 0; v < kVectors; ++v) {
          const Floats p = load(x.logits + r * stride_ + i + v * kLanes) * factor;
          columns[v] += squares ? p * p : p;
        }
      }
      for (int v = 0; v < kVectors; ++v) {
        float* to = sums + i + v * kLanes;
        put(to, load(to) + columns[v]);
      }
    }
  }

  // The same where a query leaves out the tokens that are less than skip_recent older.
  void give_to_old(const Rows& x, const QueryTile& tile, float* sums) const {
    const H2oChunk& chunk = chunks_[tile.chunk];
    const Strip<T> held = strip(tile.chunk, tile.head);
    each_row(tile, [&](int64_t r, int, int64_t query) {
      if (x.given[r] == 0.0f) return;
      const int64_t oldest = chunk.position + query - scoring_.skip_recent;
      for (int64_t slot = 0; slot <= chunk.start + query;) {
        const int64_t page = slot / page_.block_size, first = page * page_.block_size;
        const int64_t to = std::min(first + page_.block_size, chunk.start + query + 1);
        const int32_t* positions = held.positions(page);
        for (; slot < to; ++slot) {
          if (positions[slot - first] > oldest) continue;
          const float p = x.logits[r * stride_ + slot] * x.given[r];
          sums[slot] += scoring_.power == 2 ? p * p : p;
        }
      }
    });
  }

  void write(const Rows& x, const QueryTile& tile) const {
    const H2oChunk& chunk = chunks_[tile.chunk];
    const int64_t bytes = out_bytes(tokens_);
    each_row(tile, [&](int64_t r, int g, int64_t query) {
      if (query >= chunk.num_tokens) return;
      const int64_t at = (chunk.token + query) * tokens_.out_stride +
                         (tile.head * group_ + g) * page_.head_size;
      put_out(tokens_.out + at * bytes, tokens_.out_type, x.out + r * page_.head_size,
              page_.head_size, x.factor[r]);
    });
  }

  // Adds the threads' sums of slots [from, from + kBlock) to the pages.
  void score(int num_threads, int c, int h, int64_t from) const {
    const Strip<T> held = strip(c, h);
    const int64_t to = std::min(from + kBlock, end(chunks_[c]));
    const float* sums = received_ + offset(c, h);
    const int64_t position_end = chunks_[c].position + chunks_[c].num_tokens;
    const float weight = weight_ / static_cast<float>(position_end);
    for (int64_t slot = from; slot < to; ++slot) {
      float sum = 0.0f;
      for (int i = 0; i < num_threads; ++i) sum += sums[i * offsets_[num_chunks_] + slot];
      if (replay_) {
        const int32_t* positions = held.positions(slot / page_.block_size);
        sum *= weight * static_cast<float>(position_end - positions[slot % page_.block_size]);
      }
      held.scores(slot / page_.block_size)[slot % page_.block_size] += sum;
    }
  }

  const H2oCache& page_;
  const H2oChunk* chunks_;
  int num_chunks_;
  const H2oTokens& tokens_;
  const H2oScoring& scoring_;
  bool replay_;  // the chunks' queries are asked again; else the chunks are attended to
  float weight_;  // of what those give
  int group_;
  int64_t depth_;
  int heads_;
  int queries_;
  int64_t rows_;
  int64_t* offsets_ = nullptr;  // [chunks + 1]: of each chunk's slots, all its heads' together
  Element* keys_ = nullptr;     // blocks of [depth, kBlock]
  Element* values_ = nullptr;   // [slots, D]
  float* received_ = nullptr;   // [threads, slots]
  int64_t stride_ = 0;
  int64_t thread_bytes_ = 0;
  char* memory_ = nullptr;
};

#if defined(__AMX_BF16__)
using ForBf16 = Amx;
#elif defined(__AVX512BF16__)
using ForBf16 = Pairs;
#else
using ForBf16 = Wide;
#endif

template <class T, class By>
void prefill(const H2oCache& page, const H2oChunk* chunks, int num_chunks, const H2oTokens& tokens,
             const H2oScoring& scoring, bool replay, float weight) {
  for (int first = 0; first < num_chunks;) {
    int64_t slots = 0;
    int last = first;
    while (last < num_chunks) {
      slots += chunks[last].start + chunks[last].num_tokens;
      if (slots > kMaxSlots && last > first) break;
      ++last;
    }
    Prefill<T, By>(page, chunks + first, last - first, tokens, scoring, replay, weight).run();
    first = last;
  }
}

void prefill(const H2oCache& page, const H2oChunk* chunks, int num_chunks, const H2oTokens& tokens,
             const H2oScoring& scoring, bool replay, float weight) {
  const auto run = [&](auto prefill) {
    prefill(page, chunks, num_chunks, tokens, scoring, replay, weight);
  };
  if (page.type == kFloat) run(prefill<float, Wide>);
  if (page.type == kHalf) run(prefill<Half, Wide>);
  if (page.type == kBf16) run(prefill<Bf16, ForBf16>);
}

}  // namespace
}  // namespace h2o
