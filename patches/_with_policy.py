# SPDX-License-Identifier: Apache-2.0
"""Patches, and symbols relied upon, that an engine needs with a policy or contextual sparsity."""

from __future__ import annotations

from vllm_h2o.options.config import KVPolicyConfig
from vllm_h2o.patches import (
    cpu_platform__get_attn_backend_cls,
    engine_core__add_lora,
    engine_core__collective_rpc,
    inproc_client__init,
    mpclient__apply_ready_response,
    stat_logger_manager__init,
)
from vllm_h2o.patches._patch import Patch, verify_all
from vllm_h2o.patches._relied_upon import RELIED_UPON
from vllm_h2o.sparsity.config import SparsityConfig

WITH_POLICY: tuple[Patch, ...] = (cpu_platform__get_attn_backend_cls.PATCH,)
"""Applied where a worker with a policy starts, which may be the user's own process."""

METRICS: tuple[Patch, ...] = (stat_logger_manager__init.PATCH,)
"""Applied where an engine is configured with a policy or contextual sparsity."""

FRONT_END: tuple[Patch, ...] = (
    *METRICS,
    mpclient__apply_ready_response.PATCH,
    inproc_client__init.PATCH,
)
"""Applied where an engine with a policy is configured: the process that serves its metrics."""

ENGINE: tuple[Patch, ...] = (engine_core__collective_rpc.PATCH, engine_core__add_lora.PATCH)
"""Applied where a scheduler with ``continuation`` or a KV connector starts: in its process."""


def activate_worker() -> None:
    """Apply what a worker with a policy needs, after verifying all.

    Raises:
        PatchError: when a symbol is not the known one. Nothing has been changed then.

    """
    verify_all([*WITH_POLICY, *RELIED_UPON])
    for patch in WITH_POLICY:
        patch.apply()


def activate_front_end(config: KVPolicyConfig | None) -> None:
    """Apply what the process needs that configures an engine with a policy, after verifying all.

    Args:
        config: the policy; None: nothing is done.

    Raises:
        PatchError: when a symbol is not the known one. Nothing has been changed then.

    """
    if config is not None:
        verify_all([*WITH_POLICY, *FRONT_END, *ENGINE, *RELIED_UPON])
        for patch in FRONT_END:
            patch.apply()


def activate_metrics(sparsity: SparsityConfig | None) -> None:
    """Apply what the process needs that configures an engine with contextual sparsity.

    Args:
        sparsity: its configuration; None: nothing is done.

    Raises:
        PatchError: when the symbol is not the known one.

    """
    if sparsity is not None:
        verify_all(METRICS)
        for patch in METRICS:
            patch.apply()


def activate_engine_core() -> None:
    """Apply what the process of an engine with ``ENGINE``'s parts needs, after verifying all.

    Raises:
        PatchError: when a symbol is not the known one. Nothing has been changed then.

    """
    verify_all(ENGINE)
    for patch in ENGINE:
        patch.apply()
