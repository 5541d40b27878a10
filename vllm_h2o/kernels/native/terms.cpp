// SPDX-License-Identifier: Apache-2.0
// Terms of a ranking that are added once, when a chunk of the prompt is stored. Only scores are
// written.
//
//   P = softmax(q K^T * scale); score[j] += weight * (by_age ? age[j] : 1) * value[j]
//   value[j] = sum, or maximum, over queries and the group P[., j]^power
//   then       the largest value of positions j - reach ... j
//
// Rotated and reread queries see every token of their chunk's table; those of a window see tokens
// up to their own, and give nothing to the `skip` right before them. See policy/ranking.py.

#include "stage.h"

namespace h2o {
namespace {

template <class Prompt>
class ScoreTerm {
  using Rows = typename Prompt::Rows;

 public:
  static constexpr bool kReadsValues = false;

  ScoreTerm(const Prompt& prompt, const H2oTerm& term) : prompt_(prompt), term_(term) {}

  void arrange(int c, int h, int64_t start) const { prompt_.arrange_keys(c, h, start); }

  // Adds a tile's queries to the columns.
  void compute(int thread, const QueryTile& tile) const {
    const H2oChunk& chunk = prompt_.chunks[tile.chunk];
    if (tile.query_begin + prompt_.tile_queries <= chunk.first_scoring_query) return;
    const Rows x = prompt_.rows_of(thread);
    const int64_t width = prompt_.template weigh<false>(x, tile);
    if (!prompt_.set_contributions(x, tile)) return;
    if (term_.skip) leave_out_recent(x, tile);
    float* sums = prompt_.sums_of_tile(thread, tile);
    if (term_.by_maximum) {
      prompt_.template add_columns<true>(x, tile, sums, width);
    } else {
      prompt_.template add_columns<false>(x, tile, sums, width);
    }
  }

  // Adds to the scores of slots [start, start + kKeyBlock), or writes the chunk's window_scores.
  void add_to_scores(int num_threads, int c, int h, int64_t start) const {
    const H2oChunk& chunk = prompt_.chunks[c];
    const auto held = prompt_.strip(c, h);
    const int64_t n = prompt_.cache.block_size;
    const int64_t end = std::min(start + kKeyBlock, chunk.attended_len());
    for (int64_t slot = start; slot < end; ++slot) {
      const int64_t age = chunk.logical_end() - held.positions(slot / n)[slot % n];
      const float times = static_cast<float>(term_.by_age ? age : 1);
      const bool takes = slot >= chunk.first_scored_slot;
      const float added = takes ? value(num_threads, c, h, slot) * term_.weight * times : 0.0f;
      if (chunk.window_scores) {
        chunk.window_scores[h * chunk.attended_len() + slot] = added;
      } else {
        held.scores(slot / n)[slot % n] += added;
      }
    }
  }

 private:
  float value(int num_threads, int c, int h, int64_t slot) const {
    const auto held = prompt_.strip(c, h);
    const int64_t n = prompt_.cache.block_size;
    const auto position = [&](int64_t at) { return held.positions(at / n)[at % n]; };
    const auto own = [&](int64_t at) {
      return prompt_.column_sum(num_threads, c, h, at, term_.by_maximum);
    };
    float largest = own(slot);
    // Slots of a prompt are in order of position.
    for (int64_t other = std::max<int64_t>(slot - term_.reach, 0); other < slot; ++other) {
      if (position(slot) - position(other) > term_.reach) continue;
      largest = std::max(largest, own(other));
    }
    return largest;
  }

  // Zeroes the weights of tokens that are less than `skip` older than a row's query.
  void leave_out_recent(const Rows& x, const QueryTile& tile) const {
    const H2oChunk& chunk = prompt_.chunks[tile.chunk];
    const auto held = prompt_.strip(tile.chunk, tile.head);
    const int64_t n = prompt_.cache.block_size;
    prompt_.for_each_row(tile, [&](int64_t r, int, int64_t query) {
      const int64_t newest = chunk.logical_start + query - term_.skip;
      for (int64_t slot = prompt_.num_visible(chunk, query) - 1; slot >= 0; --slot) {
        if (held.positions(slot / n)[slot % n] <= newest) break;
        x.logits[r * prompt_.stride + slot] = 0.0f;
      }
    });
  }

  const Prompt& prompt_;
  const H2oTerm& term_;
};

}  // namespace
}  // namespace h2o

// Only queries are read of the tensors; K of the chunks is in their pages.
extern "C" void h2o_score_term(const H2oCache* cache, const H2oChunk* chunks, int num_chunks,
                               const H2oTensors* tensors, const H2oTerm* term) {
  h2o::run_stage<h2o::ScoreTerm>(*cache, chunks, num_chunks, *tensors, term->power,
                                 term->sees_later != 0, *term);
}
