# SPDX-License-Identifier: Apache-2.0
"""Symbols of vLLM that are not patched, but overridden or counted on: verified like the patched."""

from __future__ import annotations

from vllm_h2o.patches._digest import ABSENT
from vllm_h2o.patches._patch import Symbol

_SCHEDULER = "vllm.v1.core.sched.scheduler:Scheduler"
_MANAGER = "vllm.v1.core.single_type_kv_cache_manager:SingleTypeKVCacheManager"
_COORDINATOR = "vllm.v1.core.kv_cache_coordinator:KVCacheCoordinator"
_SELECTOR = "vllm.v1.attention.selector"
_EXAMPLE = "vllm.distributed.kv_transfer.kv_connector.v1.example_connector"
_RUNNER_V1 = "vllm.v1.worker.gpu_model_runner:GPUModelRunner"
_RUNNER_V2 = "vllm.v1.worker.gpu.model_runner:GPUModelRunner"

RELIED_UPON: tuple[Symbol, ...] = (
    # schedule() allocates slots exactly once for each request that it schedules, and starts with
    # new_step_starts(); a preempted request's pages leave through pop_blocks_for_free().
    Symbol(f"{_SCHEDULER}.schedule", {"0.32": "6625adf8f31b", "0.33": "e772cd227475"}),
    Symbol(f"{_SCHEDULER}._preempt_request", {"0.32": "38de74c1d22a", "0.33": "08dfc608e161"}),
    Symbol(
        f"{_SCHEDULER}._update_request_as_session", {"0.32": "f276848f5db6", "0.33": "75440b16bc38"}
    ),
    Symbol(
        f"{_SCHEDULER}._handle_stopped_request", {"0.32": "28b8e0dfcd96", "0.33": "d34729d46054"}
    ),
    # A waiting request is asked about here before caches are searched for it; one that is not ready
    # keeps its place, and the next one is asked about.
    Symbol(
        f"{_SCHEDULER}._handle_blocked_waiting_request",
        {"0.32": "85fa822d6a1f", "0.33": "4a016701ddd8"},
    ),
    # A part of a session is added here, or when the one before it has stopped. A reset fails where
    # a request holds pages.
    Symbol(f"{_SCHEDULER}.add_request", "97225f493cf7"),
    Symbol(f"{_SCHEDULER}.reset_prefix_cache", "5fc18f0b3884"),
    # On a CPU no generator may be found here for a row whose token is thrown away.
    Symbol(f"{_RUNNER_V1}._bookkeeping_sync", "e1369eeed7e9"),
    Symbol("vllm.v1.core.kv_cache_manager:KVCacheManager.new_step_starts", "fc3d01775728"),
    # Previews come before the commit, and tokens are [num_computed_tokens, num_tokens).
    Symbol("vllm.v1.core.kv_cache_manager:KVCacheManager.allocate_slots", "9737e8cf2fe4"),
    Symbol(f"{_MANAGER}.allocate_new_blocks", "660850b46199"),
    Symbol(f"{_MANAGER}.pop_blocks_for_free", {"0.32": "74ba80779a77", "0.33": "7023b0116e8f"}),
    Symbol(f"{_MANAGER}.free", "06218d237019"),
    # Which of the two schedulers' hand-over of tokens a step takes is this package's choice.
    Symbol(
        "vllm.v1.core.sched.async_scheduler:AsyncScheduler._update_after_schedule", "60faeadbc775"
    ),
    Symbol(
        "vllm.v1.core.sched.async_scheduler:AsyncScheduler._update_request_with_output",
        {"0.32": "8ba2a99bc677", "0.33": ABSENT},
    ),
    Symbol(f"{_SCHEDULER}._update_after_schedule", "d5a56f538750"),
    Symbol(
        f"{_SCHEDULER}._update_request_with_output",
        {"0.32": "ffcaec8de983", "0.33": "d7f0ff1e416d"},
    ),
    # Drafts that were rejected are taken off num_computed_tokens here, and nowhere else.
    Symbol(f"{_SCHEDULER}.update_from_output", {"0.32": "d285784b0bfe", "0.33": "277436550f4f"}),
    # What is found in the prefix cache is asked for here, once, and held before new pages are; what
    # is computed is published after them. A chunk is cut where the scheduler says,
    # and after that where the encoder has no room for an image.
    Symbol(
        f"{_SCHEDULER}._get_local_prefix_cache_hit",
        {"0.32": "b7126708b364", "0.33": "a85167fb54bc"},
    ),
    Symbol(
        f"{_SCHEDULER}._mamba_block_aligned_split", {"0.32": "472a7651c559", "0.33": "0e54a03474e1"}
    ),
    Symbol(
        f"{_SCHEDULER}._try_schedule_encoder_inputs",
        {"0.32": "3966c9699b77", "0.33": "87ed7d769f83"},
    ),
    Symbol("vllm.v1.core.kv_cache_manager:KVCacheManager.truncate_computed_blocks", "c7ce5341a1a0"),
    Symbol(
        "vllm.v1.core.kv_cache_manager:KVCacheManager.get_computed_blocks",
        {"0.32": "256fc98a7d34", "0.33": "a98bd865c398"},
    ),
    Symbol(f"{_MANAGER}.add_local_computed_blocks", "327a7998ba35"),
    Symbol(f"{_MANAGER}.cache_blocks", {"0.32": "9b9881457015", "0.33": "d474d54eb43c"}),
    # A request hands out the pages of all groups here; first some stay as an entry. A page of an
    # entry is free, among the last in the queue; who left it there is told when it is taken, and
    # when the cache is reset.
    Symbol(f"{_SCHEDULER}._free_request_blocks", "3a597b7813c9"),
    # What this returns is in the answer of a request that ends; it frees the blocks.
    Symbol(f"{_SCHEDULER}._free_request", {"0.32": "269307431fae", "0.33": "c3d6b01a244c"}),
    Symbol("vllm.v1.core.block_pool:BlockPool.unpin_blocks", "cd5c074640f4"),
    Symbol("vllm.v1.core.block_pool:BlockPool._notify_reuse", "a3c83fbeba8f"),
    Symbol("vllm.v1.core.block_pool:BlockPool.get_new_blocks", "df67f9d983f2"),
    Symbol("vllm.v1.core.block_pool:BlockPool.reset_prefix_cache", "ee9fe2283939"),
    # An entry's event is queued as one of cached blocks; its medium is set after that.
    Symbol(
        "vllm.v1.core.block_pool:BlockPool.emit_cached_block_events",
        {"0.32": "d367594fa78d", "0.33": "3bfbc54ce31e"},
    ),
    # What make_stats() returns reaches record(), which asks the loggers in their order.
    Symbol(f"{_SCHEDULER}.make_stats", "9accb27a065c"),
    Symbol("vllm.v1.metrics.loggers:StatLoggerManager.record", "3a2ba9e58c58"),
    # Both model runners build attention metadata inside Worker.execute_model. V1's rows are those
    # of input_batch.req_ids; V2 orders its own and names them in CommonAttentionMetadata.req_idx.
    Symbol("vllm.v1.worker.gpu_worker:Worker.execute_model", "d23383066806"),
    Symbol(
        f"{_RUNNER_V1}._build_attention_metadata", {"0.32": "c6eb499c7fba", "0.33": "6882f13de595"}
    ),
    # Where positions roll: both runners hand their own tensor of positions to the builder, after
    # they have found token ids and slots by it, and the model reads it after.
    Symbol(f"{_RUNNER_V1}._prepare_inputs", "632d07111baf"),
    Symbol(f"{_RUNNER_V1}._preprocess", "4debe59e06b4"),
    Symbol(
        "vllm.v1.worker.gpu.model_states.default:DefaultModelState.prepare_attn",
        {"0.32": "9d6989c43a07", "0.33": "ab28e277dc72"},
    ),
    Symbol(f"{_RUNNER_V2}.prepare_attn", {"0.32": "ce602e8098d8", "0.33": "2fea4ad726b6"}),
    # A row of V1's block table keeps the ids of the freed tail after those that are held, and new
    # ids are appended after them: a packed request must never be granted a page.
    Symbol(f"{_RUNNER_V1}._update_states", "83443ff2b9da"),
    Symbol("vllm.v1.worker.block_table:BlockTable.append_row", "fabd4969f4fc"),
    Symbol("vllm.v1.worker.block_table:BlockTable.add_row", "9ca5a501b121"),
    Symbol(f"{_RUNNER_V2}.execute_model", {"0.32": "72976ab315e4", "0.33": "60c35dfe24b9"}),
    Symbol(f"{_RUNNER_V2}.gather_batch_req_state", "beaf91514f56"),
    # Survivors are packed after this: it leaves rows, block tables and tokens of prompts alone.
    Symbol(f"{_RUNNER_V1}.sample_tokens", "5009bc8636a4"),
    Symbol(f"{_RUNNER_V2}.sample_tokens", {"0.32": "1afa8f4d90da", "0.33": "d2e621dcdd96"}),
    Symbol("vllm.v1.worker.gpu.attn_utils:build_attn_metadata", "9bdd0e85fa1b"),
    # Next to layers with a sliding window, those of full attention alone get the policy's backend.
    Symbol(f"{_SELECTOR}:get_attn_backend", {"0.32": "1ed83dc629a5", "0.33": "134a9494e609"}),
    Symbol(f"{_SELECTOR}:get_attn_spec_kind", "0a2898911035"),
    # All groups take their pages from one pool; a window's rows grow by position, and what it has
    # left comes back.
    Symbol(f"{_COORDINATOR}.get_num_blocks_to_allocate", "51fc8e3cb6da"),
    Symbol(f"{_COORDINATOR}.allocate_new_blocks", "7328a51ecb47"),
    Symbol(f"{_MANAGER}.get_num_blocks_to_allocate", "a02b66802e23"),
    Symbol(f"{_MANAGER}.remove_skipped_blocks", "755fb01a12a7"),
    Symbol(
        "vllm.v1.core.single_type_kv_cache_manager:SlidingWindowManager.get_num_skipped_tokens",
        "62ef239802d9",
    ),
    Symbol(
        "vllm.v1.kv_cache_interface:SlidingWindowSpec.max_admission_blocks_per_request",
        "cbb4c249d154",
    ),
    # The pages that it takes are cleared, in each step, before anybody writes to them.
    Symbol(f"{_MANAGER}.take_new_block_ids", "8a20bc7b95ba"),
    Symbol(f"{_SCHEDULER}._get_new_block_ids_to_zero", "1992cda23054"),
    Symbol("vllm.v1.worker.gpu_worker:Worker.initialize_from_config", "20c3b2bfefe7"),
    Symbol(f"{_RUNNER_V1}._init_kv_zero_meta", "4829badf28a3"),
    Symbol(f"{_RUNNER_V2}._init_kv_zero_meta", "8ca227a01c92"),
    Symbol("vllm.v1.worker.cpu_model_runner:CPUModelRunner._zero_block_ids", "9f7e577e2adb"),
    # A state has one page as long as its request runs. Pages are enlarged until one covers it, by
    # what the policy's backend says of a slot. V2 names no rows of a hybrid model's batch.
    Symbol(
        "vllm.v1.core.single_type_kv_cache_manager:MambaManager.allocate_new_blocks", "6214eab3a53b"
    ),
    Symbol(
        "vllm.v1.core.single_type_kv_cache_manager:MambaManager.get_num_skipped_tokens",
        "9324d00e4bf5",
    ),
    Symbol(
        "vllm.platforms.interface:Platform._align_hybrid_block_size",
        {"0.32": "cc6269206e9c", "0.33": "be6504a7ae55"},
    ),
    Symbol(
        "vllm.v1.worker.gpu.model_states.mamba_hybrid:MambaHybridModelState.prepare_attn",
        "b601393d3115",
    ),
    # A connector is asked for offers and orders. Workers load before the step's
    # layers attend and store after it. A name of files is made of tokens and of names of images.
    Symbol(
        "vllm.v1.worker.kv_connector_model_runner_mixin:KVConnectorModelRunnerMixin._get_kv_connector_output",
        "89c3d8a50a10",
    ),
    Symbol("vllm.v1.worker.gpu.kv_connector:ActiveKVConnector.pre_forward", "e60423a9fe92"),
    Symbol(f"{_SCHEDULER}._build_kv_connector_meta", "06261a5d4ea5"),
    Symbol(f"{_EXAMPLE}:ReqMeta.make_meta", "c00064eee72d"),
    Symbol(f"{_EXAMPLE}:ExampleConnector.start_load_kv", "e8a5d2c93937"),
    Symbol(f"{_EXAMPLE}:ExampleConnector.save_kv_layer", "507cddbbdd65"),
    Symbol(f"{_EXAMPLE}:ExampleConnector.update_state_after_alloc", "a1fe35fffb70"),
    Symbol(f"{_EXAMPLE}:ExampleConnector.get_num_new_matched_tokens", "8f68e7deb829"),
    Symbol(f"{_EXAMPLE}:ExampleConnector.build_connector_meta", "b05553da425b"),
    Symbol(f"{_EXAMPLE}:ExampleConnector._generate_foldername_debug", "96a3e29aee8e"),
    Symbol(f"{_EXAMPLE}:ExampleConnector._generate_filename_debug", "933c0aa1ff7c"),
    # Images of a refused request are sent again when they are asked about again.
    Symbol("vllm.multimodal.cache.lru:LruKeyReplicatedSenderCache.invalidate", "fe6ae33cd0f8"),
)
