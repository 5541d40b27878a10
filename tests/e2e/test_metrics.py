# SPDX-License-Identifier: Apache-2.0
"""``LLM.get_metrics()`` of a real engine, against vLLM's own counts and pool at each step."""

from __future__ import annotations

from pathlib import Path

from vllm import LLM, SamplingParams
from vllm.v1.metrics.reader import Counter, Gauge

from tests.e2e.harness import Probe, engine, tiny_llama
from vllm_h2o.metrics import COUNTERS, GAUGES

LENGTHS = (200, 20, 150)
MAX_TOKENS = 60
SLOTS, PAGE = 64, 32
SLOT_BYTES = 2 * 2 * 32 * 4
"""Two layers, one KV head each: K and V of 32 floats. The policy's eight bytes come on top."""


def metrics(llm: LLM) -> dict[str, float]:
    """The policy's numbers by name."""
    prefix = "vllm:kv_policy_"
    return {
        metric.name.removeprefix(prefix): metric.value
        for metric in llm.get_metrics()
        if isinstance(metric, Counter | Gauge) and metric.name.startswith(prefix)
    }


def test_of_three_requests(tmp_path: Path) -> None:
    """What was computed and is not in the cache has been evicted; bytes are those of real pages."""
    model = tiny_llama(tmp_path, num_heads=2, num_kv_heads=1)
    with engine(model, "h2o", {"budget": SLOTS}, block_size=PAGE, disable_log_stats=False) as llm:
        assert metrics(llm) == dict.fromkeys((*COUNTERS, *GAUGES), 0)
        params = SamplingParams(max_tokens=MAX_TOKENS, ignore_eos=True, detokenize=False)
        for length in LENGTHS:
            prompt = {"prompt_token_ids": [7 + i % 200 for i in range(length)]}
            llm.llm_engine.add_request(str(length), prompt, params)
        probe, most = Probe(llm), 0.0
        while llm.llm_engine.has_unfinished_requests():
            llm.llm_engine.step()
            now = metrics(llm)
            most = max(most, now["saved_bytes"])
            computed = [r.num_computed_tokens for r in probe.scheduler.running]
            stock = sum(-(-tokens // PAGE) for tokens in computed) * PAGE * SLOT_BYTES
            held = (probe.num_total - probe.num_free) * PAGE * (SLOT_BYTES + 2 * 8)
            assert now["logical_tokens"] == sum(computed)
            assert now["saved_bytes"] == stock - held
            assert now["evicted_tokens"] >= now["logical_tokens"] - now["resident_tokens"]
        assert most > 0
        # A request's last token is sampled, but never computed. Of the long prompts' 7 and 5 pages
        # 2 are kept.
        assert now == dict.fromkeys((*COUNTERS, *GAUGES), 0) | {
            "evicted_tokens": sum(length + MAX_TOKENS - 1 - SLOTS for length in LENGTHS),
            "packs": 2,
            "pages_freed_early": (7 - 2) + (5 - 2),
        }
