// Second-pass scoring: a prompt's queries once more, from positions past its end, without a mask.
//
//   P = softmax(q' K^T * scale); score[j] += weight * age[j] / n * sum P[., j]^power
//
// Not of the paper: see reference.score_second_pass. Only scores are written.

#include "prompt.h"

namespace h2o {
namespace {

template <class Prompt>
class SecondPass {
  using Rows = typename Prompt::Rows;

 public:
  static constexpr bool kReadsValues = false;

  SecondPass(const Prompt& prompt, float weight) : prompt_(prompt), weight_(weight) {}

  void arrange(int c, int h, int64_t start) const { prompt_.arrange_keys(c, h, start); }

  // What a tile's queries add to the columns.
  void compute(int thread, const QueryTile& tile) const {
    const H2oChunk& chunk = prompt_.chunks[tile.chunk];
    if (tile.query_begin + prompt_.tile_queries <= chunk.first_scoring_query) return;
    const Rows x = prompt_.rows_of(thread);
    const int64_t num_rows = tile.num_heads * prompt_.tile_queries;
    const int64_t width = round_up(chunk.attended_len(), kKeyBlock);
    prompt_.read_queries(x, tile);
    prompt_.multiply_keys(x, tile, width, [&](int64_t slot) { hide_unused(x, tile, slot); });
    for (int64_t r = 0; r < num_rows; ++r) prompt_.template exponentiate<false>(x, r, width);
    if (!prompt_.set_contributions(x, tile)) return;
    prompt_.template add_columns<false>(x, tile, prompt_.sums_of_tile(thread, tile), width);
  }

  // Adds the threads' sums of slots [start, start + kKeyBlock), as a mean over the queries so far.
  void add_to_scores(int num_threads, int c, int h, int64_t start) const {
    const auto held = prompt_.strip(c, h);
    const int64_t n = prompt_.cache.block_size;
    const int64_t logical_end = prompt_.chunks[c].logical_end();
    const int64_t end = std::min(start + kKeyBlock, prompt_.chunks[c].attended_len());
    const float weight = weight_ / static_cast<float>(logical_end);
    for (int64_t slot = start; slot < end; ++slot) {
      const int64_t age = logical_end - held.positions(slot / n)[slot % n];
      const float sum = prompt_.column_sum(num_threads, c, h, slot);
      held.scores(slot / n)[slot % n] += sum * (weight * static_cast<float>(age));
    }
  }

 private:
  // Hides slots after the chunk's last among [slot, slot + kKeyBlock).
  void hide_unused(const Rows& x, const QueryTile& tile, int64_t slot) const {
    const int64_t attended_len = prompt_.chunks[tile.chunk].attended_len();
    if (slot + kKeyBlock <= attended_len) return;
    prompt_.for_each_row(tile, [&](int64_t r, int, int64_t) {
      prompt_.hide(x.logits + r * prompt_.stride + slot, attended_len - slot);
    });
  }

  const Prompt& prompt_;
  float weight_;
};

}  // namespace
}  // namespace h2o

// Of the tensors only the queries are read; K of the chunks is in their pages.
extern "C" void h2o_score_second_pass(const H2oCache* cache, const H2oChunk* chunks, int num_chunks,
                                      const H2oTensors* tensors, const H2oScoring* scoring,
                                      float weight) {
  if (!scoring->power) return;
  h2o::run_stage<h2o::SecondPass>(*cache, chunks, num_chunks, *tensors, *scoring, weight);
}
