// SPDX-License-Identifier: Apache-2.0
// One new token of each of B requests: store, attend, score, select the next victims.
//
//   P = softmax(q K^T * scale); out = P V; score[j] += sum over the group P[., j]^power
//
// In the softmax's sum an attention sink, e^sink of the query head, takes its part.
//
// arXiv 2306.14048, Algorithm 1: one pass over K, one over V. The work is split over the threads
// (split.h); a strip that lies in several splits is merged from its parts. Where victims are merged
// (merge.h), the victim's key is one more query of the pass over K; the new token is stored when
// that is through, and two slots' logits are computed again.

#include "decode.h"

#include <algorithm>
#include <type_traits>

#include "attention.h"
#include "split.h"
#include "team.h"

namespace h2o {
namespace {

// T is the type of the step's tensors, S the cache's.
template <class T, class S>
class Decode {
 public:
  Decode(const H2oCache& cache, const H2oBatch& batch, const H2oTensors& tensors,
         const H2oScoring& scoring, int32_t* victims)
      : cache_(cache),
        batch_(batch),
        tensors_(tensors),
        scoring_(scoring),
        work_(cache, batch),
        attention_(cache, batch, tensors, scoring, work_, victims),
        group_(attention_.group()),
        stride_(attention_.stride()),
        part_floats_(attention_.part_floats()),
        thread_floats_(2 * part_floats_ + attention_.group_floats()) {}

  void run() {
    static thread_local Scratch splits_memory, floats_memory;
    const int64_t bytes = work_.num_slots * 2 * cache_.head_size * sizeof(S);
    num_kv_splits_ = bytes < kSerialBytes ? 1 : max_threads();
    splits_ = splits_memory.get<Split>(num_kv_splits_);
    bool cuts_strips = false;
    for (int i = 0; i < num_kv_splits_; ++i) {
      splits_[i] = Split();
      splits_[i].begin = i ? splits_[i - 1].end : Cut{0, 0, 0};
      splits_[i].end = work_.cut(i + 1, num_kv_splits_);
      cuts_strips |= splits_[i].end.slot != 0;
    }
    floats_ = floats_memory.get<float>(num_kv_splits_ * thread_floats_);
    auto body = [this, cuts_strips](Team team) { compute(team, cuts_strips); };
    parallel(num_kv_splits_, body);
  }

 private:
  // With less K and V than this, waking threads costs more than they save.
  static constexpr int64_t kSerialBytes = 1 << 15;

  int64_t field(H2oDecodeField row, int request) const { return batch_.field(row, request); }

  // A team may have fewer threads than there are splits.
  template <class F>
  void for_each_split(Team team, F f) {
    for (int i = team.thread; i < num_kv_splits_; i += team.size) f(splits_[i], i);
  }

  void compute(Team team, bool cuts_strips) {
    for_each_split(team, [&](Split& split, int i) { attend(split, i); });
    if (!cuts_strips) return;
    if (scoring_.merge > 0.0f) {
      team.barrier();
      for_each_kept(team, [&](Part& part) {
        if (attention_.merges(part)) attention_.merge(part, nearest(part));
      });
    }
    team.barrier();
    for_each_kept(team, [&](Part& part) {
      merge_sums(part);
      score(part);
    });
    team.barrier();
    for_each_kept(team, [&](Part& part) {
      if (part.begin == 0) merge_out(part);
    });
  }

  template <class F>
  void for_each_kept(Team team, F f) {
    for_each_split(team, [&](Split& split, int) {
      for (int i = 0; i < split.num_kept; ++i) f(split.kept[i]);
    });
  }

  // Whole strips are finished here; of others the parts are kept.
  void attend(Split& split, int index) {
    [[maybe_unused]] typename Group<T>::Tiles tiles(attention_.num_rows());
    float* memory = floats_ + index * thread_floats_;
    const Cut &begin = split.begin, &end = split.end;
    for (int b = begin.request; b <= end.request && b < batch_.num_requests; ++b) {
      const bool empty = field(kAttendedLen, b) == 0;
      if (empty && b < end.request) pad(b);
      const int head_begin = b == begin.request ? begin.head : 0;
      const int head_last = b == end.request ? end.head : cache_.num_kv_heads - 1;
      for (int h = head_begin; h <= head_last && !empty; ++h) {
        const int64_t length = work_.strip_len(b, h);
        Part part;
        part.request = b;
        part.head = h;
        part.strip_len = length;
        part.begin = b == begin.request && h == begin.head ? begin.slot : 0;
        part.end = b == end.request && h == end.head ? end.slot : length;
        if (part.begin >= part.end) continue;
        attention_.place(part, memory + (split.num_kept ? part_floats_ : 0));
        attention_.attend(part, memory + 2 * part_floats_);
        if (!part.whole()) {
          split.kept[split.num_kept++] = part;
          continue;
        }
        if (attention_.merges(part)) attention_.merge(part, part.nearest);
        for (int g = 0; g < group_; ++g) {
          part.factor[g] = factor_of(part.row_sum[g], part.row_max[g], sink(part, g));
        }
        score(part);
        finish(part);
      }
    }
  }

  // Writes the output of padding; nothing else of it is touched.
  void pad(int request) const {
    const int64_t bytes = out_bytes(tensors_);
    std::memset(tensors_.out + field(kToken, request) * tensors_.out_stride * bytes, 0,
                static_cast<size_t>(tensors_.num_heads) * cache_.head_size * bytes);
  }

  // Adds to the scores of the part, and finds its lowest.
  void score(Part& part) const {
    const bool adds = scoring_.power && field(kScores, part.request);
    const bool selects = field(kSelects, part.request);
    if (!adds && !selects) return;
    const Strip<S> held = attention_.strip(part);
    const auto logical_end = static_cast<int32_t>(field(kLogicalStart, part.request) + 1);
    const Candidates candidates{static_cast<int32_t>(field(kNumSinks, part.request)),
                                static_cast<int32_t>(field(kRecentStart, part.request))};
    const int n = cache_.block_size;
    for_each_run(part.begin, part.end, n, [&](int64_t page, int offset, int count) {
      float* scores = held.scores(page) + offset;                               // [count]
      const int32_t* positions = reinterpret_cast<const int32_t*>(scores + n);  // [count]
      const int64_t slot = page * n + offset;
      if (adds) {
        add_scores(part.weights + (slot - part.begin), stride_, part.factor, group_, scoring_.power,
                   scores, count);
      }
      if (selects && scoring_.by_age) {
        offer_aged(part.lowest, candidates, scores, positions, count, slot, logical_end);
      } else if (selects) {
        offer_run(part.lowest, candidates, scores, positions, count, slot);
      }
    });
  }

  // Writes the outputs and the victim of a strip.
  void finish(const Part& part) const {
    for (int g = 0; g < group_; ++g) {
      put_out(tensors_, field(kToken, part.request), part.head * group_ + g,
              part.partial_out + g * cache_.head_size, cache_.head_size, part.factor[g]);
    }
    if (field(kSelects, part.request))
      attention_.victim(part) = static_cast<int32_t>(part.lowest.slot);
  }

  template <class F>
  void for_each_part(const Part& of, F f) const {
    for (int i = 0; i < num_kv_splits_; ++i) {
      for (int j = 0; j < splits_[i].num_kept; ++j) {
        if (splits_[i].kept[j].same_strip(of)) f(splits_[i].kept[j]);
      }
    }
  }

  // The logit of a query head's attention sink, or null.
  const float* sink(const Part& part, int g) const {
    return tensors_.sink_logits ? tensors_.sink_logits + part.head * group_ + g : nullptr;
  }

  // The nearest key of all parts of a strip.
  Nearest nearest(const Part& of) const {
    Nearest found;
    for_each_part(of, [&](const Part& part) {
      if (part.nearest.slot >= 0) found.offer(part.nearest.square, part.nearest.slot);
    });
    return found;
  }

  // The factors of one part, from the maxima and sums of all parts of its strip.
  void merge_sums(Part& part) const {
    for (int g = 0; g < group_; ++g) {
      const float* logit = sink(part, g);
      float row_max = logit ? *logit : -kInfinity, row_sum = 0.0f;
      for_each_part(part, [&](const Part& p) { row_max = std::max(row_max, p.row_max[g]); });
      for_each_part(
          part, [&](const Part& p) { row_sum += p.row_sum[g] * exp_of(p.row_max[g] - row_max); });
      if (logit) row_sum += exp_of(*logit - row_max);
      part.factor[g] = exp_of(part.row_max[g] - row_max) / row_sum;
    }
  }

  // The first part of a strip takes over what the others have.
  void merge_out(Part& part) const {
    const int size = cache_.head_size, count = group_ * size;
    for (int i = 0; i < count; ++i) part.partial_out[i] *= part.factor[i / size];
    for_each_part(part, [&](const Part& other) {
      if (other.begin == part.begin) return;
      for (int i = 0; i < count; ++i) {
        part.partial_out[i] += other.partial_out[i] * other.factor[i / size];
      }
      const Lowest& found = other.lowest;
      if (found.position >= 0) part.lowest.offer(found.score, found.position, found.slot);
    });
    std::fill(part.factor, part.factor + group_, 1.0f);
    finish(part);
  }

  const H2oCache& cache_;
  const H2oBatch& batch_;
  const H2oTensors& tensors_;
  const H2oScoring& scoring_;
  Work work_;
  Attention<T, S> attention_;
  int group_;  // G
  int64_t stride_;
  int64_t part_floats_;
  int64_t thread_floats_;
  int num_kv_splits_ = 1;
  Split* splits_ = nullptr;
  float* floats_ = nullptr;
};

}  // namespace
}  // namespace h2o

extern "C" void h2o_decode(const H2oCache* cache, const H2oBatch* batch, const H2oTensors* tensors,
                           const H2oScoring* scoring, int32_t* victims) {
  using namespace h2o;
  with_types(tensors->type, cache->type, [&](auto t, auto s) {
    Decode<decltype(t), decltype(s)>(*cache, *batch, *tensors, *scoring, victims).run();
  });
}
