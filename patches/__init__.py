# SPDX-License-Identifier: Apache-2.0
"""Patches of vLLM: only what has no registry or option. One file per symbol; see README.md here.

The folder stands at the root of the repository; `vllm_h2o/patches` links to it. It is imported by
that name alone.
"""

if __name__ != "vllm_h2o.patches":
    # A second copy would have `Patch` objects of its own, which `is` and `isinstance` tell apart.
    raise ImportError(
        f"{__name__} is a second copy of the patches. Import vllm_h2o.patches instead."
    )

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
from vllm_h2o.patches._with_policy import ENGINE, FRONT_END, METRICS, WITH_POLICY

ALWAYS: tuple[Patch, ...] = (
    engine_args__init.PATCH,
    async_engine_args__init.PATCH,
    engine_args__add_cli_args.PATCH,
    engine_args__from_cli_args.PATCH,
    engine_args__create_engine_config.PATCH,
    input_processor__process_inputs.PATCH,
)
"""The flags, the place where they take effect, and requests: pass-throughs without a policy."""

__all__ = ["ALWAYS", "ENGINE", "FRONT_END", "METRICS", "RELIED_UPON", "WITH_POLICY", "Patch"]
