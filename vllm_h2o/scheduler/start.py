# SPDX-License-Identifier: Apache-2.0
"""Lines that the scheduler logs when an engine starts: the budget, the pool, the schedule."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from vllm_h2o.options.config import KVPolicyConfig
from vllm_h2o.policy import Budget
from vllm_h2o.scheduler.footprint import Pool, row_bytes


@dataclass(frozen=True, kw_only=True)
class Start:
    """The facts of an engine that starts.

    Args:
        config: the policy.
        budget: slots of a sequence.
        pool: the pages of the policy's pool.
        stock_pool: the pages that stock vLLM would have in the same memory.
        max_model_len: longest sequence, in tokens.
        max_num_seqs: most sequences of a step.
        num_layers: layers with full attention, and other layers.
        num_other_pages: most pages of a sequence in other layers, in windows and for states.
        drops: what rules out the policy's default ``merge``; None: nothing does.
        num_host_pages: most pages of earlier turns in host memory.

    """

    config: KVPolicyConfig
    budget: Budget
    pool: Pool
    stock_pool: Pool
    max_model_len: int
    max_num_seqs: int
    num_layers: tuple[int, int]
    num_other_pages: tuple[int, int]
    drops: str | None = None
    num_host_pages: int = 0

    def lines(self) -> Iterator[str]:
        """The lines, in order."""
        config, longest = self.config, f"max_model_len={self.max_model_len}"
        if config.score is not None and config.score == config.policy.fallback:
            yield (
                f"tokens are ranked by the last {config.observation_window} queries of a prompt, "
                f"and by those after it: score={config.score}, which goes with prefix caching."
            )
        if config.splits:
            heads = "of all layers" if config.splits_layers else "of a layer"
            yield f"the KV heads {heads} share slots; numbers of slots are means."
        elif config.split_reason:
            yield f"KV heads do not share slots, as they would without {config.split_reason}."
        if self.drops and not config.merges:
            yield f"evicted tokens are dropped; they cannot be merged with {self.drops}."
        slots, others = min(self.budget.capacity, self.max_model_len), sum(self.num_other_pages)
        whole = self.pool.num_sequences(self.max_model_len, others)
        yield (
            f"past its prompt a sequence holds "
            f"{'' if config.budget_basis == 'max_model_len' else 'at most '}"
            f"{self.budget.capacity} tokens ({self.budget.parts}) = {self.pool.pages_of(slots)} "
            f"pages of {self.pool.block_size}{self._evicts()}; the pool of {self.pool.num_pages} "
            f"pages holds {self.pool.num_sequences(slots, others)} sequences of {longest} at once, "
            f"stock vLLM in the same memory "
            f"{self.stock_pool.num_sequences(self.max_model_len, others)}."
        )
        if isinstance(config.budget, float) and config.budget_basis == "max_model_len":
            whole_len = min(self.budget.kept + self.budget.unit, self.max_model_len)
            yield (
                f"requests of up to {whole_len} tokens keep them all: the budget is a fraction of "
                f"{longest}; a number of tokens, or budget_basis=prompt, evicts from shorter ones."
            )
        if others:
            yield (
                f"that is of {self.num_layers[0]} layers with full attention; the other "
                f"{self.num_layers[1]} keep {self._kept_by_others()}, in up to {others} pages more "
                "of each sequence."
            )
        if config.position_limit is not None:
            taken = row_bytes(self.max_num_seqs, self.max_model_len, self.pool.block_size)
            yield (
                f"positions roll below {config.position_limit}; the rows of {self.max_num_seqs} "
                f"sequences of {longest} take {taken >> 20} MiB in each worker, for ids of tokens "
                "and pages (--max-num-seqs)."
            )
        yield from self._places(slots)
        if config.schedule.at == "pressure":
            yield (
                "eviction=pressure: until memory is short a sequence holds every token, and the "
                f"pool holds {whole} sequences of {longest}."
            )

    def _places(self, slots: int) -> Iterator[str]:
        """Say where caches of earlier turns go, each of so many slots."""
        config = self.config
        if self.num_host_pages:
            pages = self.pool.pages_of(slots) + self.num_other_pages[1]
            num_turns = self.num_host_pages // pages
            yield (
                f"continuation={config.continuation}: {config.continuation_host_bytes >> 30} GiB "
                f"of host memory keep {num_turns} or more earlier turns whose pages are reused."
            )
        if num_bytes := config.continuation_folder_bytes:
            yield (
                f"continuation={config.continuation}: {num_bytes >> 30} GiB of files in "
                f"{config.continuation_folder} take what memory drops; the least recently used go "
                "first."
            )

    def _kept_by_others(self) -> str:
        """Name what layers without full attention keep of a sequence."""
        windows, states = self.num_other_pages
        kept = ["the tokens of their sliding windows"] if windows else []
        return " or ".join([*kept, "a state"] if states else kept)

    def _evicts(self) -> str:
        """How many tokens are evicted at a time, if not one."""
        if self.config.schedule.by_page:
            return f", and evicts whole pages of {self.budget.unit} tokens"
        every = self.budget.evict_every
        return f", and evicts {every} tokens at a time" if every > 1 else ""
