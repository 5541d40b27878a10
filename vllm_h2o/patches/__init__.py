"""Patches of vLLM: only what has no registry or option. One file per symbol; see README.md here."""

from vllm_h2o.patches import (
    async_engine_args__init,
    cpu_platform__get_attn_backend_cls,
    engine_args__add_cli_args,
    engine_args__create_engine_config,
    engine_args__from_cli_args,
    engine_args__init,
    input_processor__process_inputs,
    stat_logger_manager__init,
)
from vllm_h2o.patches._patch import Patch
from vllm_h2o.patches._relied_upon import RELIED_UPON

ALWAYS: tuple[Patch, ...] = (
    engine_args__init.PATCH,
    async_engine_args__init.PATCH,
    engine_args__add_cli_args.PATCH,
    engine_args__from_cli_args.PATCH,
    engine_args__create_engine_config.PATCH,
    input_processor__process_inputs.PATCH,
)
"""The flags, the place where they take effect, and requests: pass-throughs without a policy."""

WITH_POLICY: tuple[Patch, ...] = (cpu_platform__get_attn_backend_cls.PATCH,)
"""Applied where a worker with a policy starts, which may be the user's own process."""

FRONT_END: tuple[Patch, ...] = (stat_logger_manager__init.PATCH,)
"""Applied where an engine with a policy is configured: the process that serves its metrics."""

__all__ = ["ALWAYS", "FRONT_END", "RELIED_UPON", "WITH_POLICY", "Patch"]
