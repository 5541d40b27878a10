# SPDX-License-Identifier: Apache-2.0
"""Before a step: a conversation's next turn gets a copy of what the last one held.

What ended requests held is copied to host memory before a step takes their pages, or to a file,
where the plan says so, and from there to the turns that continue from it.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from vllm_h2o.kernels.held import Held
from vllm_h2o.wire import Continuation, ResidencyPlan, Saved
from vllm_h2o.worker.after_step import Layers
from vllm_h2o.worker.files import read, write
from vllm_h2o.worker.reconstruction import sent

HOST = torch.device("cpu")


@dataclass
class Turns:
    """Copies caches of ended requests.

    Args:
        rank: of this worker.
        num_workers: of the engine.
        host: copies in host memory by number, each of all layers, in order.

    """

    rank: int = 0
    num_workers: int = 1
    host: dict[int, list[Held]] = field(default_factory=dict)

    @torch.inference_mode()
    def begin(self, plan: ResidencyPlan, layers: Layers, device: torch.device) -> None:
        """Copy, in every layer: all is read before anything is written.

        Args:
            plan: of the step that begins.
            layers: whose caches hold what is copied.
            device: of the caches.

        """
        if not (plan.saved or plan.continued or plan.dropped):
            return
        each: list[Saved | Continuation] = [*plan.saved, *plan.continued.values()]
        sources = [sent(torch.tensor(copied.source), device) for copied in each]
        turns = list(plan.continued.values())
        rows = [sent(torch.tensor(turn.blocks), device) for turn in turns]
        files = {turn.place for turn in turns if isinstance(turn.place, tuple)}
        where = (self.rank, self.num_workers)
        copies: dict[int | str | tuple[str, ...], list[Held]] = dict(self.host.items())
        copies |= {each: read(each[self.rank]) for each in files}
        copies |= {saved.place: [] for saved in plan.saved}
        for layer, cache in enumerate(layers.caches()):
            held: list[Held] = []
            for copied, source in zip(each, sources, strict=True):
                if isinstance(copied, Saved):
                    tokens = Held.of(cache, source, copied.num_used)
                    copies[copied.place].append(tokens.to(HOST))
                elif copied.place is None:
                    held.append(Held.of(cache, source))
                else:
                    held.append(copies[copied.place][layer].to(device))
            for turn, blocks, tokens in zip(turns, rows, held, strict=True):
                if turn.keeps_slots:
                    tokens.store(cache, blocks, turn.restored_end)
                else:
                    tokens.store_in_order(cache, blocks, turn.num_slots, turn.restored_end)
        for saved in plan.saved:
            if isinstance(saved.place, str):
                write(saved.place, *where, copies[saved.place], saved.header)
            else:
                self.host[saved.place] = copies[saved.place]
        for number in plan.dropped:
            del self.host[number]
