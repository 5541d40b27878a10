// One new token of each of B requests: store, attend, score, select the next victims.
//
//   P = softmax(q K^T * scale); out = P V; score[j] += sum over the group P[., j]^power
//
// arXiv 2306.14048, Algorithm 1: one pass over K, one over V. The work is split over the threads
// (split.h); a strip that lies in several splits is merged from its parts.

#include "decode.h"

#include <algorithm>
#include <type_traits>

#include "group.h"
#include "split.h"
#include "team.h"

namespace h2o {
namespace {

template <class T>
class Decode {
 public:
  Decode(const H2oCache& cache, const H2oBatch& batch, const H2oTensors& tensors,
         const H2oScoring& scoring, int32_t* victims)
      : cache_(cache),
        batch_(batch),
        tensors_(tensors),
        scoring_(scoring),
        victims_(victims),
        group_(tensors.num_heads / cache.num_kv_heads),
        work_(cache, batch, scoring.by_page ? round_up(kTile, cache.block_size) : kTile) {
    stride_ = round_up(work_.max_strip_len, kTile) + kLanes;
    part_floats_ = round_up(group_ * (stride_ + 3 + cache.head_size), 16);
    thread_floats_ = 2 * part_floats_ + round_up(Group<T>::floats(group_, cache.head_size), 16);
  }

  void run() {
    static thread_local Scratch splits_memory, floats_memory;
    const int64_t bytes = work_.num_slots * cache_.num_kv_heads * 2 * cache_.head_size * sizeof(T);
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
  Strip<T> strip(const Part& part) const {
    return {cache_, batch_.blocks(part.request), part.head, work_.first_rows(part.request)};
  }
  int32_t& victim(const Part& part) const {
    const int64_t first_block_id = batch_.blocks(part.request)[0];
    return victims_[first_block_id * cache_.num_kv_heads + part.head];
  }

  // The slot that the new token takes.
  int64_t new_slot(const Part& part) const {
    if (!field(kOverwrites, part.request)) return part.strip_len - 1;
    return victim(part) + field(kNextOffset, part.request);
  }

  Range range(const Part& part) const {
    const int64_t free_begin = new_slot(part) + 1;
    return {part.begin, part.end, free_begin, free_begin + field(kNumFreeSlots, part.request)};
  }

  // A team may have fewer threads than there are splits.
  template <class F>
  void for_each_split(Team team, F f) {
    for (int i = team.thread; i < num_kv_splits_; i += team.size) f(splits_[i], i);
  }

  void compute(Team team, bool cuts_strips) {
    for_each_split(team, [&](Split& split, int i) { attend(split, i); });
    if (!cuts_strips) return;
    team.barrier();
    for_each_split(team, [&](Split& split, int) {
      for (int i = 0; i < split.num_kept; ++i) {
        merge_sums(split.kept[i]);
        score(split.kept[i]);
      }
    });
    team.barrier();
    for_each_split(team, [&](Split& split, int) {
      for (int i = 0; i < split.num_kept; ++i) {
        if (split.kept[i].begin == 0) merge_out(split.kept[i]);
      }
    });
  }

  // Whole strips are finished here; of others the parts are kept.
  void attend(Split& split, int index) {
    [[maybe_unused]] typename Group<T>::Tiles tiles(group_);
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
        place(part, memory + (split.num_kept ? part_floats_ : 0));
        attend(part, memory + 2 * part_floats_);
        if (!part.whole()) {
          split.kept[split.num_kept++] = part;
          continue;
        }
        for (int g = 0; g < group_; ++g) part.factor[g] = 1.0f / part.row_sum[g];
        score(part);
        finish(part);
      }
    }
  }

  // Of padding only the output is written.
  void pad(int request) const {
    const int64_t bytes = out_bytes(tensors_);
    std::memset(tensors_.out + field(kToken, request) * tensors_.out_stride * bytes, 0,
                static_cast<size_t>(tensors_.num_heads) * cache_.head_size * bytes);
  }

  void place(Part& part, float* memory) const {
    part.weights = memory;
    part.row_max = memory + group_ * stride_;
    part.row_sum = part.row_max + group_;
    part.factor = part.row_sum + group_;
    part.partial_out = part.factor + group_;
  }

  // Stores the new token if its slot is in the part; then weights, their sums, and partial_out.
  void attend(Part& part, float* memory) const {
    const Strip<T> held = strip(part);
    const Range slots = range(part);
    const int size = cache_.head_size;
    const int64_t token = field(kToken, part.request);
    const T* key = head_of<T>(tensors_.key, tensors_.key_stride, token, part.head, size);
    const T* value = head_of<T>(tensors_.value, tensors_.value_stride, token, part.head, size);
    const int64_t slot = new_slot(part);
    if (slot >= part.begin && slot < part.end) {
      held.store(slot, key, value, initial_score(tensors_, token, part.head, cache_.num_kv_heads),
                 field(kLogicalStart, part.request));
    }
    Group<T> group;
    group.set(memory, group_, size,  // [G, D]
              head_of<T>(tensors_.query, tensors_.query_stride, token, part.head * group_, size));
    multiply_keys(part, held, slots, group, key, value);
    for (int g = 0; g < group_; ++g) exponentiate(part, g);
    multiply_values(part, held, slots, value);
  }

  // weights [G, slots] = q [G, D] K^T [D, slots]; hidden slots get -infinity.
  void multiply_keys(Part& part, const Strip<T>& held, const Range& slots, const Group<T>& group,
                     const T* key, const T* value) const {
    Tile<T> tiles[2];
    tiles[0].fill(held, slots, part.begin, 0, key);
    for (int64_t slot = part.begin, n = 0; slot < part.end; slot += kTile, ++n) {
      const Tile<T>& now = tiles[n % 2];
      Tile<T>& next = tiles[(n + 1) % 2];
      // V is read after the last of K.
      if (slot + kTile < part.end) {
        next.fill(held, slots, slot + kTile, 0, key);
      } else {
        next.fill(held, slots, part.begin, held.value_offset(), value);
      }
      float* to = part.weights + (slot - part.begin);  // [G, count] of [G, stride]
      constexpr int kSlots = Group<T>::kSlots;
      const int count =
          static_cast<int>(round_up(std::min<int64_t>(kTile, part.end - slot), kSlots));
      for (int i = 0; i < count; i += kSlots) {
        next.prefetch(i, kSlots, cache_.head_size);
        group.dot(now.rows, i, slots.all_visible(slot + i, kSlots), to + i, stride_);
      }
      group.spread(count, to, stride_);
      if (!slots.all_visible(slot, count)) hide(slots, slot, count, to);
    }
  }

  // Logits are [G, count] of [G, stride].
  void hide(const Range& slots, int64_t slot, int count, float* logits) const {
    for (int i = 0; i < count; ++i) {
      if (slots.visible(slot + i)) continue;
      for (int g = 0; g < group_; ++g) logits[g * stride_ + i] = -kInfinity;
    }
  }

  // Logits of one query become weights, which are probabilities but for a factor.
  void exponentiate(Part& part, int g) const {
    float* x = part.weights + g * stride_;  // [count]
    const int64_t count = part.end - part.begin;
    Floats maxima = all(-kInfinity);
    for (int64_t i = 0; i < count; i += kLanes) maxima = larger(maxima, load(x + i));
    // A part of free slots alone has no finite maximum; any number serves.
    const float row_max = std::max(largest_of(maxima), -3.0e38f);
    const Floats shift = all(row_max * tensors_.scale), scale = all(tensors_.scale);
    Floats sum = {};
    for (int64_t i = 0; i < count; i += kLanes) {
      const Floats p = exp_of(load(x + i) * scale - shift);
      put(x + i, p);
      sum += p;
    }
    part.row_max[g] = row_max * tensors_.scale;
    part.row_sum[g] = sum_of(sum);
  }

  // partial_out [G, D] = weights [G, slots] V [slots, D].
  void multiply_values(Part& part, const Strip<T>& held, const Range& slots, const T* value) const {
    std::fill(part.partial_out, part.partial_out + group_ * cache_.head_size, 0.0f);
    Tile<T> tiles[2];
    const int64_t offset = held.value_offset();
    tiles[0].fill(held, slots, part.begin, offset, value);
    for (int64_t slot = part.begin, n = 0; slot < part.end; slot += kTile, ++n) {
      const Tile<T>&now = tiles[n % 2], &next = tiles[(n + 1) % 2];
      const bool more = slot + kTile < part.end;
      if (more) tiles[(n + 1) % 2].fill(held, slots, slot + kTile, offset, value);
      const int count = static_cast<int>(std::min<int64_t>(kTile, part.end - slot));
      add_values(now.rows, more ? next.rows : now.rows, count, part.weights + (slot - part.begin),
                 stride_, part.partial_out, group_, cache_.head_size);
    }
  }

  // Adds to the scores of the part, and finds its lowest.
  void score(Part& part) const {
    const bool adds = scoring_.power && field(kScores, part.request);
    const bool by_maximum = adds && scoring_.by_maximum && field(kInPrompt, part.request);
    const bool selects = field(kSelects, part.request);
    if (!adds && !selects) return;
    const Strip<T> held = strip(part);
    const int64_t newest = field(kLogicalStart, part.request) - scoring_.skip_recent;
    const int64_t logical_end = field(kLogicalStart, part.request) + 1;
    const Candidates candidates{static_cast<int32_t>(field(kNumSinks, part.request)),
                                static_cast<int32_t>(field(kRecentStart, part.request))};
    for_each_run(range(part), cache_.block_size, [&](int64_t page, int offset, int count) {
      float* scores = held.scores(page) + offset;  // [count]
      const int32_t* positions = scores_to_positions(scores);
      const int64_t slot = page * cache_.block_size + offset;
      if (by_maximum) {
        take_largest(part, scores, positions, count, slot - part.begin, newest);
      } else if (adds) {
        add_scores(part, scores, positions, count, slot - part.begin, newest);
      }
      if (!selects) return;
      if (scoring_.by_age) {
        offer_aged(part.lowest, candidates, scores, positions, count, slot, logical_end);
      } else if (!scoring_.by_page) {
        offer_run(part.lowest, candidates, scores, positions, count, slot);
      } else if (count == cache_.block_size) {
        offer_page(part.lowest, candidates, scores, positions, count, slot);
      }
    });
  }

  const int32_t* scores_to_positions(const float* scores) const {
    return reinterpret_cast<const int32_t*>(scores + cache_.block_size);
  }

  // Adds the sums over the group to scores [count], of slots from part.begin + start on; those with
  // positions after `newest` get nothing.
  void add_scores(const Part& part, float* scores, const int32_t* positions, int count,
                  int64_t start, int64_t newest) const {
    const bool squares = scoring_.power == 2;
    int i = 0;
    if (!scoring_.skip_recent) {
      for (; i + kLanes <= count; i += kLanes) {
        Floats sum = {};
        for (int g = 0; g < group_; ++g) {
          const Floats p = load(part.weights + g * stride_ + start + i) * all(part.factor[g]);
          sum += squares ? p * p : p;
        }
        put(scores + i, load(scores + i) + sum);
      }
    }
    for (; i < count; ++i) {
      if (positions[i] > newest) continue;
      float sum = 0.0f;
      for (int g = 0; g < group_; ++g) {
        const float p = part.weights[g * stride_ + start + i] * part.factor[g];
        sum += squares ? p * p : p;
      }
      scores[i] += sum;
    }
  }

  // The same of a token of the prompt, where its queries score by maximum.
  void take_largest(const Part& part, float* scores, const int32_t* positions, int count,
                    int64_t start, int64_t newest) const {
    for (int i = 0; i < count; ++i) {
      if (positions[i] > newest) continue;
      for (int g = 0; g < group_; ++g) {
        const float p = part.weights[g * stride_ + start + i] * part.factor[g];
        scores[i] = std::max(scores[i], scoring_.power == 2 ? p * p : p);
      }
    }
  }

  // Writes the outputs and the victim of a strip.
  void finish(const Part& part) const {
    for (int g = 0; g < group_; ++g) {
      put_out(tensors_, field(kToken, part.request), part.head * group_ + g,
              part.partial_out + g * cache_.head_size, cache_.head_size, part.factor[g]);
    }
    if (field(kSelects, part.request)) victim(part) = static_cast<int32_t>(part.lowest.slot);
  }

  template <class F>
  void for_each_part(const Part& of, F f) const {
    for (int i = 0; i < num_kv_splits_; ++i) {
      for (int j = 0; j < splits_[i].num_kept; ++j) {
        if (splits_[i].kept[j].same_strip(of)) f(splits_[i].kept[j]);
      }
    }
  }

  // The factors of one part, from the maxima and sums of all parts of its strip.
  void merge_sums(Part& part) const {
    for (int g = 0; g < group_; ++g) {
      float row_max = -kInfinity, row_sum = 0.0f;
      for_each_part(part, [&](const Part& p) { row_max = std::max(row_max, p.row_max[g]); });
      for_each_part(
          part, [&](const Part& p) { row_sum += p.row_sum[g] * exp_of(p.row_max[g] - row_max); });
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
  int32_t* victims_;
  int group_;  // G
  Work work_;
  int64_t stride_ = 0;
  int64_t part_floats_ = 0;
  int64_t thread_floats_ = 0;
  int num_kv_splits_ = 1;
  Split* splits_ = nullptr;
  float* floats_ = nullptr;
};

}  // namespace
}  // namespace h2o

extern "C" void h2o_decode(const H2oCache* cache, const H2oBatch* batch, const H2oTensors* tensors,
                           const H2oScoring* scoring, int32_t* victims) {
  using namespace h2o;
  if (cache->type == kFloat) Decode<float>(*cache, *batch, *tensors, *scoring, victims).run();
  if (cache->type == kBf16) Decode<Bf16>(*cache, *batch, *tensors, *scoring, victims).run();
  if (cache->type == kHalf) Decode<Half>(*cache, *batch, *tensors, *scoring, victims).run();
}
