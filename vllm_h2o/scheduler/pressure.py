# SPDX-License-Identifier: Apache-2.0
"""``eviction=pressure``: chooses requests that fall back to their budget when the pool runs short.

No torch, no vLLM. Before each step the scheduler adds up the pages that running requests take in
their next two steps and that the first waiting requests need. If fewer are free, it chooses
requests that hold more than their budget::

    this step    computes a token of each, in a slot of its own, and packs the survivors
    the next     starts with the pages after the survivors back in the pool

Two steps, because a request without a page in the next step can only be helped in this one.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from fractions import Fraction

from vllm_h2o.pages import num_pages
from vllm_h2o.scheduler.state import RequestInfo, RequestState

MAX_PACKS = 8
"""Most requests that fall back in one step for waiting ones: packing stays a small part of it."""
SPARE = Fraction(2, 100)
"""Part of the pool that is freed besides, once pages are short: else every step would evict."""


@dataclass(frozen=True, kw_only=True)
class Forecast:
    """Pages that a running request takes soon, and that it could give back.

    Args:
        request_id: the request.
        priority: the larger, the sooner it falls back.
        takes: pages of its next two tokens, or of the rest of its prompt and the next token.
        gives: pages that come back because it falls back already.
        saves: pages that come back or are not taken if it is chosen; 0: it cannot be chosen.
        loses: tokens that it loses then.

    """

    request_id: str
    priority: int = 0
    takes: int = 0
    gives: int = 0
    saves: int = 0
    loses: int = 0

    @classmethod
    def of(
        cls,
        request_id: str,
        state: RequestState,
        block_size: int,
        falling_back: bool = False,
        priority: int = 0,
        chunk: int = 0,
    ) -> Forecast:
        """The forecast of a request.

        Args:
            request_id: the request.
            state: what it holds.
            block_size: slots of a page.
            falling_back: whether it has been chosen already, and its step is still to come.
            priority: the larger, the sooner it falls back.
            chunk: most tokens of a chunk after which its prompt is packed; 0: at its end.

        """
        held, full = (num_pages(n, block_size) for n in (state.held_len, state.budget.capacity))
        next_len = state.resident_len + 1
        if falling_back:
            pages = num_pages(next_len, block_size)
            gives = max(pages - full, 0)
            return cls(request_id=request_id, takes=max(pages - held, 0), gives=gives)
        end = (state.prompt_end if state.in_prompt else next_len) + 1
        if not (state.grows or state.fits):
            end = min(end, state.budget.most_slots(chunk if state.in_prompt else 0))
        end = end if state.max_len is None else min(end, state.max_len)
        pages = num_pages(end, block_size)
        able = state.grows and not state.in_prompt and next_len >= state.budget.capacity
        if state.max_len is not None:
            # The token that is sampled last needs no step, though it may get one.
            able = able and next_len < state.max_len
        return cls(
            request_id=request_id,
            priority=priority,
            takes=max(pages - held, 0),
            saves=max(pages - full, 0) if able else 0,
            loses=next_len - state.budget.survivors(next_len),
        )


@dataclass(frozen=True)
class Relief:
    """The requests that fall back in a step.

    Args:
        falling_back: their ids, in the order of choice.
        is_short: whether they are not enough, so that prompts that end in this step are packed.

    """

    falling_back: tuple[str, ...] = ()
    is_short: bool = False


def pages_to_admit(info: RequestInfo, block_size: int) -> int:
    """Pages of a request's prompt and of the token after it."""
    end = info.prompt_len + 1
    return num_pages(end if info.max_len is None else min(end, info.max_len), block_size)


def most_taken(states: Iterable[RequestState], block_size: int) -> int:
    """An upper bound of the pages that forecasts say running requests take, computed quickly."""
    return sum(num_pages(s.prompt_end + 1, block_size) if s.in_prompt else 2 for s in states)


def relieve(free: int, forecasts: Sequence[Forecast], waiting: Iterable[int], spare: int) -> Relief:
    """Choose the fewest requests that free enough pages.

    The lowest priority goes first; then the fewest tokens lost for each page; then the latest of
    ``forecasts``. No request is chosen for a waiting one that would not be admitted even if all
    fell back. The next step of running requests may take any number; waiting requests and
    ``spare`` take at most ``MAX_PACKS`` in a step.

    Args:
        free: free pages.
        forecasts: of the running requests, the oldest first.
        waiting: pages that each waiting request needs, in the order of the queue.
        spare: pages that are freed besides, once there are not enough.

    """
    able = [forecast for forecast in forecasts if forecast.saves > 0]
    must = sum(forecast.takes - forecast.gives for forecast in forecasts) - free
    most = sum(forecast.saves for forecast in able)
    wanted, is_short = must, must > most
    for pages in waiting:
        if wanted + pages > most:
            is_short = True
            break
        wanted += pages
    if wanted <= 0:
        return Relief(is_short=is_short)
    chosen: list[Forecast] = []
    saved = 0
    able.reverse()
    for forecast in sorted(able, key=lambda c: (-c.priority, Fraction(c.loses, c.saves))):
        if saved >= wanted + spare or (saved >= must and len(chosen) >= MAX_PACKS):
            break
        chosen.append(forecast)
        saved += forecast.saves
    return Relief(_needed(chosen, saved - (wanted + spare)), is_short)


def _needed(chosen: Sequence[Forecast], excess: int) -> tuple[str, ...]:
    """Drop choices that are not needed, among those with the priority of the last one."""
    kept = []
    for forecast in chosen:
        if forecast.saves <= excess and forecast.priority == chosen[-1].priority:
            excess -= forecast.saves
        else:
            kept.append(forecast.request_id)
    return tuple(kept)
