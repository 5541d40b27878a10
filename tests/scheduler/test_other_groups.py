# SPDX-License-Identifier: Apache-2.0
"""Groups of windows and of states next to the policy's, in vLLM's real coordinator and pool."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from vllm.v1.kv_cache_interface import (
    ChunkedLocalAttentionSpec,
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCacheSpec,
    SlidingWindowSpec,
)

from tests.draws import draw_until_seen, drawn
from tests.scheduler.harness import BLOCK_SIZE, MAX_MODEL_LEN, Simulation, vllm_config
from tests.scheduler.observed import Observed
from tests.scheduler.schedules import (
    OPTIONS,
    PAGE_BUDGET,
    READ_AGAIN,
    SNAPKV,
    Schedule,
    overlaps,
    schedules,
)
from vllm_h2o.errors import IntegrityError, UnsupportedError
from vllm_h2o.options.traits import bounds_hits
from vllm_h2o.scheduler.footprint import Pool
from vllm_h2o.scheduler.other_groups import policy_group
from vllm_h2o.scheduler.spec import HeavyHitterSpec

BUDGET = 12
PRESSURE = (("eviction", "pressure"),)
BESIDE_WINDOWS = tuple(options for options in OPTIONS if READ_AGAIN not in options)
"""A second reading needs full attention in every layer."""
totals: Counter[str] = Counter()


@drawn(400)
@given(
    schedule=schedules(),
    budget=st.sampled_from([BUDGET, 32]),
    options=st.sampled_from((*BESIDE_WINDOWS, *[PRESSURE] * len(BESIDE_WINDOWS))),
    windows=st.sampled_from([(8,), (1, 21), (6, 6, 6), (0,), (0, 0), (0, 0, 0), (6, 0)]),
    max_batched=st.sampled_from([12, 20, 64]),
    spare=st.integers(0, 20),
    overlap=overlaps,
)
def random_schedules(
    schedule: Schedule,
    budget: int,
    options: tuple[tuple[str, object], ...],
    windows: tuple[int, ...],
    max_batched: int,
    spare: int,
    overlap: tuple[int, bool],
) -> None:
    """Every window and state finds its tokens, every number is right, all pages come back."""
    if ("evict_every", "page") in options:
        budget = PAGE_BUDGET
    config = vllm_config(budget, max_batched, 8, schedule.policy, overlap[1], options)
    # vLLM does not start with less than what one longest request may hold.
    pool, most = Pool(0, schedule.block_size), overlap[0] * max_batched
    pages = pool.pages_of(MAX_MODEL_LEN)
    slide = [size for size in windows if size]
    pages += pool.pages_of_windows_in_prompts(slide, MAX_MODEL_LEN, most)
    pages += len(windows) - len(slide)
    num_blocks = pages + schedule.num_blocks(spare)
    simulation = schedule.play(Observed, config, num_blocks, overlap[0], windows)
    totals.update(simulation.count)
    totals["evict"] += simulation.pool.num_evictions


SHARED = tuple(
    (("prefix_caching", True), *rest)
    for rest in (
        (*SNAPKV, ("num_sink_tokens", 3)),
        (("name", "streaming"), ("num_sink_tokens", 2)),
        (("name", "local"),),
    )
)


@drawn(300)
@given(
    schedule=schedules(block_sizes=(4,)),
    options=st.sampled_from(SHARED),
    windows=st.sampled_from([(8,), (1, 21), (6, 6, 6)]),
    spare=st.integers(0, 40),
    overlap=overlaps,
)
def random_prefixes(
    schedule: Schedule,
    options: tuple[tuple[str, object], ...],
    windows: tuple[int, ...],
    spare: int,
    overlap: tuple[int, bool],
) -> None:
    """A hit in one group is a hit in all, and holds the tokens of the prefix."""
    config = vllm_config(BUDGET, 20, 8, schedule.policy, overlap[1], options)
    pool = Pool(0, schedule.block_size)
    pages = pool.pages_of(MAX_MODEL_LEN) + pool.pages_of(BUDGET)
    pages += pool.pages_of_windows_in_prompts(windows, MAX_MODEL_LEN, overlap[0] * 20)
    num_blocks = pages + schedule.num_blocks(spare)
    simulation = schedule.play(Simulation, config, num_blocks, overlap[0], windows)
    totals.update(simulation.count)


@pytest.mark.skipif(not bounds_hits(None), reason="refused before vLLM 0.33")
def test_prefixes_next_to_windows() -> None:
    """Shared, forked, preempted, aborted, taken by others in any order."""
    events = "add chunk decode preempt resume abort finish pack hit"
    draw_until_seen(random_prefixes, totals, dict.fromkeys(events.split(), 20))


@pytest.mark.skipif(not bounds_hits(None), reason="refused before vLLM 0.33")
def test_nothing_is_published_that_evicted_tokens_were_missing_from() -> None:
    """Past a prompt that was evicted from, tokens of sliding layers fit no other request."""
    config = vllm_config(BUDGET, 64, 8, "fcfs", False, SHARED[1])
    simulation = Simulation(config, 60, 1, windows=(6,))
    simulation.add(prompt_len=20, max_tokens=40)
    for _ in range(16):
        simulation.step()
    scheduler = simulation.scheduler
    hashes = scheduler.requests["r0"].block_hashes
    assert len(hashes) * BLOCK_SIZE > 20 + BLOCK_SIZE
    pool = scheduler.kv_cache_manager.block_pool
    known = [[pool.get_cached_block(h, [g]) is not None for h in hashes] for g in range(2)]
    assert any(known[0]) and not any(known[0][20 // BLOCK_SIZE :])
    assert known[1] == [n < 20 // BLOCK_SIZE for n in range(len(hashes))]


def test_every_window_and_state_finds_its_tokens() -> None:
    """Admit, chunk, decode, preempt, resume, abort, fall back in any order: each happened."""
    events = "add chunk decode preempt resume abort finish pack evict reset page"
    seen = (*events.split(), "pack within a prompt", "fall back")
    draw_until_seen(random_schedules, totals, dict.fromkeys(seen, 20))


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("windows", [(6,), (5, 9, 40), (1,)])
def test_pages_past_a_prompt(windows: tuple[int, ...], depth: int) -> None:
    """At most the number that the line at the start says, and at some moment that number."""
    config = vllm_config(BUDGET, 64, 8, "fcfs", async_scheduling=depth == 2)
    simulation = Simulation(config, 80, depth, windows=windows)
    simulation.add(prompt_len=20, max_tokens=40)
    held = []
    for step in range(30):
        simulation.step()
        if step > 3:
            held.append(simulation.num_total - simulation.num_free - BUDGET // BLOCK_SIZE)
    pool = Pool(80, BLOCK_SIZE)
    assert max(held) == pool.pages_of_windows(windows, MAX_MODEL_LEN, depth)


@pytest.mark.parametrize("depth", [1, 2])
def test_a_session_goes_on_from_its_state(depth: int) -> None:
    """Its next part follows the last token that was computed, of which the state is."""
    options = (("eviction", "chunk"), ("name", "streaming"))
    config = vllm_config(BUDGET, 16, 8, "fcfs", depth == 2, options)
    simulation = Simulation(config, 60, depth, windows=(0,))
    session = simulation.add(30, 6, resumable=True)
    for _ in range(3):
        for _ in range(12):
            simulation.step()
        simulation.add(5, 6, resumable=True, request_id=session)
    (state,) = simulation.scheduler.other_groups.managers
    blocks = [block.block_id for block in state.req_to_blocks[session]]
    for _ in range(12):
        simulation.step()
    assert [block.block_id for block in state.req_to_blocks[session]] == blocks
    assert simulation.pool.lives[session] == 1
    simulation.abort([session])
    assert simulation.num_free == simulation.num_total


def test_what_vllm_wants_room_for() -> None:
    """The same as its own spec, for windows and chunks of many sizes."""
    for size in (1, 5, 8, 33):
        spec = SlidingWindowSpec(
            block_size=4, num_kv_heads=1, head_size=8, dtype=torch.float32, sliding_window=size
        )
        for chunks in (1, 7, 100):
            pages = Pool(0, 4).pages_of_windows_in_prompts([size], 64, chunks)
            assert pages == spec.max_admission_blocks_per_request(chunks, 64)


def held() -> Simulation:
    """Two requests, one in its prompt, with a window of 6."""
    config = vllm_config(BUDGET, 16, 8, "fcfs", async_scheduling=False)
    simulation = Simulation(config, 60, depth=1, windows=(6,))
    simulation.add(10, 20)
    simulation.add(20, 20)
    simulation.step()
    simulation.scheduler.check_integrity()
    return simulation


def test_a_window_s_page_that_is_lost_is_seen() -> None:
    """Free and held pages of all groups are the pool's."""
    simulation = held()
    simulation.scheduler.other_groups.managers[0].req_to_blocks["r0"].pop()
    with pytest.raises(IntegrityError, match=r"other groups that do not fit: \[\(0, 'r0', 2\)"):
        simulation.scheduler.check_integrity()


def test_a_page_of_two_groups_is_seen() -> None:
    """No page is K and V to one layer and scores to another."""
    simulation = held()
    scheduler = simulation.scheduler
    (own, *_) = scheduler.block_manager.req_to_blocks["r0"]
    scheduler.other_groups.managers[0].req_to_blocks["r1"][0] = own
    with pytest.raises(IntegrityError, match=f"written by a holder: .*{own.block_id}"):
        scheduler.check_integrity()


SHAPE = {"block_size": 4, "num_kv_heads": 1, "head_size": 8, "dtype": torch.float32}
OWN = HeavyHitterSpec.of(FullAttentionSpec(**SHAPE))
WINDOW = SlidingWindowSpec(**SHAPE, sliding_window=6)


@pytest.mark.parametrize(
    ("specs", "message"),
    [
        ([WINDOW], "these caches: SlidingWindowSpec"),
        ([OWN, OWN, WINDOW], "these caches: HeavyHitterSpec, HeavyHitterSpec, SlidingWindowSpec"),
        (
            [OWN, ChunkedLocalAttentionSpec(**SHAPE, attention_chunk_size=8)],
            "Next to full attention the policy supports sliding windows and states only",
        ),
        ([OWN, replace(WINDOW, block_size=8)], "pages of 256 bytes in 4 slots, 512 bytes in 8"),
        ([OWN, replace(WINDOW, num_kv_heads=2)], "pages of 256 bytes in 4 slots, 512 bytes in 4"),
    ],
)
def test_groups_that_do_not_go(specs: list[KVCacheSpec], message: str) -> None:
    """One group is the policy's; the others slide, in pages of one shape."""
    groups = [KVCacheGroupSpec([str(index)], spec) for index, spec in enumerate(specs)]
    with pytest.raises(UnsupportedError, match=message):
        policy_group(KVCacheConfig(9, [], groups))


def test_drafts_go_with_one_group() -> None:
    """Prefix caching before vLLM 0.33 does, too, even if no config names windows."""
    groups = [KVCacheGroupSpec([str(index)], spec) for index, spec in enumerate([OWN, WINDOW])]
    with pytest.raises(UnsupportedError, match="that its configuration does not name"):
        policy_group(KVCacheConfig(9, [], groups), alone=True)


def test_the_group_may_stand_anywhere() -> None:
    """Where vLLM puts it."""
    specs = [WINDOW, OWN, replace(WINDOW, page_size_padded=OWN.page_size_bytes)]
    groups = [KVCacheGroupSpec([str(index)], spec) for index, spec in enumerate(specs)]
    assert policy_group(KVCacheConfig(9, [], groups)) == 1


def test_the_policy_s_pages_are_never_padded() -> None:
    """VLLM would do that where layers that slide had larger ones."""
    with pytest.raises(UnsupportedError, match="pages of 288 bytes, others of 4096"):
        replace(OWN, page_size_padded=4096)
