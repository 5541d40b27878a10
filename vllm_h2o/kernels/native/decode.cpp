// One new token of each of B requests: store, attend, score, select the next victims.
//
//   P = softmax(q K^T * scale); out = P V; score[j] += sum over the group P[., j]^power
//
// arXiv 2306.14048, Algorithm 1: one pass over K, one over V. The work, all slots of all requests
// and KV heads in a row, is cut into one range of equal length per thread; a strip that lies across
// a cut is put together from its parts.

#include <algorithm>
#include <type_traits>

#include "decode.h"
#include "group.h"
#include "team.h"

extern "C" {

// Rows of `orders`, as batch.py has them.
struct H2oBatch {
  const int32_t* table;
  const int64_t* orders;
  int64_t table_stride;
  int64_t field_stride;    // from row to row
  int64_t request_stride;  // within one
  int32_t num_requests;
};
}

namespace h2o {
namespace {

enum Order {
  kToken,
  kAttendedLen,
  kOverwrites,
  kSelects,
  kPosition,
  kRecentFrom,
  kNumSinks,
  kSeed,
  kNextOffset,
  kNumFreeSlots,
  kScores
};

// A request's slots that one thread has; of a strip that it shares with others when not whole.
struct Part {
  int request = -1;
  int head = 0;
  int64_t from = 0;
  int64_t to = 0;
  int64_t length = 0;  // of the whole strip
  Lowest lowest;
  float* weights = nullptr;  // [G, stride]: e^(logit - highest)
  float* highest = nullptr;  // [G]
  float* total = nullptr;    // [G], of the weights
  float* factor = nullptr;   // [G]: weights times that are probabilities
  float* out = nullptr;      // [G, D]: sum of weights times V

  bool whole() const { return from == 0 && to == length; }
  bool same_strip(const Part& other) const {
    return request == other.request && head == other.head;
  }
};

// Where the work of all requests is cut.
struct Cut {
  int request;
  int head;
  int64_t slot;
};

// What lies between two cuts, and the strips in it that are not whole: at its ends.
struct Share {
  Cut begin;
  Cut end;
  Part kept[2];
  int num_kept = 0;
};

template <class T>
class Decode {
 public:
  Decode(const H2oCache& page, const H2oBatch& batch, const H2oTokens& tokens,
         const H2oScoring& scoring, int32_t* victims)
      : page_(page),
        batch_(batch),
        tokens_(tokens),
        scoring_(scoring),
        victims_(victims),
        group_(tokens.num_heads / page.num_kv_heads) {
    for (int b = 0; b < batch.num_requests; ++b) {
      total_ += order(kAttendedLen, b);
      longest_ = std::max(longest_, order(kAttendedLen, b));
    }
    step_ = scoring.by_page ? round_up(kTile, page.block_size) : kTile;
    stride_ = round_up(longest_, kTile) + kLanes;
    part_floats_ = round_up(group_ * (stride_ + 3 + page.head_size), 16);
    thread_floats_ = 2 * part_floats_ + round_up(Group<T>::floats(group_, page.head_size), 16);
  }

  void run() {
    static thread_local Scratch shares_memory, floats_memory;
    const int64_t bytes = total_ * page_.num_kv_heads * 2 * page_.head_size * sizeof(T);
    num_shares_ = bytes < kSerialBytes ? 1 : max_threads();
    shares_ = shares_memory.get<Share>(num_shares_);
    bool any_cut = false;
    for (int i = 0; i < num_shares_; ++i) {
      shares_[i] = Share();
      shares_[i].begin = i ? shares_[i - 1].end : Cut{0, 0, 0};
      shares_[i].end = cut(i + 1);
      any_cut |= shares_[i].end.slot != 0;
    }
    floats_ = floats_memory.get<float>(num_shares_ * thread_floats_);
    auto body = [this, any_cut](Team team) { work(team, any_cut); };
    parallel(num_shares_, body);
  }

 private:
  // Below so much K and V, waking threads costs more than they save.
  static constexpr int64_t kSerialBytes = 1 << 15;

  int64_t order(Order row, int b) const { return batch_.orders[row * batch_.field_stride + b * batch_.request_stride]; }
  const int32_t* table(int b) const { return batch_.table + b * batch_.table_stride; }
  Strip<T> strip(const Part& part) const { return {page_, table(part.request), part.head}; }
  int32_t& victim(const Part& part) const {
    return victims_[static_cast<int64_t>(table(part.request)[0]) * page_.num_kv_heads + part.head];
  }

  // The slot that the new token takes.
  int64_t slot(const Part& part) const {
    if (!order(kOverwrites, part.request)) return order(kAttendedLen, part.request) - 1;
    return victim(part) + order(kNextOffset, part.request);
  }

  // The end of share i - 1: at a strip's edge if one is near.
  Cut cut(int i) const {
    const int64_t work = total_ * page_.num_kv_heads;
    int64_t left = i == num_shares_ ? work : work * i / num_shares_;
    const int64_t near = std::max<int64_t>(step_, work / num_shares_ / 32);
    for (int b = 0; b < batch_.num_requests; ++b) {
      const int64_t length = order(kAttendedLen, b);
      if (left >= length * page_.num_kv_heads) {
        left -= length * page_.num_kv_heads;
        continue;
      }
      const int head = static_cast<int>(left / length);
      const int64_t at = (left % length + step_ / 2) / step_ * step_;
      if (at < near) return {b, head, 0};
      if (at + near <= length) return {b, head, at};
      return head + 1 < page_.num_kv_heads ? Cut{b, head + 1, 0} : Cut{b + 1, 0, 0};
    }
    return {batch_.num_requests, 0, 0};
  }

  // A team may have fewer threads than there are shares.
  template <class F>
  void for_each_share(Team team, F f) {
    for (int i = team.thread; i < num_shares_; i += team.size) f(shares_[i], i);
  }

  void work(Team team, bool any_cut) {
    for_each_share(team, [&](Share& share, int i) { attend(share, i); });
    if (!any_cut) return;
    team.barrier();
    for_each_share(team, [&](Share& share, int) {
      for (int i = 0; i < share.num_kept; ++i) {
        unite(share.kept[i]);
        score(share.kept[i]);
      }
    });
    team.barrier();
    for_each_share(team, [&](Share& share, int) {
      for (int i = 0; i < share.num_kept; ++i) {
        if (share.kept[i].from == 0) gather(share.kept[i]);
      }
    });
  }

  void attend(Share& share, int index) {
    [[maybe_unused]] typename Group<T>::Tiles tiles(group_);
    float* memory = floats_ + index * thread_floats_;
    const Cut &begin = share.begin, &end = share.end;
    for (int b = begin.request; b <= end.request && b < batch_.num_requests; ++b) {
      const int64_t length = order(kAttendedLen, b);
      if (length == 0 && b < end.request) pad(b);
      const int first = b == begin.request ? begin.head : 0;
      const int last = b == end.request ? end.head : page_.num_kv_heads - 1;
      for (int h = first; h <= last && length; ++h) {
        Part part;
        part.request = b;
        part.head = h;
        part.length = length;
        part.from = b == begin.request && h == begin.head ? begin.slot : 0;
        part.to = b == end.request && h == end.head ? end.slot : length;
        if (part.from >= part.to) continue;
        place(part, memory + (share.num_kept ? part_floats_ : 0));
        attend(part, memory + 2 * part_floats_);
        if (!part.whole()) {
          share.kept[share.num_kept++] = part;
          continue;
        }
        for (int g = 0; g < group_; ++g) part.factor[g] = 1.0f / part.total[g];
        score(part);
        finish(part);
      }
    }
  }

  void pad(int b) const {
    const int64_t bytes = out_bytes(tokens_);
    std::memset(tokens_.out + order(kToken, b) * tokens_.out_stride * bytes, 0,
                static_cast<size_t>(tokens_.num_heads) * page_.head_size * bytes);
  }

  void place(Part& part, float* memory) const {
    part.weights = memory;
    part.highest = memory + group_ * stride_;
    part.total = part.highest + group_;
    part.factor = part.total + group_;
    part.out = part.factor + group_;
  }

  Range range(const Part& part) const {
    const int64_t hole = slot(part) + 1;
    return {part.from, part.to, hole, hole + order(kNumFreeSlots, part.request)};
  }

  // Logits of the part, their maximum, and both sums with e^(logit - maximum).
  void attend(Part& part, float* memory) const {
    const Strip<T> held = strip(part);
    const Range seen = range(part);
    const int size = page_.head_size;
    const int64_t token = order(kToken, part.request);
    const T* key = reinterpret_cast<const T*>(tokens_.key) + token * tokens_.key_stride +
                   part.head * size;
    const T* value = reinterpret_cast<const T*>(tokens_.value) + token * tokens_.value_stride +
                     part.head * size;
    const int64_t own = slot(part);
    if (own >= part.from && own < part.to) {
      const float first =
          tokens_.first ? tokens_.first[token * page_.num_kv_heads + part.head] : 0.0f;
      held.store(own, key, value, first, order(kPosition, part.request));
    }
    Group<T> group;
    group.set(memory, group_, size,
              tokens_.query + (token * tokens_.query_stride + part.head * group_ * size) *
                                  static_cast<int64_t>(sizeof(T)));
    logits(part, held, seen, group, key, value);
    for (int g = 0; g < group_; ++g) soften(part, g);
    weigh(part, held, seen, value);
  }

  void logits(Part& part, const Strip<T>& held, const Range& seen, const Group<T>& group,
              const T* key, const T* value) const {
    Tile<T> tiles[2];
    tiles[0].fill(held, seen, part.from, 0, key);
    for (int64_t at = part.from, n = 0; at < part.to; at += kTile, ++n) {
      const Tile<T>& now = tiles[n % 2];
      Tile<T>& next = tiles[(n + 1) % 2];
      // Behind the last of K comes the first of V.
      if (at + kTile < part.to) {
        next.fill(held, seen, at + kTile, 0, key);
      } else {
        next.fill(held, seen, part.from, held.value_offset(), value);
      }
      float* to = part.weights + (at - part.from);
      constexpr int kSlots = Group<T>::kSlots;
      const int count = static_cast<int>(round_up(std::min<int64_t>(kTile, part.to - at), kSlots));
      for (int i = 0; i < count; i += kSlots) {
        next.prefetch(i, kSlots, page_.head_size);
        group.dot(now.rows, i, seen.all_visible(at + i, kSlots), to + i, stride_);
      }
      group.spread(count, to, stride_);
      if (!seen.all_visible(at, count)) hide(seen, at, count, to);
    }
  }

  void hide(const Range& seen, int64_t at, int count, float* logits) const {
    for (int i = 0; i < count; ++i) {
      if (seen.visible(at + i)) continue;
      for (int g = 0; g < group_; ++g) logits[g * stride_ + i] = -kInfinity;
    }
  }

  // Logits of one query become probabilities but for a factor.
  void soften(Part& part, int g) const {
    float* x = part.weights + g * stride_;
    const int64_t count = part.to - part.from;
    Floats most = all(-kInfinity);
    for (int64_t i = 0; i < count; i += kLanes) most = larger(most, load(x + i));
    // A range of evicted tokens alone has no finite maximum; any number serves.
    const float highest = std::max(largest_of(most), -3.0e38f);
    const Floats shift = all(highest * tokens_.scale), scale = all(tokens_.scale);
    Floats sum = {};
    for (int64_t i = 0; i < count; i += kLanes) {
      const Floats p = exp_of(load(x + i) * scale - shift);
      put(x + i, p);
      sum += p;
    }
    part.highest[g] = highest * tokens_.scale;
    part.total[g] = sum_of(sum);
  }

  void weigh(Part& part, const Strip<T>& held, const Range& seen, const T* value) const {
    std::fill(part.out, part.out + group_ * page_.head_size, 0.0f);
    Tile<T> tiles[2];
    const int64_t offset = held.value_offset();
    tiles[0].fill(held, seen, part.from, offset, value);
    for (int64_t at = part.from, n = 0; at < part.to; at += kTile, ++n) {
      const Tile<T>&now = tiles[n % 2], &next = tiles[(n + 1) % 2];
      const bool more = at + kTile < part.to;
      if (more) tiles[(n + 1) % 2].fill(held, seen, at + kTile, offset, value);
      const int count = static_cast<int>(std::min<int64_t>(kTile, part.to - at));
      add_values(now.rows, more ? next.rows : now.rows, count, part.weights + (at - part.from),
                 stride_, part.out, group_, page_.head_size);
    }
  }

  // Adds to the scores of the part, and finds its lowest.
  void score(Part& part) const {
    const bool adds = scoring_.power && order(kScores, part.request);
    const bool selects = order(kSelects, part.request);
    if (!adds && !selects) return;
    const Strip<T> held = strip(part);
    const int64_t oldest = order(kPosition, part.request) - scoring_.skip_recent;
    const int64_t age_from = order(kPosition, part.request) + 1;
    const Candidates candidates{static_cast<int32_t>(order(kNumSinks, part.request)),
                                static_cast<int32_t>(order(kRecentFrom, part.request))};
    for_each_run(range(part), page_.block_size, [&](int64_t page, int offset, int count) {
      float* scores = held.scores(page) + offset;
      const int32_t* positions = scores_to_positions(scores);
      const int64_t first = page * page_.block_size + offset;
      if (adds) add_scores(part, scores, positions, count, first - part.from, oldest);
      if (!selects) return;
      if (scoring_.by_age) {
        offer_aged(part.lowest, candidates, scores, positions, count, first, age_from);
      } else if (!scoring_.by_page) {
        offer_run(part.lowest, candidates, scores, positions, count, first);
      } else if (count == page_.block_size) {
        offer_page(part.lowest, candidates, scores, positions, count, first);
      }
    });
  }

  const int32_t* scores_to_positions(const float* scores) const {
    return reinterpret_cast<const int32_t*>(scores + page_.block_size);
  }

  void add_scores(const Part& part, float* scores, const int32_t* positions, int count, int64_t at,
                  int64_t oldest) const {
    const bool squares = scoring_.power == 2;
    int i = 0;
    if (!scoring_.skip_recent) {
      for (; i + kLanes <= count; i += kLanes) {
        Floats sum = {};
        for (int g = 0; g < group_; ++g) {
          const Floats p = load(part.weights + g * stride_ + at + i) * all(part.factor[g]);
          sum += squares ? p * p : p;
        }
        put(scores + i, load(scores + i) + sum);
      }
    }
    for (; i < count; ++i) {
      if (positions[i] > oldest) continue;
      float sum = 0.0f;
      for (int g = 0; g < group_; ++g) {
        const float p = part.weights[g * stride_ + at + i] * part.factor[g];
        sum += squares ? p * p : p;
      }
      scores[i] += sum;
    }
  }

  // Writes the outputs and the victim of a strip.
  void finish(const Part& part) const {
    const int64_t token = order(kToken, part.request), bytes = out_bytes(tokens_);
    for (int g = 0; g < group_; ++g) {
      const int64_t at = token * tokens_.out_stride + (part.head * group_ + g) * page_.head_size;
      put_out(tokens_.out + at * bytes, tokens_.out_type, part.out + g * page_.head_size,
              page_.head_size, part.factor[g]);
    }
    if (order(kSelects, part.request)) victim(part) = static_cast<int32_t>(part.lowest.slot);
  }

  template <class F>
  void for_each_part(const Part& of, F f) const {
    for (int i = 0; i < num_shares_; ++i) {
      for (int j = 0; j < shares_[i].num_kept; ++j) {
        if (shares_[i].kept[j].same_strip(of)) f(shares_[i].kept[j]);
      }
    }
  }

  // Factors of one part, from the sums of all parts of its strip.
  void unite(Part& part) const {
    for (int g = 0; g < group_; ++g) {
      float highest = -kInfinity, total = 0.0f;
      for_each_part(part, [&](const Part& p) { highest = std::max(highest, p.highest[g]); });
      for_each_part(part, [&](const Part& p) {
        total += p.total[g] * exp_of(p.highest[g] - highest);
      });
      part.factor[g] = exp_of(part.highest[g] - highest) / total;
    }
  }

  // The first part of a strip takes over what the others found.
  void gather(Part& part) const {
    const int size = group_ * page_.head_size;
    for (int i = 0; i < size; ++i) part.out[i] *= part.factor[i / page_.head_size];
    for_each_part(part, [&](const Part& other) {
      if (other.from == part.from) return;
      for (int i = 0; i < size; ++i) part.out[i] += other.out[i] * other.factor[i / page_.head_size];
      const Lowest& found = other.lowest;
      if (found.position >= 0) part.lowest.offer(found.score, found.position, found.slot);
    });
    std::fill(part.factor, part.factor + group_, 1.0f);
    finish(part);
  }

  const H2oCache& page_;
  const H2oBatch& batch_;
  const H2oTokens& tokens_;
  const H2oScoring& scoring_;
  int32_t* victims_;
  int group_;
  int64_t total_ = 0;
  int64_t longest_ = 0;
  int64_t step_ = kTile;
  int64_t stride_ = 0;
  int64_t part_floats_ = 0;
  int64_t thread_floats_ = 0;
  int num_shares_ = 1;
  Share* shares_ = nullptr;
  float* floats_ = nullptr;
};

}  // namespace
}  // namespace h2o

extern "C" void h2o_decode(const H2oCache* page, const H2oBatch* batch, const H2oTokens* tokens,
                           const H2oScoring* scoring, int32_t* victims) {
  using namespace h2o;
  if (page->type == kFloat) Decode<float>(*page, *batch, *tokens, *scoring, victims).run();
  if (page->type == kBf16) Decode<Bf16>(*page, *batch, *tokens, *scoring, victims).run();
  if (page->type == kHalf) Decode<Half>(*page, *batch, *tokens, *scoring, victims).run();
}
