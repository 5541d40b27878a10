# SPDX-License-Identifier: Apache-2.0
"""Where float32, or 16 bits, may order two scores either way, the reference follows the engine."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from vllm_h2o.kernels.reference import Head
from vllm_h2o.kernels.strip import Strip

TIE = 1e-5
"""Relative distance of two scores at which float32 may order them either way."""


@dataclass
class WatchedHead(Head):
    """A head that remembers what it chose its survivors from.

    Args:
        before: what it held when it packed last.

    """

    before: Strip | None = None

    def pack(self) -> None:
        """Keep what survives, and all that there was for a while."""
        self.before = self.strip
        super().pack()

    def follow_tie(self, positions: Iterable[int], tie: float) -> bool:
        """Keep these positions instead; whether they are as good as what was kept, but for a tie.

        Args:
            positions: that the engine has kept of the same tokens.
            tie: relative distance of ranks that may be either way.

        """
        ours, theirs = set(positions), set(self.strip.position.tolist())
        if self.before is None or len(ours) != len(theirs) or self.budget.unit > 1:
            return False
        held = self.before.position.tolist()
        ranks = dict(
            zip(held, self.before.ranks(self.end, self.ranking.by_age).tolist(), strict=True)
        )
        if not ours <= ranks.keys():
            return False
        gained, lost = ([ranks[p] for p in some] for some in (ours - theirs, theirs - ours))
        if max(lost) - min(gained) > tie * max(lost):
            return False
        slots = sorted(map(held.index, ours), key=lambda slot: held[slot])
        self.strip = self.before.taken(slots)
        return True
