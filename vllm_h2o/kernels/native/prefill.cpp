// Chunks of prompts, attended to and scored, and their queries asked again.

#include "prompt.h"

extern "C" void h2o_prefill(const H2oCache* page, const H2oChunk* chunks, int num_chunks,
                            const H2oTokens* tokens, const H2oScoring* scoring) {
  h2o::prefill(*page, chunks, num_chunks, *tokens, *scoring, false, 0.0f);
}

// Only the queries are read of the tokens; K of the chunks is in their pages.
extern "C" void h2o_replay(const H2oCache* page, const H2oChunk* chunks, int num_chunks,
                           const H2oTokens* tokens, const H2oScoring* scoring, float weight) {
  h2o::prefill(*page, chunks, num_chunks, *tokens, *scoring, true, weight);
}
