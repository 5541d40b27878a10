// Chunks of prompts: store, attend causally, score.
//
//   P = softmax(q K^T * scale + causal); out = P V
//   score[j] += sum over queries and the group P[., j]^power
//   or, by maximum: score[j] = max of score[j] and, over queries and the group, P[., j]^power
//
// arXiv 2306.14048, section 2.1.

#include "prompt.h"

namespace h2o {
namespace {

template <class Prompt>
class Prefill {
  using T = typename Prompt::Type;
  using S = typename Prompt::Held;
  using Product = typename Prompt::Product;
  using Element = typename Prompt::Element;
  using Rows = typename Prompt::Rows;

 public:
  static constexpr bool kReadsValues = true;

  explicit Prefill(const Prompt& prompt)
      : prompt_(prompt), cache_(prompt.cache), tensors_(prompt.tensors), scoring_(prompt.scoring) {}

  // Stores the chunk's tokens among slots [start, start + kKeyBlock), and arranges all of those.
  void arrange(int c, int h, int64_t start) const {
    const H2oChunk& chunk = prompt_.chunks[c];
    const Strip<S> held = prompt_.strip(c, h);
    const int size = cache_.head_size;
    const int64_t end = std::min(start + kKeyBlock, chunk.attended_len());
    for (int64_t slot = std::max(start, chunk.resident_start); slot < end; ++slot) {
      const int64_t index = slot - chunk.resident_start, token = chunk.token_start + index;
      held.store(slot, head_of<T>(tensors_.key, tensors_.key_stride, token, h, size),
                 head_of<T>(tensors_.value, tensors_.value_stride, token, h, size),
                 initial_score(tensors_, token, h, cache_.num_kv_heads),
                 chunk.logical_start + index);
    }
    prompt_.arrange_keys(c, h, start);
    arrange_values(c, h, start);
  }

  // A tile's outputs, and what its queries add to the columns.
  void compute(int thread, const QueryTile& tile) const {
    const H2oChunk& chunk = prompt_.chunks[tile.chunk];
    const Rows x = prompt_.rows_of(thread);
    const int64_t num_rows = tile.num_heads * prompt_.tile_queries;
    const int64_t visible =
        chunk.resident_start + std::min(tile.query_begin + prompt_.tile_queries, chunk.num_tokens);
    const int64_t width = round_up(visible, kKeyBlock);
    prompt_.read_queries(x, tile);
    prompt_.multiply_keys(x, tile, width, [&](int64_t slot) { hide_later(x, tile, slot); });
    for (int64_t r = 0; r < num_rows; ++r) prompt_.template exponentiate<true>(x, tile, r, width);
    if (scoring_.power && prompt_.set_contributions(x, tile)) {
      if (scoring_.by_maximum) {
        add_columns<true>(thread, x, tile, width);
      } else {
        add_columns<false>(thread, x, tile, width);
      }
    }
    // out [rows, D] = weights [rows, width] V [width, D].
    const int64_t size = cache_.head_size;
    const Element* value = prompt_.values + prompt_.offset(tile.chunk, tile.head) * size;
    Product::multiply(num_rows, size, {width, x.weights, prompt_.stride, value, size, x.out, size});
    write(x, tile);
  }

  // Adds the threads' sums of slots [start, start + kKeyBlock).
  void add_to_scores(int num_threads, int c, int h, int64_t start) const {
    const Strip<S> held = prompt_.strip(c, h);
    const int64_t n = cache_.block_size;
    const int64_t end = std::min(start + kKeyBlock, prompt_.chunks[c].attended_len());
    for (int64_t slot = start; slot < end; ++slot) {
      float& score = held.scores(slot / n)[slot % n];
      const float sum = prompt_.column_sum(num_threads, c, h, slot);
      score = scoring_.by_maximum ? std::max(score, sum) : score + sum;
    }
  }

 private:
  void arrange_values(int c, int h, int64_t start) const {
    const Strip<S> held = prompt_.strip(c, h);
    const int size = cache_.head_size;
    const S* rows[kKeyBlock];
    prompt_.addresses(c, start, rows, [&](int64_t slot) { return held.value(slot); });
    h2o::arrange_values(rows, size, prompt_.values + (prompt_.offset(c, h) + start) * size);
  }

  // Hides slots after each query's own among [slot, slot + kKeyBlock).
  void hide_later(const Rows& x, const QueryTile& tile, int64_t slot) const {
    const int64_t resident_start = prompt_.chunks[tile.chunk].resident_start;
    if (slot + kKeyBlock <= resident_start + tile.query_begin) return;
    prompt_.for_each_row(tile, [&](int64_t r, int, int64_t query) {
      prompt_.hide(x.logits + r * prompt_.stride + slot, resident_start + query + 1 - slot);
    });
  }

  template <bool kByMaximum>
  void add_columns(int thread, const Rows& x, const QueryTile& tile, int64_t width) const {
    float* sums = prompt_.sums_of_tile(thread, tile);
    if (scoring_.skip_recent) {
      add_old_columns<kByMaximum>(x, tile, sums);
    } else {
      prompt_.template add_columns<kByMaximum>(x, tile, sums, width);
    }
  }

  // Adds to the columns where a query leaves out tokens that are less than skip_recent older.
  template <bool kByMaximum>
  void add_old_columns(const Rows& x, const QueryTile& tile, float* sums) const {
    const H2oChunk& chunk = prompt_.chunks[tile.chunk];
    const Strip<S> held = prompt_.strip(tile.chunk, tile.head);
    prompt_.for_each_row(tile, [&](int64_t r, int, int64_t query) {
      if (x.contribution[r] == 0.0f) return;
      const int64_t newest = chunk.logical_start + query - scoring_.skip_recent;
      for (int64_t slot = 0; slot <= chunk.resident_start + query;) {
        const int64_t page = slot / cache_.block_size, begin = page * cache_.block_size;
        const int64_t end = std::min(begin + cache_.block_size, chunk.resident_start + query + 1);
        const int32_t* positions = held.positions(page);
        for (; slot < end; ++slot) {
          if (positions[slot - begin] > newest) continue;
          const float p = x.logits[r * prompt_.stride + slot] * x.contribution[r];
          if constexpr (kByMaximum) {
            sums[slot] = std::max(sums[slot], scoring_.power == 2 ? p * p : p);
          } else {
            sums[slot] += scoring_.power == 2 ? p * p : p;
          }
        }
      }
    });
  }

  void write(const Rows& x, const QueryTile& tile) const {
    const H2oChunk& chunk = prompt_.chunks[tile.chunk];
    prompt_.for_each_row(tile, [&](int64_t r, int g, int64_t query) {
      if (query >= chunk.num_tokens) return;
      put_out(tensors_, chunk.token_start + query, tile.head * prompt_.group + g,
              x.out + r * cache_.head_size, cache_.head_size, x.factor[r]);
    });
  }

  const Prompt& prompt_;
  const H2oCache& cache_;
  const H2oTensors& tensors_;
  const H2oScoring& scoring_;
};

}  // namespace
}  // namespace h2o

extern "C" void h2o_prefill(const H2oCache* cache, const H2oChunk* chunks, int num_chunks,
                            const H2oTensors* tensors, const H2oScoring* scoring) {
  h2o::run_stage<h2o::Prefill>(*cache, chunks, num_chunks, *tensors, *scoring);
}
