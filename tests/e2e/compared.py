# SPDX-License-Identifier: Apache-2.0
"""What an engine holds, against what the references hold."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch

from tests.e2e.ties import TIE, WatchedHead
from tests.kernels.truth import follow_merge
from vllm_h2o.kernels.cache import LayerCache
from vllm_h2o.kernels.strip import Strip
from vllm_h2o.wire import RequestPlan

Where = tuple[str, int, str]
"""Layer name, KV head, request id."""


@dataclass
class Compared:
    """The references of an engine's layers, KV heads and requests, and how they compare.

    Args:
        scheduler: the engine's, for the lengths of prompts.
        heads: the references.
        retained: positions that the engine holds now.
        num_compared: retained sets that were compared.
        num_victims: victims that were compared.
        num_packs: packs because memory was short that were compared.
        num_renumbered: requests that were renumbered, in each layer and KV head, and followed.
        num_together: packs of every few tokens that were compared.
        num_ties: victims and packs that differ, between scores closer than ``TIE``.
        num_resumed: packs within prompts that are computed again that were compared.
        num_merged: victims that went to the nearest key; their K, V and masses are compared.
        num_merge_ties: those that went to another key than the reference's, as near.

    """

    scheduler: Any
    heads: dict[Where, WatchedHead] = field(default_factory=dict)
    retained: dict[Where, frozenset[int]] = field(default_factory=dict)
    num_compared: int = 0
    num_victims: int = 0
    num_packs: int = 0
    num_renumbered: int = 0
    num_together: int = 0
    num_ties: int = 0
    num_resumed: int = 0
    num_merged: int = 0
    num_merge_ties: int = 0

    def compare_heads(
        self,
        layer_name: str,
        request_id: str,
        plan: RequestPlan,
        cache: LayerCache,
        table: torch.Tensor,
        victims: torch.Tensor | None,
    ) -> None:
        """What one layer holds of one request, once all references have packed."""
        own, is_split = table[plan.pack_block_idx :], plan.is_split
        strips = cache.rows_of_split(own) if is_split else list(cache.rows(own))
        for head, strip in enumerate(strips):
            num_slots = plan.resident_end
            if is_split:
                num_slots = len(strip) * cache.block_size - plan.splits
            victim = None if victims is None else victims[head]
            self._compare((layer_name, head, request_id), plan, cache, strip, num_slots, victim)

    def _compare(
        self,
        where: Where,
        plan: RequestPlan,
        cache: LayerCache,
        rows: torch.Tensor,
        num_slots: int,
        victim: Any,
    ) -> None:
        head, slots = self.heads[where], torch.arange(num_slots)
        at = (rows[slots // cache.block_size], slots % cache.block_size)
        positions = cache.position[at].tolist()
        self.retained[where] = frozenset(positions)
        assert len(self.retained[where]) == len(positions)
        if self.retained[where] != {p for p in head.strip.position.tolist() if p >= 0}:
            assert plan.num_survivors and head.follow_tie(positions, TIE), (where, plan)
            self.num_ties += 1
        strip = head.strip
        if cache.mass is not None:
            masses = dict(zip(strip.position.tolist(), strip.mass.tolist(), strict=True))
            assert cache.mass[at].tolist() == [masses[p] for p in positions], (where, plan)
        if strip.keeps_scores:
            self._compare_without_window(head, cache, at, positions)
        self.num_compared += 1
        self.num_packs += plan.falls_back
        again = where[2] in self.scheduler.ledger.resumed and plan.logical_end < plan.prompt_end
        self.num_resumed += again and plan.num_survivors > 0
        self.num_renumbered += plan.renumbers_from > 0
        self.num_together += plan.evicts_together
        if plan.selects:
            self.num_victims += 1
            self._compare_victim(where, positions[int(victim)])

    def _compare_without_window(
        self, head: WatchedHead, cache: LayerCache, at: tuple[torch.Tensor, ...], held: list[int]
    ) -> None:
        """What a prompt's tokens will have when their observation window's lifetime is over."""
        assert cache.score_without_window is not None
        strip = head.strip
        known = dict(zip(strip.position.tolist(), strip.score_without_window.tolist(), strict=True))
        wanted = [known.get(p, 0.0) if p < head.prompt_len else 0.0 for p in held]
        found = cache.score_without_window[at].double()
        found = torch.where(torch.tensor(held) < head.prompt_len, found, 0.0)
        torch.testing.assert_close(
            found, torch.tensor(wanted, dtype=torch.float64), rtol=100 * TIE, atol=1e-6
        )

    def compare_merge(
        self, where: Where, plan: RequestPlan, cache: LayerCache, rows: torch.Tensor
    ) -> None:
        """Where the engine's victim went, and what became of it there."""
        assert cache.mass is not None
        num_slots = len(rows) * cache.block_size if plan.attends_split else plan.resident_end
        tokens = (cache.key, cache.value, cache.score, cache.position, cache.mass)
        parts = (view[rows].flatten(0, 1)[:num_slots] for view in tokens)
        key, value, score, position, mass = parts
        held = Strip(key.double(), value.double(), score.double(), position.long(), mass)
        merged, tied = follow_merge(self.heads[where], held, cache.key.dtype, TIE)
        self.num_merged += merged
        self.num_merge_ties += tied

    def _compare_victim(self, where: Where, position: int) -> None:
        head = self.heads[where]
        assert head.victim is not None
        if int(head.strip.position[head.victim]) == position:
            return
        chosen = head.strip.position.tolist().index(position)
        ranks = head.strip.ranks(head.end, head.ranking.by_age)
        lowest, other = float(ranks[head.victim]), float(ranks[chosen])
        assert abs(other - lowest) <= TIE * abs(lowest), (where, lowest, other)
        self.num_ties += 1
        head.victim = chosen
