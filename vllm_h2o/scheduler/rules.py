# SPDX-License-Identifier: Apache-2.0
"""The rules by which an engine counts the tokens of its requests: no torch, no vLLM."""

from __future__ import annotations

from dataclasses import dataclass

from vllm_h2o.policy.eviction import At


@dataclass(frozen=True)
class Rules:
    """The rules of one engine, the same for every request.

    Args:
        at: when a request is first cut to its budget.
        observation_window: last queries of a prompt that are computed, and score, in one chunk.
        lifetime: tokens after the prompt for which the ranking's last term counts; 0: always.
        chunk: tokens of a prompt whose queries score together, in one chunk; 0: any number.
        reread_block: tokens of a block that is read again in the step that computes it; 0: prompts
            are read once.
        max_step_tokens: most tokens of a step, those that it reads again among them; read with
            ``reread_block``.
        max_blocks_per_request: columns of the block table; None: no limit.
        prefix_caching: whether requests share the pages of a common prefix.
        splits: whether KV heads share slots once a prompt is evicted from.
        num_drafts: most drafts that a step computes past a request's next token.
        position_limit: one past the last position that a token may have; None: no limit.
        continues: whether a request may continue from the cache of an earlier one, which then
            scores every request.

    """

    at: At = "prompt_end"
    observation_window: int = 0
    lifetime: int = 0
    chunk: int = 0
    reread_block: int = 0
    max_step_tokens: int = 0
    max_blocks_per_request: int | None = None
    prefix_caching: bool = False
    splits: bool = False
    num_drafts: int = 0
    position_limit: int | None = None
    continues: bool = False

    @property
    def packs_chunks(self) -> bool:
        """Whether a prompt is evicted from after each of its chunks."""
        return self.at == "chunk"

    @property
    def under_pressure(self) -> bool:
        """Whether a request is evicted from only when memory is short."""
        return self.at == "pressure"

    @property
    def moves_on_alone(self) -> bool:
        """Whether a worker can derive the next plan of most requests from their last one."""
        return not self.num_drafts and self.position_limit is None
