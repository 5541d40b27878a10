// SPDX-License-Identifier: Apache-2.0
// Runs a stage of prompts, attention or a term, with the types and the products that it needs.
#pragma once

#include <type_traits>

#include "prompt.h"

namespace h2o {

// Slots of chunks that are computed together; one chunk may have more.
constexpr int64_t kMaxSlots = 1 << 15;

#if defined(__AMX_BF16__)
using ForBf16 = Amx;
#elif defined(__AVX512BF16__)
using ForBf16 = Pairs;
#else
using ForBf16 = Wide;
#endif

// Runs Stage<Prompt>(prompt, more...) over chunks, as many at once as kMaxSlots lets.
template <template <class> class Stage, class... More>
void run_stage(const H2oCache& cache, const H2oChunk* chunks, int num_chunks,
               const H2oTensors& tensors, int power, bool sees_later, const More&... more) {
  const auto run = [&](auto prompt) { prompt.run(Stage<decltype(prompt)>(prompt, more...)); };
  for (int begin = 0; begin < num_chunks;) {
    int64_t slots = 0;
    int end = begin;
    while (end < num_chunks) {
      slots += chunks[end].attended_len();
      if (slots > kMaxSlots && end > begin) break;
      ++end;
    }
    const H2oChunk* some = chunks + begin;
    const int count = end - begin;
    with_types(tensors.type, cache.type, [&](auto t, auto s) {
      using T = decltype(t);
      using Multiplier = std::conditional_t<std::is_same<T, Bf16>::value, ForBf16, Wide>;
      run(Prompt<T, decltype(s), Multiplier>(cache, some, count, tensors, power, sees_later));
    });
    begin = end;
  }
}

}  // namespace h2o
