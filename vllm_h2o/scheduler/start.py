"""Lines that the scheduler logs when an engine starts: the budget, the pool, the schedule."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from vllm_h2o.options.config import KVPolicyConfig
from vllm_h2o.policy import Budget, Eviction
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
        num_layers: layers with full attention, and layers with a sliding window.
        num_window_pages: most pages of a sequence in layers with a sliding window.

    """

    config: KVPolicyConfig
    budget: Budget
    pool: Pool
    stock_pool: Pool
    max_model_len: int
    max_num_seqs: int
    num_layers: tuple[int, int]
    num_window_pages: int

    def lines(self) -> Iterator[str]:
        """The lines, in order."""
        config, limit = self.config, self.config.position_limit
        if config.splits:
            heads = "of all layers" if config.splits_layers else "of a layer"
            yield f"the KV heads {heads} share slots; numbers of slots are means."
        elif config.split_reason:
            yield f"KV heads do not share slots, as they would without {config.split_reason}."
        yield self._budget()
        if self.num_window_pages:
            yield (
                f"that is of {self.num_layers[0]} layers with full attention; the other "
                f"{self.num_layers[1]} keep the tokens of their sliding windows, in up to "
                f"{self.num_window_pages} pages more of each sequence."
            )
        if limit is not None:
            taken = row_bytes(self.max_num_seqs, self.max_model_len, self.pool.block_size)
            yield (
                f"positions roll below {limit}; the rows of {self.max_num_seqs} sequences of "
                f"max_model_len={self.max_model_len} take {taken >> 20} MiB in each worker, for "
                "ids of tokens and pages (--max-num-seqs)."
            )
        if config.schedule.at == "pressure":
            whole = self.pool.num_sequences(self.max_model_len, self.num_window_pages)
            yield (
                "eviction=pressure: until memory is short a sequence holds every token, and the "
                f"pool holds {whole} sequences of max_model_len={self.max_model_len}."
            )

    def _budget(self) -> str:
        budget, pool = self.budget, self.pool
        slots, others = min(budget.capacity, self.max_model_len), self.num_window_pages
        most = "" if self.config.budget_basis == "max_model_len" else "at most "
        return (
            f"past its prompt a sequence holds {most}{budget.capacity} tokens ({budget.parts}) = "
            f"{pool.pages_of(slots)} pages of {pool.block_size}"
            f"{_evicts(self.config.schedule, budget)}; the pool of {pool.num_pages} pages holds "
            f"{pool.num_sequences(slots, others)} sequences of max_model_len={self.max_model_len} "
            "at once, stock vLLM in the same memory "
            f"{self.stock_pool.num_sequences(self.max_model_len, others)}."
        )


def _evicts(schedule: Eviction, budget: Budget) -> str:
    """How tokens are evicted, if not one at a time."""
    if schedule.by_page:
        return f", and evicts whole pages of {budget.unit} tokens"
    return "" if budget.overwrites else f", and evicts {budget.evict_every} tokens at a time"
