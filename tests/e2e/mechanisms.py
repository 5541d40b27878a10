# SPDX-License-Identifier: Apache-2.0
"""Name the engine tests of ``make test``: one a mechanism. ``make test-all`` runs the others."""

from __future__ import annotations

_OF_EACH = {
    "this table": "test_mechanisms.py::test_each_mechanism_is_a_test",
    "a full budget is stock vLLM": "test_equality.py::test_every_policy_equals_stock",
    "torch.compile": "test_equality.py::test_compiled_equals_eager[h2o]",
    "grouped-query attention": "test_retained.py::test_tiny_models_of_each_gqa_group[gqa3]",
    "sinks and a window": "test_retained.py::test_the_other_policies[streaming]",
    "observation window, merging": "test_retained.py::test_merging_of_the_other_policies[h2o2]",
    "KV heads that share slots": "test_retained.py::test_heads_that_share_slots[h2o2 12 layers 0]",
    "reconstruction": "test_second_reading.py::test_what_is_read[300]",
    "tokens evicted together": (
        "test_evict_every.py::test_retained_sets_equal_the_reference[h2o-16 0.25 3]"
    ),
    "pages evicted whole": (
        "test_evict_every.py::test_retained_sets_equal_the_reference[h2o-page 64 3]"
    ),
    "eviction under pressure": "test_pressure.py::test_what_a_pack_keeps[h2o-]",
    "eviction after each chunk": "test_equality.py::test_a_prompt_of_three_times_the_pool",
    "preemption": "test_batch.py::test_h2o_in_a_small_pool_completes",
    "more sequences at once": "test_batch.py::test_more_sequences_run_at_once",
    "budgets of requests": "test_batch.py::test_budgets_of_their_own_in_one_batch",
    "prefix caching": "test_prefix.py::test_a_hit_is_a_cold_run[snapkv]",
    "pages in files": "test_raw_prompts.py::test_loaded_prefix_is_a_cold_run[snapkv]",
    "drafts": "test_drafts.py::test_as_without_drafts[h2o-]",
    "fp8": "test_float8.py::test_what_is_kept[fp8-h2o-{'budget': 32}-{}]",
    "LoRA": "test_lora.py::test_two_adapters_in_one_batch_equal_stock",
    "sliding windows": "test_windows.py::test_what_is_kept[h2o-]",
    "states": "test_hybrid.py::test_what_is_kept[h2o--granite4]",
    "attention sinks": "test_sinks.py::test_what_is_kept[h2o-]",
    "conversations": "test_conversations.py::test_branches_regenerations_and_budgets",
    "positions that roll": "test_rolling.py::test_every_step_is_the_references[h2o--native]",
    "a policy of another package": (
        "test_own_policy.py::test_own_policy_on_cpu_kernels_keeps_what_the_reference_keeps[native]"
    ),
    "tensor parallelism": "test_parallel.py::test_ranks_equal_one_process",
    "pipeline parallelism": "test_parallel.py::test_stages_equal_one_process",
    "Model Runner V2": "gpu_runner/test_runner.py::test_a_small_budget[llama]",
    "contextual sparsity": "test_sparsity.py::test_exact_with_a_policy_equals_the_policy",
    "metrics": "test_metrics.py::test_of_three_requests",
    "the server": "test_serve.py::test_server_completes_a_long_prompt_and_answer",
}
_FAMILIES = ("Llama", "Qwen3", "Gemma 3", "gpt-oss", "Mixtral", "OPT")

MECHANISMS = _OF_EACH | {name: f"test_zoo.py::test_what_becomes_of[{name}]" for name in _FAMILIES}
"""Mechanism or family of models -> its test, below tests/e2e."""
