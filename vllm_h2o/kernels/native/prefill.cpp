// SPDX-License-Identifier: Apache-2.0
// Chunks of prompts: store, attend causally, score.
//
//   P = softmax(q K^T * scale + causal); out = P V
//   score[j] += sum over queries and the group P[., j]^power
//
// arXiv 2306.14048, section 2.1.

#include "stage.h"

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
      : prompt_(prompt), cache_(prompt.cache), tensors_(prompt.tensors) {}

  // Stores the chunk's tokens among slots [start, start + kKeyBlock), and arranges all of those.
  void arrange(int c, int h, int64_t start) const {
    const H2oChunk& chunk = prompt_.chunks[c];
    const Strip<S> held = prompt_.strip(c, h);
    const int size = cache_.head_size;
    const int64_t end = std::min(start + kKeyBlock, chunk.attended_len());
    for (int64_t slot = std::max(start, chunk.resident_start); slot < end; ++slot) {
      const int64_t index = slot - chunk.resident_start, token = chunk.token_start + index;
      held.store(slot, head_of<T>(tensors_.key, tensors_.key_stride, token, h, size),
                 head_of<T>(tensors_.value, tensors_.value_stride, token, h, size), 0.0f,
                 chunk.logical_start + index);
    }
    prompt_.arrange_keys(c, h, start);
    arrange_values(c, h, start);
  }

  // Computes a tile's outputs, and adds its queries to the columns.
  void compute(int thread, const QueryTile& tile) const {
    const Rows x = prompt_.rows_of(thread);
    const int64_t width = prompt_.template weigh<true>(x, tile);
    if (prompt_.power && prompt_.set_contributions(x, tile)) {
      prompt_.template add_columns<false>(x, tile, prompt_.sums_of_tile(thread, tile), width);
    }
    // out [rows, D] = weights [rows, width] V [width, D].
    const int64_t size = cache_.head_size, num_rows = tile.num_heads * prompt_.tile_queries;
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
      held.scores(slot / n)[slot % n] += prompt_.column_sum(num_threads, c, h, slot, false);
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
};

}  // namespace
}  // namespace h2o

extern "C" void h2o_prefill(const H2oCache* cache, const H2oChunk* chunks, int num_chunks,
                            const H2oTensors* tensors, int32_t power) {
  h2o::run_stage<h2o::Prefill>(*cache, chunks, num_chunks, *tensors, power, false);
}
