// SPDX-License-Identifier: Apache-2.0
// The survivors of each KV head move to the front of its slots, in order of position: tokens with
// the best ranks, or whole pages with the best sums of ranks. Where heads share slots, the best
// tokens of all of them say how many each has.

#include <algorithm>

#include "cache.h"
#include "team.h"

namespace h2o {
namespace {

// Calls f of an element as large as the cache's: what moves is not interpreted.
template <class F>
void with_elements(const H2oCache& cache, F f) {
  if (cache.type == kFloat) f(float());
  if (cache.type == kBf16 || cache.type == kHalf) f(Half());
  if (cache.type == kE4m3 || cache.type == kE5m2) f(E5m2());
}

// Ranks as unsigned numbers, the best lowest: the safe ones, then by score, then by age.
inline uint64_t rank(bool safe, float score, int64_t slot) {
  const uint32_t bits = bit_cast<uint32_t>(score);
  const uint32_t ascending = bits & 0x80000000u ? ~bits : bits | 0x80000000u;
  const uint64_t level = safe ? 0 : (uint64_t{1} << 32) + (0xffffffffu - ascending);
  return level << 31 | static_cast<uint64_t>(slot);
}

// Writes the ranks of all slots, [attended_len]. By page, each token has its page's, and a page is
// safe that has a safe token or is not full.
template <class T>
void rank_slots(const Strip<T>& strip, const H2oPacked& request, const H2oScoring& scoring,
                uint64_t* ranks) {
  const int64_t length = request.attended_len;
  for (int64_t start = 0; start < length; start += strip.block_size) {
    const int64_t page = start / strip.block_size;
    const int64_t count = std::min<int64_t>(strip.block_size, length - start);
    const float* scores = strip.scores(page);          // [count]
    const int32_t* positions = strip.positions(page);  // [count]
    auto ranked = [&](int64_t i) {
      if (!scoring.by_age) return scores[i];
      return scores[i] / static_cast<float>(request.logical_end - positions[i]);
    };
    auto is_safe = [&](int64_t i) {
      return positions[i] >= request.recent_start || positions[i] < request.num_sinks;
    };
    float sum = 0.0f;
    bool page_is_safe = count < strip.block_size;
    for (int64_t i = 0; scoring.by_page && i < count; ++i) {
      sum += ranked(i);
      page_is_safe |= is_safe(i);
    }
    for (int64_t i = 0; i < count; ++i) {
      const bool safe = scoring.by_page ? page_is_safe : is_safe(i);
      // Adding zero makes one zero of both, which compare as equal.
      ranks[start + i] = rank(safe, (scoring.by_page ? sum : ranked(i)) + 0.0f, start + i);
    }
  }
}

// Writes the survivors' slots, in order; reorders the ranks, [length].
void select_survivors(uint64_t* ranks, int64_t length, int64_t num_survivors, int64_t* survivors) {
  std::nth_element(ranks, ranks + num_survivors - 1, ranks + length);
  for (int64_t i = 0; i < num_survivors; ++i) {
    survivors[i] = static_cast<int64_t>(ranks[i] & 0x7fffffffu);
  }
  std::sort(survivors, survivors + num_survivors);
}

// Writes where each head's rows begin, [H + 1]; `ranks` is [H, attended_len]. Twin of split.py.
void share_rows(const uint64_t* ranks, const H2oPacked& request, const H2oCache& cache,
                int32_t* first_rows) {
  Scratch competing_memory, tenths_memory;
  const int num_heads = cache.num_kv_heads, block_size = cache.block_size;
  const int64_t length = request.attended_len, capacity = request.num_survivors + 1;
  const int64_t num_heavy =
      request.num_survivors - request.num_sinks - (request.logical_end - request.recent_start);
  uint64_t* competing = competing_memory.get<uint64_t>(num_heads * length);
  int64_t* tenths = tenths_memory.get<int64_t>(num_heads);
  int64_t num_competing = 0;
  for (int64_t i = 0; i < num_heads * length; ++i) {
    const uint64_t level = ranks[i] >> 31;
    if (level) competing[num_competing++] = level << 16 | static_cast<uint64_t>(i / length);
  }
  for (int h = 0; h < num_heads; ++h) tenths[h] = 10 * capacity - cache.shared_tenths * num_heavy;
  const int64_t num_best = num_heads * num_heavy;
  if (num_best) std::nth_element(competing, competing + num_best - 1, competing + num_competing);
  for (int64_t i = 0; i < num_best; ++i) tenths[competing[i] & 0xffff] += cache.shared_tenths;
  const int64_t least =
      (capacity - num_heavy + std::min<int64_t>(num_heavy, 1) + block_size - 1) / block_size;
  const int64_t most = (length + 1) / block_size;
  int32_t* pages = first_rows + 1;  // [H], until they are summed up
  int64_t left = num_heads * capacity / block_size;
  for (int h = 0; h < num_heads; ++h) {
    pages[h] = static_cast<int32_t>(std::max(tenths[h] / (10 * block_size), least));
    left -= pages[h];
  }
  const auto missing = [&](int h) { return tenths[h] - int64_t{10} * block_size * pages[h]; };
  while (left != 0) {
    int chosen = -1;
    for (int h = 0; h < num_heads; ++h) {
      if (left > 0 ? pages[h] >= most : pages[h] <= least) continue;
      const bool better =
          chosen < 0 || (left > 0 ? missing(h) > missing(chosen) : missing(h) < missing(chosen));
      if (better) chosen = h;
    }
    pages[chosen] += left > 0 ? 1 : -1;
    left -= left > 0 ? 1 : -1;
  }
  first_rows[0] = 0;
  for (int h = 0; h < num_heads; ++h) first_rows[h + 1] += first_rows[h];
}

template <class T>
void pack(const H2oCache& cache, const H2oPacked& request, int head, const H2oScoring& scoring) {
  const int64_t num_survivors = request.num_survivors;
  if (num_survivors <= 0 || num_survivors >= request.attended_len) return;
  static thread_local Scratch ranks_memory, survivors_memory;
  const Strip<T> strip(cache, request.block_table, head);
  uint64_t* ranks = ranks_memory.get<uint64_t>(request.attended_len);
  int64_t* survivors = survivors_memory.get<int64_t>(num_survivors);
  rank_slots(strip, request, scoring, ranks);
  select_survivors(ranks, request.attended_len, num_survivors, survivors);
  // Slots are in order of position, so no survivor overwrites a later one.
  for (int64_t to = 0; to < num_survivors; ++to) {
    const int64_t from = survivors[to], n = strip.block_size;
    if (from == to) continue;
    strip.store(to, strip.key(from), strip.value(from), strip.scores(from / n)[from % n],
                strip.positions(from / n)[from % n]);
    if (strip.keeps_scores) *strip.kept_score(to) = *strip.kept_score(from);
  }
}

// The heads that share slots, of a layer or of all. Rows of one head may become another's: all
// survivors are copied before any is stored.
template <class T>
void pack_shared(const H2oCache& cache, const H2oPacked& request, const H2oScoring& scoring) {
  // Not kept: it may be all layers', of one prompt.
  Scratch ranks_memory, survivors_memory, tokens_memory;
  const int64_t length = request.attended_len, n = cache.block_size;
  const int64_t head_bytes = cache.head_size * static_cast<int64_t>(sizeof(T));
  // K, V, score, position, the score that is kept
  const int64_t token_bytes = 2 * head_bytes + 8 + 4 * (cache.keeps_scores != 0);
  const int num_heads = cache.num_kv_heads;
  const int32_t* blocks = request.block_table;
  int32_t* first_rows = cache.first_rows + static_cast<int64_t>(blocks[0]) * (num_heads + 1);
  uint64_t* ranks = ranks_memory.get<uint64_t>(num_heads * length);  // [H, length]
  for (int h = 0; h < num_heads; ++h) {
    const Strip<T> strip(cache, blocks, h);
    rank_slots(strip, request, scoring, ranks + h * length);
  }
  share_rows(ranks, request, cache, first_rows);
  const auto num_survivors = [&](int h) { return (first_rows[h + 1] - first_rows[h]) * n - 1; };
  int64_t* survivors = survivors_memory.get<int64_t>(length);
  char* tokens = tokens_memory.get<char>(num_heads * (request.num_survivors + 1) * token_bytes);
  char* token = tokens;
  for (int h = 0; h < num_heads; ++h) {
    const Strip<T> strip(cache, blocks, h);
    select_survivors(ranks + h * length, length, num_survivors(h), survivors);
    for (int64_t i = 0; i < num_survivors(h); ++i, token += token_bytes) {
      const int64_t slot = survivors[i];
      std::memcpy(token, strip.key(slot), head_bytes);
      std::memcpy(token + head_bytes, strip.value(slot), head_bytes);
      std::memcpy(token + 2 * head_bytes, strip.scores(slot / n) + slot % n, 4);
      std::memcpy(token + 2 * head_bytes + 4, strip.positions(slot / n) + slot % n, 4);
      if (strip.keeps_scores) std::memcpy(token + 2 * head_bytes + 8, strip.kept_score(slot), 4);
    }
  }
  token = tokens;
  for (int h = 0; h < num_heads; ++h) {
    const Strip<T> strip(cache, blocks, h, first_rows);
    for (int64_t to = 0; to < num_survivors(h); ++to, token += token_bytes) {
      float score;
      int32_t position;
      std::memcpy(&score, token + 2 * head_bytes, 4);
      std::memcpy(&position, token + 2 * head_bytes + 4, 4);
      strip.store(to, reinterpret_cast<const T*>(token),
                  reinterpret_cast<const T*>(token + head_bytes), score, position);
      if (strip.keeps_scores) std::memcpy(strip.kept_score(to), token + 2 * head_bytes + 8, 4);
    }
  }
}

}  // namespace
}  // namespace h2o

extern "C" void h2o_pack_survivors(const H2oCache* caches, int num_caches,
                                   const H2oPacked* requests, int num_requests,
                                   const H2oScoring* scoring) {
  using namespace h2o;
  const int num_heads = num_caches ? caches[0].num_kv_heads : 0;
  const int64_t num_strips = static_cast<int64_t>(num_caches) * num_requests * num_heads;
  auto body = [&](Team team) {
    for (int64_t i = team.thread; i < num_strips; i += team.size) {
      const H2oCache& cache = caches[i / num_heads / num_requests];
      const H2oPacked& request = requests[i / num_heads % num_requests];
      const int head = static_cast<int>(i % num_heads);
      if (request.splits) continue;
      with_elements(cache, [&](auto s) { pack<decltype(s)>(cache, request, head, *scoring); });
    }
    for (int64_t i = team.thread; i < num_strips / num_heads; i += team.size) {
      const H2oCache& cache = caches[i / num_requests];
      const H2oPacked& request = requests[i % num_requests];
      if (!request.splits) continue;
      with_elements(cache, [&](auto s) { pack_shared<decltype(s)>(cache, request, *scoring); });
    }
  };
  parallel(static_cast<int>(std::min<int64_t>(max_threads(), num_strips)), body);
}
