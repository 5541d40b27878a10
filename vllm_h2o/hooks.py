# SPDX-License-Identifier: Apache-2.0
"""Set vLLM's options for a policy and refuse unsupported ones, where an engine is configured.

The patches call these functions, in a process that starts an engine, in this order::

    flags or arguments --options/flags.py--> additional_config["kv_policy"]
    create_engine_config: patches verified, prepare (before) ... vLLM ... finish (after)
        where positions roll, vLLM does not see max_model_len: of_trained_length
    the engine is ready: check_fitted, where vLLM has fitted max_model_len to the memory
    in the engine's process, with continuation or a KV connector: before_call, before_load
"""

from __future__ import annotations

from copy import copy
from dataclasses import replace
from enum import Enum
from typing import Any

from vllm_h2o.errors import ConfigError, UnsupportedError
from vllm_h2o.options.capabilities import find_conflict
from vllm_h2o.options.checks import check_keeps, check_positions
from vllm_h2o.options.config import KVPolicyConfig
from vllm_h2o.options.parsing import ADDITIONAL_CONFIG_KEY
from vllm_h2o.options.refusal import refuse
from vllm_h2o.options.refusals import REFUSALS, WHY_OPTION
from vllm_h2o.options.remedies import Given, flag
from vllm_h2o.options.traits import FULL_ATTENTION, page_size, slides
from vllm_h2o.paths import SCHEDULER, WORKER
from vllm_h2o.sparsity.config import SparsityConfig

CPU_BLOCK_SIZE = 128
"""vLLM's default block size on a CPU. 0.33 only sets it when it loads the model, after a budget has
been resolved in pages. Drop when: 0.32 is no longer supported, and 0.33 sets it earlier."""
MOST_TOKENS = 2**31
"""max_num_seqs * max_model_len must stay below this (int32)."""
LEFT_TO_VLLM = -1
"""vLLM's number for ``--max-model-len auto``."""
CAPTURE_STEP = 16
"""Sequences between two captured sizes, as in vLLM."""


def prepare(engine_args: Any) -> KVPolicyConfig | None:
    """Set vLLM's options for a policy, before vLLM builds its config from them.

    Returns:
        The policy; None when there is none, and nothing changes.

    Raises:
        UnsupportedError: when the user gives one of these options another value.

    """
    config = KVPolicyConfig.from_additional_config(engine_args.additional_config)
    if config is None:
        return None
    from vllm.config import AttentionConfig
    from vllm.platforms import current_platform
    from vllm.v1.attention.backends.registry import AttentionBackendEnum

    if config.splits_layers and config.max_budget is None and current_platform.is_cuda():
        # All layers' survivors move at once there: memory is set aside for the largest budget.
        config = replace(config, max_budget=config.budget)
    # Carried in full: every process reads the same, whatever form the user gave.
    engine_args.additional_config = {
        **engine_args.additional_config,
        ADDITIONAL_CONFIG_KEY: config.to_dict(),
    }
    custom = AttentionBackendEnum.CUSTOM
    backend = AttentionConfig.validate_backend_before(engine_args.attention_backend)
    within = engine_args.attention_config.backend
    settings = (
        ("scheduler_cls", "", engine_args.scheduler_cls, (None, SCHEDULER), SCHEDULER),
        ("worker_cls", "", engine_args.worker_cls, ("auto", WORKER), WORKER),
        ("attention_backend", "", backend, (None, custom), custom),
        ("attention_backend", "--attention-config.backend", within, (None, custom), custom),
    )
    for option, key, asked, compatible, value in settings:
        if asked not in compatible:
            typed = key or flag(option)
            raise UnsupportedError(
                f"{typed} {_shown(asked)} with --kv-policy {config.name}",
                f"the policy needs {typed} {_shown(value)}",
                WHY_OPTION[option],
                f"leave {typed} out, or run without --kv-policy",
            )
        setattr(engine_args, option, value)
    # The policy computes layers with full attention; vLLM chooses the backend of others.
    attention = engine_args.attention_config = copy(engine_args.attention_config)  # the user's own
    engine_args.attention_backend = attention.backend = None
    attention.backend_per_kind = {FULL_ATTENTION: custom, **attention.backend_per_kind}
    if engine_args.block_size is None and current_platform.is_cpu():
        engine_args.block_size = CPU_BLOCK_SIZE
    # Off unless asked for: with it, a prompt holds its own pages and those of its survivors.
    engine_args.enable_prefix_caching = bool(engine_args.enable_prefix_caching)
    return config


def _shown(value: Any) -> str:
    """Return a value as a command line has it: a member of an enumeration by its name."""
    return value.name if isinstance(value, Enum) else str(value)


def finish(
    vllm_config: Any,
    engine_args: Any,
    config: KVPolicyConfig | None,
    given: Given = frozenset(),
) -> Any:
    """Widen the sizes that vLLM captures, and refuse what the policy does not support.

    Args:
        vllm_config: vLLM's finished config.
        engine_args: the arguments that it was built from.
        config: the policy; None changes nothing.
        given: the arguments that the user gave.

    Returns:
        ``vllm_config``.

    """
    asked = engine_args.max_model_len if config is not None and config.rolls else None
    check_config(vllm_config, config, asked, given)
    if config is not None and not _chooses_captures(engine_args):
        _widen_captures(vllm_config, config)
    return vllm_config


def _chooses_captures(engine_args: Any) -> bool:
    """Whether the user chooses the sizes that CUDA graphs capture."""
    compilation = engine_args.compilation_config
    return any(
        (
            engine_args.max_cudagraph_capture_size,
            engine_args.cudagraph_capture_sizes,
            compilation.max_cudagraph_capture_size,
            compilation.cudagraph_capture_sizes,
            compilation.compile_sizes,
        )
    )


def _widen_captures(vllm_config: Any, config: KVPolicyConfig) -> None:
    """Capture steps with up to max_num_seqs sequences, where graphs are on and memory has room.

    vLLM captures at most 512, which is enough for sequences that keep every token. While it
    captures, it holds a page for each sequence next to the weights. With drafts a step has several
    tokens per sequence, and vLLM chooses the sizes accordingly.
    """
    compilation, scheduler = vllm_config.compilation_config, vllm_config.scheduler_config
    largest = compilation.max_cudagraph_capture_size
    most = min(scheduler.max_num_seqs, scheduler.max_num_batched_tokens)
    if not largest or most <= largest or vllm_config.speculative_config:
        return
    # Other layers take less than those with full attention.
    if not (slides(vllm_config) or vllm_config.model_config.is_hybrid):
        most = min(most, _num_fitting(vllm_config, config))
    if most <= largest:
        return
    sizes = {*compilation.cudagraph_capture_sizes, *range(largest, most, CAPTURE_STEP), most}
    compilation.cudagraph_capture_sizes = sorted(sizes)
    compilation.max_cudagraph_capture_size = most


def _num_fitting(vllm_config: Any, config: KVPolicyConfig) -> int:
    """Count the sequences at their budgets that a device's memory has room for.

    At most as many fit in the end: the bytes of weights are not known before they are loaded.
    """
    from vllm.platforms import current_platform
    from vllm.utils.torch_utils import kv_cache_dtype_str_to_dtype

    from vllm_h2o.scheduler.footprint import CacheShape

    cache, model = vllm_config.cache_config, vllm_config.model_config
    parallel = vllm_config.parallel_config
    memory = cache.kv_cache_memory_bytes
    if memory is None:
        memory = int(current_platform.get_device_total_memory() * cache.gpu_memory_utilization)
    element_size = kv_cache_dtype_str_to_dtype(cache.cache_dtype, model).itemsize
    heads = (model.get_num_kv_heads(parallel), model.get_head_size())
    shape = CacheShape(model.get_num_layers(parallel), *heads, element_size)
    budget = config.resolve(model.max_model_len, page_size(vllm_config))
    pool = shape.pool(memory, page_size(vllm_config), shape.slot_bytes(config.extra_words))
    return pool.num_sequences(min(budget.capacity, model.max_model_len))


def of_trained_length(engine_args: Any, config: KVPolicyConfig | None) -> Any:
    """Hide ``max_model_len`` from vLLM where positions roll, so that it takes the trained length.

    vLLM refuses a longer one, which has positions that the model does not know.

    Args:
        engine_args: vLLM's EngineArgs.
        config: the policy.

    Returns:
        ``engine_args``, or a copy without a ``max_model_len``.

    """
    if config is None or not config.rolls or not _is_length(engine_args.max_model_len):
        return engine_args
    untold = copy(engine_args)
    untold.max_model_len = None
    return untold


def _is_length(asked: int | None) -> bool:
    """Whether a ``max_model_len`` is a number of tokens, not left to vLLM."""
    return asked is not None and asked > 0


def check_config(
    vllm_config: Any,
    config: KVPolicyConfig | None,
    asked: int | None = None,
    given: Given = frozenset(),
) -> Any:
    """Refuse what the policy does not support.

    Args:
        vllm_config: vLLM's finished config.
        config: the policy; None refuses nothing.
        asked: the longest sequence, where positions roll; None, or below 0: left to vLLM.
        given: the arguments that the user gave, which remedies name.

    Returns:
        ``vllm_config``.

    Raises:
        UnsupportedError: for the first of :data:`REFUSALS` that applies, and for a part of the
            engine that conflicts with the policy.
        ConfigError: when the budget has too few slots, or leaves too few positions, for a
            ``max_model_len`` that is final.

    """
    if config is None:
        return vllm_config
    setup = config.setup(vllm_config, given)
    refuse(REFUSALS, setup, f"--kv-policy {config.name}", "the engine has")
    config = _carried(vllm_config, config, config.within(vllm_config))
    if conflict := find_conflict(config.setup(vllm_config, given)):
        raise UnsupportedError(*conflict)
    if config.rolls:
        config = _limit_positions(vllm_config, config)
    if _is_length(asked):
        vllm_config.model_config.max_model_len = asked
        if vllm_config.model_config.is_hybrid:  # a state's page is as long as a sequence
            vllm_config.cache_config.mamba_block_size = asked
    if not _fits_length(vllm_config):
        _check_lengths(vllm_config, config)
    check_keeps(config)
    return vllm_config


def _fits_length(vllm_config: Any) -> bool:
    """Whether vLLM is left to fit ``max_model_len`` to the memory."""
    return bool(vllm_config.model_config.original_max_model_len == LEFT_TO_VLLM)


def check_fitted(vllm_config: Any) -> None:
    """Check what depends on ``max_model_len`` and on pages, once vLLM has fitted them to the model.

    It runs in the front end: what is raised in the engine's process is not what a user reads last.

    Args:
        vllm_config: the config of an engine that is ready, with or without a policy.

    Raises:
        ConfigError: when the budget has too few slots, or leaves too few positions.

    """
    config = KVPolicyConfig.of(vllm_config)
    if config is None:
        return
    if _fits_length(vllm_config) or vllm_config.model_config.is_hybrid:
        _check_lengths(vllm_config, config)


def _check_lengths(vllm_config: Any, config: KVPolicyConfig) -> None:
    """Check what depends on ``max_model_len``, which is final.

    Raises:
        ConfigError: when the budget has too few slots, or leaves too few positions.

    """
    max_model_len = vllm_config.model_config.max_model_len
    block_size = page_size(vllm_config)
    config.check(max_model_len, block_size)
    budget = config.resolve(max_model_len, block_size)
    chunk = vllm_config.scheduler_config.max_num_batched_tokens
    check_positions(config, f"budget={config.budget!r}", budget, chunk, max_model_len)
    num_seqs = vllm_config.scheduler_config.max_num_seqs
    if config.rolls and num_seqs * max_model_len >= MOST_TOKENS:
        raise ConfigError(
            f"max_model_len={max_model_len} with positions={config.positions}",
            f"{num_seqs} sequences have {num_seqs * max_model_len} tokens",
            f"vLLM counts them in 32 bits, up to {MOST_TOKENS - 1}",
            f"give --max-num-seqs {max((MOST_TOKENS - 1) // max_model_len, 1)}, or a smaller "
            "--max-model-len",
        )


def _limit_positions(vllm_config: Any, config: KVPolicyConfig) -> KVPolicyConfig:
    """Carry the number of positions for every process: the trained length, or fewer.

    Raises:
        ConfigError: when it is above the trained length.

    """
    trained = vllm_config.model_config.max_model_len
    limit = config.position_limit or trained
    if limit > trained:
        raise ConfigError(
            f"positions={limit}",
            f"the model was trained on sequences of {trained} tokens",
            "it does not know later positions",
            f"give at most {trained}, or rolling",
        )
    return _carried(vllm_config, config, replace(config, positions=limit))


def _carried(vllm_config: Any, config: KVPolicyConfig, changed: KVPolicyConfig) -> KVPolicyConfig:
    """Carry another configuration to every process, and return it.

    Args:
        vllm_config: vLLM's config, which carries it.
        config: the one that it carries.
        changed: the other one.

    """
    if changed != config:
        carried = {ADDITIONAL_CONFIG_KEY: changed.to_dict()}
        vllm_config.additional_config = {**vllm_config.additional_config, **carried}
    return changed


def add_stat_logger(manager: Any, vllm_config: Any) -> None:
    """Add the metrics of a policy, and of contextual sparsity, to the front end.

    Args:
        manager: vLLM's StatLoggerManager, which gets one more logger for each.
        vllm_config: the engine's config.

    """
    if SparsityConfig.from_additional_config(vllm_config.additional_config) is not None:
        from vllm_h2o.sparsity.counts import SparsityStatLogger, shown

        if shown(vllm_config):
            manager.stat_loggers.append(SparsityStatLogger(vllm_config))
    if KVPolicyConfig.of(vllm_config) is None:
        return
    from vllm_h2o.metrics import PolicyStatLogger

    # First, because it removes statistics that other loggers do not know.
    manager.stat_loggers.insert(0, PolicyStatLogger(vllm_config, manager.engine_indexes))


def before_call(engine_core: Any, method: object) -> None:
    """Drop cached tokens if what all workers are about to do may change weights.

    Args:
        engine_core: vLLM's EngineCore, with or without a policy.
        method: of the workers: its name, or a function.

    """
    if (weights := _weights(engine_core)) is not None:
        weights.call(method)


def before_load(engine_core: Any, adapter: Any) -> None:
    """Drop cached tokens of an adapter whose weights are about to be replaced.

    Args:
        engine_core: vLLM's EngineCore, with or without a policy.
        adapter: the LoRARequest.

    """
    if (weights := _weights(engine_core)) is not None:
        weights.load(adapter)


def _weights(engine_core: Any) -> Any:
    """The weights that an engine's scheduler counts; None while it starts, and if it does not."""
    from vllm_h2o.scheduler.scheduler import HeavyHitterScheduler

    scheduler = vars(engine_core).get("scheduler")
    return scheduler.weights if isinstance(scheduler, HeavyHitterScheduler) else None
