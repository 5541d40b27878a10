// SPDX-License-Identifier: Apache-2.0
// A decode step computes one part of a strip: logits, weights, and their sums of V.
#pragma once

#include <algorithm>
#include <cmath>

#include "group.h"
#include "merge.h"
#include "split.h"

namespace h2o {

// P = softmax(q K^T * scale) and P V, but for the factors that all parts of a strip decide on. T is
// the type of the step's tensors, S the cache's.
template <class T, class S>
class Attention {
  static constexpr bool kSame = std::is_same<T, S>::value;

 public:
  Attention(const H2oCache& cache, const H2oBatch& batch, const H2oTensors& tensors,
            const H2oScoring& scoring, const Work& work, int32_t* victims)
      : group_(tensors.num_heads / cache.num_kv_heads),
        num_rows_(group_ + (cache.has_mass ? 1 : 0)),
        stride_(round_up(work.max_strip_len, kTile) + kLanes),
        cache_(cache),
        batch_(batch),
        tensors_(tensors),
        scoring_(scoring),
        work_(work),
        victims_(victims) {}

  int group() const { return group_; }
  int num_rows() const { return num_rows_; }
  int64_t stride() const { return stride_; }

  // Floats that place() gives to a part.
  int64_t part_floats() const {
    const int64_t size = cache_.head_size, victim = cache_.has_mass ? 2 * size : 0;
    return round_up(num_rows_ * stride_ + group_ * (3 + size) + victim, 16);
  }
  // Floats that attend() needs besides.
  int64_t group_floats() const {
    return own_floats() + (cache_.has_mass ? round_up(num_rows_ * cache_.head_size, 16) : 0);
  }

  int64_t field(H2oDecodeField row, int request) const { return batch_.field(row, request); }
  Strip<S> strip(const Part& part) const {
    return {cache_, batch_.blocks(part.request), part.head, work_.first_rows(part.request)};
  }
  int32_t& victim(const Part& part) const {
    const int64_t first_block_id = batch_.blocks(part.request)[0];
    return victims_[first_block_id * cache_.num_kv_heads + part.head];
  }

  // The slot that the new token takes.
  int64_t new_slot(const Part& part) const {
    return field(kOverwrites, part.request) ? victim(part) : part.strip_len - 1;
  }

  // Not where a mean would be rounded again and again.
  bool merges(const Part& part) const {
    return kSame && scoring_.merge > 0.0f && field(kOverwrites, part.request);
  }

  void place(Part& part, float* memory) const {
    part.weights = memory;
    part.extra = memory + group_ * stride_;
    part.row_max = memory + num_rows_ * stride_;
    part.row_sum = part.row_max + group_;
    part.factor = part.row_sum + group_;
    part.partial_out = part.factor + group_;
    part.victim = part.partial_out + group_ * cache_.head_size;
  }

  // Logits of the part; where no victim is merged, the new token is stored before and all the rest
  // is computed: weights, their sums, and partial_out.
  void attend(Part& part, float* memory) const {
    const Strip<S> held = strip(part);
    const int size = cache_.head_size;
    const T* rows = queries(part);
    if (cache_.has_mass) {
      T* copy = reinterpret_cast<T*>(memory + own_floats());  // [G + 1, D]
      std::copy(rows, rows + group_ * size, copy);
      std::copy(rows, rows + size, copy + group_ * size);
      if constexpr (kSame) {
        if (merges(part)) copy_victim(part, held, copy + group_ * size);
      }
      rows = copy;
    }
    if (!merges(part)) store(part, held);
    Group<T> group;
    group.set(memory, num_rows_, size, rows);
    multiply_keys(part, held, group);
    if (!merges(part)) weigh(part, held);
  }

  // The victim goes to the nearest key of its strip, if that is near enough, and the new token
  // takes its slot. `nearest`: of all parts of the strip, each of which is given it.
  void merge(Part& part, const Nearest& nearest) const {
    const Strip<S> held = strip(part);
    if constexpr (kSame) merge_victim(part, held, nearest);
    store(part, held);
    if (part.has(new_slot(part))) multiply_key(part, held, new_slot(part));
    weigh(part, held);
  }

 private:
  int64_t own_floats() const { return round_up(Group<T>::floats(num_rows_, cache_.head_size), 16); }

  const T* new_key(const Part& part) const {
    const int64_t token = field(kToken, part.request);
    return head_of<T>(tensors_.key, tensors_.key_stride, token, part.head, cache_.head_size);
  }
  const T* new_value(const Part& part) const {
    const int64_t token = field(kToken, part.request);
    return head_of<T>(tensors_.value, tensors_.value_stride, token, part.head, cache_.head_size);
  }
  // [G, D]
  const T* queries(const Part& part) const {
    const int64_t token = field(kToken, part.request);
    const int first = part.head * group_;
    return head_of<T>(tensors_.query, tensors_.query_stride, token, first, cache_.head_size);
  }

  // Stores the new token if its slot is in the part.
  void store(const Part& part, const Strip<S>& held) const {
    if (!part.has(new_slot(part))) return;
    held.store(new_slot(part), new_key(part), new_value(part), 0.0f,
               field(kLogicalStart, part.request));
  }

  void merge_victim(Part& part, const Strip<S>& held, const Nearest& nearest) const {
    const int64_t n = held.block_size, size = cache_.head_size;
    const T* victim = reinterpret_cast<const T*>(part.victim);  // K and V, [2, D]
    if (!part.has(nearest.slot)) return;
    const int64_t slot = nearest.slot;
    const float share = share_of(weight_of(part, held, slot), part.victim_weight);
    average(held.key(slot), victim, share, cache_.head_size);
    average(held.value(slot), victim + size, share, cache_.head_size);
    held.masses(slot / n)[slot % n] += part.victim_mass;
    multiply_key(part, held, slot);
  }

  // Keeps what the new token will overwrite; its key is the last query, too. From now on only keys
  // that are near enough are found.
  void copy_victim(Part& part, const Strip<S>& held, T* query) const {
    const int64_t slot = new_slot(part), n = held.block_size, size = cache_.head_size;
    T* copy = reinterpret_cast<T*>(part.victim);
    std::copy(held.key(slot), held.key(slot) + size, copy);
    std::copy(held.value(slot), held.value(slot) + size, copy + size);
    std::copy(copy, copy + size, query);
    part.victim_mass = held.masses(slot / n)[slot % n];
    part.victim_weight = weight_of(part, held, slot);
    part.nearest.square = scoring_.merge * scoring_.merge * square_of(copy, size);
  }

  // What a token weighs when two are merged: the attention that it is paid, or its mass.
  float weight_of(const Part& part, const Strip<S>& held, int64_t slot) const {
    const int64_t page = slot / held.block_size, offset = slot % held.block_size;
    if (!scoring_.by_age) return held.masses(page)[offset];
    const int64_t age = field(kLogicalStart, part.request) - held.positions(page)[offset];
    const float mean = held.scores(page)[offset] / static_cast<float>(age);
    return scoring_.power == 2 ? std::sqrt(mean) : mean;
  }

  // The logits of one slot again.
  void multiply_key(Part& part, const Strip<S>& held, int64_t slot) const {
    for (int g = 0; g < group_; ++g) {
      const T* q = queries(part) + g * cache_.head_size;
      const S* k = held.key(slot);
      Floats sum = {};
      for (int d = 0; d < cache_.head_size; d += kLanes) sum += load(q + d) * load(k + d);
      part.weights[g * stride_ + slot - part.begin] = sum_of(sum);
    }
  }

  // Logits become weights, and those partial_out.
  void weigh(Part& part, const Strip<S>& held) const {
    if (cache_.has_mass) {
      std::fill(part.extra, part.extra + round_up(part.end - part.begin, kLanes), 1.0f);
      const auto copy = [&](int64_t page, int offset, int count) {
        const float* from = held.masses(page) + offset;
        std::copy(from, from + count, part.extra + page * cache_.block_size + offset - part.begin);
      };
      for_each_run(part.begin, part.end, cache_.block_size, copy);
    }
    for (int g = 0; g < group_; ++g) {
      if (cache_.has_mass) {
        exponentiate<true>(part, g);
      } else {
        exponentiate<false>(part, g);
      }
    }
    multiply_values(part, held);
  }

  // weights [G, slots] = q [G, D] K^T [D, slots]; after the last slot comes -infinity.
  void multiply_keys(Part& part, const Strip<S>& held, const Group<T>& group) const {
    Tile<S> tiles[2];
    tiles[0].fill(held, part.begin, part.end, 0);
    for (int64_t slot = part.begin, n = 0; slot < part.end; slot += kTile, ++n) {
      const Tile<S>& now = tiles[n % 2];
      Tile<S>& next = tiles[(n + 1) % 2];
      // V is read after the last of K.
      if (slot + kTile < part.end) {
        next.fill(held, slot + kTile, part.end, 0);
      } else {
        next.fill(held, part.begin, part.end, held.value_offset());
      }
      float* to = part.weights + (slot - part.begin);  // [G, count] of [G, stride]
      constexpr int kSlots = Group<T>::kSlots;
      const int count =
          static_cast<int>(round_up(std::min<int64_t>(kTile, part.end - slot), kSlots));
      for (int i = 0; i < count; i += kSlots) {
        next.prefetch(i, kSlots, cache_.head_size);
        group.dot(now.rows, i, slot + i + kSlots <= part.end, to + i, stride_);
      }
      group.spread(count, to, stride_);
      if (merges(part)) find_nearest(part, now, slot);
      for (int64_t i = part.end - slot; i < count; ++i) {
        for (int g = 0; g < group_; ++g) to[g * stride_ + i] = -kInfinity;
      }
    }
  }

  // Offers a tile's slots, from `slot` on, without the victim's own.
  void find_nearest(Part& part, const Tile<S>& tile, int64_t slot) const {
    float* dots = part.extra + (slot - part.begin);
    const int count = static_cast<int>(std::min<int64_t>(kTile, part.end - slot));
    const int64_t victim = new_slot(part);
    if (victim >= slot && victim < slot + count) dots[victim - slot] = 0.0f;
    offer_keys(part.nearest, tile.rows, dots, count, slot, cache_.head_size);
  }

  // Logits of one query become weights, which are probabilities but for a factor.
  template <bool kHasMass>
  void exponentiate(Part& part, int g) const {
    float* x = part.weights + g * stride_;  // [count]
    const int64_t count = part.end - part.begin;
    Floats maxima = all(-kInfinity);
    for (int64_t i = 0; i < count; i += kLanes) maxima = larger(maxima, load(x + i));
    const float row_max = largest_of(maxima);
    const Floats shift = all(row_max * tensors_.scale), scale = all(tensors_.scale);
    Floats sum = {};
    for (int64_t i = 0; i < count; i += kLanes) {
      Floats p = exp_of(load(x + i) * scale - shift);
      if constexpr (kHasMass) p *= load(part.extra + i);
      put(x + i, p);
      sum += p;
    }
    part.row_max[g] = row_max * tensors_.scale;
    part.row_sum[g] = sum_of(sum);
  }

  // partial_out [G, D] = weights [G, slots] V [slots, D].
  void multiply_values(Part& part, const Strip<S>& held) const {
    std::fill(part.partial_out, part.partial_out + group_ * cache_.head_size, 0.0f);
    Tile<S> tiles[2];
    const int64_t offset = held.value_offset();
    tiles[0].fill(held, part.begin, part.end, offset);
    for (int64_t slot = part.begin, n = 0; slot < part.end; slot += kTile, ++n) {
      const Tile<S>&now = tiles[n % 2], &next = tiles[(n + 1) % 2];
      const bool more = slot + kTile < part.end;
      if (more) tiles[(n + 1) % 2].fill(held, slot + kTile, part.end, offset);
      const int count = static_cast<int>(std::min<int64_t>(kTile, part.end - slot));
      add_values(now.rows, more ? next.rows : now.rows, count, part.weights + (slot - part.begin),
                 stride_, part.partial_out, group_, cache_.head_size);
    }
  }

  int group_;     // G
  int num_rows_;  // queries that are multiplied with K: with masses, a victim's key is one more
  int64_t stride_;
  const H2oCache& cache_;
  const H2oBatch& batch_;
  const H2oTensors& tensors_;
  const H2oScoring& scoring_;
  const Work& work_;
  int32_t* victims_;
};

}  // namespace h2o
