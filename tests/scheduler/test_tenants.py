# SPDX-License-Identifier: Apache-2.0
"""Random conversations of several tenants, with entries in the pool, host memory and files."""

from __future__ import annotations

from collections import Counter
from tempfile import TemporaryDirectory

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.draws import draw_until_seen, drawn
from tests.scheduler.conversations import ON, Talking, WithHost
from tests.scheduler.harness import vllm_config
from tests.scheduler.schedules import (
    H2O2,
    LAYERS,
    OPTIONS,
    PREFIXES,
    READ_AGAIN,
    SNAPKV,
    Schedule,
    conversations,
    overlaps,
    schedules,
    states,
    step_tokens,
)
from tests.scheduler.with_files import WithFiles, WithLateChecks, WithTiers

OWN_SLOTS = (
    *OPTIONS,
    (PREFIXES, *SNAPKV, ("num_sink_tokens", 3)),
    (PREFIXES, ("name", "streaming"), ("num_sink_tokens", 2)),
)
SHARED_SLOTS = (
    (("split", "heads"),),
    (LAYERS, ("num_sink_tokens", 3)),
    (PREFIXES, *SNAPKV, ("split", "heads")),
    (*H2O2, READ_AGAIN),
)

totals: Counter[str] = Counter()


def play(
    schedule: Schedule,
    budget: int,
    options: tuple[tuple[str, object], ...],
    max_batched: int,
    num_pages: int,
    overlap: tuple[int, bool],
    kind: type[Talking],
    num_states: int,
) -> None:
    """Each slot that a request attends to holds what it would have computed itself, or inherited.

    By text, tenant and the ends of turns; the pool is short for some, and wide enough for others.
    Host memory keeps entries whose pages are taken, files keep some requests, or nothing does.
    Beside the policy's layers others may keep a state of all tokens.
    """
    beside = states(num_states, options)
    if ("evict_every", "page") in options:
        budget, num_pages = 32, max(num_pages, 20)
    max_batched = step_tokens(max_batched, options)
    with TemporaryDirectory() as folder:
        path = f"1,{folder}:1" if kind is WithTiers else folder
        on = ("continuation", path) if issubclass(kind, WithFiles) else ON
        config = vllm_config(budget, max_batched, 8, schedule.policy, overlap[1], (on, *options))
        num_blocks = schedule.num_blocks(num_pages) + len(beside)
        talking = schedule.play(kind, config, num_blocks, overlap[0], beside)
    totals.update(talking.count)
    totals["states"] += talking.count["continue"] if beside else 0
    totals["evict"] += talking.pool.num_evictions


@pytest.mark.parametrize(
    ("options", "num_examples", "own_events"),
    [(OWN_SLOTS, 300, "page restore"), (SHARED_SLOTS, 300, "share")],
    ids=["own slots", "shared slots"],
)
def test_no_cache_is_another_s(
    options: tuple[object, ...],
    num_examples: int,
    own_events: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Admit, preempt, resume, abort, reset, continue, in any order: each really happened."""
    monkeypatch.setattr("vllm_h2o.scheduler.conversations.FOUND_PER_STEP", 0)
    monkeypatch.setattr("vllm_h2o.scheduler.waits.IDLE", 0)
    random_conversations = given(
        schedule=schedules(ops=conversations),
        budget=st.sampled_from([12, 12, 20]),
        options=st.sampled_from(options),
        max_batched=st.sampled_from([8, 20, 64]),
        num_pages=st.sampled_from([16, 18, 20, 60]),
        overlap=overlaps,
        kind=st.sampled_from([Talking, WithHost, WithLateChecks, WithTiers, WithTiers]),
        num_states=st.sampled_from([0, 0, 1, 3]),
    )(play)
    events = (
        "add chunk decode preempt resume abort finish pack evict reset continue save fetch drop "
        "write read lose wait proceed states leave return trim"
    )
    seen = (*events.split(), *own_events.split())
    examples = drawn(num_examples)(random_conversations)
    draw_until_seen(examples, totals, dict.fromkeys(seen, 20))
