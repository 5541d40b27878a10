"""Patches of vLLM: only what has no registry or option. One file per symbol; see README.md here."""

from vllm_h2o.patches import (
    async_engine_args__init,
    engine_args__add_cli_args,
    engine_args__create_engine_config,
    engine_args__from_cli_args,
    engine_args__init,
    input_processor__process_inputs,
)
from vllm_h2o.patches._patch import Patch
from vllm_h2o.patches._relied_upon import RELIED_UPON
from vllm_h2o.patches._with_policy import FRONT_END, WITH_POLICY

ALWAYS: tuple[Patch, ...] = (
    engine_args__init.PATCH,
    async_engine_args__init.PATCH,
    engine_args__add_cli_args.PATCH,
    engine_args__from_cli_args.PATCH,
    engine_args__create_engine_config.PATCH,
    input_processor__process_inputs.PATCH,
)
"""The flags, the place where they take effect, and requests: pass-throughs without a policy."""

__all__ = ["ALWAYS", "FRONT_END", "RELIED_UPON", "WITH_POLICY", "Patch"]
