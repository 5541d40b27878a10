// After a prompt's last chunk: the survivors of each KV head move to the front of its slots.

#include <algorithm>

#include "cache.h"
#include "team.h"

extern "C" {

// A request of which `keep` of `end` tokens survive; fields as in batch.py.
struct H2oPacked {
  const int32_t* table;
  int64_t end;
  int64_t keep;
  int64_t recent_from;
  int64_t num_sinks;
  int64_t position_end;
};
}

namespace h2o {
namespace {

// Ranks as unsigned numbers, the best lowest: the safe ones, then by score, then by age.
inline uint64_t rank(bool safe, float score, int64_t slot) {
  const uint32_t bits = bit_cast<uint32_t>(score);
  const uint32_t ascending = bits & 0x80000000u ? ~bits : bits | 0x80000000u;
  const uint64_t level = safe ? 0 : (uint64_t{1} << 32) + (0xffffffffu - ascending);
  return level << 31 | static_cast<uint64_t>(slot);
}

// Writes the survivors' slots, in order; `ranks` has room for all.
template <class T>
void choose(const Strip<T>& strip, const H2oPacked& request, const H2oScoring& scoring,
            uint64_t* ranks, int64_t* survivors) {
  for (int64_t from = 0; from < request.end; from += strip.block_size) {
    const int64_t page = from / strip.block_size;
    const int64_t count = std::min<int64_t>(strip.block_size, request.end - from);
    const float* scores = strip.scores(page);
    const int32_t* positions = strip.positions(page);
    auto ranked = [&](int64_t i) {
      if (!scoring.by_age) return scores[i];
      return scores[i] / static_cast<float>(request.position_end - positions[i]);
    };
    float sum = 0.0f;
    for (int64_t i = 0; scoring.by_page && i < count; ++i) sum += ranked(i);
    for (int64_t i = 0; i < count; ++i) {
      const bool safe = positions[i] >= request.recent_from || positions[i] < request.num_sinks;
      // The sum makes one zero of both, which compare as equal.
      ranks[from + i] = rank(safe, (scoring.by_page ? sum : ranked(i)) + 0.0f, from + i);
    }
  }
  std::nth_element(ranks, ranks + request.keep - 1, ranks + request.end);
  for (int64_t i = 0; i < request.keep; ++i) {
    survivors[i] = static_cast<int64_t>(ranks[i] & 0x7fffffffu);
  }
  std::sort(survivors, survivors + request.keep);
}

template <class T>
void pack(const H2oCache& page, const H2oPacked& request, int head, const H2oScoring& scoring) {
  if (request.keep <= 0 || request.keep >= request.end) return;
  static thread_local Scratch ranks_memory, survivors_memory;
  const Strip<T> strip(page, request.table, head);
  int64_t* survivors = survivors_memory.get<int64_t>(request.keep);
  choose(strip, request, scoring, ranks_memory.get<uint64_t>(request.end), survivors);
  // Slots of a prompt are in order of position, so no survivor moves back over a later one.
  for (int64_t to = 0; to < request.keep; ++to) {
    const int64_t from = survivors[to], n = strip.block_size;
    if (from == to) continue;
    strip.store(to, strip.key(from), strip.value(from), strip.scores(from / n)[from % n],
                strip.positions(from / n)[from % n]);
  }
}

}  // namespace
}  // namespace h2o

extern "C" void h2o_pack_survivors(const H2oCache* pages, int num_pages, const H2oPacked* requests,
                                   int num_requests, const H2oScoring* scoring) {
  using namespace h2o;
  const int num_heads = num_pages ? pages[0].num_kv_heads : 0;
  const int64_t num_strips = static_cast<int64_t>(num_pages) * num_requests * num_heads;
  auto body = [&](Team team) {
    for (int64_t i = team.thread; i < num_strips; i += team.size) {
      const H2oCache& page = pages[i / num_heads / num_requests];
      const H2oPacked& request = requests[i / num_heads % num_requests];
      const int head = static_cast<int>(i % num_heads);
      if (page.type == kFloat) pack<float>(page, request, head, *scoring);
      if (page.type == kBf16) pack<Bf16>(page, request, head, *scoring);
      if (page.type == kHalf) pack<Half>(page, request, head, *scoring);
    }
  };
  parallel(static_cast<int>(std::min<int64_t>(max_threads(), num_strips)), body);
}
