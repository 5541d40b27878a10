// Queries of a prompt that score once more, when their chunk is stored. Only scores are written.
//
//   P = softmax(q K^T * scale); score[j] += weight * age[j] * E[j]
//   E[j] = sum over queries and the group P[., j]^power / n
//   or, by maximum: the largest P[., i]^power, over those and positions j - reach <= i <= j
//
// Rotated queries see every token of their chunk's table, others those up to their own, and add to
// those that are skip_recent older. Not of the paper: see reference.score_pass.

#include "prompt.h"

namespace h2o {
namespace {

template <class Prompt>
class ScoringPass {
  using Rows = typename Prompt::Rows;

 public:
  static constexpr bool kReadsValues = false;

  ScoringPass(const Prompt& prompt, float weight, bool rotated)
      : prompt_(prompt), scoring_(prompt.scoring), weight_(weight), rotated_(rotated) {}

  void arrange(int c, int h, int64_t start) const { prompt_.arrange_keys(c, h, start); }

  // What a tile's queries add to the columns.
  void compute(int thread, const QueryTile& tile) const {
    const H2oChunk& chunk = prompt_.chunks[tile.chunk];
    const int64_t query_end = tile.query_begin + prompt_.tile_queries;
    if (query_end <= chunk.first_scoring_query) return;
    const Rows x = prompt_.rows_of(thread);
    const int64_t num_rows = tile.num_heads * prompt_.tile_queries;
    const int64_t width = round_up(num_visible(chunk, query_end - 1), kKeyBlock);
    prompt_.read_queries(x, tile);
    prompt_.multiply_keys(x, tile, width, [&](int64_t slot) { hide_unseen(x, tile, slot); });
    for (int64_t r = 0; r < num_rows; ++r) prompt_.template exponentiate<false>(x, tile, r, width);
    if (!prompt_.set_contributions(x, tile)) return;
    if (scoring_.skip_recent) leave_out_recent(x, tile);
    float* sums = prompt_.sums_of_tile(thread, tile);
    if (scoring_.by_maximum) {
      prompt_.template add_columns<true>(x, tile, sums, width);
    } else {
      prompt_.template add_columns<false>(x, tile, sums, width);
    }
  }

  // Adds what slots [start, start + kKeyBlock) were given.
  void add_to_scores(int num_threads, int c, int h, int64_t start) const {
    const auto held = prompt_.strip(c, h);
    const int64_t n = prompt_.cache.block_size;
    const int64_t logical_end = prompt_.chunks[c].logical_end();
    const int64_t end = std::min(start + kKeyBlock, prompt_.chunks[c].attended_len());
    const float mean = scoring_.by_maximum ? 1.0f : 1.0f / static_cast<float>(logical_end);
    const int64_t first = std::max(start, prompt_.chunks[c].first_scored_slot);
    for (int64_t slot = first; slot < end; ++slot) {
      const auto position = [&](int64_t at) { return held.positions(at / n)[at % n]; };
      float column = prompt_.column_sum(num_threads, c, h, slot);
      for (int64_t other = std::max<int64_t>(slot - scoring_.reach, 0); other < slot; ++other) {
        if (position(slot) - position(other) > scoring_.reach) continue;
        column = std::max(column, prompt_.column_sum(num_threads, c, h, other));
      }
      const int64_t age = logical_end - position(slot);
      held.scores(slot / n)[slot % n] += column * mean * weight_ * static_cast<float>(age);
    }
  }

 private:
  // Zeroes the weights of tokens that are less than skip_recent older than a row's query.
  void leave_out_recent(const Rows& x, const QueryTile& tile) const {
    const H2oChunk& chunk = prompt_.chunks[tile.chunk];
    const auto held = prompt_.strip(tile.chunk, tile.head);
    const int64_t n = prompt_.cache.block_size;
    prompt_.for_each_row(tile, [&](int64_t r, int, int64_t query) {
      const int64_t newest = chunk.logical_start + query - scoring_.skip_recent;
      // Slots of a prompt are in order of position.
      for (int64_t slot = num_visible(chunk, query) - 1; slot >= 0; --slot) {
        if (held.positions(slot / n)[slot % n] <= newest) break;
        x.logits[r * prompt_.stride + slot] = 0.0f;
      }
    });
  }

  // Slots that a query of a chunk sees, or the chunk's last where there are fewer queries.
  int64_t num_visible(const H2oChunk& chunk, int64_t query) const {
    if (rotated_) return chunk.attended_len();
    return std::min(chunk.resident_start + query + 1, chunk.attended_len());
  }

  // Hides slots that a tile's queries do not see among [slot, slot + kKeyBlock).
  void hide_unseen(const Rows& x, const QueryTile& tile, int64_t slot) const {
    const H2oChunk& chunk = prompt_.chunks[tile.chunk];
    if (slot + kKeyBlock <= num_visible(chunk, tile.query_begin)) return;
    prompt_.for_each_row(tile, [&](int64_t r, int, int64_t query) {
      prompt_.hide(x.logits + r * prompt_.stride + slot, num_visible(chunk, query) - slot);
    });
  }

  const Prompt& prompt_;
  const H2oScoring& scoring_;
  float weight_;
  bool rotated_;
};

}  // namespace
}  // namespace h2o

// Of the tensors only the queries are read; K of the chunks is in their pages.
extern "C" void h2o_score_pass(const H2oCache* cache, const H2oChunk* chunks, int num_chunks,
                               const H2oTensors* tensors, const H2oScoring* scoring, float weight,
                               int32_t rotated) {
  if (!scoring->power) return;
  h2o::run_stage<h2o::ScoringPass>(*cache, chunks, num_chunks, *tensors, *scoring, weight,
                                   rotated != 0);
}
