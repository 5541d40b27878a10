# SPDX-License-Identifier: Apache-2.0
"""Keeps the random state of a request with a seed while its prompt takes several steps.

vLLM samples after each chunk of a prompt and throws the token away; then it moves the generator
back. Generators of a CPU cannot be moved back: in stock vLLM this ends the engine.

Drop when: vLLM's CPU model runner takes back what it throws away, or samples none of it.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from vllm.platforms import current_platform


@contextmanager
def set_aside(model_runner: Any) -> Iterator[None]:
    """Sample what is thrown away without its request's generator.

    Args:
        model_runner: vLLM's V1, on a CPU; its step has run, and is sampled from next.

    """
    batch = model_runner.input_batch
    thrown_away = model_runner.discard_request_mask.np
    # A liberty: the sampler reads this very mapping.
    kept = {row: batch.generators.pop(row) for row in [*batch.generators] if thrown_away[row]}
    try:
        yield
    finally:
        batch.generators.update(kept)


class KeepsSeeds:
    """Mixed into vLLM's worker class: on a CPU V1 throws no random state away."""

    model_runner: Any
    use_v2_model_runner: bool

    def sample_tokens(self, grammar_output: Any) -> Any:
        """Sample the tokens of the step that has run."""
        if self.use_v2_model_runner or not current_platform.is_cpu():  # V2 has no generators
            return super().sample_tokens(grammar_output)  # type: ignore[misc]
        with set_aside(self.model_runner):
            return super().sample_tokens(grammar_output)  # type: ignore[misc]
