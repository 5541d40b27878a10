// After a prompt's last chunk: the survivors of each KV head move to the front of its slots.

#include <algorithm>

#include "cache.h"
#include "team.h"

namespace h2o {
namespace {

// Ranks as unsigned numbers, the best lowest: the safe ones, then by score, then by age.
inline uint64_t rank(bool safe, float score, int64_t slot) {
  const uint32_t bits = bit_cast<uint32_t>(score);
  const uint32_t ascending = bits & 0x80000000u ? ~bits : bits | 0x80000000u;
  const uint64_t level = safe ? 0 : (uint64_t{1} << 32) + (0xffffffffu - ascending);
  return level << 31 | static_cast<uint64_t>(slot);
}

// W[j] = the largest of the scores U[j - reach ... j]. Slots of a prompt are in order of position,
// and hold every position; from the last one on, none is read that has been written.
template <class T>
void extend_scores(const Strip<T>& strip, int64_t length, int64_t reach) {
  const int64_t n = strip.block_size;
  for (int64_t slot = length - 1; slot > 0; --slot) {
    float largest = strip.scores(slot / n)[slot % n];
    for (int64_t other = std::max<int64_t>(slot - reach, 0); other < slot; ++other) {
      largest = std::max(largest, strip.scores(other / n)[other % n]);
    }
    strip.scores(slot / n)[slot % n] = largest;
  }
}

// Writes the survivors' slots, in order; `ranks` has room for all.
template <class T>
void select_survivors(const Strip<T>& strip, const H2oPacked& request, const H2oScoring& scoring,
                      uint64_t* ranks, int64_t* survivors) {
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
    float sum = 0.0f;
    for (int64_t i = 0; scoring.by_page && i < count; ++i) sum += ranked(i);
    for (int64_t i = 0; i < count; ++i) {
      const bool safe = positions[i] >= request.recent_start || positions[i] < request.num_sinks;
      // Adding zero makes one zero of both, which compare as equal.
      ranks[start + i] = rank(safe, (scoring.by_page ? sum : ranked(i)) + 0.0f, start + i);
    }
  }
  std::nth_element(ranks, ranks + request.num_survivors - 1, ranks + length);
  for (int64_t i = 0; i < request.num_survivors; ++i) {
    survivors[i] = static_cast<int64_t>(ranks[i] & 0x7fffffffu);
  }
  std::sort(survivors, survivors + request.num_survivors);
}

template <class T>
void pack(const H2oCache& cache, const H2oPacked& request, int head, const H2oScoring& scoring) {
  const int64_t num_survivors = request.num_survivors;
  if (num_survivors <= 0 || num_survivors >= request.attended_len) return;
  static thread_local Scratch ranks_memory, survivors_memory;
  const Strip<T> strip(cache, request.block_table, head);
  uint64_t* ranks = ranks_memory.get<uint64_t>(request.attended_len);
  int64_t* survivors = survivors_memory.get<int64_t>(num_survivors);
  if (scoring.reach) extend_scores(strip, request.attended_len, scoring.reach);
  select_survivors(strip, request, scoring, ranks, survivors);
  // Slots of a prompt are in order of position, so no survivor overwrites a later one.
  for (int64_t to = 0; to < num_survivors; ++to) {
    const int64_t from = survivors[to], n = strip.block_size;
    if (from == to) continue;
    strip.store(to, strip.key(from), strip.value(from), strip.scores(from / n)[from % n],
                strip.positions(from / n)[from % n]);
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
      if (cache.type == kFloat) pack<float>(cache, request, head, *scoring);
      if (cache.type == kBf16) pack<Bf16>(cache, request, head, *scoring);
      if (cache.type == kHalf) pack<Half>(cache, request, head, *scoring);
    }
  };
  parallel(static_cast<int>(std::min<int64_t>(max_threads(), num_strips)), body);
}
