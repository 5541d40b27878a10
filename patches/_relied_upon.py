"""Symbols of vLLM that are not patched, but overridden or counted on: their bodies are verified, too."""

from __future__ import annotations

from vllm_h2o.patches._patch import Symbol

_SCHEDULER = "vllm.v1.core.sched.scheduler:Scheduler"
_MANAGER = "vllm.v1.core.single_type_kv_cache_manager:SingleTypeKVCacheManager"

RELIED_UPON: tuple[Symbol, ...] = (
    # schedule() allocates slots exactly once for each request that it schedules, and starts with
    # new_step_starts(); a preempted request's pages leave through pop_blocks_for_free().
    Symbol(f"{_SCHEDULER}.schedule", "be00e14bea60"),
    Symbol(f"{_SCHEDULER}._preempt_request", "61218256336f"),
    Symbol(f"{_SCHEDULER}._update_request_as_session", "e43497a68182"),
    # Previews come before the commit, and tokens are [num_computed_tokens, num_tokens).
    Symbol("vllm.v1.core.kv_cache_manager:KVCacheManager.allocate_slots", "c8bc2d9e840f"),
    Symbol(f"{_MANAGER}.allocate_new_blocks", "3032031aeaa3"),
    Symbol(f"{_MANAGER}.pop_blocks_for_free", "6d28f5a29752"),
    Symbol(f"{_MANAGER}.free", "661d6592053d"),
    # Both model runners build attention metadata inside Worker.execute_model; V1's rows are those of
    # input_batch.req_ids, V2 names them in CommonAttentionMetadata.req_idx.
    Symbol("vllm.v1.worker.gpu_worker:Worker.execute_model", "3478b3ce2f87"),
    Symbol("vllm.v1.worker.gpu_model_runner:GPUModelRunner._build_attention_metadata", "7d46e5636386"),
    Symbol("vllm.v1.worker.gpu.model_runner:GPUModelRunner.execute_model", "b0d4de84cc30"),
    Symbol("vllm.v1.worker.gpu.attn_utils:build_attn_metadata", "3cff7a9a20a0"),
)
